// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
)

const unit0, unit1 = device.Unit("a100-0"), device.Unit("a100-1")

func TestAttach(t *testing.T) {
	r := newRig(2)
	a := r.assign(unit0, "c")
	l := r.loop(inline)
	r.settle(t, l)

	want := []string{"ListFabric", "StoreIntent", "SendAttach", "ListFabric", "Store", "Discover", "Store", "Tell"}
	if diff := cmp.Diff(want, r.acted); diff != "" {
		t.Errorf("actions (-want +got):\n%s", diff)
	}
	got := r.lease(unit0)
	if got.Phase != device.Attached || got.FabricDevice != "d0" || got.UUID != r.chassis[0].uuid || got.PCI != r.chassis[0].at || got.Attempt != a {
		t.Errorf("lease = %+v", got)
	}
	if r.told[a] != 1 {
		t.Errorf("told %d times", r.told[a])
	}
	wantStatus := []UnitStatus{{Lease: got, Doing: attach.Wait, Rule: "in use", Why: "used by claim team/c"}}
	if diff := cmp.Diff(wantStatus, l.Status()); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	r.innocent(t)
}

// attachedUnit returns a rig with one unit that serves claim c.
func attachedUnit(t *testing.T) (*rig, *Loop) {
	t.Helper()
	r := newRig(2)
	r.assign(unit0, "c")
	l := r.loop(inline)
	r.settle(t, l)
	if r.lease(unit0).Phase != device.Attached {
		t.Fatalf("lease = %+v", r.lease(unit0))
	}
	r.acted = nil
	return r, l
}

func TestRelease(t *testing.T) {
	r, l := attachedUnit(t)
	r.clear(unit0)
	r.settle(t, l)
	if diff := cmp.Diff([]string{"FindHolders", "Store"}, r.acted); diff != "" {
		t.Errorf("becomes idle (-want +got):\n%s", diff)
	}
	if !r.lease(unit0).Idle() {
		t.Errorf("lease = %+v", r.lease(unit0))
	}
	r.acted = nil
	r.clock.Step(time.Minute)
	r.release(unit0)
	r.settle(t, l)
	want := []string{"FindHolders", "Drain", "FindHolders", "Remove", "ListFabric", "SendDetach", "ListFabric", "Delete"}
	if diff := cmp.Diff(want, r.acted); diff != "" {
		t.Errorf("goes back (-want +got):\n%s", diff)
	}
	if len(r.leases) != 0 || len(r.attached()) != 0 || len(l.Status()) != 0 {
		t.Errorf("leases %v, attached %v, status %v", r.leases, r.attached(), l.Status())
	}
	r.innocent(t)
}

// TestAttachSaysWhatWasThere: a manager that is told totals gets the devices of other units and those of nobody.
func TestAttachSaysWhatWasThere(t *testing.T) {
	r, l := attachedUnit(t)
	mine := r.lease(unit0).FabricDevice
	r.chassis = append(r.chassis, &gpu{id: "foreign", uuid: "GPU-foreign", attached: true})
	r.clock.Step(time.Minute)
	r.assign(unit1, "c2")
	r.settle(t, l)
	if r.lease(unit1).Phase != device.Attached {
		t.Fatalf("lease = %+v", r.lease(unit1))
	}
	if diff := cmp.Diff([][]string{{}, {mine, "foreign"}}, r.asked); diff != "" {
		t.Errorf("what the machine had before each attach (-want +got):\n%s", diff)
	}
	r.innocent(t)
}

func TestAttachOutcomes(t *testing.T) {
	for _, tc := range []struct {
		name     string
		answers  []answer
		phase    device.Phase
		reason   string
		calls    int
		attached int
		within   time.Duration // from assignment to rest
	}{
		{"reply lost, adopted", []answer{lost}, device.Attached, "", 1, 1, 10 * time.Second},
		{"reply lost, nothing came, asked again when settled", []answer{inVain, done}, device.Attached, "", 2, 1, 2 * time.Minute},
		{"busy, asked again", []answer{busy, busy, done}, device.Attached, "", 3, 1, 20 * time.Second},
		{"refused for good", []answer{rejected}, device.Failed, "Rejected", 1, 0, 0},
		{"none free", []answer{{fault: device.FaultNoCapacity}}, device.Failed, "NoCapacity", 1, 0, 0},
		{"busy for ever", slices.Repeat([]answer{busy}, 100), device.Failed, "AttachTimeout", 48, 0, 5 * time.Minute},
		{"never an answer, never a device", slices.Repeat([]answer{inVain}, 100), device.Failed, "AttachTimeout", 3, 0, 5 * time.Minute},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(2)
			r.answers = tc.answers
			r.assign(unit0, "c")
			l := r.loop(inline)
			for range 500 {
				n := len(r.acted)
				wake := l.Step(t.Context())
				if p := r.lease(unit0).Phase; len(r.acted) == n && (wake.IsZero() || p == device.Failed) {
					break
				} else if len(r.acted) == n {
					r.clock.SetTime(wake)
				}
			}
			got := r.lease(unit0)
			if got.Phase != tc.phase || got.Failure.Reason != tc.reason {
				t.Errorf("phase %s, failure %+v, want %s %s", got.Phase, got.Failure, tc.phase, tc.reason)
			}
			if took := r.clock.Now().Sub(start); took > tc.within {
				t.Errorf("took %s, at most %s", took, tc.within)
			}
			if len(r.calls) != tc.calls || len(r.attached()) != tc.attached {
				t.Errorf("%d calls, %d attached, want %d, %d", len(r.calls), len(r.attached()), tc.calls, tc.attached)
			}
			r.innocent(t)
		})
	}
}

