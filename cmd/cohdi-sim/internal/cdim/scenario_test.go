// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cdim"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// both runs a scenario in both dialects, one of them through the gateway.
func both(t *testing.T, run func(b *bench)) {
	t.Helper()
	for _, s := range []setting{{dialect: "oss"}, {dialect: "product", gateway: true}} {
		t.Run(s.dialect, func(t *testing.T) {
			t.Parallel()
			run(newBench(t, s))
		})
	}
}

func (b *bench) device(i int) string { return b.Config.Devices[i].ResUUID }

// intent is about a device of ModelA or, the third, ModelB.
func (b *bench) intent(m device.Machine, i int) fabric.Intent {
	return fabric.Intent{Machine: m, Model: b.Config.Devices[i].Model, Device: b.device(i)}
}

func (b *bench) attach(c *client.Client, in fabric.Intent) fabric.Operation {
	b.t.Helper()
	op, err := c.Attach(b.t.Context(), in)
	if err != nil {
		b.t.Fatal(err)
	}
	if op.Handle == "" {
		b.t.Fatalf("attach = %+v, want a handle", op)
	}
	return op
}

func (b *bench) wait(c *client.Client, op fabric.Operation) (fabric.Operation, error) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	return fabrictest.Wait(ctx, clock.RealClock{}, c, op)
}

// until polls until the operation is in the state.
func (b *bench) until(c *client.Client, op fabric.Operation, state fabric.OperationState) fabric.Operation {
	b.t.Helper()
	clk := clock.RealClock{}
	for range 500 {
		next, err := c.Poll(b.t.Context(), op)
		if err != nil {
			b.t.Fatal(err)
		}
		if op = next; op.State == state {
			return op
		}
		clk.Sleep(20 * time.Millisecond)
	}
	b.t.Fatalf("operation is %+v, want it %s", op, state)
	return op
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

// requests counts what has come in by method and the end of the path.
func (b *bench) requests() map[string]int {
	out := map[string]int{}
	for _, r := range b.faults.Log() {
		if r.Face != "hw" {
			parts := strings.Split(r.Path, "/")
			last := parts[len(parts)-1]
			if idForm.MatchString(last) {
				last = "job"
			}
			out[r.Method+" "+last]++
		}
	}
	return out
}

// untouched checks that no job was cancelled, resumed or deleted by a client.
func (b *bench) untouched() {
	b.t.Helper()
	for what, n := range b.requests() {
		if method, _, _ := strings.Cut(what, " "); method != http.MethodGet && method != http.MethodPost {
			b.t.Errorf("%d requests %s", n, what)
		}
	}
}

// job is a body that links or unlinks, in the dialect of the installation.
func (b *bench) job(steps ...string) string {
	var out []string
	for i, s := range steps {
		// connect n1 0 after 1
		var operation, machine string
		var dev, after int
		_, err := fmt.Sscanf(s, "%s %s %d after %d", &operation, &machine, &dev, &after)
		if err != nil {
			after = 0
		}
		waits := ""
		if after > 0 {
			waits = fmt.Sprint(after)
		}
		m, _ := b.core.Machine(machine)
		host := `"targetCPUID":"` + m.UUID + `","targetDeviceID":"`
		if b.setting.dialect == dialectProduct {
			host = `"sourceDeviceID":"` + destinationOf(simapi.Machine{UUID: m.UUID}) + `","destinationDeviceID":"`
		}
		out = append(out, fmt.Sprintf(`{"operationID":%d,"operation":%q,%s%s","dependencies":[%s]}`, i+1, operation, host, b.device(dev), waits))
	}
	return `{"procedures":[` + strings.Join(out, ",") + `]}`
}

func (b *bench) slow(d time.Duration) {
	delay := simapi.Duration(d)
	b.core.SetTiming(simapi.Timing{AttachDelay: &delay, DetachDelay: &delay})
}

func TestScenario_requestsOfAnAttach(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		c := b.client()
		if _, err := b.wait(c, b.attach(c, b.intent(fabrictest.MachineOne, 0))); err != nil {
			t.Fatal(err)
		}
		n := b.requests()
		if n["GET resources"] != 1 || n["POST layout-apply"] != 1 || n["GET layout-apply"] != 0 {
			t.Errorf("requests %v, want one look at the inventory, one job and polls", n)
		}
	})
}

