// SPDX-License-Identifier: Apache-2.0

package uevent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Event is one kernel object event.
type Event struct {
	Action  string
	DevPath string
	// Env are the KEY=value pairs between DEVPATH and SEQNUM, SUBSYSTEM among them.
	Env []string
}

// Message is the event as the kernel writes it; the kernel appends SEQNUM.
func (e Event) Message() []byte {
	var b strings.Builder
	b.WriteString(e.Action + "@" + e.DevPath + "\x00ACTION=" + e.Action + "\x00DEVPATH=" + e.DevPath + "\x00")
	for _, kv := range e.Env {
		b.WriteString(kv + "\x00")
	}
	return []byte(b.String())
}

// Namespaces evaluates globs of network namespace files; "{pid}" in one stands for each process id found as the first
// word of a file that pidFiles match. A namespace that is reached by several paths is returned once.
func Namespaces(globs, pidFiles []string) ([]string, error) {
	var out []string
	var errs []error
	type inode struct{ dev, ino uint64 }
	seen := map[inode]bool{}
	for _, g := range expandPIDs(globs, pidFiles) {
		paths, err := filepath.Glob(g)
		if err != nil {
			errs = append(errs, fmt.Errorf("glob %q: %w", g, err))
		}
		for _, p := range paths {
			var st unix.Stat_t
			var fs unix.Statfs_t
			// The mount point of a namespace that is just being made or removed is a plain file.
			if unix.Stat(p, &st) != nil || unix.Statfs(p, &fs) != nil || fs.Type != unix.NSFS_MAGIC {
				continue
			}
			if id := (inode{st.Dev, st.Ino}); !seen[id] {
				seen[id] = true
				out = append(out, p)
			}
		}
	}
	return out, errors.Join(errs...)
}

func expandPIDs(globs, pidFiles []string) []string {
	var pids []string
	for _, g := range pidFiles {
		files, err := filepath.Glob(g)
		if err != nil {
			continue
		}
		for _, f := range files {
			if data, err := os.ReadFile(f); err == nil {
				if fields := strings.Fields(string(data)); len(fields) > 0 {
					pids = append(pids, fields[0])
				}
			}
		}
	}
	var out []string
	for _, g := range globs {
		if !strings.Contains(g, "{pid}") {
			out = append(out, g)
			continue
		}
		for _, pid := range pids {
			out = append(out, strings.ReplaceAll(g, "{pid}", pid))
		}
	}
	return out
}

// Send broadcasts the event in each of the network namespaces.
func Send(namespaces []string, e Event) error {
	var errs []error
	for _, ns := range namespaces {
		if err := inNamespace(ns, func() error { return sendHere(e) }); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("send uevent %s %s in %s: %w", e.Action, e.DevPath, ns, err))
		}
	}
	return errors.Join(errs...)
}

// inNamespace runs f on a thread in that network namespace. The thread is never unlocked, so the runtime ends it and no other
// goroutine finds itself in a foreign namespace.
func inNamespace(path string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- err
			return
		}
		err = unix.Setns(fd, unix.CLONE_NEWNET)
		err = errors.Join(err, unix.Close(fd))
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// sendHere sends to the kernel (port 0, no group), which re-broadcasts what a netlink request carries.
func sendHere(e Event) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return fmt.Errorf("open uevent socket: %w", err)
	}
	payload := e.Message()
	msg := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(payload))
	binary.NativeEndian.PutUint32(msg[0:], uint32(unix.NLMSG_HDRLEN+len(payload))) //nolint:gosec // a few hundred bytes
	binary.NativeEndian.PutUint16(msg[4:], unix.NLMSG_MIN_TYPE)
	binary.NativeEndian.PutUint16(msg[6:], unix.NLM_F_REQUEST)
	msg = append(msg, payload...)
	err = unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	return errors.Join(err, unix.Close(fd))
}
