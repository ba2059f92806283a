// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// What the rules ask of an observation.

// unwanted: no attempt is to be served and the node does not keep it for its minimum; or the lease is being
// deleted, and nobody will set an attempt on it.
func (o *Observation) unwanted() bool {
	return o.Lease.Attempt.IsZero() && !o.Lease.Kept || o.Lease.Deleting
}

// late: the attach has had its time. A lease taken by a clock ahead of ours was taken now.
func (o *Observation) late() bool { return !o.Now.Before(o.deadline()) }

func (o *Observation) deadline() time.Time {
	asked := o.past(o.Lease.AskedAt)
	if o.MaySend || o.refused() {
		asked = time.Time{} // it waits for its turn
	}
	return o.Settings.Until(o.taken(), asked)
}

// Until is when an attach has had its time that was taken and asked for then; zero is not yet.
func (s *Settings) Until(taken, asked time.Time) time.Time {
	switch most := taken.Add(s.Patience); {
	case s.Patience == 0:
		return taken.Add(s.Deadline)
	case asked.IsZero() || asked.Add(s.Deadline).After(most):
		return most
	}
	return asked.Add(s.Deadline)
}

// taken is when the lease was taken, by our clock: until the intent is stored the time is the leader's, and the
// attach must not be late before it began because that clock is behind.
func (o *Observation) taken() time.Time {
	at := o.past(o.Lease.AcquiredAt)
	if o.Lease.Phase == device.Assigned && o.FoundAt.After(at) {
		return o.FoundAt
	}
	return at
}

// past clamps a stored time that lies in our future.
func (o *Observation) past(t time.Time) time.Time {
	if t.After(o.Now) {
		return o.Now
	}
	return t
}

// retryAfter clamps a stored time to what this node's own back-off allows.
func (o *Observation) retryAfter() time.Time {
	if most := o.Now.Add(o.Settings.RetryAfter); o.Lease.Failure.RetryAfter.After(most) {
		return most
	}
	return o.Lease.Failure.RetryAfter
}

// settled: what was asked can no longer take effect, and the list was asked for after that.
func (o *Observation) settled() bool {
	return o.refused() || !o.Now.Before(o.settledAt()) && !o.ListAskedAt.Before(o.settledAt())
}

// settledAt is when what was asked can no longer take effect.
func (o *Observation) settledAt() time.Time {
	return o.Settings.EffectUntil(o.past(o.Lease.AskedAt), o.FoundAt, o.Last)
}

// EffectUntil is when a call can no longer take effect: some time after it ended. Where no answer came, the manager
// may work on it for as long as a call may take, and where a former run made it, it was sent at the latest when
// this process saw the lease. What the lease says of its attach is no word on a detach.
func (s *Settings) EffectUntil(askedAt, foundAt time.Time, last *Result) time.Time {
	sent := askedAt
	switch {
	case last == nil && foundAt.After(sent):
		sent = foundAt
	case last != nil && last.SentAt.After(sent):
		sent = last.SentAt
	}
	ended := sent.Add(s.MaxCall)
	if last != nil && (last.Fault == nil || last.At.After(ended)) {
		ended = last.At
	}
	return ended.Add(s.Settle)
}

// refused: the last call was answered, and nothing happened.
func (o *Observation) refused() bool { return o.Last.Refused() }

// Refused tells whether it was answered, and nothing happened. What keeps work that is not over is no refusal.
func (r *Result) Refused() bool {
	return r != nil && r.Work == "" && r.Fault != nil && r.Fault.Definite()
}

// unanswered: the last call ended without an answer, or a former run may have made one, and it may still
// take effect. What this process took off the bus itself, no former run had detached.
func (o *Observation) unanswered() bool {
	former := o.Last == nil && !o.FoundAt.IsZero() && o.Tried[Remove].At.IsZero()
	lost := o.Last != nil && o.Last.Fault != nil && !o.Last.Fault.Definite()
	return (former || lost) && o.Now.Before(o.settledAt())
}

// mayStillGo: a detach may still take effect. That the list does not have the device says that it has, but for a device
// that was not on it before.
func (o *Observation) mayStillGo() bool {
	return (o.onFabric() != nil || o.Last != nil && o.Last.Unlisted) && o.unanswered()
}

