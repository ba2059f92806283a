// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/image/images"
)

// The models of the chassis, two units each, and how long its parts take unless a test says otherwise.
const (
	a100 = "a100"
	l40s = "l40s"

	attachDelay = 2 * time.Second
	detachDelay = time.Second
	nodeDelay   = 300 * time.Millisecond
)

// What may take how long. A Pod waits up to 5 s for the scheduler to look at a condition again.
const (
	soon    = 15 * time.Second
	running = 40 * time.Second
	// again is a Pod that is scheduled a second time after a failure.
	again = 75 * time.Second
	// returned covers cool-down, settling and the way back.
	returned = 60 * time.Second
)

// scenario is one test on the cluster: it starts with the whole pool free and ends with it.
type scenario struct {
	*environment
	t  *testing.T
	ns string
	// operations is how many the fabric had taken on before.
	operations int
}

// begin makes a namespace and waits for the pool to be whole.
func begin(t *testing.T) *scenario {
	t.Helper()
	s := &scenario{environment: env, t: t}
	await(t, "the pool is whole before the test", returned, s.whole)
	if err := s.sim.ClearViolations(t.Context()); err != nil { // of a test that has failed, or of who used the cluster before
		t.Fatal(err)
	}
	ns, err := s.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create namespace: %v", err)
	}
	s.ns = ns.Name
	state := s.state()
	for _, o := range state.Operations {
		s.operations = max(s.operations, o.ID)
	}
	t.Cleanup(s.end)
	return s
}

// end cleans up; after a failure by force, so that the next test has a chance.
func (s *scenario) end() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if s.t.Failed() {
		s.t.Logf("logs, objects and the simulator's state are in %s", s.dump(ctx, s.t.Name()))
	}
	err := s.calm(ctx)
	if err == nil && s.t.Failed() {
		err = s.clear(ctx)
		if err == nil && poll(ctx, returned/2, s.whole) != nil {
			err = s.force(ctx)
		}
	}
	if err == nil {
		err = s.client.CoreV1().Namespaces().Delete(ctx, s.ns, metav1.DeleteOptions{})
	}
	if err != nil {
		s.t.Errorf("clean up: %v", err)
	}
}

// calm takes back what a test did to the simulator.
func (s *scenario) calm(ctx context.Context) error {
	if err := s.sim.ClearFaults(ctx, ""); err != nil {
		return err
	}
	return s.sim.SetTiming(ctx, timing(attachDelay, detachDelay, nodeDelay))
}

func timing(attach, detach, node time.Duration) simapi.Timing {
	return simapi.Timing{
		AttachDelay: new(simapi.Duration(attach)), DetachDelay: new(simapi.Duration(detach)), NodeDelay: new(simapi.Duration(node)),
	}
}

// timing changes the chassis's delays until the end of the test.
func (s *scenario) timing(attach, detach, node time.Duration) {
	s.t.Helper()
	if err := s.sim.SetTiming(s.t.Context(), timing(attach, detach, node)); err != nil {
		s.t.Fatal(err)
	}
}

// fault adds a fault until the end of the test.
func (s *scenario) fault(f simapi.Fault) string {
	s.t.Helper()
	name, err := s.sim.AddFault(s.t.Context(), f)
	if err != nil {
		s.t.Fatal(err)
	}
	return name
}

func (s *scenario) unfault(name string) {
	s.t.Helper()
	if err := s.sim.ClearFaults(s.t.Context(), name); err != nil {
		s.t.Fatal(err)
	}
}

// hit is nil when the fault has struck at least n times.
func (s *scenario) hit(name string, n int) func(context.Context) error {
	return func(ctx context.Context) error {
		faults, err := s.sim.Faults(ctx)
		if err != nil {
			return err
		}
		for _, f := range faults {
			if f.Name == name && f.Hits >= n {
				return nil
			}
		}
		return fmt.Errorf("fault %s has not struck %d times: %+v", name, n, faults)
	}
}

func (s *scenario) state() *simapi.State {
	s.t.Helper()
	state, err := s.sim.State(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return state
}

// done are the operations that the fabric took on during this test and ended well.
func (s *scenario) done(kind string) []simapi.Operation {
	s.t.Helper()
	return slices.DeleteFunc(s.state().Operations, func(o simapi.Operation) bool {
		return o.ID <= s.operations || o.Kind != kind || o.End == nil || len(o.Devices) == 0
	})
}

// template makes a ResourceClaimTemplate for count devices of a model, any model if that is empty.
func (s *scenario) template(name, model string, count int64) {
	s.t.Helper()
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: claimSpec(model, count)},
	}
	if _, err := s.client.ResourceV1().ResourceClaimTemplates(s.ns).Create(s.t.Context(), template, metav1.CreateOptions{}); err != nil {
		s.t.Fatalf("create claim template: %v", err)
	}
}

