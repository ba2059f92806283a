// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Operations of a procedure.
const (
	operationConnect    = "connect"
	operationDisconnect = "disconnect"
)

// States of a job and of its rollback, and ends of an operation in it.
const (
	stateInProgress = "IN_PROGRESS"
	stateCompleted  = "COMPLETED"
	stateFailed     = "FAILED"
	stateSuspended  = "SUSPENDED"
	stateCanceling  = "CANCELING"
	stateCanceled   = "CANCELED"
	stateSkipped    = "SKIPPED"
)

const (
	// recentJobs is how many jobs are looked through for one whose id did not arrive. It is among the last ones:
	// there is but one at a time.
	recentJobs = 20
	// clockStep is how exact the manager tells when a job began.
	clockStep = 2 * time.Second
)

// applyIDForm bounds what is stored and becomes part of a path; the manager makes ten hexadecimal digits.
var applyIDForm = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z_-]{0,63}$`)

// procedure is one change of a job.
type procedure struct {
	ID           int    `json:"operationID"`
	Operation    string `json:"operation"`
	TargetCPU    string `json:"targetCPUID,omitempty"`
	TargetDevice string `json:"targetDeviceID,omitempty"`
	Source       string `json:"sourceDeviceID,omitempty"`
	Destination  string `json:"destinationDeviceID,omitempty"`
	Dependencies []int  `json:"dependencies"`
}

// step is a procedure as the manager repeats it.
type step struct {
	ID           rest.Text `json:"operationID"`
	Operation    rest.Text `json:"operation"`
	TargetCPU    rest.Text `json:"targetCPUID"`
	TargetDevice rest.Text `json:"targetDeviceID"`
	Destination  rest.Text `json:"destinationDeviceID"`
}

// does tells whether the step is what the operation is about, in either dialect. In the product's the machine
// is not named; there the device is enough: nobody else is given it at the same time.
func (s step) does(op fabric.Operation) bool {
	want := operationConnect
	if op.Kind == fabric.KindDetach {
		want = operationDisconnect
	}
	if string(s.Operation) != want {
		return false
	}
	if s.Destination != "" {
		return strings.EqualFold(string(s.Destination), op.Intent.Device)
	}
	return strings.EqualFold(string(s.TargetDevice), op.Intent.Device) && strings.EqualFold(string(s.TargetCPU), string(op.Intent.Machine))
}

// result is what became of a step.
type result struct {
	ID     rest.Text       `json:"operationID"`
	Status rest.Text       `json:"status"`
	Code   rest.Text       `json:"statusCode"`
	Body   json.RawMessage `json:"responseBody"`
}

// results are absent, null or in another form until there are any.
type results []result

// UnmarshalJSON never fails: without results the job's own state has to do.
func (r *results) UnmarshalJSON(b []byte) error {
	var list []result
	if json.Unmarshal(b, &list) == nil {
		*r = list
	}
	return nil
}

func (r results) of(id rest.Text) (result, bool) {
	for _, one := range r {
		if one.ID == id {
			return one, true
		}
	}
	return result{}, false
}

// job is one as the manager tells of it.
type job struct {
	ID             rest.Text `json:"applyID"`
	Status         rest.Text `json:"status"`
	Procedures     []step    `json:"procedures"`
	Results        results   `json:"applyResult"`
	Resumed        results   `json:"resumeResult"`
	RollbackStatus rest.Text `json:"rollbackStatus"`
	StartedAt      rest.Text `json:"startedAt"`
}

// unfinished: it runs, or may go on, and nobody else's can begin.
func (j job) unfinished() bool {
	switch string(j.Status) {
	case stateInProgress, stateCanceling, stateSuspended:
		return true
	case stateCanceled:
		return j.RollbackStatus == stateInProgress || j.RollbackStatus == stateSuspended
	}
	return false
}

// waits: nothing goes on before a person has resumed or cancelled it, or its rollback.
func (j job) waits() bool {
	return j.Status == stateSuspended || j.Status == stateCanceled && j.RollbackStatus == stateSuspended
}

func (j job) step(op fabric.Operation) (step, bool) {
	for _, s := range j.Procedures {
		if s.does(op) {
			return s, true
		}
	}
	return step{}, false
}

// result is the last word on a step.
func (j job) result(s step) (result, bool) {
	if r, ok := j.Resumed.of(s.ID); ok {
		return r, true
	}
	return j.Results.of(s.ID)
}

func decodeApplyID(body []byte) (string, error) {
	var a struct {
		ID rest.Text `json:"applyID"`
	}
	if err := json.Unmarshal(body, &a); err != nil {
		return "", fmt.Errorf("decode answer: %w", err)
	}
	return checkApplyID(string(a.ID))
}

func checkApplyID(id string) (string, error) {
	if !applyIDForm.MatchString(id) {
		return "", fmt.Errorf("decode answer: applyID %q is none", rest.Tidy(id))
	}
	return id, nil
}

func decodeJob(body []byte) (job, error) {
	var j job
	if err := json.Unmarshal(body, &j); err != nil {
		return job{}, fmt.Errorf("decode job: %w", err)
	}
	if j.Status == "" {
		return job{}, errors.New("decode job: no status in it")
	}
	return j, nil
}

func decodeJobs(body []byte) ([]job, error) {
	var list struct {
		Jobs *[]job `json:"applyResults"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("decode jobs: %w", err)
	}
	if list.Jobs == nil {
		return nil, errors.New("decode jobs: no applyResults in it")
	}
	return *list.Jobs, nil
}

