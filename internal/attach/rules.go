// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// rule is one row of the policy: when it applies, its decision is the answer. Why is the reason for the row, in
// docs/policy.md.
type rule struct {
	name string
	when func(*Observation) bool
	then func(*Observation) Decision
	why  string
}

// Next returns the next action for the unit, or what it waits for. An action that just failed is left
// for a moment, whichever it is.
func Next(o Observation) Decision {
	d, rule := next(&o)
	turn := d.Turn || o.leadsToCall(d.Kind) || o.leadsToCall(o.Running)
	if t := o.Tried[d.Kind]; t.Err != nil && o.Now.Before(t.At.Add(o.Settings.Retry)) {
		d = o.waitUntil(t.At.Add(o.Settings.Retry), "tried again soon: %v", t.Err)
	}
	d.Rule, d.Turn = rule, turn
	return d
}

// next also names the rule that applied.
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

// Rules names the rows of a phase, in their order.
func Rules(p device.Phase) []string {
	rows := rulesOf(p)
	names := make([]string, 0, len(rows))
	for _, r := range rows {
		names = append(names, r.name)
	}
	return names
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
		}, "Nothing was asked of the fabric, so there is nothing to give back."},
		{"unknown model", func(o *Observation) bool { return o.FabricModel == "" }, (*Observation).failUnknownModel, "Without the manager's word for the model nothing can be asked; another node may have the newer configuration."},
		{"too late", (*Observation).late, (*Observation).failLate, "The Pod is placed elsewhere in time, and the scheduler's own 10 minutes do not pass."},
		{"machine busy", func(o *Observation) bool { return o.MachineBusy }, (*Observation).waitForMachine, "What one call brings could not be told from what another brings; where the manager takes attaches side by side, any of them may have any of the devices."},
		{"not its turn", func(o *Observation) bool { return o.OutOfTurn }, (*Observation).waitForTurn, "Where the manager does one thing at a time for all nodes, they take turns, in the order in which they asked."},
		{"look first", func(o *Observation) bool { return !o.Fresh || o.strangersOld() }, (*Observation).list, "What comes is told by what was there before; what others attached, they may take away at any moment, and the manager may give us that very device."},
		{"write ahead", always, (*Observation).storeIntent, "After a crash the next run must know that the fabric may have been asked, and what was there before."},
	}
}

// Attaching: the manager was, or is about to be, asked for one more device of the model. Which one came
// is read from its list; the kernel, the driver and NVML must show that very device before it is Attached.
func attaching() []rule {
	return slices.Concat(named(), []rule{
		{"work goes on, too late", func(o *Observation) bool { return o.working() && o.late() && !o.unwanted() }, (*Observation).failLate, "The Pod is placed elsewhere; that the manager still works on it stays stored."},
	}, underWay(), calling(), appearing())
}

// named: the manager works on what it was asked for, and the lease does not say so yet.
func named() []rule {
	return []rule{
		{"work to be named", func(o *Observation) bool { return o.working() && o.work() != o.Lease.Work }, func(o *Observation) Decision {
			d := o.store("the manager works on it: %s", o.work())
			d.Lease.Work = o.work()
			return d
		}, "After a crash the next run asks by this name what became of it."},
	}
}

// underWay: the manager works on what it was asked for. Nothing is known, and nothing else is done, before that ends.
func underWay() []rule {
	return []rule{
		{"work goes on, look", func(o *Observation) bool { return o.working() && !o.Now.Before(o.pollAt()) }, func(o *Observation) Decision {
			return o.do(Poll, "the manager works on it: %s", o.work())
		}, "The manager says what became of it, also to a process that did not ask for it."},
		{"work goes on", (*Observation).working, (*Observation).waitForWork, "The manager is not pressed; work that waits for a person goes on as soon as that person lets it."},
	}
}

