// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fti"
)

// Attach asks for one GPU more than the machine had before. The manager chooses it. Where one more has come
// since then, or is coming, nothing is asked.
func (c *Client) Attach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	what := fmt.Sprintf("attach one %s to machine %s", in.Model, in.Machine)
	switch {
	case in.Device != "":
		return fabric.Operation{}, wrong(device.FaultUnsupported, what, "a Cluster Manager chooses the device itself")
	case in.Model == "":
		return fabric.Operation{}, wrong(device.FaultRejected, what, "no model is given")
	}
	m, fault := c.machine(ctx, in.Machine, "list", what)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	s, ok := m.spec(in.Model)
	if !ok {
		return fabric.Operation{}, wrong(device.FaultUnsupported, what, "the machine has no specification for that model; it has %s", fti.Tidy(strings.Join(m.models(), ", ")))
	}
	count, err := s.count()
	if err != nil {
		return fabric.Operation{}, &device.Fault{Class: device.FaultUnreachable, Op: what, Err: err}
	}
	rows := m.rows()
	if in.Before == nil {
		in.Before = names(rows)
	}
	t := s.tally(rows, in.Before)
	total, joined := t.more(count)
	g := goal{spec: string(s.UUID), total: total, blank: t.blank, since: c.clock.Now().Unix()}
	op := t.attached(fabric.Operation{Kind: fabric.KindAttach, Intent: in, Handle: g.handle(), PollAfter: c.pollAfter}, g)
	limit := s.limit().Max
	switch {
	case op.State != fabric.Pending || joined:
		return explained(op, what), nil
	case t.removing:
		return fabric.Operation{}, wrong(device.FaultBusy, what, "a device is being taken from the machine")
	case t.rows-t.blank >= limit:
		return fabric.Operation{}, wrong(device.FaultRejected, what, "the machine's node group allows %d of them, and it has %d", limit, t.rows-t.blank)
	}
	if fault := c.resize(ctx, "attach", what, in.Machine, resize{Increase: &increase{Spec: s.UUID, Count: total}}); fault != nil {
		return fabric.Operation{}, c.explainRefusal(ctx, in.Model, fault)
	}
	return op, nil
}

// names are what the machine has, for a caller that does not say what it had before. What is coming is not.
func names(rows []named) []string {
	all := []string{}
	for i := range rows {
		if d := &rows[i]; d.name != "" && (d.known() || d.removing()) {
			all = append(all, d.name)
		}
	}
	return all
}

// Detach asks to take a GPU away, unless that is under way.
func (c *Client) Detach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	what := fmt.Sprintf("detach %s from machine %s", in.Device, in.Machine)
	if in.Device == "" {
		return fabric.Operation{}, wrong(device.FaultRejected, what, "no device is given")
	}
	m, fault := c.machine(ctx, in.Machine, "list", what)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	rows := m.rows()
	d := find(rows, in.Device)
	if d == nil {
		return fabric.Operation{}, wrong(device.FaultNotFound, what, "the machine does not have it")
	}
	t := d.spec.tally(rows, names(rows))
	count, err := d.spec.count()
	if err != nil {
		return fabric.Operation{}, &device.Fault{Class: device.FaultUnreachable, Op: what, Err: err}
	}
	g := goal{spec: string(d.spec.UUID), total: t.fewer(count, d.row), uuid: string(d.Detail.UUID), since: c.clock.Now().Unix()}
	op := fabric.Operation{Kind: fabric.KindDetach, Intent: in, State: fabric.Pending, Handle: g.handle(), PollAfter: c.pollAfter}
	switch {
	case d.ID == "":
		return fabric.Operation{}, wrong(device.FaultUnsupported, what, "the manager gives it no device_id, by which alone it takes devices away")
	case d.shared:
		return fabric.Operation{}, wrong(device.FaultRejected, what, "the manager gives its device_id %s to several devices: it might take another one away", fti.Tidy(string(d.ID)))
	case d.spec.UUID == "":
		return fabric.Operation{}, wrong(device.FaultUnsupported, what, "the manager gives its specification no spec_uuid")
	case d.adding():
		return fabric.Operation{}, wrong(device.FaultBusy, what, "it is still being attached: %s", d.said())
	case !d.known():
		return op, nil // it is leaving
	case t.adding || t.removing:
		return fabric.Operation{}, wrong(device.FaultBusy, what, "another device of the machine comes or goes")
	}
	if fault := c.resize(ctx, "detach", what, in.Machine, resize{Remove: &remove{
		Spec: d.spec.UUID, Count: g.total, Devices: []fti.Text{d.ID},
	}}); fault != nil {
		return fabric.Operation{}, fault
	}
	return op, nil
}

// find prefers the device that goes by the name over one that has it as its other one.
func find(rows []named, name string) *named {
	for i := range rows {
		if rows[i].name == name {
			return &rows[i]
		}
	}
	for i := range rows {
		if rows[i].is(name) {
			return &rows[i]
		}
	}
	return nil
}

// Poll reads the machine again. What it cannot read leaves the outcome unknown.
func (c *Client) Poll(ctx context.Context, op fabric.Operation) (fabric.Operation, error) {
	if op.State != fabric.Pending && op.State != fabric.Suspended {
		return op, nil
	}
	what := fmt.Sprintf("see whether one %s has come to machine %s", op.Intent.Model, op.Intent.Machine)
	if op.Kind == fabric.KindDetach {
		what = fmt.Sprintf("see whether %s has left machine %s", op.Intent.Device, op.Intent.Machine)
	}
	g, err := parseGoal(op.Handle)
	if err != nil {
		return op, &device.Fault{Class: device.FaultUnknown, Op: what, Err: err}
	}
	op.PollAfter = c.pollAfter // what was stored of it need not say so
	m, fault := c.machine(ctx, op.Intent.Machine, "poll", what)
	if fault != nil {
		fault.Class = device.FaultUnknown
		return op, fault
	}
	rows := m.rows()
	if op.Kind == fabric.KindDetach {
		leaves := slices.ContainsFunc(rows, func(d named) bool { return d.is(op.Intent.Device) && !d.known() })
		return explained(g.overdue(detached(op, g, rows), leaves, c.clock.Now(), c.workTimeout), what), nil
	}
	for i := range m.Specs {
		if s := &m.Specs[i]; string(s.UUID) == g.spec {
			t := s.tally(rows, op.Intent.Before)
			op = g.overdue(t.attached(op, g), t.adding, c.clock.Now(), c.workTimeout)
			if t.blank > g.blank && op.State == fabric.Failed && len(op.Devices) == 0 {
				op.Fault = c.explainRefusal(ctx, op.Intent.Model, op.Fault)
			}
			return explained(op, what), nil
		}
	}
	return op, &device.Fault{Class: device.FaultUnknown, Op: what, Message: "the machine's specification " + g.spec + " is gone"}
}

// explained says in the fault what was tried.
func explained(op fabric.Operation, what string) fabric.Operation {
	if op.Fault != nil {
		op.Fault.Op = what
	}
	return op
}

// resize sends a change.
func (c *Client) resize(ctx context.Context, operation, what string, id device.Machine, body resize) *device.Fault {
	b, err := json.Marshal(body)
	if err != nil {
		return &device.Fault{Class: device.FaultRejected, Op: what, Err: err}
	}
	req := c.read("v3", operation, what, "/machines/"+url.PathEscape(c.conn.Spelled(id))+"/actions/resize")
	req.Change = true
	req.Method, req.Body, req.ContentType, req.Timeout = "POST", b, "application/json", c.resizeTimeout
	answer, fault := c.conn.Call(ctx, req)
	if fault != nil {
		return fault
	}
	if !accepted(answer) {
		return answer.Strange(what, errors.New("the answer is not the manager's"))
	}
	return nil
}

// explainRefusal finds out whether an attach failed because nothing is free. The manager's codes are not
// public and its status differs, but what is free can be counted.
func (c *Client) explainRefusal(ctx context.Context, model string, fault *device.Fault) *device.Fault {
	switch fault.Class {
	case device.FaultBusy, device.FaultNotFound, device.FaultRejected, device.FaultConflict:
	default:
		if fault.Code != string(addFailed) {
			return fault
		}
	}
	if c.fm == nil {
		return fault
	}
	free, err := c.fm.Free(ctx, []string{model})
	if supply, ok := free[model]; err == nil && ok && supply.Count == 0 {
		fault.Class = device.FaultNoCapacity
	}
	return fault
}
