// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// composition is the handle where there is no task monitor: the composition itself is looked at.
const composition = "composition"

// recentTasks is how many of the service's tasks are looked through for one whose monitor did not arrive.
const recentTasks = 20

// task is one as the service tells of it.
type task struct {
	self, monitor string
	state         string
	messages      messages
	payload       payload
}

// payload is what a task was made by.
type payload struct {
	Target string `json:"TargetUri"`
	Body   string `json:"JsonBody"`
}

// decodeTask is about any answer: ok is false where it is no task.
func decodeTask(body []byte) (t task, ok bool) {
	var b struct {
		ID       string `json:"@odata.id"`
		State    string `json:"TaskState"`
		Monitor  string `json:"TaskMonitor"`
		Messages messages
		Payload  json.RawMessage
	}
	if json.Unmarshal(body, &b) != nil || b.State == "" {
		return task{}, false
	}
	t = task{state: b.State, messages: b.Messages}
	t.self, t.monitor = locationOrNone(b.ID), locationOrNone(b.Monitor)
	if json.Unmarshal(b.Payload, &t.payload) != nil {
		t.payload = payload{} // it is told by nothing, then
	}
	return t, true
}

// phase is what a task's state means for us.
type phase int

const (
	going phase = iota
	waiting
	completed
	broken
)

// phase of a task; one that is in a state of a later version goes on.
func (t task) phase() phase {
	switch strings.ToLower(t.state) {
	case "completed":
		return completed
	case "exception", "killed", "cancelled":
		return broken
	case "suspended":
		return waiting
	}
	return going
}

// does tells whether the task is what the change is about.
func (t task) does(ch change) bool {
	target, err := parsePath(t.payload.Target)
	if err != nil {
		return false
	}
	names := func(path string) bool { return strings.Contains(t.payload.Body, `"`+path+`"`) }
	switch target {
	case ch.host.offer.action(ch.kind):
		return names(ch.unit.path)
	case ch.host.path:
		return names(ch.unit.path) == (ch.kind == fabric.KindAttach)
	case ch.host.offer.compose:
		return names(ch.host.path) && names(ch.unit.path) == (ch.kind == fabric.KindAttach)
	}
	return false
}

// refusedStanza is the fault of a manifest that was answered with success and was none.
func refusedStanza(what string, r rest.Reply) *device.Fault {
	var b struct {
		Manifest struct {
			Stanzas []struct{ Response json.RawMessage }
		}
	}
	if json.Unmarshal(r.Body, &b) != nil {
		b.Manifest.Stanzas = nil // an answer to something else
	}
	for _, s := range b.Manifest.Stanzas {
		var e struct {
			Error json.RawMessage `json:"error"`
		}
		if json.Unmarshal(s.Response, &e) != nil || len(e.Error) == 0 {
			continue
		}
		v, _ := decodeRefusal(s.Response)
		return &device.Fault{Class: cmp.Or(v.class, device.FaultRejected), Op: what, Status: r.Status, Code: r.Tidy(v.code), Message: r.Tidy(v.text)}
	}
	return nil
}

func (c *Client) pending(op fabric.Operation, handle string, after time.Duration) fabric.Operation {
	op.State, op.Handle, op.Fault = fabric.Pending, handle, nil
	op.PollAfter = min(cmp.Or(after, c.poll), longestPoll)
	return op
}

func done(op fabric.Operation) fabric.Operation {
	op.State, op.Fault, op.PollAfter = fabric.Done, nil, 0
	if op.Kind == fabric.KindAttach && len(op.Devices) == 0 && op.Intent.Device != "" {
		op.Devices = []device.OnFabric{{ID: op.Intent.Device, Machine: op.Intent.Machine, Model: op.Intent.Model}}
	}
	return op
}

func failed(op fabric.Operation, fault *device.Fault) fabric.Operation {
	op.State, op.Fault, op.PollAfter = fabric.Failed, fault, 0
	return op
}

