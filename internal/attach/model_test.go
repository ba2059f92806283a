// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// The model is a small world around one unit: the manager, the bus, the driver, the kubelet's plugin, the
// leader, a person, and this process with what it remembers. The policy is the real one. Everything else
// may do at any moment what it can do at all, and each action may end in every way it can end.

// Where the GPU is on the bus, and what NVML shows of it.
const (
	absent = iota
	present
	driven
)

const (
	hidden = iota
	shown
	drained
)

// Answers to the last call.
const (
	noCall = iota
	saidDone
	saidBusy
	saidNo
	noAnswer
	works1 // the manager works on it
)

// Who has the device open, as last looked for.
const (
	notLooked = iota
	nobodyThen
	somebodyThen
)

// Who is the attempt on the lease.
const (
	nobodyWants = iota
	waiting     // by the on-call entry: to be told
	running1    // by the ready entry: its Pod is bound
)

// world is one state of it. It is comparable: a set of them is what has been seen.
type world struct {
	// The lease.
	phase                                      int8 // index in device.Phases
	want                                       int8
	gone, deleting, failure, kept              bool
	dev, asked, settled, uuid, pci, idle, note bool
	toldHeld, late, ripe                       bool
	blank                                      bool // the manager never says which GPU it is
	// What is really there.
	attached, open1 bool // on the fabric; an attach may still take effect
	leaves1         bool // a detach may still take effect
	bus, nvml       int8
	off             bool // taken off the bus by us: only a rescan brings it back
	mute            bool // the driver's library does not answer
	told            bool // the claim shows our word
	prepared, held  bool
	// What this process remembers.
	maySend, listHas, fresh, fault, listLate, knows bool
	busBefore, found                                bool
	last                                            int8
	lastOld, drainOK, undrainJust, rescanned        bool
	named                                           bool // the lease says what the manager works on
	unseen                                          bool // the driver has not shown it for long
	scan                                            int8
	scanAfterDrain, known                           bool
}

var phases = device.Phases()

func phaseIndex(p device.Phase) int8 { return int8(slices.Index(phases, p)) }

func (w world) is(p device.Phase) bool { return !w.gone && phases[w.phase] == p }

// observe is what the loop would show the policy.
func (w world) observe() Observation {
	o := Observation{
		Now: now, Settings: settings, FabricModel: model, Fresh: w.fresh, MaySend: w.maySend, Told: w.knows,
		ListTriedAt: ago(time.Second), Prepared: w.prepared, PreparedKnown: w.known, Tried: map[Kind]Try{},
		Lease: device.Lease{Phase: phases[w.phase], AcquiredAt: ago(time.Minute), ChangedAt: ago(time.Hour), Deleting: w.deleting, SetBefore: []string{}},
	}
	l := &o.Lease
	l.Attempt, l.Kept = []device.Attempt{{}, onCall, ready}[w.want], w.kept
	if w.late {
		l.AcquiredAt = ago(time.Hour)
	}
	if w.asked {
		l.AskedAt = ago(time.Second)
		if w.settled {
			l.AskedAt = ago(time.Hour)
		}
	}
	if w.dev {
		l.FabricDevice = "d1"
	}
	if w.uuid {
		l.UUID = ours
	}
	if w.pci {
		l.PCI = slot
	}
	if w.named {
		l.Work = "job-1"
	}
	if w.idle {
		l.IdleSince = ago(time.Minute)
	}
	if w.note {
		l.PreparedFor = []string{ready.UID}
	}
	if w.toldHeld {
		l.HeldBy = "pid 7"
	}
	if w.failure {
		l.Failure = device.Failure{Reason: "Broken", RetryAfter: now.Add(time.Minute)}
		if w.ripe {
			l.Failure.RetryAfter = ago(time.Second)
		}
	}
	o.ListAskedAt = ago(time.Second)
	if w.settled && !w.listLate {
		o.ListAskedAt = ago(time.Hour)
	}
	if w.listHas {
		o.Here = []device.OnFabric{{ID: "d1", Model: model, UUID: ours}}
	}
	if w.blank {
		l.GPUsBefore = []string{} // the call was prepared by this release
		for i := range o.Here {
			o.Here[i].UUID = ""
		}
	}
	if w.fault {
		o.Fresh, o.ListFault, o.ListTriedAt = false, &device.Fault{Class: device.FaultUnreachable}, ago(time.Minute)
	}
	w.observeCall(&o)
	w.observeHost(&o)
	return o
}

