// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	thisNode    = "n1"
	thisMachine = device.Machine("m-n1")
	fabricModel = "NVIDIA-A100"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func settings() attach.Settings {
	return attach.Settings{
		Deadline: 4 * time.Minute, MaxCall: 30 * time.Second, Settle: time.Minute, Look: 5 * time.Second, Appear: 3 * time.Second,
		Retry: time.Second, Busy: 5 * time.Second, Hold: 10 * time.Second, Resync: 24 * time.Hour, RetryAfter: 5 * time.Minute,
	}
}

// openFor is how long a call may take effect after it was sent.
func openFor() time.Duration { return settings().MaxCall + settings().Settle }

// gpu is one GPU of the chassis.
type gpu struct {
	id       string
	uuid     device.GPUUUID
	at       device.PCIAddress
	attached bool
	onBus    bool
	driver   bool
	seen     bool // by NVML
	draining bool
	off      bool // taken off the bus: it comes back by a rescan only
}

// answer is how the manager answers one changing call.
type answer struct {
	fault  device.FaultClass // empty is done
	effect bool
	late   bool // the effect comes when the test says so
}

var (
	done     = answer{effect: true}
	lost     = answer{fault: device.FaultUnknown, effect: true}
	inVain   = answer{fault: device.FaultUnknown}
	tardy    = answer{fault: device.FaultUnknown, late: true}
	busy     = answer{fault: device.FaultBusy}
	rejected = answer{fault: device.FaultRejected}
)

// job is what the manager works on.
type job struct {
	effect          func() error
	over, suspended bool
	err             error
}

// rig is the world around a Loop: stores, the manager and its chassis, the host. It implements all that
// the Loop needs, holds the state that survives a crash, and judges what is done to it.
type rig struct {
	clock *clocktesting.FakeClock

	mu       sync.Mutex
	leases   map[device.Unit]device.Lease
	version  int
	chassis  []*gpu
	answers  []answer // to the next changing calls; done when there are none left
	late     []func()
	slow     bool // devices do not come by themselves
	parallel bool // the manager takes several calls at once
	jobs     bool // the manager works on what it was asked for until finish is called
	nameless bool // the manager gives no GPU UUIDs
	batch    int  // how many detaches the manager takes in one call
	q        later
	work     map[string]*job
	listErr  error
	hostErr  error
	storeErr []error // of the next writes; one that wraps errAfter took effect
	tellErr  error
	told     map[device.Attempt]int
	prepared map[device.Unit]bool
	known    bool
	open     map[device.PCIAddress][]string

	calls   []string   // changing calls to the manager
	asked   [][]string // what the machine had before, by what the attaches said
	acted   []string   // ended actions
	story   []string   // the same with their units
	crimes  []string
	ops     int // operations so far, and where this process dies
	dieAt   int
	after   bool // it dies after the effect
	dead    bool
	deletes int
}

var (
	errDead  = errors.New("this process is dead")
	errAfter = errors.New("the answer was lost")
)

func newRig(gpus int) *rig {
	r := &rig{
		clock: clocktesting.NewFakeClock(start), leases: map[device.Unit]device.Lease{}, told: map[device.Attempt]int{},
		prepared: map[device.Unit]bool{}, known: true, open: map[device.PCIAddress][]string{}, work: map[string]*job{},
	}
	for i := range gpus {
		r.chassis = append(r.chassis, &gpu{
			id: fmt.Sprintf("d%d", i), uuid: device.GPUUUID(fmt.Sprintf("GPU-00000000-0000-4000-8000-%012d", i)),
			at: device.PCIAddress{Bus: uint8(0x3b + i)},
		})
	}
	return r
}

