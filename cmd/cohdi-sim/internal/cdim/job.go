// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// Operations.
const (
	opConnect    = "connect"
	opDisconnect = "disconnect"
	opBoot       = "boot"
	opShutdown   = "shutdown"
)

// States of a job, a rollback and an operation.
const (
	inProgress = "IN_PROGRESS"
	completed  = "COMPLETED"
	failed     = "FAILED"
	suspended  = "SUSPENDED"
	canceling  = "CANCELING"
	canceled   = "CANCELED"
	skipped    = "SKIPPED"
)

// maxWorkers is how many operations of a job run side by side.
const maxWorkers = 2

// jobBody is a job as it is shown and stored.
type jobBody struct {
	ID         string      `json:"applyID"`
	Status     string      `json:"status"`
	Procedures []procedure `json:"procedures,omitempty"`
	Results    *[]result   `json:"applyResult,omitempty"`

	StartedAt   string `json:"startedAt"`
	EndedAt     string `json:"endedAt,omitempty"`
	CanceledAt  string `json:"canceledAt,omitempty"`
	SuspendedAt string `json:"suspendedAt,omitempty"`
	ResumedAt   string `json:"resumedAt,omitempty"`

	ExecuteRollback    *bool       `json:"executeRollback,omitempty"`
	RollbackStatus     string      `json:"rollbackStatus,omitempty"`
	RollbackProcedures []procedure `json:"rollbackProcedures,omitempty"`
	RollbackResults    *[]result   `json:"rollbackResult,omitempty"`
	RollbackStartedAt  string      `json:"rollbackStartedAt,omitempty"`
	RollbackEndedAt    string      `json:"rollbackEndedAt,omitempty"`

	ResumeProcedures []procedure `json:"resumeProcedures,omitempty"`
	ResumeResults    *[]result   `json:"resumeResult,omitempty"`
}

// busy: no other job may begin while it runs.
func (j jobBody) busy() bool {
	return j.Status == inProgress || j.Status == canceling || j.Status == canceled && j.RollbackStatus == inProgress
}

// waiting: no other job may begin until a person has decided.
func (j jobBody) waiting() bool {
	return j.Status == suspended || j.Status == canceled && j.RollbackStatus == suspended
}

type job struct {
	jobBody
	// lost: no worker runs it, and none will.
	lost bool
	// cancel is closed by a request to cancel. A new one is made for each worker.
	cancel chan struct{}
}

