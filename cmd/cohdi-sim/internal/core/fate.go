// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const xidFellOff = 79

// ChangeDevice does to a device what the control API asks for. Nothing of it is judged: fate is not the agent's doing.
func (c *Core) ChangeDevice(id string, change simapi.DeviceChange) error {
	c.mu.Lock()
	d, err := c.deviceLocked(id)
	if err != nil {
		c.mu.Unlock()
		return err
	}
	before := *d
	err = c.changeDeviceLocked(d, change)
	if err == nil {
		err = c.commitLocked()
	}
	fellOff := before.Bound && !d.Bound
	now := d.Machine
	c.mu.Unlock()
	if err != nil {
		return err
	}
	c.changed(before.Machine)
	if now != before.Machine {
		c.changed(now)
	}
	if c.hooks.XID != nil && before.Bound {
		if change.XID != nil {
			c.hooks.XID(before.Machine, before.Address(), *change.XID)
		} else if fellOff {
			c.hooks.XID(before.Machine, before.Address(), xidFellOff)
		}
	}
	return nil
}

func (c *Core) changeDeviceLocked(d *Device, change simapi.DeviceChange) error {
	status := d.OpStatus
	if change.Health != nil {
		s, ok := map[string]string{"OK": "00", "Warning": "10", "Critical": "20", "Unknown": "90"}[*change.Health]
		if !ok {
			return fmt.Errorf("health %q is none of OK, Warning, Critical, Unknown", *change.Health)
		}
		status = s
	}
	if change.OpStatus != nil {
		status = *change.OpStatus
	}
	if err := c.actLocked(d, change); err != nil {
		return err
	}
	d.OpStatus = status
	if change.FailAttach != nil {
		d.FailAttach = *change.FailAttach
	}
	if change.FailDetach != nil {
		d.FailDetach = *change.FailDetach
	}
	if change.FabricSerial != nil {
		d.ReportedSerial = *change.FabricSerial
	}
	return nil
}

func (c *Core) actLocked(d *Device, change simapi.DeviceChange) error {
	switch change.Action {
	case "":
	case simapi.DeviceVanish:
		c.releaseLocked(d)
		d.Vanished = true
	case simapi.DeviceReturn:
		d.Vanished = false
	case simapi.DeviceFree:
		c.releaseLocked(d)
		d.Tenant, d.Vanished = "", false
	case simapi.DeviceSteal:
		if d.Phase != simapi.PhaseFree {
			return fmt.Errorf("steal %s: %w (phase %s)", d.ID, ErrInUse, d.Phase)
		}
		d.Tenant = change.Tenant
		if d.Tenant == "" {
			d.Tenant = "another-tenant"
		}
	case simapi.DeviceBuildIn:
		return c.buildInLocked(d, change.Machine)
	case simapi.DeviceLinkDown, simapi.DeviceLinkUp:
		if d.Phase != simapi.PhaseAttached {
			return fmt.Errorf("%s of %s: device is %s, not attached: %w", change.Action, d.ID, d.Phase, ErrNotFound)
		}
		if change.Action == simapi.DeviceLinkDown {
			c.unplugLocked(d)
			d.Linked, d.LinkDown = false, true
			return nil
		}
		d.LinkDown = false
		c.linkUpLocked(d)
	default:
		return fmt.Errorf("unknown action %q on a device", change.Action)
	}
	return nil
}

// buildInLocked makes a free device a part of a machine.
func (c *Core) buildInLocked(d *Device, machine string) error {
	m, err := c.machineLocked(machine)
	if err != nil {
		return err
	}
	if !usable(d, d.Fabric, d.Model) {
		return fmt.Errorf("build %s into %s: %w (phase %s)", d.ID, m.Name, ErrInUse, d.Phase)
	}
	slot, ok := c.freeSlotLocked(m)
	if !ok {
		return fmt.Errorf("build %s into %s: %w", d.ID, m.Name, ErrNoSlot)
	}
	c.assignLocked(d, m, slot)
	c.setPhaseLocked(d, simapi.PhaseAttached)
	d.BuiltIn = true
	c.linkUpLocked(d)
	return nil
}

// ChangeMachine switches power, hot-plug mode or driver of a machine.
func (c *Core) ChangeMachine(name string, change simapi.MachineChange) error {
	if change.Hotplug != nil {
		if err := config.CheckHotplug(*change.Hotplug); err != nil {
			return fmt.Errorf("hotplug: %w", err)
		}
	}
	return c.onMachine(name, func(m *Machine) error {
		if change.Hotplug != nil {
			m.Hotplug = *change.Hotplug
		}
		if change.DriverLoaded != nil {
			m.DriverLoaded = *change.DriverLoaded
		}
		if change.Power != nil {
			m.Power = *change.Power
		}
		for _, d := range c.devices {
			if d.Machine != m.Name {
				continue
			}
			switch {
			case !m.Power:
				c.unplugLocked(d)
			case !m.DriverLoaded:
				c.unbindLocked(d)
			}
			// What the firmware finds when a machine is switched on, or the driver when it is loaded.
			if change.Power != nil {
				c.enumerateLocked(m, d)
			}
			if change.DriverLoaded != nil {
				c.bindLocked(m, d)
			}
		}
		return nil
	})
}
