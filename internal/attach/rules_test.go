// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

var (
	now      = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	settings = Settings{
		Deadline: 4 * time.Minute, Settle: 3 * time.Minute, Look: 5 * time.Second, Appear: 6 * time.Second,
		Retry: 2 * time.Second, Busy: 7 * time.Second, Hold: 30 * time.Second, Resync: 20 * time.Minute, RetryAfter: 5 * time.Minute,
	}
	onCall = device.Attempt{Namespace: "a", Name: "c1", UID: "u1", AllocatedAt: "2026-01-02T03:04:04Z", Node: "n1", Pool: "fabric-0", Entry: "a100-0"}
	ready  = device.Attempt{Namespace: "a", Name: "c2", UID: "u2", AllocatedAt: "2026-01-02T03:04:04Z", Node: "n1", Pool: "fabric-0", Entry: "a100-0-ready"}
	slot   = device.PCIAddress{Bus: 0x3b}
	other  = device.PCIAddress{Bus: 0x3c}
	errTry = errors.New("it did not work")
)

const (
	ours  = device.GPUUUID("GPU-00000000-0000-4000-8000-000000000001")
	alien = device.GPUUUID("GPU-00000000-0000-4000-8000-000000000002")
	model = "NVIDIA-A100"
)

func ago(d time.Duration) time.Time { return now.Add(-d) }

// mod is one part of a situation.
type mod func(*Observation)

// The situations below are told as changes to a calm one: the phase's lease in the middle of its way, the
// world as that phase expects it.
func calm(p device.Phase) Observation {
	o := Observation{
		Now: now, Settings: settings, FabricModel: model, Fresh: true, ListTriedAt: ago(time.Second), ListAskedAt: ago(time.Second), PreparedKnown: true,
		Tried: map[Kind]Try{},
		Lease: device.Lease{
			Fabric: "0", Unit: "a100-0", Model: "a100", Node: "n1", Machine: "m1", Phase: p,
			AcquiredAt: ago(time.Minute), ChangedAt: ago(time.Second),
		},
	}
	switch p { //nolint:exhaustive // the others have nothing to start with
	case device.Assigned:
		o.Lease.Attempt = onCall
	case device.Attaching:
		o.Lease.Attempt, o.Lease.AskedAt = onCall, ago(2*time.Second)
	case device.Attached:
		o.with(attached1, here(ours), bound, seen(ours))
	case device.Releasing:
		o.with(attached1, here(ours), bound, seen(ours), scanned(time.Second))
	case device.Failed:
		o.Lease.Failure = device.Failure{Reason: "Vanished", Blame: device.BlameUnit, RetryAfter: now.Add(time.Minute)}
	}
	return o
}

func (o *Observation) with(mods ...mod) {
	for _, m := range mods {
		m(o)
	}
}

func attached1(o *Observation) {
	o.Lease.FabricDevice, o.Lease.UUID, o.Lease.PCI = "d1", ours, slot
}
func became(o *Observation)       { o.Lease.FabricDevice = "d1" }
func anonymous(o *Observation)    { o.Lease.UUID, o.Lease.PCI = "", device.PCIAddress{} }
func nobody(o *Observation)       { o.Lease.Attempt = device.Attempt{} }
func serves(a device.Attempt) mod { return func(o *Observation) { o.Lease.Attempt = a } }
func kept(o *Observation)         { o.Lease.Kept = true }
func deleting(o *Observation)     { o.Lease.Deleting = true }
func late(o *Observation)         { o.Lease.AcquiredAt = ago(time.Hour) }
func machineBusy(o *Observation)  { o.MachineBusy = true }
func stale(o *Observation)        { o.Fresh = false }
func running(k Kind) mod          { return func(o *Observation) { o.Running = k } }
func maySend(o *Observation)      { o.MaySend = true }
func told(o *Observation)         { o.Told = true }
func settled(o *Observation)      { o.Lease.AskedAt = ago(time.Hour) }
func settledSince(d time.Duration) mod {
	return func(o *Observation) { o.Lease.AskedAt = ago(settings.Settle + d) }
}
func looked(d time.Duration) mod { return func(o *Observation) { o.ListTriedAt = ago(d) } }
func before(ids ...string) mod   { return func(o *Observation) { o.Lease.SetBefore = ids } }
func claimed(id string) mod      { return func(o *Observation) { o.Claimed = map[string]bool{id: true} } }

// unseenFor: it has not been shown for that long, if it is not.
func unseenFor(d time.Duration) mod {
	return func(o *Observation) {
		if !o.Seen() {
			o.UnseenSince = ago(d)
		}
	}
}

func wasHeld(o *Observation)      { o.Lease.HeldBy = "pid 7" }
func unscanned(o *Observation)    { o.HoldersAt = time.Time{} }
func awaited(o *Observation)      { o.Awaited = map[string]int{"d1": 1} }
func awaitedFirst(o *Observation) { o.Awaited = map[string]int{"d0": 1} }
func noModel(o *Observation)      { o.FabricModel = "" }
func unreadable(o *Observation)   { o.Unreadable = true }
func listFails(d time.Duration) mod {
	return func(o *Observation) {
		o.Fresh, o.ListTriedAt = false, ago(d)
		o.ListFault = &device.Fault{Class: device.FaultUnreachable, Op: "list"}
	}
}

func answered(c device.FaultClass, d time.Duration) mod {
	return func(o *Observation) {
		o.Last = &Result{At: ago(d)}
		if c != "" {
			o.Last.Fault = &device.Fault{Class: c, Op: "attach one NVIDIA-A100", Message: "the manager's words"}
		}
	}
}

func unlisted(o *Observation) { o.Last.Unlisted = true }

// works: the manager said that long ago that it works on the call.
func works(d time.Duration) mod {
	return func(o *Observation) { o.Last = &Result{At: ago(d), Work: "job-1", PollAfter: 3 * time.Second} }
}

func waitsForPerson(o *Observation) {
	o.Last.Fault = &device.Fault{Class: device.FaultSuspended, Op: "attach d1", Message: "job-1"}
}
func named1(o *Observation) { o.Lease.Work = "job-1" }
func wanted(o *Observation) { o.Lease.Wanted = "d1" }

// arrival: the manager gives no identity, and these GPUs were there before.
func arrival(before ...string) mod {
	return func(o *Observation) { o.Settings.Arrival, o.Lease.GPUsBefore = true, append([]string{}, before...) }
}

// had: the manager gives no identity, though such managers do, and these GPUs were there before.
func had(before ...string) mod {
	return func(o *Observation) { o.Lease.GPUsBefore = append([]string{}, before...) }
}

func unmatched(o *Observation) { o.Unmatched = true }
func handAttached(o *Observation) {
	o.Here = append(o.Here, device.OnFabric{ID: "d9", Model: model})
}
func doubtTold(o *Observation) { o.Lease.Failure.Message = o.doubt() }

func alsoSeen(o *Observation) {
	o.Bus = append(o.Bus, Function{Address: other, Driver: "nvidia"})
	o.NVML = append(o.NVML, GPU{Address: other, UUID: alien})
}

func anothers(uuid device.GPUUUID) mod {
	return func(o *Observation) { o.Others = map[device.GPUUUID]bool{uuid: true} }
}
func acquired(d time.Duration) mod { return func(o *Observation) { o.Lease.AcquiredAt = ago(d) } }
func asked(d time.Duration) mod    { return func(o *Observation) { o.Lease.AskedAt = ago(d) } }
func outOfTurn(o *Observation)     { o.OutOfTurn, o.Before = true, 2 }
func patient(o *Observation)       { o.Settings.Patience = 9 * time.Minute }
func here(uuid device.GPUUUID) mod {
	return func(o *Observation) { o.Here = append(o.Here, device.OnFabric{ID: "d1", Model: model, UUID: uuid}) }
}
func numbered(o *Observation) { o.Here[0].Serial = "1650522000042" }
func notHere(o *Observation)  { o.Here = nil }
func alsoHere(id, model string) mod {
	return func(o *Observation) { o.Here = append(o.Here, device.OnFabric{ID: id, Model: model, UUID: alien}) }
}
func critical(o *Observation) { o.Here[0].Health = device.HealthCritical }
func bound(o *Observation)    { o.Bus = []Function{{Address: slot, Driver: "nvidia"}} }
func unbound(o *Observation)  { o.Bus = []Function{{Address: slot, Problem: "no space for BAR 1"}} }
func offBus(o *Observation)   { o.Bus, o.NVML = nil, nil }

func at(a device.PCIAddress) mod {
	return func(o *Observation) { o.Bus[0].Address, o.NVML[0].Address = a, a }
}

