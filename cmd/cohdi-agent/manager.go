// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/leader"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// manager is one fabric's manager as the loops need it, and remembers how the last call went.
type manager struct {
	fabric.Manager
	clock clock.WithTicker
	// timed is told of each call: what it was, how long it took, how it ended.
	timed  func(op metrics.Operation, took time.Duration, err error)
	models map[device.Model]string
	// answered is called when the manager begins or ceases to answer.
	answered func()

	mu      sync.Mutex // guards the following
	trouble error
	asked   bool
	// halted is why the manager changes nothing until a person has done something, nil if it does.
	halted error
}

var (
	_ node.Fabric   = (*managerOfNode)(nil)
	_ node.Batcher  = (*batcher)(nil)
	_ leader.Fabric = (*managerOfFabric)(nil)
)

// Trouble returns why the manager cannot be worked with, nil if the last call went well; asked is false
// before the first call.
func (m *manager) Trouble() (trouble error, asked bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.trouble == nil {
		return m.halted, m.asked
	}
	return m.trouble, m.asked
}

// halt remembers whether the manager waits for a person. Only what it says of a change tells; its lists go on being
// read.
func (m *manager) halt(op fabric.Operation, err error) {
	if op.Fault != nil {
		err = op.Fault
	}
	halted := suspended(err)
	if halted == nil && err != nil {
		return // it may not have come so far as to say
	}
	m.mu.Lock()
	changed := (halted == nil) != (m.halted == nil)
	m.halted = halted
	m.mu.Unlock()
	if changed {
		m.answered()
	}
}

// health asks how the manager is, and whether it waits for a person.
func (m *manager) health(ctx context.Context) {
	err := m.time("Health", func() error { return m.Health(ctx) })
	m.halt(fabric.Operation{}, err)
	if suspended(err) != nil {
		err = nil // it answers
	}
	m.note(err)
}

// suspended is the word of a manager that waits for a person, nil if err is none.
func suspended(err error) error {
	if f, isFault := errors.AsType[*device.Fault](err); isFault && f.Class == device.FaultSuspended {
		return f
	}
	return nil
}

// time tells how a call went.
func (m *manager) time(op metrics.Operation, call func() error) error {
	began := m.clock.Now()
	err := call()
	m.timed(op, m.clock.Since(began), err)
	return err
}

// note remembers how a call that only reads went.
func (m *manager) note(err error) {
	m.mu.Lock()
	changed := !m.asked || (err == nil) != (m.trouble == nil) || err != nil && err.Error() != m.trouble.Error()
	m.trouble, m.asked = err, true
	m.mu.Unlock()
	if changed {
		m.answered()
	}
}

// machines are those that the manager knows, on whichever of its fabrics.
func (m *manager) machines(ctx context.Context) (all []fabric.Machine, err error) {
	err = m.time("Health", func() (err error) {
		all, err = m.Machines(ctx)
		return err
	})
	m.note(err)
	return all, err
}

// managerOfNode is the manager as the node's loop needs it.
type managerOfNode struct{ *manager }

func (m managerOfNode) ListAttached(ctx context.Context, machine device.Machine) ([]device.OnFabric, error) {
	var list []device.OnFabric
	err := m.time("ListAttached", func() error {
		lists, failed := m.Manager.ListAttached(ctx, []device.Machine{machine})
		list = lists[machine]
		return failed[machine]
	})
	m.note(err)
	return list, err
}

func (m managerOfNode) Attach(ctx context.Context, c node.Call) (node.Work, error) {
	return m.change("Attach", func() (fabric.Operation, error) { return m.Manager.Attach(ctx, intent(c)) })
}

func (m managerOfNode) Detach(ctx context.Context, c node.Call) (node.Work, error) {
	return m.change("Detach", func() (fabric.Operation, error) { return m.Manager.Detach(ctx, intent(c)) })
}

// batcher is a manager that takes several detaches in one call.
type batcher struct {
	managerOfNode
	own fabric.Batcher
}