func TestScenario_anotherJobIsWaitedFor(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		c := b.client()
		// A job that never ends: its operation waits for one that is not in it.
		_, theirs := b.person("POST", "/layout-apply", b.job("connect n2 2 after 9"))
		id, _ := theirs["applyID"].(string)
		in := b.intent(fabrictest.MachineOne, 0)
		for range 3 {
			_, err := c.Attach(t.Context(), in)
			b.fault(err, device.FaultBusy, id, "E40010")
		}
		b.untouched()
		if status, body := b.person("PUT", "/layout-apply/"+id+"?action=cancel", ""); status != 202 {
			t.Fatalf("cancel = %d %v", status, body)
		}
		var op fabric.Operation
		for op.Handle == "" {
			var err error
			if op, err = c.Attach(t.Context(), in); err != nil {
				b.fault(err, device.FaultBusy)
				clock.RealClock{}.Sleep(10 * time.Millisecond)
			}
		}
		if _, err := b.wait(c, op); err != nil {
			t.Fatal(err)
		}
		if got := b.Attached(fabrictest.MachineOne); !slices.Equal(got, []string{b.device(0)}) {
			t.Errorf("machine one has %v", got)
		}
	})
}

func TestScenario_suspended(t *testing.T) {
	for _, end := range []string{"resume", "cancel"} {
		t.Run(end, func(t *testing.T) {
			both(t, func(b *bench) {
				t := b.t
				c := b.client()
				b.Add(simapi.Fault{
					Face: "hw", Action: simapi.ActionStatus, Status: 503, Content: `{"code":"ER005BAS001","message":"hardware busy"}`, Count: hardwareRetries + 1,
				})
				op := b.until(c, b.attach(c, b.intent(fabrictest.MachineOne, 0)), fabric.Suspended)
				b.fault(op.Fault, device.FaultSuspended, op.Handle, "ER005BAS001")
				_, err := c.Attach(t.Context(), b.intent(fabrictest.MachineTwo, 2))
				b.fault(err, device.FaultSuspended, op.Handle, "E40027")
				b.fault(c.Health(t.Context()), device.FaultSuspended, op.Handle)
				// Our own job is found again, not refused.
				again, err := c.Attach(t.Context(), b.intent(fabrictest.MachineOne, 0))
				if err != nil || again.Handle != op.Handle {
					t.Errorf("attach again = %+v, %v, want job %s", again, err, op.Handle)
				}
				b.untouched()
				if status, body := b.person("PUT", "/layout-apply/"+op.Handle+"?action="+end, ""); status != 202 {
					t.Fatalf("%s = %d %v", end, status, body)
				}
				op, err = b.wait(c, op)
				if sick := c.Health(t.Context()); sick != nil {
					t.Errorf("it waits for nobody any more: %v", sick)
				}
				if end == "resume" {
					if err != nil || op.State != fabric.Done || !slices.Equal(b.Attached(fabrictest.MachineOne), []string{b.device(0)}) {
						t.Errorf("after resume %+v, %v, the machine has %v", op, err, b.Attached(fabrictest.MachineOne))
					}
					return
				}
				b.fault(err, device.FaultUnknown)
				if op = b.attach(c, b.intent(fabrictest.MachineOne, 0)); op.Handle == again.Handle {
					t.Error("a job that is over was taken for a new one")
				}
			})
		})
	}
}

// TestScenario_lostAnswers: a job whose answer is lost is found, whether it still runs or has ended, and never made twice.
func TestScenario_lostAnswers(t *testing.T) {
	for _, action := range []string{simapi.ActionDropAfter, simapi.ActionStatusAfterEffect, simapi.ActionReset} {
		for _, took := range []time.Duration{0, 500 * time.Millisecond} {
			t.Run(fmt.Sprintf("%s, work takes %s", action, took), func(t *testing.T) {
				both(t, func(b *bench) {
					t := b.t
					b.slow(took)
					c := b.client()
					b.Add(simapi.Fault{Face: "cdim", Method: "POST", Path: "/layout-apply$", Action: action, Status: 504, Count: 1})
					if _, err := b.wait(c, b.attach(c, b.intent(fabrictest.MachineOne, 0))); err != nil {
						t.Fatal(err)
					}
					if n := b.requests(); n["POST layout-apply"] != 1 {
						t.Errorf("requests %v, want one job", n)
					}
				})
			})
		}
	}
}

