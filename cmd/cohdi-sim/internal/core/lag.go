// SPDX-License-Identifier: Apache-2.0

package core

import (
	"sync"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// Lag is what a manager's list shows that lags behind the chassis: a device that changes is shown as it was until the stale
// delay is over.
type Lag struct {
	core *Core

	mu   sync.Mutex
	held map[string]hold // by the device's id
}

// hold is where a device is shown, for how long.
type hold struct {
	machine string // name, "" is none
	until   time.Time
}

// NewLag begins with nothing that lags.
func (c *Core) NewLag() *Lag { return &Lag{core: c, held: map[string]hold{}} }

// Change does something to a device that is shown on a machine, or on none where that is empty.
func (l *Lag) Change(device, machine string, do func() error) error {
	l.mu.Lock()
	l.held[device] = hold{machine: machine, until: l.core.clk.Now().Add(1000 * time.Hour)}
	l.mu.Unlock()
	defer l.catchUp(device)
	return do()
}

// catchUp shows a device as it is when the stale delay is over.
func (l *Lag) catchUp(device string) {
	stale := time.Duration(*l.core.State().Timing.StaleDelay)
	l.mu.Lock()
	defer l.mu.Unlock()
	if h, ok := l.held[device]; ok {
		h.until = l.core.clk.Now().Add(stale)
		l.held[device] = h
	}
}

// On is the name of the machine that shows a device now, empty for none.
func (l *Lag) On(d simapi.Device) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h, held := l.held[d.ID]; held && l.core.clk.Now().Before(h.until) {
		return h.machine
	}
	if d.Phase == simapi.PhaseAttached || d.Phase == simapi.PhaseDetaching {
		return d.Machine
	}
	return ""
}

// CatchUp shows everything as it is.
func (l *Lag) CatchUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.held)
}
