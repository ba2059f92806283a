// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
)

// Config is what a Loop is made of; every field but Spawn, Turns and Batcher is required.
type Config struct {
	Node    string
	Machine device.Machine
	Fabric  device.FabricID

	Settings attach.Settings
	// FreshFor is how long a list of the fabric counts as what is there now.
	FreshFor time.Duration
	// Resync is the slow look in case an event was lost. It asks nobody but this host, so nodes need not spread it.
	Resync time.Duration
	// Deadlines of one action each.
	CallDeadline, LocalDeadline time.Duration

	Leases  Leases
	Manager Fabric
	// Batcher is the manager, too, where it takes several detaches in one call (Settings.Batch), else nil.
	Batcher Batcher
	// Turns is nil where nodes need not wait for each other.
	Turns    Turns
	Host     Host
	Claims   Claims
	Prepared Prepared
	Observer Observer
	Model    Model
	Clock    clock.WithTicker
	// Spawn runs an action beside the loop; a goroutine if nil.
	Spawn func(func())
}

// Loop runs the holder's policy for one node and its machine.
type Loop struct {
	cfg   Config
	poked chan struct{}

	mu      sync.Mutex // guards the following, shared with actions and Status
	units   map[device.Unit]*unit
	machine machine
	status  map[device.Unit]UnitStatus
}

// unit is what the loop remembers of one unit while its lease is in one state.
type unit struct {
	key     string
	attempt device.Attempt
	running attach.Kind
	foundAt time.Time // when this process first saw the lease, if it has not changed since
	// maySend is the AskedAt of an intent that was stored by this process and not sent yet.
	maySend time.Time
	last    *attach.Result
	tried   map[attach.Kind]attach.Try
	told    device.Attempt
	// taking is the fabric device that is being stored as this unit's: no other unit may take it.
	taking string
	// unlisted: the device that was to be detached was not on the list by which that was decided.
	unlisted bool
	// before is what was on the bus when the intent was decided.
	before  map[device.PCIAddress]bool
	holders []string
	scanned time.Time
	// unseen is since when the driver has not shown the GPU of the attached unit.
	unseen time.Time
}

// machine is what the loop remembers of the fabric's view of this machine.
type machine struct {
	here    []device.OnFabric
	triedAt time.Time // when the last listing ended
	askedAt time.Time // when here was asked for
	fault   *device.Fault
	listing bool
	// changes counts the ends of changing calls; current is that count when here was asked for, so that
	// it does not depend on the clock what was asked first. It is -1 before the first list.
	changes, current int
}

// UnitStatus is one line of `cohdi-agent status`: what was last decided for the unit. While an action is under
// way that is this action.
type UnitStatus struct {
	Lease device.Lease
	Doing attach.Kind
	// Rule is the row of the policy that applied.
	Rule string
	Why  string
	Wake time.Time
}

// Status is what `cohdi-agent status` shows of one node.
type Status struct {
	// Node is whose this is, "" of an agent before this release.
	Node  string `json:",omitempty"`
	Units []UnitStatus
	// GPUs are all on the bus and whose they are; Foreign the devices that the fabric lists on this machine and
	// that nobody of ours attached.
	GPUs    []attach.Placed
	Foreign []device.OnFabric
	// Trouble is why that may be out of date.
	Trouble string
}

// New returns a loop; Run starts it.
func New(cfg Config) *Loop {
	if cfg.Spawn == nil {
		cfg.Spawn = func(f func()) { go f() }
	}
	return &Loop{
		cfg: cfg, poked: make(chan struct{}, 1),
		units: map[device.Unit]*unit{}, status: map[device.Unit]UnitStatus{},
		machine: machine{current: -1},
	}
}

// Poke asks for a look. It never blocks.
func (l *Loop) Poke() {
	select {
	case l.poked <- struct{}{}:
	default:
	}
}

