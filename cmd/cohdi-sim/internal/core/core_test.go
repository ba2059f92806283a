// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const chassis = `
tenant: t
realm: r
credentials: {username: u, password: p, client_id: c, client_secret: s}
fabrics: [{id: 0, uuid: f0}, {id: 1, uuid: f1}]
machines:
  - {name: n1, uuid: m1, slots: 3}
  - {name: n2, uuid: m2, slots: 3}
  - {name: other, uuid: m3, fabric: 1}
devices:
  - {id: a, count: 4, model: A}
  - {id: b, count: 1, model: B}
  - {id: x, count: 1, model: A, fabric: 1}
timing: {attachDelay: 2s, detachDelay: 1s, nodeDelay: 3s}
`

// openFiles is a judge that sees what a test says is open.
type openFiles struct {
	mu   sync.Mutex
	open map[Number]bool
}

func (o *openFiles) Holders(major, minor uint32) ([]simapi.Holder, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.open[Number{major, minor}] {
		return []simapi.Holder{{PID: 42, Command: "holder"}}, nil
	}
	return nil, nil
}

func (o *openFiles) set(n Number, open bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open[n] = open
}

type bench struct {
	*Core
	t     *testing.T
	judge *openFiles
}

// start runs in a synctest bubble, where the real clock is the bubble's.
func start(t *testing.T, statePath string) bench {
	t.Helper()
	cfg, err := config.Parse([]byte(chassis))
	if err != nil {
		t.Fatal(err)
	}
	judge := &openFiles{open: map[Number]bool{}}
	var numbers []Number
	for i := range cfg.Devices {
		numbers = append(numbers, Number{4, uint32(20 + i)})
	}
	c, err := New(t.Context(), cfg, Options{Clock: clock.RealClock{}, Judge: judge, StatePath: statePath, Numbers: numbers})
	if err != nil {
		t.Fatal(err)
	}
	return bench{c, t, judge}
}

func bubble(t *testing.T, f func(b bench)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state.json")
	synctest.Test(t, func(t *testing.T) {
		b := start(t, path)
		defer b.Close()
		f(b)
	})
}

func (b bench) attach(machine, model string, n int) ([]Device, error) {
	return b.Attach(b.t.Context(), AttachRequest{Machine: machine, Specs: []Spec{{Model: model, Count: n}}, Caller: "test", Limit: -1})
}

func (b bench) mustAttach(machine, model string) Device {
	b.t.Helper()
	out, err := b.attach(machine, model, 1)
	if err != nil || len(out) != 1 {
		b.t.Fatalf("attach: %v, %v", out, err)
	}
	return out[0]
}

func (b bench) device(id string) simapi.Device {
	b.t.Helper()
	d, ok := b.State().Device(id)
	if !ok {
		b.t.Fatalf("no device %s", id)
	}
	return d
}

func (b bench) kinds() []string {
	var out []string
	for _, v := range b.Violations() {
		out = append(out, v.Kind)
	}
	return out
}

func (b bench) wantViolations(want ...string) {
	b.t.Helper()
	if diff := cmp.Diff(want, b.kinds()); diff != "" {
		b.t.Errorf("violations (-want +got):\n%s", diff)
	}
}

func TestAttach_takesItsTimeAndShowsUpByItself(t *testing.T) {
	bubble(t, func(b bench) {
		begin := time.Now()
		got := b.mustAttach("m1", "A")
		if took := time.Since(begin); took != 2*time.Second {
			b.t.Errorf("attach took %v, want 2s", took)
		}
		if d := b.device(got.ID); d.Phase != simapi.PhaseAttached || d.Machine != "n1" || d.Slot != 1 || d.OnBus {
			b.t.Errorf("after the attach: %+v", d)
		}
		time.Sleep(3*time.Second - time.Nanosecond)
		synctest.Wait()
		if b.device(got.ID).OnBus {
			b.t.Error("on the bus before the node delay is over")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if d := b.device(got.ID); !d.OnBus || !d.Bound || d.Minor != 0 || d.PCIAddress != "0000:3d:00.0" {
			b.t.Errorf("after the node delay: %+v", d)
		}
		b.wantViolations()
	})
}

func TestRescan_isNeededInRescanMode(t *testing.T) {
	bubble(t, func(b bench) {
		mode := simapi.HotplugRescan
		if err := b.ChangeMachine("n1", simapi.MachineChange{Hotplug: &mode}); err != nil {
			b.t.Fatal(err)
		}
		d := b.mustAttach("n1", "A")
		rescan := func(bus string, want bool) {
			b.t.Helper()
			if err := b.Rescan("n1", bus); err != nil {
				b.t.Fatal(err)
			}
			if got := b.device(d.ID).OnBus; got != want {
				b.t.Errorf("on the bus after rescan of %q: %v, want %v", bus, got, want)
			}
		}
		rescan("", false) // the link is not up yet
		time.Sleep(time.Minute)
		synctest.Wait()
		if b.device(d.ID).OnBus {
			b.t.Error("showed up by itself")
		}
		rescan("0000:3e", false)
		rescan("0000:3d", true)
	})
}

func TestDetach_judged(t *testing.T) {
	tests := []struct {
		name   string
		remove bool
		open   bool
		forced bool
		want   []string
	}{
		{name: "orderly", remove: true},
		{name: "still present", want: []string{simapi.PresentAtDetach}},
		{name: "open after removal", remove: true, open: true, want: []string{simapi.OpenAtRemove, simapi.OpenAtDetach}},
		{name: "open and present", open: true, want: []string{simapi.OpenAtDetach, simapi.PresentAtDetach}},
		{name: "wanted by a test", open: true, forced: true},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			bubble(t, func(b bench) {
				d := b.mustAttach("n1", "A")
				time.Sleep(3 * time.Second)
				synctest.Wait()
				b.judge.set(d.Number, tc.open)
				if tc.remove {
					if err := b.RemovePCI("n1", "0000:3d:00.0"); err != nil {
						b.t.Fatal(err)
					}
				}
				if err := b.Detach(b.t.Context(), DetachRequest{Machine: "m1", Device: d.ResUUID, Forced: tc.forced}); err != nil {
					b.t.Fatal(err)
				}
				if got := b.device(d.ID); got.Phase != simapi.PhaseFree || got.OnBus || got.Machine != "" {
					b.t.Errorf("after the detach: %+v", got)
				}
				b.wantViolations(tc.want...)
			})
		})
	}
}

func TestDetach_judgedAgainWhenItTakesEffect(t *testing.T) {
	bubble(t, func(b bench) {
		d := b.mustAttach("n1", "A")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if err := b.RemovePCI("n1", "0000:3d:00.0"); err != nil {
			b.t.Fatal(err)
		}
		done := make(chan error)
		go func() { done <- b.Detach(context.Background(), DetachRequest{Device: d.ID}) }()
		synctest.Wait()
		if err := b.Rescan("n1", ""); err != nil { // somebody's careless rescan brings it back
			b.t.Fatal(err)
		}
		if err := <-done; err != nil {
			b.t.Fatal(err)
		}
		b.wantViolations(simapi.PresentAtDetach)
	})
}

func TestAttach_refusals(t *testing.T) {
	tests := []struct {
		name, machine, model string
		count                int
		policies             simapi.Policies
		want                 error
		attached             int
	}{
		{name: "unknown machine", machine: "nobody", model: "A", count: 1, want: ErrNotFound},
		{name: "unknown model", machine: "n1", model: "Z", count: 1, want: ErrNoCapacity},
		{name: "model of another fabric only", machine: "other", model: "B", count: 1, want: ErrNoCapacity},
		{name: "fewer than asked for", machine: "n1", model: "B", count: 2, want: ErrNoCapacity},
		{name: "fewer, partial", machine: "n1", model: "B", count: 2, policies: simapi.Policies{Shortage: "partial"}, attached: 1},
		{name: "more than slots", machine: "n1", model: "A", count: 4, want: ErrNoSlot},
		{name: "all slots", machine: "n1", model: "A", count: 3, attached: 3},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			bubble(t, func(b bench) {
				if err := b.SetPolicies(tc.policies); err != nil {
					b.t.Fatal(err)
				}
				got, err := b.attach(tc.machine, tc.model, tc.count)
				if !errors.Is(err, tc.want) || len(got) != tc.attached {
					b.t.Errorf("attached %d, %v; want %d, %v", len(got), err, tc.attached, tc.want)
				}
				for _, d := range b.State().Devices {
					if d.Phase == simapi.PhaseAttaching {
						b.t.Errorf("%s is left reserved", d.ID)
					}
				}
				b.wantViolations()
			})
		})
	}
}

func TestAttach_serialization(t *testing.T) {
	tests := []struct {
		policy, second string
		took           time.Duration
		busy           int
	}{
		{"none", "n1", 2 * time.Second, 0},
		{"perMachine", "n1", 4 * time.Second, 0},
		{"perMachine", "n2", 2 * time.Second, 0},
		{"perFabric", "n2", 4 * time.Second, 0},
		{"busy409", "n1", 2 * time.Second, 1},
		{"busy409", "n2", 2 * time.Second, 0},
	}
	for _, tc := range tests {
		t.Run(tc.policy+" "+tc.second, func(t *testing.T) {
			bubble(t, func(b bench) {
				if err := b.SetPolicies(simapi.Policies{Serialization: tc.policy}); err != nil {
					b.t.Fatal(err)
				}
				begin := time.Now()
				errs := make(chan error, 2)
				for _, m := range []string{"n1", tc.second} {
					go func() {
						_, err := b.attach(m, "A", 1)
						errs <- err
					}()
				}
				busy := 0
				for range 2 {
					if err := <-errs; errors.Is(err, ErrBusy) {
						busy++
					} else if err != nil {
						b.t.Error(err)
					}
				}
				if took := time.Since(begin); took != tc.took || busy != tc.busy {
					b.t.Errorf("took %v with %d busy, want %v with %d", took, busy, tc.took, tc.busy)
				}
			})
		})
	}
}

func TestAttach_goesOnWithoutItsCaller(t *testing.T) {
	bubble(t, func(b bench) {
		ctx, cancel := context.WithTimeout(b.t.Context(), time.Second)
		defer cancel()
		_, err := b.Attach(ctx, AttachRequest{Machine: "n1", Specs: []Spec{{Model: "B", Count: 1}}, Limit: -1})
		if !errors.Is(err, context.DeadlineExceeded) {
			b.t.Fatalf("error %v, want the deadline", err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if d := b.device("b-0"); d.Phase != simapi.PhaseAttached {
			b.t.Errorf("device is %s, want attached", d.Phase)
		}
	})
}

func TestNew_goesOnAfterACrash(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	synctest.Test(t, func(t *testing.T) {
		b := start(t, path)
		first := b.mustAttach("n1", "A")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		done := make(chan error)
		go func() {
			_, err := b.attach("n2", "B", 1)
			done <- err
		}()
		time.Sleep(time.Second)
		b.Close()
		if err := <-done; !errors.Is(err, ErrStopped) {
			t.Errorf("error %v, want that it stops", err)
		}

		again := start(t, path)
		defer again.Close()
		if diff := cmp.Diff(b.device(first.ID), again.device(first.ID)); diff != "" {
			t.Errorf("attached device (-before +after):\n%s", diff)
		}
		if d := again.device("b-0"); d.Phase != simapi.PhaseAttaching {
			t.Errorf("device is %s right after the restart, want attaching", d.Phase)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if d := again.device("b-0"); d.Phase != simapi.PhaseAttached || d.Machine != "n2" {
			t.Errorf("device is %s on %q when the operation is due, want attached on n2", d.Phase, d.Machine)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if !again.device("b-0").OnBus {
			t.Error("never shows up on its node")
		}
		again.wantViolations()
	})
}

func TestMinors_lowestFreeIsReused(t *testing.T) {
	bubble(t, func(b bench) {
		if _, err := b.attach("n1", "A", 3); err != nil {
			b.t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if err := b.RemovePCI("n1", "0000:3e:00.0"); err != nil {
			b.t.Fatal(err)
		}
		if err := b.Detach(b.t.Context(), DetachRequest{Device: "a-1"}); err != nil {
			b.t.Fatal(err)
		}
		d := b.mustAttach("n1", "B")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if got := b.device(d.ID); got.Slot != 2 || got.Minor != 1 {
			b.t.Errorf("slot %d minor %d, want the free ones, 2 and 1", got.Slot, got.Minor)
		}
		b.wantViolations()
	})
}

func TestRemoveGPU(t *testing.T) {
	bubble(t, func(b bench) {
		const at = "0000:3d:00.0"
		d := b.mustAttach("n1", "A")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		step := func(what string, err, want error) {
			b.t.Helper()
			if !errors.Is(err, want) {
				b.t.Errorf("%s: %v, want %v", what, err, want)
			}
		}
		step("remove undrained", b.RemoveGPU("n1", at), ErrNotDraining)
		step("persistence", b.SetPersistence("n1", at, true), nil)
		step("drain", b.SetDrain("n1", at, true), nil)
		step("remove persistent", b.RemoveGPU("n1", at), ErrInUse)
		step("no persistence", b.SetPersistence("n1", at, false), nil)
		b.judge.set(d.Number, true)
		step("remove open", b.RemoveGPU("n1", at), ErrInUse)
		b.judge.set(d.Number, false)
		step("remove", b.RemoveGPU("n1", at), nil)
		step("remove gone", b.RemoveGPU("n1", at), ErrNotFound)
		step("rescan", b.Rescan("n1", ""), nil)
		if got := b.device(d.ID); !got.Bound || got.Drain {
			b.t.Errorf("after the rescan: %+v, want it bound and not draining", got)
		}
		b.wantViolations()
	})
}

func TestBind_unbindAndDiscover(t *testing.T) {
	bubble(t, func(b bench) {
		d := b.mustAttach("n1", "A")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if err := b.Unbind("n1", "0000:3d:00.0"); err != nil {
			b.t.Fatal(err)
		}
		if got := b.device(d.ID); got.Bound || !got.OnBus {
			b.t.Errorf("after unbind: %+v", got)
		}
		if err := b.Discover("n1"); err != nil {
			b.t.Fatal(err)
		}
		if !b.device(d.ID).Bound {
			b.t.Error("not bound after discover")
		}
		off := false
		if err := b.ChangeMachine("n1", simapi.MachineChange{DriverLoaded: &off}); err != nil {
			b.t.Fatal(err)
		}
		if _, err := b.GPUs("n1"); !errors.Is(err, ErrNoDriver) {
			b.t.Errorf("error %v without driver", err)
		}
		if err := b.Bind("n1", "0000:3d:00.0"); !errors.Is(err, ErrNoDriver) {
			b.t.Errorf("error %v of bind without driver", err)
		}
	})
}

func TestSlotPower(t *testing.T) {
	bubble(t, func(b bench) {
		d := b.mustAttach("n1", "A")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		for _, on := range []bool{false, true} {
			if err := b.SlotPower("n1", 1, on); err != nil {
				b.t.Fatal(err)
			}
			if got := b.device(d.ID).OnBus; got != on {
				b.t.Errorf("on the bus: %v with power %v", got, on)
			}
		}
		if err := b.SlotPower("n1", 9, true); !errors.Is(err, ErrNotFound) {
			b.t.Errorf("error %v for a slot that does not exist", err)
		}
	})
}

func TestChangeDevice(t *testing.T) {
	act := func(action string) simapi.DeviceChange { return simapi.DeviceChange{Action: action} }
	bubble(t, func(b bench) {
		var xids []uint64
		b.hooks.XID = func(_, _ string, code uint64) { xids = append(xids, code) }
		change := func(id string, c simapi.DeviceChange) {
			b.t.Helper()
			if err := b.ChangeDevice(id, c); err != nil {
				b.t.Fatal(err)
			}
		}
		free := func() int {
			b.t.Helper()
			_, n, _, err := b.Free("n1", "A")
			if err != nil {
				b.t.Fatal(err)
			}
			return n
		}
		change("a-0", act(simapi.DeviceSteal))
		if n := free(); n != 3 {
			b.t.Errorf("%d free after a theft, want 3", n)
		}
		change("a-0", act(simapi.DeviceFree))
		d := b.mustAttach("n1", "A")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if err := b.ChangeDevice(d.ID, act(simapi.DeviceSteal)); !errors.Is(err, ErrInUse) {
			b.t.Errorf("error %v of a theft of an attached device", err)
		}
		change(d.ID, act(simapi.DeviceLinkDown))
		if got := b.device(d.ID); got.OnBus || got.Phase != simapi.PhaseAttached {
			b.t.Errorf("after link down: %+v", got)
		}
		change(d.ID, act(simapi.DeviceLinkUp))
		critical, serial := "Critical", ""
		change(d.ID, simapi.DeviceChange{Health: &critical, FabricSerial: &serial})
		if got := b.device(d.ID); !got.OnBus || got.OpStatus != "20" || got.FabricSerial != "" {
			b.t.Errorf("after link up and changes: %+v", got)
		}
		change(d.ID, act(simapi.DeviceVanish))
		if got := b.device(d.ID); got.OnBus || got.Machine != "" || free() != 3 {
			b.t.Errorf("after it vanished: %+v, %d free", got, free())
		}
		change(d.ID, act(simapi.DeviceReturn))
		if n := free(); n != 4 {
			b.t.Errorf("%d free after it returned, want 4", n)
		}
		change("a-1", simapi.DeviceChange{Action: simapi.DeviceBuildIn, Machine: "n1"})
		v, err := b.Machine("n1")
		if err != nil || len(v.Listed) != 0 || len(v.OnBus) != 1 || v.OnBus[0].ID != "a-1" || free() != 3 {
			b.t.Errorf("after it was built in: listed %v, on the bus %v (%v), %d free", v.Listed, v.OnBus, err, free())
		}
		if err := b.ChangeDevice("a-1", simapi.DeviceChange{Action: simapi.DeviceBuildIn, Machine: "n2"}); !errors.Is(err, ErrInUse) {
			b.t.Errorf("error %v of building it in twice", err)
		}
		change("a-1", act(simapi.DeviceFree))
		if n := free(); n != 4 {
			b.t.Errorf("%d free after it was taken out, want 4", n)
		}
		if diff := cmp.Diff([]uint64{79, 79, 79}, xids); diff != "" {
			b.t.Errorf("XIDs (-want +got):\n%s", diff)
		}
		b.wantViolations()
	})
}

func TestChangeMachine_power(t *testing.T) {
	bubble(t, func(b bench) {
		d := b.mustAttach("n1", "A")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		for _, on := range []bool{false, true} {
			if err := b.ChangeMachine("n1", simapi.MachineChange{Power: &on}); err != nil {
				b.t.Fatal(err)
			}
			if got := b.device(d.ID); got.OnBus != on || got.Phase != simapi.PhaseAttached {
				b.t.Errorf("with power %v: %+v", on, got)
			}
		}
	})
}

func TestDetach_whileAnotherIsOnItsWay(t *testing.T) {
	bubble(t, func(b bench) {
		if err := b.SetPolicies(simapi.Policies{Serialization: "none"}); err != nil {
			b.t.Fatal(err)
		}
		d := b.mustAttach("n1", "A")
		first := make(chan error)
		go func() { first <- b.Detach(context.Background(), DetachRequest{Device: d.ID, Forced: true}) }()
		synctest.Wait()
		if err := b.Detach(b.t.Context(), DetachRequest{Device: d.ID}); !errors.Is(err, ErrBusy) {
			b.t.Errorf("error %v, want busy", err)
		}
		if err := <-first; err != nil {
			b.t.Error(err)
		}
		if err := b.Detach(b.t.Context(), DetachRequest{Device: d.ID}); !errors.Is(err, ErrNotFound) {
			b.t.Errorf("error %v, want not found", err)
		}
	})
}

// TestCore_holdsItsInvariants plays random moves of manager, node and fate against each other and looks for a state that the
// hardware could not be in.
func TestCore_holdsItsInvariants(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := start(t, "") // thousands of states need not be on disk
				defer b.Close()
				play(b, rand.New(rand.NewPCG(seed, 7)), 300)
			})
		})
	}
}

func play(b bench, r *rand.Rand, moves int) {
	pick := func(s ...string) string { return s[r.IntN(len(s))] }
	device := func() string { return pick("a-0", "a-1", "a-2", "a-3", "b-0", "x-0") }
	machine := func() string { return pick("n1", "n2", "other") }
	address := func() string { return pick("0000:3d:00.0", "0000:3e:00.0", "0000:3f:00.0") }
	var updates sync.WaitGroup
	for range moves {
		switch r.IntN(8) {
		case 0, 1:
			m, model, n := machine(), pick("A", "B"), 1+r.IntN(2)
			updates.Go(func() { b.attach(m, model, n) })
		case 2:
			d, forced := device(), r.IntN(2) == 0
			updates.Go(func() { b.Detach(context.Background(), DetachRequest{Device: d, Forced: forced}) })
		case 3:
			b.RemovePCI(machine(), address())
		case 4:
			b.Rescan(machine(), "")
		case 5:
			b.ChangeDevice(device(), simapi.DeviceChange{Action: pick("vanish", "return", "steal", "free", "linkDown", "linkUp")})
		case 6:
			on, mode := r.IntN(3) > 0, pick(simapi.HotplugEvent, simapi.HotplugRescan)
			b.ChangeMachine(machine(), simapi.MachineChange{Power: &on, DriverLoaded: &on, Hotplug: &mode})
		case 7:
			b.SetPolicies(simapi.Policies{Serialization: pick("none", "perMachine", "busy409")})
			b.SlotPower(machine(), 1+r.IntN(3), r.IntN(2) == 0)
		}
		time.Sleep(time.Duration(r.IntN(1500)) * time.Millisecond)
		synctest.Wait()
	}
	updates.Wait()
	for _, v := range b.Violations() {
		if v.Kind == simapi.Invariant {
			b.t.Errorf("%s %s", v.Device, v.Detail)
		}
	}
	for _, o := range b.State().Operations {
		if o.End == nil {
			b.t.Errorf("operation %d never ended", o.ID)
		}
	}
}
