// SPDX-License-Identifier: Apache-2.0

package hostroot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/uevent"
)

// Kernel is what a write to a control file reaches.
type Kernel interface {
	Machine(name string) (core.MachineView, error)
	Rescan(machine, bus string) error
	RemovePCI(machine, address string) error
	Bind(machine, address string) error
	Unbind(machine, address string) error
	SlotPower(machine string, slot int, on bool) error
	Discover(machine string) error
}

// Root is the host root of one machine.
type Root struct {
	dir     string
	machine string
	kernel  Kernel
	// control and uvm are the driver's own device nodes.
	control, uvm core.Number
	netns, pids  []string

	watcher *fsnotify.Watcher

	mu sync.Mutex
	// shown are the GPUs that the files show, by address.
	shown map[string]core.Device
	// own is what the simulator itself wrote to a power file, by path: anything else in it is somebody's wish.
	own map[string]string
	// act says what a write to a file does, by path.
	act map[string]func(content string) error
}

// New makes the directories and everything that does not change, and starts to listen for writes. Nothing acts on them before
// Watch runs.
func New(dir string, m core.MachineView, kernel Kernel, control, uvm core.Number) (*Root, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch host root %s: %w", dir, err)
	}
	r := &Root{
		dir: dir, machine: m.Name, kernel: kernel, control: control, uvm: uvm, netns: m.Netns, pids: m.NetnsPIDs, watcher: w,
		shown: map[string]core.Device{}, own: map[string]string{}, act: map[string]func(string) error{},
	}
	if err := r.makeFixed(m); err != nil {
		return nil, errors.Join(fmt.Errorf("make host root of %s: %w", m.Name, err), w.Close())
	}
	return r, nil
}

// Dir is the host root.
func (r *Root) Dir() string { return r.dir }

func (r *Root) pci(parts ...string) string {
	return filepath.Join(append([]string{r.dir, "sys/bus/pci"}, parts...)...)
}

func (r *Root) dev(name string) string { return filepath.Join(r.dir, "dev", name) }

// makeFixed makes ports, drivers and slots, and adopts the GPUs of a former run.
func (r *Root) makeFixed(m core.MachineView) error {
	for _, d := range []string{"devices", "drivers", "slots", "tree"} {
		if err := makeDir(r.pci(d)); err != nil {
			return err
		}
	}
	if err := r.makeDev(); err != nil {
		return err
	}
	for name, content := range map[string]string{"drivers_autoprobe": "1\n", "drivers_probe": "", "uevent": ""} {
		if err := write(r.pci(name), content); err != nil {
			return err
		}
	}
	for _, driver := range []string{portDriver, core.DriverName} {
		if err := r.makeDriver(driver); err != nil {
			return err
		}
	}
	if err := r.controlFile(r.pci("rescan"), func(s string) error { return r.rescan(s, "") }); err != nil {
		return err
	}
	if err := r.controlFile(r.pci("drivers_probe"), r.probe); err != nil {
		return err
	}
	if err := r.watcher.Add(r.pci()); err != nil {
		return err
	}
	for _, p := range ports(m.Slots) {
		if err := r.makePort(p); err != nil {
			return err
		}
	}
	for s := 1; s <= m.Slots; s++ {
		if err := r.makeSlot(s); err != nil {
			return err
		}
	}
	return r.adopt(m)
}

func (r *Root) makeDriver(driver string) error {
	dir := r.pci("drivers", driver)
	if err := makeDir(dir); err != nil {
		return err
	}
	for _, name := range []string{"new_id", "remove_id"} {
		if err := write(filepath.Join(dir, name), ""); err != nil {
			return err
		}
	}
	bind := func(s string) error { return r.kernel.Bind(r.machine, s) }
	unbind := func(s string) error { return r.kernel.Unbind(r.machine, s) }
	if driver != core.DriverName {
		refuse := func(s string) error {
			return fmt.Errorf("driver %s on %q: the simulated ports keep theirs", driver, s)
		}
		bind, unbind = refuse, refuse
	}
	if err := r.controlFile(filepath.Join(dir, "bind"), bind); err != nil {
		return err
	}
	if err := r.controlFile(filepath.Join(dir, "unbind"), unbind); err != nil {
		return err
	}
	return r.watcher.Add(dir)
}