// calling: the call for one more device, and which one came.
func calling() []rule {
	noDevice := func(o *Observation) bool { return o.Lease.FabricDevice == "" }
	asked := func(f func(*Observation) bool) func(*Observation) bool {
		return func(o *Observation) bool { return noDevice(o) && f(o) }
	}
	return []rule{
		// The call.
		{"stored and unwanted", asked(func(o *Observation) bool { return o.MaySend && o.unwanted() }), func(o *Observation) Decision {
			return o.do(Delete, "its claim is gone and nothing was asked of the fabric")
		}, "The call was not sent yet: there is nothing to give back."},
		{"stored, too late", asked(func(o *Observation) bool { return o.MaySend && o.late() }), (*Observation).failLate, "The call was not sent yet, and there is no time left for it."},
		{"too late, list fails", func(o *Observation) bool { return o.late() && !o.Fresh && o.ListFault != nil }, (*Observation).failLate, "Nobody can say what came, and the Pod must not wait for the manager to return."},
		{"machine busy", asked(func(o *Observation) bool { return o.MachineBusy }), (*Observation).waitForMachine, "Calls that exclude each other go one after the other: attach and detach always, two of a kind unless the manager takes them side by side."},
		{"stored, not its turn", asked(func(o *Observation) bool { return o.MaySend && o.OutOfTurn }), (*Observation).waitForTurn, "The turn was lost, as by a pause of this process; it comes again."},
		{"look again", func(o *Observation) bool { return !o.Fresh }, (*Observation).list, "Only a list that was read after the last change says what is there."},
		{"stored, model gone", asked(func(o *Observation) bool { return o.MaySend && o.FabricModel == "" }), (*Observation).failUnknownModel, "The configuration has changed, and the call was not sent yet."},
		{"stored, machine as it was", asked(func(o *Observation) bool { return o.MaySend && o.unchanged() }), func(o *Observation) Decision {
			return o.do(SendAttach, "its lease says what is asked for, and the machine is as it was")
		}, "Intent and set before are stored, so whatever comes of the call can be found."},
		{"stored, not so any more", asked(func(o *Observation) bool { return o.MaySend }), (*Observation).storeIntent, "Something came or went since the set before was stored; it would be taken for the answer."},
		// Its outcome.
		{"refused, unwanted", asked(func(o *Observation) bool { return o.refused() && o.unwanted() }), func(o *Observation) Decision {
			return o.do(Delete, "its claim is gone and the manager attached nothing")
		}, "The manager said that nothing happened, and nobody waits any more."},
		{"refused for good", asked(func(o *Observation) bool { return o.refused() && !passing(o.Last.Fault) }), (*Observation).failRefused, "The same call would be refused again; the scheduler chooses anew."},
		{"refused, too late", asked(func(o *Observation) bool { return o.refused() && o.late() }), (*Observation).failLate, "It was refused for now until the time was over."},
		{"refused for now", asked(func(o *Observation) bool { return o.refused() && o.Now.Before(o.Last.At.Add(o.Settings.Busy)) }), (*Observation).waitForBusy, "A busy manager gets a pause before it is asked again."},
		{"refused, ask again", asked((*Observation).refused), (*Observation).storeIntent, "Nothing happened on the fabric, so asking again cannot bring two."},
		{"one came", asked(func(o *Observation) bool { return o.candidate() != "" }), (*Observation).storeDevice, "The list has the last word, whatever the call answered; the device that was not there before is ours."},
		{"one left meanwhile", asked(func(o *Observation) bool { return o.left() }), (*Observation).storeLeft, "If it comes back, it answers this call."},
		{"nothing came in time", asked(func(o *Observation) bool { return o.late() && !o.unwanted() }), (*Observation).failLate, "The Pod is placed elsewhere; that a device may still come stays stored."},
		{"a lease is unreadable", asked(func(o *Observation) bool { return o.Unreadable }), (*Observation).waitForReadable, "What came may be that lease's device, and what is given up now would be left behind."},
		{"unknown, may still come", asked(func(o *Observation) bool { return !o.settled() }), (*Observation).lookWhileUnknown, "Unknown is neither done nor failed: a second call could bring a second device."},
		{"nothing came, unwanted", asked((*Observation).unwanted), func(o *Observation) Decision {
			return o.do(Delete, "its claim is gone and nothing was attached")
		}, "The call can take no effect any more, and nobody waits."},
		{"nothing came, ask again", asked(always), (*Observation).storeIntent, "The call can take no effect any more; there is time for another."},
	}
}

