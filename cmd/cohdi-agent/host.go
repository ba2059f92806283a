// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/hotplug"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nvml"
)

// host joins the kernel's and the driver's view of this machine into the node loop's Host.
type host struct {
	pci    *hotplug.PCI
	driver *nvml.Driver
}

var _ node.Host = (*host)(nil)

// Observe lists the GPUs on the bus and those that NVML shows. A driver that does not answer is part of
// what is seen, not an error.
func (h *host) Observe(ctx context.Context) (node.Sight, error) {
	bus, err := h.pci.Snapshot(ctx)
	if err != nil {
		return node.Sight{}, err
	}
	var sight node.Sight
	at := make([]device.PCIAddress, 0, len(bus))
	for _, f := range bus {
		sight.Bus = append(sight.Bus, attach.Function{Address: f.Address, Driver: f.Driver, Problem: f.Problem})
		at = append(at, f.Address)
	}
	if len(at) == 0 {
		return sight, nil // nothing to ask the driver about
	}
	gpus, err := h.driver.Inventory(ctx, at...)
	if err != nil {
		sight.NVMLState = err.Error()
		return sight, nil //nolint:nilerr // it is told as what is seen
	}
	for _, g := range gpus {
		if g.Problem == nil {
			sight.NVML = append(sight.NVML, attach.GPU{Address: g.PCI, UUID: g.UUID, Serial: g.Serial, Name: g.Name, Draining: g.Draining})
		}
	}
	return sight, nil
}

// addresses are where GPUs are on this machine; none where the bus cannot be read.
func (h *host) addresses(ctx context.Context) []device.PCIAddress {
	bus, err := h.pci.Snapshot(ctx)
	if err != nil {
		return nil
	}
	at := make([]device.PCIAddress, 0, len(bus))
	for _, f := range bus {
		at = append(at, f.Address)
	}
	return at
}

// Rescan looks where the device was, and at the empty hot-plug slots; everywhere if there are none, since
// then it can come anywhere.
func (h *host) Rescan(ctx context.Context, was device.PCIAddress) error {
	hints, err := h.pci.EmptySlots(ctx)
	if err != nil {
		return err
	}
	if !was.IsZero() {
		hints = append(hints, hotplug.Hint{Address: was})
	}
	_, err = h.pci.Rescan(ctx, hints...)
	return err
}

func (h *host) RescanAll(ctx context.Context) error {
	_, err := h.pci.Rescan(ctx)
	return err
}

func (h *host) Bind(ctx context.Context, a device.PCIAddress) error { return h.pci.Bind(ctx, a) }

// Discover makes NVML see what is on the bus, and looks for a driver that was installed meanwhile.
func (h *host) Discover(ctx context.Context) error {
	if st := h.driver.Refresh(ctx); st.State != nvml.StateReady {
		return errors.New(st.Reason)
	}
	bus, err := h.pci.Snapshot(ctx)
	if err != nil {
		return err
	}
	var bound []device.PCIAddress
	for _, f := range bus {
		if f.Driver != "" {
			bound = append(bound, f.Address)
		}
	}
	return h.driver.Rediscover(ctx, bound...)
}

// Drain makes the driver let the GPU go. A driver that cannot drain, or does not have the GPU, is no
// obstacle: the bus is next.
func (h *host) Drain(ctx context.Context, a device.PCIAddress) error {
	err := h.driver.Drain(ctx, a)
	if errors.Is(err, nvml.ErrNotFound) || errors.Is(err, nvml.ErrUnsupported) {
		return nil
	}
	return err
}

func (h *host) Undrain(ctx context.Context, a device.PCIAddress) error {
	return h.driver.Undrain(ctx, a)
}

// Remove takes the GPU off the bus: through the driver, which knows best how, or through sysfs where the
// driver cannot, as in virtual machines.
func (h *host) Remove(ctx context.Context, a device.PCIAddress) error {
	err := h.driver.Remove(ctx, a)
	if err != nil && !errors.Is(err, nvml.ErrUnsupported) && !errors.Is(err, nvml.ErrNotFound) &&
		!errors.Is(err, nvml.ErrNoLibrary) && !errors.Is(err, nvml.ErrDriverNotLoaded) {
		return err
	}
	if err := h.pci.Remove(ctx, a); err != nil { // sysfs has the last word
		return err
	}
	h.driver.Removed(a)
	return nil
}

// errOtherAgent: nobody uses the GPU but another agent of this node, as while one replaces the other.
var errOtherAgent = errors.New("another agent of this node has it open")

// Holders are the processes that have the GPU's device node open, other than this one, which holds it
// through NVML and lets go when it drains. Another agent of this node is no user, and lets go only when it ends: it is
// errOtherAgent.
func (h *host) Holders(ctx context.Context, a device.PCIAddress) ([]string, error) {
	gpus, err := h.driver.Inventory(ctx, a)
	if err != nil {
		return nil, fmt.Errorf("which device node belongs to %s is not known: %w", a, err)
	}
	var who []string
	for _, g := range gpus {
		if g.PCI != a {
			continue
		}
		if g.Minor < 0 {
			return nil, fmt.Errorf("which device node belongs to %s is not known: the driver hides a GPU that was drained by a former run", a)
		}
		number, err := h.pci.DeviceNode(g.Minor)
		if errors.Is(err, os.ErrNotExist) {
			continue // no node, nobody can have it open
		}
		if err != nil {
			return nil, err
		}
		holders, err := h.pci.Holders(ctx, number)
		if err != nil {
			return nil, err
		}
		names, err := users(holders[number], os.Getpid())
		if err != nil {
			return nil, fmt.Errorf("GPU at %s: %w", a, err)
		}
		who = append(who, names...)
	}
	return who, nil
}

// users names the processes other than the agents of this node, of which own is this one.
func users(holders []hotplug.Holder, own int) ([]string, error) {
	var names, agents []string
	for _, p := range holders {
		switch {
		case p.PID == own:
		case p.Agent:
			agents = append(agents, p.String())
		default:
			names = append(names, p.String())
		}
	}
	if len(names) == 0 && len(agents) > 0 {
		return nil, fmt.Errorf("%w, which lets it go when it ends: %s", errOtherAgent, strings.Join(agents, ", "))
	}
	return names, nil
}
