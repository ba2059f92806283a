// SPDX-License-Identifier: Apache-2.0

// Command cohdi-sim is a chassis on your desk: pooled GPUs, machines to attach them to, the fabric manager that does it, and
// for each machine the files that its kernel and its driver would show. It knows nothing of Kubernetes.
//
// What it simulates is outside of the agent: HTTPS APIs (an FM, and where they are given an address a CDIM in either dialect,
// a Redfish service and a Sunfish service), sysfs files, character devices, the driver behind the test NVML library. It also judges: taking a
// device away that somebody has open is a violation that tests look for.
//
// cohdi-sim ctl is a person's hand on one that runs: it shows what there is, and does all that the control API can.
//
// The state survives a restart in the same directory, also one by SIGKILL. SIGTERM stops it.
//
// It exits with 2 for bad flags, a bad configuration or a command that means nothing, and with 1 for everything else.
package main
