// SPDX-License-Identifier: Apache-2.0

package fabrictest

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

// script is a manager whose operation goes through the given states.
type script struct {
	fabric.Manager
	t     *testing.T
	polls []fabric.Operation
	fails int // so many polls fail first
	fault error
}

func (s *script) Poll(_ context.Context, op fabric.Operation) (fabric.Operation, error) {
	s.t.Helper()
	if op.Handle != "job-1" {
		s.t.Errorf("polled for %q, want job-1", op.Handle)
	}
	if s.fails > 0 || len(s.polls) == 0 {
		s.fails--
		return op, s.fault
	}
	next := s.polls[0]
	s.polls = s.polls[1:]
	return next, nil
}

func TestWait(t *testing.T) {
	refused := &device.Fault{Class: device.FaultNoCapacity, Op: "attach"}
	in := func(state fabric.OperationState, after time.Duration) fabric.Operation {
		return fabric.Operation{State: state, Handle: "job-1", PollAfter: after}
	}
	failed := in(fabric.Failed, 0)
	failed.Fault = refused
	tests := []struct {
		name  string
		begin fabric.Operation
		polls []fabric.Operation
		fails int
		fault error
		state fabric.OperationState
		class device.FaultClass
		took  time.Duration
	}{
		{name: "done at once", begin: in(fabric.Done, 0), state: fabric.Done},
		{name: "pending, then done", begin: in(fabric.Pending, time.Second), polls: []fabric.Operation{in(fabric.Pending, 2*time.Second), in(fabric.Done, 0)}, state: fabric.Done, took: 3 * time.Second},
		{name: "no pause given", begin: in(fabric.Pending, 0), polls: []fabric.Operation{in(fabric.Done, 0)}, state: fabric.Done, took: minPoll},
		{name: "suspended, then resumed", begin: in(fabric.Pending, time.Second), polls: []fabric.Operation{in(fabric.Suspended, time.Second), in(fabric.Done, 0)}, state: fabric.Done, took: 2 * time.Second},
		{name: "failed", begin: in(fabric.Pending, time.Second), polls: []fabric.Operation{failed}, state: fabric.Failed, class: device.FaultNoCapacity, took: time.Second},
		{name: "failed without a reason", begin: in(fabric.Failed, 0), state: fabric.Failed, class: device.FaultUnknown},
		{name: "two polls fail", begin: in(fabric.Pending, time.Second), fails: 2, fault: refused, polls: []fabric.Operation{in(fabric.Done, 0)}, state: fabric.Done, took: 3 * time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				op, err := Wait(t.Context(), clock.RealClock{}, &script{t: t, polls: tt.polls, fails: tt.fails, fault: tt.fault}, tt.begin)
				if op.State != tt.state {
					t.Errorf("state = %s, want %s", op.State, tt.state)
				}
				f, ok := errors.AsType[*device.Fault](err)
				if ok != (tt.class != "") || ok && f.Class != tt.class {
					t.Errorf("error = %v, want class %q", err, tt.class)
				}
				if took := time.Since(begun); took != tt.took {
					t.Errorf("took %s, want %s", took, tt.took)
				}
			})
		})
	}
	t.Run("context ends while nothing can be looked at", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := Wait(ctx, clock.RealClock{}, &script{t: t, fault: refused}, in(fabric.Pending, time.Second))
			f, ok := errors.AsType[*device.Fault](err)
			if !ok || f.Definite() || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, refused) {
				t.Errorf("error = %v, want an unknown outcome by the deadline, and why nothing was seen", err)
			}
		})
	})
	t.Run("context ends", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := Wait(ctx, clock.RealClock{}, &script{t: t}, in(fabric.Pending, time.Hour))
			f, ok := errors.AsType[*device.Fault](err)
			if !ok || f.Definite() || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error = %v, want an unknown outcome by the deadline", err)
			}
		})
	})
}
