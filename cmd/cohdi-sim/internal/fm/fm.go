// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
)

const (
	base      = "/fabric_manager/api/v1"
	errorCode = "E02XXXX"
	caller    = "fm"
	maxBody   = 1 << 20
)

// Tokens checks the token of a request.
type Tokens interface {
	Check(r *http.Request) error
}

// Face serves the manager's API.
type Face struct {
	core    *core.Core
	tokens  Tokens
	tenant  string
	fabrics map[int]string
	// numbers are the machines' places in the list, by uuid.
	numbers map[string]int
}

// New puts the face in front of a core.
func New(c *core.Core, tokens Tokens, cfg *config.Config) *Face {
	f := &Face{core: c, tokens: tokens, tenant: cfg.Tenant, fabrics: map[int]string{}, numbers: map[string]int{}}
	for _, fabric := range cfg.Fabrics {
		f.fabrics[fabric.ID] = fabric.UUID
	}
	for i := range cfg.Machines {
		f.numbers[cfg.Machines[i].UUID] = i + 1
	}
	return f
}

// Handler is the face; paths it does not know are answered by the mux.
func (f *Face) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+base+"/machines", f.list)
	mux.HandleFunc("GET "+base+"/machines/{machine}", f.get)
	mux.HandleFunc("GET "+base+"/machines/{machine}/available-reserved-resources", f.available)
	mux.HandleFunc("PATCH "+base+"/machines/{machine}/update", f.attach)
	mux.HandleFunc("DELETE "+base+"/machines/{machine}/update", f.detach)
	return f.guard(mux)
}

// guard checks what every call needs: a token and the tenant.
func (f *Face) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := f.tokens.Check(r); err != nil {
			refuse(w, http.StatusUnauthorized, err.Error(), nil)
			return
		}
		switch r.URL.Query().Get("tenant_uuid") {
		case f.tenant:
			next.ServeHTTP(w, r)
		case "":
			refuse(w, http.StatusBadRequest, "tenant_uuid is missing", nil)
		default:
			refuse(w, http.StatusNotFound, "tenant not found", nil)
		}
	})
}

func (f *Face) list(w http.ResponseWriter, _ *http.Request) {
	var e envelope
	e.Data.Machines = []machine{}
	for i, v := range f.core.Machines() {
		e.Data.Machines = append(e.Data.Machines, f.machine(v, i+1))
	}
	reply(w, http.StatusOK, e)
}

func (f *Face) get(w http.ResponseWriter, r *http.Request) {
	v, n, ok := f.find(w, r)
	if !ok {
		return
	}
	var e envelope
	e.Data.Machines = []machine{f.machine(v, n)}
	reply(w, http.StatusOK, e)
}

// find answers 404 itself. Machines are known by uuid only, as the real manager does.
func (f *Face) find(w http.ResponseWriter, r *http.Request) (core.MachineView, int, bool) {
	uuid := r.PathValue("machine")
	if n, known := f.numbers[uuid]; known {
		if v, err := f.core.Machine(uuid); err == nil {
			return v, n, true
		}
	}
	refuse(w, http.StatusNotFound, "machine not found", nil)
	return core.MachineView{}, 0, false
}

func (f *Face) machine(v core.MachineView, n int) machine {
	m := f.brief(v, n)
	detail := "ACTIVE PON"
	if !v.Power {
		detail = "INACTIVE POFF"
	}
	m.machineDetail = &machineDetail{
		Status: 15, OpStatus: "00", StatusDetail: detail, Owner: "AnonymousUser",
		LANPorts: []lanPort{{
			UUID: fmt.Sprintf("aa00aa00-6666-4e00-9500-%012d", n), SubnetUUID: "bb00bb00-6666-4e00-9500-000000000001",
			MAC: fmt.Sprintf("02:00:5e:00:00:%02x", n&0xff), Class: "00000", IP: fmt.Sprintf("192.0.2.%d", n&0xff),
		}},
	}
	m.Resources = []resource{{
		UUID: fmt.Sprintf("c0c0c0c0-3333-4b00-8200-%012d", n), Name: "pcpu0", Type: "compute", Status: 4, OpStatus: "00",
	}}
	for _, d := range v.Listed {
		m.Resources = append(m.Resources, gpuResource(d, true))
	}
	return m
}

func (f *Face) brief(v core.MachineView, n int) machine {
	return machine{
		FabricUUID: f.fabrics[v.Fabric], FabricID: v.Fabric, UUID: v.UUID, ID: n, Name: v.Name, TenantUUID: f.tenant,
		Resources: []resource{},
	}
}

func (f *Face) available(w http.ResponseWriter, r *http.Request) {
	v, _, ok := f.find(w, r)
	if !ok {
		return
	}
	q := r.URL.Query()
	if q.Get("res_type") != gpuType {
		refuse(w, http.StatusBadRequest, "res_type is missing or not known here", nil)
		return
	}
	model, err := decodeCondition(q.Get("condition"))
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error(), nil)
		return
	}
	fabric, count, known, err := f.core.Free(v.Name, model)
	if err != nil {
		f.fail(w, err, v)
		return
	}
	if !known && f.core.Policies().UnknownModel == "404" {
		refuse(w, http.StatusNotFound, "no such model", nil)
		return
	}
	reply(w, http.StatusOK, available{FabricID: fabric, Reserved: count})
}

