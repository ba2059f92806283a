// SPDX-License-Identifier: Apache-2.0

// Package sim plays whole clusters on one thread, from one seed: agents with the real loops and the real
// kubelet plugin, over a model of the API server, the scheduler, the kubelets, the machines and the fabric. It
// is for tests only. It crashes, delays, loses and repeats at every step, and checks the design's invariants
// after each.
//
// What is real: internal/node, internal/leader, the policies, internal/kubeletplugin with its files, the store
// of device leases and its stored form, the claims and their conditions, the layout of the slices. What is a
// model: everything behind a client (informers, the election, the controller that writes slices) and
// everything that is not ours. The models err on the side of what goes wrong.
//
// A run belongs to one goroutine. Production code runs in goroutines of a bubble of virtual time
// (testing/synctest), but one event at a time lets them go on, and what they ask for is handled in a fixed
// order when all of them are blocked: the same seed gives the same trace, byte for byte. A crash abandons
// the process's goroutines where they are.
//
// What an invariant's breach is, is a Violation in the Result; an error means that the script cannot be
// played. A seed that breaks one is shrunk to a script that still does, which can be kept as a scenario.
package sim