// accepted reads an answer of success to a change.
func (c *Client) accepted(ctx context.Context, w world, op fabric.Operation, what string, r rest.Reply) (fabric.Operation, *device.Fault) {
	t, isTask := decodeTask(r.Body)
	if r.Status != http.StatusAccepted && (!isTask || t.phase() == completed) {
		// Done, by its own account. Some are not: the block says so.
		if s, fault := c.look(ctx, w, what, op); fault == nil && !s.composing {
			return done(op), nil
		}
		return c.pending(op, composition, 0), nil
	}
	handle := cmp.Or(locationOrNone(r.Header.Get("Location")), t.monitor, t.self, composition)
	op = c.pending(op, handle, retryAfter(r, c.clock.Now()))
	if !isTask {
		return op, nil
	}
	op = c.judge(op, t)
	if op.State == fabric.Failed {
		return op, op.Fault
	}
	return op, nil
}

// situation is what the composition shows of a change.
type situation struct {
	// reached: it is as the change wants it. composing: something is still under way with the device.
	reached, composing bool
	ch                 change
}

// look reads the device and then the machine: what was over when the device was read shows in the machine's list.
func (c *Client) look(ctx context.Context, w world, what string, op fabric.Operation) (situation, *device.Fault) {
	path, err := parsePath(op.Intent.Device)
	if err != nil {
		return situation{}, &device.Fault{Class: device.FaultUnknown, Op: what, Err: err}
	}
	composing, fault := w.composing(ctx, what, path)
	if fault != nil && fault.Class != device.FaultNotFound {
		return situation{}, fault
	}
	h, fault := w.host(ctx, what, op.Intent.Machine)
	if fault != nil {
		return situation{}, fault
	}
	return situation{
		reached: h.has(path) == (op.Kind == fabric.KindAttach), composing: composing, ch: change{op.Kind, h, &unit{path: path}},
	}, nil
}

// recover finds out what became of a call without an answer: whether it is done, or under way. Else the fault holds.
func (c *Client) recover(ctx context.Context, w world, op fabric.Operation, what string, fault *device.Fault) (fabric.Operation, *device.Fault) {
	s, looked := c.look(ctx, w, what, op)
	if looked != nil {
		return op, fault
	}
	// A list may show already what is under way still.
	if t, found := c.findTask(ctx, what, s.ch); found {
		return c.pending(op, cmp.Or(t.monitor, t.self), 0), nil
	}
	switch {
	case s.composing:
		return c.pending(op, composition, 0), nil
	case s.reached:
		return done(op), nil
	}
	return op, fault
}

// findTask looks among the last tasks for one that is not over and does what the change is about, if the service says what
// its tasks do.
func (c *Client) findTask(ctx context.Context, what string, ch change) (task, bool) {
	what += ": list the tasks"
	r, fault := c.discover(ctx, what)
	if fault != nil || r.tasks == "" {
		return task{}, false
	}
	list, _, fault := read(ctx, c, "jobs", what, r.tasks, func(b []byte) (link, error) {
		var s struct{ Tasks link }
		err := json.Unmarshal(b, &s)
		return s.Tasks, err
	})
	if fault != nil || list.to == "" {
		return task{}, false
	}
	links, fault := c.collect(ctx, "jobs", what, list.to, "")
	if fault != nil {
		return task{}, false
	}
	slices.Reverse(links) // the newest first, as a rule
	links = links[:min(len(links), recentTasks)]
	all, fault := each(ctx, links, func(ctx context.Context, l link) (task, *device.Fault) {
		var t task
		if d, unread := c.get(ctx, "jobs", what, l.to); unread == nil { // else it is forgotten meanwhile, or not for us
			t, _ = decodeTask(d.Body) // what is no task is not over and does nothing
		}
		return t, nil
	})
	if fault != nil {
		return task{}, false
	}
	for _, t := range all {
		if p := t.phase(); (p == going || p == waiting) && cmp.Or(t.monitor, t.self) != "" && t.does(ch) {
			return t, true
		}
	}
	return task{}, false
}

// Poll looks at the task, or at the composition. Without a handle it looks for a task that does what is intended.
func (c *Client) Poll(ctx context.Context, op fabric.Operation) (fabric.Operation, error) {
	if op.State != fabric.Pending && op.State != fabric.Suspended {
		return op, nil
	}
	what := fmt.Sprintf("poll %s of %s, %s", strings.ToLower(string(op.Kind)), rest.Tidy(op.Intent.Device), cmp.Or(rest.Tidy(op.Handle), "without a handle"))
	w, fault := c.world(ctx, what)
	if fault != nil {
		return op, fault
	}
	var next fabric.Operation
	switch op.Handle {
	case "":
		next, fault = c.recover(ctx, w, op, what, &device.Fault{
			Class: device.FaultUnknown, Op: what, Message: "nothing does that now; whether something has, the list tells",
		})
	case composition:
		next, fault = c.pollComposition(ctx, w, op, what)
	default:
		next, fault = c.pollMonitor(ctx, w, op, what)
	}
	if fault != nil {
		return op, fault
	}
	return next, nil
}

