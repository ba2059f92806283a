// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"path/filepath"
)

// Fixed addresses of a cluster. All of it lives behind one bridge, so that two clusters cannot
// share a machine by accident and nothing listens on an address that the outside can reach.
const (
	Bridge         = "cohdi0"
	HostIP         = "10.200.0.1"
	APIServerURL   = "https://10.200.0.1:6443"
	ServiceIP      = "10.96.0.1"
	serviceCIDR    = "10.96.0.0/16"
	hostCIDR       = HostIP + "/24"
	cgroupRoot     = "cohdi"
	controlCgroup  = cgroupRoot + "/control"
	etcdURL        = "https://10.200.0.1:2379"
	etcdPeerURL    = "https://10.200.0.1:2380"
	clusterDomain  = "cluster.local"
	serviceIssuer  = "https://kubernetes.default.svc." + clusterDomain
	simulatorFMURL = "https://10.200.0.1:8443"
)

// Node is one simulated machine.
type Node struct {
	Name string
	IP   string
	// PodSubnet is the range that the node's bridge plugin hands out.
	PodSubnet string
	// Machine is the fabric manager's name of this node; the provider id carries it.
	Machine string
}

// Nodes returns the nodes of every cluster, always the same two.
func Nodes() []Node {
	return []Node{
		{Name: "n1", IP: "10.200.0.11", PodSubnet: "10.244.1.0/24", Machine: "11111111-1111-4111-8111-000000000001"},
		{Name: "n2", IP: "10.200.0.12", PodSubnet: "10.244.2.0/24", Machine: "11111111-1111-4111-8111-000000000002"},
	}
}

// ProviderID is how the node's agent learns its machine.
func (n Node) ProviderID() string { return "fsas-cdi://" + n.Machine }

// Netns is the name of the node's network namespace, as in /run/netns.
func (n Node) Netns() string { return cgroupRoot + "-" + n.Name }

func (n Node) cgroup() string { return cgroupRoot + "/" + n.Name }

// Layout knows where a cluster keeps what.
type Layout struct {
	// State is the absolute path of the cluster's state folder.
	State string
}

// AdminConfig is the kubeconfig for people and tests: a member of system:masters.
func (l Layout) AdminConfig() string { return filepath.Join(l.State, "admin.conf") }

// Logs is the folder of all components' logs; it survives Down.
func (l Layout) Logs() string { return filepath.Join(l.State, "log") }

// Log is the log of one process.
func (l Layout) Log(process string) string { return filepath.Join(l.Logs(), process+".log") }

// AuditLog is the API server's audit log.
func (l Layout) AuditLog() string { return filepath.Join(l.Logs(), "audit.log") }

// Simulator is the simulator's folder.
func (l Layout) Simulator() string { return filepath.Join(l.State, "sim") }

// Machine is the simulator's host root of a node.
func (l Layout) Machine(node string) string { return filepath.Join(l.Simulator(), "machines", node) }

// NodeDir holds what a node keeps to itself.
func (l Layout) NodeDir(node string) string { return filepath.Join(l.State, "nodes", node) }

// BootID is the file that a node sees as /proc/sys/kernel/random/boot_id.
func (l Layout) BootID(node string) string { return filepath.Join(l.NodeDir(node), "boot_id") }

func (l Layout) pki() string                { return filepath.Join(l.State, "pki") }
func (l Layout) pkiFile(name string) string { return filepath.Join(l.pki(), name) }
func (l Layout) kubeconfig(name string) string {
	return filepath.Join(l.State, "kubeconfig", name+".conf")
}

func (l Layout) pidFile(process string) string { return filepath.Join(l.State, "run", process+".pid") }
func (l Layout) record() string                { return filepath.Join(l.State, "cluster.json") }
func (l Layout) lock() string                  { return filepath.Join(l.State, "lock") }
