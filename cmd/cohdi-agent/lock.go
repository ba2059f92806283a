// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// lockPause is how often the lock is tried while another agent of this node has it, as during a rolling
// update.
const lockPause = 500 * time.Millisecond

// lockHost returns when this process is the one agent of the node that acts. The kernel lets go of the lock
// when the process ends, however it ends.
func lockHost(ctx context.Context, clk clock.WithTicker, path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("open the lock between two agents of this node: %w", err)
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil // held, and f kept open, until the process ends
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s against another agent of this node: %w", path, err)
		}
		timer := clk.NewTimer(lockPause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(ctx.Err(), f.Close())
		case <-timer.C():
		}
	}
}
