// SPDX-License-Identifier: Apache-2.0

package leader

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// Config is what a Loop is made of; every field but Spawn and Limiter is required.
type Config struct {
	Fabric   device.FabricID
	Models   func() []pool.Model
	Settings pool.Settings

	// CountEvery is how often the manager is asked what is free and what is attached; what is free is asked
	// anew when a lease has come or gone, at most every CountPause.
	CountEvery, CountPause time.Duration
	// LimitEvery is how often a machine's limits are read.
	LimitEvery time.Duration
	// Debounce is the least time between two plans: the first of a burst of changes is acted upon at once, the others
	// together. Retry is the pause after a step that failed.
	Debounce, Retry time.Duration
	// CallDeadline bounds a call to the manager, WriteDeadline one to the API server.
	CallDeadline, WriteDeadline time.Duration

	Leases    Leases
	Claims    Claims
	Nodes     Nodes
	Publisher Publisher
	Manager   Fabric
	// Limiter is the same manager, nil if it has no limits of its own.
	Limiter  Limiter
	Election Election
	Observer Observer
	Clock    clock.WithTicker
	// Spawn runs the count beside the loop; a goroutine if nil.
	Spawn func(func())
}

// Loop runs the policy of one fabric during one term of leadership.
type Loop struct {
	cfg   Config
	poked chan struct{}

	taints  map[string]time.Time         // since when a taint was seen, by entry
	away    map[string]time.Time         // since when an agent was seen away, by node
	counted time.Time                    // when the manager was last asked what is free
	listed  time.Time                    // when it was last asked what is attached
	limited map[device.Machine]time.Time // when a machine's limits were last asked for
	units   []device.Unit                // the order that was handed over for publishing; a cache may show it later

	unneeded map[device.Unit]time.Time // since when each plan has found a unit unneeded
	foreign  map[string]time.Time      // from which list on each plan has found a device foreign

	mu        sync.Mutex // guards the following, written by the count that runs beside the loop
	inventory pool.Inventory
	counting  bool
	hinted    bool // the manager says that something has changed
}

// New returns a loop for one term.
func New(cfg Config) *Loop {
	if cfg.Spawn == nil {
		cfg.Spawn = func(f func()) { go f() }
	}
	return &Loop{
		cfg: cfg, poked: make(chan struct{}, 1),
		taints: map[string]time.Time{}, away: map[string]time.Time{},
		unneeded: map[device.Unit]time.Time{}, foreign: map[string]time.Time{}, limited: map[device.Machine]time.Time{},
		inventory: pool.Inventory{Limits: map[device.Machine]map[device.Model]pool.Limit{}, Free: map[device.Model]pool.Supply{}, Leased: map[device.Unit]string{}},
	}
}

// Poke asks for a look. It never blocks.
func (l *Loop) Poke() {
	select {
	case l.poked <- struct{}{}:
	default:
	}
}

// Hint says that the manager may have something new to tell: it is asked soon, and not more often than otherwise. It
// never blocks.
func (l *Loop) Hint() {
	l.mu.Lock()
	l.hinted = true
	l.mu.Unlock()
	l.Poke()
}

// Run leads until ctx ends.
func (l *Loop) Run(ctx context.Context) {
	for ctx.Err() == nil {
		pause := l.cfg.CountEvery
		wake := l.Step(ctx)
		ended := l.cfg.Clock.Now()
		if !wake.IsZero() {
			pause = min(pause, max(wake.Sub(ended), 0))
		}
		if !l.sleep(ctx, pause, l.poked) {
			return
		}
		if early := l.cfg.Debounce - l.cfg.Clock.Since(ended); early > 0 && !l.sleep(ctx, early, nil) {
			return
		}
	}
}

// sleep waits for the pause or a poke; false is the end of ctx.
func (l *Loop) sleep(ctx context.Context, pause time.Duration, poke <-chan struct{}) bool {
	timer := l.cfg.Clock.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-poke:
	case <-timer.C():
	}
	return true
}

// Step observes, decides and carries out once. It returns when to look again though nothing changed.
func (l *Loop) Step(ctx context.Context) time.Time {
	published, ok := l.cfg.Publisher.Published()
	if !ok {
		return l.cfg.Clock.Now().Add(l.cfg.Retry) // permanence needs to know what was published before
	}
	w := l.observe(published)
	l.count(ctx, w)
	plan := pool.Decide(w)
	l.remember(plan, w)
	l.cfg.Observer.Decided(ctx, plan)
	l.handedOver(plan.Offers)
	l.cfg.Publisher.Publish(ctx, plan.Offers)
	failed := l.label(ctx, w, plan)
	for _, r := range plan.Refusals {
		failed = l.refuse(ctx, r) || failed
	}
	for _, o := range plan.Ops {
		failed = l.operate(ctx, o) || failed
	}
	wake := l.recount(plan.Wake)
	if retry := l.cfg.Clock.Now().Add(l.cfg.Retry); failed && (wake.IsZero() || retry.Before(wake)) {
		wake = retry
	}
	return wake
}

