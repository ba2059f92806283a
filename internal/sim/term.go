// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cohdi/cohdi-agent/internal/claim"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/leader"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/internal/pool"
	"github.com/cohdi/cohdi-agent/internal/publish"
)

// Times of the election and of the leader, as the agent has them.
const (
	leaseDuration = 30 * time.Second
	renewDeadline = 20 * time.Second
	renewPeriod   = 10 * time.Second
	ballotEvery   = 10 * time.Second

	countEvery    = 30 * time.Second
	countPause    = time.Second
	leaderBounce  = 20 * time.Millisecond
	writeDeadline = 10 * time.Second
	readySettle   = 10 * time.Second
	agentAway     = time.Minute
	adoptAfter    = 2 * time.Minute
)

// ballot is a candidate's part in the election.
type ballot struct {
	seen      string // holder and renewal as last seen
	seenSince time.Time
	renewedAt time.Time
	asking    bool
}

// campaign watches the election, runs for it when it looks free, and renews what was won.
func (p *process) campaign() {
	if p.balloting {
		return
	}
	p.balloting = true
	p.s.after(ballotEvery, p, func() {
		p.balloting = false
		p.campaign()
	})
	a, now := p.s.api, p.s.now()
	b := &p.ballot
	if p.term != nil && !p.stopping {
		if now.Sub(b.renewedAt) >= renewDeadline {
			p.term.end("it could not renew")
			return
		}
		if now.Sub(b.renewedAt) >= renewPeriod && !b.asking {
			p.elect("renew election", func() error {
				if !a.leads(p) {
					return errors.New("another leads")
				}
				a.renewedAt = p.s.now()
				return nil
			}, func() { b.renewedAt = now.Add(-time.Second) }) // so that the next tick renews again
		}
		return
	}
	seen := a.leader + " " + a.renewedAt.String()
	if b.seen != seen {
		b.seen, b.seenSince = seen, now
	}
	if p.stopping || b.asking || a.leader != "" && now.Sub(b.seenSince) < leaseDuration {
		return
	}
	p.elect("acquire election", func() error {
		if a.leader+" "+a.renewedAt.String() != seen {
			return errors.New("another was first")
		}
		a.leader, a.renewedAt = p.identity(), p.s.now()
		return nil
	}, func() {
		b.renewedAt = now
		p.lead()
	})
}

func (p *process) elect(key string, do func() error, then func()) {
	p.ballot.asking = true
	p.launch(func() {
		ctx, cancel := context.WithTimeout(p.ctx, 5*time.Second)
		defer cancel()
		_, err := invoke(ctx, p, apiCall(key), func() (struct{}, error) { return struct{}{}, do() })
		p.s.ask(p.name+" elected", func() {
			p.ballot.asking = false
			if err == nil {
				then()
			}
		})
	})
}

// term is one term of a leader: the real loop, over caches of its own.
type term struct {
	p      *process
	ctx    context.Context //nolint:containedctx // the term's own life
	cancel context.CancelFunc
	loop   *leader.Loop
	steps  *stepper

	store   *lease.Store
	claims  *claim.Claims
	demands *watch
	nodes   *watch
	agents  *watch
	slices  *watch

	want    []resourceslice.Slice
	writing bool
}

func (p *process) lead() {
	p.s.note(p.node, "leads the fabric")
	p.s.api.terms++
	t := &term{p: p}
	t.ctx, t.cancel = context.WithCancel(p.ctx)
	p.term = t
	t.steps = &stepper{p: p, key: "leader", ctx: t.ctx, debounce: leaderBounce, resync: countEvery, after: func() {}}
	t.open()
	t.loop = leader.New(leader.Config{
		Fabric: fabricID, Models: p.models,
		Settings:   pool.Settings{CoolDown: p.s.coolDown, ReadySettle: readySettle, AgentAway: agentAway, Addressable: p.s.manner.chooses, Arrival: p.s.manner.nameless, Adopt: p.s.adopt, AdoptAfter: adoptAfter, Slots: p.s.slots},
		CountEvery: countEvery, CountPause: countPause, Debounce: leaderBounce, Retry: retry,
		CallDeadline: callDeadline, WriteDeadline: writeDeadline,
		Leases: allLeases{t.store}, Claims: leaderClaims{t.claims, t}, Nodes: leaderNodes{t}, Publisher: publisher{t},
		Manager: manager{p}, Election: election{p}, Observer: leaderObserver{t}, Clock: wall{p}, Spawn: t.spawn,
	})
	t.steps.step = t.loop.Step
	t.steps.poke()
}

