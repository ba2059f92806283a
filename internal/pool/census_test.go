// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// lists says that the manager lists these free devices of a100, each by its identity; a "!" marks a critical one.
func lists(ids ...string) mod {
	return func(w *World) {
		s := Supply{Devices: []device.OnFabric{}}
		for _, id := range ids {
			d := device.OnFabric{ID: id, Model: "A100"}
			if id[0] == '!' {
				d.ID, d.Health = id[1:], device.HealthCritical
			}
			s.Devices = append(s.Devices, d)
		}
		w.Inventory.Free["a100"] = s
	}
}

// TestAddressable: where the manager lists its free devices, each is a unit of its own, named by its identity.
func TestAddressable(t *testing.T) {
	unit := func(id string) device.Unit { return device.AddressableUnit("a100", id) }
	a, b, c := unit("d-a"), unit("d-b"), unit("d-c")
	empty := func(w *World) {
		w.Models, w.Published = w.Models[:1], Published{Effects: map[string]Effect{}, TaintedSince: map[string]time.Time{}}
		w.Inventory.Free = map[device.Model]Supply{}
	}
	shown := func(units ...device.Unit) mod {
		return func(w *World) {
			w.Published.Units = units
			for _, u := range units {
				w.Published.Effects[u.Entry()], w.Published.Effects[u.ReadyEntry()] = NoTaint, NoSchedule
			}
		}
	}
	unread := func(w *World) { delete(w.Inventory.Free, "a100") }
	for _, tc := range []struct {
		situation string
		mods      []mod
		units     []device.Unit
		onCall    []string // what each says
	}{
		{"first start", with(lists("d-b", "d-a")), []device.Unit{a, b}, []string{"", ""}},
		{"none", with(lists()), nil, nil},
		{"one is critical", with(lists("d-a", "!d-b")), []device.Unit{a, b}, []string{"", "Unhealthy"}},
		{"one is gone from the list", with(shown(a, b), lists("d-b")), []device.Unit{a, b}, []string{"NoCapacity", ""}},
		{"one came, in front by name", with(shown(b, c), lists("d-a", "d-b", "d-c")), []device.Unit{b, c, a}, []string{"", "", ""}},
		{"list not read", with(shown(a, b), tainted(a.Entry(), time.Hour), unread), []device.Unit{a, b}, []string{"NoCapacity", ""}},
		{"one is attached", with(shown(a, b), lists("d-b"), leased(a, device.Attached, serving("c", a.Entry())), lists("d-b"), demand("c", "n1", a.Entry(), toldAttached)), []device.Unit{a, b}, []string{"", ""}},
		{"one is attached, and still listed as free", with(shown(a, b), lists("d-b"), leased(a, device.Attached, serving("c", a.Entry())), lists("d-a", "d-b"), demand("c", "n1", a.Entry(), toldAttached)), []device.Unit{a, b}, []string{"", ""}},
		{"one failed", with(shown(a, b), lists("d-b"), leased(a, device.Failed, failed("Rejected", device.BlameUnit)), lists("d-a", "d-b")), []device.Unit{a, b}, []string{"Rejected", ""}},
		{"the manager said that none is left", with(shown(a, b), lists("d-b"), leased(a, device.Failed, failed("NoCapacity", device.BlameModel)), lists("d-a", "d-b")), []device.Unit{a, b}, []string{"NoCapacity", "NoCapacity"}},
		{"only a claim knows it", with(lists(), demand("c", "n1", a.Entry())), []device.Unit{a}, []string{"NoCapacity"}},
	} {
		t.Run(tc.situation, func(t *testing.T) {
			w := calm()
			w.with(empty)
			w.with(tc.mods...)
			o := Decide(w).Offers
			if diff := cmp.Diff(tc.units, o.Units); diff != "" {
				t.Fatalf("units (-want +got):\n%s", diff)
			}
			var got []string
			for _, u := range o.Units {
				_, onCall := entries(t, o, u)
				got = append(got, onCall.Why)
				if onCall.Model != "a100" {
					t.Errorf("%s is of model %q", u, onCall.Model)
				}
			}
			if diff := cmp.Diff(tc.onCall, got); diff != "" {
				t.Errorf("on call (-want +got):\n%s", diff)
			}
			checkLayout(t, o)
		})
	}
}