// TestFailedUnitGoesAway: what failed is forgotten after its back-off, once the leader took the claim off it.
func TestFailedUnitGoesAway(t *testing.T) {
	r := newRig(1)
	r.answers = []answer{rejected}
	r.assign(unit0, "c")
	l := r.loop(inline)
	r.settle(t, l)
	if got := r.lease(unit0); got.Phase != device.Failed {
		t.Fatalf("lease = %+v", got)
	}
	r.clear(unit0)
	r.settle(t, l)
	if len(r.leases) != 0 {
		t.Errorf("leases = %v", r.leases)
	}
	if waited := r.clock.Now().Sub(start); waited < settings().RetryAfter {
		t.Errorf("forgotten after %s", waited)
	}
}

// TestLateDevice: a device that comes after its attach was given up is taken, and goes back.
func TestLateDevice(t *testing.T) {
	r := newRig(1)
	r.answers = []answer{tardy}
	r.assign(unit0, "c")
	l := r.loop(inline)
	r.until(t, l, func() bool { return r.lease(unit0).Phase == device.Attaching })
	r.change(unit0, func(l *device.Lease) { l.AcquiredAt = start.Add(-settings().Deadline + 5*time.Second) })
	r.until(t, l, func() bool { return r.lease(unit0).Phase == device.Failed })
	r.late[0]()
	r.clear(unit0)
	r.settle(t, l)
	if len(r.leases) != 0 || len(r.attached()) != 0 {
		t.Errorf("leases %v, attached %v", r.leases, r.attached())
	}
	r.innocent(t)
}

func TestClaimGoneWhileAttaching(t *testing.T) {
	r := newRig(1)
	r.slow = true
	r.assign(unit0, "c")
	l := r.loop(inline)
	r.until(t, l, func() bool { return len(r.calls) > 0 })
	r.clear(unit0)
	r.settle(t, l)
	if got := r.lease(unit0); !got.Idle() || len(r.told) != 0 {
		t.Fatalf("lease = %+v, told %v", got, r.told)
	}
	if !slices.Contains(r.acted, "Rescan") {
		t.Error("the device came without a rescan, though it does not come by itself")
	}
	// The next claim gets it at once.
	r.acted = nil
	a := r.assign(unit0, "d")
	r.settle(t, l)
	if diff := cmp.Diff([]string{"Tell"}, r.acted); diff != "" || r.told[a] != 1 {
		t.Errorf("actions (-want +got):\n%s", diff)
	}
	r.innocent(t)
}

func TestClaimGoneBeforeAnythingWasAsked(t *testing.T) {
	r := newRig(1)
	r.assign(unit0, "c")
	r.clear(unit0)
	r.settle(t, r.loop(inline))
	if len(r.leases) != 0 || len(r.calls) != 0 {
		t.Errorf("leases %v, calls %v", r.leases, r.calls)
	}
}

func TestStillPreparedAndHeldOpen(t *testing.T) {
	r, l := attachedUnit(t)
	r.prepared[unit0] = true
	r.clear(unit0)
	r.settle(t, l)
	if got := r.lease(unit0); got.Idle() || got.HeldBy == "" || !slices.Equal(r.acted, []string{"Store"}) {
		t.Fatalf("prepared: lease = %+v, actions %v", got, r.acted)
	}
	r.prepared[unit0] = false
	r.open[r.chassis[0].at] = []string{"pid 7 (exporter)"}
	for range 10 {
		n := len(r.acted)
		if wake := l.Step(t.Context()); len(r.acted) == n {
			r.clock.SetTime(wake)
		}
	}
	if got := r.lease(unit0); got.Idle() || got.HeldBy != "pid 7 (exporter)" {
		t.Fatalf("held open: lease = %+v", got)
	}
	delete(r.open, r.chassis[0].at)
	r.settle(t, l)
	if got := r.lease(unit0); !got.Idle() || got.HeldBy != "" {
		t.Errorf("nobody has it: lease = %+v", got)
	}
	r.innocent(t)
}

