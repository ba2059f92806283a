// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// variant is the test library's; a process can load one.
var variant = flag.String("nvml-variant", "new", "the test library to build: new or old")

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "nvml")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	hostRoot = dir
	build := exec.CommandContext(context.Background(), "make", "-s", "-C", "../../test/nvml", "OUT="+filepath.Join(dir, libraryDir), "VARIANT="+*variant)
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the test library: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// problems compares errors by identity.
var problems = cmpopts.EquateErrors()

func (c *card) want(t *testing.T) GPU {
	t.Helper()
	return GPU{
		PCI: c.address(t), UUID: device.GPUUUID(c.uuid), Minor: c.minor, Name: c.name, Serial: c.serial,
		MemoryBytes: c.memory, Architecture: "Hopper", ComputeCapability: "9.0",
		Persistence: c.persistence == 1, MIG: c.mig == 1,
	}
}

func checkInventory(t *testing.T, d *Driver, want ...*card) {
	t.Helper()
	got, err := d.Inventory(t.Context())
	if err != nil {
		t.Fatalf("Inventory: %v", err)
	}
	driverMu.Lock()
	defer driverMu.Unlock()
	var gpus []GPU
	for _, c := range want {
		gpus = append(gpus, c.want(t))
	}
	if diff := cmp.Diff(gpus, got, problems, cmpopts.EquateEmpty()); diff != "" {
		t.Fatalf("Inventory (-want +got):\n%s", diff)
	}
}

func TestInventory(t *testing.T) {
	a, b := h100(0x3b, 1), h100(0x1a, 0)
	a.persistence, b.mig, b.serial = 1, 1, ""
	serve(t, a, b)
	d := newDriver(t)
	checkInventory(t, d, b, a)
	st := d.Status()
	if st.State != StateReady || st.GPUs != 2 || st.DriverRoot != "/run/nvidia/driver" || st.Library == "" {
		t.Errorf("Status() = %+v", st)
	}
	v, err := d.Versions(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Versions{Driver: "570.86.15", NVML: "12.570.86.15", CUDA: "12.8"}, v); diff != "" {
		t.Errorf("Versions (-want +got):\n%s", diff)
	}
}

// TestStartBeforeDriver follows a node from nothing installed to the first GPU, without a restart.
func TestStartBeforeDriver(t *testing.T) {
	none := New(Options{HostRoot: t.TempDir(), Clock: newDriver(t).clock})
	if st := none.Refresh(t.Context()); st.State != StateNoLibrary || st.Reason == "" {
		t.Errorf("without a library: %+v", st)
	}
	if _, err := none.Inventory(t.Context()); !errors.Is(err, ErrNoLibrary) {
		t.Errorf("Inventory without a library: %v", err)
	}

	d := newDriver(t)
	if st := d.Refresh(t.Context()); st.State != StateDriverNotLoaded {
		t.Errorf("without a driver: %+v", st)
	}
	if _, err := d.Inventory(t.Context()); !errors.Is(err, ErrDriverNotLoaded) {
		t.Errorf("Inventory without a driver: %v", err)
	}

	s := serve(t)
	if st := d.Refresh(t.Context()); st.State != StateReady || st.GPUs != 0 {
		t.Errorf("without a GPU: %+v", st)
	}
	checkInventory(t, d)

	first := h100(0x1a, 0)
	s.set(func() { s.onBus = append(s.onBus, first) })
	checkInventory(t, d)
	if err := d.Rediscover(t.Context(), first.address(t)); err != nil {
		t.Fatalf("Rediscover: %v", err)
	}
	checkInventory(t, d, first)
	if st := d.Status(); st.GPUs != 1 {
		t.Errorf("Status() = %+v", st)
	}
}

