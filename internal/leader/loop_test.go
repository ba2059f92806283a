// SPDX-License-Identifier: Apache-2.0

package leader

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// rig is the API server and the manager around a Loop. What the caches show may lag behind what is live.
type rig struct {
	clock *clocktesting.FakeClock

	mu        sync.Mutex
	leases    map[device.Unit]device.Lease
	version   int
	updateErr error
	demands   []pool.Demand // as the cache shows them
	live      []device.Attempt
	liveErr   error
	refuseErr error
	nodes     []pool.Node
	labelErr  error
	published pool.Published
	unread    bool // nothing is known of what is published
	lags      bool // what is published does not show
	wanted    pool.Offers
	free      map[device.Model]int
	attached  map[device.Machine][]device.OnFabric
	lists     int
	freeErr   error
	limits    map[device.Machine]map[device.Model]pool.Limit
	limitErr  error
	limited   []device.Machine // whose limits were asked for
	hang      chan struct{}    // a count does not end before
	counts    int
	plans     []pool.Plan
	notLeader error
	log       []string
}

func newRig() *rig {
	r := &rig{
		clock: clocktesting.NewFakeClock(start), leases: map[device.Unit]device.Lease{},
		free: map[device.Model]int{"a100": 2},
	}
	for _, name := range []string{"n1", "n2"} {
		r.nodes = append(r.nodes, pool.Node{
			Name: name, UID: "uid-" + name, Machine: device.Machine("m-" + name), Member: true, AgentReady: true,
			Attachable: map[device.Model]bool{},
		})
	}
	return r
}

func (r *rig) loop() *Loop {
	return New(Config{
		Fabric: "0", Models: func() []pool.Model { return []pool.Model{{Name: "a100"}} },
		Settings:   pool.Settings{CoolDown: 10 * time.Minute, ReadySettle: 10 * time.Second, AgentAway: 2 * time.Minute},
		CountEvery: 30 * time.Second, CountPause: time.Second, Debounce: 20 * time.Millisecond, Retry: time.Second,
		CallDeadline: time.Minute, WriteDeadline: 10 * time.Second,
		Leases: r, Claims: r, Nodes: nodes{r}, Publisher: r, Manager: r, Election: r, Observer: r, Clock: r.clock,
	})
}

func (r *rig) note(format string, args ...any) { r.log = append(r.log, fmt.Sprintf(format, args...)) }

// said returns what was done since the last time.
func (r *rig) said() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	log := r.log
	r.log = nil
	return log
}

func (r *rig) List() []device.Lease {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Collect(maps.Values(r.leases))
	slices.SortFunc(all, func(a, b device.Lease) int { return cmpUnit(a.Unit, b.Unit) })
	return all
}

func cmpUnit(a, b device.Unit) int {
	if a < b {
		return -1
	}
	return 1
}

func (r *rig) put(l device.Lease) device.Lease {
	r.version++
	l.Version = fmt.Sprint(r.version)
	r.leases[l.Unit] = l
	return l
}

func (r *rig) Create(_ context.Context, l device.Lease) (device.Lease, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.leases[l.Unit]; ok {
		return l, errors.New("exists")
	}
	r.note("create %s for %s on %s", l.Unit, l.Attempt.Name, l.Node)
	return r.put(l), nil
}

func (r *rig) Update(_ context.Context, l device.Lease) (device.Lease, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.updateErr != nil {
		return l, r.updateErr
	}
	if r.leases[l.Unit].Version != l.Version {
		return l, errors.New("conflict")
	}
	r.note("update %s: %s for %q", l.Unit, l.Phase, l.Attempt.Name)
	return r.put(l), nil
}

func (r *rig) Delete(_ context.Context, l device.Lease) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.note("delete %s", l.Unit)
	delete(r.leases, l.Unit)
	return nil
}

func (r *rig) Demands() []pool.Demand {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.demands)
}

func (r *rig) Has(_ context.Context, a device.Attempt) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Contains(r.live, a), r.liveErr
}

