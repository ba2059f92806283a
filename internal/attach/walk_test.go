// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// axis is one thing that an observation can show in several ways, in the phases where it matters.
type axis struct {
	name   string
	ways   []mod
	phases []device.Phase // all if empty
}

func nothing(*Observation) {}

// axes span every combination of what a holder can observe of one unit.
func axes() []axis {
	everywhere := []device.Phase(nil)
	withDevice := []device.Phase{device.Attaching, device.Attached, device.Releasing}
	asking := []device.Phase{device.Attaching, device.Failed}
	last := []device.Phase{device.Attached, device.Releasing}
	used := []device.Phase{device.Attached, device.Releasing, device.Failed}
	attaching, attached, releasing := []device.Phase{device.Attaching}, []device.Phase{device.Attached}, []device.Phase{device.Releasing}
	return []axis{
		{"attempt", []mod{nobody, serves(onCall)}, everywhere},
		{"kept", []mod{nothing, kept}, []device.Phase{device.Assigned, device.Attaching}},
		{"ready", []mod{nothing, serves(ready)}, attached},
		{"deleting", []mod{nothing, deleting}, everywhere},
		{"deadline", []mod{nothing, late}, []device.Phase{device.Assigned, device.Attaching}},
		{"device", []mod{nothing, became}, asking},
		{"device", []mod{attached1, both2(attached1, anonymous), both2(attached1, failedBefore)}, releasing},
		{"call", []mod{never, asked0, settled, both2(asked0, maySend)}, asking},
		{"last", []mod{nothing, answered("", time.Second), answered(device.FaultBusy, time.Second), answered(device.FaultBusy, time.Minute), answered(device.FaultNoCapacity, time.Second), answered(device.FaultUnknown, time.Second), works(4 * time.Second), both2(works(4*time.Second), named1), named1}, attaching},
		{"last", []mod{nothing, answered(device.FaultBusy, time.Second), answered(device.FaultUnknown, time.Minute), works(4 * time.Second), both2(works(4*time.Second), named1), named1}, releasing},
		{"work", []mod{nothing, named1}, []device.Phase{device.Failed}},
		{"fabric", []mod{notHere, listed(ours, ""), listed(ours, device.HealthCritical), listed("", ""), both2(listed("", ""), arrival()), both2(listed("", ""), arrival(string(ours)))}, []device.Phase{device.Attaching}},
		{"fabric", []mod{notHere, listed(ours, ""), listed(ours, device.HealthCritical), listed("", "")}, []device.Phase{device.Assigned, device.Failed}},
		{"fabric", []mod{notHere, listed(ours, "")}, last},
		{"list", []mod{nothing, stale, listFails(time.Second)}, everywhere},
		{"machine", []mod{nothing, machineBusy}, []device.Phase{device.Assigned, device.Attaching, device.Releasing, device.Failed}},
		{"bus", []mod{offBus, unbound, bound}, []device.Phase{device.Releasing}},
		{"bus", []mod{offBus, both2(offBus, tried(Rescan, time.Minute, nil)), unbound, bound}, []device.Phase{device.Attaching, device.Attached}},
		{"nvml", []mod{unseen, seen(ours), both2(seen(ours), draining), seen(alien), silent}, withDevice},
		{"prepared", []mod{nothing, prepared, unknown}, used},
		{"holders", []mod{nothing, scanned(time.Second), both2(scanned(time.Second), heldBy("pid 7"))}, last},
		{"told", []mod{nothing, told}, attached},
		{"unseen", []mod{nothing, unseenFor(time.Hour)}, attached},
		{"idle", []mod{nothing, idle, both2(idle, noted)}, attached},
		{"drained", []mod{nothing, tried(Drain, 2*time.Second, nil), tried(Drain, 2*time.Second, errTry)}, releasing},
		{"back-off", []mod{nothing, over}, []device.Phase{device.Failed}},
	}
}

