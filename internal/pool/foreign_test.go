// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func TestForeign(t *testing.T) {
	of := func(change func(*device.OnFabric)) mod {
		return func(w *World) { change(&w.Inventory.Attached["m-n1"][0]) }
	}
	named := func(l *device.Lease) { l.FabricDevice = "d-9" }
	asked := func(l *device.Lease) { l.AskedAt = ago(time.Second) }
	unseen := func(w *World) { w.ForeignSince = nil }
	onNode2 := func(l *device.Lease) { l.Node, l.NodeUID, l.Machine = "n2", "uid-n2", "m-n2" }
	for _, tc := range []struct {
		situation      string
		mods           []mod
		foreign, taken bool
		wake           time.Duration
	}{
		{"ripe", nil, true, true, 0},
		{"not ripe", with(stray(time.Minute)), true, false, 0},
		{"ripe since the last list", with(func(w *World) { w.Inventory.AttachedAt = ago(51 * time.Minute) }), true, false, 0},
		{"seen just now", with(func(w *World) { w.ForeignSince = nil }), true, false, 0},
		{"was seen on another machine", with(func(w *World) { w.ForeignSince = map[string]time.Time{"m-n2/d-9": ago(time.Hour)} }), true, false, 0},
		{"only reported", with(func(w *World) { w.Settings.Adopt = false }), true, false, 0},
		{"another model", with(of(func(d *device.OnFabric) { d.Model = "L40S" })), true, false, 0},
		{"critical", with(of(func(d *device.OnFabric) { d.Health = device.HealthCritical })), true, false, 0},
		{"no identity", with(of(func(d *device.OnFabric) { d.UUID = "" })), true, false, 0},
		{"agent away", with(node("n1", agentAway(time.Hour))), true, false, 0},
		{"agent cannot reach the manager", with(node("n1", fabricDown)), true, false, 0},
		{"machine is no member's", with(node("n1", stranger)), false, false, 0},
		{"Node gone", with(noNode("n1")), false, false, 0},
		{"machine not listed this time", with(func(w *World) { delete(w.Inventory.Attached, "m-n1") }), false, false, 0},
		{"a lease names it", with(leased("a100-1", device.Attaching, named)), false, false, 0},
		{"another machine's lease names it", with(leased("a100-1", device.Attached, named, onNode2)), false, false, 0},
		{"a unit is about to be attached there", with(leased("a100-1", device.Assigned)), true, false, 0},
		{"a unit is being attached there, not seen before", with(unseen, leased("a100-1", device.Attaching, asked)), false, false, 0},
		{"a unit is being attached there", with(leased("a100-1", device.Attaching, asked)), true, false, 0},
		{"a call failed there and may still bring a device", with(leased("a100-1", device.Failed, failed("AttachTimeout", device.BlameUnit), asked)), true, false, time.Minute},
		{"a call failed there and may still bring a device, not seen before", with(unseen, leased("a100-1", device.Failed, failed("AttachTimeout", device.BlameUnit), asked)), false, false, time.Minute},
		{"a call was refused there", with(leased("a100-1", device.Failed, failed("Rejected", device.BlameUnit))), true, true, time.Minute},
		{"a unit is being attached to another machine", with(leased("a100-1", device.Attaching, asked, onNode2)), true, true, 0},
		{"a lease of the node cannot be read", with(leased("a100-1", device.Unreadable, func(l *device.Lease) { l.Machine = "" })), true, false, 0},
		{"a lease of the node cannot be read, not seen before", with(unseen, leased("a100-1", device.Unreadable, func(l *device.Lease) { l.Machine = "" })), false, false, 0},
		{"a claim has a device whose lease is gone", with(demand("c", "n1", "a100-2", toldAttached)), true, false, 0},
		{"a claim has a device whose lease is gone, on another node", with(demand("c", "n2", "a100-2", toldAttached)), true, true, 0},
		{"another unit goes back", with(leased("a100-1", device.Releasing)), true, true, 3 * time.Minute},
	} {
		t.Run(tc.situation, func(t *testing.T) {
			w := calm()
			w.with(stray(time.Hour))
			w.with(tc.mods...)
			p := Decide(w)
			taken := false
			for _, op := range p.Ops {
				if op.Lease.FabricDevice != "d-9" {
					continue
				}
				taken = true
				want := Op{Kind: Create, Why: "device d-9 was attached without a lease", Lease: device.Lease{
					Fabric: "0", Unit: "a100-4", Model: "a100", Node: "n1", NodeUID: "uid-n1", Machine: "m-n1",
					Phase: device.Attaching, FabricDevice: "d-9", AcquiredAt: now, ChangedAt: now,
				}}
				want.Lease.Unit = op.Lease.Unit
				if diff := cmp.Diff(want, op); diff != "" {
					t.Errorf("operation (-want +got):\n%s", diff)
				}
			}
			if (len(p.Foreign) > 0) != tc.foreign || taken != tc.taken {
				t.Errorf("foreign %+v, taken in %v; want %v, %v", p.Foreign, taken, tc.foreign, tc.taken)
			}
			told := len(slices.DeleteFunc(slices.Clone(p.Notes), func(n string) bool { return !strings.Contains(n, "d-9") }))
			if tc.foreign && !tc.taken && told != 1 {
				t.Errorf("notes %q, want one of the device", p.Notes)
			}
			if got := p.Wake; got.IsZero() != (tc.wake == 0) || !got.IsZero() && got.Sub(now) != tc.wake {
				t.Errorf("wake in %s, want %s", got.Sub(now), tc.wake)
			}
			checkLayout(t, p.Offers)
		})
	}
}

// TestForeignTakesASlot: what is attached takes a machine's slot, whoever attached it, also while a unit is on its way.
func TestForeignTakesASlot(t *testing.T) {
	for n, coming := range []mod{func(*World) {}, leased("a100-1", device.Attaching, func(l *device.Lease) { l.AskedAt = ago(time.Second) })} {
		w := calm()
		w.with(stray(time.Minute), slots(1+n), coming)
		for _, l := range Decide(w).Labels {
			if l.Attachable["a100"] != (l.Node == "n2") {
				t.Errorf("%d on their way: node %s attachable: %v", n, l.Node, l.Attachable)
			}
		}
	}
}

// TestAdoptOnce: two devices become two units, and once they are leased nothing more happens.
func TestAdoptOnce(t *testing.T) {
	w := calm()
	w.with(stray(time.Hour))
	w.Inventory.Attached["m-n2"] = []device.OnFabric{{ID: "d-8", Model: "NVIDIA-A100", UUID: "GPU-8"}}
	w.ForeignSince["m-n2/d-8"] = ago(time.Hour)
	p := Decide(w)
	if diff := cmp.Diff([]string{"Create a100-4", "Create a100-5"}, outcomeOf(p).Ops); diff != "" {
		t.Fatalf("operations (-want +got):\n%s", diff)
	}
	publish(&w, p.Offers)
	follow(&w, p)
	if p = Decide(w); len(p.Ops) > 0 || len(p.Foreign) > 0 || len(p.Notes) > 0 {
		t.Errorf("once more: %+v, foreign %v, notes %q", p.Ops, p.Foreign, p.Notes)
	}
}
