// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// lockPause is how often the lock is tried while another agent of this node has it, as during a rolling
// update.
const lockPause = 500 * time.Millisecond

// lockHost returns when this process is the one agent of the node that acts. The lock is held until what it
// returns is closed, which is when the process ends, however it ends. The caller has to keep it: a file that
// nobody refers to is closed by the garbage collector.
func lockHost(ctx context.Context, clk clock.WithTicker, path string) (io.Closer, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock between two agents of this node: %w", err)
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s against another agent of this node: %w", path, err), f.Close())
		}
		timer := clk.NewTimer(lockPause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-timer.C():
		}
	}
}
