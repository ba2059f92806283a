// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// client is a manager's client that answers what a test says, and remembers what it was asked.
type client struct {
	fabric.Manager
	can    fabric.Capabilities
	op     fabric.Operation
	err    error
	lists  map[device.Machine][]device.OnFabric
	failed map[device.Machine]error
	free   map[string]fabric.Supply
	asked  []string
	in     fabric.Intent
	polled fabric.Operation
}

func (c *client) Capabilities() fabric.Capabilities { return c.can }

func (c *client) Health(context.Context) error { return c.err }

func (c *client) Machines(context.Context) ([]fabric.Machine, error) { return nil, c.err }

func (c *client) ListAttached(context.Context, []device.Machine) (map[device.Machine][]device.OnFabric, map[device.Machine]error) {
	return c.lists, c.failed
}

func (c *client) Free(_ context.Context, models []string) (map[string]fabric.Supply, error) {
	c.asked = models
	return c.free, c.err
}

func (c *client) Attach(_ context.Context, in fabric.Intent) (fabric.Operation, error) {
	c.in = in
	return c.op, c.err
}

func (c *client) Detach(_ context.Context, in fabric.Intent) (fabric.Operation, error) {
	c.in = in
	return c.op, c.err
}

func (c *client) Poll(_ context.Context, op fabric.Operation) (fabric.Operation, error) {
	c.polled = op
	return c.op, c.err
}

// batching is a client that takes several detaches in one call.
type batching struct {
	*client
	begun []fabric.Begun
	ins   []fabric.Intent
}

func (c *batching) DetachAll(_ context.Context, ins []fabric.Intent) []fabric.Begun {
	c.ins = ins
	return c.begun
}

// limiting is a client that has limits of its own.
type limiting struct {
	*client
	own map[string]fabric.Limit
}

func (c *limiting) Limits(context.Context, device.Machine, []string) (map[string]fabric.Limit, error) {
	return c.own, c.err
}

// said is a Manager over a client, and what it told.
type said struct {
	*Manager
	calls    []string
	answered int
}

func over(c fabric.Manager) *said {
	s := &said{}
	s.Manager = New(Options{
		Client: c, Clock: clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), Models: map[device.Model]string{"a": "Model A", "b": "Model B"},
		Timed: func(op metrics.Operation, _ time.Duration, err error) {
			how := "ok"
			if err != nil {
				how = "failed"
			}
			s.calls = append(s.calls, string(op)+" "+how)
		},
		Answered: func() { s.answered++ },
	})
	return s
}

var (
	busy503   = &device.Fault{Class: device.FaultBusy, Op: "attach", Err: errors.New("busy")}
	halted    = &device.Fault{Class: device.FaultSuspended, Op: "attach", Err: errors.New("job 7 is suspended")}
	unanswers = &device.Fault{Class: device.FaultUnreachable, Op: "list", Err: errors.New("connection refused")}
	call      = node.Call{Machine: "m1", Model: "Model A", Device: "d1", Before: []string{"d0"}}
	asIntent  = fabric.Intent{Machine: "m1", Model: "Model A", Device: "d1", Before: []string{"d0"}}
)

// TestChange: what becomes of a call that changes something, as the node's loop hears it.
func TestChange(t *testing.T) {
	for _, tc := range []struct {
		situation string
		op        fabric.Operation
		err       error
		want      node.Work
		wantErr   error
		trouble   error
	}{
		{situation: "done", op: fabric.Operation{State: fabric.Done}},
		{situation: "works on it", op: fabric.Operation{State: fabric.Pending, Handle: "7", PollAfter: time.Second}, want: node.Work{Handle: "7", PollAfter: time.Second}},
		{situation: "waits for a person", op: fabric.Operation{State: fabric.Suspended, Handle: "7", Fault: halted}, want: node.Work{Handle: "7", Fault: halted}, trouble: halted},
		{situation: "gave up", op: fabric.Operation{State: fabric.Failed, Handle: "7", Fault: busy503}, want: node.Work{Fault: busy503}},
		{situation: "refused", err: busy503, wantErr: busy503},
		{situation: "refused, since it waits for a person", err: halted, wantErr: halted, trouble: halted},
	} {
		t.Run(tc.situation, func(t *testing.T) {
			for name, do := range map[string]func(*client, node.Fabric) (node.Work, error){
				"Attach": func(_ *client, m node.Fabric) (node.Work, error) { return m.Attach(t.Context(), call) },
				"Detach": func(_ *client, m node.Fabric) (node.Work, error) { return m.Detach(t.Context(), call) },
				"Poll": func(c *client, m node.Fabric) (node.Work, error) {
					w, err := m.Poll(t.Context(), attach.SendDetach, call, "7")
					c.in = c.polled.Intent
					if c.polled.Handle != "7" || c.polled.Kind != fabric.KindDetach || c.polled.State != fabric.Pending {
						t.Errorf("polled %+v", c.polled)
					}
					return w, err
				},
			} {
				c := &client{op: tc.op, err: tc.err}
				s := over(c)
				got, err := do(c, s.OfNode())
				if diff := cmp.Diff(tc.want, got, cmpopts.EquateErrors()); diff != "" || !errors.Is(err, tc.wantErr) {
					t.Errorf("%s: error %v, work (-want +got):\n%s", name, err, diff)
				}
				if diff := cmp.Diff(asIntent, c.in); diff != "" {
					t.Errorf("%s: intent (-want +got):\n%s", name, diff)
				}
				if trouble, _ := s.Trouble(); !errors.Is(trouble, tc.trouble) {
					t.Errorf("%s: trouble %v, want %v", name, trouble, tc.trouble)
				}
				how := "ok"
				if tc.err != nil {
					how = "failed"
				}
				if want := []string{name + " " + how}; !slices.Equal(s.calls, want) {
					t.Errorf("told of the calls %q, want %q", s.calls, want)
				}
			}
		})
	}
}