// open fills the caches of the term.
func (t *term) open() {
	p := t.p
	inf := newInformer(p, p.node+" fabric leases", leases, func(o object) bool { return o.GetLabels()[device.LabelFabric] == string(fabricID) })
	store, err := lease.NewStoreOver(lease.Selection{Label: device.LabelFabric, Value: string(fabricID), What: "fabric " + string(fabricID)}, inf,
		lease.Options{Client: kube{p: p}, Clock: wall{p}, Changed: func(string) { t.steps.poke() }})
	if err != nil {
		panic(err)
	}
	t.store, t.claims = store, claim.New(claim.Options{Client: kube{p: p}, Clock: wall{p}})
	cached := func(k kind) *watch {
		return &watch{
			p: p, name: p.node + " " + string(k) + "s", kind: k, want: func(object) bool { return true },
			put: func(object) { t.steps.poke() }, gone: func(object, bool) { t.steps.poke() },
		}
	}
	t.demands, t.nodes, t.agents, t.slices = cached(claims), cached(nodes), cached(agents), cached(poolSlices)
	for _, w := range []*watch{inf.w, t.demands, t.nodes, t.agents, t.slices} {
		p.s.api.open(w)
		p.watches = append(p.watches, w)
	}
}

func (t *term) end(why string) {
	if t.p.term != t {
		return
	}
	t.p.s.note(t.p.node, "leads no more: %s", why)
	t.p.term = nil
	t.steps.off = true
	t.cancel()
	for _, w := range []*watch{t.demands, t.nodes, t.agents, t.slices} {
		w.close()
	}
}

func (t *term) spawn(f func()) {
	t.p.s.ask(t.p.name+" spawn count", func() {
		t.p.launch(func() {
			f()
			t.p.s.ask(t.p.name+" counted", t.steps.poke)
		})
	})
}

// sorted are the objects of a cache by name, not to be changed.
func sorted[T object](w *watch) []T {
	var all []T
	for _, name := range slices.Sorted(maps.Keys(w.store)) {
		if o, ok := w.store[name].(T); ok {
			all = append(all, o)
		}
	}
	return all
}

// allLeases are the leases as cmd gives them to the loops: also those that cannot be read.
type allLeases struct{ *lease.Store }

func (l allLeases) List() []device.Lease {
	all := l.Store.List()
	for _, bad := range l.Unreadable() {
		all = append(all, device.Lease{Fabric: bad.Fabric, Unit: bad.Unit, Node: bad.Node, Phase: device.Unreadable})
	}
	return all
}

type leaderClaims struct {
	*claim.Claims
	t *term
}

func (c leaderClaims) Demands() []pool.Demand {
	var all []pool.Demand
	for _, obj := range sorted[*resourceapi.ResourceClaim](c.t.demands) {
		ds, _ := claim.Demands(fabricID, obj)
		all = append(all, ds...)
	}
	slices.SortFunc(all, func(a, b pool.Demand) int {
		return cmp.Or(cmp.Compare(a.Attempt.Name, b.Attempt.Name), cmp.Compare(a.Attempt.Entry, b.Attempt.Entry))
	})
	return all
}

type leaderNodes struct{ t *term }

func (n leaderNodes) List(device.FabricID) []pool.Node {
	var all []pool.Node
	for _, obj := range sorted[*corev1.Node](n.t.nodes) {
		if obj.Labels[device.LabelFabric] != string(fabricID) {
			continue
		}
		runs := slices.ContainsFunc(sorted[*corev1.Pod](n.t.agents), func(a *corev1.Pod) bool { return a.Spec.NodeName == obj.Name })
		attachable, idle := nodestatus.LeaderLabels(obj, n.t.p.s.fabric.models())
		all = append(all, pool.Node{
			Name: obj.Name, UID: string(obj.UID), Machine: device.Machine(obj.Annotations[device.AnnotationMachine]), Member: true,
			AgentReady: runs && nodeReady(obj), Attachable: attachable, Idle: idle,
		})
	}
	return all
}

