// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Attach makes a Connection, and looks whether the machine shows the device.
func (c *Client) Attach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	q := question{"attach", fmt.Sprintf("attach %s to machine %s", cmp.Or(in.Device, "one "+in.Model), in.Machine)}
	v, fault := c.look(ctx, q)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	system, fault := c.sure(ctx, q, v, in.Machine)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	target, fault := c.choose(ctx, q, v, in, system)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	in.Device = target
	op := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Intent: in, PollAfter: c.poll}
	if made := v.between(system, target); len(made) > 0 {
		op.Handle = made[0]
	} else if op.Handle, fault = c.connect(ctx, q, v, v.initiators(system)[0], target); fault != nil {
		return fabric.Operation{}, fault
	}
	settled, fault := c.settle(ctx, q, op)
	switch {
	case fault != nil:
		return op, nil //nolint:nilerr // it is connected; what came of it is for Poll to see
	case settled.State == fabric.Failed:
		return fabric.Operation{}, settled.Fault
	}
	return settled, nil
}

// unsent is the fault of a question before the change: what came of it or not, nothing was asked to change.
func unsent(fault *device.Fault) *device.Fault {
	if fault.Class == device.FaultUnknown {
		fault.Class = device.FaultUnreachable
	}
	return fault
}

// choose returns the endpoint of the device that is to come to the machine. One that is there already is not refused.
func (c *Client) choose(ctx context.Context, q question, v *view, in fabric.Intent, system string) (string, *device.Fault) {
	if in.Device == "" {
		list, fault := c.free(ctx, q, v, c.stock(ctx, q, v), in.Model)
		switch {
		case fault != nil:
			return "", fault
		case len(list) == 0:
			return "", &device.Fault{Class: device.FaultNoCapacity, Op: q.what, Message: "none is free"}
		}
		// Machines that choose at the same time begin at different places.
		sum := sha256.Sum256([]byte(in.Machine))
		return list[binary.BigEndian.Uint64(sum[:])%uint64(len(list))].ID, nil
	}
	refuse := func(format string, args ...any) (string, *device.Fault) {
		return "", &device.Fault{Class: device.FaultRejected, Op: q.what, Message: rest.Tidy(fmt.Sprintf(format, args...))}
	}
	if v.all[in.Device].gpu == "" {
		return refuse("fabric %s has no endpoint of a GPU at %s", v.fabric, in.Device)
	}
	p, fault := c.gpu(ctx, q, v, in.Device)
	switch {
	case fault != nil:
		return "", fault
	case in.Model != "" && in.Model != p.model:
		return refuse("it is a %q and not a %q", p.model, in.Model)
	}
	shown, fault := c.shown(ctx, q, v, system)
	if fault != nil {
		return "", fault
	}
	_, here := shown[in.Device]
	if len(v.between(system, in.Device)) > 0 || here {
		return in.Device, nil
	}
	if systems, connected := v.holders(in.Device); connected {
		return refuse("the device is not free: it is connected to %s", orNothing(strings.Join(systems, ", ")))
	}
	if !usable(p) {
		_, text := p.describe()
		return refuse("the device is not free: %s", text)
	}
	return in.Device, nil
}

// connect asks once for a Connection. That it is there already is as good.
func (c *Client) connect(ctx context.Context, q question, v *view, initiator, target string) (string, *device.Fault) {
	body, err := encodeConnection(initiator, target)
	if err != nil {
		return "", &device.Fault{Class: device.FaultRejected, Op: q.what, Err: err}
	}
	_, fault := c.send(ctx, rest.Request{
		Operation: q.operation, What: q.what, Method: http.MethodPost, URL: c.server + v.connections, Body: body,
		ContentType: "application/json", Timeout: c.capabilities.MaxCall, Limit: maxAnswer, Change: true,
	})
	made := v.connections + "/" + connectionID(initiator, target)
	if fault == nil {
		return made, nil
	}
	if fault.Status != http.StatusConflict {
		return "", missing(fault)
	}
	j, unseen := read(ctx, c, q, made, decodeConnection)
	switch {
	case unseen == nil && j.joins(initiator, target):
		return made, nil
	case unseen != nil && unseen.Class != device.FaultNotFound:
		fault.Class = device.FaultUnknown
		return "", fault
	}
	// Somebody else was faster.
	fault.Class = device.FaultConflict
	return "", fault
}

