// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cm"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const one = fabrictest.MachineOne

func attachA(before ...string) fabric.Intent {
	return fabric.Intent{Machine: one, Model: fabrictest.ModelA, Before: append([]string{}, before...)}
}

// sights are all the ways in which a change that is under way can look; or those alone that differ most.
func sights(t *testing.T, run func(t *testing.T, h *hands)) {
	t.Helper()
	for _, count := range []string{"atAccept", "atComplete"} {
		for _, progress := range []string{"noID", "withID", "absent"} {
			for _, detail := range []string{"full", "partial"} {
				if differs := (count == "atAccept") == (progress == "noID") && (detail == "full") == (count == "atAccept"); !*full && !differs {
					continue
				}
				t.Run(count+"_"+progress+"_"+detail, func(t *testing.T) {
					run(t, newHands(t, simapi.Policies{CM: simapi.CMPolicies{Count: count, Progress: progress, Detail: detail}}))
				})
			}
		}
	}
}

// resizes are the changes that reached the manager.
func (h *hands) resizes() []string {
	var all []string
	for _, r := range h.faults.Log() {
		if strings.HasSuffix(r.Path, "/resize") {
			all = append(all, r.Body)
		}
	}
	return all
}

func (h *hands) wait(m fabric.Manager, op fabric.Operation) (fabric.Operation, error) {
	h.t.Helper()
	// Virtual time passes as fast as the machine allows: what takes that long never ends.
	ctx, cancel := context.WithTimeout(h.t.Context(), 20*time.Second)
	defer cancel()
	return fabrictest.Wait(ctx, h.Clock(), m, op)
}

// stored is what another process reads of an operation.
func stored(t *testing.T, op fabric.Operation) fabric.Operation {
	t.Helper()
	data, err := json.Marshal(op)
	if err != nil {
		t.Fatal(err)
	}
	var out fabric.Operation
	if err := json.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func wantFault(t *testing.T, err error, class device.FaultClass) *device.Fault {
	t.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok || f.Class != class {
		t.Fatalf("error = %v, want a fault of class %s", err, class)
	}
	return f
}

// TestAnotherProcessGoesOn: the agent that asked has gone; what it stored is enough.
func TestAnotherProcessGoesOn(t *testing.T) {
	sights(t, func(t *testing.T, h *hands) {
		t.Helper()
		op, err := h.client().Attach(t.Context(), attachA())
		if err != nil || op.State != fabric.Pending {
			t.Fatalf("attach = %+v, %v, want one that is pending", op, err)
		}
		next := h.client()
		op, err = h.wait(next, stored(t, op))
		if err != nil || op.State != fabric.Done || len(op.Devices) != 1 || op.Devices[0].UUID == "" {
			t.Fatalf("attach = %+v, %v, want one device with its identity", op, err)
		}
		in := fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: op.Devices[0].ID}
		if op, err = next.Detach(t.Context(), in); err != nil || op.State != fabric.Pending {
			t.Fatalf("detach = %+v, %v, want one that is pending", op, err)
		}
		if _, err = h.wait(h.client(), stored(t, op)); err != nil {
			t.Fatal(err)
		}
		if got := h.Attached(one); len(got) != 0 || h.FreeCount(fabrictest.ModelA) != 2 {
			t.Errorf("attached %v in the end, want none", got)
		}
	})
}

