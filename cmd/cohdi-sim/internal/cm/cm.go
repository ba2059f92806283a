// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
)

const (
	base      = "/cluster_manager/cluster_autoscaler"
	errorCode = "E03XXXX"
	caller    = "cm"
	maxBody   = 1 << 20

	groupUUID = "0a0a0a0a-9999-4200-a800-000000000001"
	groupName = "gpu-nodes"
)

// Tokens checks the token of a request.
type Tokens interface {
	Check(r *http.Request) error
}

// Face serves the manager's API.
type Face struct {
	core    *core.Core
	tokens  Tokens
	clk     clock.PassiveClock
	cfg     *config.Config
	fabrics map[int]string
	// machines are their uuids, in the order of the configuration.
	machines []string
	// models of the chassis, in the order of the configuration.
	models []string

	// mu makes reading what there is and beginning a change one step. It also guards shortfalls.
	mu         sync.Mutex
	shortfalls map[place][]shortfall
}

// place is a specification of a machine, both by what the core calls them.
type place struct{ machine, model string }

// shortfall is an attach that found no device.
type shortfall struct{ since time.Time }

// New puts the face in front of a core.
func New(c *core.Core, tokens Tokens, cfg *config.Config, clk clock.PassiveClock) *Face {
	f := &Face{core: c, tokens: tokens, clk: clk, cfg: cfg, fabrics: map[int]string{}, shortfalls: map[place][]shortfall{}}
	for _, fabric := range cfg.Fabrics {
		f.fabrics[fabric.ID] = fabric.UUID
	}
	for i := range cfg.Machines {
		f.machines = append(f.machines, cfg.Machines[i].UUID)
	}
	seen := map[string]bool{}
	for i := range cfg.Devices {
		if m := cfg.Devices[i].Model; !seen[m] {
			seen[m] = true
			f.models = append(f.models, m)
		}
	}
	return f
}

// Handler is the face; paths it does not know are answered by the mux.
func (f *Face) Handler() http.Handler {
	mux := http.NewServeMux()
	const cluster = "/tenants/{tenant}/clusters/{cluster}"
	for pattern, h := range map[string]http.HandlerFunc{
		"GET " + base + "/v3" + cluster + "/machines/{machine}":                 f.get,
		"POST " + base + "/v3" + cluster + "/machines/{machine}/actions/resize": f.resize,
		"GET " + base + "/v2" + cluster + "/nodegroups":                         f.groups,
		"GET " + base + "/v2" + cluster + "/nodegroups/{group}":                 f.group,
	} {
		mux.HandleFunc(pattern, f.guard(h))
	}
	return mux
}

// guard checks what every call needs: a token, the tenant and the cluster.
func (f *Face) guard(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := f.tokens.Check(r); err != nil {
			f.refuse(w, http.StatusUnauthorized, err.Error())
			return
		}
		if r.PathValue("tenant") != f.cfg.Tenant || r.PathValue("cluster") != f.cfg.CM.Cluster {
			f.refuse(w, http.StatusNotFound, "tenant or cluster not found")
			return
		}
		next(w, r)
	}
}

func (f *Face) groups(w http.ResponseWriter, _ *http.Request) {
	reply(w, groups{Groups: []group{{UUID: groupUUID, Name: groupName}}})
}

func (f *Face) group(w http.ResponseWriter, r *http.Request) {
	if r.PathValue("group") != groupUUID {
		f.refuse(w, http.StatusNotFound, "no such node group")
		return
	}
	reply(w, group{UUID: groupUUID, Name: groupName, Machines: f.machines})
}

func (f *Face) get(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, ok := f.find(r)
	if !ok {
		f.refuse(w, http.StatusNotFound, "no such machine")
		return
	}
	if err := f.tidy(&v); err != nil {
		f.fail(w, err)
		return
	}
	var e envelope
	e.Data.TenantUUID, e.Data.Cluster.UUID = f.cfg.Tenant, f.cfg.CM.Cluster
	e.Data.Cluster.Machine = f.machine(&v)
	reply(w, e)
}

// find knows machines by uuid only, as the real manager does.
func (f *Face) find(r *http.Request) (core.MachineView, bool) {
	v, err := f.core.Machine(r.PathValue("machine"))
	return v, err == nil && v.UUID == r.PathValue("machine")
}

// resize reads what is asked for and answers when it is accepted.
func (f *Face) resize(w http.ResponseWriter, r *http.Request) {
	v, ok := f.find(r)
	if !ok {
		f.refuse(w, http.StatusNotFound, "no such machine")
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return // the client has gone
	}
	c, isRemoval, err := decodeResize(body)
	if err != nil {
		f.refuse(w, http.StatusBadRequest, err.Error())
		return
	}
	limit := fault.Limit(r.Context())
	err = f.core.Exclusively(r.Context(), v.Name, func() (<-chan struct{}, error) { return f.begin(v.Name, c, isRemoval, limit) })
	if err != nil {
		f.fail(w, err)
		return
	}
	switch f.core.Policies().CM.Answer {
	case "empty":
		w.WriteHeader(http.StatusAccepted)
	case "text":
		w.Header().Set("Content-Type", "text/plain")
		_, _ = io.WriteString(w, "accepted\n") //nolint:errcheck // the client has gone
	default:
		reply(w, map[string]string{"status": "success"})
	}
}

// begin changes what the machine is to have, from how it stands now. limit is how many devices really come.
func (f *Face) begin(name string, c change, isRemoval bool, limit int) (<-chan struct{}, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, err := f.core.Machine(name)
	if err != nil {
		return nil, err
	}
	model, known := f.modelOf(v.Fabric, c.Spec)
	switch {
	case !known:
		return nil, refusal{http.StatusNotFound, "no such spec"}
	case isRemoval:
		return f.remove(&v, model, c)
	}
	return f.increase(&v, model, *c.Count, limit)
}

// refusal is an answer other than 2xx.
type refusal struct {
	status  int
	message string
}

func (r refusal) Error() string { return r.message }

// fail answers with the manager's words for an error.
func (f *Face) fail(w http.ResponseWriter, err error) {
	var no refusal
	switch {
	case errors.As(err, &no):
		f.refuse(w, no.status, no.message)
	case errors.Is(err, context.Canceled):
		// The client has gone.
	case errors.Is(err, core.ErrNotFound):
		f.refuse(w, http.StatusNotFound, err.Error())
	case errors.Is(err, core.ErrBusy), errors.Is(err, core.ErrNoCapacity), errors.Is(err, core.ErrNoSlot), errors.Is(err, core.ErrInUse):
		f.refuse(w, http.StatusConflict, err.Error())
	case errors.Is(err, core.ErrStopped):
		// As a manager that is killed: nobody gets an answer.
		panic(http.ErrAbortHandler)
	default:
		f.refuse(w, http.StatusInternalServerError, err.Error())
	}
}

func (f *Face) refuse(w http.ResponseWriter, status int, message string) {
	switch f.core.Policies().CM.Refusal {
	case "empty":
		w.WriteHeader(status)
	case "html":
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "<html><body>"+http.StatusText(status)+"</body></html>") //nolint:errcheck // the client has gone
	default:
		write(w, status, errorBody{Status: status, Detail: errorDetail{Code: errorCode, Message: message}})
	}
}

func reply(w http.ResponseWriter, body any) { write(w, http.StatusOK, body) }

func write(w http.ResponseWriter, status int, body any) {
	data, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(data) //nolint:errcheck // the client has gone
}