func (r *rig) Live(_ context.Context, _ device.FabricID, u device.Unit) ([]device.Attempt, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var of []device.Attempt
	for _, a := range r.live {
		if unit, _ := device.UnitOfEntry(a.Entry); unit == u {
			of = append(of, a)
		}
	}
	return of, r.liveErr
}

func (r *rig) Refuse(_ context.Context, attempts []device.Attempt, reason, _ string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuseErr != nil {
		return r.refuseErr
	}
	for _, a := range attempts {
		r.note("refuse %s: %s", a.Name, reason)
		for i := range r.demands {
			r.demands[i].AttachFailed = r.demands[i].AttachFailed || r.demands[i].Attempt == a
		}
	}
	return nil
}

// nodes is the rig as Nodes, whose List is another one.
type nodes struct{ *rig }

func (r nodes) List(device.FabricID) []pool.Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.nodes)
}

func (r nodes) SetLabels(_ context.Context, want pool.NodeLabels) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.labelErr != nil {
		return r.labelErr
	}
	r.note("label %s: attachable %v, idle %v", want.Node, want.Attachable["a100"], want.Idle)
	for i := range r.nodes {
		if r.nodes[i].Name == want.Node {
			r.nodes[i].Attachable, r.nodes[i].Idle = maps.Clone(want.Attachable), want.Idle
		}
	}
	return nil
}

func (r *rig) Publish(_ context.Context, o pool.Offers) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !cmp.Equal(r.wanted, o) {
		r.note("publish %v", o.Units)
	}
	r.wanted = o
	if !r.lags {
		r.show()
	}
}

// show makes the API server's cache show what was published last.
func (r *rig) show() {
	r.published = pool.Published{Units: r.wanted.Units, Effects: map[string]pool.Effect{}}
	for _, slice := range slices.Concat(r.wanted.Ready, r.wanted.OnCall) {
		for _, o := range slice {
			r.published.Effects[o.Name] = o.Effect
		}
	}
}

func (r *rig) Published() (pool.Published, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.published
	p.Effects = maps.Clone(p.Effects)
	return p, !r.unread
}

func (r *rig) Free(ctx context.Context, _ []device.Model) (map[device.Model]pool.Supply, error) {
	r.mu.Lock()
	hang, free, err := r.hang, map[device.Model]pool.Supply{}, r.freeErr
	for m, n := range r.free {
		free[m] = pool.Supply{Count: n}
	}
	r.counts++
	r.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return free, err
}

func (r *rig) Attached(_ context.Context, machines []device.Machine) map[device.Machine][]device.OnFabric {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lists++
	of := map[device.Machine][]device.OnFabric{}
	for m, list := range r.attached {
		if slices.Contains(machines, m) {
			of[m] = list
		}
	}
	return of
}

func (r *rig) Limits(_ context.Context, m device.Machine) (map[device.Model]pool.Limit, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.limited = append(r.limited, m)
	return r.limits[m], r.limitErr
}

func (r *rig) StillLeads(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.notLeader
}

func (r *rig) Operated(_ context.Context, op pool.Op, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.note("%s %s did not go through: %v", op.Kind, op.Lease.Unit, err)
	}
}
func (r *rig) Refused(context.Context, pool.Refusal)                        {}
func (r *rig) Counted(context.Context, map[device.Model]pool.Supply, error) {}

func (r *rig) Decided(_ context.Context, p pool.Plan) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.plans = append(r.plans, p)
}

func attempt(claim, node, entry string) device.Attempt {
	return device.Attempt{Namespace: "team", Name: claim, UID: "uid-" + claim, AllocatedAt: "2026-01-02T03:04:00Z", Node: node, Pool: "fabric-0", Entry: entry}
}

// claims makes claims demand their entries, in the cache and live.
func (r *rig) claims(all ...device.Attempt) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.demands, r.live = nil, all
	for _, a := range all {
		r.demands = append(r.demands, pool.Demand{Attempt: a, Reserved: true, Consumers: []string{"pod-" + a.Name}})
	}
}