func seen(uuid device.GPUUUID) mod {
	return func(o *Observation) { o.NVML = []GPU{{Address: slot, UUID: uuid}} }
}
func unseen(o *Observation)   { o.NVML = nil }
func silent(o *Observation)   { o.NVML, o.NVMLState = nil, "driver not loaded" }
func draining(o *Observation) { o.NVML[0].Draining = true }
func tried(k Kind, d time.Duration, err error) mod {
	return func(o *Observation) { o.Tried[k] = Try{At: ago(d), Err: err} }
}
func longAgo(o *Observation)          { o.Lease.ChangedAt = ago(time.Minute) }
func prepared(o *Observation)         { o.Prepared, o.PreparedFor = true, []string{"claim a/c9"} }
func unknown(o *Observation)          { o.PreparedKnown = false }
func noted(o *Observation)            { o.Lease.PreparedFor = []string{"u2"} }
func idle(o *Observation)             { o.Lease.IdleSince = ago(time.Minute) }
func scanned(d time.Duration) mod     { return func(o *Observation) { o.HoldersAt = ago(d) } }
func heldBy(who ...string) mod        { return func(o *Observation) { o.Holders = who } }
func toldHeld(o *Observation)         { o.Lease.HeldBy = strings.Join(o.Holders, ", ") }
func over(o *Observation)             { o.Lease.Failure.RetryAfter = ago(time.Second) }
func skewed(o *Observation)           { o.Lease.Failure.RetryAfter = now.Add(24 * time.Hour) }
func failedBefore(o *Observation)     { o.Lease.Failure.Reason = "DeviceCritical" }
func nowhere(o *Observation)          { o.Lease.PCI = device.PCIAddress{} }
func foundBefore(d time.Duration) mod { return func(o *Observation) { o.FoundAt = ago(d) } }
func openFor(d time.Duration) mod     { return func(o *Observation) { o.OpenUntil = now.Add(d) } }
func taken(o *Observation)            { o.Taken = map[device.PCIAddress]bool{slot: true} }
func leaving(o *Observation)          { o.Leaving = true }

type row struct {
	situation string
	mods      []mod
	rule      string
	want      Kind
	wake      time.Duration // from now; zero is none
	check     func(*testing.T, Decision)
}

func with(mods ...mod) []mod { return mods }

