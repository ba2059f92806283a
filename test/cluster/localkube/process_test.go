// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// newProcess starts script as a supervised process in a folder that stands for its cgroup.
func newProcess(t *testing.T, script string) (Layout, string) {
	t.Helper()
	l := Layout{State: t.TempDir()}
	if err := os.MkdirAll(l.Logs(), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := l.start(process{name: "p", cgroup: t.TempDir(), args: []string{"/bin/sh", "-c", script}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if pid, ok := l.running("p"); ok {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	return l, "p"
}

func waitEnded(t *testing.T, l Layout, name string) {
	t.Helper()
	err := waitFor(t.Context(), 10*time.Second, func(context.Context) error {
		if _, ok := l.running(name); ok {
			return errors.New("still running")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestStop(t *testing.T) {
	tests := map[string]string{
		"one that ends when asked": "exec sleep 1000",
		// The shell's child lives on in its cgroup; Stop is about the process that was started.
		"one that cleans up first": "trap 'echo cleaned; exit 0' TERM; echo ready; while :; do read -t 1 x < /dev/null || sleep 0.1; done",
	}
	for name, script := range tests {
		t.Run(name, func(t *testing.T) {
			l, p := newProcess(t, script)
			if err := l.stop(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			if pid, ok := l.running(p); ok {
				t.Errorf("pid %d still runs", pid)
			}
			if names := l.processes(); len(names) > 0 {
				t.Errorf("pid files left: %v", names)
			}
			if err := l.stop(t.Context(), p); err != nil {
				t.Errorf("stop what is stopped: %v", err)
			}
		})
	}
}

func TestRunningToldFromReusedPID(t *testing.T) {
	l, p := newProcess(t, "exec sleep 1000")
	record, err := os.ReadFile(l.pidFile(p))
	if err != nil {
		t.Fatal(err)
	}
	// A pid that is in use, by a process that began at another time.
	if err := os.WriteFile(l.pidFile(p), []byte("1 1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if pid, ok := l.running(p); ok {
		t.Errorf("pid %d taken for ours", pid)
	}
	// For the clean-up.
	if err := os.WriteFile(l.pidFile(p), record, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestEndedShowsTheLog(t *testing.T) {
	l, p := newProcess(t, "echo the reason; exit 3")
	waitEnded(t, l, p)
	if got := l.ended(p).Error(); !strings.Contains(got, "the reason") {
		t.Errorf("got %q, want the end of the log in it", got)
	}
}

func TestStartJoinsItsCgroupFirst(t *testing.T) {
	l := Layout{State: t.TempDir()}
	if err := os.MkdirAll(l.Logs(), 0o755); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(t.TempDir(), "missing")
	// Either start sees the end or the pid file leads to it; the program itself must not have run.
	_ = l.start(process{name: "p", cgroup: missing, args: []string{"/bin/sh", "-c", "echo ran; sleep 1000"}})
	waitEnded(t, l, "p")
	if log := tail(l.Log("p"), 10); strings.Contains(log, "ran") {
		t.Errorf("ran outside its cgroup: %s", log)
	}
}

func TestWaitFor(t *testing.T) {
	final := errors.New("final")
	tests := map[string]struct {
		check func(calls int) error
		limit time.Duration
		want  error
	}{
		"ends when the check is content":  {limit: time.Minute, check: func(n int) error { return map[bool]error{true: nil, false: errors.New("wait")}[n > 2] }},
		"ends at once if it is hopeless":  {limit: time.Minute, check: func(int) error { return fatalError{final} }, want: final},
		"carries the last answer at last": {limit: 2 * pollInterval, check: func(int) error { return final }, want: final},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			calls := 0
			err := waitFor(t.Context(), tc.limit, func(context.Context) error { calls++; return tc.check(calls) })
			if !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}
