// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cdim"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// node is a caller as the contract wants it: it stores what it intends before it asks, and the handle before it polls;
// it may die at any moment and goes on with what is stored.
type node struct {
	b       *bench
	c       *client.Client
	rand    *rand.Rand
	machine device.Machine
	device  int

	// stored outlives a crash.
	stored  fabric.Operation
	crashes int
}

func (n *node) crash() bool {
	if n.rand.IntN(4) != 0 {
		return false
	}
	n.crashes++
	n.c = n.b.client()
	return true
}

// listed tells whether the manager lists the device here, once it says anything.
func (n *node) listed() bool {
	for {
		lists, failed := n.c.ListAttached(n.b.t.Context(), []device.Machine{n.machine})
		if len(failed) == 0 {
			return slices.ContainsFunc(lists[n.machine], func(d device.OnFabric) bool { return d.ID == n.b.device(n.device) })
		}
		clock.RealClock{}.Sleep(5 * time.Millisecond)
	}
}

// settled is listed once the list can be believed.
func (n *node) settled(want bool) bool {
	clk := clock.RealClock{}
	for begun := clk.Now(); ; clk.Sleep(10 * time.Millisecond) {
		if n.listed() == want {
			return true
		}
		if clk.Since(begun) > n.c.Capabilities().Settle {
			return false
		}
	}
}

// ensure makes it so.
func (n *node) ensure(kind fabric.OperationKind) {
	change := map[fabric.OperationKind]func(fabric.Intent) (fabric.Operation, error){
		fabric.KindAttach: func(in fabric.Intent) (fabric.Operation, error) { return n.c.Attach(n.b.t.Context(), in) },
		fabric.KindDetach: func(in fabric.Intent) (fabric.Operation, error) { return n.c.Detach(n.b.t.Context(), in) },
	}[kind]
	want := kind == fabric.KindAttach
	const most = 200
	for range most {
		in := n.b.intent(n.machine, n.device)
		n.stored = fabric.Operation{Kind: kind, State: fabric.Pending, Intent: in}
		op, err := change(in)
		if n.crash() { // before the handle was stored
			op, err = n.c.Poll(n.b.t.Context(), n.stored)
		}
		if err == nil {
			n.stored.Handle = op.Handle
			n.crash() // and after
			op, err = n.b.wait(n.c, n.stored)
		}
		// Whatever has been said, the list decides.
		if (err == nil || op.State == fabric.Failed || n.rand.IntN(4) == 0) && n.settled(want) {
			return
		}
		clock.RealClock{}.Sleep(time.Duration(n.rand.IntN(30)) * time.Millisecond)
	}
	n.b.t.Errorf("%s of device %d: nothing came of %d calls", kind, n.device, most)
}

// trouble breaks something about every few milliseconds until it is told to stop.
func (b *bench) trouble(r *rand.Rand, stop <-chan struct{}) {
	const page = "<html><body>Bad gateway</body></html>"
	rules := []simapi.Fault{
		{Face: "cdim", Method: "POST", Action: simapi.ActionDropBefore},
		{Face: "cdim", Method: "POST", Action: simapi.ActionDropAfter},
		{Face: "cdim", Method: "POST", Action: simapi.ActionReset},
		{Face: "cdim", Method: "POST", Action: simapi.ActionDup},
		{Face: "cdim", Method: "POST", Action: simapi.ActionStatus, Status: 502, Content: page, ContentType: "text/html"},
		{Face: "cdim", Method: "POST", Action: simapi.ActionStatusAfterEffect, Status: 504, Content: page, ContentType: "text/html"},
		{Face: "cdim", Method: "POST", Action: simapi.ActionStatusAfterEffect, Status: 202},
		{Face: "cdim", Method: "GET", Action: simapi.ActionStatus, Status: 503, Content: page, ContentType: "text/html"},
		{Face: "cdim", Method: "GET", Action: simapi.ActionDropAfter},
		{Face: "cdim", Method: "GET", Action: simapi.ActionReset},
		{Face: "hw", Action: simapi.ActionDropBefore},
		{Face: "hw", Action: simapi.ActionDropAfter},
		{Face: "hw", Action: simapi.ActionStatus, Status: 500, Content: `{"code":"EF004BAS001","message":"connect failed"}`},
		{Face: "hw", Action: simapi.ActionStatusAfterEffect, Status: 500, Content: `{"code":"EF004BAS001","message":"connect failed"}`},
	}
	for clk := (clock.RealClock{}); ; {
		select {
		case <-stop:
			return
		case <-clk.After(time.Duration(r.IntN(60)) * time.Millisecond):
		}
		if r.IntN(6) == 0 && b.setting.gateway {
			b.Tokens.RevokeAll()
			continue
		}
		rule := rules[r.IntN(len(rules))]
		rule.Count = 1
		b.Add(rule)
	}
}

// TestScenario_storm: nodes that share the one job, answers that get lost, processes that die. In the end everything is
// where it was wanted.
func TestScenario_storm(t *testing.T) {
	seeds, rounds := 2, 1
	if *full {
		seeds, rounds = 20, 2
	}
	for seed := range seeds {
		s := setting{dialect: []string{"oss", "product"}[seed%2], gateway: seed%3 != 1, stale: 40 * time.Millisecond}
		t.Run(fmt.Sprintf("seed %d, %s", seed, s.dialect), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, s)
			b.slow(20 * time.Millisecond)
			stop := make(chan struct{})
			var makers, nodes sync.WaitGroup
			makers.Go(func() { b.trouble(rand.New(rand.NewPCG(uint64(seed), 1)), stop) })
			all := []*node{{machine: fabrictest.MachineOne, device: 0}, {machine: fabrictest.MachineTwo, device: 1}, {machine: fabrictest.MachineTwo, device: 2}}
			for i, n := range all {
				n.b, n.c, n.rand = b, b.client(), rand.New(rand.NewPCG(uint64(seed), uint64(i+2)))
				nodes.Go(func() {
					for range rounds {
						n.ensure(fabric.KindAttach)
						n.ensure(fabric.KindDetach)
					}
					n.ensure(fabric.KindAttach)
				})
			}
			nodes.Wait()
			close(stop)
			makers.Wait()
			if got := b.Attached(fabrictest.MachineOne); !slices.Equal(got, []string{b.device(0)}) {
				t.Errorf("machine one has %v", got)
			}
			want := []string{b.device(1), b.device(2)}
			slices.Sort(want)
			if got := b.Attached(fabrictest.MachineTwo); !slices.Equal(got, want) {
				t.Errorf("machine two has %v", got)
			}
			b.untouched()
			hits := 0
			for _, r := range b.faults.Rules() {
				hits += r.Hits
			}
			if hits < 10 || all[0].crashes+all[1].crashes+all[2].crashes == 0 {
				t.Errorf("%d faults were met, %d, %d and %d processes died: that was no storm", hits, all[0].crashes, all[1].crashes, all[2].crashes)
			}
			t.Logf("%d faults, %d jobs", hits, len(b.face.jobs))
		})
	}
}
