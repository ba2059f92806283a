// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const (
	cpuOne  = "AAAAAAAA-0000-4000-8000-000000000001" // as some write it
	one     = device.Machine("aaaaaaaa-0000-4000-8000-000000000001")
	cpuTwo  = "aaaaaaaa-0000-4000-8000-000000000002"
	two     = device.Machine(cpuTwo)
	gpuOne  = "bbbbbbbb-0000-4000-8000-000000000001"
	gpuTwo  = "bbbbbbbb-0000-4000-8000-000000000002"
	source  = "cccccccc-0000-4000-8000-000000000001"
	adapter = "dddddddd-0000-4000-8000-000000000001"
	model   = "GPU 80GB"
)

// thing writes a resource: its id, type and what else there is to say.
func thing(id, kind, more string, links ...string) string {
	var l []string
	for _, to := range links {
		l = append(l, fmt.Sprintf(`{"type":"x","deviceID":%q}`, to))
	}
	return fmt.Sprintf(`{"device":{"deviceID":%q,"type":%q,"model":%q,"status":{"state":"Enabled","health":"OK"},"links":[%s],"deviceSwitchInfo":"sw-1"%s},
		"annotation":{"available":true},"resourceGroupIDs":["g1"],"nodeIDs":[],"detected":true}`, id, kind, model, strings.Join(l, ","), more)
}

func gpu(id string, links ...string) string { return thing(id, typeGPU, "", links...) }
func cpu(id string, links ...string) string { return thing(id, typeCPU, "", links...) }

func attribute(status string) string {
	return fmt.Sprintf(`,"attribute":{"deviceSpecificInformation":{"status":%q}}`, status)
}

func list(things ...string) []byte {
	return []byte(`{"count":` + fmt.Sprint(len(things)) + `,"resources":[` + strings.Join(things, ",") + `]}`)
}

