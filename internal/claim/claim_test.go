// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

const allocatedAt = "2026-01-02T03:04:05Z"

var now = time.Date(2026, 1, 2, 3, 4, 10, 0, time.UTC)

// allocated is claim team-a/c1 with the given devices of pool fabric-0 on node n1, used by Pod p1.
func allocated(devices ...string) *resourcev1.ResourceClaim {
	at, err := time.Parse(time.RFC3339, allocatedAt)
	if err != nil {
		panic(err)
	}
	c := &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "c1", UID: "u1", ResourceVersion: "10"},
		Status: resourcev1.ResourceClaimStatus{
			Allocation: &resourcev1.AllocationResult{
				AllocationTimestamp: &metav1.Time{Time: at},
				NodeSelector:        only("n1"),
			},
			ReservedFor: []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "p1", UID: "pod-1"}},
		},
	}
	for i, d := range devices {
		r := resourcev1.DeviceRequestAllocationResult{
			Request: "gpu" + strconv.Itoa(i), Driver: device.Driver, Pool: "fabric-0", Device: d,
		}
		if _, ready := device.UnitOfEntry(d); !ready {
			r.BindingConditions = []string{device.ConditionAttached}
			r.BindingFailureConditions = []string{device.ConditionAttachFailed}
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, r)
	}
	return c
}

// only is the selector that the scheduler writes for a device that binds to one node
// (k8s.io/dynamic-resource-allocation, createNodeSelector).
func only(node string) *corev1.NodeSelector {
	return &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
	}}}
}

func attemptAt(entry string) device.Attempt {
	return device.Attempt{
		Namespace: "team-a", Name: "c1", UID: "u1", AllocatedAt: allocatedAt, Node: "n1", Pool: "fabric-0", Entry: entry,
	}
}

func leaseOf(entry string) device.Lease {
	return device.Lease{
		Fabric: "0", Unit: device.Unit(entry), Node: "n1", Attempt: attemptAt(entry),
		PCI: device.PCIAddress{Bus: 0x3b}, UUID: "GPU-1b7e8d9c-0000-4000-8000-00000000abcd",
	}
}

