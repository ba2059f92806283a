// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/pprof"
	"slices"
	"strings"
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

// kinds runs a scenario with services that differ in how a change is asked for and answered; with more of them where all is
// to be run.
func kinds(t *testing.T, run func(b *bench)) {
	t.Helper()
	all := map[string]simapi.RedfishPolicies{
		"actions and tasks": {},
		"list and tasks":    {Forms: "list", ETag: "required", Composing: "unlisted"},
		"zones":             {Variant: "zones", Work: "sync200"},
	}
	if *full {
		all["list, synchronous"] = simapi.RedfishPolicies{Forms: "list", Work: "sync204"}
		all["manifest, no monitors"] = simapi.RedfishPolicies{Forms: "manifest", Work: "bare202"}
	}
	for name, p := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(newBench(t, setting{policies: p, random: true}))
		})
	}
}

func (b *bench) device(i int) string { return b.uri(b.Config.Devices[i].ID) }

// intent is about a device of ModelA or, the third, ModelB.
func (b *bench) intent(m device.Machine, i int) fabric.Intent {
	return fabric.Intent{Machine: m, Model: b.Config.Devices[i].Model, Device: b.device(i)}
}

func (b *bench) wait(c *client.Client, op fabric.Operation, err error) (fabric.Operation, error) {
	b.t.Helper()
	if err != nil {
		return op, err
	}
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	return fabrictest.Wait(ctx, clock.RealClock{}, c, op)
}

func (b *bench) attach(c *client.Client, in fabric.Intent) fabric.Operation {
	b.t.Helper()
	op, err := c.Attach(b.t.Context(), in)
	if op, err = b.wait(c, op, err); err != nil {
		b.t.Fatal(err)
	}
	return op
}

func (b *bench) detach(c *client.Client, in fabric.Intent) {
	b.t.Helper()
	op, err := c.Detach(b.t.Context(), in)
	if _, err = b.wait(c, op, err); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) fault(err error, class device.FaultClass, words ...string) {
	b.t.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok || f.Class != class {
		b.t.Errorf("error = %v, want a fault of class %s", err, class)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			b.t.Errorf("error = %v, want %q in it", err, w)
		}
	}
}

// has checks what is on a machine.
func (b *bench) has(m device.Machine, want ...string) {
	b.t.Helper()
	slices.Sort(want)
	if got := b.Attached(m); !slices.Equal(got, want) {
		b.t.Errorf("machine %s has %v, want %v", m, got, want)
	}
}

// TestScenario_lostAnswers: what became of a change whose answer is lost is found out, and it is never asked for twice.
func TestScenario_lostAnswers(t *testing.T) {
	for _, action := range []string{simapi.ActionDropAfter, simapi.ActionStatusAfterEffect, simapi.ActionReset} {
		t.Run(action, func(t *testing.T) {
			kinds(t, func(b *bench) {
				c := b.client()
				lose := func() {
					b.Add(simapi.Fault{Face: "redfish", Body: "@odata.id", Action: action, Status: 504, Count: 1})
				}
				lose()
				b.attach(c, b.intent(fabrictest.MachineOne, 0))
				b.has(fabrictest.MachineOne, b.device(0))
				lose()
				b.detach(c, b.intent(fabrictest.MachineOne, 0))
				b.has(fabrictest.MachineOne)
				if n := b.asked.Load(); n != 2 {
					b.t.Errorf("%d changes were asked for, want 2", n)
				}
			})
		})
	}
}

// TestScenario_lostRequests: nothing has been done, and nobody can know: the caller lists and asks again.
func TestScenario_lostRequests(t *testing.T) {
	kinds(t, func(b *bench) {
		c := b.client()
		in := b.intent(fabrictest.MachineOne, 0)
		b.Add(simapi.Fault{Face: "redfish", Body: "@odata.id", Action: simapi.ActionDropBefore, Count: 1})
		_, err := c.Attach(b.t.Context(), in)
		b.fault(err, device.FaultUnknown)
		b.has(fabrictest.MachineOne)
		b.attach(c, in)
		b.has(fabrictest.MachineOne, b.device(0))
	})
}