func (m batcher) DetachAll(ctx context.Context, calls []node.Call) []node.Answer {
	ins := make([]fabric.Intent, 0, len(calls))
	for _, c := range calls {
		ins = append(ins, intent(c))
	}
	began := m.clock.Now()
	begun := m.own.DetachAll(ctx, ins)
	answers, errs := make([]node.Answer, len(begun)), make([]error, len(begun))
	for i, b := range begun {
		errs[i] = b.Err
		m.halt(b.Operation, b.Err)
		if answers[i].Err = b.Err; b.Err == nil {
			answers[i].Work = work(b.Operation)
		}
	}
	m.timed("Detach", m.clock.Since(began), errors.Join(errs...))
	return answers
}

// batcher is the manager as one that takes several detaches in one call, nil if it does not.
func (m managerOfNode) batcher() node.Batcher {
	own, can := m.Manager.(fabric.Batcher)
	if !can {
		return nil
	}
	return batcher{m, own}
}

// Poll looks at an operation of this or any other process: its handle, kind and intent are all that is needed.
func (m managerOfNode) Poll(ctx context.Context, k attach.Kind, c node.Call, handle string) (node.Work, error) {
	op := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Intent: intent(c), Handle: handle}
	if k == attach.SendDetach {
		op.Kind = fabric.KindDetach
	}
	return m.change("Poll", func() (fabric.Operation, error) { return m.Manager.Poll(ctx, op) })
}

func intent(c node.Call) fabric.Intent {
	return fabric.Intent{Machine: c.Machine, Model: c.Model, Device: c.Device, Before: c.Before}
}

// change makes a call that begins an operation or looks at one.
func (m managerOfNode) change(what metrics.Operation, call func() (fabric.Operation, error)) (node.Work, error) {
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

// managerOfFabric is the manager as the leader needs it.
type managerOfFabric struct{ *manager }

func (m managerOfFabric) Free(ctx context.Context, models []device.Model) (map[device.Model]pool.Supply, error) {
	words := make([]string, 0, len(models))
	for _, model := range models {
		words = append(words, m.models[model])
	}
	var supplies map[string]fabric.Supply
	err := m.time("Free", func() (err error) {
		supplies, err = m.Manager.Free(ctx, words)
		return err
	})
	m.note(err)
	free := map[device.Model]pool.Supply{}
	for _, model := range models {
		if s, ok := supplies[m.models[model]]; ok {
			free[model] = m.supply(s)
		}
	}
	return free, err
}

// supply keeps the devices only where the caller may choose among them: else they are no units of their own.
func (m managerOfFabric) supply(s fabric.Supply) pool.Supply {
	if !addressable(m.Capabilities()) {
		return pool.Supply{Count: s.Count}
	}
	return pool.Supply{Count: len(s.Devices), Devices: append([]device.OnFabric{}, s.Devices...)}
}

// limiter is a manager that has limits of its own.
type limiter struct {
	managerOfFabric
	own fabric.Limiter
}

// Limits reads those of a machine.
func (m limiter) Limits(ctx context.Context, machine device.Machine) (map[device.Model]pool.Limit, error) {
	words := slices.Collect(maps.Values(m.models))
	var own map[string]fabric.Limit
	err := m.time("Limits", func() (err error) {
		own, err = m.own.Limits(ctx, machine, words)
		return err
	})
	if err != nil {
		return nil, err
	}
	limits := make(map[device.Model]pool.Limit, len(own))
	for model, word := range m.models {
		if l, there := own[word]; there {
			limits[model] = pool.Limit(l)
		}
	}
	return limits, nil
}

// limiter is the manager as one that has limits of its own, nil if it has none.
func (m managerOfFabric) limiter() leader.Limiter {
	own, can := m.Manager.(fabric.Limiter)
	if !can {
		return nil
	}
	return limiter{m, own}
}

func (m managerOfFabric) Attached(ctx context.Context, machines []device.Machine) map[device.Machine][]device.OnFabric {
	var lists map[device.Machine][]device.OnFabric
	err := m.time("ListAttached", func() error {
		var failed map[device.Machine]error
		lists, failed = m.ListAttached(ctx, machines)
		return errors.Join(slices.Collect(maps.Values(failed))...)
	})
	if err != nil {
		klog.FromContext(ctx).V(1).Info("What is attached to some machines could not be read", "err", err)
	}
	return lists
}
