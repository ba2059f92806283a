// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// run starts the Store in the test's bubble and stops it when the test ends.
func run(t *testing.T, s *Store) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	go s.Run(ctx)
	synctest.Wait()
	t.Cleanup(func() { cancel(); synctest.Wait() })
	if !s.HasSynced() {
		t.Fatal("the store has not synced")
	}
}

func storeOptions(c kubernetes.Interface) Options {
	return Options{Client: c, Clock: clock.RealClock{}, Changed: func(string) {}}
}

func fabricStore(t *testing.T, c kubernetes.Interface) *Store {
	t.Helper()
	s, err := NewFabricStore("0", storeOptions(c))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func phases(s *Store) []device.Phase {
	var p []device.Phase
	for _, l := range s.List() {
		p = append(p, l.Phase)
	}
	return p
}

// TestStore_shows_its_own_writes_before_the_cache never runs the informer: all that List shows is what
// the Store wrote itself.
func TestStore_shows_its_own_writes_before_the_cache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		s := fabricStore(t, api)
		l := must(s.Create(t.Context(), full()))(t)
		if got := phases(s); !slices.Equal(got, []device.Phase{device.Attaching}) {
			t.Fatalf("phases after create: %v", got)
		}
		before := api.count("get")
		l.Phase = device.Attached
		l = must(s.Update(t.Context(), l))(t)
		if got := phases(s); !slices.Equal(got, []device.Phase{device.Attached}) {
			t.Fatalf("phases after update: %v", got)
		}
		if got := api.count("get") - before; got != 0 {
			t.Errorf("an update of the latest version read the lease %d times first", got)
		}
		if err := s.Delete(t.Context(), l); err != nil {
			t.Fatal(err)
		}
		if got := phases(s); len(got) != 0 {
			t.Errorf("phases after delete: %v", got)
		}
		if _, err := api.current("device-0-a100-3"); err == nil {
			t.Error("the lease is still stored")
		}
		if err := s.Delete(t.Context(), l); err != nil {
			t.Errorf("delete of what is gone: %v", err)
		}
	})
}

func TestStore_overlay_gives_way(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		s, other := fabricStore(t, api), fabricStore(t, api)
		run(t, s)
		l := must(s.Create(t.Context(), full()))(t)
		synctest.Wait()

		// What another writes later is shown, not our older write.
		theirs := l
		theirs.Phase = device.Releasing
		must(other.Update(t.Context(), theirs))(t)
		synctest.Wait()
		if got := phases(s); !slices.Equal(got, []device.Phase{device.Releasing}) {
			t.Errorf("phases after another's write: %v", got)
		}
		if n := len(s.overlay.writes); n != 0 {
			t.Errorf("%d writes are kept though the cache has caught up", n)
		}

		// Deleted by another.
		if err := other.Delete(t.Context(), must(other.Get(t.Context(), "0", "a100-3"))(t)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := phases(s); len(got) != 0 {
			t.Errorf("phases after another's delete: %v", got)
		}
	})
}

func TestStore_overlay_of_a_lease_that_no_watch_showed_ends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		s, other := fabricStore(t, api), fabricStore(t, api)
		l := must(s.Create(t.Context(), full()))(t)
		if err := other.Delete(t.Context(), l); err != nil {
			t.Fatal(err)
		}
		if got := phases(s); len(got) != 1 {
			t.Fatalf("phases: %v", got)
		}
		if _, err := s.Update(t.Context(), l); !errors.Is(err, ErrNotFound) {
			t.Errorf("update of what is gone: %v", err)
		}
		if got := phases(s); len(got) != 0 {
			t.Errorf("phases after the API server said there is none: %v", got)
		}
		must(s.Create(t.Context(), full()))(t)
		if err := other.Delete(t.Context(), must(other.Get(t.Context(), "0", "a100-3"))(t)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(overlayAge + time.Second)
		if got := phases(s); len(got) != 0 {
			t.Errorf("phases after %s: %v", overlayAge, got)
		}
	})
}

func TestStore_conflicts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		s, other := fabricStore(t, api), fabricStore(t, api)
		l := must(s.Create(t.Context(), full()))(t)
		if _, err := other.Create(t.Context(), full()); !errors.Is(err, ErrExists) {
			t.Errorf("second create: %v", err)
		}
		newer := must(other.Update(t.Context(), l))(t)
		if _, err := s.Update(t.Context(), l); !errors.Is(err, ErrConflict) {
			t.Errorf("update of an old version: %v", err)
		}
		if err := s.Delete(t.Context(), l); !errors.Is(err, ErrConflict) {
			t.Errorf("delete of an old version: %v", err)
		}
		// The same name, another object.
		if err := other.Delete(t.Context(), newer); err != nil {
			t.Fatal(err)
		}
		must(other.Create(t.Context(), full()))(t)
		if err := s.Delete(t.Context(), l); !errors.Is(err, ErrConflict) {
			t.Errorf("delete of a lease that was made anew: %v", err)
		}
		if _, err := s.Update(t.Context(), full()); err == nil {
			t.Error("a lease that was never read was updated")
		}
	})
}

