// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// PCIAddress is a PCI function's address (domain, bus, device, function). The zero value is
// 0000:00:00.0, a host bridge, never a GPU: it stands for "unknown".
type PCIAddress struct {
	Domain   uint32
	Bus      uint8
	Device   uint8
	Function uint8
}

// ParsePCIAddress reads "dddd:bb:dd.f" as in sysfs. It takes longer domains too, as NVML prints
// ("00000000:3B:00.0") and as Linux uses behind VMD (0x10000 and up), and a missing domain.
func ParsePCIAddress(s string) (PCIAddress, error) {
	bad := func() (PCIAddress, error) {
		return PCIAddress{}, fmt.Errorf("PCI address %q is not of the form dddd:bb:dd.f (hexadecimal)", s)
	}
	rest, fn, ok := strings.Cut(s, ".")
	if !ok {
		return bad()
	}
	parts := strings.Split(rest, ":")
	if len(parts) == 2 {
		parts = append([]string{"0000"}, parts...)
	}
	if len(parts) != 3 {
		return bad()
	}
	domain, errDomain := parseHex(parts[0], 4, 8, 32)
	bus, errBus := parseHex(parts[1], 2, 2, 8)
	dev, errDev := parseHex(parts[2], 2, 2, 5)
	function, errFn := parseHex(fn, 1, 1, 3)
	if errDomain != nil || errBus != nil || errDev != nil || errFn != nil {
		return bad()
	}
	return PCIAddress{Domain: uint32(domain), Bus: uint8(bus), Device: uint8(dev), Function: uint8(function)}, nil //nolint:gosec // parsed with these widths
}

func parseHex(s string, least, most, bits int) (uint64, error) {
	if len(s) < least || len(s) > most || strings.ContainsAny(s, "+-_") {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseUint(s, 16, bits)
}

// String prints the address as sysfs names it.
func (a PCIAddress) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.Domain, a.Bus, a.Device, a.Function)
}

// IsZero tells whether the address is unknown.
func (a PCIAddress) IsZero() bool { return a == PCIAddress{} }

// Compare orders addresses as sysfs lists them.
func (a PCIAddress) Compare(b PCIAddress) int {
	return cmp.Or(cmp.Compare(a.Domain, b.Domain), cmp.Compare(a.Bus, b.Bus),
		cmp.Compare(a.Device, b.Device), cmp.Compare(a.Function, b.Function))
}

// GPUUUID is NVIDIA's identity of a GPU in one form: "GPU-" and a UUID in lower case. It is empty where
// the identity is unknown.
type GPUUUID string

// ParseGPUUUID reads a GPU's UUID in any case, with or without the "GPU-" prefix, since fabric
// managers print it in either way. Empty input is no identity and no error.
func ParseGPUUUID(s string) (GPUUUID, error) {
	t := strings.ToLower(strings.TrimSpace(s))
	if t == "" {
		return "", nil
	}
	t = strings.TrimPrefix(t, "gpu-")
	if !uuidForm.MatchString(t) {
		return "", fmt.Errorf("GPU UUID %q is not of the form GPU-<UUID>", s)
	}
	return GPUUUID("GPU-" + t), nil
}

// mostSerial is the longest serial number that the driver tells (NVML_DEVICE_SERIAL_BUFFER_SIZE is 30, with the 0 at its end).
const mostSerial = 29

// ParseIdentity reads what a manager says of which GPU a device is: its UUID, else the serial number of its board. What the
// driver can tell in neither form is no identity.
func ParseIdentity(s string) (GPUUUID, string) {
	id, err := ParseGPUUUID(s)
	serial := strings.TrimSpace(s)
	if err == nil || len(serial) > mostSerial {
		return id, ""
	}
	return "", serial
}