func (n leaderNodes) SetLabels(ctx context.Context, want pool.NodeLabels) error {
	p := n.t.p
	_, err := invoke(ctx, p, apiCall("label node "+want.Node), func() (struct{}, error) {
		obj, ok := find[*corev1.Node](p.s.api, nodes, want.Node)
		switch {
		case !ok:
			_, err := p.s.api.get(nodes, want.Node)
			return struct{}{}, err
		case !p.s.api.leads(p):
			return struct{}{}, p.s.api.forbidden(p, "labels of node "+want.Node)
		}
		if obj.Labels == nil {
			obj.Labels = map[string]string{}
		}
		for m, yes := range want.Attachable {
			set(obj.Labels, m.AttachableLabel(), yes)
		}
		set(obj.Labels, device.LabelIdle, want.Idle)
		_, err := p.s.api.update(nodes, obj)
		return struct{}{}, err
	})
	return err
}

func set(labels map[string]string, key string, yes bool) {
	if yes {
		labels[key] = "true"
	} else {
		delete(labels, key)
	}
}

type election struct{ p *process }

func (e election) StillLeads(ctx context.Context) error {
	_, err := invoke(ctx, e.p, apiCall("get election"), func() (struct{}, error) {
		if !e.p.s.api.leads(e.p) {
			return struct{}{}, lease.ErrNotLeader
		}
		return struct{}{}, nil
	})
	return err
}

type leaderObserver struct{ t *term }

func (leaderObserver) Operated(context.Context, pool.Op, error)                     {}
func (leaderObserver) Refused(context.Context, pool.Refusal)                        {}
func (leaderObserver) Counted(context.Context, map[device.Model]pool.Supply, error) {}
func (o leaderObserver) Decided(_ context.Context, p pool.Plan) {
	o.t.p.s.ask(o.t.p.name+" decided", func() { o.t.p.s.decided(o.t.p, p) })
}

// publisher writes the pool slice by slice, as the one of internal/publish lets client-go's controller do.
type publisher struct{ t *term }

func (b publisher) Published() (pool.Published, bool) {
	return publish.Shown(sorted[*resourceapi.ResourceSlice](b.t.slices)), true
}

func (b publisher) Publish(_ context.Context, o pool.Offers) {
	want := publish.Slices(o)
	b.t.p.s.ask(b.t.p.name+" publish", func() {
		b.t.want = want
		b.t.write()
	})
}

// write sends the first slice that differs from what the API server shows.
func (t *term) write() {
	if t.writing || t.p.term != t {
		return
	}
	shown := sorted[*resourceapi.ResourceSlice](t.slices)
	names := sliceNames(t.want)
	for i, want := range t.want {
		name := names[i]
		obj := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: device.Driver, Pool: resourceapi.ResourcePool{Name: fabricID.Pool(), ResourceSliceCount: int64(len(t.want))},
				Devices: want.Devices, SharedCounters: want.SharedCounters, PerDeviceNodeSelection: want.PerDeviceNodeSelection,
			},
		}
		j := slices.IndexFunc(shown, func(s *resourceapi.ResourceSlice) bool { return s.Name == name })
		if j >= 0 && apiequality.Semantic.DeepEqual(shown[j].Spec, obj.Spec) {
			continue
		}
		if j >= 0 {
			obj.ResourceVersion = shown[j].ResourceVersion
		}
		t.put(obj, j < 0)
		return
	}
}

// sliceNames are in the order of the slices; a slice keeps its name when the pool grows.
func sliceNames(all []resourceslice.Slice) []string {
	names, n := make([]string, 0, len(all)), map[int]int{}
	for _, s := range all {
		kind := 0 // counters
		switch {
		case len(s.Devices) > 0 && s.Devices[0].NodeName != nil:
			kind = 1
		case len(s.Devices) > 0:
			kind = 2
		}
		names = append(names, fmt.Sprintf("pool-%d-%d", kind, n[kind]))
		n[kind]++
	}
	return names
}

func (t *term) put(obj *resourceapi.ResourceSlice, fresh bool) {
	t.writing = true
	p := t.p
	p.launch(func() {
		ctx, cancel := context.WithTimeout(t.ctx, 8*time.Second)
		defer cancel()
		_, err := invoke(ctx, p, apiCall("write slice "+obj.Name), func() (struct{}, error) {
			if !p.s.api.leads(p) {
				return struct{}{}, p.s.api.forbidden(p, "slice "+obj.Name)
			}
			if fresh {
				_, err := p.s.api.create(poolSlices, obj)
				return struct{}{}, err
			}
			_, err := p.s.api.update(poolSlices, obj)
			return struct{}{}, err
		})
		p.s.ask(p.name+" written", func() {
			// The next one goes when the cache shows this one, or after a while.
			pause := 100 * time.Millisecond
			if err != nil {
				pause = time.Second
			}
			p.s.after(pause, p, func() {
				t.writing = false
				t.write()
			})
		})
	})
}
