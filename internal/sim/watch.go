// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"k8s.io/client-go/tools/cache"
)

// watch is a cache of one process, or of one controller, that the history of the API server reaches late.
type watch struct {
	s    *Sim
	p    *process // nil is a controller that does not die
	name string
	kind kind
	want func(object) bool

	store   map[string]object
	version int // of the last change that was seen
	// put and gone are told what changed; last is the object as it was seen last. relisted: it was missing in a list.
	put  func(o object)
	gone func(last object, relisted bool)

	next      time.Time // no event overtakes another
	slowUntil time.Time
	broken    bool
	closed    bool
}

// open starts a watch with a list, which may be stale, and hands over what it has through put.
func (a *apiServer) open(w *watch) {
	w.s, w.store = a.s, map[string]object{}
	a.watches = append(a.watches, w)
	as := a.s.now()
	if w.p != nil && a.s.chance("stale list "+w.name, 4) {
		as = as.Add(-a.s.between("stale by "+w.name, time.Second, 15*time.Second))
		a.s.count.Faults["list stale"]++
	}
	for _, c := range a.history[w.kind] {
		if c.at.After(as) {
			// The watch goes on from there.
			w.notice(c)
			continue
		}
		w.version = c.version
		if c.after != nil && w.want(c.after) {
			w.store[c.name] = c.after
		} else {
			delete(w.store, c.name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.store)) {
		w.put(clone(w.store[name]))
	}
}

func (w *watch) close() { w.closed = true }

// notice brings a change on its way.
func (w *watch) notice(c change) {
	if w.closed || w.kind != c.kind || w.p != nil && w.p.dead {
		return
	}
	in := w.s.between("watch "+w.name, 2*time.Millisecond, 60*time.Millisecond)
	if w.s.chance("lag of "+w.name, 60) {
		in = w.s.between("lag by "+w.name, time.Second, 4*time.Second)
		w.s.count.Faults["watch lag"]++
	}
	at := w.s.now().Add(in)
	for _, t := range []time.Time{w.next, w.slowUntil} {
		if t.After(at) {
			at = t
		}
	}
	w.next = at
	w.s.at(at, w.p, func() { w.see(c) })
}

func (w *watch) see(c change) {
	if w.closed || w.broken || c.version <= w.version {
		return
	}
	w.version = c.version
	last, had := w.store[c.name]
	if c.after != nil && w.want(c.after) {
		w.store[c.name] = c.after
		w.put(clone(c.after))
		return
	}
	if had {
		delete(w.store, c.name)
		gone := clone(last)
		gone.SetResourceVersion(strconv.Itoa(c.version))
		w.gone(gone, false)
	}
}

// drop breaks the watch: what happens until it lists again is not seen as events.
func (w *watch) drop(until time.Time) {
	w.broken = true
	w.s.at(until, w.p, w.relist)
}

func (w *watch) relist() {
	if w.closed {
		return
	}
	w.broken = false
	a := w.s.api
	seen := map[string]object{}
	for name, o := range a.objects[w.kind] {
		if w.want(o) {
			seen[name] = o
		}
	}
	w.version = a.version
	for _, name := range slices.Sorted(maps.Keys(w.store)) {
		if seen[name] == nil || seen[name].GetUID() != w.store[name].GetUID() {
			last := w.store[name]
			delete(w.store, name)
			w.gone(clone(last), true)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(seen)) {
		if had := w.store[name]; had == nil || had.GetResourceVersion() != seen[name].GetResourceVersion() {
			w.store[name] = seen[name]
			w.put(clone(seen[name]))
		}
	}
}

// informer is client-go's cache filled by a watch of the simulation.
type informer struct {
	cache.SharedIndexInformer // what is not implemented is not called

	w       *watch
	store   cache.Store
	handler cache.ResourceEventHandler
}

func newInformer(p *process, name string, k kind, want func(object) bool) *informer {
	i := &informer{store: cache.NewStore(cache.MetaNamespaceKeyFunc)}
	i.w = &watch{p: p, name: name, kind: k, want: want, put: i.put, gone: i.gone}
	return i
}

func (i *informer) put(o object) {
	was, had, err := i.store.Get(o)
	if err != nil {
		panic(err)
	}
	if err = i.store.Update(o); err != nil {
		panic(err)
	}
	if had {
		i.handler.OnUpdate(was, o)
		return
	}
	i.handler.OnAdd(o, false)
}

func (i *informer) gone(last object, relisted bool) {
	if err := i.store.Delete(last); err != nil {
		panic(err)
	}
	if relisted {
		i.handler.OnDelete(cache.DeletedFinalStateUnknown{Key: last.GetNamespace() + "/" + last.GetName(), Obj: last})
		return
	}
	i.handler.OnDelete(last)
}

func (i *informer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	i.handler = h
	return nil, nil
}

// SetWatchErrorHandlerWithContext is for an API server that refuses to list, which this one does not.
func (i *informer) SetWatchErrorHandlerWithContext(cache.WatchErrorHandlerWithContext) error {
	return nil
}

func (i *informer) GetStore() cache.Store           { return i.store }
func (i *informer) LastSyncResourceVersion() string { return strconv.Itoa(i.w.version) }
