// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// ended waits until a job is in one of the states.
func (b *bench) ended(id string, states ...string) map[string]any {
	b.t.Helper()
	for range 500 {
		_, j := b.person("GET", "/layout-apply/"+id, "")
		status, _ := j["status"].(string)
		if back, _ := j["rollbackStatus"].(string); slices.Contains(states, status) && back != inProgress {
			return j
		}
		clock.RealClock{}.Sleep(10 * time.Millisecond)
	}
	b.t.Fatalf("job %s is in none of the states %v", id, states)
	return nil
}

// begun waits until the hardware works on a device.
func (b *bench) begun(device int) {
	b.t.Helper()
	for range 500 {
		if d, _ := b.core.State().Device(b.device(device)); d.Phase == simapi.PhaseAttaching || d.Phase == simapi.PhaseDetaching {
			return
		}
		clock.RealClock{}.Sleep(5 * time.Millisecond)
	}
	b.t.Fatalf("nothing happens to device %d", device)
}

func (b *bench) post(body string) string {
	b.t.Helper()
	status, answer := b.person("POST", "/layout-apply", body)
	id, _ := answer["applyID"].(string)
	if status != 202 || !idForm.MatchString(id) {
		b.t.Fatalf("post = %d %v", status, answer)
	}
	return id
}

// ends are what became of the operations of a job, by their ids.
func ends(j map[string]any, key string) map[int]string {
	out := map[int]string{}
	list, _ := j[key].([]any)
	for _, one := range list {
		r, _ := one.(map[string]any)
		id, _ := r["operationID"].(float64)
		out[int(id)], _ = r["status"].(string)
	}
	return out
}

func TestJobs_gate(t *testing.T) {
	b := newBench(t, setting{dialect: "oss"})
	stuck := b.post(b.job("connect n1 0 after 9"))
	for _, tt := range []struct {
		name, body, code string
		status           int
	}{
		{"running", b.job("connect n1 1"), codeRunning, 409},
		{"even if there is nothing to do", `{"procedures":[]}`, codeRunning, 409},
		{"the form comes first", `{"procedures":[{}]}`, codeRequest, 400},
	} {
		if status, body := b.person("POST", "/layout-apply", tt.body); status != tt.status || body["code"] != tt.code {
			t.Errorf("%s: %d %v", tt.name, status, body)
		}
	}
	if status, body := b.person("DELETE", "/layout-apply/"+stuck, ""); status != 409 || body["code"] != codeDelete {
		t.Errorf("delete = %d %v", status, body)
	}
	if status, body := b.person("PUT", "/layout-apply/"+stuck+"?action=cancel", ""); status != 202 || body["status"] != canceling {
		t.Errorf("cancel = %d %v", status, body)
	}
	j := b.ended(stuck, canceled)
	if diff := cmp.Diff(map[int]string{1: canceled}, ends(j, "applyResult")); diff != "" {
		t.Errorf("ends (-want +got):\n%s", diff)
	}
	if status, body := b.person("PUT", "/layout-apply/"+stuck+"?action=cancel", ""); status != 200 || body["status"] != canceled {
		t.Errorf("cancel again = %d %v", status, body)
	}
	over := b.post(`{"procedures":[]}`)
	if j := b.ended(over, completed); j["endedAt"] == nil {
		t.Errorf("empty job %v", j)
	}
	if status, body := b.person("PUT", "/layout-apply/"+over+"?action=cancel", ""); status != 409 || body["code"] != codeEnded {
		t.Errorf("cancel of what is over = %d %v", status, body)
	}
	for path, code := range map[string]string{"/layout-apply/0000000000": codeNoJob, "/layout-apply/xyz": codeRequest} {
		if _, body := b.person("GET", path, ""); body["code"] != code {
			t.Errorf("GET %s = %v", path, body)
		}
	}
}