// rare are further things that an observation can show, each by itself: a walk through every combination of them all would
// take hours, and each of them decides in one or two rules.
func rare() []axis {
	ways := []axis{
		{"the very device is wanted", []mod{wanted}, nil},
		{"another device is wanted", []mod{func(o *Observation) { o.Lease.Wanted = "d9" }}, nil},
		{"it may be another unit's", []mod{awaited}, nil},
		{"another unit has it", []mod{claimed("d1")}, nil},
		{"it was there before", []mod{before("d1")}, nil},
		{"another unit's call is open", []mod{openFor(time.Minute)}, nil},
		{"a lease is unreadable", []mod{unreadable}, nil},
		{"another node goes first", []mod{outOfTurn}, nil},
		{"the model is not known", []mod{noModel}, nil},
		{"nodes wait for each other", []mod{patient}, nil},
	}
	for _, c := range device.FaultClasses() {
		ways = append(ways, axis{"the last call: " + string(c), []mod{answered(c, time.Second)}, []device.Phase{device.Attaching, device.Releasing, device.Failed}})
	}
	return ways
}

// stride is how many combinations each rare way leaves out between two; no axis has a multiple of it.
const stride = 29

func both2(a, b mod) mod              { return func(o *Observation) { a(o); b(o) } }
func never(o *Observation)            { o.Lease.AskedAt = time.Time{} }
func (a axis) in(p device.Phase) bool { return len(a.phases) == 0 || slices.Contains(a.phases, p) }

func listed(uuid device.GPUUUID, h device.Health) mod {
	return func(o *Observation) {
		o.Here = []device.OnFabric{{ID: "d1", Model: model, UUID: uuid, Health: h}}
	}
}

// TestEveryCombination walks through all of them and holds each decision against what must never be.
func TestEveryCombination(t *testing.T) {
	total, actions := 0, map[Kind]int{}
	for _, p := range device.Phases() {
		var of []axis
		for _, a := range axes() {
			if a.in(p) {
				of = append(of, a)
			}
		}
		n := walk(t, p, of, axis{"", []mod{nothing}, nil}, 1, actions)
		t.Logf("%-9s %8d combinations of %d observations", p, n, len(of))
		total += n
		for _, r := range rare() {
			if r.in(p) {
				total += walk(t, p, of, r, stride, actions)
			}
		}
	}
	t.Logf("%d combinations; decisions:", total)
	for _, k := range Kinds() {
		t.Logf("  %-11s %8d", k, actions[k])
		if actions[k] == 0 {
			t.Errorf("no combination leads to %s: the walk misses something", k)
		}
	}
}

// walk goes through the combinations of the axes, with one more thing that all of them show, and leaves all but every nth out.
func walk(t *testing.T, p device.Phase, of []axis, also axis, every int, actions map[Kind]int) (n int) {
	t.Helper()
	at, bad := make([]int, len(of)), 0
	for k := 0; ; k++ {
		if k%every == 0 {
			o := calm(p)
			o.Here, o.Lease.ChangedAt = nil, ago(time.Minute)
			for i, a := range of {
				a.ways[at[i]](&o)
			}
			also.ways[0](&o)
			d := Next(o)
			n++
			actions[d.Kind]++
			if complaints := wrongs(&o, d); len(complaints) > 0 && bad < 20 {
				bad++
				situation := map[string]int{}
				for i, a := range of {
					situation[a.name] = at[i]
				}
				t.Errorf("%s %v %s: %s (%s): %v", p, situation, also.name, d.Kind, d.Why, complaints)
			}
			if n%997 == 0 { // the same again, and what it was shown is left as it was
				if diff := cmp.Diff(d, Next(o)); diff != "" {
					t.Errorf("%s: two answers to one observation:\n%s", p, diff)
				}
			}
		}
		if !advance(at, of) {
			return n
		}
	}
}

