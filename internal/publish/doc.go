// SPDX-License-Identifier: Apache-2.0

// Package publish writes the offers of a fabric as the ResourceSlices of one pool, and reads back what the
// API server shows of it. The design's list of packages has no place for it: the leader's loop must not
// know Kubernetes' objects, and the policy must not know slices. It also lays out a node's own pool, which the
// node's kubelet plugin writes.
//
// The truth is the API server: which entries exist, in which order, and which are tainted is read from
// there, so that a new leader goes on where the last one stopped. The order of units is that of the ready
// entries.
//
// Run blocks until its ctx ends. Publish and Published may be called from anywhere and do not block.
// Changes of several slices are sent one after the other: a change of one slice is free, one of several
// makes the pool incomplete for a moment.
//
// Errors are logged and tried again. When the API server drops a field, no offer may stay usable: it is
// asked for that before anything is published (probe.go), and see Options.Dropped.
package publish