// TestScenario_anotherProcess: it goes on with what a lease holds, with the handle or without, also when the service has
// forgotten the task.
func TestScenario_anotherProcess(t *testing.T) {
	for _, p := range []simapi.RedfishPolicies{{}, {Work: "task200"}, {Work: "bare202"}, {Composing: "unlisted", Forms: "list"}, {AfterTask: "gone"}} {
		for _, lost := range []string{"nothing", "handle", "task", "handle and task"} {
			if !*full && lost != "task" && lost != "handle" {
				continue
			}
			t.Run(fmt.Sprintf("%s%s%s%s, lost %s", p.Work, p.Composing, p.Forms, p.AfterTask, lost), func(t *testing.T) {
				t.Parallel()
				b := newBench(t, setting{policies: p})
				b.slow(300 * time.Millisecond)
				in := b.intent(fabrictest.MachineOne, 0)
				op, err := b.client().Attach(t.Context(), in)
				if err != nil || op.State != fabric.Pending {
					t.Fatalf("attach = %+v, %v", op, err)
				}
				stored := fabric.Operation{Kind: op.Kind, State: fabric.Pending, Intent: in, Handle: op.Handle}
				if strings.Contains(lost, "handle") {
					stored.Handle = ""
				}
				if strings.Contains(lost, "task") {
					b.face.ForgetTasks()
				}
				other := b.client()
				stored, err = other.Poll(t.Context(), stored)
				if err == nil && stored.State == fabric.Done && b.busy() {
					t.Errorf("polled %+v while it is under way", stored)
				}
				if stored, err = b.wait(other, stored, err); err != nil || stored.State != fabric.Done {
					t.Fatalf("the other process waited for %+v, %v", stored, err)
				}
				b.has(fabrictest.MachineOne, b.device(0))
				if n := b.asked.Load(); n != 1 {
					t.Errorf("%d changes were asked for, want 1", n)
				}
			})
		}
	}
}

// TestScenario_race: many clients change one machine at once, each by a list that it has read. None of them undoes what
// another has done.
func TestScenario_race(t *testing.T) {
	rounds := 2
	if *full {
		rounds = 20
	}
	for _, p := range []simapi.RedfishPolicies{
		{Forms: "list", Work: "sync204"},
		{Forms: "list", Composing: "unlisted", ETag: "required"},
		{Forms: "list", ETag: "gzip"},
		{Forms: "manifest", Work: "sync200"},
		{Forms: "actions"},
		{Variant: "zones", Forms: "list", Work: "sync200"},
	} {
		t.Run(p.Variant+p.Forms+p.Work+p.ETag, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, setting{policies: p})
			var wg sync.WaitGroup
			for i := range 3 {
				wg.Go(func() {
					c := b.client()
					for range rounds {
						b.ensure(c, fabric.KindAttach, b.intent(fabrictest.MachineOne, i))
						b.ensure(c, fabric.KindDetach, b.intent(fabrictest.MachineOne, i))
					}
					b.ensure(c, fabric.KindAttach, b.intent(fabrictest.MachineOne, i))
				})
			}
			wg.Wait()
			b.has(fabrictest.MachineOne, b.device(0), b.device(1), b.device(2))
			// Nobody had to do it twice because somebody had undone it.
			for _, op := range b.Core.State().Operations {
				if op.Outcome == "was gone already" {
					t.Errorf("operation %+v", op)
				}
			}
			if n := len(b.Core.State().Operations); n != 3*(2*rounds+1) {
				t.Errorf("%d operations, want %d", n, 3*(2*rounds+1))
			}
		})
	}
}

