// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"container/heap"
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// Bubble is the virtual time that everything runs in (testing/synctest): it passes in Sleep only, and Wait
// returns when every other goroutine is blocked.
type Bubble struct {
	Now   func() time.Time
	Sleep func(time.Duration)
	Wait  func()
}

// Options of one run.
type Options struct {
	Seed uint64
	// Dir is where the nodes keep their files.
	Dir string
	// Verbose keeps every call in the trace, not only what a reader of a scenario needs.
	Verbose bool
}

// Sim is one cluster with its fabric, on one thread.
//
// Production code runs in goroutines, but only one event at a time lets any of them go on, and the next
// event waits until all of them are blocked again. What they ask of the world is collected meanwhile and
// handled in a fixed order, so that the same seed gives the same trace.
type Sim struct {
	bubble Bubble
	opt    Options
	began  time.Time

	queue queue
	seq   int
	dice  map[string]uint64

	mu    sync.Mutex // guards inbox: what goroutines asked for since the last event
	inbox []post

	open []*call // calls that were not answered yet

	cluster
	faults []*fault
	watch  judge

	trace []string
	count Counts
}

// Counts are what a run did.
type Counts struct {
	Steps, Calls int
	// Jobs are those of several parts, Parts how many those had.
	Jobs, Parts int
	// Faults by kind; Rules that fired, by their name; Served are the Pods that came to run.
	Faults, Rules map[string]int
	// States are those in which a device lease was written: what it says, and how its device is then.
	States       map[string]int
	Pods, Served int
}

// post is something that a goroutine asks for; run happens on the simulation's own thread.
type post struct {
	key string
	run func()
}

// event is something that happens at its time. It is left out when its process is dead, and late when the
// process is paused.
type event struct {
	at   time.Time
	seq  int
	proc *process
	run  func()
}

type queue []*event

func (q queue) Len() int      { return len(q) }
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

func (q queue) Less(i, j int) bool {
	return cmp.Or(q[i].at.Compare(q[j].at), cmp.Compare(q[i].seq, q[j].seq)) < 0
}

func (q *queue) Push(x any) {
	if e, ok := x.(*event); ok {
		*q = append(*q, e)
	}
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	*q = (*q)[:last]
	return e
}

func newSim(b Bubble, o Options) *Sim {
	return &Sim{
		bubble: b, opt: o, began: b.Now(), dice: map[string]uint64{},
		count: Counts{Faults: map[string]int{}, Rules: map[string]int{}, States: map[string]int{}},
	}
}

func (s *Sim) now() time.Time { return s.bubble.Now() }

// at makes something happen at a time, to a process or, if that is nil, to the world.
func (s *Sim) at(t time.Time, p *process, run func()) {
	s.seq++
	heap.Push(&s.queue, &event{at: t, seq: s.seq, proc: p, run: run})
}

func (s *Sim) after(d time.Duration, p *process, run func()) { s.at(s.now().Add(d), p, run) }

// ask puts something into the inbox; goroutines of production code call it.
func (s *Sim) ask(key string, run func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inbox = append(s.inbox, post{key, run})
}

// runUntil lets events happen until the time, or until done says so or something is wrong.
func (s *Sim) runUntil(t time.Time, done func() bool) {
	for s.watch.broken == nil && len(s.queue) > 0 && !s.queue[0].at.After(t) {
		if done != nil && done() {
			return
		}
		e, ok := heap.Pop(&s.queue).(*event)
		if !ok {
			return
		}
		s.happen(e)
	}
	if s.watch.broken == nil && (done == nil || !done()) {
		s.passTo(t)
	}
}

func (s *Sim) happen(e *event) {
	if e.proc != nil && e.proc.dead {
		return
	}
	if e.proc != nil && e.proc.pausedUntil.After(e.at) {
		s.at(e.proc.pausedUntil, e.proc, e.run)
		return
	}
	s.passTo(e.at)
	s.count.Steps++
	e.run()
	s.settle()
	s.judge()
}

func (s *Sim) passTo(t time.Time) {
	if d := t.Sub(s.now()); d > 0 {
		s.bubble.Sleep(d)
		s.bubble.Wait()
	}
}

// settle waits until all goroutines are blocked and does what they asked for, until they ask for nothing.
func (s *Sim) settle() {
	for {
		s.bubble.Wait()
		s.mu.Lock()
		asked := s.inbox
		s.inbox = nil
		s.mu.Unlock()
		slices.SortStableFunc(asked, func(a, b post) int { return cmp.Compare(a.key, b.key) })
		for _, p := range asked {
			p.run()
			s.bubble.Wait()
		}
		if len(asked) == 0 && !s.endGivenUp() {
			return
		}
	}
}

// endGivenUp answers the calls whose context has ended.
func (s *Sim) endGivenUp() bool {
	for _, c := range s.open {
		if c.p.dead || c.p.pausedUntil.After(s.now()) || c.ctx.Err() == nil {
			continue
		}
		c.end(nil, c.lost(context.Cause(c.ctx)))
		return true
	}
	return false
}