func (w world) observeCall(o *Observation) {
	if w.last != noCall {
		o.Last = &Result{At: ago(time.Second)}
		switch {
		case w.settled:
			o.Last.At = ago(time.Hour)
		case w.lastOld:
			o.Last.At = ago(time.Minute)
		}
		if c := []device.FaultClass{"", "", device.FaultBusy, device.FaultNoCapacity, device.FaultUnknown, ""}[w.last]; c != "" {
			o.Last.Fault = &device.Fault{Class: c}
		}
		if w.last == works1 {
			o.Last.Work, o.Last.PollAfter = "job-1", 2*time.Second
		}
	}
	if w.rescanned {
		o.Tried[Rescan] = Try{At: ago(time.Minute)}
	}
	if w.drainOK {
		o.Tried[Drain] = Try{At: ago(20 * time.Second)}
	}
	if w.found {
		o.FoundAt = ago(time.Second)
		if w.settled {
			o.FoundAt = ago(time.Hour)
		}
	}
	if w.undrainJust {
		o.Tried[Undrain] = Try{At: ago(time.Second)}
	}
	switch {
	case w.scan == notLooked:
	case w.scanAfterDrain || !w.drainOK:
		o.HoldersAt = ago(2 * time.Second)
	default:
		o.HoldersAt = ago(20 * time.Second)
	}
	if w.scan == somebodyThen {
		o.Holders = []string{"pid 7"}
	}
}

func (w world) observeHost(o *Observation) {
	if w.busBefore {
		o.BusBefore = map[device.PCIAddress]bool{}
	}
	if w.bus != absent {
		o.Bus = []Function{{Address: slot, Driver: []string{"", "", "nvidia"}[w.bus]}}
	}
	switch {
	case w.mute:
		o.NVMLState = "driver not loaded"
	case w.nvml != hidden:
		o.NVML = []GPU{{Address: slot, UUID: ours, Draining: w.nvml == drained}}
	}
	if w.is(device.Attached) && !o.Seen() {
		o.UnseenSince = ago(time.Second)
		if w.unseen {
			o.UnseenSince = ago(time.Hour)
		}
	}
}

// stored is the world after the lease was written. What the process remembers of the unit is emptied when
// the lease has come further, as the loop does.
func (w world) stored(l device.Lease, intent bool) world {
	before := w
	w.phase, w.dev, w.uuid, w.pci = phaseIndex(l.Phase), l.FabricDevice != "", l.UUID != "", !l.PCI.IsZero()
	w.settled = w.settled && !l.AskedAt.IsZero() && !l.AskedAt.Equal(now)
	w.asked, w.named = !l.AskedAt.IsZero(), l.Work != ""
	w.idle, w.note, w.toldHeld = !l.IdleSince.IsZero(), len(l.PreparedFor) > 0, l.HeldBy != ""
	w.late, w.unseen = l.AcquiredAt.Equal(ago(time.Hour)), w.unseen && l.Phase == device.Attached
	w.failure = l.Failure.Reason != ""
	w.ripe = w.failure && !l.Failure.RetryAfter.After(now)
	if !w.settled {
		w.listLate = false
	}
	if w.phase != before.phase || w.dev != before.dev || w.asked != before.asked || l.AskedAt.Equal(now) {
		w = w.forgot()
		w.found = false
	}
	if intent {
		w.maySend, w.busBefore = true, true
	} else if !w.is(device.Assigned) && !w.is(device.Attaching) {
		w.maySend = false
	}
	return w
}

// forgot is the process after it has emptied what it remembers of the unit alone.
func (w world) forgot() world {
	w.last, w.lastOld, w.drainOK, w.undrainJust, w.rescanned = noCall, false, false, false, false
	w.scan, w.scanAfterDrain = notLooked, false
	return w
}

