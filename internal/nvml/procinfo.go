// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// unknownMinor stands for a device node that cannot be named.
const unknownMinor = -1

// fromProc reads what the kernel driver tells of a GPU in /proc, also of one that it hides from NVML. What it
// does not tell stays unknown.
func fromProc(hostRoot string, pci device.PCIAddress) GPU {
	g := GPU{PCI: pci, Minor: unknownMinor}
	text, err := os.ReadFile(filepath.Join(hostRoot, "proc/driver/nvidia/gpus", pci.String(), "information"))
	if err != nil {
		return g // the caller does without
	}
	parseInformation(string(text), &g)
	return g
}

// parseInformation reads lines of "Name:  value".
func parseInformation(text string, g *GPU) {
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(name) {
		case "Model":
			g.Name = value
		case "GPU UUID":
			// A GPU that was never initialised shows question marks.
			if uuid, err := device.ParseGPUUUID(value); err == nil {
				g.UUID = uuid
			}
		case "Device Minor":
			if n, err := strconv.ParseUint(value, 10, 20); err == nil {
				g.Minor = int(n)
			}
		}
	}
}
