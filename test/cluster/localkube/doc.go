// SPDX-License-Identifier: Apache-2.0

// Package localkube runs a real Kubernetes on one machine for tests: etcd, a control plane whose
// components each have an identity of their own, and two nodes, each a kubelet and a containerd in
// a mount and network namespace of its own. It knows the device simulator only as a program to
// start and as folders to mount into the nodes.
//
// The truth is the kernel: a process runs if its pid and start time are those in its pid file, and
// everything that belongs to a cluster is in the cgroup tree /cohdi, the network namespaces
// cohdi-<node> and behind the bridge cohdi0, whose alias names the state folder of its owner. So a
// cluster can be taken down without its state folder. A restart of the caller loses nothing.
//
// A Cluster may be used by one goroutine at a time; a lock in the state folder keeps a second
// program away while one changes the cluster. Every wait ends with its context or its own deadline.
//
// Errors say which component did not do what, and where its log is. ErrOtherCluster is the only one
// that callers tell apart.
package localkube
