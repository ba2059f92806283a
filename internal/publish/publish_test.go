// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// offersOf is a pool of n units of model a100, all free.
func offersOf(n int) pool.Offers {
	o := pool.Offers{Fabric: "0"}
	for i := range n {
		o.Units = append(o.Units, device.NumberedUnit("a100", i))
	}
	for units := range slices.Chunk(o.Units, pool.SliceDevices) {
		var ready, onCall []pool.Offer
		for _, u := range units {
			attributes := map[string]string{"model": "a100", "uuid": ""}
			ready = append(ready, pool.Offer{
				Name: u.ReadyEntry(), Units: []device.Unit{u}, Model: "a100", Ready: true, Node: pool.Nowhere,
				Effect: pool.NoSchedule, Why: "NotAttached", Attributes: attributes,
			})
			onCall = append(onCall, pool.Offer{Name: u.Entry(), Units: []device.Unit{u}, Model: "a100", Attributes: attributes})
		}
		o.Ready, o.OnCall = append(o.Ready, ready), append(o.OnCall, onCall)
	}
	return o
}

// taint changes one entry's taint.
func taint(o pool.Offers, entry string, e pool.Effect) pool.Offers {
	changed := func(kind [][]pool.Offer) [][]pool.Offer {
		kind = slices.Clone(kind)
		for i := range kind {
			kind[i] = slices.Clone(kind[i])
			for j := range kind[i] {
				if kind[i][j].Name == entry {
					kind[i][j].Effect, kind[i][j].Why = e, "Test"
				}
			}
		}
		return kind
	}
	o.Ready, o.OnCall = changed(o.Ready), changed(o.OnCall)
	return o
}

func TestSlices_fields(t *testing.T) {
	o := offersOf(1)
	o.Ready[0][0].Node, o.Ready[0][0].Effect, o.Ready[0][0].Why = "n1", pool.NoTaint, ""
	o.OnCall[0][0].Effect, o.OnCall[0][0].Why = pool.NoSchedule, "NoCapacity"
	one := resourceapi.Counter{Value: resource.MustParse("1")}
	consumes := []resourceapi.DeviceCounterConsumption{{CounterSet: "units-0", Counters: map[string]resourceapi.Counter{"a100-0": one}}}
	attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"model": {StringValue: new("a100")}, "uuid": {StringValue: new("")},
	}
	want := []resourceslice.Slice{
		{
			PerDeviceNodeSelection: new(true),
			SharedCounters:         []resourceapi.CounterSet{{Name: "units-0", Counters: map[string]resourceapi.Counter{"a100-0": one}}},
		},
		{
			PerDeviceNodeSelection: new(true),
			Devices: []resourceapi.Device{{
				Name: "a100-0-ready", NodeName: new("n1"), ConsumesCounters: consumes, Attributes: attributes,
			}},
		},
		{
			PerDeviceNodeSelection: new(true),
			Devices: []resourceapi.Device{{
				Name: "a100-0", ConsumesCounters: consumes, Attributes: attributes,
				NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: "gpu.cohdi.io/fabric", Operator: corev1.NodeSelectorOpIn, Values: []string{"0"}},
					{Key: "gpu.cohdi.io/a100.attachable", Operator: corev1.NodeSelectorOpIn, Values: []string{"true"}},
				}}}},
				BindsToNode:              new(true),
				BindingConditions:        []string{"gpu.cohdi.io/Attached"},
				BindingFailureConditions: []string{"gpu.cohdi.io/AttachFailed"},
				Taints:                   []resourceapi.DeviceTaint{{Key: "gpu.cohdi.io/unavailable", Value: "NoCapacity", Effect: "NoSchedule"}},
			}},
		},
	}
	if diff := cmp.Diff(want, Slices(o)); diff != "" {
		t.Errorf("slices (-want +got):\n%s", diff)
	}
}

