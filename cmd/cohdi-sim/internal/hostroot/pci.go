// SPDX-License-Identifier: Apache-2.0

package hostroot

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/uevent"
)

const (
	classBridge   = 0x060400
	class3D       = 0x030200
	vendorNVIDIA  = 0x10de
	vendorSwitch  = 0x11f8
	deviceSwitch  = 0x4000
	vendorRoot    = 0x8086
	deviceRoot    = 0x352a
	portDriver    = "pcieport"
	pciHost       = "pci0000:3a"
	configSize    = 4096
	headerBridge  = 1
	offHeaderType = 0x0e
	offExtended   = 0x100
	capSerial     = 0x0003
)

// function is one PCI function as sysfs describes it.
type function struct {
	address        string
	vendor, device uint16
	subVendor, sub uint16
	class          uint32
	driver         string
	// primary, secondary and subordinate are the bus numbers of a bridge.
	primary, secondary, subordinate int
	// serial is the device serial number, an extended capability; 0 is none.
	serial uint64
	// path of the directory below tree/, which is the kernel's /devices.
	path string
}

// ports are the bridges of a machine, from the root port down to the port of each slot.
func ports(slots int) []function {
	root, last := core.Buses(slots)
	rootPath := filepath.Join(pciHost, core.RootPort)
	upPath := filepath.Join(rootPath, core.UpstreamPort)
	out := []function{
		{
			address: core.RootPort, vendor: vendorRoot, device: deviceRoot, class: classBridge, driver: portDriver,
			primary: root, secondary: root + 1, subordinate: last, path: rootPath,
		},
		{
			address: core.UpstreamPort, vendor: vendorSwitch, device: deviceSwitch, class: classBridge, driver: portDriver,
			primary: root + 1, secondary: root + 2, subordinate: last, path: upPath,
		},
	}
	for s := 1; s <= slots; s++ {
		out = append(out, function{
			address: core.SlotPort(s), vendor: vendorSwitch, device: deviceSwitch, class: classBridge, driver: portDriver,
			primary: root + 2, secondary: root + 2 + s, subordinate: root + 2 + s, path: slotPath(s),
		})
	}
	return out
}

// slotPath is the directory of a slot's port below tree/.
func slotPath(slot int) string {
	return filepath.Join(pciHost, core.RootPort, core.UpstreamPort, core.SlotPort(slot))
}

func gpu(d core.Device) function {
	id, err := strconv.ParseUint(d.PCIDevice, 16, 16)
	if err != nil {
		id = 0 // the configuration has checked it
	}
	f := function{
		address: d.Address(), vendor: vendorNVIDIA, device: uint16(id), subVendor: vendorNVIDIA, sub: 0x1533, class: class3D,
		path: filepath.Join(slotPath(d.Slot), d.Address()),
	}
	// Board serial numbers are decimal; one that is not has no place in configuration space.
	f.serial, err = strconv.ParseUint(d.Serial, 10, 64)
	if err != nil {
		f.serial = 0
	}
	if d.Bound {
		f.driver = core.DriverName
	}
	return f
}

func (f function) bridge() bool { return f.class == classBridge }

func (f function) modalias() string {
	return fmt.Sprintf("pci:v%08Xd%08Xsv%08Xsd%08Xbc%02Xsc%02Xi%02X",
		f.vendor, f.device, f.subVendor, f.sub, f.class>>16, f.class>>8&0xff, f.class&0xff)
}

// env is the content of the uevent file; DRIVER comes first, only while a driver is bound.
func (f function) env() []string {
	var out []string
	if f.driver != "" {
		out = append(out, "DRIVER="+f.driver)
	}
	return append(out,
		fmt.Sprintf("PCI_CLASS=%X", f.class),
		fmt.Sprintf("PCI_ID=%04X:%04X", f.vendor, f.device),
		fmt.Sprintf("PCI_SUBSYS_ID=%04X:%04X", f.subVendor, f.sub),
		"PCI_SLOT_NAME="+f.address,
		"MODALIAS="+f.modalias(),
	)
}

func (f function) event(action string) uevent.Event {
	return uevent.Event{Action: action, DevPath: "/devices/" + f.path, Env: append([]string{"SUBSYSTEM=pci"}, f.env()...)}
}

// files are the attributes of the function with their content.
func (f function) files() map[string]string {
	out := map[string]string{
		"vendor":             fmt.Sprintf("0x%04x\n", f.vendor),
		"device":             fmt.Sprintf("0x%04x\n", f.device),
		"subsystem_vendor":   fmt.Sprintf("0x%04x\n", f.subVendor),
		"subsystem_device":   fmt.Sprintf("0x%04x\n", f.sub),
		"class":              fmt.Sprintf("0x%06x\n", f.class),
		"revision":           "0xa1\n",
		"irq":                "0\n",
		"enable":             "1\n",
		"numa_node":          "0\n",
		"local_cpulist":      "0-1\n",
		"current_link_speed": "16.0 GT/s PCIe\n",
		"current_link_width": "16\n",
		"modalias":           f.modalias() + "\n",
		"uevent":             strings.Join(f.env(), "\n") + "\n",
		"resource":           f.resource(),
		"config":             string(f.config()),
		"driver_override":    "(null)\n",
	}
	if f.bridge() {
		out["secondary_bus_number"] = strconv.Itoa(f.secondary) + "\n"
		out["subordinate_bus_number"] = strconv.Itoa(f.subordinate) + "\n"
	}
	return out
}

// resource has a line for each base address register, the ROM and, on a bridge, its windows.
func (f function) resource() string {
	const none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
	if f.bridge() {
		return strings.Repeat(none, 17)
	}
	return "0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200\n" +
		"0x0000200000000000 0x0000201fffffffff 0x000000000014220c\n" + none +
		"0x0000202000000000 0x0000202001ffffff 0x000000000014220c\n" + strings.Repeat(none, 9)
}

func (f function) config() []byte {
	c := make([]byte, configSize)
	binary.LittleEndian.PutUint16(c[0x00:], f.vendor)
	binary.LittleEndian.PutUint16(c[0x02:], f.device)
	binary.LittleEndian.PutUint16(c[0x04:], 0x0407)
	binary.LittleEndian.PutUint16(c[0x06:], 0x0010)
	binary.LittleEndian.PutUint32(c[0x08:], f.class<<8|0xa1)
	if f.bridge() {
		c[offHeaderType] = headerBridge
		c[0x18], c[0x19], c[0x1a] = byte(f.primary), byte(f.secondary), byte(f.subordinate) //nolint:gosec // bus numbers
		return c
	}
	binary.LittleEndian.PutUint16(c[0x2c:], f.subVendor)
	binary.LittleEndian.PutUint16(c[0x2e:], f.sub)
	if f.serial != 0 {
		binary.LittleEndian.PutUint32(c[offExtended:], capSerial|1<<16)
		binary.LittleEndian.PutUint64(c[offExtended+4:], f.serial)
	}
	return c
}