func (r *rig) change(f func(*device.Lease)) {
	const u = device.Unit("a100-0")
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.leases[u]
	f(&l)
	r.put(l)
}

func attached(l *device.Lease) {
	l.Phase, l.FabricDevice, l.UUID = device.Attached, "d-"+string(l.Unit), "GPU-00000000-0000-4000-8000-000000000001"
}

// inTerm runs f with a leader that has counted, published and labelled, in a bubble where a count that runs
// beside the loop can be waited for.
func inTerm(t *testing.T, f func(*testing.T, *rig, *Loop)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		l := r.loop()
		r.settle(t, l)
		want := []string{"publish []", "label n1: attachable true, idle false", "label n2: attachable true, idle false", "publish [a100-0 a100-1]"}
		if diff := cmp.Diff(want, r.said()); diff != "" {
			t.Fatalf("first steps (-want +got):\n%s", diff)
		}
		f(t, r, l)
	})
}

// settle steps until nothing is done any more. Time stands still.
func (r *rig) settle(t *testing.T, l *Loop) (wake time.Time) {
	t.Helper()
	for range 20 {
		before := len(r.log)
		wake = l.Step(t.Context())
		synctest.Wait()
		select {
		case <-l.poked:
			continue
		default:
		}
		if len(r.log) == before {
			return wake
		}
	}
	t.Fatalf("no rest: %q", r.log)
	return wake
}

func (r *rig) expect(t *testing.T, what string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, r.said()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestNothingBeforeThePoolIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.unread = true
		r.claims(attempt("c", "n1", "a100-0"))
		if wake := r.settle(t, r.loop()); wake != start.Add(time.Second) {
			t.Errorf("wake %s", wake)
		}
		r.expect(t, "before what was published is known")
	})
}

func TestClaimComesAndGoes(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		r.claims(attempt("c", "n1", "a100-0"))
		r.settle(t, l)
		r.expect(t, "allocated", "create a100-0 for c on n1")
		if diff := cmp.Diff(device.Lease{
			Fabric: "0", Unit: "a100-0", Model: "a100", Node: "n1", NodeUID: "uid-n1", Machine: "m-n1", Phase: device.Assigned,
			Attempt: attempt("c", "n1", "a100-0"), AcquiredAt: start, ChangedAt: start, Version: "1",
		}, r.leases["a100-0"]); diff != "" {
			t.Errorf("lease (-want +got):\n%s", diff)
		}
		r.change(attached)
		r.settle(t, l)
		r.said()

		// The cache shows that it is gone; the API server says that it is not.
		r.demands = nil
		if wake := l.Step(t.Context()); wake != start.Add(time.Second) {
			t.Errorf("wake %s, want a retry", wake)
		}
		if got := r.said(); len(got) != 1 || r.leases["a100-0"].Attempt.IsZero() {
			t.Errorf("cache lags: %q, lease %+v", got, r.leases["a100-0"])
		}
		r.liveErr = errors.New("timeout")
		l.Step(t.Context())
		if r.leases["a100-0"].Attempt.IsZero() {
			t.Error("cleared without knowing")
		}
		r.said()
		r.live, r.liveErr = nil, nil
		r.settle(t, l)
		r.expect(t, "gone", `update a100-0: Attached for ""`, "publish [a100-0 a100-1]")
	})
}

// idleUnit brings a100-0 to n1 and lets it be idle since now.
func idleUnit(t *testing.T, r *rig, l *Loop) {
	t.Helper()
	r.claims(attempt("c", "n1", "a100-0"))
	r.settle(t, l)
	r.change(attached)
	r.settle(t, l)
	r.claims()
	r.settle(t, l)
	r.change(func(l *device.Lease) { l.IdleSince = r.clock.Now() })
	r.free["a100"] = 1
	r.clock.Step(2 * time.Second)
	r.settle(t, l)
	if !r.leases["a100-0"].Idle() || r.published.Effects["a100-0-ready"] != pool.NoTaint {
		t.Fatalf("lease %+v, published %v", r.leases["a100-0"], r.published.Effects)
	}
	r.said()
}

