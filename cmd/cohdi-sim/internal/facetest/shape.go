// SPDX-License-Identifier: Apache-2.0

package facetest

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// Samples compares messages with those that others have written down: the same fields, of the same types.
type Samples struct {
	// Find finds a file among the descriptions, or skips the test.
	Find func(tb testing.TB, name string) string

	compared map[string]bool
}

// NewSamples declares the flag of fabrictest.Descriptions. A test package declares it once, and compares in one test.
func NewSamples() *Samples {
	return &Samples{Find: fabrictest.Descriptions(), compared: map[string]bool{}}
}

// Same compares a message with a sample. Each known difference is the path of a field, which stands for all that is below it,
// and the reason; one that is none any more is an error. A nil message has not been seen at all.
func (s *Samples) Same(tb testing.TB, sample string, message []byte, known map[string]string) {
	tb.Helper()
	s.compared[sample] = true
	want, err := os.ReadFile(s.Find(tb, "samples/"+sample))
	if err != nil {
		tb.Fatal(err)
	}
	if message == nil {
		tb.Errorf("%s: there was no such message", sample)
		return
	}
	for _, d := range differences(tb, want, message, known) {
		tb.Errorf("%s: %s", sample, d)
	}
}

// All checks that no sample whose name begins so was left out, but for those with a reason: of several samples of one shape,
// one is enough.
func (s *Samples) All(tb testing.TB, prefix string, reasons map[string]string) {
	tb.Helper()
	files, err := filepath.Glob(s.Find(tb, "samples/"+prefix+"*"))
	if err != nil || len(files) == 0 {
		tb.Fatalf("%d samples of %s, %v", len(files), prefix, err)
	}
	for _, f := range files {
		if name := filepath.Base(f); s.compared[name] == (reasons[name] != "") {
			tb.Errorf("%s: compared is %t, and the reason for leaving it out %q", name, s.compared[name], reasons[name])
		}
	}
}

// differences are those that are not known, and those that are and do not show.
func differences(tb testing.TB, want, got []byte, known map[string]string) []string {
	tb.Helper()
	w, g := shapeOf(tb, want), shapeOf(tb, got)
	met := map[string]bool{}
	excused := func(at string) bool {
		for path := range known {
			if rest, below := strings.CutPrefix(at, path); below && (rest == "" || rest[0] == '/' || rest[0] == '[') {
				met[path] = true
				return true
			}
		}
		return false
	}
	var out []string
	for _, at := range slices.Sorted(maps.Keys(w)) {
		_, there := g[at]
		_, parent := g[parentOf(at)]
		switch {
		case !there && parent && !excused(at):
			out = append(out, at+" is in the sample and not in the message")
		case there:
			for kind := range g[at] {
				if !w[at][kind] && !excused(at) {
					out = append(out, fmt.Sprintf("%s is %s, and in the sample %v", at, kind, slices.Sorted(maps.Keys(w[at]))))
				}
			}
		}
	}
	for _, at := range slices.Sorted(maps.Keys(g)) {
		_, there := w[at]
		_, parent := w[parentOf(at)]
		if !there && parent && !excused(at) {
			out = append(out, at+" is in the message and not in the sample")
		}
	}
	for path, reason := range known {
		if !met[path] {
			out = append(out, fmt.Sprintf("%s is no difference any more (%s)", path, reason))
		}
	}
	return out
}

// parentOf is the path of what holds a field or an element: only the uppermost difference is told.
func parentOf(at string) string {
	if list, ok := strings.CutSuffix(at, "[]"); ok {
		return list
	}
	return at[:max(strings.LastIndexByte(at, '/'), 0)]
}

// shapeOf notes the types at each path; elements of a list share one.
func shapeOf(tb testing.TB, message []byte) map[string]map[string]bool {
	tb.Helper()
	var v any
	if err := json.Unmarshal(message, &v); err != nil {
		tb.Fatalf("%v in %s", err, message)
	}
	out := map[string]map[string]bool{}
	note(out, "", v)
	return out
}

func note(into map[string]map[string]bool, at string, v any) {
	kind := "null"
	switch v := v.(type) {
	case map[string]any:
		kind = "an object"
		for name, one := range v {
			note(into, at+"/"+name, one)
		}
	case []any:
		kind = "a list"
		for _, one := range v {
			note(into, at+"[]", one)
		}
	case string:
		kind = "text"
	case bool:
		kind = "true or false"
	case float64:
		kind = "a number"
	}
	if into[at] == nil {
		into[at] = map[string]bool{}
	}
	into[at][kind] = true
}

// Exchange is a request and its answer.
type Exchange struct {
	Method, URI     string
	Request, Answer []byte
	Status          int
}

// Record keeps what goes through a handler.
type Record struct {
	mu  sync.Mutex
	all []Exchange
}

// Wrap puts the record in front of a handler whose answers come as a whole.
func (r *Record) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, err := io.ReadAll(q.Body)
		if err != nil {
			return // the client has gone
		}
		q.Body = io.NopCloser(strings.NewReader(string(body)))
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, q)
		r.mu.Lock()
		r.all = append(r.all, Exchange{q.Method, q.URL.RequestURI(), body, rec.Body.Bytes(), rec.Code})
		r.mu.Unlock()
		maps.Copy(w.Header(), rec.Header())
		w.WriteHeader(rec.Code)
		_, _ = w.Write(rec.Body.Bytes()) //nolint:errcheck // the client has gone
	})
}

// Last is the last exchange of a method whose URI matches a regular expression; nothing where there was none.
func (r *Record) Last(method, uri string) Exchange {
	re := regexp.MustCompile(uri)
	return r.last(func(e Exchange) bool { return e.Method == method && re.MatchString(e.URI) })
}

// LastOf is the last exchange that was answered with a status.
func (r *Record) LastOf(status int) Exchange {
	return r.last(func(e Exchange) bool { return e.Status == status })
}

func (r *Record) last(which func(Exchange) bool) Exchange {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range slices.Backward(r.all) {
		if which(e) {
			return e
		}
	}
	return Exchange{}
}

// Fields is a form or a query as an object. A value that is an object itself is one there, too.
func Fields(tb testing.TB, form string) []byte {
	tb.Helper()
	values, err := url.ParseQuery(form)
	if err != nil {
		tb.Fatal(err)
	}
	out := map[string]any{}
	for name := range values {
		text := values.Get(name)
		if out[name] = text; strings.HasPrefix(text, "{") && json.Valid([]byte(text)) {
			out[name] = json.RawMessage(text)
		}
	}
	data, err := json.Marshal(out)
	if err != nil {
		tb.Fatal(err)
	}
	return data
}
