// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/chassis"
	"github.com/cohdi/cohdi-agent/test/cluster/install"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// namespace is where the Pods run.
const namespace = "demo"

// The Pods, by the names in their manifests.
const (
	first  = "first"
	second = "second"
	third  = "third"
)

// demo is one demonstration.
type demo struct {
	o       options
	files   chassis.Paths
	screen  *screen
	cluster *localkube.Cluster
	sim     *simapi.Client
	client  kubernetes.Interface
	world   *world
	guard   *guard
	// foreign: the cluster was up before and stays.
	foreign bool
	// before is the chassis at the start.
	before *simapi.State
	way    way
	result string
}

func newDemo(ctx context.Context, o options) (*demo, error) {
	c, err := localkube.New(o.state, o.bin, nil)
	if err != nil {
		return nil, err
	}
	files, err := chassis.Files(".", o.manager)
	if err != nil {
		return nil, err
	}
	d := &demo{o: o, files: files, screen: newScreen(os.Stdout), cluster: c, sim: simapi.NewClient(control)}
	d.foreign = c.Status(ctx, io.Discard) == nil
	return d, nil
}

// perform is the demonstration, act by act.
func (d *demo) perform(ctx context.Context) error {
	for _, act := range []func(context.Context) error{
		d.bringUp, d.installAgent, d.runFirst, d.lookInside, d.leaveIdle, d.runThird, d.giveBack, d.judge,
	} {
		if err := act(ctx); err != nil {
			return err
		}
	}
	return nil
}

// bringUp starts the cluster with its chassis.
func (d *demo) bringUp(ctx context.Context) error {
	begin := time.Now()
	if d.foreign {
		d.screen.say("== A cluster is up already: it is used, and stays (make cluster-down takes it down)")
	} else {
		d.screen.say("== Starting Kubernetes (a control plane and the nodes n1 and n2) and a chassis with four GPUs")
		var err error
		if d.guard, err = startGuard(d.o); err != nil {
			return err
		}
	}
	if err := d.cluster.Up(ctx, d.files.Chassis); err != nil {
		return err
	}
	if err := d.connect(); err != nil {
		return err
	}
	state, err := d.sim.State(ctx)
	if err != nil {
		return err
	}
	d.before = state
	for _, dev := range state.Devices {
		d.screen.say("  in the chassis: %-22s %s, %s", dev.Model, dev.UUID, dev.Phase)
	}
	d.screen.say("  after %.1f s", time.Since(begin).Seconds())
	return nil
}

// installAgent installs the agent and waits for what it publishes.
func (d *demo) installAgent(ctx context.Context) error {
	begin := time.Now()
	if err := d.install(ctx); err != nil {
		return err
	}
	var err error
	if d.world, err = watchWorld(ctx, d.client); err != nil {
		return err
	}
	now, err := d.world.wait(ctx, time.Minute, quiet, func(w *world) error {
		for u, l := range w.leases {
			return fmt.Errorf("wait for a pool that nobody uses: the lease of %s is %s on %s", u, leaseSays(l), l.Labels[device.LabelNode])
		}
		if free := w.offered(); len(free) < len(d.before.Devices) {
			return fmt.Errorf("wait for the pool to be published: of %d GPUs there are %q", len(d.before.Devices), free)
		}
		return nil
	})
	if err != nil {
		return err
	}
	// From here on the chassis' deeds are ours.
	if d.before, err = d.sim.State(ctx); err != nil {
		return err
	}
	d.screen.say("  agents run on n1 and n2; their leader has published the pool: %s", strings.Join(now.offered(), " "))
	d.screen.say("  after %.1f s", time.Since(begin).Seconds())
	return nil
}

