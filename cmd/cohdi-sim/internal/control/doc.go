// SPDX-License-Identifier: Apache-2.0

// Package control serves the control API, whose types and client are in package simapi.
//
// It keeps nothing; every call reaches the core, the fault injector or the token maker.
//
// The handler may be used concurrently.
//
// Errors are answered as {"error": "…"}: 400 for what cannot be read or means nothing, 404 for what does not exist, 409 for
// what the state of the chassis forbids.
package control
