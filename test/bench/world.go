// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Annotations of a device lease that are read here; they are not API.
const (
	annUnit = device.Driver + "/unit"
	annUUID = device.Driver + "/gpu-uuid"
)

// world is what the API server tells of Pods, claims, leases and the pool.
type world struct {
	changed chan struct{}
	stop    func()

	mu      sync.Mutex // guards the following
	pods    map[string]*corev1.Pod
	running map[string]time.Time // when a Pod was first told to run
	claims  map[string]*resourcev1.ResourceClaim
	leases  map[device.Unit]*coordinationv1.Lease
	slices  map[string]*resourcev1.ResourceSlice
}

// watchWorld watches until ctx ends or it is stopped. It returns when everything that is there has been told.
func watchWorld(ctx context.Context, cs kubernetes.Interface) (*world, error) {
	w := &world{
		changed: make(chan struct{}, 1), pods: map[string]*corev1.Pod{}, running: map[string]time.Time{},
		claims: map[string]*resourcev1.ResourceClaim{}, leases: map[device.Unit]*coordinationv1.Lease{}, slices: map[string]*resourcev1.ResourceSlice{},
	}
	ctx, cancel := context.WithCancel(ctx)
	all := informers.NewSharedInformerFactory(cs, 0)
	own := informers.NewSharedInformerFactoryWithOptions(cs, 0, informers.WithNamespace(namespace))
	leases := informers.NewSharedInformerFactoryWithOptions(cs, 0, informers.WithNamespace(device.LeaseNamespace))
	factories := []informers.SharedInformerFactory{all, own, leases}
	w.stop = func() {
		cancel()
		for _, f := range factories {
			f.Shutdown()
		}
	}
	for _, i := range []cache.SharedIndexInformer{
		own.Core().V1().Pods().Informer(), own.Resource().V1().ResourceClaims().Informer(),
		leases.Coordination().V1().Leases().Informer(), all.Resource().V1().ResourceSlices().Informer(),
	} {
		_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: w.told, UpdateFunc: func(_, obj any) { w.told(obj) }, DeleteFunc: w.gone,
		})
		if err != nil {
			cancel()
			return nil, fmt.Errorf("watch the cluster: %w", err)
		}
	}
	for _, f := range factories {
		f.Start(ctx.Done())
		for kind, ok := range f.WaitForCacheSync(ctx.Done()) {
			if !ok {
				w.stop()
				return nil, fmt.Errorf("watch the cluster: no list of %v: %w", kind, context.Cause(ctx))
			}
		}
	}
	return w, nil
}

// told takes an object in.
func (w *world) told(obj any) {
	w.mu.Lock()
	switch o := obj.(type) {
	case *corev1.Pod:
		w.pods[o.Name] = o
		if _, known := w.running[o.Name]; !known && o.Status.Phase == corev1.PodRunning {
			w.running[o.Name] = time.Now()
		}
	case *resourcev1.ResourceClaim:
		w.claims[o.Namespace+"/"+o.Name] = o
	case *coordinationv1.Lease:
		if u := device.Unit(o.Annotations[annUnit]); u != "" {
			w.leases[u] = o
		}
	case *resourcev1.ResourceSlice:
		if o.Spec.Driver == device.Driver {
			w.slices[o.Name] = o
		}
	}
	w.mu.Unlock()
	w.poke()
}

// gone forgets an object.
func (w *world) gone(obj any) {
	if late, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = late.Obj
	}
	w.mu.Lock()
	switch o := obj.(type) {
	case *corev1.Pod:
		delete(w.pods, o.Name)
	case *resourcev1.ResourceClaim:
		delete(w.claims, o.Namespace+"/"+o.Name)
	case *coordinationv1.Lease:
		delete(w.leases, device.Unit(o.Annotations[annUnit]))
	case *resourcev1.ResourceSlice:
		delete(w.slices, o.Name)
	}
	w.mu.Unlock()
	w.poke()
}

