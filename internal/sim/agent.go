// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/claim"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/kubeletplugin"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// Times that the agent has as constants in cmd.
const (
	appear   = 3 * time.Second
	look     = time.Second
	retry    = 500 * time.Millisecond
	busy     = 5 * time.Second
	hold     = 10 * time.Second
	freshFor = 5 * time.Second
	// maxCall is how long the manager may work on one call.
	maxCall       = 3 * time.Minute
	callDeadline  = 200 * time.Second
	localDeadline = 40 * time.Second
	nodeResync    = 10 * time.Minute
	retryAfter    = 5 * time.Minute
	attachMost    = 4 * time.Minute
	queueMost     = 9 * time.Minute
)

// process is one agent: everything that a crash loses, and the real loops over the world.
type process struct {
	s      *Sim
	name   string // for the trace and the order of requests: node/podUID/run
	node   string
	podUID string
	host   *host
	turn   *turn // its place at the manager, nil where there is none

	ctx         context.Context //nolint:containedctx // the process's own life
	cancel      context.CancelFunc
	dead        bool
	stopping    bool
	replaced    bool // by another Pod of the agent
	pausedUntil time.Time
	timers      map[time.Time][]func()

	store    *lease.Store
	plugin   *kubeletplugin.Plugin
	work     *kubeletplugin.Background
	working  bool
	workMore bool
	loop     *node.Loop
	steps    *stepper

	leaseNews, gpuNews *broadcast
	watches            []*watch

	ballot ballot
	// balloting: a look at the election is due.
	balloting bool
	term      *term
}

// identity is what the process is in the election.
func (p *process) identity() string { return p.node + "/" + p.podUID }

// launch lets a goroutine of the process run; what it asks for is handled when it is blocked.
func (p *process) launch(f func()) { go f() }

// broadcast wakes everybody who waits, once.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{}
}

func newBroadcast() *broadcast { return &broadcast{ch: make(chan struct{})} }

func (b *broadcast) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ch
}

func (b *broadcast) send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.ch)
	b.ch = make(chan struct{})
}

// stepper calls a loop's Step when it is poked, when the loop asked for it, and slowly in any case: what
// Run of the loop does with goroutines and timers.
type stepper struct {
	p        *process
	key      string
	ctx      context.Context //nolint:containedctx // the loop's life
	step     func(context.Context) time.Time
	debounce time.Duration
	resync   time.Duration
	after    func()

	running, again, off bool
	due                 time.Time
	gen                 int
}

// poke asks for a step.
func (st *stepper) poke() {
	if st.running {
		st.again = true
		return
	}
	st.wake(st.p.s.now().Add(st.debounce))
}

func (st *stepper) wake(at time.Time) {
	if st.off || !st.due.IsZero() && !at.Before(st.due) {
		return
	}
	st.gen++
	st.due = at
	gen := st.gen
	st.p.s.at(at, st.p, func() {
		if st.off || st.running || st.gen != gen {
			return
		}
		st.run()
	})
}

func (st *stepper) run() {
	st.running, st.again, st.due = true, false, time.Time{}
	st.p.launch(func() {
		wake := st.step(st.ctx)
		st.p.s.ask(st.p.name+" "+st.key+" stepped", func() { st.ran(wake) })
	})
}

func (st *stepper) ran(wake time.Time) {
	st.running = false
	st.after()
	now := st.p.s.now()
	next := now.Add(st.resync)
	if at := wake.Add(-st.p.host.skew); !wake.IsZero() && at.Before(next) {
		next = at
	}
	if st.again || next.Before(now.Add(st.debounce)) {
		next = now.Add(st.debounce)
	}
	st.wake(next)
}