func TestStore_delete_after_a_crash_in_between(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		s := fabricStore(t, api)
		run(t, s)
		l := must(s.Create(t.Context(), full()))(t)
		api.setRefuse(func(verb string) error {
			if verb == "delete" {
				return errors.New("the process died here")
			}
			return nil
		})
		if err := s.Delete(t.Context(), l); err == nil {
			t.Fatal("delete went through")
		}
		api.setRefuse(nil)
		synctest.Wait()
		again := s.List()
		if len(again) != 1 {
			t.Fatalf("leases after the crash: %v", again)
		}
		if err := s.Delete(t.Context(), again[0]); err != nil {
			t.Fatal(err)
		}
		if _, err := api.current("device-0-a100-3"); err == nil {
			t.Error("the lease is still stored")
		}
	})
}

func TestStore_kubectl_delete_is_a_wish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		s := fabricStore(t, api)
		run(t, s)
		must(s.Create(t.Context(), full()))(t)
		if err := s.client.Delete(t.Context(), "device-0-a100-3", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		leases := s.List()
		if len(leases) != 1 || !leases[0].Deleting {
			t.Fatalf("leases: %+v", leases)
		}
		l := leases[0]
		l.Phase = device.Releasing
		l = must(s.Update(t.Context(), l))(t)
		if err := s.Delete(t.Context(), l); err != nil {
			t.Fatal(err)
		}
		if _, err := api.current("device-0-a100-3"); err == nil {
			t.Error("the lease is still stored")
		}
		synctest.Wait()
		if leases := s.List(); len(leases) != 0 {
			t.Errorf("leases: %+v", leases)
		}
	})
}

func TestStore_delete_keeps_finalizers_of_others(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		s := fabricStore(t, api)
		run(t, s)
		must(s.Create(t.Context(), full()))(t)
		obj := must(api.current("device-0-a100-3"))(t)
		obj.Finalizers = append(obj.Finalizers, "example.com/audit")
		must(s.client.Update(t.Context(), obj, metav1.UpdateOptions{}))(t)
		synctest.Wait()
		if err := s.Delete(t.Context(), s.List()[0]); err == nil {
			t.Error("a lease that is still there was reported as deleted")
		}
		obj = must(api.current("device-0-a100-3"))(t)
		if diff := cmp.Diff([]string{"example.com/audit"}, obj.Finalizers); diff != "" {
			t.Errorf("finalizers (-want +got):\n%s", diff)
		}
	})
}

func TestStore_moved_label_is_not_deletion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		var changed []string
		o := storeOptions(api)
		o.Changed = func(name string) { changed = append(changed, name) }
		holder := must(NewNodeStore("n1", o))(t)
		run(t, holder)
		leader := fabricStore(t, api)
		run(t, leader)
		l := must(leader.Create(t.Context(), full()))(t)
		synctest.Wait()
		if got := len(holder.List()); got != 1 {
			t.Fatalf("the holder sees %d leases", got)
		}
		l.Node = "n2"
		must(leader.Update(t.Context(), l))(t)
		synctest.Wait()
		if got := len(holder.List()); got != 0 {
			t.Errorf("the old holder sees %d leases", got)
		}
		if diff := cmp.Diff([]string{"device-0-a100-3", "device-0-a100-3"}, changed); diff != "" {
			t.Errorf("calls of Changed (-want +got):\n%s", diff)
		}
		if got := must(holder.Get(t.Context(), "0", "a100-3"))(t); got.Node != "n2" {
			t.Errorf("the lease is held by %q", got.Node)
		}
		if _, err := holder.Get(t.Context(), "0", "a100-4"); !errors.Is(err, ErrNotFound) {
			t.Errorf("a lease that does not exist: %v", err)
		}
	})
}

func TestStore_reports_what_it_cannot_read(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		odd := object(full())
		odd.Annotations[annSchema] = "7"
		api := newAPIServer(t, odd)
		s := fabricStore(t, api)
		run(t, s)
		other := full()
		other.Unit = "a100-4"
		must(s.Create(t.Context(), other))(t)
		if got := phases(s); len(got) != 1 {
			t.Errorf("phases: %v", got)
		}
		bad := s.Unreadable()
		if len(bad) != 1 || bad[0].Lease != odd.Name || bad[0].Unit != "a100-3" || bad[0].Node != "n1" {
			t.Errorf("unreadable: %+v", bad)
		}
		var unreadable *DecodeError
		if _, err := s.Get(t.Context(), "0", "a100-3"); !errors.As(err, &unreadable) {
			t.Errorf("read of it: %v", err)
		}
	})
}

// TestStore_tells_that_it_may_not_list: what List shows then is old or nothing, and that is no empty node.
func TestStore_tells_that_it_may_not_list(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		var passed atomic.Bool
		api.PrependReactor("list", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
			return !passed.Load(), nil, apierrors.NewForbidden(coordinationv1.Resource("leases"), "", errors.New("the role is gone"))
		})
		var told atomic.Int32
		o := storeOptions(api)
		o.Changed = func(string) { told.Add(1) }
		s := must(NewFabricStore("0", o))(t)
		ctx, cancel := context.WithCancel(t.Context())
		go s.Run(ctx)
		defer func() { cancel(); synctest.Wait() }()
		synctest.Wait()
		if err := s.Refused(); err == nil || !strings.Contains(err.Error(), "the role is gone") || told.Load() == 0 {
			t.Errorf("refused: %v, told %d times; want the API server's words", err, told.Load())
		}
		passed.Store(true)
		time.Sleep(5 * time.Minute)
		if err := s.Refused(); err != nil || !s.HasSynced() {
			t.Errorf("refused: %v, synced %v; want that it passed", err, s.HasSynced())
		}
	})
}