func TestDemands(t *testing.T) {
	with := func(change func(*resourcev1.ResourceClaim), devices ...string) *resourcev1.ResourceClaim {
		c := allocated(devices...)
		change(c)
		return c
	}
	demand := func(entry string, change func(*pool.Demand)) pool.Demand {
		d := pool.Demand{Attempt: attemptAt(entry), Reserved: true, Consumers: []string{"pod-1"}}
		if change != nil {
			change(&d)
		}
		return d
	}
	condition := func(kind string, status metav1.ConditionStatus) []metav1.Condition {
		return []metav1.Condition{{Type: kind, Status: status}}
	}
	for _, tc := range []struct {
		name  string
		claim *resourcev1.ResourceClaim
		want  []pool.Demand
		bad   []error
	}{
		{name: "not allocated", claim: with(func(c *resourcev1.ResourceClaim) { c.Status.Allocation = nil })},
		{
			name: "two devices, one of them ready", claim: allocated("a100-1", "a100-2-ready"),
			want: []pool.Demand{demand("a100-1", nil), demand("a100-2-ready", nil)},
		},
		{
			name: "not reserved at the moment", claim: with(func(c *resourcev1.ResourceClaim) { c.Status.ReservedFor = nil }, "a100-1"),
			want: []pool.Demand{{Attempt: attemptAt("a100-1")}},
		},
		{
			name: "admin access, other pools and other drivers",
			claim: with(func(c *resourcev1.ResourceClaim) {
				rs := c.Status.Allocation.Devices.Results
				rs[0].AdminAccess, rs[1].Pool, rs[2].Driver = new(true), "fabric-1", "gpu.nvidia.com"
				rs[3].AdminAccess = new(false)
			}, "a100-1", "a100-2", "a100-3", "a100-4"),
			want: []pool.Demand{demand("a100-4", nil)},
		},
		{
			name: "told",
			claim: with(func(c *resourcev1.ResourceClaim) {
				entry := func(d string, cs []metav1.Condition) resourcev1.AllocatedDeviceStatus {
					return resourcev1.AllocatedDeviceStatus{Driver: device.Driver, Pool: "fabric-0", Device: d, Conditions: cs}
				}
				foreign := entry("a100-3", condition(device.ConditionAttached, metav1.ConditionTrue))
				foreign.Driver = "gpu.nvidia.com"
				c.Status.Devices = []resourcev1.AllocatedDeviceStatus{
					entry("a100-1", condition(device.ConditionAttached, metav1.ConditionTrue)),
					entry("a100-2", condition(device.ConditionAttachFailed, metav1.ConditionTrue)),
					foreign,
					entry("a100-4", condition(device.ConditionAttached, metav1.ConditionFalse)),
				}
			}, "a100-1", "a100-2", "a100-3", "a100-4"),
			want: []pool.Demand{
				demand("a100-1", func(d *pool.Demand) { d.Attached = true }),
				demand("a100-2", func(d *pool.Demand) { d.AttachFailed = true }),
				demand("a100-3", nil), demand("a100-4", nil),
			},
		},
		{
			name: "a time in another zone is printed as the API prints it",
			claim: with(func(c *resourcev1.ResourceClaim) {
				c.Status.Allocation.AllocationTimestamp.Time = c.Status.Allocation.AllocationTimestamp.In(time.FixedZone("x", 3600))
			}, "a100-1"),
			want: []pool.Demand{demand("a100-1", nil)},
		},
		{
			name: "no time", claim: with(func(c *resourcev1.ResourceClaim) { c.Status.Allocation.AllocationTimestamp = nil }, "a100-1"),
			bad: []error{errNoTime},
		},
		{
			name: "no node", claim: with(func(c *resourcev1.ResourceClaim) { c.Status.Allocation.NodeSelector = nil }, "a100-1"),
			bad: []error{errNoNode},
		},
		{
			name: "two nodes",
			claim: with(func(c *resourcev1.ResourceClaim) {
				c.Status.Allocation.NodeSelector.NodeSelectorTerms[0].MatchFields[0].Values = []string{"n1", "n2"}
			}, "a100-1"),
			bad: []error{errNoNode},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, bad := demands(tc.claim, func(p string) bool { return p == "fabric-0" })
			if diff := gocmp.Diff(tc.want, got); diff != "" {
				t.Errorf("demands (-want +got):\n%s", diff)
			}
			if len(bad) != len(tc.bad) {
				t.Fatalf("unreadable: %v, want %v", bad, tc.bad)
			}
			for i := range bad {
				if !errors.Is(bad[i], tc.bad[i]) || bad[i].Claim != "team-a/c1" || bad[i].Entry != "a100-1" {
					t.Errorf("unreadable: %v, want %v", bad[i], tc.bad[i])
				}
			}
		})
	}
}

// server is client-go's fake with versions, and with what the API server checks of an apply.
type server struct {
	*fake.Clientset
	t *testing.T

	mu      sync.Mutex
	version int
	// before runs before an apply is looked at: somebody else was faster.
	before func(s *server)
	// refuse, if set, answers applies.
	refuse  error
	applies []clienttesting.PatchActionImpl
	// managed is what each field manager applied last: an apply takes it away.
	managed map[string][]string
}

var claimsResource = resourcev1.SchemeGroupVersion.WithResource("resourceclaims")

func newServer(t *testing.T, claims ...*resourcev1.ResourceClaim) *server {
	t.Helper()
	s := &server{Clientset: fake.NewSimpleClientset(), t: t, version: 100, managed: map[string][]string{}}
	for _, c := range claims {
		if err := s.Tracker().Add(c); err != nil {
			t.Fatal(err)
		}
	}
	s.PrependReactor("patch", "resourceclaims", s.apply)
	return s
}