func claimSpec(model string, count int64) resourceapi.ResourceClaimSpec {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: device.Driver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	if model != "" {
		exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes[%q].model == %q", device.Driver, model),
		}}}
	}
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: exactly}}}}
}

// option changes a Pod before it is created.
type option func(*corev1.Pod)

// claiming gives the Pod a claim made from the template.
func claiming(template string) option {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new(template)}}
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	}
}

// limited asks for GPUs by the extended resource.
func limited(gpus string) option {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(gpus)}
	}
}

func on(node string) option {
	return func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node} }
}

// report is what each container does: it says which GPU nodes it has, which of them and which of the
// chassis's device numbers it can open, which driver libraries it sees, and stays.
const report = `
mkdir -p /tmp
open() { if (exec 3<"$1") 2>/tmp/why; then echo "opened $2"; else echo "refused $2 $(cat /tmp/why)"; fi; }
for f in /dev/nvidia[0-9]*; do [ -c "$f" ] && echo "node $f $(stat -c '%t %T' "$f")" && open "$f" "$f"; done
for n in $NUMBERS; do mknod "/tmp/$n" c "${n%:*}" "${n#*:}" && open "/tmp/$n" "number $n"; done
find / -name 'lib*.so*' ! -path '/proc/*' ! -path '/sys/*' -print 2>/dev/null | sed 's/^/library /'
echo reported
trap 'exit 0' TERM
sleep infinity & wait
`

// pod creates a Pod that reports what it sees of GPUs and stays.
func (s *scenario) pod(name string, options ...option) *corev1.Pod {
	s.t.Helper()
	var numbers []string
	for _, d := range s.state().Devices {
		numbers = append(numbers, d.DeviceNumber)
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: new(int64(2)),
			Containers: []corev1.Container{{
				Name: "main", Image: images.TestName, ImagePullPolicy: corev1.PullNever,
				Command: []string{"/bin/sh", "-c", report},
				Env:     []corev1.EnvVar{{Name: "NUMBERS", Value: strings.Join(numbers, " ")}},
			}},
		},
	}
	for _, o := range options {
		o(pod)
	}
	var made *corev1.Pod
	await(s.t, "create Pod "+name, soon, func(ctx context.Context) (err error) { // its ServiceAccount may still be on its way
		made, err = s.client.CoreV1().Pods(s.ns).Create(ctx, pod, metav1.CreateOptions{})
		return err
	})
	return made
}

// runs waits until the Pod runs and returns it.
func (s *scenario) runs(name string, within time.Duration) *corev1.Pod {
	s.t.Helper()
	var pod *corev1.Pod
	await(s.t, "Pod "+name+" runs", within, func(ctx context.Context) (err error) {
		pod, err = s.client.CoreV1().Pods(s.ns).Get(ctx, name, metav1.GetOptions{})
		if err == nil && pod.Status.Phase != corev1.PodRunning {
			err = fmt.Errorf("it is %s: %s", pod.Status.Phase, whyWaiting(pod))
		}
		return err
	})
	return pod
}

func whyWaiting(p *corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		if c.Status != corev1.ConditionTrue && c.Message != "" {
			return c.Message
		}
	}
	return "no condition says why"
}

// delete deletes a Pod and waits until it is gone.
func (s *scenario) delete(name string) {
	s.t.Helper()
	if err := s.client.CoreV1().Pods(s.ns).Delete(s.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		s.t.Fatalf("delete Pod %s: %v", name, err)
	}
	s.gone(name, running)
}

// gone waits until the Pod is no more.
func (s *scenario) gone(name string, within time.Duration) {
	s.t.Helper()
	await(s.t, "Pod "+name+" is gone", within, func(ctx context.Context) error {
		_, err := s.client.CoreV1().Pods(s.ns).Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err == nil:
			return fmt.Errorf("it is still there")
		}
		return err
	})
}

