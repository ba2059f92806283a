// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/idm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const (
	caller  = "control"
	maxBody = 1 << 20
)

var errNotReady = errors.New("not all faces serve yet")

// API serves the control API.
type API struct {
	Core   *core.Core
	Faults *fault.Injector
	Tokens *idm.Manager
	// Ready tells whether all faces serve; HostRoot is the directory of a machine's host root.
	Ready    func() bool
	HostRoot func(machine string) string
	// Jobs are a CDIM's; nil where none is served.
	Jobs Jobs
	// Sessions are a Redfish service's; nil where none is served.
	Sessions Sessions
}

// Jobs are what a person can do with the jobs of a CDIM, and what a crash does.
type Jobs interface {
	Jobs() []simapi.Job
	ChangeJob(id string, change simapi.JobChange) error
	LoseWorker() error
}

// Sessions are what a Redfish service forgets when it restarts.
type Sessions interface {
	EndSessions()
	ForgetTasks()
}

// Handler is the API.
func (a *API) Handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, h := range map[string]func(r *http.Request) (any, error){
		"GET /ready":           a.ready,
		"GET /state":           a.state,
		"GET /log":             func(*http.Request) (any, error) { return a.Faults.Log(), nil },
		"GET /violations":      func(*http.Request) (any, error) { return a.Core.Violations(), nil },
		"DELETE /violations":   func(*http.Request) (any, error) { return nil, a.Core.ClearViolations() },
		"GET /fault":           func(*http.Request) (any, error) { return a.Faults.Rules(), nil },
		"POST /fault":          a.addFault,
		"DELETE /fault":        a.clearFaults,
		"POST /device/{id}":    a.device,
		"POST /machine/{name}": a.machine,
		"POST /timing":         a.timing,
		"POST /policies":       a.policies,
		"POST /token":          a.token,
		"POST /attach":         a.attach,
		"POST /detach":         a.detach,
		"GET /job":             a.jobs,
		"POST /job/{id}":       a.job,
		"POST /loseWorker":     a.loseWorker,
		"POST /forgetTasks":    a.forgetTasks,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			out, err := h(r)
			answer(w, out, err)
		})
	}
	return mux
}

// badRequest marks errors of the caller.
type badRequest struct{ error }

func decode[T any](r *http.Request) (T, error) {
	var out T
	data, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return out, badRequest{fmt.Errorf("read body: %w", err)}
	}
	d := json.NewDecoder(bytes.NewReader(data))
	// A misspelt field would make a test that proves nothing.
	d.DisallowUnknownFields()
	if err := d.Decode(&out); err != nil {
		return out, badRequest{fmt.Errorf("read body: %w", err)}
	}
	return out, nil
}

func answer(w http.ResponseWriter, out any, err error) {
	status := http.StatusOK
	if err != nil {
		status = statusOf(err)
		out = simapi.ErrorBody{Error: err.Error()}
	} else if out == nil {
		out = struct{}{}
	}
	data, err := json.Marshal(out)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n')) //nolint:errcheck // the client has gone
}

