// SPDX-License-Identifier: Apache-2.0

// Package nodestatus says what the agent does where people look: labels and conditions of Nodes, and events
// on Nodes, claims and Pods. It also finds out who else advertises this node's GPUs. It decides nothing: what
// to say comes from the loops.
//
// The truth is elsewhere, and the Node object is only told. Publisher keeps this node's own label and
// conditions as they were last set, and puts them back when somebody changes them; it writes nothing while
// they are as they should be, and a condition's heartbeat is the time of its last change. Conditions set by
// an earlier process stay until this one says otherwise. Labels writes the leader's labels on any Node and
// keeps nothing.
//
// The Set methods of Publisher and the methods of Events return at once and may be called from any goroutine.
// Publisher.Run and Watch.Run block until their context ends. Labels calls the API server and blocks.
//
// Errors are the API server's, with what was to be written; all are worth a retry, which Publisher does
// itself.
package nodestatus