func TestCoolDown(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		idleUnit(t, r, l)
		r.clock.Step(10 * time.Minute)
		r.settle(t, l)
		r.expect(t, "cooled down", "publish [a100-0 a100-1]", "label n1: attachable true, idle false")
		if r.published.Effects["a100-0-ready"] != pool.NoSchedule {
			t.Errorf("published %v", r.published.Effects)
		}
	})
}

func TestReleaseAfterSettle(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*rig)
		want   string
	}{
		{"nobody", func(*rig) {}, `update a100-0: Releasing for ""`},
		{"a claim on another node", func(r *rig) { r.live = []device.Attempt{attempt("d", "n2", "a100-0")} }, `update a100-0: Releasing for ""`},
		{"a claim that no cache shows yet", func(r *rig) { r.live = []device.Attempt{attempt("d", "n1", "a100-0-ready")} }, "Release a100-0 did not go through: unit a100-0 was just allocated to claim team/d on n1; it is not released"},
		{"claims cannot be read", func(r *rig) { r.liveErr = errors.New("timeout") }, "Release a100-0 did not go through: read the claims of unit a100-0 before it is released: timeout"},
		{"no longer the leader", func(r *rig) { r.notLeader = errors.New("n2 leads") }, "Release a100-0 did not go through: n2 leads"},
		{"the lease changed", func(r *rig) { r.updateErr = errors.New("conflict") }, "Release a100-0 did not go through: conflict"},
	} {
		inTerm(t, func(t *testing.T, r *rig, l *Loop) {
			t.Helper()
			idleUnit(t, r, l)
			r.clock.Step(10 * time.Minute)
			wake := r.settle(t, l)
			if !wake.Equal(r.clock.Now().Add(10 * time.Second)) {
				t.Errorf("%s: wake %s, want the end of settling", tc.name, wake.Sub(r.clock.Now()))
			}
			r.clock.Step(10*time.Second - 1)
			r.settle(t, l)
			if r.leases["a100-0"].Phase != device.Attached {
				t.Errorf("%s: released before the taint had settled", tc.name)
			}
			r.clock.Step(1)
			r.said()
			tc.change(r)
			l.Step(t.Context())
			synctest.Wait()
			if got := r.said(); len(got) == 0 || got[0] != tc.want {
				t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
			}
		})
	}
}

// TestTaintThatWasGoneMeanwhile: settling counts from the last taint, even if the cache never showed that it
// was gone.
func TestTaintThatWasGoneMeanwhile(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		r.claims(attempt("c", "n1", "a100-0"))
		r.settle(t, l)
		r.change(attached)
		r.settle(t, l)
		r.clock.Step(time.Hour)
		r.settle(t, l) // the ready entry has been tainted for an hour
		r.claims()
		r.settle(t, l)
		r.lags = true
		r.change(func(l *device.Lease) { l.IdleSince = r.clock.Now() })
		r.settle(t, l) // untainted, and nobody sees it
		r.clock.Step(10 * time.Minute)
		r.settle(t, l)
		if got := r.leases["a100-0"]; got.Phase != device.Attached {
			t.Errorf("lease = %+v, called back before the new taint has settled", got)
		}
	})
}

func TestWantedElsewhere(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		idleUnit(t, r, l)
		r.claims(attempt("d", "n2", "a100-0"))
		r.settle(t, l)
		if got := r.leases["a100-0"]; got.Phase != device.Releasing || got.Version == "" {
			t.Fatalf("lease = %+v", got)
		}
		delete(r.leases, "a100-0") // the holder gave it back
		r.settle(t, l)
		if got := r.leases["a100-0"]; got.Node != "n2" || got.Attempt != attempt("d", "n2", "a100-0") {
			t.Errorf("lease = %+v", got)
		}
	})
}

