// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"sync"
	"time"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// repeatEvery is how often one and the same failure is told: a unit is looked at every second while the driver is
	// not loaded, say.
	repeatEvery = time.Minute
	// mostRepeats bounds the failures that are remembered, since a text may hold what is never the same.
	mostRepeats = 1000
)

// repeats remembers which failures were told. The zero value remembers none.
type repeats struct {
	mu   sync.Mutex // guards the following
	told map[failure]lastTold
}

// failure is one failed action of a unit. Another text is another failure.
type failure struct {
	fabric device.FabricID
	unit   device.Unit
	action attach.Kind
	text   string
}

type lastTold struct {
	at time.Time
	// kept is how often it happened since and was not told.
	kept int
}

// tell says whether to tell of a failure now, and how often it happened since it was last told.
func (r *repeats) tell(f failure, now time.Time) (tell bool, kept int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, known := r.told[f]
	if known && now.Sub(last.at) < repeatEvery {
		last.kept++
		r.told[f] = last
		return false, 0
	}
	if !known && len(r.told) >= mostRepeats {
		maps.DeleteFunc(r.told, func(_ failure, t lastTold) bool { return now.Sub(t.at) >= repeatEvery })
	}
	if r.told == nil {
		r.told = map[failure]lastTold{}
	}
	if known || len(r.told) < mostRepeats {
		r.told[f] = lastTold{at: now}
	}
	return true, last.kept
}

// forget makes the next failure of the unit's action news; of any action if that is empty.
func (r *repeats) forget(l device.Lease, action attach.Kind) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.told, func(f failure, _ lastTold) bool {
		return f.fabric == l.Fabric && f.unit == l.Unit && (action == "" || f.action == action)
	})
}
