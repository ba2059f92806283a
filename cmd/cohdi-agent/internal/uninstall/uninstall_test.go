// SPDX-License-Identifier: Apache-2.0

package uninstall

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/lease"
)

func meta(ns, name string, labels map[string]string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: ns, Name: name, Labels: labels, UID: "uid", ResourceVersion: "1"}
}

// installed is a cluster with the agent, an election, two nodes, slices of ours and of another driver.
func installed() []runtime.Object {
	part := map[string]string{"app.kubernetes.io/part-of": device.AgentName}
	slice := func(name, driver string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{ObjectMeta: meta("", name, nil), Spec: resourceapi.ResourceSliceSpec{Driver: driver}}
	}
	return []runtime.Object{
		&corev1.Namespace{ObjectMeta: meta("", device.LeaseNamespace, part)},
		&resourceapi.DeviceClass{ObjectMeta: meta("", device.Driver, part)},
		&resourceapi.DeviceClass{ObjectMeta: meta("", "another", nil)},
		&appsv1.DaemonSet{ObjectMeta: meta(device.AgentNamespace, device.AgentName, part)},
		&corev1.Pod{ObjectMeta: meta(device.AgentNamespace, "agent-1", map[string]string{"app.kubernetes.io/name": device.AgentName})},
		&coordinationv1.Lease{ObjectMeta: meta(device.LeaseNamespace, "fabric-0", map[string]string{device.LabelElection: "0"})},
		&corev1.Node{
			ObjectMeta: meta("", "n1", map[string]string{device.LabelFabric: "0", device.LabelIdle: "true", "gpu.cohdi.io/a100.attachable": "true", "zone": "z"}),
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionTrue}, {Type: "gpu.cohdi.io/FabricReady", Status: corev1.ConditionTrue},
			}},
		},
		&corev1.Node{ObjectMeta: meta("", "n2", map[string]string{"zone": "z"})},
		slice("ours", device.Driver), slice("theirs", "gpu.example.com"),
	}
}

func claim(driver string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: meta("team", "pod-gpu", nil),
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{{Driver: driver, Pool: "fabric-0", Device: "a100-0"}},
			}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod"}},
		},
	}
}

// world is a fake API server with agents that take a while.
type world struct {
	*fake.Clientset
	// asked are the leases that somebody deleted; agents give each unit back after some seconds.
	asked []string
	// stuck agents give nothing back.
	stuck bool
}

// newWorld has an idle unit on n1.
func newWorld(t *testing.T, objects ...runtime.Object) *world {
	t.Helper()
	w := &world{Clientset: fake.NewClientset(append(installed(), objects...)...)}
	store, err := lease.NewFabricStore("0", lease.Options{Client: w, Clock: clock.RealClock{}, Changed: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Create(t.Context(), device.Lease{
		Fabric: "0", Unit: "a100-0", Model: "a100", Node: "n1", Machine: "9b1d3e20-1111-4a6b-8c00-00000000a001", Phase: device.Attached,
		HeldBy: "nvidia-persistenced (pid 7)",
	}); err != nil {
		t.Fatal(err)
	}
	leases := coordinationv1.SchemeGroupVersion.WithResource("leases")
	w.PrependReactor("delete", "leases", func(a clienttesting.Action) (bool, runtime.Object, error) {
		deletion, ok := a.(clienttesting.DeleteAction)
		if !ok || !strings.HasPrefix(deletion.GetName(), "device-") {
			return false, nil, nil
		}
		name := deletion.GetName()
		// The finalizer holds it until the agent has released.
		obj, err := w.Tracker().Get(leases, device.LeaseNamespace, name)
		if err != nil {
			return true, nil, err
		}
		stored, ok := obj.(*coordinationv1.Lease)
		if !ok {
			t.Errorf("%s is a %T", name, obj)
		}
		w.asked = append(w.asked, name)
		l := stored.DeepCopy()
		l.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		if !w.stuck {
			w.later(leases, device.LeaseNamespace, name)
		}
		return true, nil, w.Tracker().Update(leases, l, device.LeaseNamespace)
	})
	w.PrependReactor("delete", "daemonsets", func(clienttesting.Action) (bool, runtime.Object, error) {
		w.later(corev1.SchemeGroupVersion.WithResource("pods"), device.AgentNamespace, "agent-1")
		return false, nil, nil
	})
	return w
}

// later removes an object after some seconds.
func (w *world) later(of schema.GroupVersionResource, ns, name string) {
	time.AfterFunc(5*time.Second, func() { _ = w.Tracker().Delete(of, ns, name) })
}

func TestRunReleasesThenClears(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, claim("gpu.example.com"))
		var out strings.Builder
		if err := Run(t.Context(), Options{Client: w, Clock: clock.RealClock{}, Out: &out}); err != nil {
			t.Fatal(err)
		}
		want := `Deleting DeviceClass gpu.cohdi.io, so that no new claim is served.
Asking for the unit of device-0-a100-0 on node n1 back.
Waiting until device-0-a100-0 is given back by node n1 (Attached, held open by nvidia-persistenced (pid 7)).
No unit is out of the pool. Stopping the agents.
Cleared 3 labels and 1 conditions of Node n1.
Withdrew 1 ResourceSlices.
Done. Now run: kubectl delete --ignore-not-found -f deploy/daemonset.yaml -f deploy/extended-resource.yaml -f deploy/prefer-idle.yaml -f deploy/metal3.yaml
`
		if diff := cmp.Diff(want, out.String()); diff != "" {
			t.Errorf("output (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]string{"device-0-a100-0"}, w.asked); diff != "" {
			t.Errorf("asked for (-want +got):\n%s", diff)
		}
		w.check(t)
	})
}