func TestAssignWhereItIs(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		idleUnit(t, r, l)
		r.claims(attempt("d", "n1", "a100-0-ready"))
		r.settle(t, l)
		if got := r.leases["a100-0"]; got.Phase != device.Attached || got.Attempt.Name != "d" || !got.IdleSince.IsZero() {
			t.Errorf("lease = %+v", got)
		}
	})
}

// TestRefusalComesLast: first the same choice is made impossible, and shown to be; then the claim is refused.
func TestRefusalComesLast(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		r.claims(attempt("c", "n1", "a100-0"))
		r.settle(t, l)
		r.said()
		r.lags = true
		r.change(func(l *device.Lease) {
			l.Phase = device.Failed
			l.Failure = device.Failure{Reason: "Rejected", Message: "no", Blame: device.BlameUnit, RetryAfter: start.Add(time.Hour)}
		})
		r.settle(t, l)
		r.expect(t, "failed", "publish [a100-0 a100-1]")
		r.show()
		r.refuseErr = errors.New("timeout")
		if wake := l.Step(t.Context()); wake != start.Add(time.Second) {
			t.Errorf("wake %s, want a retry", wake)
		}
		r.refuseErr = nil
		r.settle(t, l)
		r.expect(t, "shown", "refuse c: Rejected")
	})
}

func TestRefusalAfterTheLabel(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		r.claims(attempt("c", "n1", "a100-0"))
		r.settle(t, l)
		r.nodes[0].AgentReady = false
		r.clock.Step(time.Minute)
		r.settle(t, l) // seen away since now
		r.clock.Step(119 * time.Second)
		r.settle(t, l)
		r.said()
		r.labelErr = errors.New("timeout")
		r.clock.Step(time.Second)
		now := r.clock.Now()
		if wake := l.Step(t.Context()); !wake.Equal(now.Add(time.Second)) {
			t.Errorf("wake in %s, want a retry", wake.Sub(now))
		}
		synctest.Wait()
		r.expect(t, "away, label not written")
		r.labelErr = nil
		r.settle(t, l)
		r.expect(t, "away", "label n1: attachable false, idle false", "refuse c: AgentAway")
		r.claims()
		r.settle(t, l)
		if len(r.leases) != 0 {
			t.Errorf("nothing was asked yet, and the lease stays: %+v", r.leases)
		}
	})
}

func TestDropNeedsTheElection(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		r.claims(attempt("c", "n1", "a100-0"))
		r.settle(t, l)
		r.nodes = r.nodes[1:]
		r.claims()
		r.notLeader = errors.New("n2 leads")
		for range 5 {
			l.Step(t.Context())
		}
		if len(r.leases) != 1 {
			t.Error("dropped by who does not lead")
		}
		r.notLeader = nil
		r.settle(t, l)
		if len(r.leases) != 0 {
			t.Error("not dropped")
		}
	})
}

// TestOneFailureStopsNothingElse: the lease that cannot be written holds up no other.
// TestKept: units are attached in advance once nobody can have been given them any more, and only if the API
// server says that nobody was.
func TestKept(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		l.cfg.Models = func() []pool.Model { return []pool.Model{{Name: "a100", Min: 1}} }
		r.nodes = r.nodes[:1]
		if wake := r.settle(t, l); !wake.Equal(r.clock.Now().Add(10 * time.Second)) {
			t.Errorf("wake in %s", wake.Sub(r.clock.Now()))
		}
		r.expect(t, "lacks one", "publish [a100-0 a100-1]")
		r.clock.Step(10 * time.Second)
		r.live = []device.Attempt{attempt("c", "n2", "a100-1")} // the cache does not show it yet
		l.Step(t.Context())
		r.expect(t, "just allocated", "Create a100-1 did not go through: unit a100-1 was just allocated to claim team/c; node n1 does not keep it")
		r.live, r.notLeader = nil, errors.New("another leads")
		l.Step(t.Context())
		r.expect(t, "leads no more", "Create a100-1 did not go through: another leads")
		r.notLeader = nil
		r.settle(t, l)
		r.expect(t, "nobody has it", "create a100-1 for  on n1")
		if got := r.leases["a100-1"]; !got.Kept || got.Phase != device.Assigned {
			t.Errorf("lease %+v", got)
		}
	})
}

