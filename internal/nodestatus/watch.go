// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coreinformers "k8s.io/client-go/informers/core/v1"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Watch follows this agent's own Node and what others publish for it, and nothing of other nodes.
type Watch struct {
	name   string
	nodes  cache.SharedIndexInformer
	slices cache.SharedIndexInformer
	lister corelisters.NodeLister

	mu      sync.Mutex // guards what follows
	changed []func()
}

// NewWatch returns a Watch for the Node called name. It sees nothing until Run.
func NewWatch(client kubernetes.Interface, name string) *Watch {
	only := func(field string) func(*metav1.ListOptions) {
		return func(o *metav1.ListOptions) { o.FieldSelector = fields.OneTermEqualSelector(field, name).String() }
	}
	nodes := coreinformers.NewFilteredNodeInformer(client, 0, cache.Indexers{}, only(metav1.ObjectNameField))
	return &Watch{
		name:   name,
		nodes:  nodes,
		slices: resourceinformers.NewFilteredResourceSliceInformer(client, 0, cache.Indexers{}, only(resourcev1.ResourceSliceSelectorNodeName)),
		lister: corelisters.NewNodeLister(nodes.GetIndexer()),
	}
}

// OnChange adds a function to be called when the Node or a slice for it has changed. It must not block.
func (w *Watch) OnChange(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changed = append(w.changed, f)
}

func (w *Watch) tell() {
	w.mu.Lock()
	all := slices.Clone(w.changed)
	w.mu.Unlock()
	for _, f := range all {
		f()
	}
}

// Run watches until ctx ends.
func (w *Watch) Run(ctx context.Context) error {
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { w.tell() },
		UpdateFunc: func(any, any) { w.tell() },
		DeleteFunc: func(any) { w.tell() },
	}
	for _, informer := range []cache.SharedIndexInformer{w.nodes, w.slices} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return fmt.Errorf("watch Node %s: %w", w.name, err)
		}
	}
	var running sync.WaitGroup
	defer running.Wait()
	for _, informer := range []cache.SharedIndexInformer{w.nodes, w.slices} {
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	<-ctx.Done()
	return nil
}

// errNotRead: the watch has not shown everything yet.
var errNotRead = errors.New("not read from the API server yet")

// WaitForSync blocks until Node and slices were read once, or ctx ends.
func (w *Watch) WaitForSync(ctx context.Context) error {
	if !cache.WaitForCacheSync(ctx.Done(), w.nodes.HasSynced, w.slices.HasSynced) {
		return fmt.Errorf("Node %s: %w: %w", w.name, errNotRead, context.Cause(ctx))
	}
	return nil
}

// Node returns the Node as last seen. Only the watched Node is known.
func (w *Watch) Node(name string) (*corev1.Node, error) { return w.lister.Get(name) }

// HasPool tells whether our driver publishes a pool of that name for this node, as last seen.
func (w *Watch) HasPool(pool string) bool {
	return slices.ContainsFunc(w.slices.GetStore().List(), func(o any) bool {
		s, ok := o.(*resourcev1.ResourceSlice)
		return ok && s.Spec.Driver == device.Driver && s.Spec.Pool.Name == pool
	})
}

// Conflicts returns who else advertises this node's GPUs, as last seen. Before everything was read it
// returns an error: nobody seen is not nobody there.
func (w *Watch) Conflicts(gpus []device.PCIAddress, tolerated []string) ([]Advertiser, error) {
	if !w.nodes.HasSynced() || !w.slices.HasSynced() {
		return nil, fmt.Errorf("look for others who advertise GPUs of %s: %w", w.name, errNotRead)
	}
	node, err := w.lister.Get(w.name)
	if err != nil {
		return nil, fmt.Errorf("look for others who advertise GPUs of %s: %w", w.name, err)
	}
	var all []*resourcev1.ResourceSlice
	for _, o := range w.slices.GetStore().List() {
		if s, ok := o.(*resourcev1.ResourceSlice); ok {
			all = append(all, s)
		}
	}
	return Conflicts(node, all, gpus, tolerated), nil
}
