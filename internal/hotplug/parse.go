// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Serial is the PCI Express device serial number (an EUI-64). Zero means that the function has none.
type Serial uint64

// String prints the serial number as lspci does, or "" if there is none.
func (s Serial) String() string {
	if s == 0 {
		return ""
	}
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(s))
	parts := make([]string, len(b))
	for i, v := range b {
		parts[i] = fmt.Sprintf("%02x", v)
	}
	return strings.Join(parts, "-")
}

// The extended configuration space of PCI Express (base specification, 7.6.3 and 7.9.3).
const (
	extendedStart     = 0x100
	extendedEnd       = 0x1000
	capabilitySerial  = 0x0003
	capabilityMinSize = 8
)

// readSerial walks the extended capabilities and returns the device serial number. Without extended
// space, as for conventional PCI or a reader without privilege, there is none. A function that is gone
// reads as all ones, which is none too.
func readSerial(config io.ReaderAt) (Serial, error) {
	offset := int64(extendedStart)
	// Each capability takes at least two words, so a longer walk is a loop.
	for range (extendedEnd - extendedStart) / capabilityMinSize {
		header, err := readWord(config, offset)
		if errors.Is(err, io.EOF) {
			return 0, nil
		}
		if err != nil {
			return 0, err
		}
		if header == 0 || header == ^uint32(0) {
			return 0, nil
		}
		if header&0xffff == capabilitySerial {
			return serialAt(config, offset)
		}
		next := int64(header>>20) &^ 3
		if next < extendedStart {
			return 0, nil
		}
		offset = next
	}
	return 0, errors.New("extended capabilities form a loop")
}

func serialAt(config io.ReaderAt, offset int64) (Serial, error) {
	low, err := readWord(config, offset+4)
	if err != nil {
		return 0, fmt.Errorf("read serial number capability at %#x: %w", offset, err)
	}
	high, err := readWord(config, offset+8)
	if err != nil {
		return 0, fmt.Errorf("read serial number capability at %#x: %w", offset, err)
	}
	if low == ^uint32(0) && high == ^uint32(0) {
		return 0, nil
	}
	return Serial(uint64(high)<<32 | uint64(low)), nil
}

func readWord(config io.ReaderAt, offset int64) (uint32, error) {
	var b [4]byte
	n, err := config.ReadAt(b[:], offset)
	if n == len(b) {
		return binary.LittleEndian.Uint32(b[:]), nil
	}
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	return 0, err
}

// Flags of a resource (include/linux/ioport.h).
const (
	resourceMem   = 0x00000200
	resourceUnset = 0x20000000
)

// standardBARs is the number of base address registers of an endpoint; they are the first lines of the
// resource file.
const standardBARs = 6

// barProblem reads a sysfs resource file and says why the function cannot be used, or "". The kernel
// leaves a line of zeros, or marks it unset, where it found no address space. A line of zeros is normal
// for a BAR that the function does not have (the upper half of a 64-bit one among them), so that only
// required names those that must not be zero.
func barProblem(resource string, required []int) (string, error) {
	var bars [standardBARs]bar
	assigned := 0
	lines := strings.Split(strings.TrimRight(resource, "\n"), "\n")
	for i, line := range lines {
		if i == standardBARs {
			break
		}
		b, err := parseBAR(line)
		if err != nil {
			return "", fmt.Errorf("line %d of resource: %w", i+1, err)
		}
		bars[i] = b
		if b.flags&resourceMem == 0 {
			continue
		}
		if b.flags&resourceUnset != 0 || b.start == 0 {
			return fmt.Sprintf("BAR%d (%d MiB) has no address space", i, b.size()>>20), nil
		}
		assigned++
	}
	if assigned == 0 {
		return "no BAR has address space", nil
	}
	for _, i := range required {
		if bars[i] == (bar{}) {
			return fmt.Sprintf("BAR%d has no address space", i), nil
		}
	}
	return "", nil
}

// requiredBARs names the memory BARs that a vendor's display controllers always have.
func requiredBARs(vendor uint16) []int {
	if vendor == VendorNVIDIA {
		return []int{0, 1}
	}
	return nil
}

type bar struct{ start, end, flags uint64 }

func (b bar) size() uint64 {
	if b.end < b.start {
		return 0
	}
	return b.end - b.start + 1
}

func parseBAR(line string) (bar, error) {
	fields := strings.Fields(line)
	if len(fields) != 3 {
		return bar{}, fmt.Errorf("%q is not three numbers", line)
	}
	var v [3]uint64
	for i, f := range fields {
		n, err := strconv.ParseUint(f, 0, 64)
		if err != nil {
			return bar{}, fmt.Errorf("%q is not a number", f)
		}
		v[i] = n
	}
	return bar{start: v[0], end: v[1], flags: v[2]}, nil
}
