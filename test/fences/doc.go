// SPDX-License-Identifier: Apache-2.0

// Package fences holds tests only. They prove on a real API server what deploy/daemonset.yaml lets an
// agent write: with the token of the rightful agent each write passes, with that of an agent on
// another node, or with a token bound to no Pod, it is refused; and no right is granted without use.
//
// The truth is the API server that -kubeconfig names. The tests apply deploy/daemonset.yaml to it,
// the DaemonSet and the configuration aside, so they test the file as it stands; what they leave
// behind is that. Nodes, fabrics, leases, claims are their own and are removed again, so agents may
// run meanwhile.
//
// The tests share these objects and run one after the other.
//
// Without a cluster they are skipped, with -require-cluster they fail.
package fences
