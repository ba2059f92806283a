// SPDX-License-Identifier: Apache-2.0

// Package images says what is in each container image of the project: the agent's, and the two
// that tests need in the place of what a registry would hold.
//
// The truth is the file system of this machine: the agent's program is taken from where it was
// built, busybox and the C library from Debian's packages.
//
// Nothing is shared between calls. Agent runs ldd, nothing else blocks.
//
// Errors say which file is missing and which package brings it.
package images
