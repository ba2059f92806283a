// SPDX-License-Identifier: Apache-2.0

// Package fabric is the contract between the agent and a fabric manager: what is attached to a machine,
// what is free, attach, detach. A sub-package for each kind of manager implements it; fabrictest holds
// the conformance suite that each of them has to pass. The contract carries no policy: when to ask again
// and what to believe is decided by the caller.
//
// The truth is the manager's list of what is attached to a machine. The answer to an attach or a detach
// is a hint: after an outcome that is not definite, and before anything is forgotten, the list decides.
// Nothing is kept between calls but credentials; an Operation holds all that Poll needs, so that it can
// be stored and taken up again by another process.
//
// Implementations are safe for concurrent use. Each call blocks until the manager answers, the context
// ends, or the manager's own limit for one call (Capabilities.MaxCall) has passed. Operations on a
// manager that works asynchronously return at once, in state Pending.
//
// Errors are always *device.Fault. Its class says what the caller may do next; only FaultUnknown means
// that the fabric may have changed. Text of the manager is cut to a length fit for a condition, and holds
// no credentials.
package fabric