// TestSlices_limits lays out a large pool within what the API takes, each unit's two entries on one counter
// that exists once.
func TestSlices_limits(t *testing.T) {
	const n = 600
	counters, entries := map[string]string{}, map[string]int{}
	kinds := ""
	for _, s := range Slices(offersOf(n)) {
		switch {
		case len(s.SharedCounters) > 0:
			kinds += "c"
			if len(s.Devices) > 0 || len(s.SharedCounters) > 8 {
				t.Errorf("a counter slice with %d sets and %d devices", len(s.SharedCounters), len(s.Devices))
			}
		case s.Devices[0].NodeName != nil:
			kinds += "r"
		default:
			kinds += "f"
		}
		if len(s.Devices) > 64 {
			t.Errorf("%d devices in a slice", len(s.Devices))
		}
		for _, set := range s.SharedCounters {
			if len(set.Counters) > 32 {
				t.Errorf("%d counters in set %s", len(set.Counters), set.Name)
			}
			for name := range set.Counters {
				if other, twice := counters[name]; twice {
					t.Errorf("counter %s in sets %s and %s", name, other, set.Name)
				}
				counters[name] = set.Name
			}
		}
		for _, d := range s.Devices {
			unit, _ := device.UnitOfEntry(d.Name)
			entries[string(unit)]++
			if c := d.ConsumesCounters; len(c) != 1 || c[0].CounterSet != counters[string(unit)] || len(c[0].Counters) != 1 {
				t.Errorf("%s consumes %v", d.Name, c)
			}
		}
	}
	if want := "ccc" + "rrrrrrrrrr" + "ffffffffff"; kinds != want {
		t.Errorf("order of slices %s, want %s", kinds, want)
	}
	for name := range counters {
		if entries[name] != 2 {
			t.Errorf("unit %s has %d entries", name, entries[name])
		}
	}
	if len(counters) != n {
		t.Errorf("%d counters for %d units", len(counters), n)
	}
}

// TestSlices_of_a_unit_without_model: its selector must stay one that the API takes.
func TestSlices_of_a_unit_without_model(t *testing.T) {
	o := offersOf(1)
	o.OnCall[0][0].Model = ""
	got := Slices(o)[2].Devices[0].NodeSelector.NodeSelectorTerms[0].MatchExpressions
	if len(got) != 1 || got[0].Key != "gpu.cohdi.io/fabric" {
		t.Errorf("selector %v", got)
	}
}

// server is client-go's fake with names, versions and dry runs, and with feature gates that can be off.
type server struct {
	*fake.Clientset
	t *testing.T

	mu      sync.Mutex
	version int
	writes  []string
	// store changes what is stored, or refuses it.
	store func(*resourceapi.ResourceSlice) error
}

var slicesResource = resourceapi.SchemeGroupVersion.WithResource("resourceslices")

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{Clientset: fake.NewSimpleClientset(), t: t, version: 100}
	s.PrependReactor("list", "resourceslices", s.list)
	s.PrependReactor("create", "resourceslices", s.create)
	s.PrependReactor("update", "resourceslices", s.update)
	s.PrependReactor("delete", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.writes = append(s.writes, "delete "+index(as[clienttesting.DeleteAction](t, a).GetName()))
		return false, nil, nil
	})
	return s
}

// index is the number of the slice that the controller puts in front of its name.
func index(name string) string {
	n, err := strconv.ParseInt(name[:5], 16, 32)
	if err != nil {
		return name
	}
	return strconv.FormatInt(n, 10)
}

func (s *server) set(store func(*resourceapi.ResourceSlice) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store = store
}

func (s *server) admit(obj *resourceapi.ResourceSlice) error {
	if s.store != nil {
		if err := s.store(obj); err != nil {
			return err
		}
	}
	for i := range obj.Spec.Devices {
		for j := range obj.Spec.Devices[i].Taints {
			if taint := &obj.Spec.Devices[i].Taints[j]; taint.TimeAdded == nil {
				taint.TimeAdded = new(metav1.NewTime(time.Now().Truncate(time.Second)))
			}
		}
	}
	return nil
}

