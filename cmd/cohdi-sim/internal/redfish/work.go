// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const (
	defaultHardwareTimeout = 30 * time.Second

	keySuspended = "Suspended"
)

// keptTasks is how many tasks are remembered.
const keptTasks = 100

// task is work that was accepted.
type task struct {
	id            string
	machine       simapi.Machine
	began, ended  time.Time
	failure       *refusal
	method        string
	target, input string
	over          chan struct{}
	// waits is closed by a person who cancels the task; nil where it waits for nobody.
	waits     chan struct{}
	cancelled bool
}

func (t *task) state() string {
	switch {
	case t.waits != nil:
		return "Suspended"
	case t.ended.IsZero():
		return "Running"
	case t.cancelled:
		return "Cancelled"
	case t.failure != nil:
		return "Exception"
	}
	return "Completed"
}

// beginLocked takes work on, gives up the lock, and answers as the policy wants it.
func (f *Face) beginLocked(r *http.Request, jobs []job, m simapi.Machine) answer {
	f.lastTask++
	t := &task{
		id: strconv.Itoa(f.lastTask), machine: m, began: f.clk.Now(), method: r.Method, target: r.URL.Path, over: make(chan struct{}),
	}
	for _, j := range jobs {
		path := f.block(j.device)
		if f.policies().Variant == variantZones {
			path = f.endpoint(m.Fabric, j.device)
		}
		if j.attach || r.Method != http.MethodPatch {
			t.input += `{"@odata.id":"` + path + `"}`
		}
	}
	if strings.HasSuffix(r.URL.Path, f.compose()) {
		t.input += `{"@odata.id":"` + f.system(m.Name) + `"}`
	}
	f.tasks = append(f.tasks, t)
	if len(f.tasks) > keptTasks {
		f.tasks = f.tasks[1:]
	}
	var mine []*job
	for _, j := range jobs {
		mine = append(mine, &j)
	}
	f.coming = append(f.coming, mine...)
	pending := f.pendingLocked(t)
	f.mu.Unlock()
	f.tell(jobs)
	f.work.Go(func() { f.perform(t, mine) })
	policy := f.policies().Work
	if policy == "task202" || policy == "task200" || policy == "bare202" {
		return pending
	}
	if policy == "early200" {
		return f.final(t)
	}
	select {
	case <-t.over:
		return f.final(t)
	case <-r.Context().Done():
		panic(http.ErrAbortHandler)
	case <-f.ctx.Done():
		panic(http.ErrAbortHandler)
	}
}

// pendingLocked is the answer while a task goes on.
func (f *Face) pendingLocked(t *task) answer {
	a := answer{status: http.StatusAccepted, header: map[string]string{"Location": f.monitor(t.id)}, body: f.taskBody(t)}
	switch p := f.policies(); {
	case p.Work == "bare202":
		return answer{status: http.StatusAccepted}
	case p.RetryAfter == "date":
		a.header["Retry-After"] = f.clk.Now().Add(time.Second).UTC().Format(http.TimeFormat)
	case p.RetryAfter == "seconds":
		a.header["Retry-After"] = "1"
	case p.RetryAfter == "zero":
		a.header["Retry-After"] = "0"
	}
	return a
}

// final is what a change comes to.
func (f *Face) final(t *task) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.failure != nil {
		return f.refusal(t.failure)
	}
	if f.policies().Work == "sync204" {
		return answer{status: http.StatusNoContent}
	}
	v := f.lookLocked()
	m, ok := v.machine(t.machine.Name)
	if !ok {
		return answer{status: http.StatusNoContent}
	}
	if v.policies.Variant == variantZones {
		return f.show(f.portBody(v, m), f.targetLocked(v, m).tag, readOnly)
	}
	return f.show(f.systemBody(v, m), f.targetLocked(v, m).tag, readOnly)
}

// perform has the hardware do the work, one after the other, and ends the task.
func (f *Face) perform(t *task, jobs []*job) {
	var failure *refusal
	for _, j := range jobs {
		if failure == nil {
			failure = f.askHardware(*j)
		}
		if failure != nil && failure.key == keySuspended {
			failure = f.waitForPerson(t, failure)
		}
	}
	f.mu.Lock()
	f.coming = slices.DeleteFunc(f.coming, func(j *job) bool { return slices.Contains(jobs, j) })
	t.failure, t.ended = failure, f.clk.Now()
	f.mu.Unlock()
	close(t.over)
	var plain []job
	for _, j := range jobs {
		plain = append(plain, *j)
	}
	f.tell(plain)
}

// askHardware makes one call.
func (f *Face) askHardware(j job) *refusal {
	method := http.MethodDelete
	if j.attach {
		method = http.MethodPut
	}
	rec, err := f.hw.Ask(f.ctx, method, "http://hardware/"+url.PathEscape(j.machine)+"/"+url.PathEscape(j.device), nil)
	switch {
	case err == nil && rec.Code == http.StatusOK:
		return nil
	case err == nil && rec.Code == http.StatusServiceUnavailable:
		return refuse(http.StatusServiceUnavailable, keySuspended, "the hardware is to be seen to: %s", rec.Body)
	case err == nil && rec.Code/100 == 4:
		return refuse(http.StatusConflict, "ResourceBlockInUse", "the hardware refuses it: %s", rec.Body)
	}
	return refuse(http.StatusInternalServerError, "InternalError", "the hardware did not answer")
}

