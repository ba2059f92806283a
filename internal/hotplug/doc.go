// SPDX-License-Identifier: Apache-2.0

// Package hotplug reports which PCI functions this node has and what changed, finds a function that
// the kernel did not notice, takes one away, and tells who has a device node open. It knows nothing of
// NVML, claims or fabrics.
//
// The truth is sysfs, devtmpfs and procfs below the root given to New. Uevents and changes below /dev
// only say "look again": the socket is opened before the first look, an overrun asks for a full look,
// and a periodic look is authoritative where no event comes. A restart loses nothing but the knowledge
// of a write that still hangs in the kernel; that is found again by what the write left behind.
//
// All methods may be called at once. Snapshot, Bind and Holders block for as long as the kernel takes to
// answer reads. Rescan and Remove hand their write to a goroutine, since the kernel may never return
// from it; there is never more than one such write per file. Watcher.Run blocks until its context ends.
//
// Errors: BusyError means that the kernel has not finished a removal, so the device must be taken as
// present and nothing else may be done to it. DriverError means that another driver owns the device.
// ErrNoDriver means that no driver took it. ErrIncomplete means that some processes could not be
// inspected, so that nobody can be said to hold nothing. Everything else is worth a retry.
package hotplug