// list selects by field, which the fake does not.
func (s *server) list(a clienttesting.Action) (bool, runtime.Object, error) {
	list := as[clienttesting.ListActionImpl](s.t, a)
	obj, err := s.Tracker().List(slicesResource, list.Kind, "", list.ListOptions)
	if err != nil {
		return true, nil, err
	}
	all := as[*resourceapi.ResourceSliceList](s.t, obj)
	all.Items = slices.DeleteFunc(all.Items, func(i resourceapi.ResourceSlice) bool {
		return !list.ListRestrictions.Fields.Matches(fields.Set{
			resourceapi.ResourceSliceSelectorDriver:   i.Spec.Driver,
			resourceapi.ResourceSliceSelectorNodeName: ptr.Deref(i.Spec.NodeName, ""),
			resourceapi.ResourceSliceSelectorPoolName: i.Spec.Pool.Name,
		})
	})
	return true, all, nil
}

func (s *server) create(a clienttesting.Action) (bool, runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	create := as[clienttesting.CreateActionImpl](s.t, a)
	obj := as[*resourceapi.ResourceSlice](s.t, create.Object).DeepCopy()
	if err := s.admit(obj); err != nil {
		return true, nil, err
	}
	if len(create.CreateOptions.DryRun) > 0 {
		return true, obj, nil
	}
	s.version++
	obj.Name = obj.GenerateName + strconv.Itoa(s.version)
	obj.UID, obj.ResourceVersion = types.UID("uid-"+obj.Name), strconv.Itoa(s.version)
	s.writes = append(s.writes, "create "+index(obj.Name))
	return true, obj.DeepCopy(), s.Tracker().Create(slicesResource, obj, "")
}

func (s *server) update(a clienttesting.Action) (bool, runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	obj := as[*resourceapi.ResourceSlice](s.t, as[clienttesting.UpdateActionImpl](s.t, a).Object).DeepCopy()
	have, err := s.Tracker().Get(slicesResource, "", obj.Name)
	if err != nil {
		return true, nil, err
	}
	if as[*resourceapi.ResourceSlice](s.t, have).ResourceVersion != obj.ResourceVersion {
		return true, nil, apierrors.NewConflict(slicesResource.GroupResource(), obj.Name, errors.New("modified"))
	}
	if err := s.admit(obj); err != nil {
		return true, nil, err
	}
	s.version++
	obj.ResourceVersion = strconv.Itoa(s.version)
	s.writes = append(s.writes, "update "+index(obj.Name))
	return true, obj.DeepCopy(), s.Tracker().Update(slicesResource, obj, "")
}

func (s *server) taken() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.writes
	s.writes = nil
	return w
}

