// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// entries are the two entries of a unit.
func entries(t *testing.T, o Offers, u device.Unit) (ready, onCall Offer) {
	t.Helper()
	find := func(in [][]Offer, name string) Offer {
		for _, slice := range in {
			for _, offer := range slice {
				if offer.Name == name {
					return offer
				}
			}
		}
		t.Fatalf("no entry %s", name)
		return Offer{}
	}
	return find(o.Ready, u.ReadyEntry()), find(o.OnCall, u.Entry())
}

func TestTaints(t *testing.T) {
	const here, nowhere = "n1", Nowhere
	for _, tc := range []struct {
		situation     string
		mods          []mod
		ready, onCall string // effect and why
		node          string
	}{
		{"free", nil, "NoSchedule NotAttached", "", nowhere},
		{"free, allocated", with(demand("c", "n2", "a100-0")), "NoSchedule NotAttached", "", nowhere},
		{"none left", with(func(w *World) { w.free("a100", 0) }), "NoSchedule NotAttached", "NoSchedule NoCapacity", nowhere},
		{"count not read, published usable", with(func(w *World) { delete(w.Inventory.Free, "a100") }), "NoSchedule NotAttached", "", nowhere},
		{"count not read, published tainted", with(func(w *World) { delete(w.Inventory.Free, "a100") }, tainted("a100-0", time.Hour)), "NoSchedule NotAttached", "NoSchedule NoCapacity", nowhere},
		{"model taken out of the configuration", with(unconfigured), "NoSchedule NotAttached", "NoSchedule UnknownModel", nowhere},
		{"attaching", with(leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0")), "NoSchedule NotAttached", "", nowhere},
		{"attaching, agent away", with(leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0"), node("n1", agentAway(time.Hour))), "NoSchedule NotAttached", "", nowhere},
		{"attaching, the node's machine is another now", with(leased("a100-0", device.Attaching, serving("c", "a100-0"), otherMachine), demand("c", "n1", "a100-0")), "NoSchedule NotAttached", "NoSchedule AgentAway", nowhere},
		{"attaching, claim gone", with(leased("a100-0", device.Attaching)), "NoSchedule NotAttached", "NoSchedule NotFreeYet", nowhere},
		{"in use", with(leased("a100-0", device.Attached, serving("c", "a100-0")), demand("c", "n1", "a100-0", toldAttached)), "NoSchedule InUse", "", here},
		{"claim gone, still prepared", with(leased("a100-0", device.Attached)), "NoSchedule InUse", "NoSchedule NotFreeYet", here},
		{"idle", with(leased("a100-0", device.Attached, idle(time.Minute))), "", "", here},
		{"idle, prepared just now", with(leased("a100-0", device.Attached, idle(time.Minute), noted)), "NoSchedule InUse", "NoSchedule NotFreeYet", here},
		{"idle, lease deleted by a person", with(leased("a100-0", device.Attached, idle(time.Minute), deleting)), "NoSchedule InUse", "NoSchedule Releasing", here},
		{"idle, agent restarts", with(leased("a100-0", device.Attached, idle(time.Minute)), node("n1", agentAway(time.Minute))), "", "", here},
		{"idle, agent away", with(leased("a100-0", device.Attached, idle(time.Minute)), node("n1", agentAway(time.Hour))), "NoSchedule AgentAway", "NoSchedule AgentAway", here},
		{"idle, Node gone", with(leased("a100-0", device.Attached, idle(time.Minute)), noNode("n1")), "NoSchedule AgentAway", "NoSchedule AgentAway", here},
		{"idle on a machine that had the node's name", with(leased("a100-0", device.Attached, idle(time.Minute), otherMachine)), "NoSchedule AgentAway", "NoSchedule AgentAway", here},
		{"idle, the Node was made anew on the same machine", with(leased("a100-0", device.Attached, idle(time.Minute), otherUID)), "NoSchedule AgentAway", "", here},
		{"cooled down", with(leased("a100-0", device.Attached, idle(time.Hour))), "NoSchedule Releasing", "", here},
		{"on its way back", with(leased("a100-0", device.Releasing)), "NoSchedule Releasing", "", here},
		{"on its way back, held", with(leased("a100-0", device.Releasing, func(l *device.Lease) { l.HeldBy = "python (7)" })), "NoSchedule Releasing", "NoSchedule NotFreeYet", here},
		{"on its way back for long", with(leased("a100-0", device.Releasing, tooLong)), "NoSchedule Releasing", "NoSchedule NotFreeYet", here},
		{"held on its way back, and given to a claim", with(leased("a100-0", device.Releasing, held, serving("c", "a100-0")), demand("c", "n1", "a100-0")), "NoSchedule InUse", "NoSchedule NotFreeYet", here},
		{"on its way back, agent away", with(leased("a100-0", device.Releasing), node("n1", agentAway(time.Hour))), "NoSchedule Releasing", "NoSchedule AgentAway", here},
		{"failed", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit))), "NoSchedule Rejected", "NoSchedule Rejected", nowhere},
		{"failed, its claim waits", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit), serving("c", "a100-0")), demand("c", "n1", "a100-0")), "NoSchedule Rejected", "NoSchedule Rejected", nowhere},
		{"vanished under a bound Pod", with(leased("a100-0", device.Failed, failed("Vanished", device.BlameUnit), serving("c", "a100-0")), demand("c", "n1", "a100-0", toldAttached)), "NoSchedule Vanished", "NoExecute Vanished", nowhere},
		{"vanished under a Pod bound by the ready entry", with(leased("a100-0", device.Failed, failed("Vanished", device.BlameUnit), serving("c", "a100-0-ready")), demand("c", "n1", "a100-0-ready")), "NoExecute Vanished", "NoSchedule Vanished", nowhere},
		{"vanished just before a Pod was bound by the ready entry", with(leased("a100-0", device.Failed, failed("Vanished", device.BlameUnit)), demand("c", "n1", "a100-0-ready")), "NoExecute Vanished", "NoSchedule Vanished", nowhere},
		{"vanished under a Pod bound by the ready entry before the Node was made anew", with(leased("a100-0", device.Failed, failed("Vanished", device.BlameUnit), otherUID), demand("c", "n1", "a100-0-ready")), "NoExecute Vanished", "NoSchedule Vanished", nowhere},
		{"attached again in vain for a Pod bound by the ready entry", with(leased("a100-0", device.Failed, failed("NoCapacity", device.BlameModel), serving("c", "a100-0-ready")), demand("c", "n1", "a100-0-ready")), "NoExecute NoCapacity", "NoSchedule NoCapacity", nowhere},
		{"a later release's phase", with(leased("a100-0", "Dreaming")), "NoSchedule InUse", "NoSchedule NotFreeYet", nowhere},
		{"vanished under a bound Pod, model taken out of the configuration", with(unconfigured, leased("a100-0", device.Failed, failed("Vanished", device.BlameUnit), serving("c", "a100-0")), demand("c", "n1", "a100-0", toldAttached)), "NoSchedule Vanished", "NoExecute Vanished", nowhere},
		{"kept, coming", with(least(1), leased("a100-0", device.Attaching, kept)), "NoSchedule NotAttached", "NoSchedule Kept", nowhere},
		{"kept, idle", with(least(1), leased("a100-0", device.Attached, kept, idle(time.Minute))), "", "NoSchedule Kept", here},
		{"kept, idle for long", with(least(1), leased("a100-0", device.Attached, kept, idle(time.Hour))), "", "NoSchedule Kept", here},
		{"kept, in use", with(least(1), leased("a100-0", device.Attached, kept, serving("c", "a100-0-ready")), demand("c", "n1", "a100-0-ready")), "NoSchedule InUse", "NoSchedule Kept", here},
		{"kept, agent away", with(least(1), leased("a100-0", device.Attached, kept, idle(time.Minute)), node("n1", agentAway(time.Hour))), "NoSchedule AgentAway", "NoSchedule Kept", here},
		{"kept, lease deleted by a person", with(least(1), leased("a100-0", device.Attached, kept, idle(time.Minute), deleting)), "NoSchedule InUse", "NoSchedule Releasing", here},
		{"kept on a machine that had the node's name", with(least(1), leased("a100-0", device.Attached, kept, idle(time.Minute), otherMachine)), "NoSchedule AgentAway", "NoSchedule AgentAway", here},
		{"kept, the Node was made anew on the same machine", with(least(1), leased("a100-0", device.Attached, kept, idle(time.Hour), otherUID)), "NoSchedule Releasing", "", here},
		{"idle, and the minimum is held by others", with(least(1), leased("a100-0", device.Attached, idle(time.Minute)), leased("a100-1", device.Attached, kept, idle(time.Minute))), "", "", here},
		{"idle, attached for a claim, the node has just its minimum", with(least(1), leased("a100-0", device.Attached, idle(time.Hour))), "", "NoSchedule Kept", here},
		{"kept, the minimum is gone from the configuration", with(leased("a100-0", device.Attached, kept, idle(time.Hour))), "NoSchedule Releasing", "", here},
		{"kept, the node left the fabric", with(least(1), leased("a100-0", device.Attached, kept, idle(time.Minute)), node("n1", stranger)), "NoSchedule AgentAway", "NoSchedule AgentAway", here},
	} {
		t.Run(tc.situation, func(t *testing.T) {
			w := calm()
			w.with(tc.mods...)
			ready, onCall := entries(t, Decide(w).Offers, "a100-0")
			word := func(o Offer) string {
				if o.Effect == NoTaint {
					return o.Why
				}
				return string(o.Effect) + " " + o.Why
			}
			if diff := cmp.Diff([]string{tc.ready, tc.onCall, tc.node}, []string{word(ready), word(onCall), ready.Node}); diff != "" {
				t.Errorf("ready, on call, node of ready (-want +got):\n%s", diff)
			}
			if onCall.Node != "" || onCall.Ready || !ready.Ready {
				t.Errorf("ready %+v, on call %+v", ready, onCall)
			}
		})
	}
}

