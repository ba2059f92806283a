// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

//go:embed node.sh
var nodeScript string

// mountPoints are folders of the host that a node covers with its own; down removes what up made.
func mountPoints() []string {
	return []string{"/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/etc/cni/net.d", "/etc/cni"}
}

// makeMountPoints creates the missing ones and returns them, deepest first.
func makeMountPoints() ([]string, error) {
	var made []string
	for _, dir := range mountPoints() {
		if _, err := os.Stat(dir); err == nil {
			continue
		}
		made = append(made, dir)
	}
	for _, dir := range made {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("create mount point: %w", err)
		}
	}
	return made, nil
}

// holder, containerd and kubelet are the three processes of a node.
func (n Node) holder() string     { return n.Name + "-namespaces" }
func (n Node) containerd() string { return n.Name + "-containerd" }
func (n Node) kubelet() string    { return n.Name + "-kubelet" }

// prepareNode writes everything that a node reads before it starts.
func (c *Cluster) prepareNode(node Node) error {
	dir := c.NodeDir(node.Name)
	for _, sub := range []string{"kubelet", "containerd", "cni", "cni-conf", "log", "dev"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return fmt.Errorf("create folder of node %s: %w", node.Name, err)
		}
	}
	files := map[string]string{
		"boot_id":                     newUUID() + "\n",
		"machine-id":                  newHex(16) + "\n",
		"containerd.toml":             containerdConfig(c.snapshotter),
		"kubelet.yaml":                c.kubeletConfig(node),
		"cni-conf/10-bridge.conflist": cniConfig(node),
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return fmt.Errorf("write configuration of node %s: %w", node.Name, err)
		}
	}
	return nil
}

// namespacesReady is the file that the node's script writes when all mounts are in place.
func (c *Cluster) namespacesReady(node Node) string {
	return filepath.Join(c.NodeDir(node.Name), "namespaces-ready")
}

// startNamespaces creates the node's namespaces and waits until they are complete.
func (c *Cluster) startNamespaces(ctx context.Context, node Node) error {
	if err := createNetns(ctx, node); err != nil {
		return err
	}
	machine := c.Machine(node.Name)
	if _, err := os.Stat(machine); err != nil {
		machine = ""
	}
	err := c.start(process{
		name:   node.holder(),
		cgroup: c.cgroups[node.cgroup()],
		args: []string{
			"nsenter", "--net=/run/netns/" + node.Netns(),
			"unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", nodeScript,
		},
		env: []string{"NODE_DIR=" + c.NodeDir(node.Name), "MACHINE=" + machine},
	})
	if err != nil {
		return err
	}
	return waitFor(ctx, 10*time.Second, func(context.Context) error {
		if _, err := os.Stat(c.namespacesReady(node)); err == nil {
			return nil
		}
		if err := c.ended(node.holder()); err != nil {
			return fatalError{err}
		}
		return fmt.Errorf("mount namespace of node %s is not ready, see %s", node.Name, c.Log(node.holder()))
	})
}

// inside prefixes a command so that it runs in the node's namespaces.
func (c *Cluster) inside(node Node, args ...string) ([]string, error) {
	pid, ok := c.running(node.holder())
	if !ok {
		return nil, fmt.Errorf("node %s is not running: start the cluster first", node.Name)
	}
	enter := []string{"nsenter", "--net=/proc/" + strconv.Itoa(pid) + "/ns/net", "--mount=/proc/" + strconv.Itoa(pid) + "/ns/mnt", "--"}
	return append(enter, args...), nil
}

func (c *Cluster) startContainerd(ctx context.Context, node Node) error {
	args, err := c.inside(node, c.tool("containerd"), "--config", filepath.Join(c.NodeDir(node.Name), "containerd.toml"))
	if err != nil {
		return err
	}
	if err = c.start(process{name: node.containerd(), cgroup: c.cgroups[node.cgroup()], args: args, env: c.nodeEnv()}); err != nil {
		return err
	}
	probe, err := c.inside(node, c.tool("ctr"), "version")
	if err != nil {
		return err
	}
	return waitFor(ctx, 20*time.Second, func(ctx context.Context) error {
		if err := c.ended(node.containerd()); err != nil {
			return fatalError{err}
		}
		return command(ctx, probe...)
	})
}

func (c *Cluster) startKubelet(node Node) error {
	args, err := c.inside(node, c.tool("kubelet"),
		"--config="+filepath.Join(c.NodeDir(node.Name), "kubelet.yaml"),
		"--kubeconfig="+c.kubeconfig(node.Name),
		"--hostname-override="+node.Name,
		"--node-ip="+node.IP,
		"--v=2")
	if err != nil {
		return err
	}
	return c.start(process{name: node.kubelet(), cgroup: c.cgroups[node.cgroup()], args: args, env: c.nodeEnv()})
}

