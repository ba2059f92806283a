// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Times of the election. A leader that cannot renew stops after renewDeadline, and nobody takes over
// before leaseDuration: the 10 s between them are the margin for a slow API server and a slow stop.
const (
	leaseDuration = 30 * time.Second
	renewDeadline = 20 * time.Second
	renewPeriod   = 10 * time.Second
	// renewRetry is the pause after a renewal that failed; the period alone would leave one try.
	renewRetry = 2 * time.Second
	// renewTimeout bounds one call to renew, so that one that hangs leaves time for another.
	renewTimeout = 5 * time.Second
	// spreadFree and spreadExpired are over how long the candidates of a large cluster spread their
	// run for a lease that was given up or has run out. The first to run wins, and the others see that.
	spreadFree    = time.Second
	spreadExpired = 5 * time.Second
	// campaignPause is the least time between two runs; it doubles, up to campaignPauseMost, while the API
	// server does not answer.
	campaignPause     = 2 * time.Second
	campaignPauseMost = 10 * time.Second
)

// ErrNotLeader is why a call that only the leader may make must not be made.
var ErrNotLeader = errors.New("this agent does not lead the fabric")

// ElectionOptions are what an Election needs.
type ElectionOptions struct {
	Client kubernetes.Interface
	Clock  clock.WithTicker
	Fabric device.FabricID
	// Node and PodUID make the identity. With the node's name alone, the old and the new agent of a
	// rolling update would both think they lead.
	Node, PodUID string
}

// Election elects one leader among the agents of a fabric.
type Election struct {
	client   coordinationv1client.LeaseInterface
	clock    clock.WithTicker
	fabric   device.FabricID
	name     string
	identity string
	informer cache.SharedIndexInformer
	changed  chan struct{}

	mu sync.Mutex // guards the following
	// seen is the election Lease's content as this process saw it last, nil if there is none, and
	// seenAt when it saw that content first.
	seen   *coordinationv1.LeaseSpec
	seenAt time.Time
	// term is the run that is under way, nil while this agent only watches.
	term *term
}

// NewElection makes an election; nothing is sent before Run.
func NewElection(o ElectionOptions) (*Election, error) {
	name := o.Fabric.ElectionLease()
	factory := informers.NewSharedInformerFactoryWithOptions(o.Client, 0,
		informers.WithNamespace(device.LeaseNamespace),
		informers.WithTransform(dropManagedFields),
		informers.WithTweakListOptions(func(lo *metav1.ListOptions) {
			lo.FieldSelector = fields.OneTermEqualSelector("metadata.name", name).String()
		}))
	e := &Election{
		client:   o.Client.CoordinationV1().Leases(device.LeaseNamespace),
		clock:    o.Clock,
		fabric:   o.Fabric,
		name:     name,
		identity: o.Node + "/" + o.PodUID,
		informer: factory.Coordination().V1().Leases().Informer(),
		changed:  make(chan struct{}, 1),
	}
	_, err := e.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    e.observeObject,
		UpdateFunc: func(_, obj any) { e.observeObject(obj) },
		DeleteFunc: func(any) { e.observe(nil) },
	})
	if err != nil {
		return nil, fmt.Errorf("watch the election of fabric %s: %w", o.Fabric, err)
	}
	return e, nil
}

// Run watches the election Lease, runs for it when it looks free, and calls lead for each term that
// this agent wins. It returns when ctx has ended and lead has returned.
//
// The context of lead ends before another agent may take over, and lead must then return at once: the
// Lease is given up, and another term begins, only after it has. Run may be called once.
func (e *Election) Run(ctx context.Context, lead func(ctx context.Context)) {
	var informer sync.WaitGroup
	defer informer.Wait()
	informer.Go(func() { e.informer.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), e.informer.HasSynced) {
		return
	}
	pause := campaignPause
	for e.waitFree(ctx) {
		if answered := e.campaign(ctx, lead); answered {
			pause = campaignPause
		}
		if !e.sleep(ctx, wait.Jitter(pause, 0.5)) {
			return
		}
		pause = min(2*pause, campaignPauseMost)
	}
}

// Leader returns the identity that holds the election, as far as this agent has seen; empty if nobody.
func (e *Election) Leader() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.seen == nil {
		return ""
	}
	return ptr.Deref(e.seen.HolderIdentity, "")
}