// TestLayout: unit i has its entries in slice i/64 of each kind, in pools of any size.
func TestLayout(t *testing.T) {
	for _, tc := range []struct {
		units int
		sizes []int
	}{{1, []int{1}}, {63, []int{63}}, {64, []int{64}}, {65, []int{64, 1}}, {128, []int{64, 64}}, {200, []int{64, 64, 64, 8}}} {
		w := calm()
		w.Models, w.Published = w.Models[:1], Published{}
		w.Inventory.Free = map[device.Model]Supply{"a100": {Count: tc.units}}
		o := Decide(w).Offers
		if len(o.Units) != tc.units {
			t.Fatalf("%d units: %d listed", tc.units, len(o.Units))
		}
		checkLayout(t, o)
		var ready, onCall []int
		for i := range o.Ready {
			ready, onCall = append(ready, len(o.Ready[i])), append(onCall, len(o.OnCall[i]))
		}
		if diff := cmp.Diff([][]int{tc.sizes, tc.sizes}, [][]int{ready, onCall}); diff != "" {
			t.Errorf("%d units, sizes of slices (-want +got):\n%s", tc.units, diff)
		}
	}
}

// checkLayout: each unit has exactly its two entries, each in its slice, each with one unit and the same
// names of attributes.
func checkLayout(t *testing.T, o Offers) {
	t.Helper()
	var keys []string
	seen := map[string]bool{}
	check := func(slice int, offer Offer, name string, ready bool) {
		if offer.Name != name || seen[name] || offer.Ready != ready || len(offer.Units) != 1 {
			t.Errorf("slice %d: entry %+v, want %s, ready %v", slice, offer, name, ready)
		}
		seen[name] = true
		got := slices.Sorted(maps.Keys(offer.Attributes))
		if keys == nil {
			keys = got
		}
		if !slices.Equal(keys, got) {
			t.Errorf("entry %s has attributes %v, others %v", name, got, keys)
		}
		if (offer.Effect == NoTaint) != (offer.Why == "") {
			t.Errorf("entry %s: effect %q, why %q", name, offer.Effect, offer.Why)
		}
	}
	for i, u := range o.Units {
		s := i / SliceDevices
		if len(o.Ready) <= s || len(o.OnCall) <= s {
			t.Fatalf("unit %d of %d: %d ready slices, %d on call", i, len(o.Units), len(o.Ready), len(o.OnCall))
		}
		check(s, o.Ready[s][i%SliceDevices], u.ReadyEntry(), true)
		at := slices.IndexFunc(o.OnCall[s], func(offer Offer) bool { return offer.Name == u.Entry() })
		if at < 0 {
			t.Fatalf("no entry %s in slice %d", u, s)
		}
		check(s, o.OnCall[s][at], u.Entry(), false)
	}
	if len(seen) != 2*len(o.Units) {
		t.Errorf("%d entries of %d units", len(seen), len(o.Units))
	}
}

