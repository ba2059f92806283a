// SPDX-License-Identifier: Apache-2.0

// Package kubeletplugin answers the kubelet: it prepares the devices of a claim for containers and
// takes that back. It writes CDI specs and device metadata, reports health, and publishes the node's own
// pool as it is told to. It decides neither who gets a unit nor when one is released, nor whose a GPU is,
// and it never attaches or detaches.
//
// What is prepared for whom is true in the checkpoint, one file in the plugin's data directory that all
// agents of a node share during a rolling update. It is read anew for each call; nothing lives in memory
// alone. Everything else is looked up again on each Prepare: the unit's state in its device lease, the
// GPU behind a UUID in NVML, the driver's files on disk. A stored path, minor or address is never
// replayed. A GPU that is built into the node has no lease; that none names it is looked up instead.
// A checkpoint that is missing or damaged is rebuilt from device leases and claims; until then
// PreparedBy answers that it does not know, and nothing may be released.
//
// All methods may be called at once. A claim has one worker at a time, a device belongs to the claim
// whose entry the checkpoint took first, and Unprepare interrupts a Prepare of the same claim that waits.
// Prepare blocks until its devices can be used, 40 s at most; Unprepare needs nothing but local files.
//
// Errors of Prepare say what was waited for and for how long; the kubelet asks again. A Prepare that
// fails leaves nothing behind.
package kubeletplugin
