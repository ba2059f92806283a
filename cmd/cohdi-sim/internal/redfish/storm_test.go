// SPDX-License-Identifier: Apache-2.0

package redfish

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
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	client "github.com/cohdi/cohdi-agent/internal/fabric/redfish"
)

// agent is a caller as the contract wants it: what it intends is stored before it asks, and the handle before it polls. It may
// die at any moment; the next one goes on with what is stored.
type agent struct {
	b       *bench
	c       *client.Client
	rand    *rand.Rand
	machine device.Machine
	device  int
	deaths  int
}

// dies tells whether the process ends here. Its session stays, until it is not used any more.
func (a *agent) dies() bool {
	if a.rand.IntN(4) != 0 {
		return false
	}
	a.deaths++
	a.c = a.b.client()
	return true
}

// listed tells whether the device is on the machine, once the service says anything.
func (a *agent) listed() bool {
	for {
		lists, failed := a.c.ListAttached(a.b.t.Context(), []device.Machine{a.machine})
		if len(failed) == 0 {
			return slices.ContainsFunc(lists[a.machine], func(d device.OnFabric) bool { return d.ID == a.b.device(a.device) })
		}
		clock.RealClock{}.Sleep(5 * time.Millisecond)
	}
}

// become asks until the list shows the device, or does not, and goes on doing so.
func (a *agent) become(kind fabric.OperationKind) {
	want := kind == fabric.KindAttach
	const most = 300
	for range most {
		in := a.b.intent(a.machine, a.device)
		op, err := a.ask(kind, in)
		stored := fabric.Operation{Kind: kind, State: fabric.Pending, Intent: in, Handle: op.Handle}
		if a.dies() { // the handle was not stored
			stored.Handle = ""
			op, err = a.c.Poll(a.b.t.Context(), stored)
		}
		if err == nil && op.State == fabric.Pending {
			stored.Handle = op.Handle
			a.dies() // and now it was
			op, err = a.b.wait(a.c, stored, nil)
		}
		// Whatever has been said, the list decides, when nothing is under way any more.
		if err == nil || op.State == fabric.Failed || a.rand.IntN(3) == 0 {
			a.b.rest()
			if a.listed() == want {
				return
			}
		}
		clock.RealClock{}.Sleep(time.Duration(a.rand.IntN(20)) * time.Millisecond)
	}
	a.b.t.Errorf("%s of device %d: nothing came of %d calls", kind, a.device, most)
}

func (a *agent) ask(kind fabric.OperationKind, in fabric.Intent) (fabric.Operation, error) {
	if kind == fabric.KindDetach {
		return a.c.Detach(a.b.t.Context(), in)
	}
	return a.c.Attach(a.b.t.Context(), in)
}

// trouble breaks something every few milliseconds until it is told to stop.
func (b *bench) trouble(r *rand.Rand, stop <-chan struct{}) {
	const page, names = "<html><body>Bad gateway</body></html>", "@odata.id"
	_, busy := refusalOf(503, "ResourceInUse")
	rules := []simapi.Fault{
		{Face: "redfish", Body: names, Action: simapi.ActionDropBefore},
		{Face: "redfish", Body: names, Action: simapi.ActionDropAfter},
		{Face: "redfish", Body: names, Action: simapi.ActionReset},
		{Face: "redfish", Body: names, Action: simapi.ActionDup},
		{Face: "redfish", Body: names, Action: simapi.ActionStatus, Status: 503, Content: busy},
		{Face: "redfish", Body: names, Action: simapi.ActionStatus, Status: 502, Content: page, ContentType: "text/html"},
		{Face: "redfish", Body: names, Action: simapi.ActionStatusAfterEffect, Status: 504, Content: page, ContentType: "text/html"},
		{Face: "redfish", Body: names, Action: simapi.ActionStatusAfterEffect, Status: 202},
		{Face: "redfish", Method: "GET", Action: simapi.ActionStatus, Status: 503, Content: busy},
		{Face: "redfish", Method: "GET", Action: simapi.ActionStatus, Status: 500, Content: page},
		{Face: "redfish", Method: "GET", Action: simapi.ActionDropAfter},
		{Face: "redfish", Method: "GET", Action: simapi.ActionReset},
		{Face: "hw", Action: simapi.ActionDropBefore},
		{Face: "hw", Action: simapi.ActionDropAfter},
		{Face: "hw", Action: simapi.ActionStatus, Status: 409, Content: "no"},
		{Face: "hw", Action: simapi.ActionStatusAfterEffect, Status: 500, Content: "link training failed"},
	}
	for clk := (clock.RealClock{}); ; {
		select {
		case <-stop:
			return
		case <-clk.After(time.Duration(r.IntN(40)) * time.Millisecond):
		}
		switch r.IntN(8) {
		case 0:
			b.face.EndSessions()
		case 1:
			b.face.ForgetTasks()
		default:
			rule := rules[r.IntN(len(rules))]
			rule.Count = 1
			b.Add(rule)
		}
	}
}

// TestScenario_storm: machines that change at the same time, answers that get lost, tasks and sessions that are forgotten,
// processes that die. In the end everything is where it was wanted, and nothing else is anywhere.
func TestScenario_storm(t *testing.T) {
	seeds, rounds := 2, 1
	if *full {
		seeds, rounds = 24, 2
	}
	ways := []simapi.RedfishPolicies{
		{},
		{Forms: "list", Composing: "unlisted", ETag: "required"},
		{Forms: "list", Work: "sync204"},
		{Forms: "manifest", Work: "bare202"},
		{Work: "early200", AfterTask: "gone"},
		{Variant: "zones", Forms: "list", Work: "sync200"},
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, setting{policies: ways[seed%len(ways)], random: seed%2 == 0})
			b.slow(20 * time.Millisecond)
			stop := make(chan struct{})
			var makers, agents sync.WaitGroup
			makers.Go(func() { b.trouble(rand.New(rand.NewPCG(uint64(seed), 1)), stop) })
			all := []*agent{{machine: fabrictest.MachineOne, device: 0}, {machine: fabrictest.MachineTwo, device: 1}, {machine: fabrictest.MachineTwo, device: 2}}
			for i, a := range all {
				a.b, a.c, a.rand = b, b.client(), rand.New(rand.NewPCG(uint64(seed), uint64(i+2)))
				agents.Go(func() {
					for range rounds {
						a.become(fabric.KindAttach)
						a.become(fabric.KindDetach)
					}
					a.become(fabric.KindAttach)
				})
			}
			agents.Wait()
			close(stop)
			makers.Wait()
			b.Faults.Clear("") // what was not met
			b.has(fabrictest.MachineOne, b.device(0))
			b.has(fabrictest.MachineTwo, b.device(1), b.device(2))
			deaths := 0
			for _, a := range all {
				deaths += a.deaths
			}
			if deaths == 0 {
				t.Error("no process died: that was no storm")
			}
			t.Logf("%d deaths, %d requests", deaths, len(b.Faults.Log()))
		})
	}
}
