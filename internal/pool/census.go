// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// census counts the units of one model on a fabric that only tells how many are free.
type census struct {
	w      *World
	model  device.Model
	leases map[device.Unit]*device.Lease
	units  *order
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
	for _, u := range c.units.list {
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

// grow adds units with the smallest numbers that are not taken, until there is one for each that is free.
func (c *census) grow() {
	free, ok := c.free()
	if !ok || !c.quiet() {
		return
	}
	missing := free - len(c.unleased()) - c.empty()
	for n := 0; missing > 0; n++ {
		if u := device.NumberedUnit(c.model, n); !c.units.has[u] {
			c.units.add(u)
			missing--
		}
	}
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
