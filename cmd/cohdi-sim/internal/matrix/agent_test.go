// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	"github.com/cohdi/cohdi-agent/internal/manager"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/node"
)

// The agent's names of the models.
const (
	modelA device.Model = "a"
	modelB device.Model = "b"
)

// Times of the agent; those of a manager come from its setting.
const (
	deadline   = 4 * time.Minute
	retryAfter = time.Minute
)

func (s *setting) times() manager.Times {
	return manager.Times{AttachDeadline: deadline, RetryAfter: retryAfter, CallTimeout: s.call, Settle: s.settle, Resync: 10 * time.Minute}
}

var errDead = errors.New("this process is dead")

// agent is the agent of one node: what is stored of its units, and the process of now.
type agent struct {
	b       *bench
	name    string
	machine device.Machine

	mu      sync.Mutex // guards the following
	leases  map[device.Unit]device.Lease
	version int
	units   int
	told    map[device.Attempt]int
	p       *process
}

// process is one life of an agent.
type process struct {
	*agent
	manager fabric.Manager
	joint   *manager.Manager
	loop    *node.Loop
	end     func()

	// ops counts the steps that can be the last one: dieAt is, before or after its effect. Guarded by agent.mu.
	ops, dieAt int
	after      bool
	dead       bool
}

// machines are those of the nodes.
func machines() map[string]device.Machine {
	return map[string]device.Machine{"n1": fabrictest.MachineOne, "n2": fabrictest.MachineTwo}
}

// nodeOf is the name of a machine.
func nodeOf(m device.Machine) string {
	for name, of := range machines() {
		if of == m {
			return name
		}
	}
	return ""
}

// agent makes the agent of node n1 or n2 and starts it.
func (b *bench) agent(name string) *agent {
	b.t.Helper()
	a := &agent{
		b: b, name: name, machine: machines()[name],
		leases: map[device.Unit]device.Lease{}, told: map[device.Attempt]int{},
	}
	b.agents = append(b.agents, a)
	a.start(0, false)
	b.t.Cleanup(func() { a.p.end() })
	return a
}

// start begins a process, which dies at a step of its life if dieAt is not 0.
func (a *agent) start(dieAt int, after bool) {
	a.b.t.Helper()
	p := &process{agent: a, manager: a.b.client(), dieAt: dieAt, after: after}
	p.joint = manager.New(manager.Options{
		Client: p.manager, Clock: clock.RealClock{}, Models: map[device.Model]string{modelA: fabrictest.ModelA, modelB: fabrictest.ModelB},
		Timed: func(metrics.Operation, time.Duration, error) {}, Answered: func() {},
	})
	c := p.joint.NodeConfig(a.b.setting.times())
	c.Node, c.Machine, c.Fabric = a.name, a.machine, "0"
	c.Leases, c.Manager, c.Host, c.Claims, c.Prepared, c.Observer, c.Clock = p, p, p, p, p, p, clock.RealClock{}
	if c.Batcher != nil {
		c.Batcher = p
	}
	p.loop = node.New(c)
	ctx, cancel := context.WithCancel(a.b.t.Context())
	var work sync.WaitGroup
	work.Go(func() { p.loop.Run(ctx) })
	p.end = func() {
		a.mu.Lock()
		p.dead = true
		a.mu.Unlock()
		cancel()
		work.Wait()
	}
	a.mu.Lock()
	a.p = p
	a.mu.Unlock()
}

// kill ends the process where it stands, and its calls with it. What it had under way must not change anything any more.
func (a *agent) kill() { a.p.end() }

// again starts a new process after the death of the last one.
func (a *agent) again() {
	a.b.t.Helper()
	a.kill()
	a.start(0, false)
	a.b.proved("the agent was started again")
}

// died tells whether the process has come to the step at which it dies.
func (a *agent) died() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.p.dead
}

// step is where a process may die: before or after something is done.
func (p *process) step(do func() error) error {
	p.mu.Lock()
	if p.dead {
		p.mu.Unlock()
		return errDead
	}
	p.ops++
	last := p.ops == p.dieAt
	p.dead = last
	before := last && !p.after
	p.mu.Unlock()
	if before {
		return errDead
	}
	err := do()
	if last {
		return errDead
	}
	return err
}

// The device leases.

func (p *process) List() []device.Lease {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Values(p.leases))
}