// ends are the ways in which an action can end, the good one first.
func (w world) ends(d Decision) []world {
	one := func(f func(*world)) world { n := w; f(&n); return n }
	same := w
	switch d.Kind {
	case ListFabric:
		return []world{
			one(func(n *world) { n.listHas, n.fresh, n.fault, n.listLate = n.attached, true, false, n.settled }),
			one(func(n *world) { n.fresh, n.fault = false, true }),
		}
	case Store, StoreIntent:
		lost := w.stored(d.Lease, false)
		lost.maySend = false // written, but the answer was lost: this process may not send
		return []world{w.stored(d.Lease, d.Kind == StoreIntent), same, lost}
	case Delete:
		return []world{one(func(n *world) { *n = world{gone: true} }), same}
	case SendAttach:
		call := func(last int8, now, later bool) world {
			return one(func(n *world) {
				n.maySend, n.fresh, n.last, n.lastOld = false, false, last, false
				n.attached, n.open1 = now, later
				n.settled, n.listLate = false, false // it settles from now
			})
		}
		return []world{
			call(saidDone, true, false), call(saidBusy, false, false), call(saidNo, false, false),
			call(noAnswer, true, false), call(noAnswer, false, true), call(noAnswer, false, false),
			call(works1, false, true),
		}
	case SendDetach:
		call := func(last int8, now, later bool) world {
			return one(func(n *world) {
				n.fresh, n.last, n.lastOld, n.leaves1 = false, last, false, later && n.attached
				if now {
					n.taken()
				}
			})
		}
		return []world{
			call(saidDone, true, false), call(saidBusy, false, false), call(saidNo, false, false),
			call(noAnswer, true, false), call(noAnswer, false, true), call(noAnswer, false, false),
			call(works1, false, true),
		}
	case Poll:
		return w.polled()
	default:
		return w.endsOnHost(d.Kind)
	}
}

// polled are the manager's words on what it works on: it is not over, or how it ended. Only where nothing happened is
// it refused.
func (w world) polled() []world {
	says := func(last int8) world {
		n := w
		n.last, n.lastOld = last, false
		if last != works1 {
			n.fresh, n.settled, n.listLate = false, false, false
		}
		return n
	}
	detach := w.is(device.Releasing)
	switch happened := w.attached != detach; {
	case w.open1 || w.leaves1:
		return []world{says(works1)}
	case happened:
		return []world{says(saidDone), says(noAnswer)}
	}
	return []world{says(saidBusy), says(saidNo), says(noAnswer), says(saidDone)}
}

// taken: the device leaves the machine.
func (w *world) taken() {
	w.attached, w.bus, w.nvml, w.off, w.leaves1, w.held = false, absent, hidden, false, false, false
}

func (w world) endsOnHost(k Kind) []world {
	one := func(f func(*world)) world { n := w; f(&n); return n }
	same := w
	switch k { //nolint:exhaustive // the others do not happen on the host
	case Rescan, RescanAll:
		return []world{one(func(n *world) {
			if n.attached && n.bus == absent {
				n.bus, n.off = present, false
			}
		}), one(func(n *world) { n.rescanned = true })}
	case Bind:
		return []world{one(func(n *world) { n.bus = max(n.bus, int8(driven)) }), same}
	case Discover:
		return []world{one(func(n *world) {
			if n.bus == driven && !n.mute && n.nvml == hidden {
				n.nvml = shown
			}
		}), same}
	case FindHolders:
		return []world{one(func(n *world) {
			n.scan, n.scanAfterDrain = nobodyThen, n.drainOK
			if n.held {
				n.scan = somebodyThen
			}
		}), same}
	case Drain:
		if w.held {
			return []world{same} // the driver refuses
		}
		return []world{one(func(n *world) { n.nvml, n.drainOK, n.scanAfterDrain, n.undrainJust = drained, true, false, false }), same}
	case Undrain:
		return []world{
			one(func(n *world) { n.nvml, n.drainOK, n.undrainJust = min(n.nvml, int8(shown)), false, true }),
			one(func(n *world) { n.undrainJust, n.drainOK = true, false }),
		}
	case Remove:
		return []world{one(func(n *world) { n.bus, n.nvml, n.off, n.drainOK, n.found = absent, hidden, true, false, false }), same}
	case Tell:
		return []world{one(func(n *world) { n.told, n.knows = true, true }), same}
	}
	return nil
}

// event is something that others do.
type event struct {
	name string
	can  func(world) bool
	do   func(*world)
}

