// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/node"
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
	// dead: its driver shows it no more, wherever it is.
	dead bool
	// unnamedUntil is how long the manager does not know its UUID.
	unnamedUntil time.Time
	// refuses: the next part of a job that is to detach it fails.
	refuses bool
	// moves are where it was from when on, for a list that lags.
	moves []move
}

type move struct {
	at time.Time
	to device.Machine
}

// manner is how a manager works.
type manner struct {
	// works: it answers at once and works on it; who asked polls.
	works bool
	// chooses: the caller chooses the device, and the manager lists what is free.
	chooses bool
	// alone: it works on one thing at a time, for all machines.
	alone bool
	// nameless: it gives no GPU UUIDs.
	nameless bool
	// lag is how far its lists are behind.
	lag time.Duration
	// batch is how many devices of a machine one call may detach; one if zero.
	batch int
}

// manners are those of the managers that there are, by what they are asked for.
func manners() map[string]manner {
	return map[string]manner{
		"":       {},
		"totals": {works: true},
		"tasks":  {works: true, chooses: true},
		"jobs":   {works: true, chooses: true, alone: true, nameless: true, lag: 10 * time.Second},
		"batch":  {works: true, chooses: true, alone: true, nameless: true, lag: 10 * time.Second, batch: 3},
	}
}

// job is what a manager works on: one change, or several of one machine, one after the other.
type job struct {
	handle    string
	parts     []*part
	suspended bool
	// whole: it says nothing of its parts before all are over.
	whole bool
}

// part is one change.
type part struct {
	op      string
	machine device.Machine
	// id is the device, where it is named.
	id string
	// do is the work; over says that it was done, fault how.
	do    func() error
	over  bool
	fault *device.Fault
}

func (j *job) over() bool {
	return !slices.ContainsFunc(j.parts, func(p *part) bool { return !p.over })
}

// part is the one of the job that a call is about; where there is but one, the job's name says enough.
func (j *job) part(call node.Call) *part {
	for _, p := range j.parts {
		if len(j.parts) == 1 || p.id == call.Device {
			return p
		}
	}
	return nil
}

const tenant = device.Machine("tenant")

// chassis is the fabric and its manager.
type chassis struct {
	s    *Sim
	gpus []*gpu
	// downUntil is how long the manager cannot be reached, busyUntil how long it refuses to change anything.
	downUntil, busyUntil time.Time
	manner               manner
	jobs                 []*job
	// suspends is how long the next job waits for a person.
	suspends time.Duration
}