// claim returns the Pod's only claim.
func (s *scenario) claim(ctx context.Context, pod string) (*resourceapi.ResourceClaim, error) {
	p, err := s.client.CoreV1().Pods(s.ns).Get(ctx, pod, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	name := ""
	for _, c := range p.Status.ResourceClaimStatuses {
		name = ptr.Deref(c.ResourceClaimName, "")
	}
	if e := p.Status.ExtendedResourceClaimStatus; e != nil {
		name = e.ResourceClaimName
	}
	if name == "" {
		return nil, fmt.Errorf("Pod %s has no claim yet", pod)
	}
	return s.client.ResourceV1().ResourceClaims(s.ns).Get(ctx, name, metav1.GetOptions{})
}

// units are the entries that the Pod's claim was allocated, in order.
func (s *scenario) units(pod string) (units []device.Unit, ready []bool) {
	s.t.Helper()
	claim, err := s.claim(s.t.Context(), pod)
	if err != nil {
		s.t.Fatalf("read the claim of Pod %s: %v", pod, err)
	}
	if claim.Status.Allocation == nil {
		s.t.Fatalf("the claim of Pod %s is not allocated", pod)
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		u, isReady := device.UnitOfEntry(r.Device)
		units, ready = append(units, u), append(ready, isReady)
	}
	return units, ready
}

// condition returns a condition of the claim's devices, the first that is there.
func condition(claim *resourceapi.ResourceClaim, kind string) *metav1.Condition {
	for _, d := range claim.Status.Devices {
		for i := range d.Conditions {
			if d.Conditions[i].Type == kind {
				return &d.Conditions[i]
			}
		}
	}
	return nil
}

// lease returns the device lease of a unit.
func (s *scenario) lease(ctx context.Context, u device.Unit) (device.Lease, error) {
	return s.leases.Get(ctx, fabric, u)
}

// leased waits until the unit's lease is as wanted.
func (s *scenario) leased(u device.Unit, what string, want func(device.Lease) bool) device.Lease {
	s.t.Helper()
	var l device.Lease
	await(s.t, fmt.Sprintf("unit %s is %s", u, what), soon, func(ctx context.Context) (err error) {
		l, err = s.lease(ctx, u)
		if err == nil && !want(l) {
			err = fmt.Errorf("it is %s, attempt %q, idle since %q, held by %q, failure %+v", l.Phase, l.Attempt, l.IdleSince, l.HeldBy, l.Failure)
		}
		return err
	})
	return l
}

// idle waits until the unit is idle.
func (s *scenario) idle(u device.Unit) {
	s.t.Helper()
	s.leased(u, "idle", device.Lease.Idle)
}

// choosable waits until the scheduler may choose an idle unit where it is: the leader publishes that a moment after
// the lease says so.
func (s *scenario) choosable(u device.Unit) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("unit %s can be chosen where it is", u), soon, func(ctx context.Context) error {
		list, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + device.Driver})
		if err != nil {
			return err
		}
		for i := range list.Items {
			for _, d := range list.Items[i].Spec.Devices {
				if d.Name == u.ReadyEntry() && len(d.Taints) == 0 {
					return nil
				}
			}
		}
		return errors.New("its entry is tainted")
	})
}

// log reads a container's log.
func (s *scenario) log(ctx context.Context, ns, pod string, o corev1.PodLogOptions) (string, error) {
	stream, err := s.client.CoreV1().Pods(ns).GetLogs(pod, &o).Stream(ctx)
	if err != nil {
		return "", err
	}
	defer stream.Close()
	var b bytes.Buffer
	_, err = io.Copy(&b, stream)
	return b.String(), err
}

// eventsOn are the events about an object, as "reason: note".
func (s *scenario) eventsOn(ctx context.Context, ns string, uid types.UID) ([]string, error) {
	list, err := s.client.EventsV1().Events(ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var all []string
	for i := range list.Items {
		if e := &list.Items[i]; e.Regarding.UID == uid {
			all = append(all, e.Reason+": "+e.Note)
		}
	}
	return all, nil
}

// hasEvent waits for an event about an object that holds all the words.
func (s *scenario) hasEvent(ns string, uid types.UID, words ...string) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("an event with %q", words), soon, func(ctx context.Context) error {
		all, err := s.eventsOn(ctx, ns, uid)
		if err != nil {
			return err
		}
		for _, e := range all {
			if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(e, w) }) {
				return nil
			}
		}
		return fmt.Errorf("the events are %q", all)
	})
}
