// SPDX-License-Identifier: Apache-2.0

// Package uevent sends kernel uevents into network namespaces, so that listeners there cannot tell them from real ones: a
// message sent to the kernel's own end of the uevent socket is broadcast by the kernel, with port id 0 and a sequence number,
// inside the sender's network namespace only.
//
// Nothing is kept between two events; the namespaces are looked for anew each time, because Pods come and go.
//
// Send may be called concurrently; each call uses a thread of its own that ends with it.
//
// Errors are joined: one namespace that has gone does not keep the others from their event.
package uevent