func (r *Root) makePort(p function) error {
	dir := r.pci("tree", p.path)
	if err := r.makeFunction(dir, p); err != nil {
		return err
	}
	if err := r.controlFile(filepath.Join(dir, "remove"), func(string) error {
		return fmt.Errorf("remove of port %s: not simulated", p.address)
	}); err != nil {
		return err
	}
	// A rescan through a device scans the bus that it is on, and all below.
	if err := r.controlFile(filepath.Join(dir, "rescan"), func(s string) error { return r.rescan(s, "") }); err != nil {
		return err
	}
	if err := r.watcher.Add(dir); err != nil {
		return err
	}
	bus := fmt.Sprintf("0000:%02x", p.secondary)
	busDir := filepath.Join(dir, "pci_bus", bus)
	if err := makeDir(busDir); err != nil {
		return err
	}
	only := bus
	if p.address == core.RootPort || p.address == core.UpstreamPort {
		only = ""
	}
	if err := r.controlFile(filepath.Join(busDir, "rescan"), func(s string) error { return r.rescan(s, only) }); err != nil {
		return err
	}
	if err := r.watcher.Add(busDir); err != nil {
		return err
	}
	return r.link(p)
}

func (r *Root) makeSlot(slot int) error {
	dir := r.pci("slots", fmt.Sprint(slot))
	if err := makeDir(dir); err != nil {
		return err
	}
	for name, content := range map[string]string{
		"address": core.SlotBus(slot) + ":00\n", "max_bus_speed": "16.0 GT/s PCIe\n", "cur_bus_speed": "16.0 GT/s PCIe\n",
		"attention": "0\n", "latch": "0\n", "adapter": "0\n",
	} {
		if err := write(filepath.Join(dir, name), content); err != nil {
			return err
		}
	}
	path := filepath.Join(dir, "power")
	if err := r.controlFile(path, func(s string) error { return r.slotPower(slot, s) }); err != nil {
		return err
	}
	return r.watcher.Add(dir)
}

// makeFunction writes a device directory with all its attributes.
func (r *Root) makeFunction(dir string, f function) error {
	if err := makeDir(dir); err != nil {
		return err
	}
	files := f.files()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := write(filepath.Join(dir, name), files[name]); err != nil {
			return err
		}
	}
	return symlink(relative(dir, r.pci()), filepath.Join(dir, "subsystem"))
}

// link makes the two symbolic links that lead to and from a device directory.
func (r *Root) link(f function) error {
	dir := r.pci("tree", f.path)
	if f.driver != "" {
		driver := r.pci("drivers", f.driver)
		if err := symlink(relative(dir, driver), filepath.Join(dir, "driver")); err != nil {
			return err
		}
		if err := symlink(relative(driver, dir), filepath.Join(driver, f.address)); err != nil {
			return err
		}
	}
	return symlink(relative(r.pci("devices"), dir), r.pci("devices", f.address))
}

// adopt takes over the GPUs that a former run showed and that are still there, without a blink, and clears away the others.
func (r *Root) adopt(view core.MachineView) error {
	present := map[string]core.Device{}
	for _, d := range view.OnBus {
		present[d.Address()] = d
	}
	dirs, err := filepath.Glob(r.pci("tree", filepath.Dir(slotPath(1)), "0000:*", "0000:*", "class"))
	if err != nil {
		return err
	}
	for _, class := range dirs {
		dir := filepath.Dir(class)
		address := filepath.Base(dir)
		d, ok := present[address]
		f := gpu(d)
		if id, err := os.ReadFile(filepath.Join(dir, "device")); !ok || err != nil || string(id) != f.files()["device"] {
			err := errors.Join(removeFile(r.pci("devices", address)), removeFile(r.pci("drivers", core.DriverName, address)), os.RemoveAll(dir))
			if err != nil {
				return err
			}
			continue
		}
		if err := errors.Join(r.makeFunction(dir, f), r.register(dir, f), r.adoptBinding(dir, f, d)); err != nil {
			return err
		}
		r.shown[address] = d
	}
	return r.clearNodes(view)
}

func (r *Root) adoptBinding(dir string, f function, d core.Device) error {
	if !d.Bound {
		return errors.Join(removeFile(filepath.Join(dir, "driver")), removeFile(r.pci("drivers", core.DriverName, f.address)), r.link(f))
	}
	if node := r.dev(fmt.Sprintf("nvidia%d", d.Minor)); !isNode(node, d.Number) {
		if err := mknod(node, d.Number); err != nil {
			return err
		}
	}
	return r.link(f)
}

