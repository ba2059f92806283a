// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// view is one unit with everything that is known of it, as the rules look at it.
type view struct {
	w     *World
	unit  device.Unit
	model *Model // nil if the configuration lacks it
	lease *device.Lease
	// demand is the claim that has the unit now: the one that the lease serves, else the only other.
	demand *Demand
	// serving: the demand is the very attempt that the lease stores.
	serving bool
	// rivals counts further claims for the same unit, which the shared counter should make impossible.
	rivals int
	// holder is the lease's Node, wanted the demand's; nil if there is no such Node.
	holder, wanted *Node
	// offered: an unleased unit that the manager's count covers.
	offered bool
}

// views returns every unit of the pool in its permanent order: as published, then what only leases or
// claims name, then the units by which the pool has grown.
func views(w *World) []view {
	leases := map[device.Unit]*device.Lease{}
	for i := range w.Leases {
		leases[w.Leases[i].Unit] = &w.Leases[i]
	}
	units := slices.Clone(w.Published.Units)
	demands := map[device.Unit][]*Demand{}
	for i := range w.Demands {
		if u, _ := device.UnitOfEntry(w.Demands[i].Attempt.Entry); w.Demands[i].Attempt.Pool == w.Fabric.Pool() {
			demands[u] = append(demands[u], &w.Demands[i])
		}
	}
	for _, u := range slices.Concat(slices.Sorted(maps.Keys(leases)), slices.Sorted(maps.Keys(demands))) {
		if !slices.Contains(units, u) {
			units = append(units, u)
		}
	}
	offered := map[device.Unit]bool{}
	for i := range w.Models {
		c := census{w: w, model: w.Models[i].Name, leases: leases, units: units}
		units = append(units, c.grown()...)
		c.units = units
		maps.Copy(offered, c.offered())
	}
	all := make([]view, 0, len(units))
	for _, u := range units {
		v := view{w: w, unit: u, lease: leases[u], offered: offered[u]}
		v.model = v.modelOf()
		v.take(demands[u])
		all = append(all, v)
	}
	return all
}

func (v *view) modelOf() *Model {
	for i := range v.w.Models {
		m := &v.w.Models[i]
		if v.lease != nil && v.lease.Model != "" {
			if v.lease.Model == m.Name {
				return m
			}
		} else if _, ok := v.unit.Number(m.Name); ok {
			return m
		}
	}
	return nil
}

// take chooses the demand to serve among the claims that have the unit: the one that the lease serves, else
// the oldest that can be served.
func (v *view) take(demands []*Demand) {
	for _, d := range demands {
		if v.lease != nil && v.lease.Attempt == d.Attempt {
			v.demand, v.serving = d, true
		}
	}
	if v.demand == nil && len(demands) > 0 {
		v.demand = slices.MinFunc(demands, func(a, b *Demand) int {
			return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(a.Attempt.AllocatedAt, b.Attempt.AllocatedAt), cmp.Compare(a.Attempt.UID, b.Attempt.UID))
		})
	}
	v.rivals = max(0, len(demands)-1)
	if v.lease != nil {
		v.holder = v.w.node(v.lease.Node)
	}
	if v.demand != nil {
		v.wanted = v.w.node(v.demand.Attempt.Node)
	}
}

// rank puts a demand that waits before one that nobody waits for.
func (d *Demand) rank() int {
	if d.Reserved && !d.AttachFailed {
		return 0
	}
	return 1
}

func (w *World) node(name string) *Node {
	for i := range w.Nodes {
		if w.Nodes[i].Name == name {
			return &w.Nodes[i]
		}
	}
	return nil
}

// serves tells whether the node can take part: a member of the fabric whose agent is there, or away no
// longer than a rolling update takes.
func (w *World) serves(n *Node) bool {
	return n != nil && n.Member && n.Machine != "" && (n.AgentReady || !n.AwaySince.IsZero() && w.Now.Before(n.AwaySince.Add(w.Settings.AgentAway)))
}

// isHolder tells whether the node is the one that took the lease, not another of the same name.
func (v *view) isHolder(n *Node) bool {
	return n != nil && v.lease.Node == n.Name && v.lease.Machine == n.Machine && (v.lease.NodeUID == "" || v.lease.NodeUID == n.UID)
}

// holderActs tells whether somebody is there who carries the lease further: an agent on the machine that
// took it. It need not be on the same Node object.
func (v *view) holderActs() bool {
	return v.w.serves(v.holder) && v.holder.Machine == v.lease.Machine
}

