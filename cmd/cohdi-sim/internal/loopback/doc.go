// SPDX-License-Identifier: Apache-2.0

// Package loopback lets one part of the simulator call another within this process as if it were over a network: with a time
// limit, and with connections that faults can break.
//
// A call that nobody waits for any more goes on, as it would at the other end of a network, until its context ends.
//
// Ask may be called concurrently. Its errors are ErrBroken, ErrTimeout and ErrStopped.
package loopback
