// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
)

// spare returns a free device of a model's words.
func (s *scenario) spare(words string) simapi.Device {
	s.t.Helper()
	for _, d := range s.state().Devices {
		if d.Phase == simapi.PhaseFree && strings.Contains(d.Model, words) {
			return d
		}
	}
	s.t.Fatalf("no free device of model %s", words)
	return simapi.Device{}
}

// own is nil when the node's own pool holds just these GPUs.
func (s *scenario) own(node string, want ...device.GPUUUID) func(context.Context) error {
	return func(ctx context.Context) error {
		list, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + device.Driver})
		if err != nil {
			return err
		}
		var got []device.GPUUUID
		for i := range list.Items {
			spec := &list.Items[i].Spec
			if spec.Pool.Name != node {
				continue
			}
			if spec.NodeName == nil || *spec.NodeName != node {
				return fmt.Errorf("slice %s of the pool %s is not the node's", list.Items[i].Name, node)
			}
			for _, d := range spec.Devices {
				id, ok := device.Unit(d.Name).BuiltIn()
				if !ok || d.Attributes["uuid"].StringValue == nil || *d.Attributes["uuid"].StringValue != string(id) {
					return fmt.Errorf("the pool %s holds %s, %v", node, d.Name, d.Attributes)
				}
				got = append(got, id)
			}
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("the pool %s holds %v, want %v", node, got, want)
		}
		return nil
	}
}

// that makes a template for the one GPU of that UUID.
func (s *scenario) that(name string, id device.GPUUUID, change func(*resourceapi.ExactDeviceRequest)) {
	s.t.Helper()
	spec := claimSpec("", 1)
	spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes[%q].uuid == %q", device.Driver, id),
	}}}
	if change != nil {
		change(spec.Devices.Requests[0].Exactly)
	}
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: spec},
	}
	if _, err := s.client.ResourceV1().ResourceClaimTemplates(s.ns).Create(s.t.Context(), template, metav1.CreateOptions{}); err != nil {
		s.t.Fatalf("create claim template: %v", err)
	}
}

func (s *scenario) identity(d simapi.Device) device.GPUUUID {
	s.t.Helper()
	id, err := device.ParseGPUUUID(d.UUID)
	if err != nil {
		s.t.Fatal(err)
	}
	return id
}

func (s *scenario) nodeUID(name string) types.UID {
	s.t.Helper()
	n, err := s.client.CoreV1().Nodes().Get(s.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return n.UID
}

// statusSays is nil when /status of the node's agent holds all the words.
func (s *scenario) statusSays(node string, words ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		agent, err := s.agent(ctx, node)
		if err != nil {
			return err
		}
		code, body, err := s.get(ctx, agent, "/status")
		if err != nil || code != 200 {
			return errors.Join(err, fmt.Errorf("/status answers %d", code))
		}
		for _, w := range words {
			if !strings.Contains(body, w) {
				return fmt.Errorf("/status has no %q: %s", w, body)
			}
		}
		return nil
	}
}

// TestBuiltInGPU: a GPU that the fabric does not list is the node's own: offered there without a lease, withdrawn
// while somebody else advertises it, and when it is not well.
func TestBuiltInGPU(t *testing.T) {
	s := begin(t)
	d := s.spare("A100")
	id := s.identity(d)
	if err := s.sim.Device(t.Context(), d.ID, simapi.DeviceChange{Action: simapi.DeviceBuildIn, Machine: "n1"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.sim.Device(context.Background(), d.ID, simapi.DeviceChange{Action: simapi.DeviceFree}) // free already, if all went well
	})
	await(t, "its agent says that it is built-in", running, s.statusSays("n1", "built-in", d.UUID))
	await(t, "the node's own pool has it", soon, s.own("n1", id))
	await(t, "the other node's has nothing", soon, s.own("n2"))

	s.that("that", id, nil)
	s.pod("pod", claiming("that"))
	if pod := s.runs("pod", running); pod.Spec.NodeName != "n1" {
		t.Errorf("the Pod runs on %s", pod.Spec.NodeName)
	}
	if got := s.sees("pod"); len(got) != 1 || got[0].ID != d.ID {
		t.Errorf("the container has %v, want %s", got, d.ID)
	}
	if leases, err := s.leases.ListLive(t.Context()); err != nil || len(leases) != 0 {
		t.Errorf("device leases %v, %v", leases, err)
	}
	s.pod("second", claiming("that"))
	s.steady("the wait of the second Pod", 5*time.Second, func(ctx context.Context) error {
		pod, err := s.client.CoreV1().Pods(s.ns).Get(ctx, "second", metav1.GetOptions{})
		if err == nil && pod.Spec.NodeName != "" {
			err = errors.New("it was placed")
		}
		return err
	})
	s.delete("pod")
	s.runs("second", again)
	s.delete("second")

	// Somebody else advertises this node's GPUs.
	other := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "n1-gpu.nvidia.com"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: new("n1"), Pool: resourceapi.ResourcePool{Name: "n1", ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0"}},
		},
	}
	slicesOf := s.client.ResourceV1().ResourceSlices()
	if _, err := slicesOf.Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = slicesOf.Delete(context.Background(), other.Name, metav1.DeleteOptions{}) // usually gone
	})
	await(t, "it is withdrawn", soon, s.own("n1"))
	if err := slicesOf.Delete(t.Context(), other.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "it is back", soon, s.own("n1", id))

	if err := s.sim.Device(t.Context(), d.ID, simapi.DeviceChange{XID: new(uint64(48))}); err != nil {
		t.Fatal(err)
	}
	await(t, "it is withdrawn for its error", running, s.own("n1"))
	s.hasEvent(metav1.NamespaceDefault, s.nodeUID("n1"), nodestatus.ReasonUnhealthy, d.UUID, "XID 48")
	if err := s.sim.Device(t.Context(), d.ID, simapi.DeviceChange{Action: simapi.DeviceFree}); err != nil {
		t.Fatal(err)
	}
	await(t, "nothing of the node's own is left", soon, s.own("n1"))
	s.settled()
}