// Run looks whenever it is poked, when the policy asked for it, and slowly in any case, until ctx ends.
func (l *Loop) Run(ctx context.Context) {
	for ctx.Err() == nil {
		wake := l.Step(ctx)
		pause := l.cfg.Resync
		if !wake.IsZero() {
			pause = min(pause, max(wake.Sub(l.cfg.Clock.Now()), 0))
		}
		timer := l.cfg.Clock.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-l.poked:
		case <-timer.C():
		}
		timer.Stop()
	}
}

// Step observes once, decides for every unit and starts what was decided. It returns when to look again
// though nothing changed.
func (l *Loop) Step(ctx context.Context) time.Time {
	leases := l.mine(ctx)
	if len(leases) == 0 {
		l.forgetAllBut(nil)
		l.wantTurn(false)
		return time.Time{}
	}
	look, cancel := context.WithTimeout(ctx, l.cfg.LocalDeadline)
	sight, err := l.cfg.Host.Observe(look)
	cancel()
	if err != nil {
		klog.FromContext(ctx).Error(err, "the host's GPUs cannot be observed; nothing is decided until they can")
		return l.cfg.Clock.Now().Add(l.cfg.Settings.Busy)
	}
	leases = l.mine(ctx) // looking at the host takes a while, in which actions end
	l.forgetAllBut(leases)
	var wake time.Time
	turn := false
	var together []order
	for _, lease := range leases {
		d := l.decide(lease, leases, sight, together)
		turn = turn || d.Turn || l.changing(lease)
		if !d.Wake.IsZero() && (wake.IsZero() || d.Wake.Before(wake)) {
			wake = d.Wake
		}
		switch {
		case d.Kind == attach.Wait:
		case d.Kind == attach.SendDetach && l.cfg.Batcher != nil:
			together = append(together, order{lease, d})
		default:
			l.perform(ctx, order{lease, d})
		}
	}
	l.performAll(ctx, together)
	l.wantTurn(turn)
	return wake
}

func (l *Loop) wantTurn(want bool) {
	if l.cfg.Turns != nil {
		l.cfg.Turns.Want(want)
	}
}

// changing: the manager is changing something for the unit, or is about to.
func (l *Loop) changing(lease device.Lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	mem := l.units[lease.Unit]
	doing := mem.doing(lease)
	return doing == attach.SendAttach || doing == attach.SendDetach || mem.running == attach.StoreIntent
}

// mine returns the leases that this node holds: those of its machine, in the order in which they were
// taken, so that units that wait for the machine do not overtake. Those that failed come last: a device that
// comes is first of all for a unit that waits for one. What is attached to the machine stays
// ours when its Node object is made anew; a Node of the same name on another machine is not the holder.
func (l *Loop) mine(ctx context.Context) []device.Lease {
	all := l.cfg.Leases.List()
	leases := make([]device.Lease, 0, len(all))
	for _, lease := range all {
		if lease.Node != l.cfg.Node || lease.Fabric != l.cfg.Fabric {
			continue
		}
		if lease.Phase == device.Unreadable {
			continue
		}
		if lease.Machine != l.cfg.Machine {
			klog.FromContext(ctx).V(2).Info("A device lease names this node but another machine; it is left alone",
				"unit", lease.Unit, "machine", lease.Machine)
			continue
		}
		leases = append(leases, lease)
	}
	slices.SortFunc(leases, func(a, b device.Lease) int {
		if af, bf := a.Phase == device.Failed, b.Phase == device.Failed; af != bf {
			if af {
				return 1
			}
			return -1
		}
		if c := a.AcquiredAt.Compare(b.AcquiredAt); c != 0 {
			return c
		}
		return strings.Compare(string(a.Unit), string(b.Unit))
	})
	return leases
}

func (l *Loop) forgetAllBut(leases []device.Lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for u, mem := range l.units {
		if mem.running == "" && !slices.ContainsFunc(leases, func(d device.Lease) bool { return d.Unit == u }) {
			delete(l.units, u)
			delete(l.status, u)
		}
	}
}

