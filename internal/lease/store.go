// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Errors on which callers decide. Each wraps the API server's answer.
var (
	// ErrConflict: the lease is not what was decided on any more. Look again.
	ErrConflict = errors.New("the device lease has changed in the meantime")
	// ErrNotFound: there is no such lease.
	ErrNotFound = errors.New("there is no such device lease")
	// ErrExists: the unit has a lease already.
	ErrExists = errors.New("the unit has a device lease already")
)

// callTimeout bounds one call to the API server. It is well below the election's renew deadline, so
// that a leader whose API server hangs learns of it in time.
const callTimeout = 8 * time.Second

// Options are what a Store needs.
type Options struct {
	Client kubernetes.Interface
	Clock  clock.PassiveClock
	// Changed is called, from one goroutine, with the object's name after a lease appeared, changed or
	// left the selection in the cache. It must not block. It is not called for this Store's own writes
	// before the cache shows them. The name is empty when the API server refuses to list them.
	Changed func(name string)
}

// Store reads and writes device leases and keeps those that it selects in memory.
type Store struct {
	client   coordinationv1client.LeaseInterface
	clock    clock.PassiveClock
	changed  func(name string)
	informer cache.SharedIndexInformer
	handler  cache.ResourceEventHandlerRegistration
	// overlay holds our own writes until the informer has caught up with them.
	overlay *overlay
	// label and value select the leases.
	label, value string
	// what says whose leases these are, for errors.
	what string

	mu      sync.Mutex // guards the following
	refused error
	at      time.Time
	// decoded are the leases as they were last read, by name.
	decoded map[string]decoded
}

// NewNodeStore makes the Store of a holder: the leases that name the node, on any fabric.
func NewNodeStore(node string, o Options) (*Store, error) {
	return newStore(device.LabelNode, device.NodeLabelValue(node), "node "+node, o)
}

// NewFabricStore makes the Store of a leader: all leases of one fabric.
func NewFabricStore(fabric device.FabricID, o Options) (*Store, error) {
	return newStore(device.LabelFabric, string(fabric), "fabric "+string(fabric), o)
}

func newStore(label, value, what string, o Options) (*Store, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(o.Client, 0,
		informers.WithNamespace(device.LeaseNamespace),
		informers.WithTransform(dropManagedFields),
		informers.WithTweakListOptions(func(lo *metav1.ListOptions) {
			lo.LabelSelector = labels.Set{label: value}.String()
		}))
	return NewStoreOver(Selection{Label: label, Value: value, What: what}, factory.Coordination().V1().Leases().Informer(), o)
}

// Selection is which leases a Store reads: those with the label. What says whose they are, for errors.
type Selection struct{ Label, Value, What string }

// NewStoreOver makes a Store over an informer of the selected leases.
func NewStoreOver(of Selection, informer cache.SharedIndexInformer, o Options) (*Store, error) {
	s := &Store{
		client:   o.Client.CoordinationV1().Leases(device.LeaseNamespace),
		clock:    o.Clock,
		changed:  o.Changed,
		informer: informer,
		overlay:  newOverlay(o.Clock),
		label:    of.Label,
		value:    of.Value,
		what:     of.What,
	}
	err := s.informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
			s.refuse(ctx, err)
			return
		}
		cache.DefaultWatchErrorHandler(ctx, r, err) // it passes; until then the cache shows what was
	})
	if err != nil {
		return nil, fmt.Errorf("watch device leases of %s: %w", of.What, err)
	}
	handler, err := s.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    s.seen,
		UpdateFunc: func(_, obj any) { s.seen(obj) },
		DeleteFunc: s.gone,
	})
	if err != nil {
		return nil, fmt.Errorf("watch device leases of %s: %w", of.What, err)
	}
	s.handler = handler
	return s, nil
}

// dropManagedFields halves what a cached lease costs; nobody reads them.
func dropManagedFields(obj any) (any, error) {
	if l, ok := obj.(*coordinationv1.Lease); ok {
		l.ManagedFields = nil
	}
	return obj, nil
}

// Run keeps the cache current until ctx ends. It may be called once.
func (s *Store) Run(ctx context.Context) { s.informer.RunWithContext(ctx) }

