// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Attach puts the device into the machine's system; without one, some that is free and of the model, which is named in
// the operation.
func (c *Client) Attach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	what := fmt.Sprintf("attach %s to machine %s", cmp.Or(rest.Tidy(in.Device), "one "+in.Model), in.Machine)
	w, fault := c.world(ctx, what)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	missed := make(map[string]bool)
	for try := 1; ; try++ {
		h, fault := w.host(ctx, what, in.Machine)
		if fault != nil {
			return fabric.Operation{}, unsent(fault)
		}
		u, fault := c.choose(ctx, w, what, in, h, missed)
		if fault != nil {
			return fabric.Operation{}, fault
		}
		op := fabric.Operation{Kind: fabric.KindAttach, Intent: in}
		op.Intent.Device = u.path
		if op, fault = c.ask(ctx, w, op, what, change{op.Kind, h, u}); fault == nil {
			d := u.onFabric()
			d.Machine = in.Machine
			op.Devices = []device.OnFabric{d}
			return op, nil
		}
		switch {
		case fault.Class != device.FaultConflict || try == tries:
			return fabric.Operation{}, fault
		case fault.Code != keyBlockTaken: // it was decided on an old state
		case in.Device == "":
			missed[u.path] = true
		default:
			return c.inUse(ctx, w, op, what, fault)
		}
	}
}

// inUse finds out by whom a device is used that the service did not attach for that: this machine has it by now, or
// something is under way with it, or somebody has it whom the service does not show.
func (c *Client) inUse(ctx context.Context, w world, op fabric.Operation, what string, fault *device.Fault) (fabric.Operation, error) {
	s, looked := c.look(ctx, w, what, op)
	switch {
	case looked != nil || s.composing:
		return fabric.Operation{}, fault
	case s.reached:
		return done(op), nil
	}
	fault.Class = device.FaultRejected
	return fabric.Operation{}, fault
}

// Detach takes the device out of the machine's system.
func (c *Client) Detach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	what := fmt.Sprintf("detach %s from machine %s", rest.Tidy(in.Device), in.Machine)
	if in.Device == "" {
		return fabric.Operation{}, &device.Fault{Class: device.FaultRejected, Op: what, Message: "no device is given"}
	}
	w, fault := c.world(ctx, what)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	for try := 1; ; try++ {
		h, fault := w.host(ctx, what, in.Machine)
		if fault != nil {
			return fabric.Operation{}, unsent(fault)
		}
		u, fault := leaving(ctx, w, what, in, h)
		if fault != nil {
			return fabric.Operation{}, fault
		}
		op, fault := c.ask(ctx, w, fabric.Operation{Kind: fabric.KindDetach, Intent: in}, what, change{fabric.KindDetach, h, u})
		if fault == nil {
			return op, nil
		}
		if fault.Class != device.FaultConflict || fault.Code == keyBlockTaken || try == tries {
			return fabric.Operation{}, fault
		}
	}
}

// unsent is the fault of a question before the change: what came of it or not, nothing was asked to change.
func unsent(fault *device.Fault) *device.Fault {
	if fault.Class == device.FaultUnknown {
		fault.Class = device.FaultUnreachable
	}
	return fault
}

// choose returns the device to attach: the one that is named, or one that is free.
func (c *Client) choose(ctx context.Context, w world, what string, in fabric.Intent, h *host, missed map[string]bool) (*unit, *device.Fault) {
	if in.Device == "" {
		return pick(ctx, w, what, in, h, missed)
	}
	path, err := parsePath(in.Device)
	if err != nil {
		return nil, &device.Fault{Class: device.FaultRejected, Op: what, Err: err}
	}
	u, fault := w.unit(ctx, what, path)
	if fault != nil {
		if fault.Class == device.FaultNotFound {
			fault.Class = device.FaultRejected // NotFound would be the machine
		}
		return nil, unsent(fault)
	}
	refuse := func(class device.FaultClass, format string, args ...any) (*unit, *device.Fault) {
		return nil, &device.Fault{Class: class, Op: what, Message: rest.Tidy(fmt.Sprintf(format, args...))}
	}
	switch {
	case u.fixed:
		return refuse(device.FaultRejected, "it is part of a host, or no device that is pooled")
	case in.Model != "" && in.Model != u.model:
		return refuse(device.FaultRejected, "it is a %q and not a %q", rest.Tidy(u.model), in.Model)
	case h.holds(u):
		return u, nil
	case u.composing:
		return refuse(device.FaultBusy, "the device is not free: %s", u.taken)
	case u.taken != "":
		return refuse(device.FaultRejected, "the device is not free: %s", u.taken)
	}
	return u, nil
}