func (p *process) Update(_ context.Context, l device.Lease) (device.Lease, error) {
	err := p.step(func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if have, ok := p.leases[l.Unit]; !ok || have.Version != l.Version {
			return fmt.Errorf("conflict: version %q, stored %q", l.Version, have.Version)
		}
		l = p.putLocked(l)
		return nil
	})
	return l, err
}

func (p *process) Delete(_ context.Context, l device.Lease) error {
	return p.step(func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		have, ok := p.leases[l.Unit]
		if ok && have.Version != l.Version {
			return fmt.Errorf("conflict: version %q, stored %q", l.Version, have.Version)
		}
		if d, held := p.b.device(l.FabricDevice); ok && held && d.Machine == p.name && l.FabricDevice != "" {
			p.b.crime("the lease of %s was deleted while %s is on %s", l.Unit, d.ID, p.name)
		}
		delete(p.leases, l.Unit)
		return nil
	})
}

// putLocked stores a lease and judges it.
func (a *agent) putLocked(l device.Lease) device.Lease {
	a.version++
	l.Version = fmt.Sprint(a.version)
	for u, other := range a.leases {
		if u != l.Unit && l.FabricDevice != "" && other.FabricDevice == l.FabricDevice {
			a.b.crime("%s is taken for %s and for %s", l.FabricDevice, u, l.Unit)
		}
	}
	if d, ok := a.b.device(l.FabricDevice); ok && l.UUID != "" && string(l.UUID) != d.UUID {
		a.b.crime("%s is taken for GPU %s, and is %s", l.FabricDevice, l.UUID, d.UUID)
	}
	a.leases[l.Unit] = l
	return l
}

// device finds what the manager calls by that name; not where two go by it.
func (b *bench) device(id string) (core.Device, bool) {
	var found []core.Device
	for _, m := range b.chassis().Machines() {
		for _, d := range slices.Concat(m.Listed, m.Coming) {
			if id != "" && b.face.id(b, d) == id {
				found = append(found, d)
			}
		}
	}
	if len(found) != 1 {
		return core.Device{}, false
	}
	return found[0], true
}

// The manager, by the agent's own joint; each call may be the process's last.

func (p *process) ListAttached(ctx context.Context, m device.Machine) (list []device.OnFabric, err error) {
	err = p.step(func() (err error) {
		list, err = p.joint.OfNode().ListAttached(ctx, m)
		return err
	})
	return list, err
}

func (p *process) call(do func() (node.Work, error)) (w node.Work, err error) {
	err = p.step(func() (err error) {
		w, err = do()
		return err
	})
	return w, err
}

func (p *process) Attach(ctx context.Context, c node.Call) (node.Work, error) {
	return p.call(func() (node.Work, error) { return p.joint.OfNode().Attach(ctx, c) })
}

func (p *process) Detach(ctx context.Context, c node.Call) (node.Work, error) {
	return p.call(func() (node.Work, error) { return p.joint.OfNode().Detach(ctx, c) })
}

func (p *process) DetachAll(ctx context.Context, calls []node.Call) []node.Answer {
	var answers []node.Answer
	err := p.step(func() error {
		answers = p.joint.Batcher().DetachAll(ctx, calls)
		return nil
	})
	if err != nil {
		answers = make([]node.Answer, len(calls))
		for i := range answers {
			answers[i].Err = err
		}
	}
	return answers
}

func (p *process) Poll(ctx context.Context, k attach.Kind, c node.Call, handle string) (node.Work, error) {
	return p.call(func() (node.Work, error) { return p.joint.OfNode().Poll(ctx, k, c, handle) })
}

// The host: the node's side of the chassis.

func (p *process) Observe(context.Context) (node.Sight, error) {
	var s node.Sight
	v, err := p.b.chassis().Machine(p.name)
	if err != nil {
		return s, err
	}
	for i := range v.OnBus {
		d := &v.OnBus[i]
		at, err := device.ParsePCIAddress(d.Address())
		if err != nil {
			return s, err
		}
		f := attach.Function{Address: at}
		if d.Bound {
			f.Driver = core.DriverName
			s.NVML = append(s.NVML, attach.GPU{Address: at, UUID: device.GPUUUID(d.UUID), Serial: d.Serial, Name: d.ProductName, Draining: d.Drain})
		}
		s.Bus = append(s.Bus, f)
	}
	return s, nil
}

func (p *process) Rescan(ctx context.Context, _ device.PCIAddress) error { return p.RescanAll(ctx) }

