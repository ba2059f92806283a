// SPDX-License-Identifier: Apache-2.0

// Package fabrictest is the conformance suite of fabric.Manager: what every client of a manager has to do
// for the callers, which know no manager in particular, to be right. It is for tests only.
//
// The truth is a chassis behind the manager, which the caller provides as Control: it knows what is
// attached whatever the client believes, and makes calls go wrong.
//
// Run uses a chassis of its own for each case; cases do not run in parallel.
//
// Failures are reported to the test; nothing is returned.
package fabrictest