func TestFailedWithoutReason(t *testing.T) {
	got, err := over(&client{op: fabric.Operation{Kind: fabric.KindAttach, State: fabric.Failed, Handle: "7"}}).OfNode().Attach(t.Context(), call)
	if err != nil || got.Fault == nil || got.Fault.Class != device.FaultUnknown {
		t.Errorf("%+v, %v; want work that ended with an unknown outcome", got, err)
	}
}

// TestDetachAll: one call, and an answer of each device in its order.
func TestDetachAll(t *testing.T) {
	c := &batching{client: &client{can: fabric.Capabilities{Batch: 8}}, begun: []fabric.Begun{
		{Operation: fabric.Operation{State: fabric.Pending, Handle: "7/0", PollAfter: time.Second}},
		{Err: busy503},
		{Operation: fabric.Operation{State: fabric.Suspended, Handle: "7/2", Fault: halted}},
	}}
	s := over(c)
	second := node.Call{Machine: "m1", Model: "Model A", Device: "d2"}
	got := s.Batcher().DetachAll(t.Context(), []node.Call{call, second, call})
	want := []node.Answer{{Work: node.Work{Handle: "7/0", PollAfter: time.Second}}, {Err: busy503}, {Work: node.Work{Handle: "7/2", Fault: halted}}}
	if diff := cmp.Diff(want, got, cmpopts.EquateErrors()); diff != "" {
		t.Errorf("answers (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]fabric.Intent{asIntent, {Machine: "m1", Model: "Model A", Device: "d2"}, asIntent}, c.ins); diff != "" {
		t.Errorf("intents (-want +got):\n%s", diff)
	}
	if trouble, _ := s.Trouble(); !errors.Is(trouble, halted) {
		t.Errorf("trouble %v, want the suspended job", trouble)
	}
	if want := []string{"Detach failed"}; !slices.Equal(s.calls, want) {
		t.Errorf("told of the calls %q, want %q", s.calls, want)
	}
	if over(&client{}).Batcher() != nil {
		t.Error("a manager that takes one detach at a time is a batcher")
	}
}

// TestTrouble: what is remembered of the calls, and when somebody is told.
func TestTrouble(t *testing.T) {
	c := &client{}
	s := over(c)
	expect := func(step string, trouble error, asked bool, answered int) {
		t.Helper()
		if got, did := s.Trouble(); !errors.Is(got, trouble) || (got == nil) != (trouble == nil) || did != asked || s.answered != answered {
			t.Errorf("%s: trouble %v, asked %v, told %d times; want %v, %v, %d", step, got, did, s.answered, trouble, asked, answered)
		}
	}
	expect("before the first call", nil, false, 0)
	s.Ask(t.Context())
	expect("it answers", nil, true, 1)
	c.err = unanswers
	s.Ask(t.Context())
	expect("it does not answer", unanswers, true, 2)
	s.Ask(t.Context())
	expect("it still does not answer", unanswers, true, 2)
	c.err = halted
	s.Ask(t.Context())
	expect("it answers, and waits for a person", halted, true, 4)
	c.lists = map[device.Machine][]device.OnFabric{"m1": {{ID: "d1"}}}
	list, err := s.OfNode().ListAttached(t.Context(), "m1")
	if err != nil || len(list) != 1 {
		t.Errorf("list %v, %v", list, err)
	}
	expect("lists can be read meanwhile", halted, true, 4)
	c.err = busy503
	_, _ = s.OfNode().Attach(t.Context(), call)
	expect("a call that did not come so far says nothing of that", halted, true, 4)
	c.err = nil
	_, _ = s.OfNode().Attach(t.Context(), call)
	expect("it works again", nil, true, 5)
	c.failed = map[device.Machine]error{"m1": unanswers}
	if _, err := s.OfNode().ListAttached(t.Context(), "m1"); !errors.Is(err, unanswers) {
		t.Errorf("list: %v", err)
	}
	expect("a list cannot be read", unanswers, true, 6)
}

// TestFree: devices are kept where the caller may choose among them.
func TestFree(t *testing.T) {
	supply := map[string]fabric.Supply{"Model A": {Count: 3, Devices: []device.OnFabric{{ID: "d1"}, {ID: "d2"}}}}
	for _, tc := range []struct {
		situation string
		can       fabric.Capabilities
		want      map[device.Model]pool.Supply
	}{
		{"counts", fabric.Capabilities{Free: fabric.FreeCount}, map[device.Model]pool.Supply{"a": {Count: 3}}},
		{"lists, and chooses itself", fabric.Capabilities{Free: fabric.FreeList}, map[device.Model]pool.Supply{"a": {Count: 3}}},
		{"lists, and is told which", fabric.Capabilities{Free: fabric.FreeList, AddressableAttach: true}, map[device.Model]pool.Supply{"a": {Count: 2, Devices: []device.OnFabric{{ID: "d1"}, {ID: "d2"}}}}},
	} {
		t.Run(tc.situation, func(t *testing.T) {
			c := &client{can: tc.can, free: supply}
			got, err := over(c).OfFabric().Free(t.Context(), []device.Model{"a", "b"})
			if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
				t.Errorf("error %v, supply (-want +got):\n%s", err, diff)
			}
			if want := []string{"Model A", "Model B"}; !slices.Equal(c.asked, want) {
				t.Errorf("asked for %q, want %q", c.asked, want)
			}
		})
	}
}