// observe gathers the World.
func (l *Loop) observe(published pool.Published) pool.World {
	now := l.cfg.Clock.Now()
	published.TaintedSince = l.sinceTainted(published.Effects, now)
	published.Units = l.permanent(published.Units)
	nodes := l.cfg.Nodes.List(l.cfg.Fabric)
	seen := map[string]time.Time{}
	for i := range nodes {
		if !nodes[i].AgentReady {
			nodes[i].AwaySince = since(l.away, nodes[i].Name, now)
			seen[nodes[i].Name] = nodes[i].AwaySince
		}
	}
	l.away = seen
	l.mu.Lock()
	inventory := l.inventory // its maps are replaced, never changed
	l.mu.Unlock()
	return pool.World{
		Now: now, Fabric: l.cfg.Fabric, Settings: l.cfg.Settings, Models: l.cfg.Models(), Inventory: inventory,
		Leases: l.cfg.Leases.List(), Demands: l.cfg.Claims.Demands(), Nodes: nodes, Published: published,
		UnneededSince: l.unneeded, ForeignSince: l.foreign,
	}
}

// remember keeps since when each plan has said the same of a unit or a device.
func (l *Loop) remember(p pool.Plan, w pool.World) {
	unneeded, foreign := map[device.Unit]time.Time{}, map[string]time.Time{}
	for _, u := range p.Unneeded {
		unneeded[u] = since(l.unneeded, u, w.Now)
	}
	for _, f := range p.Foreign {
		foreign[f.Key()] = since(l.foreign, f.Key(), w.Inventory.AttachedAt)
	}
	l.unneeded, l.foreign = unneeded, foreign
}

func since[K comparable](known map[K]time.Time, key K, now time.Time) time.Time {
	if at, ok := known[key]; ok {
		return at
	}
	return now
}

// handedOver remembers what will be published before any cache shows it: units keep their place, and an
// entry whose taint is about to go was not tainted all the time when it is tainted again.
func (l *Loop) handedOver(o pool.Offers) {
	l.units = o.Units
	for _, slice := range slices.Concat(o.Ready, o.OnCall) {
		for i := range slice {
			if slice[i].Effect == pool.NoTaint {
				delete(l.taints, slice[i].Name)
			}
		}
	}
}

// permanent is the order of the units as this term handed it over, before what only the API server shows.
func (l *Loop) permanent(shown []device.Unit) []device.Unit {
	units, known := slices.Clone(l.units), make(map[device.Unit]bool, len(l.units)+len(shown))
	for _, u := range units {
		known[u] = true
	}
	for _, u := range shown {
		if !known[u] {
			units, known[u] = append(units, u), true
		}
	}
	return units
}

func (l *Loop) sinceTainted(effects map[string]pool.Effect, now time.Time) map[string]time.Time {
	seen := map[string]time.Time{}
	for entry, effect := range effects {
		if effect == pool.NoTaint {
			continue
		}
		seen[entry] = since(l.taints, entry, now)
	}
	l.taints = seen
	return maps.Clone(seen)
}

// count asks the manager beside the loop when it is time, or when the devices that are leased are not
// those of the last count.
func (l *Loop) count(ctx context.Context, w pool.World) {
	leased := leasedDevices(w.Leases)
	due := func(last time.Time, pause time.Duration) bool { return last.IsZero() || !w.Now.Before(last.Add(pause)) }
	list := w.Settings.NeedsAttached() && due(l.listed, l.cfg.CountEvery)
	limits := l.limitsDue(w)
	l.mu.Lock()
	news := l.hinted || !maps.Equal(leased, l.inventory.Leased)
	start := !l.counting && (list || len(limits) > 0 || due(l.counted, l.cfg.CountEvery) || news && due(l.counted, l.cfg.CountPause))
	list = list || start && l.hinted && w.Settings.NeedsAttached()
	l.counting = l.counting || start
	l.hinted = l.hinted && !start
	l.mu.Unlock()
	if !start {
		return
	}
	l.counted = w.Now
	for _, m := range limits {
		l.limited[m] = w.Now
	}
	names := make([]device.Model, 0, len(w.Models))
	for _, m := range w.Models {
		names = append(names, m.Name)
	}
	var machines []device.Machine
	if list {
		l.listed = w.Now
		for i := range w.Nodes {
			if n := &w.Nodes[i]; n.Member && n.Machine != "" {
				machines = append(machines, n.Machine)
			}
		}
	}
	l.cfg.Spawn(func() {
		l.ask(ctx, names, leased, machines, list)
		l.limit(ctx, limits)
		l.mu.Lock()
		l.counting = false
		l.mu.Unlock()
		l.Poke()
	})
}

// mostLimits bounds how many machines' limits are read at a time, so that what is free is counted meanwhile.
const mostLimits = 16