// loop returns a process that starts now.
func (r *rig) loop(spawn func(func())) *Loop {
	r.dead, r.dieAt, r.ops = false, 0, 0
	s := settings()
	s.Parallel, s.Arrival, s.Batch = r.parallel, r.nameless, r.batch
	cfg := Config{
		Node: thisNode, Machine: thisMachine, Fabric: "0", Settings: s,
		FreshFor: 5 * time.Second, Resync: 10 * time.Minute, CallDeadline: time.Minute, LocalDeadline: 10 * time.Second,
		Leases: r, Manager: r, Host: r, Claims: r, Prepared: r, Observer: r,
		Model: func(m device.Model) string { return map[device.Model]string{"a100": fabricModel}[m] },
		Clock: r.clock, Spawn: spawn,
	}
	if r.batch > 1 {
		cfg.Batcher = r
	}
	return New(cfg)
}

func inline(f func()) { f() }

// op counts an operation that changes something, and is where a process dies: before or after its effect.
func (r *rig) op(effect func() error) error {
	if r.dead {
		return errDead
	}
	r.ops++
	if r.ops == r.dieAt && !r.after {
		r.dead = true
		return errDead
	}
	err := effect()
	if r.ops == r.dieAt {
		r.dead = true
		return errDead
	}
	return err
}

// The device leases.

func (r *rig) List() []device.Lease {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.leases))
}

func (r *rig) Update(_ context.Context, l device.Lease) (device.Lease, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.op(func() error {
		var fails error
		if len(r.storeErr) > 0 {
			fails, r.storeErr = r.storeErr[0], r.storeErr[1:]
		}
		if fails != nil && !errors.Is(fails, errAfter) {
			return fails
		}
		if have, ok := r.leases[l.Unit]; !ok || have.Version != l.Version {
			return fmt.Errorf("conflict: version %q, stored %q", l.Version, have.Version)
		}
		l = r.put(l)
		return fails
	})
	return l, err
}

// put stores a lease as its writers do: the leader, too.
func (r *rig) put(l device.Lease) device.Lease {
	r.version++
	l.Version = fmt.Sprint(r.version)
	if l.FabricDevice != "" {
		for u, other := range r.leases {
			if u != l.Unit && other.FabricDevice == l.FabricDevice {
				r.crimes = append(r.crimes, fmt.Sprintf("%s is taken for %s and for %s", l.FabricDevice, u, l.Unit))
			}
		}
	}
	for _, g := range r.chassis {
		if g.id == l.FabricDevice && l.UUID != "" && g.uuid != l.UUID {
			r.crimes = append(r.crimes, fmt.Sprintf("%s is taken for %s, and is %s", g.id, l.UUID, g.uuid))
		}
	}
	r.leases[l.Unit] = l
	return l
}

func (r *rig) Delete(_ context.Context, l device.Lease) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.op(func() error {
		have, ok := r.leases[l.Unit]
		switch {
		case !ok:
			return nil
		case have.Version != l.Version:
			return errors.New("conflict")
		}
		delete(r.leases, l.Unit)
		r.deletes++
		return nil
	})
}

// The manager.