func TestOneFailureStopsNothingElse(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		r.claims(attempt("c", "n1", "a100-0"), attempt("d", "n2", "a100-1"))
		r.mu.Lock()
		r.leases["a100-0"] = device.Lease{Unit: "a100-0", Model: "a100", Version: "x", Phase: device.Assigned, Node: "n1", Machine: "m-n1", NodeUID: "uid-n1"}
		r.updateErr = errors.New("conflict")
		r.mu.Unlock()
		l.Step(t.Context())
		synctest.Wait()
		if got := r.leases["a100-1"]; got.Attempt.Name != "d" {
			t.Errorf("lease = %+v", got)
		}
	})
}

// TestPlacesAreKept: a cache that lags behind what was just published moves no entry, and loses none.
func TestPlacesAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.lags = true
		l := r.loop()
		r.settle(t, l)
		r.free["a100"] = 1
		r.clock.Step(30 * time.Second)
		r.settle(t, l)
		if diff := cmp.Diff([]device.Unit{"a100-0", "a100-1"}, r.wanted.Units); diff != "" {
			t.Errorf("units (-want +got):\n%s", diff)
		}
	})
}

// TestNextTerm: a new leader goes on with the order that it finds, and with a fresh memory.
func TestNextTerm(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		idleUnit(t, r, l)
		r.clock.Step(time.Hour)
		r.settle(t, l)
		r.published.Units = []device.Unit{"a100-1", "a100-0"}
		next := r.loop()
		r.settle(t, next)
		if diff := cmp.Diff([]device.Unit{"a100-1", "a100-0"}, r.wanted.Units); diff != "" {
			t.Errorf("units (-want +got):\n%s", diff)
		}
		if r.leases["a100-0"].Phase != device.Attached {
			t.Error("the new leader has not seen the taint for long enough")
		}
	})
}

func TestCount(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		l.cfg.Settings.Adopt = true // only then it matters what is attached without a lease
		if r.counts != 1 || r.lists != 0 {
			t.Fatalf("%d counts at the start", r.counts)
		}
		r.settle(t, l)
		if r.counts != 2 || r.lists != 1 {
			t.Errorf("%d counts, %d lists, nothing else changed", r.counts, r.lists)
		}
		r.clock.Step(30 * time.Second)
		r.settle(t, l)
		if r.counts != 3 {
			t.Errorf("%d counts after 30 s", r.counts)
		}
		// What is leased changed: counted anew, but not more often than it may be.
		r.claims(attempt("c", "n1", "a100-0"))
		r.settle(t, l)
		r.change(attached)
		if wake := r.settle(t, l); r.counts != 3 || !wake.Equal(r.clock.Now().Add(time.Second)) {
			t.Errorf("%d counts, wake in %s", r.counts, wake.Sub(r.clock.Now()))
		}
		r.clock.Step(time.Second)
		r.settle(t, l)
		if r.counts != 4 || r.lists != 2 {
			t.Errorf("%d counts, %d lists after the pause", r.counts, r.lists)
		}
	})
}

