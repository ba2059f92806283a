// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// chaos lets everybody around three units of one machine do at random what they can do: the leader, people,
// the kubelet, containers, the manager, the kernel, the API server; and this process dies at any moment.
type chaos struct {
	*rig
	t     *testing.T
	rand  *rand.Rand
	q     *later
	l     *Loop
	until []time.Time // when a late effect comes at the latest, for each of rig.late
	trace []string
	kinds map[string]int
	// beside counts steps with several changing calls in flight.
	beside int
}

var chaosUnits = []device.Unit{"a100-0", "a100-1", "a100-2"}

func TestChaos(t *testing.T) {
	for name, manner := range map[string]func(*rig){
		"one call at a time": func(*rig) {},
		"calls side by side": func(r *rig) { r.parallel = true },
		"works on it":        func(r *rig) { r.jobs = true },
		"no identities":      func(r *rig) { r.jobs, r.nameless = true, true },
		"several in one job": func(r *rig) { r.jobs, r.nameless, r.batch = true, true, 2 },
	} {
		t.Run(name, func(t *testing.T) { testChaos(t, manner) })
	}
}

func testChaos(t *testing.T, manner func(*rig)) {
	t.Helper()
	parallel, batch := false, 0
	const seeds, steps = 250, 600
	kinds, calls, attaches, beside := map[string]int{}, 0, 0, 0
	for seed := range uint64(seeds) {
		c := &chaos{rig: newRig(5), t: t, rand: rand.New(rand.NewPCG(seed, 7)), kinds: kinds}
		manner(c.rig)
		parallel, batch = c.parallel, c.batch
		c.start()
		for range steps {
			c.anything()
			c.judge(seed)
		}
		c.calm(seed)
		calls += len(c.calls)
		attaches += c.deletes
		beside += c.beside
	}
	t.Logf("%d seeds of %d steps: %v, %d changing calls, %d times several in flight, %d units given back", seeds, steps, kinds, calls, beside, attaches)
	if calls < 10*seeds/4 || attaches < seeds || parallel && beside < seeds || batch > 1 && beside < 10 {
		t.Error("too little happened: the test shows nothing")
	}
}

// start is a process that begins, after another died or not.
func (c *chaos) start() {
	c.q = &later{}
	c.l = c.loop(c.q.spawn)
}

func (c *chaos) did(format string, args ...any) {
	c.trace = append(c.trace, fmt.Sprintf(format, args...))
	c.kinds[strings.Fields(c.trace[len(c.trace)-1])[0]]++
}

func (c *chaos) judge(seed uint64) {
	c.t.Helper()
	attaches, detaches := c.l.inFlight()
	if attaches+detaches > 1 {
		c.beside++
	}
	if attaches > 0 && detaches > 0 || !c.parallel && (attaches > 1 || detaches > max(c.batch, 1)) {
		c.crimes = append(c.crimes, fmt.Sprintf("%d attaches and %d detaches in flight", attaches, detaches))
	}
	if len(c.crimes) > 0 {
		c.t.Fatalf("seed %d: %v\n%s", seed, c.crimes, strings.Join(c.trace, "\n"))
	}
}

// anything is one step of the world. The loop's own are the most frequent.
func (c *chaos) anything() {
	u := chaosUnits[c.rand.IntN(len(chaosUnits))]
	switch n := c.rand.IntN(1000); {
	case n < 350:
		c.l.Step(c.t.Context())
	case n < 750:
		if len(c.q.queue) > 0 {
			before := len(c.story)
			c.q.run(c.rand.IntN(len(c.q.queue)))
			c.did("acted %v, attached %v", c.story[before:], c.attached())
		}
	case n < 840:
		c.pass(time.Duration(c.rand.IntN(15)) * time.Second)
	case n < 920:
		c.leader(u)
	case n < 970:
		c.kubelet(u)
	case n < 990:
		c.faults(u)
	case n < 997:
		for len(c.q.queue) > 0 && c.rand.IntN(2) == 0 {
			c.q.run(0) // what had left the process takes effect
		}
		c.did("crash")
		c.start()
	default:
		c.taken(u)
	}
}

// pass lets time pass; what the manager does late is done before a call counts as settled.
func (c *chaos) pass(d time.Duration) {
	now := c.clock.Now().Add(d)
	for len(c.until) < len(c.late) {
		c.until = append(c.until, c.clock.Now().Add(openFor()/2))
	}
	for len(c.late) > 0 && (c.rand.IntN(3) == 0 || now.After(c.until[0])) {
		c.did("late effect")
		c.late[0]()
		c.late, c.until = c.late[1:], c.until[1:]
	}
	if c.rand.IntN(3) == 0 {
		c.finish()
	}
	c.clock.SetTime(now)
}

