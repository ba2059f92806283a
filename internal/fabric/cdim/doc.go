// SPDX-License-Identifier: Apache-2.0

// Package cdim talks to project-cdim and to the product that grew from it: the configuration-manager, which
// knows what there is and how it is linked, and layout-apply, which changes it. Both are reached on their own
// ports, or through the gateway with a token of its Keycloak. The two dialects differ in what a change names:
// the CPU of a host (OSS), or the adapter on the host's IO side (product).
//
// The truth is the inventory, which lags: after a job has completed it may show the old links until the
// manager's next look at the hardware (Capabilities.Settle). A device is free only if nothing at all links
// to it and no operator has withdrawn it. A change is a job. One job runs in the whole installation, whoever
// started it. Ours carries one attach, or several detaches that do not wait for each other; it is named by its id
// (Operation.Handle), and any process can poll it: which part is its own, the intent tells.
// A job is never cancelled: not ours, for it may be half done, and not somebody else's.
//
// All methods may be called at once; one login serves all callers. Attach, Detach and DetachAll read the
// inventory, post a job and return. An answer that was lost is looked for among the jobs, so that a job of ours whose
// id never arrived is found if it runs or has just ended.
//
// Errors are *device.Fault. While another job runs it is FaultBusy, while one waits for a person
// FaultSuspended, with the job's id. A device that is named and not free is FaultRejected, for it says nothing of
// the others of its model. An operation that the hardware did not answer is FaultUnknown, though
// the job has failed: the inventory decides.
package cdim
