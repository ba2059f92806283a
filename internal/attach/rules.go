// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"fmt"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// rule is one row of the policy: when it applies, its decision is the answer.
type rule struct {
	name string
	when func(*Observation) bool
	then func(*Observation) Decision
}

// Next returns the next action for the unit, or what it waits for. An action that just failed is left
// for a moment, whichever it is.
func Next(o Observation) Decision {
	d, _ := next(&o)
	if t := o.Tried[d.Kind]; t.Err != nil && o.Now.Before(t.At.Add(o.Settings.Retry)) {
		return o.waitUntil(t.At.Add(o.Settings.Retry), "tried again soon: %v", t.Err)
	}
	return d
}

// next also names the rule that applied, for the tests.
func next(o *Observation) (Decision, string) {
	if o.Running != "" {
		return o.wait("%s is under way", o.Running), "running"
	}
	for _, r := range rulesOf(o.Lease.Phase) {
		if r.when(o) {
			return r.then(o), r.name
		}
	}
	return o.wait("phase %q is not known to this release: hands off", o.Lease.Phase), "unknown phase"
}

// rulesOf returns the rows of a phase. The last row of each applies always.
func rulesOf(p device.Phase) []rule {
	switch p {
	case device.Assigned:
		return assigned()
	case device.Attaching:
		return attaching()
	case device.Attached:
		return attached()
	case device.Releasing:
		return releasing()
	case device.Failed:
		return failed()
	default:
		return nil
	}
}

// Assigned: the leader wants the unit here; nothing was asked of the fabric yet.
func assigned() []rule {
	return []rule{
		{"nobody wants it", (*Observation).unwanted, func(o *Observation) Decision {
			return o.do(Delete, "its claim is gone and nothing was asked of the fabric")
		}},
		{"unknown model", func(o *Observation) bool { return o.FabricModel == "" }, (*Observation).failUnknownModel},
		{"too late", (*Observation).late, (*Observation).failLate},
		{"machine busy", func(o *Observation) bool { return o.MachineBusy }, (*Observation).waitForMachine},
		{"look first", func(o *Observation) bool { return !o.Fresh }, (*Observation).list},
		{"write ahead", always, (*Observation).storeIntent},
	}
}

