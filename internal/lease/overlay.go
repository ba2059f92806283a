// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
)

// overlayAge bounds how long a write of ours outlives a cache that never shows it: one that was created
// and deleted again between two listings is in no watch event.
const overlayAge = time.Minute

// overlay holds this process's own writes until the informer's cache shows them or something newer. It
// is not client-go's MutationCache, because that one has no listing and takes a deletion only from the
// informer, not from the one who deleted.
type overlay struct {
	clock clock.PassiveClock

	mu     sync.Mutex
	writes map[string]write
}

// write is one own write: the object as the API server returned it, or as it was when it was deleted.
type write struct {
	obj     *coordinationv1.Lease
	deleted bool
	at      time.Time
}

func newOverlay(c clock.PassiveClock) *overlay {
	return &overlay{clock: c, writes: map[string]write{}}
}

// wrote keeps what the API server returned for a write.
func (o *overlay) wrote(obj *coordinationv1.Lease) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.writes[obj.Name]; ok && w.obj.UID == obj.UID && (w.deleted || newer(w.obj.ResourceVersion, obj.ResourceVersion)) {
		return
	}
	o.writes[obj.Name] = write{obj: obj, at: o.clock.Now()}
}

// deleted keeps that the object is gone. An object of that UID never comes back.
func (o *overlay) deleted(obj *coordinationv1.Lease) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.writes[obj.Name] = write{obj: obj, deleted: true, at: o.clock.Now()}
}

// observed drops a write that the cache has caught up with.
func (o *overlay) observed(obj *coordinationv1.Lease) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.writes[obj.Name]; ok && w.supersededBy(obj) {
		delete(o.writes, obj.Name)
	}
}

// missing drops a write to an object that the cache has lost at the given version.
func (o *overlay) missing(name, version string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.writes[name]; ok && !newer(w.obj.ResourceVersion, version) {
		delete(o.writes, name)
	}
}

// forget drops whatever is known of the name: the API server said that there is none.
func (o *overlay) forget(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.writes, name)
}

// supersededBy tells whether the cache's object makes the write superfluous.
func (w write) supersededBy(obj *coordinationv1.Lease) bool {
	if w.deleted {
		return w.obj.UID != obj.UID && !newer(w.obj.ResourceVersion, obj.ResourceVersion)
	}
	return !newer(w.obj.ResourceVersion, obj.ResourceVersion)
}

// newer tells whether version a is later than b. Versions of one resource are comparable; where one is
// not a version (an API server that does not keep to that), the write counts as the newer: it expires.
func newer(a, b string) bool {
	n, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || n > 0
}

// one returns the newer of the cache's object (nil if it has none) and our write; nil if there is none.
func (o *overlay) one(name string, cached *coordinationv1.Lease) *coordinationv1.Lease {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.pick(name, cached)
}

func (o *overlay) pick(name string, cached *coordinationv1.Lease) *coordinationv1.Lease {
	w, ok := o.writes[name]
	if ok && o.clock.Since(w.at) > overlayAge {
		delete(o.writes, name)
		ok = false
	}
	if !ok || (cached != nil && w.supersededBy(cached)) {
		return cached
	}
	if w.deleted {
		return nil
	}
	return w.obj
}

// over returns the cache's objects with our writes laid over them, by name.
func (o *overlay) over(cached []*coordinationv1.Lease) []*coordinationv1.Lease {
	o.mu.Lock()
	defer o.mu.Unlock()
	byName := make(map[string]*coordinationv1.Lease, len(cached))
	for _, obj := range cached {
		byName[obj.Name] = obj
	}
	for name := range maps.Clone(o.writes) {
		if obj := o.pick(name, byName[name]); obj != nil {
			byName[name] = obj
		} else {
			delete(byName, name)
		}
	}
	return slices.SortedFunc(maps.Values(byName), func(a, b *coordinationv1.Lease) int {
		return cmp.Compare(a.Name, b.Name)
	})
}