// TestCheckpointUnknown: while the plugin does not know what is prepared, nothing is given back.
func TestCheckpointUnknown(t *testing.T) {
	r, l := attachedUnit(t)
	r.known = false
	r.clear(unit0)
	r.settle(t, l)
	r.release(unit0)
	r.settle(t, l)
	if got := r.lease(unit0); got.Phase != device.Releasing || len(r.acted) != 0 {
		t.Errorf("lease = %+v, actions %v", got, r.acted)
	}
}

func TestReleaseCalledBack(t *testing.T) {
	r, l := attachedUnit(t)
	r.clear(unit0)
	r.settle(t, l)
	r.release(unit0)
	r.until(t, l, func() bool { return r.chassis[0].draining })
	a := r.assign(unit0, "d")
	r.settle(t, l)
	if got := r.lease(unit0); got.Phase != device.Attached || r.told[a] != 1 || r.chassis[0].draining {
		t.Errorf("lease = %+v, told %d, draining %v", got, r.told[a], r.chassis[0].draining)
	}
	if len(r.calls) != 1 {
		t.Errorf("calls = %v", r.calls)
	}
	r.innocent(t)
}

func TestConflictOnUpdate(t *testing.T) {
	r := newRig(1)
	r.storeErr = []error{errors.New("conflict")}
	r.assign(unit0, "c")
	r.settle(t, r.loop(inline))
	if got := r.lease(unit0); got.Phase != device.Attached || len(r.calls) != 1 || !slices.Contains(r.acted, "StoreIntent!") {
		t.Errorf("lease = %+v, calls %v, actions %v", got, r.calls, r.acted)
	}
}

// TestIntentStoredAnswerLost: the call may have been sent by whoever stored the intent, as far as anybody
// knows; it is sent again only when it would have shown.
func TestIntentStoredAnswerLost(t *testing.T) {
	r := newRig(1)
	r.storeErr = []error{errAfter}
	r.assign(unit0, "c")
	r.settle(t, r.loop(inline))
	if got := r.lease(unit0); got.Phase != device.Attached || len(r.calls) != 1 {
		t.Errorf("lease = %+v, calls %v", got, r.calls)
	}
	if waited := r.clock.Now().Sub(start); waited < openFor() {
		t.Errorf("sent after %s", waited)
	}
}

// TestCrash: this process dies at each operation, before or after its effect, and another goes on.
func TestCrash(t *testing.T) {
	for _, tc := range []struct {
		name           string
		jobs, nameless bool
	}{{"answers when it is done", false, false}, {"works on it", true, false}, {"works on it, gives no identities", true, true}} {
		t.Run(tc.name, func(t *testing.T) {
			testCrash(t, func() *rig {
				r := newRig(3)
				r.jobs, r.nameless = tc.jobs, tc.nameless
				return r
			})
		})
	}
}

func testCrash(t *testing.T, newRig func() *rig) {
	t.Helper()
	died := 0
	for _, after := range []bool{false, true} {
		for at := 1; ; at++ {
			r := newRig()
			a := r.assign(unit0, "c")
			l := r.loop(inline)
			r.dieAt, r.after = at, after
			r.settle(t, l)
			survived := !r.dead
			if r.dead {
				died++
				l = r.loop(inline)
				r.settle(t, l)
			}
			name := fmt.Sprintf("attach, operation %d, after its effect %v", at, after)
			if got := r.lease(unit0); got.Phase != device.Attached || r.told[a] == 0 || len(r.attached()) != 1 {
				t.Errorf("%s: lease %+v, told %d, attached %v", name, got, r.told[a], r.attached())
			}
			r.clear(unit0)
			r.settle(t, l)
			r.release(unit0)
			r.dieAt, r.after = at, after
			r.ops = 0
			r.settle(t, l)
			if r.dead {
				survived = false
				died++
				r.settle(t, r.loop(inline))
			}
			if len(r.leases) != 0 || len(r.attached()) != 0 {
				t.Errorf("%s, and at the same of release: leases %v, attached %v", name, r.leases, r.attached())
			}
			r.innocent(t)
			if survived {
				break
			}
		}
	}
	t.Logf("%d deaths", died)
	if died < 20 {
		t.Error("too few: the test shows nothing")
	}
}

// TestWork: what the manager works on is named on the lease, looked at until it ends, also by another process, and
// holds up what must not run beside it.
func TestWork(t *testing.T) {
	r := newRig(2)
	r.jobs, r.nameless = true, true
	a := r.assign(unit0, "c")
	l := r.loop(inline)
	r.until(t, l, func() bool { return r.lease(unit0).Work != "" })
	r.assign(unit1, "c2")
	if got := r.lease(unit0); got.Work != "job-1" || got.Phase != device.Attaching || got.FabricDevice != "" {
		t.Fatalf("lease = %+v", got)
	}
	r.work["job-1"].suspended = true
	r.until(t, l, func() bool { return r.clock.Now().After(start.Add(30 * time.Second)) })
	status := l.Status()[0]
	if !strings.Contains(status.Why, "job-1") || !strings.Contains(status.Why, "suspended") {
		t.Errorf("it does not say what it waits for: %+v", status)
	}
	l = r.loop(inline) // another process
	r.acted = nil
	r.until(t, l, func() bool { return slices.Contains(r.acted, "Poll") })
	if len(r.calls) != 1 || r.lease(unit1).Phase != device.Assigned {
		t.Errorf("calls %v beside the work, the other unit is %s", r.calls, r.lease(unit1).Phase)
	}
	r.settle(t, l)
	for _, u := range []device.Unit{unit0, unit1} {
		if got := r.lease(u); got.Phase != device.Attached || got.Work != "" || got.FabricDevice != got.Wanted {
			t.Errorf("lease = %+v", got)
		}
	}
	if r.told[a] != 1 || len(r.calls) != 2 {
		t.Errorf("told %d times, calls %v", r.told[a], r.calls)
	}
	r.innocent(t)
}

