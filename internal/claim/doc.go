// SPDX-License-Identifier: Apache-2.0

// Package claim reads what ResourceClaims demand of a fabric's pool, and tells claims how their devices
// fare by conditions in status.devices. It decides nothing: who is told what is the loops' affair.
//
// The truth is status.allocation of the claims in the API server. The conditions are a report: they are
// read back only to see whether they were written. A Watch holds all claims' demands in memory, one entry
// a claim, so a change costs that claim and nothing else; a restart loses nothing.
//
// Everything may be called from many goroutines. Watch.Run blocks until its context ends; every call to
// the API server has a deadline of its own below the caller's.
//
// Errors: ErrGone means that the claim has not this allocation any more, and nothing was written;
// ErrConflict that the claim kept changing; ErrForbidden that a right is missing, and which. An
// allocation that cannot be read is a *ReadError: it is listed apart, never dropped.
package claim