// decide looks at one unit. What it decided counts as under way from then on, so that the next unit sees
// the machine busy; but for the detaches of this look, which go together.
func (l *Loop) decide(lease device.Lease, all []device.Lease, sight Sight, together []order) attach.Decision {
	prepared, known := l.cfg.Prepared.Prepared(lease.Fabric, lease.Unit)
	l.mu.Lock()
	defer l.mu.Unlock()
	mem := l.memory(lease)
	now := l.cfg.Clock.Now()
	l.machine.here = attach.Identified(l.machine.here, sight.NVML)
	o := attach.Observation{
		Now: now, Settings: l.cfg.Settings, Lease: lease, FabricModel: l.cfg.Model(lease.Model),
		Here: l.machine.here, Fresh: l.machine.fresh(now, l.cfg.FreshFor), ListFault: l.machine.fault, ListTriedAt: l.machine.triedAt, ListAskedAt: l.machine.askedAt,
		Claimed: l.claimed(lease, all), Unreadable: l.unreadable(), Running: mem.running, MachineBusy: l.excluded(lease, all, together),
		MaySend: !mem.maySend.IsZero() && mem.maySend.Equal(lease.AskedAt), FoundAt: mem.foundAt, Last: mem.last, Tried: mem.tried,
		Bus: sight.Bus, NVML: sight.NVML, NVMLState: sight.NVMLState,
		Taken: taken(lease, all), Others: others(lease, all), Unmatched: l.unmatchedBeside(lease, all), BusBefore: mem.before, Leaving: l.leaving(lease, all, addresses(sight.Bus), now),
		Prepared: len(prepared) > 0, PreparedFor: prepared, PreparedKnown: known, Holders: mem.holders, HoldersAt: mem.scanned,
		Told: !lease.Attempt.IsZero() && mem.told == lease.Attempt,
	}
	o.OpenUntil, o.Awaited = l.openCalls(lease, all, now)
	switch {
	case lease.Phase != device.Attached || o.Seen():
		mem.unseen = time.Time{}
	case mem.unseen.IsZero():
		mem.unseen = now
	}
	o.UnseenSince = mem.unseen
	if l.cfg.Turns != nil {
		before, mine := l.cfg.Turns.Before()
		o.Before, o.OutOfTurn = before, !mine
	}
	running := mem.running != ""
	d := attach.Next(o)
	if d.Kind == attach.ListFabric && l.machine.listing {
		d.Kind, d.Why = attach.Wait, "the fabric's list is being read" // one list serves all units
	}
	if d.Kind != attach.Wait {
		mem.running = d.Kind
	}
	switch {
	case d.Kind == attach.StoreIntent:
		mem.before = addresses(sight.Bus)
	case d.Kind == attach.Store && d.Lease.FabricDevice != lease.FabricDevice:
		mem.taking = d.Lease.FabricDevice
	case d.Kind == attach.SendDetach:
		mem.unlisted = !slices.ContainsFunc(o.Here, func(d device.OnFabric) bool { return d.ID == lease.FabricDevice })
	}
	l.machine.listing = l.machine.listing || d.Kind == attach.ListFabric
	status := UnitStatus{Lease: lease, Doing: d.Kind, Rule: d.Rule, Why: d.Why, Wake: d.Wake}
	if running {
		status = l.status[lease.Unit]
		status.Lease = lease
	}
	l.status[lease.Unit] = status
	return d
}

// memory returns what is remembered of the unit. It is emptied when the lease has come further, except
// for what is still under way; who had the device open counts for one attempt only.
func (l *Loop) memory(lease device.Lease) *unit {
	key := string(lease.Phase) + " " + lease.AskedAt.String() + " " + lease.FabricDevice
	mem := l.units[lease.Unit]
	switch {
	case mem == nil:
		mem = &unit{key: key, attempt: lease.Attempt, tried: map[attach.Kind]attach.Try{}, foundAt: l.cfg.Clock.Now()}
		l.units[lease.Unit] = mem
	case mem.key != key && mem.running == "":
		*mem = unit{key: key, attempt: lease.Attempt, tried: map[attach.Kind]attach.Try{}, told: mem.told, maySend: mem.maySend, before: mem.before}
	}
	if lease.Phase != device.Assigned && lease.Phase != device.Attaching {
		mem.maySend = time.Time{} // given up before it was sent: the machine is free for others
	}
	if mem.attempt != lease.Attempt {
		mem.attempt, mem.holders, mem.scanned = lease.Attempt, nil, time.Time{}
	}
	return mem
}

