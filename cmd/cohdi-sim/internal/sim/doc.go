// SPDX-License-Identifier: Apache-2.0

// Package sim puts the simulator together: the core, a host root and a driver socket for each machine, the faces behind the
// fault injector, the control API.
//
// Its directory holds machines/<name> (host roots), tls (ca.crt), state.json (what a restart takes over) and the file ready,
// which is there while everything serves.
//
// Run blocks until ctx ends, and may be called once.
//
// Errors are those of the start; what fails later is logged and the simulator goes on.
package sim
