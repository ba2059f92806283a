// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"k8s.io/utils/clock"
	"sigs.k8s.io/yaml"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// judge holds what is asked and answered against the services' own OpenAPI files.
type judge struct {
	documents []*openapi3.T

	mu     sync.Mutex
	judged map[string]int // by method, path and status
	faults []string
}

func newJudge(t *testing.T) *judge {
	t.Helper()
	j := &judge{judged: map[string]int{}}
	for _, name := range []string{"configuration-management-api", "layout-apply-api"} {
		loader := openapi3.NewLoader()
		loader.ReadFromURIFunc = func(_ *openapi3.Loader, at *url.URL) ([]byte, error) {
			data, err := os.ReadFile(at.Path)
			if err != nil {
				return nil, err
			}
			var v any
			if err := yaml.Unmarshal(data, &v); err != nil {
				return nil, err
			}
			mend(v)
			return json.Marshal(v)
		}
		document, err := loader.LoadFromFile(samples.Find(t, "openapi/"+name+"/openapi.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		j.documents = append(j.documents, document)
	}
	return j
}

// mend puts in order what is wrong in the files: a type that OpenAPI does not have, numbers that are one of some texts, and
// headers that are schemas.
func mend(v any) {
	switch v := v.(type) {
	case map[string]any:
		if v["type"] == "datetime" || v["type"] == "number" && v["enum"] != nil {
			v["type"] = "string"
		}
		if v["content"] != nil {
			delete(v, "headers")
		}
		for _, one := range v {
			mend(one)
		}
	case []any:
		for _, one := range v {
			mend(one)
		}
	}
}

// route finds the operation of a request; nil is one that the files do not have.
func (j *judge) route(method, path string) (*routers.Route, map[string]string) {
	parts := strings.Split(strings.TrimPrefix(path, api), "/")
	for _, exact := range []bool{true, false} {
		for _, d := range j.documents {
			for template, item := range d.Paths.Map() {
				params, ok := match(strings.Split(template, "/"), parts)
				if op := item.GetOperation(method); ok && op != nil && exact == (len(params) == 0) {
					return &routers.Route{Spec: d, Path: template, PathItem: item, Method: method, Operation: op}, params
				}
			}
		}
	}
	return nil, nil
}

func match(template, parts []string) (params map[string]string, ok bool) {
	if len(template) != len(parts) {
		return nil, false
	}
	params = map[string]string{}
	for i, t := range template {
		if strings.HasPrefix(t, "{") {
			name := strings.Trim(t, "{}")
			// The files spell it in two ways.
			params[name], params[strings.ToUpper(name)] = parts[i], parts[i]
		} else if t != parts[i] {
			return nil, false
		}
	}
	return params, true
}

// wrap puts the judge in front of the face.
func (j *judge) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client has gone
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		j.judge(r, body, rec)
		maps.Copy(w.Header(), rec.Header())
		w.WriteHeader(rec.Code)
		_, _ = w.Write(rec.Body.Bytes())
	})
}

// plain puts the product's dialect in the words of the files, which have the other one.
func plain(body []byte) []byte {
	body = bytes.ReplaceAll(body, []byte(`"sourceDeviceID"`), []byte(`"targetCPUID"`))
	return bytes.ReplaceAll(body, []byte(`"destinationDeviceID"`), []byte(`"targetDeviceID"`))
}

// judge holds answers against the files, and questions that were granted.
func (j *judge) judge(r *http.Request, body []byte, rec *httptest.ResponseRecorder) {
	what := fmt.Sprintf("%s %s %d", r.Method, r.URL.RequestURI(), rec.Code)
	route, params := j.route(r.Method, r.URL.Path)
	j.mu.Lock()
	defer j.mu.Unlock()
	if route == nil {
		j.faults = append(j.faults, what+": the files have no such operation")
		return
	}
	j.judged[fmt.Sprintf("%s %s %d", r.Method, route.Path, rec.Code)]++
	// Validation reads the answer after the request is over.
	ctx := context.WithoutCancel(r.Context())
	in := &openapi3filter.RequestValidationInput{Request: r, PathParams: params, Route: route}
	accuse := func(of string, err error) {
		if err != nil {
			why, _, _ := strings.Cut(err.Error(), "\nSchema:")
			j.faults = append(j.faults, what+": "+of+": "+why)
		}
	}
	if rec.Code < http.StatusBadRequest {
		r.Body = io.NopCloser(bytes.NewReader(plain(body)))
		accuse("question", openapi3filter.ValidateRequest(ctx, in))
	}
	out := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: in, Status: rec.Code, Header: rec.Header(), Options: &openapi3filter.Options{IncludeResponseStatus: true, MultiError: true},
	}
	accuse("answer", openapi3filter.ValidateResponse(ctx, out.SetBodyBytes(plain(rec.Body.Bytes()))))
}

