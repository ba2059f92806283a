// SPDX-License-Identifier: Apache-2.0

// Package hostroot shows the node side of one machine as files below a directory that can be mounted over a node's own:
// sys/bus/pci as the kernel lays it out, dev with real character devices, run/nvidia/driver with the driver's libraries.
// It watches the files that a kernel would act on (rescan, remove, bind, unbind, slot power) and hands what is written to the
// core.
//
// The truth is the core; Sync makes the files follow it and can be repeated at any time. Directories that may be mounted are
// never replaced, so that mounts survive a restart of the simulator. Nothing here but the nodes named nvidia* is ever removed
// from dev.
//
// Sync may be called concurrently and returns when files are in place and uevents are sent. Watch runs until ctx ends.
//
// Errors are those of the file system; a uevent that could not be sent is logged, the files are the truth.
package hostroot
