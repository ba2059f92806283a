// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	client "github.com/cohdi/cohdi-agent/internal/fabric/sunfish"
)

const one, two = fabrictest.MachineOne, fabrictest.MachineTwo

// attach waits until it is over.
func (b *bench) attach(c *client.Client, m device.Machine, id string) (fabric.Operation, error) {
	b.t.Helper()
	op, err := c.Attach(b.t.Context(), fabric.Intent{Machine: m, Model: modelOf(id), Device: id})
	if err != nil {
		return op, err
	}
	return fabrictest.Wait(b.t.Context(), clock.RealClock{}, c, op)
}

func modelOf(id string) string {
	if id == onlyB {
		return fabrictest.ModelB
	}
	return fabrictest.ModelA
}

func (b *bench) detach(c *client.Client, m device.Machine, id string) error {
	b.t.Helper()
	op, err := c.Detach(b.t.Context(), fabric.Intent{Machine: m, Model: modelOf(id), Device: id})
	if err != nil {
		return err
	}
	_, err = fabrictest.Wait(b.t.Context(), clock.RealClock{}, c, op)
	return err
}

func (b *bench) is(err error, class device.FaultClass, says string) {
	b.t.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok || f.Class != class || !strings.Contains(err.Error(), says) {
		b.t.Fatalf("error = %v, want %s with %q", err, class, says)
	}
}

// listed are the ids that the client lists on a machine.
func (b *bench) listed(c *client.Client, m device.Machine) []device.OnFabric {
	b.t.Helper()
	lists, failed := c.ListAttached(b.t.Context(), []device.Machine{m})
	if err := failed[m]; err != nil {
		b.t.Fatal(err)
	}
	return lists[m]
}