// change is what is asked for, and what a job does for it.
type change struct {
	op        fabric.Operation
	procedure procedure
}

// apply posts one job with all the changes, which are of one kind, and says of each how it began. None of them waits for
// another, so that one which fails keeps no other from being made.
func (c *Client) apply(ctx context.Context, what string, changes []change) []fabric.Begun {
	begun, ops := make([]fabric.Begun, len(changes)), make([]fabric.Operation, len(changes))
	job := struct {
		Procedures []procedure `json:"procedures"`
	}{make([]procedure, len(changes))}
	for i, one := range changes {
		ops[i], job.Procedures[i] = one.op, one.procedure
		job.Procedures[i].ID, job.Procedures[i].Dependencies = i+1, []int{}
	}
	body, err := json.Marshal(job)
	if err != nil {
		return all(begun, &device.Fault{Class: device.FaultRejected, Op: what, Err: err})
	}
	req := c.request(strings.ToLower(string(ops[0].Kind)), what, c.layout+"/layout-apply", nil)
	req.Method, req.Body, req.ContentType, req.Timeout, req.Change = http.MethodPost, body, "application/json", changeTimeout, true
	sent := c.clock.Now()
	r, fault := c.call(ctx, req)
	if fault == nil {
		id, err := decodeApplyID(r.Body)
		if err == nil {
			for i, op := range ops {
				begun[i].Operation = c.pending(op, id)
			}
			return begun
		}
		fault = r.Strange(what, err)
	}
	switch fault.Class {
	case device.FaultUnknown, device.FaultBusy, device.FaultSuspended:
		return c.find(ctx, ops, what, sent, fault)
	case device.FaultNotFound:
		fault.Class = device.FaultRejected // the path, neither machine nor device
	default:
	}
	if fault.Code == codeRequest {
		fault.Message = rest.Tidy(fmt.Sprintf("%s (dialect %s was spoken)", fault.Message, c.dialect))
	}
	return all(begun, fault)
}

// all says the fault of each.
func all(begun []fabric.Begun, fault *device.Fault) []fabric.Begun {
	for i := range begun {
		mine := *fault
		begun[i].Err = &mine
	}
	return begun
}

func (c *Client) pending(op fabric.Operation, id string) fabric.Operation {
	op.State, op.Handle, op.PollAfter, op.Fault = fabric.Pending, id, c.poll, nil
	return op
}

