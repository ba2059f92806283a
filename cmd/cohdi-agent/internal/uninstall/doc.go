// SPDX-License-Identifier: Apache-2.0

// Package uninstall takes the agent off a cluster without leaving a GPU behind: units go back to their
// pool while the agents still run, and only then do the agents go, and what they wrote on Nodes. What was
// installed from the manifest itself is left to `kubectl delete -f`.
//
// The truth is the API server: claims say what is in use, device leases what is out of the pool. Nothing
// is remembered: after an error, or a crash, running it again goes on where it was.
//
// Run blocks until it is done or its context ends. It needs an administrator's rights, and agents that
// run: it asks them to release and does not touch a fabric itself.
//
// Errors: *InUseError names the claims that stand in the way; everything else says what to do.
package uninstall
