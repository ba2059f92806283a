// SPDX-License-Identifier: Apache-2.0

package hostroot

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const chassis = `
tenant: t
realm: r
credentials: {username: u, password: p, client_id: c, client_secret: s}
fabrics: [{id: 0, uuid: f}]
machines: [{name: n1, uuid: m1, slots: 3}]
devices: [{id: a, count: 2, model: A100, uuid: ""}]
`

const gpuDir = "tree/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0/0000:3d:00.0"

// bench is a machine with its files. Changes of the core reach the files at once, as in the simulator; done gets a word each
// time they have.
type bench struct {
	*core.Core
	*Root
	t    *testing.T
	done chan struct{}
}

func start(t *testing.T, dir, state string) bench {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make device nodes")
	}
	cfg, err := config.Parse([]byte(chassis))
	if err != nil {
		t.Fatal(err)
	}
	b := bench{t: t, done: make(chan struct{}, 100)}
	b.Core, err = core.New(t.Context(), cfg, core.Options{
		Clock: clock.RealClock{}, StatePath: state, Numbers: []core.Number{{Major: 4, Minor: 20}, {Major: 4, Minor: 21}},
		Hooks: core.Hooks{Changed: func(string) {
			if b.Root == nil {
				return
			}
			if serr := b.Sync(t.Context()); serr != nil {
				t.Error(serr)
			}
			b.done <- struct{}{}
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	view, err := b.Machine("n1")
	if err != nil {
		t.Fatal(err)
	}
	if b.Root, err = New(dir, view, b.Core, core.Number{Major: 4, Minor: 22}, core.Number{Major: 4, Minor: 23}); err != nil {
		t.Fatal(err)
	}
	if err := b.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b bench) watch() {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.Watch(ctx) }()
	b.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			b.t.Error(err)
		}
	})
}

func (b bench) attach() {
	b.t.Helper()
	_, err := b.Attach(b.t.Context(), core.AttachRequest{Machine: "n1", Specs: []core.Spec{{Model: "A100", Count: 1}}, Limit: -1})
	if err != nil {
		b.t.Fatal(err)
	}
	<-b.done
}