// excluded: another unit changes the machine, on the fabric or on the bus, or is about to, in a way that this unit's
// call must neither run beside nor go with.
func (l *Loop) excluded(lease device.Lease, all []device.Lease, together []order) bool {
	known := map[device.Unit]bool{lease.Unit: true}
	for _, other := range all {
		if known[other.Unit] {
			continue
		}
		known[other.Unit] = true
		doing := l.units[other.Unit].doing(other)
		if slices.ContainsFunc(together, func(o order) bool { return o.lease.Unit == other.Unit }) && l.cfg.Settings.Joins(doing, lease.Phase, len(together)) {
			continue
		}
		if l.cfg.Settings.Excludes(doing, lease.Phase) || l.cfg.Settings.Arrival && unmatched(other) && lease.Phase == device.Assigned {
			return true
		}
	}
	for other, mem := range l.units {
		if !known[other] && l.cfg.Settings.Excludes(mem.running, lease.Phase) {
			return true
		}
	}
	return false
}

// unmatched: a device was asked for, and it is not known which GPU of this node it is, so that the next one could not be
// told from it.
func unmatched(lease device.Lease) bool { return !lease.AskedAt.IsZero() && lease.UUID == "" }

// doing is what is done to the machine for the unit: by this process, or by the manager that works on it.
func (u *unit) doing(lease device.Lease) attach.Kind {
	switch {
	case u != nil && !u.maySend.IsZero():
		return attach.SendAttach
	case !u.works(lease):
	case lease.Phase == device.Releasing:
		return attach.SendDetach
	default:
		return attach.SendAttach
	}
	if u == nil {
		return ""
	}
	return u.running
}

// works: the manager works on what was asked for the unit, as far as is known.
func (u *unit) works(lease device.Lease) bool {
	if u != nil && u.last != nil {
		return u.last.Work != ""
	}
	return lease.Work != ""
}

// asking: the manager is about to be asked for a device for the unit, or was, and has not said what became of it.
func (u *unit) asking(lease device.Lease) bool {
	return u != nil && u.running == attach.StoreIntent || u.doing(lease) == attach.SendAttach
}

// openCalls looks at the attaches for other units of which it is not known what came: how long those that ended may
// take effect, and which devices may answer one.
func (l *Loop) openCalls(lease device.Lease, all []device.Lease, now time.Time) (until time.Time, awaited map[string]int) {
	awaited = map[string]int{}
	for _, other := range all {
		if other.Unit == lease.Unit || other.FabricDevice != "" || other.AskedAt.IsZero() {
			continue
		}
		mem := l.units[other.Unit]
		if mem == nil {
			mem = &unit{}
		}
		asking := mem.asking(other)
		if mem.last.Refused() {
			continue
		}
		at := l.cfg.Settings.EffectUntil(other.AskedAt, mem.foundAt, mem.last)
		if other.Wanted != "" {
			awaited[other.Wanted]++ // what comes can be told from anything else
			continue
		}
		if !asking && at.After(until) {
			until = at
		}
		model := l.cfg.Model(other.Model)
		for _, d := range l.machine.here {
			if (asking || now.Before(at)) && (d.Model == model || model == "") && !slices.Contains(other.SetBefore, d.ID) {
				awaited[d.ID]++
			}
		}
	}
	return until, awaited
}

