// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"
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
	// offered: an unleased unit that the manager has. unhealthy: it has it, and says that it is not fit.
	offered, unhealthy bool
	// device is what the free unit is, where the manager lists what is free.
	device string
	// uncertain: whether the manager has it could not be read.
	uncertain bool
	// adopt is the foreign device that the unit is to become.
	adopt *Foreign
	// kept: min keeps the unit on its node. keepFor: it is free and to be attached to that node in advance.
	kept    bool
	keepFor *Node
}

// views returns every unit of the pool in its permanent order: as published, then what only leases or
// claims name, then the units by which the pool has grown.
func views(w *World) []view {
	w.index()
	w.notes, w.lacking = nil, nil
	for i := range w.Nodes {
		if n := &w.Nodes[i]; n.Member && w.shared(n) {
			w.note("node %s is given nothing: %s is on machine %s, too, as it says", n.Name, w.others(n), n.Machine)
		}
	}
	leases := map[device.Unit]*device.Lease{}
	for i := range w.Leases {
		leases[w.Leases[i].Unit] = &w.Leases[i]
	}
	units := newOrder(w.Published.Units)
	demands := map[device.Unit][]*Demand{}
	for i := range w.Demands {
		if u, _ := device.UnitOfEntry(w.Demands[i].Attempt.Entry); w.Demands[i].Attempt.Pool == w.Fabric.Pool() {
			demands[u] = append(demands[u], &w.Demands[i])
		}
	}
	for _, u := range slices.Concat(slices.Sorted(maps.Keys(leases)), slices.Sorted(maps.Keys(demands))) {
		units.add(u)
	}
	stripped := map[device.Unit]bool{}
	for u, ds := range demands {
		stripped[u] = leases[u] == nil && slices.ContainsFunc(ds, func(d *Demand) bool { return d.Attached })
	}
	of := map[device.Model]count{}
	for i := range w.Models {
		c := census{w: w, model: w.Models[i].Name, leases: leases, units: units, stripped: stripped}
		of[c.model] = c.take()
	}
	adopted := adopt(w, leases, demands, units, of)
	all := make([]view, 0, len(units.list))
	for _, u := range units.list {
		v := view{w: w, unit: u, lease: leases[u], adopt: adopted[u]}
		if v.model = v.modelOf(); v.model != nil {
			n := of[v.model.Name]
			v.offered, v.unhealthy, v.uncertain, v.device = n.offered[u], n.unhealthy[u], !n.known, n.device[u]
		}
		v.take(demands[u])
		all = append(all, v)
	}
	keep(w, all)
	return all
}

func (w *World) note(format string, args ...any) {
	w.notes = append(w.notes, fmt.Sprintf(format, args...))
}