func TestLimits(t *testing.T) {
	c := &limiting{client: &client{}, own: map[string]fabric.Limit{"Model B": {Min: 1, Max: 2}}}
	got, err := over(c).Limiter().Limits(t.Context(), "m1")
	if diff := cmp.Diff(map[device.Model]pool.Limit{"b": {Min: 1, Max: 2}}, got); diff != "" || err != nil {
		t.Errorf("error %v, limits (-want +got):\n%s", err, diff)
	}
	c.err = unanswers
	if _, err := over(c).Limiter().Limits(t.Context(), "m1"); !errors.Is(err, unanswers) {
		t.Errorf("error %v", err)
	}
	if over(&client{}).Limiter() != nil {
		t.Error("a manager without limits is a limiter")
	}
}

// TestNodeConfig: what a manager can do decides how the node goes about it.
func TestNodeConfig(t *testing.T) {
	times := Times{AttachDeadline: 4 * time.Minute, RetryAfter: time.Minute, CallTimeout: time.Minute, Settle: 10 * time.Second, Resync: time.Hour}
	for _, tc := range []struct {
		situation string
		can       fabric.Capabilities
		want      attach.Settings
	}{
		{"nothing is known of it", fabric.Capabilities{Exclusion: fabric.ExclusionUnknown, Identity: true}, attach.Settings{MaxCall: time.Minute, Settle: 10 * time.Second}},
		{"side by side, with identity", fabric.Capabilities{Exclusion: fabric.ExclusionNone, Identity: true}, attach.Settings{Parallel: true, MaxCall: time.Minute, Settle: 10 * time.Second}},
		{"side by side, without", fabric.Capabilities{Exclusion: fabric.ExclusionNone}, attach.Settings{Arrival: true, MaxCall: time.Minute, Settle: 10 * time.Second}},
		{"slower than configured", fabric.Capabilities{Identity: true, MaxCall: time.Hour, Settle: time.Minute}, attach.Settings{MaxCall: time.Hour, Settle: time.Minute}},
		{"one thing at a time for all", fabric.Capabilities{Exclusion: fabric.ExclusionGlobal, Identity: true, Batch: 8}, attach.Settings{Patience: queueMost, Batch: 8, MaxCall: time.Minute, Settle: 10 * time.Second}},
	} {
		t.Run(tc.situation, func(t *testing.T) {
			c := over(&client{can: tc.can}).NodeConfig(times)
			want := tc.want
			want.Deadline, want.RetryAfter, want.Resync = times.AttachDeadline, times.RetryAfter, times.Resync
			want.Look, want.Appear, want.Retry, want.Busy, want.Hold = look, appear, retry, busy, hold
			if diff := cmp.Diff(want, c.Settings); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
			if c.CallDeadline != times.CallTimeout+CallDeadline || c.Model("a") != "Model A" || c.Manager == nil || c.Batcher != nil {
				t.Errorf("config %+v", c)
			}
		})
	}
}