func (r *rig) ListAttached(_ context.Context, m device.Machine) ([]device.OnFabric, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []device.OnFabric
	err := r.op(func() error {
		for _, g := range r.chassis {
			if g.attached {
				d := device.OnFabric{ID: g.id, Machine: m, Model: fabricModel, UUID: g.uuid, Health: device.HealthOK}
				if r.nameless {
					d.UUID = ""
				}
				list = append(list, d)
			}
		}
		return r.listErr
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// answerNext carries out one changing call as the manager answers it.
func (r *rig) answerNext(call string, effect func() error) error {
	return r.op(func() error {
		r.calls = append(r.calls, call)
		a := done
		if len(r.answers) > 0 {
			a, r.answers = r.answers[0], r.answers[1:]
		}
		switch {
		case a.late:
			r.late = append(r.late, func() { _ = effect() })
		case a.effect:
			if err := effect(); err != nil {
				return err
			}
		}
		if a.fault != "" {
			return &device.Fault{Class: a.fault, Op: call}
		}
		return nil
	})
}

func (r *rig) Attach(_ context.Context, c Call) (Work, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, c.Before)
	if c.Machine != thisMachine || c.Model != fabricModel {
		r.crimes = append(r.crimes, fmt.Sprintf("attach of %q to machine %q", c.Model, c.Machine))
	}
	return r.begin("attach", func() error {
		i := slices.IndexFunc(r.chassis, func(g *gpu) bool { return !g.attached && (c.Device == "" || g.id == c.Device) })
		if i < 0 {
			return &device.Fault{Class: device.FaultNoCapacity, Op: "attach"}
		}
		g := r.chassis[i]
		g.attached, g.onBus, g.driver = true, !r.slow, !r.slow
		return nil
	})
}

// begin does it at once, or becomes work that somebody does later.
func (r *rig) begin(call string, effect func() error) (Work, error) {
	if !r.jobs {
		return Work{}, r.answerNext(call, effect)
	}
	handle := fmt.Sprintf("job-%d", len(r.work)+1)
	err := r.answerNext(call, func() error {
		r.work[handle] = &job{effect: effect}
		return nil
	})
	if err != nil || r.work[handle] == nil {
		return Work{}, err
	}
	return Work{Handle: handle, PollAfter: time.Second}, nil
}

func (r *rig) Poll(_ context.Context, k attach.Kind, c Call, handle string) (Work, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if (k == attach.SendDetach) != (c.Device != "" && len(c.Before) == 0 && c.Before == nil) {
		r.crimes = append(r.crimes, fmt.Sprintf("poll of %s for %+v", k, c))
	}
	var w Work
	err := r.op(func() error {
		j := r.work[handle]
		if part := r.work[handle+" "+c.Device]; part != nil {
			j = part
		}
		switch {
		case j == nil:
			w.Fault = &device.Fault{Class: device.FaultUnknown, Op: "poll " + handle}
		case j.suspended:
			w = Work{Handle: handle, PollAfter: time.Second, Fault: &device.Fault{Class: device.FaultSuspended, Op: "poll " + handle}}
		case !j.over:
			w = Work{Handle: handle, PollAfter: time.Second}
		default:
			w.Fault = fault(handle, j.err)
		}
		return nil
	})
	return w, err
}

// finish ends the work that was begun.
func (r *rig) finish() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, j := range r.work {
		if !j.over {
			j.over, j.suspended, j.err = true, false, j.effect()
		}
	}
}

func (r *rig) Detach(_ context.Context, c Call) (Work, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.begin("detach "+c.Device, r.detaching(c))
}

// DetachAll is one call, answered once; each device's part of the work is by itself.
func (r *rig) DetachAll(_ context.Context, calls []Call) []Answer {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []string
	for _, c := range calls {
		ids = append(ids, c.Device)
	}
	if len(ids) > r.batch || len(ids) < 2 {
		r.crimes = append(r.crimes, fmt.Sprintf("one call detaches %v", ids))
	}
	handle, begun := fmt.Sprintf("job-%d", len(r.work)+1), false
	err := r.answerNext("detach "+strings.Join(ids, " "), func() error {
		begun = true
		for _, c := range calls {
			r.work[handle+" "+c.Device] = &job{effect: r.detaching(c)}
		}
		return nil
	})
	answers := make([]Answer, len(calls))
	for i := range calls {
		if answers[i].Err = err; err == nil && begun {
			answers[i].Work = Work{Handle: handle, PollAfter: time.Second}
		}
	}
	return answers
}

// detaching is how a device leaves.
func (r *rig) detaching(c Call) func() error {
	id := c.Device
	if id == "" || c.Model != fabricModel {
		r.crimes = append(r.crimes, fmt.Sprintf("detach of %q, %q", id, c.Model))
	}
	is := func(g *gpu) bool { return g.id == id && g.attached }
	was := slices.ContainsFunc(r.chassis, is)
	return func() error {
		i := slices.IndexFunc(r.chassis, is)
		if i < 0 || !was { // a manager does not keep a call for what was not there
			return &device.Fault{Class: device.FaultNotFound, Op: "detach " + id}
		}
		g := r.chassis[i]
		for u, l := range r.leases {
			if l.FabricDevice == id && r.prepared[u] {
				r.crimes = append(r.crimes, "detached while prepared: "+id)
			}
		}
		if g.onBus && g.driver {
			r.crimes = append(r.crimes, "detached on the bus: "+id)
		}
		if len(r.open[g.at]) > 0 {
			r.crimes = append(r.crimes, "detached while open: "+id)
		}
		g.attached, g.onBus, g.driver, g.seen, g.draining, g.off = false, false, false, false, false, false
		return nil
	}
}

// The host.

func (r *rig) Observe(context.Context) (Sight, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dead {
		return Sight{}, errDead
	}
	var s Sight
	for _, g := range r.chassis {
		if g.onBus {
			f := attach.Function{Address: g.at}
			if g.driver {
				f.Driver = "nvidia"
			}
			s.Bus = append(s.Bus, f)
		}
		if g.seen {
			s.NVML = append(s.NVML, attach.GPU{Address: g.at, UUID: g.uuid, Draining: g.draining})
		}
	}
	return s, r.hostErr
}

func (r *rig) host(f func()) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.op(func() error { f(); return nil })
}

