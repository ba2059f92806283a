// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// The PCI topology of every machine: a root port, a switch, and a downstream port with a bus of its own for each slot.
const (
	rootBus       = 0x3a
	RootPort      = "0000:3a:00.0"
	UpstreamPort  = "0000:3b:00.0"
	downstreamBus = 0x3c
	firstSlotBus  = 0x3d
)

// DriverName is the GPU driver's directory in sysfs.
const DriverName = "nvidia"

// What the node side refuses.
var (
	ErrNotDraining = errors.New("GPU is not draining")
	ErrNoDriver    = errors.New("driver is not loaded")
)

// SlotBus is the PCI bus behind the port of a slot, "0000:3d".
func SlotBus(slot int) string { return fmt.Sprintf("0000:%02x", firstSlotBus+slot-1) }

// SlotPort is the address of the downstream port of a slot.
func SlotPort(slot int) string { return fmt.Sprintf("0000:%02x:%02x.0", downstreamBus, slot-1) }

// Buses are the numbers of the root bus and of the last slot's bus.
func Buses(slots int) (root, last int) { return rootBus, firstSlotBus + slots - 1 }

// Address is where the node sees the device, given its slot.
func (d *Device) Address() string { return SlotBus(d.Slot) + ":00.0" }

// linkUpLocked makes the card visible to the port, and in event mode to the kernel.
func (c *Core) linkUpLocked(d *Device) {
	m, err := c.machineLocked(d.Machine)
	if err != nil {
		return
	}
	d.Linked = true
	if m.Hotplug == simapi.HotplugEvent {
		// A real hot-plug port switches a slot on again when a new card is put in.
		delete(m.SlotOff, d.Slot)
		c.enumerateLocked(m, d)
	}
}

func (c *Core) enumerateLocked(m *Machine, d *Device) {
	if d.OnBus || !d.Linked || !m.Power || m.SlotOff[d.Slot] {
		return
	}
	d.OnBus, d.OnBusSince = true, c.clk.Now()
	c.bindLocked(m, d)
}

// bindLocked gives the device to the driver under the lowest free minor, as the driver does.
func (c *Core) bindLocked(m *Machine, d *Device) {
	if d.Bound || !d.OnBus || !m.DriverLoaded {
		return
	}
	used := map[int]bool{}
	for _, o := range c.devices {
		if o.Machine == m.Name && o.Bound {
			used[o.Minor] = true
		}
	}
	d.Minor = 0
	for used[d.Minor] {
		d.Minor++
	}
	d.Bound = true
}

func (c *Core) unbindLocked(d *Device) {
	d.Bound, d.Minor, d.Drain, d.Persistence = false, -1, false, false
}

func (c *Core) unplugLocked(d *Device) {
	c.unbindLocked(d)
	d.OnBus = false
}

// Rescan enumerates what the ports of a machine see; bus "" is all of it, otherwise the one bus, such as "0000:3d".
func (c *Core) Rescan(machine, bus string) error {
	return c.onMachine(machine, func(m *Machine) error {
		for _, d := range c.devices {
			if d.Machine == m.Name && (bus == "" || bus == SlotBus(d.Slot)) {
				c.enumerateLocked(m, d)
			}
		}
		return nil
	})
}

// RemovePCI takes the device off the machine's PCI tree, as a write to its remove file does. The real driver would wait for
// open files; here it is judged and done.
func (c *Core) RemovePCI(machine, address string) error {
	return c.remove(machine, func(d *Device) bool { return d.OnBus && d.Address() == address })
}

// SlotPower switches a slot off, which removes what is in it, or on, which enumerates it.
func (c *Core) SlotPower(machine string, slot int, on bool) error {
	if !on {
		err := c.remove(machine, func(d *Device) bool { return d.OnBus && d.Slot == slot })
		if err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
	}
	return c.onMachine(machine, func(m *Machine) error {
		if slot < 1 || slot > m.Slots {
			return fmt.Errorf("slot %d of %s: %w", slot, m.Name, ErrNotFound)
		}
		if !on {
			m.SlotOff[slot] = true
			return nil
		}
		delete(m.SlotOff, slot)
		for _, d := range c.devices {
			if d.Machine == m.Name && d.Slot == slot {
				c.enumerateLocked(m, d)
			}
		}
		return nil
	})
}

func (c *Core) remove(machine string, which func(*Device) bool) error {
	d, err := c.find(machine, which)
	if err != nil {
		return err
	}
	holders, err := c.holders(d)
	if err != nil {
		return err
	}
	return c.onMachine(machine, func(m *Machine) error {
		live, err := c.deviceLocked(d.ID)
		if err != nil {
			return err
		}
		if live.Machine != m.Name || !live.OnBus {
			return nil // somebody was faster
		}
		c.judgeRemoveLocked(live, holders)
		c.unplugLocked(live)
		return nil
	})
}

func (c *Core) judgeRemoveLocked(d *Device, holders []simapi.Holder) {
	if len(holders) == 0 {
		return
	}
	c.violateLocked(simapi.Violation{
		Kind: simapi.OpenAtRemove, Machine: d.Machine, Device: d.ID, Holders: holders,
		Detail: fmt.Sprintf("processes had %s (device number %s) open when %s was removed from the PCI tree", d.UUID, d.Number, d.Address()),
	})
}

