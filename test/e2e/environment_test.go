// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/test/cluster/install"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

const (
	// root is the root of the repository, seen from this package.
	root = "../.."
	// fabric is the only fabric of the chassis.
	fabric  = device.FabricID("0")
	control = "127.0.0.1:8444"
)

// environment is the cluster with the agent on it, and the ways to look at both.
type environment struct {
	cluster *localkube.Cluster
	config  *rest.Config
	client  kubernetes.Interface
	sim     *simapi.Client
	leases  *lease.Store
	// found: the cluster ran before us, so it outlives us.
	found bool
	// dumps is where failed tests write, logs where the agents' logs are kept.
	dumps, logs string
	collecting  sync.WaitGroup
	collected   context.CancelFunc
}

// startEnvironment returns what it has started even if it fails.
func startEnvironment(ctx context.Context) (*environment, error) {
	at := func(path string) string { return filepath.Join(root, path) }
	dumps, err := filepath.Abs(at(".cache/e2e"))
	if err != nil {
		return nil, fmt.Errorf("find the folder for what failed tests leave: %w", err)
	}
	if err = os.RemoveAll(dumps); err != nil {
		return nil, fmt.Errorf("remove what the last run left: %w", err)
	}
	cluster, err := localkube.New(at(".cache/cluster"), at(".cache/bin"), os.Stderr)
	if err != nil {
		return nil, err
	}
	e := &environment{cluster: cluster, sim: simapi.NewClient(control), dumps: dumps, logs: filepath.Join(dumps, "agents")}
	e.found = e.connect() == nil && e.answers(ctx)
	if err = cluster.Up(ctx, at("test/chassis/demo.yaml")); err != nil {
		return nil, err // it has undone what it did
	}
	if err = e.connect(); err != nil {
		return e, err
	}
	e.collect(ctx)
	return e, e.install(ctx)
}

// connect makes the clients from what the cluster has written.
func (e *environment) connect() error {
	config, err := clientcmd.BuildConfigFromFlags("", e.cluster.AdminConfig())
	if err != nil {
		return fmt.Errorf("read the administrator's kubeconfig: %w", err)
	}
	config.QPS = -1 // no limit: a wait that is throttled would not tell what it waits for
	if e.client, err = kubernetes.NewForConfig(config); err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	e.config = config
	e.leases, err = lease.NewFabricStore(fabric, lease.Options{Client: e.client, Clock: clock.RealClock{}, Changed: func(string) {}})
	return err
}

func (e *environment) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err := e.client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
	return err == nil
}

// install puts the agent in as a user does, with our configuration.
func (e *environment) install(ctx context.Context) error {
	o := install.Default(root)
	o.Config = filepath.Join("testdata", "agent.yaml")
	o.More = slices.DeleteFunc(o.More, func(file string) bool {
		_, err := os.Stat(file)
		return errors.Is(err, fs.ErrNotExist)
	})
	want, err := os.ReadFile(o.Config)
	if err != nil {
		return fmt.Errorf("read the agent's configuration: %w", err)
	}
	version, err := digest(append([]string{o.Image, o.Manifest, o.Config, o.Chassis}, o.More...)...)
	if err != nil {
		return err
	}
	before, err := e.configuration(ctx)
	if err != nil {
		return err
	}
	if before == string(want) && e.installed(ctx, version) {
		return nil
	}
	if err = install.Install(ctx, e.cluster, o); err != nil {
		return err
	}
	if before != "" && before != string(want) {
		if err = e.restartAgents(ctx); err != nil { // those that were there have read the former one
			return err
		}
	}
	return e.annotate(ctx, installedAnnotation, version)
}

// installedAnnotation on the DaemonSet says what was installed last, so that the same is not installed again.
const installedAnnotation = "test.cohdi.io/installed"

func digest(files ...string) (string, error) {
	sum := sha256.New()
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("read what is to be installed: %w", err)
		}
		one := sha256.Sum256(data)
		sum.Write(one[:])
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// installed tells whether exactly this runs already.
func (e *environment) installed(ctx context.Context, version string) bool {
	ds, err := e.client.AppsV1().DaemonSets(device.AgentNamespace).Get(ctx, device.AgentName, metav1.GetOptions{})
	return err == nil && ds.Annotations[installedAnnotation] == version && e.rolledOut(ctx) == nil
}

func (e *environment) annotate(ctx context.Context, key, value string) error {
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, key, value)
	_, err := e.client.AppsV1().DaemonSets(device.AgentNamespace).Patch(ctx, device.AgentName, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("mark the DaemonSet: %w", err)
	}
	return nil
}

// stop takes the cluster down, unless it was there before or is to be kept.
func (e *environment) stop(ctx context.Context, keep bool) {
	if e.collected != nil {
		e.collected()
		e.collecting.Wait()
	}
	if keep || e.found {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, reserve)
	defer cancel()
	if err := e.cluster.Down(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "e2e: take the cluster down:", err)
	}
}

// collect keeps the agents' logs beyond their Pods: it gives each file a second name.
func (e *environment) collect(ctx context.Context) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	e.collected = cancel
	e.collecting.Go(func() {
		for {
			e.linkLogs()
			select {
			case <-ctx.Done():
				return
			case <-time.After(500 * time.Millisecond):
			}
		}
	})
}

func (e *environment) linkLogs() {
	for _, node := range localkube.Nodes() {
		pods := filepath.Join(e.cluster.NodeDir(node.Name), "log", "pods")
		files, err := filepath.Glob(filepath.Join(pods, device.AgentNamespace+"_*", "*", "*.log"))
		if err != nil {
			continue // the pattern is good
		}
		for _, file := range files {
			name := strings.TrimPrefix(file, pods+"/")
			to := filepath.Join(e.logs, node.Name+"_"+strings.ReplaceAll(name, "/", "_"))
			if _, err := os.Lstat(to); err == nil {
				continue
			}
			if err := os.MkdirAll(e.logs, 0o755); err == nil {
				_ = os.Link(file, to) // it may be gone by now
			}
		}
	}
}

// onNode runs a command in a node's namespaces and returns what it printed.
func (e *environment) onNode(ctx context.Context, node string, args ...string) (string, error) {
	n, err := localkube.FindNode(node)
	if err != nil {
		return "", err
	}
	cmd, err := e.cluster.NodeCommand(ctx, n, args...)
	if err != nil {
		return "", err
	}
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return string(out), fmt.Errorf("run %q on %s: %w: %s", strings.Join(args, " "), node, err, strings.TrimSpace(string(exit.Stderr)))
	}
	return string(out), err
}

// dialOn returns a dialer whose connections start on the node: Pods have addresses there only.
func dialOn(node string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		type result struct {
			conn net.Conn
			err  error
		}
		out := make(chan result, 1)
		go func() {
			// The thread ends with this goroutine: it never goes back to others in a foreign namespace.
			runtime.LockOSThread()
			conn, err := dialIn(ctx, "/run/netns/cohdi-"+node, network, address)
			out <- result{conn, err}
		}()
		r := <-out
		return r.conn, r.err
	}
}

func dialIn(ctx context.Context, netns, network, address string) (net.Conn, error) {
	ns, err := os.Open(netns)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	defer ns.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("enter network namespace %s: %w", netns, err)
	}
	return (&net.Dialer{}).DialContext(ctx, network, address)
}
