// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// short is a write timeout for tests in which it is reached.
const short = 50 * time.Millisecond

// fifo replaces a sysfs file by one into which a write hangs until somebody reads, as the kernel makes
// it hang. It is released when the test ends.
func (tr *tree) fifo(p string) {
	tr.t.Helper()
	tr.remove(p)
	path := tr.path(p)
	if err := unix.Mkfifo(path, 0o600); err != nil {
		tr.t.Fatal(err)
	}
	tr.t.Cleanup(func() {
		if f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0); err == nil {
			f.Close()
		}
	})
}

// release lets all writes into a fifo end, those to come too.
func (tr *tree) release(p string) {
	tr.t.Helper()
	f, err := os.OpenFile(tr.path(p), os.O_RDWR, 0)
	if err != nil {
		tr.t.Fatal(err)
	}
	tr.t.Cleanup(func() { f.Close() })
}

// kernel serves a fifo: it reads each write to its end and then acts.
func (tr *tree) kernel(p string, act func(written string)) {
	tr.t.Helper()
	f, err := os.Open(tr.path(p))
	if err != nil {
		tr.t.Error(err)
		return
	}
	b, err := io.ReadAll(f)
	if err = errors.Join(err, f.Close()); err != nil {
		tr.t.Error(err)
	}
	act(string(b))
}

func TestRescan(t *testing.T) {
	const portBus = "sys/devices/pci0000:3a/0000:3a:00.0/pci_bus/0000:3b/rescan"
	const port = "sys/devices/pci0000:3a/0000:3a:00.0/rescan"
	const all = "sys/bus/pci/rescan"
	tests := []struct {
		name    string
		without []string
		hint    []Hint
		want    string
	}{
		{name: "anywhere", want: all},
		{name: "below the port", hint: []Hint{{Port: address(t, "0000:3a:00.0")}}, want: portBus},
		{
			name: "port without a bus of its own", without: []string{"sys/devices/pci0000:3a/0000:3a:00.0/pci_bus"},
			hint: []Hint{{Port: address(t, "0000:3a:00.0")}}, want: port,
		},
		{name: "bus of the address", hint: []Hint{{Address: address(t, "0000:3b:00.0")}}, want: portBus},
		{name: "the same bus twice", hint: []Hint{{Address: address(t, "0000:3b:00.0")}, {Address: address(t, "0000:3b:01.0")}}, want: portBus},
		{name: "bus that is not there", hint: []Hint{{Address: address(t, "0000:99:00.0")}}, want: all},
		{name: "port that is not there", hint: []Hint{{Port: address(t, "0000:98:00.0")}}, want: all},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tr := newTree(t)
			tr.bridge("pci0000:3a", "0000:3a:00.0", "0000:3b")
			for _, p := range tt.without {
				tr.remove(p)
			}
			files, err := New(tr.root, Options{}).Rescan(t.Context(), tt.hint...)
			if err != nil {
				t.Fatal(err)
			}
			if len(files) != 1 {
				t.Errorf("wrote %s, want one file", files)
			}
			for _, p := range []string{portBus, port, all} {
				want := ""
				if p == tt.want {
					want = "1"
				}
				if _, err := os.Stat(tr.path(p)); err == nil && tr.read(p) != want {
					t.Errorf("%s = %q, want %q (files %s)", p, tr.read(p), want, files)
				}
			}
		})
	}
}

func TestEmptySlots(t *testing.T) {
	tr := newTree(t)
	slot := func(name, place string) { tr.write("sys/bus/pci/slots/"+name+"/address", place+"\n") }
	slot("1", "0000:3d:00")
	slot("2", "0000:3e:00")
	slot("none", "")
	tr.function("pci0000:3a", "0000:3e:00.0", nil)
	got, err := New(tr.root, Options{}).EmptySlots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Hint{{Address: address(t, "0000:3d:00.0")}}, got); diff != "" {
		t.Errorf("empty slots (-want +got):\n%s", diff)
	}
}

