// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// recorder writes down what is recorded.
type recorder struct {
	lines []string
	about []runtime.Object
}

func (r *recorder) Eventf(regarding, related runtime.Object, eventtype, reason, action, note string, args ...any) {
	r.about = append(r.about, related)
	on, ok := regarding.(*corev1.ObjectReference)
	if !ok {
		r.lines = append(r.lines, fmt.Sprintf("an event on a %T", regarding))
		return
	}
	name := on.Name
	if on.Namespace != "" {
		name = on.Namespace + "/" + name
	}
	r.lines = append(r.lines, fmt.Sprintf("%s %s: %s %s %s: %s", on.Kind, name, eventtype, action, reason, fmt.Sprintf(note, args...)))
}

// TestEventsOfUnits: events that the API machinery must not count as one are about different objects.
func TestEventsOfUnits(t *testing.T) {
	held := func(unit device.Unit, version, by string) device.Lease {
		return device.Lease{Fabric: "f1", Unit: unit, Node: "n1", Phase: device.Attached, HeldBy: by, ObjectUID: "uid-" + string(unit), Version: version}
	}
	r := &recorder{}
	e := NewEvents(r, "n1", "node-uid")
	e.Stored(held("a100-0", "1", ""), held("a100-0", "2", "python3 (pid 7)"))
	e.Stored(held("a100-0", "2", "python3 (pid 7)"), held("a100-0", "3", "python3 (pid 8)"))
	e.Stored(held("a100-1", "4", ""), held("a100-1", "5", "python3 (pid 7)"))
	seen := map[corev1.ObjectReference]bool{}
	for _, about := range r.about {
		ref, ok := about.(*corev1.ObjectReference)
		if !ok || ref.Kind != "Lease" || ref.Namespace != device.LeaseNamespace {
			t.Fatalf("an event is about %+v, want a device lease", about)
		}
		seen[*ref] = true
	}
	if len(r.about) != 3 || len(seen) != 3 {
		t.Errorf("%d events about %d objects, want 3 about 3", len(r.about), len(seen))
	}
}