func TestJobs_form(t *testing.T) {
	oss := `{"operationID":1,"operation":"connect","targetCPUID":"c","targetDeviceID":"d","dependencies":[]}`
	product := `{"operationID":1,"operation":"connect","sourceDeviceID":"c","destinationDeviceID":"d","dependencies":[]}`
	for _, tt := range []struct {
		name, dialect, body string
		strict, refused     bool
	}{
		{"own dialect", "oss", oss, false, false},
		{"own dialect of the product", "product", product, false, false},
		{"other dialect", "oss", product, false, true},
		{"other dialect of the product", "product", oss, false, true},
		{"no dependencies", "oss", strings.Replace(oss, `,"dependencies":[]`, "", 1), false, true},
		{"null for dependencies", "oss", strings.Replace(oss, `[]`, "null", 1), false, true},
		{"id is text", "oss", strings.Replace(oss, `:1`, `:"1"`, 1), false, true},
		{"unknown operation", "oss", strings.Replace(oss, "connect", "join", 1), false, true},
		{"unknown field", "oss", strings.Replace(oss, `"operationID"`, `"x":1,"operationID"`, 1), false, true},
		{"boot", "oss", `{"operationID":1,"operation":"boot","targetDeviceID":"c","dependencies":[]}`, false, false},
		{"id twice", "oss", oss + "," + oss, false, false},
		{"id twice, strictly", "oss", oss + "," + oss, true, true},
		{"unknown dependency", "oss", strings.Replace(oss, "[]", "[9]", 1), false, false},
		{"unknown dependency, strictly", "oss", strings.Replace(oss, "[]", "[9]", 1), true, true},
		{"circle, strictly", "oss", strings.Replace(oss, "[]", "[1]", 1), true, true},
	} {
		_, err := decodeProcedures([]byte(`{"procedures":[`+tt.body+`]}`), tt.dialect, tt.strict)
		if (err != nil) != tt.refused {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	for _, body := range []string{``, `[]`, `{}`, `{"procedures":null}`, `{"procedures":{}}`} {
		if _, err := decodeProcedures([]byte(body), "oss", false); err == nil {
			t.Errorf("%q was taken", body)
		}
	}
}

func TestJobs_partsAndRollback(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		refuse := simapi.Fault{
			Face: "hw", Body: b.device(1), Action: simapi.ActionStatus, Status: 500, Content: `{"code":"EF004BAS001","message":"connect failed"}`, Count: 1,
		}
		b.Add(refuse)
		id := b.post(b.job("connect n1 0", "connect n1 1", "connect n2 2 after 2", "disconnect n1 0 after 1"))
		want := map[int]string{1: completed, 2: failed, 3: skipped, 4: completed}
		if diff := cmp.Diff(want, ends(b.ended(id, failed), "applyResult")); diff != "" {
			t.Errorf("ends (-want +got):\n%s", diff)
		}
		if err := b.core.SetPolicies(simapi.Policies{CDIM: simapi.CDIMPolicies{JobError: "suspended"}}); err != nil {
			t.Fatal(err)
		}
		b.Add(refuse)
		id = b.post(b.job("connect n1 0", "connect n1 1", "connect n2 2 after 2"))
		j := b.ended(id, suspended)
		left, _ := j["resumeProcedures"].([]any)
		if len(left) != 2 {
			t.Errorf("%d procedures to resume, want 2: %v", len(left), left)
		}
		if status, body := b.person("POST", "/layout-apply", `{"procedures":[]}`); status != 409 || body["code"] != codeSuspended || !strings.Contains(fmt.Sprint(body["message"]), id) {
			t.Errorf("post = %d %v", status, body)
		}
		if status, body := b.person("PUT", "/layout-apply/"+id+"?action=resume", ""); status != 202 || body["status"] != inProgress {
			t.Errorf("resume = %d %v", status, body)
		}
		j = b.ended(id, completed)
		if diff := cmp.Diff(map[int]string{2: completed, 3: completed}, ends(j, "resumeResult")); diff != "" {
			t.Errorf("ends after resume (-want +got):\n%s", diff)
		}
		b.slow(200 * time.Millisecond)
		id = b.post(b.job("disconnect n1 0", "disconnect n1 1", "disconnect n2 2 after 1"))
		b.begun(0)
		if status, _ := b.person("PUT", "/layout-apply/"+id+"?action=cancel&rollbackOnCancel=true", ""); status != 202 {
			t.Errorf("cancel = %d", status)
		}
		j = b.ended(id, canceled)
		if j["rollbackStatus"] != completed || len(b.Attached("00000000-0000-4000-8000-000000000001")) != 2 {
			t.Errorf("after the rollback: %v", j)
		}
	})
}