func (p *process) RescanAll(context.Context) error {
	return p.step(func() error { return p.b.chassis().Rescan(p.name, "") })
}

func (p *process) Bind(_ context.Context, at device.PCIAddress) error {
	return p.step(func() error { return p.b.chassis().Bind(p.name, at.String()) })
}

func (p *process) Discover(context.Context) error {
	return p.step(func() error { return p.b.chassis().Discover(p.name) })
}

func (p *process) Drain(_ context.Context, at device.PCIAddress) error {
	return p.step(func() error { return p.b.chassis().SetDrain(p.name, at.String(), true) })
}

func (p *process) Undrain(_ context.Context, at device.PCIAddress) error {
	return p.step(func() error { return p.b.chassis().SetDrain(p.name, at.String(), false) })
}

func (p *process) Remove(_ context.Context, at device.PCIAddress) error {
	return p.step(func() error { return p.b.chassis().RemovePCI(p.name, at.String()) })
}

func (p *process) Holders(context.Context, device.PCIAddress) ([]string, error) { return nil, nil }

// Claims, checkpoint, observer.

func (p *process) TellAttached(_ context.Context, l device.Lease) error {
	return p.step(func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if d, ok := p.b.device(l.FabricDevice); !ok || d.Machine != p.name || !d.Bound || d.UUID != string(l.UUID) {
			p.b.crime("a claim is told of what it cannot use: %s, %s", l.FabricDevice, l.UUID)
		}
		p.told[l.Attempt]++
		return nil
	})
}

func (p *process) Prepared(device.FabricID, device.Unit) (claims []string, known bool) {
	return nil, true
}

func (p *process) Stored(context.Context, device.Lease, device.Lease)                     {}
func (p *process) Deleted(context.Context, device.Lease)                                  {}
func (p *process) Told(context.Context, device.Lease)                                     {}
func (p *process) Acted(context.Context, device.Lease, attach.Kind, time.Duration, error) {}

// The leader.

// assign gives the node a unit of the model, for a claim.
func (a *agent) assign(model device.Model) device.Unit {
	a.b.t.Helper()
	can := a.b.leader.Capabilities()
	wanted := ""
	if can.AddressableAttach {
		word := map[device.Model]string{modelA: fabrictest.ModelA, modelB: fabrictest.ModelB}[model]
		free, err := a.b.leader.Free(a.b.t.Context(), []string{word})
		if err != nil {
			a.b.t.Fatal(err)
		}
		for _, d := range free[word].Devices {
			if wanted == "" && !a.b.taken(d.ID) {
				wanted = d.ID
			}
		}
		if wanted == "" {
			a.b.t.Fatalf("nothing of %s is free: %v", word, free)
		}
	}
	return a.want(model, wanted)
}

// taken: a unit is to become the device.
func (b *bench) taken(id string) bool {
	for _, a := range b.agents {
		for _, l := range a.p.List() {
			if l.Wanted == id || l.FabricDevice == id {
				return true
			}
		}
	}
	return false
}

// want assigns a unit that is to be a very device, where the manager takes one.
func (a *agent) want(model device.Model, wanted string) device.Unit {
	a.mu.Lock()
	a.units++
	u := device.NumberedUnit(model, a.units)
	now := time.Now()
	a.putLocked(device.Lease{
		Fabric: "0", Unit: u, Model: model, Node: a.name, NodeUID: "uid-" + a.name, Machine: a.machine, Phase: device.Assigned, Wanted: wanted,
		AcquiredAt: now, ChangedAt: now, ObjectUID: fmt.Sprint("uid-", u),
		Attempt: device.Attempt{
			Namespace: "team", Name: "claim-" + string(u), UID: "uid-" + a.name + string(u), AllocatedAt: now.Format(time.RFC3339), Node: a.name, Pool: "fabric-0", Entry: u.Entry(),
		},
	})
	a.mu.Unlock()
	a.p.loop.Poke()
	return u
}

// adopt makes a lease for a device that is attached and nobody's, as the leader does where it is told to.
func (a *agent) adopt(model device.Model, id string) device.Unit {
	a.mu.Lock()
	a.units++
	u := device.NumberedUnit(model, a.units)
	now := time.Now()
	l := device.Lease{
		Fabric: "0", Unit: u, Model: model, Node: a.name, NodeUID: "uid-" + a.name, Machine: a.machine, Phase: device.Attaching, FabricDevice: id,
		AcquiredAt: now, ChangedAt: now, ObjectUID: fmt.Sprint("uid-", u),
	}
	if a.b.leader.Capabilities().AddressableAttach {
		l.Wanted = id
	}
	a.putLocked(l)
	a.mu.Unlock()
	a.p.loop.Poke()
	return u
}