// events are everything that others can do at any moment.
func events() []event {
	return []event{
		// Leader and people.
		{"clear", func(w world) bool { return w.want != nobodyWants }, func(w *world) {
			w.want, w.told, w.knows, w.scan, w.kept = nobodyWants, false, false, notLooked, false
		}},
		{"clear and keep", func(w world) bool { return w.want != nobodyWants && !w.deleting }, func(w *world) {
			w.want, w.told, w.knows, w.scan, w.kept = nobodyWants, false, false, notLooked, true
		}},
		{"assign", func(w world) bool { return w.want == nobodyWants && !w.deleting && !w.is(device.Failed) }, func(w *world) {
			w.want, w.idle, w.toldHeld, w.late, w.scan = waiting, false, false, false, notLooked
		}},
		{"assign ready", func(w world) bool {
			return w.want == nobodyWants && !w.deleting && (w.is(device.Attached) && w.idle || w.is(device.Releasing))
		}, func(w *world) {
			w.want, w.idle, w.toldHeld, w.late, w.scan = running1, false, false, false, notLooked
		}},
		{"release", func(w world) bool {
			return w.is(device.Attached) && w.idle && w.want == nobodyWants && !w.note && !w.deleting
		}, func(w *world) {
			w.phase, w.idle, w.found = phaseIndex(device.Releasing), false, false
			*w = w.forgot()
		}},
		{"delete the lease", func(w world) bool { return !w.deleting }, func(w *world) { w.deleting = true }},
		// Kubelet and containers.
		{"prepare", func(w world) bool {
			return !w.prepared && w.known && w.is(device.Attached) && w.nvml == shown && !w.mute &&
				(w.want == waiting && w.told || w.want == running1 || w.want == nobodyWants && w.idle && !w.deleting)
		}, func(w *world) { w.prepared, w.note = true, w.want != waiting }},
		{"unprepare", func(w world) bool { return w.prepared }, func(w *world) { w.prepared = false }},
		// The moment between the last look for holders and the removal is closed by the drain alone, so whoever
		// opens an undrained device does it longer before.
		{"open", func(w world) bool { return w.nvml == shown && !w.held }, func(w *world) { w.held, w.scan = true, notLooked }},
		{"close", func(w world) bool { return w.held }, func(w *world) { w.held = false }},
		// This process.
		{"crash", func(w world) bool { return true }, func(w *world) {
			*w = w.forgot()
			w.found, w.settled = !w.is(device.Assigned), false
			w.maySend, w.listHas, w.fresh, w.fault, w.listLate, w.knows, w.known, w.busBefore = false, false, false, false, false, false, false, false
		}},
		{"checkpoint known", func(w world) bool { return !w.known }, func(w *world) { w.known = true }},
		// Time.
		{"a while", func(w world) bool { return true }, func(w *world) {
			w.fresh, w.lastOld, w.scan, w.undrainJust = false, w.last != noCall, notLooked, false
		}},
		{"deadline", func(w world) bool { return !w.late }, func(w *world) { w.late = true }},
		{"settled", func(w world) bool {
			return w.asked && !w.settled && !w.open1 && w.last != works1 && (!w.named || w.last != noCall)
		}, func(w *world) { w.settled, w.listLate = true, false }},
		{"detach settled", func(w world) bool {
			return w.is(device.Releasing) && (w.last == noAnswer || w.found) && !w.leaves1 && (!w.named || w.last != noCall)
		}, func(w *world) {
			w.found = false
			if w.last == noAnswer {
				w.last, w.lastOld = noCall, false
			}
		}},
		{"late detach", func(w world) bool { return w.leaves1 }, func(w *world) { w.taken() }},
		{"back-off over", func(w world) bool { return w.failure && !w.ripe }, func(w *world) { w.ripe = true }},
		// Manager, kernel, driver.
		{"late effect", func(w world) bool { return w.open1 }, func(w *world) { w.attached, w.open1 = true, false }},
		{"no effect", func(w world) bool { return w.open1 }, func(w *world) { w.open1 = false }},
		{"appears", func(w world) bool { return w.attached && w.bus == absent && !w.off }, func(w *world) { w.bus = present }},
		{"somebody rescans", func(w world) bool { return w.attached && w.bus == absent && w.off }, func(w *world) { w.bus, w.off = driven, false }},
		{"is bound", func(w world) bool { return w.bus == present }, func(w *world) { w.bus = driven }},
		{"is shown", func(w world) bool { return w.bus == driven && w.nvml == hidden && !w.mute }, func(w *world) { w.nvml, w.unseen = shown, false }},
		{"is not shown for long", func(w world) bool { return w.is(device.Attached) && w.nvml == hidden && !w.unseen }, func(w *world) { w.unseen = true }},
		{"driver stops answering", func(w world) bool { return !w.mute }, func(w *world) { w.mute, w.nvml, w.held = true, hidden, false }},
		{"driver answers", func(w world) bool { return w.mute }, func(w *world) { w.mute = false }},
		{"falls off the bus", func(w world) bool { return w.bus != absent && !w.held }, func(w *world) { w.bus, w.nvml = absent, hidden }},
		{"taken by a person", func(w world) bool { return w.attached && !w.held }, func(w *world) { w.taken() }},
	}
}