func TestJobs_list(t *testing.T) {
	b := newBench(t, setting{dialect: "oss"})
	var ids []string
	for range 25 {
		ids = append(ids, b.post(`{"procedures":[]}`))
	}
	list := func(query string) (out []string, total float64) {
		t.Helper()
		status, body := b.person("GET", "/layout-apply"+query, "")
		if status != 200 {
			t.Fatalf("list%s = %d %v", query, status, body)
		}
		all, _ := body["applyResults"].([]any)
		for _, one := range all {
			j, _ := one.(map[string]any)
			id, _ := j["applyID"].(string)
			out = append(out, id)
			if _, shown := j["procedures"]; shown && !strings.Contains(query, "procedures") {
				t.Errorf("list%s shows procedures", query)
			}
		}
		total, _ = body["totalCount"].(float64)
		return out, total
	}
	newest := slices.Clone(ids)
	slices.Reverse(newest)
	for query, want := range map[string][]string{
		"":                                     newest[:20],
		"?limit=2&offset=1":                    newest[1:3],
		"?orderBy=asc&limit=3":                 ids[:3],
		"?offset=30":                           nil,
		"?status=FAILED":                       nil,
		"?fields=procedures&limit=1":           newest[:1],
		"?startedAtSince=2100-01-01T00:00:00Z": nil,
		"?startedAtUntil=2100-01-01T00:00:00%2B09:00&limit=1":     newest[:1],
		"?endedAtSince=2000-01-01T00:00:00Z&limit=1":              newest[:1],
		"?fields=applyResult&fields=procedures&limit=1&offset=24": ids[:1],
	} {
		if got, total := list(query); !slices.Equal(got, want) || want != nil && total != 25 {
			t.Errorf("list%s = %v of %v, want %v", query, got, total, want)
		}
	}
	for _, query := range []string{"?limit=0", "?limit=x", "?offset=-1", "?status=DONE", "?sortBy=id", "?orderBy=up", "?fields=all", "?page=1", "?startedAtSince=now"} {
		if status, body := b.person("GET", "/layout-apply"+query, ""); status != 400 || body["code"] != codeRequest {
			t.Errorf("list%s = %d %v", query, status, body)
		}
	}
}

func TestInventory(t *testing.T) {
	both(t, func(b *bench) {
		t := b.t
		count := func(path string) int {
			_, body := b.person("GET", path, "")
			n, _ := body["count"].(float64)
			return int(n)
		}
		if n := count("/resources/unused"); n < 3 {
			t.Errorf("%d unused at first", n)
		}
		nodes := func() int { return count("/nodes") }
		want := 0 // a CPU without links is no node
		if b.setting.dialect == dialectProduct {
			want = 2
		}
		if n := nodes(); n != want {
			t.Errorf("%d nodes at first, want %d", n, want)
		}
		b.ended(b.post(b.job("connect n1 0")), completed)
		if n := nodes(); n != max(want, 1) {
			t.Errorf("%d nodes", n)
		}
		for path, status := range map[string]int{
			"/resources?detail=TRUE": 200, "/resources?detail=yes": 400, "/resources/x": 404, "/nodes/x": 404, "/resource-groups": 200,
			"/nodes/00000000-0000-4000-8000-000000000001": 200, "/resources/" + b.device(0): 200, "/resources/available": 200,
			"/resources/unused?resourceGroupID=x&resourceGroupID=" + defaultGroup: 200,
		} {
			if got, body := b.person("GET", path, ""); got != status {
				t.Errorf("GET %s = %d %v, want %d", path, got, body, status)
			}
		}
		if status, _ := b.person("PUT", "/resources/"+b.device(1)+"/annotation", `{}`); status != 400 {
			t.Errorf("annotation without a word = %d", status)
		}
	})
}