// TestAttach_lostAnswerBringsOne: the answer to the resize is lost and the agent starts anew, at once or when all is over.
func TestAttach_lostAnswerBringsOne(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("late_%v", late), func(t *testing.T) {
			sights(t, func(t *testing.T, h *hands) {
				t.Helper()
				if _, err := h.client().Free(t.Context(), []string{fabrictest.ModelA}); err != nil {
					t.Fatal(err)
				}
				h.Fate(fabrictest.LostAfter)
				_, err := h.client().Attach(t.Context(), attachA())
				wantFault(t, err, device.FaultUnknown)
				if late {
					h.settle()
				} else if h.core.Policies().CM.Progress == "absent" && h.core.Policies().CM.Count == "atComplete" {
					// Nothing at all shows: asking for the same total again must be harmless, and this manager would not
					// answer a second call while the first is at work.
					if err = h.core.SetPolicies(simapi.Policies{Serialization: "none"}); err != nil {
						t.Fatal(err)
					}
				}
				m := h.client()
				op, err := m.Attach(t.Context(), attachA())
				if err == nil {
					op, err = h.wait(m, op)
				}
				if err != nil || op.State != fabric.Done || len(op.Devices) != 1 {
					t.Fatalf("attach = %+v, %v, want the one that came", op, err)
				}
				if got := h.Attached(one); !slices.Equal(got, []string{op.Devices[0].ID}) {
					t.Errorf("attached %v, want %s alone", got, op.Devices[0].ID)
				}
			})
		})
	}
}

// TestDetach_lostAnswer: the same for a detach.
func TestDetach_lostAnswer(t *testing.T) {
	sights(t, func(t *testing.T, h *hands) {
		t.Helper()
		m := h.client()
		op, err := m.Attach(t.Context(), attachA())
		if err == nil {
			op, err = h.wait(m, op)
		}
		if err != nil {
			t.Fatal(err)
		}
		in := fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: op.Devices[0].ID}
		h.Fate(fabrictest.LostAfter)
		_, err = m.Detach(t.Context(), in)
		wantFault(t, err, device.FaultUnknown)
		before := len(h.resizes())
		listed, failed := m.ListAttached(t.Context(), []device.Machine{one})
		if len(failed) > 0 || len(listed[one]) != 1 {
			t.Fatalf("listed %v, %v; want the device until it has gone", listed, failed)
		}
		if op, err = m.Detach(t.Context(), in); err == nil {
			_, err = h.wait(m, op)
		}
		if err != nil || len(h.resizes()) != before {
			t.Errorf("error %v, %d more resizes; want the detach that is under way to be joined", err, len(h.resizes())-before)
		}
		if got := h.Attached(one); len(got) != 0 {
			t.Errorf("attached %v, want none", got)
		}
	})
}

// TestAttach_requests: what one intent costs when nothing goes wrong.
func TestAttach_requests(t *testing.T) {
	h := newHands(t, simapi.Policies{})
	m := h.client()
	op, err := m.Attach(t.Context(), attachA())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.wait(m, op); err != nil {
		t.Fatal(err)
	}
	calls := map[string]int{}
	for _, r := range h.faults.Log() {
		calls[r.Face+" "+r.Method]++
	}
	// 20 s of work, looked at every 2 s; the first GET is the fresh state.
	if calls["idm POST"] != 1 || calls["cm POST"] != 1 || calls["cm GET"] > 13 || calls["fm GET"] != 0 {
		t.Errorf("requests %v", calls)
	}
}

// TestAttach_processedTwice: a proxy sends the resize again.
func TestAttach_processedTwice(t *testing.T) {
	for _, count := range []string{"atAccept", "atComplete"} {
		h := newHands(t, simapi.Policies{Serialization: "none", CM: simapi.CMPolicies{Count: count}})
		h.Add(simapi.Fault{Face: "cm", Path: "/resize$", Count: 1, Action: simapi.ActionDup})
		m := h.client()
		op, err := m.Attach(t.Context(), attachA())
		if err == nil {
			_, err = h.wait(m, op)
		}
		if got := h.Attached(one); err != nil || len(got) != 1 || len(h.resizes()) != 1 {
			t.Errorf("%s: attached %v, %v", count, got, err)
		}
	}
}

