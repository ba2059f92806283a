// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func newNode(labels map[string]string, conditions ...corev1.NodeCondition) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "uid-1", Labels: labels, ResourceVersion: "1"},
		Status:     corev1.NodeStatus{Conditions: conditions},
	}
}

// live reads the Node from the fake API server: a cache that never lags.
func live(t *testing.T, c *fake.Clientset) func(string) (*corev1.Node, error) {
	t.Helper()
	return func(name string) (*corev1.Node, error) {
		return c.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	}
}

// writes returns the patches sent since the last call, and forgets them.
func writes(c *fake.Clientset) []string {
	var all []string
	for _, a := range c.Actions() {
		if p, ok := a.(clienttesting.PatchAction); ok {
			all = append(all, fmt.Sprintf("%s %s%s", p.GetPatchType(), p.GetName(), suffix(p.GetSubresource())))
		}
	}
	c.ClearActions()
	return all
}

func suffix(sub string) string {
	if sub == "" {
		return ""
	}
	return "/" + sub
}

func conditionsOf(n *corev1.Node) map[string]string {
	all := map[string]string{}
	for _, c := range n.Status.Conditions {
		all[string(c.Type)] = fmt.Sprintf("%s %s %q heartbeat %s transition %s", c.Status, c.Reason, c.Message,
			c.LastHeartbeatTime.UTC().Format(time.TimeOnly), c.LastTransitionTime.UTC().Format(time.TimeOnly))
	}
	return all
}

