// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2/ktesting"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/claim"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

func TestSaid(t *testing.T) {
	claimed := device.Attempt{Namespace: "team", Name: "c"}
	for name, tc := range map[string]struct{ pairs, want []any }{
		"all empty": {[]any{
			"claim", claimOf(device.Attempt{}), "device", "", "uuid", device.GPUUUID(""), "pci", device.PCIAddress{}, "at", time.Time{}, "err", nil,
		}, []any{}},
		"what is false or none is said": {[]any{"idle", false, "took", time.Duration(0), "n", 0}, []any{"idle", false, "took", time.Duration(0), "n", 0}},
		"some":                          {[]any{"claim", claimOf(claimed), "uuid", device.GPUUUID(""), "unit", device.Unit("a100-0")}, []any{"claim", "team/c", "unit", device.Unit("a100-0")}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, said(tc.pairs...)); diff != "" {
				t.Errorf("pairs (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLacking: a Node is told once what it lacks for long, that it is another thing now, and that it is over.
func TestLacking(t *testing.T) {
	o := &leaderObserver{observer: testObserver(t), fabric: "0", onlookers: func() []claim.Onlooker { return nil }}
	fake := clocktesting.NewFakeClock(time.Unix(1000, 0))
	o.clock = fake
	var events recorded
	o.setEvents(nodestatus.NewEvents(&events, "n1", "uid-1"))
	one := pool.Lack{Node: "n2", NodeUID: "uid-2", Model: "a100", Least: 2, Lacks: 1, Why: "no more are free"}
	both := one
	both.Lacks = 2
	lacks, over := "Node n2 (uid-2): GPUMinimumLacking", "Node n2 (uid-2): GPUMinimumMet"
	for i, step := range []struct {
		after time.Duration
		lack  []pool.Lack
		want  []string
	}{
		{0, []pool.Lack{one}, nil},
		{lackSettles / 2, nil, nil}, // an attach failed, and the next one is on its way
		{lackSettles, []pool.Lack{one}, nil},
		{lackSettles / 2, []pool.Lack{one}, nil},
		{lackSettles / 2, []pool.Lack{one}, []string{lacks}},
		{time.Hour, []pool.Lack{one}, []string{lacks}},
		{time.Hour, []pool.Lack{both}, []string{lacks}},
		{lackSettles, []pool.Lack{both}, []string{lacks, lacks}},
		{time.Hour, nil, []string{lacks, lacks}},
		{lackSettles, nil, []string{lacks, lacks, over}},
		{lackSettles, nil, []string{lacks, lacks, over}},
		{lackSettles, nil, []string{lacks, lacks, over}},
	} {
		fake.Step(step.after)
		o.Decided(t.Context(), pool.Plan{Lacking: step.lack})
		if diff := cmp.Diff(step.want, []string(events)); diff != "" {
			t.Fatalf("events after step %d (-want +got):\n%s", i, diff)
		}
	}
	if len(o.lacks) > 0 {
		t.Errorf("what is over is remembered: %v", o.lacks)
	}
}

// TestOnlookers: a claim with admin access that waits in vain is told so once for each allocation, as soon as a Pod waits.
func TestOnlookers(t *testing.T) {
	var now []claim.Onlooker
	o := &leaderObserver{observer: testObserver(t), fabric: "0", onlookers: func() []claim.Onlooker { return now }}
	var events recorded
	o.setEvents(nodestatus.NewEvents(&events, "n1", "uid-1"))
	waits := claim.Onlooker{Attempt: device.Attempt{Namespace: "ns", Name: "watch", UID: "wu", AllocatedAt: "1", Entry: "a100-0"}}
	reserved := waits
	reserved.Pods = []claim.Consumer{{Namespace: "ns", Name: "p1", UID: "pu", Resource: "pods"}, {Namespace: "ns", Name: "g", Resource: "podgroups"}}
	again := reserved
	again.Attempt.AllocatedAt = "2"
	told := []string{"ResourceClaim watch (wu): GPUAdminAccess", "Pod p1 (pu): GPUAdminAccess"}
	for i, step := range []struct {
		all  []claim.Onlooker
		want []string
	}{
		{nil, nil},
		{[]claim.Onlooker{waits}, nil},
		{[]claim.Onlooker{reserved}, told},
		{[]claim.Onlooker{reserved}, told},
		{[]claim.Onlooker{again}, append(told, told...)},
		{nil, append(told, told...)},
	} {
		now = step.all
		o.Decided(t.Context(), pool.Plan{})
		if diff := cmp.Diff(step.want, []string(events)); diff != "" {
			t.Fatalf("events after step %d (-want +got):\n%s", i, diff)
		}
	}
	if len(o.looked) > 0 {
		t.Errorf("what is over is remembered: %v", o.looked)
	}
}

// recorded are events, as lines.
type recorded []string

func (r *recorded) Eventf(regarding, _ runtime.Object, _, reason, _, _ string, _ ...any) {
	if on, ok := regarding.(*corev1.ObjectReference); ok {
		*r = append(*r, fmt.Sprintf("%s %s (%s): %s", on.Kind, on.Name, on.UID, reason))
	}
}

// TestOperated: it is the leader that sends a unit back, so it tells the holder's Node. What did not go through
// is not told.
func TestOperated(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	var events recorded
	m := metrics.New(build(), nil)
	o := &observer{log: logger, clock: clocktesting.NewFakePassiveClock(time.Unix(0, 0)), metrics: m, stages: newStages(m)}
	o.setEvents(nodestatus.NewEvents(&events, "n1", "uid-1"))
	held := device.Lease{Fabric: "0", Unit: "a100-0", Model: "a100", Node: "n2", NodeUID: "uid-2", Phase: device.Attached}
	o.Operated(t.Context(), pool.Op{Kind: pool.Release, Lease: held, Why: "it was idle for the cool-down"}, nil)
	o.Operated(t.Context(), pool.Op{Kind: pool.Release, Lease: held}, errors.New("no longer the leader"))
	o.Operated(t.Context(), pool.Op{Kind: pool.Assign, Lease: held}, nil)
	if diff := cmp.Diff(recorded{"Node n2 (uid-2): GPUReleasing"}, events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	under, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatalf("the log is a %T", logger.GetSink())
	}
	if log := under.GetBuffer().String(); strings.Contains(log, "claim=") || !strings.Contains(log, `unit="a100-0"`) {
		t.Errorf("log: %s", log)
	}
}

// A refusal is told to each Pod that waits, once, though it waits for two devices; also when one claim is gone.
func TestRefusedTellsPods(t *testing.T) {
	pod := func(name string) claim.Consumer {
		return claim.Consumer{Namespace: "ns", Name: name, UID: "uid-" + name, Resource: "pods"}
	}
	waiting := map[string][]claim.Consumer{
		"c1": {pod("p1"), pod("p2"), {Namespace: "ns", Name: "g", Resource: "podgroups"}}, "c2": {pod("p1")},
	}
	o := &leaderObserver{observer: testObserver(t), fabric: "0", consumers: func(_ context.Context, a device.Attempt) ([]claim.Consumer, error) {
		if all, ok := waiting[a.Name]; ok {
			return all, nil
		}
		return nil, claim.ErrGone
	}}
	var told reasons
	o.setEvents(nodestatus.NewEvents(&told, "n1", "uid"))
	r := pool.Refusal{Reason: "NodeFull", Attempts: []device.Attempt{{Name: "c1"}, {Name: "gone"}, {Name: "c2"}}}
	o.tellPods(t.Context(), r)
	if diff := cmp.Diff(reasons{"Warning GPURefused", "Warning GPURefused"}, told); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	told = nil
	o.tellPods(t.Context(), pool.Refusal{Attempts: []device.Attempt{{Name: "gone"}}})
	if len(told) != 0 {
		t.Errorf("told %v though nobody waits", told)
	}
}

// One and the same failure is told and counted once a minute, with how often it happened; what is new is told at once.
// TestFailedAs: what was attached once and fails later is not counted as a failed attach.
func TestFailedAs(t *testing.T) {
	for _, tc := range []struct {
		before device.Phase
		reason string
		want   string
	}{
		{device.Attaching, "NoCapacity", "AttachFailed"},
		{device.Attaching, "DeviceCritical", "AttachFailed"},
		{device.Attached, "Vanished", "GPULost"},
		{device.Attached, "DeviceCritical", "GPUUnhealthy"},
		{device.Attached, "NotUsable", "GPUUnhealthy"},
	} {
		after := device.Lease{Phase: device.Failed, Failure: device.Failure{Reason: tc.reason}}
		if got := failedAs(device.Lease{Phase: tc.before}, after); got != tc.want || !slices.Contains(metrics.Reasons(), got) {
			t.Errorf("%s, %s: %s, want %s", tc.before, tc.reason, got, tc.want)
		}
	}
}

func TestActedTellsARepeatedFailureOnce(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	clk := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	m := metrics.New(build(), nil)
	o := &observer{log: logger, clock: clk, metrics: m, stages: newStages(m)}
	under, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatalf("the log is a %T", logger.GetSink())
	}
	a, b := device.Lease{Fabric: "0", Unit: "a100-0"}, device.Lease{Fabric: "0", Unit: "a100-1"}
	unloaded, other := errors.New("the driver is not loaded"), errors.New("the bus is gone")
	at := 0
	act := func(second int, l device.Lease, k attach.Kind, err error, want string) {
		t.Helper()
		clk.SetTime(time.Unix(int64(second), 0))
		o.Acted(t.Context(), l, k, 0, err)
		log := under.GetBuffer().String()
		news := log[at:]
		at = len(log)
		if !strings.Contains(news, want) || want == "" && news != "" {
			t.Errorf("after %d s, %s of %s: %v: log %q, want %q", second, k, l.Unit, err, news, want)
		}
	}
	act(0, a, attach.Discover, unloaded, "not loaded")
	act(0, b, attach.Discover, unloaded, "not loaded")
	act(0, a, attach.Bind, unloaded, "not loaded")
	for second := 1; second < 60; second++ {
		act(second, a, attach.Discover, unloaded, "")
	}
	act(30, a, attach.Discover, other, "bus is gone")
	act(60, a, attach.Discover, unloaded, "alsoSinceLastTold=59")
	act(61, a, attach.Bind, nil, "Done")
	act(61, a, attach.Discover, unloaded, "")
	act(62, a, attach.Discover, nil, "Done")
	act(63, a, attach.Discover, unloaded, "not loaded")
	o.Deleted(t.Context(), a)
	at = len(under.GetBuffer().String())
	act(64, a, attach.Discover, unloaded, "not loaded")
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
	if counted := "cohdi_agent_errors_total{reason=\"Other\"} 6"; !strings.Contains(w.Body.String(), counted) {
		t.Errorf("not %s in\n%s", counted, w.Body)
	}
}

// What is remembered of failures is bounded, and what is not remembered is told.
func TestRepeatsBounded(t *testing.T) {
	var r repeats
	now := time.Unix(0, 0)
	for i := range 2 * mostRepeats {
		if tell, _ := r.tell(failure{text: strconv.Itoa(i)}, now); !tell {
			t.Fatalf("failure %d is not told", i)
		}
	}
	if len(r.told) > mostRepeats {
		t.Errorf("%d failures are remembered", len(r.told))
	}
	now = now.Add(repeatEvery)
	r.tell(failure{text: "new"}, now)
	if tell, _ := r.tell(failure{text: "new"}, now); tell || len(r.told) != 1 {
		t.Errorf("told %v, %d failures are remembered", tell, len(r.told))
	}
}
