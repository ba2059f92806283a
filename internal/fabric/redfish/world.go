// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// world is how a service models what is attached to what: systems of resource blocks, or zones of endpoints. Its faults
// are NotFound only where the machine, or the device, is not known.
type world interface {
	machines(ctx context.Context, what string) ([]fabric.Machine, *device.Fault)
	host(ctx context.Context, what string, m device.Machine) (*host, *device.Fault)
	// unit reads one device.
	unit(ctx context.Context, what, path string) (*unit, *device.Fault)
	// composing tells whether something is under way with one device, where the service shows that.
	composing(ctx context.Context, what, path string) (bool, *device.Fault)
	// units reads all; those that cannot be read are left out, unless none can.
	units(ctx context.Context, what string) ([]*unit, *device.Fault)
	// reachable returns which devices can come to the host.
	reachable(ctx context.Context, what string, h *host) (func(*unit) bool, *device.Fault)
}

// host is what a machine's devices are in: its system, or its zone.
type host struct {
	path, etag string
	// members are all that it has, whatever they are.
	members []string
	offer   offer
}

func (h *host) has(path string) bool { return slices.Contains(h.members, path) }

// holds tells whether the host has the device by its own list or by what the device said, which was read later.
func (h *host) holds(u *unit) bool { return h.has(u.path) || slices.Contains(u.users, h.path) }

// unit is what can be attached: a resource block or an endpoint.
type unit struct {
	path, etag string
	// fixed: it is part of a host, or none of what is pooled.
	fixed bool
	// counted is how many devices are in it.
	counted int
	model   string
	uuid    device.GPUUUID
	serial  string
	health  device.Health
	text    string
	// composing: it is about to be attached or detached.
	composing bool
	// taken says why it cannot be had, "" if it can; users are the hosts that have it.
	taken string
	users []string
}

func (u *unit) onFabric() device.OnFabric {
	d := device.OnFabric{ID: u.path, Model: u.model, UUID: u.uuid, Serial: u.serial, Health: u.health, HealthText: rest.Tidy(u.text)}
	if u.counted != 1 {
		d.UUID, d.Serial = "", ""
		d.HealthText = rest.Tidy(fmt.Sprintf("there are %d devices in it, which come and go together; %s", u.counted, u.text))
	}
	return d
}

// knows refuses a model that no device has, and names those that there are: a misspelt model is never free.
func knows(units []*unit, what, model string) *device.Fault {
	var models []string
	for _, u := range units {
		if u.model == model && model != "" {
			return nil
		}
		if quoted := fmt.Sprintf("%q", rest.Tidy(u.model)); u.model != "" && !slices.Contains(models, quoted) {
			models = append(models, quoted)
		}
	}
	slices.Sort(models)
	return &device.Fault{
		Class: device.FaultUnsupported, Op: what,
		Message: rest.Tidy(fmt.Sprintf("the service has no device of model %q; it has %s", model, orNothing(strings.Join(models, ", ")))),
	}
}

// world finds out what the service models.
func (c *Client) world(ctx context.Context, what string) (world, *device.Fault) {
	r, fault := c.discover(ctx, what)
	if fault != nil {
		return nil, fault
	}
	switch {
	case r.composition != "":
		s, fault := c.compositionService(ctx, what, r)
		if fault != nil {
			return nil, fault
		}
		return &blocks{c, r, s}, nil
	case r.fabrics != "":
		return &zones{c: c, root: r}, nil
	}
	return nil, &device.Fault{Class: device.FaultRejected, Op: what, Message: "the service has neither a CompositionService nor Fabrics: nothing can be attached with it"}
}

func (c *Client) compositionService(ctx context.Context, what string, r root) (service, *device.Fault) {
	c.mu.Lock()
	known := c.service
	c.mu.Unlock()
	if known != nil {
		return *known, nil
	}
	s, _, fault := read(ctx, c, "discover", what, r.composition, decodeService)
	if fault != nil {
		if fault.Class == device.FaultNotFound {
			c.forget()
		}
		return s, elsewhere(fault)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.service = &s
	return s, nil
}

// indexLife is how long a system is believed to keep its UUID without being asked.
const indexLife = time.Minute

// index is where the systems are.
type index struct {
	at      time.Time
	machine map[string]device.Machine // by path; "" is a system without a UUID
}

// path is where a machine was last.
func (x index) path(m device.Machine) string {
	for path, machine := range x.machine {
		if machine == m && m != "" {
			return path
		}
	}
	return ""
}

// note remembers where a machine is.
func (c *Client) note(path string, m device.Machine) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.systems.machine == nil {
		c.systems.machine = make(map[string]device.Machine)
		c.systems.at = c.clock.Now()
	}
	c.systems.machine[path] = m
}