func (w *world) poke() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// wait asks done at every change until there is nothing more to wait for. Its error carries what done said last.
func (w *world) wait(ctx context.Context, limit time.Duration, done func() error) error {
	parent := ctx
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := done()
		var stop finalError
		if err == nil || errors.As(err, &stop) {
			return err
		}
		select {
		case <-w.changed:
		case <-ctx.Done():
			if parent.Err() != nil {
				return context.Cause(parent)
			}
			return fmt.Errorf("after %v: %w", limit, err)
		}
	}
}

// finalError ends a wait early: what was waited for cannot come any more.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// podsRun says which Pod does not run yet.
func (w *world) podsRun(names ...string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		switch pod := w.pods[name]; {
		case pod == nil:
			return fmt.Errorf("wait for Pod %s to run: it does not exist", name)
		case pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded:
			return finalError{fmt.Errorf("wait for Pod %s to run: it is %s: %s", name, pod.Status.Phase, pod.Status.Message)}
		case pod.Status.Phase != corev1.PodRunning:
			return fmt.Errorf("wait for Pod %s to run: it is %s", name, pod.Status.Phase)
		}
	}
	return nil
}

// claimOf is the claim that ends with the Pod, nil if there is none.
func (w *world) claimOf(pod string) *resourcev1.ResourceClaim {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.claims {
		for _, owner := range c.OwnerReferences {
			if owner.Kind == "Pod" && owner.Name == pod {
				return c
			}
		}
	}
	return nil
}

// claimAttached says what a claim still waits for.
func (w *world) claimAttached(name string) error {
	w.mu.Lock()
	c := w.claims[namespace+"/"+name]
	w.mu.Unlock()
	if c == nil {
		return fmt.Errorf("wait for claim %s to be attached: it does not exist", name)
	}
	return saysAttached(c)
}

func saysAttached(c *resourcev1.ResourceClaim) error {
	switch {
	case ours(c) == nil:
		return fmt.Errorf("wait for claim %s to be attached: it is not allocated", c.Name)
	case says(c, ours(c), device.ConditionAttachFailed):
		return finalError{fmt.Errorf("wait for claim %s to be attached: %s says %s", c.Name, ours(c).Device, device.ConditionAttachFailed)}
	case !says(c, ours(c), device.ConditionAttached):
		return fmt.Errorf("wait for claim %s to be attached: %s is not", c.Name, ours(c).Device)
	}
	return nil
}

// settled says what is left of Pods, claims and leases.
func (w *world) settled() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name := range w.pods {
		return fmt.Errorf("wait for the Pods to end: %s is there", name)
	}
	for name := range w.claims {
		return fmt.Errorf("wait for the claims to end: %s is there", name)
	}
	for u, l := range w.leases {
		return fmt.Errorf("wait for the GPUs to go back: the lease of %s is %s on %s", u, l.Labels[device.LabelPhase], l.Labels[device.LabelNode])
	}
	return nil
}

// leased says whether there are just so many device leases.
func (w *world) leased(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.leases) != n {
		return fmt.Errorf("wait for %d device leases: there are %d", n, len(w.leases))
	}
	return nil
}

// free are the units that nobody has and that can be attached now, by the pool's own word.
func (w *world) free() []device.Unit {
	w.mu.Lock()
	defer w.mu.Unlock()
	var units []device.Unit
	for _, s := range w.slices {
		for i := range s.Spec.Devices {
			if u, ready := device.UnitOfEntry(s.Spec.Devices[i].Name); !ready && len(s.Spec.Devices[i].Taints) == 0 && w.leases[u] == nil {
				units = append(units, u)
			}
		}
	}
	slices.Sort(units)
	return units
}

// uuidOf is the GPU that a unit has become.
func (w *world) uuidOf(u device.Unit) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := w.leases[u]; l != nil {
		return l.Annotations[annUUID]
	}
	return ""
}

// whenRunning is when the Pod was first told to run.
func (w *world) whenRunning(pod string) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.running[pod]
}