// free are the ids that the client lists as free, of all models if none is named.
func (b *bench) free(c *client.Client, models ...string) []string {
	b.t.Helper()
	if len(models) == 0 {
		models = []string{fabrictest.ModelA, fabrictest.ModelB}
	}
	free, err := c.Free(b.t.Context(), models)
	if err != nil {
		b.t.Fatal(err)
	}
	var ids []string
	for _, s := range free {
		for _, d := range s.Devices {
			ids = append(ids, d.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// changes counts the requests that may change something.
func (b *bench) changes() int {
	n := 0
	for _, r := range b.Faults.Log() {
		if r.Face == "sunfish" && r.Method != http.MethodGet {
			n++
		}
	}
	return n
}

// An attach without a device takes one that is free and names it.
func TestFace_anyOfAModel(t *testing.T) {
	b := newBench(t, simapi.SunfishPolicies{}, 0)
	c := b.client()
	op, err := b.attach(c, one, "")
	if err != nil || op.State != fabric.Done || len(op.Devices) != 1 || op.Devices[0].ID != op.Intent.Device || op.Devices[0].UUID == "" {
		t.Fatalf("attach = %+v, %v", op, err)
	}
	if got := b.Attached(one); !slices.Equal(got, []string{op.Devices[0].ID}) {
		t.Errorf("the machine has %v, the operation names %s", got, op.Devices[0].ID)
	}
	// Asked again with the device, it is there already.
	before := b.changes()
	if _, err = b.attach(c, one, op.Intent.Device); err != nil || b.changes() != before {
		t.Errorf("attach of what is attached = %v, with %d changes", err, b.changes()-before)
	}
	_, err = b.attach(c, two, op.Intent.Device)
	b.is(err, device.FaultRejected, "is connected to /redfish/v1/Systems/n1")
}

// Two clients saw the same device free. One gets it, the other gives its Connection up.
func TestFace_twoClients(t *testing.T) {
	for _, policy := range []string{"accept", "reject"} {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, simapi.SunfishPolicies{SameTarget: policy}, 0)
			first, second := b.client(), b.client()
			b.before = func() {
				if _, err := b.attach(second, two, firstA); err != nil {
					t.Errorf("the faster one: %v", err)
				}
			}
			_, err := b.attach(first, one, firstA)
			b.is(err, device.FaultConflict, "")
			if got := b.Attached(two); !slices.Equal(got, []string{firstA}) || len(b.Attached(one)) != 0 {
				t.Errorf("the machines have %v and %v", b.Attached(one), got)
			}
			if made := b.members(connections); len(made) != 1 {
				t.Errorf("Connections %v, want the faster one's", made)
			}
		})
	}
}

// The same with real threads, and machines that lag.
func TestFace_twoClientsAtOnce(t *testing.T) {
	b := newBench(t, simapi.SunfishPolicies{}, 30*time.Millisecond)
	first, second := b.client(), b.client()
	for range 10 {
		errs := make([]error, 2)
		var both sync.WaitGroup
		for i, c := range []*client.Client{first, second} {
			both.Go(func() { _, errs[i] = b.attach(c, []device.Machine{one, two}[i], onlyB) })
		}
		both.Wait()
		has := [2]int{len(b.Attached(one)), len(b.Attached(two))}
		if has[0]+has[1] != 1 || (errs[0] == nil) != (has[0] == 1) || (errs[1] == nil) != (has[1] == 1) {
			t.Fatalf("the machines have %v devices, the clients were told %v", has, errs)
		}
		winner := slices.Index(has[:], 1)
		if err := b.detach([]*client.Client{first, second}[winner], []device.Machine{one, two}[winner], onlyB); err != nil {
			t.Fatal(err)
		}
		if made := b.members(connections); len(made) != 0 {
			t.Fatalf("Connections %v are left", made)
		}
	}
}

// The agent has attached and its answer was lost: the service has no copy. The list shows the device all the same, and it
// can be given back.
func TestFace_copyMissing(t *testing.T) {
	lose := func(t *testing.T) (*bench, *client.Client) {
		t.Helper()
		b := newBench(t, simapi.SunfishPolicies{}, 20*time.Millisecond)
		b.Add(simapi.Fault{Face: "agent", Action: simapi.ActionDropAfter, Count: 1})
		c := b.client()
		_, err := b.attach(c, one, firstA)
		b.is(err, device.FaultUnknown, "500")
		if len(b.members(connections)) != 0 || len(b.Attached(one)) != 1 {
			t.Fatal("nothing was lost")
		}
		time.Sleep(2 * b.stale) // the machine has caught up
		if got := b.listed(c, one); len(got) != 1 || got[0].ID != firstA || got[0].Health != device.HealthOK {
			t.Fatalf("listed %+v", got)
		}
		if slices.Contains(b.free(c), firstA) {
			t.Error("it is free, too")
		}
		return b, c
	}
	over := func(t *testing.T, b *bench, c *client.Client) {
		t.Helper()
		if made := b.members(connections); len(made) != 0 || len(b.Attached(one)) != 0 || len(b.free(c)) != 3 {
			t.Errorf("Connections %v, the machine has %v, free %v", made, b.Attached(one), b.free(c))
		}
	}
	t.Run("detach", func(t *testing.T) {
		b, c := lose(t)
		b.is(b.detach(c, one, firstA), device.FaultConflict, "nothing connects it")
		if n := b.changes(); n != 1 {
			t.Errorf("%d changes: what may only lag was connected again", n-1)
		}
		time.Sleep(b.settle())
		if err := b.detach(c, one, firstA); err != nil {
			t.Fatal(err)
		}
		over(t, b, c)
	})
	t.Run("attach again", func(t *testing.T) {
		b, c := lose(t)
		if _, err := b.attach(c, one, firstA); err != nil || len(b.members(connections)) != 1 {
			t.Fatalf("attach = %v, Connections %v", err, b.members(connections))
		}
		if err := b.detach(c, one, firstA); err != nil {
			t.Fatal(err)
		}
		over(t, b, c)
	})
	t.Run("the agent says so later", func(t *testing.T) {
		b, c := lose(t)
		event := `{"Context":"agent","Events":[{"MessageId":"ResourceEvent.1.0.ResourceCreated","OriginOfCondition":{"@odata.id":"` + base + `/Fabrics/f-0"}}]}`
		if status, text := b.person(http.MethodPost, "/EventListener", event); status != http.StatusOK || len(b.members(connections)) != 1 {
			t.Fatalf("event: %d %s; Connections %v", status, text, b.members(connections))
		}
		if err := b.detach(c, one, firstA); err != nil {
			t.Fatal(err)
		}
		over(t, b, c)
	})
}

// The agent has detached and its answer was lost: the copy stays, and the device is nobody else's until it is detached again.
func TestFace_copyStays(t *testing.T) {
	b := newBench(t, simapi.SunfishPolicies{}, 0)
	c := b.client()
	if _, err := b.attach(c, one, firstA); err != nil {
		t.Fatal(err)
	}
	b.Add(simapi.Fault{Face: "agent", Action: simapi.ActionDropAfter, Count: 1})
	b.is(b.detach(c, one, firstA), device.FaultUnknown, "500")
	got := b.listed(c, one)
	if len(got) != 1 || got[0].Health != device.HealthUnknown || !strings.Contains(got[0].HealthText, "does not show it") || len(b.Attached(one)) != 0 {
		t.Fatalf("listed %+v, the machine has %v", got, b.Attached(one))
	}
	if slices.Contains(b.free(c), firstA) {
		t.Error("it is free, too")
	}
	if err := b.detach(c, one, firstA); err != nil || len(b.listed(c, one)) != 0 || len(b.free(c)) != 3 {
		t.Errorf("detach again = %v, listed %+v, free %v", err, b.listed(c, one), b.free(c))
	}
}

// A proxy repeats the request: one Connection is made.
func TestFace_requestRepeated(t *testing.T) {
	b := newBench(t, simapi.SunfishPolicies{}, 0)
	c := b.client()
	b.Add(simapi.Fault{Face: "sunfish", Method: http.MethodPost, Action: simapi.ActionDup, Count: 1})
	if _, err := b.attach(c, one, firstA); err != nil || len(b.members(connections)) != 1 {
		t.Fatalf("attach = %v, Connections %v", err, b.members(connections))
	}
	b.Add(simapi.Fault{Face: "sunfish", Method: http.MethodDelete, Action: simapi.ActionDup, Count: 1})
	if err := b.detach(c, one, firstA); err != nil || len(b.free(c)) != 3 {
		t.Errorf("detach = %v, free %v", err, b.free(c))
	}
}

// catchUp lets the machines show what they have.
func (b *bench) catchUp() { b.face.lag.CatchUp() }

// An operation that a machine does not show yet is polled, by any process; one that began nowhere is not known.
func TestFace_polled(t *testing.T) {
	b := newBench(t, simapi.SunfishPolicies{}, time.Hour)
	op, err := b.client().Attach(t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA})
	if err != nil || op.State != fabric.Pending || op.Handle == "" {
		t.Fatalf("attach = %+v, %v, want it pending", op, err)
	}
	op.Intent.Device = "" // as the caller knew it
	if op, err = b.client().Poll(t.Context(), op); err != nil || op.State != fabric.Pending {
		t.Fatalf("poll = %+v, %v, want it pending", op, err)
	}
	b.catchUp()
	op, err = fabrictest.Wait(t.Context(), clock.RealClock{}, b.client(), op)
	if err != nil || len(op.Devices) != 1 {
		t.Fatalf("wait = %+v, %v", op, err)
	}
	c := b.client()
	left, err := c.Detach(t.Context(), fabric.Intent{Machine: one, Device: op.Devices[0].ID})
	if err != nil || left.State != fabric.Pending {
		t.Fatalf("detach = %+v, %v, want it pending", left, err)
	}
	// Somebody connects it again meanwhile.
	other := b.client()
	if _, err = other.Attach(t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: op.Devices[0].ID}); err != nil {
		t.Fatal(err)
	}
	_, err = fabrictest.Wait(t.Context(), clock.RealClock{}, c, left)
	b.is(err, device.FaultUnknown, "connected again")
	_, err = c.Poll(t.Context(), fabric.Operation{Kind: fabric.KindDetach, State: fabric.Pending, Intent: left.Intent})
	b.is(err, device.FaultUnknown, "nothing is under way")
}