// stored returns the slices of the pool by index, and their one generation.
func (s *server) stored() (all []resourceapi.ResourceSlice, generation int64) {
	s.t.Helper()
	list, err := s.ResourceV1().ResourceSlices().List(s.t.Context(), metav1.ListOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, obj := range list.Items {
		if obj.Spec.Pool.Name != "fabric-0" {
			continue
		}
		if generation != 0 && obj.Spec.Pool.Generation != generation {
			s.t.Errorf("slices of generations %d and %d", generation, obj.Spec.Pool.Generation)
		}
		generation = obj.Spec.Pool.Generation
		all = append(all, obj)
	}
	slices.SortFunc(all, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	return all, generation
}

// term is a Publisher that runs until it is ended.
type term struct {
	*Publisher
	end func()

	mu      sync.Mutex
	dropped []string
}

func begin(t *testing.T, s *server) *term {
	t.Helper()
	m := &term{}
	p, err := New(Options{Client: s, Fabric: "0", Clock: clock.RealClock{}, Changed: func() {}, Dropped: func(f []string) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.dropped = append(m.dropped, f...)
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := p.Published(); ok {
		t.Error("published before anything was read")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := p.Run(ctx); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	}()
	m.Publisher, m.end = p, func() { cancel(); <-done; synctest.Wait() }
	t.Cleanup(m.end)
	settle()
	return m
}

// settle lets everything happen that is due within 5 s.
func settle() {
	time.Sleep(5 * time.Second)
	synctest.Wait()
}

func (m *term) publish(t *testing.T, o pool.Offers) {
	t.Helper()
	m.Publish(t.Context(), o)
	settle()
}

func TestPublisher_sends_one_slice_at_a_time(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		m := begin(t, s)
		if p, ok := m.Published(); !ok || len(p.Units) != 0 {
			t.Errorf("an empty cluster shows %v, %v", p, ok)
		}
		o := offersOf(70) // 1 counter slice, 2 ready, 2 fabric
		m.publish(t, o)
		if diff := cmp.Diff([]string{"create 0", "create 1", "create 2", "create 3", "create 4"}, s.taken()); diff != "" {
			t.Errorf("first writes (-want +got):\n%s", diff)
		}
		all, generation := s.stored()
		for i := range all {
			if len(all[i].OwnerReferences) != 0 || all[i].Spec.NodeName != nil || all[i].Spec.Pool.ResourceSliceCount != 5 {
				t.Errorf("slice %d: owners %v, node %v, %d slices", i, all[i].OwnerReferences, all[i].Spec.NodeName, all[i].Spec.Pool.ResourceSliceCount)
			}
		}

		m.publish(t, o)
		if got := s.taken(); len(got) != 0 {
			t.Errorf("the same again wrote %v", got)
		}

		o = taint(o, "a100-3", pool.NoSchedule)
		m.publish(t, o)
		if diff := cmp.Diff([]string{"update 3"}, s.taken()); diff != "" {
			t.Errorf("one change (-want +got):\n%s", diff)
		}

		o = taint(taint(taint(o, "a100-3", pool.NoTaint), "a100-69-ready", pool.NoTaint), "a100-0-ready", pool.NoTaint)
		m.publish(t, o)
		if diff := cmp.Diff([]string{"update 1", "update 2", "update 3"}, s.taken()); diff != "" {
			t.Errorf("three changes (-want +got):\n%s", diff)
		}
		if _, now := s.stored(); now != generation {
			t.Errorf("generation %d became %d: the pool was incomplete for a moment", generation, now)
		}
		p, ok := m.Published()
		if !ok || !slices.Equal(p.Units, o.Units) {
			t.Errorf("shown %v: %v", ok, p.Units)
		}
		if p.Effects["a100-0-ready"] != pool.NoTaint || p.Effects["a100-1-ready"] != pool.NoSchedule || len(p.Effects) != 140 {
			t.Errorf("%d effects: %v", len(p.Effects), p.Effects)
		}
	})
}

// TestPublisher_burst: what comes while a slice is under way is sent as one change of each slice, not as many.
func TestPublisher_burst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		m := begin(t, s)
		o := offersOf(130) // 1 counter slice, 3 ready, 3 fabric
		m.publish(t, o)
		_, generation := s.stored()
		s.taken()
		// 130 units are taken and attached one after the other while the first write is under way.
		under := make(chan struct{})
		s.set(func(*resourceapi.ResourceSlice) error { <-under; return nil })
		for i, u := range o.Units {
			o = taint(taint(o, u.Entry(), pool.NoSchedule), u.ReadyEntry(), pool.NoTaint)
			m.Publish(t.Context(), o)
			if i == 0 {
				synctest.Wait()
			}
		}
		close(under)
		settle()
		want := []string{"update 1", "update 1", "update 2", "update 3", "update 4", "update 5", "update 6"}
		if diff := cmp.Diff(want, s.taken()); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
		if _, now := s.stored(); now != generation {
			t.Errorf("generation %d became %d: the pool was incomplete for a moment", generation, now)
		}
		p, _ := m.Published()
		for _, u := range o.Units {
			if p.Effects[u.Entry()] != pool.NoSchedule || p.Effects[u.ReadyEntry()] != pool.NoTaint {
				t.Fatalf("%s is shown as %q, %q", u, p.Effects[u.Entry()], p.Effects[u.ReadyEntry()])
			}
		}
	})
}

