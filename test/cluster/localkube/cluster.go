// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cohdi/cohdi-agent/test/image/images"
	"github.com/cohdi/cohdi-agent/test/image/oci"
)

// PauseImage is the sandbox of every Pod.
const PauseImage = images.PauseName

// ErrOtherCluster means that the machine's bridge belongs to a cluster with another state folder.
var ErrOtherCluster = errors.New("another test cluster runs on this machine")

// Cluster is one cluster, running or not.
type Cluster struct {
	Layout
	// Bin is the absolute path of the folder with the built programs.
	Bin string
	// Progress receives a line per step; nil is silent.
	Progress io.Writer

	chassis     string
	snapshotter string
	cgroups     map[string]string
}

// record is what later commands must know of the `up` that made the cluster.
type record struct {
	Chassis     string            `json:"chassis,omitempty"`
	Cgroups     map[string]string `json:"cgroups"`
	MountPoints []string          `json:"mountPoints,omitempty"`
	Sysctls     map[string]string `json:"sysctls"`
}

// New returns the cluster of a state folder. Both paths may be relative.
func New(state, bin string, progress io.Writer) (*Cluster, error) {
	state, err := filepath.Abs(state)
	if err != nil {
		return nil, fmt.Errorf("find state folder: %w", err)
	}
	if bin, err = filepath.Abs(bin); err != nil {
		return nil, fmt.Errorf("find folder of programs: %w", err)
	}
	if progress == nil {
		progress = io.Discard
	}
	c := &Cluster{Layout: Layout{State: state}, Bin: bin, Progress: progress}
	rec, err := c.load()
	if err == nil {
		c.chassis, c.cgroups = rec.Chassis, rec.Cgroups
	}
	return c, nil
}

func (c *Cluster) tool(name string) string { return filepath.Join(c.Bin, name) }

func (c *Cluster) say(format string, args ...any) {
	fmt.Fprintf(c.Progress, format+"\n", args...)
}

// Up starts the cluster with the simulator's configuration file chassis, or without a simulator if
// that is empty. A healthy cluster is left as it is; the rest of a broken one is taken down first.
// A failed Up takes down what it started and keeps the logs.
func (c *Cluster) Up(ctx context.Context, chassis string) error {
	if chassis != "" {
		var err error
		if chassis, err = filepath.Abs(chassis); err != nil {
			return fmt.Errorf("find chassis file: %w", err)
		}
	}
	unlock, err := c.acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := c.claim(); err != nil {
		return err
	}
	if c.healthy(ctx, chassis) {
		c.say("the cluster is up: export KUBECONFIG=%s", c.AdminConfig())
		return nil
	}
	if err := c.down(ctx); err != nil {
		return err
	}
	begin := time.Now()
	if err := c.up(ctx, chassis); err != nil {
		// Not the caller's context: it may be what ended the start.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return errors.Join(err, c.down(undo))
	}
	c.say("the cluster is up after %.1f s: export KUBECONFIG=%s", time.Since(begin).Seconds(), c.AdminConfig())
	return nil
}

func (c *Cluster) up(ctx context.Context, chassis string) error {
	if err := c.prepare(ctx, chassis); err != nil {
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.startControlPlane(groupCtx) })
	group.Go(func() error {
		// The simulator makes the folders that are mounted into the nodes.
		if err := c.startSimulator(groupCtx); err != nil {
			return err
		}
		nodes, nodesCtx := errgroup.WithContext(groupCtx)
		for _, node := range Nodes() {
			nodes.Go(func() error { return c.startRuntime(nodesCtx, node) })
		}
		return nodes.Wait()
	})
	if err := group.Wait(); err != nil {
		return err
	}
	c.say("control plane and container runtimes are up")
	for _, node := range Nodes() {
		if err := c.startKubelet(node); err != nil {
			return err
		}
	}
	for _, node := range Nodes() {
		if err := c.waitKubelet(ctx, node); err != nil {
			return err
		}
	}
	return c.waitPodsWelcome(ctx)
}

// prepare writes all files, takes the bridge and creates the cgroups.
func (c *Cluster) prepare(ctx context.Context, chassis string) error {
	if err := c.checkTools(chassis); err != nil {
		return err
	}
	if err := os.RemoveAll(c.Logs()); err != nil {
		return fmt.Errorf("remove the last run's logs: %w", err)
	}
	if err := os.MkdirAll(c.Logs(), 0o755); err != nil {
		return fmt.Errorf("create folder for logs: %w", err)
	}
	c.chassis, c.snapshotter = chassis, chooseSnapshotter(c.State)
	if err := c.createBridge(ctx); err != nil {
		return err
	}
	if err := freePorts(ctx); err != nil {
		return err
	}
	names := []string{controlCgroup}
	for _, node := range Nodes() {
		names = append(names, node.cgroup())
	}
	var err error
	if c.cgroups, err = makeCgroups(names...); err != nil {
		return err
	}
	made, err := makeMountPoints()
	if err != nil {
		return err
	}
	if err := c.save(record{Chassis: chassis, Cgroups: c.cgroups, MountPoints: made, Sysctls: readSysctls()}); err != nil {
		return err
	}
	if err := c.writeIdentities(); err != nil {
		return err
	}
	for _, node := range Nodes() {
		if err := c.prepareNode(node); err != nil {
			return err
		}
	}
	return c.writeImages()
}