// TestScenario_oldJobsAreNotTakenForNewOnes: one that did the same some time ago says nothing of a call that was lost.
func TestScenario_oldJobsAreNotTakenForNewOnes(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		c := b.client()
		in := b.intent(fabrictest.MachineOne, 0)
		if _, err := b.wait(c, b.attach(c, in)); err != nil {
			t.Fatal(err)
		}
		op, err := c.Detach(t.Context(), in)
		if err == nil {
			_, err = b.wait(c, op)
		}
		if err != nil {
			t.Fatal(err)
		}
		b.face.mu.Lock()
		for _, j := range b.face.jobs {
			j.StartedAt = time.Now().Add(-time.Minute).UTC().Format(time.RFC3339)
		}
		b.face.mu.Unlock()
		b.Add(simapi.Fault{Face: "cdim", Method: "POST", Path: "/layout-apply$", Action: simapi.ActionDropBefore, Count: 1})
		_, err = c.Attach(t.Context(), in)
		b.fault(err, device.FaultUnknown)
	})
}

func TestScenario_anotherProcess(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		b.slow(time.Second)
		in := b.intent(fabrictest.MachineOne, 0)
		op := b.attach(b.client(), in)
		other := b.client()
		// It asks again: what runs is its own.
		if again := b.attach(other, in); again.Handle != op.Handle {
			t.Errorf("the other process made job %s beside %s", again.Handle, op.Handle)
		}
		// It polls with no more than a lease holds.
		if polled, err := b.wait(other, fabric.Operation{Kind: op.Kind, State: fabric.Pending, Intent: in, Handle: op.Handle}); err != nil || polled.State != fabric.Done {
			t.Errorf("the other process polled %+v, %v", polled, err)
		}
		if n := len(b.Attached(fabrictest.MachineOne)); n != 1 {
			t.Errorf("%d devices", n)
		}
	})
}

func TestScenario_personCancels(t *testing.T) {
	for _, query := range []string{"?action=cancel", "?action=cancel&rollbackOnCancel=true"} {
		t.Run(query, func(t *testing.T) {
			both(t, func(b *bench) {
				t := b.t
				b.slow(300 * time.Millisecond)
				c := b.client()
				op := b.attach(c, b.intent(fabrictest.MachineOne, 0))
				b.begun(0)
				if status, body := b.person("PUT", "/layout-apply/"+op.Handle+query, ""); status != 202 {
					t.Fatalf("cancel = %d %v", status, body)
				}
				_, err := b.wait(c, op)
				n := len(b.Attached(fabrictest.MachineOne))
				if strings.Contains(query, "rollback") {
					b.fault(err, device.FaultRejected, "cancelled")
					if n != 0 {
						t.Errorf("%d devices after the rollback", n)
					}
				} else if err != nil || n != 1 {
					t.Errorf("%v, %d devices: what runs is finished", err, n)
				}
			})
		})
	}
}

// TestScenario_jobOfSeveral: one job may hold the changes of several nodes; each sees its own end.
func TestScenario_jobOfSeveral(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		b.Add(simapi.Fault{
			Face: "hw", Body: b.device(1), Action: simapi.ActionStatus, Status: 500, Content: `{"code":"EF004BAS001","message":"connect failed"}`, Count: 1,
		})
		_, posted := b.person("POST", "/layout-apply", b.job("connect n1 0", "connect n1 1", "connect n2 2 after 2"))
		id, _ := posted["applyID"].(string)
		c := b.client()
		for _, part := range []struct {
			machine device.Machine
			device  int
			class   device.FaultClass
		}{
			{fabrictest.MachineOne, 0, ""},
			{fabrictest.MachineOne, 1, device.FaultUnknown},
			{fabrictest.MachineTwo, 2, device.FaultBusy},
		} {
			op, err := b.wait(c, fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Handle: id, Intent: b.intent(part.machine, part.device)})
			if part.class != "" {
				b.fault(err, part.class)
			} else if err != nil || op.State != fabric.Done {
				t.Errorf("device %d: %+v, %v", part.device, op, err)
			}
		}
		_, err := b.wait(c, fabric.Operation{Kind: fabric.KindDetach, State: fabric.Pending, Handle: id, Intent: b.intent(fabrictest.MachineOne, 0)})
		b.fault(err, device.FaultUnknown, "something else")
		if got := b.Attached(fabrictest.MachineOne); !slices.Equal(got, []string{b.device(0)}) {
			t.Errorf("machine one has %v", got)
		}
	})
}