func TestStored(t *testing.T) {
	claim := device.Attempt{Namespace: "ns", Name: "c1", UID: "u", AllocatedAt: "t", Node: "n1", Pool: "fabric-f1", Entry: "a100-0"}
	base := device.Lease{Fabric: "f1", Unit: "a100-0", Model: "a100", Node: "n1", Phase: device.Assigned, Attempt: claim}
	with := func(change func(*device.Lease)) device.Lease {
		l := base
		change(&l)
		return l
	}
	attached := with(func(l *device.Lease) {
		l.Phase, l.PCI, l.UUID = device.Attached, device.PCIAddress{Bus: 0x3b}, "GPU-1"
	})
	idle := attached
	idle.Attempt, idle.IdleSince = device.Attempt{}, time.Unix(1, 0)
	failed := with(func(l *device.Lease) {
		l.Phase, l.Failure = device.Failed, device.Failure{Reason: "NoCapacity", Message: "the manager says none is free"}
	})
	for _, tt := range []struct {
		name          string
		before, after device.Lease
		want          []string
	}{
		{"nothing", base, base, nil},
		{"attaching", base, with(func(l *device.Lease) { l.Phase = device.Attaching }), []string{
			"ResourceClaim ns/c1: Normal Attach GPUAttaching: attaching a GPU (a100, unit a100-0) to node n1",
		}},
		{"attached", with(func(l *device.Lease) { l.Phase = device.Attaching }), attached, []string{
			"ResourceClaim ns/c1: Normal Attach GPUAttached: GPU a100-0 (a100) is attached at 0000:3b:00.0 as GPU-1 on node n1",
			"Node n1: Normal Attach GPUAttached: GPU a100-0 (a100) is attached at 0000:3b:00.0 as GPU-1 for claim ns/c1",
		}},
		{"failed", with(func(l *device.Lease) { l.Phase = device.Attaching }), failed, []string{
			"ResourceClaim ns/c1: Warning Attach GPUAttachFailed: attach of GPU a100-0 (a100) to node n1: NoCapacity: the manager says none is free",
			"Node n1: Warning Observe GPUFailed: GPU a100-0 (a100), attaching: NoCapacity: the manager says none is free",
		}},
		{"idle", attached, idle, []string{"Node n1: Normal Observe GPUIdle: GPU a100-0 (a100) is idle: any Pod on this node can have it at once"}},
		{"lost in use", attached, func() device.Lease {
			l := attached
			l.Phase, l.Failure = device.Failed, device.Failure{Reason: "Vanished", Message: "the link is down"}
			return l
		}(), []string{
			"Node n1: Warning Observe GPULost: GPU a100-0 (a100) was lost on node n1 while the claim had it: Vanished: the link is down",
			"ResourceClaim ns/c1: Warning Observe GPULost: GPU a100-0 (a100) was lost on node n1 while the claim had it: Vanished: the link is down",
		}},
		{"failed, and it can go on only with a person's help", func() device.Lease {
			l := attached
			l.Phase, l.Attempt, l.Failure = device.Failed, device.Attempt{}, device.Failure{Reason: "NoIdentity", Message: "no UUID"}
			return l
		}(), func() device.Lease {
			l := attached
			l.Phase, l.Attempt, l.Failure = device.Failed, device.Attempt{}, device.Failure{Reason: "NoIdentity", Message: "a person takes it away"}
			return l
		}(), []string{
			"Node n1: Warning Observe GPUFailed: GPU a100-0 (a100): NoIdentity: a person takes it away",
		}},
		{"still idle", idle, idle, nil},
		{"releasing", idle, func() device.Lease { l := idle; l.Phase = device.Releasing; return l }(), []string{
			"Node n1: Normal Release GPUReleasing: GPU a100-0 (a100) goes back to the pool",
		}},
		{"wanted again", func() device.Lease { l := idle; l.Phase = device.Releasing; return l }(), attached, []string{
			"Node n1: Normal Observe GPUAttached: GPU a100-0 (a100) stays: it is wanted here again",
		}},
		{"held", attached, func() device.Lease { l := attached; l.Attempt, l.HeldBy = device.Attempt{}, "dcgm (pid 7)"; return l }(), []string{
			"Node n1: Warning Observe GPUHeld: GPU a100-0 (a100) has no claim but is held open by dcgm (pid 7)",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &recorder{}
			NewEvents(r, "n1", "uid-1").Stored(tt.before, tt.after)
			if diff := cmp.Diff(tt.want, r.lines); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOtherEvents(t *testing.T) {
	claim := device.Attempt{Namespace: "ns", Name: "c1", UID: "u"}
	l := device.Lease{Fabric: "f1", Unit: "a100-0", Model: "a100", Node: "n1", Attempt: claim}
	pods := []Pod{{"ns", "p1", "pu"}}
	r := &recorder{}
	e := NewEvents(r, "n1", "uid-1")
	e.Released(l)
	e.Released(device.Lease{Fabric: "f1", Unit: "a100-1", Model: "a100", Node: "n2", NodeUID: "uid-2"})
	e.Deleted(l)
	e.Refused([]device.Attempt{claim}, pods, "NoCapacity", strings.Repeat("x", 2000))
	e.Onlooker(device.Attempt{Namespace: "ns", Name: "watch", UID: "wu", Entry: "a100-0"}, pods)
	e.Conflict(nil)
	e.Conflict([]Advertiser{{Name: "nvidia.com/gpu", Devices: 8}})
	e.Foreign("f1", device.OnFabric{ID: "res-1", Model: "NVIDIA-A100", UUID: "GPU-1"}, 0)
	e.Foreign("f1", device.OnFabric{ID: "res-2", Model: "NVIDIA-A100"}, 10*time.Minute)
	e.Unhealthy("a100-0", "GPU-1", "XID 79")
	e.ConfigFaulty(errors.Join(errors.New("config.yaml:3: fabrix: is no field"), errors.New("config.yaml:4: id: is missing")))
	e.ConfigInOrder()
	e.Lacking("n2", "uid-2", "a100", "node n2 should have 2 units")
	e.Lacking("n2", "uid-2", "a100", "")
	e.CheckpointDamaged("/var/x.damaged-1", errors.New("unexpected end"))
	e.Unprepared("ns", "c1", "u", []device.Unit{"a100-0", "a100-1"})
	long := "NoCapacity: " + strings.Repeat("x", longestNote-len("NoCapacity: ")-3) + "..."
	const onlooks = `device a100-0, which the claim was given with admin access, has to be attached first, and nothing is attached for an administrator; ` +
		`let the claim select what is attached: device.attributes["gpu.cohdi.io"].uuid != ""`
	want := []string{
		"Node n1: Normal Release GPUReleasing: GPU a100-0 (a100) goes back to the pool",
		"Node n2: Normal Release GPUReleasing: GPU a100-1 (a100) goes back to the pool",
		"Node n1: Normal Release GPUReturned: GPU a100-0 (a100) is back in the pool of fabric f1",
		"ResourceClaim ns/c1: Warning Attach GPURefused: " + long,
		"Pod ns/p1: Warning Attach GPURefused: " + long,
		"ResourceClaim ns/watch: Warning Attach GPUAdminAccess: " + onlooks,
		"Pod ns/p1: Warning Attach GPUAdminAccess: " + onlooks,
		"Node n1: Warning Observe GPUConflict: " + ConflictCondition([]Advertiser{{Name: "nvidia.com/gpu", Devices: 8}}).Message,
		"Node n1: Warning Observe GPUForeign: fabric f1 lists device res-1 (NVIDIA-A100, GPU-1) on this node's machine, and no device lease says why: another tenant or a person attached it; it is neither handed out nor detached",
		"Node n1: Warning Observe GPUForeign: fabric f1 lists device res-2 (NVIDIA-A100, of unknown identity) on this node's machine, and no device lease says why: another tenant or a person attached it; once it has been there for 10m0s it is taken in as an idle GPU, if its model is configured, its identity is known and it is not critical",
		"Node n1: Warning Observe GPUUnhealthy: GPU a100-0 (GPU-1) is unhealthy: XID 79",
		"Node n1: Warning Observe ConfigFaulty: the configuration has changed and is faulty; this node's agent goes on with the last good one: config.yaml:3: fabrix: is no field; config.yaml:4: id: is missing",
		"Node n1: Normal Observe ConfigInOrder: the configuration is in order again, and this node's agent goes by it",
		"Node n2: Warning Observe GPUMinimumLacking: node n2 should have 2 units",
		"Node n2: Normal Observe GPUMinimumMet: node n2 no longer lacks units of model a100",
		"Node n1: Warning Observe CheckpointDamaged: the kubelet plugin's checkpoint could not be read (unexpected end); it is kept as /var/x.damaged-1 and rebuilt from device leases and claims",
		"Node n1: Warning Release ClaimUnprepared: claim ns/c1 is no more and the kubelet did not say so; it was unprepared, and its GPUs are let go: a100-0, a100-1",
	}
	if diff := cmp.Diff(want, r.lines); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestApart: events that the API machinery must not count as one are about different objects.
func TestApart(t *testing.T) {
	for what, say := range map[string]func(*Events){
		"foreign devices": func(e *Events) {
			e.Foreign("f1", device.OnFabric{ID: "res-1"}, 0)
			e.Foreign("f1", device.OnFabric{ID: "res-2"}, 0)
		},
		"what a node lacks": func(e *Events) {
			e.Lacking("n1", "uid-1", "a100", "no more are free")
			e.Lacking("n1", "uid-1", "a100", "its agent is away")
		},
		"faults of the configuration": func(e *Events) {
			e.ConfigFaulty(errors.New("config.yaml:3: fabrix: is no field"))
			e.ConfigFaulty(errors.New("config.yaml:4: id: is missing"))
		},
	} {
		r := &recorder{}
		say(NewEvents(r, "n1", "uid-1"))
		if len(r.about) != 2 || cmp.Equal(r.about[0], r.about[1]) {
			t.Errorf("the events of two %s are about %v", what, r.about)
		}
	}
}

// TestStartRecorder: an event reaches the API server, on the right object.
func TestStartRecorder(t *testing.T) {
	c := fake.NewClientset()
	sent := make(chan *eventsv1.Event, 1)
	c.PrependReactor("create", "events", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if create, ok := a.(clienttesting.CreateAction); ok {
			if ev, ok := create.GetObject().(*eventsv1.Event); ok {
				sent <- ev
				return true, ev, nil
			}
		}
		return false, nil, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	rec, err := StartRecorder(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	NewEvents(rec, "n1", "uid-1").Refused([]device.Attempt{{Namespace: "ns", Name: "c1", UID: "u"}}, nil, "NoCapacity", "100% used")
	ev := <-sent
	if ev.Regarding.Kind != "ResourceClaim" || ev.Regarding.APIVersion != "resource.k8s.io/v1" || ev.Namespace != "ns" ||
		ev.Related.Name != "n1" || ev.Note != "NoCapacity: 100% used" || ev.ReportingController != device.Driver || ev.Action == "" {
		t.Errorf("event %+v", ev)
	}
}
