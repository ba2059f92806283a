// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// turnRenew is how often who has the turn says that it is still there, turnExpiry how long it may say nothing before
	// the first in the line takes over, and the second after as long again.
	turnRenew  = 15 * time.Second
	turnExpiry = 45 * time.Second
	// turnTimeout bounds one call; turnPause is the pause after one that failed, or lost a race.
	turnTimeout = 5 * time.Second
	turnPause   = 200 * time.Millisecond

	// annQueue lists the nodes that wait, the first in the line first.
	annQueue = device.Driver + "/queue"
	// mostWaiting bounds the line.
	mostWaiting = 10000
)

// TurnOptions are what a Turn needs.
type TurnOptions struct {
	Client kubernetes.Interface
	Clock  clock.WithTicker
	// Name is the Lease's, the same for all who share the manager.
	Name string
	Node string
	// Changed is called when the turn came, or was lost, or somebody before us has had theirs. It must not block.
	Changed func()
}

// Turn is the right to have a manager change something that does one thing at a time, for all nodes: they take it one
// after the other, in the order in which they asked. It is for fairness, not for safety: the manager refuses a second
// call by itself.
type Turn struct {
	o        TurnOptions
	client   coordinationv1client.LeaseInterface
	informer cache.SharedIndexInformer
	poked    chan struct{}

	mu   sync.Mutex // guards the following
	want bool
	seen line
	// since is when this process first saw the line so.
	since time.Time
}

// line is who has the turn and who waits for it.
type line struct {
	holder string
	queue  []string
	// renewed is the holder's word that it is there; only that it changes counts.
	renewed time.Time
	// version is the object's, empty if there is none.
	version string
}

// next is the line as a node makes it that wants its turn or does not; unchanged is how long it has been as it is, by
// the node's own clock.
func (l line) next(node string, want bool, unchanged time.Duration) line {
	at := slices.Index(l.queue, node)
	switch {
	case !want && l.holder == node: // the first in the line is next
		l.holder = ""
		if len(l.queue) > 0 {
			l.holder, l.queue = l.queue[0], l.queue[1:]
		}
		return l
	case !want && at >= 0:
		l.queue = slices.Delete(slices.Clone(l.queue), at, at+1)
		return l
	case !want || l.holder == node:
		return l
	}
	before := at
	if at < 0 {
		before = len(l.queue)
	}
	switch {
	case l.holder == "" && before == 0, unchanged >= turnExpiry*time.Duration(before+1): // who is before us is gone
		l.holder, l.queue = node, l.queue[min(before+1, len(l.queue)):]
	case at < 0 && len(l.queue) < mostWaiting:
		l.queue = append(slices.Clone(l.queue), node)
	}
	return l
}

func (l line) same(other line) bool {
	return l.holder == other.holder && slices.Equal(l.queue, other.queue)
}

// NewTurn returns a Turn; Run starts it.
func NewTurn(o TurnOptions) (*Turn, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(o.Client, 0,
		informers.WithNamespace(device.LeaseNamespace),
		informers.WithTransform(dropManagedFields),
		informers.WithTweakListOptions(func(lo *metav1.ListOptions) {
			lo.FieldSelector = fields.OneTermEqualSelector("metadata.name", o.Name).String()
		}))
	t := &Turn{
		o: o, client: o.Client.CoordinationV1().Leases(device.LeaseNamespace),
		informer: factory.Coordination().V1().Leases().Informer(), poked: make(chan struct{}, 1), since: o.Clock.Now(),
	}
	_, err := t.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    t.observe,
		UpdateFunc: func(_, now any) { t.observe(now) },
		DeleteFunc: func(any) { t.observe(nil) },
	})
	if err != nil {
		return nil, fmt.Errorf("watch the turn %s: %w", o.Name, err)
	}
	return t, nil
}

// Want says whether this node has something for the manager to change. It never blocks.
func (t *Turn) Want(want bool) {
	t.mu.Lock()
	changed := t.want != want
	t.want = want
	t.mu.Unlock()
	if changed {
		t.poke()
	}
}

// Before tells how many are before this node; mine is that it is its turn.
func (t *Turn) Before() (before int, mine bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.seen.holder == t.o.Node {
		return 0, true
	}
	before = len(t.seen.queue)
	if at := slices.Index(t.seen.queue, t.o.Node); at >= 0 {
		before = at
	}
	if t.seen.holder != "" {
		before++
	}
	return before, false
}

func (t *Turn) poke() {
	select {
	case t.poked <- struct{}{}:
	default:
	}
}

func (t *Turn) observe(obj any) {
	l, is := obj.(*coordinationv1.Lease)
	if !is {
		l = nil // it is gone
	}
	t.saw(lineOf(l))
}

