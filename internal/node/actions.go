// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
)

// order is what was decided for a unit.
type order struct {
	lease device.Lease
	does  attach.Decision
}

// perform starts the action. It records how it ended and pokes the loop.
func (l *Loop) perform(ctx context.Context, o order) {
	l.cfg.Spawn(func() {
		began := l.cfg.Clock.Now()
		work, err := l.act(ctx, o.lease, o.does)
		l.acted(ctx, o, began, Answer{work, err})
		l.Poke()
	})
}

// performAll starts detaches that go to the manager in one call. Each ends by itself.
func (l *Loop) performAll(ctx context.Context, all []order) {
	if len(all) == 1 {
		l.perform(ctx, all[0])
	}
	if len(all) < 2 {
		return
	}
	l.cfg.Spawn(func() {
		began := l.cfg.Clock.Now()
		calls := make([]Call, 0, len(all))
		for _, o := range all {
			_, call := l.call(o.lease)
			calls = append(calls, call)
		}
		limited, cancel := context.WithTimeout(ctx, l.cfg.CallDeadline)
		answers := l.cfg.Batcher.DetachAll(limited, calls)
		cancel()
		for i, o := range all {
			l.acted(ctx, o, began, answers[i])
		}
		l.Poke()
	})
}

func (l *Loop) acted(ctx context.Context, o order, began time.Time, a Answer) {
	ended := l.cfg.Clock.Now()
	l.ended(o.lease, o.does.Kind, a.Work, began, ended, a.Err)
	l.cfg.Observer.Acted(ctx, o.lease, o.does.Kind, ended.Sub(began), a.Err)
}

// ended records the end of an action.
func (l *Loop) ended(lease device.Lease, k attach.Kind, work Work, began, at time.Time, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	mem := l.units[lease.Unit]
	mem.running = ""
	mem.tried[k] = attach.Try{At: at, Err: err}
	switch k {
	case attach.SendAttach, attach.SendDetach:
		mem.maySend = time.Time{}
		r := attach.Result{SentAt: began, At: at, Unlisted: k == attach.SendDetach && mem.unlisted, Fault: fault(string(k), err)}
		l.heard(mem, r, work, err)
	case attach.Poll:
		if err != nil {
			break // nothing was heard of it
		}
		r := attach.Result{SentAt: began, At: at}
		switch {
		case mem.last != nil:
			r.SentAt, r.Unlisted = mem.last.SentAt, mem.last.Unlisted
		case !mem.foundAt.IsZero():
			r.SentAt = mem.foundAt // a former run sent it, not later than this
		}
		l.heard(mem, r, work, nil)
	case attach.Tell:
		if err == nil {
			mem.told = lease.Attempt
		}
	case attach.Drain, attach.Undrain, attach.Remove:
		mem.holders, mem.scanned = nil, time.Time{} // who had it open before says nothing any more
	default:
	}
}

// heard records what the manager says of a call. What it lists may be different from then on.
func (l *Loop) heard(mem *unit, r attach.Result, work Work, err error) {
	l.machine.changes++
	if err == nil {
		r.Work, r.PollAfter, r.Fault = work.Handle, work.PollAfter, work.Fault
	}
	mem.last = &r
}

// call is what is asked of the manager for the unit, and whether it is an attach or a detach.
func (l *Loop) call(lease device.Lease) (attach.Kind, Call) {
	c := Call{Machine: l.cfg.Machine, Model: l.cfg.Model(lease.Model), Device: lease.FabricDevice}
	if lease.Phase == device.Releasing {
		return attach.SendDetach, c
	}
	c.Device, c.Before = lease.Wanted, l.before(lease)
	return attach.SendAttach, c
}

// before are the devices that the machine had when it was decided to ask for one more: those of other units, and
// those that nobody had.
func (l *Loop) before(lease device.Lease) []string {
	all := l.cfg.Leases.List()
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := slices.AppendSeq([]string{}, maps.Keys(l.claimed(lease, all)))
	ids = append(ids, lease.SetBefore...)
	slices.Sort(ids)
	return ids
}

