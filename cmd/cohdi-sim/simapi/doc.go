// SPDX-License-Identifier: Apache-2.0

// Package simapi is the control API of cohdi-sim: its JSON types and a client, for tests, the demo and `cohdi-sim ctl`.
// It is the side door through which a test looks at the chassis and plays fate with it; the agent never uses it.
//
// The truth is the simulator's; everything here is a copy at the time of the answer.
//
// A Client may be used by many goroutines. Calls block until the simulator answers or ctx ends.
//
// Errors are *StatusError where the simulator answered with something else than 2xx; everything else is transport.
package simapi