// TestOrder: what is idle on some node, or on its way back, is tried last, since first fit would take it from there, or wait.
func TestOrder(t *testing.T) {
	w := calm()
	w.with(leased("a100-0", device.Attached, idle(time.Minute)), leased("a100-1", device.Releasing), leased("a100-2", device.Attached, serving("c", "a100-2")), demand("c", "n1", "a100-2", toldAttached))
	var got []string
	for _, offer := range Decide(w).Offers.OnCall[0] {
		got = append(got, offer.Name)
	}
	if diff := cmp.Diff([]string{"a100-2", "a100-3", "h100-0", "h100-1", "a100-0", "a100-1"}, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestAttributes(t *testing.T) {
	w := calm()
	w.with(leased("a100-0", device.Attached, idle(time.Minute)))
	o := Decide(w).Offers
	checkLayout(t, o)
	ready, onCall := entries(t, o, "a100-0")
	want := map[string]string{
		"fabric": "0", "model": "a100", "productName": "NVIDIA A100", "memory": "80Gi",
		"uuid": "GPU-00000000-0000-4000-8000-000000000001", "pciBusID": "0000:3b:00.0",
	}
	if diff := cmp.Diff(want, ready.Attributes); diff != "" {
		t.Errorf("ready (-want +got):\n%s", diff)
	}
	want["uuid"], want["pciBusID"] = "", ""
	if diff := cmp.Diff(want, onCall.Attributes); diff != "" {
		t.Errorf("on call (-want +got):\n%s", diff)
	}
	_, h100 := entries(t, o, "h100-0")
	if got, ok := h100.Attributes["memory"]; !ok || got != "" {
		t.Errorf("memory of h100-0 = %q, %v, want an empty one", got, ok)
	}
}

func TestLabels(t *testing.T) {
	nodeFailed := leased("a100-0", device.Failed, failed("NotUsable", device.BlameNode))
	for _, tc := range []struct {
		situation  string
		mods       []mod
		a100, h100 bool // attachable on n1
		idle       bool
	}{
		{"calm", nil, true, true, false},
		{"agent restarts", with(node("n1", agentAway(time.Minute))), true, true, false},
		{"agent away", with(node("n1", agentAway(time.Hour))), false, false, false},
		{"agent cannot reach the manager", with(node("n1", fabricDown)), false, false, false},
		{"no member", with(node("n1", stranger)), false, false, false},
		{"machine unknown", with(node("n1", noMachine)), false, false, false},
		{"one of two", with(most(2), leased("a100-0", device.Attached, idle(time.Minute))), true, true, true},
		{"full", with(most(1), leased("a100-0", device.Attached, serving("c", "a100-0"))), false, true, false},
		{"full by a machine that had the node's name", with(most(1), leased("a100-0", device.Attached, idle(time.Minute), otherMachine)), true, true, false},
		{"something spoke against the node", with(nodeFailed), false, true, false},
		{"something spoke against the node, long ago", with(nodeFailed, func(w *World) { w.Leases[0].Failure.RetryAfter = ago(time.Second) }), true, true, false},
		{"one unit failed", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit))), true, true, false},
		{"a second unit failed", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit)), leased("a100-1", device.Failed, failed("Rejected", device.BlameUnit))), false, false, false},
		{"a second unit failed, of another model", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit)), leased("h100-0", device.Failed, ofH100, failed("Rejected", device.BlameUnit))), false, false, false},
		{"a second unit failed, long ago", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit)), leased("a100-1", device.Failed, failed("Rejected", device.BlameUnit), func(l *device.Lease) { l.Failure.RetryAfter = ago(time.Second) })), true, true, false},
		{"full, but what failed holds nothing", with(most(1), leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit))), true, true, false},
		{"full by a device in quarantine", with(most(1), leased("a100-0", device.Failed, failed("DeviceCritical", device.BlameUnit), became)), false, true, false},
		{"somebody else advertises its GPUs", with(node("n1", conflict)), false, false, false},
		{"all slots taken", with(slots(1), leased("a100-0", device.Attached, serving("c", "a100-0"))), false, false, false},
		{"a slot left", with(slots(2), leased("a100-0", device.Attached, serving("c", "a100-0"))), true, true, false},
		{"the node has fewer slots than others", with(slots(2), slotsOf("n1", 1), leased("a100-0", device.Attached, serving("c", "a100-0"))), false, false, false},
		{"the node has more slots than others", with(slots(1), slotsOf("n1", 2), leased("a100-0", device.Attached, serving("c", "a100-0"))), true, true, false},
		{"a model that excludes another is there", with(exclude(0, "h100"), leased("a100-0", device.Attaching, serving("c", "a100-0"))), true, false, false},
		{"a model that another excludes is there", with(exclude(1, "a100"), leased("a100-0", device.Attaching, serving("c", "a100-0"))), true, false, false},
		{"a model that excludes another failed and holds nothing", with(exclude(0, "h100"), leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit))), true, true, false},
		{"a model that excludes another is on a machine that had the node's name", with(exclude(0, "h100"), leased("a100-0", device.Attached, idle(time.Minute), otherMachine)), true, true, false},
		{"a device in doubt, known by its arrival alone", with(arrival, leased("a100-0", device.Failed, failed("Ambiguous", device.BlameUnit), became, askedFor)), false, false, false},
		{"a device in doubt, that the manager names", with(leased("a100-0", device.Failed, failed("Ambiguous", device.BlameUnit), became, askedFor)), true, true, false},
		{"a device in quarantine, known by its arrival alone", with(arrival, leased("a100-0", device.Failed, failed("DeviceCritical", device.BlameUnit), became, askedFor, func(l *device.Lease) { l.UUID = "GPU-1" })), true, true, false},
		{"none of the model left", with(leased("a100-0", device.Failed, failed("NoCapacity", device.BlameModel))), true, true, false},
		{"idle", with(leased("a100-0", device.Attached, idle(time.Minute))), true, true, true},
		{"idle for the cool-down", with(leased("a100-0", device.Attached, idle(24*time.Hour))), true, true, false},
		{"idle, and somebody else advertises the GPUs", with(leased("a100-0", device.Attached, idle(time.Minute)), node("n1", func(n *Node) { n.Conflict = true })), false, false, false},
		{"idle, agent away", with(leased("a100-0", device.Attached, idle(time.Minute)), node("n1", agentAway(time.Hour))), false, false, false},
		{"in use", with(leased("a100-0", device.Attached, serving("c", "a100-0"))), true, true, false},
	} {
		w := calm()
		w.with(tc.mods...)
		want := []NodeLabels{
			{Node: "n1", Attachable: map[device.Model]bool{"a100": tc.a100, "h100": tc.h100}, Idle: tc.idle},
			{Node: "n2", Attachable: map[device.Model]bool{"a100": true, "h100": true}},
		}
		if diff := cmp.Diff(want, Decide(w).Labels); diff != "" {
			t.Errorf("%s: labels (-want +got):\n%s", tc.situation, diff)
		}
	}
}

