// SPDX-License-Identifier: Apache-2.0

package hostroot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
)

// controlFile makes an empty control file and remembers what a write to it does. The file of a former run is kept as it is: a
// write that came while the simulator was down is acted on by Watch.
func (r *Root) controlFile(path string, act func(string) error) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		if err := write(path, ""); err != nil {
			return err
		}
	}
	r.act[path] = act
	return nil
}

// Watch acts on writes to control files until ctx ends, in the order in which they were made.
func (r *Root) Watch(ctx context.Context) error {
	defer r.watcher.Close()
	r.mu.Lock()
	paths := make([]string, 0, len(r.act))
	for p := range r.act {
		paths = append(paths, p)
	}
	r.mu.Unlock()
	slices.Sort(paths)
	for _, p := range paths {
		if !strings.HasSuffix(p, "/power") { // shows its state, so it is never empty
			r.handle(ctx, p)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, ok := <-r.watcher.Events:
			if !ok {
				return errors.New("watch host root: the watcher ended")
			}
			if e.Has(fsnotify.Write) || e.Has(fsnotify.Create) {
				r.handle(ctx, e.Name)
			}
		case err, ok := <-r.watcher.Errors:
			if !ok {
				return errors.New("watch host root: the watcher ended")
			}
			klog.FromContext(ctx).Error(err, "Writes to control files may have been lost", "machine", r.machine)
		}
	}
}

// handle empties a control file before it acts on what was in it, so that a write that comes later is not lost.
func (r *Root) handle(ctx context.Context, path string) {
	r.mu.Lock()
	act := r.act[path]
	// Under the lock, so that a half-shown state is not taken for somebody's wish.
	data, err := os.ReadFile(path)
	own, shows := r.own[path]
	r.mu.Unlock()
	if act == nil || err != nil || trimmed(data) == "" || shows && string(data) == own {
		return
	}
	if !strings.HasSuffix(path, "/power") {
		if err := os.Truncate(path, 0); err != nil {
			return // the device has gone, and the file with it
		}
	}
	// The kernel answers the writer with an error; a file cannot, so it is only logged.
	if err := act(trimmed(data)); err != nil {
		klog.FromContext(ctx).Info("Write to a control file had no effect", "machine", r.machine, "file", path, "content", trimmed(data), "reason", err.Error())
	}
}

func enabled(s string) bool { return s != "0" }

func (r *Root) rescan(s, bus string) error {
	if !enabled(s) {
		return nil
	}
	return r.kernel.Rescan(r.machine, bus)
}

func (r *Root) remove(s, address string) error {
	if !enabled(s) {
		return nil
	}
	return r.kernel.RemovePCI(r.machine, address)
}

func (r *Root) probe(address string) error {
	if address == "" {
		return nil
	}
	return r.kernel.Bind(r.machine, address)
}

func (r *Root) slotPower(slot int, s string) error {
	if s != "0" && s != "1" {
		return fmt.Errorf("power of slot %d: %q is neither 0 nor 1", slot, s)
	}
	return r.kernel.SlotPower(r.machine, slot, s == "1")
}

var _ Kernel = (*core.Core)(nil)
