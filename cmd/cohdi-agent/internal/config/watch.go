// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"

	"github.com/fsnotify/fsnotify"
)

// Watch follows the file until ctx ends and calls apply with each configuration that differs from the
// one before, the first from current. A faulty file is reported once and changes nothing: the last good
// one holds. When it is in order again, nil is reported, before apply. What was written between reading current
// and the call of Watch is not missed.
//
// The directory is watched, not the file: the kubelet replaces a ConfigMap's files by swapping a
// symbolic link beside them, and editors by renaming.
func Watch(ctx context.Context, file string, current Config, apply func(Config), report func(error)) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch the configuration: %w", err)
	}
	defer w.Close()
	dir := filepath.Dir(file)
	if err := w.Add(dir); err != nil {
		return fmt.Errorf("watch the configuration in %s: %w", dir, err)
	}
	last := ""
	tell := func(err error) {
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != last {
			report(err)
		}
		last = text
	}
	look := func() {
		next, err := Load(file)
		if tell(err); err != nil {
			return
		}
		if !reflect.DeepEqual(current, next) {
			current = next
			apply(next)
		}
	}
	look()
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-w.Events:
			if !open {
				return errors.New("watch the configuration: the watch has ended")
			}
			look()
		case err, open := <-w.Errors:
			if !open {
				return errors.New("watch the configuration: the watch has ended")
			}
			// An overflow lost events: look.
			tell(fmt.Errorf("watch the configuration: %w", err))
			look()
		}
	}
}
