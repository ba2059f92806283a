// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func TestLineNext(t *testing.T) {
	for _, tc := range []struct {
		name      string
		was       line
		want      bool
		unchanged time.Duration
		is        line
	}{
		{"nobody wants anything", line{}, false, 0, line{}},
		{"free", line{}, true, 0, line{holder: "me"}},
		{"free, first in the line", line{queue: []string{"me", "b"}}, true, 0, line{holder: "me", queue: []string{"b"}}},
		{"free, others wait", line{queue: []string{"a"}}, true, 0, line{queue: []string{"a", "me"}}},
		{"somebody has it", line{holder: "a"}, true, turnExpiry - 1, line{holder: "a", queue: []string{"me"}}},
		{"somebody has it, others wait", line{holder: "a", queue: []string{"b"}}, true, 0, line{holder: "a", queue: []string{"b", "me"}}},
		{"in the line", line{holder: "a", queue: []string{"b", "me"}}, true, turnExpiry, line{holder: "a", queue: []string{"b", "me"}}},
		{"in the line, nothing was heard", line{holder: "a", queue: []string{"me", "b"}}, true, turnExpiry, line{holder: "me", queue: []string{"b"}}},
		{"second in the line, nothing was heard of anybody", line{holder: "a", queue: []string{"b", "me", "c"}}, true, 2 * turnExpiry, line{holder: "me", queue: []string{"c"}}},
		{"second in a line that nobody has", line{queue: []string{"b", "me"}}, true, 2 * turnExpiry, line{holder: "me", queue: []string{}}},
		{"it is mine", line{holder: "me", queue: []string{"b"}}, true, time.Hour, line{holder: "me", queue: []string{"b"}}},
		{"done, others wait", line{holder: "me", queue: []string{"b", "c"}}, false, 0, line{holder: "b", queue: []string{"c"}}},
		{"done, nobody waits", line{holder: "me"}, false, 0, line{}},
		{"not wanted any more", line{holder: "a", queue: []string{"b", "me", "c"}}, false, 0, line{holder: "a", queue: []string{"b", "c"}}},
		{"others' alone", line{holder: "a", queue: []string{"b"}}, false, time.Hour, line{holder: "a", queue: []string{"b"}}},
	} {
		before := slices.Clone(tc.was.queue)
		got := tc.was.next("me", tc.want, tc.unchanged)
		if !got.same(tc.is) {
			t.Errorf("%s: %+v, want %+v", tc.name, got, tc.is)
		}
		if !slices.Equal(before, tc.was.queue) {
			t.Errorf("%s: what was seen is changed to %v", tc.name, tc.was.queue)
		}
	}
}

// turns are the nodes at one manager.
type turns struct {
	t      *testing.T
	server *apiServer
	all    map[string]*Turn
	stop   map[string]context.CancelFunc
	ended  sync.WaitGroup
}

func newTurns(t *testing.T, nodes ...string) *turns {
	t.Helper()
	ts := &turns{t: t, server: newAPIServer(t), all: map[string]*Turn{}, stop: map[string]context.CancelFunc{}}
	for _, n := range nodes {
		turn, err := NewTurn(TurnOptions{Client: ts.server.Clientset, Clock: clock.RealClock{}, Name: "turn-x", Node: n, Changed: func() {}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ts.all[n], ts.stop[n] = turn, cancel
		ts.ended.Go(func() { turn.Run(ctx) })
	}
	synctest.Wait()
	return ts
}

func (ts *turns) end() {
	for _, stop := range ts.stop {
		stop()
	}
	ts.ended.Wait()
}

// has is who has the turn, by everybody's own word.
func (ts *turns) has() []string {
	var has []string
	for n, turn := range ts.all {
		if _, mine := turn.Before(); mine {
			has = append(has, n)
		}
	}
	slices.Sort(has)
	return has
}

// TestTurns: nodes have their turn in the order in which they asked, and the turn of one that is silent passes on.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := []string{"n1", "n2", "n3", "n4"}
		ts := newTurns(t, nodes...)
		for _, n := range nodes {
			ts.all[n].Want(true)
			time.Sleep(2 * time.Second)
		}
		if before, mine := ts.all["n4"].Before(); before != 3 || mine {
			t.Errorf("n4 has %d before it, and its turn: %v", before, mine)
		}
		var order [][]string
		for _, n := range nodes[:2] {
			order = append(order, ts.has())
			ts.all[n].Want(false)
			time.Sleep(time.Second)
		}
		order = append(order, ts.has())
		ts.stop["n3"]() // its agent ends as a process does that is killed: it hands nothing on
		ts.server.setRefuse(func(verb string) error {
			if verb == "update" {
				return fmt.Errorf("the API server is away")
			}
			return nil
		})
		time.Sleep(10 * time.Second)
		ts.server.setRefuse(nil)
		delete(ts.all, "n3")
		time.Sleep(turnExpiry / 2)
		order = append(order, ts.has())
		time.Sleep(turnExpiry)
		order = append(order, ts.has())
		if diff := cmp.Diff([][]string{{"n1"}, {"n2"}, {"n3"}, nil, {"n4"}}, order); diff != "" {
			t.Errorf("who had the turn (-want +got):\n%s", diff)
		}
		time.Sleep(time.Hour) // who has it, and is there, keeps it
		if got := ts.has(); !slices.Equal(got, []string{"n4"}) {
			t.Errorf("after an hour %v has the turn", got)
		}
		ts.end()
		l, err := ts.server.CoordinationV1().Leases(device.LeaseNamespace).Get(t.Context(), "turn-x", metav1.GetOptions{})
		if err != nil || !lineOf(l).same(line{}) || l.Labels[device.LabelTurn] == "" {
			t.Errorf("after the end: %+v, %v", l, err)
		}
	})
}

// TestTurnsAtOnce: all ask at the same moment, and each has its turn once, one at a time.
func TestTurnsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := []string{"n1", "n2", "n3", "n4", "n5", "n6"}
		ts := newTurns(t, nodes...)
		for _, n := range nodes {
			ts.all[n].Want(true)
		}
		had := map[string]int{}
		for range 200 {
			time.Sleep(500 * time.Millisecond)
			has := ts.has()
			if len(has) > 1 {
				t.Fatalf("%v have the turn", has)
			}
			for _, n := range has {
				had[n]++
				ts.all[n].Want(false)
			}
		}
		for _, n := range nodes {
			if had[n] != 1 {
				t.Errorf("%s had its turn %d times: %v", n, had[n], had)
			}
		}
		ts.end()
	})
}

// TestTurnIsQuiet: nobody writes while nobody wants anything.
func TestTurnIsQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ts := newTurns(t, "n1", "n2")
		time.Sleep(24 * time.Hour)
		if n := ts.server.count("update") + ts.server.count("create") + ts.server.count("get"); n != 0 {
			t.Errorf("%d calls in a day", n)
		}
		ts.end()
	})
}

func FuzzLineOf(f *testing.F) {
	f.Add(`["n1","n2"]`, "n3")
	f.Add(`null`, "")
	f.Add(`{"a": 1}`, "n1")
	f.Fuzz(func(t *testing.T, queue, holder string) {
		l := lineOf(&coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{annQueue: queue}},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder},
		})
		if len(l.queue) > mostWaiting {
			t.Errorf("%d in the line", len(l.queue))
		}
		if next := l.next("me", true, 0); next.holder != "me" && !slices.Contains(next.queue, "me") && len(l.queue) < mostWaiting {
			t.Errorf("%+v has no place for one more: %+v", l, next)
		}
	})
}