func TestRescan_errors(t *testing.T) {
	t.Run("no bus", func(t *testing.T) {
		_, err := New(t.TempDir(), Options{}).Rescan(t.Context())
		checkError(t, err, "is sysfs mounted there?")
	})
	t.Run("hangs in the kernel", func(t *testing.T) {
		tr := newTree(t)
		tr.fifo("sys/bus/pci/rescan")
		p := New(tr.root, Options{WriteTimeout: short})
		_, err := p.Rescan(t.Context())
		if busy, ok := errors.AsType[*BusyError](err); !ok || busy.Operation != "rescan" || !errors.Is(err, errTimeout) {
			t.Errorf("error = %v, want BusyError of rescan by timeout", err)
		}
		// The next caller waits for the first one's write and then asks again itself.
		p.timeout = defaultWriteTimeout
		ended := make(chan error, 1)
		go func() {
			_, err := p.Rescan(t.Context())
			ended <- err
		}()
		tr.release("sys/bus/pci/rescan")
		if err := <-ended; err != nil {
			t.Errorf("rescan after the hang: %v", err)
		}
	})
	t.Run("caller gives up", func(t *testing.T) {
		tr := newTree(t)
		tr.fifo("sys/bus/pci/rescan")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := New(tr.root, Options{}).Rescan(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("error = %v, want Canceled", err)
		}
	})
}

