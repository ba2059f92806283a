// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

func (b bench) beginAttach(model string) (<-chan struct{}, error) {
	return b.BeginAttach(AttachRequest{Machine: "n1", Specs: []Spec{{Model: model, Count: 1}}, Caller: "test", Limit: -1})
}

func TestBegin_goesOnByItself(t *testing.T) {
	bubble(t, func(b bench) {
		begun := time.Now()
		over, err := b.beginAttach("A")
		if err != nil {
			t.Fatal(err)
		}
		v, err := b.Machine("n1")
		if err != nil || len(v.Coming) != 1 || len(v.Listed) != 0 {
			t.Fatalf("machine = %+v, %v, want one that is coming", v, err)
		}
		<-over
		if took := time.Since(begun); took != 2*time.Second || b.device("a-0").Phase != simapi.PhaseAttached {
			t.Errorf("%s after %s, want attached after 2s", b.device("a-0").Phase, took)
		}
		if over, err = b.BeginDetach(DetachRequest{Machine: "n1", Device: "a-0", Caller: "test"}); err != nil {
			t.Fatal(err)
		}
		<-over
		if took := time.Since(begun); took != 3*time.Second || b.device("a-0").Phase != simapi.PhaseFree {
			t.Errorf("%s after %s, want free after 3s", b.device("a-0").Phase, took)
		}
	})
}

// TestBegin_failuresStay: over a crash, too, and until the device is given back.
func TestBegin_failuresStay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	reason := "because"
	synctest.Test(t, func(t *testing.T) {
		b := start(t, path)
		if err := b.ChangeDevice("a-0", simapi.DeviceChange{FailAttach: &reason, FailDetach: &reason}); err != nil {
			t.Fatal(err)
		}
		if _, err := b.beginAttach("A"); err != nil {
			t.Fatal(err)
		}
		b.Close() // the crash

		b = start(t, path)
		defer b.Close()
		time.Sleep(3 * time.Second)
		if d := b.device("a-0"); d.Phase != simapi.PhaseAttaching || d.Failure != reason || d.OnBus {
			t.Fatalf("device = %+v, want one that failed to come", d)
		}
		over, err := b.BeginDetach(DetachRequest{Machine: "n1", Device: "a-0", Caller: "test"})
		if err != nil {
			t.Fatal(err)
		}
		<-over
		if d := b.device("a-0"); d.Phase != simapi.PhaseAttached || d.Failure != reason {
			t.Fatalf("device = %+v, want one that failed to leave", d)
		}
		if over, err = b.BeginDetach(DetachRequest{Machine: "n1", Device: "a-0", Caller: "test"}); err != nil {
			t.Fatal(err)
		}
		<-over
		if d := b.device("a-0"); d.Phase != simapi.PhaseFree || d.Failure != "" {
			t.Errorf("device = %+v, want it free", d)
		}
		// A caller that waits for the answer is not told of failures, so there are none.
		if err := b.ChangeDevice("a-0", simapi.DeviceChange{FailAttach: &reason}); err != nil {
			t.Fatal(err)
		}
		b.mustAttach("n1", "A")
		b.wantViolations()
	})
}

func TestExclusively(t *testing.T) {
	for policy, want := range map[string]struct {
		took time.Duration
		err  error
	}{
		"perMachine": {took: 2 * time.Second},
		"none":       {},
		"busy409":    {err: ErrBusy},
	} {
		t.Run(policy, func(t *testing.T) {
			bubble(t, func(b bench) {
				if err := b.SetPolicies(simapi.Policies{Serialization: policy}); err != nil {
					t.Fatal(err)
				}
				change := func(machine string) error {
					return b.Exclusively(b.t.Context(), machine, func() (<-chan struct{}, error) { return b.beginAttach("A") })
				}
				if err := change("n1"); err != nil {
					t.Fatal(err)
				}
				begun := time.Now()
				if err := change("n1"); !errors.Is(err, want.err) || time.Since(begun) != want.took {
					t.Errorf("second change: %v after %s, want %v after %s", err, time.Since(begun), want.err, want.took)
				}
				// What begins nothing holds up nobody.
				for range 2 {
					begun = time.Now()
					err := b.Exclusively(b.t.Context(), "n2", func() (<-chan struct{}, error) { return nil, ErrNoCapacity })
					if !errors.Is(err, ErrNoCapacity) || time.Since(begun) != 0 {
						t.Errorf("change that fails: %v after %s", err, time.Since(begun))
					}
				}
			})
		})
	}
}