// crimes says what an action does to the world that must never be, whatever the policy saw.
func (w world) crimes(d Decision) string {
	usable := w.attached && w.bus == driven && w.nvml != hidden && !w.mute
	switch d.Kind {
	case SendAttach:
		switch {
		case w.attached || w.open1:
			return "a second device is attached for one unit"
		case w.leaves1:
			return "a call may take the device as soon as it comes"
		}
	case Delete:
		switch {
		case w.attached || w.open1:
			return "a device stays attached without a lease"
		case w.leaves1:
			return "a call may take the device from whoever gets it next"
		}
	case Drain, Remove, SendDetach:
		switch {
		case w.prepared:
			return "a prepared device is taken away"
		case w.want != nobodyWants && usable && w.nvml == shown && !w.failure && w.uuid:
			return "a usable device is taken away from its claim"
		case d.Kind == SendDetach && w.bus != absent && (w.pci || w.nvml != hidden || w.blank):
			return "a device is detached that is on the bus, where it can be found"
		case d.Kind == SendDetach && w.held:
			return "a device is detached that is open"
		case d.Kind == Remove && w.nvml == drained && w.held:
			return "a device is removed that is open"
		}
	case Tell:
		if !usable || w.nvml == drained || !w.uuid {
			return "a claim is told of a device that it cannot use"
		}
	default:
	}
	return ""
}

// plain prints as a struct.
type plain world

func (w world) String() string {
	if w.gone {
		return "lease deleted"
	}
	s := strings.ReplaceAll(fmt.Sprintf("%+v", plain(w)), "false", "-")
	var on []string
	for f := range strings.FieldsSeq(strings.Trim(s, "{}")) {
		if !strings.HasSuffix(f, ":-") && !strings.HasSuffix(f, ":0") {
			on = append(on, f)
		}
	}
	return string(phases[w.phase]) + " " + strings.Join(on, " ")
}

// plainly drops what no rule looks at in the phase that the lease is in, so that worlds which differ in
// nothing else are one.
func (w world) plainly() world {
	if w.dev {
		w.asked, w.settled, w.listLate = false, false, false
	}
	if w.dev && !w.is(device.Releasing) || !w.asked && !w.dev {
		w.found = false
	}
	if !w.is(device.Assigned) && !w.is(device.Attaching) {
		w.late, w.busBefore = false, false
	}
	if w.want != waiting {
		w.told, w.knows = false, false
	}
	if w.want != nobodyWants || !w.is(device.Assigned) && !w.is(device.Attaching) {
		w.kept = false
	}
	w.toldHeld = w.toldHeld && w.scan == somebodyThen
	return w
}

// reach explores every world that can come of a fresh lease, made for a claim, to be kept or for a device that
// is attached already, and returns them with how each was come by.
func reach(t *testing.T) (from map[world]world, how map[world]string) {
	t.Helper()
	starts := []world{
		{want: waiting, known: true},
		{kept: true, known: true},
		{want: waiting, known: true, blank: true},
		{phase: phaseIndex(device.Attaching), dev: true, attached: true, bus: driven, nvml: shown, known: true},
	}
	from, how = map[world]world{}, map[world]string{}
	for i := range starts {
		starts[i] = starts[i].plainly()
		from[starts[i]] = starts[i]
	}
	queue, steps := slices.Clone(starts), 0
	all := events()
	add := func(was, is world, by string) {
		steps++
		is = is.plainly()
		if _, seen := from[is]; seen {
			return
		}
		from[is], how[is] = was, by
		if !is.gone {
			queue = append(queue, is)
		}
	}
	for len(queue) > 0 {
		w := queue[0]
		queue = queue[1:]
		d := Next(w.observe())
		if crime := w.crimes(d); crime != "" {
			t.Fatalf("%s:%s\n  %s: %s (%s)", crime, trace(from, how, w), w, d.Kind, d.Why)
		}
		for i, n := range w.ends(d) {
			add(w, n, fmt.Sprintf("%s/%d", d.Kind, i))
		}
		for _, e := range all {
			if e.can(w) {
				n := w
				e.do(&n)
				add(w, n, e.name)
			}
		}
	}
	t.Logf("%d worlds by %d steps", len(from), steps)
	return from, how
}

