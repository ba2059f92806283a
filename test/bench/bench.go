// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/cluster/install"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

const (
	// namespace is where the Pods and claims of the measurements are.
	namespace = "bench"
	// fabric is the only one.
	fabric = device.FabricID("0")
	// control is the simulator's control API, as the chassis' file says.
	control = "127.0.0.1:8444"

	chassisFile = "test/bench/testdata/chassis.yaml"
	configFile  = "test/bench/testdata/agent.yaml"
)

// bench is one run.
type bench struct {
	o       options
	out     io.Writer
	cluster *localkube.Cluster
	sim     *simapi.Client
	config  *rest.Config
	client  kubernetes.Interface
	audit   *auditLog
	world   *world
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	cluster, err := localkube.New(o.state, o.bin, nil)
	if err != nil {
		return err
	}
	if cluster.Status(ctx, io.Discard) == nil {
		return errors.New("a cluster is up already, and figures of a used one say nothing: make cluster-down takes it down")
	}
	b := &bench{o: o, out: out, cluster: cluster, sim: simapi.NewClient(control), audit: &auditLog{path: cluster.AuditLog()}}
	defer func() {
		after, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
		defer cancel()
		err = errors.Join(err, cluster.Down(after))
	}()
	b.say("%s", machine(ctx, o))
	if o.has("a") || o.has("b") || o.has("c") {
		if err = b.withAgents(ctx); err != nil {
			return err
		}
	}
	if o.has("d") {
		return b.growth(ctx)
	}
	return nil
}

// say prints a line of the report.
func (b *bench) say(format string, args ...any) { fmt.Fprintf(b.out, format+"\n", args...) }

// tell shows how far it is, where it does not get into the report.
func tell(format string, args ...any) {
	fmt.Fprintf(os.Stderr, time.Now().Format("15:04:05 ")+format+"\n", args...)
}

// withAgents does the parts for which the agents run as a user installs them.
func (b *bench) withAgents(ctx context.Context) error {
	if err := b.start(ctx, chassisFile); err != nil {
		return err
	}
	defer b.world.stop()
	if err := b.install(ctx); err != nil {
		return err
	}
	for _, part := range []struct {
		name    string
		measure func(context.Context) error
	}{{"a", b.attaches}, {"b", b.pods}, {"c", b.idle}} {
		if !b.o.has(part.name) {
			continue
		}
		tell("part %s", part.name)
		if err := part.measure(ctx); err != nil {
			return fmt.Errorf("part %s: %w", part.name, err)
		}
		if err := b.judge(ctx); err != nil {
			return fmt.Errorf("part %s: %w", part.name, err)
		}
	}
	return nil
}

// start brings up a cluster and connects to it.
func (b *bench) start(ctx context.Context, chassis string) error {
	tell("starting the cluster")
	if err := b.cluster.Up(ctx, chassis); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(b.cluster.Logs(), "bench-client.log"))
	if err != nil {
		return fmt.Errorf("keep the client's log: %w", err)
	}
	klog.LogToStderr(false)
	klog.SetOutput(log)
	b.audit.offset = 0
	b.config, err = clientcmd.BuildConfigFromFlags("", b.cluster.AdminConfig())
	if err != nil {
		return fmt.Errorf("read the administrator's kubeconfig: %w", err)
	}
	b.config.QPS = -1 // what is measured must not wait for us
	if b.client, err = kubernetes.NewForConfig(b.config); err != nil {
		return fmt.Errorf("make a client of the API server: %w", err)
	}
	_, err = b.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make namespace %s: %w", namespace, err)
	}
	b.world, err = watchWorld(ctx, b.client)
	return err
}

// install puts the agents in as a user does, and waits for the pool.
func (b *bench) install(ctx context.Context) error {
	tell("installing the agents")
	o := install.Default(".")
	o.Config, o.Chassis, o.More = configFile, chassisFile, nil
	if err := install.Install(ctx, b.cluster, o); err != nil {
		return err
	}
	if _, err := b.client.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, template(), metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("make the claims' template: %w", err)
	}
	state, err := b.sim.State(ctx)
	if err != nil {
		return err
	}
	return b.world.wait(ctx, time.Minute, func() error {
		if free := b.world.free(); len(free) < len(state.Devices) {
			return fmt.Errorf("wait for the pool: of %d GPUs there are %q", len(state.Devices), free)
		}
		return nil
	})
}

// judge asks the chassis whether a rule was broken, and that nobody holds what nobody uses.
func (b *bench) judge(ctx context.Context) error {
	state, err := b.sim.State(ctx)
	if err != nil {
		return err
	}
	var wrong []error
	for _, d := range state.Devices {
		if d.Phase != simapi.PhaseFree {
			wrong = append(wrong, fmt.Errorf("the chassis says that %s is %s on machine %s, though it has no lease", d.ID, d.Phase, d.Machine))
		}
	}
	violations, err := b.sim.Violations(ctx)
	if err != nil {
		return err
	}
	for _, v := range violations {
		wrong = append(wrong, fmt.Errorf("the chassis has seen a violation: %s of %s on %s: %s", v.Kind, v.Device, v.Machine, v.Detail))
	}
	return errors.Join(wrong...)
}