// usable lists the units whose on-call entry may be chosen.
func usable(o Offers) []string {
	var names []string
	for _, slice := range o.OnCall {
		for _, offer := range slice {
			if offer.Effect == NoTaint {
				names = append(names, offer.Name)
			}
		}
	}
	slices.Sort(names)
	return names
}

func TestCensus(t *testing.T) {
	only := func(n int) mod {
		return func(w *World) {
			w.Models, w.Published = w.Models[:1], Published{Effects: map[string]Effect{}}
			w.Inventory = Inventory{Free: map[device.Model]Supply{"a100": {Count: n}}, Leased: map[device.Unit]string{}}
		}
	}
	published := func(n int) mod {
		return func(w *World) {
			for i := range n {
				w.Published.Units = append(w.Published.Units, device.NumberedUnit("a100", i))
			}
		}
	}
	free := func(n int) mod { return func(w *World) { w.free("a100", n) } }
	uncounted := func(u device.Unit) mod { return func(w *World) { delete(w.Inventory.Leased, u) } }
	counted := func(u device.Unit, id string) mod { return func(w *World) { w.Inventory.Leased[u] = id } }
	asked := func(l *device.Lease) { l.AskedAt = ago(time.Second) }
	for _, tc := range []struct {
		situation string
		mods      []mod
		units     int
		usable    []string
	}{
		{"first start", with(only(2)), 2, []string{"a100-0", "a100-1"}},
		{"first start, count not read", with(only(0), func(w *World) { w.Inventory.Free = nil }), 0, nil},
		{"first start, none free", with(only(0)), 0, nil},
		{"grown", with(only(3), published(2)), 3, []string{"a100-0", "a100-1", "a100-2"}},
		{"shrunk", with(only(1), published(3)), 3, []string{"a100-0"}},
		{"shrunk to none", with(only(0), published(3)), 3, nil},
		{"count not read", with(only(0), published(2), func(w *World) { w.Inventory.Free = map[device.Model]Supply{} }), 2, []string{"a100-0", "a100-1"}},
		{"one assigned", with(only(2), published(2), leased("a100-0", device.Assigned, serving("c", "a100-0")), demand("c", "n1", "a100-0")), 2, []string{"a100-0", "a100-1"}},
		{"one assigned, another tenant took one", with(only(1), published(2), leased("a100-0", device.Assigned, serving("c", "a100-0")), demand("c", "n1", "a100-0")), 2, []string{"a100-0"}},
		{"one attaching, not counted yet", with(only(2), published(2), leased("a100-0", device.Attaching, serving("c", "a100-0"), became), demand("c", "n1", "a100-0")), 2, []string{"a100-0", "a100-1"}},
		{"one attaching, counted", with(only(1), published(2), leased("a100-0", device.Attaching, serving("c", "a100-0"), became), counted("a100-0", "d-a100-0"), demand("c", "n1", "a100-0")), 2, []string{"a100-0", "a100-1"}},
		{"one attached since the count", with(only(2), published(2), leased("a100-0", device.Attached, serving("c", "a100-0")), free(2), uncounted("a100-0"), demand("c", "n1", "a100-0", toldAttached)), 2, []string{"a100-0", "a100-1"}},
		{"one attached, pool grown", with(only(2), published(2), leased("a100-0", device.Attached, serving("c", "a100-0")), free(2), demand("c", "n1", "a100-0", toldAttached)), 3, []string{"a100-0", "a100-1", "a100-2"}},
		{"one given back since the count", with(only(1), published(2), counted("a100-0", "d-a100-0")), 2, []string{"a100-0"}},
		{"one given back since the count, pool grown meanwhile", with(only(5), published(2), counted("a100-0", "d-a100-0")), 2, []string{"a100-0", "a100-1"}},
		{"one on its way back, detached already", with(only(2), published(2), leased("a100-0", device.Releasing), free(2)), 2, []string{"a100-0", "a100-1"}},
		{"manager said that none is left", with(only(2), published(2), leased("a100-1", device.Failed, failed("NoCapacity", device.BlameModel))), 2, nil},
		{"manager said so a while ago", with(only(2), published(2), leased("a100-1", device.Failed, failed("NoCapacity", device.BlameModel), func(l *device.Lease) { l.Failure.RetryAfter = ago(time.Second) })), 2, []string{"a100-0"}},
		{"only leases are known, slices lost", with(only(1), leased("a100-7", device.Attached, serving("c", "a100-7")), free(1), demand("c", "n1", "a100-7", toldAttached)), 2, []string{"a100-0", "a100-7"}},
		{"only claims are known, slices lost", with(only(1), demand("c", "n1", "a100-3")), 1, []string{"a100-3"}},
		{"grown, one in quarantine", with(only(2), leased("a100-0", device.Failed, failed("DeviceCritical", device.BlameUnit), became), counted("a100-0", "d-a100-0"), free(1)), 2, []string{"a100-1"}},
		{"grown, one in quarantine that was not counted", with(only(2), leased("a100-0", device.Failed, failed("DeviceCritical", device.BlameUnit), became)), 1, nil},
		{"grown, one failed with nothing attached", with(only(2), leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit))), 2, []string{"a100-1"}},
		{"grown, one failed and may still come", with(only(2), leased("a100-0", device.Failed, failed("AttachTimeout", device.BlameUnit), asked)), 1, nil},
		{"grown, one is assigned", with(only(3), leased("a100-0", device.Assigned)), 1, nil},
	} {
		t.Run(tc.situation, func(t *testing.T) {
			w := calm()
			w.with(tc.mods...)
			o := Decide(w).Offers
			if len(o.Units) != tc.units {
				t.Errorf("units %v, want %d", o.Units, tc.units)
			}
			if diff := cmp.Diff(tc.usable, usable(o)); diff != "" {
				t.Errorf("usable (-want +got):\n%s", diff)
			}
			checkLayout(t, o)
		})
	}
}