// table is the policy as situations; each rule of rules.go is the answer to one at least.
var table = map[device.Phase][]row{
	device.Assigned: {
		{situation: "fresh list", rule: "write ahead", want: StoreIntent, check: func(t *testing.T, d Decision) {
			t.Helper()
			want := device.Lease{Phase: device.Attaching, AskedAt: now, ChangedAt: now, SetBefore: []string{}}
			got := device.Lease{Phase: d.Lease.Phase, AskedAt: d.Lease.AskedAt, ChangedAt: d.Lease.ChangedAt, SetBefore: d.Lease.SetBefore}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("intent (-want +got):\n%s", diff)
			}
		}},
		{situation: "others' devices were there a while ago", mods: with(alsoHere("d9", model), looked(10*time.Second)), rule: "look first", want: ListFabric},
		{situation: "other devices are there", mods: with(alsoHere("d9", model), alsoHere("d2", "H100")), rule: "write ahead", want: StoreIntent, check: func(t *testing.T, d Decision) {
			t.Helper()
			if diff := cmp.Diff([]string{"d2", "d9"}, d.Lease.SetBefore); diff != "" {
				t.Errorf("set before (-want +got):\n%s", diff)
			}
		}},
		{situation: "the wanted one is there already", mods: with(here(ours), wanted), rule: "write ahead", want: Store, check: both(failed1("Foreign", device.BlameUnit), unasked)},
		{situation: "another than the wanted one is there", mods: with(alsoHere("d9", model), wanted), rule: "write ahead", want: StoreIntent},
		{situation: "another unit's device is there", mods: with(here(ours), claimed("d1")), rule: "write ahead", want: StoreIntent, check: func(t *testing.T, d Decision) {
			t.Helper()
			if len(d.Lease.SetBefore) != 0 {
				t.Errorf("set before = %v: when that unit has given it back, it may be what comes", d.Lease.SetBefore)
			}
		}},
		{situation: "another unit's call has brought a device", mods: with(here(ours), awaited, alsoHere("d9", model)), rule: "write ahead", want: StoreIntent, check: func(t *testing.T, d Decision) {
			t.Helper()
			if diff := cmp.Diff([]string{"d9"}, d.Lease.SetBefore); diff != "" {
				t.Errorf("set before (-want +got):\n%s", diff)
			}
		}},
		{situation: "another unit's call is open", mods: with(openFor(time.Minute)), rule: "write ahead", want: Wait, wake: time.Minute},
		{situation: "a lease of the node is unreadable", mods: with(unreadable), rule: "write ahead", want: Wait, wake: 3 * time.Minute},
		{situation: "another unit's call is open beyond the deadline", mods: with(openFor(time.Hour)), rule: "write ahead", want: Wait, wake: 3 * time.Minute},
		{situation: "another unit's call was open", mods: with(openFor(-time.Second)), rule: "write ahead", want: StoreIntent},
		{situation: "list is old", mods: with(stale), rule: "look first", want: ListFabric, check: takesTurn},
		{situation: "list failed just now", mods: with(listFails(time.Second)), rule: "look first", want: Wait, wake: 6 * time.Second},
		{situation: "list failed a while ago", mods: with(listFails(time.Minute)), rule: "look first", want: ListFabric},
		{situation: "claim gone", mods: with(nobody), rule: "nobody wants it", want: Delete},
		{situation: "kept for the node's minimum", mods: with(nobody, kept), rule: "write ahead", want: StoreIntent},
		{situation: "kept, lease deleted by a person", mods: with(nobody, kept, deleting), rule: "nobody wants it", want: Delete},
		{situation: "lease deleted by a person", mods: with(deleting), rule: "nobody wants it", want: Delete},
		{situation: "model not configured here", mods: with(noModel), rule: "unknown model", want: Store, check: failed1("UnknownModel", device.BlameNode)},
		{situation: "deadline passed in the queue", mods: with(late, machineBusy), rule: "too late", want: Store, check: failed1("AttachTimeout", device.BlameUnit)},
		{situation: "another unit attaches", mods: with(machineBusy), rule: "machine busy", want: Wait, wake: 3 * time.Minute},
		{situation: "another node goes first", mods: with(outOfTurn), rule: "not its turn", want: Wait, wake: 3 * time.Minute, check: takesTurn},
		{situation: "another node goes first, list old", mods: with(outOfTurn, stale), rule: "not its turn", want: Wait, wake: 3 * time.Minute, check: takesTurn},
		{situation: "waits for its turn beyond the deadline of a call", mods: with(patient, acquired(8*time.Minute), machineBusy), rule: "machine busy", want: Wait, wake: time.Minute},
		{situation: "waited for its turn for too long", mods: with(patient, acquired(9*time.Minute), machineBusy), rule: "too late", want: Store, check: failed1("AttachTimeout", device.BlameUnit)},
		{situation: "the manager gives no identities", mods: with(bound, seen(ours), func(o *Observation) {
			o.Settings.Arrival = true
			o.Bus = append(o.Bus, Function{Address: other, Driver: "vfio-pci"})
		}), rule: "write ahead", want: StoreIntent, check: func(t *testing.T, d Decision) {
			t.Helper()
			if diff := cmp.Diff([]string{other.String(), string(ours)}, d.Lease.GPUsBefore); diff != "" {
				t.Errorf("what was here before (-want +got):\n%s", diff)
			}
		}},
		{situation: "an action runs", mods: with(running(Store)), rule: "running", want: Wait, check: leavesTurn},
		{situation: "the last look before the call runs", mods: with(running(ListFabric), stale), rule: "running", want: Wait, check: takesTurn},
		{situation: "storing failed just now", mods: with(tried(StoreIntent, time.Second, errTry)), rule: "write ahead", want: Wait, wake: time.Second},
	},
	device.Attaching: {
		// The call.
		{situation: "intent stored", mods: with(maySend), rule: "stored, machine as it was", want: SendAttach},
		{situation: "intent stored, another unit gave a device back", mods: with(maySend, alsoHere("d9", model), claimed("d9")), rule: "stored, machine as it was", want: SendAttach},
		{situation: "busy a while ago, another unit's call is open", mods: with(answered(device.FaultBusy, time.Minute), openFor(time.Minute)), rule: "refused, ask again", want: Wait, wake: time.Minute},
		{situation: "reply lost, listed, another unit's call is open", mods: with(here(ours), openFor(time.Minute)), rule: "one came", want: Store, check: became1},
		{situation: "intent stored, list old", mods: with(maySend, stale), rule: "look again", want: ListFabric, check: takesTurn},
		{situation: "intent stored, somebody attached another", mods: with(maySend, alsoHere("d9", model)), rule: "stored, not so any more", want: StoreIntent},
		{situation: "intent stored long ago, while the list failed", mods: with(maySend, settled), rule: "stored, machine as it was", want: SendAttach},
		{situation: "intent stored, claim gone", mods: with(maySend, nobody), rule: "stored and unwanted", want: Delete},
		{situation: "intent stored, kept", mods: with(maySend, nobody, kept), rule: "stored, machine as it was", want: SendAttach},
		{situation: "intent stored, lease deleted", mods: with(maySend, deleting), rule: "stored and unwanted", want: Delete},
		{situation: "intent stored, deadline passed", mods: with(maySend, late), rule: "stored, too late", want: Store, check: both(failed1("AttachTimeout", device.BlameUnit), unasked)},
		{situation: "intent stored, another unit's turn", mods: with(maySend, machineBusy), rule: "machine busy", want: Wait, wake: 3 * time.Minute},
		{situation: "intent stored, the turn was lost", mods: with(maySend, outOfTurn), rule: "stored, not its turn", want: Wait, wake: 3 * time.Minute, check: takesTurn},
		{situation: "busy a while ago, another node goes first", mods: with(answered(device.FaultBusy, time.Minute), outOfTurn), rule: "refused, ask again", want: Wait, wake: 3 * time.Minute, check: takesTurn},
		{situation: "reply lost, listed, another node goes first", mods: with(here(ours), outOfTurn), rule: "one came", want: Store, check: became1},
		{situation: "call runs", mods: with(maySend, running(SendAttach)), rule: "running", want: Wait},
		{situation: "a device that was attached without a lease", mods: with(never, became, nobody, here(ours), bound, seen(ours)), rule: "seen by all", want: Store},
		// What the manager works on.
		{situation: "the manager works on it", mods: with(works(time.Second)), rule: "work to be named", want: Store, check: worksOn1},
		{situation: "the manager works on it, too late", mods: with(works(time.Second), late), rule: "work to be named", want: Store, check: worksOn1},
		{situation: "asked just now", mods: with(works(time.Second), named1), rule: "work goes on", want: Wait, wake: 2 * time.Second},
		{situation: "asked a moment ago", mods: with(works(4*time.Second), named1), rule: "work goes on, look", want: Poll},
		{situation: "looked at just now", mods: with(works(time.Second), named1, tried(Poll, time.Second, nil)), rule: "work goes on", want: Wait, wake: 2 * time.Second},
		{situation: "looked at a moment ago, listed meanwhile", mods: with(works(4*time.Second), named1, tried(Poll, 4*time.Second, nil), here(ours)), rule: "work goes on, look", want: Poll},
		{situation: "work of a former run", mods: with(named1, stale), rule: "work goes on, look", want: Poll},
		{situation: "work of a former run, the look failed", mods: with(named1, tried(Poll, time.Second, errTry)), rule: "work goes on", want: Wait, wake: 6 * time.Second},
		{situation: "work waits for a person", mods: with(works(4*time.Second), named1, waitsForPerson, tried(Poll, 4*time.Second, nil)), rule: "work goes on", want: Wait, wake: 3 * time.Second},
		{situation: "work waits for a person, too late", mods: with(works(4*time.Second), named1, waitsForPerson, late), rule: "work goes on, too late", want: Store, check: both(asked1, worksOn1)},
		{situation: "work waits for a person for longer than a call may take", mods: with(patient, acquired(8*time.Minute), asked(5*time.Minute), works(4*time.Second), named1, waitsForPerson), rule: "work goes on, too late", want: Store, check: both(asked1, worksOn1)},
		{situation: "work goes on, the deadline comes first", mods: with(works(time.Second), named1, acquired(4*time.Minute-time.Second)), rule: "work goes on", want: Wait, wake: time.Second},
		{situation: "work goes on, too late", mods: with(works(4*time.Second), named1, late), rule: "work goes on, too late", want: Store, check: both(both(failed1("AttachTimeout", device.BlameUnit), asked1), worksOn1)},
		{situation: "work goes on, too late for nobody", mods: with(works(4*time.Second), named1, late, nobody), rule: "work goes on, look", want: Poll},
		{situation: "asked a while ago, after a long wait for its turn", mods: with(patient, acquired(6*time.Minute), works(4*time.Second), named1), rule: "work goes on, look", want: Poll},
		{situation: "asked long ago, after a long wait for its turn", mods: with(patient, acquired(8*time.Minute), asked(5*time.Minute), works(4*time.Second), named1), rule: "work goes on, too late", want: Store, check: worksOn1},
		{situation: "busy for longer than a call may take", mods: with(patient, acquired(8*time.Minute), asked(5*time.Minute), answered(device.FaultBusy, time.Minute)), rule: "refused, ask again", want: StoreIntent},
		{situation: "work ended, listed", mods: with(answered("", time.Second), named1, here(ours)), rule: "one came", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.Work != "" {
				t.Errorf("work = %q: the next run would ask what became of it, and take that for a detach's", d.Lease.Work)
			}
		}},
		{situation: "work refused", mods: with(answered(device.FaultRejected, time.Second), named1), rule: "refused for good", want: Store, check: both(failed1("Rejected", device.BlameUnit), unasked)},
		// Its outcome.
		{situation: "the wanted one came", mods: with(wanted, alsoHere("d9", model), here(ours)), rule: "one came", want: Store, check: became1},
		{situation: "the wanted one is of another name in the list", mods: with(wanted, alsoHere("d1", "its full name")), rule: "one came", want: Store, check: became1},
		{situation: "another came than the wanted one", mods: with(wanted, alsoHere("d9", model)), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "done minutes ago, the list lags", mods: with(answered("", 2*time.Minute), looked(10*time.Second)), rule: "unknown, may still come", want: Wait, wake: 5 * time.Second},
		{situation: "refused for good, kept", mods: with(answered(device.FaultNoCapacity, time.Second), nobody, kept), rule: "refused for good", want: Store, check: failed1("NoCapacity", device.BlameModel)},
		{situation: "nothing came in time, kept", mods: with(settled, nobody, kept, late), rule: "nothing came in time", want: Store, check: failed1("AttachTimeout", device.BlameUnit)},
		{situation: "reply done, listed", mods: with(answered("", time.Second), here(ours)), rule: "one came", want: Store, check: became1},
		{situation: "reply lost, listed", mods: with(answered(device.FaultUnknown, time.Second), here(ours)), rule: "one came", want: Store, check: became1},
		{situation: "two came, and the first may be another unit's", mods: with(alsoHere("d0", model), alsoHere("d1", model), awaitedFirst), rule: "one came", want: Store, check: became1},
		{situation: "restart, listed", mods: with(here(ours)), rule: "one came", want: Store, check: became1},
		{situation: "restart, listed, another lease cannot be read", mods: with(here(ours), unreadable), rule: "a lease is unreadable", want: Wait, wake: 3 * time.Minute},
		{situation: "too late, listed, another lease cannot be read", mods: with(late, settled, here(ours), unreadable), rule: "nothing came in time", want: Store},
		{situation: "reply done, listed, the configuration lost the model", mods: with(answered("", time.Second), here(ours), noModel), rule: "one came", want: Store, check: became1},
		{situation: "restart, claim gone, listed", mods: with(nobody, here(ours)), rule: "one came", want: Store, check: became1},
		{situation: "too late, but it came", mods: with(late, settled, here(ours)), rule: "one came", want: Store, check: became1},
		{situation: "what came was there before", mods: with(here(ours), before("d1")), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "what came is another unit's", mods: with(here(ours), claimed("d1")), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "what came is of another model", mods: with(alsoHere("d1", "H100")), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "a device of before left", mods: with(before("d7")), rule: "one left meanwhile", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if len(d.Lease.SetBefore) != 0 || d.Lease.AskedAt != ago(2*time.Second) || d.Lease.Phase != device.Attaching {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "restart, nothing listed", rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "restart, nothing listed, time for a look", mods: with(looked(time.Minute)), rule: "unknown, may still come", want: ListFabric},
		{situation: "reply lost, nothing listed", mods: with(answered(device.FaultUnknown, time.Second)), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "reply done, nothing listed yet", mods: with(answered("", time.Second)), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "reply lost, too late, may still come", mods: with(late), rule: "nothing came in time", want: Store, check: both(failed1("AttachTimeout", device.BlameUnit), asked1)},
		{situation: "reply lost, claim gone, too late, may still come", mods: with(late, nobody), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "nothing came", mods: with(settled), rule: "nothing came, ask again", want: StoreIntent},
		{situation: "nothing came by the last list, which was asked too early", mods: with(settledSince(500 * time.Millisecond)), rule: "unknown, may still come", want: ListFabric},
		{situation: "the call took long, and ended without an answer", mods: with(settled, answered(device.FaultUnknown, 10*time.Second), looked(time.Second)), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "asked long ago by a former run, found just now", mods: with(settled, foundBefore(10*time.Second)), rule: "unknown, may still come", want: Wait, wake: 4 * time.Second},
		{situation: "asked and found long ago", mods: with(settled, foundBefore(time.Hour)), rule: "nothing came, ask again", want: StoreIntent},
		{situation: "the call took long and ended too late without an answer", mods: with(settled, late, answered(device.FaultUnknown, 10*time.Second)), rule: "nothing came in time", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.AskedAt != ago(10*time.Second) {
				t.Errorf("asked at %s: it settles from the end of the call", d.Lease.AskedAt)
			}
		}},
		{situation: "it may come for another second", mods: with(settledSince(-time.Second)), rule: "unknown, may still come", want: Wait, wake: time.Second},
		{situation: "nothing came, too late", mods: with(settled, late), rule: "nothing came in time", want: Store, check: failed1("AttachTimeout", device.BlameUnit)},
		{situation: "nothing came, claim gone", mods: with(settled, nobody), rule: "nothing came, unwanted", want: Delete},
		{situation: "refused: none free", mods: with(answered(device.FaultNoCapacity, time.Second)), rule: "refused for good", want: Store, check: both(failed1("NoCapacity", device.BlameModel), unasked)},
		{situation: "refused: machine unknown", mods: with(answered(device.FaultNotFound, time.Second)), rule: "refused for good", want: Store, check: both(failed1("NotFound", device.BlameNode), unasked)},
		{situation: "refused: bad request", mods: with(answered(device.FaultRejected, time.Second)), rule: "refused for good", want: Store, check: both(failed1("Rejected", device.BlameUnit), unasked)},
		{situation: "refused: unsupported", mods: with(answered(device.FaultUnsupported, time.Second)), rule: "refused for good", want: Store, check: failed1("Unsupported", device.BlameModel)},
		{situation: "refused, claim gone", mods: with(answered(device.FaultNoCapacity, time.Second), nobody), rule: "refused, unwanted", want: Delete},
		{situation: "refused, and a person attached one", mods: with(answered(device.FaultNoCapacity, time.Second), here(ours)), rule: "refused for good", want: Store, check: failed1("NoCapacity", device.BlameModel)},
		{situation: "stored, the configuration lost the model", mods: with(maySend, noModel), rule: "stored, model gone", want: Store, check: both(failed1("UnknownModel", device.BlameNode), unasked)},
		{situation: "busy a while ago, the configuration lost the model", mods: with(answered(device.FaultBusy, time.Minute), noModel), rule: "refused, ask again", want: Store, check: both(failed1("UnknownModel", device.BlameNode), unasked)},
		{situation: "busy just now", mods: with(answered(device.FaultBusy, time.Second)), rule: "refused for now", want: Wait, wake: 6 * time.Second},
		{situation: "busy a while ago", mods: with(answered(device.FaultBusy, time.Minute)), rule: "refused, ask again", want: StoreIntent},
		{situation: "login refused a while ago", mods: with(answered(device.FaultUnauthorized, time.Minute)), rule: "refused, ask again", want: StoreIntent},
		{situation: "not reached a while ago", mods: with(answered(device.FaultUnreachable, time.Minute)), rule: "refused, ask again", want: StoreIntent},
		{situation: "suspended a while ago", mods: with(answered(device.FaultSuspended, time.Minute)), rule: "refused, ask again", want: StoreIntent},
		{situation: "conflict a while ago", mods: with(answered(device.FaultConflict, time.Minute)), rule: "refused, ask again", want: StoreIntent},
		{situation: "busy until too late", mods: with(answered(device.FaultBusy, time.Second), late), rule: "refused, too late", want: Store, check: both(failed1("AttachTimeout", device.BlameUnit), unasked)},
		{situation: "list fails, too late", mods: with(listFails(time.Minute), late), rule: "too late, list fails", want: Store, check: both(failed1("AttachTimeout", device.BlameUnit), asked1)},
		{situation: "list fails, not too late", mods: with(listFails(time.Minute)), rule: "look again", want: ListFabric, check: leavesTurn},
		{situation: "list failed, the deadline comes first", mods: with(listFails(time.Second), func(o *Observation) { o.Lease.AcquiredAt = ago(4*time.Minute - time.Second) }), rule: "look again", want: Wait, wake: time.Second},
		// The device.
		{situation: "all show it", mods: with(became, here(ours), bound, seen(ours)), rule: "seen by all", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.Phase != device.Attached || d.Lease.UUID != ours || d.Lease.PCI != slot || d.Lease.Attempt != onCall {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "all show it, claim gone", mods: with(became, nobody, here(ours), bound, seen(ours)), rule: "seen by all", want: Store},
		{situation: "all show it, too late", mods: with(became, late, here(ours), bound, seen(ours)), rule: "seen by all", want: Store},
		{situation: "all show it, list old", mods: with(became, stale, here(ours), bound, seen(ours)), rule: "look again", want: ListFabric},
		{situation: "NVML shows it, the bus does not", mods: with(became, here(ours), seen(ours), longAgo), rule: "not on the bus", want: Rescan},
		{situation: "NVML shows another", mods: with(became, here(ours), bound, seen(alien), longAgo), rule: "not on the bus", want: Rescan},
		{situation: "just attached, nothing on the bus", mods: with(became, here(ours)), rule: "coming", want: Wait, wake: 2 * time.Second},
		{situation: "nothing on the bus for a while", mods: with(became, here(ours), longAgo), rule: "not on the bus", want: Rescan},
		{situation: "nothing on the bus, another unit leaves", mods: with(became, here(ours), longAgo, leaving), rule: "coming", want: Wait, wake: 2 * time.Second},
		{situation: "nothing at the slots by a rescan", mods: with(became, here(ours), longAgo, tried(Rescan, time.Minute, nil)), rule: "not on the bus", want: RescanAll},
		{situation: "rescanned everywhere just now", mods: with(became, here(ours), longAgo, tried(Rescan, time.Minute, nil), tried(RescanAll, time.Second, nil)), rule: "coming", want: Wait, wake: 2 * time.Second},
		{situation: "rescanned just now", mods: with(became, here(ours), longAgo, tried(Rescan, time.Second, nil)), rule: "coming", want: Wait, wake: 2 * time.Second},
		{situation: "no driver for a while", mods: with(became, here(ours), unbound, longAgo), rule: "no driver", want: Bind, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.PCI != slot {
				t.Errorf("bind %s", d.Lease.PCI)
			}
		}},
		{situation: "bound, NVML does not show it", mods: with(became, here(ours), bound), rule: "not in NVML", want: Discover},
		{situation: "bound, NVML does not answer", mods: with(became, here(ours), bound, silent), rule: "not in NVML", want: Discover},
		{situation: "bound, NVML asked just now", mods: with(became, here(ours), bound, tried(Discover, time.Second, nil)), rule: "coming", want: Wait, wake: 2 * time.Second},
		{situation: "not usable in time", mods: with(became, here(ours), unbound, late), rule: "not seen, too late", want: Store, check: both(failed1("NotUsable", device.BlameNode), func(t *testing.T, d Decision) {
			t.Helper()
			if !d.Lease.PCI.IsZero() || d.Lease.UUID != ours {
				t.Errorf("what was on the bus before is not known, so nothing may be taken off it: %s %s", d.Lease.PCI, d.Lease.UUID)
			}
		})},
		{situation: "not usable in time, one came", mods: with(became, here(ours), unbound, late, busBefore()), rule: "not seen, too late", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.PCI != slot {
				t.Errorf("PCI = %s", d.Lease.PCI)
			}
		}},
		{situation: "not usable in time, a built-in one has no driver", mods: with(became, here(ours), unbound, late, busBefore(slot)), rule: "not seen, too late", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if !d.Lease.PCI.IsZero() {
				t.Errorf("PCI = %s, which was there before", d.Lease.PCI)
			}
		}},
		{situation: "taken away while attaching", mods: with(became), rule: "taken away", want: Store, check: failed1("Vanished", device.BlameUnit)},
		{situation: "arrived broken", mods: with(became, here(ours), critical, bound, seen(ours)), rule: "critical", want: Store, check: failed1("DeviceCritical", device.BlameUnit)},
		{situation: "manager gives no identity, one came", mods: with(became, here(""), bound, seen(ours), arrival()), rule: "seen by all", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.Phase != device.Attached || d.Lease.UUID != ours || d.Lease.PCI != slot {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "manager gives no identity, one came beside another unit's and one of before", mods: with(became, here(""), bound, seen(ours), alsoSeen, anothers(alien), arrival("GPU-before")), rule: "seen by all", want: Store},
		{situation: "manager gives no identity, all were there before", mods: with(became, here(""), bound, seen(ours), alsoSeen, arrival(string(ours), other.String()), longAgo), rule: "not on the bus", want: Rescan},
		{situation: "manager gives no identity, two came", mods: with(became, here(""), bound, seen(ours), alsoSeen, arrival()), rule: "several came", want: Store, check: both(failed1("Ambiguous", device.BlameUnit), func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.UUID != "" || d.Lease.FabricDevice != "d1" {
				t.Errorf("lease = %+v", d.Lease)
			}
		})},
		{situation: "manager gives no identity, one came, somebody attached another", mods: with(became, here(""), handAttached, bound, seen(ours), arrival(), longAgo), rule: "not on the bus", want: Rescan},
		{situation: "manager gives identities, two came", mods: with(became, here(ours), bound, seen(ours), alsoSeen, arrival()), rule: "seen by all", want: Store},
		{situation: "manager gives a serial number, nothing came yet", mods: with(became, here(""), numbered, longAgo), rule: "not on the bus", want: Rescan},
		{situation: "manager gives a serial number that no GPU has", mods: with(became, here(""), numbered, bound, seen(ours), late), rule: "not seen, too late", want: Store, check: both(failed1("NotUsable", device.BlameNode), func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.UUID != "" || !strings.Contains(d.Why, "serial number 1650522000042") {
				t.Errorf("UUID = %q, %s", d.Lease.UUID, d.Why)
			}
		})},
		{situation: "manager gives a serial number, a GPU of another one came", mods: with(became, here(""), numbered, bound, seen(ours), had(), longAgo), rule: "not on the bus", want: Rescan},
		{situation: "manager gives no identity", mods: with(became, here(""), bound, seen(ours)), rule: "no identity", want: Store, check: failed1("NoIdentity", device.BlameUnit)},
	},
	device.Attached: {
		{situation: "claim waits", mods: with(serves(onCall)), rule: "tell", want: Tell},
		{situation: "claim waits, list old", mods: with(serves(onCall), stale), rule: "tell", want: Tell},
		{situation: "claim was told", mods: with(serves(onCall), told), rule: "in use", want: Wait},
		{situation: "ready offer, nobody waits", mods: with(serves(ready)), rule: "in use", want: Wait},
		{situation: "telling failed just now", mods: with(serves(onCall), tried(Tell, time.Second, errTry)), rule: "telling failed", want: Wait, wake: 2 * time.Second},
		{situation: "telling failed a while ago", mods: with(serves(onCall), tried(Tell, time.Minute, errTry)), rule: "tell", want: Tell},
		{situation: "still drained from a release called back", mods: with(serves(onCall), draining), rule: "drained by mistake", want: Undrain},
		{situation: "undrained just now, still drained", mods: with(serves(onCall), draining, tried(Undrain, time.Second, nil)), rule: "still drained", want: Wait, wake: 2 * time.Second},
		{situation: "drained by a former run", mods: with(serves(onCall), seen(""), draining), rule: "drained by a former run", want: Undrain},
		{situation: "claim gone, still prepared", mods: with(prepared), rule: "still prepared", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.HeldBy != "a container of claim a/c9" || d.Lease.Phase != device.Attached || !d.Lease.IdleSince.IsZero() {
				t.Errorf("the lease does not say who keeps it: %+v", d.Lease)
			}
		}},
		{situation: "claim gone, still prepared, as told", mods: with(prepared, heldBy("a container"), toldHeld), rule: "still prepared", want: Wait},
		{situation: "idle, prepared by its ready entry just now", mods: with(idle, prepared), rule: "still prepared", want: Wait},
		{situation: "claim gone, checkpoint unknown", mods: with(unknown), rule: "still prepared", want: Wait},
		{situation: "claim gone, unprepared", rule: "who has it open", want: FindHolders},
		{situation: "claim gone, note of a prepare", mods: with(noted), rule: "stale note", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if len(d.Lease.PreparedFor) != 0 || d.Lease.Phase != device.Attached {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "claim gone, noted and prepared", mods: with(noted, prepared), rule: "still prepared", want: Store},
		{situation: "a process has it open", mods: with(scanned(time.Second), heldBy("pid 7")), rule: "held", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.HeldBy != "pid 7" || !d.Lease.IdleSince.IsZero() {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "a process has it open, as told", mods: with(scanned(time.Second), heldBy("pid 7"), toldHeld), rule: "held", want: Wait, wake: 29 * time.Second},
		{situation: "nobody has it, list old", mods: with(scanned(time.Second), stale), rule: "look before it is offered", want: ListFabric},
		{situation: "nobody has it, the manager cannot be asked", mods: with(scanned(time.Second), listFails(time.Second)), rule: "becomes idle", want: Store},
		{situation: "nobody has it, the manager calls it critical", mods: with(scanned(time.Second), critical), rule: "critical", want: Store, check: failed1("DeviceCritical", device.BlameUnit)},
		{situation: "idle, kept", mods: with(idle, kept), rule: "idle", want: Wait, wake: 20*time.Minute - time.Second},
		{situation: "idle for long, the list is old", mods: with(idle, looked(20*time.Minute), stale), rule: "idle, look now and then", want: ListFabric},
		{situation: "idle, the manager calls it critical", mods: with(idle, critical), rule: "idle and critical", want: Store, check: failed1("DeviceCritical", device.BlameUnit)},
		{situation: "idle, it was critical when the list was read long ago", mods: with(idle, critical, stale), rule: "idle", want: Wait, wake: 20*time.Minute - time.Second},
		{situation: "idle, and shown no more", mods: with(idle, unseen, tried(Discover, time.Second, nil)), rule: "idle and not seen", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.Phase != device.Attached || d.Lease.Idle() {
				t.Errorf("lease %+v", d.Lease)
			}
		}},
		{situation: "shown no more since a moment", mods: with(unseen, unseenFor(time.Second), tried(Discover, time.Second, nil)), rule: "unusable", want: Wait, wake: 2 * time.Second},
		{situation: "shown no more for a while", mods: with(unseen, unseenFor(time.Minute), tried(Discover, 6*time.Second, nil)), rule: "unusable", want: Wait, wake: 7 * time.Second},
		{situation: "shown no more for long", mods: with(unseen, unseenFor(time.Hour), tried(Discover, time.Second, nil)), rule: "not seen, too late", want: Store, check: failed1("NotUsable", device.BlameUnit)},
		{situation: "the driver has not answered for long", mods: with(silent, unseenFor(time.Hour), tried(Discover, time.Second, errTry)), rule: "not seen, too late", want: Store, check: failed1("NotUsable", device.BlameNode)},
		{situation: "shown no more for long, its claim was not told", mods: with(serves(onCall), unseen, unseenFor(time.Hour), tried(Discover, time.Second, nil)), rule: "not seen, too late", want: Store, check: failed1("NotUsable", device.BlameUnit)},
		{situation: "shown no more for long, a Pod is bound to it", mods: with(serves(ready), unseen, unseenFor(time.Hour), tried(Discover, time.Second, nil)), rule: "not seen, too late", want: Store, check: failed1("NotUsable", device.BlameUnit)},
		{situation: "shown no more for long, a container has it", mods: with(serves(ready), prepared, unseen, unseenFor(time.Hour), tried(Discover, time.Second, nil)), rule: "unusable", want: Wait, wake: 7 * time.Second},
		{situation: "nobody has it", mods: with(scanned(time.Second)), rule: "becomes idle", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.IdleSince != now || d.Lease.Phase != device.Attached {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "idle", mods: with(idle), rule: "idle", want: Wait, wake: 20*time.Minute - time.Second},
		{situation: "idle, lease deleted", mods: with(idle, deleting), rule: "wanted back", want: Store, check: phase1(device.Releasing)},
		{situation: "in use, lease deleted", mods: with(serves(ready), deleting), rule: "in use", want: Wait},
		{situation: "at another address after a restart of the node", mods: with(idle, at(other)), rule: "moved", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.PCI != other || d.Lease.IdleSince.IsZero() {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "gone from the bus", mods: with(serves(ready), offBus, stale), rule: "unseen, look", want: ListFabric},
		{situation: "gone from bus and fabric", mods: with(serves(ready), offBus, notHere), rule: "taken away", want: Store, check: failed1("Vanished", device.BlameUnit)},
		{situation: "gone from the bus, list fails", mods: with(serves(ready), offBus, listFails(time.Second), longAgo), rule: "off the bus", want: Rescan},
		{situation: "gone from the bus, list lacks it but is old", mods: with(serves(ready), offBus, notHere, listFails(time.Second)), rule: "unusable", want: Wait, wake: 2 * time.Second},
		{situation: "NVML does not answer", mods: with(serves(ready), silent), rule: "not in NVML", want: Discover},
		{situation: "NVML does not answer, asked just now", mods: with(serves(ready), silent, tried(Discover, time.Second, errTry)), rule: "unusable", want: Wait, wake: 2 * time.Second},
		{situation: "driver gone", mods: with(serves(ready), unbound, unseen, longAgo), rule: "no driver", want: Bind},
		{situation: "off the bus, on the fabric", mods: with(serves(ready), offBus, longAgo), rule: "off the bus", want: Rescan, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.PCI != slot {
				t.Errorf("rescan at %s, want where it was, %s", d.Lease.PCI, slot)
			}
		}},
		{situation: "off the bus, rescan where it was brought nothing", mods: with(serves(ready), offBus, longAgo, tried(Rescan, time.Minute, nil)), rule: "off the bus", want: RescanAll},
		{situation: "off the bus, another unit leaves", mods: with(serves(ready), offBus, longAgo, leaving), rule: "unusable", want: Wait, wake: 2 * time.Second},
	},
	device.Releasing: {
		{situation: "nobody has it", rule: "drain", want: Drain},
		{situation: "not looked for holders yet", mods: with(scanned(time.Minute)), rule: "who has it open", want: FindHolders},
		{situation: "a process had it open", mods: with(scanned(time.Second), wasHeld), rule: "let go", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.HeldBy != "" || d.Lease.Phase != device.Releasing {
				t.Errorf("lease %+v", d.Lease)
			}
		}},
		{situation: "a container had it, off the bus", mods: with(wasHeld, offBus), rule: "let go", want: Store},
		{situation: "a process had it open, not looked for yet", mods: with(wasHeld, unscanned), rule: "who has it open", want: FindHolders},
		{situation: "a process has it open", mods: with(heldBy("pid 7")), rule: "held", want: Store},
		{situation: "a process has it open, as told", mods: with(heldBy("pid 7"), toldHeld), rule: "held", want: Wait, wake: 29 * time.Second},
		{situation: "prepared", mods: with(prepared), rule: "still prepared", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.HeldBy == "" || d.Lease.Phase != device.Releasing {
				t.Errorf("the lease does not say who keeps it: %+v", d.Lease)
			}
		}},
		{situation: "prepared, as told", mods: with(prepared, heldBy("a container"), toldHeld), rule: "still prepared", want: Wait},
		{situation: "checkpoint unknown", mods: with(unknown), rule: "still prepared", want: Wait},
		{situation: "the driver hides it, list old", mods: with(unseen, stale), rule: "known by its address, look", want: ListFabric, check: leavesTurn},
		{situation: "the driver hides it, and was not asked", mods: with(unseen), rule: "known by its address, ask the driver", want: Discover},
		{situation: "the driver hides it", mods: with(unseen, tried(Discover, time.Second, nil)), rule: "off the bus", want: Remove},
		{situation: "the driver does not answer", mods: with(silent, tried(Discover, time.Second, errTry)), rule: "off the bus", want: Remove},
		{situation: "the driver hides it, drained by this process", mods: with(unseen, tried(Drain, time.Second, nil)), rule: "off the bus", want: Remove},
		{situation: "off the bus, something came to its address", mods: with(unseen, here(ours), tried(Remove, 2*time.Second, nil)), rule: "not found, ask the driver", want: Discover},
		{situation: "off the bus, something that the driver does not know came to its address", mods: with(unseen, here(ours), tried(Remove, 2*time.Second, nil), tried(Discover, time.Second, nil)), rule: "off the fabric", want: SendDetach},
		{situation: "off the bus, and it came back", mods: with(bound, here(ours), seen(ours), tried(Remove, time.Minute, nil)), rule: "drain", want: Drain},
		{situation: "detached, something else came to its address", mods: with(unseen, notHere, tried(Remove, 2*time.Second, nil), answered("", time.Second)), rule: "back in the pool", want: Delete},
		{situation: "detached by a former run, something else came to its address", mods: with(unseen, notHere, foundBefore(time.Hour), tried(Discover, time.Second, nil)), rule: "not listed, but not detached by us", want: SendDetach},
		{situation: "prepared, off the bus", mods: with(prepared, offBus, heldBy("a container"), toldHeld), rule: "still prepared", want: Wait},
		{situation: "checkpoint unknown, off the bus", mods: with(unknown, offBus), rule: "still prepared", want: Wait},
		{situation: "drain failed just now", mods: with(tried(Drain, time.Second, errTry)), rule: "not drained", want: Wait, wake: 2 * time.Second},
		{situation: "drained, not looked since", mods: with(draining, tried(Drain, time.Second/2, nil)), rule: "opened meanwhile?", want: FindHolders},
		{situation: "drained, opened meanwhile", mods: with(draining, tried(Drain, 2*time.Second, nil), heldBy("pid 7")), rule: "opened meanwhile", want: Undrain},
		{situation: "drained, opened, undraining does not help", mods: with(draining, tried(Drain, 2*time.Second, nil), tried(Undrain, time.Second, nil), heldBy("pid 7")), rule: "held on the bus", want: Store},
		{situation: "drained, nobody has it", mods: with(draining, tried(Drain, 2*time.Second, nil)), rule: "off the bus", want: Remove},
		{situation: "drained unseen by NVML, nobody has it", mods: with(tried(Drain, 2*time.Second, nil)), rule: "off the bus", want: Remove},
		{situation: "drained, removed, and back by a rescan", mods: with(tried(Drain, 20*time.Second, nil), tried(Remove, 15*time.Second, nil)), rule: "not drained", want: Wait, wake: 2 * time.Second},
		{situation: "driver does not show it, nobody has it", mods: with(unseen, tried(Discover, time.Second, nil)), rule: "off the bus", want: Remove},
		{situation: "driver does not show it, a process has it", mods: with(unseen, tried(Discover, time.Second, nil), heldBy("pid 7")), rule: "held on the bus", want: Store},
		{situation: "drained by a former run", mods: with(seen(""), draining), rule: "drained by a former run", want: Undrain},
		{situation: "removed just now, still there", mods: with(draining, tried(Drain, 2*time.Second, nil), tried(Remove, time.Second, nil)), rule: "not off the bus", want: Wait, wake: 2 * time.Second},
		{situation: "off the bus", mods: with(offBus), rule: "off the fabric", want: SendDetach},
		{situation: "off the bus, list old", mods: with(offBus, stale), rule: "look", want: ListFabric, check: takesTurn},
		{situation: "off the bus, another node goes first", mods: with(offBus, outOfTurn), rule: "not its turn", want: Wait, check: takesTurn},
		{situation: "detached, another node goes first", mods: with(offBus, outOfTurn, notHere, answered("", time.Second)), rule: "back in the pool", want: Delete},
		{situation: "reply lost, still listed, another node goes first", mods: with(offBus, outOfTurn, answered(device.FaultUnknown, time.Second)), rule: "unknown, may still go", want: Wait, wake: 4 * time.Second},
		{situation: "off the bus, another unit's call", mods: with(offBus, machineBusy), rule: "machine busy", want: Wait},
		{situation: "its address is not known, something is on the bus", mods: with(bound, silent, nowhere), rule: "not found, ask the driver", want: Discover},
		{situation: "its address is not known, the driver was asked", mods: with(bound, silent, nowhere, tried(Discover, time.Second, nil)), rule: "off the fabric", want: SendDetach},
		{situation: "the manager works on it", mods: with(offBus, works(time.Second)), rule: "work to be named", want: Store, check: worksOn1},
		{situation: "the manager works on it, looked at a moment ago", mods: with(offBus, works(4*time.Second), named1), rule: "work goes on, look", want: Poll},
		{situation: "the manager works on it, looked at just now", mods: with(offBus, works(time.Second), named1), rule: "work goes on", want: Wait, wake: 2 * time.Second},
		{situation: "the manager works on it, back on the bus by a rescan, allocated", mods: with(works(time.Second), named1, serves(ready)), rule: "work goes on", want: Wait, wake: 2 * time.Second},
		{situation: "work of a former run", mods: with(offBus, named1, foundBefore(time.Second)), rule: "work goes on, look", want: Poll},
		{situation: "the manager gives no identity, one came", mods: with(anonymous, notHere, here(""), arrival()), rule: "found", want: Store},
		{situation: "the manager gives no identity, two came", mods: with(anonymous, notHere, here(""), alsoSeen, arrival()), rule: "which one cannot be told", want: Store, check: failed1("NoIdentity", device.BlameUnit)},
		{situation: "the manager gives no identity this time, one came", mods: with(anonymous, notHere, here(""), had()), rule: "found", want: Store},
		{situation: "the manager gives no identity this time, no driver has what came", mods: with(anonymous, notHere, here(""), unbound, unseen, had()), rule: "known by its arrival", want: Store},
		{situation: "the manager gives no identity this time, two came", mods: with(anonymous, notHere, here(""), alsoSeen, had()), rule: "which one cannot be told", want: Store, check: failed1("NoIdentity", device.BlameUnit)},
		{situation: "the manager gives no identity, what was here before is not known", mods: with(anonymous, notHere, here(""), failedBefore), rule: "which one cannot be told", want: Store, check: failed1("DeviceCritical", device.BlameUnit)},
		{situation: "the manager gives no identity, it is not on the bus", mods: with(anonymous, notHere, here(""), offBus, had()), rule: "off the fabric", want: SendDetach},
		{situation: "the manager gives no identity, it was taken off the bus by its address", mods: with(anonymous, notHere, here(""), had(), alsoSeen, tried(Remove, time.Second, nil)), rule: "off the fabric", want: SendDetach},
		{situation: "another unit is at the stored address", mods: with(seen(alien)), rule: "off the fabric", want: SendDetach},
		{situation: "another unit is at the stored address, NVML silent", mods: with(silent, taken, tried(Discover, time.Second, nil)), rule: "off the fabric", want: SendDetach},
		{situation: "manager is busy", mods: with(offBus, answered(device.FaultBusy, time.Second)), rule: "refused for now", want: Wait, wake: 6 * time.Second, check: takesTurn},
		{situation: "manager said done, still listed", mods: with(offBus, answered("", time.Second)), rule: "detached, still listed", want: Wait, wake: 4 * time.Second},
		{situation: "manager said done a while ago, still listed", mods: with(offBus, answered("", time.Minute), looked(10*time.Second)), rule: "detached, still listed", want: ListFabric},
		{situation: "manager said done long ago, still listed", mods: with(offBus, answered("", time.Hour)), rule: "off the fabric", want: SendDetach},
		{situation: "reply lost, still listed", mods: with(offBus, answered(device.FaultUnknown, time.Second)), rule: "unknown, may still go", want: Wait, wake: 4 * time.Second},
		{situation: "reply lost, still listed, time for a look", mods: with(offBus, answered(device.FaultUnknown, time.Minute), looked(10*time.Second)), rule: "unknown, may still go", want: ListFabric},
		{situation: "found so after a restart", mods: with(offBus, foundBefore(time.Second)), rule: "unknown, may still go", want: Wait, wake: 4 * time.Second},
		{situation: "found so after a restart, and settled", mods: with(offBus, foundBefore(time.Hour)), rule: "off the fabric", want: SendDetach},
		{situation: "found on the bus after a restart, and taken off", mods: with(offBus, foundBefore(time.Second), tried(Remove, time.Second, nil)), rule: "off the fabric", want: SendDetach},
		{situation: "found so after a restart, busy since", mods: with(offBus, foundBefore(time.Second), answered(device.FaultBusy, time.Minute)), rule: "off the fabric", want: SendDetach},
		{situation: "reply lost, still listed when settled", mods: with(offBus, answered(device.FaultUnknown, time.Hour)), rule: "off the fabric", want: SendDetach},
		{situation: "no longer listed", mods: with(offBus, notHere, answered("", time.Second)), rule: "back in the pool", want: Delete},
		{situation: "no longer listed, reply lost", mods: with(offBus, notHere, answered(device.FaultUnknown, time.Second)), rule: "back in the pool", want: Delete},
		{situation: "not listed, detached all the same, reply lost", mods: with(offBus, notHere, answered(device.FaultUnknown, time.Second), unlisted), rule: "unknown, may still go", want: Wait, wake: 4 * time.Second},
		{situation: "not listed, detached all the same, reply lost long ago", mods: with(offBus, notHere, answered(device.FaultUnknown, time.Hour), unlisted), rule: "back in the pool", want: Delete},
		{situation: "not listed, detached all the same, done", mods: with(offBus, notHere, answered("", time.Second), unlisted), rule: "back in the pool", want: Delete},
		{situation: "no longer listed, and the manager does not know it", mods: with(offBus, notHere, answered(device.FaultNotFound, time.Second)), rule: "back in the pool", want: Delete},
		{situation: "no longer listed, nobody had it detached", mods: with(offBus, notHere), rule: "not listed, but not detached by us", want: SendDetach},
		{situation: "no longer listed, the manager was busy just now", mods: with(offBus, notHere, answered(device.FaultBusy, time.Second)), rule: "refused for now", want: Wait, wake: 6 * time.Second},
		{situation: "no longer listed, the manager was busy", mods: with(offBus, notHere, answered(device.FaultBusy, time.Minute)), rule: "not listed, but not detached by us", want: SendDetach},
		{situation: "no longer listed, list old", mods: with(offBus, notHere, stale), rule: "look", want: ListFabric},
		{situation: "no longer listed, prepared", mods: with(offBus, notHere, prepared), rule: "still prepared", want: Store},
		{situation: "allocated meanwhile", mods: with(serves(onCall)), rule: "wanted again", want: Store, check: phase1(device.Attached)},
		{situation: "allocated meanwhile, lease deleted", mods: with(serves(ready), deleting), rule: "wanted again", want: Store, check: phase1(device.Attached)},
		{situation: "allocated after the drain", mods: with(serves(onCall), draining), rule: "wanted again, drained", want: Undrain},
		{situation: "allocated after an unseen drain", mods: with(serves(onCall), tried(Drain, time.Second, nil)), rule: "wanted again, drained", want: Undrain},
		{situation: "allocated after the drain, undraining does not help", mods: with(serves(onCall), draining, tried(Undrain, time.Second, errTry)), rule: "wanted again", want: Store, check: phase1(device.Attached)},
		{situation: "allocated when what failed goes back", mods: with(serves(onCall), failedBefore), rule: "drain", want: Drain},
		{situation: "allocated when what was never identified goes back", mods: with(serves(onCall), anonymous), rule: "found", want: Store},
		{situation: "allocated when off the bus", mods: with(serves(onCall), offBus), rule: "off the fabric", want: SendDetach},
		{situation: "allocated when off the fabric", mods: with(serves(onCall), offBus, notHere, answered("", time.Second)), rule: "attach again", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			l := d.Lease
			if l.Phase != device.Assigned || l.FabricDevice != "" || l.UUID != "" || !l.PCI.IsZero() || !l.AskedAt.IsZero() || l.AcquiredAt != now {
				t.Errorf("lease = %+v", l)
			}
		}},
		{situation: "its identity is not known yet", mods: with(anonymous, stale), rule: "which one, look", want: ListFabric},
		{situation: "its identity comes from the list", mods: with(anonymous), rule: "found", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.UUID != ours || d.Lease.PCI != slot || d.Lease.Phase != device.Releasing {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "at another address", mods: with(at(other)), rule: "found", want: Store},
	},
	device.Failed: {
		{situation: "claim not taken back yet", mods: with(serves(onCall), over), rule: "not taken back yet", want: Wait},
		{situation: "back-off", rule: "back-off", want: Wait, wake: time.Minute},
		{situation: "back-off by a clock far ahead", mods: with(skewed), rule: "back-off", want: Wait, wake: 5 * time.Minute},
		{situation: "back-off, lease deleted", mods: with(deleting), rule: "nothing to give back", want: Delete},
		{situation: "back-off over, its Pod still runs", mods: with(attached1, over, prepared), rule: "still prepared", want: Store},
		{situation: "back-off over, nothing attached", mods: with(over), rule: "nothing to give back", want: Delete},
		{situation: "back-off over, attached", mods: with(over, became), rule: "goes back", want: Store, check: both(phase1(device.Releasing), func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.Failure.Reason == "" {
				t.Error("on its way back it is not known any more that it failed")
			}
		})},
		{situation: "no identity, one came", mods: with(became, here(""), bound, seen(ours), had()), rule: "known by its arrival", want: Store, check: both(inPhase(device.Failed), func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.UUID != ours || d.Lease.PCI != slot {
				t.Errorf("it is taken for %s at %s", d.Lease.UUID, d.Lease.PCI)
			}
		})},
		{situation: "no identity, one came, list old", mods: with(became, here(""), bound, seen(ours), had(), stale), rule: "known by its arrival, look", want: ListFabric},
		{situation: "no identity, one came beside another that the list names", mods: with(became, here(""), alsoHere("d9", model), bound, seen(ours), alsoSeen, had()), rule: "known by its arrival", want: Store},
		{situation: "no identity, one came, back-off over", mods: with(became, here(""), bound, seen(ours), had(), over, stale, listFails(time.Second)), rule: "which one, look", want: Wait, wake: 6 * time.Second},
		{situation: "no identity, two came, back-off", mods: with(became, here(""), bound, seen(ours), alsoSeen, had()), rule: "back-off", want: Wait, wake: time.Minute},
		{situation: "no identity, two came, list old", mods: with(became, here(""), bound, seen(ours), alsoSeen, had(), over, stale, looked(time.Hour)), rule: "which one, look", want: ListFabric},
		{situation: "no identity, two came", mods: with(became, here(""), bound, seen(ours), alsoSeen, had(), over), rule: "which one cannot be told, say so", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.Phase != device.Failed || !strings.Contains(d.Lease.Failure.Message, "until a person takes it away") {
				t.Errorf("lease = %+v", d.Lease)
			}
		}},
		{situation: "no identity, two came, told", mods: with(became, here(""), bound, seen(ours), alsoSeen, had(), over, doubtTold), rule: "which one cannot be told", want: Wait, wake: 5*time.Minute - time.Second},
		{situation: "no identity, two came, told, list old", mods: with(became, here(""), bound, seen(ours), alsoSeen, had(), over, doubtTold, stale), rule: "which one cannot be told", want: Wait, wake: 5*time.Minute - time.Second},
		{situation: "no identity, one came and may be what a person attached", mods: with(became, here(""), handAttached, bound, seen(ours), had(), over, doubtTold), rule: "which one cannot be told", want: Wait, wake: 5*time.Minute - time.Second},
		{situation: "no identity, one came and may be another unit's", mods: with(became, here(""), bound, seen(ours), unmatched, had(), over, doubtTold), rule: "which one cannot be told", want: Wait, wake: 5*time.Minute - time.Second},
		{situation: "no identity, what was here before is not known", mods: with(became, here(""), bound, seen(ours), over, doubtTold), rule: "which one cannot be told", want: Wait, wake: 5*time.Minute - time.Second},
		{situation: "no identity, the driver does not show what came", mods: with(became, here(""), bound, had(), over), rule: "which one, ask the driver", want: Discover},
		{situation: "no identity, the driver does not answer", mods: with(became, here(""), bound, silent, had(), over, tried(Discover, time.Minute, errTry), doubtTold), rule: "which one cannot be told", want: Wait, wake: 5*time.Minute - time.Second},
		{situation: "no identity, no driver has what came", mods: with(became, here(""), unbound, had()), rule: "known by its arrival", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if d.Lease.UUID != "" || d.Lease.PCI != slot {
				t.Errorf("it is taken for %q at %s", d.Lease.UUID, d.Lease.PCI)
			}
		}},
		{situation: "no identity, no driver has it, its address known", mods: with(became, here(""), unbound, had(), over, func(o *Observation) { o.Lease.PCI = slot }), rule: "goes back", want: Store},
		{situation: "no identity, its address known, the driver shows it now", mods: with(became, here(""), bound, seen(ours), had(), func(o *Observation) { o.Lease.PCI = slot }), rule: "known by its arrival", want: Store},
		{situation: "no identity, not on the bus", mods: with(became, here(""), had(), over), rule: "goes back", want: Store},
		{situation: "no identity, all on the bus were there before", mods: with(became, here(""), bound, seen(ours), had(string(ours)), over), rule: "goes back", want: Store},
		{situation: "no identity, a person took it away", mods: with(became, bound, seen(ours), over), rule: "goes back", want: Store},
		{situation: "identity came later", mods: with(became, here(ours), bound, seen(ours), alsoSeen, over), rule: "goes back", want: Store},
		{situation: "the manager still works on it", mods: with(asked0, named1, serves(onCall)), rule: "work goes on, look", want: Poll},
		{situation: "the manager still works on it, looked at just now", mods: with(asked0, named1, works(time.Second)), rule: "work goes on", want: Wait, wake: 2 * time.Second},
		{situation: "it may have come, list old", mods: with(asked0, stale), rule: "it may have come, look", want: ListFabric},
		{situation: "it came after all", mods: with(asked0, here(ours)), rule: "it came after all", want: Store, check: both(became1, phase1(device.Failed))},
		{situation: "it came after all, claim not taken back", mods: with(asked0, here(ours), serves(onCall)), rule: "it came after all", want: Store},
		{situation: "another unit attaches", mods: with(asked0, machineBusy, here(ours)), rule: "machine busy", want: Wait},
		{situation: "it may still come, another lease cannot be read", mods: with(asked0, unreadable), rule: "a lease is unreadable", want: Wait},
		{situation: "it may still come", mods: with(asked0), rule: "it may still come", want: Wait, wake: 4 * time.Second},
		{situation: "it may still come, another left", mods: with(asked0, before("d7")), rule: "one left meanwhile", want: Store},
		{situation: "it did not come", mods: with(asked0, settled, before("d7"), alsoHere("d7", model)), rule: "nothing came", want: Store, check: func(t *testing.T, d Decision) {
			t.Helper()
			if !d.Lease.AskedAt.IsZero() || d.Lease.SetBefore != nil || d.Lease.Failure.Reason == "" {
				t.Errorf("the call is not forgotten, or the failure is: %+v", d.Lease)
			}
		}},
	},
	"Dreaming": {
		{situation: "a phase of a later release", rule: "unknown phase", want: Wait},
	},
}