// rng returns a source of its own for each thing that is decided, so that leaving out one fault changes
// little else.
func (s *Sim) rng(key string) *rand.Rand {
	s.dice[key]++
	h := fnv.New64a()
	if _, err := h.Write([]byte(key)); err != nil {
		panic(err) // it never fails
	}
	return rand.New(rand.NewPCG(s.opt.Seed^h.Sum64(), s.dice[key]))
}

// between draws a time; without a seed it is always the shortest.
func (s *Sim) between(key string, least, most time.Duration) time.Duration {
	if s.opt.Seed == 0 || most <= least {
		return least
	}
	return least + time.Duration(s.rng(key).Int64N(int64(most-least)))
}

// chance draws one in n; without a seed it never comes.
func (s *Sim) chance(key string, n int) bool { return s.opt.Seed != 0 && s.rng(key).IntN(n) == 0 }

// note writes what a reader needs; detail what only the search for an error does.
func (s *Sim) note(who, format string, args ...any) {
	s.line(who, fmt.Sprintf(format, args...))
}

func (s *Sim) detail(who, format string, args ...any) {
	if s.opt.Verbose {
		s.line(who, "  "+fmt.Sprintf(format, args...))
	}
}

func (s *Sim) line(who, text string) {
	if s.opt.Verbose {
		s.trace = append(s.trace, fmt.Sprintf("%9.3f %-8s %s", s.now().Sub(s.began).Seconds(), who, text))
		return
	}
	s.trace = append(s.trace, fmt.Sprintf("%-8s%s", who, " "+text))
}

// call is a call of production code to the world, from when it is made until it is answered.
type call struct {
	s     *Sim
	p     *process
	ctx   context.Context //nolint:containedctx // it is the call's own, and looked at until the call ends
	key   string
	do    func() (any, error)
	lost  func(cause error) error
	no    func() error
	least time.Duration
	most  time.Duration

	done  chan struct{}
	ended bool
	value any
	err   error
}

// request is what the world needs to know of a call.
type request struct {
	// key names the call for faults, draws and traces: "api update lease …", "fabric attach …".
	key string
	// least and most are how long it takes.
	least, most time.Duration
	// lost makes the caller's error of an answer that does not come, no of a refusal.
	lost func(cause error) error
	no   func() error
}

// invoke makes a call from a goroutine of production code and blocks until the world answers. When the
// process died meanwhile, the goroutine ends here.
func invoke[T any](ctx context.Context, p *process, r request, do func() (T, error)) (T, error) {
	var none T
	if p.dead {
		runtime.Goexit()
	}
	c := &call{
		s: p.s, p: p, ctx: ctx, key: r.key, lost: r.lost, no: r.no, least: r.least, most: r.most,
		done: make(chan struct{}),
		do:   func() (any, error) { return do() },
	}
	p.s.ask(p.name+" "+r.key, c.begin)
	<-c.done
	if p.dead {
		runtime.Goexit()
	}
	if c.err != nil {
		if v, ok := c.value.(T); ok {
			return v, c.err
		}
		return none, c.err
	}
	v, ok := c.value.(T)
	if !ok {
		return none, fmt.Errorf("%s answered %T", r.key, c.value)
	}
	return v, nil
}

// begin decides, on the simulation's thread, what becomes of the call.
func (c *call) begin() {
	s := c.s
	if c.p.dead {
		s.orphans = append(s.orphans, c)
		return
	}
	s.count.Calls++
	s.open = append(s.open, c)
	if t, ok := c.ctx.Deadline(); ok {
		s.at(t, nil, func() {}) // to look at the context then
	}
	took := s.between(c.p.node+" "+c.key, c.least, c.most)
	f := s.armed(c)
	s.detail(c.p.name, "%s%s", c.key, f.text())
	if f == nil {
		c.takeEffect(took/2, func(v any, err error) { c.answer(took/2, v, err) })
		return
	}
	s.count.Faults[f.class()]++
	f.strike(c, took)
}

// takeEffect does it, after a while, whoever is still there to hear of it.
func (c *call) takeEffect(in time.Duration, then func(any, error)) {
	c.s.after(in, nil, func() {
		v, err := c.do()
		then(v, err)
	})
}

func (c *call) answer(in time.Duration, v any, err error) {
	c.s.after(in, c.p, func() { c.end(v, err) })
}

func (c *call) end(v any, err error) {
	if c.ended || c.p.dead {
		return
	}
	c.ended, c.value, c.err = true, v, err
	c.s.open = slices.DeleteFunc(c.s.open, func(o *call) bool { return o == c })
	if err != nil {
		c.s.detail(c.p.name, "%s: %v", firstWords(c.key), err)
	}
	close(c.done)
}

func firstWords(key string) string {
	w := strings.Fields(key)
	return strings.Join(w[:min(len(w), 3)], " ")
}