// clearNodes removes the GPU nodes that no bound device has.
func (r *Root) clearNodes(view core.MachineView) error {
	keep := map[string]bool{}
	for _, d := range view.OnBus {
		if d.Bound {
			keep[r.dev(fmt.Sprintf("nvidia%d", d.Minor))] = true
		}
	}
	nodes, err := filepath.Glob(r.dev("nvidia[0-9]*"))
	for _, n := range nodes {
		if !keep[n] {
			err = errors.Join(err, removeFile(n))
		}
	}
	return err
}

// register makes the control files of a GPU's directory act.
func (r *Root) register(dir string, f function) error {
	r.act[filepath.Join(dir, "remove")] = func(s string) error { return r.remove(s, f.address) }
	r.act[filepath.Join(dir, "rescan")] = func(s string) error { return r.rescan(s, f.address[:len("0000:3d")]) }
	return r.watcher.Add(dir)
}

// makeDev makes what every /dev has, so that the directory can be mounted over a node's; what is there already is kept.
func (r *Root) makeDev() error {
	for _, d := range []string{"", "pts", "shm", "mqueue"} {
		if err := makeDir(r.dev(d)); err != nil {
			return err
		}
	}
	for name, n := range map[string]core.Number{
		"null": {Major: 1, Minor: 3}, "zero": {Major: 1, Minor: 5}, "full": {Major: 1, Minor: 7}, "random": {Major: 1, Minor: 8},
		"urandom": {Major: 1, Minor: 9}, "kmsg": {Major: 1, Minor: 11}, "tty": {Major: 5, Minor: 0},
	} {
		if !isNode(r.dev(name), n) {
			if err := mknod(r.dev(name), n); err != nil {
				return err
			}
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
	} {
		if _, err := os.Lstat(r.dev(name)); errors.Is(err, fs.ErrNotExist) {
			if err := os.Symlink(target, r.dev(name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Sync makes the files show what the core knows, and announces what changed.
func (r *Root) Sync(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	view, err := r.kernel.Machine(r.machine)
	if err != nil {
		return err
	}
	now := map[string]core.Device{}
	for _, d := range view.OnBus {
		now[d.Address()] = d
	}
	var errs []error
	for _, address := range slices.Sorted(maps.Keys(r.shown)) {
		if d, ok := now[address]; !ok || d.ID != r.shown[address].ID {
			errs = append(errs, r.hide(ctx, r.shown[address]))
		}
	}
	for _, address := range slices.Sorted(maps.Keys(now)) {
		errs = append(errs, r.show(ctx, now[address]))
	}
	for s := 1; s <= view.Slots; s++ {
		errs = append(errs, r.showSlot(s, view.Linked[s], !view.SlotOff[s] && view.Linked[s]))
	}
	errs = append(errs, r.showDriver(view.DriverLoaded))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("show %s in %s: %w", r.machine, r.dir, err)
	}
	return nil
}

func (r *Root) show(ctx context.Context, d core.Device) error {
	old, known := r.shown[d.Address()]
	rebound := known && (old.Bound != d.Bound || old.Minor != d.Minor)
	var err error
	if !known {
		err = r.add(ctx, d)
	}
	if rebound && old.Bound {
		err = r.unbound(ctx, old)
	}
	if rebound && d.Bound {
		err = errors.Join(err, r.bound(ctx, d))
	}
	if err == nil {
		r.shown[d.Address()] = d
	}
	return err
}

// add builds the directory aside, so that it appears with all its files. A device that the driver takes at once appears with
// its driver and its node: the kernel would block whoever asks for a probe in between, which files cannot.
func (r *Root) add(ctx context.Context, d core.Device) error {
	f, unbound := gpu(d), gpu(d)
	unbound.driver = ""
	dir := r.pci("tree", f.path)
	aside := r.pci("tree", ".new-"+f.address)
	if err := errors.Join(os.RemoveAll(aside), os.RemoveAll(dir)); err != nil {
		return err
	}
	if err := r.makeFunction(aside, f); err != nil {
		return err
	}
	for _, name := range []string{"remove", "rescan"} {
		if err := write(filepath.Join(aside, name), ""); err != nil {
			return err
		}
	}
	if err := symlink(relative(dir, r.pci()), filepath.Join(aside, "subsystem")); err != nil {
		return err
	}
	if d.Bound {
		node := r.dev(fmt.Sprintf("nvidia%d", d.Minor))
		driver := symlink(relative(dir, r.pci("drivers", f.driver)), filepath.Join(aside, "driver"))
		if err := errors.Join(driver, mknod(node, d.Number)); err != nil {
			return err
		}
	}
	if err := os.Rename(aside, dir); err != nil {
		return err
	}
	if err := errors.Join(r.register(dir, f), r.link(f)); err != nil {
		return err
	}
	r.send(ctx, unbound.event("add"))
	if d.Bound {
		r.send(ctx, f.event("bind"))
	}
	return nil
}

func (r *Root) bound(ctx context.Context, d core.Device) error {
	f := gpu(d)
	dir := r.pci("tree", f.path)
	if err := write(filepath.Join(dir, "uevent"), f.files()["uevent"]); err != nil {
		return err
	}
	if err := r.link(f); err != nil {
		return err
	}
	if err := mknod(r.dev(fmt.Sprintf("nvidia%d", d.Minor)), d.Number); err != nil {
		return err
	}
	r.send(ctx, f.event("bind"))
	return nil
}

func (r *Root) unbound(ctx context.Context, d core.Device) error {
	f := gpu(d)
	dir := r.pci("tree", f.path)
	node := r.dev(fmt.Sprintf("nvidia%d", d.Minor))
	var errs []error
	// The node may be another GPU's by now.
	if isNode(node, d.Number) {
		errs = append(errs, os.Remove(node))
	}
	errs = append(errs, removeFile(filepath.Join(dir, "driver")), removeFile(r.pci("drivers", core.DriverName, f.address)))
	f.driver = ""
	errs = append(errs, write(filepath.Join(dir, "uevent"), f.files()["uevent"]))
	r.send(ctx, f.event("unbind"))
	return errors.Join(errs...)
}

func (r *Root) hide(ctx context.Context, d core.Device) error {
	var errs []error
	if d.Bound {
		errs = append(errs, r.unbound(ctx, d))
	}
	f := gpu(d)
	f.driver = ""
	dir := r.pci("tree", f.path)
	delete(r.act, filepath.Join(dir, "remove"))
	delete(r.act, filepath.Join(dir, "rescan"))
	delete(r.shown, d.Address())
	errs = append(errs, removeFile(r.pci("devices", f.address)), os.RemoveAll(dir))
	r.send(ctx, f.event("remove"))
	return errors.Join(errs...)
}

func (r *Root) showSlot(slot int, adapter, power bool) error {
	dir := r.pci("slots", fmt.Sprint(slot))
	r.own[filepath.Join(dir, "power")] = bit(power)
	return errors.Join(write(filepath.Join(dir, "adapter"), bit(adapter)), write(filepath.Join(dir, "power"), bit(power)))
}

// showDriver makes the driver's own nodes come and go with it.
func (r *Root) showDriver(loaded bool) error {
	var errs []error
	for name, n := range map[string]core.Number{"nvidiactl": r.control, "nvidia-uvm": r.uvm} {
		path := r.dev(name)
		switch {
		case loaded && !isNode(path, n):
			errs = append(errs, mknod(path, n))
		case !loaded:
			errs = append(errs, removeFile(path))
		}
	}
	return errors.Join(errs...)
}

func (r *Root) send(ctx context.Context, e uevent.Event) {
	namespaces, err := uevent.Namespaces(r.netns, r.pids)
	err = errors.Join(err, uevent.Send(namespaces, e))
	if err != nil {
		klog.FromContext(ctx).Error(err, "Uevent was not sent everywhere", "machine", r.machine, "action", e.Action)
	}
}

func bit(on bool) string {
	if on {
		return "1\n"
	}
	return "0\n"
}

// write leaves a file alone that has the content already: its inode may be mounted somewhere, and a write wakes watchers.
func write(path, content string) error {
	if old, err := os.ReadFile(path); err == nil && string(old) == content {
		return nil
	}
	// Not truncated first: a reader must not find the file empty in between.
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644) //nolint:gosec // as in sysfs
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Truncate(int64(len(content))), f.Close())
}

func symlink(target, path string) error {
	if old, err := os.Readlink(path); err == nil && old == target {
		return nil
	}
	if err := removeFile(path); err != nil {
		return err
	}
	return os.Symlink(target, path)
}

// makeDir makes a directory that everybody may read, as those of sysfs and /dev.
func makeDir(path string) error {
	return os.MkdirAll(path, 0o755) //nolint:gosec // see above
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { //nolint:gosec // below the host root
		return err
	}
	return nil
}

// relative is the path from directory to target; both are below the same root.
func relative(directory, target string) string {
	rel, err := filepath.Rel(directory, target)
	if err != nil {
		return target
	}
	return rel
}

func trimmed(data []byte) string { return strings.Trim(string(data), " \t\r\n\x00") }
