// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	clocktesting "k8s.io/utils/clock/testing"
)

// run starts a watcher and stops it when the test ends.
func run(t *testing.T, w *Watcher) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// quiet is an interval that no test reaches.
const quiet = 24 * time.Hour

func TestWatcher_firstLookNeedsNoEvent(t *testing.T) {
	w := New(newTree(t).root, Options{}).NewWatcher(quiet)
	run(t, w)
	<-w.Look()
}

func TestWatcher_deviceNodes(t *testing.T) {
	tr := newTree(t)
	w := New(tr.root, Options{}).NewWatcher(quiet)
	run(t, w)
	<-w.Look()
	tr.write("dev/other", "")
	tr.write("dev/nvidia0", "")
	<-w.Look()
	waitFor(t, func() bool { return w.Counters().NodeEvents == 1 })
	tr.remove("dev/nvidia0")
	waitFor(t, func() bool { return w.Counters().NodeEvents == 2 })
}

// waitFor spins; it ends by the test's own deadline only.
func waitFor(t *testing.T, done func() bool) {
	t.Helper()
	for !done() {
		if t.Context().Err() != nil {
			t.Fatal("never happened")
		}
		runtime.Gosched()
	}
}

func TestWatcher_periodicLook(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(0, 0))
	w := New(newTree(t).root, Options{Clock: clock}).NewWatcher(time.Minute)
	run(t, w)
	<-w.Look()
	for i := range 3 {
		waitFor(t, clock.HasWaiters)
		clock.Step(time.Minute + time.Minute/5)
		waitFor(t, func() bool { return w.Counters().Looks == uint64(i+1) })
		<-w.Look()
	}
}

func TestWatcher_wakesRemove(t *testing.T) {
	p := New(newTree(t).root, Options{})
	w := p.NewWatcher(quiet)
	changed := p.changes.wait()
	w.poke()
	<-changed
}

func TestWatcher_withoutSources(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(0, 0))
	w := New(t.TempDir(), Options{Clock: clock}).NewWatcher(time.Minute)
	if w.nodesErr == nil {
		t.Error("a missing dev is not noticed")
	}
	if w.events != nil {
		if err := w.events.Close(); err != nil {
			t.Fatal(err)
		}
		w.events, w.deaf = nil, errors.New("not permitted")
	}
	run(t, w)
	<-w.Look()
	waitFor(t, clock.HasWaiters)
	clock.Step(2 * time.Minute)
	<-w.Look()
}

// sendUevent sends a message to the kernel's uevent group, as the kernel lets root do within the own
// network namespace.
func sendUevent(t *testing.T, msg string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	err = unix.Sendto(fd, []byte(msg), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup})
	if errors.Is(err, unix.EPERM) {
		t.Skip("sending to the kernel's uevent group is not permitted here: needs root of the network namespace")
	}
	if err != nil {
		t.Fatal(err)
	}
}

func uevents(t *testing.T, w *Watcher) {
	t.Helper()
	if w.events == nil {
		t.Skipf("no uevent socket here: %v", w.Deaf())
	}
}

func TestWatcher_uevents(t *testing.T) {
	w := New(newTree(t).root, Options{}).NewWatcher(quiet)
	uevents(t, w)
	run(t, w)
	<-w.Look()
	before := w.Counters()
	sendUevent(t, "add@/devices/pci0000:3a/0000:3b:00.0\x00ACTION=add\x00SUBSYSTEM=pci\x00SEQNUM=1\x00")
	<-w.Look()
	sendUevent(t, "change@/devices/virtual/block/loop0\x00ACTION=change\x00SUBSYSTEM=block\x00SEQNUM=2\x00")
	sendUevent(t, "nonsense")
	// The real kernel may speak meanwhile, so these are lower bounds.
	waitFor(t, func() bool {
		c := w.Counters()
		return c.Events > before.Events && c.Ignored > before.Ignored && c.Malformed > before.Malformed
	})
}

func TestWatcher_overrunAsksForALook(t *testing.T) {
	w := New(newTree(t).root, Options{}).NewWatcher(quiet)
	uevents(t, w)
	// Nobody reads yet: more than the buffer holds is lost, and the kernel says so once.
	raw, err := w.events.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var sizeErr error
	if err := raw.Control(func(fd uintptr) {
		sizeErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096)
	}); err != nil || sizeErr != nil {
		t.Fatal(err, sizeErr)
	}
	for i := range 64 {
		sendUevent(t, fmt.Sprintf("change@/devices/virtual/block/loop%d\x00SUBSYSTEM=block\x00", i))
	}
	<-w.Look() // the first one
	run(t, w)
	<-w.Look()
	if c := w.Counters(); c.Overruns == 0 {
		t.Errorf("counters = %+v, want an overrun", c)
	}
}

func TestCheckAudible(t *testing.T) {
	// In the initial user namespace the kernel must be heard; elsewhere the reason must say so.
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/user", &st); err != nil {
		t.Fatal(err)
	}
	err := checkAudible()
	if initial := st.Ino == initialUserNamespace; initial && err != nil {
		t.Errorf("deaf in the initial user namespace: %v", err)
	} else if !initial {
		checkError(t, err, "user namespace")
	}
}
