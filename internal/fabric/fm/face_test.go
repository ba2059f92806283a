// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const (
	tenant   = "5f0c2a10-7d1e-4c55-9a40-000000000001"
	username = "agent"
	password = "p&w=d+100% s\"ure"
	secret   = "s3cret/&="
	realm    = "some realm"
)

// face is a Fabric Manager and its id_manager on a local port, with a chassis behind them.
type face struct {
	t      *testing.T
	server *httptest.Server
	dir    string // the client's credentials

	mu        sync.Mutex
	devices   []*hardware
	fate      fabrictest.Fate
	failReads map[device.Machine]bool
	refuse    bool
	token     string // the only one that is good
	logins    int
	lifetime  int
	requests  []string
	hung      chan struct{}
	// override answers a request in place of the face if it returns true.
	override func(w http.ResponseWriter, r *http.Request) bool
}

type hardware struct {
	id, model, uuid string
	machine         device.Machine
}

func newFace(t *testing.T) *face {
	t.Helper()
	f := &face{
		t: t, dir: t.TempDir(), lifetime: 300, hung: make(chan struct{}),
		failReads: make(map[device.Machine]bool),
		devices: []*hardware{
			{id: "71e0aa00-3333-4b00-a200-000000000001", model: fabrictest.ModelA, uuid: "GPU-0d5c7e11-4444-4c00-b300-000000000001"},
			{id: "71e0aa00-3333-4b00-a200-000000000002", model: fabrictest.ModelA, uuid: "GPU-0d5c7e11-4444-4c00-b300-000000000002"},
			{id: "71e0aa00-3333-4b00-a200-000000000003", model: fabrictest.ModelB, uuid: "GPU-0d5c7e11-4444-4c00-b300-000000000003"},
		},
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /id_manager/realms/{realm}/protocol/openid-connect/token", f.login)
	mux.HandleFunc("GET "+base+"/machines", f.guard(f.listAll))
	mux.HandleFunc("GET "+base+"/machines/{m}", f.guard(f.listOne))
	mux.HandleFunc("GET "+base+"/machines/{m}/available-reserved-resources", f.guard(f.available))
	mux.HandleFunc("PATCH "+base+"/machines/{m}/update", f.guard(f.changing))
	mux.HandleFunc("DELETE "+base+"/machines/{m}/update", f.guard(f.changing))
	f.server = httptest.NewUnstartedServer(mux)
	f.server.EnableHTTP2 = true
	f.server.StartTLS()
	t.Cleanup(func() {
		close(f.hung)
		f.server.CloseClientConnections()
		f.server.Close()
	})
	for name, content := range map[string]string{
		"username": username + "\n", "password": password, "client_id": "cdi", "client_secret": secret, "realm": realm,
		"ca.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.server.Certificate().Raw})),
	} {
		f.file(name, content)
	}
	return f
}

func (f *face) file(name, content string) {
	f.t.Helper()
	if err := os.WriteFile(filepath.Join(f.dir, name), []byte(content), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *face) client(change ...func(*Config)) *Client {
	f.t.Helper()
	cfg := Config{Endpoint: f.server.Listener.Addr().String(), Tenant: tenant, Credentials: f.dir}
	for _, c := range change {
		c(&cfg)
	}
	c, err := New(cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		if err := c.Close(f.t.Context()); err != nil {
			f.t.Error(err)
		}
	})
	return c
}

func (f *face) login(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, "login")
	if f.override != nil && f.override(w, r) {
		return
	}
	if err := r.ParseForm(); err != nil {
		if r.Context().Err() == nil { // a client that gave up sends no form
			f.t.Error(err)
		}
		return
	}
	want := map[string]string{
		"username": username, "password": password, "client_id": "cdi", "client_secret": secret,
		"grant_type": "password", "scope": "openid", "response_type": "id_token token",
	}
	for k, v := range want {
		if f.refuse || r.PostForm.Get(k) != v || r.PathValue("realm") != realm {
			// It echoes what it should not, as a debug proxy would.
			respond(w, http.StatusUnauthorized, map[string]any{"error": "invalid_grant", "error_description": "bad: " + r.PostForm.Encode()})
			return
		}
	}
	f.logins++
	f.token = fmt.Sprintf("token-%d", f.logins)
	respond(w, http.StatusOK, map[string]any{"access_token": f.token, "expires_in": f.lifetime, "token_type": "Bearer"})
}

func (f *face) guard(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.requests = append(f.requests, r.Method+" "+strings.TrimPrefix(r.URL.Path, base))
		if f.override != nil && f.override(w, r) {
			return
		}
		if r.Header.Get("Authorization") != "Bearer "+f.token {
			respond(w, http.StatusUnauthorized, refusalBody(401, "E020401", "token expired"))
			return
		}
		if r.URL.Query().Get("tenant_uuid") != tenant {
			respond(w, http.StatusNotFound, refusalBody(404, "E020404", "tenant not found"))
			return
		}
		m := device.Machine(r.PathValue("m"))
		if m != "" && m != fabrictest.MachineOne && m != fabrictest.MachineTwo {
			respond(w, http.StatusNotFound, refusalBody(404, "E020404", "machine not found"))
			return
		}
		if r.Method == http.MethodGet && (f.failReads[m] || f.failReads[""]) {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(http.StatusBadGateway)
			io.WriteString(w, "<html><body>Bad\n Gateway</body></html>")
			return
		}
		next(w, r)
	}
}