// install applies the manifests, unless the agent is there.
func (d *demo) install(ctx context.Context) error {
	if d.o.reuse {
		d.screen.say("\n== Using cohdi-agent as it is installed")
		return nil
	}
	d.screen.say("\n== Installing cohdi-agent")
	d.typed("kubectl create secret generic cohdi-fabric-0 -n cohdi-system ...   # the fabric manager's login")
	d.typed("kubectl apply -f deploy/daemonset.yaml                             # with %s in the ConfigMap", d.files.Agent)
	d.typed("kubectl apply -f deploy/extended-resource.yaml")
	log, err := d.openLog("install.log")
	if err != nil {
		return err
	}
	defer log.Close()
	d.cluster.Progress = log
	what := install.Default(".")
	what.Config, what.Chassis = d.files.Agent, d.files.Chassis
	return install.Install(ctx, d.cluster, what)
}

func (d *demo) openLog(name string) (*os.File, error) {
	if err := os.MkdirAll(d.logs(), 0o755); err != nil {
		return nil, fmt.Errorf("keep a log: %w", err)
	}
	log, err := os.Create(filepath.Join(d.logs(), name))
	if err != nil {
		return nil, fmt.Errorf("keep a log: %w", err)
	}
	return log, nil
}

func quiet(*world) {}

// draw shows the table of now.
func (d *demo) draw(w *world) { d.screen.draw(w.rows(), time.Now()) }

// drawSince shows it with times that count from when the Pod was created.
func (d *demo) drawSince(pod string) func(*world) {
	return func(w *world) {
		if begin, ok := w.steps[pod][created]; ok {
			d.screen.begin = begin
		}
		d.draw(w)
	}
}

// apply applies manifests of test/demo/pods.
func (d *demo) apply(ctx context.Context, files ...string) error {
	args := []string{"apply", "-n", namespace}
	for _, f := range files {
		args = append(args, "-f", filepath.Join("test/demo/pods", f))
	}
	d.typed("kubectl %s", strings.Join(args, " "))
	_, err := d.kubectl(ctx, args...)
	return err
}

// runFirst runs the two Pods that have to wait for GPUs from the pool.
func (d *demo) runFirst(ctx context.Context) error {
	d.screen.say("\n== A Pod that claims a GPU, and a plain Pod that says limits: {nvidia.com/gpu: 2}")
	d.screen.say("  CLAIM: allocated, the scheduler has chosen the GPU; Attached, the GPU can be used; ready offer, it was attached already, idle.")
	d.screen.say("  LEASE: the phase of the GPU's device lease, by which the agents bring it to a node and back.")
	if d.foreign {
		// A run before may have been broken off.
		if _, err := d.kubectl(ctx, "delete", "namespace", namespace, "--ignore-not-found", "--timeout=1m"); err != nil {
			return err
		}
	}
	if _, err := d.kubectl(ctx, "create", "namespace", namespace); err != nil {
		return err
	}
	if err := d.apply(ctx, "claim.yaml"); err != nil {
		return err
	}
	// The plain Pod takes any two GPUs: it could leave none of the product that the first asks for.
	d.screen.start(time.Now())
	_, err := d.world.wait(ctx, 30*time.Second, d.drawSince(first), func(w *world) error {
		if w.steps[first][allocated].IsZero() {
			return errors.Join(fmt.Errorf("wait for the scheduler to choose a GPU for Pod %s", first), w.podsRun(first))
		}
		return nil
	})
	if err != nil {
		return err
	}
	d.screen.wipe()
	if err = d.apply(ctx, "plain.yaml"); err != nil {
		return err
	}
	now, err := d.world.wait(ctx, 90*time.Second, d.drawSince(first), func(w *world) error { return w.podsRun(first, second) })
	if err != nil {
		return err
	}
	if d.way, err = d.wayOfFirst(ctx, now); err != nil {
		return err
	}
	d.screen.say("\n  the way of the first Pod, as the API server and the chassis tell it:")
	d.screen.say("  +%6.3f s  the Pod is created", 0.0)
	for _, m := range d.way.Marks {
		d.screen.say("  +%6.3f s  %-46s %s", m.At.Sub(d.way.Begin).Seconds(), m.What, m.By)
	}
	return d.showStatus(ctx)
}

