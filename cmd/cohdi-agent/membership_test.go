// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/machine"
	"github.com/cohdi/cohdi-agent/internal/manager"
	"github.com/cohdi/cohdi-agent/internal/metal3"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
)

const (
	firstMachine  = "11111111-1111-4111-8111-000000000001"
	secondMachine = "22222222-2222-4222-8222-000000000002"
	thirdMachine  = "33333333-3333-4333-8333-000000000003"
)

// A leader goes by what a node's agent says, else by what older agents went by.
func TestMachineOf(t *testing.T) {
	configured := map[string]device.Machine{"n1": thirdMachine}
	for name, tc := range map[string]struct {
		label, provider, annotation, node string
		want                              device.Machine
		fails                             string
	}{
		"the agent's word":         {label: secondMachine, provider: "fsas-cdi://" + firstMachine, node: "n1", want: secondMachine},
		"a label that is no UUID":  {label: "x", provider: "fsas-cdi://" + firstMachine, node: "n1", fails: `"x"`},
		"an older agent":           {provider: "fsas-cdi://" + firstMachine, annotation: secondMachine, node: "n1", want: firstMachine},
		"by annotation":            {provider: "aws:///eu/i-0123", annotation: secondMachine, node: "n1", want: secondMachine},
		"by the configuration":     {node: "n1", want: thirdMachine},
		"a host is not its own ID": {provider: "metal3://" + firstMachine, node: "n2", fails: device.LabelMachine},
	} {
		t.Run(name, func(t *testing.T) {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: tc.node}, Spec: corev1.NodeSpec{ProviderID: tc.provider}}
			if tc.annotation != "" {
				n.Annotations = map[string]string{device.AnnotationMachine: tc.annotation}
			}
			if tc.label != "" {
				n.Labels = map[string]string{device.LabelMachine: tc.label}
			}
			got, err := machineOf(n, configured)
			if tc.fails != "" {
				if err == nil || !strings.Contains(err.Error(), tc.fails) {
					t.Fatalf("error = %v, want one that names %q", err, tc.fails)
				}
				return
			}
			if err != nil || got != tc.want {
				t.Errorf("machine = %s, %v; want %s", got, err, tc.want)
			}
		})
	}
}

// listing is a manager of which only the list of machines is asked.
type listing struct {
	fabric.Manager
	machines []device.Machine
	err      error
	asked    int
}

func (l *listing) Machines(context.Context) ([]fabric.Machine, error) {
	l.asked++
	var all []fabric.Machine
	for _, m := range l.machines {
		all = append(all, fabric.Machine{ID: m})
	}
	return all, l.err
}

// place is a node that looks for where it belongs.
type place struct {
	*membership
	manager *listing
	clock   *clocktesting.FakeClock
	kube    *fake.Clientset
	hosts   dynamic.Interface
}

var hostsOfMetal3 = schema.GroupVersionResource{Group: "metal3.io", Version: "v1alpha1", Resource: "baremetalhosts"}

func hostNamed(machine string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "metal3.io/v1alpha1", "kind": "BareMetalHost",
		"metadata": map[string]any{
			"namespace": "machines", "name": "host-1", "uid": "u-1",
			"annotations": map[string]any{"cluster-manager.cdi.io/machine": machine},
		},
	}}
}

func newPlace(t *testing.T, provider string, listed ...device.Machine) *place {
	t.Helper()
	p := &place{
		manager: &listing{machines: listed}, clock: clocktesting.NewFakeClock(time.Unix(1000, 0)),
		kube: fake.NewClientset(&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "uid-1"}, Spec: corev1.NodeSpec{ProviderID: provider},
		}),
		hosts: dynamicfake.NewSimpleDynamicClient(runtime.NewScheme(), hostNamed(secondMachine)),
	}
	a := &agent{o: options{node: "n1"}, clock: p.clock, client: p.kube, chain: metal3.New(p.hosts), watch: nodestatus.NewWatch(p.kube, "n1")}
	p.membership = &membership{
		a: a, cfg: config.Config{Fabrics: []config.Fabric{{ID: "0"}}, Timings: config.Timings{NodeList: 10 * time.Minute}},
		managers: map[device.FabricID]*manager.Manager{"0": manager.New(manager.Options{
			Client: p.manager, Clock: p.clock, Answered: func() {}, Timed: func(metrics.Operation, time.Duration, error) {},
		})},
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.watch.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	if err := a.watch.WaitForSync(ctx); err != nil {
		t.Fatal(err)
	}
	return p
}

