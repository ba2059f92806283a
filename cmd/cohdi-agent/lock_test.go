// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/hotplug"
)

// Two agents of one node, as during a rolling update: one acts, the other waits until it has ended. That is known by the file
// which both have open all the time.
func TestHostLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plugin", "lock")
	open := func() *hostLock {
		l, err := openHostLock(path)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	old, young := open(), open()
	if err := old.take(t.Context(), clock.RealClock{}); err != nil {
		t.Fatal(err)
	}
	fake := clocktesting.NewFakeClock(time.Unix(0, 0))
	ctx, cancel := context.WithCancel(t.Context())
	waits := make(chan error)
	go func() { waits <- young.take(ctx, fake) }()
	for range 3 {
		// The lock outlives its last use in the code by far.
		runtime.GC()
		for !fake.HasWaiters() {
			runtime.Gosched()
		}
		fake.Step(lockPause)
	}
	cancel()
	if err := <-waits; !errors.Is(err, context.Canceled) {
		t.Fatalf("the second agent ended with %v, want it to wait", err)
	}
	if err := old.release(); err != nil {
		t.Fatal(err)
	}
	if err := young.take(t.Context(), fake); err != nil {
		t.Fatal(err)
	}
	for name, l := range map[string]*hostLock{"old": old, "young": young} {
		if _, err := l.file.Stat(); err != nil {
			t.Errorf("the %s agent cannot be known any more: %v", name, err)
		}
	}
}

// TestUsers: a GPU that only agents have open has no user, and is not let go yet.
func TestUsers(t *testing.T) {
	own, other := hotplug.Holder{PID: 1, Command: "cohdi-agent", Agent: true}, hotplug.Holder{PID: 2, Command: "cohdi-agent", Agent: true}
	user, twin := hotplug.Holder{PID: 3, Command: "python"}, hotplug.Holder{PID: 4, Command: "cohdi-agent"}
	for _, tc := range []struct {
		situation string
		holders   []hotplug.Holder
		want      []string
		other     bool
	}{
		{"nobody", nil, nil, false},
		{"this agent", []hotplug.Holder{own}, nil, false},
		{"both agents", []hotplug.Holder{own, other}, nil, true},
		{"both agents and a user", []hotplug.Holder{own, other, user}, []string{"python (pid 3)"}, false},
		{"one that only has the name", []hotplug.Holder{own, twin}, []string{"cohdi-agent (pid 4)"}, false},
	} {
		got, err := users(tc.holders, own.PID)
		if diff := cmp.Diff(tc.want, got); diff != "" || errors.Is(err, errOtherAgent) != tc.other {
			t.Errorf("%s: %v, %v; want %v, another agent %v", tc.situation, got, err, tc.want, tc.other)
		}
	}
}
