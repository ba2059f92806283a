// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// ErrNoDriver means that no driver took the function: none is loaded, or its probe failed.
var ErrNoDriver = errors.New("no driver took the device")

// ErrIncomplete means that some processes could not be inspected.
var ErrIncomplete = errors.New("some processes could not be inspected")

// BusyError means that the kernel has not finished what a write asked for. The write cannot be taken
// back: what it asked for may still happen at any time.
type BusyError struct {
	// Operation is "remove" or "rescan".
	Operation string
	// File is what was written.
	File string
	// Since is when the write began, zero if another process, such as an earlier run of the agent,
	// began it.
	Since time.Time
	// Cause is why the wait ended.
	Cause error
}

// Error says what hangs and since when.
func (e *BusyError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s by %s has not ended", e.Operation, e.File)
	if e.Since.IsZero() {
		b.WriteString(", begun by another process")
	} else {
		fmt.Fprintf(&b, ", begun %s", e.Since.UTC().Format(time.RFC3339))
	}
	fmt.Fprintf(&b, ": %v; the kernel or a driver waits for something, see dmesg", e.Cause)
	return b.String()
}

// Unwrap returns why the wait ended.
func (e *BusyError) Unwrap() error { return e.Cause }

// DriverError means that a driver other than ours owns the function, or is meant to.
type DriverError struct {
	Address device.PCIAddress
	Driver  string
}

// Error names the driver.
func (e *DriverError) Error() string {
	return fmt.Sprintf("PCI device %s belongs to driver %s; unbind it there if it is meant for Pods", e.Address, e.Driver)
}