// detachSent: this process has had the manager detach it, or was told that it is not there.
func (o *Observation) detachSent() bool {
	return o.Last != nil && (o.Last.Fault == nil || !passing(o.Last.Fault))
}

// leadsToCall: the action is a call that changes something, or the last look before one. A node that gave up its turn in
// between would wait in the line again, and its look would be old again when the turn comes.
func (o *Observation) leadsToCall(k Kind) bool {
	switch k {
	case StoreIntent, SendAttach, SendDetach:
		return true
	case ListFabric:
		switch o.Lease.Phase {
		case device.Assigned:
			return true
		case device.Attaching:
			return o.Lease.FabricDevice == "" && (o.MaySend || o.refused())
		case device.Releasing:
			return o.function() == nil && !o.detachSent() && !o.unanswered()
		default:
			return false
		}
	default:
		return false
	}
}

// Excludes tells whether a unit in phase p must not have the manager called while another unit of the machine does
// k. Attaches of one model may run side by side where the manager can do that: which device answers which call does
// not matter then. A device that is being detached must not be given out by an attach meanwhile: its own unit would
// detach it again. One that failed looks only when nothing else can be mistaken for what its call brought.
func (s *Settings) Excludes(k Kind, p device.Phase) bool {
	switch k {
	case StoreIntent, SendAttach:
		return !s.Parallel || p == device.Releasing || p == device.Failed
	case SendDetach:
		return !s.Parallel || p != device.Releasing
	case Rescan, RescanAll: // it would bring back what is about to be detached
		return true
	default:
		return false
	}
}

// Joins tells whether the call for a unit in phase p may be one with the calls for n other units of the machine that were
// decided at the same moment, each of them k. What was decided before that is at the manager, and goes first.
func (s *Settings) Joins(k Kind, p device.Phase, n int) bool {
	return k == SendDetach && p == device.Releasing && n < s.Batch
}