// showStatus shows what a person sees who asks the agents.
func (d *demo) showStatus(ctx context.Context) error {
	d.screen.say("")
	args := []string{"exec", "-n", device.AgentNamespace, "ds/" + device.AgentName, "--", "cohdi-agent", "status", "--all"}
	d.typed("kubectl %s", strings.Join(args, " "))
	out, err := d.kubectl(ctx, args...)
	if err != nil {
		return err
	}
	for l := range strings.Lines(out) {
		d.screen.say("  %s", strings.TrimRight(l, "\n"))
	}
	return nil
}

// podsRun says which Pod does not run yet, and what it waits for.
func (w *world) podsRun(names ...string) error {
	for _, name := range names {
		pod := w.pods[name]
		if pod == nil {
			return fmt.Errorf("wait for Pod %s to run: it does not exist", name)
		}
		switch pod.Status.Phase {
		case corev1.PodRunning:
			continue
		case corev1.PodFailed, corev1.PodSucceeded:
			return finalError{fmt.Errorf("wait for Pod %s to run: it is %s: %s", name, pod.Status.Phase, pod.Status.Message)}
		case corev1.PodPending, corev1.PodUnknown:
		}
		why := "nobody says why"
		for _, c := range pod.Status.Conditions {
			if c.Status != corev1.ConditionTrue && c.Message != "" {
				why = c.Message
			}
		}
		return fmt.Errorf("wait for Pod %s to run: it is %s: %s", name, pod.Status.Phase, why)
	}
	return nil
}

// wayOfFirst asks the chassis what it did for the first Pod.
func (d *demo) wayOfFirst(ctx context.Context, w *world) (way, error) {
	state, err := d.sim.State(ctx)
	if err != nil {
		return way{}, err
	}
	units := w.unitsOf(first)
	if len(units) != 1 {
		return way{}, fmt.Errorf("the first Pod has %d GPUs, not one", len(units))
	}
	dev, ok := deviceOf(state, w, units[0])
	if !ok {
		return way{}, fmt.Errorf("the chassis knows no GPU behind %s", units[0])
	}
	var ops []simapi.Operation
	for _, op := range state.Operations {
		if op.ID > lastOperation(d.before) && op.Kind == "attach" && slices.Contains(op.Devices, dev.ID) {
			ops = append(ops, op)
		}
	}
	if dev.OnBusSince == nil {
		return way{}, fmt.Errorf("%s is not on the node's bus", units[0])
	}
	return wayOf(w.steps[first], ops, *dev.OnBusSince)
}

func lastOperation(s *simapi.State) int {
	last := 0
	for _, op := range s.Operations {
		last = max(last, op.ID)
	}
	return last
}

// unitsOf are the units that a Pod's claims were given.
func (w *world) unitsOf(name string) []device.Unit {
	pod := w.pods[name]
	if pod == nil {
		return nil
	}
	var units []device.Unit
	for _, c := range w.claimsOf(pod) {
		for _, r := range results(c) {
			u, _ := device.UnitOfEntry(r.Device)
			units = append(units, u)
		}
	}
	return units
}

// deviceOf finds the chassis' device that a unit has become.
func deviceOf(s *simapi.State, w *world, u device.Unit) (simapi.Device, bool) {
	l := w.leases[u]
	if l == nil {
		return simapi.Device{}, false
	}
	return s.Device(l.Annotations[annUUID])
}