// alter changes a lease as the leader does.
func (a *agent) alter(u device.Unit, f func(*device.Lease)) {
	a.mu.Lock()
	if l, ok := a.leases[u]; ok {
		f(&l)
		a.putLocked(l)
	}
	a.mu.Unlock()
	a.p.loop.Poke()
}

// takeBack ends the claim's attempt, and release asks for the device.
func (a *agent) takeBack(u device.Unit) {
	a.alter(u, func(l *device.Lease) { l.Attempt = device.Attempt{} })
}

func (a *agent) release(u device.Unit) {
	a.alter(u, func(l *device.Lease) {
		l.Attempt = device.Attempt{}
		if l.Phase == device.Attached {
			l.Phase, l.ChangedAt, l.IdleSince = device.Releasing, time.Now(), time.Time{}
		}
	})
}

func (a *agent) lease(u device.Unit) device.Lease {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.leases[u]
}

// giveAllBack has the node give back what it has.
func (a *agent) giveAllBack() {
	a.b.t.Helper()
	a.b.until("all of "+a.name+" is given back", 90*time.Minute, func() bool {
		left := a.p.List()
		for _, l := range left {
			if l.Phase == device.Attached || !l.Attempt.IsZero() {
				a.release(l.Unit)
			}
		}
		return len(left) == 0
	})
}

// ended: the claim was told that it has its device, or the unit has failed.
func (a *agent) ended(u device.Unit) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	l := a.leases[u]
	return l.Phase == device.Failed || l.Phase == device.Attached && (l.Attempt.IsZero() || a.told[l.Attempt] > 0)
}

// serves waits until the unit can be used.
func (a *agent) serves(u device.Unit) device.Lease {
	a.b.t.Helper()
	a.b.until(string(u)+" is attached", 15*time.Minute, func() bool { return a.ended(u) })
	l := a.lease(u)
	if l.Phase != device.Attached {
		a.b.t.Fatalf("%s is %s: %+v\n%s", u, l.Phase, l.Failure, a.b.story())
	}
	return l
}

// fails waits until the unit has failed, for a reason.
func (a *agent) fails(u device.Unit, reasons ...string) {
	a.b.t.Helper()
	a.b.until(string(u)+" has failed", 15*time.Minute, func() bool { return a.ended(u) })
	l := a.lease(u)
	if l.Phase != device.Failed || !slices.Contains(reasons, l.Failure.Reason) {
		a.b.t.Fatalf("%s is %s %+v, want it failed for one of %v\n%s", u, l.Phase, l.Failure, reasons, a.b.story())
	}
}

// servesInTime is serves where there is time to ask again when it is not known what came of a call; else the unit fails, and
// nothing has come.
func (a *agent) servesInTime(u device.Unit) {
	a.b.t.Helper()
	if s := a.p.joint.NodeConfig(a.b.setting.times()).Settings; s.MaxCall+s.Settle < deadline {
		a.serves(u)
		return
	}
	a.fails(u, "AttachTimeout")
	if has := a.b.has(a.name); len(has) > 0 {
		a.b.t.Errorf("%s has %v, want nothing", a.name, has)
	}
}

// gone waits until the unit is back in the pool.
func (a *agent) gone(u device.Unit) {
	a.b.t.Helper()
	a.b.until(string(u)+" is back in the pool", 90*time.Minute, func() bool { return a.lease(u).Unit == "" })
}

// why is what the agent says of a unit.
func (a *agent) why(u device.Unit) string {
	for _, s := range a.p.loop.Status() {
		if s.Lease.Unit == u {
			return s.Rule + ": " + s.Why
		}
	}
	return ""
}

func (a *agent) status() []string {
	var out []string
	for _, s := range a.p.loop.Status() {
		out = append(out, fmt.Sprintf("%s %s %s %s %s: %s; %s", a.name, s.Lease.Unit, s.Lease.Phase, s.Lease.FabricDevice, s.Rule, s.Why, strings.TrimSpace(s.Lease.Failure.Message)))
	}
	return out
}
