// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// These tests start clusters of their own, take minutes and need root and the built programs.
var realClusters = flag.Bool("real", false, "start real clusters; none may run on this machine")

const bin = "../../../.cache/bin"

// leftovers lists what a cluster that is down must not have left on the machine.
func leftovers(t *testing.T, l Layout) []string {
	t.Helper()
	var found []string
	for _, node := range Nodes() {
		for _, path := range []string{"/run/netns/" + node.Netns(), "/sys/class/net/cohdi-" + node.Name, l.NodeDir(node.Name)} {
			if _, err := os.Lstat(path); err == nil {
				found = append(found, path)
			}
		}
	}
	if _, err := os.Stat("/sys/class/net/" + Bridge); err == nil {
		found = append(found, Bridge)
	}
	all, err := hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range all {
		if _, err = os.Stat(filepath.Join(h.path, cgroupRoot)); err == nil {
			found = append(found, filepath.Join(h.path, cgroupRoot))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, l.State) {
			found = append(found, "mount "+line)
		}
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range processes {
		if data, err := os.ReadFile(file); err == nil && strings.Contains(string(data), l.State) {
			found = append(found, file+" "+strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return found
}

func newCluster(t *testing.T) *Cluster {
	t.Helper()
	if !*realClusters {
		t.Skip("starts a real cluster: make cluster-test runs it")
	}
	c, err := New(t.TempDir(), bin, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The test's own context has ended by now.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if err := c.Down(ctx); err != nil {
			t.Errorf("take the cluster down: %v", err)
		}
		if diff := cmp.Diff([]string(nil), leftovers(t, c.Layout)); diff != "" {
			t.Errorf("left on the machine (-want +got):\n%s", diff)
		}
	})
	return c
}

// kubectl returns what kubectl printed.
func (c *Cluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), c.tool("kubectl"), append([]string{"--kubeconfig", c.AdminConfig()}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

func TestRealCluster(t *testing.T) {
	c := newCluster(t)
	if err := c.Up(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	for _, node := range Nodes() {
		c.kubectl(t, "run", node.Name, "--image=docker.io/cohdi/test:dev", "--overrides", `{"spec":{"nodeName":"`+node.Name+`"}}`,
			"--command", "--", "sh", "-c", "echo hello from $HOSTNAME; exec sleep 1000000")
	}
	for _, node := range Nodes() {
		c.kubectl(t, "wait", "--for=condition=Ready", "pod/"+node.Name, "--timeout=60s")
		if diff := cmp.Diff("hello from "+node.Name, c.kubectl(t, "logs", node.Name)); diff != "" {
			t.Errorf("logs (-want +got):\n%s", diff)
		}
		// From the Pod network to the API server's service address, and to the host.
		for _, address := range []string{ServiceIP + " 443", HostIP + " 6443"} {
			c.kubectl(t, "exec", node.Name, "--", "sh", "-c", "nc -w 5 "+address+" </dev/null")
		}
	}
	t.Run("another state folder is refused", func(t *testing.T) {
		other, err := New(t.TempDir(), bin, t.Output())
		if err != nil {
			t.Fatal(err)
		}
		for name, call := range map[string]func() error{
			"up":   func() error { return other.Up(t.Context(), "") },
			"down": func() error { return other.Down(t.Context()) },
		} {
			if err := call(); !errors.Is(err, ErrOtherCluster) {
				t.Errorf("%s: got %v, want %v", name, err, ErrOtherCluster)
			}
		}
		if err := c.Status(t.Context(), t.Output()); err != nil {
			t.Errorf("the first cluster suffered: %v", err)
		}
	})
	t.Run("components come back", func(t *testing.T) {
		for _, words := range [][]string{{"apiserver"}, {"etcd"}, {"scheduler"}, {"controller-manager"}, {"n1", "kubelet"}, {"n2", "containerd"}} {
			if err := c.Restart(t.Context(), words...); err != nil {
				t.Errorf("restart %v: %v", words, err)
			}
		}
		if err := c.Status(t.Context(), t.Output()); err != nil {
			t.Error(err)
		}
	})
	t.Run("a node reboots", func(t *testing.T) {
		bootID := func() string {
			return c.kubectl(t, "get", "node", "n1", "-o", "jsonpath={.status.nodeInfo.bootID}")
		}
		before := bootID()
		if err := c.Reboot(t.Context(), Nodes()[0]); err != nil {
			t.Fatal(err)
		}
		// The node is Ready by what it said before it went; the kubelet tells of the new boot when it reports next.
		err := waitFor(t.Context(), time.Minute, func(context.Context) error {
			if after := bootID(); after == before {
				return fmt.Errorf("boot id is still %s", after)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		c.kubectl(t, "wait", "--for=jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/n1", "--timeout=60s")
		c.kubectl(t, "wait", "--for=condition=Ready", "pod/n1", "--timeout=60s")
	})
	t.Run("the state folder is lost", func(t *testing.T) {
		if err := os.RemoveAll(c.State); err != nil {
			t.Fatal(err)
		}
		// newCluster's clean-up takes down what is left and looks for the rest.
	})
}

func TestRealClusterInterrupted(t *testing.T) {
	c := newCluster(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		// In the middle: the nodes have their namespaces, and nothing is ready.
		err := waitFor(ctx, time.Minute, func(context.Context) error {
			_, err := os.Stat(c.namespacesReady(Nodes()[1]))
			return err
		})
		if err == nil {
			cancel()
		}
	}()
	if err := c.Up(ctx, ""); !errors.Is(err, context.Canceled) {
		t.Errorf("up: got %v, want %v", err, context.Canceled)
	}
	if diff := cmp.Diff([]string(nil), leftovers(t, c.Layout)); diff != "" {
		t.Errorf("left by the interrupted start (-want +got):\n%s", diff)
	}
}