func (s *server) claim() *resourcev1.ResourceClaim {
	s.t.Helper()
	obj, err := s.Tracker().Get(claimsResource, "team-a", "c1")
	if err != nil {
		s.t.Fatal(err)
	}
	return as[*resourcev1.ResourceClaim](s.t, obj).DeepCopy()
}

// put stores the claim as a new version.
func (s *server) put(c *resourcev1.ResourceClaim) {
	s.t.Helper()
	s.version++
	c.ResourceVersion = strconv.Itoa(s.version)
	if err := s.Tracker().Update(claimsResource, c, c.Namespace); err != nil {
		s.t.Fatal(err)
	}
}

// apply does what the API server does with server-side apply on status.devices (list map keys driver,
// device, pool, shareID; conditions by type).
func (s *server) apply(action clienttesting.Action) (bool, runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := as[clienttesting.PatchActionImpl](s.t, action)
	if a.PatchType != types.ApplyPatchType || a.Subresource != "status" || !ptr.Deref(a.PatchOptions.Force, false) {
		s.t.Errorf("patch of type %s on subresource %q, options %+v", a.PatchType, a.Subresource, a.PatchOptions)
	}
	if s.before != nil {
		before := s.before
		s.before = nil
		before(s)
	}
	if s.refuse != nil {
		return true, nil, s.refuse
	}
	s.applies = append(s.applies, a)
	var applied resourcev1.ResourceClaim
	if err := json.Unmarshal(a.Patch, &applied); err != nil {
		s.t.Fatal(err)
	}
	have := s.claim()
	if applied.ResourceVersion != have.ResourceVersion || applied.UID != have.UID {
		return true, nil, apierrors.NewConflict(claimsResource.GroupResource(), have.Name, errors.New("the object has been modified"))
	}
	manager := a.PatchOptions.FieldManager
	key := func(d resourcev1.AllocatedDeviceStatus) string { return d.Driver + " " + d.Pool + " " + d.Device }
	for _, owned := range s.managed[manager] {
		have.Status.Devices = slices.DeleteFunc(have.Status.Devices, func(d resourcev1.AllocatedDeviceStatus) bool { return key(d) == owned })
	}
	s.managed[manager] = nil
	for _, d := range applied.Status.Devices {
		s.managed[manager] = append(s.managed[manager], key(d))
		have.Status.Devices = append(have.Status.Devices, d)
	}
	s.put(have)
	return true, have, nil
}

func (s *server) claims() *Claims {
	return New(Options{Client: s, Clock: clocktesting.NewFakePassiveClock(now)})
}

// conditions prints the claim's conditions as device=type:status:reason.
func conditions(c *resourcev1.ResourceClaim) []string {
	var all []string
	for _, d := range c.Status.Devices {
		for _, cond := range d.Conditions {
			all = append(all, fmt.Sprintf("%s=%s:%s:%s", d.Device, strings.TrimPrefix(cond.Type, device.Driver+"/"), cond.Status, cond.Reason))
		}
	}
	slices.Sort(all)
	return all
}

func TestTellAttached(t *testing.T) {
	s := newServer(t, allocated("a100-1", "a100-2-ready"))
	if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); err != nil {
		t.Fatal(err)
	}
	want := []resourcev1.AllocatedDeviceStatus{{
		Driver: device.Driver, Pool: "fabric-0", Device: "a100-1",
		Conditions: []metav1.Condition{{
			Type: "gpu.cohdi.io/Attached", Status: metav1.ConditionTrue, Reason: "Attached",
			Message:            "GPU-1b7e8d9c-0000-4000-8000-00000000abcd at 0000:3b:00.0 on node n1",
			LastTransitionTime: metav1.NewTime(now),
		}},
	}}
	if diff := gocmp.Diff(want, s.claim().Status.Devices, cmpopts.EquateApproxTime(0)); diff != "" {
		t.Errorf("status.devices (-want +got):\n%s", diff)
	}
	if got := s.applies[0].PatchOptions.FieldManager; got != "cohdi-agent/a100-1" {
		t.Errorf("field manager %q", got)
	}
	// Again: nothing is written.
	if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); err != nil {
		t.Fatal(err)
	}
	// A ready entry: nobody waits.
	if err := s.claims().TellAttached(t.Context(), leaseOf("a100-2-ready")); err != nil {
		t.Error(err)
	}
	if got := len(s.applies); got != 1 {
		t.Errorf("%d writes", got)
	}
}