// ensure asks again while another change of the machine is in the way, and only then.
func (b *bench) ensure(c *client.Client, kind fabric.OperationKind, in fabric.Intent) {
	ask := c.Attach
	if kind == fabric.KindDetach {
		ask = c.Detach
	}
	for range 500 {
		op, err := ask(b.t.Context(), in)
		if _, err = b.wait(c, op, err); err == nil {
			return
		}
		f, ok := errors.AsType[*device.Fault](err)
		if !ok || f.Class != device.FaultBusy && f.Class != device.FaultConflict {
			b.t.Errorf("%s of %s: %v", kind, in.Device, err)
			return
		}
		clock.RealClock{}.Sleep(5 * time.Millisecond)
	}
	b.t.Errorf("%s of %s: nothing comes of it", kind, in.Device)
}

// TestScenario_churn: blocks come and go while the pages are read; what stays is found, and once.
func TestScenario_churn(t *testing.T) {
	b := newBenchOf(t, setting{policies: simapi.RedfishPolicies{PageSize: "3"}}, strings.Replace(chassis, "id: a, count: 2", "id: a, count: 20", 1))
	c := b.client()
	turns, gone := 0, false
	change := func(r *http.Request) {
		// While a later page is read, the first member goes, or comes back.
		if r.URL.Path != b.face.block("")[:len(b.face.block(""))-1] || r.URL.Query().Get("$skip") != "6" || turns == 3 {
			return
		}
		turns++
		gone = !gone
		action := simapi.DeviceReturn
		if gone {
			action = simapi.DeviceVanish
		}
		if changed := b.Core.ChangeDevice("a-0", simapi.DeviceChange{Action: action}); changed != nil {
			t.Error(changed)
		}
	}
	b.before.Store(&change)
	free, err := c.Free(t.Context(), []string{fabrictest.ModelA})
	if err != nil {
		t.Fatal(err)
	}
	if turns != 3 || !gone {
		t.Fatalf("nothing changed while it was read: %d", turns)
	}
	var got, want []string
	for _, d := range free[fabrictest.ModelA].Devices {
		got = append(got, d.ID)
	}
	for i := 1; i < 20; i++ {
		want = append(want, b.face.block(fmt.Sprintf("a-%d", i)))
	}
	slices.Sort(got)
	if slices.Sort(want); !slices.Equal(got, want) {
		t.Errorf("free %v, want %v", got, want)
	}
}

// TestScenario_anonymous: a caller that names no device gets one that can be had.
func TestScenario_anonymous(t *testing.T) {
	kinds(t, func(b *bench) {
		c := b.client()
		in := fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA}
		first := b.attach(c, in)
		if len(first.Devices) != 1 {
			b.t.Fatalf("attach names %+v", first.Devices)
		}
		b.has(fabrictest.MachineOne, first.Devices[0].ID)
		second := b.attach(c, fabric.Intent{Machine: fabrictest.MachineTwo, Model: fabrictest.ModelA})
		b.has(fabrictest.MachineTwo, second.Devices[0].ID)
		_, err := c.Attach(b.t.Context(), in)
		b.fault(err, device.FaultNoCapacity)
	})
}

func TestScenario_anonymousSpares(t *testing.T) {
	critical := "Critical"
	for name, does := range map[string]func(b *bench) error{
		"reserved": func(b *bench) error {
			if status, body := b.person("PATCH", b.face.block("a-0"), `{"CompositionStatus":{"Reserved":true}}`); status != 204 {
				return fmt.Errorf("reserve: %d %v", status, body)
			}
			return nil
		},
		"critical": func(b *bench) error { return b.Core.ChangeDevice("a-0", simapi.DeviceChange{Health: &critical}) },
		"stolen": func(b *bench) error {
			return b.Core.ChangeDevice("a-0", simapi.DeviceChange{Action: simapi.DeviceSteal})
		},
		"vanished": func(b *bench) error {
			return b.Core.ChangeDevice("a-0", simapi.DeviceChange{Action: simapi.DeviceVanish})
		},
		"built in": func(b *bench) error {
			return b.Core.ChangeDevice("a-0", simapi.DeviceChange{Action: simapi.DeviceBuildIn, Machine: "n2"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, setting{})
			if err := does(b); err != nil {
				t.Fatal(err)
			}
			c := b.client()
			free, err := c.Free(t.Context(), []string{fabrictest.ModelA})
			if err != nil || free[fabrictest.ModelA].Count != 1 || free[fabrictest.ModelA].Devices[0].ID != b.device(1) {
				t.Errorf("free = %+v, %v, want the other one", free, err)
			}
			before := b.asked.Load()
			_, err = c.Attach(t.Context(), b.intent(fabrictest.MachineOne, 0))
			b.fault(err, device.FaultRejected)
			if n := b.asked.Load(); n != before {
				t.Error("it was asked for all the same")
			}
			for _, m := range []device.Machine{fabrictest.MachineOne, fabrictest.MachineTwo} {
				in := fabric.Intent{Machine: m, Model: fabrictest.ModelA}
				op := b.attach(c, in)
				b.has(m, b.device(1))
				in.Device = op.Devices[0].ID
				b.detach(c, in)
			}
		})
	}
}