// givenBack has three units, named by their devices, attached one after the other, and then called back at once.
func givenBack(t *testing.T, r *rig, l *Loop, units ...device.Unit) {
	t.Helper()
	for _, u := range units {
		r.assign(u, "c-"+string(u))
	}
	r.settle(t, l)
	for _, u := range units {
		if got := r.lease(u); got.Phase != device.Attached {
			t.Fatalf("lease = %+v", got)
		}
		r.clear(u)
	}
	r.settle(t, l)
	r.clock.Step(time.Minute)
	for _, u := range units {
		r.release(u)
	}
	r.calls, r.acted, r.story = nil, nil, nil
}

// TestBatch: what goes back at once goes in one call, as far as the call has room; what becomes of it is each unit's own.
func TestBatch(t *testing.T) {
	const third = device.Unit("a100-2")
	units := []device.Unit{unit0, unit1, third}
	start := func(t *testing.T, batch int) (*rig, *Loop) {
		t.Helper()
		r := newRig(3)
		r.jobs, r.nameless, r.batch = true, true, batch
		l := r.loop(r.q.spawn)
		givenBack(t, r, l, units...)
		return r, l
	}
	named := func(r *rig) func() bool {
		return func() bool {
			return !slices.ContainsFunc(units, func(u device.Unit) bool { return r.lease(u).Work == "" })
		}
	}
	calls := func(t *testing.T, r *rig, want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, r.calls); diff != "" {
			t.Errorf("calls (-want +got):\n%s\n%v", diff, r.story)
		}
		r.innocent(t)
	}
	gone := func(t *testing.T, r *rig) {
		t.Helper()
		if len(r.leases) > 0 || len(r.attached()) > 0 {
			t.Errorf("left: %v, leases %v", r.attached(), r.leases)
		}
	}
	t.Run("room for all", func(t *testing.T) {
		r, l := start(t, 3)
		r.settle(t, l)
		calls(t, r, "detach d0 d1 d2")
		gone(t, r)
	})
	t.Run("room for two", func(t *testing.T) {
		r, l := start(t, 2)
		r.settle(t, l)
		calls(t, r, "detach d0 d1", "detach d2")
		gone(t, r)
	})
	t.Run("another process goes on", func(t *testing.T) {
		r, l := start(t, 3)
		r.until(t, l, named(r))
		for _, u := range units {
			if w := r.lease(u).Work; w != r.lease(unit0).Work {
				t.Errorf("%s waits for %s", u, w)
			}
		}
		r.settle(t, r.loop(r.q.spawn))
		calls(t, r, "detach d0 d1 d2")
		gone(t, r)
	})
	t.Run("one part is refused", func(t *testing.T) {
		r, l := start(t, 3)
		r.until(t, l, named(r))
		r.work[r.lease(unit1).Work+" d1"].effect = func() error { return &device.Fault{Class: device.FaultConflict, Op: "detach d1"} }
		r.settle(t, l)
		calls(t, r, "detach d0 d1 d2", "detach d1")
		gone(t, r)
	})
	t.Run("of one part nobody knows", func(t *testing.T) {
		r, l := start(t, 3)
		r.until(t, l, named(r))
		r.work[r.lease(unit1).Work+" d1"].effect = func() error { return &device.Fault{Class: device.FaultUnknown, Op: "detach d1"} }
		begun := r.clock.Now()
		r.settle(t, l)
		calls(t, r, "detach d0 d1 d2", "detach d1")
		gone(t, r)
		if took := r.clock.Now().Sub(begun); took < settings().Settle {
			t.Errorf("asked again after %s", took)
		}
	})
	for name, a := range map[string]answer{"refused for now": busy, "lost, nothing begun": inVain} {
		t.Run(name, func(t *testing.T) {
			r, l := start(t, 3)
			r.answers = []answer{a}
			r.settle(t, l)
			calls(t, r, "detach d0 d1 d2", "detach d0 d1 d2")
			gone(t, r)
		})
	}
	t.Run("lost, begun", func(t *testing.T) {
		r, l := start(t, 3)
		r.answers = []answer{lost}
		r.settle(t, l)
		calls(t, r, "detach d0 d1 d2")
		gone(t, r)
	})
	t.Run("what is ready later goes in the next one", func(t *testing.T) {
		r, l := start(t, 3)
		for _, u := range units[1:] {
			r.prepared[u] = true // until the first is at the manager
		}
		r.until(t, l, func() bool { return r.lease(unit0).Work != "" })
		clear(r.prepared)
		for range 20 {
			r.step(t, l)
		}
		calls(t, r, "detach d0")
		r.settle(t, l)
		calls(t, r, "detach d0", "detach d1 d2")
		gone(t, r)
	})
	t.Run("an attach is by itself", func(t *testing.T) {
		r := newRig(3)
		r.jobs, r.nameless, r.batch = true, true, 3
		l := r.loop(r.q.spawn)
		givenBack(t, r, l, unit0, unit1)
		r.assign(third, "c")
		r.settle(t, l)
		if got := r.lease(third); got.Phase != device.Attached || len(r.leases) != 1 {
			t.Errorf("leases = %+v", r.leases)
		}
		calls(t, r, "attach", "detach d0 d1")
	})
}

