// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/metrics"
)

// Options are what a Manager is made of.
type Options struct {
	Client fabric.Manager
	Clock  clock.PassiveClock
	// Models are the manager's words for the models.
	Models map[device.Model]string
	// Timed is told of each call: what it was, how long it took, how it ended.
	Timed func(op metrics.Operation, took time.Duration, err error)
	// Answered is called when the manager begins or ceases to answer, and when it begins or ceases to wait for a person.
	Answered func()
}

// Manager is one fabric's manager.
type Manager struct {
	o Options

	mu      sync.Mutex // guards the following
	trouble error
	asked   bool
	// halted is why the manager changes nothing until a person has done something, nil if it does.
	halted error
}

// New makes a Manager; nothing is asked of it yet.
func New(o Options) *Manager { return &Manager{o: o} }

// Capabilities are what the manager can do.
func (m *Manager) Capabilities() fabric.Capabilities { return m.o.Client.Capabilities() }

// Close ends the session at the manager.
func (m *Manager) Close(ctx context.Context) error { return m.o.Client.Close(ctx) }

// Watcher is the manager as one that tells of changes, nil if it does not.
func (m *Manager) Watcher() fabric.Watcher {
	if w, can := m.o.Client.(fabric.Watcher); can {
		return w
	}
	return nil
}

// Trouble returns why the manager cannot be worked with, nil if the last call went well; asked is false
// before the first call.
func (m *Manager) Trouble() (trouble error, asked bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.trouble == nil {
		return m.halted, m.asked
	}
	return m.trouble, m.asked
}

// Ask asks how the manager is, and whether it waits for a person.
func (m *Manager) Ask(ctx context.Context) {
	err := m.time("Health", func() error { return m.o.Client.Health(ctx) })
	m.halt(fabric.Operation{}, err)
	if suspended(err) != nil {
		err = nil // it answers
	}
	m.note(err)
}

// Machines are those that the manager knows, on whichever of its fabrics.
func (m *Manager) Machines(ctx context.Context) (all []fabric.Machine, err error) {
	err = m.time("Health", func() (err error) {
		all, err = m.o.Client.Machines(ctx)
		return err
	})
	m.note(err)
	return all, err
}

// halt remembers whether the manager waits for a person. Only what it says of a change tells; its lists go on being
// read.
func (m *Manager) halt(op fabric.Operation, err error) {
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
		m.o.Answered()
	}
}

// suspended is the word of a manager that waits for a person, nil if err is none.
func suspended(err error) error {
	if f, isFault := errors.AsType[*device.Fault](err); isFault && f.Class == device.FaultSuspended {
		return f
	}
	return nil
}

// time tells how a call went.
func (m *Manager) time(op metrics.Operation, call func() error) error {
	began := m.o.Clock.Now()
	err := call()
	m.o.Timed(op, m.o.Clock.Since(began), err)
	return err
}

// note remembers how a call that only reads went.
func (m *Manager) note(err error) {
	m.mu.Lock()
	changed := !m.asked || (err == nil) != (m.trouble == nil) || err != nil && err.Error() != m.trouble.Error()
	m.trouble, m.asked = err, true
	m.mu.Unlock()
	if changed {
		m.o.Answered()
	}
}
