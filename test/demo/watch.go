// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Annotations of a device lease that the demonstration shows; they are not API.
const (
	annUnit      = device.Driver + "/unit"
	annAttempt   = device.Driver + "/attempt"
	annIdleSince = device.Driver + "/idle-since"
	annUUID      = device.Driver + "/gpu-uuid"
)

// world is what the API server has told.
type world struct {
	// changed is poked after each change.
	changed chan struct{}
	// stop ends the watch and waits for it.
	stop func()

	mu     sync.Mutex // guards the rest
	pods   map[string]*corev1.Pod
	claims map[types.UID]*resourcev1.ResourceClaim
	leases map[device.Unit]*coordinationv1.Lease
	slices map[string]*resourcev1.ResourceSlice
	nodes  map[string]*corev1.Node
	// steps is when this Pod first had come that far, by Pod.
	steps map[string]map[step]time.Time
}

// step is how far a Pod has come.
type step string

// The steps that the API server tells of.
const (
	created   step = "created"
	allocated step = "allocated"
	assigned  step = "assigned"
	attached  step = "attached"
	bound     step = "bound"
	running   step = "running"
)

func newWorld() *world {
	return &world{
		changed: make(chan struct{}, 1), stop: func() {},
		pods: map[string]*corev1.Pod{}, claims: map[types.UID]*resourcev1.ResourceClaim{},
		leases: map[device.Unit]*coordinationv1.Lease{}, slices: map[string]*resourcev1.ResourceSlice{},
		nodes: map[string]*corev1.Node{}, steps: map[string]map[step]time.Time{},
	}
}

