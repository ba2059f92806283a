// SPDX-License-Identifier: Apache-2.0

// Package attach decides the next action for one unit on this node: on the way in until its claim may
// be told Attached, on the way out until its lease may be deleted. It is the holder's whole policy: one
// table of rules per phase (rules.go), read from the top, the first that applies wins. Beside that it tells
// whose the GPUs of the node are (classify.go) and how they are (health.go).
//
// The truth is in what is observed: the device lease (intent), the fabric's list (attachment), sysfs
// (presence), NVML (identity and use), the plugin's checkpoint (prepared). Nothing is remembered
// between calls, so a restart is just another call.
//
// Next, Classify and Healthy are pure: the same in, the same out. They do not block and may be called from anywhere.
//
// It returns no errors; what stands in the way is the Decision's reason, in words for a person.
package attach