// appearing: the device is known, and comes to the node.
func appearing() []rule {
	return []rule{
		{"taken away", func(o *Observation) bool { return o.onFabric() == nil }, func(o *Observation) Decision {
			return o.fail("Vanished", device.BlameUnit, "the fabric manager no longer lists %s on this machine", o.Lease.FabricDevice)
		}, "Somebody detached it before it could be used."},
		{"critical", func(o *Observation) bool { return o.onFabric().Health == device.HealthCritical }, (*Observation).failCritical, "It stays attached, out of use, so that the manager does not hand it out again at once."},
		{"no identity", (*Observation).anonymous, func(o *Observation) Decision {
			return o.fail("NoIdentity", device.BlameUnit,
				"the fabric manager gives no GPU UUID and no serial number for %s, so it cannot be told from other GPUs of this node", o.Lease.FabricDevice)
		}, "It could be mistaken for another GPU of this node."},
		{"several came", (*Observation).ambiguous, func(o *Observation) Decision {
			return o.fail("Ambiguous", device.BlameUnit, "the fabric manager gives no GPU UUID for %s, and more than one GPU came to this node: %s", o.Lease.FabricDevice, o.arrived())
		}, "Either could be somebody else's; it is handed out to nobody."},
		{"seen by all", func(o *Observation) bool {
			return o.usable(o.identity()) != nil && (o.byArrival() || !o.unidentified())
		}, (*Observation).storeAttached, "Fabric, bus and driver show the same identity: only then a claim may be told."},
		{"not seen, too late", (*Observation).late, (*Observation).failUnseen, "It is there and cannot be used on this node; the failure speaks against the node."},
		{"no driver", func(o *Observation) bool { return o.unbound() != nil && o.due(Bind) }, (*Observation).bind, "The kernel had its time to bind the driver by itself."},
		{"not in NVML", func(o *Observation) bool { return o.unlisted() != nil && o.due(Discover) }, func(o *Observation) Decision {
			return o.do(Discover, "%s is on the bus, NVML does not show it yet", o.unlisted().Address)
		}, "The driver's library looks for devices only when it is asked to."},
		{"not on the bus", func(o *Observation) bool { return o.nothingNew() && o.mayRescan() }, func(o *Observation) Decision {
			return o.rescan("%s is attached but did not appear on the bus by itself", o.Lease.FabricDevice)
		}, "The kernel had its time to show the device by itself; a device on its way out would come back by a rescan, so that waits."},
		{"coming", always, func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "%s: %s", o.Lease.FabricDevice, o.unseen())
		}, "Kernel and driver need a moment."},
	}
}

// Attached: the device can be used here. It serves its claim, or becomes idle.
func attached() []rule {
	return slices.Concat([]rule{
		{"moved", func(o *Observation) bool { return o.moved() != nil }, func(o *Observation) Decision {
			d := o.store("%s is now at %s", o.Lease.UUID, o.moved().Address)
			d.Lease.PCI = o.moved().Address
			return d
		}, "Addresses change, as after a restart of the node; the identity does not."},
	}, lost(), inUse())
}

// lost: the driver does not show it. It may come back by itself, or be gone.
func lost() []rule {
	unseen := func(f func(*Observation) bool) func(*Observation) bool {
		return func(o *Observation) bool { return o.usable(o.Lease.UUID) == nil && f(o) }
	}
	return []rule{
		{"unseen, look", unseen(func(o *Observation) bool { return !o.Fresh && o.listDue() }), (*Observation).list, "The manager says whether it is gone or only out of sight."},
		{"taken away", unseen(func(o *Observation) bool { return o.Fresh && o.onFabric() == nil }), func(o *Observation) Decision {
			return o.fail("Vanished", device.BlameUnit, "%s is gone from %s, and the fabric manager no longer lists it on this machine",
				o.Lease.UUID, o.Lease.PCI)
		}, "Bus and manager agree that it is gone; a Pod that used it is evicted."},
		{"drained by a former run", unseen(func(o *Observation) bool { return o.blind() && o.due(Undrain) }), (*Observation).undrainBlind, "The driver hides a drained GPU's identity from a new process; undrained it is seen again."},
		{"no driver", unseen(func(o *Observation) bool { return o.unbound() != nil && o.due(Bind) }), (*Observation).bind, "It lost its driver and gets it back."},
		{"not in NVML", unseen(func(o *Observation) bool { return o.unlisted() != nil && o.due(Discover) }), func(o *Observation) Decision {
			return o.do(Discover, "NVML does not show %s", o.Lease.UUID)
		}, "The driver's library looks for devices only when it is asked to."},
		{"off the bus", unseen(func(o *Observation) bool { return o.nothingNew() && o.mayRescan() }), func(o *Observation) Decision {
			return o.rescan("%s is attached but not on the bus", o.Lease.FabricDevice)
		}, "The manager says that it is attached, so a rescan brings it back."},
		{"idle and not seen", unseen(func(o *Observation) bool { return !o.Lease.IdleSince.IsZero() }), func(o *Observation) Decision {
			d := o.store("it is idle, and cannot be used: %s", o.unseen())
			d.Lease.IdleSince = time.Time{}
			return d
		}, "The next Pod would wait for it in vain."},
		{"not seen, too late", unseen(func(o *Observation) bool {
			return !o.UnseenSince.IsZero() && !o.Now.Before(o.UnseenSince.Add(o.Settings.Deadline)) && !o.prepared()
		}), (*Observation).failLost, "Nobody can use it: who waits for it is given another, and it goes back, unless a container has it."},
		{"unusable", unseen(always), func(o *Observation) Decision {
			return o.waitUntil(o.Now.Add(o.unseenPause()), "%s cannot be used: %s", o.Lease.UUID, o.unseen())
		}, "It may come back by itself; meanwhile the reason stands here."},
	}
}

