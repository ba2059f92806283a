// SPDX-License-Identifier: Apache-2.0

// Package cdim is the face of project-cdim and of the product of it: configuration-manager and layout-apply over the core,
// each on its own port or behind a gateway that wants a token, and the hardware control below them.
//
// The truth about devices is the core; jobs and what operators have withdrawn are kept in a file of their own. Reads lag
// behind the core by the stale delay. A job that ran when the simulator was killed has lost its worker, as with the real one.
//
// The handlers may be used concurrently. Jobs run in goroutines that Close waits for.
//
// Errors become the services' own bodies. Fault rules for the face "hw" hit what a job asks of the hardware.
package cdim