// TestPermanence: whatever happens to inventory, leases, claims, configuration and nodes, no entry is ever
// removed or moved, by any leader that sees what was published.
func TestPermanence(t *testing.T) {
	moves := 0
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := calm()
		w.Published = Published{}
		models := w.Models
		var last []device.Unit
		for step := range 60 {
			shake(r, &w, models)
			p := Decide(w)
			o := p.Offers
			if len(o.Units) < len(last) || !slices.Equal(o.Units[:len(last)], last) {
				t.Fatalf("seed %d, step %d: units %v after %v", seed, step, o.Units, last)
			}
			for i := range o.OnCall {
				if len(o.OnCall[i]) > SliceDevices || len(o.Ready[i]) > SliceDevices {
					t.Fatalf("seed %d, step %d: slice %d has %d entries", seed, step, i, len(o.OnCall[i]))
				}
			}
			checkLayout(t, o)
			if t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
			moves += len(o.Units) - len(last)
			last = o.Units
			publish(&w, o)
			follow(&w, p)
		}
	}
	if moves == 0 {
		t.Fatal("no pool ever grew: the test shows nothing")
	}
	t.Logf("40 seeds, 60 steps each, %d units added, none removed", moves)
}

// shake changes the world at random.
func shake(r *rand.Rand, w *World, models []Model) {
	w.Now = w.Now.Add(time.Duration(r.IntN(60)) * time.Second)
	w.Inventory.Free = map[device.Model]Supply{}
	for _, m := range models {
		if r.IntN(4) > 0 {
			w.free(m.Name, r.IntN(90))
		}
	}
	w.Inventory.Leased = map[device.Unit]string{}
	for i := range w.Leases {
		if r.IntN(3) > 0 && w.Leases[i].FabricDevice != "" {
			w.Inventory.Leased[w.Leases[i].Unit] = w.Leases[i].FabricDevice
		}
	}
	w.Models = models
	if r.IntN(6) == 0 {
		w.Models = models[r.IntN(2)+0:]
	}
	for i := range w.Nodes {
		w.Nodes[i].AgentReady = r.IntN(5) > 0
		w.Nodes[i].AwaySince = time.Time{}
		if !w.Nodes[i].AgentReady {
			w.Nodes[i].AwaySince = w.Now.Add(-time.Duration(r.IntN(300)) * time.Second)
		}
	}
	phases := append(device.Phases(), "Dreaming")
	for i := len(w.Leases) - 1; i >= 0; i-- {
		l := &w.Leases[i]
		switch r.IntN(4) {
		case 0:
			l.Phase, l.Failure.Reason = phases[r.IntN(len(phases))], "Broken"
			if l.Phase == device.Attached {
				l.FabricDevice, l.UUID, l.IdleSince = fmt.Sprintf("d%d", r.IntN(1000)), "GPU-x", w.Now
			}
		case 1:
			w.Leases = slices.Delete(w.Leases, i, i+1)
		}
	}
	w.Demands = nil
	units := w.Published.Units
	for range min(len(units), r.IntN(4)) {
		u := units[r.IntN(len(units))]
		entry := u.Entry()
		if r.IntN(3) == 0 {
			entry = u.ReadyEntry()
		}
		demand(fmt.Sprintf("c%d", r.IntN(100)), []string{"n1", "n2", "gone"}[r.IntN(3)], entry)(w)
	}
}