// update reads the body that both kinds of update have.
func (f *Face) update(w http.ResponseWriter, r *http.Request) (core.MachineView, int, []spec, bool) {
	v, n, ok := f.find(w, r)
	if !ok {
		return v, 0, nil, false
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return v, 0, nil, false // the client has gone
	}
	specs, err := decodeUpdate(body, v.UUID, f.tenant)
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error(), nil)
		return v, 0, nil, false
	}
	return v, n, specs, true
}

func (f *Face) attach(w http.ResponseWriter, r *http.Request) {
	v, n, specs, ok := f.update(w, r)
	if !ok {
		return
	}
	wanted, err := attachSpecs(specs)
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error(), nil)
		return
	}
	devices, err := f.core.Attach(r.Context(), core.AttachRequest{
		Machine: v.Name, Specs: wanted, Caller: caller, Limit: fault.Limit(r.Context()),
	})
	if err != nil {
		f.fail(w, err, v)
		return
	}
	var e envelope
	m := f.brief(v, n)
	if m.Resources, err = f.attached(v, n, devices); err != nil {
		f.fail(w, err, v)
		return
	}
	e.Data.Machines = []machine{m}
	reply(w, http.StatusOK, e)
}

// attached is what the answer to an attach lists, by policy.
func (f *Face) attached(v core.MachineView, n int, devices []core.Device) ([]resource, error) {
	policy := f.core.Policies().AttachAnswer
	out := []resource{}
	switch policy {
	case "empty":
	case "allResources", "reordered":
		now, err := f.core.Machine(v.Name)
		if err != nil {
			return nil, err
		}
		out = f.machine(now, n).Resources
		if policy == "reordered" {
			slices.Reverse(out)
		}
	default: // newOnly, withoutSerial
		for _, d := range devices {
			out = append(out, gpuResource(d, policy != "withoutSerial"))
		}
	}
	return out, nil
}

func (f *Face) detach(w http.ResponseWriter, r *http.Request) {
	v, _, specs, ok := f.update(w, r)
	if !ok {
		return
	}
	uuids, err := detachUUIDs(specs)
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error(), nil)
		return
	}
	for _, id := range uuids {
		err := f.core.Detach(r.Context(), core.DetachRequest{Machine: v.Name, Device: id, Caller: caller})
		if errors.Is(err, core.ErrNotFound) && f.core.Policies().UnknownDetach == "200" {
			continue
		}
		if err != nil {
			f.fail(w, err, v)
			return
		}
	}
	if f.core.Policies().DetachAnswer == "204" {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	reply(w, http.StatusOK, map[string]string{"status": "success"})
}

// fail answers with the manager's words for an error of the core.
func (f *Face) fail(w http.ResponseWriter, err error, v core.MachineView) {
	switch {
	case errors.Is(err, context.Canceled):
		// The client has gone; what it asked for goes on.
	case errors.Is(err, core.ErrNoCapacity):
		f.noCapacity(w, v)
	case errors.Is(err, core.ErrBusy):
		refuse(w, http.StatusConflict, core.ErrBusy.Error(), map[string]string{"mach_uuid": v.UUID})
	case errors.Is(err, core.ErrNotFound):
		refuse(w, http.StatusNotFound, "resource not found", nil)
	case errors.Is(err, core.ErrNoSlot), errors.Is(err, core.ErrInUse):
		refuse(w, http.StatusConflict, err.Error(), map[string]string{"mach_uuid": v.UUID})
	case errors.Is(err, core.ErrStopped):
		// As a manager that is killed: nobody gets an answer.
		panic(http.ErrAbortHandler)
	default:
		refuse(w, http.StatusInternalServerError, err.Error(), nil)
	}
}

func (f *Face) noCapacity(w http.ResponseWriter, v core.MachineView) {
	switch f.core.Policies().NoCapacity {
	case "409":
		refuse(w, http.StatusConflict, core.ErrNoCapacity.Error(), nil)
	case "400":
		refuse(w, http.StatusBadRequest, core.ErrNoCapacity.Error(), nil)
	case "empty200":
		var e envelope
		e.Data.Machines = []machine{f.brief(v, 1)}
		reply(w, http.StatusOK, e)
	default: // 404mock
		reply(w, http.StatusNotFound, map[string]string{"error": "no_available_resources", "message": core.ErrNoCapacity.Error()})
	}
}

func refuse(w http.ResponseWriter, status int, message string, data any) {
	reply(w, status, errorBody{Status: status, Detail: errorDetail{Code: errorCode, Message: message, Data: data}})
}

func reply(w http.ResponseWriter, status int, body any) {
	data, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(data) //nolint:errcheck // the client has gone
}