// find looks for jobs that do what we asked for, after the answer was lost (and they may have ended since), or
// when the manager is occupied (and it may be our own that occupies it, from before a crash). Else the fault holds.
func (c *Client) find(ctx context.Context, ops []fabric.Operation, what string, sent time.Time, fault *device.Fault) []fabric.Begun {
	begun := all(make([]fabric.Begun, len(ops)), fault)
	jobs, now, looked := c.jobs(ctx, what)
	if looked != nil {
		return begun
	}
	var since time.Time // by the manager's clock
	if fault.Class == device.FaultUnknown && !now.IsZero() {
		since = now.Add(-c.clock.Since(sent) - clockStep)
	}
	for i, op := range ops {
		mine := *fault
		if id := among(jobs, op, since, &mine); id != "" {
			begun[i] = fabric.Begun{Operation: c.pending(op, id)}
			continue
		}
		begun[i].Err = &mine
	}
	return begun
}

// among finds the job that does what the operation is about, the newest first. If none does, the fault says which one is
// in the way.
func among(jobs []job, op fabric.Operation, since time.Time, fault *device.Fault) (found string) {
	for _, j := range jobs {
		id, err := checkApplyID(string(j.ID))
		if err != nil {
			continue
		}
		if _, ours := j.step(op); ours && (j.unfinished() || j.began(since)) {
			return id
		}
		if j.unfinished() && fault.Class != device.FaultUnknown && !strings.Contains(fault.Message, id) {
			fault.Message = rest.Tidy(fmt.Sprintf("%s (job %s, %s)", fault.Message, id, j.Status))
		}
	}
	return ""
}

// began tells whether the job is not older than that.
func (j job) began(since time.Time) bool {
	at, err := time.Parse(time.RFC3339, string(j.StartedAt))
	return err == nil && !since.IsZero() && !at.Before(since)
}

// jobs are the last ones, the newest first, and the manager's clock.
func (c *Client) jobs(ctx context.Context, what string) ([]job, time.Time, *device.Fault) {
	req := c.request("jobs", what+": list the jobs", c.layout+"/layout-apply", url.Values{
		"fields": {"procedures"}, "limit": {fmt.Sprint(recentJobs)},
	})
	r, fault := c.call(ctx, req)
	if fault != nil {
		return nil, time.Time{}, fault
	}
	jobs, err := decodeJobs(r.Body)
	if err != nil {
		return nil, time.Time{}, r.Strange(req.What, err)
	}
	return jobs, r.Date, nil
}

// Poll looks at the job. Without a handle it looks for one that does what is intended.
func (c *Client) Poll(ctx context.Context, op fabric.Operation) (fabric.Operation, error) {
	if op.State != fabric.Pending && op.State != fabric.Suspended {
		return op, nil
	}
	if op.Handle == "" {
		what := fmt.Sprintf("look for a job that does %s of %s", strings.ToLower(string(op.Kind)), op.Intent.Device)
		found := c.find(ctx, []fabric.Operation{op}, what, c.clock.Now(), &device.Fault{
			Class: device.FaultUnknown, Op: what, Message: "no job does that now; whether one has, the list tells",
		})
		if found[0].Err != nil {
			return op, found[0].Err
		}
		op = found[0].Operation
	}
	what := "poll job " + op.Handle
	r, fault := c.call(ctx, c.request("poll", what, c.layout+"/layout-apply/"+url.PathEscape(op.Handle), nil))
	if fault != nil {
		if fault.Class == device.FaultNotFound && fault.Code == codeUnknown {
			fault.Class = device.FaultUnknown // somebody deleted it, and what it did is done
			return failed(op, fault), nil
		}
		return op, fault
	}
	j, err := decodeJob(r.Body)
	if err != nil {
		return op, r.Strange(what, err)
	}
	return c.judge(op, j), nil
}

func failed(op fabric.Operation, fault *device.Fault) fabric.Operation {
	op.State, op.Fault, op.PollAfter = fabric.Failed, fault, 0
	return op
}