// Attaching: the manager was, or is about to be, asked for one more device of the model. Which one came
// is read from its list; the kernel, the driver and NVML must show that very device before it is Attached.
func attaching() []rule {
	noDevice := func(o *Observation) bool { return o.Lease.FabricDevice == "" }
	asked := func(f func(*Observation) bool) func(*Observation) bool {
		return func(o *Observation) bool { return noDevice(o) && f(o) }
	}
	return []rule{
		// The call.
		{"stored and unwanted", asked(func(o *Observation) bool { return o.MaySend && o.unwanted() }), func(o *Observation) Decision {
			return o.do(Delete, "its claim is gone and nothing was asked of the fabric")
		}},
		{"stored, too late", asked(func(o *Observation) bool { return o.MaySend && o.late() }), (*Observation).failLate},
		{"too late, list fails", func(o *Observation) bool { return o.late() && !o.Fresh && o.ListFault != nil }, (*Observation).failLate},
		{"machine busy", asked(func(o *Observation) bool { return o.MachineBusy }), (*Observation).waitForMachine},
		{"look again", func(o *Observation) bool { return !o.Fresh }, (*Observation).list},
		{"stored, machine as it was", asked(func(o *Observation) bool { return o.MaySend && o.unchanged() }), func(o *Observation) Decision {
			return o.do(SendAttach, "its lease says what is asked for, and the machine is as it was")
		}},
		{"stored, not so any more", asked(func(o *Observation) bool { return o.MaySend }), (*Observation).storeIntent},
		// Its outcome.
		{"refused, unwanted", asked(func(o *Observation) bool { return o.refused() && o.unwanted() }), func(o *Observation) Decision {
			return o.do(Delete, "its claim is gone and the manager attached nothing")
		}},
		{"refused for good", asked(func(o *Observation) bool { return o.refused() && !passing(o.Last.Fault) }), (*Observation).failRefused},
		{"refused, too late", asked(func(o *Observation) bool { return o.refused() && o.late() }), (*Observation).failLate},
		{"refused for now", asked(func(o *Observation) bool { return o.refused() && o.Now.Before(o.Last.At.Add(o.Settings.Busy)) }), func(o *Observation) Decision {
			return o.waitUntil(o.Last.At.Add(o.Settings.Busy), "the manager is asked again: %v", o.Last.Fault)
		}},
		{"refused, ask again", asked((*Observation).refused), (*Observation).storeIntent},
		{"one came", asked(func(o *Observation) bool { return o.candidate() != "" }), (*Observation).storeDevice},
		{"one left meanwhile", asked(func(o *Observation) bool { return o.left() }), (*Observation).storeLeft},
		{"nothing came in time", asked(func(o *Observation) bool { return o.late() && !o.unwanted() }), (*Observation).failLate},
		{"unknown, may still come", asked(func(o *Observation) bool { return !o.settled() }), (*Observation).lookWhileUnknown},
		{"nothing came, unwanted", asked((*Observation).unwanted), func(o *Observation) Decision {
			return o.do(Delete, "its claim is gone and nothing was attached")
		}},
		{"nothing came, ask again", asked(always), (*Observation).storeIntent},
		// The device.
		{"taken away", func(o *Observation) bool { return o.onFabric() == nil }, func(o *Observation) Decision {
			return o.fail("Vanished", device.BlameUnit, "the fabric manager no longer lists %s on this machine", o.Lease.FabricDevice)
		}},
		{"critical", func(o *Observation) bool { return o.onFabric().Health == device.HealthCritical }, func(o *Observation) Decision {
			return o.fail("DeviceCritical", device.BlameUnit, "the fabric manager reports %s as critical (%s); it stays attached, out of use",
				o.Lease.FabricDevice, o.onFabric().HealthText)
		}},
		{"no identity", func(o *Observation) bool { return o.onFabric().UUID == "" }, func(o *Observation) Decision {
			return o.fail("NoIdentity", device.BlameUnit,
				"the fabric manager gives no GPU UUID for %s, so it cannot be told from other GPUs of this node", o.Lease.FabricDevice)
		}},
		{"seen by all", func(o *Observation) bool { return o.usable(o.onFabric().UUID) != nil }, (*Observation).storeAttached},
		{"not seen, too late", (*Observation).late, (*Observation).failUnseen},
		{"no driver", func(o *Observation) bool { return o.unbound() != nil && o.due(Bind) }, (*Observation).bind},
		{"not in NVML", func(o *Observation) bool { return o.unlisted() != nil && o.due(Discover) }, func(o *Observation) Decision {
			return o.do(Discover, "%s is on the bus, NVML does not show it yet", o.unlisted().Address)
		}},
		{"not on the bus", func(o *Observation) bool { return o.nothingNew() && o.mayRescan() }, func(o *Observation) Decision {
			return o.rescan("%s is attached but did not appear on the bus by itself", o.Lease.FabricDevice)
		}},
		{"coming", always, func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "%s: %s", o.Lease.FabricDevice, o.unseen())
		}},
	}
}