func TestTellAttached_only_the_stored_attempt(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*resourcev1.ResourceClaim)
	}{
		{"made anew", func(c *resourcev1.ResourceClaim) { c.UID = "u2" }},
		{"not allocated", func(c *resourcev1.ResourceClaim) { c.Status.Allocation = nil }},
		{"allocated anew", func(c *resourcev1.ResourceClaim) {
			c.Status.Allocation.AllocationTimestamp.Time = c.Status.Allocation.AllocationTimestamp.Add(time.Second)
		}},
		{"on another node", func(c *resourcev1.ResourceClaim) { c.Status.Allocation.NodeSelector = only("n2") }},
		{"with another device", func(c *resourcev1.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Device = "a100-2" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := allocated("a100-1")
			tc.change(c)
			s := newServer(t, c)
			if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); !errors.Is(err, ErrGone) {
				t.Errorf("told before: %v", err)
			}
			if has, err := s.claims().Has(t.Context(), attemptAt("a100-1")); has || err != nil {
				t.Errorf("Has = %v, %v", has, err)
			}

			// The same, happening between our look and our write.
			s = newServer(t, allocated("a100-1"))
			s.before = func(s *server) {
				c := s.claim()
				tc.change(c)
				s.put(c)
			}
			if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); !errors.Is(err, ErrGone) {
				t.Errorf("told in between: %v", err)
			}
			if got := conditions(s.claim()); len(got) != 0 {
				t.Errorf("conditions: %v", got)
			}
		})
	}
	s := newServer(t)
	if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); !errors.Is(err, ErrGone) {
		t.Errorf("deleted: %v", err)
	}
}

func TestTellAttached_conflict_that_changes_nothing_for_us(t *testing.T) {
	s := newServer(t, allocated("a100-1"))
	s.before = func(s *server) {
		c := s.claim()
		c.Labels = map[string]string{"a": "b"}
		s.put(c)
	}
	if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); err != nil {
		t.Fatal(err)
	}
	if got := conditions(s.claim()); !slices.Equal(got, []string{"a100-1=Attached:True:Attached"}) {
		t.Errorf("conditions: %v", got)
	}
}

func TestTellAttached_conflict_each_time(t *testing.T) {
	s := newServer(t, allocated("a100-1"))
	s.refuse = apierrors.NewConflict(claimsResource.GroupResource(), "c1", errors.New("modified"))
	if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); !errors.Is(err, ErrConflict) {
		t.Error(err)
	}
}

func TestTell_says_which_right_is_missing(t *testing.T) {
	forbidden := field.ErrorList{field.Forbidden(field.NewPath("status", "devices"), "changing status.devices requires …")}
	for _, refuse := range []error{
		apierrors.NewForbidden(claimsResource.GroupResource(), "c1", errors.New("no")),
		apierrors.NewInvalid(resourcev1.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), "c1", forbidden),
	} {
		s := newServer(t, allocated("a100-1"))
		s.refuse = refuse
		if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); !errors.Is(err, ErrForbidden) {
			t.Error(err)
		}
		if err := s.claims().Refuse(t.Context(), []device.Attempt{attemptAt("a100-1")}, "NoCapacity", ""); !errors.Is(err, ErrForbidden) {
			t.Error(err)
		}
	}
	other := field.ErrorList{field.Invalid(field.NewPath("status", "devices"), "", "…")}
	s := newServer(t, allocated("a100-1"))
	s.refuse = apierrors.NewInvalid(resourcev1.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), "c1", other)
	if err := s.claims().TellAttached(t.Context(), leaseOf("a100-1")); err == nil || errors.Is(err, ErrForbidden) {
		t.Error(err)
	}
}

