// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"
)

// mostHung bounds the calls given up and not yet back: each holds a thread for as long as the kernel keeps it.
const mostHung = 3

// step is one NVML call under way.
type step struct {
	call  string
	since time.Time
}

// session is one turn at the library. It is used by the goroutine that runs the operation, and by nobody
// else once the operation is over.
type session struct {
	d    *Driver
	op   string
	ctx  context.Context //nolint:containedctx // a session is one call
	step atomic.Pointer[step]
	// gone is guarded by Driver.mu: this session was given up and must not change the driver's state.
	gone bool
	// keepsTurn is guarded by Driver.mu: too many hang, so nobody gets the turn until this one is back.
	keepsTurn bool
}

// begin announces a call to the library: from here it has callTimeout.
func (s *session) begin(call string) {
	s.step.Store(&step{call: call, since: s.d.clock.Now()})
}

// run gives op its turn and returns what it returned, or earlier: with ctx's error when ctx ends, with
// ErrHung when an NVML call does not return. op may still be in such a call when run has returned.
func (d *Driver) run(ctx context.Context, op string, do func(*session) error) error {
	if err := d.takeTurn(ctx, op); err != nil {
		return err
	}
	sctx, cancel := context.WithCancel(ctx)
	s := &session{d: d, op: op, ctx: sctx}
	s.begin(op)
	var result error
	finished, expired := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(finished)
		result = do(s)
	}()
	go d.watch(s, cancel, finished, expired)

	select {
	case <-finished:
		return result
	case <-expired:
		return d.hungError(op)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", op, context.Cause(ctx))
	}
}

func (d *Driver) takeTurn(ctx context.Context, op string) error {
	d.mu.Lock()
	full := len(d.hung) >= mostHung
	d.mu.Unlock()
	if full {
		return d.hungError(op)
	}
	timer := d.clock.NewTimer(d.callTimeout)
	defer timer.Stop()
	select {
	case <-d.turn:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: wait for an earlier NVML call: %w", op, context.Cause(ctx))
	case <-timer.C():
		return d.hungError(op)
	}
}

// watch gives the session up when one of its calls is overdue, and the turn back when it may be taken.
func (d *Driver) watch(s *session, cancel context.CancelFunc, finished <-chan struct{}, expired chan<- struct{}) {
	defer cancel()
	for {
		overdue := s.step.Load().since.Add(d.callTimeout)
		timer := d.clock.NewTimer(overdue.Sub(d.clock.Now()))
		// Looked at again with the timer running: time may have passed between the two.
		if d.clock.Now().Before(s.step.Load().since.Add(d.callTimeout)) {
			select {
			case <-finished:
				timer.Stop()
				d.turn <- struct{}{}
				return
			case <-timer.C():
				continue
			}
		}
		timer.Stop()
		select {
		case <-finished:
			d.turn <- struct{}{}
			return
		default:
		}
		cancel()
		d.giveUp(s)
		close(expired)
		<-finished
		d.comeBack(s)
		return
	}
}

func (d *Driver) giveUp(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s.gone = true
	d.hung[s] = struct{}{}
	if len(d.hung) < mostHung {
		d.turn <- struct{}{}
		return
	}
	s.keepsTurn = true
}

func (d *Driver) comeBack(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.hung, s)
	if s.keepsTurn {
		d.turn <- struct{}{}
	}
}

// hungError says what hangs and since when.
func (d *Driver) hungError(op string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	what := d.hungTextLocked()
	if what == "" {
		what = fmt.Sprintf("no turn within %s", d.callTimeout)
	}
	return fmt.Errorf("%s: %w: %s", op, ErrHung, what)
}

func (d *Driver) hungTextLocked() string {
	var calls []string
	for s := range d.hung {
		st := s.step.Load()
		calls = append(calls, fmt.Sprintf("%s has not returned since %s", st.call, st.since.UTC().Format(time.RFC3339)))
	}
	return strings.Join(calls, "; ")
}