// Attached: the device can be used here. It serves its claim, or becomes idle.
func attached() []rule {
	unseen := func(f func(*Observation) bool) func(*Observation) bool {
		return func(o *Observation) bool { return o.usable(o.Lease.UUID) == nil && f(o) }
	}
	return []rule{
		{"moved", func(o *Observation) bool { return o.moved() != nil }, func(o *Observation) Decision {
			d := o.store("%s is now at %s", o.Lease.UUID, o.moved().Address)
			d.Lease.PCI = o.moved().Address
			return d
		}},
		{"unseen, look", unseen(func(o *Observation) bool { return !o.Fresh && o.listDue() }), (*Observation).list},
		{"taken away", unseen(func(o *Observation) bool { return o.Fresh && o.onFabric() == nil }), func(o *Observation) Decision {
			return o.fail("Vanished", device.BlameUnit, "%s is gone from %s, and the fabric manager no longer lists it on this machine",
				o.Lease.UUID, o.Lease.PCI)
		}},
		{"drained by a former run", unseen(func(o *Observation) bool { return o.blind() && o.due(Undrain) }), (*Observation).undrainBlind},
		{"no driver", unseen(func(o *Observation) bool { return o.unbound() != nil && o.due(Bind) }), (*Observation).bind},
		{"not in NVML", unseen(func(o *Observation) bool { return o.unlisted() != nil && o.due(Discover) }), func(o *Observation) Decision {
			return o.do(Discover, "NVML does not show %s", o.Lease.UUID)
		}},
		{"off the bus", unseen(func(o *Observation) bool { return o.nothingNew() && o.mayRescan() }), func(o *Observation) Decision {
			return o.rescan("%s is attached but not on the bus", o.Lease.FabricDevice)
		}},
		{"unusable", unseen(always), func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "%s cannot be used: %s", o.Lease.UUID, o.unseen())
		}},
		{"drained by mistake", func(o *Observation) bool { return o.usable(o.Lease.UUID).Draining && o.due(Undrain) }, func(o *Observation) Decision {
			return o.do(Undrain, "it was called back and is wanted again")
		}},
		{"still drained", func(o *Observation) bool { return o.usable(o.Lease.UUID).Draining }, func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "the driver still drains it%s", because(o.Tried[Undrain].Err))
		}},
		{"tell", func(o *Observation) bool { return o.mustTell() && o.due(Tell) }, func(o *Observation) Decision {
			return o.do(Tell, "%s can be used", o.Lease.UUID)
		}},
		{"telling failed", (*Observation).mustTell, func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "the claim could not be told yet%s", because(o.Tried[Tell].Err))
		}},
		{"in use", func(o *Observation) bool { return !o.Lease.Attempt.IsZero() }, func(o *Observation) Decision {
			return o.wait("used by claim %s", o.Lease.Attempt.Claim())
		}},
		{"still prepared", (*Observation).prepared, func(o *Observation) Decision {
			return o.wait("its claim is gone, a container may still use it (not unprepared yet)")
		}},
		{"stale note", func(o *Observation) bool { return len(o.Lease.PreparedFor) > 0 }, func(o *Observation) Decision {
			d := o.store("it is no longer prepared")
			d.Lease.PreparedFor = nil
			return d
		}},
		{"wanted back", func(o *Observation) bool { return o.Lease.Deleting }, func(o *Observation) Decision {
			return o.phase(device.Releasing, "the lease was deleted, which is a wish to release")
		}},
		{"idle", func(o *Observation) bool { return !o.Lease.IdleSince.IsZero() }, func(o *Observation) Decision {
			return o.wait("goes back after the cool-down, or when another node needs it")
		}},
		{"who has it open", func(o *Observation) bool { return o.scanDue(o.Settings.Hold) }, (*Observation).findHolders},
		{"held", (*Observation).held, (*Observation).tellHolders},
		{"becomes idle", always, func(o *Observation) Decision {
			d := o.store("nobody uses it")
			d.Lease.IdleSince, d.Lease.HeldBy = o.Now, ""
			return d
		}},
	}
}