// TestLies: whatever a manager says, the pool stays within what the cluster bears.
func TestLies(t *testing.T) {
	var many []string
	for i := range 3 * mostUnits {
		many = append(many, fmt.Sprint("d-", i))
	}
	for _, tc := range []struct {
		situation string
		mods      []mod
		units     int
	}{
		{"a thousand millions", with(func(w *World) { w.free("a100", 1e9) }), mostUnits},
		{"more than it can count", with(func(w *World) { w.free("a100", math.MaxInt) }), mostUnits},
		{"less than none", with(func(w *World) { w.free("a100", -5) }), 6},
		{"a list without end", with(lists(many...)), mostUnits},
	} {
		w := calm()
		w.with(tc.mods...)
		p := Decide(w)
		if len(p.Offers.Units) != tc.units {
			t.Errorf("%s: %d units, want %d", tc.situation, len(p.Offers.Units), tc.units)
		}
		if (len(p.Notes) > 0) != (tc.units == mostUnits) {
			t.Errorf("%s: notes %q", tc.situation, p.Notes[:min(len(p.Notes), 3)])
		}
		if !slices.Equal(p.Offers.Units[:6], w.Published.Units) {
			t.Errorf("%s: units %v", tc.situation, p.Offers.Units[:6])
		}
	}
}

func TestForget(t *testing.T) {
	since := func(d time.Duration, units ...device.Unit) mod {
		return func(w *World) {
			for _, u := range units {
				w.UnneededSince[u] = ago(d)
			}
		}
	}
	free := func(n int) mod { return func(w *World) { w.free("a100", n) } }
	one := func(w *World) {
		w.Models, w.Published.Units = w.Models[:1], w.Published.Units[:4]
		w.Settings.ForgetUnit, w.UnneededSince = 24*time.Hour, map[device.Unit]time.Time{}
	}
	renamed := func(w *World) {
		w.Models[0].Name = "ampere"
		w.Inventory.Free = map[device.Model]Supply{"ampere": {Count: 4}}
	}
	const day = 25 * time.Hour
	for _, tc := range []struct {
		situation string
		mods      []mod
		listed    int
		unneeded  []device.Unit
	}{
		{"all are there", with(since(day, "a100-3")), 4, nil},
		{"two are gone", with(free(2)), 4, []device.Unit{"a100-2", "a100-3"}},
		{"two are gone for a while", with(free(2), since(time.Hour, "a100-2", "a100-3")), 4, []device.Unit{"a100-2", "a100-3"}},
		{"two are gone for long", with(free(2), since(day, "a100-2", "a100-3")), 2, []device.Unit{"a100-2", "a100-3"}},
		{"two are gone, the last for long", with(free(2), since(time.Hour, "a100-2"), since(day, "a100-3")), 3, []device.Unit{"a100-2", "a100-3"}},
		{"two are gone, not the last for long", with(free(2), since(day, "a100-2"), since(time.Hour, "a100-3")), 4, []device.Unit{"a100-2", "a100-3"}},
		{"two are gone, a claim names the last", with(free(2), since(day, "a100-2", "a100-3"), demand("c", "n1", "a100-3", unreserved)), 4, []device.Unit{"a100-2"}},
		{"two are gone, a lease has the last", with(leased("a100-3", device.Attached, idle(time.Minute)), free(2), since(day, "a100-2", "a100-3")), 4, []device.Unit{"a100-2"}},
		{"all are gone for long", with(free(0), since(day, "a100-0", "a100-1", "a100-2", "a100-3")), 0, []device.Unit{"a100-0", "a100-1", "a100-2", "a100-3"}},
		{"all are gone for long, entries are for ever", with(free(0), since(day, "a100-0", "a100-1", "a100-2", "a100-3"), func(w *World) { w.Settings.ForgetUnit = 0 }), 4, []device.Unit{"a100-0", "a100-1", "a100-2", "a100-3"}},
		{"count not read", with(func(w *World) { w.Inventory.Free = nil }, tainted("a100-3", day), since(day, "a100-3")), 4, nil},
		{"listed, and critical", with(lists("!d-1"), func(w *World) { w.Published.Units = []device.Unit{device.AddressableUnit("a100", "d-1")} }, since(day, device.AddressableUnit("a100", "d-1"))), 1, nil},
		{"model renamed", with(renamed), 8, []device.Unit{"a100-0", "a100-1", "a100-2", "a100-3"}},
		{"model renamed long ago", with(renamed, since(day, "a100-0", "a100-1", "a100-2", "a100-3")), 8, []device.Unit{"a100-0", "a100-1", "a100-2", "a100-3"}},
	} {
		t.Run(tc.situation, func(t *testing.T) {
			w := calm()
			w.with(one)
			w.with(tc.mods...)
			p := Decide(w)
			if len(p.Offers.Units) != tc.listed || !slices.Equal(p.Offers.Units[:min(tc.listed, len(w.Published.Units))], w.Published.Units[:min(tc.listed, len(w.Published.Units))]) {
				t.Errorf("units %v, want %d of %v", p.Offers.Units, tc.listed, w.Published.Units)
			}
			if diff := cmp.Diff(tc.unneeded, p.Unneeded); diff != "" {
				t.Errorf("unneeded (-want +got):\n%s", diff)
			}
			checkLayout(t, p.Offers)
		})
	}
}