// What else happens to devices shows.
func TestFace_byHand(t *testing.T) {
	b := newBench(t, simapi.SunfishPolicies{}, 0)
	c := b.client()
	steal := func(id string, change simapi.DeviceChange) {
		t.Helper()
		if err := b.Core.ChangeDevice(id, change); err != nil {
			t.Fatal(err)
		}
	}
	steal("a-0", simapi.DeviceChange{Action: simapi.DeviceSteal})
	critical := "Critical"
	steal("a-1", simapi.DeviceChange{Health: &critical})
	steal("b-0", simapi.DeviceChange{Action: simapi.DeviceBuildIn, Machine: "n1"})
	if got := b.free(c, fabrictest.ModelA); len(got) != 0 {
		t.Errorf("free %v", got)
	}
	_, err := c.Free(t.Context(), []string{fabrictest.ModelB})
	b.is(err, device.FaultUnsupported, fabrictest.ModelB) // what is part of a machine is none of the fabric's
	_, err = b.attach(c, one, firstA)
	b.is(err, device.FaultRejected, "not free")
	_, err = b.attach(c, one, secondA)
	b.is(err, device.FaultRejected, "Critical")
	if got := b.listed(c, one); len(got) != 0 {
		t.Errorf("a GPU that is part of the machine is listed: %+v", got)
	}
	// A person attaches by another face; the agent of the fabric sees that, and we can give it back.
	ok := "OK"
	steal("a-1", simapi.DeviceChange{Health: &ok})
	if _, err := b.Core.Attach(t.Context(), core.AttachRequest{Machine: "n1", Specs: []core.Spec{{Device: "a-1", Count: 1}}, Limit: -1}); err != nil {
		t.Fatal(err)
	}
	unknown := "Unknown"
	steal("a-1", simapi.DeviceChange{Health: &unknown})
	if got := b.listed(c, one); len(got) != 1 || got[0].ID != secondA || got[0].Health != device.HealthUnknown {
		t.Errorf("listed %+v", got)
	}
	if err := b.detach(c, one, secondA); err != nil || len(b.Attached(one)) != 0 {
		t.Errorf("detach = %v, the machine has %v", err, b.Attached(one))
	}
	steal("a-1", simapi.DeviceChange{Action: simapi.DeviceVanish})
	if got := b.free(c, fabrictest.ModelA); len(got) != 0 {
		t.Errorf("a device that is gone is free: %v", got)
	}
}