func (c *chaos) leader(u device.Unit) {
	l, ok := c.leases[u]
	switch {
	case !ok || l.Attempt.IsZero() && !l.Deleting && l.Phase != device.Failed && c.rand.IntN(3) == 0:
		c.did("assign %s", u)
		c.assign(u, fmt.Sprintf("c%d", len(c.trace)))
	case !l.Attempt.IsZero() && (l.Phase == device.Failed || c.rand.IntN(6) == 0):
		c.did("clear %s", u)
		c.clear(u)
	case l.Idle():
		c.did("release %s", u)
		c.release(u)
	case c.rand.IntN(20) == 0:
		c.did("delete %s", u)
		c.change(u, func(l *device.Lease) { l.Deleting = true })
	}
}

func (c *chaos) kubelet(u device.Unit) {
	l := c.leases[u]
	g := c.of(l)
	switch {
	case c.prepared[u]:
		c.did("unprepare %s", u)
		delete(c.prepared, u)
		if g != nil {
			delete(c.open, g.at)
		}
	case l.Phase != device.Attached || g == nil || !g.seen || g.draining:
	case c.told[l.Attempt] > 0:
		c.did("prepare %s", u)
		c.prepared[u] = true
		c.open[g.at] = []string{"pid 1"}
	case l.Idle() && c.rand.IntN(3) == 0:
		c.did("prepare ready %s", u)
		c.prepared[u] = true
		c.change(u, func(l *device.Lease) { l.PreparedFor = []string{"uid-x"} })
	case c.rand.IntN(4) == 0:
		c.did("known %v", !c.known)
		c.known = !c.known
	}
}

func (c *chaos) of(l device.Lease) *gpu {
	for _, g := range c.chassis {
		if l.FabricDevice != "" && g.id == l.FabricDevice && g.attached {
			return g
		}
	}
	return nil
}

func (c *chaos) faults(device.Unit) {
	switch c.rand.IntN(4) {
	case 0:
		a := []answer{lost, inVain, tardy, busy, rejected, {fault: device.FaultNoCapacity}}[c.rand.IntN(6)]
		c.did("answer %+v", a)
		c.answers = append(c.answers, a)
	case 1:
		c.did("store fails")
		c.storeErr = append(c.storeErr, []error{errors.New("timeout"), errAfter}[c.rand.IntN(2)])
	case 2:
		c.slow = !c.slow
		c.did("slow %v", c.slow)
	case 3:
		c.listErr = nil
		if c.rand.IntN(2) == 0 {
			c.listErr = &device.Fault{Class: device.FaultUnreachable, Op: "list"}
		}
		c.did("list %v", c.listErr)
	}
}

// taken: a person takes a device that nobody has open.
func (c *chaos) taken(u device.Unit) {
	g := c.of(c.leases[u])
	if g == nil || len(c.open[g.at]) > 0 || c.prepared[u] || len(c.q.queue)+len(c.late) > 0 { // what is under way cannot know
		return
	}
	c.did("taken %s of %s", g.id, u)
	*g = gpu{id: g.id, uuid: g.uuid, at: g.at}
}

// calm ends all trouble and every claim. Whatever happened before, everything is given back.
func (c *chaos) calm(seed uint64) {
	c.t.Helper()
	c.did("calm")
	c.answers, c.storeErr, c.listErr, c.known = nil, nil, nil, true
	for _, effect := range c.late {
		effect()
	}
	c.late = nil
	clear(c.prepared)
	clear(c.open)
	for range 3000 {
		for _, u := range slices.Sorted(maps.Keys(c.leases)) {
			switch l := c.leases[u]; {
			case !l.Attempt.IsZero():
				c.clear(u)
			case l.Idle():
				c.release(u)
			}
		}
		c.finish()
		wake := c.l.Step(c.t.Context())
		switch {
		case len(c.q.queue) > 0:
			before := len(c.story)
			c.q.run(0)
			c.did("acted %v, attached %v", c.story[before:], c.attached())
		case len(c.leases) == 0:
			if ids := c.attached(); len(ids) > 0 {
				c.t.Fatalf("seed %d: nobody's: %v\n%s", seed, ids, strings.Join(c.trace, "\n"))
			}
			c.judge(seed)
			return
		case wake.After(c.clock.Now()):
			c.clock.SetTime(wake)
		default:
			c.clock.Step(time.Second)
		}
		c.judge(seed)
	}
	c.t.Fatalf("seed %d: no rest: %+v\n%s", seed, c.l.Status(), strings.Join(c.trace, "\n"))
}
