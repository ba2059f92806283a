// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// aliasPrefix marks the bridge as ours; the state folder of the cluster that owns it follows.
const aliasPrefix = "cohdi-agent test cluster in "

// bridgeOwner returns the state folder of the cluster that owns the bridge, "" without a bridge.
func bridgeOwner() (string, error) {
	data, err := os.ReadFile(filepath.Join("/sys/class/net", Bridge, "ifalias"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read owner of bridge %s: %w", Bridge, err)
	}
	owner, ok := strings.CutPrefix(strings.TrimSpace(string(data)), aliasPrefix)
	if !ok {
		return "", fmt.Errorf("the network interface %s exists and was not made by a test cluster: remove it or rename it", Bridge)
	}
	return owner, nil
}

// createBridge makes the bridge with the host's address; from here on the machine is ours.
func (l Layout) createBridge(ctx context.Context) error {
	for _, args := range []string{
		"ip link add " + Bridge + " type bridge",
		"ip addr add " + hostCIDR + " dev " + Bridge,
		"ip link set " + Bridge + " up",
	} {
		if err := command(ctx, strings.Fields(args)...); err != nil {
			return fmt.Errorf("create bridge: %w", err)
		}
		if strings.HasPrefix(args, "ip link add") {
			// Named at once, so that a crash right after leaves nothing anonymous.
			if err := command(ctx, "ip", "link", "set", Bridge, "alias", aliasPrefix+l.State); err != nil {
				return fmt.Errorf("name bridge: %w", err)
			}
		}
	}
	return nil
}

// freePorts tells early that another program already has a port on all addresses.
func freePorts(ctx context.Context) error {
	for _, port := range []string{"2379", "2380", "6443", "8443", "10257", "10259"} {
		var config net.ListenConfig
		listener, err := config.Listen(ctx, "tcp", net.JoinHostPort(HostIP, port))
		if err != nil {
			return fmt.Errorf("the cluster needs port %s of %s, but another program has it: %w", port, HostIP, err)
		}
		if err := listener.Close(); err != nil {
			return fmt.Errorf("close port %s: %w", port, err)
		}
	}
	return nil
}

// createNetns makes a node's network: a namespace with one leg on the bridge, routes to the other
// nodes' Pods, and the service address of the API server as kube-proxy would provide it.
func createNetns(ctx context.Context, node Node) error {
	ns, veth := node.Netns(), "cohdi-"+node.Name
	steps := []string{
		"ip netns add " + ns,
		"ip link add " + veth + " type veth peer name eth0 netns " + ns,
		"ip link set " + veth + " master " + Bridge + " up",
		"ip -n " + ns + " link set lo up",
		"ip -n " + ns + " addr add " + node.IP + "/24 dev eth0",
		"ip -n " + ns + " link set eth0 up",
		"ip -n " + ns + " route add default via " + HostIP,
	}
	for _, other := range Nodes() {
		if other.Name != node.Name {
			steps = append(steps, "ip -n "+ns+" route add "+other.PodSubnet+" via "+other.IP)
		}
	}
	enter := "nsenter --net=/run/netns/" + ns + " "
	steps = append(steps, enter+"sysctl -q -w net.ipv4.ip_forward=1")
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		steps = append(steps, enter+"iptables -w -t nat -A "+chain+" -d "+ServiceIP+" -p tcp --dport 443 -j DNAT --to-destination "+HostIP+":6443")
	}
	for _, step := range steps {
		if err := command(ctx, strings.Fields(step)...); err != nil {
			return fmt.Errorf("create network of node %s: %w", node.Name, err)
		}
	}
	return nil
}

// removeNetwork removes the nodes' namespaces and the bridge, whoever left them.
func removeNetwork(ctx context.Context) error {
	for _, node := range Nodes() {
		if err := removeNetns(ctx, node); err != nil {
			return err
		}
	}
	return removeLink(ctx, Bridge)
}

func removeNetns(ctx context.Context, node Node) error {
	if _, err := os.Stat(filepath.Join("/run/netns", node.Netns())); err == nil {
		if err := command(ctx, "ip", "netns", "del", node.Netns()); err != nil {
			return fmt.Errorf("remove network of node %s: %w", node.Name, err)
		}
	}
	// A namespace lives on while a dying process holds it, and its leg with it.
	return removeLink(ctx, "cohdi-"+node.Name)
}

func removeLink(ctx context.Context, name string) error {
	exists := func() bool { _, err := os.Stat(filepath.Join("/sys/class/net", name)); return err == nil }
	if !exists() {
		return nil
	}
	// The kernel may remove a leg by itself between the look and the call.
	if err := command(ctx, "ip", "link", "del", name); err != nil && exists() {
		return fmt.Errorf("remove network interface: %w", err)
	}
	return nil
}