// inUse: the driver shows it.
func inUse() []rule {
	return []rule{
		{"drained by mistake", func(o *Observation) bool { return o.usable(o.Lease.UUID).Draining && o.due(Undrain) }, func(o *Observation) Decision {
			return o.do(Undrain, "it was called back and is wanted again")
		}, "A release was begun and called back."},
		{"still drained", func(o *Observation) bool { return o.usable(o.Lease.UUID).Draining }, func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "the driver still drains it%s", because(o.Tried[Undrain].Err))
		}, "The driver takes a moment, or refuses; it is asked again."},
		{"tell", func(o *Observation) bool { return o.mustTell() && o.due(Tell) }, func(o *Observation) Decision {
			return o.do(Tell, "%s can be used", o.Lease.UUID)
		}, "The scheduler waits for this word, and only the holder may say it."},
		{"telling failed", (*Observation).mustTell, func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "the claim could not be told yet%s", because(o.Tried[Tell].Err))
		}, "The API server refused or did not answer; it is told again."},
		{"in use", func(o *Observation) bool { return !o.Lease.Attempt.IsZero() }, func(o *Observation) Decision {
			return o.wait("used by claim %s", o.Lease.Attempt.Claim())
		}, "The claim has it until the leader clears the attempt."},
		{"still prepared", (*Observation).prepared, (*Observation).tellPrepared, "That a claim is gone does not mean that its containers are; the lease says so, since how long they stay nobody knows."},
		{"stale note", func(o *Observation) bool { return len(o.Lease.PreparedFor) > 0 }, func(o *Observation) Decision {
			d := o.store("it is no longer prepared")
			d.Lease.PreparedFor = nil
			return d
		}, "The kubelet unprepared it, so the note that it was given out is over."},
		{"wanted back", func(o *Observation) bool { return o.Lease.Deleting }, func(o *Observation) Decision {
			return o.phase(device.Releasing, "the lease was deleted, which is a wish to release")
		}, "Deleting the lease is a wish to release; the finalizer keeps it until then."},
		{"idle, look now and then", func(o *Observation) bool {
			return !o.Lease.IdleSince.IsZero() && !o.Now.Before(o.relookAt())
		}, (*Observation).list, "The manager may have called it critical since; that does not announce itself."},
		{"idle and critical", func(o *Observation) bool { return !o.Lease.IdleSince.IsZero() && o.critical() }, (*Observation).failCritical, "It is kept from the next Pod; it stays attached, out of use, so that the manager does not hand it out again at once."},
		{"idle", func(o *Observation) bool { return !o.Lease.IdleSince.IsZero() }, func(o *Observation) Decision {
			why := "goes back after the cool-down, or when another node needs it"
			if o.Lease.Kept {
				why = "stays, since the node keeps a minimum"
			}
			return o.waitUntil(o.relookAt(), "%s", why)
		}, "It waits for a Pod here, or for the leader to call it back."},
		{"who has it open", func(o *Observation) bool { return o.scanDue(o.Settings.Hold) }, (*Observation).findHolders, "A process may use it without a claim."},
		{"held", (*Observation).held, (*Observation).tellHolders, "It is not offered while somebody has it open; the lease names who."},
		{"look before it is offered", func(o *Observation) bool { return !o.Fresh && o.ListFault == nil }, (*Observation).list, "The next Pod gets it at once, and the manager may have called it critical since."},
		{"critical", (*Observation).critical, (*Observation).failCritical, "It is kept from the next Pod; it stays attached, out of use, so that the manager does not hand it out again at once."},
		{"becomes idle", always, func(o *Observation) Decision {
			d := o.store("nobody uses it")
			d.Lease.IdleSince, d.Lease.HeldBy = o.Now, ""
			return d
		}, "No claim has it, no container, no process: the next Pod gets it at once."},
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
	return slices.Concat(named(), underWay(), []rule{
		{"which one, look", func(o *Observation) bool { return o.Lease.UUID == "" && o.Lease.FabricDevice != "" && !o.Fresh }, (*Observation).list, "A release must take the right device, and the list tells its identity."},
		{"which one cannot be told", (*Observation).inDoubt, (*Observation).failInDoubt, "What is detached has to be off the bus, and the wrong one must not be taken off it."},
		{"found", func(o *Observation) bool { return o.found() != nil }, func(o *Observation) Decision {
			d := o.store("%s is at %s", o.identity(), o.found().Address) // a drained GPU is shown no more
			d.Lease.UUID, d.Lease.PCI = o.identity(), o.found().Address
			return d
		}, "Where it is now is stored before it is drained, since a drained GPU is shown no more."},
		{"known by its arrival", (*Observation).toBeNamed, (*Observation).storeArrived, "No driver has it, and it is taken off the bus before it goes back."},
		{"wanted again, drained", onBus(func(o *Observation) bool {
			return again(o) && o.usable(o.identity()) != nil && drained(o) && o.due(Undrain)
		}), func(o *Observation) Decision {
			return o.do(Undrain, "claim %s was allocated meanwhile", o.Lease.Attempt.Claim())
		}, "An allocation slipped in; the driver takes it back first."},
		{"wanted again", onBus(again), func(o *Observation) Decision {
			return o.phase(device.Attached, "claim "+o.Lease.Attempt.Claim()+" was allocated meanwhile")
		}, "An allocation slipped in before it left the bus: it is faster to keep it than to attach again."},
		{"still prepared", (*Observation).prepared, (*Observation).tellPrepared, "A container may use it, even where the bus does not show it; the lease says so, since how long that takes, as with an administrator's claim, nobody knows."},
		{"known by its address, look", func(o *Observation) bool { return o.nameless() && !o.Fresh && o.Lease.FabricDevice != "" }, (*Observation).list, "Something else may have come to its address since; it is there only if the manager lists it."},
		{"drained by a former run", onBus(func(o *Observation) bool { return o.blind() && o.due(Undrain) }), (*Observation).undrainBlind, "The driver hides a drained GPU's identity from a new process; undrained it is seen again."},
		{"known by its address, ask the driver", func(o *Observation) bool { return o.nameless() && o.strange(o.function()) }, func(o *Observation) Decision {
			return o.do(Discover, "something is at %s, where %s was, and the driver does not say what", o.function().Address, o.Lease.UUID)
		}, "A former run may have taken it off the bus, and another device may have come to its address since."},
		{"who has it open", onBus(func(o *Observation) bool { return !drained(o) && o.scanDue(o.Settings.Look) }), (*Observation).findHolders, "A device that somebody has open is never drained."},
		{"held", onBus(func(o *Observation) bool { return !drained(o) && o.held() }), (*Observation).tellHolders, "It stays until the process ends; the lease names who."},
		{"let go", func(o *Observation) bool {
			return o.Lease.HeldBy != "" && (o.function() == nil || !o.HoldersAt.IsZero() && !o.held())
		}, func(o *Observation) Decision {
			d := o.store("%s is done with it", o.Lease.HeldBy)
			d.Lease.HeldBy = ""
			return d
		}, "Who waits for it does not wait for that any more; the way back may still be long."},
		{"drain", onBus(func(o *Observation) bool { return !drained(o) && o.due(Drain) }), func(o *Observation) Decision {
			return o.do(Drain, "nobody uses it")
		}, "The driver lets it go before it leaves the bus."},
		{"not drained", onBus(func(o *Observation) bool { return !drained(o) }), func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "the driver did not let it go%s", because(o.Tried[Drain].Err))
		}, "The driver refused, mostly because somebody just opened it; it is asked again."},
		{"opened meanwhile?", onBus(func(o *Observation) bool { return o.scanDue(o.Settings.Look) || o.HoldersAt.Before(o.Tried[Drain].At) }), (*Observation).findHolders, "Between the last look and the drain somebody may have opened it."},
		{"opened meanwhile", onBus(func(o *Observation) bool { return o.held() && o.usable(o.identity()) != nil && o.due(Undrain) }), func(o *Observation) Decision {
			return o.do(Undrain, "it was opened while it was drained")
		}, "It goes back to whoever opened it, and the release begins anew."},
		{"held on the bus", onBus((*Observation).held), (*Observation).tellHolders, "Removing an open device hangs the kernel."},
		{"off the bus", onBus(func(o *Observation) bool { return o.due(Remove) }), func(o *Observation) Decision {
			return o.do(Remove, "it is drained")
		}, "It is drained and nobody has it open."},
		{"not off the bus", onBus(always), func(o *Observation) Decision {
			return o.waitUntil(o.nextLook(), "the kernel did not remove %s%s", o.function().Address, because(o.Tried[Remove].Err))
		}, "The kernel takes a moment, or refuses; it is asked again."},
		{"not found, ask the driver", func(o *Observation) bool {
			return o.function() == nil && o.unlisted() != nil && !o.Tried[Discover].At.After(o.Tried[Remove].At) && (o.onFabric() != nil || !o.removed())
		}, func(o *Observation) Decision {
			return o.do(Discover, "%s is on the bus, and may be what goes back", o.unlisted().Address)
		}, "What is on the bus and unknown to the driver's library may be the device that goes back."},
	}, detaching())
}

