// SPDX-License-Identifier: Apache-2.0

// Package tlsgen makes the certificate authority and the server certificate of the simulator.
//
// Both are kept in a directory, so that a restart does not change what clients trust; the server certificate is made anew at
// each start, because the names in the configuration may have changed.
//
// It is called once, at start.
//
// Errors are those of the file system and of unreadable certificates of a former run.
package tlsgen
