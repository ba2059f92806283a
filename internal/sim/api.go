// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/lease"
)

// kind is a resource of the API server.
type kind string

const (
	leases     kind = "lease"
	claims     kind = "claim"
	nodes      kind = "node"
	poolSlices kind = "slice"
	agents     kind = "agent" // the agents' own Pods
)

// object is what the API server keeps.
type object interface {
	metav1.Object
	runtime.Object
}

// change is one line of the API server's history.
type change struct {
	kind kind
	name string
	// before and after are the object, nil where there was or is none.
	before, after object
	at            time.Time
	version       int
}

// apiServer keeps objects and their history; watches read the history, late.
type apiServer struct {
	s       *Sim
	version int
	uids    int
	objects map[kind]map[string]object
	history map[kind][]change
	watches []*watch
	// election is the fabric's election Lease: who holds it, and since when without renewal.
	leader    string
	renewedAt time.Time
	terms     int
}

func newAPIServer(s *Sim) *apiServer {
	a := &apiServer{s: s, objects: map[kind]map[string]object{}, history: map[kind][]change{}}
	for _, k := range []kind{leases, claims, nodes, poolSlices, agents} {
		a.objects[k] = map[string]object{}
	}
	return a
}

func (a *apiServer) get(k kind, name string) (object, error) {
	o, ok := a.objects[k][name]
	if !ok {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: string(k)}, name)
	}
	return clone(o), nil
}

func clone[T object](o T) T {
	c, ok := o.DeepCopyObject().(T)
	if !ok {
		panic("an object's copy is of another type")
	}
	return c
}

// list returns the objects of a kind by name.
func (a *apiServer) list(k kind) []object {
	all := make([]object, 0, len(a.objects[k]))
	for _, name := range slices.Sorted(maps.Keys(a.objects[k])) {
		all = append(all, clone(a.objects[k][name]))
	}
	return all
}

func listOf[T object](a *apiServer, k kind) []T {
	var all []T
	for _, o := range a.list(k) {
		if t, ok := o.(T); ok {
			all = append(all, t)
		}
	}
	return all
}

func find[T object](a *apiServer, k kind, name string) (T, bool) {
	o, ok := a.objects[k][name].(T)
	if !ok {
		var none T
		return none, false
	}
	return clone(o), true
}

func (a *apiServer) uid() types.UID {
	a.uids++
	return types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", a.uids))
}

func (a *apiServer) create(k kind, o object) (object, error) {
	if _, ok := a.objects[k][o.GetName()]; ok {
		return nil, apierrors.NewAlreadyExists(schema.GroupResource{Resource: string(k)}, o.GetName())
	}
	o = clone(o)
	if o.GetUID() == "" {
		o.SetUID(a.uid())
	}
	a.record(k, nil, o)
	return clone(o), nil
}

// update stores the object if its version, where it has one, is the stored one's.
func (a *apiServer) update(k kind, o object) (object, error) {
	stored, ok := a.objects[k][o.GetName()]
	if !ok {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: string(k)}, o.GetName())
	}
	if v := o.GetResourceVersion(); v != "" && v != stored.GetResourceVersion() {
		return nil, conflict(k, o.GetName())
	}
	if o.GetUID() != "" && o.GetUID() != stored.GetUID() {
		return nil, conflict(k, o.GetName())
	}
	o = clone(o)
	o.SetUID(stored.GetUID())
	o.SetDeletionTimestamp(stored.GetDeletionTimestamp())
	if o.GetDeletionTimestamp() != nil && len(o.GetFinalizers()) == 0 {
		a.record(k, stored, nil)
		return o, nil
	}
	a.record(k, stored, o)
	return clone(o), nil
}

func conflict(k kind, name string) error {
	return apierrors.NewConflict(schema.GroupResource{Resource: string(k)}, name, fmt.Errorf("the object has been modified"))
}

// remove deletes as the API server does: what has finalizers is marked and stays.
func (a *apiServer) remove(k kind, name string, pre *metav1.Preconditions) error {
	stored, ok := a.objects[k][name]
	if !ok {
		return apierrors.NewNotFound(schema.GroupResource{Resource: string(k)}, name)
	}
	if pre != nil && (pre.UID != nil && *pre.UID != stored.GetUID() || pre.ResourceVersion != nil && *pre.ResourceVersion != stored.GetResourceVersion()) {
		return conflict(k, name)
	}
	if len(stored.GetFinalizers()) == 0 {
		a.record(k, stored, nil)
		return nil
	}
	if stored.GetDeletionTimestamp() == nil {
		marked := clone(stored)
		now := metav1.NewTime(a.s.now())
		marked.SetDeletionTimestamp(&now)
		a.record(k, stored, marked)
	}
	return nil
}

// discard deletes what may be gone already.
func (a *apiServer) discard(k kind, name string) {
	if err := a.remove(k, name, nil); err != nil && !isNotFound(err) {
		panic(err)
	}
}

// record makes a change and tells the watches, and the judge.
func (a *apiServer) record(k kind, before, after object) {
	a.version++
	c := change{kind: k, before: before, at: a.s.now(), version: a.version}
	if after != nil {
		after.SetResourceVersion(strconv.Itoa(a.version))
		c.name, c.after = after.GetName(), clone(after)
		a.objects[k][c.name] = c.after
	} else {
		c.name = before.GetName()
		delete(a.objects[k], c.name)
	}
	a.history[k] = append(a.history[k], c)
	a.s.changed(c)
	for _, w := range a.watches {
		w.notice(c)
	}
}

// leads tells whether the process is the one that the election Lease names, as the admission policies do.
func (a *apiServer) leads(p *process) bool { return a.leader == p.identity() }

func (a *apiServer) forbidden(p *process, what string) error {
	a.s.struck("write fenced")
	a.s.note("policy", "%s may not write the %s", p.node, what)
	return apierrors.NewForbidden(schema.GroupResource{}, what, fmt.Errorf("denied by the admission policies"))
}

// admitLease is what the admission policies say of a write to a device lease.
func (a *apiServer) admitLease(p *process, before, after *coordinationv1.Lease) error {
	holds := before != nil && before.Spec.HolderIdentity != nil && *before.Spec.HolderIdentity == p.node
	same := before != nil && after != nil && before.Annotations[device.Driver+"/attempt"] == after.Annotations[device.Driver+"/attempt"]
	switch {
	case a.leads(p):
		return nil
	case !holds:
		return a.forbidden(p, "lease of another node")
	case after != nil && !same:
		return a.forbidden(p, "attempt of a lease")
	}
	return nil
}

// refusedWrite is the API server's answer to a write that it did not carry out.
func refusedWrite() error {
	return apierrors.NewInternalError(fmt.Errorf("etcdserver: request timed out"))
}

func leaseOf(o object) (device.Lease, bool) {
	l, ok := o.(*coordinationv1.Lease)
	if !ok {
		return device.Lease{}, false
	}
	d, err := lease.Decode(l)
	return d, err == nil
}

func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// results are the devices that a claim was allocated, those aside that it only watches.
func results(c *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if c == nil || c.Status.Allocation == nil {
		return nil
	}
	return owned(c.Status.Allocation)
}

func owned(a *resourceapi.AllocationResult) []resourceapi.DeviceRequestAllocationResult {
	return slices.DeleteFunc(slices.Clone(a.Devices.Results), func(r resourceapi.DeviceRequestAllocationResult) bool {
		return ptr.Deref(r.AdminAccess, false)
	})
}