func (v *view) modelOf() *Model {
	for i := range v.w.Models {
		m := &v.w.Models[i]
		if v.lease != nil && v.lease.Model != "" {
			if v.lease.Model == m.Name {
				return m
			}
		} else if v.unit.Of(m.Name) {
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

// index makes Nodes and leases to be found by the node's name.
func (w *World) index() {
	w.nodes, w.leasesOn = make(map[string]*Node, len(w.Nodes)), map[string][]*device.Lease{}
	w.nodesOf = make(map[device.Machine][]string, len(w.Nodes))
	w.nodeRules = nodeRules()
	for i := range w.Nodes {
		n := &w.Nodes[i]
		w.nodes[n.Name] = n
		if n.Member {
			w.nodesOf[n.Machine] = append(w.nodesOf[n.Machine], n.Name)
		}
	}
	for i := range w.Leases {
		l := &w.Leases[i]
		w.leasesOn[l.Node] = append(w.leasesOn[l.Node], l)
	}
}

func (w *World) node(name string) *Node { return w.nodes[name] }

// shared: another member says that it is on the same machine.
func (w *World) shared(n *Node) bool { return n.Machine != "" && len(w.nodesOf[n.Machine]) > 1 }

// others names the members that say that they are on the same machine, one of them if there are many.
func (w *World) others(n *Node) string {
	all := slices.DeleteFunc(slices.Clone(w.nodesOf[n.Machine]), func(name string) bool { return name == n.Name })
	switch len(all) {
	case 0:
		return "no other node"
	case 1:
		return "node " + all[0]
	}
	return fmt.Sprintf("node %s (and %d more)", all[0], len(all)-1)
}

// serves tells whether the node can take part: a member of the fabric whose agent is there, or away no
// longer than a rolling update takes.
func (w *World) serves(n *Node) bool {
	return n != nil && n.Member && n.Machine != "" && (n.AgentReady || !n.AwaySince.IsZero() && w.Now.Before(n.AwaySince.Add(w.Settings.AgentAway)))
}

// isHolder tells whether the node is the one that took the lease, not another of the same name.
func (v *view) isHolder(n *Node) bool {
	return v.isThere(n) && (v.lease.NodeUID == "" || v.lease.NodeUID == n.UID)
}

// isThere tells whether the unit's device is on the node, whose Node object may have been made anew since.
func (v *view) isThere(n *Node) bool {
	return n != nil && v.lease.Node == n.Name && v.lease.Machine == n.Machine
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

// cooled: the unit has been idle for long enough, and its node need not keep it.
func (v *view) cooled() bool {
	return v.lease != nil && v.lease.Idle() && !v.kept && !v.w.Now.Before(v.coolUntil())
}

// settledAt is when the entry has been seen tainted long enough; zero while it is not tainted.
func (v *view) settledAt(entry string) time.Time {
	since := v.w.Published.TaintedSince[entry]
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

// place is a node as a place for one more unit of a model.
type place struct {
	w    *World
	name string
	node *Node // nil if there is no such Node
	// model is nil if the configuration lacks it; limit is how many of it the node must and may have.
	model *Model
	limit Limit
	// has is what the node's machine has, or is about to have; foreign counts what it has without a lease.
	has     []*device.Lease
	foreign int
}

// place returns the node as a place, with what is planned for it counted in.
func (w *World) place(name string, planned []*device.Lease) place {
	c := place{w: w, name: name, node: w.node(name), foreign: w.foreignOn[name]}
	if c.node == nil {
		return c
	}
	for _, l := range w.leasesOn[name] {
		if on(l, c.node) && !holdsNothing(l) {
			c.has = append(c.has, l)
		}
	}
	for _, l := range planned {
		if l.Node == name {
			c.has = append(c.has, l)
		}
	}
	return c
}

// of is the place as one for a unit of the model.
func (c place) of(m *Model) *place {
	c.model = m
	if c.node != nil && m != nil {
		c.limit = c.w.limit(c.node, m)
	}
	return &c
}

// limit is how many units of the model the node must and may have, by the configuration and by the manager.
func (w *World) limit(n *Node, m *Model) Limit {
	l := Limit{m.Min, cmp.Or(m.Max, NoLimit)}
	if own, says := w.Inventory.Limits[n.Machine]; says {
		l.Min, l.Max = max(l.Min, own[m.Name].Min), min(l.Max, own[m.Name].Max)
	}
	l.Min = min(l.Min, l.Max)
	return l
}

// on tells whether the unit is on that node's machine, not on another that had the same name.
func on(l *device.Lease, n *Node) bool { return l.Node == n.Name && l.Machine == n.Machine }

// count is how many units of the model are there.
func (c *place) count() int {
	n := 0
	for _, l := range c.has {
		if l.Model == c.model.Name {
			n++
		}
	}
	return n
}

func (c *place) slots() int {
	if n, ok := c.w.Settings.NodeSlots[c.name]; ok {
		return n
	}
	return c.w.Settings.Slots
}

// excluding is a model on the node that must not be beside this one, "" if there is none.
func (c *place) excluding() device.Model {
	for _, l := range c.has {
		if c.w.exclude(c.model.Name, l.Model) {
			return l.Model
		}
	}
	return ""
}

// exclude tells whether either model says that it must not be beside the other.
func (w *World) exclude(a, b device.Model) bool {
	for i := range w.Models {
		m := &w.Models[i]
		if m.Name == a && slices.Contains(m.Excludes, b) || m.Name == b && slices.Contains(m.Excludes, a) {
			return true
		}
	}
	return false
}

// blamed: an attach of the model failed lately, and it speaks against the node.
func (c *place) blamed() bool {
	for _, l := range c.w.leasesOn[c.name] {
		if on(l, c.node) && l.Model == c.model.Name && l.Failure.Blame == device.BlameNode && c.w.Now.Before(backOff(l)) {
			return true
		}
	}
	return false
}

// failedUnits counts the units, of any model, that failed on the node lately by their own fault.
func (c *place) failedUnits() int {
	n := 0
	for _, l := range c.w.leasesOn[c.name] {
		if on(l, c.node) && l.Failure.Blame == device.BlameUnit && c.w.Now.Before(backOff(l)) {
			n++
		}
	}
	return n
}

// inDoubt: a device is on the machine, or may still come, and which GPU it is cannot be told.
func (c *place) inDoubt() bool {
	return c.w.Settings.Arrival && slices.ContainsFunc(c.has, func(l *device.Lease) bool {
		return l.Phase == device.Failed && l.UUID == "" && !l.AskedAt.IsZero()
	})
}
