// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const chassis = `
faces: [fm, cm]
cm: {cluster: c-1, limits: {A: {min: 0, max: 2}}, failedFor: 30s}
tenant: t-1
realm: r
credentials: {username: u, password: p, client_id: c, client_secret: s}
fabrics: [{id: 0, uuid: f-0}]
machines: [{name: n1, uuid: m-1}, {name: n2, uuid: m-2}]
devices:
  - {id: a0, model: A, productName: GPU A, resUUID: res-a0, uuid: GPU-a0}
  - {id: a1, model: A, resUUID: res-a1, uuid: GPU-a1}
  - {id: b0, model: B, resUUID: res-b0, uuid: GPU-b0}
timing: {attachDelay: 20s, detachDelay: 10s}
`

type anyToken struct{ err error }

func (a anyToken) Check(*http.Request) error { return a.err }

// bench is a face that is called directly; its chassis's time stands until a test moves it.
type bench struct {
	*hands
	h http.Handler
}

func start(t *testing.T, p simapi.CMPolicies) bench {
	t.Helper()
	// A change is answered while another one is at work.
	h := newChassis(t, chassis, simapi.Policies{Serialization: "none", CM: p})
	return bench{h, New(h.core, anyToken{}, h.Config, h.clk).Handler()}
}

func (b bench) call(method, path, body string) (int, string) {
	b.t.Helper()
	w := httptest.NewRecorder()
	b.h.ServeHTTP(w, httptest.NewRequestWithContext(b.t.Context(), method, base+path, strings.NewReader(body)))
	return w.Code, w.Body.String()
}

const (
	v3     = "/v3/tenants/t-1/clusters/c-1/machines/"
	resize = v3 + "m-1/actions/resize"
)

var specA, specB = specUUID(0), specUUID(1)

func increase(spec string, n int) string {
	return fmt.Sprintf(`{"increase_resource_count":{"spec_uuid":%q,"device_count":%d}}`, spec, n)
}

func removal(spec string, n int, ids ...string) string {
	data, err := json.Marshal(ids)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"remove_resources":{"spec_uuid":%q,"device_count":%d,"devices":%s}}`, spec, n, data)
}

// standing is what the manager shows of model A: its count, and each device with its status.
func (b bench) standing() string {
	b.t.Helper()
	status, body := b.call("GET", v3+"m-1", "")
	var e envelope
	if err := json.Unmarshal([]byte(body), &e); err != nil || status != 200 {
		b.t.Fatalf("read the machine: %d %s", status, body)
	}
	s := e.Data.Cluster.Machine.Specs[1]
	out := fmt.Sprint(s.Count)
	for _, r := range s.Devices {
		out += fmt.Sprintf(" %s=%s", r.ID, r.Status)
	}
	return out
}

func (b bench) wantStanding(when, want string) {
	b.t.Helper()
	if got := b.standing(); got != want {
		b.t.Errorf("%s: %q, want %q", when, got, want)
	}
}

func (b bench) must(body string) {
	b.t.Helper()
	if status, answer := b.call("POST", resize, body); status/100 != 2 {
		b.t.Fatalf("resize %s: %d %s", body, status, answer)
	}
}

