// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"time"
)

// turnExpiry is how long who has the turn may be silent.
const turnExpiry = 45 * time.Second

// turns is the line of the nodes at a manager that does one thing at a time. It is a model of lease.Turn, whose code is
// about one object and tested by itself: who asked first is first, and everybody hears of it a while later.
type turns struct {
	s     *Sim
	line  []*process // the first has the turn
	heard time.Time  // when the first was last known to be there
}

// turn is the line as one process sees it.
type turn struct {
	p      *process
	want   bool
	before int
	mine   bool
}

// Want asks for the turn, or gives it up.
func (t *turn) Want(want bool) {
	if t.want == want {
		return
	}
	t.want = want
	p := t.p
	p.s.ask(p.name+" turn", func() {
		p.s.after(p.s.between("turn "+p.node, 10*time.Millisecond, time.Second), p, func() { p.s.turns.update(p) })
	})
}

// Before is what the process has heard.
func (t *turn) Before() (before int, mine bool) { return t.before, t.mine }

// update is the process' write.
func (ts *turns) update(p *process) {
	at := slices.Index(ts.line, p)
	switch {
	case p.turn.want && at < 0:
		ts.line = append(ts.line, p)
	case !p.turn.want && at >= 0:
		ts.line = slices.Delete(ts.line, at, at+1)
	}
	ts.tell()
}

// tell lets everybody hear how the line is now. One that is dead or paused says nothing, and loses its place.
func (ts *turns) tell() {
	s := ts.s
	silent := func(p *process) bool { return p.dead || p.pausedUntil.After(s.now()) }
	if len(ts.line) > 0 && !silent(ts.line[0]) {
		ts.heard = s.now()
	}
	for len(ts.line) > 0 && silent(ts.line[0]) && s.now().Sub(ts.heard) >= turnExpiry {
		ts.line, ts.heard = ts.line[1:], s.now()
	}
	for _, p := range s.procs {
		if p.dead || p.turn == nil {
			continue
		}
		before := max(slices.Index(ts.line, p), 0)
		mine := len(ts.line) > 0 && ts.line[0] == p
		if before == p.turn.before && mine == p.turn.mine {
			continue
		}
		s.after(s.between("turn heard "+p.node, 10*time.Millisecond, time.Second), p, func() {
			p.turn.before, p.turn.mine = before, mine
			p.steps.poke()
		})
	}
}

// watchOver looks after the line for as long as the cluster is there.
func (ts *turns) watchOver() {
	ts.tell()
	ts.s.after(5*time.Second, nil, ts.watchOver)
}
