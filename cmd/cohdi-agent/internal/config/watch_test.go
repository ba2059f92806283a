// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// swap replaces a ConfigMap's files as the kubelet does: a new directory, a link renamed over the old.
func swap(t *testing.T, dir, version, content string) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(dir, version), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, version, "config.yaml"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(version, filepath.Join(dir, "..data_tmp")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
}

func TestWatch(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "config.yaml")
	swap(t, dir, "..1", head)
	if err := os.Symlink("..data/config.yaml", file); err != nil {
		t.Fatal(err)
	}
	current, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	// Written between Load and Watch: not missed.
	swap(t, dir, "..2", head+"logging: {format: json}\n")

	ctx, cancel := context.WithCancel(t.Context())
	applied, reported, ended := make(chan Config, 9), make(chan error, 9), make(chan error, 1)
	go func() {
		ended <- Watch(ctx, file, current, func(c Config) { applied <- c }, func(err error) { reported <- err })
	}()
	if c := <-applied; c.Logging.Format != LogJSON {
		t.Errorf("first got %+v, want the file as it was when Watch began", c.Logging)
	}
	swap(t, dir, "..3", head+"logging: {format: xml}\n")
	if err := <-reported; !strings.Contains(err.Error(), `:3: logging.format: is "xml"`) {
		t.Errorf("reported %v", err)
	}
	// The same as the last good one: a change of comments is none, but the fault is gone.
	swap(t, dir, "..4", head+"# better\nlogging: {format: json}\n")
	if err := <-reported; err != nil {
		t.Errorf("reported %v of a file that is in order", err)
	}
	swap(t, dir, "..5", head+"driverRoots: [/opt]\n")
	if c := <-applied; c.Logging.Format != LogText || len(c.DriverRoots) != 1 {
		t.Errorf("then got %+v, want the file as it is now", c)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Watch ended with %v", err)
	}
	if len(applied) > 0 || len(reported) > 0 {
		t.Errorf("%d more configurations and %d more faults than there were", len(applied), len(reported))
	}
}

func TestWatchWithoutDirectory(t *testing.T) {
	err := Watch(t.Context(), filepath.Join(t.TempDir(), "none", "config.yaml"), Config{}, func(Config) {}, func(error) {})
	if err == nil || !strings.Contains(err.Error(), "watch the configuration in ") {
		t.Errorf("got %v", err)
	}
}