func (r *rig) RescanAll(ctx context.Context) error { return r.Rescan(ctx, device.PCIAddress{}) }

func (r *rig) Rescan(context.Context, device.PCIAddress) error {
	return r.host(func() {
		for _, g := range r.chassis {
			if g.attached && !g.onBus {
				g.onBus, g.driver, g.off = true, true, false
			}
		}
	})
}

func (r *rig) Bind(_ context.Context, a device.PCIAddress) error {
	return r.atAddress(a, func(g *gpu) error { g.driver = true; return nil })
}

func (r *rig) Discover(context.Context) error {
	return r.host(func() {
		for _, g := range r.chassis {
			g.seen = g.onBus && g.driver
		}
	})
}

func (r *rig) Drain(_ context.Context, a device.PCIAddress) error {
	return r.atAddress(a, func(g *gpu) error {
		if len(r.open[a]) > 0 {
			return errors.New("in use")
		}
		g.draining = true
		return nil
	})
}

func (r *rig) Undrain(_ context.Context, a device.PCIAddress) error {
	return r.atAddress(a, func(g *gpu) error { g.draining = false; return nil })
}

func (r *rig) Remove(_ context.Context, a device.PCIAddress) error {
	return r.atAddress(a, func(g *gpu) error {
		if len(r.open[a]) > 0 {
			r.crimes = append(r.crimes, "removed while open: "+g.id)
		}
		g.onBus, g.driver, g.seen, g.draining, g.off = false, false, false, false, true
		return nil
	})
}

func (r *rig) Holders(_ context.Context, a device.PCIAddress) ([]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dead {
		return nil, errDead
	}
	return r.open[a], nil
}

// atAddress does something to the GPU that is there.
func (r *rig) atAddress(a device.PCIAddress, f func(*gpu) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.op(func() error {
		for _, g := range r.chassis {
			if g.at == a && g.onBus {
				return f(g)
			}
		}
		return fmt.Errorf("nothing is at %s", a)
	})
}

// Claims, checkpoint, observer.

func (r *rig) TellAttached(_ context.Context, l device.Lease) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tellErr != nil {
		return r.tellErr
	}
	return r.op(func() error {
		i := slices.IndexFunc(r.chassis, func(g *gpu) bool { return g.id == l.FabricDevice })
		if i < 0 || !r.chassis[i].attached || !r.chassis[i].seen || r.chassis[i].draining || r.chassis[i].uuid != l.UUID {
			r.crimes = append(r.crimes, "a claim is told of what it cannot use: "+l.FabricDevice)
		}
		r.told[l.Attempt]++
		return nil
	})
}

func (r *rig) Prepared(_ device.FabricID, u device.Unit) (claims []string, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.prepared[u] && r.known {
		claims = []string{"claim team/c"}
	}
	return claims, r.known
}