func TestRediscover(t *testing.T) {
	a, b := h100(0x1a, 0), h100(0x1b, 1)
	for _, tt := range []struct {
		name   string
		arrive func(s *driverServer)
		want   error
		calls  []string
	}{
		{"on the bus", func(s *driverServer) { s.onBus = append(s.onBus, b) }, nil, []string{"discover"}},
		{"probed already", func(s *driverServer) { s.gpus = append(s.gpus, b) }, nil, []string{"discover"}},
		{"discover refused", func(s *driverServer) {
			s.gpus = append(s.gpus, b)
			s.refuse["discover"] = int(nvml.ERROR_NO_PERMISSION)
		}, nil, []string{"discover"}},
		{"not there", func(*driverServer) {}, ErrNotFound, []string{"discover"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, a)
			d := newDriver(t)
			checkInventory(t, d, a)
			s.set(func() { tt.arrive(s) })
			for range 2 {
				if err := d.Rediscover(t.Context(), b.address(t)); !errors.Is(err, tt.want) {
					t.Fatalf("Rediscover = %v, want %v", err, tt.want)
				}
			}
			calls := s.mutations()
			if tt.want != nil {
				calls = calls[:1]
			}
			if diff := cmp.Diff(tt.calls, calls); diff != "" {
				t.Errorf("asked of the driver (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAttributesFollowTheGPU: minor numbers and indices move when a GPU leaves; names must not.
func TestAttributesFollowTheGPU(t *testing.T) {
	a, b := h100(0x1a, 0), h100(0x1b, 1)
	s := serve(t, a, b)
	d := newDriver(t)
	checkInventory(t, d, a, b)
	if err := d.Drain(t.Context(), a.address(t)); err != nil {
		t.Fatalf("Drain: %v", err)
	}
	if err := d.Remove(t.Context(), a.address(t)); err != nil {
		t.Fatalf("Remove: %v", err)
	}
	checkInventory(t, d, b)
	c := h100(0x2c, 0)
	s.set(func() { s.onBus = append(s.onBus, c) })
	if err := d.Rediscover(t.Context(), c.address(t)); err != nil {
		t.Fatal(err)
	}
	checkInventory(t, d, b, c)
}

// TestVanished: a GPU that left without a word is gone from the list, and another at its address is itself.
func TestVanished(t *testing.T) {
	a, b := h100(0x1a, 0), h100(0x1b, 1)
	s := serve(t, a, b)
	d := newDriver(t)
	checkInventory(t, d, a, b)
	var kept nvml.Device
	if err := d.Do(t.Context(), "keep a handle", func(lib nvml.Interface) error {
		var ret nvml.Return
		kept, ret = lib.DeviceGetHandleByUUID(a.uuid)
		return failure("handle", "", ret)
	}); err != nil {
		t.Fatal(err)
	}
	s.set(func() { s.gpus = []*card{b} })
	if _, ret := kept.GetUUID(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("a handle of the lost GPU answers %d, want GPU_IS_LOST", ret)
	}
	if _, err := d.Processes(t.Context(), a.address(t)); !errors.Is(err, ErrLost) {
		t.Errorf("Processes of the lost GPU: %v", err)
	}
	checkInventory(t, d, b)

	other := h100(0x1a, 0)
	other.uuid = "GPU-ffffffff-0000-4000-8000-00000000001a"
	s.set(func() { s.gpus = []*card{other, b} })
	if err := d.Rediscover(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkInventory(t, d, other, b)
}

func TestDrain(t *testing.T) {
	a := h100(0x1a, 0)
	a.persistence = 1
	s := serve(t, a)
	d := newDriver(t)
	checkInventory(t, d, a)
	// Not hidden from a session that saw it before.
	s.set(func() { a.drain = 1 })
	if got, err := d.Inventory(t.Context(), a.address(t)); err != nil || len(got) != 1 || !got[0].Draining {
		t.Errorf("Inventory while draining = %+v, %v", got, err)
	}
	s.set(func() { a.drain = 0 })
	for range 2 {
		if err := d.Drain(t.Context(), a.address(t)); err != nil {
			t.Fatalf("Drain: %v", err)
		}
	}
	if diff := cmp.Diff([]string{"persistence 0000:1a:00.0 0", "drain 0000:1a:00.0 1"}, s.mutations()); diff != "" {
		t.Errorf("Drain asked (-want +got):\n%s", diff)
	}
	checkInventory(t, d)
	if on, err := d.Draining(t.Context(), a.address(t)); err != nil || !on {
		t.Errorf("Draining = %v, %v", on, err)
	}
	for what, d := range map[string]*Driver{"this process": d, "after a restart": newDriver(t)} {
		got, err := d.Inventory(t.Context(), a.address(t), device.PCIAddress{Bus: 0x77})
		if err != nil || len(got) != 1 || !got[0].Draining || got[0].PCI != a.address(t) {
			t.Errorf("%s: Inventory with addresses = %+v, %v", what, got, err)
		}
		if len(got) == 1 && (got[0].UUID == "") != (what == "after a restart") {
			t.Errorf("%s: UUID %q", what, got[0].UUID)
		}
		if len(got) == 1 && (got[0].Minor == unknownMinor) != (what == "after a restart") {
			t.Errorf("%s: minor %d", what, got[0].Minor)
		}
		if err := d.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}

	if err := d.Undrain(t.Context(), a.address(t)); err != nil {
		t.Fatalf("Undrain: %v", err)
	}
	if diff := cmp.Diff([]string{"drain 0000:1a:00.0 0", "persistence 0000:1a:00.0 1"}, s.mutations()); diff != "" {
		t.Errorf("Undrain asked (-want +got):\n%s", diff)
	}
	checkInventory(t, d, a)
}

func TestRemove(t *testing.T) {
	for _, tt := range []struct {
		name string
		gpu  func(*card)
		ret  nvml.Return
		want error
		left int
	}{
		{"free", func(*card) {}, nvml.SUCCESS, nil, 0},
		{"in use", func(c *card) { c.procs = []int{4711} }, nvml.SUCCESS, ErrInUse, 1},
		{"virtual machine", func(*card) {}, nvml.ERROR_NOT_SUPPORTED, ErrUnsupported, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// It is the node's last GPU in all cases.
			a := h100(0x1a, 0)
			tt.gpu(a)
			s := serve(t, a)
			s.set(func() { s.refuse["remove"] = int(tt.ret) })
			d := newDriver(t)
			if err := d.Drain(t.Context(), a.address(t)); err != nil {
				t.Fatalf("Drain: %v", err)
			}
			if err := d.Remove(t.Context(), a.address(t)); !errors.Is(err, tt.want) {
				t.Errorf("Remove = %v, want %v", err, tt.want)
			}
			s.set(func() {
				if len(s.gpus) != tt.left {
					t.Errorf("%d GPUs left, want %d", len(s.gpus), tt.left)
				}
			})
			checkInventory(t, d)
		})
	}
	t.Run("gone already", func(t *testing.T) {
		serve(t)
		d := newDriver(t)
		pci := device.PCIAddress{Bus: 0x1a}
		if err := d.Drain(t.Context(), pci); !errors.Is(err, ErrNotFound) {
			t.Errorf("Drain = %v", err)
		}
		if err := d.Remove(t.Context(), pci); !errors.Is(err, ErrNotFound) {
			t.Errorf("Remove = %v", err)
		}
	})
}

func TestProcesses(t *testing.T) {
	a := h100(0x1a, 0)
	a.procs = []int{30, 10, 20, 40, 50}
	serve(t, a)
	got, err := newDriver(t).Processes(t.Context(), a.address(t))
	if err != nil {
		t.Fatal(err)
	}
	want := []Process{{10, 10 << 20}, {20, 20 << 20}, {30, 30 << 20}, {40, 40 << 20}, {50, 50 << 20}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Processes (-want +got):\n%s", diff)
	}
}

// TestHalfInitialised: a GPU that does not answer yet is listed with its problem, and whole the next time.
func TestHalfInitialised(t *testing.T) {
	a, b := h100(0x1a, 0), h100(0x1b, 1)
	whole := b.uuid
	b.uuid = "not-a-uuid-yet"
	s := serve(t, a, b)
	d := newDriver(t)
	got, err := d.Inventory(t.Context())
	if err != nil || len(got) != 2 || got[0].Problem != nil || got[1].Problem == nil || got[1].PCI != b.address(t) {
		t.Fatalf("Inventory = %+v, %v", got, err)
	}
	s.set(func() { s.gpus = []*card{a, h100(0x1b, 1)} })
	if err := d.Rediscover(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.set(func() { b.uuid = whole })
	checkInventory(t, d, a, b)
}

// TestDriverRestarted: the driver goes and comes back under an initialised library.
func TestDriverRestarted(t *testing.T) {
	a := h100(0x1a, 0)
	d := newDriver(t)
	t.Run("before", func(t *testing.T) {
		serve(t, a)
		checkInventory(t, d, a)
	})
	if st := d.Refresh(t.Context()); st.State != StateDriverNotLoaded {
		t.Errorf("unloaded: %+v", st)
	}
	serve(t, a)
	if st := d.Refresh(t.Context()); st.State != StateReady || st.GPUs != 1 {
		t.Errorf("loaded again: %+v", st)
	}
	checkInventory(t, d, a)
}

func TestHang(t *testing.T) {
	a, b := h100(0x1a, 0), h100(0x1b, 1)
	s := serve(t, a, b)
	d, fake := newFakeClockDriver(t)
	checkInventory(t, d, a, b)

	s.stuck("procs " + a.pci)
	result := make(chan error, 1)
	go func() {
		_, err := d.Processes(context.WithoutCancel(t.Context()), a.address(t))
		result <- err
	}()
	<-s.asked
	fake.Step(DefaultCallTimeout)
	err := <-result
	if !errors.Is(err, ErrHung) || !strings.Contains(err.Error(), "nvmlDeviceGetComputeRunningProcesses_v3 has not returned since 2026-01-02T03:04:05Z") {
		t.Errorf("Processes of the hung GPU: %v", err)
	}
	if st := d.Status(); st.State != StateHung || st.Reason == "" {
		t.Errorf("Status() = %+v", st)
	}

	// The other GPU goes on, but nobody closes the library under the call that hangs in it.
	checkInventory(t, d, a, b)
	if _, err := d.Processes(t.Context(), b.address(t)); err != nil {
		t.Errorf("Processes of the other GPU: %v", err)
	}
	if err := d.Release(t.Context()); !errors.Is(err, ErrHung) {
		t.Errorf("Release = %v", err)
	}

	s.release()
	waitFor(t, d, StateReady)
	checkInventory(t, d, a, b)
	if err := d.Release(t.Context()); err != nil {
		t.Errorf("Release = %v", err)
	}
}

// TestHangEverywhere: a driver that answers nothing costs a bounded number of threads, and no caller waits.
func TestHangEverywhere(t *testing.T) {
	s := serve(t, h100(0x1a, 0))
	d, fake := newFakeClockDriver(t)
	s.stuck("list")
	for range mostHung {
		result := make(chan error, 1)
		go func() {
			_, err := d.Inventory(context.WithoutCancel(t.Context()))
			result <- err
		}()
		<-s.asked
		fake.Step(DefaultCallTimeout)
		if err := <-result; !errors.Is(err, ErrHung) {
			t.Fatalf("Inventory = %v", err)
		}
	}
	if _, err := d.Inventory(t.Context()); !errors.Is(err, ErrHung) {
		t.Errorf("Inventory = %v", err)
	}
	s.release()
	waitFor(t, d, StateUnknown)
	if st := d.Refresh(t.Context()); st.State != StateReady || st.GPUs != 1 {
		t.Errorf("after it came back: %+v", st)
	}
	// What came back late must not have left the library initialised behind our back.
	late := h100(0x1b, 1)
	s.set(func() { s.gpus = append(s.gpus, late); s.refuse["discover"] = int(nvml.ERROR_NOT_SUPPORTED) })
	if err := d.Rediscover(t.Context(), late.address(t)); err != nil {
		t.Errorf("Rediscover = %v", err)
	}
}

// TestCallerLeaves: a caller that goes away is not a hung driver.
func TestCallerLeaves(t *testing.T) {
	a := h100(0x1a, 0)
	s := serve(t, a)
	d, _ := newFakeClockDriver(t)
	checkInventory(t, d, a)
	s.stuck("procs " + a.pci)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() {
		_, err := d.Processes(ctx, a.address(t))
		result <- err
	}()
	<-s.asked
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Errorf("Processes = %v", err)
	}
	if st := d.Status(); st.State != StateReady {
		t.Errorf("Status() = %+v", st)
	}
	s.release()
	checkInventory(t, d, a)
}

// waitFor returns when every call given up has come back and the state is as wanted.
func waitFor(t *testing.T, d *Driver, want State) {
	t.Helper()
	// Whoever gets the turn as many times as there are calls given up sees them come back one by one; the
	// end of the test is the limit.
	for d.Status().State == StateHung && t.Context().Err() == nil {
		d.mu.Lock()
		full := len(d.hung) >= mostHung
		d.mu.Unlock()
		if !full {
			<-d.turn
			d.turn <- struct{}{}
		}
	}
	if st := d.Status(); st.State != want {
		t.Fatalf("Status() = %+v, want %s", st, want)
	}
}

// TestOwnHandles: while a GPU is on its way out, this process must not be who holds it.
func TestOwnHandles(t *testing.T) {
	a, b := h100(0x1a, 250), h100(0x1b, 251)
	for _, c := range []*card{a, b} {
		node := fmt.Sprintf("/dev/nvidia%d", c.minor)
		// A plain file does for being held open; these minors are no machine's.
		if err := os.WriteFile(node, nil, 0o600); err != nil {
			t.Skipf("cannot stand in for a device node: %v", err)
		}
		t.Cleanup(func() { os.Remove(node) })
	}
	serve(t, a, b)
	d := newDriver(t)
	held := func() []string {
		var nodes []string
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, "/dev/nvidia25") {
				nodes = append(nodes, to)
			}
		}
		return nodes
	}
	checkInventory(t, d, a, b)
	if got := held(); len(got) != 2 {
		t.Fatalf("held after Inventory: %v", got)
	}
	if err := d.Drain(t.Context(), a.address(t)); err != nil {
		t.Fatal(err)
	}
	checkInventory(t, d, b)
	if diff := cmp.Diff([]string{"/dev/nvidia251"}, held()); diff != "" {
		t.Errorf("held after Drain (-want +got):\n%s", diff)
	}
	if err := d.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := held(); len(got) != 0 {
		t.Errorf("held after Release: %v", got)
	}
}

// TestOldLibrary runs itself in a process of its own, with a library that lacks symbols: calling one of
// them would end that process.
func TestOldLibrary(t *testing.T) {
	if *variant != "old" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOldLibrary$", "-test.v", "-nvml-variant=old")
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestOldLibrary") {
			t.Fatalf("with the old library: %v\n%s", err, out)
		}
		return
	}
	a, b := h100(0x1a, 250), h100(0x1b, 251)
	a.persistence = 1
	a.procs = []int{10, 20}
	s := serve(t, a)
	d := newDriver(t)
	checkInventory(t, d, a)
	if procs, err := d.Processes(t.Context(), a.address(t)); err != nil || len(procs) != 2 {
		t.Errorf("Processes = %v, %v", procs, err)
	}
	s.set(func() { s.gpus = append(s.gpus, b) })
	checkInventory(t, d, a)
	if err := d.Rediscover(t.Context(), b.address(t)); err != nil {
		t.Errorf("Rediscover = %v", err)
	}
	checkInventory(t, d, a, b)
	if err := d.Drain(t.Context(), a.address(t)); !errors.Is(err, ErrUnsupported) {
		t.Errorf("Drain = %v", err)
	}
	s.set(func() {
		if a.persistence != 0 {
			t.Error("Drain left persistence mode on")
		}
	})
	if _, err := d.Inventory(t.Context()); err != nil || d.open {
		t.Errorf("Inventory while a GPU leaves: %v, library still open: %v", err, d.open)
	}
	if err := d.Remove(t.Context(), a.address(t)); !errors.Is(err, ErrUnsupported) {
		t.Errorf("Remove = %v", err)
	}
	if _, err := d.Draining(t.Context(), a.address(t)); !errors.Is(err, ErrUnsupported) {
		t.Errorf("Draining = %v", err)
	}
	// This library cannot hide the GPU that leaves, so listening ends with each look.
	e := &ear{s, d}
	e.look(t, 0)
	e.look(t, 0)
	if err := d.Undrain(t.Context(), a.address(t)); err != nil {
		t.Errorf("Undrain = %v", err)
	}
	checkInventory(t, d, a, b)
	e.look(t, 2)
	e.look(t, 2, e.tell(t, b, 79))
}

// ear follows what a driver tells of GPUs' errors.
type ear struct {
	*driverServer
	d *Driver
}

// look wants just these, and so many sets of events after it.
func (e *ear) look(t *testing.T, sets int, want ...XID) {
	t.Helper()
	got, err := e.d.XIDs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("errors (-want +got):\n%s", diff)
	}
	e.waitFor(t, sets)
}

