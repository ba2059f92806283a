// SPDX-License-Identifier: Apache-2.0

package leader

import (
	"context"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// Leases are the device leases of the fabric. What was written shows in List at once.
type Leases interface {
	List() []device.Lease
	// Create makes the lease; an existing one is an error.
	Create(ctx context.Context, l device.Lease) (device.Lease, error)
	// Update writes all that the leader may write; it fails if the stored version differs.
	Update(ctx context.Context, l device.Lease) (device.Lease, error)
	// Delete drops the finalizer and the object of that version.
	Delete(ctx context.Context, l device.Lease) error
}

// Claims are the ResourceClaims that were allocated from the fabric's pool.
type Claims interface {
	Demands() []pool.Demand
	// Has reads from the API server whether the claim still has that very allocation.
	Has(ctx context.Context, a device.Attempt) (bool, error)
	// Live reads from the API server, not from a cache, whether any claim is allocated the unit (either
	// of its entries), and returns those attempts.
	Live(ctx context.Context, f device.FabricID, u device.Unit) ([]device.Attempt, error)
	// Refuse writes AttachFailed for each attempt that its claim still has; gone is success.
	Refuse(ctx context.Context, attempts []device.Attempt, reason, message string) error
}

// Nodes are the cluster's Nodes and the agents on them.
type Nodes interface {
	// List returns the members of the fabric.
	List(f device.FabricID) []pool.Node
	// SetLabels writes what differs and nothing else.
	SetLabels(ctx context.Context, want pool.NodeLabels) error
}

// Publisher writes the pool as ResourceSlices.
type Publisher interface {
	// Publish hands over what is wanted; it returns at once and nothing is written if nothing changed.
	Publish(ctx context.Context, o pool.Offers)
	// Published is what the API server shows; ok is false until it was read once. TaintedSince is empty.
	Published() (p pool.Published, ok bool)
}

// Fabric is the manager.
type Fabric interface {
	// Free reads what is free. A model that could not be read is missing, and the error says why.
	Free(ctx context.Context, models []device.Model) (map[device.Model]pool.Supply, error)
	// Attached reads all that is attached to each of the machines. A machine that could not be read is missing.
	Attached(ctx context.Context, machines []device.Machine) map[device.Machine][]device.OnFabric
}

// Limiter is a manager that has limits of its own.
type Limiter interface {
	// Limits reads how many of each model the machine must and may have; a model that is missing it cannot have.
	Limits(ctx context.Context, m device.Machine) (map[device.Model]pool.Limit, error)
}

// Election tells whether this agent leads.
type Election interface {
	// StillLeads reads the election from the API server; an error means no, or unknown.
	StillLeads(ctx context.Context) error
}

// Observer hears what happened, for metrics, events and logs. Its methods must not block.
type Observer interface {
	// Operated: a lease operation ended.
	Operated(ctx context.Context, op pool.Op, err error)
	// Refused: an allocation was taken back.
	Refused(ctx context.Context, r pool.Refusal)
	// Counted: the manager was asked what is free.
	Counted(ctx context.Context, free map[device.Model]pool.Supply, err error)
	// Decided: a plan was made.
	Decided(ctx context.Context, p pool.Plan)
}