// StillLeads asks the API server whether this agent leads now. It goes before each call that cannot be
// taken back: a process that was stopped for a while does not know that its term is over. An error that
// is not ErrNotLeader means that nobody knows; the call must not be made then either.
func (e *Election) StillLeads(ctx context.Context) error {
	e.mu.Lock()
	t := e.term
	e.mu.Unlock()
	if t == nil || !t.current() {
		return fmt.Errorf("check the election of fabric %s: %w", e.fabric, ErrNotLeader)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	obj, err := e.client.Get(ctx, e.name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("check the election of fabric %s: %w", e.fabric, err)
	}
	if holder := ptr.Deref(obj.Spec.HolderIdentity, ""); holder != e.identity {
		return fmt.Errorf("check the election of fabric %s: held by %q: %w", e.fabric, holder, ErrNotLeader)
	}
	// The answer may have come after the time in which it was worth something.
	if !t.current() {
		return fmt.Errorf("check the election of fabric %s: not renewed in time: %w", e.fabric, ErrNotLeader)
	}
	return nil
}

func (e *Election) observeObject(obj any) {
	if l, ok := obj.(*coordinationv1.Lease); ok {
		e.observe(&l.Spec)
	}
}

// observe notes the Lease's content. Only a change of it counts as a sign of life, and only the time at
// which this process saw it: the times in it are another machine's.
func (e *Election) observe(spec *coordinationv1.LeaseSpec) {
	e.mu.Lock()
	if !equality.Semantic.DeepEqual(e.seen, spec) {
		e.seen, e.seenAt = spec.DeepCopy(), e.clock.Now()
	}
	e.mu.Unlock()
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

// expired tells whether the content has stood unchanged for as long as it is valid.
func (e *Election) expired(spec *coordinationv1.LeaseSpec) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.seen != nil && equality.Semantic.DeepEqual(e.seen, spec) && !e.clock.Now().Before(e.seenAt.Add(validity(spec)))
}

func validity(spec *coordinationv1.LeaseSpec) time.Duration {
	if s := ptr.Deref(spec.LeaseDurationSeconds, 0); s > 0 {
		return time.Duration(s) * time.Second
	}
	return leaseDuration
}

// vacancy returns how long it is until the Lease looks free, and over how long to spread the run then.
func (e *Election) vacancy() (in, spread time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.seen == nil {
		return 0, spreadFree
	}
	switch ptr.Deref(e.seen.HolderIdentity, "") {
	case "":
		return 0, spreadFree
	case e.identity: // this Pod's container was restarted
		return 0, 0
	}
	return e.seenAt.Add(validity(e.seen)).Sub(e.clock.Now()), spreadExpired
}

// waitFree blocks until the Lease looks free and has looked so for this candidate's share of the
// spread; false is the end of ctx.
func (e *Election) waitFree(ctx context.Context) bool {
	for ctx.Err() == nil {
		in, spread := e.vacancy()
		if in > 0 {
			e.sleepUnlessChanged(ctx, in)
			continue
		}
		if spread > 0 && !e.sleep(ctx, wait.Jitter(spread, 1)-spread) {
			return false
		}
		if in, _ = e.vacancy(); in <= 0 {
			return true
		}
	}
	return false
}

func (e *Election) sleepUnlessChanged(ctx context.Context, d time.Duration) {
	timer := e.clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-e.changed:
	case <-timer.C():
	}
}

func (e *Election) sleep(ctx context.Context, d time.Duration) bool {
	timer := e.clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C():
		return true
	}
}

// campaign runs for the Lease once and, if this agent wins, leads until the term ends. It tells whether
// the API server answered.
func (e *Election) campaign(ctx context.Context, lead func(ctx context.Context)) (answered bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t := &term{election: e, end: cancel, done: make(chan struct{})}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:            t,
		LeaseDuration:   leaseDuration,
		RenewDeadline:   renewDeadline,
		RetryPeriod:     renewPeriod,
		ReleaseOnCancel: true,
		Name:            e.name,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { t.lead(ctx, lead) },
			OnStoppedLeading: func() {},
		},
	})
	if err != nil { // the times above are checked there, nothing else can be wrong
		panic(fmt.Sprintf("run for election %s: %v", e.name, err))
	}
	e.setTerm(t)
	defer e.setTerm(nil)
	elector.Run(ctx)
	if t.won() {
		<-t.done
	}
	return t.getObj() != nil
}

func (e *Election) setTerm(t *term) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.term = t
}