// Bind gives a device to the driver, Unbind takes it away; both as writes to the driver's files do.
func (c *Core) Bind(machine, address string) error {
	return c.onDevice(machine, address, func(m *Machine, d *Device) error {
		if !m.DriverLoaded {
			return fmt.Errorf("bind %s: %w", address, ErrNoDriver)
		}
		c.bindLocked(m, d)
		return nil
	})
}

// Unbind judges like a removal: the driver loses the device under whoever has it open.
func (c *Core) Unbind(machine, address string) error {
	d, err := c.find(machine, func(d *Device) bool { return d.Bound && d.Address() == address })
	if err != nil {
		return err
	}
	holders, err := c.holders(d)
	if err != nil {
		return err
	}
	return c.onDevice(machine, address, func(_ *Machine, live *Device) error {
		c.judgeRemoveLocked(live, holders)
		c.unbindLocked(live)
		return nil
	})
}

// GPUs are the devices that the driver of a machine has, by PCI address, or ErrNoDriver.
func (c *Core) GPUs(machine string) ([]Device, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := c.machineLocked(machine)
	if err != nil {
		return nil, err
	}
	if !m.DriverLoaded {
		return nil, ErrNoDriver
	}
	var out []Device
	for _, d := range c.devices {
		if d.Machine == m.Name && d.Bound {
			out = append(out, *d)
		}
	}
	slices.SortFunc(out, func(a, b Device) int { return a.Slot - b.Slot })
	return out, nil
}

// SetDrain and SetPersistence change what NVML can change of a GPU.
func (c *Core) SetDrain(machine, address string, on bool) error {
	return c.onDevice(machine, address, func(_ *Machine, d *Device) error {
		if !d.Bound {
			return fmt.Errorf("GPU at %s: %w", address, ErrNotFound)
		}
		d.Drain = on
		return nil
	})
}

// SetPersistence switches persistence mode, which counts as a user of the GPU.
func (c *Core) SetPersistence(machine, address string, on bool) error {
	return c.onDevice(machine, address, func(_ *Machine, d *Device) error {
		if !d.Bound {
			return fmt.Errorf("GPU at %s: %w", address, ErrNotFound)
		}
		d.Persistence = on
		return nil
	})
}

// RemoveGPU is NVML's removal: only of a draining GPU without users, so nothing needs to be judged; a user makes it fail with
// ErrInUse and leaves the GPU draining.
func (c *Core) RemoveGPU(machine, address string) error {
	d, err := c.find(machine, func(d *Device) bool { return d.Bound && d.Address() == address })
	if err != nil {
		return err
	}
	holders, err := c.holders(d)
	if err != nil {
		return err
	}
	return c.onDevice(machine, address, func(_ *Machine, live *Device) error {
		switch {
		case !live.Drain:
			return fmt.Errorf("remove GPU %s: %w", address, ErrNotDraining)
		case live.Persistence || len(holders) > 0:
			return fmt.Errorf("remove GPU %s: %w", address, ErrInUse)
		}
		c.unplugLocked(live)
		return nil
	})
}

// Discover makes the driver take every device that is on the bus.
func (c *Core) Discover(machine string) error {
	return c.onMachine(machine, func(m *Machine) error {
		if !m.DriverLoaded {
			return ErrNoDriver
		}
		for _, d := range c.devices {
			if d.Machine == m.Name {
				c.bindLocked(m, d)
			}
		}
		return nil
	})
}

// Users are the processes that have the GPU at this address open.
func (c *Core) Users(machine, address string) ([]simapi.Holder, error) {
	d, err := c.find(machine, func(d *Device) bool { return d.Bound && d.Address() == address })
	if err != nil {
		return nil, err
	}
	return c.holders(d)
}

func (c *Core) find(machine string, which func(*Device) bool) (Device, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := c.machineLocked(machine)
	if err != nil {
		return Device{}, err
	}
	for _, d := range c.devices {
		if d.Machine == m.Name && which(d) {
			return *d, nil
		}
	}
	return Device{}, fmt.Errorf("such a device on the PCI tree of %s: %w", machine, ErrNotFound)
}

// onMachine changes something of a machine, records it and tells the node side.
func (c *Core) onMachine(machine string, change func(*Machine) error) error {
	c.mu.Lock()
	m, err := c.machineLocked(machine)
	if err == nil {
		err = change(m)
	}
	if err == nil {
		err = c.commitLocked()
	}
	c.mu.Unlock()
	c.changed(machine)
	return err
}

func (c *Core) onDevice(machine, address string, change func(*Machine, *Device) error) error {
	return c.onMachine(machine, func(m *Machine) error {
		for _, d := range c.devices {
			if d.Machine == m.Name && d.OnBus && d.Address() == address {
				return change(m, d)
			}
		}
		return fmt.Errorf("PCI device %s on %s: %w", address, m.Name, ErrNotFound)
	})
}
