// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

const containerID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// node makes a character device; the numbers are those of memory devices, which always open.
func (tr *tree) node(p string, n DeviceNumber) {
	tr.t.Helper()
	tr.mkdir(filepath.Dir(p))
	err := unix.Mknod(tr.path(p), unix.S_IFCHR|0o666, int(unix.Mkdev(n.Major, n.Minor)))
	if errors.Is(err, unix.EPERM) {
		tr.t.Skip("making device nodes is not permitted here: needs root")
	}
	if err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *tree) process(pid int, comm string, fds map[string]string) {
	tr.t.Helper()
	dir := "proc/" + strconv.Itoa(pid)
	tr.mkdir(dir + "/fd")
	tr.mkdir(dir + "/task/" + strconv.Itoa(pid))
	tr.write(dir+"/comm", comm+"\n")
	tr.write(dir+"/maps", "")
	for fd, target := range fds {
		tr.link(target, dir+"/fd/"+fd)
	}
}

func TestHolders(t *testing.T) {
	tr := newTree(t)
	tr.remove("proc/1")
	gpu0, gpu1, free, ctl := DeviceNumber{1, 5}, DeviceNumber{1, 3}, DeviceNumber{1, 8}, DeviceNumber{1, 9}
	tr.node("dev/nvidia0", gpu0)
	tr.node("dev/nvidia1", gpu1)
	tr.node("dev/nvidiactl", ctl)
	tr.node("container/dev/other-name", gpu0) // another path, the same device
	tr.write("regular", "")

	tr.process(1, "init", map[string]string{"0": tr.path("regular"), "1": "socket:[5]", "2": "/nonexistent"})
	tr.process(20, "python", map[string]string{"0": tr.path("regular"), "7": tr.path("container/dev/other-name"), "8": tr.path("dev/nvidia0")})
	tr.write("proc/20/cgroup", "0::/kubepods/besteffort/pod8f1c6a52-7f2a-4c58-9d6f-0d1e2f3a4b5c/"+containerID+"\n")
	tr.process(21, "nvidia-smi", map[string]string{"3": tr.path("dev/nvidiactl")})
	tr.process(22, "two", map[string]string{"3": tr.path("dev/nvidia0"), "4": tr.path("dev/nvidia1")})
	// A process whose first thread has ended while another still holds the file.
	tr.process(23, "zombie", nil)
	tr.mkdir("proc/23/task/24/fd")
	tr.link(tr.path("dev/nvidia1"), "proc/23/task/24/fd/5")
	// A process that closed the file but kept the mapping.
	tr.process(25, "mapper", map[string]string{"0": tr.path("regular")})
	tr.write("proc/25/maps", "7f00a000-7f00b000 rw-s 00000000 00:06 77 /dev/nvidia1\n7f00c000-7f00d000 rw-p 00000000 00:00 0 \n"+
		"7f00e000-7f00f000 r--p 00000000 00:06 78 /gone (deleted)\n")
	tr.mkdir("proc/25/map_files")
	tr.link(tr.path("dev/nvidia1"), "proc/25/map_files/7f00a000-7f00b000")
	// One that ended during the scan: the directory is there, nothing in it.
	tr.mkdir("proc/26")
	tr.mkdir("proc/sys")

	got, err := New(tr.root, Options{}).Holders(t.Context(), gpu0, gpu1, free)
	if err != nil {
		t.Fatal(err)
	}
	for _, hs := range got {
		slices.SortFunc(hs, func(a, b Holder) int { return a.PID - b.PID })
	}
	want := map[DeviceNumber][]Holder{
		gpu0: {
			{PID: 20, Command: "python", Container: containerID, Pod: "8f1c6a52-7f2a-4c58-9d6f-0d1e2f3a4b5c"},
			{PID: 22, Command: "two"},
		},
		gpu1: {
			{PID: 22, Command: "two"},
			{PID: 23, Command: "zombie"},
			{PID: 25, Command: "mapper", Mapped: true},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
	if s := got[gpu0][0].String(); s != "python (pid 20, container 0123456789ab, Pod 8f1c6a52-7f2a-4c58-9d6f-0d1e2f3a4b5c)" {
		t.Errorf("holder prints as %q", s)
	}
}

// TestHolders_agent: another agent is known by the file that all agents have open, never by its name.
func TestHolders_agent(t *testing.T) {
	tr := newTree(t)
	tr.remove("proc/1")
	gpu := DeviceNumber{1, 5}
	tr.node("dev/nvidia0", gpu)
	tr.write("plugins/lock", "")
	tr.write("elsewhere/lock", "")
	held := func(pid int, comm, file string) {
		tr.process(pid, comm, map[string]string{"5": tr.path("dev/nvidia0"), "6": tr.path(file)})
	}
	held(30, "cohdi-agent", "plugins/lock")
	held(31, "cohdi-agent", "elsewhere/lock")
	held(32, "python", "dev/nvidia0")
	held(33, "renamed", "plugins/lock")

	got, err := New(tr.root, Options{AgentFile: tr.path("plugins/lock")}).Holders(t.Context(), gpu)
	if err != nil {
		t.Fatal(err)
	}
	agents := map[int]bool{}
	for _, h := range got[gpu] {
		agents[h.PID] = h.Agent
	}
	if diff := cmp.Diff(map[int]bool{30: true, 31: false, 32: false, 33: true}, agents); diff != "" {
		t.Errorf("agents among the holders (-want +got):\n%s", diff)
	}
	if _, err := New(tr.root, Options{AgentFile: tr.path("none")}).Holders(t.Context(), gpu); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error = %v, want that the file does not exist", err)
	}
}

// TestHolders_realProcess looks for this very process in the real procfs.
func TestHolders_realProcess(t *testing.T) {
	for _, mapped := range []bool{false, true} {
		t.Run("mapped="+strconv.FormatBool(mapped), func(t *testing.T) {
			tr := newTree(t)
			tr.remove("proc")
			tr.link("/proc", "proc")
			zero := DeviceNumber{1, 5}
			tr.node("odd-name", zero)
			f, err := os.OpenFile(tr.path("odd-name"), os.O_RDWR, 0)
			if err != nil {
				t.Skipf("device nodes cannot be opened in the temporary directory: %v", err)
			}
			defer f.Close()
			if mapped {
				var mem []byte
				mem, err = unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE)
				if err != nil {
					t.Skipf("map /dev/zero: %v", err)
				}
				defer unix.Munmap(mem)
				f.Close()
			}
			got, err := New(tr.root, Options{}).Holders(t.Context(), zero)
			if err != nil && !errors.Is(err, ErrIncomplete) {
				t.Fatal(err)
			}
			i := slices.IndexFunc(got[zero], func(h Holder) bool { return h.PID == os.Getpid() })
			if i < 0 {
				t.Fatalf("holders = %v, want this process (pid %d) among them", got[zero], os.Getpid())
			}
			if h := got[zero][i]; h.Mapped != mapped || h.Command == "?" {
				t.Errorf("holder = %+v, want mapped %v and a command", h, mapped)
			}
		})
	}
}

