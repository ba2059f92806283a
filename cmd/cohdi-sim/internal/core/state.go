// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"
	"maps"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/statefile"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// saved is the state file. Fixed descriptions are not in it: the configuration is newer.
type saved struct {
	Devices    []*Device          `json:"devices"`
	Machines   []*Machine         `json:"machines"`
	Operations []*operation       `json:"operations"`
	LastOp     int                `json:"lastOp"`
	LastSeq    int                `json:"lastSeq"`
	Violations []simapi.Violation `json:"violations"`
}

// commitLocked checks the invariants and makes the state durable.
func (c *Core) commitLocked() error {
	c.checkLocked()
	return statefile.Save(c.path, saved{c.devices, c.machines, c.operations, c.lastOp, c.lastSeq, c.violations})
}

// load takes over what a former run left; fresh is true where there was none.
func (c *Core) load() (fresh bool, err error) {
	var s saved
	if fresh, err = statefile.Load(c.path, &s); fresh || err != nil {
		return fresh, err
	}
	c.lastOp, c.lastSeq, c.violations, c.operations = s.LastOp, s.LastSeq, s.Violations, s.Operations
	for _, old := range s.Machines {
		if m, err := c.machineLocked(old.Name); err == nil {
			m.Power, m.DriverLoaded = old.Power, old.DriverLoaded && !m.NoDriver
			maps.Copy(m.SlotOff, old.SlotOff)
		}
	}
	for _, old := range s.Devices {
		d, err := c.deviceLocked(old.ID)
		if err != nil {
			c.log.Info("Dropped a device that the chassis no longer has", "device", old.ID)
			continue
		}
		m, err := c.machineLocked(old.Machine)
		if old.Machine != "" && (err != nil || old.Slot > m.Slots) {
			c.log.Info("Freed a device whose machine or slot is gone", "device", old.ID, "machine", old.Machine, "slot", old.Slot)
			continue
		}
		fixed, index, number := d.Device, d.Index, d.Number
		*d = *old
		d.Device, d.Index, d.Number = fixed, index, number
	}
	return false, nil
}

// checkLocked records an invariant that the simulator itself broke.
func (c *Core) checkLocked() {
	type place struct {
		machine string
		number  int
	}
	slots, minors := map[place]string{}, map[place]string{}
	for _, d := range c.devices {
		if broken := c.brokenLocked(d); broken != "" {
			c.invariantLocked(d, broken)
		}
		if d.Machine != "" {
			at := place{d.Machine, d.Slot}
			if other := slots[at]; other != "" {
				c.invariantLocked(d, fmt.Sprintf("shares slot %d with %s", d.Slot, other))
			}
			slots[at] = d.ID
		}
		if d.Bound {
			at := place{d.Machine, d.Minor}
			if other := minors[at]; other != "" {
				c.invariantLocked(d, fmt.Sprintf("shares minor %d with %s", d.Minor, other))
			}
			minors[at] = d.ID
		}
	}
}

func (c *Core) brokenLocked(d *Device) string {
	m, err := c.machineLocked(d.Machine)
	switch {
	case d.Phase == simapi.PhaseFree && (d.Machine != "" || d.OnBus || d.Linked):
		return "is free and still on a machine"
	case d.Phase != simapi.PhaseFree && err != nil:
		return "is " + d.Phase + " and on no machine"
	case d.Phase != simapi.PhaseFree && (d.Slot < 1 || d.Slot > m.Slots):
		return fmt.Sprintf("is in slot %d, which %s does not have", d.Slot, m.Name)
	case d.Phase != simapi.PhaseFree && m.Fabric != d.Fabric:
		return "is on a machine of another fabric"
	case d.OnBus && (!d.Linked || d.Phase == simapi.PhaseAttaching):
		return "is on the PCI tree without being attached"
	case d.Bound && !d.OnBus:
		return "is bound and not on the PCI tree"
	case d.Phase != simapi.PhaseFree && (d.Tenant != "" || d.Vanished):
		return "is attached here and is another tenant's, or gone"
	}
	return ""
}

func (c *Core) invariantLocked(d *Device, what string) {
	for _, v := range c.violations {
		if v.Kind == simapi.Invariant && v.Device == d.ID && v.Detail == what {
			return
		}
	}
	c.violateLocked(simapi.Violation{Kind: simapi.Invariant, Machine: d.Machine, Device: d.ID, Detail: what})
}
