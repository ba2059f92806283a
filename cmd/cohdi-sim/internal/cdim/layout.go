// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

const defaultLimit = 20

var idForm = regexp.MustCompile(`^[0-9a-f]{10}$`)

// post takes a job, unless one is there: that is judged after the form, even for an empty list.
func (f *Face) post(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return // the client has gone
	}
	list, err := decodeProcedures(body, f.dialect, f.strict())
	if err != nil {
		refuse(w, http.StatusBadRequest, codeRequest, err.Error())
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if code, message, shut := f.gateLocked(); shut {
		refuse(w, http.StatusConflict, code, message)
		return
	}
	j, err := f.beginLocked(list)
	if err != nil {
		refuse(w, http.StatusInternalServerError, "E40019", err.Error())
		return
	}
	reply(w, http.StatusAccepted, map[string]string{"applyID": j.ID})
}

// with finds the job of the path and holds the lock for what is done to it.
func (f *Face) with(w http.ResponseWriter, r *http.Request, do func(j *job)) {
	id := r.PathValue("id")
	if !idForm.MatchString(id) {
		refuse(w, http.StatusBadRequest, codeRequest, fmt.Sprintf("'%s' does not match '^[0-9a-f]{10}$'", id))
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	j := f.jobLocked(id)
	if j == nil {
		refuse(w, http.StatusNotFound, codeNoJob, fmt.Sprintf("Specified %s is not found.", id))
		return
	}
	do(j)
}

func (f *Face) get(w http.ResponseWriter, r *http.Request) {
	f.with(w, r, func(j *job) { reply(w, http.StatusOK, j.jobBody) })
}

func (f *Face) delete(w http.ResponseWriter, r *http.Request) {
	f.with(w, r, func(j *job) {
		defer f.storeLocked()
		if j.busy() || j.waiting() {
			refuse(w, http.StatusConflict, codeDelete, "This layoutapply cannot be deleted.")
			return
		}
		f.jobs = slices.DeleteFunc(f.jobs, func(o *job) bool { return o == j })
		w.WriteHeader(http.StatusNoContent)
	})
}

// put is what a person does: cancel or resume.
func (f *Face) put(w http.ResponseWriter, r *http.Request) {
	action, back := r.URL.Query().Get("action"), strings.EqualFold(r.URL.Query().Get("rollbackOnCancel"), "true")
	switch action {
	case "cancel":
		f.with(w, r, func(j *job) { f.cancelLocked(w, j, back) })
	case "resume":
		f.with(w, r, func(j *job) { f.resumeLocked(w, j) })
	default:
		refuse(w, http.StatusBadRequest, codeRequest, fmt.Sprintf("'%s' is not one of ['cancel', 'resume']", action))
	}
}

func (f *Face) cancelLocked(w http.ResponseWriter, j *job, back bool) {
	defer f.storeLocked()
	switch {
	case j.busy() && j.lost:
		f.forceLocked(w, j)
	case j.Status == inProgress:
		j.Status, j.CanceledAt, j.ExecuteRollback = canceling, f.stamp(), &back
		close(j.cancel)
		reply(w, http.StatusAccepted, map[string]string{"status": canceling})
	case j.Status == suspended:
		j.Status, j.CanceledAt, j.ExecuteRollback, j.EndedAt = failed, f.stamp(), &back, f.stamp()
		reply(w, http.StatusAccepted, map[string]string{"status": failed})
	case j.Status == canceled && j.RollbackStatus == suspended:
		j.RollbackStatus, j.RollbackEndedAt, j.EndedAt = failed, f.stamp(), f.stamp()
		reply(w, http.StatusAccepted, map[string]string{"status": canceled, "rollbackStatus": failed})
	case j.Status == canceling, j.Status == canceled:
		reply(w, http.StatusOK, map[string]string{"status": j.Status})
	default:
		refuse(w, http.StatusConflict, codeEnded, "This layoutapply has already executed.")
	}
}

// forceLocked ends a job that nobody works on.
func (f *Face) forceLocked(w http.ResponseWriter, j *job) {
	body := struct {
		codeBody
		Status         string `json:"status"`
		RollbackStatus string `json:"rollbackStatus,omitempty"`
	}{codeBody{codeWorker, "Since the process with the specified ID does not exist, change the status from IN_PROGRESS to FAILED."}, failed, ""}
	if j.Status == canceled {
		body.Message = strings.Replace(body.Message, "the status", "the rollbackStatus", 1)
		j.RollbackStatus, j.RollbackEndedAt = failed, f.stamp()
		body.Status, body.RollbackStatus = canceled, failed
	} else {
		j.Status = failed
	}
	j.EndedAt = f.stamp()
	reply(w, http.StatusConflict, body)
}

func (f *Face) resumeLocked(w http.ResponseWriter, j *job) {
	defer f.storeLocked()
	switch {
	case j.Status == suspended:
		j.Status, j.ResumedAt, j.ResumeResults, j.lost = inProgress, f.stamp(), &[]result{}, false
		list := j.ResumeProcedures
		f.startLocked(j, func() { f.run(j, list, true) })
		reply(w, http.StatusAccepted, map[string]string{"status": inProgress})
	case j.Status == canceled && j.RollbackStatus == suspended:
		j.RollbackStatus, j.lost = inProgress, false
		list := j.RollbackProcedures[len(*j.RollbackResults)-1:]
		*j.RollbackResults = (*j.RollbackResults)[:len(*j.RollbackResults)-1]
		f.startLocked(j, func() { f.undo(j, list) })
		reply(w, http.StatusAccepted, map[string]string{"status": canceled, "rollbackStatus": inProgress})
	default:
		reply(w, http.StatusOK, map[string]string{"status": j.Status})
	}
}

// query is what a list is asked for.
type query struct {
	status, sortBy, orderBy string
	fields                  []string
	limit, offset           int
	since, until            time.Time
	endedSince, endedUntil  time.Time
}

func parseQuery(r *http.Request) (query, error) {
	q := query{sortBy: "startedAt", orderBy: "desc", limit: defaultLimit}
	for name, values := range r.URL.Query() {
		value := values[0]
		var err error
		switch name {
		case "status":
			q.status, err = oneOf(value, inProgress, completed, failed, canceling, canceled, suspended)
		case "sortBy":
			q.sortBy, err = oneOf(value, "startedAt", "endedAt")
		case "orderBy":
			q.orderBy, err = oneOf(value, "asc", "desc")
		case "fields":
			for _, v := range values {
				_, err = oneOf(v, "procedures", "applyResult", "rollbackProcedures", "rollbackResult", "resumeProcedures", "resumeResult")
				if err != nil {
					break
				}
			}
			q.fields = values
		case "limit":
			q.limit, err = atLeast(value, 1)
		case "offset":
			q.offset, err = atLeast(value, 0)
		case "startedAtSince":
			q.since, err = time.Parse(time.RFC3339, value)
		case "startedAtUntil":
			q.until, err = time.Parse(time.RFC3339, value)
		case "endedAtSince":
			q.endedSince, err = time.Parse(time.RFC3339, value)
		case "endedAtUntil":
			q.endedUntil, err = time.Parse(time.RFC3339, value)
		default:
			err = fmt.Errorf("unknown parameter '%s'", name)
		}
		if err != nil {
			return q, err
		}
	}
	return q, nil
}

func oneOf(value string, accepted ...string) (string, error) {
	if !slices.Contains(accepted, value) {
		return "", fmt.Errorf("'%s' is not one of %v", value, accepted)
	}
	return value, nil
}

func atLeast(value string, least int) (int, error) {
	n, err := strconv.Atoi(value)
	if err != nil || n < least {
		return 0, fmt.Errorf("'%s' is no number of at least %d", value, least)
	}
	return n, nil
}

// takes tells whether a job is asked for.
func (q query) takes(j *job) bool {
	within := func(text string, since, until time.Time) bool {
		if since.IsZero() && until.IsZero() {
			return true
		}
		at, err := time.Parse(time.RFC3339, text)
		return err == nil && !at.Before(since) && (until.IsZero() || at.Before(until))
	}
	return (q.status == "" || q.status == j.Status) && within(j.StartedAt, q.since, q.until) && within(j.EndedAt, q.endedSince, q.endedUntil)
}

func (f *Face) list(w http.ResponseWriter, r *http.Request) {
	q, err := parseQuery(r)
	if err != nil {
		refuse(w, http.StatusBadRequest, codeRequest, err.Error())
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	taken := []jobBody{}
	for _, j := range f.jobs {
		if q.takes(j) {
			taken = append(taken, visible(j.jobBody, q.fields))
		}
	}
	slices.SortStableFunc(taken, func(a, b jobBody) int {
		if q.sortBy == "endedAt" {
			return strings.Compare(a.EndedAt, b.EndedAt)
		}
		return strings.Compare(a.StartedAt, b.StartedAt)
	})
	if q.orderBy == "desc" {
		slices.Reverse(taken)
	}
	total := len(taken)
	taken = taken[min(q.offset, total):]
	taken = taken[:min(q.limit, len(taken))]
	reply(w, http.StatusOK, map[string]any{"count": len(taken), "totalCount": total, "applyResults": taken})
}
