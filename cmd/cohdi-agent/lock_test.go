// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
)

// Two agents of one node, as during a rolling update: one acts, the other waits until it has ended.
func TestLockHost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	old, err := lockHost(t.Context(), clock.RealClock{}, path)
	if err != nil {
		t.Fatal(err)
	}
	fake := clocktesting.NewFakeClock(time.Unix(0, 0))
	ctx, cancel := context.WithCancel(t.Context())
	waits := make(chan error)
	go func() {
		_, ended := lockHost(ctx, fake, path)
		waits <- ended
	}()
	for range 3 {
		// The lock outlives its last use in the code by far.
		runtime.GC()
		for !fake.HasWaiters() {
			runtime.Gosched()
		}
		fake.Step(lockPause)
	}
	cancel()
	if err = <-waits; !errors.Is(err, context.Canceled) {
		t.Fatalf("the second agent ended with %v, want it to wait", err)
	}
	if err = old.Close(); err != nil {
		t.Fatal(err)
	}
	young, err := lockHost(t.Context(), fake, path)
	if err != nil {
		t.Fatal(err)
	}
	if err = young.Close(); err != nil {
		t.Error(err)
	}
}