// publish makes the world show what was decided.
func publish(w *World, o Offers) {
	w.Published = Published{Units: o.Units, Effects: map[string]Effect{}, TaintedSince: map[string]time.Time{}}
	for _, slice := range slices.Concat(o.Ready, o.OnCall) {
		for _, offer := range slice {
			w.Published.Effects[offer.Name] = offer.Effect
		}
	}
}

// follow carries the operations out.
func follow(w *World, p Plan) {
	for _, op := range p.Ops {
		i := slices.IndexFunc(w.Leases, func(l device.Lease) bool { return l.Unit == op.Lease.Unit })
		switch op.Kind {
		case Create:
			w.Leases = append(w.Leases, op.Lease)
		case Assign:
			w.Leases[i] = op.Lease
		case Clear:
			w.Leases[i].Attempt = device.Attempt{}
		case Release:
			w.Leases[i].Phase = device.Releasing
		case Drop:
			w.Leases = slices.Delete(w.Leases, i, i+1)
		}
	}
}

// TestLostSlices: a leader that finds no slices lists again what leases and claims name.
func TestLostSlices(t *testing.T) {
	w := calm()
	w.with(leased("a100-3", device.Attached, serving("c", "a100-3")), demand("c", "n1", "a100-3", toldAttached), demand("d", "n2", "h100-1"))
	w.Published = Published{}
	w.Inventory.Free = map[device.Model]Supply{}
	if diff := cmp.Diff([]device.Unit{"a100-3", "h100-1"}, Decide(w).Offers.Units); diff != "" {
		t.Errorf("units (-want +got):\n%s", diff)
	}
}
