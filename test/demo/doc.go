// SPDX-License-Identifier: Apache-2.0

// Command demo shows the main job on a real cluster of this machine: Pods ask for GPUs, get them from a
// simulated chassis, and when nobody needs them any more the GPUs are back in the pool. `make demo` runs
// it; the tests of the behaviour are in test/e2e.
//
// The truth is what the API server and the chassis tell: the program only watches, applies manifests that
// stand beside it, and runs commands in the containers. Times are those at which the API server told it
// of a change, and those of the chassis for what the chassis did; one machine, one clock.
//
// One goroutine acts. A watch keeps what is known in a struct with a lock. Every wait has a deadline of
// its own. Whatever ends the program, a second process takes the cluster down if the first cannot.
//
// Errors say what was waited for and what was seen last; logs of everything stay in the cluster's folder.
package main