// TestFace_shape: the whole of what is said of a machine.
func TestFace_shape(t *testing.T) {
	b := start(t, simapi.CMPolicies{})
	b.must(increase(specA, 1))
	b.settle()
	_, body := b.call("GET", v3+"m-1", "")
	selector := func(model string) string {
		return `{"version":"type_conditions","expression":{"conditions":[{"column":"model","operator":"eq","value":"` + model + `"}]}}`
	}
	want := `{"data":{"tenant_uuid":"t-1","cluster":{"cluster_uuid":"c-1","machine":{"uuid":"m-1","name":"n1","status":"ADD_COMPLETE","status_reason":"","resspecs":[
		{"spec_uuid":"ee00ee00-8888-4100-f700-0000000000c0","type":"cpu","selector":` + selector("XEON-32C") + `,"min_resspec_count":null,"max_resspec_count":null,"device_count":1,"devices":[]},
		{"spec_uuid":"ee00ee00-8888-4100-f700-000000000001","type":"gpu","selector":` + selector("A") + `,"min_resspec_count":0,"max_resspec_count":2,"device_count":1,"devices":[
			{"device_id":"GPU-a0","status":"ADD_COMPLETE","status_reason":"","detail":{"fabric_uuid":"f-0","fabric_id":0,"res_uuid":"res-a0","fabr_gid":"0x00000000","res_type":"gpu","res_name":"gpu0",
			"res_status":4,"res_op_status":"00","resspecs":[{"resspec_uuid":"dd00dd00-7777-4f00-e600-000000000001","productname":"GPU A","model":"A","vendor":"NVIDIA","removable":true}],
			"tenant_uuid":"t-1","mach_uuid":"m-1"}}]},
		{"spec_uuid":"ee00ee00-8888-4100-f700-000000000002","type":"gpu","selector":` + selector("B") + `,"min_resspec_count":null,"max_resspec_count":null,"device_count":0,"devices":[]}]}}}}`
	var w, g any
	if err := errors.Join(json.Unmarshal([]byte(want), &w), json.Unmarshal([]byte(body), &g)); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	if diff := cmp.Diff(w, g); diff != "" {
		t.Errorf("machine (-want +got):\n%s", diff)
	}
}

// TestFace_sights: how a change looks before, while and after it is at work.
func TestFace_sights(t *testing.T) {
	const complete = "1 GPU-a0=ADD_COMPLETE"
	for _, tt := range []struct {
		policies        simapi.CMPolicies
		coming, leaving string
	}{
		{simapi.CMPolicies{}, "1 =ADD_IN_PROGRESS", "0 GPU-a0=REMOVE_IN_PROGRESS"},
		{simapi.CMPolicies{Count: "atComplete"}, "0 =ADD_IN_PROGRESS", "1 GPU-a0=REMOVE_IN_PROGRESS"},
		{simapi.CMPolicies{Progress: "withID"}, "1 GPU-a0=ADD_IN_PROGRESS", "0 GPU-a0=REMOVE_IN_PROGRESS"},
		{simapi.CMPolicies{Progress: "absent"}, "1", "0 GPU-a0=REMOVE_IN_PROGRESS"},
		{simapi.CMPolicies{Progress: "absent", Count: "atComplete"}, "0", "1 GPU-a0=REMOVE_IN_PROGRESS"},
	} {
		t.Run(fmt.Sprintf("%s_%s", tt.policies.Count, tt.policies.Progress), func(t *testing.T) {
			b := start(t, tt.policies)
			b.wantStanding("before", "0")
			b.must(increase(specA, 1))
			b.wantStanding("coming", tt.coming)
			b.must(increase(specA, 1)) // the same total
			b.settle()
			b.wantStanding("there", complete)
			b.must(removal(specA, 0, "GPU-a0"))
			b.wantStanding("leaving", tt.leaving)
			b.settle()
			b.wantStanding("gone", "0")
		})
	}
}

