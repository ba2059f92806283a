// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/hotplug"
	"github.com/cohdi/cohdi-agent/internal/kubeletplugin"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/metal3"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/internal/nvml"
)

// options are the flags of run.
type options struct {
	hostRoot, config, listen, kubeconfig string
	node, podUID                         string
	pluginDir, registrarDir, cdiDir      string
	hook                                 string
}

func runCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "run", Short: "Run the agent of this node", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return run(c.Context(), o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.hostRoot, "host-root", "/", "where the host's file system is seen")
	f.StringVar(&o.config, "config", "/etc/cohdi-agent/config.yaml", "configuration file")
	f.StringVar(&o.listen, "listen", ":8080", "address of /metrics, /healthz, /readyz and /status")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file; the Pod's own account if empty")
	f.StringVar(&o.node, "node-name", "", "name of the Node that this agent runs on")
	f.StringVar(&o.podUID, "pod-uid", "", "UID of the Pod that this agent runs in")
	f.String("pod-name", "", "name of the Pod that this agent runs in, for logs")
	f.String("pod-namespace", "", "namespace of that Pod, for logs")
	f.StringVar(&o.pluginDir, "plugin-dir", "/var/lib/kubelet/plugins/"+device.Driver, "directory of the plugin's socket and checkpoint, the same path on the host")
	f.StringVar(&o.registrarDir, "registrar-dir", "/var/lib/kubelet/plugins_registry", "directory where the kubelet looks for plugins")
	f.StringVar(&o.cdiDir, "cdi-dir", "/var/run/cdi", "directory of CDI specs, the same path on the host")
	f.StringVar(&o.hook, "cdi-hook", "/usr/bin/nvidia-cdi-hook", "nvidia-cdi-hook in this image, copied to the plugin's directory for the host; empty for none")
	klogFlags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(klogFlags)
	f.AddGoFlag(klogFlags.Lookup("v"))
	return cmd
}

// check refuses flags without which nothing can run.
func (o *options) check() error {
	var missing []string
	for flag, value := range map[string]string{"--node-name": o.node, "--pod-uid": o.podUID} {
		if value == "" {
			missing = append(missing, flag)
		}
	}
	if len(missing) > 0 {
		return usageError{fmt.Errorf("run needs %s; deploy/daemonset.yaml sets them from the Pod", strings.Join(missing, " and "))}
	}
	return nil
}

func run(ctx context.Context, o options) error {
	if err := o.check(); err != nil {
		return err
	}
	cfg, err := config.Load(o.config)
	if err != nil {
		return usageError{err}
	}
	log := klog.Background().WithValues("node", o.node)
	log.Info("Starting", "version", build().Version, "revision", build().Revision, "fabrics", len(cfg.Fabrics), "config", o.config)
	ctx = klog.NewContext(ctx, log)
	a, err := newAgent(ctx, o, cfg)
	if err != nil {
		return err
	}
	return a.run(ctx)
}

func client(kubeconfig string) (kubernetes.Interface, dynamic.Interface, error) {
	cfg, err := rest.InClusterConfig()
	if kubeconfig != "" {
		cfg, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("find the API server: %w", err)
	}
	cfg.UserAgent = "cohdi-agent/" + version
	cfg.QPS, cfg.Burst = 50, 100
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("make a client of the API server: %w", err)
	}
	dyn, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("make a client of the API server for other projects' objects: %w", err)
	}
	return cs, dyn, nil
}

// agent is everything of this process that lives as long as it does.
type agent struct {
	o       options
	clock   clock.WithTicker
	client  kubernetes.Interface
	metrics *metrics.Metrics
	obs     *observer
	lock    *hostLock

	// What speaks with the API server.
	watch     *nodestatus.Watch
	status    *nodestatus.Publisher
	leases    *lease.Store
	leaseNews *pluginLeases
	chain     *metal3.Reader

	// This machine and its kubelet.
	host    *host
	watcher *hotplug.Watcher
	plugin  *kubeletplugin.Plugin
	health  *healthMonitor
	gpuNews *pluginGPUs
	// machine is what the loops need of those.
	machine ownMachine

	fatal chan error
	// config carries a changed configuration to act.
	config chan config.Config
	// foreign are the foreign devices that were told of; one survey at a time uses it. published: the node's own
	// pool was written by this process; one ownPool at a time uses it.
	foreign   map[string]bool
	published bool

	mu     sync.Mutex // guards the following
	member *membership
	lacks  []string // rights
}

