// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// FindNode returns the node of that name.
func FindNode(name string) (Node, error) {
	for _, node := range Nodes() {
		if node.Name == name {
			return node, nil
		}
	}
	return Node{}, fmt.Errorf("find node %q: there are n1 and n2", name)
}

// component finds what Start, Stop and Restart name: a process of the control plane, or kubelet and
// containerd of a node as in "n1 kubelet".
func (c *Cluster) component(words []string) (name string, start func(context.Context) error, err error) {
	switch len(words) {
	case 1:
		control := map[string]func() process{
			etcd: c.etcdProcess, apiserver: c.apiserverProcess, scheduler: c.schedulerProcess,
			controllerManager: c.controllerManagerProcess, simulator: c.simulatorProcess,
		}
		if p, ok := control[words[0]]; ok {
			return words[0], func(ctx context.Context) error { return c.startAndWait(ctx, p()) }, nil
		}
	case 2:
		node, err := FindNode(words[0])
		if err != nil {
			return "", nil, err
		}
		switch words[1] {
		case "kubelet":
			return node.kubelet(), func(ctx context.Context) error {
				if err := c.startKubelet(node); err != nil {
					return err
				}
				return c.waitKubelet(ctx, node)
			}, nil
		case "containerd":
			return node.containerd(), func(ctx context.Context) error { return c.startContainerd(ctx, node) }, nil
		}
	}
	return "", nil, fmt.Errorf("find component %q: there are etcd, apiserver, controller-manager, scheduler, sim, and per node "+
		"kubelet and containerd, as in: n1 kubelet", strings.Join(words, " "))
}

// startAndWait starts a component of the control plane and waits until clients can use it.
func (c *Cluster) startAndWait(ctx context.Context, p process) error {
	if p.name == simulator {
		if c.chassis == "" {
			return errors.New("start sim: this cluster was made without a chassis")
		}
		if err := os.Remove(c.simulatorReady()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("start sim: %w", err)
		}
		return c.startSimulator(ctx)
	}
	if err := c.startControl(p); err != nil {
		return err
	}
	if p.name == etcd || p.name == apiserver {
		return c.waitStore(ctx)
	}
	return c.waitHealthz(ctx, p.name)
}

// waitStore waits for the API server after it or etcd was started, unless the other is stopped: then
// that is what the caller wants to see. A component that died of the outage is started again, as a
// service manager would.
func (c *Cluster) waitStore(ctx context.Context) error {
	for _, name := range []string{etcd, apiserver} {
		if _, ok := c.running(name); !ok {
			return nil
		}
	}
	if err := c.waitAPIServer(ctx); err != nil {
		return err
	}
	for _, p := range []process{c.controllerManagerProcess(), c.schedulerProcess()} {
		// One that was stopped on purpose has no pid file.
		if !slices.Contains(c.processes(), p.name) {
			continue
		}
		if err := c.startControl(p); err != nil {
			return err
		}
		if err := c.waitHealthz(ctx, p.name); err != nil {
			return err
		}
	}
	return nil
}

// waitHealthz waits until a component says itself that it works.
func (c *Cluster) waitHealthz(ctx context.Context, name string) error {
	port := map[string]string{controllerManager: "10257", scheduler: "10259"}[name]
	return waitFor(ctx, 30*time.Second, func(ctx context.Context) error {
		if err := c.ended(name); err != nil {
			return fatalError{err}
		}
		return probe(ctx, "https://"+HostIP+":"+port+"/healthz")
	})
}

// Start starts a component that was stopped and waits until it works.
func (c *Cluster) Start(ctx context.Context, words ...string) error {
	_, start, err := c.component(words)
	if err != nil {
		return err
	}
	if c.cgroups == nil {
		return fmt.Errorf("no cluster in %s: start one first", c.State)
	}
	return start(ctx)
}

// Stop stops a component; what it serves stays as it was.
func (c *Cluster) Stop(ctx context.Context, words ...string) error {
	name, _, err := c.component(words)
	if err != nil {
		return err
	}
	return c.stop(ctx, name)
}

// Restart is Stop and Start.
func (c *Cluster) Restart(ctx context.Context, words ...string) error {
	if err := c.Stop(ctx, words...); err != nil {
		return err
	}
	return c.Start(ctx, words...)
}

// Import loads an OCI archive into every node.
func (c *Cluster) Import(ctx context.Context, archive string) error {
	for _, node := range Nodes() {
		if err := c.ImportImage(ctx, node, archive); err != nil {
			return err
		}
		c.say("%s imported into %s", archive, node.Name)
	}
	return nil
}

// ErrNone says that no cluster is up.
var ErrNone = errors.New("no cluster")

// Status writes a table of the processes and nodes. It returns an error if something is missing, and ErrNone if
// all is.
func (c *Cluster) Status(ctx context.Context, w io.Writer) error {
	if _, err := c.load(); err != nil {
		return fmt.Errorf("%w in %s (make cluster starts one)", ErrNone, c.State)
	}
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	var missing []string
	fmt.Fprintln(table, "PROCESS\tPID\tSTATE\tLOG")
	for _, name := range c.expected() {
		pid, ok := c.running(name)
		state := "running"
		if !ok {
			state = "stopped"
			missing = append(missing, name)
		}
		fmt.Fprintf(table, "%s\t%d\t%s\t%s\n", name, pid, state, c.Log(name))
	}
	if slices.Contains(missing, apiserver) {
		return errors.Join(table.Flush(), errors.New("the API server does not run"))
	}
	fmt.Fprintln(table, "\nNODE\tIP\tREADY\tMACHINE")
	api, err := c.newClient()
	if err != nil {
		return err
	}
	for _, node := range Nodes() {
		ready := "yes"
		if err := api.nodeReady(ctx, node.Name); err != nil {
			ready = err.Error()
			missing = append(missing, "node "+node.Name)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", node.Name, node.IP, ready, node.Machine)
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("write status: %w", err)
	}
	if len(missing) > 0 {
		return fmt.Errorf("not running: %s", strings.Join(missing, ", "))
	}
	return nil
}