func newChassis(s *Sim, n, others int) *chassis {
	c := &chassis{s: s}
	for i := range n + others {
		g := &gpu{
			id: fmt.Sprintf("res-%d", i), uuid: device.GPUUUID(fmt.Sprintf("GPU-00000000-0000-4000-8000-%012x", i+1)),
			model: gpuModel, health: device.HealthOK, moves: []move{{}},
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

func (m manager) Attach(ctx context.Context, call node.Call) (node.Work, error) {
	op := "attach one " + call.Model + " to " + m.p.node
	m.p.s.ask(m.p.name+" before", func() { m.p.s.asked(m.p, call.Machine) })
	return m.change(ctx, "attach", op, call, func() error { return m.p.s.fabric.attach(m.p, call, op) })
}

// change is a call that changes something: it is over when the manager answers, or the manager works on it.
func (m manager) change(ctx context.Context, what, op string, call node.Call, do func() error) (node.Work, error) {
	c := m.p.s.fabric
	least, most := c.takes(what)
	if !c.manner.works {
		_, err := invoke(ctx, m.p, fabricCall(what+" "+m.p.node, op, least, most), func() (struct{}, error) { return struct{}{}, do() })
		return node.Work{}, err
	}
	return invoke(ctx, m.p, fabricCall(what+" "+m.p.node, op, 50*time.Millisecond, 800*time.Millisecond), func() (node.Work, error) {
		a := c.begin(what, []*part{{op: op, machine: call.Machine, id: call.Device, do: do}})[0]
		return a.Work, a.Err
	})
}

// DetachAll is one call and one job. What the lists do not have on the machine is refused, and keeps no other from going.
func (m manager) DetachAll(ctx context.Context, calls []node.Call) []node.Answer {
	op := fmt.Sprintf("detach %d devices from %s", len(calls), m.p.node)
	m.p.s.ask(m.p.name+" before", func() { m.p.s.askedAtOnce(m.p, calls) })
	answers, err := invoke(ctx, m.p, fabricCall("detach "+m.p.node, op, 50*time.Millisecond, 800*time.Millisecond), func() ([]node.Answer, error) {
		c, answers := m.p.s.fabric, make([]node.Answer, len(calls))
		var parts []*part
		var of []int // which call each of them is
		for i, call := range calls {
			one := "detach " + call.Device + " from " + m.p.node
			if g := c.byID(call.Device); g == nil || c.listedOn(g) != call.Machine {
				answers[i].Err = &device.Fault{Class: device.FaultNotFound, Op: one, Message: "it is not listed there"}
				continue
			}
			parts, of = append(parts, &part{op: one, machine: call.Machine, id: call.Device, do: func() error {
				return c.detach(m.p, call.Machine, call.Device, one)
			}}), append(of, i)
		}
		for i, a := range c.begin("detach", parts) {
			answers[of[i]] = a
		}
		return answers, nil
	})
	if err != nil {
		answers = slices.Repeat([]node.Answer{{Err: err}}, len(calls))
	}
	return answers
}

// takes is how long the manager works on a change.
func (c *chassis) takes(what string) (least, most time.Duration) {
	if what == "attach" {
		return 2 * time.Second, 12 * time.Second
	}
	return time.Second, 8 * time.Second
}

// begin makes work of a call, and answers for each part. One that is under way already is what its client finds when it
// asks again.
func (c *chassis) begin(what string, parts []*part) []node.Answer {
	answers := make([]node.Answer, len(parts))
	var fresh []*part
	var of []int // which part each of them is
	for i, p := range parts {
		if answers[i] = c.answer(p); answers[i] == (node.Answer{}) {
			fresh, of = append(fresh, p), append(of, i)
		}
	}
	if len(fresh) == 0 {
		return answers
	}
	j := &job{handle: fmt.Sprintf("job-%d", len(c.jobs)+1), parts: fresh}
	if len(fresh) > 1 {
		c.s.count.Jobs++
		c.s.count.Parts += len(fresh)
		j.whole = c.s.chance("whole job", 2)
		c.s.note("fabric", "%s of %s: %s", j.handle, c.s.hostOf(fresh[0].machine).node, strings.Join(j.ids(), ","))
	}
	c.jobs = append(c.jobs, j)
	c.schedule(j, what)
	for _, i := range of {
		answers[i].Work = node.Work{Handle: j.handle, PollAfter: time.Second}
	}
	return answers
}

// answer is what the manager says of a change instead of beginning it, nothing if it begins.
func (c *chassis) answer(p *part) node.Answer {
	if err := c.refuses(p.op); err != nil {
		return node.Answer{Err: err}
	}
	for _, j := range c.jobs {
		same := func(q *part) bool { return !q.over && q.op == p.op && q.machine == p.machine && q.id == p.id }
		switch {
		case j.over():
		case p.id != "" && slices.ContainsFunc(j.parts, same):
			return node.Answer{Work: node.Work{Handle: j.handle, PollAfter: time.Second}}
		case c.manner.alone && j.suspended:
			return node.Answer{Err: &device.Fault{Class: device.FaultSuspended, Op: p.op, Message: j.handle + " waits for a person"}}
		case c.manner.alone:
			return node.Answer{Err: &device.Fault{Class: device.FaultBusy, Op: p.op, Message: j.handle + " goes first"}}
		}
	}
	return node.Answer{}
}

func (j *job) ids() []string {
	all := make([]string, 0, len(j.parts))
	for _, p := range j.parts {
		all = append(all, p.id)
	}
	return all
}

// schedule says when each part of the job is over.
func (c *chassis) schedule(j *job, what string) {
	var at time.Duration
	least, most := c.takes(what)
	if c.manner.alone && c.s.chance("suspended", 30) {
		c.suspends = c.s.between("person", 20*time.Second, 3*time.Minute)
	}
	for i, p := range j.parts {
		took := c.s.between("work "+what, least, most)
		if c.suspends > 0 && (i == len(j.parts)-1 || !c.s.chance("suspended later", 2)) {
			c.s.struck("manager suspends")
			c.suspendAt(at, j, p)
			took, c.suspends = took+c.suspends, 0
		}
		at += took
		c.s.after(at, nil, func() { c.end(j, p) })
	}
}

// suspendAt has the job wait for a person before one of its parts.
func (c *chassis) suspendAt(at time.Duration, j *job, p *part) {
	wait := func() {
		if !p.over {
			c.s.note("fabric", "%s waits for a person: %s", j.handle, p.op)
			j.suspended = true
		}
	}
	if at > 0 {
		c.s.after(at, nil, wait)
		return
	}
	wait()
}

// end does a part of the work.
func (c *chassis) end(j *job, p *part) {
	if p.over {
		return
	}
	p.over, j.suspended = true, false
	if p.fault = c.fails(j, p); p.fault != nil {
		c.s.struck("part fails " + string(p.fault.Class))
		c.s.note("fabric", "%s fails: %s: %s", j.handle, p.op, p.fault.Class)
		return
	}
	if err := p.do(); err != nil {
		f, ok := errors.AsType[*device.Fault](err)
		if !ok || f.Class == device.FaultUnreachable || f.Class == device.FaultBusy {
			f = &device.Fault{Class: device.FaultBusy, Op: p.op, Err: err} // nothing was done
		}
		p.fault = f
	}
	c.s.detail("fabric", "%s is over: %s", j.handle, p.op)
}

// fails is why a part of a job of several is not done, nil if it is. One of which the hardware says nothing may be done all
// the same, also later.
func (c *chassis) fails(j *job, p *part) *device.Fault {
	g := c.byID(p.id)
	if len(j.parts) == 1 || g == nil {
		return nil
	}
	f := &device.Fault{Class: device.FaultConflict, Op: p.op, Message: "the hardware refuses"}
	if g.refuses {
		g.refuses = false
		return f
	}
	if !c.s.calm.IsZero() || !c.s.chance("part fails", 4) {
		return nil
	}
	classes := []device.FaultClass{device.FaultConflict, device.FaultRejected, device.FaultBusy, device.FaultUnknown, device.FaultUnknown}
	f.Class = classes[c.s.rng("how a part fails").IntN(len(classes))]
	if f.Class == device.FaultUnknown && c.s.chance("done all the same", 2) {
		c.s.after(c.s.between("late part", 0, settle*8/10), nil, func() {
			c.s.detail("fabric", "%s late: %v", p.op, p.do())
		})
	}
	return f
}

// restart makes the manager forget what it worked on; half of it is done all the same.
func (c *chassis) restart() {
	for i, j := range c.jobs {
		for _, p := range j.parts {
			if !p.over && c.s.chance("done at the restart", 2) {
				c.end(j, p)
			}
			p.over = true
		}
		c.jobs[i] = &job{}
	}
}

func (m manager) Poll(ctx context.Context, _ attach.Kind, call node.Call, handle string) (node.Work, error) {
	op := "poll " + handle
	return invoke(ctx, m.p, fabricCall("poll "+m.p.node, op, 50*time.Millisecond, 800*time.Millisecond), func() (node.Work, error) {
		c := m.p.s.fabric
		if c.down() {
			return node.Work{}, unreachable(op)
		}
		for _, j := range c.jobs {
			if j.handle == handle {
				return j.tells(call, op), nil
			}
		}
		return node.Work{Fault: &device.Fault{Class: device.FaultUnknown, Op: op, Message: "no such job"}}, nil
	})
}

// tells is what the manager says of the part that a call is about.
func (j *job) tells(call node.Call, op string) node.Work {
	p := j.part(call)
	switch {
	case p == nil:
		return node.Work{Fault: &device.Fault{Class: device.FaultUnknown, Op: op, Message: "the job is about something else"}}
	case p.over && (!j.whole || j.suspended || j.over()):
		return node.Work{Fault: p.fault}
	case j.suspended:
		return node.Work{Handle: j.handle, PollAfter: time.Second, Fault: &device.Fault{Class: device.FaultSuspended, Op: op, Message: "a person has to resume it"}}
	}
	return node.Work{Handle: j.handle, PollAfter: time.Second}
}

func (c *chassis) attach(p *process, call node.Call, op string) error {
	machine, model := call.Machine, call.Model
	if err := c.refuses(op); err != nil {
		return err
	}
	if g := c.byID(call.Device); call.Device != "" && (g == nil || g.machine != "") {
		return &device.Fault{Class: device.FaultRejected, Op: op, Message: call.Device + " is not free"}
	}
	var free []*gpu
	for _, g := range c.gpus {
		if fabricModel(g.model) == model && g.machine == "" && g.health != device.HealthCritical && (call.Device == "" || g.id == call.Device) {
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
	c.move(g, machine)
	if h := c.s.hostOf(machine); h != nil {
		h.linked(g)
	}
}

// move is where the device is from now on.
func (c *chassis) move(g *gpu, to device.Machine) {
	g.machine = to
	g.moves = append(g.moves, move{c.s.now(), to})
}

// listedOn is where the manager's lists have the device.
func (c *chassis) listedOn(g *gpu) device.Machine {
	seen := c.s.now().Add(-c.manner.lag)
	for _, m := range slices.Backward(g.moves) {
		if !m.at.After(seen) {
			return m.to
		}
	}
	return ""
}

// disconnect takes the link down; what the host still shows of it goes.
func (c *chassis) disconnect(g *gpu) {
	h := c.s.hostOf(g.machine)
	c.move(g, "")
	g.foreign = false
	if h != nil {
		h.unlinked(g)
	}
}

func (m manager) Detach(ctx context.Context, call node.Call) (node.Work, error) {
	op := "detach " + call.Device + " from " + m.p.node
	return m.change(ctx, "detach", op, call, func() error { return m.p.s.fabric.detach(m.p, call.Machine, call.Device, op) })
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
			free[model] = c.free(model)
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

// free is what the manager lists, or counts, as free.
func (c *chassis) free(model device.Model) pool.Supply {
	var supply pool.Supply
	if c.manner.chooses {
		supply.Devices = []device.OnFabric{}
	}
	for _, g := range c.gpus {
		if g.model != model || c.listedOn(g) != "" || g.health == device.HealthCritical && !c.manner.chooses {
			continue
		}
		supply.Count++
		if c.manner.chooses {
			supply.Devices = append(supply.Devices, c.shown(g, ""))
		}
	}
	return supply
}

func (c *chassis) list(machine device.Machine) []device.OnFabric {
	list := []device.OnFabric{}
	for _, g := range c.gpus {
		if c.listedOn(g) == machine {
			list = append(list, c.shown(g, machine))
		}
	}
	return list
}

// shown is a device as the manager lists it.
func (c *chassis) shown(g *gpu, machine device.Machine) device.OnFabric {
	uuid := g.uuid
	if c.manner.nameless || c.s.now().Before(g.unnamedUntil) {
		uuid = ""
	}
	return device.OnFabric{ID: g.id, Machine: machine, Model: fabricModel(g.model), UUID: uuid, Health: g.health}
}
