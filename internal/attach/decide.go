// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// What the rules answer.

func (o *Observation) wait(format string, args ...any) Decision {
	return Decision{Kind: Wait, Why: fmt.Sprintf(format, args...), Lease: o.Lease}
}

func (o *Observation) waitUntil(t time.Time, format string, args ...any) Decision {
	d := o.wait(format, args...)
	d.Wake = t
	return d
}

// do is any action but Store; its lease has the address where the device is now.
func (o *Observation) do(k Kind, format string, args ...any) Decision {
	d := Decision{Kind: k, Why: fmt.Sprintf(format, args...), Lease: o.Lease}
	if f := o.function(); f != nil {
		d.Lease.PCI = f.Address
	}
	return d
}

// store writes the lease.
func (o *Observation) store(format string, args ...any) Decision {
	return Decision{Kind: Store, Why: fmt.Sprintf(format, args...), Lease: o.Lease}
}

func (o *Observation) phase(p device.Phase, why string) Decision {
	d := o.store("%s", why)
	d.Lease.Phase, d.Lease.ChangedAt, d.Lease.Work = p, o.Now, ""
	d.Lease.IdleSince, d.Lease.HeldBy = time.Time{}, ""
	d.Lease.Failure = device.Failure{}
	return d
}

func (o *Observation) fail(reason string, blame device.Blame, format string, args ...any) Decision {
	d := o.phase(device.Failed, reason)
	d.Lease.Failure = device.Failure{
		Reason: reason, Message: fmt.Sprintf(format, args...), Blame: blame,
		RetryAfter: o.Now.Add(o.Settings.RetryAfter),
	}
	d.Why = d.Lease.Failure.Message
	return d
}

func (o *Observation) list() Decision {
	if next := o.ListTriedAt.Add(o.Settings.Busy); !o.listDue() {
		if d := o.deadline(); d.After(o.Now) && d.Before(next) {
			next = d // passes meanwhile
		}
		return o.waitUntil(next, "the fabric manager's list could not be read: %v", o.ListFault)
	}
	return o.do(ListFabric, "what is attached decides")
}

func (o *Observation) lookWhileUnknown() Decision {
	return o.lookUntilSettled("it is not known what came of the last call to the manager, which may take effect until %s",
		o.settledAt().UTC().Format(time.RFC3339))
}

func (o *Observation) lookAfterDetach() Decision {
	return o.lookUntilSettled("the manager said %s is detached, and still lists it", o.Lease.FabricDevice)
}

func (o *Observation) lookUntilSettled(format string, args ...any) Decision {
	next := o.ListTriedAt.Add(o.lookPause())
	if at := o.settledAt(); at.Before(next) {
		next = at
	}
	if o.Now.Before(next) {
		return o.waitUntil(next, format, args...)
	}
	return o.do(ListFabric, format, args...)
}

// lookPause is how long a list that does not show it yet is left: a manager's list that lags by minutes is not read
// every second.
func (o *Observation) lookPause() time.Duration {
	since := o.past(o.Lease.AskedAt)
	switch {
	case o.Last != nil:
		since = o.Last.At
	case o.FoundAt.After(since):
		since = o.FoundAt
	}
	return max(o.Settings.Look, min(o.Now.Sub(since)/8, o.Settings.Hold))
}

func (o *Observation) waitForMachine() Decision {
	const why = "another unit's call for this machine goes first"
	if at := o.deadline(); at.After(o.Now) && (o.Lease.Phase == device.Assigned || o.Lease.Phase == device.Attaching) {
		return o.waitUntil(at, why)
	}
	return o.wait(why)
}

func (o *Observation) waitForWork() Decision {
	next, why := o.pollAt(), ""
	if o.Last != nil && o.Last.Fault != nil {
		why = because(o.Last.Fault)
	}
	if err := o.Tried[Poll].Err; err != nil {
		why = because(err)
	}
	if d := o.deadline(); o.Lease.Phase == device.Attaching && d.After(o.Now) && d.Before(next) {
		next = d // passes meanwhile
	}
	return o.waitUntil(next, "the manager works on it (%s)%s", o.work(), why)
}