// placed is a system with where it was read.
type placed struct {
	system
	doc
	fault *device.Fault
}

func (c *Client) readSystem(ctx context.Context, what, path string) placed {
	s, d, fault := read(ctx, c, "inventory", what, path, decodeSystem)
	if fault == nil {
		c.note(path, s.machine)
	}
	return placed{s, d, fault}
}

// processor reads what is in a block, or at an endpoint, if it did not come in full with that.
func (c *Client) processor(ctx context.Context, what string, l link) (processor, *device.Fault) {
	p, err := decodeProcessor(l.raw)
	if err != nil {
		var fault *device.Fault
		if p, _, fault = read(ctx, c, "inventory", what, l.to, decodeProcessor); fault != nil {
			return p, fault
		}
	}
	if c.noIdentity {
		p.uuid, p.serial = "", ""
	}
	return p, nil
}

// known is the system as it was read, nothing if it went meanwhile, or what is known of it from before: one that does not
// answer for the moment is none that is not there.
func (c *Client) known(path string, p placed) (system, *device.Fault) {
	if p.fault == nil || p.fault.Class == device.FaultNotFound {
		return p.system, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.systems.machine[path]; m != "" {
		return system{machine: m, composable: true, power: fabric.PowerUnknown}, nil
	}
	return system{}, p.fault
}

// find returns the system that is the machine.
func (c *Client) find(ctx context.Context, what string, r root, m device.Machine) (placed, *device.Fault) {
	c.mu.Lock()
	path := c.systems.path(m)
	c.mu.Unlock()
	if path != "" {
		p := c.readSystem(ctx, what, path)
		switch {
		case p.fault == nil && p.machine == m:
			return p, nil
		case p.fault != nil && p.fault.Class != device.FaultNotFound:
			return p, p.fault
		}
		c.forget() // it is somewhere else, or not any more
	}
	return c.search(ctx, what, r, m)
}

// search looks through all systems that are not known to be others.
func (c *Client) search(ctx context.Context, what string, r root, m device.Machine) (placed, *device.Fault) {
	links, fault := c.collect(ctx, "inventory", what, r.systems, "")
	if fault != nil {
		return placed{}, fault
	}
	c.mu.Lock()
	if c.clock.Since(c.systems.at) > indexLife {
		c.systems = index{}
	}
	var others []string
	for path := range c.systems.machine {
		others = append(others, path)
	}
	c.mu.Unlock()
	unknown := slices.DeleteFunc(paths(links), func(p string) bool { return slices.Contains(others, p) })
	all, fault := each(ctx, unknown, func(ctx context.Context, path string) (placed, *device.Fault) {
		return c.readSystem(ctx, what, path), nil
	})
	if fault != nil {
		return placed{}, fault
	}
	for _, p := range all {
		switch {
		case p.fault == nil && p.machine == m:
			return p, nil
		case p.fault != nil && p.fault.Class != device.FaultNotFound:
			fault = p.fault // it may be this one
		}
	}
	if fault != nil {
		return placed{}, fault
	}
	fault = &device.Fault{Class: device.FaultNotFound, Op: what, Message: fmt.Sprintf("none of the service's %d systems has this UUID", len(links))}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.systems.path(swapped(m)) != "" {
		fault.Message += fmt.Sprintf("; one has %s, which is the same with its first groups written in the other byte order", swapped(m))
	}
	return placed{}, fault
}

// swapped writes the first three groups of a UUID in the other byte order, as some firmware does.
func swapped(m device.Machine) device.Machine {
	s := string(m)
	if len(s) != 36 {
		return ""
	}
	return device.Machine(s[6:8] + s[4:6] + s[2:4] + s[0:2] + "-" + s[11:13] + s[9:11] + "-" + s[16:18] + s[14:16] + s[18:])
}
