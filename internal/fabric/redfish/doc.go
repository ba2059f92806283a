// SPDX-License-Identifier: Apache-2.0

// Package redfish talks to a Redfish service that composes: resource blocks that become part of computer systems, or,
// where a service has no composition, endpoints that become part of a fabric's zones, one zone for each host port.
// Everything is found by links from the service root; the one fixed path is /redfish/v1/. What the service advertises
// decides how a change is asked for: an action of the system or zone, an update of its list, or a manifest.
//
// The truth is the system's list of its resource blocks (the zone's of its endpoints). A device is a block with one GPU
// in it, and is named by the block's URI; a machine is named by the system's UUID. A block that is part of a host, or
// that another client has reserved, is never attached. An update of a list is made of the list as it was read and is
// conditional on its ETag, so that the changes of two clients cannot undo one another; where a service has no ETags,
// nothing but its own order of changes protects them. Links that were found are remembered and looked up anew when they
// lead nowhere; nothing else is kept but the session.
//
// All methods may be called at once; one session serves all callers and ends with Close. A change may be accepted as a
// task: Operation.Handle is the URI of its monitor, and any process can poll it. Where there is no monitor, or it has
// been forgotten, the composition itself tells. Watch blocks until its context, or the client, ends.
//
// Errors are *device.Fault, by the message's key in a registry rather than by the HTTP status. A device that is named and
// not free is FaultRejected, for it says nothing of the others of its model; FaultConflict means that the service was
// changed by somebody else each time it was asked.
package redfish
