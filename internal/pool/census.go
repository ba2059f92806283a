// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"slices"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// census finds the units of one model: by number on a fabric that only tells how many are free, by device on
// one that lists them.
type census struct {
	w      *World
	model  device.Model
	leases map[device.Unit]*device.Lease
	units  *order
	// stripped are the units that a claim uses though somebody removed the lease: what is free is not theirs.
	stripped map[device.Unit]bool
}

// order is the permanent order of the units.
type order struct {
	list []device.Unit
	has  map[device.Unit]bool
}

func newOrder(published []device.Unit) *order {
	o := &order{has: make(map[device.Unit]bool, len(published))}
	for _, u := range published {
		o.add(u)
	}
	return o
}

// add puts a unit at the end, unless it has its place.
func (o *order) add(u device.Unit) {
	if !o.has[u] {
		o.list, o.has[u] = append(o.list, u), true
	}
}

// count is what the census finds.
type count struct {
	// offered are the unleased units that are to be had; unhealthy those that the manager lists as not fit.
	offered, unhealthy map[device.Unit]bool
	// device is the unit's, where the manager lists free devices.
	device map[device.Unit]string
	// known: the manager's word was read, so that a unit which is neither is of no use now.
	known bool
}

// take adds the units by which the pool has grown, and tells which are to be had.
func (c *census) take() count {
	supply, read := c.w.Inventory.Free[c.model]
	switch {
	case !read:
		return c.asPublished()
	case supply.Devices != nil:
		return c.listed(supply.Devices)
	}
	c.grow()
	return c.counted()
}

// asPublished leaves the units as they are where the manager's word is missing.
func (c *census) asPublished() count {
	n := count{offered: map[device.Unit]bool{}}
	for _, u := range c.units.list {
		if u.Of(c.model) && c.leases[u] == nil {
			n.offered[u] = c.w.Published.Effects[u.Entry()] == NoTaint
		}
	}
	return n
}

// listed takes the manager's list of free devices, each of which is a unit by its identity.
func (c *census) listed(devices []device.OnFabric) count {
	n := count{offered: map[device.Unit]bool{}, unhealthy: map[device.Unit]bool{}, device: map[device.Unit]string{}, known: true}
	devices = slices.Clone(devices)
	slices.SortFunc(devices, func(a, b device.OnFabric) int { return cmp.Compare(a.ID, b.ID) })
	for _, d := range devices {
		u := device.AddressableUnit(c.model, d.ID)
		if !c.add(u) || c.leases[u] != nil {
			continue
		}
		n.device[u] = d.ID
		if d.Health == device.HealthCritical {
			n.unhealthy[u] = true
		} else {
			n.offered[u] = !c.backsOff()
		}
	}
	return n
}

// add lists a unit, unless the pool is as large as it may become.
func (c *census) add(u device.Unit) bool {
	if !c.units.has[u] && len(c.units.list) >= mostUnits {
		c.w.note("the fabric manager has more than the %d units that a pool may have; the others, of model %s among them, are left out", mostUnits, c.model)
		return false
	}
	c.units.add(u)
	return true
}

// backsOff: the manager said lately that none is left, whatever it counts.
func (c *census) backsOff() bool {
	for _, l := range c.leases {
		if l.Model == c.model && l.Failure.Blame == device.BlameModel && c.w.Now.Before(backOff(l)) {
			return true
		}
	}
	return false
}

// free is how many unleased units the manager's count covers.
func (c *census) free() int {
	if c.backsOff() {
		return 0
	}
	n := c.w.Inventory.Free[c.model].Count
	for _, l := range c.leases {
		coming := l.Phase == device.Assigned || l.Phase == device.Attaching
		if l.Model == c.model && coming && (l.FabricDevice == "" || c.w.Inventory.Leased[l.Unit] != l.FabricDevice) {
			n--
		}
	}
	return max(0, n)
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
	for _, u := range c.units.list {
		if _, ok := u.Number(c.model); ok && c.leases[u] == nil && !c.stripped[u] {
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

// grow adds units with the smallest numbers that are not taken, until there is one for each that is free.
func (c *census) grow() {
	if !c.quiet() {
		return
	}
	missing := c.free() - len(c.unleased()) - c.empty()
	for ; missing > 0 && c.add(c.nextNumber()); missing-- {
	}
}

func (c *census) nextNumber() device.Unit {
	for n := 0; ; n++ {
		if u := device.NumberedUnit(c.model, n); !c.units.has[u] {
			return u
		}
	}
}

// counted: the units that the count covers are those with the lowest numbers.
func (c *census) counted() count {
	n := count{offered: map[device.Unit]bool{}, known: true}
	free := c.free()
	for i, u := range c.unleased() {
		n.offered[u] = i < free
	}
	return n
}