// leaveIdle deletes the Pods: their GPUs stay where they are, for whoever comes next.
func (d *demo) leaveIdle(ctx context.Context) error {
	d.screen.say("\n== The Pods end; their GPUs stay on the nodes for a while, idle")
	d.typed("kubectl delete pod -n %s %s %s", namespace, first, second)
	begin := time.Now()
	if _, err := d.kubectl(ctx, "delete", "pod", "-n", namespace, first, second, "--wait=false"); err != nil {
		return err
	}
	d.screen.start(begin)
	_, err := d.world.wait(ctx, time.Minute, d.draw, func(w *world) error {
		for _, name := range []string{first, second} {
			if w.pods[name] != nil {
				return fmt.Errorf("wait for the Pods to end: %s is there", name)
			}
		}
		for u, l := range w.leases {
			if !strings.HasSuffix(leaseSays(l), "idle") {
				return fmt.Errorf("wait for the GPUs to be idle: %s is %s", u, leaseSays(l))
			}
			if !slices.Contains(w.offered(), u.ReadyEntry()) {
				return fmt.Errorf("wait for the idle GPUs to be offered: the pool's entry %s is not", u.ReadyEntry())
			}
			if node := w.nodes[l.Labels[device.LabelNode]]; node == nil || node.Labels[device.LabelIdle] == "" {
				return fmt.Errorf("wait for node %s to carry the label %s", l.Labels[device.LabelNode], device.LabelIdle)
			}
		}
		return nil
	})
	return err
}

// runThird runs a Pod that finds an idle GPU: the fabric has nothing to do.
func (d *demo) runThird(ctx context.Context) error {
	d.screen.say("\n== A third Pod takes one of the idle GPUs")
	before, err := d.sim.State(ctx)
	if err != nil {
		return err
	}
	if err = d.apply(ctx, "idle.yaml"); err != nil {
		return err
	}
	d.screen.start(time.Now())
	now, err := d.world.wait(ctx, time.Minute, d.drawSince(third), func(w *world) error { return w.podsRun(third) })
	if err != nil {
		return err
	}
	after, err := d.sim.State(ctx)
	if err != nil {
		return err
	}
	for _, op := range after.Operations {
		if op.ID > lastOperation(before) && op.Kind == "attach" {
			return fmt.Errorf("the third Pod did not get an idle GPU: the fabric attached %q for it", op.Devices)
		}
	}
	steps := now.steps[third]
	d.screen.say("  Pending -> Running in %.1f s, and the fabric had nothing to do", steps[running].Sub(steps[created]).Seconds())
	return nil
}

// giveBack deletes the last Pod and waits until all GPUs are back in the pool.
func (d *demo) giveBack(ctx context.Context) error {
	d.screen.say("\n== The last Pod ends; after the cool-down all GPUs go back to the pool")
	d.typed("kubectl delete pod -n %s %s", namespace, third)
	begin := time.Now()
	if _, err := d.kubectl(ctx, "delete", "pod", "-n", namespace, third, "--wait=false"); err != nil {
		return err
	}
	d.screen.start(begin)
	_, err := d.world.wait(ctx, 2*time.Minute, d.draw, func(w *world) error {
		if w.pods[third] != nil {
			return fmt.Errorf("wait for Pod %s to end", third)
		}
		for u, l := range w.leases {
			return fmt.Errorf("wait for %s to go back to the pool: its lease is %s", u, leaseSays(l))
		}
		return nil
	})
	if err != nil {
		return err
	}
	d.screen.say("  no lease is left after %.1f s", time.Since(begin).Seconds())
	return nil
}

// judge asks the chassis for its verdict.
func (d *demo) judge(ctx context.Context) error {
	state, err := d.sim.State(ctx)
	if err != nil {
		return err
	}
	var wrong []error
	for _, dev := range state.Devices {
		if dev.Phase != simapi.PhaseFree {
			wrong = append(wrong, fmt.Errorf("the chassis says that %s is %s (machine %s), though nobody holds it", dev.ID, dev.Phase, dev.Machine))
		}
	}
	violations, err := d.sim.Violations(ctx)
	if err != nil {
		return err
	}
	for _, v := range violations[min(d.before.Violations, len(violations)):] {
		wrong = append(wrong, fmt.Errorf("the chassis has seen a violation: %s of %s on %s: %s", v.Kind, v.Device, v.Machine, v.Detail))
	}
	if len(wrong) > 0 {
		return errors.Join(wrong...)
	}
	d.screen.say("\n== The chassis' verdict: all %d GPUs are free, 0 violations (no GPU was taken while a process had it open)", len(state.Devices))
	d.result = "demo: ok: " + d.way.String()
	return nil
}