func asked0(o *Observation) { o.Lease.AskedAt = ago(2 * time.Second) }
func busBefore(all ...device.PCIAddress) mod {
	return func(o *Observation) {
		o.BusBefore = map[device.PCIAddress]bool{}
		for _, a := range all {
			o.BusBefore[a] = true
		}
	}
}

type check = func(*testing.T, Decision)

func both(a, b check) check { return func(t *testing.T, d Decision) { t.Helper(); a(t, d); b(t, d) } }

func failed1(reason string, blame device.Blame) check {
	return func(t *testing.T, d Decision) {
		t.Helper()
		f := d.Lease.Failure
		if d.Lease.Phase != device.Failed || f.Reason != reason || f.Blame != blame || f.RetryAfter != now.Add(settings.RetryAfter) || f.Message == "" {
			t.Errorf("phase %s, failure %+v, want Failed with %s, blame %s", d.Lease.Phase, f, reason, blame)
		}
	}
}

func unasked(t *testing.T, d Decision) {
	t.Helper()
	if !d.Lease.AskedAt.IsZero() {
		t.Error("nothing can come of the call, and yet it is waited for")
	}
}

func asked1(t *testing.T, d Decision) {
	t.Helper()
	if d.Lease.AskedAt.IsZero() {
		t.Error("something may come of the call, and nobody waits for it")
	}
}

