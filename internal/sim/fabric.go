// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

const (
	fabricID   = device.FabricID("0")
	gpuModel   = device.Model("a100")
	otherModel = device.Model("h100")
	// settle is how long a call of unknown outcome may still take effect, as the configuration says.
	settle = time.Minute
)

// fabricModel is the manager's word for a model.
func fabricModel(m device.Model) string { return "NVIDIA " + strings.ToUpper(string(m)) }

// gpu is one physical GPU of the chassis.
type gpu struct {
	id    string
	uuid  device.GPUUUID
	model device.Model
	// machine is where it is attached, empty while it is free; tenant is another tenant's machine.
	machine device.Machine
	health  device.Health
	// foreign: a person attached it, not we.
	foreign bool
	// upset is when something from outside last happened to it.
	upset time.Time
	// unnamedUntil is how long the manager does not know its UUID.
	unnamedUntil time.Time
}

const tenant = device.Machine("tenant")

// chassis is the fabric and its manager.
type chassis struct {
	s    *Sim
	gpus []*gpu
	// downUntil is how long the manager cannot be reached, busyUntil how long it refuses to change anything.
	downUntil, busyUntil time.Time
}

func newChassis(s *Sim, n, others int) *chassis {
	c := &chassis{s: s}
	for i := range n + others {
		g := &gpu{
			id: fmt.Sprintf("res-%d", i), uuid: device.GPUUUID(fmt.Sprintf("GPU-00000000-0000-4000-8000-%012x", i+1)),
			model: gpuModel, health: device.HealthOK,
		}
		if i >= n {
			g.model = otherModel
		}
		c.gpus = append(c.gpus, g)
	}
	return c
}

// models are those that the configuration names.
func (c *chassis) models() []device.Model {
	if slices.ContainsFunc(c.gpus, func(g *gpu) bool { return g.model == otherModel }) {
		return []device.Model{gpuModel, otherModel}
	}
	return []device.Model{gpuModel}
}

func (c *chassis) byID(id string) *gpu {
	for _, g := range c.gpus {
		if g.id == id {
			return g
		}
	}
	return nil
}

func (c *chassis) byUUID(uuid device.GPUUUID) *gpu {
	for _, g := range c.gpus {
		if g.uuid == uuid {
			return g
		}
	}
	return nil
}

func (c *chassis) on(m device.Machine) []*gpu {
	var on []*gpu
	for _, g := range c.gpus {
		if g.machine == m {
			on = append(on, g)
		}
	}
	return on
}

func (c *chassis) down() bool { return c.s.now().Before(c.downUntil) }

// refuses is the manager's answer to a call that would change something, nil if it takes the call.
func (c *chassis) refuses(op string) error {
	switch {
	case c.down():
		return unreachable(op)
	case c.s.now().Before(c.busyUntil):
		return &device.Fault{Class: device.FaultBusy, Op: op, Message: "it is being maintained"}
	}
	return nil
}

func unreachable(op string) error {
	return &device.Fault{Class: device.FaultUnreachable, Op: op, Err: errors.New("connection refused")}
}

// fabricCall is a call to the manager.
func fabricCall(key, op string, least, most time.Duration) request {
	return request{
		key: "fabric " + key, least: least, most: most,
		lost: func(cause error) error { return &device.Fault{Class: device.FaultUnknown, Op: op, Err: cause} },
		no:   func() error { return &device.Fault{Class: device.FaultBusy, Op: op, Message: "try again later"} },
	}
}

// manager is the chassis as the loops of one process see it.
type manager struct{ p *process }

func (m manager) ListAttached(ctx context.Context, machine device.Machine) ([]device.OnFabric, error) {
	op := "list what is attached to " + string(machine)
	return invoke(ctx, m.p, fabricCall("list "+m.p.node, op, 50*time.Millisecond, 800*time.Millisecond), func() ([]device.OnFabric, error) {
		c := m.p.s.fabric
		if c.down() {
			return nil, unreachable(op)
		}
		return c.list(machine), nil
	})
}

func (m manager) Attach(ctx context.Context, machine device.Machine, model string, _ []string) error {
	op := "attach one " + model + " to " + m.p.node
	m.p.s.ask(m.p.name+" before", func() { m.p.s.asked(m.p, machine) })
	_, err := invoke(ctx, m.p, fabricCall("attach "+m.p.node, op, 2*time.Second, 12*time.Second), func() (struct{}, error) {
		return struct{}{}, m.p.s.fabric.attach(m.p, machine, model, op)
	})
	return err
}