// TestForeign: a device that nobody leased is taken in once this leader itself has seen it for long enough in
// every list; a list that fails begins that anew.
func TestForeign(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		l.cfg.Models = func() []pool.Model { return []pool.Model{{Name: "a100", FabricModel: "A100"}} }
		l.cfg.Settings.Adopt, l.cfg.Settings.AdoptAfter = true, 5*time.Minute
		stray := map[device.Machine][]device.OnFabric{"m-n1": {{ID: "d-9", Model: "A100", UUID: "GPU-9"}}, "m-n2": {}}
		pass := func(d time.Duration) {
			for range d / (30 * time.Second) {
				r.clock.Step(30 * time.Second)
				r.settle(t, l)
			}
		}
		r.attached = stray
		pass(5 * time.Minute)
		r.attached = map[device.Machine][]device.OnFabric{"m-n2": {}} // this machine could not be read
		pass(30 * time.Second)
		r.attached = stray
		pass(5 * time.Minute)
		r.expect(t, "not in every list for 5 minutes yet")
		pass(30 * time.Second)
		r.expect(t, "in every list for 5 minutes", "publish [a100-0 a100-1 a100-2]", "create a100-2 for  on n1", "publish [a100-0 a100-1 a100-2]")
		if got := r.leases["a100-2"]; got.Phase != device.Attaching || got.FabricDevice != "d-9" || got.Kept {
			t.Errorf("lease %+v", got)
		}
		pass(30 * time.Second)
		r.expect(t, "counted with its lease", "publish [a100-0 a100-1 a100-2]")
		pass(10 * time.Minute)
		r.expect(t, "it has its lease")
	})
}

// TestForget: an entry at the end of the pool goes when this leader itself has seen for long enough that it is
// of no use, and the cache that still shows it does not bring it back.
func TestForget(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		l.cfg.Settings.ForgetUnit = time.Hour
		r.free["a100"] = 1
		r.clock.Step(30 * time.Second)
		r.settle(t, l)
		r.expect(t, "one is gone", "publish [a100-0 a100-1]")
		r.clock.Step(59 * time.Minute)
		r.settle(t, l)
		next := r.loop() // another leader begins anew
		next.cfg.Settings.ForgetUnit = time.Hour
		r.settle(t, next)
		r.clock.Step(time.Minute)
		r.settle(t, next)
		r.expect(t, "another leader has not seen it for long")
		r.lags = true
		r.settle(t, l)
		r.expect(t, "gone for an hour", "publish [a100-0]")
		r.clock.Step(30 * time.Second)
		r.settle(t, l)
		r.expect(t, "the cache shows it still")
		r.show()
		r.free["a100"] = 2
		r.clock.Step(30 * time.Second)
		r.settle(t, l)
		r.expect(t, "it is back", "publish [a100-0 a100-1]")
	})
}

func TestCountThatHangsOrFails(t *testing.T) {
	inTerm(t, func(t *testing.T, r *rig, l *Loop) {
		t.Helper()
		r.hang = make(chan struct{})
		r.free["a100"] = 5
		r.clock.Step(30 * time.Second)
		l.Step(t.Context())
		r.clock.Step(30 * time.Second)
		l.Step(t.Context())
		synctest.Wait()
		if r.counts != 2 {
			t.Errorf("%d counts, one hangs", r.counts)
		}
		r.claims(attempt("c", "n1", "a100-0"))
		l.Step(t.Context())
		if len(r.leases) != 1 {
			t.Error("a count that hangs holds up claims")
		}
		r.free, r.freeErr = nil, errors.New("unreachable")
		close(r.hang)
		synctest.Wait()
		r.settle(t, l)
		r.clock.Step(30 * time.Second)
		r.hang = nil
		r.settle(t, l)
		if len(r.wanted.Units) < 2 {
			t.Errorf("units = %v after a failed count", r.wanted.Units)
		}
		for _, o := range r.wanted.OnCall[0] {
			if o.Name == "a100-1" && o.Effect != pool.NoTaint {
				t.Errorf("a failed count withdraws what is there: %+v", o)
			}
		}
	})
}