// start begins a new process on the host.
func (s *Sim) start(h *host, podUID string) {
	s.runs++
	p := &process{
		s: s, name: fmt.Sprintf("%s/%03d", h.node, s.runs), node: h.node, podUID: podUID, host: h, timers: map[time.Time][]func(){},
		leaseNews: newBroadcast(), gpuNews: newBroadcast(),
	}
	ctx := klog.NewContext(s.root, logr.Discard())
	p.ctx, p.cancel = context.WithCancel(ctx)
	s.procs = append(s.procs, p)
	s.note(h.node, "agent starts")
	s.agentPod(p, true)
	p.openStore()
	p.makePlugin()
	p.tidy()
	p.makeLoop()
	s.takeLock(h)
}

func (p *process) openStore() {
	inf := newInformer(p, p.node+" leases", leases, func(o object) bool {
		return o.GetLabels()[device.LabelNode] == device.NodeLabelValue(p.node)
	})
	store, err := lease.NewStoreOver(lease.Selection{Label: device.LabelNode, Value: device.NodeLabelValue(p.node), What: "node " + p.node}, inf,
		lease.Options{Client: kube{p: p}, Clock: wall{p}, Changed: func(string) { p.leasesChanged() }})
	if err != nil {
		panic(err)
	}
	p.store = store
	p.s.api.open(inf.w)
	p.watches = append(p.watches, inf.w)
}

func (p *process) leasesChanged() {
	p.leaseNews.send()
	if p.steps != nil {
		p.steps.poke()
	}
}

func (p *process) makePlugin() {
	plugin, err := kubeletplugin.New(kubeletplugin.Settings{
		NodeName: p.node, DataDir: filepath.Join(p.host.dir, "plugin"), RegistrarDir: filepath.Join(p.host.dir, "registry"),
		CDIDir: filepath.Join(p.host.dir, "cdi"), BootID: p.host.bootID, Client: kube{p: p}, Clock: wall{p},
		Leases: pluginLeases{p}, GPUs: pluginView{view{p}}, Specs: pluginView{view{p}}, Claims: pluginClaims{p},
		Observer: pluginObserver{p}, Fatal: func(err error) { panic(err) },
	})
	if err != nil {
		panic(err)
	}
	p.plugin, p.work = plugin, plugin.Background()
}

// tidy does the plugin's background work: at once, after each call of the kubelet, and slowly in any case.
func (p *process) tidy() {
	if p.working {
		p.workMore = true
		return
	}
	p.working, p.workMore = true, false
	p.launch(func() {
		more, err := p.work.Round(p.ctx)
		p.s.ask(p.name+" tidied", func() {
			p.working = false
			next := 7 * time.Minute
			switch {
			case p.workMore:
				next = 0
			case err != nil:
				next = 5 * time.Second
			case more:
				next = 20 * time.Second
			}
			p.s.after(next, p, p.tidy)
			p.steps.poke()
		})
	})
}

func (p *process) makeLoop() {
	cfg := node.Config{
		Node: p.node, Machine: p.host.machine, Fabric: fabricID,
		Settings: attach.Settings{
			Parallel: p.s.parallel && !p.s.manner.nameless, Batch: p.s.manner.batch, Arrival: p.s.manner.nameless, Patience: p.s.patience(), Deadline: attachMost, MaxCall: maxCall, Settle: settle, Look: look, Appear: appear, Retry: retry, Busy: busy, Hold: hold, Resync: nodeResync, RetryAfter: retryAfter,
		},
		FreshFor: freshFor, Resync: nodeResync, CallDeadline: callDeadline, LocalDeadline: localDeadline,
		Leases: allLeases{p.store}, Manager: manager{p}, Host: view{p},
		Claims: claim.New(claim.Options{Client: kube{p: p}, Clock: wall{p}}), Prepared: prepared{p}, Observer: nodeObserver{},
		Model: p.fabricModel, Clock: wall{p}, Spawn: p.spawn,
	}
	if p.s.turns != nil {
		p.turn = &turn{p: p}
		cfg.Turns = p.turn
	}
	if p.s.manner.batch > 1 {
		cfg.Batcher = manager{p}
	}
	p.loop = node.New(cfg)
	p.steps = &stepper{
		p: p, key: "node", ctx: p.ctx, step: p.loop.Step, debounce: time.Millisecond, resync: nodeResync, off: true,
		after: func() {
			for _, u := range p.loop.Status() {
				p.s.count.Rules["attach: "+string(u.Lease.Phase)+": "+u.Rule]++
			}
		},
	}
}