// TestScenario_wantedByTwo: two machines want some device at once; each gets its own, or is told that there is none.
func TestScenario_wantedByTwo(t *testing.T) {
	kinds(t, func(b *bench) {
		for range 2 {
			var wg sync.WaitGroup
			for _, m := range []device.Machine{fabrictest.MachineOne, fabrictest.MachineTwo} {
				wg.Go(func() { b.ensure(b.client(), fabric.KindAttach, fabric.Intent{Machine: m, Model: fabrictest.ModelA}) })
			}
			wg.Wait()
			one, two := b.Attached(fabrictest.MachineOne), b.Attached(fabrictest.MachineTwo)
			if len(one) != 1 || len(two) != 1 || one[0] == two[0] {
				b.t.Fatalf("the machines have %v and %v", one, two)
			}
			c := b.client()
			b.detach(c, fabric.Intent{Machine: fabrictest.MachineOne, Device: one[0]})
			b.detach(c, fabric.Intent{Machine: fabrictest.MachineTwo, Device: two[0]})
		}
	})
}

// TestScenario_hostBlock: what the host itself is made of is never asked to leave.
func TestScenario_hostBlock(t *testing.T) {
	kinds(t, func(b *bench) {
		path := b.face.block(hostBlock + "n1")
		if b.face.policies().Variant == variantZones {
			path = b.face.endpoint(0, hostPort+"n1")
		}
		before := b.asked.Load()
		_, err := b.client().Detach(b.t.Context(), fabric.Intent{Machine: fabrictest.MachineOne, Device: path})
		b.fault(err, device.FaultRejected, "host")
		_, err = b.client().Attach(b.t.Context(), fabric.Intent{Machine: fabrictest.MachineTwo, Device: path})
		b.fault(err, device.FaultRejected, "host")
		if b.asked.Load() != before {
			b.t.Error("a change was asked for")
		}
	})
}

func TestScenario_identity(t *testing.T) {
	for identity, want := range map[string]bool{"full": true, "prefixed": true, "inSerial": true, "nullStatus": true, "serialOnly": false, "none": false, "duplicate": false} {
		t.Run(identity, func(t *testing.T) {
			b := newBench(t, setting{policies: simapi.RedfishPolicies{Identity: identity}})
			b.place("n1", "a-0")
			b.place("n1", "a-1")
			lists, failed := b.client().ListAttached(t.Context(), []device.Machine{fabrictest.MachineOne})
			if len(failed) > 0 || len(lists[fabrictest.MachineOne]) != 2 {
				t.Fatalf("list = %v, %v", lists, failed)
			}
			for i, d := range lists[fabrictest.MachineOne] {
				id := device.GPUUUID("")
				if want {
					id = device.GPUUUID(b.Config.Devices[i].UUID)
				}
				if d.UUID != id || d.ID != b.device(i) {
					t.Errorf("device %+v, want UUID %q", d, id)
				}
				if serial := b.Config.Devices[i].Serial; identity == "serialOnly" && d.Serial != serial {
					t.Errorf("device %+v, want serial number %q", d, serial)
				}
			}
			b.setting.nameless = true
			c := b.client()
			lists, failed = c.ListAttached(t.Context(), []device.Machine{fabrictest.MachineOne})
			if len(failed) > 0 || len(lists[fabrictest.MachineOne]) != 2 || c.Capabilities().Identity {
				t.Fatalf("list = %v, %v", lists, failed)
			}
			for _, d := range lists[fabrictest.MachineOne] {
				if d.UUID != "" || d.Serial != "" {
					t.Errorf("device %+v, though identities are not to be believed", d)
				}
			}
		})
	}
}