// disconnect asks once to delete a Connection. That it is not there is as good.
func (c *Client) disconnect(ctx context.Context, q question, made string) *device.Fault {
	_, fault := c.send(ctx, rest.Request{
		Operation: q.operation, What: q.what, Method: http.MethodDelete, URL: c.server + made,
		Timeout: c.capabilities.MaxCall, Limit: maxAnswer, Change: true,
	})
	switch {
	case fault == nil, fault.Class == device.FaultNotFound:
		return nil
	case fault.Class == device.FaultUnauthorized: // it knows nobody, so this is about the Connection
		fault.Class = device.FaultRejected
	}
	return fault
}

// Detach deletes the Connections between the device and the machine.
func (c *Client) Detach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	q := question{"detach", fmt.Sprintf("detach %s from machine %s", in.Device, in.Machine)}
	if in.Device == "" {
		return fabric.Operation{}, &device.Fault{Class: device.FaultRejected, Op: q.what, Message: "no device is given"}
	}
	v, fault := c.look(ctx, q)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	system, fault := c.sure(ctx, q, v, in.Machine)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	made, fault := c.toDelete(ctx, q, v, in, system)
	if fault != nil {
		return fabric.Operation{}, fault
	}
	for _, m := range made {
		if fault = c.disconnect(ctx, q, m); fault != nil {
			return fabric.Operation{}, fault
		}
	}
	op := fabric.Operation{Kind: fabric.KindDetach, State: fabric.Pending, Intent: in, Handle: made[0], PollAfter: c.poll}
	settled, fault := c.settle(ctx, q, op)
	switch {
	case fault != nil:
		return op, nil //nolint:nilerr // it is deleted; what came of it is for Poll to see
	case settled.State == fabric.Failed:
		return fabric.Operation{}, settled.Fault
	}
	return settled, nil
}

// toDelete are the Connections whose end takes the device from the machine.
func (c *Client) toDelete(ctx context.Context, q question, v *view, in fabric.Intent, system string) ([]string, *device.Fault) {
	if v.all[in.Device].gpu == "" {
		return nil, &device.Fault{Class: device.FaultNotFound, Op: q.what, Message: "fabric " + v.fabric + " has no endpoint of such a GPU"}
	}
	made := v.between(system, in.Device)
	for _, m := range made {
		if j := v.joins[m]; len(j.targets) > 1 || len(j.initiators) > 1 {
			return nil, &device.Fault{
				Class: device.FaultRejected, Op: q.what, Message: m + " joins more than this device and this machine: somebody else made it, and has to take it apart",
			}
		}
	}
	at := place{in.Machine, in.Device}
	if len(made) > 0 {
		c.inOrder(at)
		return made, nil
	}
	shown, fault := c.shown(ctx, q, v, system)
	if fault != nil {
		return nil, unsent(fault)
	}
	if _, here := shown[in.Device]; !here {
		c.inOrder(at)
		systems, _ := v.holders(in.Device)
		return nil, &device.Fault{
			Class: device.FaultNotFound, Op: q.what, Message: "the device is not there; it is connected to " + orNothing(strings.Join(systems, ", ")),
		}
	}
	// What the machine shows lags behind a Connection that was deleted just now; later it can only be that the service has
	// no copy of one that its agent made. Making it once more brings it back, and it can be deleted then.
	if !c.outOfOrder(at) {
		return nil, &device.Fault{
			Class: device.FaultConflict, Op: q.what,
			Message: fmt.Sprintf("the machine shows the device and nothing connects it; if that is still so after %s, the Connection is made anew to be deleted", c.capabilities.Settle),
		}
	}
	again, fault := c.connect(ctx, q, v, v.initiators(system)[0], in.Device)
	if fault != nil {
		return nil, fault
	}
	c.inOrder(at)
	return []string{again}, nil
}

// outOfOrder tells whether a machine has shown a device that nothing connects for longer than its list may lag.
func (c *Client) outOfOrder(at place) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	since, seen := c.orphans[at]
	if !seen {
		c.orphans[at] = c.clock.Now()
		return false
	}
	return c.clock.Since(since) >= c.capabilities.Settle
}

func (c *Client) inOrder(at place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.orphans, at)
}

// Poll looks whether the machine shows the device, or shows it no more. Without a handle it looks for a Connection that
// does what is intended.
func (c *Client) Poll(ctx context.Context, op fabric.Operation) (fabric.Operation, error) {
	if op.State != fabric.Pending && op.State != fabric.Suspended {
		return op, nil
	}
	q := question{"poll", fmt.Sprintf("look how far %s of %s is", strings.ToLower(string(op.Kind)), cmp.Or(op.Intent.Device, "one "+op.Intent.Model))}
	next, fault := c.settle(ctx, q, op)
	if fault != nil {
		return op, fault
	}
	return next, nil
}