func (c *Cluster) checkTools(chassis string) error {
	tools := []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "containerd", "containerd-shim-runc-v2", "ctr"}
	if chassis != "" {
		tools = append(tools, "cohdi-sim")
	}
	for _, tool := range tools {
		if _, err := os.Stat(c.tool(tool)); err != nil {
			return fmt.Errorf("find program %s: %w (make tools builds them)", tool, err)
		}
	}
	return nil
}

// chooseSnapshotter takes overlayfs where the state folder can carry it.
func chooseSnapshotter(state string) string {
	var fs unix.Statfs_t
	if err := unix.Statfs(state, &fs); err == nil && fs.Type != unix.OVERLAYFS_SUPER_MAGIC {
		return "overlayfs"
	}
	return "native"
}

func (c *Cluster) imageFile(name string) string { return filepath.Join(c.State, "images", name+".tar") }

func (c *Cluster) writeImages() error {
	for name, define := range map[string]func() (oci.Image, error){"pause": images.Pause, "test": images.Test} {
		img, err := define()
		if err != nil {
			return err
		}
		if err := oci.Write(img, c.imageFile(name)); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) startSimulator(ctx context.Context) error {
	if c.chassis == "" {
		return nil
	}
	if err := c.startControl(c.simulatorProcess()); err != nil {
		return err
	}
	return waitFor(ctx, 30*time.Second, func(context.Context) error {
		if _, err := os.Stat(c.simulatorReady()); err == nil {
			return nil
		}
		if err := c.ended(simulator); err != nil {
			return fatalError{err}
		}
		return fmt.Errorf("the simulator is not ready, see %s", c.Log(simulator))
	})
}

// simulatorReady is the file that the simulator writes once it serves.
func (c *Cluster) simulatorReady() string { return filepath.Join(c.Simulator(), "ready") }

func (c *Cluster) simulatorProcess() process {
	return process{name: simulator, args: []string{c.tool("cohdi-sim"), "--config", c.chassis, "--dir", c.Simulator()}}
}

func (c *Cluster) startRuntime(ctx context.Context, node Node) error {
	if err := c.startNamespaces(ctx, node); err != nil {
		return err
	}
	if err := c.startContainerd(ctx, node); err != nil {
		return err
	}
	for _, image := range []string{"pause", "test"} {
		if err := c.ImportImage(ctx, node, c.imageFile(image)); err != nil {
			return err
		}
	}
	return nil
}

// waitPodsWelcome waits for what the first Pod needs besides a node: a scheduler, and the service
// account that the controller manager makes for each namespace.
func (c *Cluster) waitPodsWelcome(ctx context.Context) error {
	for _, name := range []string{controllerManager, scheduler} {
		if err := c.waitHealthz(ctx, name); err != nil {
			return fmt.Errorf("wait for the %s, log in %s: %w", name, c.Log(name), err)
		}
	}
	api, err := c.newClient()
	if err != nil {
		return err
	}
	return waitFor(ctx, 30*time.Second, func(ctx context.Context) error {
		return api.get(ctx, "/api/v1/namespaces/default/serviceaccounts/default", nil)
	})
}

// healthy reports whether everything of the asked-for cluster runs and answers.
func (c *Cluster) healthy(ctx context.Context, chassis string) bool {
	if _, err := c.load(); err != nil || c.chassis != chassis {
		return false
	}
	for _, name := range c.expected() {
		if _, ok := c.running(name); !ok {
			return false
		}
	}
	api, err := c.newClient()
	if err != nil {
		return false
	}
	for _, node := range Nodes() {
		if api.nodeReady(ctx, node.Name) != nil {
			return false
		}
	}
	return true
}

// expected lists the processes of a complete cluster.
func (c *Cluster) expected() []string {
	names := []string{etcd, apiserver, controllerManager, scheduler}
	if c.chassis != "" {
		names = append(names, simulator)
	}
	for _, node := range Nodes() {
		names = append(names, node.holder(), node.containerd(), node.kubelet())
	}
	return names
}

// Down takes the cluster down and leaves nothing but the logs. It also removes what a cluster left
// whose state folder is lost.
func (c *Cluster) Down(ctx context.Context) error {
	unlock, err := c.acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := c.claim(); err != nil {
		return err
	}
	return c.down(ctx)
}

func (c *Cluster) down(ctx context.Context) error {
	rec, err := c.load()
	if err != nil {
		// The state folder is lost or damaged: what a cluster may have made is looked for everywhere.
		rec.MountPoints = mountPoints()
	}
	if err := killCgroup(ctx, cgroupRoot); err != nil {
		return err
	}
	if err := removeNetwork(ctx); err != nil {
		return err
	}
	if err := removeCgroup(ctx, cgroupRoot); err != nil {
		return err
	}
	if err := unmountBelow(c.State); err != nil {
		return err
	}
	if err := c.keepPodLogs(); err != nil {
		return err
	}
	restoreSysctls(rec.Sysctls)
	for _, dir := range rec.MountPoints {
		// Not empty means somebody else uses it by now.
		_ = os.Remove(dir)
	}
	return c.removeState()
}

// PodLogs is where the logs of a node's Pods are once the cluster is down.
func (l Layout) PodLogs(node string) string { return filepath.Join(l.Logs(), node+"-pods") }

// keepPodLogs saves the logs of all Pods from the removal: after a failed test they are what counts.
func (c *Cluster) keepPodLogs() error {
	for _, node := range Nodes() {
		from := filepath.Join(c.NodeDir(node.Name), "log", "pods")
		if _, err := os.Stat(from); err != nil {
			continue // this node has run none
		}
		if err := os.RemoveAll(c.PodLogs(node.Name)); err != nil {
			return fmt.Errorf("remove the last run's Pod logs: %w", err)
		}
		if err := os.Rename(from, c.PodLogs(node.Name)); err != nil {
			return fmt.Errorf("keep Pod logs: %w", err)
		}
	}
	return nil
}

// removeState removes all but the logs and the lock, the record last: an interrupted removal is
// then still known to be ours.
func (c *Cluster) removeState() error {
	entries, err := os.ReadDir(c.State)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove state folder: %w", err)
	}
	keep := map[string]bool{c.Logs(): true, c.lock(): true, c.record(): true}
	for _, e := range entries {
		path := filepath.Join(c.State, e.Name())
		if keep[path] {
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove state folder: %w", err)
		}
	}
	if err := os.Remove(c.record()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record: %w", err)
	}
	return nil
}