// waitForPerson suspends a task until it is cancelled.
func (f *Face) waitForPerson(t *task, why *refusal) *refusal {
	cancelled := make(chan struct{})
	f.mu.Lock()
	t.waits, t.failure = cancelled, why
	f.mu.Unlock()
	select {
	case <-cancelled:
	case <-f.ctx.Done():
		return why
	}
	return refuse(http.StatusConflict, "TaskCancelled", "a person has cancelled the task")
}

// cancel ends a task that waits for a person.
func (f *Face) cancel(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.taskLocked(r)
	switch {
	case t == nil:
		return f.refusal(f.missing(r))
	case t.waits == nil:
		return f.refusal(refuse(http.StatusMethodNotAllowed, "OperationNotAllowed", "the task does not wait for anybody"))
	}
	close(t.waits)
	t.waits, t.cancelled = nil, true
	return answer{status: http.StatusNoContent}
}

// hardware does what is below the service.
func (f *Face) hardware(w http.ResponseWriter, r *http.Request) {
	machine, id, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	var err error
	if r.Method == http.MethodPut {
		_, err = f.core.Attach(r.Context(), core.AttachRequest{Machine: machine, Specs: []core.Spec{{Device: id, Count: 1}}, Caller: caller, Limit: fault.Limit(r.Context())})
	} else {
		err = f.core.Detach(r.Context(), core.DetachRequest{Machine: machine, Device: id, Caller: caller})
	}
	switch {
	case err == nil:
		w.WriteHeader(http.StatusOK)
	case errors.Is(err, core.ErrStopped):
		panic(http.ErrAbortHandler)
	default:
		http.Error(w, err.Error(), http.StatusConflict)
	}
}

func (f *Face) taskBody(t *task) object {
	body := object{
		"@odata.type": "#Task.v1_7_0.Task", "@odata.id": f.task(t.id), "Id": t.id, "Name": t.method + " " + t.target,
		"TaskState": t.state(), "TaskStatus": "OK", "PercentComplete": 0, "TaskMonitor": f.monitor(t.id),
		"StartTime": t.began.UTC().Format(time.RFC3339), "Messages": []object{},
		"Payload": object{"TargetUri": t.target, "HttpOperation": t.method, "JsonBody": t.input, "HttpHeaders": []string{}},
	}
	if !t.ended.IsZero() {
		body["EndTime"] = t.ended.UTC().Format(time.RFC3339)
	}
	switch {
	case t.failure != nil:
		body["TaskStatus"], body["Messages"] = "Critical", []object{t.failure.extended()}
	case !t.ended.IsZero():
		body["PercentComplete"] = 100
	}
	return body
}

func (f *Face) getTaskService(*http.Request) answer {
	body := object{
		"@odata.type": "#TaskService.v1_2_0.TaskService", "@odata.id": f.taskService(), "Id": "TaskService", "Name": "Tasks",
		"ServiceEnabled": true, "Tasks": ref(f.names.tasks()),
	}
	return f.show(body, tagOf(body, ""), readOnly)
}

func (f *Face) listTasks(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	var members []string
	for _, t := range f.tasks {
		members = append(members, f.task(t.id))
	}
	return f.collection(r, "TaskCollection", f.names.tasks(), members, nil)
}

func (f *Face) taskLocked(r *http.Request) *task {
	for _, t := range f.tasks {
		if t.id == r.PathValue("id") {
			return t
		}
	}
	return nil
}

func (f *Face) getTask(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.taskLocked(r)
	if t == nil {
		return f.refusal(f.missing(r))
	}
	body := f.taskBody(t)
	return f.show(body, tagOf(body, ""), readOnly)
}

// getMonitor goes on while the task does; then it is the answer that the change did not have.
func (f *Face) getMonitor(r *http.Request) answer {
	f.mu.Lock()
	t := f.taskLocked(r)
	if t == nil {
		f.mu.Unlock()
		return f.refusal(f.missing(r))
	}
	over, policy := !t.ended.IsZero(), f.policies()
	a := f.pendingLocked(t)
	body := f.taskBody(t)
	f.mu.Unlock()
	switch {
	case !over && policy.Work == "task200":
		a.status = http.StatusOK // as some firmware does
		return a
	case !over:
		return a
	case policy.AfterTask == "task":
		return answer{status: http.StatusOK, body: body}
	case policy.AfterTask == "gone":
		return f.refusal(refuse(http.StatusNotFound, "ResourceMissingAtURI", "the task is over"))
	}
	return f.final(t)
}

// ForgetTasks makes all tasks vanish, as a restart of the service does. What they do goes on.
func (f *Face) ForgetTasks() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tasks = nil
}

// eventBody is what an event says of a device.
func (f *Face) eventBody(id int, j job) ([]byte, error) {
	return json.Marshal(object{
		"@odata.type": "#Event.v1_7_0.Event", "Id": strconv.Itoa(id), "Name": "Events", "Context": "emu",
		"Events": []object{{
			"MemberId": "0", "EventId": strconv.Itoa(id), "EventType": "ResourceUpdated", "EventTimestamp": f.clk.Now().UTC().Format(time.RFC3339),
			"Severity": "OK", "MessageSeverity": "OK", "MessageId": "Composition.1.1.ResourceBlockCompositionStateChanged", "MessageArgs": []string{j.device},
			"Message": "block state changed", "OriginOfCondition": ref(f.block(j.device)),
		}},
	})
}