func trace(from map[world]world, how map[world]string, w world) string {
	var lines []string
	for from[w] != w {
		lines = append(lines, fmt.Sprintf("\n  %-24s-> %s", how[w], w))
		w = from[w]
	}
	slices.Reverse(lines)
	return strings.Join(lines, "")
}

// way is where a world comes to rest, and in how many steps.
type way struct {
	end   string
	steps int
}

// TestModel: no world that can come about leads to what must never be, and from each one the unit comes to
// rest when everybody else does what is to be expected.
func TestModel(t *testing.T) {
	from, how := reach(t)
	for _, stays := range []bool{true, false} {
		ways, rests, longest := map[world]way{}, map[string]int{}, 0
		for w := range from {
			if stuck := w.settle(stays, ways); stuck != nil {
				t.Fatalf("claim stays=%v: no rest: %s\nreached by:%s\nfrom there:%s", stays, *stuck, trace(from, how, w), w.story(stays))
			}
			longest = max(longest, ways[w].steps)
			rests[ways[w].end]++
		}
		t.Logf("claim stays=%v: rests %v, the longest way has %d steps", stays, rests, longest)
	}
}

// settle lets the unit act, every action succeed, and what is to be expected happen while it waits, until
// it comes to rest; it stores the way of every world in between. It returns a world that goes in circles.
func (w world) settle(stays bool, ways map[world]way) *world {
	var path []world
	seen := map[world]bool{}
	for {
		w = w.plainly()
		if seen[w] {
			if w.late || !w.is(device.Assigned) && !w.is(device.Attaching) {
				return &w
			}
			w.late = true // time passes in circles, and ends them
		}
		known, ok := ways[w]
		if end := w.rest(stays); !ok && end != "" {
			known, ok = way{end: end}, true
			ways[w] = known
		}
		if ok {
			for i, p := range path {
				ways[p] = way{end: known.end, steps: known.steps + len(path) - i}
			}
			return nil
		}
		seen[w] = true
		path = append(path, w)
		w = w.goesOn(stays)
	}
}

// goesOn is the next world when all goes well.
func (w world) goesOn(stays bool) world {
	if d := Next(w.observe()); d.Kind != Wait {
		if n := w.ends(d)[0].plainly(); n != w {
			return n
		} // else it did not help, and is left for a moment
	}
	n, _ := w.expected(stays)
	return n
}

func (w world) rest(stays bool) string {
	at := w.is(device.Attached) && w.attached && w.nvml == shown && !w.mute
	switch {
	case w.gone:
		return "back in the pool"
	case at && stays && w.want == waiting && w.told && w.knows:
		return "serves a claim that was told"
	case at && stays && w.want == running1:
		return "serves a claim by its ready entry"
	case at && stays && w.idle && w.want == nobodyWants && !w.deleting && !w.note && !w.prepared:
		return "idle"
	}
	return ""
}

// expected is the next thing that happens in a world where everybody does as is to be expected.
func (w world) expected(stays bool) (world, string) {
	order := []string{
		"checkpoint known", "driver answers", "late effect", "late detach", "appears", "is bound", "is shown",
		"unprepare", "close", "clear", "release", "settled", "detach settled", "back-off over", "a while",
	}
	all := events()
	for _, name := range order {
		e := all[slices.IndexFunc(all, func(e event) bool { return e.name == name })]
		n := w
		switch {
		case !e.can(w):
			continue
		case stays && (name == "release" || name == "clear" && !w.is(device.Failed)):
			continue // the claim stays until it is told that it failed
		case name == "unprepare" && stays && w.want != nobodyWants && w.is(device.Attached):
			continue
		}
		if e.do(&n); n != w {
			return n, name
		}
	}
	return w, "nothing"
}

func (w world) story(stays bool) string {
	var lines []string
	for range 60 {
		d := Next(w.observe())
		_, name := w.expected(stays)
		w = w.goesOn(stays)
		lines = append(lines, fmt.Sprintf("\n  %s (%s), else %s -> %s", d.Kind, d.Why, name, w))
	}
	return strings.Join(lines, "")
}