// TestAttach_deviceFails: the device stays on the machine and says so, until it is given back.
func TestAttach_deviceFails(t *testing.T) {
	sights(t, func(t *testing.T, h *hands) {
		t.Helper()
		reason := "hot-plug timed out"
		if err := h.core.ChangeDevice("a-0", simapi.DeviceChange{FailAttach: &reason}); err != nil {
			t.Fatal(err)
		}
		m := h.client()
		op, err := m.Attach(t.Context(), attachA())
		if err == nil {
			op, err = h.wait(m, op)
		}
		f := wantFault(t, err, device.FaultUnknown)
		if f.Code != "ADD_FAILED" || !strings.Contains(f.Message, reason) || len(op.Devices) != 1 {
			t.Errorf("fault %v with %v, want the manager's reason and the device", f, op.Devices)
		}
		listed, _ := m.ListAttached(t.Context(), []device.Machine{one})
		if l := listed[one]; len(l) != 1 || l[0].Health != device.HealthCritical || !strings.Contains(l[0].HealthText, reason) {
			t.Fatalf("listed %+v, want one that is critical", l)
		}
		bad := listed[one][0].ID
		// Another one beside it.
		op, err = m.Attach(t.Context(), attachA(bad))
		if err == nil {
			op, err = h.wait(m, op)
		}
		if err != nil || len(op.Devices) != 1 || op.Devices[0].ID == bad {
			t.Fatalf("second attach = %+v, %v", op.Devices, err)
		}
		good := op.Devices[0].ID
		for _, id := range []string{bad, good} {
			op, err := m.Detach(t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: id})
			if err == nil {
				_, err = h.wait(m, op)
			}
			if err != nil {
				t.Fatalf("detach %s: %v", id, err)
			}
		}
		if n := h.FreeCount(fabrictest.ModelA); n != 2 {
			t.Errorf("%d free in the end, want 2", n)
		}
	})
}

// TestDetach_fails: the device is where it was, and the next try does it.
func TestDetach_fails(t *testing.T) {
	sights(t, func(t *testing.T, h *hands) {
		t.Helper()
		m := h.client()
		op, err := m.Attach(t.Context(), attachA())
		if err == nil {
			op, err = h.wait(m, op)
		}
		if err != nil {
			t.Fatal(err)
		}
		reason := "device busy"
		if err = h.core.ChangeDevice("a-0", simapi.DeviceChange{FailDetach: &reason}); err != nil {
			t.Fatal(err)
		}
		in := fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: op.Devices[0].ID}
		if op, err = m.Detach(t.Context(), in); err == nil {
			_, err = h.wait(m, op)
		}
		if f := wantFault(t, err, device.FaultBusy); f.Code != "REMOVE_FAILED" || !strings.Contains(f.Message, reason) {
			t.Errorf("fault %v, want the manager's reason", f)
		}
		listed, _ := m.ListAttached(t.Context(), []device.Machine{one})
		if l := listed[one]; len(l) != 1 || !strings.Contains(l[0].HealthText, reason) {
			t.Errorf("listed %+v, want it with what the manager says", l)
		}
		if op, err = m.Detach(t.Context(), in); err == nil {
			_, err = h.wait(m, op)
		}
		if got := h.Attached(one); err != nil || len(got) != 0 {
			t.Errorf("second detach: %v, attached %v", err, got)
		}
	})
}

// TestAttach_refusedWithoutAsking: what the machine's own description rules out is not asked.
func TestAttach_refusedWithoutAsking(t *testing.T) {
	h := newHands(t, simapi.Policies{})
	m := h.client()
	for range 2 {
		op, err := m.Attach(t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA})
		if err == nil {
			_, err = h.wait(m, op)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	before := len(h.resizes())
	_, err := m.Attach(t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA})
	if f := wantFault(t, err, device.FaultRejected); !strings.Contains(f.Message, "allows 2") {
		t.Errorf("fault %v, want it to name the limit", f)
	}
	for _, model := range []string{strings.ToLower(fabrictest.ModelA), fabrictest.ModelA + " "} {
		_, err := m.Attach(t.Context(), fabric.Intent{Machine: one, Model: model})
		wantFault(t, err, device.FaultUnsupported)
	}
	if n := len(h.resizes()) - before; n != 0 {
		t.Errorf("%d resizes were sent", n)
	}
}