func (f *face) listAll(w http.ResponseWriter, _ *http.Request) {
	respond(w, http.StatusOK, frame(f.machine(fabrictest.MachineOne), f.machine(fabrictest.MachineTwo)))
}

func (f *face) listOne(w http.ResponseWriter, r *http.Request) {
	respond(w, http.StatusOK, frame(f.machine(device.Machine(r.PathValue("m")))))
}

func (f *face) machine(m device.Machine, only ...*hardware) map[string]any {
	resources := []any{map[string]any{"res_uuid": "c0", "res_type": "compute", "res_op_status": "00"}}
	for _, d := range f.devices {
		if d.machine == m && (len(only) == 0 || slices.Contains(only, d)) {
			resources = append(resources, map[string]any{
				"res_uuid": d.id, "res_type": "gpu", "res_op_status": "00", "res_serial_num": d.uuid, "res_status": 4,
				"res_spec": map[string]any{"condition": []any{map[string]any{"column": "model", "operator": "eq", "value": d.model}}},
			})
		}
	}
	return map[string]any{"mach_uuid": m, "fabric_id": 0, "mach_name": "n", "mach_status_detail": "ACTIVE PON", "resources": resources}
}

func (f *face) available(w http.ResponseWriter, r *http.Request) {
	var c struct{ Column, Operator, Value string }
	q := r.URL.Query()
	if err := json.Unmarshal([]byte(q.Get("condition")), &c); err != nil || c.Column != "model" || c.Operator != "eq" || q.Get("res_type") != "gpu" {
		respond(w, http.StatusBadRequest, refusalBody(400, "E020400", "condition"))
		return
	}
	respond(w, http.StatusOK, map[string]any{"fabric_id": 0, "reserved_res_num_per_fabric": f.free(c.Value)})
}

func (f *face) free(model string) int {
	n := 0
	for _, d := range f.devices {
		if d.model == model && d.machine == "" {
			n++
		}
	}
	return n
}

// changing applies the fate around an attach or detach.
func (f *face) changing(w http.ResponseWriter, r *http.Request) {
	fate := f.fate
	f.fate = ""
	switch fate {
	case fabrictest.Busy:
		respond(w, http.StatusConflict, refusalBody(409, "E020409", "another operation is in progress"))
		return
	case fabrictest.LostBefore:
		panic(http.ErrAbortHandler)
	case fabrictest.ErrorBefore:
		http.Error(w, "<html>oops</html>", http.StatusInternalServerError)
		return
	case fabrictest.Hang:
		f.mu.Unlock()
		select {
		case <-r.Context().Done():
		case <-f.hung:
		}
		f.mu.Lock()
		return
	case fabrictest.CredentialsEnded:
		f.token = "revoked"
		respond(w, http.StatusUnauthorized, refusalBody(401, "E020401", "token revoked"))
		return
	default: // the work comes first
	}
	rec := httptest.NewRecorder()
	f.update(rec, r)
	switch fate {
	case fabrictest.LostAfter:
		panic(http.ErrAbortHandler)
	case fabrictest.ErrorAfter:
		http.Error(w, "", http.StatusGatewayTimeout)
	case fabrictest.Truncated:
		w.WriteHeader(rec.Code)
		w.Write(rec.Body.Bytes()[:rec.Body.Len()/2])
	case fabrictest.NoWords:
		w.WriteHeader(http.StatusAccepted)
	default:
		w.WriteHeader(rec.Code)
		w.Write(rec.Body.Bytes())
	}
}

func (f *face) update(w http.ResponseWriter, r *http.Request) {
	var u update
	if err := json.NewDecoder(r.Body).Decode(&u); err != nil || u.Tenants.UUID != tenant || len(u.Tenants.Machines) != 1 ||
		u.Tenants.Machines[0].UUID != r.PathValue("m") {
		respond(w, http.StatusBadRequest, refusalBody(400, "E020400", "body"))
		return
	}
	m := device.Machine(r.PathValue("m"))
	spec := u.Tenants.Machines[0].Resources[0].Specs[0]
	for _, d := range f.devices {
		switch {
		case r.Method == http.MethodDelete && d.id == spec.Device && d.machine == m:
			d.machine = ""
			respond(w, http.StatusOK, map[string]any{"status": "success"})
			return
		case r.Method == http.MethodPatch && d.machine == "" && d.model == string(spec.Spec.Condition[0].Value) && spec.Count == 1:
			d.machine = m
			respond(w, http.StatusOK, frame(f.machine(m, d)))
			return
		}
	}
	respond(w, http.StatusNotFound, refusalBody(404, "E020404", map[string]any{"text": "no such resource"}))
}

func frame(machines ...any) map[string]any {
	return map[string]any{"data": map[string]any{"machines": machines}}
}

func refusalBody(status int, code string, message any) map[string]any {
	return map[string]any{"status": status, "detail": map[string]any{"code": code, "message": message}}
}

func respond(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body)
}

// The following make the face a fabrictest.Control.

func (f *face) Attached(m device.Machine) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var ids []string
	for _, d := range f.devices {
		if d.machine == m {
			ids = append(ids, d.id)
		}
	}
	return ids
}

func (f *face) FreeCount(model string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.free(model)
}

func (f *face) Fate(fate fabrictest.Fate) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fate = fate
	return true
}

func (f *face) FailReads(m device.Machine, fail bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failReads[m] = fail
}

func (f *face) Shut() {
	f.server.CloseClientConnections()
	f.server.Listener.Close()
}

func (f *face) RefuseLogin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse, f.token = true, "revoked"
}

func (f *face) log() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.requests)
}