// waitForTurn waits for the nodes that asked before.
func (o *Observation) waitForTurn() Decision {
	d := o.wait("the fabric manager does one thing at a time; %d before this node's", o.Before)
	d.Turn = true
	if at := o.deadline(); at.After(o.Now) && (o.Lease.Phase == device.Assigned || o.Lease.Phase == device.Attaching) {
		d.Wake = at
	}
	return d
}

func (o *Observation) waitForReadable() Decision {
	const why = "a device lease of this node cannot be read, and what comes may be its; a person has to put it right"
	if d := o.deadline(); d.After(o.Now) && o.Lease.Phase != device.Failed {
		return o.waitUntil(d, why)
	}
	return o.wait(why)
}

// storeIntent writes ahead what will be asked. It waits while another unit's call is open: what appears could
// not be told apart.
func (o *Observation) storeIntent() Decision {
	if o.FabricModel == "" { // the configuration has changed since the first call
		return o.failUnknownModel()
	}
	if o.Unreadable {
		return o.waitForReadable()
	}
	if w := o.Lease.Wanted; w != "" && slices.Contains(o.strangers(), w) {
		return nothingComes(o.fail("Foreign", device.BlameUnit, "the fabric manager lists %s on this machine already, and no device lease says why", w))
	}
	if o.OutOfTurn {
		return o.waitForTurn()
	}
	if o.open() {
		next := o.OpenUntil
		if d := o.deadline(); d.After(o.Now) && d.Before(next) {
			next = d // passes meanwhile
		}
		return o.waitUntil(next, "another unit's call for this machine ended without an answer, and may still bring a device")
	}
	d := o.phase(device.Attaching, "write ahead what will be asked")
	d.Kind = StoreIntent
	d.Lease.SetBefore, d.Lease.AskedAt, d.Lease.AcquiredAt = o.strangers(), o.Now, o.taken()
	d.Lease.GPUsBefore = o.gpusHere()
	return d
}

func (o *Observation) storeDevice() Decision {
	d := o.store("the manager attached %s", o.candidate())
	d.Lease.FabricDevice, d.Lease.ChangedAt, d.Lease.Work = o.candidate(), o.Now, ""
	return d
}

// storeLeft forgets a device that was there before the call and is not any more. If it comes back, it
// answers the call.
func (o *Observation) storeLeft() Decision {
	d := o.store("a device that was there before was taken away meanwhile")
	d.Lease.SetBefore = slices.DeleteFunc(slices.Clone(o.Lease.SetBefore), func(id string) bool { return !o.lists(id) })
	return d
}

// storeArrived names the GPU of what failed, as long as it can be told: the next one that comes to this node is another.
func (o *Observation) storeArrived() Decision {
	at := o.suspects()[0].Address
	d := o.store("%s is at %s, the one GPU that came since it was asked for", o.Lease.FabricDevice, at)
	d.Lease.UUID, d.Lease.PCI = o.identity(), at
	return d
}

// doubt is for whoever has to act.
func (o *Observation) doubt() string {
	return fmt.Sprintf("the fabric manager gives no GPU UUID for %s, and which GPU of this node it is cannot be told; it stays attached, out of use, "+
		"until a person takes it away from machine %s, or the manager gives its UUID", o.Lease.FabricDevice, o.Lease.Machine)
}

func (o *Observation) tellDoubt() Decision {
	d := o.store("%s", o.doubt())
	d.Lease.Failure.Message = o.doubt()
	return d
}

func (o *Observation) waitInDoubt() Decision {
	at := make([]string, 0, len(o.Bus))
	for _, f := range o.suspects() {
		at = append(at, f.Address.String())
	}
	return o.waitUntil(o.doubtLookAt(), "%s; it may be at %s", o.doubt(), holders(at))
}

func (o *Observation) failInDoubt() Decision {
	f := o.Lease.Failure
	return o.fail(cmp.Or(f.Reason, "NoIdentity"), cmp.Or(f.Blame, device.BlameUnit), "%s", o.doubt())
}

func (o *Observation) storeAttached() Decision {
	uuid := o.identity()
	d := o.phase(device.Attached, "fabric, bus and NVML show the same GPU")
	d.Lease.UUID, d.Lease.PCI = uuid, o.usable(uuid).Address
	return d
}

// rescan looks where the device can have come, and everywhere if that brought nothing.
func (o *Observation) rescan(format string, args ...any) Decision {
	if o.Tried[Rescan].At.IsZero() {
		return o.do(Rescan, format, args...)
	}
	return o.do(RescanAll, format, args...)
}