func decoded(t *testing.T, things ...string) *inventory {
	t.Helper()
	v, err := decodeInventory(list(things...))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestInventory_attached(t *testing.T) {
	pair := []string{
		thing(source, typeSource, attribute(statusSource), cpuOne, adapter), thing(adapter, typeDestination, attribute(statusDestination), source),
	}
	tests := []struct {
		name   string
		things []string
		one    []string
		oneIs  device.FaultClass
		two    []string
		free   []string
		strays []string
	}{
		{name: "nothing linked", things: []string{gpu(gpuOne), gpu(gpuTwo)}, free: []string{gpuOne, gpuTwo}},
		{name: "linked to the CPU, in another case", things: []string{gpu(gpuOne, strings.ToLower(cpuOne)), gpu(gpuTwo)}, one: []string{gpuOne}, free: []string{gpuTwo}},
		{name: "only the CPU tells", things: []string{cpu(cpuOne, gpuOne), gpu(gpuOne), gpu(gpuTwo)}, one: []string{gpuOne}, free: []string{gpuTwo}},
		{name: "by way of two adapters", things: append(pair, gpu(gpuOne, adapter), gpu(gpuTwo)), one: []string{gpuOne}, free: []string{gpuTwo}},
		{name: "linked to what leads nowhere", things: []string{gpu(gpuOne, "eeeeeeee-0000-4000-8000-000000000001"), gpu(gpuTwo)}, free: []string{gpuTwo}, strays: []string{gpuOne}},
		{
			name: "only the node is named", things: []string{strings.Replace(gpu(gpuOne), `"nodeIDs":[]`, `"nodeIDs":["`+cpuTwo+`"]`, 1)},
			two: []string{gpuOne},
		},
		{
			name: "the node is named and links are not told", things: []string{strings.Replace(gpu(gpuOne), `"links":[]`, `"links":null`, 1)},
			free: []string{gpuOne},
		},
		{name: "on two machines", things: []string{gpu(gpuOne, cpuOne, cpuTwo), gpu(gpuTwo)}, oneIs: device.FaultConflict, free: []string{gpuTwo}},
		{
			name: "machine is not seen", things: []string{strings.Replace(cpu(cpuOne), `"detected":true`, `"detected":false`, 1), gpu(gpuOne, cpuOne)},
			oneIs: device.FaultUnknown,
		},
		{
			name: "part of the machine", things: []string{
				thing(cpuOne, typeCPU, `,"constraints":{"nonRemovableDevices":[{"deviceID":"`+gpuOne+`"}]}`, gpuOne), gpu(gpuOne, cpuOne),
			},
		},
		{name: "another thing", things: []string{thing("eeeeeeee-0000-4000-8000-000000000001", "networkInterface", "", cpuOne)}},
		{name: "listed twice", things: []string{gpu(gpuOne), gpu(gpuOne, cpuOne)}, one: []string{gpuOne}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := decoded(t, append(tt.things, cpu(cpuOne), cpu(cpuTwo))...)
			ids := func(gpus []device.OnFabric) (out []string) {
				for _, g := range gpus {
					out = append(out, g.ID)
				}
				return out
			}
			got, fault := v.attached("list", one)
			if (fault == nil) != (tt.oneIs == "") || fault != nil && fault.Class != tt.oneIs {
				t.Errorf("fault = %v, want class %q", fault, tt.oneIs)
			}
			if diff := cmp.Diff(tt.one, ids(got)); diff != "" {
				t.Errorf("on machine one (-want +got):\n%s", diff)
			}
			got, fault = v.attached("list", two)
			if tt.oneIs != device.FaultConflict && (fault != nil || !cmp.Equal(tt.two, ids(got))) {
				t.Errorf("on machine two %v, %v, want %v", got, fault, tt.two)
			}
			if diff := cmp.Diff(tt.free, ids(v.free(model, scope{}))); diff != "" {
				t.Errorf("free (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.strays, v.strays); diff != "" {
				t.Errorf("strays (-want +got):\n%s", diff)
			}
		})
	}
}

func TestInventory_shortFormIsRefused(t *testing.T) {
	short := `{"device":{"deviceID":"` + gpuOne + `","type":"GPU","status":{"state":"Enabled","health":"OK"}},"detected":true}`
	if _, err := decodeInventory(list(cpu(cpuOne), short)); err == nil || !strings.Contains(err.Error(), gpuOne) {
		t.Errorf("error = %v, want one that names the device of which no link is told", err)
	}
}

func TestInventory_taken(t *testing.T) {
	tests := []struct {
		name, old, new, want string
	}{
		{"free", "", "", ""},
		{"withdrawn", `"available":true`, `"available":false`, "withdrawn"},
		{"annotation is missing", `"annotation":{"available":true},`, ``, ""},
		{"other group", `"g1"`, `"g2"`, "group"},
		{"other switch", `"sw-1"`, `"sw-2"`, "sw-2"},
		{"disabled", `"Enabled"`, `"Disabled"`, "Disabled"},
		{"words in another case", `"state":"Enabled","health":"OK"`, `"state":"enabled","health":"ok"`, ""},
		{"warning", `"OK"`, `"Warning"`, "Warning"},
		{"health is empty", `"OK"`, `""`, "nothing"},
		{"health is null", `"OK"`, `null`, "nothing"},
		{"health is a number", `"OK"`, `9`, "9"},
		{"no status", `"status":{"state":"Enabled","health":"OK"},`, ``, "no status"},
		{"not detected", `"detected":true`, `"detected":false`, "not detect"},
		{"detection is a word", `"detected":true`, `"detected":"False"`, "not detect"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !strings.Contains(gpu(gpuOne), tt.old) {
				t.Fatalf("%s does not hold %s", gpu(gpuOne), tt.old)
			}
			v := decoded(t, strings.Replace(gpu(gpuOne), tt.old, tt.new, 1))
			got := v.taken(v.gpus[0], scope{groups: []string{"g1"}, cxl: "sw-1"})
			if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
				t.Errorf("taken = %q, want %q in it", got, tt.want)
			}
		})
	}
}