// waitKubelet waits until this kubelet, not the one before it, works and its node takes Pods.
func (c *Cluster) waitKubelet(ctx context.Context, node Node) error {
	err := waitFor(ctx, time.Minute, func(ctx context.Context) error {
		if err := c.ended(node.kubelet()); err != nil {
			return fatalError{err}
		}
		return probe(ctx, "http://"+node.IP+":10248/healthz")
	})
	if err != nil {
		return fmt.Errorf("wait for the kubelet of node %s, log in %s: %w", node.Name, c.Log(node.kubelet()), err)
	}
	api, err := c.newClient()
	if err != nil {
		return err
	}
	err = waitFor(ctx, time.Minute, func(ctx context.Context) error { return api.nodeReady(ctx, node.Name) })
	if err != nil {
		return fmt.Errorf("wait for node %s, log in %s: %w", node.Name, c.Log(node.kubelet()), err)
	}
	return nil
}

// Reboot does to a node what a power cycle does: every process is gone, /run is empty, the boot id
// is another, and kubelet and runtime find what is on disk. Its devices stay attached.
func (c *Cluster) Reboot(ctx context.Context, node Node) error {
	if _, ok := c.running(node.holder()); !ok {
		return fmt.Errorf("reboot node %s: it is not running", node.Name)
	}
	if err := killCgroup(ctx, node.cgroup()); err != nil {
		return err
	}
	if err := removeNetns(ctx, node); err != nil {
		return err
	}
	if err := removeCgroup(ctx, node.cgroup()); err != nil {
		return err
	}
	if _, err := makeCgroups(node.cgroup()); err != nil {
		return err
	}
	if err := os.Remove(c.namespacesReady(node)); err != nil {
		return fmt.Errorf("reboot node %s: %w", node.Name, err)
	}
	if err := os.WriteFile(c.BootID(node.Name), []byte(newUUID()+"\n"), 0o644); err != nil {
		return fmt.Errorf("reboot node %s: %w", node.Name, err)
	}
	if err := c.startNamespaces(ctx, node); err != nil {
		return err
	}
	if err := c.startContainerd(ctx, node); err != nil {
		return err
	}
	if err := c.startKubelet(node); err != nil {
		return err
	}
	return c.waitKubelet(ctx, node)
}

// nodeEnv lets containerd find its shim and runc, wherever the caller's PATH points.
func (c *Cluster) nodeEnv() []string {
	return []string{"PATH=" + c.Bin + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
}

// ImportImage loads an OCI archive into a node's containerd.
func (c *Cluster) ImportImage(ctx context.Context, node Node, archive string) error {
	// Entering the namespaces leaves the working directory behind.
	archive, err := filepath.Abs(archive)
	if err != nil {
		return fmt.Errorf("find image: %w", err)
	}
	args, err := c.inside(node, c.tool("ctr"), "--namespace", "k8s.io", "images", "import", archive)
	if err != nil {
		return err
	}
	if err := command(ctx, args...); err != nil {
		return fmt.Errorf("import image into node %s: %w", node.Name, err)
	}
	return nil
}

// NodeCommand returns a command that runs in the node's namespaces; the caller wires and runs it.
func (c *Cluster) NodeCommand(ctx context.Context, node Node, args ...string) (*exec.Cmd, error) {
	if len(args) == 0 {
		return nil, errors.New("run command on node: no command given")
	}
	full, err := c.inside(node, args...)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, full[0], full[1:]...)
	cmd.Env = append(os.Environ(), c.nodeEnv()...)
	return cmd, nil
}

func containerdConfig(snapshotter string) string {
	return `version = 3
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "` + snapshotter + `"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "` + PauseImage + `"
[plugins."io.containerd.cri.v1.runtime"]
  # Raising a process's oom_score_adj back up needs CAP_SYS_RESOURCE, which a container host may lack.
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
`
}

func (c *Cluster) kubeletConfig(node Node) string {
	return `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: ` + node.IP + `
providerID: ` + node.ProviderID() + `
cgroupRoot: /` + node.cgroup() + `
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: "` + c.pkiFile("ca.crt") + `"}}
authorization: {mode: Webhook}
tlsCertFile: "` + c.pkiFile("kubelet-"+node.Name+".crt") + `"
tlsPrivateKeyFile: "` + c.pkiFile("kubelet-"+node.Name+".key") + `"
clusterDomain: ` + clusterDomain + `
clusterDNS: [10.96.0.10]
readOnlyPort: 0
healthzBindAddress: ` + node.IP + `
healthzPort: 10248
# What the machine that runs the tests may lack or be short of must not decide over Pods.
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
localStorageCapacityIsolation: false
imageGCHighThresholdPercent: 100
evictionHard: {nodefs.available: "0%", imagefs.available: "0%", memory.available: "1Mi"}
`
}

func cniConfig(node Node) string {
	return `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "` + node.PodSubnet + `"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
`
}

func newHex(bytes int) string {
	b := make([]byte, bytes)
	_, _ = rand.Read(b) // never fails, see its documentation
	return hex.EncodeToString(b)
}

// newUUID has the form of the kernel's boot id.
func newUUID() string {
	h := newHex(16)
	return h[:8] + "-" + h[8:12] + "-4" + h[13:16] + "-a" + h[17:20] + "-" + h[20:]
}
