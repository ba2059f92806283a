// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	pollInterval = 50 * time.Millisecond
	// stopGrace is how long a process may take to end by itself.
	stopGrace = 10 * time.Second
	// API server and etcd wait for their clients' watches, which never end; a crash must not hurt either.
	servingGrace = time.Second
)

// joinAndExec moves the shell into the cgroup named first and becomes the command that follows:
// the only way that works on cgroup v1 and v2 and leaves no moment in which a child escapes.
const joinAndExec = `echo $$ > "$1" || exit 1; shift; exec "$@"`

// process is a supervised program, known by its pid file.
type process struct {
	name   string
	cgroup string // folder that has a cgroup.procs
	args   []string
	env    []string
}

// start runs p detached from the caller and records its pid. A process that runs already is left alone.
func (l Layout) start(p process) error {
	if _, ok := l.running(p.name); ok {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(l.pidFile(p.name)), 0o755); err != nil {
		return fmt.Errorf("create folder for pid files: %w", err)
	}
	log, err := os.OpenFile(l.Log(p.name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open log of %s: %w", p.name, err)
	}
	defer log.Close()
	args := append([]string{"-c", joinAndExec, "sh", filepath.Join(p.cgroup, "cgroup.procs")}, p.args...)
	cmd := exec.Command("/bin/sh", args...) //nolint:noctx // it outlives the caller on purpose
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err = cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	pid := cmd.Process.Pid
	// Looked up before it is reaped: until then even one that has ended is there.
	started, _, err := startTime(pid)
	// Reap it while we live, so that a dead one is seen as dead; the outcome shows in pid file and log.
	go func() { _ = cmd.Wait() }() //nolint:errcheck // see above
	if err != nil {
		return fmt.Errorf("start %s: it ended at once, see %s: %w", p.name, l.Log(p.name), err)
	}
	record := fmt.Sprintf("%d %s\n", pid, started)
	if err := os.WriteFile(l.pidFile(p.name), []byte(record), 0o644); err != nil {
		return fmt.Errorf("record pid of %s: %w", p.name, err)
	}
	return nil
}

// running returns the pid of the named process if it lives.
func (l Layout) running(name string) (int, bool) {
	data, err := os.ReadFile(l.pidFile(name))
	if err != nil {
		return 0, false
	}
	pidText, want, ok := strings.Cut(strings.TrimSpace(string(data)), " ")
	pid, err := strconv.Atoi(pidText)
	if !ok || err != nil {
		return 0, false
	}
	got, ended, err := startTime(pid)
	return pid, err == nil && !ended && got == want
}

// stop ends the named process: SIGTERM, and SIGKILL once it has had its grace.
func (l Layout) stop(ctx context.Context, name string) error {
	pid, ok := l.running(name)
	if !ok {
		return nil
	}
	gone := func() bool { _, alive := l.running(name); return !alive }
	grace := stopGrace
	if name == apiserver || name == etcd {
		grace = servingGrace
	}
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("send %v to %s (pid %d): %w", sig, name, pid, err)
		}
		err := waitFor(ctx, grace, func(context.Context) error {
			if gone() {
				return nil
			}
			return errors.New("still running")
		})
		if err == nil {
			return os.Remove(l.pidFile(name))
		}
		if ctx.Err() != nil {
			return fmt.Errorf("stop %s (pid %d): %w", name, pid, ctx.Err())
		}
	}
	return fmt.Errorf("stop %s: pid %d survives SIGKILL, it hangs in the kernel", name, pid)
}

// processes lists the names of all processes that have a pid file.
func (l Layout) processes() []string {
	files, err := filepath.Glob(l.pidFile("*"))
	if err != nil {
		return nil
	}
	names := make([]string, 0, len(files))
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".pid"))
	}
	return names
}

// ended reports a process that should run and does not, with the end of its log.
func (l Layout) ended(name string) error {
	if _, ok := l.running(name); ok {
		return nil
	}
	return fmt.Errorf("%s has ended; the end of %s:\n%s", name, l.Log(name), tail(l.Log(name), 15))
}

// startTime tells two processes with one pid apart; ended is set for one that nobody has reaped yet.
func startTime(pid int) (started string, ended bool, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", false, err
	}
	// The command name may hold blanks and parentheses: count fields after the last ")".
	_, rest, ok := cutLast(string(data), ") ")
	fields := strings.Fields(rest)
	const state, start = 0, 19
	if !ok || len(fields) <= start {
		return "", false, fmt.Errorf("parse /proc/%d/stat: unexpected form", pid)
	}
	return fields[start], fields[state] == "Z" || fields[state] == "X", nil
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// waitFor calls check until it returns nil. When time is up, the error carries check's last answer.
func waitFor(parent context.Context, limit time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(parent, limit)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := check(ctx)
		var fatal fatalError
		if err == nil || errors.As(err, &fatal) {
			return err
		}
		select {
		case <-ctx.Done():
			if parent.Err() != nil {
				return fmt.Errorf("interrupted (%w): %w", context.Cause(parent), err)
			}
			return fmt.Errorf("after %v: %w", limit, err)
		case <-tick.C:
		}
	}
}

// fatalError ends waitFor early: waiting longer cannot help.
type fatalError struct{ error }

func (e fatalError) Unwrap() error { return e.error }

// tail returns the last lines of a file, for error messages.
func tail(path string, lines int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// command runs a short-lived program to its end; what it printed is part of the error.
func command(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("run %q: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