func (b bench) read(path string) string {
	b.t.Helper()
	data, err := os.ReadFile(b.pci(path))
	if err != nil {
		b.t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

func (b bench) exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func TestSync_showsAnAttachedGPU(t *testing.T) {
	b := start(t, t.TempDir(), "")
	if b.read("slots/1/adapter") != "0" || b.exists(b.pci("devices/0000:3d:00.0")) {
		t.Fatal("an empty slot shows a card")
	}
	b.attach()
	got := map[string]string{}
	for _, f := range []string{"vendor", "device", "class", "numa_node", "uevent"} {
		got[f] = b.read("devices/0000:3d:00.0/" + f)
	}
	want := map[string]string{
		"vendor": "0x10de", "device": "0x20b5", "class": "0x030200", "numa_node": "0",
		"uevent": "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:20B5\nPCI_SUBSYS_ID=10DE:1533\nPCI_SLOT_NAME=0000:3d:00.0\n" +
			"MODALIAS=pci:v000010DEd000020B5sv000010DEsd00001533bc03sc02i00",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("attributes (-want +got):\n%s", diff)
	}
	config, err := os.ReadFile(b.pci("devices/0000:3d:00.0/config"))
	if err != nil || len(config) != 4096 || string(config[:4]) != "\xde\x10\xb5\x20" || string(config[0x100:0x104]) != "\x03\x00\x01\x00" {
		t.Errorf("configuration space: %d bytes, %v", len(config), err)
	}
	for link, target := range map[string]string{
		"devices/0000:3d:00.0":        gpuDir,
		"drivers/nvidia/0000:3d:00.0": gpuDir,
		gpuDir + "/driver":            "drivers/nvidia",
		gpuDir + "/subsystem":         ".",
		"devices/0000:3c:00.0":        filepath.Dir(gpuDir),
		"devices/0000:3c:00.0/driver": "drivers/pcieport",
	} {
		to, err := filepath.EvalSymlinks(b.pci(link))
		want, werr := filepath.EvalSymlinks(b.pci(target))
		if err != nil || werr != nil || to != want {
			t.Errorf("%s leads to %s, %v; want %s", link, to, err, target)
		}
	}
	if to, err := os.Readlink(b.pci("devices/0000:3d:00.0")); err != nil || filepath.IsAbs(to) {
		t.Errorf("link %s, %v: must hold where it is mounted", to, err)
	}
	if s := b.read("slots/1/address") + b.read("slots/1/adapter") + b.read("slots/1/power") + b.read("slots/2/adapter"); s != "0000:3d:00110" {
		t.Errorf("slots say %s", s)
	}
	for name, n := range map[string]core.Number{
		"nvidia0": {Major: 4, Minor: 20}, "nvidiactl": {Major: 4, Minor: 22}, "nvidia-uvm": {Major: 4, Minor: 23}, "null": {Major: 1, Minor: 3},
	} {
		if !isNode(b.dev(name), n) {
			t.Errorf("dev/%s is not the character device %s", name, n)
		}
	}
}

func TestWatch_actsOnControlFiles(t *testing.T) {
	const bdf = "0000:3d:00.0"
	tests := []struct {
		name                      string
		prepare                   func(b bench) error
		file, content             string
		onBus, bound, otherDriver bool
	}{
		{name: "remove", file: "devices/" + bdf + "/remove", content: "1"},
		{name: "unbind", file: "drivers/nvidia/unbind", content: bdf + "\n", onBus: true},
		{name: "bind", prepare: func(b bench) error { return b.Unbind("n1", bdf) }, file: "drivers/nvidia/bind", content: bdf, onBus: true, bound: true},
		{name: "probe", prepare: func(b bench) error { return b.Unbind("n1", bdf) }, file: "drivers_probe", content: bdf, onBus: true, bound: true},
		{name: "slot off", file: "slots/1/power", content: "0"},
		{name: "slot on", prepare: func(b bench) error { return b.SlotPower("n1", 1, false) }, file: "slots/1/power", content: "1\n", onBus: true, bound: true},
		{name: "rescan all", prepare: func(b bench) error { return b.RemovePCI("n1", bdf) }, file: "rescan", content: "1", onBus: true, bound: true},
		{name: "rescan by the port", prepare: func(b bench) error { return b.RemovePCI("n1", bdf) }, file: "devices/0000:3c:00.0/rescan", content: "1\n", onBus: true, bound: true},
		{name: "rescan of the bus", prepare: func(b bench) error { return b.RemovePCI("n1", bdf) }, file: "devices/0000:3c:00.0/pci_bus/0000:3d/rescan", content: "1", onBus: true, bound: true},
		{name: "rescan of another bus", prepare: func(b bench) error { return b.RemovePCI("n1", bdf) }, file: "devices/0000:3c:01.0/pci_bus/0000:3e/rescan", content: "1"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			b := start(t, t.TempDir(), "")
			b.attach()
			if tc.prepare != nil {
				if err := tc.prepare(b); err != nil {
					t.Fatal(err)
				}
			}
			b.watch()
			for len(b.done) > 0 {
				<-b.done
			}
			if err := os.WriteFile(b.pci(tc.file), []byte(tc.content), 0o200); err != nil {
				t.Fatal(err)
			}
			<-b.done
			if onBus := b.exists(b.pci("devices/" + bdf)); onBus != tc.onBus || b.exists(b.pci(gpuDir)) != onBus {
				t.Errorf("on the bus: %v, want %v", onBus, tc.onBus)
			}
			if bound := b.exists(b.pci("drivers/nvidia/" + bdf)); bound != tc.bound || b.exists(b.dev("nvidia0")) != bound {
				t.Errorf("bound: %v, want %v", bound, tc.bound)
			}
		})
	}
}

func TestNew_adoptsWithoutABlink(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "state.json")
	inode := func(path string) uint64 {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		return st.Ino
	}
	first := start(t, dir, state)
	first.attach()
	paths := []string{first.pci(), first.pci(gpuDir), first.pci("devices/0000:3d:00.0"), first.pci("rescan"), first.dev("nvidia0"), first.dev("")}
	var before []uint64
	for _, p := range paths {
		before = append(before, inode(p))
	}
	first.Close()
	// What a killed run leaves half done: a GPU that has gone from the core, a node of nobody.
	stale := first.pci("tree/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:02.0/0000:3f:00.0")
	if err := errors.Join(
		os.Mkdir(stale, 0o755), os.WriteFile(filepath.Join(stale, "class"), []byte("0x030200\n"), 0o600),
		os.Symlink(stale, first.pci("devices/0000:3f:00.0")), os.WriteFile(first.dev("nvidia7"), nil, 0o600),
		os.WriteFile(first.dev("mine"), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}

	again := start(t, dir, state)
	for i, p := range paths {
		if inode(p) != before[i] {
			t.Errorf("%s was replaced", p)
		}
	}
	for p, want := range map[string]bool{
		stale: false, again.pci("devices/0000:3f:00.0"): false, again.dev("nvidia7"): false, again.dev("mine"): true,
	} {
		if again.exists(p) != want {
			t.Errorf("%s exists: %v, want %v", p, !want, want)
		}
	}
	again.watch()
	if err := os.WriteFile(again.pci("devices/0000:3d:00.0/remove"), []byte("1"), 0o200); err != nil {
		t.Fatal(err)
	}
	<-again.done
	if again.exists(again.pci("devices/0000:3d:00.0")) {
		t.Error("an adopted GPU cannot be removed")
	}
}

func TestWatch_actsOnWhatWasWrittenWhileItWasDown(t *testing.T) {
	b := start(t, t.TempDir(), "")
	b.attach()
	if err := os.WriteFile(b.pci("devices/0000:3d:00.0/remove"), []byte("1"), 0o200); err != nil {
		t.Fatal(err)
	}
	b.watch()
	<-b.done
	if b.exists(b.pci("devices/0000:3d:00.0")) {
		t.Error("the GPU is still there")
	}
}

func TestSync_driverUnloaded(t *testing.T) {
	b := start(t, t.TempDir(), "")
	b.attach()
	off := false
	if err := b.ChangeMachine("n1", simapi.MachineChange{DriverLoaded: &off}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"nvidia0", "nvidiactl", "nvidia-uvm"} {
		if b.exists(b.dev(name)) {
			t.Errorf("dev/%s is still there", name)
		}
	}
	if !b.exists(b.pci("devices/0000:3d:00.0")) {
		t.Error("the GPU left the bus with its driver")
	}
}

func TestInstallDriver(t *testing.T) {
	b := start(t, t.TempDir(), "")
	source := filepath.Join(t.TempDir(), "lib.so")
	if err := os.WriteFile(source, []byte("elf"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := config.Driver{Version: "570.1", NVMLLibrary: source, Stub: source, Files: []config.DriverFile{{Source: source, Path: "../../etc/x"}}}
	for range 2 {
		if err := b.InstallDriver(d); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{
		LibDir() + "/libnvidia-ml.so.570.1", LibDir() + "/libnvidia-ml.so.1", LibDir() + "/libcuda.so", "etc/x",
	} {
		if data, err := os.ReadFile(filepath.Join(b.DriverRoot(), f)); err != nil || string(data) != "elf" {
			t.Errorf("%s: %q, %v", f, data, err)
		}
	}
	d.NVMLLibrary = filepath.Join(t.TempDir(), "absent")
	if err := b.InstallDriver(d); err == nil || !strings.Contains(err.Error(), "absent") {
		t.Errorf("error %v, want one that names the missing library", err)
	}
}

func TestNumbers_openAndAreDistinct(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make device nodes")
	}
	dir := t.TempDir()
	numbers, err := Numbers(dir, 12)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[core.Number]bool{}
	for _, n := range numbers {
		if seen[n] {
			t.Errorf("%s is given out twice", n)
		}
		seen[n] = true
		path := filepath.Join(dir, "node")
		if err := mknod(path, n); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
		if err != nil {
			t.Errorf("open %s: %v", n, err)
			continue
		}
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	}
	if _, err := Numbers(dir, 1<<20); err == nil {
		t.Error("found a million device numbers")
	}
}