// TestBatchTurn: the turn is kept until the whole job is done.
func TestBatchTurn(t *testing.T) {
	r := newRig(3)
	r.jobs, r.nameless, r.batch = true, true, 3
	l := r.loop(r.q.spawn)
	units := []device.Unit{unit0, unit1, "a100-2"}
	givenBack(t, r, l, units...)
	turns := &line{}
	l.cfg.Turns = turns
	for range 40 {
		r.step(t, l)
		r.clock.Step(time.Second)
	}
	if len(r.calls) > 0 {
		t.Fatalf("asked out of turn: %v", r.calls)
	}
	turns.mine = true
	r.until(t, l, func() bool {
		return !slices.ContainsFunc(units, func(u device.Unit) bool { return r.lease(u).Work == "" })
	})
	for _, u := range units[:2] { // two of three parts are done
		part := r.work[r.lease(u).Work+" "+r.lease(u).FabricDevice]
		part.over, part.err = true, part.effect()
	}
	r.until(t, l, func() bool {
		waiting := slices.DeleteFunc(l.Status(), func(s UnitStatus) bool { return s.Rule != "machine busy" })
		return len(waiting) == 2
	})
	if diff := cmp.Diff([]bool{true}, turns.wanted); diff != "" {
		t.Errorf("before the job was done the turn was wanted (-want +got):\n%s", diff)
	}
	r.settle(t, l)
	if diff := cmp.Diff([]bool{true, false}, turns.wanted); diff != "" || len(r.leases) > 0 || len(r.calls) != 1 {
		t.Errorf("the turn was wanted (-want +got):\n%s\ncalls %v, leases %v", diff, r.calls, r.leases)
	}
	r.innocent(t)
}

// line is the nodes' line as the test has it.
type line struct {
	mine   bool
	wanted []bool // what was said, in order, each change once
}

func (l *line) Before() (int, bool) { return 1, l.mine }

func (l *line) Want(want bool) {
	if n := len(l.wanted); n == 0 && want || n > 0 && l.wanted[n-1] != want {
		l.wanted = append(l.wanted, want)
	}
}

// TestTurn: a node that has waited long for its turn keeps it until the manager has done what it is asked for, though what
// it knew of the machine is old by then; and hands it on after that.
func TestTurn(t *testing.T) {
	for name, jobs := range map[string]bool{"answers when it is done": false, "works on it": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(1)
			r.jobs = jobs
			r.assign(unit0, "c")
			turns := &line{}
			l := r.loop(inline)
			l.cfg.Turns = turns
			wait := func() { // another node's work takes its time
				turns.mine = false
				for range 20 {
					l.Step(t.Context())
					r.clock.Step(time.Second)
				}
				turns.mine = true
			}
			wait()
			if len(r.calls) > 0 {
				t.Fatalf("asked out of turn: %v", r.calls)
			}
			r.settle(t, l)
			if diff := cmp.Diff([]bool{true, false}, turns.wanted); diff != "" || r.lease(unit0).Phase != device.Attached {
				t.Fatalf("the turn was wanted (-want +got):\n%s\nlease %+v", diff, r.lease(unit0))
			}
			r.clear(unit0)
			r.settle(t, l)
			r.clock.Step(time.Minute)
			r.release(unit0)
			turns.wanted = nil
			wait()
			if len(r.calls) != 1 {
				t.Fatalf("asked out of turn: %v", r.calls)
			}
			r.settle(t, l)
			if diff := cmp.Diff([]bool{true, false}, turns.wanted); diff != "" || len(r.leases) != 0 {
				t.Errorf("the turn was wanted (-want +got):\n%s\nleases %v", diff, r.leases)
			}
			r.innocent(t)
		})
	}
}

