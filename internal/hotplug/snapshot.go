// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Function is one PCI function as sysfs showed it.
type Function struct {
	Address device.PCIAddress
	// Instance tells one arrival at an address from the next: the inode number of its directory.
	Instance  uint64
	Vendor    uint16
	Device    uint16
	SubVendor uint16
	SubDevice uint16
	// Class is the 24-bit class code.
	Class uint32
	// Driver is the bound driver's name, "" if none is.
	Driver string
	// Port is the bridge above, zero on a root bus.
	Port device.PCIAddress
	// Root is the name of the root complex, "pci0000:3a".
	Root string
	// Slot is the name of the hot-plug slot, "" if there is none.
	Slot string
	// NUMANode is -1 where the firmware does not say.
	NUMANode int
	// BootVGA is set for the display that the firmware used.
	BootVGA bool
	// IOMMUGroup is "" without an IOMMU.
	IOMMUGroup string
	Serial     Serial
	// Problem says why the function cannot be used although it is there, or "".
	Problem string
}

// Snapshot is what was on the bus, ordered by address.
type Snapshot []Function

// Find returns the function at an address.
func (s Snapshot) Find(addr device.PCIAddress) (Function, bool) {
	i, ok := slices.BinarySearchFunc(s, addr, func(f Function, a device.PCIAddress) int { return f.Address.Compare(a) })
	if !ok {
		return Function{}, false
	}
	return s[i], true
}

// Change is a function that is the same piece of hardware in another state.
type Change struct{ Old, New Function }

// Difference is what happened between two snapshots. Another piece of hardware at the same address is
// in Removed and in Added.
type Difference struct {
	Added   []Function
	Removed []Function
	Changed []Change
}

// IsEmpty tells whether nothing happened.
func (d Difference) IsEmpty() bool {
	return len(d.Added) == 0 && len(d.Removed) == 0 && len(d.Changed) == 0
}

// Delta compares two snapshots.
func Delta(before, after Snapshot) Difference {
	var d Difference
	for _, o := range before {
		n, ok := after.Find(o.Address)
		switch {
		case !ok:
			d.Removed = append(d.Removed, o)
		case !o.sameHardware(n):
			d.Removed = append(d.Removed, o)
			d.Added = append(d.Added, n)
		case o != n:
			d.Changed = append(d.Changed, Change{Old: o, New: n})
		}
	}
	for _, n := range after {
		if _, ok := before.Find(n.Address); !ok {
			d.Added = append(d.Added, n)
		}
	}
	slices.SortFunc(d.Added, func(a, b Function) int { return a.Address.Compare(b.Address) })
	return d
}

// sameHardware tells whether both were read of one arrival of one device. The address alone is not it.
func (f Function) sameHardware(g Function) bool {
	return f.Instance == g.Instance && f.Serial == g.Serial && f.Vendor == g.Vendor && f.Device == g.Device
}

// Snapshot lists the matching functions. One that leaves the bus during the read is left out.
func (p *PCI) Snapshot(ctx context.Context) (Snapshot, error) {
	entries, err := os.ReadDir(p.bus("devices"))
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	slots, err := p.slots()
	if err != nil {
		return nil, err
	}
	var s Snapshot
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("list PCI devices: %w", err)
		}
		addr, err := device.ParsePCIAddress(e.Name())
		if err != nil {
			continue // not a function
		}
		f, ok, err := p.function(addr, slots)
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read PCI device %s: %w", addr, err)
		}
		if ok {
			s = append(s, f)
		}
	}
	slices.SortFunc(s, func(a, b Function) int { return a.Address.Compare(b.Address) })
	return s, nil
}

// gone tells whether an error means that a device or process left while it was being read.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENXIO) ||
		errors.Is(err, syscall.ESRCH)
}

// present tells whether the address has a directory on the bus.
func (p *PCI) present(addr device.PCIAddress) (bool, error) {
	_, err := os.Stat(p.bus("devices", addr.String()))
	if gone(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for PCI device %s: %w", addr, err)
	}
	return true, nil
}

// function reads one function; ok is false if it does not match.
func (p *PCI) function(addr device.PCIAddress, slots map[string]string) (f Function, ok bool, err error) {
	dir := p.bus("devices", addr.String())
	vendor, err := readHex[uint16](dir, "vendor", 16)
	if err != nil {
		return f, false, err
	}
	class, err := readHex[uint32](dir, "class", 24)
	if err != nil {
		return f, false, err
	}
	f = Function{Address: addr, Vendor: vendor, Class: class, NUMANode: -1}
	if !p.match(f.Vendor, f.Class) {
		return f, false, nil
	}
	err = f.read(dir, slots)
	if gone(err) {
		return f, false, err
	}
	if err != nil {
		// One function that cannot be read must not hide the others.
		f.Problem = "cannot be read: " + err.Error()
	}
	return f, true, nil
}

