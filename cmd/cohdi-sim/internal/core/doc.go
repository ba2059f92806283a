// SPDX-License-Identifier: Apache-2.0

// Package core is the hardware: fabrics, machines, slots, devices, and how far each attach or detach has come. It holds both
// sides of a device, what the fabric has done with it and what the node's kernel and driver see of it, because a surprise on
// one side shows on the other.
//
// It is the truth that all faces show. Every change is written to a file before it is visible, so that a simulator that was
// killed comes back with the same attachments and goes on with the operations it had accepted.
//
// All methods may be called concurrently. An operation goes on when its caller has gone; Close ends waiting operations
// without finishing them, which is what a crash does. The hook for changes is called without locks held.
//
// Errors that a face has to tell apart are ErrNotFound, ErrBusy, ErrNoCapacity, ErrNoSlot and ErrInUse.
package core