// TestManagerUnreachable: no claim is failed before its deadline for a manager that cannot be reached.
func TestManagerUnreachable(t *testing.T) {
	r := newRig(1)
	r.listErr = &device.Fault{Class: device.FaultUnreachable, Op: "list"}
	r.assign(unit0, "c")
	l := r.loop(inline)
	r.until(t, l, func() bool {
		return !r.clock.Now().Before(start.Add(settings().Deadline-10*time.Second)) || r.lease(unit0).Phase != device.Assigned
	})
	if got := r.lease(unit0); got.Phase != device.Assigned {
		t.Fatalf("%s after assignment: lease %+v", r.clock.Now().Sub(start), got)
	}
	if n := len(r.acted); n < 20 || n > 60 {
		t.Errorf("asked %d times in 4 minutes", n)
	}
	r.listErr = nil
	r.settle(t, l)
	if got := r.lease(unit0); got.Phase != device.Attached {
		t.Errorf("manager is back: lease %+v", got)
	}
}

func TestHostCannotBeObserved(t *testing.T) {
	r := newRig(1)
	r.hostErr = errors.New("sysfs is gone")
	r.assign(unit0, "c")
	l := r.loop(inline)
	if wake := l.Step(t.Context()); wake != start.Add(settings().Busy) || len(r.acted) != 0 {
		t.Errorf("wake %s, actions %v", wake, r.acted)
	}
}

func TestWhoseLease(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*device.Lease)
		ours   bool
	}{
		{"ours", func(*device.Lease) {}, true},
		{"of our Node before it was made anew", func(l *device.Lease) { l.NodeUID = "uid-of-before" }, true},
		{"of another node", func(l *device.Lease) { l.Node = "n2" }, false},
		{"of another machine of our name", func(l *device.Lease) { l.Machine = "m-of-before" }, false},
		{"of another fabric", func(l *device.Lease) { l.Fabric = "1" }, false},
	} {
		r := newRig(1)
		r.assign(unit0, "c")
		r.change(unit0, tc.change)
		r.settle(t, r.loop(inline))
		if got := len(r.acted) > 0; got != tc.ours {
			t.Errorf("%s: actions %v", tc.name, r.acted)
		}
	}
}

func TestUnknownErrorIsOfUnknownOutcome(t *testing.T) {
	if f := fault("attach", errors.New("connection reset")); f.Definite() {
		t.Errorf("fault = %+v", f)
	}
	if f := fault("attach", fmt.Errorf("attach: %w", &device.Fault{Class: device.FaultBusy})); f.Class != device.FaultBusy {
		t.Errorf("fault = %+v", f)
	}
	if f := fault("attach", nil); f != nil {
		t.Errorf("fault = %+v", f)
	}
}

// later keeps actions until the test runs them, so that several are under way at once.
type later struct{ queue []func() }

func (q *later) spawn(f func()) { q.queue = append(q.queue, f) }

func (q *later) run(i int) {
	f := q.queue[i]
	q.queue = slices.Delete(q.queue, i, i+1)
	f()
}

// inFlight counts the changing calls that were decided and have not ended.
func (l *Loop) inFlight() (attaches, detaches int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range l.units {
		switch u.running {
		case attach.SendAttach:
			attaches++
		case attach.SendDetach:
			detaches++
		default:
		}
	}
	return attaches, detaches
}

// TestOneCallAtATime: two units attach to one machine, one after the other, and none takes the other's device.
func TestOneCallAtATime(t *testing.T) {
	r := newRig(3)
	a, b := r.assign(unit0, "a"), r.assign(unit1, "b")
	q := &later{}
	l := r.loop(q.spawn)
	for range 200 {
		wake := l.Step(t.Context())
		if attaches, detaches := l.inFlight(); attaches+detaches > 1 {
			t.Fatalf("%d attaches and %d detaches in flight", attaches, detaches)
		}
		switch {
		case len(q.queue) > 0:
			q.run(len(q.queue) - 1)
		case !wake.IsZero():
			r.clock.SetTime(wake)
		}
	}
	if r.told[a] != 1 || r.told[b] != 1 || len(r.attached()) != 2 || r.lease(unit0).FabricDevice == r.lease(unit1).FabricDevice {
		t.Errorf("told %v, attached %v, leases %v", r.told, r.attached(), r.leases)
	}
	r.innocent(t)
}