func statusOf(err error) int {
	var bad badRequest
	switch {
	case errors.As(err, &bad):
		return http.StatusBadRequest
	case errors.Is(err, core.ErrNotFound):
		return http.StatusNotFound
	case errors.Is(err, core.ErrBusy), errors.Is(err, core.ErrInUse), errors.Is(err, core.ErrNoSlot), errors.Is(err, core.ErrNoCapacity):
		return http.StatusConflict
	case errors.Is(err, errNotReady):
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

var errNoCDIM = badRequest{errors.New("no CDIM is served")}

func (a *API) jobs(*http.Request) (any, error) {
	if a.Jobs == nil {
		return nil, errNoCDIM
	}
	return a.Jobs.Jobs(), nil
}

func (a *API) job(r *http.Request) (any, error) {
	change, err := decode[simapi.JobChange](r)
	if err != nil {
		return nil, err
	}
	if a.Jobs == nil {
		return nil, errNoCDIM
	}
	return nil, refused(a.Jobs.ChangeJob(r.PathValue("id"), change))
}

func (a *API) loseWorker(*http.Request) (any, error) {
	if a.Jobs == nil {
		return nil, errNoCDIM
	}
	return nil, a.Jobs.LoseWorker()
}

func (a *API) forgetTasks(*http.Request) (any, error) {
	if a.Sessions == nil {
		return nil, badRequest{errors.New("no Redfish service is served")}
	}
	a.Sessions.ForgetTasks()
	return nil, nil //nolint:nilnil // an empty answer
}

func (a *API) ready(*http.Request) (any, error) {
	if !a.Ready() {
		return nil, errNotReady
	}
	return nil, nil //nolint:nilnil // an empty answer
}

func (a *API) state(*http.Request) (any, error) {
	s := a.Core.State()
	s.Logins = a.Tokens.Logins()
	for i := range s.Machines {
		s.Machines[i].HostRoot = a.HostRoot(s.Machines[i].Name)
	}
	return s, nil
}

func (a *API) addFault(r *http.Request) (any, error) {
	f, err := decode[simapi.Fault](r)
	if err != nil {
		return nil, err
	}
	if f.Face != "" && !slices.Contains(simapi.Faces(), f.Face) {
		return nil, badRequest{fmt.Errorf("face %q is none of %s", f.Face, strings.Join(simapi.Faces(), ", "))}
	}
	out, err := a.Faults.Add(f)
	if err != nil {
		return nil, badRequest{err}
	}
	return out, nil
}

func (a *API) clearFaults(r *http.Request) (any, error) {
	a.Faults.Clear(r.URL.Query().Get("name"))
	return nil, nil //nolint:nilnil // an empty answer
}

func (a *API) device(r *http.Request) (any, error) {
	change, err := decode[simapi.DeviceChange](r)
	if err != nil {
		return nil, err
	}
	return nil, refused(a.Core.ChangeDevice(r.PathValue("id"), change))
}

func (a *API) machine(r *http.Request) (any, error) {
	change, err := decode[simapi.MachineChange](r)
	if err != nil {
		return nil, err
	}
	return nil, refused(a.Core.ChangeMachine(r.PathValue("name"), change))
}

// refused turns what the core finds meaningless into a bad request.
func refused(err error) error {
	if err == nil || statusOf(err) != http.StatusInternalServerError {
		return err
	}
	return badRequest{err}
}

func (a *API) timing(r *http.Request) (any, error) {
	t, err := decode[simapi.Timing](r)
	if err != nil {
		return nil, err
	}
	a.Core.SetTiming(t)
	return nil, nil //nolint:nilnil // an empty answer
}

func (a *API) policies(r *http.Request) (any, error) {
	p, err := decode[simapi.Policies](r)
	if err != nil {
		return nil, err
	}
	return nil, refused(a.Core.SetPolicies(p))
}

func (a *API) token(r *http.Request) (any, error) {
	t, err := decode[simapi.TokenChange](r)
	if err != nil {
		return nil, err
	}
	if t.Lifetime != nil {
		a.Tokens.SetLifetime(time.Duration(*t.Lifetime))
	}
	if t.RevokeAll {
		a.Tokens.RevokeAll()
		if a.Sessions != nil {
			a.Sessions.EndSessions()
		}
	}
	return nil, nil //nolint:nilnil // an empty answer
}

func (a *API) attach(r *http.Request) (any, error) {
	req, err := decode[simapi.AttachRequest](r)
	if err != nil {
		return nil, err
	}
	_, err = a.Core.Attach(r.Context(), core.AttachRequest{
		Machine: req.Machine, Specs: []core.Spec{{Device: req.Device, Count: 1}}, Caller: caller, Limit: -1,
	})
	return nil, err
}

func (a *API) detach(r *http.Request) (any, error) {
	req, err := decode[simapi.DetachRequest](r)
	if err != nil {
		return nil, err
	}
	return nil, a.Core.Detach(r.Context(), core.DetachRequest{Device: req.Device, Caller: caller, Forced: true})
}