func newAgent(ctx context.Context, o options, cfg config.Config) (*agent, error) {
	cs, dyn, err := client(o.kubeconfig)
	if err != nil {
		return nil, err
	}
	bootID, err := os.ReadFile(filepath.Join(o.hostRoot, "proc/sys/kernel/random/boot_id"))
	if err != nil {
		return nil, fmt.Errorf("read the machine's boot id: %w", err)
	}
	a, err := connect(ctx, o, cfg, cs, dyn)
	if err != nil {
		return nil, err
	}
	a.host = &host{
		pci:    hotplug.New(o.hostRoot, hotplug.Options{Clock: a.clock, AgentFile: a.lock.path}),
		driver: nvml.New(nvml.Options{HostRoot: o.hostRoot, DriverRoots: cfg.DriverRoots, Clock: a.clock}),
	}
	a.watcher = a.host.pci.NewWatcher(0)
	a.gpuNews = &pluginGPUs{host: a.host}
	a.health = a.newHealthMonitor(a.host, a.host.driver)
	hook, err := installHook(o.hook, o.pluginDir)
	if err != nil {
		return nil, err
	}
	a.plugin, err = kubeletplugin.New(kubeletplugin.Settings{
		NodeName: o.node, PodUID: types.UID(o.podUID), DataDir: o.pluginDir, RegistrarDir: o.registrarDir, CDIDir: o.cdiDir,
		BootID: strings.TrimSpace(string(bootID)), Metadata: true, Client: cs, Clock: a.clock,
		Leases: a.leaseNews, GPUs: a.gpuNews, Specs: &specMaker{driver: a.host.driver, hook: hook}, Claims: &claims{cs},
		Health: a.health, Observer: a.obs, Fatal: a.fail,
	})
	if err != nil {
		return nil, err
	}
	return a, a.join(cfg, thisMachine{a.host, &prepared{a.plugin}})
}

// connect makes the part of an agent that speaks with the API server.
func connect(ctx context.Context, o options, cfg config.Config, cs kubernetes.Interface, dyn dynamic.Interface) (*agent, error) {
	clk := clock.RealClock{}
	a := &agent{
		o: o, clock: clk, client: cs, chain: metal3.New(dyn), metrics: metrics.New(build(), driverStates()),
		fatal: make(chan error, 1), config: make(chan config.Config),
	}
	a.metrics.Configure(names(cfg))
	a.obs = &observer{log: klog.FromContext(ctx), clock: clk, metrics: a.metrics, stages: newStages(a.metrics), changed: a.poke}
	a.watch = nodestatus.NewWatch(cs, o.node)
	a.status = nodestatus.NewPublisher(cs, o.node, a.watch.Node, clk)
	a.leaseNews = &pluginLeases{client: cs, node: o.node}
	var err error
	if a.lock, err = openHostLock(filepath.Join(o.pluginDir, "lock")); err != nil {
		return nil, err
	}
	a.leases, err = lease.NewNodeStore(o.node, lease.Options{Client: cs, Clock: clk, Changed: func(string) {
		a.leaseNews.send()
		a.poke()
		if a.leases.Refused() != nil {
			a.present().lookAgain() // the Node's condition says so
		}
	}})
	a.leaseNews.store = a.leases
	return a, err
}

// join lets the loops work on the machine.
func (a *agent) join(cfg config.Config, m ownMachine) (err error) {
	a.machine = m
	a.watch.OnChange(a.changed)
	a.member, err = newMembership(a, cfg)
	return err
}

// ownMachine is this node's machine and what its kubelet has prepared, as the loops need it.
type ownMachine interface {
	node.Host
	node.Prepared
	// addresses are where GPUs are.
	addresses(ctx context.Context) []device.PCIAddress
}

// thisMachine joins what sees and changes the devices with what hands them out.
type thisMachine struct {
	*host
	*prepared
}

func (a *agent) newHealthMonitor(h node.Observable, driver gpuErrors) *healthMonitor {
	return &healthMonitor{
		host: h, driver: driver, leases: a.leases.List, clock: a.clock, poked: make(chan struct{}, 1),
		found: func() (node.Found, bool) {
			if m := a.present(); m != nil {
				return m.whose()
			}
			return node.Found{}, false
		},
		sick: func(name string, id device.GPUUUID, why string) {
			a.metrics.Failed("GPUUnhealthy")
			a.obs.log.Info("A GPU is not well", "name", name, "gpu", id, "why", why)
			a.obs.onEvents(func(e *nodestatus.Events) { e.Unhealthy(name, id, why) })
		},
		changed: func() {
			if m := a.present(); m != nil {
				m.own.poke()
			}
		},
	}
}

// changed hears that this Node, or what others publish for it, is another.
func (a *agent) changed() {
	a.status.Poke()
	a.present().lookAgain()
}

// present is the membership by the configuration that holds now.
func (a *agent) present() *membership {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.member
}

// names are the fabrics and models that the configuration names.
func names(cfg config.Config) (fabrics []device.FabricID, models []device.Model) {
	for i := range cfg.Fabrics {
		fabrics = append(fabrics, cfg.Fabrics[i].ID)
		for _, m := range cfg.Fabrics[i].Models {
			models = append(models, m.Name)
		}
	}
	return fabrics, models
}

func driverStates() []string {
	return []string{
		string(nvml.StateUnknown), string(nvml.StateNoLibrary), string(nvml.StateDriverNotLoaded),
		string(nvml.StateReady), string(nvml.StateFailed), string(nvml.StateHung),
	}
}

