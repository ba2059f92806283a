// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"time"

	"k8s.io/utils/clock"
)

// wall is the clock of a process: the virtual time, ahead or behind by what its node's clock is. Its timers
// are events of the process.
type wall struct{ p *process }

var _ clock.WithTicker = wall{}

func (w wall) Now() time.Time                  { return w.p.s.now().Add(w.p.host.skew) }
func (w wall) Since(t time.Time) time.Duration { return w.Now().Sub(t) }

func (w wall) After(d time.Duration) <-chan time.Time { return w.NewTimer(d).C() }
func (w wall) Tick(d time.Duration) <-chan time.Time  { return w.NewTicker(d).C() }

// Sleep blocks.
func (w wall) Sleep(d time.Duration) { <-w.After(d) }

// NewTimer returns a timer that the simulation fires.
func (w wall) NewTimer(d time.Duration) clock.Timer {
	t := &timer{w: w, c: make(chan time.Time, 1)}
	t.start(d)
	return t
}

// NewTicker returns a ticker that the simulation fires.
func (w wall) NewTicker(d time.Duration) clock.Ticker {
	t := &timer{w: w, c: make(chan time.Time, 1), every: d}
	t.start(d)
	return ticker{t}
}

type ticker struct{ *timer }

func (t ticker) Stop() { t.timer.Stop() }

type timer struct {
	w     wall
	c     chan time.Time
	every time.Duration
	round int // of starts, so that a stopped timer does not fire
	on    bool
}

func (t *timer) C() <-chan time.Time { return t.c }

// start is called by production code, so it only asks. The due time counts from now.
func (t *timer) start(d time.Duration) {
	p := t.w.p
	t.round++
	t.on = true
	round, due := t.round, p.s.now().Add(max(d, 0))
	p.s.ask(p.name+" timer "+due.Format(time.RFC3339Nano), func() {
		// Those that are due together fire together: which of them was made first may not matter.
		waiting, ok := p.timers[due]
		p.timers[due] = append(waiting, func() { t.fire(round) })
		if ok {
			return
		}
		p.s.at(due, p, func() {
			all := p.timers[due]
			delete(p.timers, due)
			for _, fire := range all {
				fire()
			}
		})
	})
}

func (t *timer) fire(round int) {
	if !t.on || t.round != round {
		return
	}
	t.on = t.every > 0
	select {
	case t.c <- t.w.Now():
	default:
	}
	if t.every > 0 {
		t.start(t.every)
	}
}

// Stop ends the timer.
func (t *timer) Stop() bool {
	was := t.on
	t.on = false
	return was
}

// Reset starts it anew.
func (t *timer) Reset(d time.Duration) bool {
	was := t.on
	t.start(d)
	return was
}