func TestInventory_adapterBetween(t *testing.T) {
	other := "dddddddd-0000-4000-8000-000000000002"
	src := func(status string) string {
		return thing(source, typeSource, attribute(status), cpuOne, adapter, other)
	}
	dst := func(id, status string, links ...string) string {
		return thing(id, typeDestination, attribute(status), links...)
	}
	tests := []struct {
		name   string
		things []string
		want   string
	}{
		{"one pair", []string{src(statusSource), dst(adapter, statusDestination)}, adapter},
		{"the first works not", []string{src(statusSource), dst(adapter, "eexx"), dst(other, statusDestination)}, other},
		{"the one that the device hangs on", []string{src(statusSource), dst(adapter, statusDestination), dst(other, statusDestination, gpuOne)}, other},
		{"source works not", []string{src("eexx"), dst(adapter, statusDestination)}, ""},
		{"attribute is no object", []string{strings.Replace(src(statusSource), attribute(statusSource), `,"attribute":[1]`, 1), dst(adapter, statusDestination)}, ""},
		{"none", nil, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := decoded(t, append(tt.things, cpu(cpuOne), gpu(gpuOne))...)
			got := ""
			if a := v.adapterBetween(v.machines[one], v.gpus[0]); a != nil {
				got = string(a.Device.ID)
			}
			if got != tt.want {
				t.Errorf("adapter = %q, want %q", got, tt.want)
			}
		})
	}
}

