// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"encoding/binary"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// tree is a host root with a PCI bus laid out as the kernel does: devices are links into a tree in
// which each function's directory lies in its bridge's.
type tree struct {
	t    *testing.T
	root string
}

func newTree(t *testing.T) *tree {
	t.Helper()
	tr := &tree{t: t, root: t.TempDir()}
	for _, dir := range []string{"sys/bus/pci/devices", "sys/bus/pci/drivers", "sys/bus/pci/slots", "dev", "proc/1/fd", "proc/1/task/1"} {
		tr.mkdir(dir)
	}
	tr.write("sys/bus/pci/rescan", "")
	tr.write("sys/bus/pci/drivers_probe", "")
	return tr
}

func (tr *tree) path(p string) string { return filepath.Join(tr.root, p) }

func (tr *tree) mkdir(p string) {
	tr.t.Helper()
	if err := os.MkdirAll(tr.path(p), 0o755); err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *tree) write(p, content string) {
	tr.t.Helper()
	tr.mkdir(filepath.Dir(p))
	if err := os.WriteFile(tr.path(p), []byte(content), 0o644); err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *tree) read(p string) string {
	tr.t.Helper()
	b, err := os.ReadFile(tr.path(p))
	if err != nil {
		tr.t.Fatal(err)
	}
	return string(b)
}

func (tr *tree) link(target, p string) {
	tr.t.Helper()
	if err := os.Symlink(target, tr.path(p)); err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *tree) remove(p string) {
	tr.t.Helper()
	if err := os.RemoveAll(tr.path(p)); err != nil {
		tr.t.Fatal(err)
	}
}

const gpuResource = `0x00000000fa000000 0x00000000faffffff 0x0000000000040200
0x00000038000000000 0x0000003bffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x00000038000000000 0x0000003801ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000
`

// function adds a function below a directory of the tree ("pci0000:3a/0000:3a:00.0") and returns its
// directory's path in the tree.
func (tr *tree) function(below, addr string, attrs map[string]string) string {
	tr.t.Helper()
	dir := filepath.Join("sys/devices", below, addr)
	tr.mkdir(dir)
	all := map[string]string{
		"vendor": "0x10de\n", "device": "0x2330\n", "class": "0x030200\n",
		"subsystem_vendor": "0x10de\n", "subsystem_device": "0x16c1\n",
		"numa_node": "1\n", "resource": gpuResource, "remove": "", "rescan": "",
		"config": string(configSpace(0x48b02dffff123456)),
	}
	maps.Copy(all, attrs)
	for k, v := range all {
		tr.write(filepath.Join(dir, k), v)
	}
	tr.link(filepath.Join("../../../devices", below, addr), "sys/bus/pci/devices/"+addr)
	return dir
}

func (tr *tree) bridge(below, addr, busBelow string) {
	tr.t.Helper()
	dir := tr.function(below, addr, map[string]string{"vendor": "0x1000\n", "device": "0xc030\n", "class": "0x060400\n"})
	if busBelow != "" {
		tr.write(filepath.Join(dir, "pci_bus", busBelow, "rescan"), "")
	}
}

func (tr *tree) drop(addr string) {
	tr.t.Helper()
	dir, err := filepath.EvalSymlinks(tr.path("sys/bus/pci/devices/" + addr))
	if err != nil {
		tr.t.Fatal(err)
	}
	tr.remove("sys/bus/pci/devices/" + addr)
	if err := os.RemoveAll(dir); err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *tree) driver(name string) {
	tr.t.Helper()
	tr.mkdir("sys/bus/pci/drivers/" + name)
}

func (tr *tree) bind(addr, driver string) {
	tr.t.Helper()
	tr.driver(driver)
	tr.link("../../../bus/pci/drivers/"+driver, "sys/bus/pci/devices/"+addr+"/driver")
}

// configSpace is an extended configuration space with AER first and the serial number second.
func configSpace(serial uint64) []byte {
	b := make([]byte, extendedEnd)
	binary.LittleEndian.PutUint32(b[0x100:], 0x0001|2<<16|0x148<<20)
	binary.LittleEndian.PutUint32(b[0x148:], capabilitySerial|1<<16)
	binary.LittleEndian.PutUint64(b[0x14c:], serial)
	return b
}

func address(t *testing.T, s string) device.PCIAddress {
	t.Helper()
	a, err := device.ParsePCIAddress(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}