func TestHolders_errors(t *testing.T) {
	t.Run("no procfs", func(t *testing.T) {
		tr := newTree(t)
		tr.remove("proc/1")
		_, err := New(tr.root, Options{}).Holders(t.Context(), DeviceNumber{1, 5})
		checkError(t, err, "is the host's procfs mounted there?")
	})
	t.Run("context ended", func(t *testing.T) {
		tr := newTree(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := New(tr.root, Options{}).Holders(ctx, DeviceNumber{1, 5})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error = %v, want Canceled", err)
		}
	})
	t.Run("process that may not be inspected", func(t *testing.T) {
		s := holderScan{wanted: map[DeviceNumber]bool{}, found: map[DeviceNumber][]Holder{}}
		if os.Geteuid() == 0 {
			t.Skip("root may inspect every process")
		}
		tr := newTree(t)
		if err := os.Chmod(tr.path("proc/1/fd"), 0); err != nil {
			t.Fatal(err)
		}
		if err := s.process(tr.path("proc/1"), 1); err != nil || len(s.refused) != 1 {
			t.Errorf("refused = %v, %v", s.refused, err)
		}
	})
}

func TestDeviceNode(t *testing.T) {
	tr := newTree(t)
	tr.node("dev/nvidia3", DeviceNumber{1, 5})
	tr.write("dev/nvidia4", "")
	p := New(tr.root, Options{})
	if n, err := p.DeviceNode(3); err != nil || n.String() != "1:5" {
		t.Errorf("DeviceNode(3) = %v, %v, want 1:5", n, err)
	}
	if _, err := p.DeviceNode(4); err == nil {
		t.Error("a regular file passes as a device node")
	}
	if _, err := p.DeviceNode(5); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("DeviceNode(5) error = %v, want ErrNotExist", err)
	}
}
