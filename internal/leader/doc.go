// SPDX-License-Identifier: Apache-2.0

// Package leader runs one fabric's policy (package pool) for as long as this agent leads the fabric: it
// observes claims, device leases, Nodes, the published pool and the manager's counts, decides, and
// carries out the plan, what withdraws a choice before what takes an allocation back.
//
// It holds no truth. A new leader starts from fresh lists; what it remembers (since when a taint was seen, an
// agent was away, a unit was of no use, a device was foreign) starts anew with it and so only makes it wait longer.
//
// Run belongs to one goroutine and ends with its context, which must end before leadership does. Poke
// may be called from anywhere.
//
// A failed step is logged, and decided anew after a moment; nothing is retried blindly. Before a lease is
// cleared the claim is read live; before one is called back, or made without a claim, all claims of the unit
// are, and the election is checked; before one is dropped, the election.
package leader