func done(op fabric.Operation) fabric.Operation {
	op.State, op.Fault, op.PollAfter = fabric.Done, nil, 0
	if op.Kind == fabric.KindAttach {
		op.Devices = []device.OnFabric{{ID: op.Intent.Device, Machine: op.Intent.Machine, Model: op.Intent.Model}}
	}
	return op
}

// judge says what the job means for our change, which need not be its only one.
func (c *Client) judge(op fabric.Operation, j job) fabric.Operation {
	fault := &device.Fault{Class: device.FaultUnknown, Op: strings.ToLower(string(op.Kind)) + " " + op.Intent.Device + ", job " + op.Handle}
	s, ours := j.step(op)
	if !ours && len(j.Procedures) > 0 {
		fault.Message = "the job is about something else"
		return failed(op, fault)
	}
	r, told := j.result(s)
	switch string(j.Status) {
	case stateCompleted, stateFailed:
		if told && r.Status == stateCompleted || !told && j.Status == stateCompleted {
			return done(op)
		}
		return failed(op, r.explain(fault, op.Kind))
	case stateSuspended:
		if told && r.Status == stateCompleted {
			return done(op) // another change of the job waits
		}
		return c.suspended(op, r, fault, "")
	case stateCanceled:
		return c.canceled(op, j, r, fault)
	}
	return c.pending(op, op.Handle) // also a state of a later version
}

func (c *Client) suspended(op fabric.Operation, r result, fault *device.Fault, what string) fabric.Operation {
	fault = r.explain(fault, op.Kind)
	fault.Class = device.FaultSuspended
	fault.Message = rest.Tidy(fmt.Sprintf("job %s%s is suspended until a person resumes or cancels it, and no other can begin: %s", op.Handle, what, fault.Message))
	op.State, op.Fault, op.PollAfter = fabric.Suspended, fault, c.poll
	return op
}

// canceled: a person has called the job off; what was done may be undone.
func (c *Client) canceled(op fabric.Operation, j job, r result, fault *device.Fault) fabric.Operation {
	if r.Status != stateCompleted {
		return failed(op, r.explain(fault, op.Kind))
	}
	switch string(j.RollbackStatus) {
	case "":
		return done(op)
	case stateInProgress:
		return c.pending(op, op.Handle)
	case stateSuspended:
		return c.suspended(op, result{}, fault, " (its rollback)")
	case stateCompleted:
		fault.Class, fault.Message = device.FaultRejected, "somebody cancelled the job and had it undone"
	default:
		fault.Message = "somebody cancelled the job, and undoing it failed"
	}
	return failed(op, fault)
}

// explain fills in why a step is not done. Only what the hardware refused, or never was asked, is definite.
func (r result) explain(fault *device.Fault, kind fabric.OperationKind) *device.Fault {
	var said struct {
		Code    rest.Text `json:"code"`
		Message rest.Text `json:"message"`
	}
	if json.Unmarshal(r.Body, &said) != nil {
		said.Message = rest.Text(r.Body)
	}
	fault.Code, fault.Message = rest.Tidy(string(said.Code)), rest.Tidy(string(said.Message))
	switch string(r.Status) {
	case stateSkipped:
		fault.Class, fault.Message = device.FaultBusy, "it was skipped, since another change in the job failed"
		return fault
	case stateCanceled:
		fault.Class, fault.Message = device.FaultRejected, "somebody cancelled the job before it came to this"
		return fault
	case "":
		fault.Message = "the job does not say what became of it"
		return fault
	}
	switch code := string(r.Code); {
	case code == "400" || code == "401" || code == "403":
		fault.Class = device.FaultRejected
	case (code == "404" || code == "409") && kind == fabric.KindAttach: // there is no such device, or it is on another machine
		fault.Class = device.FaultRejected
	case code == "404":
		fault.Class = device.FaultNotFound
	case code == "409":
		fault.Class = device.FaultConflict
	}
	if fault.Message == "" {
		fault.Message = "the hardware answered with status " + orNothing(string(r.Code))
	}
	return fault
}
