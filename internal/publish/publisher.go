// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

const (
	// stepTimeout is how long the pool may take to show one changed slice before the next is sent anyway.
	stepTimeout = 5 * time.Second
	// callTimeout bounds a call to the API server, probePause the pause before a failed probe is repeated.
	callTimeout = 8 * time.Second
	probePause  = time.Second
)

// Options are what a Publisher needs.
type Options struct {
	Client kubernetes.Interface
	Fabric device.FabricID
	Clock  clock.WithTicker
	// Changed is called after the API server shows something new of the pool. It must not block.
	Changed func()
	// Dropped is called when the API server drops fields, with the feature gates that are off. Nothing is
	// to be had from the pool from then on, until a new Publisher is made.
	Dropped func(features []string)
}

// Publisher writes and watches one pool.
type Publisher struct {
	o        Options
	informer cache.SharedIndexInformer
	poked    chan struct{}
	seen     map[string]seenAs // used by Run's goroutine only

	mu sync.Mutex // guards the following
	// want is what Publish asked for, nil before that; sent is what the controller was last given.
	want, sent []resourceslice.Slice
	// offers are what Publish was last given, laid how they were laid out.
	offers pool.Offers
	laid   []resourceslice.Slice
	// use is what the API server lets us do with the pool.
	use use
}

// use is how much of what is asked for can be published.
type use string

const (
	useAll      use = ""         // every field is stored
	useWithdraw use = "withdraw" // entries stay listed, all tainted: a field is dropped that makes them work
	useNothing  use = "nothing"  // not even that is safe: taints are dropped, or entries would start Pods without their device
)

// fit cuts what is asked for to what can be published.
func (u use) fit(want []resourceslice.Slice) []resourceslice.Slice {
	switch u {
	case useWithdraw:
		return withdrawn(want)
	case useNothing:
		return []resourceslice.Slice{}
	case useAll:
	}
	return want
}

// New returns a Publisher; Run starts it.
func New(o Options) (*Publisher, error) {
	p := &Publisher{o: o, poked: make(chan struct{}, 1), seen: map[string]seenAs{}}
	p.informer = resourceinformers.NewFilteredResourceSliceInformer(o.Client, 0, cache.Indexers{}, func(l *metav1.ListOptions) {
		l.FieldSelector = fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, device.Driver).String()
	})
	tell := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		// The nodes' own pools are many and none of the leader's business.
		if s, ok := obj.(*resourceapi.ResourceSlice); ok && s.Spec.Pool.Name == o.Fabric.Pool() {
			p.poke()
			o.Changed()
		}
	}
	_, err := p.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: tell, UpdateFunc: func(_, now any) { tell(now) }, DeleteFunc: tell,
	})
	if err != nil {
		return nil, fmt.Errorf("watch the slices of pool %s: %w", o.Fabric.Pool(), err)
	}
	return p, nil
}

func (p *Publisher) poke() {
	select {
	case p.poked <- struct{}{}:
	default:
	}
}

// Publish asks for the pool to be as the offers say.
func (p *Publisher) Publish(_ context.Context, o pool.Offers) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.offers, p.laid = o, relayout(p.offers, p.laid, o)
	want := p.use.fit(p.laid)
	if p.want != nil && same(p.want, want) {
		return
	}
	p.want = want
	p.poke()
}

// Published returns what the API server shows; ok is false until that was read.
func (p *Publisher) Published() (shown pool.Published, ok bool) {
	if !p.informer.HasSynced() {
		return pool.Published{}, false
	}
	return Shown(p.shown()), true
}

// shown are the pool's slices by name, which begins with their index.
func (p *Publisher) shown() []*resourceapi.ResourceSlice {
	var all []*resourceapi.ResourceSlice
	for _, obj := range p.informer.GetStore().List() {
		if s, ok := obj.(*resourceapi.ResourceSlice); ok && s.Spec.Pool.Name == p.o.Fabric.Pool() && s.DeletionTimestamp == nil {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// Run publishes until ctx ends; ctx must end before leadership does.
func (p *Publisher) Run(ctx context.Context) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { p.informer.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), p.informer.HasSynced) {
		return nil // ctx ended
	}
	p.o.Changed()
	if !p.probe(ctx) {
		return nil
	}
	first, ok := p.first(ctx)
	if !ok {
		return nil
	}
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: device.Driver, KubeClient: p.o.Client, Resources: p.resources(first),
		ReconcilePoolWithName: p.o.Fabric.Pool(), ErrorHandler: p.failed,
	})
	if err != nil {
		return fmt.Errorf("publish pool %s: %w", p.o.Fabric.Pool(), err)
	}
	defer controller.Stop()
	for {
		p.waitShown(ctx)
		step, ok := p.next(ctx)
		if !ok {
			return nil
		}
		controller.Update(p.resources(step))
	}
}

func (p *Publisher) resources(s []resourceslice.Slice) *resourceslice.DriverResources {
	return &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{p.o.Fabric.Pool(): {AllNodes: allNodes(s), Slices: s}}}
}