func TestScenario_sessions(t *testing.T) {
	b := newBenchOf(t, setting{}, chassis+"redfish: {sessions: 1, sessionTimeout: 500ms}\n")
	first, second := b.client(), b.client()
	for range 5 {
		if err := first.Health(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	b.fault(second.Health(t.Context()), device.FaultBusy, "SessionLimitExceeded")
	if n := b.face.Logins(); n != 1 {
		t.Errorf("%d logins, want 1", n)
	}
	// Nobody is asked for anything, and the session ends.
	clock.RealClock{}.Sleep(time.Second)
	if err := first.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := b.face.Logins(); n != 2 {
		t.Errorf("%d logins after one session had ended, want 2", n)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if n := b.face.Sessions(); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
	if err := second.Health(t.Context()); err != nil {
		t.Errorf("%v, now that there is room", err)
	}
	for _, r := range b.Faults.Log() {
		if strings.Contains(r.Body, b.Config.Credentials.Password) || strings.Contains(r.Body, `"Password"`) {
			t.Errorf("the log shows %s", r.Body)
		}
	}
}

// TestScenario_events: a client that listens is told of what others do, also after it was cut off, and ends with Close.
func TestScenario_events(t *testing.T) {
	b := newBench(t, setting{random: true})
	c := b.client()
	pokes := make(chan struct{}, 1000)
	ended := make(chan error, 1)
	go func() { ended <- c.Watch(t.Context(), func() { pokes <- struct{}{} }) }()
	await := func(n int, when string) {
		t.Helper()
		for range n {
			select {
			case <-pokes:
			case <-time.After(20 * time.Second):
				t.Fatalf("no poke %s", when)
			}
		}
	}
	await(1, "when it listens")
	other := b.client()
	b.attach(other, b.intent(fabrictest.MachineTwo, 0))
	await(2, "at an attach's begin and end")
	b.face.CutStreams()
	await(1, "when it listens again")
	b.face.EndSessions() // of whoever has opened the stream, which goes on
	b.detach(other, b.intent(fabrictest.MachineTwo, 0))
	await(2, "at a detach's begin and end")
	if n := b.face.Streams(); n != 1 {
		t.Errorf("%d streams", n)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("watch = %v at the end", err)
	}
	leftOvers(t)
}

// leftOvers checks that no goroutine of a client is left that was closed.
func leftOvers(t *testing.T) {
	t.Helper()
	var last string
	for range 200 {
		var b strings.Builder
		if err := pprof.Lookup("goroutine").WriteTo(&b, 2); err != nil {
			t.Fatal(err)
		}
		last = ""
		for g := range strings.SplitSeq(b.String(), "\n\n") {
			if strings.Contains(g, "fabric/redfish.(*Client)") || strings.Contains(g, "fabric/rest.") {
				last = g
			}
		}
		if last == "" {
			return
		}
		clock.RealClock{}.Sleep(10 * time.Millisecond)
	}
	t.Errorf("a goroutine is left:\n%s", last)
}

// TestScenario_closeDuringLogin: whoever waits is let go.
func TestScenario_closeDuringLogin(t *testing.T) {
	b := newBench(t, setting{})
	b.Add(simapi.Fault{Face: "redfish", Method: "POST", Path: "Sessions$", Action: simapi.ActionHang})
	c := b.client()
	ended := make(chan error, 1)
	go func() { ended <- c.Health(t.Context()) }()
	for len(b.Faults.Rules()) == 0 || b.Faults.Rules()[0].Hits == 0 {
		clock.RealClock{}.Sleep(time.Millisecond)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	b.fault(<-ended, device.FaultUnreachable)
	leftOvers(t)
}