func (c *Client) pollComposition(ctx context.Context, w world, op fabric.Operation, what string) (fabric.Operation, *device.Fault) {
	if pathOrNone(op.Intent.Device) == "" {
		return failed(op, &device.Fault{Class: device.FaultUnknown, Op: what, Message: "the task is forgotten, and it is not known which device it was about"}), nil
	}
	s, fault := c.look(ctx, w, what, op)
	switch {
	case fault != nil:
		return op, fault
	case s.composing:
		return c.pending(op, composition, 0), nil
	case s.reached:
		return done(op), nil
	}
	return failed(op, &device.Fault{Class: device.FaultUnknown, Op: what, Message: "nothing is under way any more, and the machine's list is not as it was to be"}), nil
}

// pollMonitor reads the monitor: 202 while it goes on, then what the change itself would have answered, then nothing.
func (c *Client) pollMonitor(ctx context.Context, w world, op fabric.Operation, what string) (fabric.Operation, *device.Fault) {
	path, err := parseLocation(op.Handle)
	if err != nil {
		return op, &device.Fault{Class: device.FaultRejected, Op: what, Err: err}
	}
	d, fault := c.get(ctx, "poll", what, path)
	switch {
	case fault == nil:
	case fault.Class == device.FaultNotFound:
		return c.pollComposition(ctx, w, op, what) // forgotten, or lost
	case aboutTheLook(d.Reply, fault):
		return op, fault
	default:
		if fault.Class == device.FaultBusy && meanings()[fault.Code] == "" {
			fault.Class = device.FaultUnknown // the work had begun, and the status alone says nothing of it
		}
		return failed(op, fault), nil
	}
	op = c.pending(op, op.Handle, retryAfter(d.Reply, c.clock.Now()))
	t, ok := decodeTask(d.Body)
	switch {
	case ok:
		return c.judge(op, t), nil
	case d.Status == http.StatusAccepted:
		return op, nil
	}
	if fault := refusedStanza(what, d.Reply); fault != nil {
		return failed(op, fault), nil
	}
	return done(op), nil
}

// aboutTheLook tells a fault of looking at a monitor from the end of what it monitors, which is answered in the same way:
// it is no answer, not the service's, or says that there will be another one.
func aboutTheLook(r rest.Reply, fault *device.Fault) bool {
	_, own := decodeRefusal(r.Body)
	if own && r.Status == http.StatusConflict { // no look is refused for that
		return false
	}
	if slices.Contains([]device.FaultClass{device.FaultUnreachable, device.FaultUnauthorized, device.FaultBusy, device.FaultUnsupported}, fault.Class) {
		return true
	}
	return r.Status == 0 || !own || r.Status/100 == 2 || r.Status == http.StatusServiceUnavailable
}

// judge says what the task means for the operation.
func (c *Client) judge(op fabric.Operation, t task) fabric.Operation {
	v := judge(t.messages)
	fault := &device.Fault{
		Class: device.FaultUnknown, Op: fmt.Sprintf("%s %s, task %s", strings.ToLower(string(op.Kind)), rest.Tidy(op.Intent.Device), rest.Tidy(op.Handle)),
		Code: rest.Tidy(v.code), Message: rest.Tidy(strings.TrimSpace(fmt.Sprintf("the task's state is %s. %s", orNothing(t.state), v.text))),
	}
	switch t.phase() {
	case completed:
		return done(op)
	case broken:
		if v.class != "" {
			fault.Class = v.class
		}
		if fault.Class == device.FaultNotFound && op.Kind == fabric.KindAttach {
			fault.Class = device.FaultRejected // it is the device that was not found
		}
		return failed(op, fault)
	case waiting:
		fault.Class = device.FaultSuspended
		fault.Err = errors.New("the service waits for a person")
		op.State, op.Fault = fabric.Suspended, fault
		return op
	case going:
	}
	return c.pending(op, op.Handle, op.PollAfter)
}
