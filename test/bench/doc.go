// SPDX-License-Identifier: Apache-2.0

// Command bench measures the agent on a real cluster of this machine and prints tables in Markdown, which
// docs/performance.md takes over. `make bench` runs it; PARTS=a,c runs some of its parts.
//
//	a  how long from an allocation to the condition that the scheduler waits for, and what is written on the way
//	b  how long from a Pod's creation until it runs, and who takes how much of that
//	c  what the agents do when there is nothing to do
//	d  how all that grows with the number of nodes
//
// The truth is the API server's audit log, which tells who wrote what when by one clock, the chassis' own record
// of what it did, and /proc. A figure never makes it fail: it fails when something did not work, or when two
// sources contradict each other.
//
// One goroutine acts; watches keep what is known. Every wait has a deadline. It takes the cluster down that it
// has started, and refuses one that is up already: figures of a used cluster say nothing.
//
// Errors say what was waited for and what was seen last; logs stay in the cluster's folder.
package main