// say tells what was wrong, and what was not met.
func (j *judge) say(t *testing.T, met ...string) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, f := range j.faults {
		t.Error(f)
	}
	for _, m := range met {
		if j.judged[m] == 0 {
			t.Errorf("there was no %s among %v", m, slices.Sorted(maps.Keys(j.judged)))
		}
	}
}

// TestFace_openAPI lets the agent's client do its work, and a person all that there is, before a judge.
func TestFace_openAPI(t *testing.T) {
	for _, dialect := range []string{"oss", "product"} {
		t.Run(dialect, func(t *testing.T) {
			j := newJudge(t)
			b := newBench(t, setting{dialect: dialect, judge: j})
			ctx, m := t.Context(), b.client()
			if _, err := m.Machines(ctx); err != nil {
				t.Fatal(err)
			}
			if _, err := m.Free(ctx, []string{fabrictest.ModelA}); err != nil {
				t.Fatal(err)
			}
			for _, ask := range []func(context.Context, fabric.Intent) (fabric.Operation, error){m.Attach, m.Detach} {
				op, err := ask(ctx, fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA, Device: b.device(0)})
				if err == nil {
					op, err = fabrictest.Wait(ctx, clock.RealClock{}, m, op)
				}
				if err != nil {
					t.Fatalf("%+v: %v", op, err)
				}
				// Without its name, work is looked for in the list.
				op.Handle, op.State = "", fabric.Pending
				if _, err := m.Poll(ctx, op); err != nil {
					t.Fatal(err)
				}
				if _, failed := m.ListAttached(ctx, []device.Machine{fabrictest.MachineOne}); len(failed) > 0 {
					t.Fatal(failed)
				}
			}
			j.say(t, "GET /resources 200", "POST /layout-apply 202", "GET /layout-apply/{applyID} 200", "GET /layout-apply 200")
		})
	}
}

// TestJudge: what is wrong does not pass.
func TestJudge(t *testing.T) {
	for name, tt := range map[string]struct {
		method, path, question string
		status                 int
		answer, want           string
	}{
		"in order":              {"GET", "/layout-apply/0123456789", "", 200, `{"applyID":"0123456789","status":"COMPLETED","procedures":[],"applyResult":[],"startedAt":"x","endedAt":"x"}`, ""},
		"an answer of a type":   {"POST", "/layout-apply", `{"procedures":[]}`, 202, `{"applyID":7}`, "answer: "},
		"something within it":   {"GET", "/layout-apply/0123456789", "", 200, `{"applyID":"0123456789","status":"COMPLETED","procedures":[{"operation":"dance"}],"startedAt":"x"}`, "answer: "},
		"a status that is none": {"GET", "/resources", "", 418, `{}`, "answer: "},
		"a question":            {"POST", "/layout-apply", `{"procedures":[{"operationID":1}]}`, 202, `{"applyID":"0123456789"}`, "question: "},
		"a parameter":           {"GET", "/layout-apply?limit=some", "", 200, `{"count":0,"totalCount":0,"applyResults":[]}`, "question: "},
		"an operation":          {"GET", "/nothing", "", 200, `{}`, "no such operation"},
	} {
		t.Run(name, func(t *testing.T) {
			j := newJudge(t)
			r := httptest.NewRequestWithContext(t.Context(), tt.method, api+tt.path, strings.NewReader(tt.question))
			r.Header.Set("Content-Type", "application/json")
			j.wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(tt.status)
				_, _ = io.WriteString(w, tt.answer)
			})).ServeHTTP(httptest.NewRecorder(), r)
			if found := strings.Join(j.faults, "; "); !strings.Contains(found, tt.want) || (found == "") != (tt.want == "") {
				t.Errorf("faults %q, want %q", found, tt.want)
			}
		})
	}
}