// HasSynced tells whether List shows at least what there was when Run began, and Changed was called
// for it.
func (s *Store) HasSynced() bool { return s.handler.HasSynced() }

// refusedFor is how long a refusal counts when nothing more is heard. The informer tries again within a minute.
const refusedFor = 2 * time.Minute

func (s *Store) refuse(ctx context.Context, err error) {
	err = fmt.Errorf("list device leases of %s in namespace %s: %w", s.what, device.LeaseNamespace, err)
	klog.FromContext(ctx).Error(err, "The API server refuses to show the device leases")
	s.mu.Lock()
	s.refused, s.at = err, s.clock.Now()
	s.mu.Unlock()
	s.changed("")
}

// Refused says why the leases cannot be read, while the API server refuses that: List shows what was before,
// or nothing at all.
func (s *Store) Refused() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refused == nil || s.clock.Since(s.at) > refusedFor {
		return nil
	}
	return s.refused
}

func (s *Store) seen(obj any) {
	l, ok := obj.(*coordinationv1.Lease)
	if !ok {
		return
	}
	s.overlay.observed(l)
	s.changed(l.Name)
}

// gone is called when a lease left the selection, which is not the same as deleted.
func (s *Store) gone(obj any) {
	if unknown, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		// The last state that was seen of it is older than the listing which lacked it.
		if l, isLease := unknown.Obj.(*coordinationv1.Lease); isLease {
			s.overlay.missing(l.Name, s.informer.LastSyncResourceVersion())
			s.changed(l.Name)
		}
		return
	}
	if l, ok := obj.(*coordinationv1.Lease); ok {
		s.overlay.missing(l.Name, l.ResourceVersion)
		s.changed(l.Name)
	}
}

// List returns the selected leases that can be read, by name.
func (s *Store) List() []device.Lease {
	leases, _ := s.read()
	return leases
}

// Unreadable returns the selected leases that List leaves out. Their units are held by somebody.
func (s *Store) Unreadable() []*DecodeError {
	_, bad := s.read()
	return bad
}

// decoded is what a stored object says; the object never changes.
type decoded struct {
	obj   *coordinationv1.Lease
	lease device.Lease
	bad   *DecodeError
}

// read decodes what has changed since the last time.
func (s *Store) read() (leases []device.Lease, bad []*DecodeError) {
	objs := s.overlay.over(s.cached())
	s.mu.Lock()
	defer s.mu.Unlock()
	now := make(map[string]decoded, len(objs))
	for _, obj := range objs {
		d, known := s.decoded[obj.Name]
		if !known || d.obj != obj {
			l, err := decode(obj)
			d = decoded{obj: obj, lease: l}
			errors.As(err, &d.bad)
		}
		now[obj.Name] = d
		if d.bad != nil {
			bad = append(bad, d.bad)
		} else {
			leases = append(leases, d.lease)
		}
	}
	s.decoded = now
	return leases, bad
}

func (s *Store) cached() []*coordinationv1.Lease {
	objs := s.informer.GetStore().List()
	leases := make([]*coordinationv1.Lease, 0, len(objs))
	for _, obj := range objs {
		if l, ok := obj.(*coordinationv1.Lease); ok {
			leases = append(leases, l)
		}
	}
	return leases
}

// Get reads a unit's lease from the API server, whoever holds it. That a lease left List does not mean
// that it was deleted: it may have another label now. Only ErrNotFound from here means that.
func (s *Store) Get(ctx context.Context, fabric device.FabricID, unit device.Unit) (device.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	name := device.LeaseName(fabric, unit)
	obj, err := s.client.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		if apierrors.IsNotFound(err) {
			s.overlay.forget(name)
		}
		return device.Lease{}, wrap("read", name, err)
	}
	return decode(obj)
}

// Create stores a new lease. That a unit has one holder rests on this call: it fails with ErrExists if
// there is a lease of the unit.
func (s *Store) Create(ctx context.Context, l device.Lease) (device.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	obj := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: device.LeaseNamespace,
		Name:      device.LeaseName(l.Fabric, l.Unit),
	}}
	encode(obj, l)
	stored, err := s.client.Create(ctx, obj, metav1.CreateOptions{})
	if err != nil {
		return device.Lease{}, wrap("create", obj.Name, err)
	}
	s.overlay.wrote(stored)
	return decode(stored)
}