func TestFace_failures(t *testing.T) {
	reason := "because"
	for _, count := range []string{"atAccept", "atComplete"} {
		for _, failed := range []string{"stay", "vanish"} {
			t.Run(count+"_"+failed, func(t *testing.T) {
				b := start(t, simapi.CMPolicies{Count: count, Failed: failed})
				if err := b.core.ChangeDevice("a0", simapi.DeviceChange{FailAttach: &reason}); err != nil {
					t.Fatal(err)
				}
				b.must(increase(specA, 1))
				for !b.clk.HasWaiters() {
					runtime.Gosched()
				}
				b.clk.Step(20 * time.Second) // no longer than needed: what failed may vanish
				for b.working() {
					runtime.Gosched()
				}
				counted := map[string]string{"atAccept": "1", "atComplete": "0"}[count]
				b.wantStanding("failed", counted+" GPU-a0=ADD_FAILED")
				b.clk.Step(time.Hour)
				if failed == "vanish" {
					b.wantStanding("forgotten", "0")
					return
				}
				b.wantStanding("later", counted+" GPU-a0=ADD_FAILED")
				b.must(removal(specA, 0, "GPU-a0"))
				b.settle()
				b.wantStanding("removed", "0")
			})
		}
	}
	b := start(t, simapi.CMPolicies{})
	b.must(increase(specA, 1))
	b.settle()
	if err := b.core.ChangeDevice("a0", simapi.DeviceChange{FailDetach: &reason}); err != nil {
		t.Fatal(err)
	}
	b.must(removal(specA, 0, "GPU-a0"))
	b.settle()
	b.wantStanding("refused to leave", "1 GPU-a0=REMOVE_FAILED")
	b.must(removal(specA, 0, "GPU-a0"))
	b.settle()
	b.wantStanding("left", "0")
}

func TestFace_lastWins(t *testing.T) {
	for below, want := range map[string]string{"noop": "2 GPU-a0=ADD_COMPLETE GPU-a1=ADD_COMPLETE", "lastWins": "1 GPU-a0=ADD_COMPLETE"} {
		b := start(t, simapi.CMPolicies{Below: below})
		b.must(increase(specA, 2))
		b.must(increase(specA, 1))
		b.settle()
		b.wantStanding(below, want)
	}
}

func TestFace_answers(t *testing.T) {
	tests := []struct {
		name, method, path, body string
		policies                 simapi.CMPolicies
		status                   int
		want                     string
	}{
		{name: "accepted", body: increase(specA, 1), status: 200, want: `{"status":"success"}`},
		{name: "accepted, empty", body: increase(specA, 1), policies: simapi.CMPolicies{Answer: "empty"}, status: 202},
		{name: "accepted, text", body: increase(specA, 1), policies: simapi.CMPolicies{Answer: "text"}, status: 200, want: "accepted"},
		{name: "nothing to do", body: increase(specA, 0), status: 200},
		{name: "above", body: increase(specA, 3), status: 400, want: "max_resspec_count"},
		{name: "above, 409", body: increase(specA, 3), policies: simapi.CMPolicies{Above: "409"}, status: 409},
		{name: "above, clamped", body: increase(specA, 3), policies: simapi.CMPolicies{Above: "clamp"}, status: 200},
		{name: "too few", body: increase(specB, 2), status: 200},
		{name: "too few, 409", body: increase(specB, 2), policies: simapi.CMPolicies{Shortage: "409"}, status: 409, want: "no free device"},
		{name: "unknown spec", body: increase("x", 1), status: 404, want: `{"status":404,"detail":{"code":"E03XXXX","message":"no such spec"}}`},
		{name: "no spec", body: increase("", 1), status: 404},
		{name: "the CPU's spec", body: increase(cpuSpec, 2), status: 404},
		{name: "refusal in HTML", body: increase("", 1), policies: simapi.CMPolicies{Refusal: "html"}, status: 404, want: "<html>"},
		{name: "refusal without words", body: increase("", 1), policies: simapi.CMPolicies{Refusal: "empty"}, status: 404},
		{name: "neither", body: `{}`, status: 400, want: "want one of"},
		{name: "both", body: `{"increase_resource_count":{},"remove_resources":{}}`, status: 400, want: "want one of"},
		{name: "no count", body: `{"increase_resource_count":{"spec_uuid":"x"}}`, status: 400, want: "device_count"},
		{name: "no JSON", body: `<`, status: 400, want: "not a resize"},
		{name: "remove nothing", body: removal(specA, 0), status: 400, want: "devices"},
		{name: "remove what is not there", body: removal(specA, 0, "GPU-a0"), status: 404, want: "no such device"},
		{name: "remove what is not there, ignored", body: removal(specA, 0, "GPU-a0"), policies: simapi.CMPolicies{Unknown: "ignore"}, status: 200},
		{name: "remove the one without a name", body: removal(specA, 0, ""), status: 404},
		{name: "other machine", path: v3 + "m-9/actions/resize", body: increase(specA, 1), status: 404, want: "no such machine"},
		{name: "machine by name", method: "GET", path: v3 + "n1", status: 404, want: "no such machine"},
		{name: "other cluster", method: "GET", path: "/v3/tenants/t-1/clusters/c-2/machines/m-1", status: 404, want: "cluster"},
		{name: "other tenant", method: "GET", path: "/v3/tenants/t-2/clusters/c-1/machines/m-1", status: 404, want: "tenant"},
		{name: "groups", method: "GET", path: "/v2/tenants/t-1/clusters/c-1/nodegroups", status: 200, want: `{"nodegroups":[{"uuid":"` + groupUUID + `","name":"gpu-nodes"}]}`},
		{name: "group", method: "GET", path: "/v2/tenants/t-1/clusters/c-1/nodegroups/" + groupUUID, status: 200, want: `"mach_ids":["m-1","m-2"]`},
		{name: "unknown group", method: "GET", path: "/v2/tenants/t-1/clusters/c-1/nodegroups/x", status: 404},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			b := start(t, tc.policies)
			if tc.method == "" {
				tc.method = "POST"
			}
			if tc.path == "" {
				tc.path = resize
			}
			if status, body := b.call(tc.method, tc.path, tc.body); status != tc.status || !strings.Contains(body, tc.want) {
				t.Errorf("answer %d %s, want %d with %s", status, body, tc.status, tc.want)
			}
		})
	}
}

