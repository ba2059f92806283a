// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// seeds of the soak; each is one life of a machine.
func seeds() uint64 {
	if *full {
		return 40
	}
	return 10
}

// TestSoak: a caller that does no more than the recipe says (store what was there, ask, look, ask again) gets one device for
// each intent and loses none, whatever becomes of its calls and however the manager shows its work.
func TestSoak(t *testing.T) {
	for seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 7))
			h := newHands(t, randomPolicies(r))
			s := &soak{hands: h, r: r, m: h.client()}
			for range 8 {
				if len(s.held) < 2 && (len(s.held) == 0 || r.IntN(2) == 0) {
					s.attach()
				} else {
					s.detach()
				}
				if t.Failed() {
					t.Fatalf("policies %+v", h.core.Policies())
				}
			}
		})
	}
}

func randomPolicies(r *rand.Rand) simapi.Policies {
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	return simapi.Policies{
		// A manager that makes the second call wait would wait for the chassis's clock, which moves only between calls.
		Serialization: pick("none", "busy409"),
		CM: simapi.CMPolicies{
			Count: pick("atAccept", "atComplete"), Progress: pick("noID", "withID", "absent"), Detail: pick("full", "partial"),
			Below: pick("noop", "lastWins"), Shortage: pick("addFailed", "409"), Unknown: pick("404", "ignore"),
			Remaining: pick("checked", "trusted"), Answer: pick("json", "empty", "text"), Refusal: pick("json", "html", "empty"),
		},
	}
}

type soak struct {
	*hands
	r    *rand.Rand
	m    fabric.Manager
	held []string
}

// disturb makes the next call, or a read, go wrong, and sometimes ends the process.
func (s *soak) disturb() {
	s.t.Helper()
	fates := []fabrictest.Fate{
		"", "", fabrictest.Busy, fabrictest.LostBefore, fabrictest.LostAfter, fabrictest.ErrorBefore, fabrictest.ErrorAfter,
		fabrictest.Truncated, fabrictest.NoWords, fabrictest.CredentialsEnded,
	}
	s.faults.Clear("")
	if f := fates[s.r.IntN(len(fates))]; f != "" {
		s.Fate(f)
	}
	switch s.r.IntN(4) {
	case 0:
		s.Add(simapi.Fault{Face: "cm", Method: "GET", Nth: 1 + s.r.IntN(5), Count: 1, Action: simapi.ActionStatus, Status: 503})
	case 1:
		s.m = s.client()
	}
}

func (s *soak) list() []string {
	s.t.Helper()
	for range 20 {
		attached, failed := s.m.ListAttached(s.t.Context(), []device.Machine{one})
		if len(failed) > 0 {
			continue
		}
		var ids []string
		for _, d := range attached[one] {
			ids = append(ids, d.ID)
		}
		return ids
	}
	s.t.Fatal("the machine cannot be read")
	return nil
}

// try makes a call and waits for its end, unless the process ends before.
func (s *soak) try(call func() (fabric.Operation, error)) error {
	s.t.Helper()
	op, err := call()
	if err == nil && s.r.IntN(4) > 0 {
		_, err = s.wait(s.m, op)
	}
	return err
}

func (s *soak) attach() {
	s.t.Helper()
	before := append([]string{}, s.list()...)
	isNew := func(id string) bool { return !slices.Contains(before, id) }
	if s.r.IntN(6) == 0 {
		reason := "hot-plug timed out"
		if err := s.core.ChangeDevice(fmt.Sprintf("a-%d", s.r.IntN(2)), simapi.DeviceChange{FailAttach: &reason}); err != nil {
			s.t.Fatal(err)
		}
	}
	open := false // a former call may still take effect
	for range 30 {
		s.disturb()
		err := s.try(func() (fabric.Operation, error) {
			return s.m.Attach(s.t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA, Before: before})
		})
		f, failed := errors.AsType[*device.Fault](err)
		if failed && (f.Class == device.FaultRejected || f.Class == device.FaultNoCapacity && !open) {
			s.t.Fatalf("attach beside %v: %v", before, err) // one is free
		}
		open = open || !failed || !f.Definite()
		s.clk.Step(time.Duration(s.r.IntN(15)) * time.Second)
		if !slices.ContainsFunc(s.list(), isNew) {
			continue
		}
		s.settle()
		now := s.list()
		came := slices.DeleteFunc(slices.Clone(now), func(id string) bool { return !isNew(id) })
		if len(came) != 1 || len(now) != len(before)+1 {
			s.t.Errorf("%v came to %v, want one", came, before)
		}
		s.held = append(s.held, came...)
		return
	}
	s.t.Errorf("nothing comes to %v in 30 tries", before)
}

func (s *soak) detach() {
	s.t.Helper()
	i := s.r.IntN(len(s.held))
	id := s.held[i]
	s.held = slices.Delete(s.held, i, i+1)
	if s.r.IntN(6) == 0 {
		reason := "device busy"
		for _, d := range []string{"a-0", "a-1"} {
			if err := s.core.ChangeDevice(d, simapi.DeviceChange{FailDetach: &reason}); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	for range 30 {
		s.disturb()
		err := s.try(func() (fabric.Operation, error) {
			return s.m.Detach(s.t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: id})
		})
		if f, ok := errors.AsType[*device.Fault](err); ok && f.Class == device.FaultRejected {
			s.t.Fatalf("detach %s: %v", id, err)
		}
		s.clk.Step(time.Duration(s.r.IntN(15)) * time.Second)
		if slices.Contains(s.list(), id) {
			continue
		}
		now := slices.Sorted(slices.Values(s.list()))
		if want := slices.Sorted(slices.Values(s.held)); !slices.Equal(now, want) {
			s.t.Errorf("after %s has left there is %v, want %v", id, now, want)
		}
		return
	}
	s.t.Errorf("%s does not leave in 30 tries", id)
}