func TestScenario_jobIsGone(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		c := b.client()
		op := b.attach(c, b.intent(fabrictest.MachineOne, 0))
		b.until(c, op, fabric.Done)
		if status, _ := b.person("DELETE", "/layout-apply/"+op.Handle, ""); status != 204 {
			t.Fatalf("delete = %d", status)
		}
		_, err := b.wait(c, op)
		b.fault(err, device.FaultUnknown, "E40020")
	})
}

func TestScenario_workerIsLost(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		b.slow(300 * time.Millisecond)
		c := b.client()
		op := b.attach(c, b.intent(fabrictest.MachineOne, 0))
		if err := b.face.LoseWorker(); err != nil {
			t.Fatal(err)
		}
		clock.RealClock{}.Sleep(500 * time.Millisecond)
		if op = b.until(c, op, fabric.Pending); op.PollAfter == 0 {
			t.Errorf("%+v, want a pause", op)
		}
		if status, body := b.person("PUT", "/layout-apply/"+op.Handle+"?action=cancel", ""); status != 409 || body["code"] != codeWorker {
			t.Fatalf("cancel = %d %v", status, body)
		}
		_, err := b.wait(c, op)
		b.fault(err, device.FaultUnknown)
	})
}

// TestScenario_restart: jobs are kept, and one that ran is stuck until a person ends it.
func TestScenario_restart(t *testing.T) {
	b := newBench(t, setting{dialect: "oss"})
	b.face.path = filepath.Join(t.TempDir(), "cdim.json")
	c := b.client()
	done := b.attach(c, b.intent(fabrictest.MachineOne, 0))
	b.until(c, done, fabric.Done)
	b.slow(time.Hour)
	stuck := b.attach(c, b.intent(fabrictest.MachineOne, 1))
	b.face.Stop()
	again, err := New(t.Context(), Options{Core: b.core, Faults: b.faults, Clock: clock.RealClock{}, Dialect: "oss", StatePath: b.face.path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Close)
	first := b.face
	t.Cleanup(func() { b.core.Close(); first.Close() })
	b.face = again
	if status, body := b.person("GET", "/layout-apply/"+done.Handle, ""); status != 200 || body["status"] != completed {
		t.Errorf("job from before = %d %v", status, body)
	}
	if status, body := b.person("POST", "/layout-apply", b.job("connect n2 2")); status != 409 || body["code"] != codeRunning {
		t.Errorf("another job = %d %v", status, body)
	}
	if status, body := b.person("PUT", "/layout-apply/"+stuck.Handle+"?action=cancel", ""); status != 409 || body["code"] != codeWorker || body["status"] != failed {
		t.Errorf("cancel = %d %v", status, body)
	}
	if status, _ := b.person("POST", "/layout-apply", `{"procedures":[]}`); status != 202 {
		t.Errorf("another job after that = %d", status)
	}
}

func TestScenario_notFree(t *testing.T) {
	critical, word := "Critical", func(s string) simapi.DeviceChange { return simapi.DeviceChange{Action: s, Machine: "n2"} }
	tests := []struct {
		name  string
		does  func(b *bench) error
		words string
	}{
		{"withdrawn", func(b *bench) error {
			if status, body := b.person("PUT", "/resources/"+b.device(0)+"/annotation", `{"available":false}`); status != 200 {
				return fmt.Errorf("annotate: %d %v", status, body)
			}
			return nil
		}, "withdrawn"},
		{"stolen", func(b *bench) error { return b.core.ChangeDevice("a-0", word(simapi.DeviceSteal)) }, "on machine"},
		{"vanished", func(b *bench) error { return b.core.ChangeDevice("a-0", word(simapi.DeviceVanish)) }, "not detect"},
		{"critical", func(b *bench) error { return b.core.ChangeDevice("a-0", simapi.DeviceChange{Health: &critical}) }, "Critical"},
		{"built in", func(b *bench) error { return b.core.ChangeDevice("a-0", word(simapi.DeviceBuildIn)) }, "no such GPU"},
		{"elsewhere", func(b *bench) error {
			_, err := b.wait(b.client(), b.attach(b.client(), b.intent(fabrictest.MachineTwo, 0)))
			return err
		}, string(fabrictest.MachineTwo)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			both(t, func(b *bench) {
				t := b.t
				if err := tt.does(b); err != nil {
					t.Fatal(err)
				}
				c := b.client()
				before := b.requests()["POST layout-apply"]
				free, err := c.Free(t.Context(), []string{fabrictest.ModelA})
				if err != nil || free[fabrictest.ModelA].Count != 1 || free[fabrictest.ModelA].Devices[0].ID != b.device(1) {
					t.Errorf("free = %+v, %v, want the other one", free, err)
				}
				_, err = c.Attach(t.Context(), b.intent(fabrictest.MachineOne, 0))
				b.fault(err, device.FaultRejected, tt.words)
				if n := b.requests()["POST layout-apply"]; n != before {
					t.Errorf("%d jobs were made all the same", n-before)
				}
			})
		})
	}
}

