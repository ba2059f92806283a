// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"testing/quick"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestQuantile(t *testing.T) {
	var hundred sample
	for i := range 100 {
		hundred = append(hundred, time.Duration(100-i))
	}
	for _, tc := range []struct {
		name string
		s    sample
		q    float64
		want time.Duration
	}{
		{"none", nil, 0.5, 0},
		{"one", sample{7}, 0.99, 7},
		{"the least", hundred, 0, 1},
		{"median", hundred, 0.5, 50},
		{"p90", hundred, 0.9, 90},
		{"p99", hundred, 0.99, 99},
		{"the most", hundred, 1, 100},
		{"median of five", sample{5, 1, 4, 2, 3}, 0.5, 3},
		{"p99 of a few is the most", sample{5, 1, 4, 2, 3}, 0.99, 5},
	} {
		if got := tc.s.quantile(tc.q); got != tc.want {
			t.Errorf("%s: quantile(%v) = %d, want %d", tc.name, tc.q, got, tc.want)
		}
	}
}

func TestTable(t *testing.T) {
	table := newTable("what", "p50")
	table.add("allocated → attached", "12 ms")
	table.add("target")
	want := `| what                 | p50   |
|----------------------|-------|
| allocated → attached | 12 ms |
| target               |       |
`
	if diff := cmp.Diff(want, table.String()); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
}

// Whatever the clocks said: no part is negative, they add up to the whole, and so does what is printed.
func TestPartsOf_add_up(t *testing.T) {
	adds := func(ms [5]uint16) bool {
		begin := time.Unix(1000, 0)
		at := func(i int) time.Time { return begin.Add(time.Duration(ms[i]) * time.Millisecond) }
		marks := []mark{{byScheduler, at(0)}, {byAgent, at(1)}, {byFabric, at(2)}, {byAgent, at(3)}, {byKubelet, at(4)}}
		last := begin
		for _, m := range marks {
			if m.at.After(last) {
				last = m.at
			}
		}
		var sum time.Duration
		var values []time.Duration
		for _, d := range partsOf(begin, marks) {
			if d < 0 {
				return false
			}
			sum += d
			values = append(values, d)
		}
		total := 0
		for _, tenths := range roundToSum(values, 100*time.Millisecond) {
			total += tenths
		}
		return sum == last.Sub(begin) && total == int((sum+50*time.Millisecond)/(100*time.Millisecond))
	}
	if err := quick.Check(adds, nil); err != nil {
		t.Error(err)
	}
}

func TestPartsOf(t *testing.T) {
	begin := time.Unix(1000, 0)
	at := func(seconds float64) time.Time { return begin.Add(time.Duration(seconds * float64(time.Second))) }
	got := partsOf(begin, []mark{
		{byScheduler, at(0.1)}, {byAgent, at(0.3)}, {byFabric, at(2.3)}, {byFabric, at(2.2)}, {byAgent, at(2.5)}, {byScheduler, at(5)}, {byKubelet, at(6)},
	})
	want := map[part]time.Duration{
		byScheduler: 2600 * time.Millisecond, byFabric: 2 * time.Second, byAgent: 400 * time.Millisecond, byKubelet: time.Second,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("parts (-want +got):\n%s", diff)
	}
}

func TestParse(t *testing.T) {
	o, err := parse([]string{"-parts", "a,c", "-sizes", "2,50"})
	if err != nil {
		t.Fatal(err)
	}
	if !o.has("a") || o.has("b") || !o.has("c") || o.has("d") {
		t.Errorf("parts %q", o.parts)
	}
	if got := o.commandLine(); got != "make bench PARTS=a,c" {
		t.Errorf("commandLine() = %q", got)
	}
	for _, args := range [][]string{{"-parts", "e"}, {"-parts", ""}, {"-sizes", "1"}, {"-sizes", "many"}, {"a"}} {
		if o, err := parse(args); err == nil {
			t.Errorf("parse(%q) = %+v, want an error", args, o)
		}
	}
}

func TestByPlace(t *testing.T) {
	at := func(second int) time.Time { return time.Unix(int64(second), 0) }
	one := func(machine string, asked int, took time.Duration) podWay {
		return podWay{parts: map[part]time.Duration{byAgent: took}, machine: machine, asked: at(asked)}
	}
	got := byPlace([]podWay{
		one("m1", 1, 10), one("m1", 6, 15), one("m2", 1, 11), one("m1", 11, 20), // a run
		one("m2", 21, 12), one("m1", 21, 13), one("m2", 26, 16), one("m1", 26, 17), // another
	}, 4)
	want := []sample{{10, 11, 12, 13}, {15, 16, 17}, {20}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("byPlace (-want +got):\n%s", diff)
	}
}
