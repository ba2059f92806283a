// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"errors"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// errInterrupted: an Unprepare of the same claim called the work off.
var errInterrupted = errors.New("the claim is being unprepared")

// turns gives each claim one worker at a time.
type turns struct {
	mu      sync.Mutex
	byClaim map[types.UID]*turn
}

type turn struct {
	// token is held by the worker; users counts it and those who wait, so that turns are forgotten.
	token     chan struct{}
	users     int
	interrupt context.CancelCauseFunc
}

func newTurns() *turns { return &turns{byClaim: map[types.UID]*turn{}} }

// take waits until the claim's worker is done, and returns the context to work under: it also ends when
// interrupt is called. done must be called.
func (t *turns) take(ctx context.Context, claim types.UID) (work context.Context, done func(), err error) {
	t.mu.Lock()
	c := t.byClaim[claim]
	if c == nil {
		c = &turn{token: make(chan struct{}, 1)}
		t.byClaim[claim] = c
	}
	c.users++
	t.mu.Unlock()

	select {
	case c.token <- struct{}{}:
	case <-ctx.Done():
		t.leave(claim, c)
		return nil, nil, context.Cause(ctx)
	}
	work, done = t.begin(ctx, claim, c)
	return work, done, nil
}

// tryTake is take, unless there is a worker.
func (t *turns) tryTake(ctx context.Context, claim types.UID) (work context.Context, done func(), ok bool) {
	t.mu.Lock()
	if t.byClaim[claim] != nil {
		t.mu.Unlock()
		return nil, nil, false
	}
	c := &turn{token: make(chan struct{}, 1), users: 1}
	c.token <- struct{}{}
	t.byClaim[claim] = c
	t.mu.Unlock()
	work, done = t.begin(ctx, claim, c)
	return work, done, true
}

func (t *turns) begin(ctx context.Context, claim types.UID, c *turn) (context.Context, func()) {
	work, cancel := context.WithCancelCause(ctx)
	t.mu.Lock()
	c.interrupt = cancel
	t.mu.Unlock()
	return work, func() {
		t.mu.Lock()
		c.interrupt = nil
		t.mu.Unlock()
		cancel(context.Canceled)
		<-c.token
		t.leave(claim, c)
	}
}

func (t *turns) leave(claim types.UID, c *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.users--; c.users == 0 {
		delete(t.byClaim, claim)
	}
}

// interrupt calls off what the claim's worker does.
func (t *turns) interrupt(claim types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.byClaim[claim]; c != nil && c.interrupt != nil {
		c.interrupt(errInterrupted)
	}
}
