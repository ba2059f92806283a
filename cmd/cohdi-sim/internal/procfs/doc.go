// SPDX-License-Identifier: Apache-2.0

// Package procfs is the judge's eye: it finds the processes of this machine that have a character device open, whatever
// container they are in and under whatever path they opened it.
//
// The truth is /proc/*/fd at the time of the look; a process that ends meanwhile holds nothing.
//
// Proc has no state and may be used concurrently. A look reads all of /proc.
//
// Errors: only that /proc itself cannot be listed.
package procfs