// Where there is nothing but the composition system, the client says that it does not use it, and changes nothing.
func TestFace_compositionAlone(t *testing.T) {
	b := newBench(t, simapi.SunfishPolicies{Offers: "systems"}, 0)
	c := b.client()
	const why = "names no device"
	b.is(c.Health(t.Context()), device.FaultUnsupported, why)
	_, err := c.Machines(t.Context())
	b.is(err, device.FaultUnsupported, why)
	_, err = c.Free(t.Context(), []string{fabrictest.ModelA})
	b.is(err, device.FaultUnsupported, why)
	_, failed := c.ListAttached(t.Context(), []device.Machine{one})
	b.is(failed[one], device.FaultUnsupported, why)
	_, err = b.attach(c, one, firstA)
	b.is(err, device.FaultUnsupported, why)
	b.is(b.detach(c, one, firstA), device.FaultUnsupported, why)
	if n := b.changes(); n != 0 {
		t.Errorf("%d changes", n)
	}
}

// A service that was killed comes back with its Connections.
func TestFace_restart(t *testing.T) {
	b := newBench(t, simapi.SunfishPolicies{}, 0)
	path := filepath.Join(t.TempDir(), "sunfish.json")
	again := func() *Face {
		f, err := New(t.Context(), Options{Core: b.Core, Faults: fault.New(clock.RealClock{}), Clock: clock.RealClock{}, Fabrics: b.Config.Fabrics, StatePath: path})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(f.Close)
		return f
	}
	before := b.face
	b.face = again()
	body := `{"@odata.type":"#Connection.v1_0_0.Connection","Id":"mine","Links":{"InitiatorEndpoints":[{"@odata.id":"` + endpoints + `I-n1"}],"TargetEndpoints":[{"@odata.id":"` + firstA + `"}]}}`
	if status, text := b.person(http.MethodPost, connections, body); status != http.StatusOK {
		t.Fatalf("POST: %d %s", status, text)
	}
	b.face.Close()
	b.face = again()
	if got := b.members(connections); !slices.Equal(got, []string{connections + "/mine"}) {
		t.Errorf("Connections %v", got)
	}
	if status, text := b.person(http.MethodDelete, connections+"/mine", ""); status != http.StatusOK || len(b.Attached(one)) != 0 {
		t.Errorf("DELETE: %d %s, the machine has %v", status, text, b.Attached(one))
	}
	b.face = before
}

