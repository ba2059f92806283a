// SPDX-License-Identifier: Apache-2.0

// Package node runs the holder's policy (package attach) for the device leases of this node: it
// observes, decides for each unit, performs one action per unit, and observes again.
//
// Beside the loop, a Survey tells whose the GPUs of the node are: it looks, asks the fabric manager for its list
// where that tells more, and changes nothing.
//
// It holds no truth. What it remembers between two looks (calls under way, when something was tried,
// the last list) only spares work or makes it wait longer; after a restart it is observed anew.
//
// Run and Step, of either, belong to one goroutine. Actions run beside it, one per unit, and calls that change the
// machine on the fabric one at a time, or as the manager takes them: side by side, or several detaches in one call. Poke and
// Status may be called from anywhere.
//
// Errors of actions do not end the loop: they are remembered as tried, told to the Observer, and the
// policy decides what follows.
package node
