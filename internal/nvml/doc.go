// SPDX-License-Identifier: Apache-2.0

// Package nvml asks the NVIDIA driver, through its management library, which GPUs it can use, and prepares
// a GPU for removal. It is the only owner of libnvidia-ml in the process and the only user of go-nvml. It
// neither rescans the bus nor decides when a GPU may go.
//
// The truth is the driver's. The library is looked for below the host root at every Refresh until one is
// found; a node without library, driver or GPU is a normal state, told by Status. The library takes its list
// of GPUs when it is initialised, so Rediscover has to be called after one came. GPUs are named by PCI
// address in every call; no handle is kept between calls. Whoever took a handle holds the device node open:
// Drain, Remove and Release let go of what this process holds, so that it is not itself the one who keeps a
// GPU in use. The driver hides a drained GPU from whoever initialises after that: Inventory and Draining ask
// for it by address. What a restart loses: whether persistence mode was on before Drain, and errors (XIDs) that
// GPUs reported before.
//
// Methods may be called from any goroutine; they run one at a time. Each NVML call has a deadline, and so
// has the wait for one's turn. A call that does not return by then is given up: the caller gets ErrHung, the
// state is Hung until the call comes back, and others get their turn, up to a small number of calls given
// up. The library is never shut down while a call hangs in it.
//
// Errors: the Err values tell the cases on which a caller decides; everything else is worth a retry. A
// function that the library lacks is ErrUnsupported (it is looked up before it is called, since go-nvml ends
// the process on a missing one). Once loaded, a library stays until the process ends: when the driver is
// replaced by another version the state is Failed and says that a restart helps.
package nvml
