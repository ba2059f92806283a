// SPDX-License-Identifier: Apache-2.0

// Package statefile keeps the state of a part of the simulator as one JSON file, so that a restart goes on with it.
//
// A file survives the end of the process, and not that of the machine: an fsync would cost an attach tens of milliseconds,
// which no manager of a real fabric takes for that. Without a path there is no file, and the state lives in memory only.
//
// The caller sees to it that there is one Save of a file at a time. Errors name the file; one that cannot be read is left as
// it is.
package statefile