// read fills in everything but vendor and class.
func (f *Function) read(dir string, slots map[string]string) error {
	if err := f.readIdentity(dir); err != nil {
		return err
	}
	if err := f.readPlace(dir, slots); err != nil {
		return err
	}
	var err error
	if f.Driver, err = linkBase(dir, "driver"); err != nil {
		return err
	}
	if f.IOMMUGroup, err = linkBase(dir, "iommu_group"); err != nil {
		return err
	}
	resource, err := os.ReadFile(filepath.Join(dir, "resource"))
	if err != nil {
		return err
	}
	f.Problem, err = barProblem(string(resource), requiredBARs(f.Vendor))
	return err
}

// readIdentity reads what the hardware is.
func (f *Function) readIdentity(dir string) error {
	var err error
	if f.Device, err = readHex[uint16](dir, "device", 16); err != nil {
		return err
	}
	// Subsystem ids tell board variants apart; nothing depends on them, so they may be absent.
	if f.SubVendor, err = optional(readHex[uint16](dir, "subsystem_vendor", 16)); err != nil {
		return err
	}
	if f.SubDevice, err = optional(readHex[uint16](dir, "subsystem_device", 16)); err != nil {
		return err
	}

	config, err := os.Open(filepath.Join(dir, "config"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // older kernels create it after the device is on the bus
	}
	if err != nil {
		return err
	}
	defer config.Close()
	f.Serial, err = readSerial(configReader{config})
	return err
}

// configReader turns a file that ends early into io.EOF for the capability walk.
type configReader struct{ f *os.File }

func (c configReader) ReadAt(b []byte, off int64) (int, error) {
	n, err := c.f.ReadAt(b, off)
	if n < len(b) && err == nil {
		err = io.EOF
	}
	return n, err
}

// readPlace reads where the function sits.
func (f *Function) readPlace(dir string, slots map[string]string) error {
	// The link's target is the chain of bridges: .../pci0000:3a/0000:3a:00.0/0000:3b:00.0
	target, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	info, err := os.Stat(target)
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		f.Instance = st.Ino
	}
	// On a root bus the parent is the root complex, not a function.
	f.Port, _ = device.ParsePCIAddress(filepath.Base(filepath.Dir(target))) //nolint:errcheck // see above
	for part := range strings.SplitSeq(target, string(filepath.Separator)) {
		if strings.HasPrefix(part, "pci") && strings.Contains(part, ":") {
			f.Root = part
		}
	}
	f.Slot = slots[slotAddress(f.Address)]

	node, err := readTrimmed(dir, "numa_node")
	switch {
	case err == nil:
		if f.NUMANode, err = strconv.Atoi(node); err != nil {
			return fmt.Errorf("numa_node %q is not a number", node)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	boot, err := optional(readHex[uint16](dir, "boot_vga", 8))
	if err != nil {
		return err
	}
	f.BootVGA = boot != 0
	return nil
}

// slotAddress is how a slot names the place that it holds: an address without function.
func slotAddress(a device.PCIAddress) string {
	s, _, _ := strings.Cut(a.String(), ".")
	return s
}

// slots maps the address that each hot-plug slot holds to the slot's name.
func (p *PCI) slots() (map[string]string, error) {
	entries, err := os.ReadDir(p.bus("slots"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list PCI slots: %w", err)
	}
	slots := make(map[string]string, len(entries))
	for _, e := range entries {
		addr, err := readTrimmed(p.bus("slots", e.Name()), "address")
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read address of PCI slot %s: %w", e.Name(), err)
		}
		slots[addr] = e.Name()
	}
	return slots, nil
}

func readTrimmed(dir, name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, name))
	return strings.TrimSpace(string(b)), err
}

func readHex[T uint16 | uint32](dir, name string, bits int) (T, error) {
	s, err := readTrimmed(dir, name)
	if err != nil {
		return 0, err
	}
	v, err := strconv.ParseUint(strings.TrimPrefix(s, "0x"), 16, bits)
	if err != nil {
		return 0, fmt.Errorf("%s %q is not a hexadecimal number of %d bits", name, s, bits)
	}
	return T(v), nil
}

// optional turns an absent attribute into its zero value.
func optional[T any](v T, err error) (T, error) {
	if errors.Is(err, fs.ErrNotExist) {
		var zero T
		return zero, nil
	}
	return v, err
}

// linkBase returns the last element of a link's target, "" if there is no link.
func linkBase(dir, name string) (string, error) {
	target, err := os.Readlink(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return filepath.Base(target), nil
}