// strangers are the devices on the machine that no other lease names, in order. Those that one names are told
// from what will come by that; and when they have gone, the manager may give the very same again. What another
// unit's call has brought may be taken by that unit or by this one.
func (o *Observation) strangers() []string {
	ids := make([]string, 0, len(o.Here))
	for _, d := range o.Here {
		if !o.Claimed[d.ID] && o.Awaited[d.ID] == 0 {
			ids = append(ids, d.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// strangersOld: the list shows what others attached, and is no longer of this moment.
func (o *Observation) strangersOld() bool {
	return len(o.strangers()) > 0 && o.Now.Sub(o.ListTriedAt) > o.Settings.Look
}

// unchanged: the machine has the very strangers that were stored before the call.
func (o *Observation) unchanged() bool { return slices.Equal(o.strangers(), o.Lease.SetBefore) }

// open: another unit's call may still bring a device.
func (o *Observation) open() bool { return o.Now.Before(o.OpenUntil) }

// candidate is the device that answers the call: the one that was wanted, or one of the model, not there before,
// nobody else's. Of several it is the one that may answer the fewest other calls: another unit, which stored it as
// there before, would wait in vain for what this one took. Where the configuration has lost the model since, any
// device that came is. While a lease cannot be read, none is.
func (o *Observation) candidate() string {
	if o.Unreadable {
		return ""
	}
	id := ""
	for _, d := range o.Here {
		fits := (d.Model == o.FabricModel || o.FabricModel == "") && !slices.Contains(o.Lease.SetBefore, d.ID)
		if o.Lease.Wanted != "" {
			fits = d.ID == o.Lease.Wanted
		}
		if fits && !o.Claimed[d.ID] && (id == "" || o.Awaited[d.ID] < o.Awaited[id]) {
			id = d.ID
		}
	}
	return id
}

// lists tells whether the fabric lists the device on this machine.
func (o *Observation) lists(id string) bool {
	return slices.ContainsFunc(o.Here, func(d device.OnFabric) bool { return d.ID == id })
}

// left: a device of before the call is gone. The manager may give that very device for this call.
func (o *Observation) left() bool {
	return slices.ContainsFunc(o.Lease.SetBefore, func(id string) bool { return !o.lists(id) })
}

// listDue: the list may be asked for again, after a failure not at once.
func (o *Observation) listDue() bool {
	return o.ListFault == nil || !o.Now.Before(o.ListTriedAt.Add(o.Settings.Busy))
}

// onFabric is the unit's device in the fabric's list.
func (o *Observation) onFabric() *device.OnFabric {
	for i, d := range o.Here {
		if d.ID == o.Lease.FabricDevice && d.ID != "" {
			return &o.Here[i]
		}
	}
	return nil
}

// Identified is the manager's list with the UUIDs that it does not give, where a serial number tells them: one that a single
// device of the list and a single GPU of this node have.
func Identified(list []device.OnFabric, gpus []GPU) []device.OnFabric {
	var out []device.OnFabric
	for i, d := range list {
		if d.UUID != "" || d.Serial == "" {
			continue
		}
		same := func(other device.OnFabric) bool { return other.Serial == d.Serial }
		has := func(g GPU) bool { return g.Serial == d.Serial }
		at := slices.IndexFunc(gpus, has)
		if at < 0 || slices.ContainsFunc(gpus[at+1:], has) || slices.ContainsFunc(list[:i], same) || slices.ContainsFunc(list[i+1:], same) {
			continue
		}
		if out == nil {
			out = slices.Clone(list)
		}
		out[i].UUID = gpus[at].UUID
	}
	if out == nil {
		return list
	}
	return out
}

// anonymous: the manager gives nothing by which its device could be told from other GPUs of this node.
func (o *Observation) anonymous() bool {
	d := o.onFabric()
	return d.UUID == "" && d.Serial == "" && !o.byArrival()
}

// identity is what tells the unit's device from other GPUs of this node.
func (o *Observation) identity() device.GPUUUID {
	switch d := o.onFabric(); {
	case o.Lease.UUID != "" || d == nil:
		return o.Lease.UUID
	case d.UUID != "":
		return d.UUID
	}
	if g := o.arrival(); g != nil {
		return g.UUID
	}
	return ""
}

// byArrival: what was here when the call was prepared is known, so that what came can be handed out.
func (o *Observation) byArrival() bool { return o.Settings.Arrival && o.Lease.GPUsBefore != nil }

// arrival is the GPU that came for the unit, nil where that cannot be told.
func (o *Observation) arrival() *GPU {
	if came := o.arrivals(); o.Lease.GPUsBefore != nil && len(came) == 1 && !o.uninvited() && !o.Unmatched {
		return &came[0]
	}
	return nil
}

// unidentified: the manager lists the unit's device and does not say which GPU it is, and nor does the lease.
func (o *Observation) unidentified() bool {
	d := o.onFabric()
	return o.Lease.UUID == "" && d != nil && d.UUID == ""
}

// knownByArrival: it is known by that alone, and nothing else on the bus may be it. What no driver has is known by its
// address: nobody can have it open.
func (o *Observation) knownByArrival() bool {
	alone := o.Lease.GPUsBefore != nil && len(o.suspects()) == 1 && !o.uninvited() && !o.Unmatched
	return o.unidentified() && alone && (o.arrival() != nil || o.suspects()[0].Driver == "")
}

// toBeNamed: it is known by its arrival, and the lease does not say so.
func (o *Observation) toBeNamed() bool {
	return o.knownByArrival() && (o.arrival() != nil || !o.byAddress())
}

// byAddress: the unit's device is on the bus where the lease says.
func (o *Observation) byAddress() bool {
	f := o.function()
	return f != nil && f.Address == o.Lease.PCI
}

// inDoubt: the unit's device may be on the bus, and which one it is cannot be told. What this process took off the bus
// itself was known by its address.
func (o *Observation) inDoubt() bool {
	return o.unidentified() && !o.byAddress() && o.Tried[Remove].At.IsZero() && len(o.suspects()) > 0 && !o.knownByArrival()
}

// unsure: the list has to say which GPU it is. In doubt it is asked seldom; that the GPU leaves the bus is seen.
func (o *Observation) unsure() bool {
	return o.Lease.UUID == "" && !o.Fresh && (!o.inDoubt() || !o.Now.Before(o.doubtLookAt()))
}

func (o *Observation) doubtLookAt() time.Time { return o.ListTriedAt.Add(o.Settings.RetryAfter) }

// suspects are the functions on the bus that may be the unit's device: those that were not there when the call was
// prepared and that are nobody else's.
func (o *Observation) suspects() []Function {
	var all []Function
	for _, f := range o.Bus {
		uuid := device.GPUUUID("")
		for _, g := range o.NVML {
			if g.Address == f.Address {
				uuid = g.UUID
			}
		}
		known := slices.Contains(o.Lease.GPUsBefore, f.Address.String()) || o.Taken[f.Address] ||
			uuid != "" && (slices.Contains(o.Lease.GPUsBefore, string(uuid)) || o.anothers(uuid))
		if !known {
			all = append(all, f)
		}
	}
	return all
}

// anothers: the GPU is another unit's, or another device on the manager's list.
func (o *Observation) anothers(uuid device.GPUUUID) bool {
	return o.Others[uuid] || slices.ContainsFunc(o.Here, func(d device.OnFabric) bool {
		return d.UUID == uuid && d.ID != o.Lease.FabricDevice
	})
}

// uninvited: somebody else attached a device since, which may be the GPU that came.
func (o *Observation) uninvited() bool {
	return slices.ContainsFunc(o.Here, func(d device.OnFabric) bool {
		return d.UUID == "" && d.ID != o.Lease.FabricDevice && !o.Claimed[d.ID] && !slices.Contains(o.Lease.SetBefore, d.ID)
	})
}

// arrivals are the GPUs that came to this node since the call was prepared and that no other unit is.
func (o *Observation) arrivals() []GPU {
	var came []GPU
	for _, g := range o.NVML {
		known := slices.Contains(o.Lease.GPUsBefore, string(g.UUID)) || slices.Contains(o.Lease.GPUsBefore, g.Address.String())
		if g.UUID != "" && !known && !o.anothers(g.UUID) && o.functionAt(g.Address) != nil {
			came = append(came, g)
		}
	}
	return came
}

// ambiguous: the unit's GPU is one of several that came.
func (o *Observation) ambiguous() bool {
	d := o.onFabric()
	return o.Lease.UUID == "" && d != nil && d.UUID == "" && o.byArrival() && len(o.arrivals()) > 1
}

// arrived names what came, for people.
func (o *Observation) arrived() string {
	var names []string
	for _, g := range o.arrivals() {
		names = append(names, fmt.Sprintf("%s at %s", g.UUID, g.Address))
	}
	return strings.Join(names, ", ")
}

// gpusHere are the GPUs of this node: by UUID, and where the driver does not show it by address.
func (o *Observation) gpusHere() []string {
	here := make([]string, 0, len(o.Bus))
	for _, f := range o.Bus {
		name := f.Address.String()
		for _, g := range o.NVML {
			if g.Address == f.Address && g.UUID != "" {
				name = string(g.UUID)
			}
		}
		here = append(here, name)
	}
	slices.Sort(here)
	return here
}

// working: the manager works on the last call, of this process or of a former run.
func (o *Observation) working() bool { return o.work() != "" }

// work is the manager's name for it.
func (o *Observation) work() string {
	switch {
	case o.MaySend: // nothing was sent yet
		return ""
	case o.Last != nil:
		return o.Last.Work
	}
	return o.Lease.Work
}

// pollAt is when the work is looked at again. What a former run began is looked at right away; what waits for a
// person, or could not be looked at, is left for longer.
func (o *Observation) pollAt() time.Time {
	last := o.Tried[Poll]
	switch {
	case last.Err != nil || o.Last != nil && o.Last.Fault != nil:
		return last.At.Add(o.Settings.Busy)
	case o.Last == nil:
		return time.Time{}
	case last.At.Before(o.Last.At):
		return o.Last.At.Add(o.Last.PollAfter)
	}
	return last.At.Add(max(o.Last.PollAfter, o.Settings.Retry))
}

// function is the unit's device on the bus: where NVML shows its identity, else at the stored address
// unless NVML shows another GPU there, another unit's device was seen there last, this process has taken the unit's off the
// bus, or the manager does not list the unit's device: addresses are given anew to what comes next.
func (o *Observation) function() *Function {
	if g := o.usable(o.identity()); g != nil {
		return o.functionAt(g.Address)
	}
	if slices.ContainsFunc(o.NVML, func(g GPU) bool { return g.Address == o.Lease.PCI && g.UUID != "" }) || o.Taken[o.Lease.PCI] || o.removed() ||
		o.Fresh && o.Lease.FabricDevice != "" && o.onFabric() == nil {
		return nil
	}
	return o.functionAt(o.Lease.PCI)
}

// removed: this process has taken the unit's device off the bus.
func (o *Observation) removed() bool {
	last := o.Tried[Remove]
	return !last.At.IsZero() && last.Err == nil
}

func (o *Observation) functionAt(a device.PCIAddress) *Function {
	for i, f := range o.Bus {
		if f.Address == a && !a.IsZero() {
			return &o.Bus[i]
		}
	}
	return nil
}

// usable is the GPU of that identity, if NVML shows it on a function that is on the bus.
func (o *Observation) usable(id device.GPUUUID) *GPU {
	for i, g := range o.NVML {
		if g.UUID == id && id != "" && o.functionAt(g.Address) != nil {
			return &o.NVML[i]
		}
	}
	return nil
}

// Seen tells whether NVML shows the unit's GPU.
func (o *Observation) Seen() bool { return o.usable(o.Lease.UUID) != nil }

// unseenPause is how long a driver is left that does not show what it has shown: the longer, the longer that lasts.
func (o *Observation) unseenPause() time.Duration {
	if o.UnseenSince.IsZero() || o.Now.Before(o.UnseenSince.Add(o.Settings.Busy)) {
		return o.Settings.Retry
	}
	return o.Settings.Busy
}

// relookAt is when the manager is asked again of what does not announce itself.
func (o *Observation) relookAt() time.Time { return o.ListTriedAt.Add(o.Settings.Resync) }

// critical: the manager said just now that the device is not fit.
func (o *Observation) critical() bool {
	return o.Fresh && o.onFabric() != nil && o.onFabric().Health == device.HealthCritical
}

// moved is the GPU of the lease at another address than the lease says, as after a restart of the node.
func (o *Observation) moved() *GPU {
	if g := o.usable(o.Lease.UUID); g != nil && g.Address != o.Lease.PCI {
		return g
	}
	return nil
}

// found is the GPU that goes back, at another address than the lease says or at none.
func (o *Observation) found() *GPU {
	if g := o.usable(o.identity()); g != nil && g.Address != o.Lease.PCI {
		return g
	}
	return nil
}

// drained: the driver has let the GPU go, or does not have it. Some drivers cannot say so; that the last
// drain went well counts then, until it is taken back or the device leaves the bus.
func (o *Observation) drained() bool {
	g := o.usable(o.identity())
	last := o.Tried[Drain]
	return g == nil || g.Draining || !last.At.IsZero() && last.Err == nil && last.At.After(o.Tried[Undrain].At) && last.At.After(o.Tried[Remove].At)
}

// blind: the driver shows that the GPU is draining and hides which GPU it is, as it does to a process that
// began after the drain.
func (o *Observation) blind() bool {
	return slices.ContainsFunc(o.NVML, func(g GPU) bool { return g.Address == o.Lease.PCI && g.Draining && g.UUID == "" })
}

// nameless: the unit's device is on the bus by its address alone.
func (o *Observation) nameless() bool { return o.usable(o.identity()) == nil && o.function() != nil }

// unbound is a function without a driver; unlisted one with a driver that NVML does not show.
func (o *Observation) unbound() *Function {
	for i, f := range o.Bus {
		if f.Driver == "" {
			return &o.Bus[i]
		}
	}
	return nil
}

func (o *Observation) unlisted() *Function {
	for i, f := range o.Bus {
		if f.Driver != "" && !slices.ContainsFunc(o.NVML, func(g GPU) bool { return g.Address == f.Address }) {
			return &o.Bus[i]
		}
	}
	return nil
}

// strange: a driver has the function and NVML does not show it, and this process, which did not drain it, has not asked
// yet.
func (o *Observation) strange(f *Function) bool {
	return f.Driver != "" && o.Tried[Discover].At.IsZero() && o.Tried[Drain].At.IsZero() &&
		!slices.ContainsFunc(o.NVML, func(g GPU) bool { return g.Address == f.Address })
}

// newcomer is the one function that came to the bus since the call was prepared and that NVML does not
// show; nil if there is none, or several, or it is not known what was there before.
func (o *Observation) newcomer() *Function {
	var found *Function
	for i, f := range o.Bus {
		known := slices.ContainsFunc(o.NVML, func(g GPU) bool { return g.Address == f.Address })
		if o.BusBefore == nil || o.BusBefore[f.Address] || o.Taken[f.Address] || known {
			continue
		}
		if found != nil {
			return nil
		}
		found = &o.Bus[i]
	}
	return found
}

// nothingNew: every function on the bus is known to NVML as another GPU.
func (o *Observation) nothingNew() bool { return o.unbound() == nil && o.unlisted() == nil }

// mayRescan: it is time to, and no other unit's device that is on its way out would come back by it.
func (o *Observation) mayRescan() bool { return o.due(Rescan) && o.due(RescanAll) && !o.Leaving }

// due: the action was not tried lately. The kernel gets a while to show and bind a device by itself
// before it is asked to.
func (o *Observation) due(k Kind) bool {
	last, pause := o.Tried[k].At, o.Settings.Retry
	switch k {
	case Rescan, RescanAll, Bind:
		pause = o.Settings.Appear
		if last.IsZero() {
			last = o.past(o.Lease.ChangedAt)
		}
	case Discover:
		if o.Tried[k].Err != nil { // a driver that does not answer is not pressed
			pause = o.Settings.Busy
		}
		pause = max(pause, o.unseenPause())
	case Drain, Remove:
		pause = o.Settings.Hold
	default:
	}
	return last.IsZero() || !o.Now.Before(last.Add(pause))
}

// nextLook is when something that does not announce itself is looked at again.
func (o *Observation) nextLook() time.Time { return o.Now.Add(o.Settings.Retry) }

func (o *Observation) mustTell() bool {
	return !o.Lease.Attempt.IsZero() && !o.Lease.Attempt.Ready() && !o.Told
}

// prepared: a container may use the device; while the checkpoint is unknown, it may.
func (o *Observation) prepared() bool { return o.Prepared || !o.PreparedKnown }

func (o *Observation) held() bool { return len(o.Holders) > 0 }

func (o *Observation) scanDue(every time.Duration) bool {
	return o.HoldersAt.IsZero() || !o.Now.Before(o.HoldersAt.Add(every))
}

// unseen says what of the way from the bus to NVML is missing.
func (o *Observation) unseen() string {
	switch {
	case o.unbound() != nil && o.unbound().Problem != "":
		return fmt.Sprintf("%s is on the bus but cannot be used: %s", o.unbound().Address, o.unbound().Problem)
	case o.unbound() != nil:
		return fmt.Sprintf("%s is on the bus, no driver is bound to it", o.unbound().Address)
	case o.function() != nil && o.NVMLState != "":
		return fmt.Sprintf("%s is on the bus, NVML does not answer: %s", o.function().Address, o.NVMLState)
	case o.unlisted() != nil && o.NVMLState != "":
		return fmt.Sprintf("%s is on the bus, NVML does not answer: %s", o.unlisted().Address, o.NVMLState)
	case o.unlisted() != nil:
		return fmt.Sprintf("%s is on the bus, NVML does not show it", o.unlisted().Address)
	case o.onFabric() != nil && o.onFabric().UUID == "" && o.onFabric().Serial != "":
		return fmt.Sprintf("no GPU of this node, or more than one, has the serial number %s that the manager gives", o.onFabric().Serial)
	default:
		return "it has not appeared on the bus"
	}
}