// TestScenario_stale: after a job has completed the inventory is old for a while, and says so of no other thing.
func TestScenario_stale(t *testing.T) {
	for _, dialect := range []string{"oss", "product"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, setting{dialect: dialect, stale: time.Hour})
			c := b.client()
			if _, err := b.wait(c, b.attach(c, b.intent(fabrictest.MachineOne, 0))); err != nil {
				t.Fatal(err)
			}
			lists, failed := c.ListAttached(t.Context(), []device.Machine{fabrictest.MachineOne})
			if len(failed) > 0 || len(lists[fabrictest.MachineOne]) != 0 {
				t.Fatalf("list = %v, %v, want the old one", lists, failed)
			}
			// Whoever takes the device by an old list is told by the hardware.
			_, err := b.wait(c, b.attach(c, b.intent(fabrictest.MachineTwo, 0)))
			b.fault(err, device.FaultRejected, "EF011BAS000")
			// Once more on its own machine does no harm.
			if _, err := b.wait(c, b.attach(c, b.intent(fabrictest.MachineOne, 0))); err != nil {
				t.Error(err)
			}
			if status, _ := b.person("POST", "/devices", "[]"); status != 201 {
				t.Fatalf("refresh = %d", status)
			}
			if lists, _ = c.ListAttached(t.Context(), []device.Machine{fabrictest.MachineOne}); len(lists[fabrictest.MachineOne]) != 1 {
				t.Errorf("list = %v after the look at the hardware", lists)
			}
		})
	}
}

func TestScenario_wrongDialect(t *testing.T) {
	for _, dialect := range []string{"oss", "product"} {
		t.Run(dialect, func(t *testing.T) {
			b := newBench(t, setting{dialect: "product"})
			b.face.dialect = "product"
			if dialect == "product" {
				b.setting.dialect = "oss"
			} else {
				b.setting.dialect, b.face.dialect = "product", "oss"
			}
			_, err := b.client().Attach(t.Context(), b.intent(fabrictest.MachineOne, 0))
			if dialect == "oss" { // the client looks for adapters, of which there are none
				b.fault(err, device.FaultNotFound, typeDestination)
				return
			}
			b.fault(err, device.FaultRejected, "E40001", "sourceDeviceID")
		})
	}
}

func TestScenario_tokens(t *testing.T) {
	b := newBench(t, setting{dialect: "oss", gateway: true})
	c := b.client()
	for range 5 {
		if err := c.Health(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.Tokens.Logins(); n != 1 {
		t.Errorf("%d logins, want 1", n)
	}
	b.Tokens.RevokeAll()
	if err := c.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := b.Tokens.Logins(); n != 2 {
		t.Errorf("%d logins after one revocation, want 2", n)
	}
	b.RefuseLogin()
	b.fault(c.Health(t.Context()), device.FaultUnauthorized, "invalid_grant")
	b.fault(c.Health(t.Context()), device.FaultUnauthorized)
	if n := b.requests()["POST token"]; n > 4 {
		t.Errorf("%d tries to log in", n)
	}
}
