// SPDX-License-Identifier: Apache-2.0

// Package fault sits between the network and the faces: it records every request and lets rules change what becomes of it,
// from another answer to a connection that closes after the work was done.
//
// Rules and log live in memory only; a restart of the simulator forgets both.
//
// An Injector may be used concurrently. A hanging request blocks until the client leaves or the server closes.
//
// Errors are those of rules that mean nothing.
package fault