func newID() string {
	b := make([]byte, 5)
	// Read never fails: the runtime ends the process instead.
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

func (f *Face) stamp() string { return f.clk.Now().UTC().Format(time.RFC3339) }

func (f *Face) jobLocked(id string) *job {
	for _, j := range f.jobs {
		if j.ID == id {
			return j
		}
	}
	return nil
}

// gateLocked says why no job may begin now.
func (f *Face) gateLocked() (code, message string, shut bool) {
	for _, j := range f.jobs {
		if j.busy() {
			return codeRunning, "Already running. Cannot start multiple instances.", true
		}
	}
	for _, j := range f.jobs {
		if j.waiting() {
			return codeSuspended, "Suspended data exist. Please resume layoutapply. applyID:[" + j.ID + "]", true
		}
	}
	return "", "", false
}

// beginLocked accepts a job.
func (f *Face) beginLocked(list []procedure) (*job, error) {
	j := &job{jobBody: jobBody{ID: newID(), Status: inProgress, Procedures: list, Results: &[]result{}, StartedAt: f.stamp()}}
	f.jobs = append(f.jobs, j)
	if len(list) == 0 {
		j.Status, j.EndedAt = completed, f.stamp()
		return j, f.saveLocked()
	}
	f.startLocked(j, func() { f.run(j, j.Procedures, false) })
	return j, f.saveLocked()
}

func (f *Face) startLocked(j *job, work func()) {
	j.cancel = make(chan struct{})
	f.work.Go(work)
}

// attempt is how one operation ended; an open one has to be suspended.
type attempt struct {
	result
	open bool
}

// run does the procedures in the order of their dependencies.
func (f *Face) run(j *job, list []procedure, resumed bool) {
	ended := make(chan attempt, maxWorkers)
	status := map[int]string{}
	left := slices.Clone(list)
	running, open, cancel := 0, false, j.cancel
	var again []procedure
	for {
		f.mu.Lock()
		stopped := j.Status == canceling
		f.mu.Unlock()
		left = f.settle(j, left, status, stopped, resumed)
		for i := 0; i < len(left) && !open && !stopped && running < maxWorkers; {
			if !ready(left[i], list, status) {
				i++
				continue
			}
			p := left[i]
			left = slices.Delete(left, i, i+1)
			running++
			f.work.Go(func() { ended <- f.perform(p) })
		}
		if running == 0 && (len(left) == 0 || open) {
			break
		}
		select {
		case a := <-ended:
			if f.ctx.Err() != nil {
				return
			}
			running--
			f.record(j, a.result, resumed)
			if a.open {
				open = true
				i := slices.IndexFunc(list, func(p procedure) bool { return p.ID == a.ID })
				again = append(again, list[i])
				continue
			}
			status[a.ID] = a.Status
		case <-cancel: // the last ones end, no other begins
			cancel = nil
		case <-f.ctx.Done():
			return // as a worker that is killed
		}
	}
	f.finish(j, status, append(again, left...), open)
}

// settle takes out what will not run any more.
func (f *Face) settle(j *job, left []procedure, status map[int]string, stopped, resumed bool) []procedure {
	for again := true; again; {
		again = false
		for i := 0; i < len(left); i++ {
			p, end := left[i], ""
			if stopped {
				end = canceled
			}
			for _, id := range p.Dependencies {
				if status[id] == failed || status[id] == skipped {
					end = skipped
				}
			}
			if end == "" {
				continue
			}
			status[p.ID] = end
			f.record(j, result{ID: p.ID, Status: end}, resumed)
			left = slices.Delete(left, i, i+1)
			again = true
			break
		}
	}
	return left
}

// ready: all that it waits for is done. What is in no list (any more) was done before a suspension; an operation
// that does not exist at all never is.
func ready(p procedure, list []procedure, status map[int]string) bool {
	for _, id := range p.Dependencies {
		if status[id] == completed {
			continue
		}
		return false
	}
	return slices.ContainsFunc(list, func(o procedure) bool { return o.ID == p.ID })
}

func (f *Face) record(j *job, r result, resumed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if j.lost {
		return // nobody is there to write it
	}
	into := j.Results
	if resumed {
		into = j.ResumeResults
	}
	*into = append(slices.Clone(*into), r)
}

// finish writes how the job ended, or that it does not.
func (f *Face) finish(j *job, status map[int]string, rest []procedure, open bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if j.lost {
		return
	}
	defer f.storeLocked()
	switch {
	case open && j.Status != canceling:
		j.Status, j.SuspendedAt = suspended, f.stamp()
		j.ResumeProcedures = withoutDone(rest, status)
		return
	case j.Status == canceling:
		j.Status = canceled
		if j.ExecuteRollback != nil && *j.ExecuteRollback {
			f.rollbackLocked(j, status)
			return
		}
	default:
		j.Status = completed
		for _, s := range status {
			if s == failed || s == skipped {
				j.Status = failed
			}
		}
	}
	j.EndedAt = f.stamp()
}

// withoutDone drops dependencies on what is done, so that the rest can run by itself.
func withoutDone(list []procedure, status map[int]string) []procedure {
	out := slices.Clone(list)
	for i := range out {
		out[i].Dependencies = slices.DeleteFunc(slices.Clone(out[i].Dependencies), func(id int) bool { return status[id] == completed })
	}
	return out
}

func (f *Face) storeLocked() {
	if err := f.saveLocked(); err != nil {
		f.log.Error(err, "Job went on and was not recorded")
	}
}

// rollbackLocked begins to undo what was done, the last first.
func (f *Face) rollbackLocked(j *job, status map[int]string) {
	j.RollbackStatus, j.RollbackStartedAt, j.RollbackResults, j.RollbackProcedures = inProgress, f.stamp(), &[]result{}, []procedure{}
	for _, p := range slices.Backward(j.Procedures) {
		inverse, ok := map[string]string{opConnect: opDisconnect, opDisconnect: opConnect, opBoot: opShutdown, opShutdown: opBoot}[p.Operation]
		if !ok || status[p.ID] != completed {
			continue
		}
		p.ID, p.Operation, p.Dependencies = len(j.RollbackProcedures)+1, inverse, []int{}
		if p.ID > 1 {
			p.Dependencies = []int{p.ID - 1}
		}
		j.RollbackProcedures = append(j.RollbackProcedures, p)
	}
	list := j.RollbackProcedures
	f.startLocked(j, func() { f.undo(j, list) })
}

func (f *Face) undo(j *job, list []procedure) {
	end := completed
	for _, p := range list {
		a := f.perform(p)
		if f.ctx.Err() != nil {
			return
		}
		f.mu.Lock()
		*j.RollbackResults = append(slices.Clone(*j.RollbackResults), a.result)
		f.mu.Unlock()
		if a.open {
			end = suspended
		} else if a.Status != completed {
			end = failed
		}
		if end != completed {
			break
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if j.lost {
		return
	}
	j.RollbackStatus = end
	if end != suspended {
		j.RollbackEndedAt, j.EndedAt = f.stamp(), f.stamp()
	}
	f.storeLocked()
}

// LoseWorker makes the worker of the running job vanish: it stays as it is until somebody cancels it.
func (f *Face) LoseWorker() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, j := range f.jobs {
		if j.busy() {
			j.lost = true
			return nil
		}
	}
	return fmt.Errorf("lose the worker of a job that runs: %w", core.ErrNotFound)
}

// Jobs lists all jobs, the oldest first.
func (f *Face) Jobs() []simapi.Job {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := []simapi.Job{}
	for _, j := range f.jobs {
		out = append(out, simapi.Job{ID: j.ID, Status: j.Status, RollbackStatus: j.RollbackStatus, StartedAt: j.StartedAt, Lost: j.lost})
	}
	return out
}

// ChangeJob is what an operator does to a job: the call that he makes, past faults and tokens.
func (f *Face) ChangeJob(id string, change simapi.JobChange) error {
	query := url.Values{"action": {change.Action}}
	if change.Rollback {
		query.Set("rollbackOnCancel", "true")
	}
	rec := httptest.NewRecorder()
	f.Handler().ServeHTTP(rec, httptest.NewRequestWithContext(f.ctx, http.MethodPut, api+"/layout-apply/"+url.PathEscape(id)+"?"+query.Encode(), nil))
	if rec.Code/100 == 2 {
		return nil
	}
	kind := map[int]error{http.StatusNotFound: core.ErrNotFound, http.StatusConflict: core.ErrInUse}[rec.Code]
	var said codeBody
	if err := json.Unmarshal(rec.Body.Bytes(), &said); err != nil || kind == nil {
		return fmt.Errorf("%s job %s: %s", change.Action, id, rec.Body)
	}
	return fmt.Errorf("%s job %s: %w: %s", change.Action, id, kind, said.Message)
}

// patient: whatever the hardware refuses is left to a person.
func (f *Face) patient() bool { return f.core.State().Policies.CDIM.JobError == "suspended" }

func (f *Face) strict() bool { return f.core.State().Policies.CDIM.JobCheck == "strict" }

// machineOf finds the machine that a host's end of a link names.
func machineOf(s *simapi.State, host string) (simapi.Machine, bool) {
	for _, m := range s.Machines {
		if m.UUID == host || destinationOf(m) == host {
			return m, true
		}
	}
	return simapi.Machine{}, false
}