func (c *chassis) attach(p *process, machine device.Machine, model, op string) error {
	if err := c.refuses(op); err != nil {
		return err
	}
	var free []*gpu
	for _, g := range c.gpus {
		if fabricModel(g.model) == model && g.machine == "" && g.health != device.HealthCritical {
			free = append(free, g)
		}
	}
	if len(free) == 0 {
		c.s.note("fabric", "attach for %s: no capacity", p.node)
		return &device.Fault{Class: device.FaultNoCapacity, Op: op, Message: "no free device"}
	}
	g := free[0]
	if c.s.opt.Seed != 0 {
		g = free[c.s.rng("which").IntN(len(free))]
	}
	c.connect(g, machine)
	c.s.note("fabric", "attached %s to %s", g.id, p.node)
	if c.s.chance("arrives critical", 40) {
		g.health = device.HealthCritical
		c.s.count.Faults["device arrives-critical"]++
		c.s.note("fabric", "%s is critical", g.id)
	}
	return nil
}

// connect makes the link; the host finds the device.
func (c *chassis) connect(g *gpu, machine device.Machine) {
	g.machine = machine
	if h := c.s.hostOf(machine); h != nil {
		h.linked(g)
	}
}

// disconnect takes the link down; what the host still shows of it goes.
func (c *chassis) disconnect(g *gpu) {
	h := c.s.hostOf(g.machine)
	g.machine, g.foreign = "", false
	if h != nil {
		h.unlinked(g)
	}
}

func (m manager) Detach(ctx context.Context, machine device.Machine, id, _ string) error {
	op := "detach " + id + " from " + m.p.node
	_, err := invoke(ctx, m.p, fabricCall("detach "+m.p.node, op, time.Second, 8*time.Second), func() (struct{}, error) {
		return struct{}{}, m.p.s.fabric.detach(m.p, machine, id, op)
	})
	return err
}

func (c *chassis) detach(p *process, machine device.Machine, id, op string) error {
	if err := c.refuses(op); err != nil {
		return err
	}
	g := c.byID(id)
	if g == nil || g.machine != machine {
		return &device.Fault{Class: device.FaultNotFound, Op: op, Message: "it is not attached"}
	}
	c.s.taking(p, g, "detached")
	c.disconnect(g)
	c.s.note("fabric", "detached %s from %s", id, p.node)
	return nil
}

func (m manager) Free(ctx context.Context, models []device.Model) (map[device.Model]pool.Supply, error) {
	return invoke(ctx, m.p, fabricCall("count", "count free devices", 50*time.Millisecond, time.Second), func() (map[device.Model]pool.Supply, error) {
		c := m.p.s.fabric
		if c.down() {
			return nil, unreachable("count free devices")
		}
		free := map[device.Model]pool.Supply{}
		for _, model := range models {
			n := 0
			for _, g := range c.gpus {
				if g.model == model && g.machine == "" && g.health != device.HealthCritical {
					n++
				}
			}
			free[model] = pool.Supply{Count: n}
		}
		return free, nil
	})
}

// Attached is for the leader: what is attached to all machines, for devices that nobody of ours attached.
func (m manager) Attached(ctx context.Context, machines []device.Machine) map[device.Machine][]device.OnFabric {
	op := "list what is attached"
	of, err := invoke(ctx, m.p, fabricCall("list all", op, 50*time.Millisecond, time.Second), func() (map[device.Machine][]device.OnFabric, error) {
		c := m.p.s.fabric
		if c.down() {
			return nil, unreachable(op)
		}
		of := map[device.Machine][]device.OnFabric{}
		for _, machine := range machines {
			of[machine] = c.list(machine)
		}
		return of, nil
	})
	if err != nil {
		return nil // a machine that could not be read is missing
	}
	return of
}

func (c *chassis) list(machine device.Machine) []device.OnFabric {
	list := []device.OnFabric{}
	for _, g := range c.on(machine) {
		uuid := g.uuid
		if c.s.now().Before(g.unnamedUntil) {
			uuid = ""
		}
		list = append(list, device.OnFabric{ID: g.id, Machine: machine, Model: fabricModel(g.model), UUID: uuid, Health: g.health})
	}
	return list
}
