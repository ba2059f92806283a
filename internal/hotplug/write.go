// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// write is one write into a sysfs file. The kernel acts inside the system call and may not return from
// it for minutes, or ever.
type write struct {
	begun time.Time
	done  chan struct{}
	err   error // valid once done is closed
}

// writers allows one write per file at a time.
type writers struct {
	mu      sync.Mutex
	pending map[string]*write
}

// start begins a write, or returns the one that has not ended yet.
func (w *writers) start(path, value string, now time.Time) (_ *write, started bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if running, ok := w.pending[path]; ok {
		return running, false
	}
	if w.pending == nil {
		w.pending = make(map[string]*write)
	}
	started = true
	job := &write{begun: now, done: make(chan struct{})}
	w.pending[path] = job
	go func() {
		job.err = writeFile(path, value)
		w.mu.Lock()
		delete(w.pending, path)
		w.mu.Unlock()
		close(job.done)
	}()
	return job, started
}

// running returns the write into the file that has not ended yet.
func (w *writers) running(path string) (*write, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	job, ok := w.pending[path]
	return job, ok
}

// writeFile writes without creating or truncating: sysfs knows neither, and a file that we created would
// look like success.
func writeFile(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(value); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("close %s: %w", path, err)
	}
	return nil
}
