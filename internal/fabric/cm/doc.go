// SPDX-License-Identifier: Apache-2.0

// Package cm talks to an FTI Cluster Manager (CM). A CM is told how many devices of a specification a
// machine is to have in all, chooses the devices itself, and says "accepted"; how far it has come is read
// from the machine. A device is taken away by its device_id, the GPU's UUID. What is free a CM does not
// count: the Fabric Manager beside it does, over the same login.
//
// The truth is the machine as the CM shows it. Each change is computed from a fresh read of it, and an
// Operation holds what Poll needs to tell what has come since. Because totals are absolute, a change that is
// under way already is joined and not asked for again: a repeat after a crash brings no second device. Rows
// that failed stay listed, an added one as Critical, so that nobody loses them.
//
// All methods may be called at once, but two changes of one machine have to go one after the other, attach
// and detach alike (ExclusionMachine): computed from the same state they would ask for the same total.
//
// Errors are *device.Fault. What fails before the change is sent is definite. An accepted change whose
// progress cannot be read is FaultUnknown, never definite.
package cm