// Update stores l over the version that l was read in; ErrConflict if it is not the latest any more.
func (s *Store) Update(ctx context.Context, l device.Lease) (device.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	base, err := s.base(ctx, l)
	if err != nil {
		return device.Lease{}, err
	}
	encode(base, l)
	stored, err := s.put(ctx, base)
	if err != nil {
		return device.Lease{}, err
	}
	return decode(stored)
}

// Delete forgets a lease whose unit is back in the pool; ErrConflict if l is not the latest version any
// more. A lease that is gone already is success.
//
// The finalizer goes first. After a crash in between, the lease is still there in its last phase, and
// calling Delete again ends it; the other order would do too, but shows people a lease that is
// "terminating" for no reason.
func (s *Store) Delete(ctx context.Context, l device.Lease) error {
	ctx, cancel := context.WithTimeout(ctx, 2*callTimeout)
	defer cancel()
	base, err := s.base(ctx, l)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	deleting := base.DeletionTimestamp != nil
	if i := slices.Index(base.Finalizers, device.Finalizer); i >= 0 {
		base.Finalizers = slices.Delete(base.Finalizers, i, i+1)
		stored, err := s.put(ctx, base)
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		base = stored
	}
	if !deleting {
		err := s.client.Delete(ctx, base.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{
			UID: new(base.UID), ResourceVersion: new(base.ResourceVersion),
		}})
		if err != nil && !apierrors.IsNotFound(err) {
			return wrap("delete", base.Name, err)
		}
	}
	if len(base.Finalizers) > 0 {
		s.overlay.forget(base.Name)
		return fmt.Errorf("delete device lease %s: it is kept by finalizers that are not ours: %q", base.Name, base.Finalizers)
	}
	s.overlay.deleted(base)
	return nil
}

// base returns a copy, to be changed, of the stored object in exactly the version of l.
func (s *Store) base(ctx context.Context, l device.Lease) (*coordinationv1.Lease, error) {
	name := device.LeaseName(l.Fabric, l.Unit)
	if l.Version == "" || l.ObjectUID == "" {
		return nil, fmt.Errorf("change device lease %s: it was never read: no version", name)
	}
	if obj := s.latest(name); obj != nil && isVersion(obj, l) {
		return obj.DeepCopy(), nil
	}
	obj, err := s.client.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		if apierrors.IsNotFound(err) {
			s.overlay.forget(name)
		}
		return nil, wrap("read", name, err)
	}
	if !isVersion(obj, l) {
		return nil, fmt.Errorf("change device lease %s: version %s was decided on, %s is stored: %w", name, l.Version, obj.ResourceVersion, ErrConflict)
	}
	return obj, nil
}

// latest returns the newest object that is known without asking, nil if none is.
func (s *Store) latest(name string) *coordinationv1.Lease {
	obj, exists, err := s.informer.GetStore().GetByKey(device.LeaseNamespace + "/" + name)
	if err != nil || !exists {
		return s.overlay.one(name, nil)
	}
	l, ok := obj.(*coordinationv1.Lease)
	if !ok {
		return nil
	}
	return s.overlay.one(name, l)
}

func isVersion(obj *coordinationv1.Lease, l device.Lease) bool {
	return obj.ResourceVersion == l.Version && obj.UID == types.UID(l.ObjectUID)
}

func (s *Store) put(ctx context.Context, obj *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	stored, err := s.client.Update(ctx, obj, metav1.UpdateOptions{})
	if err != nil {
		if apierrors.IsNotFound(err) {
			s.overlay.forget(obj.Name)
		}
		return nil, wrap("update", obj.Name, err)
	}
	s.overlay.wrote(stored)
	return stored, nil
}

// wrap adds what was tried, and what the caller may decide on.
func wrap(verb, name string, err error) error {
	switch {
	case apierrors.IsConflict(err):
		return fmt.Errorf("%s device lease %s: %w: %w", verb, name, ErrConflict, err)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s device lease %s: %w: %w", verb, name, ErrNotFound, err)
	case apierrors.IsAlreadyExists(err):
		return fmt.Errorf("%s device lease %s: %w: %w", verb, name, ErrExists, err)
	}
	return fmt.Errorf("%s device lease %s: %w", verb, name, err)
}
