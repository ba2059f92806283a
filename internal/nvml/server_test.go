// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// hostRoot holds the built test library. There is one for the whole process: a loaded library stays.
var hostRoot string

const libraryDir = "run/nvidia/driver/usr/lib/x86_64-linux-gnu"

// card is a GPU as the test driver has it.
type card struct {
	pci, uuid, name, serial, arch string
	minor                         int
	memory                        uint64
	persistence, drain, mig       int
	procs                         []int
}

func h100(bus, minor int) *card {
	return &card{
		pci:    fmt.Sprintf("0000:%02x:00.0", bus),
		uuid:   fmt.Sprintf("GPU-00000000-0000-4000-8000-%012x", bus),
		name:   "NVIDIA H100 80GB HBM3",
		serial: fmt.Sprintf("16500%08d", bus),
		arch:   "hopper",
		minor:  minor,
		memory: 80 << 30,
	}
}

func (c *card) address(t *testing.T) device.PCIAddress {
	t.Helper()
	a, err := device.ParsePCIAddress(c.pci)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// driverMu guards what the driver has, cards included.
var driverMu sync.Mutex

// driverServer is the kernel driver behind the test library.
type driverServer struct {
	t    *testing.T
	gpus []*card
	// onBus are cards that the driver has not probed: discover finds them.
	onBus []*card
	// refuse answers a command with an NVML return value.
	refuse map[string]int
	// hang keeps the answer to a request until the channel is closed; asked tells of each such request.
	hang  map[string]chan struct{}
	asked chan string
	// streams are those who listen to events now.
	streams map[net.Conn]bool
	calls   []string
}

// serve loads the driver: a server on the socket beside the library, until the test ends.
func serve(t *testing.T, gpus ...*card) *driverServer {
	t.Helper()
	s := &driverServer{
		t: t, gpus: gpus, refuse: map[string]int{}, hang: map[string]chan struct{}{},
		asked: make(chan string, 100), streams: map[net.Conn]bool{},
	}
	path := filepath.Join(hostRoot, libraryDir, "nvml.sock")
	// A relative name: the path of a test's directory may be too long for a socket address.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", fmt.Sprintf("/proc/self/fd/%d/nvml.sock", dir.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	closed := false
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = true
			if closed {
				c.Close()
			}
			mu.Unlock()
			conns.Go(func() { s.talk(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		dir.Close()
		os.Remove(path)
		s.release()
		mu.Lock()
		closed = true
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		conns.Wait()
	})
	return s
}

func (s *driverServer) talk(c net.Conn) {
	defer c.Close()
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		if lines.Text() == "events" {
			s.stream(c)
			return
		}
		fmt.Fprintf(c, "%s\n.\n", s.answer(lines.Text()))
	}
}

// stream keeps a connection that gets events until the library closes its end.
func (s *driverServer) stream(c net.Conn) {
	s.set(func() { s.streams[c] = true })
	_, _ = io.Copy(io.Discard, c)
	s.set(func() { delete(s.streams, c) })
}

// listeners is how many sets of events there are.
func (s *driverServer) listeners() (n int) {
	s.set(func() { n = len(s.streams) })
	return n
}

// report sends an error of a GPU to all that listen, as the driver does: it is up to a set what it takes.
func (s *driverServer) report(c *card, code int) {
	s.set(func() {
		for to := range s.streams {
			fmt.Fprintf(to, "xid\tpci=%s\tcode=%d\n", c.pci, code)
		}
	})
}

// wait blocks while the command is set to hang.
func (s *driverServer) wait(request string) {
	driverMu.Lock()
	hung := s.hang[request]
	driverMu.Unlock()
	if hung != nil {
		s.asked <- request
		<-hung
	}
}

func (s *driverServer) answer(request string) string {
	s.wait(request)
	driverMu.Lock()
	defer driverMu.Unlock()
	words := strings.Fields(request)
	if words[0] != "list" && words[0] != "procs" {
		s.calls = append(s.calls, request)
	}
	if ret := s.refuse[words[0]]; ret != 0 {
		return fmt.Sprintf("err %d", ret)
	}
	switch words[0] {
	case "list":
		return s.list() + "ok"
	case "discover":
		s.gpus, s.onBus = append(s.gpus, s.onBus...), nil
		return "ok"
	}
	i := slices.IndexFunc(s.gpus, func(g *card) bool { return g.pci == words[1] })
	if i < 0 {
		return "err 6"
	}
	g := s.gpus[i]
	switch words[0] {
	case "drain":
		g.drain = int(words[2][0] - '0')
	case "persistence":
		g.persistence = int(words[2][0] - '0')
	case "remove":
		if len(g.procs) > 0 {
			return "err 19"
		}
		s.gpus = slices.Delete(s.gpus, i, i+1)
	case "procs":
		var b strings.Builder
		for _, pid := range g.procs {
			fmt.Fprintf(&b, "proc\tpid=%d\tused=%d\n", pid, pid<<20)
		}
		return b.String() + "ok"
	default:
		return "err 2"
	}
	return "ok"
}

func (s *driverServer) list() string {
	var b strings.Builder
	b.WriteString("driver\tversion=570.86.15\tcuda=12080\tnvml=12.570.86.15\n")
	for i, g := range s.gpus {
		fmt.Fprintf(&b, "pci=%s\tuuid=%s\tminor=%d\tname=%s\tmemory=%d\tserial=%s\tarch=%s\tpersistence=%d\tdrain=%d\tmig=%d\tindex=%d\n",
			g.pci, g.uuid, g.minor, g.name, g.memory, g.serial, g.arch, g.persistence, g.drain, g.mig, i)
	}
	return b.String()
}

func (s *driverServer) set(change func()) {
	driverMu.Lock()
	defer driverMu.Unlock()
	change()
}

// stuck makes a request hang until release.
func (s *driverServer) stuck(request string) {
	s.set(func() { s.hang[request] = make(chan struct{}) })
}

func (s *driverServer) release() {
	driverMu.Lock()
	defer driverMu.Unlock()
	for request, hung := range s.hang {
		close(hung)
		delete(s.hang, request)
	}
}

// mutations returns the requests that changed something, and forgets them.
func (s *driverServer) mutations() []string {
	driverMu.Lock()
	defer driverMu.Unlock()
	calls := s.calls
	s.calls = nil
	return calls
}

// newDriver returns a Driver over the built library, shut down when the test ends.
func newDriver(t *testing.T) *Driver {
	t.Helper()
	return newDriverWith(t, clock.RealClock{})
}

func newFakeClockDriver(t *testing.T) (*Driver, *clocktesting.FakeClock) {
	t.Helper()
	fake := clocktesting.NewFakeClock(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	return newDriverWith(t, fake), fake
}

func newDriverWith(t *testing.T, c clock.WithTicker) *Driver {
	t.Helper()
	d := New(Options{HostRoot: hostRoot, Clock: c})
	t.Cleanup(func() {
		if err := d.Release(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("Release: %v", err)
		}
	})
	return d
}
