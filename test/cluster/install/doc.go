// SPDX-License-Identifier: Apache-2.0

// Package install puts the agent into a local cluster the way its users do: it applies
// deploy/daemonset.yaml with the ConfigMap filled in, and the Secret of the fabric.
//
// The truth is the manifest as it is shipped; the login comes from the simulator's own configuration
// and the certificate authority from its folder, so nothing is written down twice.
//
// Nothing is shared between calls. Install blocks until the agents run or its context ends.
//
// Errors carry what kubectl said.
package install
