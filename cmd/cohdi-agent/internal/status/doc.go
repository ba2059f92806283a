// SPDX-License-Identifier: Apache-2.0

// Package status shows people what becomes of the units: those of one node, with what each waits for and
// the node's other GPUs, or those of all nodes. It changes nothing.
//
// What one node's units wait for only its agent knows; it is asked over HTTP. The fleet is what the
// device leases say.
//
// Every function is called once by a command that then ends.
//
// Errors say who was asked and what to do if nobody answered.
package status