func advance(at []int, of []axis) bool {
	for i := range at {
		if at[i]++; at[i] < len(of[i].ways) {
			return true
		}
		at[i] = 0
	}
	return false
}

// wrongs says what a decision breaks, in terms of what was observed and not of the rules.
func wrongs(o *Observation, d Decision) []string {
	var w []string
	never := func(yes bool, what string) {
		if yes {
			w = append(w, what)
		}
	}
	onBus := func(a device.PCIAddress) bool {
		return slices.ContainsFunc(o.Bus, func(f Function) bool { return f.Address == a && !a.IsZero() })
	}
	gpu := slices.IndexFunc(o.NVML, func(g GPU) bool { return g.UUID == ours && onBus(g.Address) })
	usable := gpu >= 0
	drains := usable && o.NVML[gpu].Draining
	wanted := o.Lease.Attempt != device.Attempt{}
	isListed := slices.ContainsFunc(o.Here, func(f device.OnFabric) bool { return f.ID == o.Lease.FabricDevice && f.ID != "" })
	open := o.Lease.FabricDevice == "" && o.Lease.AskedAt != (time.Time{}) && !o.MaySend && // a call may still take effect
		(o.Last == nil || o.Last.Fault == nil || !o.Last.Fault.Definite()) && o.Now.Before(o.Lease.AskedAt.Add(o.Settings.Settle))

	working := !o.MaySend && (o.Last != nil && o.Last.Work != "" || o.Last == nil && o.Lease.Work != "") // nobody knows what came of it
	switch d.Kind {
	case SendAttach, SendDetach, StoreIntent, Delete, Remove:
		never(working, "goes on while the manager works")
	case Store:
		never(working && d.Lease.Work == "", "forgets what the manager works on")
	default:
	}
	switch d.Kind {
	case Drain, Remove, SendDetach:
		never(o.Lease.Phase != device.Releasing, "takes a device away that nobody asked for")
		never(o.Prepared || !o.PreparedKnown, "takes a device away that is, or may be, prepared")
		never(wanted && usable && o.Lease.UUID == ours && o.Lease.Failure.Reason == "" && !drains, "takes a usable device away from its claim")
	case SendAttach:
		never(!o.MaySend, "asks without an intent stored by this process")
		never(o.MachineBusy, "asks while another unit's call is under way")
		never(!o.Fresh || !slices.Equal(strange(o), o.Lease.SetBefore), "asks although the machine is not, or may not be, as it was")
		never(o.OutOfTurn, "asks before its turn")
		never(!wanted && !o.Lease.Kept || o.Lease.Deleting, "asks for nobody")
	case StoreIntent:
		never(open, "asks again while the first call may take effect")
		never(!o.Fresh, "writes ahead without knowing what is there")
		never(o.MachineBusy || o.OutOfTurn, "writes ahead out of turn")
		never(o.Now.Before(o.OpenUntil), "writes ahead while what comes may be another unit's")
		never(!slices.Equal(strange(o), d.Lease.SetBefore), "does not write ahead what is there")
	case Delete:
		never(open, "forgets a call that may take effect")
		never(o.Lease.FabricDevice != "" && (!o.Fresh || isListed), "forgets a device that may be attached")
		never(o.Lease.Phase != device.Releasing && o.Lease.Phase != device.Failed && (wanted || o.Lease.Kept) && !o.Lease.Deleting, "forgets what is wanted")
		never((o.Prepared || !o.PreparedKnown) && o.Lease.Phase == device.Releasing, "forgets a device that is, or may be, prepared")
	case Tell:
		never(!usable || drains || o.Lease.UUID != ours || o.Lease.Phase != device.Attached, "tells a claim of a device that it cannot use")
		never(o.Lease.Attempt != onCall, "tells nobody")
	default:
	}
	if d.Kind == Remove || d.Kind == Drain {
		never(o.HoldersAt.IsZero() || len(o.Holders) > 0, "takes a device away that is, or may be, open")
	}
	if d.Kind != Store && d.Kind != StoreIntent {
		return w
	}
	came, went := d.Lease.Phase, o.Lease.Phase
	arrived := isListed && o.Here[0].UUID == "" && o.Settings.Arrival && !slices.Contains(o.Lease.GPUsBefore, string(d.Lease.UUID)) &&
		slices.ContainsFunc(o.NVML, func(g GPU) bool { return g.UUID == d.Lease.UUID && onBus(g.Address) })
	never(came == device.Attached && went == device.Attaching && (!o.Fresh || !isListed || (!usable || o.Here[0].UUID != ours) && !arrived),
		"calls attached what fabric, bus and NVML do not all show")
	never(came == device.Attached && went == device.Releasing && !wanted, "calls a release back for nobody")
	never(came == device.Attached && (d.Lease.UUID == "" || d.Lease.Failure.Reason != ""), "calls attached what has no identity, or failed")
	never(came == device.Releasing && went == device.Attached && wanted, "releases what serves a claim")
	never(came == device.Failed && went != device.Failed && d.Lease.Failure.Reason == "Vanished" && (!o.Fresh || isListed), "calls vanished what may be there")
	never(came == device.Failed && went == device.Attached && usable && d.Lease.Failure.Reason != "DeviceCritical", "fails a usable device")
	never(came == device.Failed && went == device.Attached && (o.Prepared || !o.PreparedKnown) && isListed, "fails a device that a container may use")
	never(came == device.Failed && went != device.Failed && open && !late2(o), "takes unknown for failed")
	never(d.Lease.FabricDevice != "" && o.Lease.FabricDevice == "" && (!o.Fresh || !slices.ContainsFunc(o.Here, func(f device.OnFabric) bool { return f.ID == d.Lease.FabricDevice })),
		"takes unknown for done")
	took := d.Lease.FabricDevice
	never(took != o.Lease.FabricDevice && took != "" && (o.Unreadable || o.Claimed[took] || o.Lease.Wanted != "" && took != o.Lease.Wanted || o.Lease.Wanted == "" && slices.Contains(o.Lease.SetBefore, took)),
		"takes a device that may be, or is, another's")
	never(o.Unreadable && d.Kind == StoreIntent, "writes ahead while what comes may be an unreadable lease's")
	never(d.Lease.Attempt != o.Lease.Attempt, "changes the attempt, which is the leader's")
	never(!d.Lease.IdleSince.IsZero() && (wanted || o.Prepared || !o.PreparedKnown || o.Lease.IdleSince.IsZero() && len(o.Holders) > 0), "calls idle what somebody has")
	return w
}

// strange are the devices here that nobody else has or waits for.
func strange(o *Observation) []string {
	ids := []string{}
	for _, d := range o.Here {
		if !o.Claimed[d.ID] && o.Awaited[d.ID] == 0 {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

func late2(o *Observation) bool { return o.Now.After(o.Lease.AcquiredAt.Add(o.Settings.Deadline)) }

// TestWaitsEnd: what is waited for without a time announces itself: a write of the lease, an unprepare, the
// end of an action of this loop.
func TestWaitsEnd(t *testing.T) {
	announced := map[string]bool{
		"running": true, "unknown phase": true, "machine busy": true, "not its turn": true, "in use": true,
		"still prepared": true, "not taken back yet": true, "a lease is unreadable": true,
	}
	used := map[string]bool{}
	for p, rows := range table {
		for _, r := range rows {
			if r.want == Wait && r.wake == 0 {
				used[r.rule] = true
				if !announced[r.rule] {
					t.Errorf("%s, %s: waits for ever", p, r.situation)
				}
			}
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(announced)), slices.Sorted(maps.Keys(used))); diff != "" {
		t.Errorf("waits without a time (-want +got):\n%s", diff)
	}
}
