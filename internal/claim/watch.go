// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// Watch holds what all claims demand of one fabric's pool. The leader alone needs one.
type Watch struct {
	*Claims
	informer cache.SharedIndexInformer
	handler  cache.ResourceEventHandlerRegistration
	fabric   device.FabricID
	changed  func(claim string)

	mu     sync.Mutex // guards byName
	byName map[string]entry
}

// entry is what one claim demands.
type entry struct {
	demands []pool.Demand
	bad     []*ReadError
	// onlookers wait for a device that nobody attaches.
	onlookers []Onlooker
}

// NewWatch makes a Watch; nothing is sent before Run. Changed is called, from one goroutine, with
// namespace/name after what a claim demands may have changed. It must not block.
func NewWatch(fabric device.FabricID, o Options, changed func(claim string)) (*Watch, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(o.Client, 0, informers.WithTransform(slim))
	w := &Watch{
		Claims:   New(o),
		informer: factory.Resource().V1().ResourceClaims().Informer(),
		fabric:   fabric,
		changed:  changed,
		byName:   map[string]entry{},
	}
	handler, err := w.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    w.seen,
		UpdateFunc: func(_, obj any) { w.seen(obj) },
		DeleteFunc: w.gone,
	})
	if err != nil {
		return nil, fmt.Errorf("watch the claims on pool %s: %w", fabric.Pool(), err)
	}
	w.handler = handler
	return w, nil
}

// slim drops what nobody here reads: the leader holds every claim of the cluster.
func slim(obj any) (any, error) {
	if c, ok := obj.(*resourcev1.ResourceClaim); ok {
		c.ManagedFields = nil
		c.Annotations = nil
		c.Spec = resourcev1.ResourceClaimSpec{}
		if c.Status.Allocation != nil {
			c.Status.Allocation.Devices.Config = nil
		}
	}
	return obj, nil
}

// Run keeps the demands current until ctx ends. It may be called once.
func (w *Watch) Run(ctx context.Context) { w.informer.RunWithContext(ctx) }

// HasSynced tells whether Demands shows at least what there was when Run began.
func (w *Watch) HasSynced() bool { return w.handler.HasSynced() }

// Demands returns what the claims demand of the pool, by claim.
func (w *Watch) Demands() []pool.Demand {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []pool.Demand
	for _, e := range w.byName {
		all = append(all, e.demands...)
	}
	slices.SortFunc(all, func(a, b pool.Demand) int {
		return cmp.Or(
			cmp.Compare(a.Attempt.Namespace, b.Attempt.Namespace),
			cmp.Compare(a.Attempt.Name, b.Attempt.Name),
			cmp.Compare(a.Attempt.Entry, b.Attempt.Entry))
	})
	return all
}

// Unreadable returns the allocations from the pool that Demands leaves out.
func (w *Watch) Unreadable() []*ReadError {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []*ReadError
	for _, e := range w.byName {
		all = append(all, e.bad...)
	}
	slices.SortFunc(all, func(a, b *ReadError) int {
		return cmp.Or(cmp.Compare(a.Claim, b.Claim), cmp.Compare(a.Entry, b.Entry))
	})
	return all
}

// Onlookers returns the claims with admin access that wait in vain for a device of the pool.
func (w *Watch) Onlookers() []Onlooker {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []Onlooker
	for _, e := range w.byName {
		all = append(all, e.onlookers...)
	}
	slices.SortFunc(all, func(a, b Onlooker) int { return cmp.Compare(a.Attempt.String(), b.Attempt.String()) })
	return all
}

func (w *Watch) seen(obj any) {
	c, ok := obj.(*resourcev1.ResourceClaim)
	if !ok {
		return
	}
	ds, bad := Demands(w.fabric, c)
	w.put(c.Namespace+"/"+c.Name, entry{demands: ds, bad: bad, onlookers: onlookers(w.fabric, c)})
}

func (w *Watch) gone(obj any) {
	name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj)
	if err != nil {
		return // not an object: nothing can have been stored for it
	}
	w.put(name, entry{})
}

// put stores what a claim demands. A claim of another driver, before and after, is nobody's news.
func (w *Watch) put(name string, e entry) {
	w.mu.Lock()
	_, had := w.byName[name]
	has := len(e.demands)+len(e.bad)+len(e.onlookers) > 0
	if has {
		w.byName[name] = e
	} else {
		delete(w.byName, name)
	}
	w.mu.Unlock()
	if had || has {
		w.changed(name)
	}
}