// TestForeignDevice: what somebody else attaches to our machine is told of, neither handed out nor detached, and
// does not disturb our own units.
func TestForeignDevice(t *testing.T) {
	s := begin(t)
	d := s.spare("A100")
	if err := s.sim.Attach(t.Context(), "n1", d.ID); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.sim.Device(context.Background(), d.ID, simapi.DeviceChange{Action: simapi.DeviceFree}) // free already, if all went well
	})
	s.hasEventWithin(running, s.nodeUID("n1"), nodestatus.ReasonForeign, d.ResUUID)
	await(t, "its agent says so", soon, s.statusSays("n1", "foreign", d.ResUUID))
	s.template("one", a100, 1)
	s.pod("pod", claiming("one"), on("n1"))
	s.runs("pod", running)
	for _, got := range s.sees("pod") {
		if got.ID == d.ID {
			t.Error("the foreign device was handed out")
		}
	}
	await(t, "it is in no pool of the node", soon, s.own("n1"))
	s.delete("pod")
	if err := s.giveBack(t.Context()); err != nil {
		t.Fatal(err)
	}
	await(t, "our own unit is back", returned, func(ctx context.Context) error {
		leases, err := s.leases.ListLive(ctx)
		if err == nil && len(leases) > 0 {
			err = fmt.Errorf("%d leases are there", len(leases))
		}
		return err
	})
	if now, _ := s.state().Device(d.ID); now.Phase != simapi.PhaseAttached || !now.OnBus {
		t.Errorf("the foreign device is %+v", now)
	}
	if err := s.sim.Detach(t.Context(), d.ID); err != nil {
		t.Fatal(err)
	}
	s.settled()
}

// hasEventWithin waits for an event on a Node that holds all the words.
func (s *scenario) hasEventWithin(within time.Duration, uid types.UID, words ...string) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("an event with %q", words), within, func(ctx context.Context) error {
		all, err := s.eventsOn(ctx, metav1.NamespaceDefault, uid)
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

// TestAdminAccess: an administrator's claim has an idle unit beside the Pod that is given it next, and no lease
// says a word of it.
func TestAdminAccess(t *testing.T) {
	s := begin(t)
	label := []byte(`{"metadata":{"labels":{"resource.kubernetes.io/admin-access":"true"}}}`)
	if _, err := s.client.CoreV1().Namespaces().Patch(t.Context(), s.ns, types.MergePatchType, label, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	s.template("one", a100, 1)
	s.pod("first", claiming("one"), on("n1"))
	s.runs("first", running)
	units, _ := s.units("first")
	s.delete("first")
	s.idle(units[0])
	s.choosable(units[0])
	l := s.leased(units[0], "idle", device.Lease.Idle)

	s.that("watch", l.UUID, func(r *resourceapi.ExactDeviceRequest) { r.AdminAccess = new(true) })
	s.pod("watcher", claiming("watch"))
	s.runs("watcher", running)
	if now := s.leased(units[0], "idle still", device.Lease.Idle); now.Version != l.Version {
		t.Errorf("the lease was written: %+v, was %+v", now, l)
	}
	s.that("that", l.UUID, nil)
	s.pod("second", claiming("that"), on("n1"))
	s.runs("second", running)
	s.delete("watcher")
	s.sees("second")
	s.settled()
}

// TestHealthReachesThePod: the Pod's status says that its GPU is not well.
func TestHealthReachesThePod(t *testing.T) {
	s := begin(t)
	s.template("one", a100, 1)
	s.pod("pod", claiming("one"), on("n1"))
	s.runs("pod", running)
	own := s.sees("pod")
	says := func(want corev1.ResourceHealthStatus) func(context.Context) error {
		return func(ctx context.Context) error {
			pod, err := s.client.CoreV1().Pods(s.ns).Get(ctx, "pod", metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, c := range pod.Status.ContainerStatuses {
				for _, r := range c.AllocatedResourcesStatus {
					for _, h := range r.Resources {
						if h.Health == want {
							return nil
						}
					}
				}
			}
			return fmt.Errorf("the container statuses are %+v", pod.Status.ContainerStatuses)
		}
	}
	await(t, "the Pod's status says that its GPU is well", running, says(corev1.ResourceHealthStatusHealthy))
	if err := s.sim.Device(t.Context(), own[0].ID, simapi.DeviceChange{XID: new(uint64(48))}); err != nil {
		t.Fatal(err)
	}
	await(t, "the Pod's status says that its GPU is not", running, says(corev1.ResourceHealthStatusUnhealthy))
	s.settled()
}