// Releasing: off the driver, off the bus, off the fabric, in this order, each only when nobody uses it.
func releasing() []rule {
	onBus := func(f func(*Observation) bool) func(*Observation) bool {
		return func(o *Observation) bool { return o.function() != nil && f(o) }
	}
	drained := (*Observation).drained
	again := func(o *Observation) bool { // what failed goes back first
		return !o.Lease.Attempt.IsZero() && o.Lease.Failure.Reason == "" && o.Lease.UUID != ""
	}
	return []rule{
		{"which one, look", func(o *Observation) bool { return o.Lease.UUID == "" && o.Lease.FabricDevice != "" && !o.Fresh }, (*Observation).list},
		{"found", func(o *Observation) bool { return o.found() != nil }, func(o *Observation) Decision {
			d := o.store("%s is at %s", o.identity(), o.found().Address) // a drained GPU is shown no more
			d.Lease.UUID, d.Lease.PCI = o.identity(), o.found().Address
			return d
		}},
		{"wanted again, drained", onBus(func(o *Observation) bool {
			return again(o) && o.usable(o.identity()) != nil && drained(o) && o.due(Undrain)
		}), func(o *Observation) Decision {
			return o.do(Undrain, "claim %s was allocated meanwhile", o.Lease.Attempt.Claim())
		}},
		{"wanted again", onBus(again), func(o *Observation) Decision {
			return o.phase(device.Attached, "claim "+o.Lease.Attempt.Claim()+" was allocated meanwhile")
		}},
		{"still prepared", (*Observation).prepared, func(o *Observation) Decision { // off the bus too: a container may have it
			return o.wait("it is still prepared for a claim")
		}},
		{"drained by a former run", onBus(func(o *Observation) bool { return o.blind() && o.due(Undrain) }), (*Observation).undrainBlind},
		{"who has it open", onBus(func(o *Observation) bool { return !drained(o) && o.scanDue(o.Settings.Look) }), (*Observation).findHolders},
		{"held", onBus(func(o *Observation) bool { return !drained(o) && o.held() }), (*Observation).tellHolders},
		{"drain", onBus(func(o *Observation) bool { return !drained(o) && o.due(Drain) }), func(o *Observation) Decision {
			return o.do(Drain, "nobody uses it")
		}},
		{"not drained", onBus(func(o *Observation) bool { return !drained(o) }), func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "the driver did not let it go%s", because(o.Tried[Drain].Err))
		}},
		{"opened meanwhile?", onBus(func(o *Observation) bool { return o.scanDue(o.Settings.Look) || o.HoldersAt.Before(o.Tried[Drain].At) }), (*Observation).findHolders},
		{"opened meanwhile", onBus(func(o *Observation) bool { return o.held() && o.usable(o.identity()) != nil && o.due(Undrain) }), func(o *Observation) Decision {
			return o.do(Undrain, "it was opened while it was drained")
		}},
		{"held on the bus", onBus((*Observation).held), (*Observation).tellHolders},
		{"off the bus", onBus(func(o *Observation) bool { return o.due(Remove) }), func(o *Observation) Decision {
			return o.do(Remove, "it is drained")
		}},
		{"not off the bus", onBus(always), func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "the kernel did not remove %s%s", o.function().Address, because(o.Tried[Remove].Err))
		}},
		{"not found, ask the driver", func(o *Observation) bool {
			return o.function() == nil && o.unlisted() != nil && o.Tried[Discover].At.IsZero() && o.Tried[Remove].At.IsZero()
		}, func(o *Observation) Decision {
			return o.do(Discover, "%s is on the bus, and may be what goes back", o.unlisted().Address)
		}},
		{"machine busy", func(o *Observation) bool { return o.MachineBusy }, (*Observation).waitForMachine},
		{"look", func(o *Observation) bool { return !o.Fresh }, (*Observation).list},
		{"unknown, may still go", func(o *Observation) bool { return o.onFabric() != nil && o.unanswered() }, (*Observation).lookWhileUnknown},
		{"refused for now", func(o *Observation) bool {
			return o.onFabric() != nil && o.Last != nil && o.Now.Before(o.Last.At.Add(o.Settings.Busy))
		}, (*Observation).waitForDetach},
		{"off the fabric", func(o *Observation) bool { return o.onFabric() != nil }, func(o *Observation) Decision {
			return o.do(SendDetach, "it is off the bus")
		}},
		{"attach again", func(o *Observation) bool { return !o.Lease.Attempt.IsZero() && !o.Lease.Deleting }, func(o *Observation) Decision {
			d := o.phase(device.Assigned, "claim "+o.Lease.Attempt.Claim()+" was allocated while it went back")
			d.Lease.FabricDevice, d.Lease.PCI, d.Lease.UUID = "", device.PCIAddress{}, ""
			d.Lease.SetBefore, d.Lease.AskedAt, d.Lease.AcquiredAt = nil, time.Time{}, o.Now
			return d
		}},
		{"back in the pool", always, func(o *Observation) Decision {
			return o.do(Delete, "the fabric manager no longer lists it on this machine")
		}},
	}
}

