// SPDX-License-Identifier: Apache-2.0

package nvmlsock

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// recorder is a driver with one GPU that notes what it is told.
type recorder struct {
	calls []string
	err   error
}

func (r *recorder) note(format string, args ...any) error {
	r.calls = append(r.calls, fmt.Sprintf(format, args...))
	return r.err
}

func (r *recorder) GPUs(string) ([]core.Device, error) {
	return []core.Device{{
		Device: config.Device{UUID: "GPU-1", ProductName: "NVIDIA L40S", MemoryMiB: 1, Serial: "7", Arch: "ada", PCIDevice: "26b9"},
		Slot:   2, Bound: true, Minor: 1, Drain: true,
	}}, r.err
}

func (r *recorder) SetDrain(m, a string, on bool) error { return r.note("drain %s %s %v", m, a, on) }

func (r *recorder) SetPersistence(m, a string, on bool) error {
	return r.note("persistence %s %s %v", m, a, on)
}
func (r *recorder) RemoveGPU(m, a string) error { return r.note("remove %s %s", m, a) }
func (r *recorder) Discover(m string) error     { return r.note("discover %s", m) }
func (r *recorder) Users(m, a string) ([]simapi.Holder, error) {
	return []simapi.Holder{{PID: 7}}, r.note("users %s %s", m, a)
}

// longDir is deeper than a socket address may be long.
func longDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func dial(t *testing.T, dir string) (net.Conn, error) {
	t.Helper()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var dialer net.Dialer
	return dialer.DialContext(t.Context(), "unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), SocketName))
}

func start(t *testing.T, driver Driver) (*Server, net.Conn, *bufio.Reader) {
	t.Helper()
	dir := longDir(t)
	s := New(dir, "n1", driver, config.Driver{Version: "570.1", CUDAVersion: 12080, NVMLVersion: "12.570.1"})
	if err := s.SetLoaded(true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(filepath.Join(dir, SocketName)); err == nil {
			t.Error("the socket outlives the server")
		}
	})
	c, err := dial(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return s, c, bufio.NewReader(c)
}

func TestServer_requests(t *testing.T) {
	tests := []struct{ request, want, call string }{
		{
			"list", "driver\tversion=570.1\tcuda=12080\tnvml=12.570.1\npci=0000:3e:00.0\tuuid=GPU-1\tminor=1\tname=NVIDIA L40S\t" +
				"memory=1048576\tserial=7\tarch=ada\tpersistence=0\tdrain=1\tmig=0\tindex=0\tdevice=26b9\nok\n.\n", "",
		},
		{"drain 0000:3E:00.0 1", "ok\n.\n", "drain n1 0000:3e:00.0 true"},
		{"persistence 00000000:3E:00.0 0", "ok\n.\n", "persistence n1 0000:3e:00.0 false"},
		{"remove 0000:3e:00.0", "ok\n.\n", "remove n1 0000:3e:00.0"},
		{"discover", "ok\n.\n", "discover n1"},
		{"procs 0000:3e:00.0", "proc\tpid=7\tused=268435456\nok\n.\n", "users n1 0000:3e:00.0"},
		{"drain 0000:3e:00.0 2", "err 2\n.\n", ""},
		{"drain", "err 2\n.\n", ""},
		{"nonsense", "err 2\n.\n", ""},
		{"", "err 2\n.\n", ""},
	}
	d := &recorder{}
	_, c, in := start(t, d)
	for _, tc := range tests { // all over one connection
		d.calls = nil
		if _, err := fmt.Fprintln(c, tc.request); err != nil {
			t.Fatal(err)
		}
		got := ""
		for !strings.HasSuffix(got, ".\n") || strings.Count(got, "\n") < strings.Count(tc.want, "\n") {
			line, err := in.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			got += line
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tc.request, diff)
		}
		if calls := strings.Join(d.calls, ";"); calls != tc.call {
			t.Errorf("%q reached the driver as %q, want %q", tc.request, calls, tc.call)
		}
	}
}

func TestServer_errors(t *testing.T) {
	for err, want := range map[error]string{
		core.ErrInUse: "err 19\n.\n", core.ErrNotFound: "err 6\n.\n", core.ErrNoDriver: "err 9\n.\n",
		core.ErrNotDraining: "err 29\n.\n", os.ErrClosed: "err 999\n.\n",
	} {
		s := New("", "n1", &recorder{err: fmt.Errorf("wrapped: %w", err)}, config.Driver{})
		if got := s.answer([]string{"remove", "0000:3e:00.0"}); got != want {
			t.Errorf("%v is answered %q, want %q", err, got, want)
		}
	}
}

func TestServer_events(t *testing.T) {
	s, c, in := start(t, &recorder{})
	if _, err := fmt.Fprintln(c, "events"); err != nil {
		t.Fatal(err)
	}
	// Events are not kept for who comes later, so they are sent until one arrives.
	lines := make(chan string)
	go func() {
		line, err := in.ReadString('\n')
		if err != nil {
			line = err.Error()
		}
		lines <- line
	}()
	for {
		s.XID("0000:3e:00.0", 79)
		select {
		case line := <-lines:
			if line != "xid\tpci=0000:3e:00.0\tcode=79\n" {
				t.Errorf("event %q", line)
			}
			return
		default:
		}
	}
}

func TestServer_unloaded(t *testing.T) {
	dir := longDir(t)
	s := New(dir, "n1", &recorder{}, config.Driver{})
	// A killed run leaves its socket behind.
	if err := os.WriteFile(filepath.Join(dir, SocketName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.SetLoaded(true); err != nil {
			t.Fatal(err)
		}
		c, err := dial(t, dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.SetLoaded(false); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("the connection outlives the driver")
		}
		if _, err := dial(t, dir); err == nil {
			t.Error("somebody answers without a driver")
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func FuzzAnswer(f *testing.F) {
	for _, s := range []string{"list", "drain 0000:3e:00.0 1", "procs x", "remove", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		s := New("", "n1", &recorder{}, config.Driver{})
		got := s.answer(strings.Fields(line))
		if !strings.HasSuffix(got, "ok\n.\n") && !strings.HasPrefix(got, "err ") {
			t.Errorf("%q is answered %q", line, got)
		}
	})
}
