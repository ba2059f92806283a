// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const chassis = `
tenant: t-1
realm: r
credentials: {username: u, password: p, client_id: c, client_secret: s}
fabrics: [{id: 0, uuid: f-0}]
machines: [{name: n1, uuid: m-1}, {name: n2, uuid: m-2}]
devices:
  - {id: a0, model: A, resUUID: res-a0, uuid: GPU-a0}
  - {id: a1, model: A, resUUID: res-a1, uuid: GPU-a1}
  - {id: b0, model: B, resUUID: res-b0, uuid: GPU-b0}
`

type anyToken struct{ err error }

func (a anyToken) Check(*http.Request) error { return a.err }

type bench struct {
	*core.Core
	t *testing.T
	h http.Handler
}

func start(t *testing.T) bench {
	t.Helper()
	cfg, err := config.Parse([]byte(chassis))
	if err != nil {
		t.Fatal(err)
	}
	c, err := core.New(t.Context(), cfg, core.Options{Clock: clock.RealClock{}, Numbers: make([]core.Number, len(cfg.Devices))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return bench{c, t, fault.New(clock.RealClock{}).Wrap("fm", New(c, anyToken{}, cfg).Handler())}
}

func (b bench) call(method, path, body string) (int, string) {
	b.t.Helper()
	if !strings.Contains(path, "?") {
		path += "?tenant_uuid=t-1"
	}
	w := httptest.NewRecorder()
	b.h.ServeHTTP(w, httptest.NewRequestWithContext(b.t.Context(), method, base+path, strings.NewReader(body)))
	return w.Code, w.Body.String()
}

func attachBody(machine, model string, n int) string {
	return fmt.Sprintf(`{"tenants":{"tenant_uuid":"t-1","machines":[{"mach_uuid":%q,"resources":[{"res_specs":[{"res_type":"gpu",`+
		`"res_spec":{"condition":[{"column":"model","operator":"eq","value":%q}]},"res_num":%d}]}]}]}}`, machine, model, n)
}

func detachBody(machine, res string) string {
	return fmt.Sprintf(`{"tenants":{"tenant_uuid":"t-1","machines":[{"mach_uuid":%q,"resources":[{"res_specs":[`+
		`{"res_type":"gpu","res_uuid":%q,"res_num":1}]}]}]}}`, machine, res)
}

// same compares JSON texts by meaning.
func same(t *testing.T, want, got string) {
	t.Helper()
	var w, g any
	if err := errors.Join(json.Unmarshal([]byte(want), &w), json.Unmarshal([]byte(got), &g)); err != nil {
		t.Fatalf("%v in %s", err, got)
	}
	if diff := cmp.Diff(w, g); diff != "" {
		t.Errorf("answer (-want +got):\n%s", diff)
	}
}

const (
	gpuA0 = `{"res_uuid":"res-a0","res_name":"gpu0","res_type":"gpu","res_status":4,"res_op_status":"00",
		"condition_uuid":"8a8a8a8a-5555-4d00-8400-000000000000","res_serial_num":"GPU-a0",
		"res_spec":{"condition":[{"column":"model","operator":"eq","value":"A"}]}}`
	cpu1 = `{"res_uuid":"c0c0c0c0-3333-4b00-8200-000000000001","res_name":"pcpu0","res_type":"compute","res_status":4,"res_op_status":"00"}`
)

func machine1(resources string) string {
	return `{"fabric_uuid":"f-0","fabric_id":0,"mach_uuid":"m-1","mach_id_nonliqid":null,"mach_id":1,"mach_name":"n1","mach_status":15,
		"mach_op_status":"00","mach_status_detail":"ACTIVE PON","mach_owner":"AnonymousUser","tenant_uuid":"t-1","boot_ssd":null,
		"lanports":[{"lanport_uuid":"aa00aa00-6666-4e00-9500-000000000001","subnet_uuid":"bb00bb00-6666-4e00-9500-000000000001",
		"lanport_idx":0,"mac_address":"02:00:5e:00:00:01","nw_class_cu":"00000","ip_address":"192.0.2.1"}],"resources":[` + resources + `]}`
}

func TestFace_attachAndDetach(t *testing.T) {
	b := start(t)
	status, body := b.call("PATCH", "/machines/m-1/update", attachBody("m-1", "A", 1))
	if status != 200 {
		t.Fatalf("attach: %d %s", status, body)
	}
	same(t, `{"data":{"machines":[{"fabric_uuid":"f-0","fabric_id":0,"mach_uuid":"m-1","mach_id":1,"mach_name":"n1",
		"tenant_uuid":"t-1","resources":[`+gpuA0+`]}]}}`, body)

	_, body = b.call("GET", "/machines/m-1", "")
	same(t, `{"data":{"machines":[`+machine1(cpu1+","+gpuA0)+`]}}`, body)

	if err := b.RemovePCI("n1", "0000:3d:00.0"); err != nil {
		t.Fatal(err)
	}
	status, body = b.call("DELETE", "/machines/m-1/update", detachBody("m-1", "res-a0"))
	if status != 200 {
		t.Fatalf("detach: %d %s", status, body)
	}
	same(t, `{"status":"success"}`, body)
	_, body = b.call("GET", "/machines/m-1", "")
	same(t, `{"data":{"machines":[`+machine1(cpu1)+`]}}`, body)
	if v := b.Violations(); len(v) > 0 {
		t.Errorf("violations %v", v)
	}
}

func TestFace_list(t *testing.T) {
	_, body := start(t).call("GET", "/machines", "")
	var e struct {
		Data struct {
			Machines []struct {
				UUID string `json:"mach_uuid"`
			}
		}
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range e.Data.Machines {
		got = append(got, m.UUID)
	}
	if diff := cmp.Diff([]string{"m-1", "m-2"}, got); diff != "" {
		t.Errorf("machines (-want +got):\n%s", diff)
	}
}

func query(resType, condition string) string {
	return "?" + url.Values{"tenant_uuid": {"t-1"}, "res_type": {resType}, "condition": {condition}}.Encode()
}

func TestFace_answers(t *testing.T) {
	const is = `{"column":"model","operator":"eq","value":"%s"}`
	const free = "/machines/m-1/available-reserved-resources"
	const update = "/machines/m-1/update"
	tests := []struct {
		name, method, path, body string
		policies                 simapi.Policies
		status                   int
		want                     string
	}{
		{name: "free", method: "GET", path: free + query("gpu", fmt.Sprintf(is, "A")), status: 200, want: `{"fabric_id":0,"reserved_res_num_per_fabric":2}`},
		{name: "free of unknown model", method: "GET", path: free + query("gpu", fmt.Sprintf(is, "Z")), status: 200, want: `"reserved_res_num_per_fabric":0`},
		{name: "free of unknown model, 404", method: "GET", path: free + query("gpu", fmt.Sprintf(is, "Z")), policies: simapi.Policies{UnknownModel: "404"}, status: 404, want: "no such model"},
		{name: "free, other type", method: "GET", path: free + query("fpga", fmt.Sprintf(is, "A")), status: 400, want: "res_type"},
		{name: "free, condition in an array", method: "GET", path: free + query("gpu", "["+fmt.Sprintf(is, "A")+"]"), status: 400, want: "condition"},
		{name: "unknown machine", method: "GET", path: "/machines/m-9", status: 404, want: `{"status":404,"detail":{"code":"E02XXXX","message":"machine not found"}}`},
		{name: "machine by name", method: "GET", path: "/machines/n1", status: 404, want: "machine not found"},
		{name: "no tenant", method: "GET", path: "/machines?x=1", status: 400, want: "tenant_uuid is missing"},
		{name: "foreign tenant", method: "GET", path: "/machines?tenant_uuid=t-2", status: 404, want: "tenant not found"},
		{name: "unknown path", method: "GET", path: "/nothing", status: 404},
		{name: "no update by POST", method: "POST", path: update, status: 405},
		{name: "attach, no JSON", method: "PATCH", path: update, body: "<", status: 400, want: "not an update"},
		{name: "attach, tenants an array", method: "PATCH", path: update, body: `{"tenants":[]}`, status: 400, want: "not an update"},
		{name: "attach, other machine in the body", method: "PATCH", path: update, body: attachBody("m-2", "A", 1), status: 400, want: "machines"},
		{name: "attach none", method: "PATCH", path: update, body: attachBody("m-1", "A", 0), status: 400, want: "res_num"},
		{name: "attach, no model", method: "PATCH", path: update, body: attachBody("m-1", "", 1), status: 400, want: "model"},
		{name: "none free", method: "PATCH", path: update, body: attachBody("m-1", "Z", 1), status: 404, want: `"error":"no_available_resources"`},
		{name: "none free, 409", method: "PATCH", path: update, body: attachBody("m-1", "Z", 1), policies: simapi.Policies{NoCapacity: "409"}, status: 409, want: `"status":409`},
		{name: "none free, 400", method: "PATCH", path: update, body: attachBody("m-1", "Z", 1), policies: simapi.Policies{NoCapacity: "400"}, status: 400, want: `"status":400`},
		{name: "none free, 200", method: "PATCH", path: update, body: attachBody("m-1", "Z", 1), policies: simapi.Policies{NoCapacity: "empty200"}, status: 200, want: `"resources":[]`},
		{name: "too few", method: "PATCH", path: update, body: attachBody("m-1", "A", 3), status: 404, want: "no_available_resources"},
		{name: "too few, partial", method: "PATCH", path: update, body: attachBody("m-1", "A", 3), policies: simapi.Policies{Shortage: "partial"}, status: 200, want: "res-a1"},
		{name: "without serial", method: "PATCH", path: update, body: attachBody("m-1", "A", 1), policies: simapi.Policies{AttachAnswer: "withoutSerial"}, status: 200, want: `"res_serial_num":""`},
		{name: "all resources", method: "PATCH", path: update, body: attachBody("m-1", "A", 1), policies: simapi.Policies{AttachAnswer: "allResources"}, status: 200, want: `"resources":[{"res_uuid":"c0c0`},
		{name: "reordered", method: "PATCH", path: update, body: attachBody("m-1", "A", 2), policies: simapi.Policies{AttachAnswer: "reordered"}, status: 200, want: `"resources":[{"res_uuid":"res-a1"`},
		{name: "empty", method: "PATCH", path: update, body: attachBody("m-1", "A", 1), policies: simapi.Policies{AttachAnswer: "empty"}, status: 200, want: `"resources":[]`},
		{name: "detach unknown", method: "DELETE", path: update, body: detachBody("m-1", "res-x"), status: 404, want: "resource not found"},
		{name: "detach unknown, 200", method: "DELETE", path: update, body: detachBody("m-1", "res-x"), policies: simapi.Policies{UnknownDetach: "200"}, status: 200, want: "success"},
		{name: "detach without uuid", method: "DELETE", path: update, body: detachBody("m-1", ""), status: 400, want: "res_uuid"},
		{name: "detach without body", method: "DELETE", path: update, status: 400, want: "not an update"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			b := start(t)
			if err := b.SetPolicies(tc.policies); err != nil {
				t.Fatal(err)
			}
			if status, body := b.call(tc.method, tc.path, tc.body); status != tc.status || !strings.Contains(body, tc.want) {
				t.Errorf("answer %d %s, want %d with %s", status, body, tc.status, tc.want)
			}
		})
	}
}

