// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"fmt"
	"strconv"
	"sync"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// apiServer is client-go's fake with what it leaves out and we rely on: versions and UIDs, conflicts,
// preconditions, finalizers, and watches by selector.
type apiServer struct {
	*fake.Clientset
	t *testing.T

	mu      sync.Mutex
	version int
	// refuse, if set, answers a call before anything else does.
	refuse func(verb string) error
	// calls counts by verb.
	calls map[string]int
}

var leasesResource = coordinationv1.SchemeGroupVersion.WithResource("leases")

func newAPIServer(t *testing.T, objs ...runtime.Object) *apiServer {
	t.Helper()
	s := &apiServer{Clientset: fake.NewSimpleClientset(objs...), t: t, version: 100, calls: map[string]int{}}
	s.PrependReactor("*", "leases", s.react)
	s.PrependWatchReactor("leases", s.watch)
	return s
}

func (s *apiServer) setRefuse(f func(verb string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = f
}

func (s *apiServer) count(verb string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[verb]
}

func (s *apiServer) react(action clienttesting.Action) (bool, runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[action.GetVerb()]++
	if s.refuse != nil {
		if err := s.refuse(action.GetVerb()); err != nil {
			return true, nil, err
		}
	}
	switch a := action.(type) {
	case clienttesting.CreateActionImpl:
		return s.create(a)
	case clienttesting.UpdateActionImpl:
		return s.update(a)
	case clienttesting.DeleteActionImpl:
		return s.delete(a)
	}
	return false, nil, nil
}

func (s *apiServer) next() string {
	s.version++
	return strconv.Itoa(s.version)
}

func (s *apiServer) create(a clienttesting.CreateActionImpl) (bool, runtime.Object, error) {
	obj := as[*coordinationv1.Lease](s.t, a.Object).DeepCopy()
	obj.ResourceVersion = s.next()
	obj.UID = types.UID("uid-" + obj.ResourceVersion)
	if err := s.Tracker().Create(leasesResource, obj, a.GetNamespace()); err != nil {
		return true, nil, err
	}
	return true, obj.DeepCopy(), nil
}

func (s *apiServer) current(name string) (*coordinationv1.Lease, error) {
	obj, err := s.Tracker().Get(leasesResource, device.LeaseNamespace, name)
	if err != nil {
		return nil, err
	}
	return as[*coordinationv1.Lease](s.t, obj).DeepCopy(), nil
}

func conflict(name, why string) error {
	return apierrors.NewConflict(leasesResource.GroupResource(), name, fmt.Errorf("%s", why))
}

func (s *apiServer) update(a clienttesting.UpdateActionImpl) (bool, runtime.Object, error) {
	obj := as[*coordinationv1.Lease](s.t, a.Object).DeepCopy()
	have, err := s.current(obj.Name)
	if err != nil {
		return true, nil, err
	}
	if obj.ResourceVersion != "" && obj.ResourceVersion != have.ResourceVersion || obj.UID != "" && obj.UID != have.UID {
		return true, nil, conflict(obj.Name, "the object has been modified")
	}
	obj.DeletionTimestamp, obj.UID = have.DeletionTimestamp, have.UID
	obj.ResourceVersion = s.next()
	if obj.DeletionTimestamp != nil && len(obj.Finalizers) == 0 {
		return true, obj, s.Tracker().Delete(leasesResource, a.GetNamespace(), obj.Name)
	}
	return true, obj.DeepCopy(), s.Tracker().Update(leasesResource, obj, a.GetNamespace())
}

func (s *apiServer) delete(a clienttesting.DeleteActionImpl) (bool, runtime.Object, error) {
	have, err := s.current(a.Name)
	if err != nil {
		return true, nil, err
	}
	if p := a.DeleteOptions.Preconditions; p != nil {
		if p.UID != nil && *p.UID != have.UID || p.ResourceVersion != nil && *p.ResourceVersion != have.ResourceVersion {
			return true, nil, conflict(a.Name, "precondition failed")
		}
	}
	if len(have.Finalizers) > 0 {
		now := metav1.Now()
		have.DeletionTimestamp, have.ResourceVersion = &now, s.next()
		return true, nil, s.Tracker().Update(leasesResource, have, a.GetNamespace())
	}
	return true, nil, s.Tracker().Delete(leasesResource, a.GetNamespace(), a.Name)
}

// watch filters by selector as the API server does: what stops matching is sent as deleted.
func (s *apiServer) watch(action clienttesting.Action) (bool, watch.Interface, error) {
	opts := as[clienttesting.WatchActionImpl](s.t, action).ListOptions
	byLabel, err := labels.Parse(opts.LabelSelector)
	if err != nil {
		return true, nil, err
	}
	byField, err := fields.ParseSelector(opts.FieldSelector)
	if err != nil {
		return true, nil, err
	}
	all, err := s.Tracker().Watch(leasesResource, action.GetNamespace(), opts)
	if err != nil {
		return true, nil, err
	}
	return true, newSelected(all, func(l *coordinationv1.Lease) bool {
		return byLabel.Matches(labels.Set(l.Labels)) && byField.Matches(fields.Set{"metadata.name": l.Name})
	}), nil
}

// selected is a watch of what matches.
type selected struct {
	watch.Interface
	result  chan watch.Event
	stopped chan struct{}
	once    sync.Once
}

func newSelected(all watch.Interface, match func(*coordinationv1.Lease) bool) *selected {
	w := &selected{Interface: all, result: make(chan watch.Event), stopped: make(chan struct{})}
	go func() {
		defer close(w.result)
		for in := range all.ResultChan() {
			if l, ok := in.Object.(*coordinationv1.Lease); ok && in.Type != watch.Deleted && !match(l) {
				in.Type = watch.Deleted
			}
			select {
			case w.result <- in:
			case <-w.stopped:
				return
			}
		}
	}()
	return w
}

// ResultChan is where the events come out.
func (w *selected) ResultChan() <-chan watch.Event { return w.result }

// Stop ends the watch.
func (w *selected) Stop() {
	w.once.Do(func() { close(w.stopped) })
	w.Interface.Stop()
}

// as is a checked type assertion.
func as[T any](t *testing.T, v any) T {
	t.Helper()
	got, ok := v.(T)
	if !ok {
		t.Fatalf("got a %T", v)
	}
	return got
}
