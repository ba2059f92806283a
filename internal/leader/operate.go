// SPDX-License-Identifier: Apache-2.0

package leader

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// operate carries out one lease operation. What takes something away is checked against the API server
// first: the caches that were decided on may lag.
func (l *Loop) operate(ctx context.Context, op pool.Op) (failed bool) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.WriteDeadline)
	defer cancel()
	err := l.do(ctx, op)
	l.cfg.Observer.Operated(ctx, op, err)
	if err != nil {
		klog.FromContext(ctx).V(1).Info("A lease operation did not go through; it is decided anew",
			"operation", op.Kind, "unit", op.Lease.Unit, "err", err)
	}
	return err != nil
}

func (l *Loop) do(ctx context.Context, op pool.Op) error {
	switch op.Kind {
	case pool.Create:
		return l.create(ctx, op)
	case pool.Assign:
		return l.update(ctx, op.Lease)
	case pool.Clear:
		if err := l.unclaimed(ctx, op.Lease, op.Attempt); err != nil {
			return err
		}
		op.Lease.Attempt = device.Attempt{}
		return l.update(ctx, op.Lease)
	case pool.Release:
		if err := l.releasable(ctx, op.Lease); err != nil {
			return err
		}
		op.Lease.Phase, op.Lease.ChangedAt, op.Lease.IdleSince = device.Releasing, l.cfg.Clock.Now(), time.Time{}
		return l.update(ctx, op.Lease)
	case pool.Drop:
		if err := l.cfg.Election.StillLeads(ctx); err != nil {
			return err
		}
		return l.cfg.Leases.Delete(ctx, op.Lease)
	}
	return fmt.Errorf("lease operation %q is not known", op.Kind)
}

// create makes a lease. One that no claim asks for must not take the unit from a claim that is allocated it.
func (l *Loop) create(ctx context.Context, op pool.Op) error {
	if op.Attempt.IsZero() {
		if err := l.cfg.Election.StillLeads(ctx); err != nil {
			return err
		}
		live, err := l.cfg.Claims.Live(ctx, op.Lease.Fabric, op.Lease.Unit)
		if err != nil {
			return fmt.Errorf("read the claims of unit %s before node %s keeps it: %w", op.Lease.Unit, op.Lease.Node, err)
		}
		if len(live) > 0 {
			return fmt.Errorf("unit %s was just allocated to claim %s; node %s does not keep it", op.Lease.Unit, live[0].Claim(), op.Lease.Node)
		}
	}
	_, err := l.cfg.Leases.Create(ctx, op.Lease)
	return err
}

func (l *Loop) update(ctx context.Context, lease device.Lease) error {
	_, err := l.cfg.Leases.Update(ctx, lease)
	return err
}

// unclaimed fails while the claim still has that very allocation.
func (l *Loop) unclaimed(ctx context.Context, lease device.Lease, gone device.Attempt) error {
	has, err := l.cfg.Claims.Has(ctx, gone)
	if err != nil {
		return fmt.Errorf("read claim %s before it loses unit %s: %w", gone.Claim(), lease.Unit, err)
	}
	if has {
		return fmt.Errorf("claim %s still has unit %s; the cache lags", gone.Claim(), lease.Unit)
	}
	return nil
}

// releasable fails while a claim on the unit's own node has it: that claim is served instead. A claim on
// another node is what the unit is released for, and so is one on a Node that was made anew under the name.
func (l *Loop) releasable(ctx context.Context, lease device.Lease) error {
	if err := l.cfg.Election.StillLeads(ctx); err != nil {
		return err
	}
	live, err := l.cfg.Claims.Live(ctx, lease.Fabric, lease.Unit)
	if err != nil {
		return fmt.Errorf("read the claims of unit %s before it is released: %w", lease.Unit, err)
	}
	for _, a := range live {
		if a.Node == lease.Node && l.isThere(lease) {
			return fmt.Errorf("unit %s was just allocated to claim %s on %s; it is not released", lease.Unit, a.Claim(), a.Node)
		}
	}
	return nil
}

// isThere tells whether the Node that took the lease is still there, and not another of its name.
func (l *Loop) isThere(lease device.Lease) bool {
	return slices.ContainsFunc(l.cfg.Nodes.List(lease.Fabric), func(n pool.Node) bool {
		return n.Name == lease.Node && n.Machine == lease.Machine && (lease.NodeUID == "" || lease.NodeUID == n.UID)
	})
}
