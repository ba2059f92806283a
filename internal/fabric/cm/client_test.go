// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"encoding/pem"
	"errors"
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
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

const (
	prefix      = base + "/v3/tenants/t/clusters/c/machines/"
	machinePath = prefix + string(id)
)

// face answers as the test says; what it was asked is kept. How a whole manager behaves is for the conformance
// suite, which runs against the simulator's face.
type face struct {
	t      *testing.T
	server *httptest.Server
	dir    string

	mu sync.Mutex // guards the following
	// machine is the answer to a read of the machine, free that of the Fabric Manager.
	machine, free string
	// status and body are the answer to a resize.
	status int
	body   string
	asked  []string
}

func newFace(t *testing.T, machine string) *face {
	t.Helper()
	f := &face{t: t, dir: t.TempDir(), machine: machine, free: "1", status: 200, body: `{"status":"success"}`}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /id_manager/realms/r/protocol/openid-connect/token", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"access_token":"token-1","expires_in":300}`)
	})
	mux.HandleFunc("GET "+machinePath, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, f.machine) })
	mux.HandleFunc("POST "+machinePath+"/actions/resize", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.Header.Get("Content-Type") != "application/json" {
			t.Errorf("resize as %q: %v", r.Header.Get("Content-Type"), err)
		}
		f.asked = append(f.asked, string(body))
		w.Header().Set("Location", "/elsewhere")
		w.WriteHeader(f.status)
		io.WriteString(w, f.body)
	})
	mux.HandleFunc("GET /fabric_manager/api/v1/machines", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"data":{"machines":[{"mach_uuid":%q,"fabric_id":0}]}}`, id)
	})
	mux.HandleFunc("GET /fabric_manager/api/v1/machines/{m}/available-reserved-resources", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"fabric_id":0,"reserved_res_num_per_fabric":%s}`, f.free)
	})
	f.server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if r.Method == http.MethodGet && r.URL.RawQuery != "" && strings.HasPrefix(r.URL.Path, base) {
			t.Errorf("a query: %s", r.URL)
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(f.server.Close)
	for name, content := range map[string]string{
		"username": "u", "password": "p", "client_id": "i", "realm": "r",
		"ca.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.server.Certificate().Raw})),
	} {
		if err := os.WriteFile(filepath.Join(f.dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func (f *face) client() *Client {
	f.t.Helper()
	c, err := New(Config{
		Endpoint: strings.TrimPrefix(f.server.URL, "https://"), Tenant: "t", Cluster: "c", Credentials: f.dir, FabricManager: true,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return c
}

func wantFault(t *testing.T, err error, class device.FaultClass) *device.Fault {
	t.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok {
		t.Fatalf("error = %v (%T), want a *device.Fault", err, err)
	}
	if f.Class != class || f.Op == "" {
		t.Errorf("fault = %v, want class %s and what was tried", err, class)
	}
	return f
}

func TestNew(t *testing.T) {
	good := Config{Endpoint: "cm.example:8443", Tenant: "t", Cluster: "c", Credentials: "/x", FabricManager: true}
	for _, tt := range []struct {
		name   string
		change func(*Config)
		err    string
	}{
		{"good", func(*Config) {}, ""},
		{"plain HTTP", func(c *Config) { c.Endpoint = "http://cm.example" }, "not of the form"},
		{"no tenant", func(c *Config) { c.Tenant = "" }, "tenant or cluster is empty"},
		{"no cluster", func(c *Config) { c.Cluster = "" }, "tenant or cluster is empty"},
		{"no credentials", func(c *Config) { c.Credentials = "" }, "credentials directory is empty"},
	} {
		cfg := good
		tt.change(&cfg)
		_, err := New(cfg)
		if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: error = %v, want one that contains %q", tt.name, err, tt.err)
		}
	}
}

// TestBodies: what goes over the wire.
func TestBodies(t *testing.T) {
	f := newFace(t, machineJSON("2", free8,
		rowJSON(gpu(1), "ADD_COMPLETE", "", detailJSON("r1", `"00"`)), rowJSON(gpu(2), "ADD_COMPLETE", "", "{}")))
	c := f.client()
	op, err := c.Attach(t.Context(), fabric.Intent{Machine: id, Model: "A100"})
	if err != nil || op.State != fabric.Pending || op.PollAfter <= 0 || !slices.Equal(op.Intent.Before, []string{gpu(1), gpu(2)}) {
		t.Errorf("attach = %+v, %v", op, err)
	}
	// By either name of the device.
	for _, name := range []string{gpu(1), "r1"} {
		if op, err = c.Detach(t.Context(), fabric.Intent{Machine: id, Device: name}); err != nil || op.State != fabric.Pending {
			t.Errorf("detach = %+v, %v", op, err)
		}
	}
	removal := `{"remove_resources":{"spec_uuid":"s-a","device_count":1,"devices":["` + gpu(1) + `"]}}`
	want := []string{`{"increase_resource_count":{"spec_uuid":"s-a","device_count":3}}`, removal, removal}
	if !slices.Equal(f.asked, want) {
		t.Errorf("asked %q, want %q", f.asked, want)
	}
}

// TestNotAsked: what is decided by looking.
func TestNotAsked(t *testing.T) {
	row := func(n int, status string) string { return rowJSON(gpu(n), status, "because", "{}") }
	attach := func(before ...string) fabric.Intent {
		return fabric.Intent{Machine: id, Model: "A100", Before: append([]string{}, before...)}
	}
	detach := func(n int) fabric.Intent { return fabric.Intent{Machine: id, Model: "A100", Device: gpu(n)} }
	tests := []struct {
		name    string
		machine string
		in      fabric.Intent
		class   device.FaultClass // empty: an operation
		state   fabric.OperationState
	}{
		{name: "one has come since", machine: machineJSON("2", free8, row(1, "ADD_COMPLETE"), row(2, "ADD_COMPLETE")), in: attach(gpu(1)), state: fabric.Done},
		{name: "one has failed since", machine: machineJSON("2", free8, row(1, "ADD_COMPLETE"), row(2, "ADD_FAILED")), in: attach(gpu(1)), state: fabric.Failed},
		{name: "one is coming", machine: machineJSON("1", free8, rowJSON("", "ADD_IN_PROGRESS", "", "{}")), in: attach(), state: fabric.Pending},
		{name: "one is coming, another word", machine: machineJSON("1", free8, row(1, "PREPARING")), in: attach(), state: fabric.Pending},
		{name: "the caller does not say what there was", machine: machineJSON("1", free8, row(1, "ADD_IN_PROGRESS")), in: fabric.Intent{Machine: id, Model: "A100"}, state: fabric.Pending},
		{name: "one is leaving", machine: machineJSON("0", free8, row(1, "REMOVE_IN_PROGRESS")), in: attach(gpu(1)), class: device.FaultBusy},
		{name: "one is leaving, another word", machine: machineJSON("0", free8, row(1, "GOING")), in: attach(gpu(1)), class: device.FaultBusy},
		{name: "full", machine: machineJSON("1", `"max_resspec_count":1`, row(1, "ADD_COMPLETE")), in: attach(gpu(1)), class: device.FaultRejected},
		{name: "no such model", machine: machineJSON("0", free8), in: fabric.Intent{Machine: id, Model: "a100"}, class: device.FaultUnsupported},
		{name: "a certain device", machine: machineJSON("0", free8), in: fabric.Intent{Machine: id, Model: "A100", Device: "x"}, class: device.FaultUnsupported},
		{name: "no model", machine: machineJSON("0", free8), in: fabric.Intent{Machine: id}, class: device.FaultRejected},
		{name: "no count", machine: machineJSON("null", free8), in: attach(), class: device.FaultUnreachable},
		{name: "the read fails", machine: "<html>", in: attach(), class: device.FaultUnreachable},
		{name: "another machine", machine: strings.ReplaceAll(machineJSON("0", free8), string(id), "00000000-0000-4000-8000-000000000002"), in: attach(), class: device.FaultUnreachable},
		{name: "detach: leaving already", machine: machineJSON("0", free8, row(1, "REMOVE_IN_PROGRESS")), in: detach(1), state: fabric.Pending},
		{name: "detach: coming still", machine: machineJSON("1", free8, row(1, "ADD_IN_PROGRESS")), in: detach(1), class: device.FaultBusy},
		{name: "detach: another is coming", machine: machineJSON("2", free8, row(1, "ADD_COMPLETE"), row(2, "ADD_IN_PROGRESS")), in: detach(1), class: device.FaultBusy},
		{name: "detach: not there", machine: machineJSON("1", free8, row(1, "ADD_COMPLETE")), in: detach(2), class: device.FaultNotFound},
		{name: "detach: id of several", machine: machineJSON("2", free8, rowJSON(gpu(1), "ADD_COMPLETE", "", detailJSON("r1", "0")), rowJSON(gpu(1), "ADD_COMPLETE", "", detailJSON("r2", "0"))), in: detach(1), class: device.FaultRejected},
		{name: "detach: the read fails", machine: "{", in: detach(1), class: device.FaultUnreachable},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFace(t, tt.machine)
			call := f.client().Attach
			if strings.HasPrefix(tt.name, "detach") {
				call = f.client().Detach
			}
			op, err := call(t.Context(), tt.in)
			switch {
			case tt.class != "":
				wantFault(t, err, tt.class)
			case err != nil || op.State != tt.state:
				t.Errorf("operation = %+v, %v, want %s", op, err, tt.state)
			}
			if op.Fault != nil && op.Fault.Op == "" {
				t.Errorf("fault %v does not say what was tried", op.Fault)
			}
			if len(f.asked) > 0 {
				t.Errorf("asked %q", f.asked)
			}
		})
	}
}

// TestResize_answers: what the manager may say to a change and how it is understood.
func TestResize_answers(t *testing.T) {
	const refusal = `{"status":400,"detail":{"code":"E1","message":"bad"}}`
	for _, tt := range []struct {
		name   string
		status int
		body   string
		free   string
		want   device.FaultClass // empty: accepted
		code   string
	}{
		{name: "success", status: 200, body: `{"status":"success"}`},
		{name: "202 without a body", status: 202},
		{name: "204", status: 204},
		{name: "text", status: 200, body: "accepted\n"},
		{name: "a web page", status: 200, body: "<html>Login</html>", want: device.FaultUnknown},
		{name: "half of some JSON", status: 200, body: `{"status":"suc`, want: device.FaultUnknown},
		{name: "400", status: 400, body: refusal, want: device.FaultRejected, code: "E1"},
		{name: "400, none is free", status: 400, body: refusal, free: "0", want: device.FaultNoCapacity, code: "E1"},
		{name: "404, none is free", status: 404, body: refusal, free: "0", want: device.FaultNoCapacity},
		{name: "404", status: 404, body: "<html>", want: device.FaultNotFound},
		{name: "409", status: 409, want: device.FaultBusy},
		{name: "409, none is free", status: 409, free: "0", want: device.FaultNoCapacity},
		{name: "403", status: 403, want: device.FaultUnauthorized},
		{name: "a redirect is not followed", status: 307, want: device.FaultRejected},
		{name: "500", status: 500, body: refusal, free: "0", want: device.FaultUnknown, code: "E1"},
		{name: "502", status: 502, body: "<html>", want: device.FaultUnknown},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFace(t, machineJSON("0", free8))
			f.status, f.body = tt.status, tt.body
			if tt.free != "" {
				f.free = tt.free
			}
			op, err := f.client().Attach(t.Context(), fabric.Intent{Machine: id, Model: "A100"})
			if len(f.asked) != 1 {
				t.Errorf("asked %d times, want once", len(f.asked))
			}
			if tt.want == "" {
				if err != nil || op.State != fabric.Pending {
					t.Errorf("operation = %+v, %v, want one that is pending", op, err)
				}
				return
			}
			if fault := wantFault(t, err, tt.want); fault.Status != tt.status || tt.code != "" && fault.Code != tt.code {
				t.Errorf("fault = %v, want status %d and code %q", fault, tt.status, tt.code)
			}
		})
	}
}

// TestPoll_neverDefinite: what cannot be read says nothing of a change that was accepted.
func TestPoll_neverDefinite(t *testing.T) {
	for name, spoil := range map[string]func(f *face, op *fabric.Operation){
		"web page":        func(f *face, _ *fabric.Operation) { f.machine = "<html>" },
		"unknown machine": func(_ *face, op *fabric.Operation) { op.Intent.Machine = "00000000-0000-4000-8000-00000000ffff" },
		"no handle":       func(_ *face, op *fabric.Operation) { op.Handle = "" },
		"spec gone":       func(_ *face, op *fabric.Operation) { op.Handle = goal{spec: "other", total: 1}.handle() },
		"down":            func(f *face, _ *fabric.Operation) { f.server.Listener.Close(); f.server.CloseClientConnections() },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFace(t, machineJSON("0", free8))
			c := f.client()
			op, err := c.Attach(t.Context(), fabric.Intent{Machine: id, Model: "A100"})
			if err != nil {
				t.Fatal(err)
			}
			f.mu.Lock()
			spoil(f, &op)
			f.mu.Unlock()
			op, err = c.Poll(t.Context(), op)
			if wantFault(t, err, device.FaultUnknown); op.State != fabric.Pending {
				t.Errorf("operation is %s, want it pending still", op.State)
			}
		})
	}
}

// TestOneLogin: the Fabric Manager is asked with the same token.
func TestOneLogin(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	f := newFace(t, machineJSON("0", free8))
	c, err := New(Config{
		Endpoint: f.server.URL, Tenant: "t", Cluster: "c", Credentials: f.dir, FabricManager: true,
		Observe: func(operation string, _ int, _ time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			seen[operation]++
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Free(t.Context(), []string{"A100"}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Machines(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, failed := c.ListAttached(t.Context(), []device.Machine{id}); len(failed) > 0 {
		t.Fatal(failed)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if seen["login"] != 1 || seen["list"] != 1 || seen["free"] != 1 {
		t.Errorf("requests %v, want one login for both managers", seen)
	}
}
