// SPDX-License-Identifier: Apache-2.0

// Package idm is the id_manager face: an OpenID Connect token endpoint with the password grant, and the check that the other
// faces make of a token.
//
// Tokens are signed with a key that lives as long as the process, so that a restart makes all of them worthless, as a key
// rotation does.
//
// A Manager may be used concurrently.
//
// Check returns ErrNoToken or ErrBadToken.
package idm