func (v *view) phase() device.Phase {
	if v.lease == nil {
		return ""
	}
	return v.lease.Phase
}

// coolUntil is when an idle unit has been idle long enough; a stored time in the future counts as now.
func (v *view) coolUntil() time.Time {
	since := v.lease.IdleSince
	if since.After(v.w.Now) {
		since = v.w.Now
	}
	return since.Add(v.w.Settings.CoolDown)
}

func (v *view) cooled() bool {
	return v.lease != nil && v.lease.Idle() && !v.w.Now.Before(v.coolUntil())
}

// settledAt is when the ready entry has been seen tainted long enough; zero while it is not tainted.
func (v *view) settledAt() time.Time {
	since := v.w.Published.TaintedSince[v.unit.ReadyEntry()]
	if since.IsZero() {
		return time.Time{}
	}
	return since.Add(v.w.Settings.ReadySettle)
}

// backOff is when a failed unit may be tried again, by its holder's clock. A clock that is ahead makes it
// longer here, until the holder, which clamps it, has deleted the lease.
func backOff(l *device.Lease) time.Time {
	if l.Phase != device.Failed {
		return time.Time{}
	}
	return l.Failure.RetryAfter
}

// census counts the units of one model on a fabric that only tells how many are free.
type census struct {
	w      *World
	model  device.Model
	leases map[device.Unit]*device.Lease
	units  []device.Unit
}

// free is how many unleased units the manager's count covers; ok is false where it was not read.
func (c *census) free() (n int, ok bool) {
	n, ok = c.w.Inventory.Free[c.model]
	for _, l := range c.leases {
		if l.Model != c.model {
			continue
		}
		if l.Phase == device.Failed && l.Failure.Blame == device.BlameModel && c.w.Now.Before(backOff(l)) {
			return 0, ok // the manager said that none is left
		}
		coming := l.Phase == device.Assigned || l.Phase == device.Attaching
		if coming && (l.FabricDevice == "" || c.w.Inventory.Leased[l.Unit] != l.FabricDevice) {
			n--
		}
	}
	return max(0, n), ok
}

// quiet: no unit of the model is on its way, and the count was read with just the present devices leased.
// Only then a count that is larger than the pool means that the pool has grown.
func (c *census) quiet() bool {
	held := 0
	for u, l := range c.leases {
		if l.Model != c.model {
			continue
		}
		switch {
		case holdsNothing(l):
			continue
		case l.Phase != device.Attached && l.Phase != device.Failed, c.w.Inventory.Leased[u] != l.FabricDevice:
			return false
		}
		held++
	}
	for u := range c.w.Inventory.Leased {
		if _, ok := u.Number(c.model); ok {
			held--
		}
	}
	return held == 0
}

// holdsNothing: the lease keeps a unit's name out of use, while the manager counts a device as free for it.
func holdsNothing(l *device.Lease) bool {
	return l.Phase == device.Failed && l.FabricDevice == "" && l.AskedAt.IsZero()
}

func (c *census) empty() int {
	n := 0
	for _, l := range c.leases {
		if l.Model == c.model && holdsNothing(l) {
			n++
		}
	}
	return n
}

func (c *census) unleased() []device.Unit {
	var free []device.Unit
	for _, u := range c.units {
		if _, ok := u.Number(c.model); ok && c.leases[u] == nil {
			free = append(free, u)
		}
	}
	slices.SortFunc(free, func(a, b device.Unit) int {
		na, _ := a.Number(c.model)
		nb, _ := b.Number(c.model)
		return na - nb
	})
	return free
}

// grown returns the units to add, with the smallest numbers that are not taken.
func (c *census) grown() []device.Unit {
	free, ok := c.free()
	if !ok || !c.quiet() {
		return nil
	}
	var added []device.Unit
	missing := free - len(c.unleased()) - c.empty()
	for n := 0; len(added) < missing; n++ {
		if u := device.NumberedUnit(c.model, n); !slices.Contains(c.units, u) {
			added = append(added, u)
		}
	}
	return added
}

// offered are the unleased units that the count covers: the lowest numbers. Where the count could not be
// read, the units stay as they were published.
func (c *census) offered() map[device.Unit]bool {
	free, ok := c.free()
	covered := map[device.Unit]bool{}
	for i, u := range c.unleased() {
		covered[u] = ok && i < free || !ok && c.w.Published.Effects[u.Entry()] == NoTaint
	}
	return covered
}