// settle says how far an operation is. The fault is about the look.
func (c *Client) settle(ctx context.Context, q question, op fabric.Operation) (fabric.Operation, *device.Fault) {
	v, fault := c.look(ctx, q)
	if fault != nil {
		return op, fault
	}
	system, fault := v.system(q, op.Intent.Machine)
	if fault != nil {
		return op, fault
	}
	if op.Intent.Device == "" && len(v.joins[op.Handle].targets) == 1 {
		op.Intent.Device = v.joins[op.Handle].targets[0]
	}
	shown, fault := c.shown(ctx, q, v, system)
	if fault != nil {
		return op, fault
	}
	p, here := shown[op.Intent.Device]
	s := sight{made: v.between(system, op.Intent.Device), here: here, blind: v.systems[system].processors == ""}
	if op.Kind == fabric.KindDetach {
		return c.leaving(q, op, s)
	}
	if here {
		return done(op, describe(op.Intent.Device, op.Intent.Machine, p)), nil
	}
	return c.coming(ctx, q, v, op, system, s)
}

// sight is what is seen of a device on a machine: the Connections, whether the machine shows it, or shows nothing ever.
type sight struct {
	made        []string
	here, blind bool
}

func done(op fabric.Operation, devices ...device.OnFabric) fabric.Operation {
	op.State, op.Fault, op.PollAfter, op.Devices = fabric.Done, nil, 0, devices
	return op
}

func failed(op fabric.Operation, fault *device.Fault) fabric.Operation {
	op.State, op.Fault, op.PollAfter = fabric.Failed, fault, 0
	return op
}

func (c *Client) pending(op fabric.Operation) fabric.Operation {
	op.State, op.Fault, op.PollAfter = fabric.Pending, nil, c.poll
	return op
}

// leaving says how far a detach is.
func (c *Client) leaving(q question, op fabric.Operation, s sight) (fabric.Operation, *device.Fault) {
	switch {
	case op.Intent.Device == "":
		return op, &device.Fault{Class: device.FaultUnknown, Op: q.what, Message: "no device is given"}
	case len(s.made) > 0 && op.Handle == "":
		return op, &device.Fault{Class: device.FaultUnknown, Op: q.what, Message: "it is connected, and nothing is under way: " + s.made[0]}
	case len(s.made) > 0:
		return failed(op, &device.Fault{Class: device.FaultUnknown, Op: q.what, Message: "it is connected again: " + s.made[0]}), nil
	case s.here:
		return c.pending(op), nil
	}
	return done(op), nil
}

// coming says how far an attach is that the machine does not show yet. Where another machine shows the device, somebody
// else has it, and our Connection is one too many.
func (c *Client) coming(ctx context.Context, q question, v *view, op fabric.Operation, system string, s sight) (fabric.Operation, *device.Fault) {
	fault := &device.Fault{Class: device.FaultUnknown, Op: q.what}
	if len(s.made) == 0 {
		fault.Message = "no Connection does that now; whether one has, the list tells"
		if op.Handle == "" {
			return op, fault
		}
		return failed(op, fault), nil
	}
	if s.blind {
		p, fault := c.gpu(ctx, q, v, op.Intent.Device)
		if fault != nil {
			return op, fault
		}
		return done(op, describe(op.Intent.Device, op.Intent.Machine, p)), nil
	}
	systems, _ := v.holders(op.Intent.Device)
	for _, other := range systems {
		if other == system {
			continue
		}
		shown, unseen := c.shown(ctx, q, v, other)
		if unseen != nil {
			return op, unseen
		}
		if _, theirs := shown[op.Intent.Device]; theirs {
			return c.giveUp(ctx, q, op, s.made, other), nil
		}
	}
	op.Handle = cmp.Or(op.Handle, s.made[0])
	return c.pending(op), nil
}

// giveUp deletes our Connections to a device that is another machine's. Somebody else's are left alone.
func (c *Client) giveUp(ctx context.Context, q question, op fabric.Operation, made []string, other string) fabric.Operation {
	fault := &device.Fault{Class: device.FaultConflict, Op: q.what, Message: "somebody else has connected the device to " + other + " at the same time, and that one shows it"}
	ours := slices.DeleteFunc(slices.Clone(made), func(m string) bool { return !strings.HasPrefix(path.Base(m), idPrefix) })
	for _, m := range ours {
		if left := c.disconnect(ctx, q, m); left != nil {
			// The list shows it until it is deleted.
			fault.Class, fault.Message, fault.Err = device.FaultUnknown, fault.Message+"; our Connection "+m+" is one too many and still there", left
		}
	}
	return failed(op, fault)
}