func TestJudge(t *testing.T) {
	procedures := `"procedures":[{"operationID":1,"operation":"connect","targetCPUID":"` + cpuOne + `","targetDeviceID":"` + gpuOne + `","dependencies":[]},
		{"operationID":"2","operation":"disconnect","sourceDeviceID":"` + adapter + `","destinationDeviceID":"` + gpuTwo + `","dependencies":[1]}]`
	tests := []struct {
		name  string
		job   string
		kind  fabric.OperationKind
		state fabric.OperationState
		class device.FaultClass
		words string
	}{
		{name: "running", job: `"status":"IN_PROGRESS","applyResult":[]`, state: fabric.Pending},
		{name: "being cancelled", job: `"status":"CANCELING"`, state: fabric.Pending},
		{name: "a word of a later version", job: `"status":"QUEUED"`, state: fabric.Pending},
		{name: "completed", job: `"status":"COMPLETED","applyResult":[{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Done},
		{name: "completed, nothing said of the parts", job: `"status":"COMPLETED"`, state: fabric.Done},
		{name: "completed, parts in another form", job: `"status":"COMPLETED","applyResult":{"details":1}`, state: fabric.Done},
		{name: "completed, numbers as words", job: `"status":"COMPLETED","applyResult":[{"operationID":"1","status":"COMPLETED","statusCode":"200"}]`, state: fabric.Done},
		{name: "failed, ours is done", job: `"status":"FAILED","applyResult":[{"operationID":2,"status":"FAILED"},{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Done},
		{name: "failed, nothing said", job: `"status":"FAILED"`, state: fabric.Failed, class: device.FaultUnknown},
		{name: "hardware did not answer", job: `"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":504,"responseBody":{"code":"E40003","message":"Timeout"}}]`, state: fabric.Failed, class: device.FaultUnknown, words: "E40003"},
		{name: "hardware failed", job: `"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":500,"responseBody":{"code":"EF004BAS001"}}]`, state: fabric.Failed, class: device.FaultUnknown, words: "EF004BAS001"},
		{name: "body is no object", job: `"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":500,"responseBody":"<html>"}]`, state: fabric.Failed, class: device.FaultUnknown, words: "html"},
		{name: "on another machine", job: `"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":409,"responseBody":{"code":"EF011BAS000"}}]`, state: fabric.Failed, class: device.FaultRejected},
		{name: "unknown to the hardware", job: `"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":404}]`, state: fabric.Failed, class: device.FaultRejected},
		{name: "detach, unknown to the hardware", kind: fabric.KindDetach, job: `"status":"FAILED","applyResult":[{"operationID":2,"status":"FAILED","statusCode":404}]`, state: fabric.Failed, class: device.FaultNotFound},
		{name: "refused", job: `"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":400}]`, state: fabric.Failed, class: device.FaultRejected},
		{name: "detach, skipped", kind: fabric.KindDetach, job: `"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED"},{"operationID":2,"status":"SKIPPED"}]`, state: fabric.Failed, class: device.FaultBusy},
		{name: "detach, on another machine", kind: fabric.KindDetach, job: `"status":"FAILED","applyResult":[{"operationID":2,"status":"FAILED","statusCode":409}]`, state: fabric.Failed, class: device.FaultConflict},
		{name: "suspended", job: `"status":"SUSPENDED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":503,"responseBody":{"code":"ER005BAS001","message":"busy"}}]`, state: fabric.Suspended, class: device.FaultSuspended, words: "0a1b2c3d4e"},
		{name: "suspended, ours is done", job: `"status":"SUSPENDED","applyResult":[{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Done},
		{name: "resumed and done", job: `"status":"COMPLETED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":503}],"resumeResult":[{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Done},
		{name: "resumed and failed", job: `"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":503}],"resumeResult":[{"operationID":1,"status":"FAILED","statusCode":400}]`, state: fabric.Failed, class: device.FaultRejected},
		{name: "cancelled before", job: `"status":"CANCELED","applyResult":[{"operationID":1,"status":"CANCELED"}]`, state: fabric.Failed, class: device.FaultRejected, words: "cancelled"},
		{name: "cancelled after", job: `"status":"CANCELED","applyResult":[{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Done},
		{name: "cancelled, being undone", job: `"status":"CANCELED","rollbackStatus":"IN_PROGRESS","applyResult":[{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Pending},
		{name: "cancelled and undone", job: `"status":"CANCELED","rollbackStatus":"COMPLETED","applyResult":[{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Failed, class: device.FaultRejected, words: "undone"},
		{name: "cancelled, undoing waits", job: `"status":"CANCELED","rollbackStatus":"SUSPENDED","applyResult":[{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Suspended, class: device.FaultSuspended, words: "rollback"},
		{name: "cancelled, undoing failed", job: `"status":"CANCELED","rollbackStatus":"FAILED","applyResult":[{"operationID":1,"status":"COMPLETED"}]`, state: fabric.Failed, class: device.FaultUnknown},
		{name: "cancelled, nothing said", job: `"status":"CANCELED"`, state: fabric.Failed, class: device.FaultUnknown},
	}
	c := &Client{poll: time.Second}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			j, err := decodeJob([]byte(`{"applyID":"0a1b2c3d4e",` + procedures + `,` + tt.job + `}`))
			if err != nil {
				t.Fatal(err)
			}
			op := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Handle: "0a1b2c3d4e", Intent: fabric.Intent{Machine: one, Device: strings.ToUpper(gpuOne)}}
			if tt.kind != "" {
				op.Kind, op.Intent.Device = tt.kind, gpuTwo
			}
			got := c.judge(op, j)
			if got.State != tt.state || (got.Fault == nil) != (tt.class == "") || got.Fault != nil && got.Fault.Class != tt.class {
				t.Errorf("judged %+v, %v, want %s, %q", got, got.Fault, tt.state, tt.class)
			}
			if got.Fault != nil && !strings.Contains(got.Fault.Error(), tt.words) {
				t.Errorf("fault = %v, want %q in it", got.Fault, tt.words)
			}
			if waits := got.State == fabric.Pending || got.State == fabric.Suspended; waits != (got.PollAfter > 0) {
				t.Errorf("poll after %s in state %s", got.PollAfter, got.State)
			}
		})
	}
	t.Run("another machine's", func(t *testing.T) {
		j, err := decodeJob([]byte(`{"status":"COMPLETED",` + procedures + `}`))
		if err != nil {
			t.Fatal(err)
		}
		got := c.judge(fabric.Operation{Kind: fabric.KindAttach, Intent: fabric.Intent{Machine: two, Device: gpuOne}}, j)
		if got.State != fabric.Failed || got.Fault.Class != device.FaultUnknown {
			t.Errorf("judged %+v", got)
		}
	})
}

var describe = fabrictest.Descriptions()

// TestSamples: what others have written down of the manager's messages is understood.
func TestSamples(t *testing.T) {
	read := func(name string) []byte {
		t.Helper()
		body, err := os.ReadFile(describe(t, "samples/"+name))
		if err != nil {
			t.Fatal(err)
		}
		return body
	}
	const free, attached, machine = "d0d0d0d0-0000-4000-8000-000000000001", "d0d0d0d0-0000-4000-8000-000000000002", "c0c0c0c0-0000-4000-8000-000000000001"
	v, err := decodeInventory(read("cdim-resources-detail-200.json"))
	if err != nil {
		t.Fatal(err)
	}
	if got := v.free("EMU GPU 80GB", scope{}); len(got) != 1 || got[0].ID != free {
		t.Errorf("free = %+v", got)
	}
	if got, fault := v.attached("list", machine); fault != nil || len(got) != 1 || got[0].ID != attached {
		t.Errorf("attached = %+v, %v", got, fault)
	}
	if _, err := decodeInventory(read("cdim-resources-summary-200.json")); err != nil {
		t.Errorf("summary with node ids: %v", err)
	}
	// One node of the product, as a part of an inventory.
	var nodes struct {
		Nodes []struct{ Resources []json.RawMessage }
	}
	if err := json.Unmarshal(read("cdim-nodes-200-product.json"), &nodes); err != nil {
		t.Fatal(err)
	}
	parts := []string{string(read("cdim-resource-200-destination-adapter.json")), string(read("cdim-resource-200-free.json"))}
	for _, r := range nodes.Nodes[0].Resources {
		parts = append(parts, string(r))
	}
	v = decoded(t, parts...)
	if got, fault := v.attached("list", machine); fault != nil || len(got) != 1 || got[0].ID != attached {
		t.Errorf("attached in the product = %+v, %v", got, fault)
	}
	if a := v.adapterBetween(v.machines[machine], v.byKey[free]); a == nil || a.Device.ID != "b2b2b2b2-0000-4000-8000-000000000001" {
		t.Errorf("adapter = %+v", a)
	}
	for name, want := range map[string]string{
		"critical": "Critical", "undetected": "not detect", "maintenance": "withdrawn", "attached": "machine", "free": "",
	} {
		v := decoded(t, string(read("cdim-resource-200-"+name+".json")))
		if got := v.taken(v.gpus[0], scope{}); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: taken = %q, want %q in it", name, got, want)
		}
	}
	c := &Client{poll: time.Second}
	op := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Handle: "x", Intent: fabric.Intent{Machine: machine, Device: free}}
	for name, want := range map[string]fabric.OperationState{
		"in-progress": fabric.Pending, "canceling": fabric.Pending, "completed": fabric.Done, "failed-partial": fabric.Done,
		"failed-timeout": fabric.Failed, "canceled-rolled-back": fabric.Failed, "suspended": fabric.Suspended,
	} {
		j, err := decodeJob(read("cdim-job-200-" + name + ".json"))
		if err != nil {
			t.Fatal(err)
		}
		if got := c.judge(op, j); got.State != want {
			t.Errorf("job %s is judged %+v, %v, want %s", name, got, got.Fault, want)
		}
	}
	if jobs, err := decodeJobs(read("cdim-jobs-list-200.json")); err != nil || len(jobs) != 2 {
		t.Errorf("jobs = %+v, %v", jobs, err)
	}
	if id, err := decodeApplyID(read("cdim-apply-202.json")); err != nil || id != "0a1b2c3d4e" {
		t.Errorf("applyID = %q, %v", id, err)
	}
	for name, want := range map[string][2]string{
		"error-404": {"notFound", "resource not found"}, "error-409-E40010": {"E40010", "Already"}, "error-409-E40027": {"E40027", "0a1b2c3d50"},
		"error-500-E40018": {"E40018", "ApplyStatusDB"}, "kong-401-expired": {"", "expired"}, "kong-401-no-token": {"", "Unauthorized"},
	} {
		if code, message := decodeRefusal(read("cdim-" + name + ".json")); code != want[0] || !strings.Contains(message, want[1]) {
			t.Errorf("%s: %q, %q", name, code, message)
		}
	}
}

