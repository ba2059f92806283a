// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

var samples = facetest.NewSamples()

// TestFace_shapes compares answers with samples: the same fields of the same types.
func TestFace_shapes(t *testing.T) {
	samples.Find(t, "samples")
	oss, product := newJudge(t), newJudge(t)
	b := newBench(t, setting{dialect: "oss", judge: oss})
	p := newBench(t, setting{dialect: "product", judge: product})
	same := func(name string, got map[string]any, known ...map[string]string) {
		t.Helper()
		data, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		reasons := map[string]string{}
		for _, k := range known {
			maps.Copy(reasons, k)
		}
		samples.Same(t, name, data, reasons)
	}
	get := func(b *bench, path string) map[string]any {
		_, body := b.person("GET", path, "")
		return body
	}
	const solderless = "nothing is soldered to anything"
	for _, x := range []*bench{b, p} {
		x.ended(x.post(x.job("connect n1 0")), completed)
	}
	same("cdim-resources-detail-200.json", get(b, "/resources?detail=true"), map[string]string{"/resources[]/device/constraints": solderless})
	same("cdim-resources-summary-200.json", get(b, "/resources"))
	same("cdim-resource-200-free.json", get(b, "/resources/"+b.device(1)))
	same("cdim-resource-200-attached.json", get(b, "/resources/"+b.device(0)))
	same("cdim-resource-200-source-adapter.json", get(p, "/resources/"+sourceOf(simapi.Machine{UUID: "00000000-0000-4000-8000-000000000001"})))
	same("cdim-resource-200-destination-adapter.json", get(p, "/resources/"+destinationOf(simapi.Machine{UUID: "00000000-0000-4000-8000-000000000001"})))
	same("cdim-unused-200.json", func() map[string]any {
		body := get(b, "/resources/unused")
		list, _ := body["resources"].([]any)
		body["resources"] = slices.DeleteFunc(list, func(r any) bool { return !strings.Contains(fmt.Sprint(r), typeGPU) })
		return body
	}())
	same("cdim-nodes-200-oss.json", get(b, "/nodes"))
	same("cdim-nodes-200-product.json", get(p, "/nodes?detail=true"), map[string]string{"/nodes[]/resources[]/device/constraints": solderless})
	same("cdim-node-200.json", get(b, "/nodes/00000000-0000-4000-8000-000000000001"), map[string]string{"/resources[]/device/constraints": solderless})
	same("cdim-error-404.json", get(b, "/resources/x"))
	same("cdim-error-404-E40020.json", get(b, "/layout-apply/0000000000"))
	_, body := b.person("POST", "/layout-apply", `{"procedures":[{}]}`)
	same("cdim-error-400-E40001.json", body)
	same("cdim-jobs-list-200.json", get(b, "/layout-apply"))

	done := b.post(b.job("connect n2 2"))
	same("cdim-job-200-completed.json", b.ended(done, completed))
	_, body = b.person("PUT", "/layout-apply/"+done+"?action=cancel", "")
	same("cdim-error-409-E40022.json", body)
	b.Add(simapi.Fault{Face: "hw", Action: simapi.ActionStatus, Status: 503, Content: `{"code":"ER005BAS001","message":"hardware busy"}`, Count: 2 * (hardwareRetries + 1)})
	open := b.post(b.job("connect n1 1"))
	same("cdim-job-200-suspended.json", b.ended(open, suspended))
	_, body = b.person("POST", "/layout-apply", `{"procedures":[]}`)
	same("cdim-error-409-E40027.json", body)
	_, body = b.person("PUT", "/layout-apply/"+open+"?action=resume", "")
	same("cdim-resume-202.json", body)
	b.ended(open, suspended)
	b.person("PUT", "/layout-apply/"+open+"?action=cancel", "")
	b.Add(simapi.Fault{Face: "hw", Action: simapi.ActionDropBefore, Count: 1})
	same("cdim-job-200-failed-timeout.json", b.ended(b.post(b.job("connect n1 1")), failed))
	b.Add(simapi.Fault{Face: "hw", Body: b.device(1), Action: simapi.ActionStatus, Status: 500, Content: `{"code":"EF004BAS001","message":"connect failed"}`, Count: 1})
	same("cdim-job-200-failed-partial.json", b.ended(b.post(b.job("connect n1 1", "disconnect n2 2", "connect n1 2 after 1")), failed))
	b.slow(500 * time.Millisecond)
	runs := b.post(b.job("connect n1 1", "connect n1 2 after 1"))
	b.begun(1)
	same("cdim-job-200-in-progress.json", get(b, "/layout-apply/"+runs), map[string]string{"/procedures[]/dependencies[]": "one waits for another here"})
	_, body = b.person("POST", "/layout-apply", `{"procedures":[]}`)
	same("cdim-error-409-E40010.json", body)
	_, body = b.person("PUT", "/layout-apply/"+runs+"?action=cancel&rollbackOnCancel=true", "")
	same("cdim-cancel-202.json", body)
	same("cdim-job-200-canceling.json", get(b, "/layout-apply/"+runs), map[string]string{"/procedures[]/dependencies[]": "one waits for another here", "/applyResult": "nothing has ended yet"})
	same("cdim-job-200-canceled-rolled-back.json", b.ended(runs, canceled))
	stuck := b.post(b.job("connect n1 1 after 9"))
	if err := b.face.LoseWorker(); err != nil {
		t.Fatal(err)
	}
	_, body = b.person("PUT", "/layout-apply/"+stuck+"?action=cancel", "")
	same("cdim-error-409-E40028.json", body)
	for _, step := range []struct{ method, path, body string }{
		{"PUT", "/layout-apply/" + runs + "?action=cancel", ""}, // it is cancelled already
		{"DELETE", "/layout-apply/" + stuck, ""},
		{"GET", "/resources/available", ""},
		{"GET", "/resource-groups", ""},
		{"PUT", "/resources/" + b.device(0) + "/annotation", `{"available":false}`},
		{"POST", "/devices", "[]"},
	} {
		if status, body := b.person(step.method, step.path, step.body); status/100 != 2 {
			t.Errorf("%s %s = %d %v", step.method, step.path, status, body)
		}
	}
	for sample, token := range map[string]string{"cdim-kong-401-no-token.json": "", "cdim-kong-401-expired.json": "Bearer old"} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", api+"/configuration-manager/nodes", nil)
		r.Header.Set("Authorization", token)
		w := httptest.NewRecorder()
		if b.face.Gateway(b.Tokens).ServeHTTP(w, r); w.Code != http.StatusUnauthorized {
			t.Errorf("token %q: %d", token, w.Code)
		}
		samples.Same(t, sample, w.Body.Bytes(), nil)
	}
	for dialect, sample := range map[string]string{"oss": "cdim-apply-request-oss.json", "product": "cdim-apply-request-nec.json"} {
		c := newBench(t, setting{dialect: dialect})
		if _, err := c.client().Attach(t.Context(), fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA, Device: c.device(0)}); err != nil {
			t.Fatal(err)
		}
		for _, r := range c.faults.Log() {
			if r.Method == "POST" {
				samples.Same(t, sample, []byte(r.Body), nil)
			}
		}
	}
	oss.say(t, "GET /nodes 200", "GET /nodes/{id} 200", "GET /resources/{id} 404", "GET /resources/unused 200", "GET /resources/available 200",
		"PUT /resources/{id}/annotation 200", "PUT /layout-apply/{applyID} 200", "PUT /layout-apply/{applyID} 202", "PUT /layout-apply/{applyID} 409",
		"POST /layout-apply 400", "POST /layout-apply 409", "GET /layout-apply 200", "DELETE /layout-apply/{applyID} 204", "GET /resource-groups 200", "POST /devices 201")
	product.say(t, "GET /nodes 200")
	const twice, unserved = "another sample is of this shape", "the face does not serve it"
	samples.All(t, "cdim-", map[string]string{
		"cdim-apply-202.json": "each job that is posted here has it, and its form is checked", "cdim-apply-request-oss-batch.json": twice,
		"cdim-apply-request-nec-disconnect.json": twice, "cdim-annotation-request.json": "the OpenAPI file has it",
		"cdim-error-500-E40018.json": twice,
		"cdim-migration-200.json":    unserved, "cdim-migration-request.json": unserved,
		"cdim-resource-200-critical.json": twice, "cdim-resource-200-maintenance.json": twice, "cdim-resource-200-undetected.json": twice,
	})
}
