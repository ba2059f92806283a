// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the agent on a real Kubernetes with two nodes, against the simulated chassis: what a
// user asks for, and what must hold when something goes wrong on the way.
//
// The truth is never the agent's word alone: a device is attached when the fabric's own list says so, free
// when it is back there, and usable when a container opens it. Each test ends with the same look at all of
// it (settled): nothing attached without a device lease, no lease without its unit, no CDI spec without its
// claim, no violation seen by the simulator, and, once the Pods are gone, everything back in the pool.
//
// One cluster serves all tests, one after the other. One that runs already is used and left as it is;
// otherwise it is started, and taken down at the end, however that comes about. Waits are for conditions and
// have deadlines; none is a pause.
//
// A failed test writes logs, objects and the simulator's state into a folder below .cache/e2e, whose path it
// prints.
package e2e