func worksOn1(t *testing.T, d Decision) {
	t.Helper()
	if d.Lease.Work != "job-1" {
		t.Errorf("work = %q: the next run could not ask what became of it", d.Lease.Work)
	}
}

func leavesTurn(t *testing.T, d Decision) {
	t.Helper()
	if d.Turn {
		t.Error("the node would keep others from their turn")
	}
}

func takesTurn(t *testing.T, d Decision) {
	t.Helper()
	if !d.Turn {
		t.Error("the node would not ask for its turn")
	}
}

func became1(t *testing.T, d Decision) {
	t.Helper()
	if d.Lease.FabricDevice != "d1" {
		t.Errorf("device = %q", d.Lease.FabricDevice)
	}
}

func inPhase(p device.Phase) check {
	return func(t *testing.T, d Decision) {
		t.Helper()
		if d.Lease.Phase != p {
			t.Errorf("phase = %s", d.Lease.Phase)
		}
	}
}

func phase1(p device.Phase) check {
	return func(t *testing.T, d Decision) {
		t.Helper()
		if d.Lease.Phase != p || d.Lease.ChangedAt != now {
			t.Errorf("phase = %s, changed at %s", d.Lease.Phase, d.Lease.ChangedAt)
		}
	}
}

func TestNext(t *testing.T) {
	covered := map[device.Phase]map[string]bool{}
	for phase, rows := range table {
		covered[phase] = map[string]bool{}
		for _, r := range rows {
			t.Run(string(phase)+"/"+r.situation, func(t *testing.T) {
				o := calm(phase)
				o.with(r.mods...)
				_, rule := next(&o)
				covered[phase][rule] = true
				d := Next(o)
				if rule != r.rule || d.Kind != r.want {
					t.Fatalf("rule %q: %s (%s), want rule %q: %s", rule, d.Kind, d.Why, r.rule, r.want)
				}
				if d.Why == "" || strings.Contains(d.Why, "%!") || strings.Contains(d.Why, "<nil>") {
					t.Errorf("why = %q", d.Why)
				}
				var wake time.Duration
				if !d.Wake.IsZero() {
					wake = d.Wake.Sub(now)
				}
				if wake != r.wake {
					t.Errorf("wake in %s, want %s", wake, r.wake)
				}
				if d.Kind != Store && d.Kind != StoreIntent && d.Lease.Phase != o.Lease.Phase {
					t.Errorf("%s would change the phase to %s", d.Kind, d.Lease.Phase)
				}
				if r.check != nil {
					r.check(t, d)
				}
			})
		}
	}
	for _, phase := range device.Phases() {
		for _, r := range rulesOf(phase) {
			if !covered[phase][r.name] {
				t.Errorf("%s: no situation of the table is answered by rule %q", phase, r.name)
			}
		}
	}
}