// readable checks what goes into a condition.
func readable(t *testing.T, s string) {
	t.Helper()
	if !utf8.ValidString(s) || len(s) > 1024 || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' }) {
		t.Errorf("%q is not fit for a condition", s)
	}
}

func FuzzDecodeInventory(f *testing.F) {
	f.Add(list(cpu(cpuOne, gpuOne), cpu(cpuTwo), gpu(gpuOne, cpuOne), gpu(gpuTwo)))
	f.Add(list(cpu(cpuOne), thing(source, typeSource, attribute(statusSource), cpuOne, adapter), thing(adapter, typeDestination, attribute(statusDestination), source), gpu(gpuOne, adapter)))
	f.Add([]byte(`{"count":0,"resources":[]}`))
	f.Add([]byte(`{"resources":[{"device":{"deviceID":7,"type":"GPU","links":[{"deviceID":null}],"constraints":{"nonRemovableDevices":null}},"nodeIDs":[1]}]}`))
	f.Add([]byte(`{"resources":null}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		v, err := decodeInventory(body)
		if err != nil {
			return
		}
		here := make(map[string]device.Machine)
		for m, c := range v.machines {
			gpus, fault := v.attached("list", m)
			if fault != nil {
				readable(t, fault.Error())
				continue
			}
			for _, g := range gpus {
				if other, twice := here[strings.ToLower(g.ID)]; twice && other != m {
					t.Errorf("%q is on %s and on %s", g.ID, other, m)
				}
				here[strings.ToLower(g.ID)] = m
				readable(t, g.HealthText)
			}
			for _, g := range v.gpus {
				v.adapterBetween(c, g)
			}
		}
		for _, g := range v.gpus {
			for _, free := range v.free(string(g.Device.Model), scope{}) {
				if m, attached := here[strings.ToLower(free.ID)]; attached {
					t.Errorf("%q is free and on %s", free.ID, m)
				}
			}
			readable(t, v.taken(g, scope{groups: []string{"g"}}))
		}
	})
}

func FuzzDecodeJob(f *testing.F) {
	f.Add([]byte(`{"applyID":"0a1b2c3d4e","status":"COMPLETED","procedures":[{"operationID":1,"operation":"connect","targetCPUID":"` + cpuOne + `","targetDeviceID":"` + gpuOne + `","dependencies":[]}],"applyResult":[{"operationID":1,"status":"COMPLETED","statusCode":200,"responseBody":{}}],"startedAt":"2026-01-01T00:00:00Z"}`))
	f.Add([]byte(`{"status":"CANCELED","rollbackStatus":"COMPLETED","applyResult":[{"operationID":1,"status":"COMPLETED"}]}`))
	f.Add([]byte(`{"status":"SUSPENDED","applyResult":null}`))
	f.Add([]byte(`{"status":"FAILED","applyResult":[{"operationID":1,"status":"FAILED","statusCode":"504","responseBody":"x"}]}`))
	c := &Client{poll: time.Second}
	f.Fuzz(func(t *testing.T, body []byte) {
		j, err := decodeJob(body)
		if err != nil {
			return
		}
		for _, kind := range []fabric.OperationKind{fabric.KindAttach, fabric.KindDetach} {
			got := c.judge(fabric.Operation{Kind: kind, State: fabric.Pending, Handle: "0a1b2c3d4e", Intent: fabric.Intent{Machine: one, Device: gpuOne}}, j)
			if bad := got.State == fabric.Failed || got.State == fabric.Suspended; bad != (got.Fault != nil) {
				t.Errorf("judged %+v", got)
			}
			if got.Fault != nil {
				readable(t, got.Fault.Message)
				readable(t, got.Fault.Code)
			}
		}
	})
}

func FuzzDecodeJobs(f *testing.F) {
	f.Add([]byte(`{"count":1,"totalCount":21,"applyResults":[{"applyID":"0a1b2c3d4e","status":"IN_PROGRESS","startedAt":"2026-01-01T00:00:00Z"}]}`))
	f.Add([]byte(`{"applyResults":null}`))
	f.Add([]byte(`{"applyID":"0a1b2c3d4e"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if id, err := decodeApplyID(body); err == nil && (id == "" || len(id) > 64 || strings.ContainsAny(id, "/?#% .")) {
			t.Errorf("applyID %q", id)
		}
		jobs, err := decodeJobs(body)
		if err != nil {
			return
		}
		for _, j := range jobs {
			if j.began(time.Time{}) {
				t.Errorf("job %+v began after no time", j)
			}
		}
	})
}

func FuzzDecodeRefusal(f *testing.F) {
	f.Add([]byte(`{"code":"E40010","message":"Already running. Cannot start multiple instances."}`))
	f.Add([]byte(`{"code":"notFound","message":"resource not found","details":"x"}`))
	f.Add([]byte(`{"message":"Unauthorized"}`))
	f.Add([]byte(`{"exp":"token expired"}`))
	f.Add([]byte(`<html><body>504 Gateway Time-out</body></html>`))
	f.Fuzz(func(t *testing.T, body []byte) {
		code, message := decodeRefusal(body)
		if len(code)+len(message) > 8*len(body)+16 {
			t.Errorf("%d bytes of words out of %d", len(code)+len(message), len(body))
		}
	})
}