// TestParallelCalls: where the manager can do that, attaches of one machine run side by side, and so do detaches; what
// each has brought is told apart, in whichever order they end, and a foreign device of the model is nobody's.
func TestParallelCalls(t *testing.T) {
	units := []device.Unit{unit0, unit1, "a100-2"}
	all := func(r *rig, is func(device.Lease) bool) func() bool {
		return func() bool {
			return !slices.ContainsFunc(units, func(u device.Unit) bool { return !is(r.lease(u)) })
		}
	}
	var attaches, detaches int
	for seed := range uint64(50) {
		r, random := newRig(4), rand.New(rand.NewPCG(seed, 1))
		r.parallel = true
		r.chassis[0].attached, r.chassis[0].onBus, r.chassis[0].driver, r.chassis[0].seen = true, true, true, true
		for i, u := range units {
			r.assign(u, fmt.Sprint("c", i))
		}
		q := &later{}
		l := r.loop(q.spawn)
		play := func(done func() bool) {
			t.Helper()
			for range 1000 {
				wake := l.Step(t.Context())
				a, d := l.inFlight()
				attaches, detaches = max(attaches, a), max(detaches, d)
				switch {
				case len(q.queue) > 0:
					q.run(random.IntN(len(q.queue)))
				case done():
					return
				case !wake.IsZero():
					r.clock.SetTime(wake)
				}
			}
			t.Fatalf("seed %d: no end: %+v", seed, l.Status())
		}
		play(func() bool { return len(r.told) == len(units) })
		taken := map[string]bool{"d0": true}
		for _, u := range units {
			taken[r.lease(u).FabricDevice] = true
		}
		if len(taken) != 4 || len(r.attached()) != 4 {
			t.Errorf("seed %d: attached %v, leases %+v", seed, r.attached(), r.leases)
		}
		for _, u := range units {
			r.clear(u)
		}
		play(all(r, device.Lease.Idle))
		for _, u := range units {
			r.release(u)
		}
		play(func() bool { return len(r.leases) == 0 })
		if diff := cmp.Diff([]string{"d0"}, r.attached()); diff != "" || len(r.calls) != 2*len(units) {
			t.Errorf("seed %d: calls %v; attached in the end (-want +got):\n%s", seed, r.calls, diff)
		}
		r.innocent(t)
	}
	if attaches != len(units) || detaches != len(units) {
		t.Errorf("at most %d attaches and %d detaches at once, want %d", attaches, detaches, len(units))
	}
}

// TestStatusWhileActing: what is under way is shown, whatever else is decided meanwhile.
func TestStatusWhileActing(t *testing.T) {
	r := newRig(1)
	r.assign(unit0, "c")
	q := &later{}
	l := r.loop(q.spawn)
	for range 3 {
		l.Step(t.Context())
		status := l.Status()
		if len(status) != 1 || status[0].Doing != attach.ListFabric || status[0].Why != "what is attached decides" {
			t.Fatalf("while the list is read: %+v", status)
		}
	}
	for len(q.queue) > 0 {
		q.run(0)
		l.Step(t.Context())
	}
	if got := l.Status(); len(got) != 1 || got[0].Doing == attach.ListFabric {
		t.Errorf("in the end: %+v", got)
	}
}

// TestTwoUnknownsOneDevice: of two units that wait for a device with an unknown outcome, one takes what came.
func TestTwoUnknownsOneDevice(t *testing.T) {
	r := newRig(3)
	r.answers = []answer{inVain, lost}
	r.assign(unit0, "a")
	r.assign(unit1, "b")
	l := r.loop(inline)
	r.settle(t, l)
	if len(r.attached()) != 2 || r.lease(unit0).FabricDevice == r.lease(unit1).FabricDevice {
		t.Errorf("attached %v, leases %+v", r.attached(), r.leases)
	}
	r.innocent(t)
}

// TestRestartWithTwoUnknowns: the same, where a restart lost which call was whose.
func TestRestartWithTwoUnknowns(t *testing.T) {
	r := newRig(3)
	for u, c := range map[device.Unit]string{unit0: "a", unit1: "b"} {
		r.assign(u, c)
		r.change(u, func(l *device.Lease) { l.Phase, l.AskedAt = device.Attaching, start })
	}
	r.chassis[2].attached, r.chassis[2].onBus, r.chassis[2].driver = true, true, true
	q := &later{}
	l := r.loop(q.spawn)
	for range 300 {
		wake := l.Step(t.Context())
		switch {
		case len(q.queue) > 0:
			q.run(0)
		case !wake.IsZero():
			r.clock.SetTime(wake)
		}
	}
	if len(r.attached()) != 2 || r.lease(unit0).FabricDevice == r.lease(unit1).FabricDevice {
		t.Errorf("attached %v, leases %+v", r.attached(), r.leases)
	}
	r.innocent(t)
}

// TestUnsentIntentLetsOthersGo: an intent that was given up before it was sent holds nobody up.
func TestUnsentIntentLetsOthersGo(t *testing.T) {
	r := newRig(2)
	r.assign(unit0, "a")
	l := r.loop(inline)
	r.until(t, l, func() bool { return r.lease(unit0).Phase == device.Attaching })
	r.clock.Step(settings().Deadline)
	r.listErr = &device.Fault{Class: device.FaultUnreachable}
	r.until(t, l, func() bool { return r.lease(unit0).Phase == device.Failed })
	r.listErr = nil
	b := r.assign(unit1, "b")
	for range 20 {
		l.Step(t.Context())
		r.clock.Step(time.Second)
	}
	if r.told[b] != 1 {
		t.Errorf("unit 1 waits: %+v", l.Status())
	}
}