// TestFace_remaining: a removal's total has to go with what it names, or does not matter.
func TestFace_remaining(t *testing.T) {
	for remaining, want := range map[string]int{"checked": 400, "trusted": 200} {
		b := start(t, simapi.CMPolicies{Remaining: remaining})
		b.must(increase(specA, 2))
		b.settle()
		if status, body := b.call("POST", resize, removal(specA, 0, "GPU-a0")); status != want {
			t.Errorf("%s: %d %s, want %d", remaining, status, body, want)
		}
	}
	b := start(t, simapi.CMPolicies{})
	b.must(increase(specA, 2))
	b.settle()
	b.must(removal(specA, 0, "GPU-a0", "GPU-a1"))
	b.settle()
	b.wantStanding("both removed", "0")
}

// TestFace_busy: one change of a machine at a time, if the manager says so.
func TestFace_busy(t *testing.T) {
	b := start(t, simapi.CMPolicies{})
	if err := b.core.SetPolicies(simapi.Policies{Serialization: "busy409"}); err != nil {
		t.Fatal(err)
	}
	b.must(increase(specA, 1))
	if status, _ := b.call("POST", resize, increase(specB, 1)); status != 409 {
		t.Errorf("second change while the first is at work: %d, want 409", status)
	}
	if status, _ := b.call("POST", v3+"m-2/actions/resize", increase(specB, 1)); status != 200 {
		t.Errorf("change of another machine: %d, want 200", status)
	}
}

func TestFace_token(t *testing.T) {
	b := start(t, simapi.CMPolicies{})
	b.h = New(b.core, anyToken{errors.New("token expired")}, b.Config, b.clk).Handler()
	if status, body := b.call("GET", v3+"m-1", ""); status != 401 || !strings.Contains(body, "token expired") {
		t.Errorf("answer %d %s, want 401", status, body)
	}
}

func FuzzDecodeResize(f *testing.F) {
	f.Add([]byte(increase(specA, 2)))
	f.Add([]byte(removal(specA, 1, "GPU-a0")))
	f.Add([]byte(`{"increase_resource_count":null,"remove_resources":{"device_count":-1,"devices":[""]}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		c, isRemoval, err := decodeResize(body)
		if err != nil {
			return
		}
		if c.Count == nil || *c.Count < 0 || isRemoval != (len(c.Devices) > 0) {
			t.Errorf("accepted %+v, removal %v, of %q", c, isRemoval, body)
		}
	})
}