// Failed: out of use, until its allocation is taken back and a while has passed. A device that came
// after all is found, and goes back in the ordinary way.
func failed() []rule {
	unsettled := func(f func(*Observation) bool) func(*Observation) bool {
		return func(o *Observation) bool {
			return o.Lease.FabricDevice == "" && !o.Lease.AskedAt.IsZero() && f(o)
		}
	}
	return []rule{
		{"machine busy", unsettled(func(o *Observation) bool { return o.MachineBusy }), (*Observation).waitForMachine},
		{"it may have come, look", unsettled(func(o *Observation) bool { return !o.Fresh }), (*Observation).list},
		{"it came after all", unsettled(func(o *Observation) bool { return o.candidate() != "" }), (*Observation).storeDevice},
		{"one left meanwhile", unsettled(func(o *Observation) bool { return o.left() }), (*Observation).storeLeft},
		{"it may still come", unsettled(func(o *Observation) bool { return !o.settled() }), (*Observation).lookWhileUnknown},
		{"not taken back yet", func(o *Observation) bool { return !o.Lease.Attempt.IsZero() }, func(o *Observation) Decision {
			return o.wait("failed (%s); the scheduler takes the allocation back", o.Lease.Failure.Reason)
		}},
		{"back-off", func(o *Observation) bool { return o.Now.Before(o.retryAfter()) && !o.Lease.Deleting }, func(o *Observation) Decision {
			return o.waitUntil(o.retryAfter(), "failed (%s); tried again after %s", o.Lease.Failure.Reason,
				o.retryAfter().UTC().Format(time.RFC3339))
		}},
		{"nothing to give back", func(o *Observation) bool { return o.Lease.FabricDevice == "" }, func(o *Observation) Decision {
			return o.do(Delete, "the back-off is over and nothing is attached")
		}},
		{"goes back", always, func(o *Observation) Decision {
			d := o.phase(device.Releasing, "the back-off is over")
			d.Lease.Failure = o.Lease.Failure // so that nobody is given it on its way back
			return d
		}},
	}
}

func always(*Observation) bool { return true }

// passing tells a fault that may be gone when the same is asked again.
func passing(f *device.Fault) bool {
	switch f.Class {
	case device.FaultBusy, device.FaultUnauthorized, device.FaultUnreachable, device.FaultSuspended, device.FaultConflict:
		return true
	case device.FaultNotFound, device.FaultNoCapacity, device.FaultRejected, device.FaultUnsupported, device.FaultUnknown:
		return false
	}
	return false
}

// blameOf says what a refusal for good speaks against.
func blameOf(c device.FaultClass) device.Blame {
	switch c {
	case device.FaultNoCapacity, device.FaultUnsupported:
		return device.BlameModel
	case device.FaultNotFound: // the machine
		return device.BlameNode
	case device.FaultUnauthorized, device.FaultBusy, device.FaultRejected, device.FaultConflict,
		device.FaultSuspended, device.FaultUnreachable, device.FaultUnknown:
		return device.BlameUnit
	}
	return device.BlameUnit
}

// because appends the error of the last try, if there was one.
func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

// holders prints who has the device open, cut to what a person reads.
func holders(all []string) string {
	const most = 5
	if len(all) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(all[:most], ", "), len(all)-most)
	}
	return strings.Join(all, ", ")
}