// TestRun: the loop looks when it is poked and when the policy wants it, and ends with its context.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(1)
		r.slow = true
		l := r.loop(nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			l.Run(ctx)
		}()
		synctest.Wait()
		a := r.assign(unit0, "c")
		l.Poke()
		for range 20 {
			synctest.Wait() // all that can be done without time is done
			r.clock.Step(time.Second)
		}
		synctest.Wait()
		if r.told[a] != 1 {
			t.Errorf("after 20 s: %+v", l.Status())
		}
		cancel()
		<-ended
		n := len(r.story)
		r.clear(unit0)
		l.Poke()
		r.clock.Step(time.Hour)
		synctest.Wait()
		if len(r.story) != n {
			t.Errorf("after its end: %v", r.story[n:])
		}
	})
}

// TestOpenCallHoldsOthersUp: while the outcome of one unit's call is unknown, no other unit's call is sent.
func TestOpenCallHoldsOthersUp(t *testing.T) {
	for _, tc := range []struct {
		name    string
		restart bool
	}{{"same process", false}, {"next process", true}} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(2)
			r.answers = []answer{tardy}
			r.assign(unit0, "a")
			l := r.loop(inline)
			r.until(t, l, func() bool { return len(r.calls) == 1 })
			b := r.assign(unit1, "b")
			if tc.restart {
				l = r.loop(inline)
			}
			r.until(t, l, func() bool { return r.clock.Now().After(start.Add(openFor() / 2)) })
			if len(r.calls) != 1 {
				t.Fatalf("calls = %v", r.calls)
			}
			r.late[0]()
			r.settle(t, l)
			if r.lease(unit0).FabricDevice != "d0" || r.lease(unit1).FabricDevice != "d1" || r.told[b] != 1 {
				t.Errorf("leases = %+v", r.leases)
			}
			r.innocent(t)
		})
	}
}

// TestDetachWithoutAnAnswer: it is looked after, not repeated, until it has settled; by the next process too,
// which has it said once more when the device is gone, since it knows of no call.
func TestDetachWithoutAnAnswer(t *testing.T) {
	for _, tc := range []struct {
		name    string
		restart bool
		calls   int
	}{{"same process", false, 2}, {"next process", true, 3}} {
		t.Run(tc.name, func(t *testing.T) {
			r, l := attachedUnit(t)
			r.clear(unit0)
			r.settle(t, l)
			r.release(unit0)
			r.answers = []answer{tardy, done}
			r.until(t, l, func() bool { return len(r.calls) == 2 })
			sent := r.clock.Now()
			if tc.restart {
				l = r.loop(inline)
			}
			r.until(t, l, func() bool { return len(r.calls) > 2 || r.clock.Now().After(sent.Add(openFor()/2)) })
			if len(r.calls) != 2 {
				t.Fatalf("%s after %v it was repeated", r.clock.Now().Sub(sent), r.calls)
			}
			r.late[0]()
			r.settle(t, l)
			if len(r.leases) != 0 || len(r.attached()) != 0 || len(r.calls) != tc.calls {
				t.Errorf("leases %v, attached %v, calls %v", r.leases, r.attached(), r.calls)
			}
			r.innocent(t)
		})
	}
}

// TestLeaving: a rescan would bring back what a call may take off the fabric at any moment.
func TestLeaving(t *testing.T) {
	name := device.Unit("a100-0")
	unknown := &device.Fault{Class: device.FaultUnknown}
	for _, tc := range []struct {
		situation string
		mem       *unit
		want      bool
	}{
		{"nothing was asked", &unit{}, false},
		{"a former run may have asked", nil, true},
		{"found just now", &unit{foundAt: start}, true},
		{"found long ago", &unit{foundAt: start.Add(-time.Hour)}, false},
		{"the answer was lost", &unit{last: &attach.Result{SentAt: start.Add(-2 * time.Second), At: start.Add(-time.Second), Fault: unknown}}, true},
		{"the answer was lost long ago", &unit{last: &attach.Result{SentAt: start.Add(-2 * time.Hour), At: start.Add(-time.Hour), Fault: unknown}}, false},
		{"the manager works on it", &unit{last: &attach.Result{SentAt: start.Add(-2 * time.Hour), At: start.Add(-time.Hour), Work: "job-1"}}, true},
		{"it was refused", &unit{last: &attach.Result{SentAt: start, At: start, Fault: &device.Fault{Class: device.FaultRejected}}}, false},
	} {
		l := newRig(1).loop(inline)
		l.machine.here = []device.OnFabric{{ID: "d0"}}
		if tc.mem != nil {
			l.units[name] = tc.mem
		}
		all := []device.Lease{{Unit: name, Phase: device.Releasing, FabricDevice: "d0", PCI: device.PCIAddress{Bus: 0x3b}, ChangedAt: start.Add(-time.Hour)}}
		if got := l.leaving(device.Lease{Unit: "a100-1"}, all, nil, start); got != tc.want {
			t.Errorf("%s: leaving %v, want %v", tc.situation, got, tc.want)
		}
	}
}