func TestPublisherLabel(t *testing.T) {
	const fabric, machine = device.LabelFabric, device.LabelMachine
	attachable := device.Model("a100").AttachableLabel()
	type labels = map[string]string
	for _, tt := range []struct {
		name   string
		have   labels
		place  place
		want   labels
		writes int
	}{
		{"set", labels{"a": "b"}, place{"f1", "m1"}, labels{"a": "b", fabric: "f1", machine: "m1"}, 1},
		{"as it is", labels{fabric: "f1", machine: "m1", device.LabelIdle: "true"}, place{"f1", "m1"}, labels{fabric: "f1", machine: "m1", device.LabelIdle: "true"}, 0},
		{
			"changed, with what the old leader said",
			labels{fabric: "f0", machine: "m1", device.LabelIdle: "true", attachable: "true"},
			place{"f1", "m1"},
			labels{fabric: "f1", machine: "m1"},
			1,
		},
		{"another machine is another member", labels{fabric: "f1", machine: "m0", attachable: "true"}, place{"f1", "m1"}, labels{fabric: "f1", machine: "m1"}, 1},
		{
			"an agent before this one did not say the machine",
			labels{fabric: "f1", attachable: "true"},
			place{"f1", "m1"},
			labels{fabric: "f1", machine: "m1", attachable: "true"},
			1,
		},
		{"removed", labels{"a": "b", fabric: "f0", machine: "m1", attachable: "true"}, place{}, labels{"a": "b"}, 1},
		{"nothing to remove", labels{"a": "b"}, place{}, labels{"a": "b"}, 0},
		{"left over", labels{device.LabelIdle: "true"}, place{}, nil, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := fake.NewClientset(newNode(tt.have))
			p := NewPublisher(c, "n1", live(t, c), clocktesting.NewFakeClock(start))
			if err := p.Step(t.Context()); err != nil {
				t.Fatal(err)
			}
			if w := writes(c); len(w) != 0 {
				t.Errorf("wrote before anything was set: %v", w)
			}
			p.SetPlace(tt.place.fabric, tt.place.machine)
			for range 2 {
				if err := p.Step(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if w := writes(c); len(w) != tt.writes {
				t.Errorf("writes %v, want %d", w, tt.writes)
			}
			node, err := live(t, c)("n1")
			if err != nil {
				t.Fatal(err)
			}
			if len(node.Labels) == 0 {
				node.Labels = nil
			}
			if diff := cmp.Diff(tt.want, node.Labels); diff != "" {
				t.Errorf("labels (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPublisherConditions(t *testing.T) {
	kubelet := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}
	c := fake.NewClientset(newNode(nil, kubelet))
	clk := clocktesting.NewFakeClock(start)
	p := NewPublisher(c, "n1", live(t, c), clk)
	step := func(set ...Condition) (map[string]string, []string) {
		t.Helper()
		for _, s := range set {
			p.SetCondition(s)
		}
		if err := p.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		w := writes(c)
		node, err := live(t, c)("n1")
		if err != nil {
			t.Fatal(err)
		}
		c.ClearActions()
		all := conditionsOf(node)
		if _, ok := all["Ready"]; !ok {
			t.Error("the kubelet's condition is gone")
		}
		delete(all, "Ready")
		return all, w
	}
	down := Condition{Type: FabricReady, Status: corev1.ConditionFalse, Reason: "Unreachable", Message: "no route to host"}
	plug := Condition{Type: HotplugReady, Status: corev1.ConditionTrue, Reason: "Watching", Message: "devices are seen"}

	got, w := step(down, plug)
	want := map[string]string{
		string(FabricReady):  `False Unreachable "no route to host" heartbeat 03:04:05 transition 03:04:05`,
		string(HotplugReady): `True Watching "devices are seen" heartbeat 03:04:05 transition 03:04:05`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("first (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"application/apply-patch+yaml n1/status"}, w); diff != "" {
		t.Errorf("first writes (-want +got):\n%s", diff)
	}

	clk.Step(time.Minute)
	if _, w = step(down, plug); len(w) != 0 {
		t.Errorf("unchanged, but wrote %v", w)
	}

	// Another text of the same status is no transition; what did not change keeps its heartbeat.
	down.Message = "connection refused"
	got, _ = step(down)
	want[string(FabricReady)] = `False Unreachable "connection refused" heartbeat 03:05:05 transition 03:04:05`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("other text (-want +got):\n%s", diff)
	}

	clk.Step(time.Minute)
	got, _ = step(Condition{Type: FabricReady, Status: corev1.ConditionTrue, Reason: "Reachable", Message: "ok"})
	want[string(FabricReady)] = `True Reachable "ok" heartbeat 03:06:05 transition 03:06:05`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("other status (-want +got):\n%s", diff)
	}

	// A later process that has one thing to say keeps the other.
	clk.Step(time.Minute)
	p = NewPublisher(c, "n1", live(t, c), clk)
	got, _ = step(Condition{Type: GPUConflict, Status: corev1.ConditionFalse, Reason: "NoOtherAdvertiser", Message: "none"})
	want[string(GPUConflict)] = `False NoOtherAdvertiser "none" heartbeat 03:07:05 transition 03:07:05`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after a restart (-want +got):\n%s", diff)
	}
}

// TestPublisherLaggingCache: what was just written is not written again because the cache does not show it.
func TestPublisherLaggingCache(t *testing.T) {
	old := newNode(nil)
	c := fake.NewClientset(old)
	// The fake does not count versions.
	version := 1
	c.PrependReactor("patch", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
		_, node, err := clienttesting.ObjectReaction(c.Tracker())(a)
		if n, ok := node.(*corev1.Node); ok && err == nil {
			version++
			n = n.DeepCopy()
			n.ResourceVersion = fmt.Sprint(version)
			return true, n, nil
		}
		return true, node, err
	})
	cached := old
	p := NewPublisher(c, "n1", func(string) (*corev1.Node, error) { return cached, nil }, clocktesting.NewFakeClock(start))
	p.SetPlace("f1", "m1")
	if err := p.Step(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.SetCondition(Condition{Type: FabricReady, Status: corev1.ConditionTrue, Reason: "Reachable"})
	for range 2 {
		if err := p.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if w := writes(c); len(w) != 2 {
		t.Errorf("writes %v, want one of the label and one of the condition", w)
	}
	// Somebody removed both: they are put back.
	cached = newNode(nil)
	cached.ResourceVersion = "77"
	if _, err := c.CoreV1().Nodes().Update(t.Context(), newNode(nil), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := p.Step(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w := writes(c); len(w) != 2 {
		t.Errorf("writes %v after both were removed, want 2", w)
	}
}

func TestPublisherRunTriesAgain(t *testing.T) {
	c := fake.NewClientset(newNode(nil))
	refuse := make(chan error, 1)
	refuse <- errors.New("the server is on fire")
	done := make(chan struct{})
	c.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		select {
		case err := <-refuse:
			return true, nil, err
		default:
			close(done)
			return false, nil, nil
		}
	})
	clk := clocktesting.NewFakeClock(start)
	p := NewPublisher(c, "n1", live(t, c), clk)
	p.SetPlace("f1", "m1")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.Run(ctx)
	}()
	for waiting := true; waiting; {
		select {
		case <-done:
			waiting = false
		default:
			clk.Step(time.Second)
		}
	}
	cancel()
	<-ended
}

func TestLongMessage(t *testing.T) {
	p := NewPublisher(nil, "n1", nil, nil)
	p.SetCondition(Condition{Type: FabricReady, Message: strings.Repeat("ä", 5000)})
	m := p.Conditions()[0].Message
	if len(m) > longestMessage || !strings.HasSuffix(m, "ä...") {
		t.Errorf("message of %d bytes ends in %q", len(m), m[len(m)-8:])
	}
}

func TestSetLabels(t *testing.T) {
	a, b := device.Model("a100"), device.Model("h100")
	for _, tt := range []struct {
		name string
		have map[string]string
		want pool.NodeLabels
		// patch is the change, "" for none.
		patch string
	}{
		{"nothing to do", map[string]string{a.AttachableLabel(): "true"}, pool.NodeLabels{Attachable: map[device.Model]bool{a: true, b: false}}, ""},
		{
			"on and off",
			map[string]string{a.AttachableLabel(): "true", "x": "y"},
			pool.NodeLabels{Attachable: map[device.Model]bool{a: false, b: true}, Idle: true},
			`{"gpu.cohdi.io/a100.attachable":null,"gpu.cohdi.io/h100.attachable":"true","gpu.cohdi.io/idle":"true"}`,
		},
		{
			"a model that is no more",
			map[string]string{"gpu.cohdi.io/old.attachable": "true", device.LabelFabric: "f1"},
			pool.NodeLabels{},
			`{"gpu.cohdi.io/old.attachable":null}`,
		},
		{"another value", map[string]string{device.LabelIdle: "maybe"}, pool.NodeLabels{Idle: true}, `{"gpu.cohdi.io/idle":"true"}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := fake.NewClientset(newNode(tt.have))
			tt.want.Node = "n1"
			l := NewLabels(c, live(t, c))
			if err := l.SetLabels(t.Context(), tt.want); err != nil {
				t.Fatal(err)
			}
			var patches []string
			for _, action := range c.Actions() {
				if p, ok := action.(clienttesting.PatchAction); ok && p.GetPatchType() == types.MergePatchType {
					var body struct {
						Metadata struct {
							UID    string          `json:"uid"`
							Labels json.RawMessage `json:"labels"`
						} `json:"metadata"`
					}
					if err := json.Unmarshal(p.GetPatch(), &body); err != nil || body.Metadata.UID != "uid-1" {
						t.Errorf("patch %s: %v", p.GetPatch(), err)
					}
					patches = append(patches, string(body.Metadata.Labels))
				}
			}
			if got := strings.Join(patches, "\n"); got != tt.patch {
				t.Errorf("patch %s, want %s", got, tt.patch)
			}
			node, err := live(t, c)("n1")
			if err != nil {
				t.Fatal(err)
			}
			attachable, idle := LeaderLabels(node, []device.Model{a, b})
			wantOn := map[device.Model]bool{a: tt.want.Attachable[a], b: tt.want.Attachable[b]}
			if diff := cmp.Diff(wantOn, attachable); diff != "" || idle != tt.want.Idle {
				t.Errorf("read back: idle %v, attachable (-want +got):\n%s", idle, diff)
			}
		})
	}
}

func TestOnMachine(t *testing.T) {
	here, there := newNode(map[string]string{device.LabelMachine: "m1"}), newNode(map[string]string{device.LabelMachine: "m2"})
	there.Name = "n2"
	c := fake.NewClientset(here, there)
	for self, want := range map[string]string{"n1": "", "n2": "n1"} {
		if got, err := OnMachine(t.Context(), c, "m1", self); err != nil || got != want {
			t.Errorf("beside %s: %q, %v; want %q", self, got, err, want)
		}
	}
	c.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("on fire") })
	if got, err := OnMachine(t.Context(), c, "m1", "n1"); err == nil || !strings.Contains(err.Error(), "m1") {
		t.Errorf("without an API server: %q, %v", got, err)
	}
}