// fail ends the process: something that it cannot go on without has ended.
func (a *agent) fail(err error) {
	select {
	case a.fatal <- err:
	default:
	}
}

// poke makes everybody look again who goes by leases, the bus or the checkpoint.
func (a *agent) poke() {
	if m := a.present(); m != nil {
		m.poke()
	}
	if a.health != nil {
		a.health.poke()
	}
}

// run serves until ctx ends. The kubelet is served from the start; the loops run once this is the one agent
// of the node that acts.
func (a *agent) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", a.o.listen)
	if err != nil {
		return usageError{fmt.Errorf("listen for metrics and probes: %w", err)}
	}
	start := func(what string, f func(context.Context) error) {
		all.Go(func() {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				a.fail(fmt.Errorf("%s: %w", what, err))
			}
		})
	}
	start("HTTP", func(ctx context.Context) error { return a.serve(ctx, listener) })
	start("hot-plug watch", a.watcher.Run)
	start("hot-plug", a.followBus)
	start("kubelet plugin", a.plugin.Run)
	start("health of GPUs", a.health.run)
	a.work(start)
	start("configuration", func(ctx context.Context) error { return a.follow(ctx, a.present().cfg) })
	select {
	case <-ctx.Done():
		klog.FromContext(ctx).Info("Stopping")
		return nil
	case err := <-a.fatal:
		return err
	}
}

// work starts all that speaks with the API server.
func (a *agent) work(start func(what string, f func(context.Context) error)) {
	start("node watch", a.watch.Run)
	start("leases", func(ctx context.Context) error { a.leases.Run(ctx); return nil })
	start("own rights", a.checkRights)
	start("loops", a.act)
}

// act waits for the lock between the agents of this node, and for the first look at the cluster.
func (a *agent) act(ctx context.Context) error {
	if err := a.lock.take(ctx, a.clock); err != nil {
		return ignoreEnd(err)
	}
	err := a.actAlone(ctx)
	return errors.Join(err, a.lock.release())
}

// actAlone acts as the one agent of the node.
func (a *agent) actAlone(ctx context.Context) error {
	if err := a.watch.WaitForSync(ctx); err != nil {
		return ignoreEnd(err)
	}
	recorder, err := nodestatus.StartRecorder(ctx, a.client)
	if err != nil {
		return err
	}
	self, err := a.watch.Node(a.o.node)
	if err != nil {
		return fmt.Errorf("read this node's Node %s: %w", a.o.node, err)
	}
	a.obs.setEvents(nodestatus.NewEvents(recorder, a.o.node, self.UID))
	var all sync.WaitGroup
	all.Go(func() { a.status.Run(ctx) })
	for ctx.Err() == nil {
		a.actBy(ctx)
	}
	all.Wait()
	return nil
}

// actBy runs the loops by the present configuration until another one comes.
func (a *agent) actBy(ctx context.Context) {
	term, cancel := context.WithCancel(ctx)
	defer cancel()
	var all sync.WaitGroup
	all.Go(func() { a.present().run(term) })
	defer all.Wait()
	select {
	case <-ctx.Done():
	case cfg := <-a.config:
		cancel()
		all.Wait()
		next, err := newMembership(a, cfg)
		if err != nil { // config has checked all that can be checked
			a.fail(err)
			return
		}
		a.metrics.Configure(names(cfg))
		a.mu.Lock()
		a.member = next
		a.mu.Unlock()
	}
}

// follow takes up a changed configuration. A faulty one is reported, and the last good one goes on.
func (a *agent) follow(ctx context.Context, first config.Config) error {
	log := klog.FromContext(ctx)
	return config.Watch(ctx, a.o.config, first, func(cfg config.Config) {
		log.Info("The configuration has changed", "fabrics", len(cfg.Fabrics))
		select {
		case a.config <- cfg:
		case <-ctx.Done():
		}
	}, a.obs.Configured)
}

func ignoreEnd(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// followBus tells everybody who waits for a GPU that one may have come or gone.
func (a *agent) followBus(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.watcher.Look():
		}
		a.gpuNews.send()
		a.poke()
		a.hotplugCondition(ctx)
	}
}

// installHook puts nvidia-cdi-hook where the host's container runtime finds it.
func installHook(from, dir string) (string, error) {
	if from == "" {
		return "", nil
	}
	data, err := os.ReadFile(from)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil // an image without it: containers find the driver's libraries by themselves
	}
	if err != nil {
		return "", fmt.Errorf("read the CDI hook: %w", err)
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return "", fmt.Errorf("make the plugin's directory: %w", err)
	}
	to := filepath.Join(dir, filepath.Base(from))
	part := fmt.Sprintf("%s.%d", to, os.Getpid())
	if err := os.WriteFile(part, data, 0o755); err != nil { //nolint:gosec // a program
		return "", fmt.Errorf("copy the CDI hook for the host: %w", err)
	}
	if err := os.Rename(part, to); err != nil {
		return "", fmt.Errorf("copy the CDI hook for the host: %w", err)
	}
	return to, nil
}
