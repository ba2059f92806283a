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

	mu      sync.Mutex // guards trouble
	trouble error
	asked   bool
}

var (
	_ node.Fabric   = (*managerOfNode)(nil)
	_ leader.Fabric = (*managerOfFabric)(nil)
)

// Trouble returns why the manager cannot be worked with, nil if the last call went well; asked is false
// before the first call.
func (m *manager) Trouble() (trouble error, asked bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.trouble, m.asked
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

// has tells whether the manager knows the machine, and on which of its fabrics.
func (m *manager) has(ctx context.Context, machine device.Machine) (found bool, err error) {
	var machines []fabric.Machine
	err = m.time("Health", func() (err error) {
		machines, err = m.Machines(ctx)
		return err
	})
	m.note(err)
	if err != nil {
		return false, err
	}
	for _, known := range machines {
		if known.ID == machine {
			return true, nil
		}
	}
	return false, nil
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

func (m managerOfNode) Attach(ctx context.Context, machine device.Machine, model string, before []string) error {
	return m.time("Attach", func() error {
		op, err := m.Manager.Attach(ctx, fabric.Intent{Machine: machine, Model: model, Before: before})
		if err != nil {
			return err
		}
		_, err = fabric.Wait(ctx, m.clock, m.Manager, op)
		return err
	})
}

func (m managerOfNode) Detach(ctx context.Context, machine device.Machine, id, model string) error {
	return m.time("Detach", func() error {
		op, err := m.Manager.Detach(ctx, fabric.Intent{Machine: machine, Device: id, Model: model})
		if err != nil {
			return err
		}
		_, err = fabric.Wait(ctx, m.clock, m.Manager, op)
		return err
	})
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
	c := m.Capabilities()
	if !c.AddressableAttach || c.Free != fabric.FreeList {
		return pool.Supply{Count: s.Count}
	}
	return pool.Supply{Count: len(s.Devices), Devices: append([]device.OnFabric{}, s.Devices...)}
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
