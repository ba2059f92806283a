// SPDX-License-Identifier: Apache-2.0

// Package metal3 follows a Node to its BareMetalHost, which says what the fabric manager calls the machine. On clusters
// that manage bare metal by Metal3 or OpenShift nobody has to write that down a second time.
//
// The objects are other projects' and read as they are, one GET each, nothing is watched or listed. The right to do so is
// optional (deploy/metal3.yaml). What is missing, a right, a kind or a word, is the Problem of the Chain, in one sentence;
// it is Passing where the same GET may answer the next time. There are no errors.
//
// Follow blocks for the calls that it makes. A Reader may be used from any goroutine.
package metal3
