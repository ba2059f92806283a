// SPDX-License-Identifier: Apache-2.0

// Package redfish is the face of a Redfish service over the core: sessions, a composition service with resource blocks and
// zones, systems whose blocks can be changed, tasks and a stream of events; or, in the variant without composition, fabrics
// whose zones are host ports. Its paths can be made up anew for each chassis, so that a client has to follow links.
//
// The truth about devices is the core. Sessions, tasks and reservations are kept in memory and end with the process, as a
// service forgets them; what a task has begun in the core goes on.
//
// The handler may be used concurrently. Work that is accepted runs in goroutines that Close waits for.
//
// Errors become messages of the registries, in one of the forms that real services have. Fault rules for the face "hw" hit
// what a change asks of the hardware.
package redfish