// TestLastRuleIsUnconditional: no situation of a known phase is without an answer.
func TestLastRuleIsUnconditional(t *testing.T) {
	for _, p := range device.Phases() {
		rules := rulesOf(p)
		if last := rules[len(rules)-1]; !last.when(&Observation{}) {
			t.Errorf("%s: the last rule %q has a condition", p, last.name)
		}
		names := map[string]bool{}
		for _, r := range rules {
			if names[r.name] {
				t.Errorf("%s: two rules are called %q", p, r.name)
			}
			names[r.name] = true
		}
	}
}

func TestHolders(t *testing.T) {
	for _, tc := range []struct {
		n    int
		want string
	}{{1, "p"}, {5, "p, p, p, p, p"}, {7, "p, p, p, p, p and 2 more"}} {
		all := make([]string, tc.n)
		for i := range all {
			all[i] = "p"
		}
		if got := holders(all); got != tc.want {
			t.Errorf("%d holders = %q, want %q", tc.n, got, tc.want)
		}
	}
}

// TestClassesAreDecided: every class of fault has been thought of.
func TestClassesAreDecided(t *testing.T) {
	for c, want := range map[device.FaultClass]struct {
		passing bool
		blame   device.Blame
	}{
		device.FaultUnauthorized: {true, device.BlameUnit}, device.FaultBusy: {true, device.BlameUnit},
		device.FaultConflict: {true, device.BlameUnit}, device.FaultSuspended: {true, device.BlameUnit},
		device.FaultUnreachable: {true, device.BlameUnit}, device.FaultUnknown: {false, device.BlameUnit},
		device.FaultNotFound: {false, device.BlameNode}, device.FaultNoCapacity: {false, device.BlameModel},
		device.FaultRejected: {false, device.BlameUnit}, device.FaultUnsupported: {false, device.BlameModel},
	} {
		if passing(&device.Fault{Class: c}) != want.passing || blameOf(c) != want.blame {
			t.Errorf("%s: passing %v, blame %s", c, passing(&device.Fault{Class: c}), blameOf(c))
		}
	}
	if n := len(device.FaultClasses()); n != 10 {
		t.Errorf("%d classes of faults, 10 decided on", n)
	}
}

