// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// lockPause is how often the lock is tried while another agent of this node has it, as during a rolling
// update.
const lockPause = 500 * time.Millisecond

// hostLock lets one agent of the node act. Every agent of the node has its file open for as long as the process lives, also
// before it has the lock and after it has given it up: by that one agent knows another.
type hostLock struct {
	path string
	file *os.File
}

// openHostLock opens the file. The caller has to keep what it returns: a file that nobody refers to is closed by the
// garbage collector.
func openHostLock(path string) (*hostLock, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, fmt.Errorf("make the plugin's directory: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock between two agents of this node: %w", err)
	}
	return &hostLock{path: path, file: f}, nil
}

// take returns when this process is the one agent of the node that acts: until release, or until the process ends, however
// it ends.
func (l *hostLock) take(ctx context.Context, clk clock.WithTicker) error {
	for {
		err := unix.Flock(int(l.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s against another agent of this node: %w", l.path, err)
		}
		timer := clk.NewTimer(lockPause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C():
		}
	}
}

// release lets the next agent act.
func (l *hostLock) release() error {
	if err := unix.Flock(int(l.file.Fd()), unix.LOCK_UN); err != nil {
		return fmt.Errorf("unlock %s for another agent of this node: %w", l.path, err)
	}
	return nil
}
