// SPDX-License-Identifier: Apache-2.0

// Command cluster runs a real Kubernetes with two nodes on this machine, for tests, for the
// demonstration and for the inner loop of development.
//
// The truth is what package localkube finds; the command adds flags and nothing else.
//
// Commands that change the cluster wait for one another. An interrupt takes down what was half up.
//
// Errors are printed as one line, with exit status 1.
package main