// is expects what find comes to, and sits there as run does.
func (p *place) is(t *testing.T, machine device.Machine, known bool, why string) {
	t.Helper()
	want := seat{}
	if machine != "" {
		want = seat{fabric: "0", machine: machine, nodeUID: "uid-1"}
	}
	at, ok := p.find(t.Context())
	if at != want || ok != known {
		t.Fatalf("found %+v, known %v; want %+v, %v (%s)", at, ok, want, known, p.whyNot)
	}
	if machine == "" && (!strings.Contains(p.why+": "+p.whyNot, why) || why == "") {
		t.Errorf("why: %s: %s; want %q", p.why, p.whyNot, why)
	}
	if known {
		p.seat = at
	}
}

// A node's place is found once, and anew when what names it says something else.
func TestFind(t *testing.T) {
	p := newPlace(t, "baremetalhost:///machines/host-1/u-1", firstMachine, secondMachine)
	p.is(t, secondMachine, true, "")
	p.is(t, secondMachine, true, "")
	if p.manager.asked != 1 {
		t.Errorf("the manager was asked %d times for a node that has its place", p.manager.asked)
	}
	if _, err := p.hosts.Resource(hostsOfMetal3).Namespace("machines").Update(t.Context(), hostNamed(firstMachine), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.is(t, secondMachine, true, "") // nobody tells us
	p.clock.Step(11 * time.Minute)
	p.is(t, firstMachine, true, "")
	if err := p.hosts.Resource(hostsOfMetal3).Namespace("machines").Delete(t.Context(), "host-1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p.clock.Step(11 * time.Minute)
	p.is(t, firstMachine, true, "") // a host that is gone says nothing of the machine
	p.seat = seat{}
	p.is(t, "", true, "MachineUnknown: ")
	if !strings.Contains(p.whyNot, "there is no BareMetalHost machines/host-1") {
		t.Errorf("why not: %s", p.whyNot)
	}
}

// Where a node may not be, and what it says.
func TestFind_nowhere(t *testing.T) {
	p := newPlace(t, "fsas-cdi://"+firstMachine, secondMachine)
	p.is(t, "", true, machine.NotInFabric+": no configured fabric manager has machine "+firstMachine)
	p.manager.err = errors.New("connection refused")
	p.is(t, "", false, machine.Unreachable)
	p.manager.err, p.manager.machines = nil, []device.Machine{firstMachine}

	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2", Labels: map[string]string{device.LabelMachine: firstMachine}}}
	if _, err := p.kube.CoreV1().Nodes().Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.is(t, "", true, machine.Shared+": the node's provider id")
	if !strings.Contains(p.whyNot, "on which node n2 is already") {
		t.Errorf("the other node is not named: %s", p.whyNot)
	}
	if err := p.kube.CoreV1().Nodes().Delete(t.Context(), "n2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p.is(t, firstMachine, true, "")
}

// An agent that starts anew while the manager is down takes its place by what it has said on the Node.
func TestFind_managerDown(t *testing.T) {
	p := newPlace(t, "fsas-cdi://"+firstMachine, firstMachine)
	p.manager.err = errors.New("connection refused")
	self, err := p.kube.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	self.Labels = map[string]string{device.LabelFabric: "0", device.LabelMachine: firstMachine}
	if _, err = p.kube.CoreV1().Nodes().Update(t.Context(), self, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	seen := make(chan struct{}, 100)
	p.a.watch.OnChange(func() { seen <- struct{}{} })
	for {
		if n, err := p.a.watch.Node("n1"); err == nil && n.Labels[device.LabelFabric] != "" {
			break
		}
		<-seen
	}
	p.is(t, firstMachine, true, "")
}

// parting is a manager that only ends.
type parting struct {
	fabric.Manager
	hangs  bool
	closed int
}

func (p *parting) Close(ctx context.Context) error {
	p.closed++
	if p.hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

// TestLogOut: every session ends, and a manager that does not answer holds up neither the others nor the end for long.
func TestLogOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quick, slow := &parting{}, &parting{hangs: true}
		m := &membership{managers: map[device.FabricID]*manager.Manager{
			"0": manager.New(manager.Options{Client: slow}), "1": manager.New(manager.Options{Client: quick}),
		}}
		began := time.Now()
		m.logOut(t.Context())
		if quick.closed != 1 || slow.closed != 1 || time.Since(began) > logOutMost {
			t.Errorf("closed %d and %d times, within %s", quick.closed, slow.closed, time.Since(began))
		}
	})
}
