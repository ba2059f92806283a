// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"maps"
	"slices"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// foreign are the devices on members' machines that no lease names, by node. On a machine on which a call may still
// bring a device, or a lease cannot be read, what comes may be that lease's: only what was foreign before is.
func foreign(w *World) []Foreign {
	ours, open := map[string]bool{}, map[device.Machine]bool{}
	for i := range w.Leases {
		l := &w.Leases[i]
		ours[l.FabricDevice] = true
		if n := w.nodes[l.Node]; l.Machine == "" && n != nil {
			open[n.Machine] = open[n.Machine] || mayBring(l)
		}
		open[l.Machine] = open[l.Machine] || mayBring(l)
	}
	var all []Foreign
	for _, name := range slices.Sorted(maps.Keys(w.nodes)) {
		n := w.nodes[name]
		if !n.Member || n.Machine == "" {
			continue
		}
		for _, d := range w.Inventory.Attached[n.Machine] {
			d.Machine = n.Machine
			f := Foreign{Node: name, Device: d, beside: open[n.Machine]}
			if !ours[d.ID] && (!f.beside || !w.ForeignSince[f.Key()].IsZero()) {
				all = append(all, f)
			}
		}
	}
	return all
}

// mayBring: a device of the machine may be this lease's though it does not name it.
func mayBring(l *device.Lease) bool {
	switch l.Phase {
	case device.Assigned, device.Attaching:
		return l.FabricDevice == ""
	case device.Failed:
		return l.FabricDevice == "" && !l.AskedAt.IsZero()
	case device.Attached, device.Releasing:
		return false
	case device.Unreadable:
		return true
	}
	return true // whatever a later release does there
}

// adopt finds a unit for each foreign device that is to be taken in: by its identity where devices have units,
// else one that the manager does not have free and nobody names, else a new one.
func adopt(w *World, leases map[device.Unit]*device.Lease, demands map[device.Unit][]*Demand, units *order, of map[device.Model]count) map[device.Unit]*Foreign {
	w.foreign, w.foreignOn = foreign(w), map[string]int{}
	stripped := map[string]bool{}
	for u, ds := range demands {
		for _, d := range ds {
			if leases[u] == nil && (d.Attached || d.Attempt.Ready()) {
				stripped[d.Attempt.Node] = true
			}
		}
	}
	for i := range w.foreign {
		w.foreignOn[w.foreign[i].Node]++
	}
	taken := map[device.Unit]*Foreign{}
	for i := range w.foreign {
		f := &w.foreign[i]
		m, why := w.adoptable(f)
		if m != nil && stripped[f.Node] {
			m, why = nil, "a claim has a device there whose lease is gone, and this may be it"
		}
		if m == nil {
			w.note("device %s (%s) is attached to node %s without a lease; it is left alone: %s", f.Device.ID, f.Device.Model, f.Node, why)
			continue
		}
		c := census{w: w, model: m.Name, leases: leases, units: units}
		free := func(u device.Unit) bool {
			return u.Of(m.Name) && leases[u] == nil && len(demands[u]) == 0 && taken[u] == nil && !of[m.Name].offered[u]
		}
		u := device.AddressableUnit(m.Name, f.Device.ID)
		if w.Inventory.Free[m.Name].Devices == nil {
			if at := slices.IndexFunc(units.list, free); at >= 0 {
				u = units.list[at]
			} else {
				u = c.nextNumber()
			}
		}
		if c.add(u) && free(u) {
			taken[u] = f
		}
	}
	return taken
}

// adoptable returns the model as which the device is to be taken in, or why it is not.
func (w *World) adoptable(f *Foreign) (*Model, string) {
	at := slices.IndexFunc(w.Models, func(m Model) bool { return m.FabricModel == f.Device.Model })
	switch {
	case !w.Settings.Adopt:
		return nil, "foreign devices are only reported"
	case f.beside:
		return nil, "another device is being attached there, or a lease of the node cannot be read"
	case at < 0:
		return nil, "the configuration has no such model"
	case f.Device.Health == device.HealthCritical:
		return nil, "the manager reports it as critical"
	case f.Device.UUID == "":
		return nil, "the manager gives no GPU UUID for it"
	case w.shared(w.nodes[f.Node]):
		return nil, "another node says that it is on the same machine"
	case !w.serves(w.nodes[f.Node]) || w.nodes[f.Node].FabricDown:
		return nil, "the node's agent is away, or cannot work with the manager"
	}
	since := w.ForeignSince[f.Key()]
	if ripe := since.Add(w.Settings.AdoptAfter); since.IsZero() || w.Inventory.AttachedAt.Before(ripe) {
		return nil, "it is taken in when it has been there for " + w.Settings.AdoptAfter.String()
	}
	return &w.Models[at], ""
}