// allNodes is for a pool without slices that choose their nodes per device; it must not be set beside them.
func allNodes(s []resourceslice.Slice) bool { return len(s) == 0 }

// first waits until the pool is asked for and returns what to start the controller with: what is shown
// already with one slice changed, or all at once where nothing, or nothing whole, is shown.
//
// The controller has to run even where nothing differs: it repairs what others do to the slices.
func (p *Publisher) first(ctx context.Context) (start []resourceslice.Slice, ok bool) {
	for {
		p.mu.Lock()
		if p.want != nil {
			start, _ = whole(p.shown())
			if step, differs := oneStep(start, p.want); differs {
				start = step
			}
			p.sent = start
			p.mu.Unlock()
			return start, true
		}
		p.mu.Unlock()
		if !p.wait(ctx) {
			return nil, false
		}
	}
}

// next waits until there is something to send and returns it: what was sent last, with one slice changed.
func (p *Publisher) next(ctx context.Context) (step []resourceslice.Slice, ok bool) {
	for {
		p.mu.Lock()
		p.sent, ok = oneStep(p.sent, p.want)
		step = p.sent
		p.mu.Unlock()
		if ok {
			return step, true
		}
		if !p.wait(ctx) {
			return nil, false
		}
	}
}

func (p *Publisher) wait(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-p.poked:
		return true
	}
}

// oneStep returns from with its first differing slice as in to; all of to where the number differs. ok is
// false if there is no difference.
func oneStep(from, to []resourceslice.Slice) (step []resourceslice.Slice, ok bool) {
	if len(from) != len(to) {
		return to, true
	}
	step = slices.Clone(from)
	for i := range to {
		same := identical(&from[i], &to[i]) || apiequality.Semantic.DeepEqual(from[i], to[i])
		step[i] = to[i] // where they are the same, too, so that this is seen at a glance the next time
		if !same {
			return step, true
		}
	}
	return step, false
}

// identical: they are the very same in memory, and nobody changes a slice once it is laid out.
func identical(a, b *resourceslice.Slice) bool {
	return sameArray(a.Devices, b.Devices) && sameArray(a.SharedCounters, b.SharedCounters)
}

func sameArray[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

func same(a, b []resourceslice.Slice) bool {
	_, differs := oneStep(a, b)
	return !differs
}

// waitShown returns when the API server shows what was sent, or after a while.
func (p *Publisher) waitShown(ctx context.Context) {
	timer := p.o.Clock.NewTimer(stepTimeout)
	defer timer.Stop()
	for !p.isShown() {
		select {
		case <-ctx.Done():
			return
		case <-timer.C():
			klog.FromContext(ctx).V(2).Info("The pool does not show the last change yet", "pool", p.o.Fabric.Pool())
			return
		case <-p.poked:
		}
	}
	p.poke() // what else was asked for meanwhile
}

func (p *Publisher) isShown() bool {
	p.mu.Lock()
	sent := p.sent
	p.mu.Unlock()
	shown := p.shown()
	if len(shown) != len(sent) {
		return false
	}
	for i, s := range shown {
		if int(s.Spec.Pool.ResourceSliceCount) != len(sent) || !p.shows(s, &sent[i]) {
			return false
		}
	}
	return true
}

// seenAs is a slice of the API server that was found to be one that was sent.
type seenAs struct {
	shown *resourceapi.ResourceSlice
	sent  resourceslice.Slice
}

// shows tells whether a slice is shown as it was sent. What was compared once is not compared again.
func (p *Publisher) shows(s *resourceapi.ResourceSlice, sent *resourceslice.Slice) bool {
	if known, ok := p.seen[s.Name]; ok && known.shown == s && identical(&known.sent, sent) {
		return true
	}
	if !resourceslice.DevicesDeepEqual(s.Spec.Devices, sent.Devices) {
		return false
	}
	p.seen[s.Name] = seenAs{s, *sent}
	return true
}

// failed hears of every problem of the controller, which tries again by itself.
func (p *Publisher) failed(ctx context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	if !errors.As(err, &dropped) {
		if ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "The pool is not published as wanted; trying again", "pool", p.o.Fabric.Pool(), "what", msg)
		}
		return
	}
	p.limit(dropped.DisabledFeatures(), false)
}

// limit takes the pool back as far as the dropped fields demand. Where nothing is published yet, nothing
// ever is; entries that claims may name already stay listed while that is safe.
func (p *Publisher) limit(features []string, nothingYet bool) {
	if len(features) == 0 {
		features = []string{"unknown"}
	}
	u := useWithdraw
	if nothingYet || slices.Contains(features, gateTaints) || slices.Contains(features, gateBinding) {
		u = useNothing
	}
	p.mu.Lock()
	first := p.use == useAll
	if p.use != useNothing {
		p.use = u
	}
	if p.want != nil {
		p.want = p.use.fit(p.want)
	}
	p.mu.Unlock()
	p.poke()
	if first {
		p.o.Dropped(features)
	}
}
