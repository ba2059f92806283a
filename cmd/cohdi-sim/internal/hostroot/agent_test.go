// SPDX-License-Identifier: Apache-2.0

package hostroot

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/hotplug"
)

// TestRoot_asTheAgentSeesIt lets the agent's own reader of sysfs, written for a real kernel, work on the files.
func TestRoot_asTheAgentSeesIt(t *testing.T) {
	b := start(t, t.TempDir(), "")
	b.watch()
	// A node has its own /proc beside what the simulator shows.
	if err := os.Symlink("/proc", filepath.Join(b.Dir(), "proc")); err != nil {
		t.Fatal(err)
	}
	pci := hotplug.New(b.Dir(), hotplug.Options{})
	look := func() hotplug.Snapshot {
		t.Helper()
		s, err := pci.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := look(); len(s) != 0 {
		t.Fatalf("an empty machine has %+v", s)
	}
	b.attach()
	address := device.PCIAddress{Bus: 0x3d}
	first, ok := look().Find(address)
	if !ok {
		t.Fatalf("no GPU at %s in %+v", address, look())
	}
	want := hotplug.Function{
		Address: address, Vendor: 0x10de, Device: 0x20b5, SubVendor: 0x10de, SubDevice: 0x1533, Class: 0x030200, Driver: "nvidia",
		Port: device.PCIAddress{Bus: 0x3c}, Root: "pci0000:3a", Slot: "1", Instance: first.Instance, Serial: first.Serial,
	}
	if diff := cmp.Diff(want, first); diff != "" || first.Serial == 0 {
		t.Errorf("GPU with serial %s (-want +got):\n%s", first.Serial, diff)
	}
	if n, err := pci.DeviceNode(0); err != nil || n != (hotplug.DeviceNumber{Major: 4, Minor: 20}) {
		t.Errorf("device node %s, %v", n, err)
	}

	if err := pci.Remove(t.Context(), address); err != nil {
		t.Fatal(err)
	}
	<-b.done
	if s := look(); len(s) != 0 {
		t.Errorf("after the removal: %+v", s)
	}
	if _, err := pci.DeviceNode(0); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("device node after the removal: %v", err)
	}

	slots, err := pci.EmptySlots(t.Context())
	if err != nil || !slices.Contains(slots, hotplug.Hint{Address: address}) {
		t.Errorf("empty slots = %v, %v", slots, err)
	}
	files, err := pci.Rescan(t.Context(), hotplug.Hint{Port: first.Port})
	if want := []string{b.pci("devices/0000:3c:00.0/pci_bus/0000:3d/rescan")}; err != nil || !slices.Equal(files, want) {
		t.Errorf("rescan through %s, %v", files, err)
	}
	<-b.done
	if again, ok := look().Find(address); !ok || again.Serial != first.Serial {
		t.Errorf("after the rescan: %+v", look())
	}
}
