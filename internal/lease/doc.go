// SPDX-License-Identifier: Apache-2.0

// Package lease keeps device leases as coordination.k8s.io/v1 Lease objects, and elects the leader of a
// fabric by one more Lease. It translates, stores and watches; when a lease may change, and how, is
// decided by the loops.
//
// The truth is the API server. A Store shows the informer's cache with this process's own writes laid
// over it until the cache has caught up, so a loop never decides on what it has overwritten itself. A
// restart loses nothing. An election trusts only what this process saw elapse on its own clock, never a
// time that another machine wrote.
//
// A Store and an Election may be used from many goroutines. Run blocks until its ctx ends; everything
// that calls the API server has a deadline of its own below the caller's.
//
// Errors: ErrConflict means look again, decide anew; ErrExists and ErrNotFound say what they say. A
// lease that cannot be read is a *DecodeError: it is listed apart, never dropped and never touched.
package lease