// TestAttach_stolen: another tenant has taken what was free.
func TestAttach_stolen(t *testing.T) {
	for _, shortage := range []string{"addFailed", "409"} {
		h := newHands(t, simapi.Policies{CM: simapi.CMPolicies{Shortage: shortage}})
		for _, d := range []string{"a-0", "a-1"} {
			if err := h.core.ChangeDevice(d, simapi.DeviceChange{Action: simapi.DeviceSteal}); err != nil {
				t.Fatal(err)
			}
		}
		m := h.client()
		try := func() error {
			op, err := m.Attach(t.Context(), attachA())
			if err == nil {
				_, err = h.wait(m, op)
			}
			return err
		}
		wantFault(t, try(), device.FaultNoCapacity)
		wantFault(t, try(), device.FaultNoCapacity)
		if err := h.core.ChangeDevice("a-1", simapi.DeviceChange{Action: simapi.DeviceFree}); err != nil {
			t.Fatal(err)
		}
		if err := try(); err != nil || len(h.Attached(one)) != 1 {
			t.Errorf("%s: %v, attached %v when one is free again", shortage, err, h.Attached(one))
		}
	}
}

// TestIdentities: two devices with one id, and one without any.
func TestIdentities(t *testing.T) {
	h := newHands(t, simapi.Policies{})
	m := h.client()
	for range 2 {
		op, err := m.Attach(t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA})
		if err == nil {
			_, err = h.wait(m, op)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	v, err := h.core.Machine(string(one))
	if err != nil {
		t.Fatal(err)
	}
	first, second := v.Listed[0], v.Listed[1]
	if err = h.core.ChangeDevice(second.ID, simapi.DeviceChange{FabricSerial: &first.UUID}); err != nil {
		t.Fatal(err)
	}
	listed, _ := m.ListAttached(t.Context(), []device.Machine{one})
	if l := listed[one]; len(l) != 2 || l[0].ID != first.UUID || l[1].ID != second.ResUUID || l[0].UUID != "" || l[1].UUID != "" {
		t.Errorf("listed %+v, want two that cannot be matched", l)
	}
	_, err = m.Detach(t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: second.ResUUID})
	wantFault(t, err, device.FaultRejected)
	none := ""
	if err = h.core.ChangeDevice(second.ID, simapi.DeviceChange{FabricSerial: &none}); err != nil {
		t.Fatal(err)
	}
	_, err = m.Detach(t.Context(), fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: second.ResUUID})
	wantFault(t, err, device.FaultUnsupported)
	if got := h.Attached(one); len(got) != 2 {
		t.Errorf("attached %v, want both untouched", got)
	}
}

func TestLimits(t *testing.T) {
	h := newHands(t, simapi.Policies{})
	got, err := h.client().Limits(t.Context(), one, []string{fabrictest.ModelA, fabrictest.ModelB, fabrictest.ModelNone})
	if err != nil || len(got) != 2 || got[fabrictest.ModelA] != (fabric.Limit{Max: 2}) || got[fabrictest.ModelB] != (fabric.Limit{Max: fabric.NoLimit}) {
		t.Errorf("limits = %+v, %v", got, err)
	}
}

// TestWithoutFabricManager: machines are those of the node groups, and nothing can be counted.
func TestWithoutFabricManager(t *testing.T) {
	h := newHands(t, simapi.Policies{})
	m := h.client(func(c *client.Config) { c.FabricManager = false })
	got, err := m.Machines(t.Context())
	if err != nil || len(got) != 2 || got[0].ID != one {
		t.Errorf("machines = %+v, %v", got, err)
	}
	_, err = m.Free(t.Context(), []string{fabrictest.ModelA})
	wantFault(t, err, device.FaultUnsupported)
	if m.Capabilities().Free != fabric.FreeNone {
		t.Error("it claims to count what is free")
	}
	for _, r := range h.faults.Log() {
		if r.Face == "fm" {
			t.Errorf("asked the fabric manager: %s %s", r.Method, r.Path)
		}
	}
}
