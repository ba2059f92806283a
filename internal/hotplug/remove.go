// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// While a removal waits for the directory to go, it looks at every event and at least this often.
const (
	removeLookMin = 10 * time.Millisecond
	removeLookMax = time.Second
)

// Remove takes the function off the bus and returns when sysfs does not show it any more. A function
// that is not there is done. It must not be called while anything uses the device: the kernel then
// waits inside the write for ever, and nothing can take the write back.
//
// It waits at most the write timeout and returns BusyError then. Called again, it waits for the same
// write and never starts a second one, also if an earlier process began it.
func (p *PCI) Remove(ctx context.Context, addr device.PCIAddress) error {
	there, err := p.present(addr)
	if err != nil || !there {
		return err
	}
	ctx, cancel := p.deadline(ctx)
	defer cancel()
	file := p.bus("devices", addr.String(), "remove")
	job, err := p.startRemove(ctx, addr, file)
	if err != nil {
		return err
	}
	var done <-chan struct{}
	var since time.Time
	if job != nil {
		done, since = job.done, job.begun
	}
	pause := removeLookMin
	for {
		changed := p.changes.wait()
		if there, err = p.present(addr); err != nil || !there {
			return err
		}
		timer := p.clock.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return &BusyError{Operation: "remove", File: file, Since: since, Cause: context.Cause(ctx)}
		case <-done:
			done = nil
			if job.err != nil && !gone(job.err) {
				timer.Stop()
				return fmt.Errorf("remove PCI device %s: %w", addr, job.err)
			}
		case <-changed:
		case <-timer.C():
			pause = min(2*pause, removeLookMax)
		}
		timer.Stop()
	}
}

// startRemove begins the write unless one is under way; it returns nil for one of another process.
func (p *PCI) startRemove(ctx context.Context, addr device.PCIAddress, file string) (*write, error) {
	if job, ok := p.writes.running(file); ok {
		return job, nil
	}
	_, err := os.Stat(file)
	if errors.Is(err, fs.ErrNotExist) {
		// The kernel takes the file away as the first step of a removal: somebody's is under way, or
		// the function has gone by now.
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("remove PCI device %s: %w", addr, err)
	}
	pid, err := p.writerOf(ctx, file)
	if err != nil {
		return nil, fmt.Errorf("look for a removal of PCI device %s that is under way: %w", addr, err)
	}
	if pid != 0 {
		return nil, nil
	}
	job, _ := p.writes.start(file, "1", p.clock.Now())
	return job, nil
}

// InRemoval tells whether a removal of the function began and has not ended.
func (p *PCI) InRemoval(ctx context.Context, addr device.PCIAddress) (bool, error) {
	file := p.bus("devices", addr.String(), "remove")
	if _, ok := p.writes.running(file); ok {
		return true, nil
	}
	there, err := p.present(addr)
	if err != nil || !there {
		return false, err
	}
	if _, err = os.Stat(file); errors.Is(err, fs.ErrNotExist) {
		return p.present(addr)
	}
	pid, err := p.writerOf(ctx, file)
	return pid != 0, err
}
