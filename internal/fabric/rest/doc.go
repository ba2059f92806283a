// SPDX-License-Identifier: Apache-2.0

// Package rest is what clients of REST interfaces have in common: one exchange with a time limit and a
// bounded answer, or with one that goes on, whether anything of it can have left this machine, tokens for all
// callers from one login, and foreign words made fit for a condition. It knows no manager and no path.
//
// The truth is in files: the CA bundle is read again for each exchange and credentials at each login, as a
// Secret is mounted, so that a rotation needs no restart. Tokens are kept in memory only.
//
// Client and Tokens are safe for concurrent use. A login belongs to all who wait for it: it does not end with
// the first one's context, but with Close.
//
// Errors are *device.Fault. FaultUnreachable means that nothing was sent; an exchange that broke later is
// FaultUnknown. No error holds a token or a secret.
package rest
