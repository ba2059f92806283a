// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"time"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/node"
)

// What is not worth a setting: each is short against what it bounds or waits for.
const (
	// appear is how long the kernel gets to show a device by itself: a link that comes up takes 1 to 2 s.
	appear = 3 * time.Second
	// look, retry, busy and hold pace what does not announce itself.
	look  = time.Second
	retry = 500 * time.Millisecond
	busy  = 5 * time.Second
	hold  = 10 * time.Second
	// freshFor is how long a list of the fabric counts as what is there now.
	freshFor = 5 * time.Second
	// queueMost is how long an attach may take where nodes wait for each other at the manager: less than the 10 minutes
	// after which the scheduler gives up by itself.
	queueMost = 9 * time.Minute
)

const (
	// CallDeadline is what a call gets above what the manager may work on it: the client gives up by itself.
	CallDeadline = 20 * time.Second
	// LocalDeadline is what a step on this machine gets.
	LocalDeadline = 40 * time.Second
)

// Times are the configuration's for one fabric; the manager's own are longer where it knows better.
type Times struct {
	AttachDeadline, RetryAfter, CallTimeout, Settle, Resync time.Duration
}

// NodeConfig is what the manager decides of the node loop's configuration, and what is the same for every node.
func (m *Manager) NodeConfig(t Times) node.Config {
	can := m.Capabilities()
	return node.Config{
		Settings: attach.Settings{
			Parallel: can.Exclusion == fabric.ExclusionNone && can.Identity, Batch: can.Batch, Arrival: !can.Identity,
			Deadline: t.AttachDeadline, Patience: m.patience(), MaxCall: max(t.CallTimeout, can.MaxCall), Settle: max(t.Settle, can.Settle),
			Look: look, Appear: appear, Retry: retry, Busy: busy, Hold: hold, Resync: t.Resync, RetryAfter: t.RetryAfter,
		},
		FreshFor: freshFor, Resync: t.Resync, CallDeadline: t.CallTimeout + CallDeadline, LocalDeadline: LocalDeadline,
		Manager: m.OfNode(), Batcher: m.Batcher(), Model: func(name device.Model) string { return m.o.Models[name] },
	}
}

// Queues tells whether one call occupies more than the machine that it is for, so that nodes take turns.
func (m *Manager) Queues() bool {
	e := m.Capabilities().Exclusion
	return e == fabric.ExclusionGlobal || e == fabric.ExclusionFabric
}

// patience is how long an attach may take where that is so.
func (m *Manager) patience() time.Duration {
	if m.Queues() {
		return queueMost
	}
	return 0
}

// Addressable tells whether the manager lists what is free, and takes the very device that is asked for.
func (m *Manager) Addressable() bool {
	can := m.Capabilities()
	return can.AddressableAttach && can.Free == fabric.FreeList
}