func TestRemove(t *testing.T) {
	const gpu = "0000:3b:00.0"
	const file = "sys/bus/pci/devices/" + gpu + "/remove"

	t.Run("leaves after the write", func(t *testing.T) {
		tr := newTree(t)
		tr.function("pci0000:3a", gpu, nil)
		tr.fifo(file)
		served := make(chan struct{})
		go func() {
			defer close(served)
			tr.kernel(file, func(written string) {
				if written != "1" {
					t.Errorf("written %q, want 1", written)
				}
				tr.drop(gpu)
			})
		}()
		p := New(tr.root, Options{})
		if err := p.Remove(t.Context(), address(t, gpu)); err != nil {
			t.Fatal(err)
		}
		<-served
		s, err := p.Snapshot(t.Context())
		if err != nil || len(s) != 0 {
			t.Errorf("snapshot after removal = %v, %v", s, err)
		}
	})
	t.Run("already gone", func(t *testing.T) {
		tr := newTree(t)
		if err := New(tr.root, Options{}).Remove(t.Context(), address(t, gpu)); err != nil {
			t.Error(err)
		}
	})
	t.Run("refused", func(t *testing.T) {
		tr := newTree(t)
		tr.function("pci0000:3a", gpu, nil)
		tr.remove(file)
		tr.mkdir(file) // cannot be opened for writing by anyone
		err := New(tr.root, Options{}).Remove(t.Context(), address(t, gpu))
		if !errors.Is(err, unix.EISDIR) {
			t.Errorf("error = %v, want EISDIR", err)
		}
	})
	t.Run("an event ends the wait", func(t *testing.T) {
		tr := newTree(t)
		tr.function("pci0000:3a", gpu, nil)
		p := New(tr.root, Options{})
		ended := make(chan error, 1)
		go func() { ended <- p.Remove(t.Context(), address(t, gpu)) }()
		p.changes.wake()
		tr.drop(gpu)
		p.changes.wake()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestRemove_hangs(t *testing.T) {
	const gpu = "0000:3b:00.0"
	const file = "sys/bus/pci/devices/" + gpu + "/remove"
	tr := newTree(t)
	tr.function("pci0000:3a", gpu, nil)
	tr.fifo(file)
	p := New(tr.root, Options{WriteTimeout: short})
	for i := range 3 {
		err := p.Remove(t.Context(), address(t, gpu))
		if busy, ok := errors.AsType[*BusyError](err); !ok || busy.Operation != "remove" || busy.Since.IsZero() {
			t.Fatalf("call %d: error = %v, want BusyError with the time of the write", i, err)
		}
	}
	if in, err := p.InRemoval(t.Context(), address(t, gpu)); err != nil || !in {
		t.Errorf("InRemoval = %v, %v, want true", in, err)
	}
	// All three calls together made one write.
	tr.kernel(file, func(written string) {
		if written != "1" {
			t.Errorf("written %q, want one 1", written)
		}
		tr.drop(gpu)
	})
	if err := p.Remove(t.Context(), address(t, gpu)); err != nil {
		t.Error(err)
	}
	if in, err := p.InRemoval(t.Context(), address(t, gpu)); err != nil || in {
		t.Errorf("InRemoval = %v, %v, want false", in, err)
	}
}

func TestRemove_begunByAnotherProcess(t *testing.T) {
	const gpu = "0000:3b:00.0"
	const file = "sys/bus/pci/devices/" + gpu + "/remove"
	tests := []struct {
		name  string
		begin func(tr *tree)
		check func(tr *tree)
	}{
		{
			name:  "the kernel took the file away first",
			begin: func(tr *tree) { tr.remove(file) },
			check: func(*tree) {},
		},
		{
			name: "the file is held open",
			begin: func(tr *tree) {
				tr.mkdir("proc/4711/fd")
				tr.link(tr.path(file), "proc/4711/fd/3")
			},
			check: func(tr *tree) {
				if got := tr.read(file); got != "" {
					tr.t.Errorf("second write %q", got)
				}
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tr := newTree(t)
			tr.function("pci0000:3a", gpu, nil)
			tt.begin(tr)
			p := New(tr.root, Options{WriteTimeout: short})
			err := p.Remove(t.Context(), address(t, gpu))
			if busy, ok := errors.AsType[*BusyError](err); !ok || !busy.Since.IsZero() {
				t.Errorf("error = %v, want BusyError of another process", err)
			}
			tt.check(tr)
			if in, err := p.InRemoval(t.Context(), address(t, gpu)); err != nil || !in {
				t.Errorf("InRemoval = %v, %v, want true", in, err)
			}
		})
	}
}

func TestRemove_devicesAreIndependent(t *testing.T) {
	tr := newTree(t)
	const n = 8
	p := New(tr.root, Options{})
	var wg sync.WaitGroup
	for i := range n {
		gpu := "0000:3b:0" + strconv.Itoa(i) + ".0"
		file := "sys/bus/pci/devices/" + gpu + "/remove"
		tr.function("pci0000:3a", gpu, nil)
		tr.fifo(file)
		if i == 0 {
			continue // this one hangs
		}
		wg.Go(func() { tr.kernel(file, func(string) { tr.drop(gpu) }) })
		wg.Go(func() {
			if err := p.Remove(t.Context(), address(t, gpu)); err != nil {
				t.Errorf("remove %s: %v", gpu, err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	hung := make(chan error, 1)
	go func() { hung <- p.Remove(ctx, address(t, "0000:3b:00.0")) }()
	wg.Wait()
	cancel()
	if err := <-hung; !errors.Is(err, context.Canceled) {
		t.Errorf("error of the hung removal = %v, want Canceled", err)
	}
}

func TestBind(t *testing.T) {
	const gpu = "0000:3b:00.0"
	const probe = "sys/bus/pci/drivers_probe"
	tests := []struct {
		name   string
		setup  func(tr *tree)
		check  func(error) bool
		writes bool
	}{
		{name: "already bound", setup: func(tr *tree) { tr.bind(gpu, "nvidia") }, check: func(err error) bool { return err == nil }},
		{name: "vfio-pci has it", setup: func(tr *tree) { tr.bind(gpu, "vfio-pci") }, check: isDriver("vfio-pci")},
		{
			name: "reserved for vfio-pci",
			setup: func(tr *tree) {
				tr.driver("nvidia")
				tr.write("sys/bus/pci/devices/"+gpu+"/driver_override", "vfio-pci\n")
			},
			check: isDriver("vfio-pci"),
		},
		{name: "driver not loaded", setup: func(*tree) {}, check: func(err error) bool { return errors.Is(err, ErrNoDriver) }},
		{name: "gone", setup: func(tr *tree) { tr.drop(gpu) }, check: func(err error) bool { return errors.Is(err, fs.ErrNotExist) }},
		{
			name: "probe takes no device",
			setup: func(tr *tree) {
				tr.driver("nvidia")
				tr.write("sys/bus/pci/devices/"+gpu+"/driver_override", "(null)\n")
			},
			check: func(err error) bool { return errors.Is(err, ErrNoDriver) }, writes: true,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tr := newTree(t)
			tr.function("pci0000:3a", gpu, nil)
			tt.setup(tr)
			if err := New(tr.root, Options{}).Bind(t.Context(), address(t, gpu)); !tt.check(err) {
				t.Errorf("error = %v", err)
			}
			if got := tr.read(probe) != ""; got != tt.writes {
				t.Errorf("probe written = %v, want %v", got, tt.writes)
			}
		})
	}
	t.Run("probe hangs", func(t *testing.T) {
		tr := newTree(t)
		tr.function("pci0000:3a", gpu, nil)
		tr.driver("nvidia")
		tr.fifo(probe)
		err := New(tr.root, Options{WriteTimeout: short}).Bind(t.Context(), address(t, gpu))
		if _, ok := errors.AsType[*BusyError](err); !ok {
			t.Errorf("error = %v, want BusyError", err)
		}
	})
}

func isDriver(want string) func(error) bool {
	return func(err error) bool {
		other, ok := errors.AsType[*DriverError](err)
		return ok && other.Driver == want
	}
}
