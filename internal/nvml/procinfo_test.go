// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const information = `Model: 		 NVIDIA H100 80GB HBM3
IRQ:   		 24
GPU UUID: 	 GPU-1b7e8d9c-0000-4000-8000-00000000abcd
Video BIOS: 	 96.00.5e.00.01
Bus Type: 	 PCIe
DMA Size: 	 52 bits
DMA Mask: 	 0xfffffffffffff
Bus Location: 	 0000:1a:00.0
Device Minor: 	 3
GPU Firmware: 	 570.86.15
GPU Excluded:	 No
`

func TestFromProc(t *testing.T) {
	pci := device.PCIAddress{Bus: 0x1a}
	unknown := GPU{PCI: pci, Minor: unknownMinor}
	for _, tt := range []struct {
		name, text string
		want       GPU
	}{
		{"whole", information, GPU{PCI: pci, Minor: 3, UUID: "GPU-1b7e8d9c-0000-4000-8000-00000000abcd", Name: "NVIDIA H100 80GB HBM3"}},
		{"never initialised", "Model: Unknown\nGPU UUID: GPU-????????-????-????-????-????????????\nDevice Minor: 0\n", GPU{PCI: pci, Name: "Unknown"}},
		{"empty", "", unknown},
		{"no number", "Device Minor: -7\nDevice Minor: 99999999\n", unknown},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			dir := filepath.Join(root, "proc/driver/nvidia/gpus/0000:1a:00.0")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "information"), []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, fromProc(root, pci)); diff != "" {
				t.Errorf("fromProc (-want +got):\n%s", diff)
			}
		})
	}
	if diff := cmp.Diff(unknown, fromProc(t.TempDir(), pci)); diff != "" {
		t.Errorf("without the file (-want +got):\n%s", diff)
	}
}

func FuzzParseInformation(f *testing.F) {
	f.Add(information)
	f.Add("GPU UUID: GPU-?\nDevice Minor: 1048576")
	f.Fuzz(func(t *testing.T, text string) {
		g := GPU{Minor: unknownMinor}
		parseInformation(text, &g)
		if g.Minor < unknownMinor || g.Minor >= 1<<20 {
			t.Errorf("minor %d", g.Minor)
		}
		if again, err := device.ParseGPUUUID(string(g.UUID)); err != nil || again != g.UUID {
			t.Errorf("UUID %q", g.UUID)
		}
	})
}