func TestRunEndsWithItsTerm(t *testing.T) {
	for _, tc := range []struct {
		name string
		when func(*rig)
	}{
		{"while it waits", func(*rig) {}},
		{"while a count hangs", func(r *rig) { r.hang = make(chan struct{}) }},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig()
			tc.when(r)
			l := r.loop()
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				l.Run(ctx)
			}()
			synctest.Wait()
			l.Poke()
			synctest.Wait()
			r.clock.Step(20 * time.Millisecond)
			synctest.Wait()
			cancel()
			<-ended
			synctest.Wait()
			n := len(r.said())
			if n == 0 {
				t.Errorf("%s: it never did anything", tc.name)
			}
			r.clock.Step(time.Hour)
			synctest.Wait()
			if after := r.said(); len(after) != 0 {
				t.Errorf("%s: after its term: %q", tc.name, after)
			}
		})
	}
}

// TestDebounce: the first change of a burst is acted upon at once, the others together.
func TestDebounce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		l := r.loop()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go l.Run(ctx)
		rest := func() {
			for range 5 {
				synctest.Wait()
				r.clock.Step(20 * time.Millisecond)
			}
			synctest.Wait()
		}
		rest()
		r.plans = nil
		var all []device.Attempt
		for i, name := range []string{"c", "d", "e"} {
			all = append(all, attempt(name, "n1", fmt.Sprint("a100-", i)))
			r.claims(all...)
			l.Poke()
			synctest.Wait()
		}
		rest()
		if len(r.plans) < 2 || len(r.plans[0].Ops) != 1 || len(r.plans[1].Ops) != 2 {
			t.Errorf("the first plan is not for the first claim, and the second for the two others: %+v", r.plans)
		}
	})
}

// TestLimits: what the manager lets a machine have is read once in a while, and stands where it cannot be read.
func TestLimits(t *testing.T) {
	r := newRig()
	r.limits = map[device.Machine]map[device.Model]pool.Limit{"m-n1": {"a100": {Max: 0}}, "m-n2": {"a100": {Max: pool.NoLimit}}}
	l := r.loop()
	l.cfg.Spawn, l.cfg.Limiter, l.cfg.LimitEvery = func(f func()) { f() }, r, 10*time.Minute
	attachable := func() map[string]bool {
		l.Step(t.Context())
		l.Step(t.Context())
		at := map[string]bool{}
		for _, n := range r.plans[len(r.plans)-1].Labels {
			at[n.Node] = n.Attachable["a100"]
		}
		return at
	}
	want := map[string]bool{"n1": false, "n2": true}
	if got := attachable(); !maps.Equal(got, want) {
		t.Errorf("attachable %v, want %v", got, want)
	}
	r.clock.Step(time.Minute)
	if attachable(); len(r.limited) != 2 {
		t.Errorf("asked for the limits of %v within a minute", r.limited)
	}
	r.limitErr = errors.New("the manager is down")
	r.clock.Step(10 * time.Minute)
	if got := attachable(); !maps.Equal(got, want) || len(r.limited) != 4 {
		t.Errorf("attachable %v, want %v as before; asked for %v", got, want, r.limited)
	}
}

// TestHint: what the manager hints at is asked for soon, and hints without end do not make it asked without end.
func TestHint(t *testing.T) {
	r := newRig()
	l := r.loop()
	l.cfg.Spawn = func(f func()) { f() }
	l.Step(t.Context())
	first := r.counts
	l.Hint()
	wake := l.Step(t.Context())
	if r.counts != first || wake.After(r.clock.Now().Add(l.cfg.CountPause)) || wake.IsZero() {
		t.Fatalf("counted %d times at once, next look at %s", r.counts-first, wake)
	}
	r.clock.SetTime(wake)
	for range 100 {
		l.Hint()
		l.Step(t.Context())
	}
	if r.counts != first+1 {
		t.Errorf("counted %d times within a moment of 100 hints, want once", r.counts-first)
	}
	r.clock.Step(l.cfg.CountPause)
	l.Step(t.Context())
	if r.counts != first+2 {
		t.Errorf("counted %d times, want a second time for what was hinted at during the first", r.counts-first)
	}
}