// TestPublisher_sizes: pools around the limit of a slice are read back in their order, also when they grow or
// shrink at their end.
func TestPublisher_sizes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		m := begin(t, s)
		for _, tc := range []struct{ units, slices int }{{64, 3}, {65, 5}, {128, 5}, {200, 9}, {300, 12}, {128, 5}, {64, 3}, {0, 0}, {65, 5}} {
			o := offersOf(tc.units)
			m.publish(t, o)
			p, ok := m.Published()
			if all, _ := s.stored(); !ok || !slices.Equal(p.Units, o.Units) || len(all) != tc.slices {
				t.Errorf("%d units: %d shown, %d slices, want %d", tc.units, len(p.Units), len(all), tc.slices)
			}
			s.taken()
			m.publish(t, o)
			if again := s.taken(); len(again) > 0 {
				t.Errorf("%d units: the same again wrote %v", tc.units, again)
			}
		}
	})
}

func TestPublisher_next_leader_goes_on(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		first := begin(t, s)
		o := offersOf(2)
		first.publish(t, o)
		first.end()
		_, generation := s.stored()
		s.taken()

		second := begin(t, s)
		if p, ok := second.Published(); !ok || !slices.Equal(p.Units, o.Units) {
			t.Fatalf("shown %v: %v", ok, p.Units)
		}
		second.publish(t, taint(taint(o, "a100-0", pool.NoSchedule), "a100-0-ready", pool.NoTaint))
		if diff := cmp.Diff([]string{"update 1", "update 2"}, s.taken()); diff != "" {
			t.Errorf("writes of the next leader (-want +got):\n%s", diff)
		}
		if _, now := s.stored(); now != generation {
			t.Errorf("generation %d became %d", generation, now)
		}

		// The first one is over: what it is told does nothing.
		first.publish(t, offersOf(3))
		time.Sleep(5 * time.Minute)
		if got := s.taken(); len(got) != 0 {
			t.Errorf("writes after the term: %v", got)
		}
	})
}

func TestPublisher_unfinished_change_of_the_last_leader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		first := begin(t, s)
		first.publish(t, offersOf(2))
		first.end()
		// It died while it raised the generation: slice 0 is of the new one.
		all, _ := s.stored()
		all[0].Spec.Pool.Generation++
		if err := s.Tracker().Update(slicesResource, &all[0], ""); err != nil {
			t.Fatal(err)
		}
		second := begin(t, s)
		if p, ok := second.Published(); !ok || len(p.Units) != 2 {
			t.Errorf("shown %v: %v", ok, p.Units)
		}
		second.publish(t, offersOf(2))
		if now, _ := s.stored(); len(now) != 3 {
			t.Errorf("%d slices", len(now))
		}
	})
}

func TestPublisher_leaves_other_pools_alone_and_repairs_its_own(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		foreign := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "n1-own", ResourceVersion: "1"},
			Spec:       resourceapi.ResourceSliceSpec{Driver: device.Driver, NodeName: new("n1"), Pool: resourceapi.ResourcePool{Name: "n1", ResourceSliceCount: 1}},
		}
		if err := s.Tracker().Add(foreign); err != nil {
			t.Fatal(err)
		}
		m := begin(t, s)
		m.publish(t, offersOf(1))
		s.taken()
		all, _ := s.stored()
		if err := s.Tracker().Delete(slicesResource, "", all[1].Name); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if now, _ := s.stored(); len(now) != 3 {
			t.Errorf("%d slices a minute after one was deleted by hand", len(now))
		}
		if _, err := s.Tracker().Get(slicesResource, "", "n1-own"); err != nil {
			t.Error(err)
		}
	})
}