// detaching: off the fabric, once the node has let it go.
func detaching() []rule {
	return []rule{
		{"machine busy", func(o *Observation) bool { return o.MachineBusy }, (*Observation).waitForMachine, "Calls that exclude each other go one after the other: attach and detach always, two of a kind unless the manager takes them side by side; detaches that can go at the same moment are one call where the manager takes that."},
		{"not its turn", func(o *Observation) bool { return o.OutOfTurn && !o.detachSent() && !o.unanswered() }, (*Observation).waitForTurn, "Where the manager does one thing at a time for all nodes, they take turns, in the order in which they asked."},
		{"look", func(o *Observation) bool { return !o.Fresh }, (*Observation).list, "Only a list that was read after the last change says whether it is still attached."},
		{"unknown, may still go", (*Observation).mayStillGo, (*Observation).lookWhileUnknown, "The call, or a second one, could take the device from whoever gets it next."},
		{"detached, still listed", func(o *Observation) bool {
			return o.onFabric() != nil && o.Last != nil && o.Last.Fault == nil && o.Now.Before(o.settledAt())
		}, (*Observation).lookAfterDetach, "A manager's list may lag behind what it has done; a second call could take the device from whoever gets it next."},
		{"refused for now", func(o *Observation) bool {
			return (o.onFabric() != nil || !o.detachSent()) && o.Last != nil && o.Now.Before(o.Last.At.Add(o.Settings.Busy))
		}, (*Observation).waitForBusy, "A busy manager gets a pause before it is asked again."},
		{"off the fabric", func(o *Observation) bool { return o.onFabric() != nil }, func(o *Observation) Decision {
			return o.do(SendDetach, "it is off the bus")
		}, "Nobody uses it and the node has let it go."},
		{"not listed, but not detached by us", func(o *Observation) bool { return o.Lease.FabricDevice != "" && !o.detachSent() }, func(o *Observation) Decision {
			return o.do(SendDetach, "the manager does not list it, though this process has not had it detached")
		}, "One list may be wrong, as of a manager that has just started; a detach of what is not there does no harm."},
		{"attach again", func(o *Observation) bool { return !o.Lease.Attempt.IsZero() && !o.Lease.Deleting }, func(o *Observation) Decision {
			d := o.phase(device.Assigned, "claim "+o.Lease.Attempt.Claim()+" was allocated while it went back")
			d.Lease.FabricDevice, d.Lease.PCI, d.Lease.UUID = "", device.PCIAddress{}, ""
			d.Lease.SetBefore, d.Lease.AskedAt, d.Lease.AcquiredAt = nil, time.Time{}, o.Now
			d.Lease.GPUsBefore, d.Lease.Work = nil, ""
			return d
		}, "A claim was given the unit while it went back: it is served by a new attach."},
		{"back in the pool", always, func(o *Observation) Decision {
			return o.do(Delete, "the fabric manager no longer lists it on this machine")
		}, "The manager's list, not its answer, says that it is gone; the lease goes last."},
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
	return slices.Concat(underWay(), []rule{
		{"machine busy", unsettled(func(o *Observation) bool { return o.MachineBusy }), (*Observation).waitForMachine, "What another unit's call brings could be mistaken for what came late."},
		{"it may have come, look", unsettled(func(o *Observation) bool { return !o.Fresh }), (*Observation).list, "A call without an answer may have taken effect."},
		{"it came after all", unsettled(func(o *Observation) bool { return o.candidate() != "" }), (*Observation).storeDevice, "Found, it goes back in the ordinary way instead of staying attached without a lease."},
		{"one left meanwhile", unsettled(func(o *Observation) bool { return o.left() }), (*Observation).storeLeft, "If it comes back, it answers this call."},
		{"a lease is unreadable", unsettled(func(o *Observation) bool { return o.Unreadable }), (*Observation).waitForReadable, "What came may be that lease's device, and what is given up now would be left behind."},
		{"it may still come", unsettled(func(o *Observation) bool { return !o.settled() }), (*Observation).lookWhileUnknown, "The call may still take effect, so it is not forgotten."},
		{"nothing came", unsettled(always), func(o *Observation) Decision {
			return nothingComes(o.store("the call can take no effect any more"))
		}, "What comes from now on is somebody else's, and must not be taken for the answer."},
		{"known by its arrival, look", func(o *Observation) bool { return o.toBeNamed() && !o.Fresh && o.listDue() }, (*Observation).list, "Somebody else may have attached a device meanwhile, which may be what came."},
		{"known by its arrival", func(o *Observation) bool { return o.toBeNamed() && o.Fresh }, (*Observation).storeArrived, "It is taken off the bus before it goes back; what comes later could not be told from it."},
		{"not taken back yet", func(o *Observation) bool { return !o.Lease.Attempt.IsZero() }, func(o *Observation) Decision {
			return o.wait("failed (%s); the scheduler takes the allocation back", o.Lease.Failure.Reason)
		}, "The leader withdraws the choice before it takes the allocation back."},
		{"back-off", func(o *Observation) bool { return o.Now.Before(o.retryAfter()) && !o.Lease.Deleting }, func(o *Observation) Decision {
			return o.waitUntil(o.retryAfter(), "failed (%s); tried again after %s", o.Lease.Failure.Reason,
				o.retryAfter().UTC().Format(time.RFC3339))
		}, "What failed would fail again at once; a bad device stays out of use meanwhile."},
		{"nothing to give back", func(o *Observation) bool { return o.Lease.FabricDevice == "" }, func(o *Observation) Decision {
			return o.do(Delete, "the back-off is over and nothing is attached")
		}, "No call is open, and none brought anything."},
		{"which one, look", (*Observation).unsure, (*Observation).list, "A release must take the right device, and the list tells its identity."},
		{"which one, ask the driver", func(o *Observation) bool { return o.inDoubt() && o.unlisted() != nil && o.Tried[Discover].At.IsZero() }, func(o *Observation) Decision {
			return o.do(Discover, "%s is on the bus, and may be what goes back", o.unlisted().Address)
		}, "What is on the bus and unknown to the driver's library may be the device that goes back."},
		{"which one cannot be told, say so", func(o *Observation) bool { return o.inDoubt() && o.Lease.Failure.Message != o.doubt() }, (*Observation).tellDoubt, "A person has to take it away, or see to it that the manager gives its identity."},
		{"which one cannot be told", (*Observation).inDoubt, (*Observation).waitInDoubt, "Nothing is detached that is on the bus and may be in use, and the wrong one must not be taken off it."},
		{"still prepared", (*Observation).prepared, (*Observation).tellPrepared, "Its Pod is evicted for as long as it has failed; on its way back it would only be kept from others."},
		{"goes back", always, func(o *Observation) Decision {
			d := o.phase(device.Releasing, "the back-off is over")
			d.Lease.Failure = o.Lease.Failure // so that nobody is given it on its way back
			return d
		}, "The back-off is over: it goes back to the manager, and nobody is given it on its way."},
	})
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