func (r *rig) Stored(context.Context, device.Lease, device.Lease) {}
func (r *rig) Deleted(context.Context, device.Lease)              {}
func (r *rig) Told(context.Context, device.Lease)                 {}
func (r *rig) Acted(_ context.Context, l device.Lease, k attach.Kind, _ time.Duration, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	word := string(k)
	if err != nil {
		word += "!"
	}
	r.acted = append(r.acted, word)
	r.story = append(r.story, fmt.Sprintf("%s %s (%s %s)", l.Unit, word, l.Phase, l.FabricDevice))
}

// The leader, the kubelet.

func attemptFor(u device.Unit, claim string) device.Attempt {
	return device.Attempt{Namespace: "team", Name: claim, UID: "uid-" + claim, AllocatedAt: "2026-01-02T03:04:00Z", Node: thisNode, Pool: "fabric-0", Entry: u.Entry()}
}

func (r *rig) assign(u device.Unit, claim string) device.Attempt {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := attemptFor(u, claim)
	l, ok := r.leases[u]
	if !ok {
		l = device.Lease{
			Fabric: "0", Unit: u, Model: "a100", Node: thisNode, NodeUID: "uid-n1", Machine: thisMachine, Phase: device.Assigned,
			ChangedAt: r.clock.Now(), ObjectUID: fmt.Sprintf("o%d", r.version),
		}
		if r.nameless {
			l.Wanted = "d" + string(u[len(u)-1])
		}
	}
	l.Attempt, l.AcquiredAt, l.IdleSince, l.HeldBy = a, r.clock.Now(), time.Time{}, ""
	r.put(l)
	return a
}

func (r *rig) change(u device.Unit, f func(*device.Lease)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.leases[u]
	f(&l)
	r.put(l)
}

func (r *rig) clear(u device.Unit) {
	r.change(u, func(l *device.Lease) { l.Attempt = device.Attempt{} })
}

func (r *rig) release(u device.Unit) {
	r.change(u, func(l *device.Lease) {
		l.Phase, l.ChangedAt, l.IdleSince = device.Releasing, r.clock.Now(), time.Time{}
	})
}

func (r *rig) lease(u device.Unit) device.Lease {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.leases[u]
}

func (r *rig) attached() (ids []string) {
	for _, g := range r.chassis {
		if g.attached {
			ids = append(ids, g.id)
		}
	}
	return ids
}

// step steps the loop, and then does what was to be done beside it.
func (r *rig) step(t *testing.T, l *Loop) time.Time {
	t.Helper()
	wake := l.Step(t.Context())
	for len(r.q.queue) > 0 {
		r.q.run(0)
	}
	return wake
}

// settle steps the loop and lets time pass to where it wants to be woken, until it waits for others.
func (r *rig) settle(t *testing.T, l *Loop) {
	t.Helper()
	for range 500 {
		n := len(r.acted)
		wake := r.step(t, l)
		switch {
		case r.dead:
			return
		case len(r.acted) > n:
		case wake.IsZero() || wake.After(r.clock.Now().Add(settings().Resync/2)): // only what is idle is looked at, now and then
			return
		case wake.After(r.clock.Now()):
			r.finish()
			r.clock.SetTime(wake)
		}
	}
	t.Fatalf("no rest: %v, %+v", r.acted[max(0, len(r.acted)-20):], l.Status())
}

// until steps the loop, and lets time pass when it waits, until something is so.
func (r *rig) until(t *testing.T, l *Loop, so func() bool) {
	t.Helper()
	for range 500 {
		if so() {
			return
		}
		n := len(r.acted)
		if wake := r.step(t, l); len(r.acted) == n && wake.After(r.clock.Now()) {
			r.clock.SetTime(wake)
		}
	}
	t.Fatalf("it never came to that: %v, %+v", r.acted[max(0, len(r.acted)-20):], l.Status())
}

// innocent fails the test if something was done that must never be.
func (r *rig) innocent(t *testing.T) {
	t.Helper()
	for _, c := range r.crimes {
		t.Error(c)
	}
}