// watchWorld watches until ctx ends or the watch is stopped. It returns when everything that is there has been
// told.
func watchWorld(ctx context.Context, cs kubernetes.Interface) (*world, error) {
	w := newWorld()
	ctx, cancel := context.WithCancel(ctx)
	all := informers.NewSharedInformerFactory(cs, 0)
	demo := informers.NewSharedInformerFactoryWithOptions(cs, 0, informers.WithNamespace(namespace))
	leases := informers.NewSharedInformerFactoryWithOptions(cs, 0, informers.WithNamespace(device.LeaseNamespace))
	for _, i := range []cache.SharedIndexInformer{
		demo.Core().V1().Pods().Informer(), demo.Resource().V1().ResourceClaims().Informer(), leases.Coordination().V1().Leases().Informer(),
		all.Resource().V1().ResourceSlices().Informer(), all.Core().V1().Nodes().Informer(),
	} {
		_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(obj any) { w.told(obj, time.Now()) },
			UpdateFunc: func(_, obj any) { w.told(obj, time.Now()) },
			DeleteFunc: w.gone,
		})
		if err != nil {
			cancel()
			return nil, fmt.Errorf("watch the cluster: %w", err)
		}
	}
	w.stop = func() {
		cancel()
		for _, f := range []informers.SharedInformerFactory{all, demo, leases} {
			f.Shutdown()
		}
	}
	for _, f := range []informers.SharedInformerFactory{all, demo, leases} {
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
func (w *world) told(obj any, now time.Time) {
	w.mu.Lock()
	switch o := obj.(type) {
	case *corev1.Pod:
		w.pods[o.Name] = o
	case *resourcev1.ResourceClaim:
		w.claims[o.UID] = o
	case *coordinationv1.Lease:
		if u := device.Unit(o.Annotations[annUnit]); u != "" {
			w.leases[u] = o
		}
	case *resourcev1.ResourceSlice:
		if o.Spec.Driver == device.Driver {
			w.slices[o.Name] = o
		}
	case *corev1.Node:
		w.nodes[o.Name] = o
	}
	w.mark(now)
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
		delete(w.steps, o.Name)
	case *resourcev1.ResourceClaim:
		delete(w.claims, o.UID)
	case *coordinationv1.Lease:
		delete(w.leases, device.Unit(o.Annotations[annUnit]))
	case *resourcev1.ResourceSlice:
		delete(w.slices, o.Name)
	case *corev1.Node:
		delete(w.nodes, o.Name)
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

// mark notes which steps have been taken by now. Only the first time counts.
func (w *world) mark(now time.Time) {
	for name, pod := range w.pods {
		seen := w.steps[name]
		if seen == nil {
			seen = map[step]time.Time{}
			w.steps[name] = seen
		}
		claims := w.claimsOf(pod)
		for s, is := range map[step]bool{
			created:   true,
			allocated: every(claims, func(c *resourcev1.ResourceClaim) bool { return c.Status.Allocation != nil }),
			assigned:  every(claims, w.leased),
			attached:  every(claims, saysAttached),
			bound:     pod.Spec.NodeName != "",
			running:   pod.Status.Phase == corev1.PodRunning,
		} {
			if _, known := seen[s]; is && !known {
				seen[s] = now
			}
		}
	}
}

// every is true for none of nothing: a Pod whose claim has not been made has not come far.
func every[T any](all []T, is func(T) bool) bool {
	return len(all) > 0 && !slices.ContainsFunc(all, func(t T) bool { return !is(t) })
}

// claimsOf returns the claims that end with the Pod.
func (w *world) claimsOf(pod *corev1.Pod) []*resourcev1.ResourceClaim {
	var of []*resourcev1.ResourceClaim
	for _, c := range w.claims {
		for _, owner := range c.OwnerReferences {
			if owner.UID == pod.UID {
				of = append(of, c)
			}
		}
	}
	slices.SortFunc(of, func(a, b *resourcev1.ResourceClaim) int { return cmp.Compare(a.Name, b.Name) })
	return of
}

// results are the devices of our driver that the claim was given.
func results(c *resourcev1.ResourceClaim) []resourcev1.DeviceRequestAllocationResult {
	if c.Status.Allocation == nil {
		return nil
	}
	var ours []resourcev1.DeviceRequestAllocationResult
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver == device.Driver {
			ours = append(ours, r)
		}
	}
	return ours
}

// leased tells whether every device of the claim has a lease for it.
func (w *world) leased(c *resourcev1.ResourceClaim) bool {
	return every(results(c), func(r resourcev1.DeviceRequestAllocationResult) bool {
		u, _ := device.UnitOfEntry(r.Device)
		l := w.leases[u]
		return l != nil && strings.Contains(l.Annotations[annAttempt], string(c.UID))
	})
}

// saysAttached tells whether every device of the claim is attached, by its own word.
func saysAttached(c *resourcev1.ResourceClaim) bool {
	return every(results(c), func(r resourcev1.DeviceRequestAllocationResult) bool {
		return deviceSays(c, r) == shortAttached
	})
}

// What a claim says of a device, in short.
const (
	shortAllocated = "allocated"
	shortAttached  = "Attached"
	shortFailed    = "AttachFailed"
	shortReady     = "ready offer"
)

// deviceSays returns what the claim says of one of its devices.
func deviceSays(c *resourcev1.ResourceClaim, r resourcev1.DeviceRequestAllocationResult) string {
	says := shortAllocated
	if _, ready := device.UnitOfEntry(r.Device); ready {
		says = shortReady
	}
	for _, d := range c.Status.Devices {
		if d.Driver != r.Driver || d.Pool != r.Pool || d.Device != r.Device {
			continue
		}
		for _, cond := range d.Conditions {
			if cond.Status != "True" {
				continue
			}
			switch cond.Type {
			case device.ConditionAttached:
				says = shortAttached
			case device.ConditionAttachFailed:
				return shortFailed
			}
		}
	}
	return says
}

// leaseSays returns a lease's phase, and whether the unit waits for somebody.
func leaseSays(l *coordinationv1.Lease) string {
	if l == nil {
		return ""
	}
	phase := l.Labels[device.LabelPhase]
	if l.Annotations[annIdleSince] != "" && phase == string(device.Attached) {
		return phase + ", idle"
	}
	return phase
}

// copyOf returns a world that does not change any more.
func (w *world) copyOf() *world {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := &world{
		pods: maps.Clone(w.pods), claims: maps.Clone(w.claims), leases: maps.Clone(w.leases),
		slices: maps.Clone(w.slices), nodes: maps.Clone(w.nodes), steps: map[string]map[step]time.Time{},
	}
	for name, s := range w.steps {
		c.steps[name] = maps.Clone(s)
	}
	return c
}

// offered lists the entries of the pool that can be chosen now.
func (w *world) offered() []string {
	var names []string
	for _, s := range w.slices {
		for i := range s.Spec.Devices {
			if len(s.Spec.Devices[i].Taints) == 0 {
				names = append(names, s.Spec.Devices[i].Name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// wait calls draw at every change, and every now and then, until done says that there is nothing more to
// wait for. Its error carries what done said last.
func (w *world) wait(ctx context.Context, limit time.Duration, draw func(*world), done func(*world) error) (*world, error) {
	parent := ctx
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		now := w.copyOf()
		draw(now)
		err := done(now)
		var stop finalError
		if err == nil || errors.As(err, &stop) {
			return now, err
		}
		select {
		case <-w.changed:
		case <-tick.C:
		case <-ctx.Done():
			if parent.Err() != nil {
				return now, context.Cause(parent)
			}
			return now, fmt.Errorf("after %v: %w", limit, err)
		}
	}
}

// finalError ends a wait early: what was waited for cannot come any more.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }
