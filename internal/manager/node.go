// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/node"
)

var (
	_ node.Fabric  = ofNode{}
	_ node.Batcher = batcher{}
)

// OfNode is the manager as the node's loop and survey need it.
func (m *Manager) OfNode() node.Fabric { return ofNode{m} }

// Batcher is the manager as one that takes several detaches in one call, nil if it does not.
func (m *Manager) Batcher() node.Batcher {
	own, can := m.o.Client.(fabric.Batcher)
	if !can {
		return nil
	}
	return batcher{m, own}
}

type ofNode struct{ *Manager }

func (m ofNode) ListAttached(ctx context.Context, machine device.Machine) ([]device.OnFabric, error) {
	var list []device.OnFabric
	err := m.time("ListAttached", func() error {
		lists, failed := m.o.Client.ListAttached(ctx, []device.Machine{machine})
		list = lists[machine]
		return failed[machine]
	})
	m.note(err)
	return list, err
}

func (m ofNode) Attach(ctx context.Context, c node.Call) (node.Work, error) {
	return m.change("Attach", func() (fabric.Operation, error) { return m.o.Client.Attach(ctx, intent(c)) })
}

func (m ofNode) Detach(ctx context.Context, c node.Call) (node.Work, error) {
	return m.change("Detach", func() (fabric.Operation, error) { return m.o.Client.Detach(ctx, intent(c)) })
}

// Poll looks at an operation of this or any other process: its handle, kind and intent are all that is needed.
func (m ofNode) Poll(ctx context.Context, k attach.Kind, c node.Call, handle string) (node.Work, error) {
	op := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Intent: intent(c), Handle: handle}
	if k == attach.SendDetach {
		op.Kind = fabric.KindDetach
	}
	return m.change("Poll", func() (fabric.Operation, error) { return m.o.Client.Poll(ctx, op) })
}

// change makes a call that begins an operation or looks at one.
func (m ofNode) change(what metrics.Operation, call func() (fabric.Operation, error)) (node.Work, error) {
	var op fabric.Operation
	err := m.time(what, func() (err error) {
		op, err = call()
		return err
	})
	m.halt(op, err)
	if err != nil {
		return node.Work{}, err
	}
	return work(op), nil
}

type batcher struct {
	*Manager
	own fabric.Batcher
}

func (m batcher) DetachAll(ctx context.Context, calls []node.Call) []node.Answer {
	ins := make([]fabric.Intent, 0, len(calls))
	for _, c := range calls {
		ins = append(ins, intent(c))
	}
	began := m.o.Clock.Now()
	begun := m.own.DetachAll(ctx, ins)
	answers, errs := make([]node.Answer, len(begun)), make([]error, len(begun))
	for i, b := range begun {
		errs[i] = b.Err
		m.halt(b.Operation, b.Err)
		if answers[i].Err = b.Err; b.Err == nil {
			answers[i].Work = work(b.Operation)
		}
	}
	m.o.Timed("Detach", m.o.Clock.Since(began), errors.Join(errs...))
	return answers
}

func intent(c node.Call) fabric.Intent {
	return fabric.Intent{Machine: c.Machine, Model: c.Model, Device: c.Device, Before: c.Before}
}

// work is what an operation means to the node's loop.
func work(op fabric.Operation) node.Work {
	switch op.State {
	case fabric.Pending, fabric.Suspended:
		return node.Work{Handle: op.Handle, PollAfter: op.PollAfter, Fault: op.Fault}
	case fabric.Failed:
		if op.Fault == nil {
			op.Fault = &device.Fault{Class: device.FaultUnknown, Op: string(op.Kind) + " " + op.Handle, Err: errors.New("it failed without a reason")}
		}
		return node.Work{Fault: op.Fault}
	case fabric.Done:
	}
	return node.Work{}
}
