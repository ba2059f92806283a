// SPDX-License-Identifier: Apache-2.0

package uevent

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// newNamespace makes a network namespace, mounts it at path as `ip netns add` does, and returns a uevent socket inside it.
func newNamespace(t *testing.T, path string) int {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for a network namespace")
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	type made struct {
		fd  int
		err error
	}
	out := make(chan made)
	go func() {
		runtime.LockOSThread()
		fd, err := func() (int, error) {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return -1, err
			}
			if err := unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, ""); err != nil {
				return -1, err
			}
			fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
			if err != nil {
				return -1, err
			}
			return fd, unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1})
		}()
		out <- made{fd, err}
	}()
	m := <-out
	t.Cleanup(func() { unix.Unmount(path, unix.MNT_DETACH) })
	if m.err != nil {
		t.Fatalf("make network namespace: %v", m.err)
	}
	t.Cleanup(func() { unix.Close(m.fd) })
	timeout := unix.NsecToTimeval(int64(5e9))
	if err := unix.SetsockoptTimeval(m.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		t.Fatal(err)
	}
	return m.fd
}

func TestSend_arrivesAsKernelEvent(t *testing.T) {
	dir := t.TempDir()
	sock := newNamespace(t, filepath.Join(dir, "one"))
	if err := os.Symlink("one", filepath.Join(dir, "same")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "no-namespace"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	namespaces, err := Namespaces([]string{dir + "/*"}, nil)
	if err != nil || len(namespaces) != 1 {
		t.Fatalf("namespaces %v, %v; want one", namespaces, err)
	}
	e := Event{Action: "add", DevPath: "/devices/pci0000:3a/x", Env: []string{"SUBSYSTEM=pci", "PCI_SLOT_NAME=0000:3d:00.0"}}
	if err := Send(namespaces, e); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	// The kernel announces the namespace's own devices too.
	for {
		n, from, err := unix.Recvfrom(sock, buf, 0)
		if err != nil {
			t.Fatalf("wait for the event: %v", err)
		}
		nl, ok := from.(*unix.SockaddrNetlink)
		if !ok || nl.Pid != 0 {
			t.Fatalf("sender %+v, want the kernel", from)
		}
		if !bytes.HasPrefix(buf[:n], []byte("add@/devices/pci0000:3a/x\x00")) {
			continue
		}
		fields := strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00")
		last := fields[len(fields)-1]
		if !strings.HasPrefix(last, "SEQNUM=") {
			t.Errorf("last field %q, want SEQNUM", last)
		}
		want := []string{
			"add@/devices/pci0000:3a/x", "ACTION=add", "DEVPATH=/devices/pci0000:3a/x", "SUBSYSTEM=pci", "PCI_SLOT_NAME=0000:3d:00.0",
		}
		if diff := cmp.Diff(want, fields[:len(fields)-1]); diff != "" {
			t.Errorf("fields (-want +got):\n%s", diff)
		}
		return
	}
}

func TestSend_goneNamespace(t *testing.T) {
	if err := Send([]string{filepath.Join(t.TempDir(), "gone")}, Event{Action: "add", DevPath: "/x"}); err != nil {
		t.Errorf("a namespace that has gone is an error: %v", err)
	}
}

func TestExpandPIDs(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.pid"), []byte("12 4711\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "b.pid"), []byte("13"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "c.pid"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	got := expandPIDs([]string{"/run/netns/n1", "/proc/{pid}/root/run/netns/*"}, []string{dir + "/*.pid", "/absent"})
	want := []string{"/run/netns/n1", "/proc/12/root/run/netns/*", "/proc/13/root/run/netns/*"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