// TestRenamedModel: units of the old name stay listed and out of reach, those in use go on, and come back to
// the pool when they are given back.
func TestRenamedModel(t *testing.T) {
	w := calm()
	w.with(leased("a100-0", device.Attached, serving("c", "a100-0")), demand("c", "n1", "a100-0", toldAttached), leased("a100-1", device.Attached, idle(time.Hour)), tainted("a100-1-ready", time.Minute))
	w.Models[0].Name = "ampere"
	w.Inventory.Free = map[device.Model]Supply{"ampere": {Count: 2}, "h100": {Count: 2}}
	p := Decide(w)
	if diff := cmp.Diff(outcome{Ops: []string{"Release a100-1"}}, outcomeOf(p)); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(append(slices.Clone(w.Published.Units), "ampere-0", "ampere-1"), p.Offers.Units); diff != "" {
		t.Errorf("units (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"ampere-0", "ampere-1", "h100-0", "h100-1"}, usable(p.Offers)); diff != "" {
		t.Errorf("usable (-want +got):\n%s", diff)
	}
}

// TestFlappingInventory: counts that come and go change taints and nothing else.
func TestFlappingInventory(t *testing.T) {
	w := calm()
	w.with(leased("a100-0", device.Attached, serving("c", "a100-0")), demand("c", "n1", "a100-0", toldAttached), leased("a100-1", device.Attached, idle(time.Minute)))
	w.Settings.ForgetUnit = 24 * time.Hour
	unread := map[device.Model]Supply{}
	of := func(a100, h100 int) map[device.Model]Supply {
		return map[device.Model]Supply{"a100": {Count: a100}, "h100": {Count: h100}}
	}
	all, taken := []string{"a100-0", "a100-1", "a100-2", "a100-3", "h100-0", "h100-1"}, []string{"a100-0", "a100-1"}
	for i, tc := range []struct {
		free   map[device.Model]Supply
		usable []string
	}{
		{of(2, 2), all},
		{unread, all},
		{of(0, 0), taken},
		{unread, taken},
		{of(2, 2), all},
		{of(1, 0), []string{"a100-0", "a100-1", "a100-2"}},
		{of(0, 0), taken},
		{of(2, 2), all},
	} {
		w.Now = w.Now.Add(30 * time.Second)
		w.Inventory.Free = tc.free
		p := Decide(w)
		if diff := cmp.Diff(w.Published.Units, p.Offers.Units); diff != "" {
			t.Errorf("step %d: units (-want +got):\n%s", i, diff)
		}
		if diff := cmp.Diff(tc.usable, usable(p.Offers)); diff != "" {
			t.Errorf("step %d: usable (-want +got):\n%s", i, diff)
		}
		if diff := cmp.Diff(outcome{}, outcomeOf(p)); diff != "" {
			t.Errorf("step %d: plan (-want +got):\n%s", i, diff)
		}
		publish(&w, p.Offers)
	}
}

// BenchmarkDecide: 1,000 nodes, 500 units, half of them leased and claimed.
func BenchmarkDecide(b *testing.B) {
	w := calm()
	w.Models, w.Nodes, w.Published = w.Models[:1], nil, Published{}
	w.with(least(1))
	for i := range 1000 {
		name := fmt.Sprintf("n%d", i)
		w.Nodes = append(w.Nodes, Node{Name: name, UID: name, Machine: device.Machine(name), Member: true, AgentReady: true})
	}
	w.free("a100", 250)
	for i := range 250 {
		u, n := device.NumberedUnit("a100", i), fmt.Sprintf("n%d", i)
		at := attemptOf("c"+n, n, u.Entry())
		w.Leases = append(w.Leases, device.Lease{
			Fabric: "0", Unit: u, Model: "a100", Node: n, NodeUID: n, Machine: device.Machine(n), Phase: device.Attached, Attempt: at, FabricDevice: "d" + n, UUID: "GPU-x",
		})
		w.Demands = append(w.Demands, Demand{Attempt: at, Reserved: true, Attached: true})
		w.Inventory.Leased[u] = "d" + n
	}
	publish(&w, Decide(w).Offers)
	for b.Loop() {
		Decide(w)
	}
}

// TestStripped: where a person removed the lease of a unit in use, what is free is another unit's.
func TestStripped(t *testing.T) {
	w := calm()
	w.with(func(w *World) { w.free("a100", 2) },
		leased("a100-1", device.Attached, serving("b", "a100-1")), demand("b", "n1", "a100-1", toldAttached),
		func(w *World) { w.free("a100", 2) }, demand("c", "n2", "a100-0", toldAttached))
	var got []string
	for _, u := range []device.Unit{"a100-0", "a100-1", "a100-2", "a100-3"} {
		_, onCall := entries(t, Decide(w).Offers, u)
		got = append(got, onCall.Why)
	}
	if diff := cmp.Diff([]string{"NoCapacity", "", "", ""}, got); diff != "" {
		t.Errorf("what the entries say (-want +got):\n%s", diff)
	}
}