func (o *Observation) bind() Decision {
	f := o.unbound()
	d := o.do(Bind, "%s has no driver", f.Address)
	d.Lease.PCI = f.Address
	return d
}

func (o *Observation) undrainBlind() Decision {
	return o.do(Undrain, "%s was drained by a former run, and the driver hides whose it is", o.Lease.PCI)
}

func (o *Observation) findHolders() Decision {
	return o.do(FindHolders, "nobody may have it open before it goes")
}

func (o *Observation) tellHolders() Decision {
	who := holders(o.Holders)
	if o.Lease.HeldBy == who {
		return o.waitUntil(o.HoldersAt.Add(o.Settings.Hold), "held open by %s", who)
	}
	d := o.store("held open by %s", who)
	d.Lease.HeldBy = who
	return d
}

// tellPrepared says in the lease that a container may keep the device for long, so that no more claims are given it.
func (o *Observation) tellPrepared() Decision {
	who := "a container of " + holders(o.PreparedFor)
	switch {
	case !o.Prepared:
		return o.wait("it is not known yet whether it is prepared for a claim")
	case o.Lease.HeldBy != "", !o.Lease.IdleSince.IsZero(): // a claim that comes by the ready entry says so itself
		return o.wait("it is still prepared for %s", holders(o.PreparedFor))
	}
	d := o.store("it is still prepared for %s", holders(o.PreparedFor))
	d.Lease.HeldBy = who
	return d
}

// waitForBusy keeps the turn: whoever came next would be refused, too.
func (o *Observation) waitForBusy() Decision {
	d := o.waitUntil(o.Last.At.Add(o.Settings.Busy), "the manager is asked again: %v", o.Last.Fault)
	d.Turn = true
	return d
}

func (o *Observation) failUnknownModel() Decision {
	return nothingComes(o.fail("UnknownModel", device.BlameNode, "the agent's configuration on this node has no model %q", o.Lease.Model))
}

func (o *Observation) failRefused() Decision {
	f := o.Last.Fault
	return nothingComes(o.fail(string(f.Class), blameOf(f.Class), "%v", f))
}

// nothingComes forgets the call: it was not sent, or was refused.
func nothingComes(d Decision) Decision {
	d.Lease.AskedAt, d.Lease.SetBefore, d.Lease.Work = time.Time{}, nil, ""
	return d
}

func (o *Observation) failLate() Decision {
	why := "the manager attached no device"
	switch {
	case o.refused():
		why = o.Last.Fault.Error()
	case o.ListFault != nil:
		why = o.ListFault.Error()
	case o.Last != nil && o.Last.Fault != nil:
		why = o.Last.Fault.Error()
	}
	d := o.fail("AttachTimeout", device.BlameUnit, "not attached within %s: %s", o.Settings.Deadline, why)
	d.Lease.Work = o.work() // it is looked at until it ends
	switch {
	case o.MaySend || o.refused():
		return nothingComes(d)
	case o.Last != nil && !o.working():
		d.Lease.AskedAt = o.Last.At // it settles from there; the next phase does not remember the call
	}
	return d
}

func (o *Observation) failCritical() Decision {
	return o.fail("DeviceCritical", device.BlameUnit, "the fabric manager reports %s as critical (%s); it stays attached, out of use, until it is tried again",
		o.Lease.FabricDevice, o.onFabric().HealthText)
}

// failLost gives up what could be used here once: the driver does not answer at all, or not for this one.
func (o *Observation) failLost() Decision {
	blame := device.BlameUnit
	if o.NVMLState != "" {
		blame = device.BlameNode
	}
	return o.fail("NotUsable", blame, "%s is attached, and could not be used for %s: %s", o.Lease.UUID, o.Settings.Deadline, o.unseen())
}

func (o *Observation) failUnseen() Decision {
	d := o.fail("NotUsable", device.BlameNode, "%s was attached by the fabric manager but could not be used within %s: %s",
		o.Lease.FabricDevice, o.Settings.Deadline, o.unseen())
	d.Lease.UUID = o.identity()
	if f := o.newcomer(); f != nil {
		d.Lease.PCI = f.Address // what is to be taken off the bus before it goes back
	}
	return d
}