func TestRefuse_all_devices_that_are_not_attached(t *testing.T) {
	c := allocated("a100-1", "a100-2", "a100-3", "a100-4-ready")
	c.Status.Devices = []resourcev1.AllocatedDeviceStatus{{Driver: "gpu.nvidia.com", Pool: "n1", Device: "gpu-0", Conditions: []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Ok"}}}}
	s := newServer(t, c)
	if err := s.claims().TellAttached(t.Context(), leaseOf("a100-2")); err != nil {
		t.Fatal(err)
	}
	gone := attemptAt("a100-9")
	gone.Name, gone.UID = "c2", "u2"
	attempts := []device.Attempt{gone, attemptAt("a100-1"), attemptAt("a100-2"), attemptAt("a100-3"), attemptAt("a100-4-ready")}
	for range 2 { // the second time changes nothing
		if err := s.claims().Refuse(t.Context(), attempts, "NoCapacity", "none left"); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"a100-1=AttachFailed:True:NoCapacity", "a100-2=Attached:True:Attached", "a100-3=AttachFailed:True:NoCapacity", "gpu-0=Ready:True:Ok",
	}
	if diff := gocmp.Diff(want, conditions(s.claim())); diff != "" {
		t.Errorf("conditions (-want +got):\n%s", diff)
	}
	if got := len(s.applies); got != 3 {
		t.Errorf("%d writes, want one a device", got)
	}
}

func TestRefuse_late_does_not_hit_the_next_attempt(t *testing.T) {
	s := newServer(t, allocated("a100-1", "a100-2"))
	s.before = func(s *server) {
		c := s.claim()
		c.Status.Allocation.AllocationTimestamp.Time = c.Status.Allocation.AllocationTimestamp.Add(time.Minute)
		s.put(c)
	}
	if err := s.claims().Refuse(t.Context(), []device.Attempt{attemptAt("a100-1"), attemptAt("a100-2")}, "NoCapacity", ""); err != nil {
		t.Fatal(err)
	}
	if got := conditions(s.claim()); len(got) != 0 {
		t.Errorf("the next attempt was told: %v", got)
	}
}

func TestRefuse_one_failure_does_not_stop_the_others(t *testing.T) {
	second := allocated("a100-2")
	second.Name, second.UID = "c2", "u2"
	s := newServer(t, allocated("a100-1"), second)
	s.PrependReactor("get", "resourceclaims", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if as[clienttesting.GetAction](t, a).GetName() == "c2" {
			return true, nil, errors.New("connection reset")
		}
		return false, nil, nil
	})
	other := attemptAt("a100-2")
	other.Name, other.UID = "c2", "u2"
	if err := s.claims().Refuse(t.Context(), []device.Attempt{other, attemptAt("a100-1")}, "NoCapacity", ""); err == nil {
		t.Error("a failure was not reported")
	}
	if got := conditions(s.claim()); !slices.Equal(got, []string{"a100-1=AttachFailed:True:NoCapacity"}) {
		t.Errorf("conditions: %v", got)
	}
}

func TestRefuse_fits_the_limits_of_a_condition(t *testing.T) {
	for _, tc := range []struct {
		reason, wantReason string
		message            string
		wantMessage        int
	}{
		{"NoCapacity", "NoCapacity", "short", 5},
		{"no capacity", "AttachFailed", "", 0},
		{"", "AttachFailed", "", 0},
		{strings.Repeat("x", longestReason+1), "AttachFailed", strings.Repeat("x", longestMessage), longestMessage},
		{"A", "A", strings.Repeat("ä", longestMessage), longestMessage},
		{"A", "A", "x" + strings.Repeat("ä", longestMessage), longestMessage},
	} {
		s := newServer(t, allocated("a100-1"))
		if err := s.claims().Refuse(t.Context(), []device.Attempt{attemptAt("a100-1")}, tc.reason, tc.message); err != nil {
			t.Fatal(err)
		}
		got := s.claim().Status.Devices[0].Conditions[0]
		if got.Reason != tc.wantReason || len(got.Message) > tc.wantMessage || len(got.Message) < tc.wantMessage-1 || strings.ContainsRune(got.Message, '\uFFFD') {
			t.Errorf("reason %.20q… message of %d bytes, want %q and %d", got.Reason, len(got.Message), tc.wantReason, tc.wantMessage)
		}
	}
}

func TestHas_and_Consumers(t *testing.T) {
	s := newServer(t, allocated("a100-1"))
	if has, err := s.claims().Has(t.Context(), attemptAt("a100-1")); !has || err != nil {
		t.Errorf("Has = %v, %v", has, err)
	}
	got, err := s.claims().Consumers(t.Context(), attemptAt("a100-1"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff([]Consumer{{Namespace: "team-a", Name: "p1", UID: "pod-1", Resource: "pods"}}, got); diff != "" {
		t.Errorf("consumers (-want +got):\n%s", diff)
	}
}

func TestLive(t *testing.T) {
	second := allocated("a100-1-ready", "a100-2")
	second.Name, second.UID = "c2", "u2"
	odd := allocated("a100-3")
	odd.Name, odd.UID, odd.Status.Allocation.NodeSelector = "c3", "u3", nil
	s := newServer(t, allocated("a100-1"), second, odd)
	got, err := s.claims().Live(t.Context(), "0", "a100-1")
	if err != nil {
		t.Fatal(err)
	}
	ready := attemptAt("a100-1-ready")
	ready.Name, ready.UID = "c2", "u2"
	slices.SortFunc(got, func(a, b device.Attempt) int { return cmp.Compare(a.Name, b.Name) })
	if diff := gocmp.Diff([]device.Attempt{attemptAt("a100-1"), ready}, got); diff != "" {
		t.Errorf("attempts (-want +got):\n%s", diff)
	}
	if got, err := s.claims().Live(t.Context(), "1", "a100-1"); len(got) != 0 || err != nil {
		t.Errorf("on another fabric: %v, %v", got, err)
	}
	// Whose it is cannot be read: that is not "nobody's".
	var unreadable *ReadError
	if _, err := s.claims().Live(t.Context(), "0", "a100-3"); !errors.As(err, &unreadable) {
		t.Errorf("unreadable allocation: %v", err)
	}
}

func TestSelfCheck(t *testing.T) {
	s := newServer(t)
	lacks := map[string]bool{}
	s.PrependReactor("create", "selfsubjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review := as[*authorizationv1.SelfSubjectAccessReview](t, as[clienttesting.CreateAction](t, a).GetObject())
		r := review.Spec.ResourceAttributes
		if r.Group != "resource.k8s.io" || r.Resource != "resourceclaims" || r.Namespace != "" {
			t.Errorf("asked for %+v", r)
		}
		review.Status.Allowed = !lacks[strings.Join([]string{r.Verb, r.Subresource, r.Name}, " ")]
		return true, review, nil
	})
	missing, err := s.claims().SelfCheck(t.Context())
	if len(missing) != 0 || err != nil {
		t.Errorf("missing %q, %v", missing, err)
	}
	lacks["patch status "] = true
	lacks["associated-node:patch driver gpu.cohdi.io"] = true
	missing, err = s.claims().SelfCheck(t.Context())
	want := []string{"patch resourceclaims/status", "associated-node:patch resourceclaims/driver gpu.cohdi.io"}
	if !slices.Equal(missing, want) || err != nil {
		t.Errorf("missing %q, %v, want %q", missing, err, want)
	}
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := allocated("gpu-0")
		other.Name, other.Status.Allocation.Devices.Results[0].Driver = "c2", "gpu.nvidia.com"
		odd := allocated("a100-3")
		odd.Name, odd.Status.Allocation.AllocationTimestamp = "c3", nil
		s := newServer(t, allocated("a100-2", "a100-1"), other, odd)
		var changed []string
		w, err := NewWatch("0", Options{Client: s, Clock: clocktesting.NewFakePassiveClock(now)}, func(c string) { changed = append(changed, c) })
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer func() { cancel(); synctest.Wait() }()
		go w.Run(ctx)
		synctest.Wait()
		if !w.HasSynced() {
			t.Fatal("not synced")
		}
		entries := func() []string {
			var all []string
			for _, d := range w.Demands() {
				all = append(all, d.Attempt.Claim()+" "+d.Attempt.Entry)
			}
			return all
		}
		if diff := gocmp.Diff([]string{"team-a/c1 a100-1", "team-a/c1 a100-2"}, entries()); diff != "" {
			t.Errorf("demands (-want +got):\n%s", diff)
		}
		if bad := w.Unreadable(); len(bad) != 1 || bad[0].Claim != "team-a/c3" {
			t.Errorf("unreadable: %v", bad)
		}
		changed = nil
		// The scheduler takes the allocation back; later the claim goes.
		c := s.claim()
		c.Status.Allocation = nil
		s.put(c)
		synctest.Wait()
		if got := entries(); len(got) != 0 {
			t.Errorf("demands: %v", got)
		}
		if err := s.Tracker().Delete(claimsResource, "team-a", "c1"); err != nil {
			t.Fatal(err)
		}
		other.Labels = map[string]string{"a": "b"}
		s.put(other)
		if err := s.Tracker().Delete(claimsResource, "team-a", "c3"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if diff := gocmp.Diff([]string{"team-a/c1", "team-a/c3"}, changed); diff != "" {
			t.Errorf("calls of changed (-want +got):\n%s", diff)
		}
		if bad := w.Unreadable(); len(bad) != 0 {
			t.Errorf("unreadable: %v", bad)
		}
	})
}

func TestSlim_keeps_what_demands_read(t *testing.T) {
	c := allocated("a100-1")
	c.Status.Devices = []resourcev1.AllocatedDeviceStatus{{Driver: device.Driver, Pool: "fabric-0", Device: "a100-1", Conditions: []metav1.Condition{{Type: device.ConditionAttached, Status: metav1.ConditionTrue}}}}
	want, _ := demands(c, func(string) bool { return true })
	obj, err := slim(c.DeepCopy())
	if err != nil {
		t.Fatal(err)
	}
	got, _ := demands(as[*resourcev1.ResourceClaim](t, obj), func(string) bool { return true })
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("demands (-full +slim):\n%s", diff)
	}
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

// TestOnlookers: a claim with admin access that was given what is attached nowhere demands nothing and waits in vain.
func TestOnlookers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := allocated("a100-0", "a100-1", "a100-2-ready", "a100-3", "a100-4")
		rs := c.Status.Allocation.Devices.Results
		for _, i := range []int{1, 2, 3, 4} {
			rs[i].AdminAccess = new(true)
		}
		rs[3].Pool, rs[4].Driver = "fabric-1", "gpu.nvidia.com"
		s := newServer(t, c)
		news := 0
		w, err := NewWatch("0", Options{Client: s, Clock: clocktesting.NewFakePassiveClock(now)}, func(string) { news++ })
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer func() { cancel(); synctest.Wait() }()
		go w.Run(ctx)
		synctest.Wait()
		got := w.Onlookers()
		if len(got) != 1 || got[0].Attempt.Entry != "a100-1" || len(got[0].Pods) != 1 || got[0].Pods[0].Name != "p1" || len(w.Demands()) != 1 || news == 0 {
			t.Errorf("onlookers %+v, demands %+v, %d news; want a100-1 for p1, and a100-0 to be attached", got, w.Demands(), news)
		}
		c = s.claim()
		c.Status.Allocation = nil
		s.put(c)
		synctest.Wait()
		if got := w.Onlookers(); len(got) > 0 {
			t.Errorf("onlookers of no allocation: %+v", got)
		}
	})
}
