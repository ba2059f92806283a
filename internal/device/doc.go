// SPDX-License-Identifier: Apache-2.0

// Package device holds the words of the agent as types: units and the entries they are offered as,
// machines, PCI addresses and GPU UUIDs, the attempt to serve a claim, the device lease as a record,
// and the faults of a fabric manager. It parses and prints them; it decides nothing.
//
// The truth about each of these lives elsewhere (the fabric's list, sysfs, NVML, the Lease object);
// the types here are what was read of it.
//
// Everything is a value; nothing here blocks, locks, or keeps state.
//
// Parse functions return an error that quotes the input and says which form is expected.
package device