// TestFace_storm: clients that attach and detach while calls fail in all ways. Nothing is ever on two machines, and when it
// is over everything can be given back.
func TestFace_storm(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, simapi.SunfishPolicies{SameTarget: []string{"accept", "reject"}[seed%2]}, 5*time.Millisecond)
			rnd := rand.New(rand.NewPCG(seed, 1))
			for range 20 {
				b.disturb(rnd)
				var all sync.WaitGroup
				for _, m := range []device.Machine{one, two} {
					c, id, back := b.client(), []string{firstA, secondA, onlyB, ""}[rnd.IntN(4)], rnd.IntN(2) == 0
					all.Go(func() {
						if back && id != "" {
							_, _ = c.Detach(t.Context(), fabric.Intent{Machine: m, Device: id})
						} else {
							_, _ = c.Attach(t.Context(), fabric.Intent{Machine: m, Model: modelOf(id), Device: id})
						}
					})
				}
				all.Wait()
			}
			b.Faults.Clear("")
			b.calm()
		})
	}
}

// disturb lets the next calls fail.
func (b *bench) disturb(rnd *rand.Rand) {
	for range rnd.IntN(3) {
		f := simapi.Fault{Face: []string{"sunfish", "agent"}[rnd.IntN(2)], Path: "/Connections", Count: 1}
		f.Method = []string{http.MethodPost, http.MethodDelete, http.MethodGet}[rnd.IntN(3)]
		f.Action = []string{simapi.ActionDropBefore, simapi.ActionDropAfter, simapi.ActionStatusAfterEffect, simapi.ActionStatus, simapi.ActionDup, simapi.ActionReset}[rnd.IntN(6)]
		f.Status = 500
		b.Add(f)
	}
}

// calm gives everything back, and looks whether it is.
func (b *bench) calm() {
	b.t.Helper()
	c := b.client()
	for range 100 {
		left := 0
		for _, m := range []device.Machine{one, two} {
			for _, d := range b.listed(c, m) {
				left++
				_ = b.detach(c, m, d.ID)
			}
		}
		if left == 0 && len(b.free(c)) == 3 {
			break
		}
		time.Sleep(b.settle() / 4)
	}
	if made := b.members(connections); len(made) != 0 || len(b.free(c)) != 3 || len(b.Attached(one))+len(b.Attached(two)) != 0 {
		b.t.Errorf("Connections %v, free %v, the machines have %v and %v", made, b.free(c), b.Attached(one), b.Attached(two))
	}
}
