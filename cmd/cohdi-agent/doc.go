// SPDX-License-Identifier: Apache-2.0

// Command cohdi-agent runs on every node: it serves the kubelet's DRA plugin, attaches and detaches this
// node's GPUs, and, while it is elected, leads its fabric.
//
// This package only joins: flags and configuration, adapters and loops. What is decided stands in
// internal/attach (a node's unit) and internal/pool (a fabric).
//
// SIGTERM ends it cleanly: leadership is given up, calls under way are left to be observed by the next.
//
// Exit codes: 0 done, 1 failed at run time, 2 bad flags or configuration (one line on standard error).
package main
