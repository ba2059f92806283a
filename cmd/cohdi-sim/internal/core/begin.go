// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"fmt"
)

// Exclusively lets start begin a change of a machine when the serialization policy allows it, and the next one
// when that change is over. start returns a channel that closes then, or nil if it changed nothing.
func (c *Core) Exclusively(ctx context.Context, machine string, start func() (<-chan struct{}, error)) error {
	c.mu.Lock()
	gate, busy := c.gateLocked(machine)
	c.mu.Unlock()
	if gate != nil {
		if busy && !tryEnter(gate) {
			return ErrBusy
		}
		if !busy {
			select {
			case gate <- struct{}{}:
			case <-ctx.Done():
				return fmt.Errorf("wait for the update of %s: %w", machine, ctx.Err())
			case <-c.stop:
				return ErrStopped
			}
		}
	}
	leave := func() {
		if gate != nil {
			<-gate
		}
	}
	over, err := start()
	if err != nil || over == nil {
		leave()
		return err
	}
	go func() { // the core ends what it closes over
		<-over
		leave()
	}()
	return nil
}

// BeginAttach reserves devices and goes on by itself: over closes when they are attached. A device that is to fail
// stays reserved and says so.
func (c *Core) BeginAttach(r AttachRequest) (over <-chan struct{}, err error) {
	op, err := c.acceptAttach(r, true)
	if err != nil {
		return nil, err
	}
	return c.goOn(op, func() error {
		_, err := c.finishAttach(op)
		return err
	}), nil
}

// BeginDetach judges and goes on by itself: over closes when the device is back in the pool, or has failed to leave.
func (c *Core) BeginDetach(r DetachRequest) (over <-chan struct{}, err error) {
	op, judged, err := c.acceptDetach(r, true)
	if err != nil {
		return nil, err
	}
	return c.goOn(op, func() error { return c.finishDetach(op, judged) }), nil
}

// goOn ends an operation when it is due.
func (c *Core) goOn(op *operation, finish func() error) <-chan struct{} {
	over := make(chan struct{})
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.spawnLocked(func() {
		defer close(over)
		if !c.waitUntil(op.Due) {
			return
		}
		if err := finish(); err != nil {
			c.log.Error(err, "Operation that nobody waits for", "operation", op.ID)
		}
	}) {
		close(over)
	}
	return over
}
