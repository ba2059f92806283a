// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// DeviceNumber is the number by which the kernel knows a character device, whatever its path.
type DeviceNumber struct{ Major, Minor uint32 }

// String prints the number as "major:minor".
func (n DeviceNumber) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// DeviceNode returns the device number of the GPU's node below dev, which the driver's minor number
// names. The error is fs.ErrNotExist where the node has not been made.
func (p *PCI) DeviceNode(minor int) (DeviceNumber, error) {
	path := filepath.Join(p.root, "dev", nodePrefix+strconv.Itoa(minor))
	info, err := os.Stat(path)
	if err != nil {
		return DeviceNumber{}, fmt.Errorf("read device node: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode()&os.ModeCharDevice == 0 {
		return DeviceNumber{}, fmt.Errorf("read device node: %s is not a character device (%s)", path, info.Mode())
	}
	return DeviceNumber{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}, nil
}