// waitFor returns when there are so many sets: the driver notices late that one came or went.
func (e *ear) waitFor(t *testing.T, sets int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for e.listeners() != sets {
		if ctx.Err() != nil {
			t.Fatalf("%d sets of events, want %d", e.listeners(), sets)
		}
		runtime.Gosched()
	}
}

func (e *ear) tell(t *testing.T, c *card, code int) XID {
	t.Helper()
	e.report(c, code)
	return XID{PCI: c.address(t), UUID: device.GPUUUID(c.uuid), Code: uint64(code)}
}

// Errors are told once, of the GPU that reported them, also of one that came later, and again after the
// library was closed under a drain.
func TestXIDs(t *testing.T) {
	a, b, later := h100(0x1a, 0), h100(0x1b, 1), h100(0x1c, 2)
	e := &ear{serve(t, a, b), newDriver(t)}
	e.look(t, 2)
	first, second := e.tell(t, a, 31), e.tell(t, b, 79)
	e.look(t, 2, first, second)
	e.look(t, 2)

	e.set(func() { e.gpus = append(e.gpus, later) })
	if err := e.d.Rediscover(t.Context(), later.address(t)); err != nil {
		t.Fatal(err)
	}
	e.look(t, 3)
	e.look(t, 3, e.tell(t, later, 48))

	unread := e.tell(t, b, 62)
	if err := e.d.Drain(t.Context(), a.address(t)); err != nil {
		t.Fatal(err)
	}
	e.waitFor(t, 0)
	e.look(t, 2, unread) // listens anew
	e.look(t, 2, e.tell(t, b, 95))
	if err := e.d.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.waitFor(t, 0)
}