func TestFace_detachAnswer204(t *testing.T) {
	b := start(t)
	if err := b.SetPolicies(simapi.Policies{DetachAnswer: "204"}); err != nil {
		t.Fatal(err)
	}
	b.call("PATCH", "/machines/m-1/update", attachBody("m-1", "B", 1))
	if status, body := b.call("DELETE", "/machines/m-1/update", detachBody("m-1", "res-b0")); status != 204 || body != "" {
		t.Errorf("answer %d %q, want 204 and no body", status, body)
	}
	if status, _ := b.call("DELETE", "/machines/m-2/update", detachBody("m-2", "res-b0")); status != 404 {
		t.Errorf("detach from a machine that does not have it: %d, want 404", status)
	}
}

func TestFace_token(t *testing.T) {
	cfg, err := config.Parse([]byte(chassis))
	if err != nil {
		t.Fatal(err)
	}
	b := start(t)
	b.h = New(b.Core, anyToken{errors.New("token expired")}, cfg).Handler()
	status, body := b.call("GET", "/machines", "")
	if status != 401 {
		t.Errorf("status %d, want 401", status)
	}
	same(t, `{"status":401,"detail":{"code":"E02XXXX","message":"token expired"}}`, body)
}

func FuzzDecodeUpdate(f *testing.F) {
	f.Add([]byte(attachBody("m-1", "A", 1)))
	f.Add([]byte(detachBody("m-1", "res-a0")))
	f.Add([]byte(`{"tenants":null}`))
	f.Add([]byte(`{"tenants":{"machines":[{"resources":[{"res_specs":[{"res_num":1e3}]}]}]}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		specs, err := decodeUpdate(body, "m-1", "t-1")
		if err != nil {
			return
		}
		if len(specs) == 0 {
			t.Error("accepted an update without specs")
		}
		if wanted, err := attachSpecs(specs); err == nil {
			for _, s := range wanted {
				if s.Model == "" || s.Count < 1 {
					t.Errorf("accepted %+v", s)
				}
			}
		}
		if uuids, err := detachUUIDs(specs); err == nil && (len(uuids) != len(specs) || uuids[0] == "") {
			t.Errorf("accepted %q", uuids)
		}
	})
}

func FuzzDecodeCondition(f *testing.F) {
	f.Add(`{"column":"model","operator":"eq","value":"A"}`)
	f.Add(`[{}]`)
	f.Fuzz(func(t *testing.T, s string) {
		if model, err := decodeCondition(s); err == nil && model == "" {
			t.Errorf("no model in %q", s)
		}
	})
}