// patience is how long an attach may take where nodes wait for each other.
func (s *Sim) patience() time.Duration {
	if s.manner.alone {
		return queueMost
	}
	return 0
}

// models are those of the node's configuration.
func (p *process) models() []pool.Model {
	s := p.s
	var all []pool.Model
	for _, m := range s.fabric.models() {
		if m == gpuModel && s.now().Before(p.host.unmodelUntil) {
			continue
		}
		configured := pool.Model{Name: m, FabricModel: fabricModel(m), Max: s.maxPerNode}
		if m == gpuModel {
			configured.Min = s.minPerNode
			if s.exclude {
				configured.Excludes = []device.Model{otherModel}
			}
		}
		all = append(all, configured)
	}
	return all
}

func (p *process) fabricModel(m device.Model) string {
	for _, has := range p.models() {
		if has.Name == m {
			return has.FabricModel
		}
	}
	return ""
}

// spawn runs an action of a loop beside it.
func (p *process) spawn(f func()) {
	p.s.ask(p.name+" spawn", func() {
		p.launch(func() {
			f()
			p.s.ask(p.name+" acted", p.steps.poke)
		})
	})
}

// takeLock gives the host-wide lock to the oldest agent that lives.
func (s *Sim) takeLock(h *host) {
	if h.owner != nil && !h.owner.dead {
		return
	}
	h.owner = nil
	for _, p := range s.procs {
		if p.host == h && !p.dead && !p.stopping {
			h.owner = p
			p.steps.off = false
			s.after(s.between("lock "+p.node, 10*time.Millisecond, 200*time.Millisecond), p, func() {
				p.labelNode()
				p.steps.poke()
				p.campaign()
			})
			return
		}
	}
}

// labelNode says that the node belongs to the fabric, if the Node does not say so.
func (p *process) labelNode() {
	p.launch(func() {
		_, err := invoke(p.ctx, p, apiCall("label node "+p.node), func() (struct{}, error) {
			n, ok := find[*corev1.Node](p.s.api, nodes, p.node)
			if !ok || n.Labels[device.LabelFabric] == string(fabricID) {
				return struct{}{}, nil
			}
			if n.Labels == nil {
				n.Labels = map[string]string{}
			}
			n.Labels[device.LabelFabric] = string(fabricID)
			_, err := p.s.api.update(nodes, n)
			return struct{}{}, err
		})
		if err != nil {
			p.s.ask(p.name+" not labelled", func() { p.s.after(time.Second, p, p.labelNode) })
		}
	})
}

// crash ends a process at once: what it had sent goes on, what it remembered is gone.
func (s *Sim) crash(p *process, when string) {
	if p.dead {
		return
	}
	s.note(p.node, "agent crashes %s", when)
	s.end(p)
	s.after(s.between("restart "+p.node, time.Second, 20*time.Second), nil, func() {
		if !s.closing && s.mayStart(p) {
			s.start(p.host, p.podUID)
		}
	})
}

// mayStart: the container is started again only in its own Pod, and only if the node is up.
func (s *Sim) mayStart(was *process) bool {
	return was.host.awayUntil.Before(s.now()) && !was.replaced
}

func (s *Sim) end(p *process) {
	p.dead = true
	for _, w := range p.watches {
		w.close()
	}
	s.api.watches = slices.DeleteFunc(s.api.watches, func(w *watch) bool { return w.closed })
	s.open = slices.DeleteFunc(s.open, func(c *call) bool {
		if c.p == p {
			s.orphans = append(s.orphans, c)
		}
		return c.p == p
	})
	s.after(s.between("container gone "+p.node, 500*time.Millisecond, 3*time.Second), nil, func() { s.agentPod(p, false) })
	s.after(50*time.Millisecond, nil, func() { s.takeLock(p.host) })
	s.kubelets[p.node].agentGone(p)
}