// A GPU that vanishes takes nobody else's errors along, whoever notices first that it is gone, and neither what it
// reported itself.
func TestXIDsOfOthersWhileOneVanishes(t *testing.T) {
	for name, listed := range map[string]bool{"the listener": false, "who lists GPUs": true} {
		t.Run(name, func(t *testing.T) {
			a, b := h100(0x1a, 0), h100(0x1b, 1)
			e := &ear{serve(t, a, b), newDriver(t)}
			e.look(t, 2)
			last := e.tell(t, a, 79)
			e.set(func() { e.gpus = []*card{b} })
			before := e.tell(t, b, 48)
			if listed {
				checkInventory(t, e.d, b)
				e.waitFor(t, 1) // it listens again, unasked
			}
			e.look(t, 1, last, before, e.tell(t, b, 95))
			e.look(t, 1, e.tell(t, b, 79))
		})
	}
}

// What was read is told beside an error, as of a GPU that is half initialised.
func TestXIDsBesideAnError(t *testing.T) {
	a, b := h100(0x1a, 0), h100(0x1b, 1)
	e := &ear{serve(t, a, b), newDriver(t)}
	e.look(t, 2)
	want := e.tell(t, a, 79)
	e.set(func() {
		bad := *b
		bad.pci, bad.uuid = "0000:1c:00.0", "not-a-uuid-yet"
		e.gpus = append(e.gpus, &bad)
	})
	if err := e.d.Rediscover(t.Context()); err != nil {
		t.Fatal(err)
	}
	got, err := e.d.XIDs(t.Context())
	if diff := cmp.Diff([]XID{want}, got); diff != "" || err == nil {
		t.Errorf("errors beside %v (-want +got):\n%s", err, diff)
	}
}

// A set that a call hangs with is neither used nor freed by anybody else.
func TestSetsInUse(t *testing.T) {
	a, b := h100(0x1a, 0), h100(0x1b, 1)
	e := &ear{serve(t, a, b), newDriver(t)}
	e.look(t, 2)
	hung := &session{d: e.d, ctx: t.Context()}
	of := e.d.listenedTo()[0]
	if !hung.take(of) || hung.take(of) {
		t.Fatal("a set is not one session's own")
	}
	late := e.tell(t, a, 79)
	e.look(t, 2, e.tell(t, b, 48))
	e.d.done(of, nil)
	e.look(t, 2, late)
	if !hung.take(of) {
		t.Fatal("a set was not given back")
	}
	e.d.done(of, ErrLost)
	if err := hung.free(of.set); err != nil {
		t.Fatal(err)
	}
	e.look(t, 2) // listens anew
}