// claim makes sure that no other live cluster owns the bridge.
func (c *Cluster) claim() error {
	owner, err := bridgeOwner()
	if err != nil || owner == "" || owner == c.State {
		return err
	}
	other := Layout{State: owner}
	for _, name := range other.processes() {
		if _, ok := other.running(name); ok {
			return fmt.Errorf("%w, its state is in %s: take it down first (cohdi-cluster down --state %s)", ErrOtherCluster, owner, owner)
		}
	}
	c.say("removing what the cluster in %s has left", owner)
	return nil
}

// acquire takes the state folder's lock, so that two commands do not change one cluster at once. It
// returns what gives the lock back.
func (c *Cluster) acquire(ctx context.Context) (func(), error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("a test cluster needs root: namespaces, mounts and a bridge are made")
	}
	if err := os.MkdirAll(c.State, 0o755); err != nil {
		return nil, fmt.Errorf("create state folder: %w", err)
	}
	file, err := os.OpenFile(c.lock(), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	err = waitFor(ctx, 2*time.Minute, func(context.Context) error {
		busy := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if busy != nil {
			return fmt.Errorf("another command is changing the cluster in %s: %w", c.State, busy)
		}
		return nil
	})
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return func() { _ = file.Close() }, nil
}

func (c *Cluster) save(r record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	if err := os.WriteFile(c.record(), data, 0o644); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return nil
}

func (c *Cluster) load() (record, error) {
	var r record
	data, err := os.ReadFile(c.record())
	if err != nil {
		return r, fmt.Errorf("read record: %w", err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("decode record: %w", err)
	}
	return r, nil
}

// unmountBelow detaches every mount below dir, deepest first: a removal must never reach through one.
func unmountBelow(dir string) error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("read mount table: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	for _, line := range slices.Backward(lines) {
		fields := strings.Fields(line)
		if len(fields) < 5 || !strings.HasPrefix(fields[4], dir+"/") {
			continue
		}
		if err := syscall.Unmount(fields[4], unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", fields[4], err)
		}
	}
	return nil
}

// sysctls are the machine-wide settings that a kubelet changes.
func sysctls() []string {
	return []string{
		"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
	}
}

func readSysctls() map[string]string {
	values := map[string]string{}
	for _, name := range sysctls() {
		if data, err := os.ReadFile("/proc/sys/" + name); err == nil {
			values[name] = strings.TrimSpace(string(data))
		}
	}
	return values
}

func restoreSysctls(values map[string]string) {
	for name, value := range values {
		// A setting that cannot be written was not changed either.
		_ = os.WriteFile("/proc/sys/"+name, []byte(value), 0o644) //nolint:errcheck // see above
	}
}
