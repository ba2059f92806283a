// SPDX-License-Identifier: Apache-2.0

// Package fm is the face of the Fujitsu fabric manager: its REST API over the core.
//
// The truth is the core; where the real manager's behaviour is not known, the core's policies choose one.
//
// The handler may be used concurrently. Updates block for as long as the hardware takes and go on when the client leaves.
//
// Errors become the manager's error body with a status; the codes in it are placeholders, the real ones are not public.
package fm
