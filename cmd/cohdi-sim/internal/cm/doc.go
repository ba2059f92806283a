// SPDX-License-Identifier: Apache-2.0

// Package cm is the face of the Fujitsu cluster manager: its REST API over the core. It counts nothing that is free: the
// fabric manager's face beside it does.
//
// The truth is the core; where the real manager's behaviour is not known, the core's policies choose one. Only the rows of
// attaches for which there was no device live in the face, and are lost when it ends.
//
// The handler may be used concurrently. A resize is answered when it is accepted and goes on in the core.
//
// Errors become the manager's error body with a status; the codes in it are placeholders, the real ones are not public.
package cm