// pick returns a free device of the model that can come to the host, a healthy one if there is any. Which one depends on
// the host, so that hosts that pick at the same time seldom want the same.
func pick(ctx context.Context, w world, what string, in fabric.Intent, h *host, missed map[string]bool) (*unit, *device.Fault) {
	units, fault := w.units(ctx, what)
	if fault != nil {
		return nil, unsent(fault)
	}
	if unknown := knows(units, what, in.Model); unknown != nil {
		return nil, unknown
	}
	reachable, fault := w.reachable(ctx, what, h)
	if fault != nil {
		return nil, unsent(fault)
	}
	free := slices.DeleteFunc(units, func(u *unit) bool {
		return u.model != in.Model || u.taken != "" || missed[u.path] || !reachable(u)
	})
	if len(free) == 0 {
		return nil, &device.Fault{Class: device.FaultNoCapacity, Op: what, Message: "none is free"}
	}
	if healthy := slices.DeleteFunc(slices.Clone(free), func(u *unit) bool { return u.health != device.HealthOK }); len(healthy) > 0 {
		free = healthy
	}
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(in.Machine))
	return free[int(sum.Sum32()%uint32(len(free)))], nil //nolint:gosec // far fewer than 2^32
}

// leaving returns the device to detach, if it is there.
func leaving(ctx context.Context, w world, what string, in fabric.Intent, h *host) (*unit, *device.Fault) {
	path, err := parsePath(in.Device)
	if err != nil || !h.has(path) {
		return nil, &device.Fault{Class: device.FaultNotFound, Op: what, Message: "the device is not in the machine's list", Err: err}
	}
	u, fault := w.unit(ctx, what, path)
	switch {
	case fault != nil && fault.Class == device.FaultNotFound:
		return &unit{path: path}, nil // only the list has it any more
	case fault != nil:
		return nil, unsent(fault)
	case u.fixed:
		return nil, &device.Fault{Class: device.FaultRejected, Op: what, Message: "it is part of the host, or no device that is pooled"}
	}
	return u, nil
}

// ask makes the change in the best form that the service offers and takes.
func (c *Client) ask(ctx context.Context, w world, op fabric.Operation, what string, ch change) (fabric.Operation, *device.Fault) {
	if ch.kind == fabric.KindAttach && ch.host.holds(ch.unit) {
		if ch.unit.composing {
			return c.pending(op, composition, 0), nil
		}
		return done(op), nil
	}
	fault := &device.Fault{
		Class: device.FaultNotFound, Op: what, // nothing can come to this machine, or leave it
		Message: "the service offers neither an action for it, nor to update the list, nor to compose by a manifest",
	}
	for _, f := range forms() {
		if !f.offered(ch.host.offer, ch.kind) {
			continue
		}
		m := f.call(ch)
		m.operation, m.what = strings.ToLower(string(op.Kind)), what
		r, refusal := c.do(ctx, m)
		if refusal == nil {
			refusal = refusedStanza(what, r)
		}
		if refusal == nil {
			return c.accepted(ctx, w, op, what, r)
		}
		fault = refusal
		if fault.Class != device.FaultUnsupported {
			break // and never another form while this one may have been taken
		}
	}
	switch {
	case fault.Class == device.FaultUnknown:
		return c.recover(ctx, w, op, what, fault)
	case fault.Class == device.FaultUnsupported:
		fault.Class = device.FaultRejected // it is not the model that is not supported
	case fault.Code == keyBlockGone && op.Kind == fabric.KindAttach:
		fault.Class = device.FaultRejected
	}
	return op, fault
}