// TestEffectUntil: a call that nobody heard the end of may be worked on for as long as one may take.
func TestEffectUntil(t *testing.T) {
	s := Settings{MaxCall: 3 * time.Minute, Settle: time.Minute}
	unknown := &device.Fault{Class: device.FaultUnknown}
	for _, tc := range []struct {
		situation string
		found     time.Time
		last      *Result
		want      time.Time
	}{
		{"stored by this process, not sent yet", time.Time{}, nil, now.Add(4 * time.Minute)},
		{"stored by a former run, found a minute later", now.Add(time.Minute), nil, now.Add(5 * time.Minute)},
		{"stored by a clock that is ahead", ago(time.Minute), nil, now.Add(4 * time.Minute)},
		{"the manager said done", time.Time{}, &Result{At: now.Add(2 * time.Second)}, now.Add(62 * time.Second)},
		{"the connection broke at once", time.Time{}, &Result{At: now.Add(time.Second), Fault: unknown}, now.Add(4 * time.Minute)},
		{"a later call, as to detach, broke at once", time.Time{}, &Result{SentAt: now.Add(time.Hour), At: now.Add(time.Hour + time.Second), Fault: unknown}, now.Add(time.Hour + 4*time.Minute)},
		{"no answer within what a call may take", time.Time{}, &Result{At: now.Add(4 * time.Minute), Fault: unknown}, now.Add(5 * time.Minute)},
	} {
		if got := s.EffectUntil(now, tc.found, tc.last); !got.Equal(tc.want) {
			t.Errorf("%s: %s after it was asked for, want %s", tc.situation, got.Sub(now), tc.want.Sub(now))
		}
	}
}