// gateOff drops what the API server drops when the gate is off.
func gateOff(gate string) func(*resourceapi.ResourceSlice) error {
	return func(s *resourceapi.ResourceSlice) error {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			switch gate {
			case gateTaints:
				d.Taints = nil
			case gateBinding:
				d.BindingConditions, d.BindingFailureConditions, d.BindsToNode = nil, nil, nil
			case gatePartition:
				d.ConsumesCounters, d.NodeName, d.NodeSelector = nil, nil, nil
			}
		}
		if gate == gatePartition {
			s.Spec.SharedCounters, s.Spec.PerDeviceNodeSelection = nil, nil
			return apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceSlice").GroupKind(), s.Name,
				field.ErrorList{field.Required(field.NewPath("spec"), "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required")})
		}
		return nil
	}
}

func TestPublisher_gate_off_from_the_start(t *testing.T) {
	for _, gate := range []string{gateTaints, gateBinding, gatePartition} {
		t.Run(gate, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newServer(t)
				s.set(gateOff(gate))
				m := begin(t, s)
				m.publish(t, offersOf(2))
				m.publish(t, taint(offersOf(2), "a100-0", pool.NoSchedule))
				if got := s.taken(); len(got) != 0 {
					t.Errorf("writes: %v", got)
				}
				if !slices.Equal(m.dropped, []string{gate}) {
					t.Errorf("dropped: %v", m.dropped)
				}
			})
		})
	}
}

func TestPublisher_gate_off_later(t *testing.T) {
	for _, gate := range []string{gateTaints, gateBinding} {
		for _, restarted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,restarted=%v", gate, restarted), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newServer(t)
					m := begin(t, s)
					m.publish(t, offersOf(2))
					if restarted {
						m.end()
					}
					s.set(gateOff(gate))
					if restarted {
						m = begin(t, s)
					}
					m.publish(t, taint(offersOf(2), "a100-0", pool.NoSchedule))
					m.publish(t, taint(offersOf(2), "a100-1", pool.NoSchedule))
					if all, _ := s.stored(); len(all) != 0 {
						t.Errorf("%d slices are still there", len(all))
					}
					if !slices.Equal(m.dropped, []string{gate}) {
						t.Errorf("dropped: %v", m.dropped)
					}
				})
			})
		}
	}
}

// TestPublisher_other_field_dropped: what cannot be told apart leaves the entries listed, tainted.
func TestPublisher_other_field_dropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		m := begin(t, s)
		m.publish(t, offersOf(2))
		s.set(func(s *resourceapi.ResourceSlice) error {
			for i := range s.Spec.Devices {
				delete(s.Spec.Devices[i].Attributes, "uuid")
			}
			return nil
		})
		m.publish(t, taint(offersOf(2), "a100-0", pool.NoSchedule))
		m.publish(t, offersOf(2))
		all, _ := s.stored()
		entries := 0
		for i := range all {
			for _, d := range all[i].Spec.Devices {
				entries++
				if effectOf(&d) != pool.NoSchedule {
					t.Errorf("%s can be had", d.Name)
				}
			}
		}
		if entries != 4 || !slices.Equal(m.dropped, []string{"unknown"}) {
			t.Errorf("%d entries, dropped %v", entries, m.dropped)
		}
	})
}

// TestPublisher_probe_refused: a new leader is not known to the admission policy for a moment.
func TestPublisher_probe_refused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		denied := &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: 422, Reason: metav1.StatusReasonInvalid,
			Message: "resourceslices is forbidden: ValidatingAdmissionPolicy 'cohdi-slices' denied request",
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Message: "the leader is another"}}},
		}}
		s.set(func(*resourceapi.ResourceSlice) error { return denied })
		m := begin(t, s)
		m.publish(t, offersOf(1))
		if got := s.taken(); len(got) != 0 {
			t.Fatalf("writes: %v", got)
		}
		s.set(nil)
		settle()
		if all, _ := s.stored(); len(all) != 3 || len(m.dropped) != 0 {
			t.Errorf("%d slices, dropped %v", len(all), m.dropped)
		}
	})
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
