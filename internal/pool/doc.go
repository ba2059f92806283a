// SPDX-License-Identifier: Apache-2.0

// Package pool decides for one fabric: which device leases to make, give away, clear or call back,
// which Nodes the scheduler may choose, which allocations to refuse, and which offers to publish. It is
// the leader's whole policy, a function of what was observed and the time; it does nothing itself.
//
// What is true where: allocations are the claims', attachments the fabric's, intent the device leases',
// and what the scheduler may choose from the published slices'. Nothing is remembered between calls.
//
// Decide is pure: same World, same Plan. It does not block and may be called from anywhere.
//
// It returns no errors. What cannot be decided is left alone, and the Plan says so in Notes.
package pool
