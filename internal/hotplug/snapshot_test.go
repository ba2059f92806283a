// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func TestSnapshot(t *testing.T) {
	tr := newTree(t)
	tr.bridge("pci0000:3a", "0000:3a:00.0", "0000:3b")
	tr.function("pci0000:3a/0000:3a:00.0", "0000:3b:00.0", nil)
	tr.bind("0000:3b:00.0", "nvidia")
	tr.function("pci0000:3a/0000:3a:00.0", "0000:3b:00.1", map[string]string{"class": "0x040300\n"}) // its audio function
	tr.write("sys/bus/pci/slots/7/address", "0000:3b:00\n")
	tr.write("sys/bus/pci/slots/8/address", "0000:3c:00\n")
	tr.function("pci0000:00", "0000:00:02.0", map[string]string{
		"class": "0x030000\n", "boot_vga": "1\n", "numa_node": "-1\n", "config": string(make([]byte, 64)),
	})
	tr.mkdir("sys/kernel/iommu_groups/12")
	tr.link("../../../kernel/iommu_groups/12", "sys/bus/pci/devices/0000:00:02.0/iommu_group")
	tr.function("pci10000:00", "10000:01:00.0", map[string]string{"resource": "hello\n"})
	tr.function("pci0000:00", "0000:00:03.0", map[string]string{"vendor": "0x8086\n"})
	// What a device leaves behind when it goes during the read: a link to nothing, an empty directory.
	tr.link("../../../devices/pci0000:00/0000:00:04.0", "sys/bus/pci/devices/0000:00:04.0")
	tr.mkdir("sys/bus/pci/devices/0000:00:05.0")

	got, err := New(tr.root, Options{}).Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := Snapshot{
		{
			Address: address(t, "0000:00:02.0"), Vendor: 0x10de, Device: 0x2330, SubVendor: 0x10de, SubDevice: 0x16c1,
			Class: 0x030000, Root: "pci0000:00", NUMANode: -1, BootVGA: true, IOMMUGroup: "12",
		},
		{
			Address: address(t, "0000:3b:00.0"), Vendor: 0x10de, Device: 0x2330, SubVendor: 0x10de, SubDevice: 0x16c1,
			Class: 0x030200, Driver: "nvidia", Port: address(t, "0000:3a:00.0"), Root: "pci0000:3a", Slot: "7", NUMANode: 1,
			Serial: 0x48b02dffff123456,
		},
		{
			Address: address(t, "10000:01:00.0"), Vendor: 0x10de, Device: 0x2330, SubVendor: 0x10de, SubDevice: 0x16c1,
			Class: 0x030200, Root: "pci10000:00", NUMANode: 1, Serial: 0x48b02dffff123456,
			Problem: `cannot be read: line 1 of resource: "hello" is not three numbers`,
		},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(Function{}, "Instance")); diff != "" {
		t.Errorf("snapshot (-want +got):\n%s", diff)
	}
	for _, f := range got {
		if f.Instance == 0 {
			t.Errorf("%s has no instance", f.Address)
		}
	}
}

func TestSnapshot_otherVendors(t *testing.T) {
	tr := newTree(t)
	tr.function("pci0000:00", "0000:00:02.0", map[string]string{"vendor": "0x1002\n"})
	tr.function("pci0000:00", "0000:00:03.0", nil)
	got, err := New(tr.root, Options{Match: MatchDisplay(0x1002)}).Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0].Vendor != 0x1002 {
		t.Errorf("snapshot = %+v, want the one of vendor 0x1002", got)
	}
}

func TestSnapshot_errors(t *testing.T) {
	t.Run("no bus", func(t *testing.T) {
		if _, err := New(t.TempDir(), Options{}).Snapshot(t.Context()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("error = %v, want ErrNotExist", err)
		}
	})
	t.Run("context ended", func(t *testing.T) {
		tr := newTree(t)
		tr.function("pci0000:00", "0000:00:02.0", nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := New(tr.root, Options{}).Snapshot(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("error = %v, want Canceled", err)
		}
	})
}

func TestDelta(t *testing.T) {
	at := func(addr string, instance uint64) Function {
		return Function{Address: address(t, addr), Instance: instance, Serial: 5}
	}
	bound := at("0000:01:00.0", 1)
	bound.Driver = "nvidia"
	otherSerial := at("0000:01:00.0", 1)
	otherSerial.Serial = 6

	tests := []struct {
		name          string
		before, after Snapshot
		want          Difference
	}{
		{name: "nothing", before: Snapshot{bound}, after: Snapshot{bound}},
		{name: "from nothing to nothing"},
		{
			name: "one comes", before: Snapshot{at("0000:02:00.0", 2)},
			after: Snapshot{at("0000:01:00.0", 1), at("0000:02:00.0", 2)},
			want:  Difference{Added: []Function{at("0000:01:00.0", 1)}},
		},
		{
			name: "one goes", before: Snapshot{at("0000:01:00.0", 1), at("0000:02:00.0", 2)},
			after: Snapshot{at("0000:02:00.0", 2)},
			want:  Difference{Removed: []Function{at("0000:01:00.0", 1)}},
		},
		{
			name: "driver bound", before: Snapshot{at("0000:01:00.0", 1)}, after: Snapshot{bound},
			want: Difference{Changed: []Change{{Old: at("0000:01:00.0", 1), New: bound}}},
		},
		{
			name: "went and came between two looks", before: Snapshot{at("0000:01:00.0", 1)}, after: Snapshot{at("0000:01:00.0", 7)},
			want: Difference{Removed: []Function{at("0000:01:00.0", 1)}, Added: []Function{at("0000:01:00.0", 7)}},
		},
		{
			name: "another card in the slot", before: Snapshot{at("0000:01:00.0", 1)}, after: Snapshot{otherSerial},
			want: Difference{Removed: []Function{at("0000:01:00.0", 1)}, Added: []Function{otherSerial}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := Delta(tt.before, tt.after)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("delta (-want +got):\n%s", diff)
			}
			if empty := cmp.Equal(tt.want, Difference{}); got.IsEmpty() != empty {
				t.Errorf("IsEmpty = %v, want %v", got.IsEmpty(), empty)
			}
		})
	}
}

func TestSnapshotFind(t *testing.T) {
	s := Snapshot{{Address: address(t, "0000:01:00.0")}, {Address: address(t, "0000:02:00.0")}}
	if f, ok := s.Find(address(t, "0000:02:00.0")); !ok || f.Address != s[1].Address {
		t.Errorf("Find = %v, %v", f.Address, ok)
	}
	if _, ok := s.Find(device.PCIAddress{Bus: 9}); ok {
		t.Error("Find found a function that is not there")
	}
}