// limitsDue are machines whose limits are to be read. Those of a machine that left are read anew when it is back.
func (l *Loop) limitsDue(w pool.World) []device.Machine {
	if l.cfg.Limiter == nil {
		return nil
	}
	asked, due := make(map[device.Machine]time.Time, len(w.Nodes)), []device.Machine(nil)
	for i := range w.Nodes {
		m := w.Nodes[i].Machine
		if !w.Nodes[i].Member || m == "" {
			continue
		}
		asked[m] = l.limited[m]
		if asked[m].IsZero() || !w.Now.Before(asked[m].Add(l.cfg.LimitEvery)) {
			due = append(due, m)
		}
	}
	l.limited = asked
	slices.SortFunc(due, func(a, b device.Machine) int { return asked[a].Compare(asked[b]) })
	return due[:min(len(due), mostLimits)]
}

// limit reads the limits of machines. Where they cannot be read, those that were read before stand.
func (l *Loop) limit(ctx context.Context, machines []device.Machine) {
	for _, m := range machines {
		call, cancel := context.WithTimeout(ctx, l.cfg.CallDeadline)
		limits, err := l.cfg.Limiter.Limits(call, m)
		cancel()
		if err != nil {
			klog.FromContext(ctx).V(1).Info("A machine's limits could not be read", "machine", m, "err", err)
			continue
		}
		l.mu.Lock()
		l.inventory.Limits = maps.Clone(l.inventory.Limits)
		l.inventory.Limits[m] = limits
		l.mu.Unlock()
	}
}

// ask reads what is free, and what is attached if that is due.
func (l *Loop) ask(ctx context.Context, names []device.Model, leased map[device.Unit]string, machines []device.Machine, list bool) {
	free, err := l.free(ctx, names)
	l.cfg.Observer.Counted(ctx, free, err)
	var attached map[device.Machine][]device.OnFabric
	asked := l.cfg.Clock.Now()
	if list && len(machines) > 0 {
		call, cancel := context.WithTimeout(ctx, l.cfg.CallDeadline)
		attached = l.cfg.Manager.Attached(call, machines)
		cancel()
	}
	l.mu.Lock()
	if len(free) > 0 || err == nil {
		l.inventory.Free, l.inventory.Leased = free, leased
	}
	if list {
		l.inventory.Attached, l.inventory.AttachedAt = attached, asked
	}
	l.mu.Unlock()
}

func (l *Loop) free(ctx context.Context, names []device.Model) (map[device.Model]pool.Supply, error) {
	call, cancel := context.WithTimeout(ctx, l.cfg.CallDeadline)
	defer cancel()
	return l.cfg.Manager.Free(call, names)
}

// leasedDevices are the devices that leases name.
func leasedDevices(leases []device.Lease) map[device.Unit]string {
	leased := map[device.Unit]string{}
	for i := range leases {
		if leases[i].FabricDevice != "" {
			leased[leases[i].Unit] = leases[i].FabricDevice
		}
	}
	return leased
}

// recount makes the loop look again when a count is due before the plan's own time.
func (l *Loop) recount(wake time.Time) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.counting || !l.hinted && maps.Equal(leasedDevices(l.cfg.Leases.List()), l.inventory.Leased) {
		return wake
	}
	if due := l.counted.Add(l.cfg.CountPause); wake.IsZero() || due.Before(wake) {
		return due
	}
	return wake
}

// label writes the labels that differ from what the Nodes carry.
func (l *Loop) label(ctx context.Context, w pool.World, p pool.Plan) (failed bool) {
	at := make(map[string]*pool.Node, len(w.Nodes))
	for i := range w.Nodes {
		at[w.Nodes[i].Name] = &w.Nodes[i]
	}
	for _, want := range p.Labels {
		if have := at[want.Node]; have.Idle == want.Idle && sameLabels(have.Attachable, want.Attachable) {
			continue
		}
		write, cancel := context.WithTimeout(ctx, l.cfg.WriteDeadline)
		err := l.cfg.Nodes.SetLabels(write, want)
		cancel()
		if err != nil {
			klog.FromContext(ctx).Error(err, "A Node could not be labelled", "node", want.Node)
			failed = true
		}
	}
	return failed
}

// sameLabels compares what is there with what is wanted; a model that is missing is not attachable.
func sameLabels(have, want map[device.Model]bool) bool {
	for m, yes := range want {
		if have[m] != yes {
			return false
		}
	}
	for m, yes := range have {
		if want[m] != yes {
			return false
		}
	}
	return true
}

func (l *Loop) refuse(ctx context.Context, r pool.Refusal) (failed bool) {
	write, cancel := context.WithTimeout(ctx, l.cfg.WriteDeadline)
	defer cancel()
	if err := l.cfg.Claims.Refuse(write, r.Attempts, r.Reason, r.Message); err != nil {
		klog.FromContext(ctx).Error(err, "A claim could not be told that its attach failed", "reason", r.Reason)
		return true
	}
	l.cfg.Observer.Refused(ctx, r)
	return false
}
