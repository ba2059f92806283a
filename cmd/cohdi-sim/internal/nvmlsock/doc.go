// SPDX-License-Identifier: Apache-2.0

// Package nvmlsock is the driver behind the test NVML library: it answers the library's requests over a socket that lies
// beside the library. No socket means that no driver is loaded.
//
// A request is one line; the answer is lines, of which the last but one is "ok" or "err <nvmlReturn_t>", and a final ".".
// A connection can carry many requests, until "events", after which it only carries events.
//
// The truth is the core; the server keeps nothing but the connections that wait for events.
//
// A Server may be used concurrently. Close ends all connections and waits for them.
//
// Errors of requests are answered as NVML return codes; others end the connection.
package nvmlsock