// agentPod shows the agent's container as running, or not.
func (s *Sim) agentPod(p *process, runs bool) {
	if runs {
		if _, ok := s.api.objects[agents][p.name]; !ok {
			obj := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: p.name}, Spec: corev1.PodSpec{NodeName: p.node}}
			if _, err := s.api.create(agents, obj); err != nil {
				panic(err)
			}
		}
		return
	}
	s.api.discard(agents, p.name)
}

// live returns the agents of a node that answer.
func (s *Sim) live(name string) []*process {
	var all []*process
	for _, p := range s.procs {
		if p.node == name && !p.dead && !p.stopping {
			all = append(all, p)
		}
	}
	return all
}

// hostChanged is a uevent.
func (s *Sim) hostChanged(h *host) {
	for _, p := range s.procs {
		if p.host == h && !p.dead {
			s.after(s.between("uevent "+h.node, time.Millisecond, 20*time.Millisecond), p, func() {
				p.gpuNews.send()
				p.steps.poke()
			})
		}
	}
}

type prepared struct{ p *process }

func (q prepared) Prepared(f device.FabricID, u device.Unit) (claims []string, known bool) {
	return q.p.plugin.PreparedClaims(f, u)
}

type nodeObserver struct{}

func (nodeObserver) Stored(context.Context, device.Lease, device.Lease) {}
func (nodeObserver) Deleted(context.Context, device.Lease)              {}
func (nodeObserver) Told(context.Context, device.Lease)                 {}
func (nodeObserver) Acted(context.Context, device.Lease, attach.Kind, time.Duration, error) {
}

// pluginLeases are the leases as cmd gives them to the plugin.
type pluginLeases struct{ p *process }

func (l pluginLeases) Get(ctx context.Context, f device.FabricID, u device.Unit) (device.Lease, bool, error) {
	got, err := l.p.store.Get(ctx, f, u)
	if isNotFound(err) {
		return device.Lease{}, false, nil
	}
	return got, err == nil, err
}

func (l pluginLeases) Held(ctx context.Context) ([]device.Lease, error) {
	return l.p.store.ListLive(ctx)
}

func (l pluginLeases) PrepareReady(ctx context.Context, d device.Lease, uid types.UID) error {
	if !slices.Contains(d.PreparedFor, string(uid)) {
		d.PreparedFor = append(slices.Clone(d.PreparedFor), string(uid))
	}
	_, err := l.p.store.Update(ctx, d)
	return err
}

func (l pluginLeases) Unprepared(ctx context.Context, d device.Lease, uid types.UID) error {
	d.PreparedFor = slices.DeleteFunc(slices.Clone(d.PreparedFor), func(c string) bool { return c == string(uid) })
	_, err := l.p.store.Update(ctx, d)
	return err
}

func (l pluginLeases) Changed() <-chan struct{} { return l.p.leaseNews.next() }

// pluginClaims are the claims as cmd gives them to the plugin.
type pluginClaims struct{ p *process }

func (c pluginClaims) Get(ctx context.Context, _, name string) (*resourceapi.ResourceClaim, bool, error) {
	got, err := kubeClaims{p: c.p}.Get(ctx, name, metav1.GetOptions{})
	if isNotFound(err) {
		return nil, false, nil
	}
	return got, err == nil, err
}

func (c pluginClaims) List(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	list, err := kubeClaims{p: c.p}.List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

type pluginObserver struct{ p *process }

func (pluginObserver) Prepared(kubeletplugin.Outcome, time.Duration)         {}
func (pluginObserver) Unprepared(kubeletplugin.Outcome, time.Duration)       {}
func (pluginObserver) CheckpointDamaged(string, error)                       {}
func (pluginObserver) OrphanUndone(string, string, types.UID, []device.Unit) {}
func (o pluginObserver) PreparedChanged() {
	o.p.s.ask(o.p.name+" prepared changed", func() {
		if o.p.steps != nil {
			o.p.steps.poke()
		}
	})
}