// leaving: another unit's device is being taken off the bus or the fabric, or is off the one and not yet off
// the other. That holds others up no longer than an attach may take, or than a call may take effect that this or a
// former run has made.
func (l *Loop) leaving(lease device.Lease, all []device.Lease, bus map[device.PCIAddress]bool, now time.Time) bool {
	for _, other := range all {
		if other.Unit == lease.Unit || other.Phase != device.Releasing {
			continue
		}
		mem := l.units[other.Unit]
		if mem != nil && (mem.running == attach.Remove || mem.running == attach.SendDetach) {
			return true
		}
		if mem == nil {
			mem = &unit{foundAt: now}
		}
		until := other.ChangedAt.Add(l.cfg.Settings.Deadline)
		if at := l.cfg.Settings.EffectUntil(other.AskedAt, mem.foundAt, mem.last); at.After(until) && !mem.last.Refused() {
			until = at
		}
		listed := slices.ContainsFunc(l.machine.here, func(d device.OnFabric) bool { return d.ID == other.FabricDevice })
		if listed && !other.PCI.IsZero() && !bus[other.PCI] && (mem.works(other) || now.Before(until)) {
			return true
		}
	}
	return false
}

// claimed are the fabric devices of other units, those included whose lease is only being written: a
// device that came answers one call.
func (l *Loop) claimed(lease device.Lease, all []device.Lease) map[string]bool {
	ids := map[string]bool{}
	for _, other := range all {
		if other.Unit != lease.Unit && other.FabricDevice != "" {
			ids[other.FabricDevice] = true
		}
	}
	for other, mem := range l.units {
		if other != lease.Unit && mem.taking != "" {
			ids[mem.taking] = true
		}
	}
	return ids
}

// unreadable: there is a lease of this node of which nobody knows which device it names.
func (l *Loop) unreadable() bool {
	return slices.ContainsFunc(l.cfg.Leases.List(), func(lease device.Lease) bool {
		return lease.Phase == device.Unreadable && lease.Node == l.cfg.Node
	})
}

// taken are the addresses where other units are attached.
func taken(lease device.Lease, all []device.Lease) map[device.PCIAddress]bool {
	at := map[device.PCIAddress]bool{}
	for _, other := range all {
		if other.Unit != lease.Unit && other.Phase == device.Attached && !other.PCI.IsZero() {
			at[other.PCI] = true
		}
	}
	return at
}

// others are the GPUs of other units.
func others(lease device.Lease, all []device.Lease) map[device.GPUUUID]bool {
	gpus := map[device.GPUUUID]bool{}
	for _, other := range all {
		if other.Unit != lease.Unit && other.UUID != "" {
			gpus[other.UUID] = true
		}
	}
	return gpus
}

// unmatchedBeside: another unit has a device on this machine, or may get one, and neither its lease nor the manager says which
// GPU that is.
func (l *Loop) unmatchedBeside(lease device.Lease, all []device.Lease) bool {
	return slices.ContainsFunc(all, func(other device.Lease) bool {
		if other.Unit == lease.Unit || other.UUID != "" {
			return false
		}
		if other.FabricDevice == "" {
			return !other.AskedAt.IsZero()
		}
		return slices.ContainsFunc(l.machine.here, func(d device.OnFabric) bool { return d.ID == other.FabricDevice && d.UUID == "" })
	})
}

func addresses(bus []attach.Function) map[device.PCIAddress]bool {
	at := make(map[device.PCIAddress]bool, len(bus))
	for _, f := range bus {
		at[f.Address] = true
	}
	return at
}

// fresh: the list ended a moment ago, and was asked for after the last changing call ended.
func (m *machine) fresh(now time.Time, most time.Duration) bool {
	return m.fault == nil && m.current == m.changes && now.Sub(m.triedAt) <= most
}

// Status returns a line per unit, in the order of their names.
func (l *Loop) Status() []UnitStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := make([]UnitStatus, 0, len(l.status))
	for _, s := range l.status {
		lines = append(lines, s)
	}
	slices.SortFunc(lines, func(a, b UnitStatus) int { return strings.Compare(string(a.Lease.Unit), string(b.Lease.Unit)) })
	return lines
}

// fault makes a *device.Fault of any error: one that is not is of unknown outcome.
func fault(op string, err error) *device.Fault {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*device.Fault](err); ok {
		return f
	}
	return &device.Fault{Class: device.FaultUnknown, Op: op, Err: err}
}