// TestLateByWhoseClock: before anything was asked, a lease's time is the leader's, whose clock may be behind.
func TestLateByWhoseClock(t *testing.T) {
	o := calm(device.Assigned)
	o.Lease.AcquiredAt, o.FoundAt = ago(time.Hour), ago(time.Second)
	d := Next(o)
	if d.Kind != StoreIntent || !d.Lease.AcquiredAt.Equal(o.FoundAt) {
		t.Errorf("%s (%s), taken at %s; want the intent, with the time by this node's clock", d.Kind, d.Why, d.Lease.AcquiredAt)
	}
	o.FoundAt = ago(time.Hour)
	if d := Next(o); d.Lease.Failure.Reason != "AttachTimeout" {
		t.Errorf("%s (%s); want that it is too late", d.Kind, d.Why)
	}
}

// TestIdentified: a serial number stands for a UUID where it can mean one device and one GPU alone.
func TestIdentified(t *testing.T) {
	gpus := []GPU{{UUID: ours, Serial: "1"}, {UUID: alien, Serial: "2"}, {UUID: "GPU-3", Serial: "3"}, {UUID: "GPU-4", Serial: "3"}, {UUID: "GPU-5"}}
	for name, tt := range map[string]struct {
		list []device.OnFabric
		want []device.GPUUUID
	}{
		"the board's":             {[]device.OnFabric{{ID: "a"}, {ID: "b", Serial: "2"}, {ID: "c", Serial: "1"}}, []device.GPUUUID{"", alien, ours}},
		"nobody's":                {[]device.OnFabric{{ID: "a", Serial: "9"}, {ID: "b", Serial: ""}}, []device.GPUUUID{"", ""}},
		"two GPUs on a board":     {[]device.OnFabric{{ID: "a", Serial: "3"}}, []device.GPUUUID{""}},
		"two devices of a number": {[]device.OnFabric{{ID: "a", Serial: "1"}, {ID: "b", Serial: "1"}}, []device.GPUUUID{"", ""}},
		"the UUID goes first":     {[]device.OnFabric{{ID: "a", UUID: "GPU-5", Serial: "1"}}, []device.GPUUUID{"GPU-5"}},
	} {
		before := slices.Clone(tt.list)
		got := Identified(tt.list, gpus)
		for i, d := range got {
			if d.UUID != tt.want[i] || d.ID != tt.list[i].ID {
				t.Errorf("%s: device %d is %+v, want UUID %q", name, i, d, tt.want[i])
			}
		}
		if !slices.Equal(before, tt.list) {
			t.Errorf("%s: the list that was given changed to %+v", name, tt.list)
		}
	}
}
