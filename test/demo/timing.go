// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// part is who a time is spent by.
type part string

// The parts of the way from Pending to Running.
const (
	byScheduler part = "scheduler"
	byFabric    part = "fabric"
	byAgent     part = "agent"
	byKubelet   part = "kubelet"
)

// mark is a moment on the way, and who has spent the time before it.
type mark struct {
	What string
	By   part
	At   time.Time
}

// way is a Pod's from Pending to Running.
type way struct {
	Begin time.Time
	Marks []mark
}

// wayOf puts together when the API server told of each step and what the chassis did meanwhile. A chassis
// that attaches when nobody waits, or an attach that took two calls, is not the way of one GPU.
func wayOf(steps map[step]time.Time, ops []simapi.Operation, onBus time.Time) (way, error) {
	for _, s := range []step{created, allocated, assigned, attached, bound, running} {
		if steps[s].IsZero() {
			return way{}, fmt.Errorf("the Pod was never seen %s", s)
		}
	}
	if len(ops) != 1 || ops[0].End == nil {
		return way{}, fmt.Errorf("the chassis shows %d attaches of the Pod's GPU, not one that has ended", len(ops))
	}
	w := way{Begin: steps[created], Marks: []mark{
		{"the scheduler has chosen node and GPU", byScheduler, steps[allocated]},
		{"the leader has given the GPU to the node", byAgent, steps[assigned]},
		{"the node's agent has asked the fabric manager", byAgent, ops[0].Start},
		{"the fabric has attached the GPU", byFabric, *ops[0].End},
		{"the GPU is on the node's PCI bus", byFabric, onBus},
		{"the claim says Attached", byAgent, steps[attached]},
		{"the Pod is bound to the node", byScheduler, steps[bound]},
		{"the container runs", byKubelet, steps[running]},
	}}
	// A watch may tell of a step after the one that follows it is known from elsewhere.
	last := w.Begin
	for i := range w.Marks {
		if w.Marks[i].At.Before(last) {
			w.Marks[i].At = last
		}
		last = w.Marks[i].At
	}
	return w, nil
}

func (w way) total() time.Duration { return w.Marks[len(w.Marks)-1].At.Sub(w.Begin) }

// parts says who has spent how much; it adds up to the total.
func (w way) parts() map[part]time.Duration {
	sum := map[part]time.Duration{}
	last := w.Begin
	for _, m := range w.Marks {
		sum[m.By] += m.At.Sub(last)
		last = m.At
	}
	return sum
}

// String is the line that ends the demonstration. The parts are rounded so that what is printed adds up.
func (w way) String() string {
	order := []part{byScheduler, byFabric, byAgent, byKubelet}
	sum := w.parts()
	values := make([]time.Duration, len(order))
	for i, p := range order {
		values[i] = sum[p]
	}
	tenths := roundToSum(values, 100*time.Millisecond)
	words := make([]string, len(order))
	total := 0
	for i, p := range order {
		words[i] = fmt.Sprintf("%s %.1f", p, float64(tenths[i])/10)
		total += tenths[i]
	}
	return fmt.Sprintf("first Pod Pending -> Running in %.1f s (%s)", float64(total)/10, strings.Join(words, ", "))
}

// roundToSum returns the values in units, rounded so that they add up to the rounded sum: those that lose
// most by being cut off get the units that are missing.
func roundToSum(values []time.Duration, unit time.Duration) []int {
	var sum time.Duration
	type share struct {
		at   int
		rest time.Duration
	}
	rounded, shares := make([]int, len(values)), make([]share, len(values))
	missing := 0
	for i, v := range values {
		sum += v
		rounded[i] = int(v / unit)
		shares[i] = share{i, v % unit}
		missing -= rounded[i]
	}
	missing += int((sum + unit/2) / unit)
	slices.SortStableFunc(shares, func(a, b share) int { return int(b.rest - a.rest) })
	for i := range missing {
		rounded[shares[i].at]++
	}
	return rounded
}
