// SPDX-License-Identifier: Apache-2.0

// Package sunfish talks to a Sunfish service of the OpenFabrics Alliance: a tree of Redfish resources above the agents
// that work the fabrics. A GPU is attached by a Connection between the initiator endpoint of a machine and the target
// endpoint of the GPU, and detached by deleting that. A machine is known by the UUID of its System; what has really come
// to it shows as a GPU among the System's Processors, where the fabric's agent says it (an extension: Sunfish itself has
// no GPUs). The form by which a count of a model is written to Systems/System names no device; it is never used.
//
// The service checks little. A target may get two Connections, and its copy of the tree may lack what an agent has done
// if the agent's answer was lost. So nothing is taken at its word: a device counts as taken if a Connection names it or a
// machine shows it, a change is over when the machine shows it so, and of two clients that connected one target the one
// whose machine does not show it takes its Connection back. A Connection of ours has an id that follows from its two ends,
// so that it is made once however often it is asked for, and any process finds it again.
//
// All methods may be called at once. What cannot change under one URI (the ends of an endpoint, the UUID of a System) is
// remembered; all else is read anew each time. The service has neither logins nor transactions.
//
// Errors are *device.Fault. Its words are plain text. A 5xx may come after the agent has done the work: FaultUnknown, and
// the list decides.
package sunfish