// saw takes what the API server shows.
func (t *Turn) saw(l line) {
	t.mu.Lock()
	changed := !t.seen.same(l)
	if changed || !t.seen.renewed.Equal(l.renewed) {
		t.since = t.o.Clock.Now()
	}
	t.seen = l
	t.mu.Unlock()
	t.poke()
	if changed {
		t.o.Changed()
	}
}

// lineOf reads the Lease; what cannot be read is a line without anybody in it.
func lineOf(l *coordinationv1.Lease) line {
	if l == nil {
		return line{}
	}
	out := line{holder: ptr.Deref(l.Spec.HolderIdentity, ""), renewed: fromMicroTime(l.Spec.RenewTime), version: l.ResourceVersion}
	if err := json.Unmarshal([]byte(l.Annotations[annQueue]), &out.queue); err != nil || len(out.queue) > mostWaiting {
		out.queue = nil
	}
	return out
}

// Run takes part until ctx ends, and then leaves the line.
func (t *Turn) Run(ctx context.Context) {
	var watching sync.WaitGroup
	defer watching.Wait()
	defer t.leave(context.WithoutCancel(ctx))
	watching.Go(func() { t.informer.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), t.informer.HasSynced) {
		return
	}
	for ctx.Err() == nil {
		pause, err := t.step(ctx)
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("The turn at the fabric manager is tried again", "lease", t.o.Name, "err", err)
			pause = wait.Jitter(turnPause, 4)
		}
		timer := t.o.Clock.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-t.poked:
			if err != nil { // the race was lost: the others first
				select {
				case <-ctx.Done():
				case <-timer.C():
				}
			}
		case <-timer.C():
		}
		timer.Stop()
	}
}

// step brings the line to what is wanted, once, and tells when to look again though nothing changed.
func (t *Turn) step(ctx context.Context) (time.Duration, error) {
	t.mu.Lock()
	now, want, seen, since := t.o.Clock.Now(), t.want, t.seen, t.since
	t.mu.Unlock()
	next := seen.next(t.o.Node, want, now.Sub(since))
	renew := want && seen.holder == t.o.Node && now.Sub(since) >= turnRenew
	switch {
	case !next.same(seen), renew:
		return turnRenew, t.write(ctx, next)
	case !want:
		return time.Hour, nil // nothing ends by itself
	case seen.holder == t.o.Node:
		return since.Add(turnRenew).Sub(now), nil
	}
	at := max(slices.Index(seen.queue, t.o.Node), 0)
	return max(since.Add(turnExpiry*time.Duration(at+1)).Sub(now), turnPause), nil
}

// write stores the line, if it is still as it was seen.
func (t *Turn) write(ctx context.Context, l line) error {
	queue, err := json.Marshal(l.queue)
	if err != nil {
		return fmt.Errorf("write turn %s: %w", t.o.Name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	obj := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: t.o.Name, Namespace: device.LeaseNamespace, ResourceVersion: l.version},
	}
	if l.version != "" {
		if obj, err = t.client.Get(ctx, t.o.Name, metav1.GetOptions{}); err != nil {
			return fmt.Errorf("read turn %s: %w", t.o.Name, err)
		}
		if now := lineOf(obj); now.version != l.version {
			t.saw(now) // the cache may show it later
			return fmt.Errorf("write turn %s: %w", t.o.Name, ErrConflict)
		}
	}
	if obj.Annotations == nil {
		obj.Annotations = map[string]string{}
	}
	if obj.Labels == nil {
		obj.Labels = map[string]string{}
	}
	obj.Labels[device.LabelTurn] = t.o.Name
	obj.Annotations[annQueue] = string(queue)
	obj.Spec.HolderIdentity, obj.Spec.RenewTime = new(l.holder), microTime(t.o.Clock.Now())
	var stored *coordinationv1.Lease
	if l.version == "" {
		stored, err = t.client.Create(ctx, obj, metav1.CreateOptions{})
	} else {
		stored, err = t.client.Update(ctx, obj, metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return fmt.Errorf("write turn %s: %w", t.o.Name, ErrConflict)
	case err != nil:
		return fmt.Errorf("write turn %s: %w", t.o.Name, err)
	}
	t.saw(lineOf(stored))
	return nil
}

// leave gives the turn, or the place in the line, to the others.
func (t *Turn) leave(ctx context.Context) {
	t.mu.Lock()
	t.want = false
	t.mu.Unlock()
	for range 3 {
		if _, err := t.step(ctx); !errors.Is(err, ErrConflict) {
			return
		}
	}
}