// check looks at what is left.
func (w *world) check(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	n, err := w.CoreV1().Nodes().Get(ctx, "n1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"zone": "z"}, n.Labels); diff != "" {
		t.Errorf("labels of n1 (-want +got):\n%s", diff)
	}
	if len(n.Status.Conditions) != 1 || n.Status.Conditions[0].Type != corev1.NodeReady {
		t.Errorf("conditions of n1: %v, want Ready alone", n.Status.Conditions)
	}
	slices, err := w.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil || len(slices.Items) != 1 || slices.Items[0].Name != "theirs" {
		t.Errorf("slices %v, %v; want those of the other driver", slices.Items, err)
	}
	classes, err := w.ResourceV1().DeviceClasses().List(ctx, metav1.ListOptions{})
	if err != nil || len(classes.Items) != 1 || classes.Items[0].Name != "another" {
		t.Errorf("classes %v, %v; want the other one", classes.Items, err)
	}
	ns, err := w.CoreV1().Namespaces().Get(ctx, device.LeaseNamespace, metav1.GetOptions{})
	if err != nil || ns.Annotations[device.AnnotationUninstalled] != "true" {
		t.Errorf("namespace of the leases: %v, %v; want it marked, so that it may be deleted", ns.Annotations, err)
	}
	leases, err := w.CoordinationV1().Leases(device.LeaseNamespace).List(ctx, metav1.ListOptions{})
	if err != nil || len(leases.Items) != 0 {
		t.Errorf("leases %v, %v; want none", leases.Items, err)
	}
}

func TestRunRefusesWhileInUse(t *testing.T) {
	w := newWorld(t, claim(device.Driver))
	before := len(w.Actions())
	var out strings.Builder
	err := Run(t.Context(), Options{Client: w, Clock: clock.RealClock{}, Out: &out})
	var inUse *InUseError
	if !errors.As(err, &inUse) || inUse.Closed {
		t.Fatalf("got %v, want an InUseError with nothing changed", err)
	}
	if want := "GPUs are in use: claim team/pod-gpu has a100-0 for pod. Delete the Pods and claims that have them and run this again; nothing was changed"; err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	for _, a := range w.Actions()[before:] {
		if a.GetVerb() != "list" {
			t.Errorf("it did %s %s", a.GetVerb(), a.GetResource().Resource)
		}
	}
}

// A claim that was allocated just before the classes were gone stops everything, and says so.
// TestRunRefusesWhatComesBack: agents that take units without a claim would never be done.
func TestRunRefusesWhatComesBack(t *testing.T) {
	const head = "apiVersion: agent.gpu.cohdi.io/v1alpha1\nkind: Config\n"
	for _, tc := range []struct{ name, config, want string }{
		{"minimum", head + `fabrics: [{id: "0", manager: fm, endpoint: "https://fm", tenant: 3b5d7a52-0000-4000-8000-000000000001, models: [{name: a100, fabricModel: A, minPerNode: 1}]}]`, "take minPerNode of model a100 on fabric 0 out of ConfigMap cohdi-system/cohdi-agent"},
		{"foreign devices", head + "foreignDevices: adopt", "take foreignDevices: adopt out of ConfigMap"},
		{"nothing", head, ""},
		{"unreadable", "x", ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, &corev1.ConfigMap{ObjectMeta: meta(device.AgentNamespace, device.AgentName, nil), Data: map[string]string{"config.yaml": tc.config}})
			var out strings.Builder
			err := Run(t.Context(), Options{Client: w, Clock: clock.RealClock{}, Out: &out})
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || len(w.asked) > 0) {
				t.Errorf("%s: %v, asked %v, want %q", tc.name, err, w.asked, tc.want)
			}
			if (tc.config == "x") != strings.Contains(out.String(), "cannot be read") {
				t.Errorf("%s: said %s", tc.name, out.String())
			}
		})
	}
}

func TestRunRefusesWhenAClaimSlipsIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.PrependReactor("delete", "deviceclasses", func(clienttesting.Action) (bool, runtime.Object, error) {
			return false, nil, w.Tracker().Add(claim(device.Driver))
		})
		var out strings.Builder
		err := Run(t.Context(), Options{Client: w, Clock: clock.RealClock{}, Out: &out})
		var inUse *InUseError
		if !errors.As(err, &inUse) || !inUse.Closed || !strings.Contains(err.Error(), "apply the manifests again") {
			t.Errorf("got %v, want an InUseError that says how to go on", err)
		}
		if len(w.asked) > 0 {
			t.Errorf("it asked for %v", w.asked)
		}
	})
}

// Units that nobody gives back are named when the time is over, and the agents go on running.
func TestRunSaysWhatItWaitsFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.stuck = true
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var out strings.Builder
		err := Run(ctx, Options{Client: w, Clock: clock.RealClock{}, Out: &out})
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "device-0-a100-0 is given back by node n1 (Attached, held open by nvidia-persistenced (pid 7)) (do the agents on these nodes run?)") {
			t.Errorf("got %v", err)
		}
		if n := strings.Count(out.String(), "Waiting"); n != 1 {
			t.Errorf("it said %d times what it waits for, want once:\n%s", n, out.String())
		}
		if _, err := w.AppsV1().DaemonSets(device.AgentNamespace).Get(t.Context(), device.AgentName, metav1.GetOptions{}); err != nil {
			t.Errorf("the agents are gone: %v", err)
		}
	})
}
