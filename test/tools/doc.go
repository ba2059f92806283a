// SPDX-License-Identifier: Apache-2.0

// Command tools builds the programs that the tests run against, each family from a module of its
// own below this folder, and installs the Debian packages that they need.
//
// The truth is a stamp per family beside the programs: it holds a digest of go.mod, go.sum, the
// build flags and the Go version. A family is built again only when that changes.
//
// A lock in the target folder keeps two builds apart. A build blocks for minutes and says so.
//
// Errors carry the end of the compiler's output.
package main
