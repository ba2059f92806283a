// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"testing/quick"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
)

func someSteps() map[step]time.Time {
	return map[step]time.Time{
		created: at(0), allocated: at(0.2), assigned: at(0.3), attached: at(3), bound: at(5.2), running: at(6.25),
	}
}

func attach(from, to float64) simapi.Operation {
	end := at(to)
	return simapi.Operation{ID: 1, Kind: "attach", Start: at(from), End: &end}
}

func TestWayOf(t *testing.T) {
	w, err := wayOf(someSteps(), []simapi.Operation{attach(0.5, 2.5)}, at(2.8))
	if err != nil {
		t.Fatal(err)
	}
	want := map[part]time.Duration{
		byScheduler: 2400 * time.Millisecond, byFabric: 2300 * time.Millisecond, byAgent: 500 * time.Millisecond, byKubelet: 1050 * time.Millisecond,
	}
	if diff := cmp.Diff(want, w.parts()); diff != "" {
		t.Errorf("parts (-want +got):\n%s", diff)
	}
	if got, want := w.String(), "first Pod Pending -> Running in 6.3 s (scheduler 2.4, fabric 2.3, agent 0.5, kubelet 1.1)"; got != want {
		t.Errorf("String() = %q, want %q", got, want)
	}
}

func TestWayOf_refuses(t *testing.T) {
	unseen := someSteps()
	delete(unseen, attached)
	for name, tc := range map[string]struct {
		steps map[step]time.Time
		ops   []simapi.Operation
	}{
		"a step that was not seen":     {unseen, []simapi.Operation{attach(1, 2)}},
		"no attach":                    {someSteps(), nil},
		"two attaches":                 {someSteps(), []simapi.Operation{attach(1, 2), attach(3, 4)}},
		"an attach that still goes on": {someSteps(), []simapi.Operation{{Kind: "attach"}}},
	} {
		t.Run(name, func(t *testing.T) {
			if w, err := wayOf(tc.steps, tc.ops, at(2)); err == nil {
				t.Errorf("wayOf = %v, want an error", w)
			}
		})
	}
}

// Whatever the clocks said: no part is negative, and they add up to the total, also as they are printed.
func TestWayOf_adds_up(t *testing.T) {
	adds := func(ms [8]uint16) bool {
		at := func(i int) time.Time { return start.Add(time.Duration(ms[i]) * time.Millisecond) }
		end := at(6)
		w, err := wayOf(map[step]time.Time{
			created: start, allocated: at(0), assigned: at(1), attached: at(2), bound: at(3), running: at(4),
		}, []simapi.Operation{{Start: at(5), End: &end}}, at(7))
		if err != nil {
			return false
		}
		var sum time.Duration
		var values []time.Duration
		for _, v := range w.parts() {
			if v < 0 {
				return false
			}
			sum += v
			values = append(values, v)
		}
		total := 0
		for _, tenths := range roundToSum(values, 100*time.Millisecond) {
			total += tenths
		}
		return sum == w.total() && total == int((sum+50*time.Millisecond)/(100*time.Millisecond))
	}
	if err := quick.Check(adds, nil); err != nil {
		t.Error(err)
	}
}

func TestSteps_first_time_counts(t *testing.T) {
	w := newWorld()
	w.told(aPod("first", "", ""), at(0))
	w.told(aClaim("first"), at(1))
	w.told(aClaim("first", "a100-0"), at(2))
	w.told(aLease("a100-0", "n1", device.Assigned, map[string]string{annAttempt: "demo/x/claim-of-another t n1 fabric-0/a100-0"}), at(3))
	w.told(aLease("a100-0", "n1", device.Assigned, map[string]string{annAttempt: "demo/first-gpu/claim-first t n1 fabric-0/a100-0"}), at(4))
	w.told(aClaim("first", "a100-0=Attached"), at(5))
	w.told(aPod("first", "n1", "Pending"), at(6))
	w.told(aPod("first", "n1", "Running"), at(7))
	w.told(aPod("first", "n1", "Running"), at(8))
	want := map[step]time.Time{created: at(0), allocated: at(2), assigned: at(4), attached: at(5), bound: at(6), running: at(7)}
	if diff := cmp.Diff(want, w.copyOf().steps["first"]); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
}