// act does what was decided for the unit.
func (l *Loop) act(ctx context.Context, lease device.Lease, d attach.Decision) (Work, error) {
	k, now := d.Kind, l.cfg.Clock.Now()
	deadline := l.cfg.LocalDeadline
	switch k {
	case attach.SendAttach:
		// A manager that does not answer must not keep the claim beyond its time; what it does later is found
		// in its list.
		deadline = min(l.cfg.CallDeadline, l.cfg.Settings.Until(lease.AcquiredAt, now).Sub(now))
	case attach.SendDetach, attach.Poll, attach.ListFabric:
		deadline = l.cfg.CallDeadline
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	what, call := l.call(lease)
	switch k {
	case attach.SendAttach:
		return l.cfg.Manager.Attach(ctx, call)
	case attach.SendDetach:
		return l.cfg.Manager.Detach(ctx, call)
	case attach.Poll:
		return l.cfg.Manager.Poll(ctx, what, call, d.Lease.Work)
	default:
		return Work{}, l.actHere(ctx, lease, d)
	}
}

// actHere does what asks for no change on the fabric.
func (l *Loop) actHere(ctx context.Context, lease device.Lease, d attach.Decision) error {
	switch d.Kind {
	case attach.ListFabric:
		return l.list(ctx)
	case attach.Store, attach.StoreIntent:
		return l.store(ctx, lease, d)
	case attach.Delete:
		err := l.cfg.Leases.Delete(ctx, lease)
		if err == nil {
			l.cfg.Observer.Deleted(ctx, lease)
		}
		return err
	case attach.Tell:
		err := l.cfg.Claims.TellAttached(ctx, lease)
		if err == nil {
			l.cfg.Observer.Told(ctx, lease)
		}
		return err
	case attach.FindHolders:
		return l.findHolders(ctx, d.Lease)
	default:
		return l.onHost(ctx, d.Kind, d.Lease.PCI)
	}
}

func (l *Loop) onHost(ctx context.Context, k attach.Kind, a device.PCIAddress) error {
	switch k {
	case attach.Rescan:
		return l.cfg.Host.Rescan(ctx, a)
	case attach.RescanAll:
		return l.cfg.Host.RescanAll(ctx)
	case attach.Bind:
		return l.cfg.Host.Bind(ctx, a)
	case attach.Discover:
		return l.cfg.Host.Discover(ctx)
	case attach.Drain:
		return l.cfg.Host.Drain(ctx, a)
	case attach.Undrain:
		return l.cfg.Host.Undrain(ctx, a)
	case attach.Remove:
		return l.cfg.Host.Remove(ctx, a)
	default:
		return nil
	}
}

func (l *Loop) list(ctx context.Context) error {
	l.mu.Lock()
	changes, asked := l.machine.changes, l.cfg.Clock.Now()
	l.mu.Unlock()
	here, err := l.cfg.Manager.ListAttached(ctx, l.cfg.Machine)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.machine.listing, l.machine.triedAt = false, l.cfg.Clock.Now()
	l.machine.fault = fault("list what is attached to machine "+string(l.cfg.Machine), err)
	if err == nil {
		l.machine.here, l.machine.current, l.machine.askedAt = here, changes, asked
	}
	return err
}

func (l *Loop) store(ctx context.Context, before device.Lease, d attach.Decision) error {
	stored, err := l.cfg.Leases.Update(ctx, d.Lease)
	if err != nil {
		return err
	}
	if d.Kind == attach.StoreIntent {
		l.mu.Lock()
		l.units[before.Unit].maySend = stored.AskedAt
		l.mu.Unlock()
	}
	l.cfg.Observer.Stored(ctx, before, stored)
	return nil
}

func (l *Loop) findHolders(ctx context.Context, d device.Lease) error {
	who, err := l.cfg.Host.Holders(ctx, d.PCI)
	if err != nil {
		return err // looked for again: unknown is not nobody
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	mem := l.units[d.Unit]
	mem.holders, mem.scanned = who, l.cfg.Clock.Now()
	return nil
}
