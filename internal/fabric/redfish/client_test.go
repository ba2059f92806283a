// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

const (
	one   device.Machine = "00000000-0000-4000-8000-000000000001"
	model string         = "GPU 80GB"
)

func TestNew(t *testing.T) {
	tests := []struct {
		endpoint, credentials, want string
	}{
		{"h", "d", ""},
		{"h:8443", "d", ""},
		{"https://h:8443/", "d", ""},
		{"http://h", "d", "https://"},
		{"https://u:secret@h", "d", "https://"},
		{"https://h/redfish/v1", "d", "https://"},
		{"https://h?x", "d", "https://"},
		{"", "d", "https://"},
		{"::", "d", "endpoint"},
		{"h", "", "credentials"},
	}
	for _, tt := range tests {
		_, err := New(Config{Endpoint: tt.endpoint, Credentials: tt.credentials})
		if (err == nil) != (tt.want == "") || err != nil && (!strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("endpoint %q, credentials %q: %v, want %q", tt.endpoint, tt.credentials, err, tt.want)
		}
	}
}

// fake answers requests by method and path, and knows who is logged in.
type fake struct {
	*httptest.Server
	t   *testing.T
	dir string

	mu sync.Mutex
	// The following are guarded by mu.
	answers  map[string]http.HandlerFunc
	counts   map[string]int
	tokens   map[string]bool
	password string
}

func says(status int, body string, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// newService has one system with a host block, and one free GPU.
func newService(t *testing.T) *fake {
	t.Helper()
	s := &fake{t: t, dir: t.TempDir(), counts: map[string]int{}, tokens: map[string]bool{}, password: "p&w %"}
	s.answers = map[string]http.HandlerFunc{
		"GET /redfish/v1/": says(200, `{"Systems":{"@odata.id":"/s"},"CompositionService":{"@odata.id":"/c"},"Tasks":{"@odata.id":"/t"},"EventService":{"@odata.id":"/e"},"Links":{"Sessions":{"@odata.id":"/sessions"}}}`),
		"POST /sessions":   s.login,
		"DELETE /sessions/1": func(w http.ResponseWriter, r *http.Request) {
			delete(s.tokens, r.Header.Get("X-Auth-Token"))
			w.WriteHeader(204)
		},
		"GET /c":     says(200, `{"ResourceBlocks":{"@odata.id":"/b"}}`),
		"GET /s":     says(200, `{"Members":[{"@odata.id":"/s/1"}],"Members@odata.count":1}`),
		"GET /s/1":   says(200, `{"Id":"1","UUID":"`+string(one)+`","@odata.etag":"\"7\"","Links":{"ResourceBlocks":[{"@odata.id":"/b/h"}]}}`, "Allow", "GET, PATCH"),
		"GET /b":     says(200, `{"Members":[{"@odata.id":"/b/h"},{"@odata.id":"/b/1"}],"Members@odata.count":2}`),
		"GET /b/h":   says(200, `{"ResourceBlockType":["Compute"],"CompositionStatus":{"CompositionState":"Composed"}}`),
		"GET /b/1":   says(200, gpu),
		"GET /b/1/p": says(200, `{"Id":"0","ProcessorType":"GPU","Model":"`+model+`","UUID":"0d5c7e11-4444-4c00-b300-000000000001"}`),
		"GET /t":     says(200, `{"Tasks":{"@odata.id":"/t/all"}}`),
		"GET /t/all": says(200, `{"Members":[],"Members@odata.count":0}`),
	}
	s.Server = httptest.NewTLSServer(http.HandlerFunc(s.answer))
	t.Cleanup(s.Close)
	s.file("username", "agent")
	s.file("password", s.password)
	s.file("ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	return s
}

func (s *fake) file(name, content string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(content), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

func (s *fake) login(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		s.t.Error(err)
	}
	if r.Header.Get("X-Auth-Token") != "" || !strings.Contains(string(body), s.password[1:]) && !strings.Contains(string(body), `p\u0026w %`) {
		says(401, `{"error":{"code":"Base.1.18.NoValidSession","message":"not you: `+strings.ReplaceAll(string(body), `"`, "'")+`"}}`)(w, r)
		return
	}
	token := fmt.Sprintf("token-%d", s.counts["POST /sessions"])
	s.tokens[token] = true
	w.Header().Set("X-Auth-Token", token)
	w.Header().Set("Location", s.URL+"/sessions/1")
	w.WriteHeader(201)
}

func (s *fake) answer(w http.ResponseWriter, r *http.Request) {
	what := r.Method + " " + r.URL.RequestURI()
	s.mu.Lock()
	s.counts[what]++
	h, ok := s.answers[what]
	s.mu.Unlock()
	switch {
	case !ok:
		s.t.Errorf("request %s", what)
		w.WriteHeader(http.StatusTeapot)
	case r.Header.Get("OData-Version") != "4.0":
		s.t.Errorf("request %s without OData-Version", what)
	case what == "GET /redfish/v1/" || what == "POST /sessions":
		if r.Header.Get("Authorization") != "" || r.Header.Get("X-Auth-Token") != "" {
			s.t.Errorf("request %s shows who we are", what)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		h(w, r)
	case !s.known(r):
		says(401, extended("NoValidSession"))(w, r)
	default:
		h(w, r)
	}
}

func (s *fake) known(r *http.Request) bool {
	user, password, ok := r.BasicAuth()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tokens[r.Header.Get("X-Auth-Token")] || ok && user == "agent" && password == s.password
}

func (s *fake) set(what string, h http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[what] = h
}

func (s *fake) count(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[what]
}

func (s *fake) endSessions() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.tokens)
}

func (s *fake) client(clk clock.WithTicker, basic bool) *Client {
	s.t.Helper()
	c, err := New(Config{Endpoint: s.URL, Credentials: s.dir, Basic: basic, Clock: clk, Poll: time.Millisecond})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := c.Close(context.WithoutCancel(s.t.Context())); err != nil {
			s.t.Error(err)
		}
	})
	return c
}

func wantFault(t *testing.T, err error, class device.FaultClass, words string) {
	t.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok || f.Class != class || !strings.Contains(f.Error(), words) {
		t.Errorf("error = %v, want class %s and %q in it", err, class, words)
	}
}

func TestSessions(t *testing.T) {
	s := newService(t)
	c := s.client(nil, false)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if err := c.Health(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := s.count("POST /sessions"); n != 1 {
		t.Errorf("%d logins for 10 callers", n)
	}
	s.endSessions()
	if err := c.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := s.count("POST /sessions"); n != 2 {
		t.Errorf("%d logins after the session had ended, want 2", n)
	}
	// A 401 that a new session does not help is said once.
	before := s.count("GET /c")
	s.set("GET /c", says(401, extended("NoValidSession")))
	wantFault(t, c.Health(t.Context()), device.FaultUnauthorized, "NoValidSession")
	if n := s.count("GET /c") - before; n != 2 {
		t.Errorf("%d requests, want one retry", n)
	}
	s.set("GET /c", says(200, `{}`))
	if err := c.Health(t.Context()); err != nil {
		t.Error(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if n := s.count("DELETE /sessions/1"); n != 1 {
		t.Errorf("%d logouts", n)
	}
}

func TestSessions_refused(t *testing.T) {
	s := newService(t)
	clk := clocktesting.NewFakeClock(time.Unix(1e9, 0))
	c := s.client(clk, false)
	s.file("password", "wr0ng")
	for range 3 {
		err := c.Health(t.Context())
		wantFault(t, err, device.FaultUnauthorized, "NoValidSession")
		if strings.Contains(err.Error(), "wr0ng") {
			t.Errorf("error = %v shows the password", err)
		}
	}
	if n := s.count("POST /sessions"); n != 1 {
		t.Errorf("%d tries with the same password", n)
	}
	s.file("password", s.password) // a new one is tried at once
	if err := c.Health(t.Context()); err != nil {
		t.Error(err)
	}
	s.endSessions()
	s.set("POST /sessions", says(503, extended("SessionLimitExceeded"), "Retry-After", "30"))
	wantFault(t, c.Health(t.Context()), device.FaultBusy, "SessionLimitExceeded")
	s.set("POST /sessions", says(502, "<html>"))
	wantFault(t, c.Health(t.Context()), device.FaultUnreachable, "502")
	s.set("POST /sessions", says(201, ""))
	wantFault(t, c.Health(t.Context()), device.FaultUnreachable, "X-Auth-Token")
	s.set("POST /sessions", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		says(400, "<html>bad request: "+string(b))(w, r)
	})
	err := c.Health(t.Context())
	wantFault(t, err, device.FaultUnauthorized, "<secret>")
	if strings.Contains(err.Error(), "26w") {
		t.Errorf("error = %v shows the password", err)
	}
	s.file("username", "")
	wantFault(t, c.Health(t.Context()), device.FaultUnauthorized, "empty")
}

// TestSessions_found: where the root has no link to sessions their service has one; where there is none, Basic it is.
func TestSessions_found(t *testing.T) {
	s := newService(t)
	s.set("GET /redfish/v1/", says(200, `{"Systems":{"@odata.id":"/s"},"SessionService":{"@odata.id":"/open"}}`))
	s.set("GET /open", says(200, `{"Sessions":{"@odata.id":"/sessions"}}`))
	s.mu.Lock()
	s.tokens[""] = true // everybody may read that
	s.mu.Unlock()
	c := s.client(nil, false)
	if err := c.Health(t.Context()); err != nil || s.count("POST /sessions") != 1 {
		t.Errorf("%v, %d logins", err, s.count("POST /sessions"))
	}
	s = newService(t)
	s.set("GET /redfish/v1/", says(200, `{"Systems":{"@odata.id":"/s"}}`))
	c = s.client(nil, false)
	if err := c.Health(t.Context()); err != nil || s.count("POST /sessions") != 0 {
		t.Errorf("%v, %d logins", err, s.count("POST /sessions"))
	}
	_, err := c.Free(t.Context(), []string{model})
	wantFault(t, err, device.FaultRejected, "CompositionService")
}

func TestBasic(t *testing.T) {
	s := newService(t)
	c := s.client(nil, true)
	if err := c.Health(t.Context()); err != nil || s.count("POST /sessions") != 0 {
		t.Errorf("%v, %d logins", err, s.count("POST /sessions"))
	}
	s.set("GET /c", func(w http.ResponseWriter, r *http.Request) {
		says(403, `{"message":"`+r.Header.Get("Authorization")+`"}`)(w, r)
	})
	err := c.Health(t.Context())
	wantFault(t, err, device.FaultUnauthorized, "<secret>")
	s.file("password", "wrong")
	wantFault(t, c.Health(t.Context()), device.FaultUnauthorized, "NoValidSession")
}

func TestRedirects(t *testing.T) {
	s := newService(t)
	other := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { t.Errorf("request %s to another host", r.URL) }))
	t.Cleanup(other.Close)
	c := s.client(nil, false)
	s.set("GET /c2", says(200, `{"ResourceBlocks":{"@odata.id":"/b"}}`))
	for _, status := range []int{301, 302, 307, 308} {
		for _, to := range []string{"/c2", s.URL + "/c2"} {
			s.set("GET /c", says(status, "", "Location", to))
			if err := c.Health(t.Context()); err != nil {
				t.Errorf("%d to %s: %v", status, to, err)
			}
		}
	}
	for to, words := range map[string]string{other.URL + "/c2": "another host", "": "not an absolute path", "c2": "not an absolute path", "/c": "without an end"} {
		s.set("GET /c", says(307, "", "Location", to))
		wantFault(t, c.Health(t.Context()), device.FaultRejected, words)
	}
	// A change goes on only where nothing can have been done.
	s.set("PATCH /s/1", says(302, "", "Location", "/s/2"))
	_, err := c.Attach(t.Context(), fabric.Intent{Machine: one, Device: "/b/1"})
	if err == nil {
		t.Error("a change went on after a 302")
	}
}

func TestCollect(t *testing.T) {
	tests := []struct {
		name  string
		pages map[string]http.HandlerFunc
		want  string
		class device.FaultClass
	}{
		{"one page", map[string]http.HandlerFunc{"GET /l": says(200, `{"Members":[{"@odata.id":"/1"},{"@odata.id":"/2"}],"Members@odata.count":2}`)}, "/1 /2", ""},
		{"two pages", map[string]http.HandlerFunc{
			"GET /l":         says(200, `{"Members":[{"@odata.id":"/1"}],"Members@odata.count":2,"Members@odata.nextLink":"/l?$skip=1"}`),
			"GET /l?$skip=1": says(200, `{"Members":[{"@odata.id":"/2"},{"@odata.id":"/1"}],"Members@odata.count":2}`),
		}, "/1 /2", ""},
		{"count as text", map[string]http.HandlerFunc{"GET /l": says(200, `{"Members":[{"@odata.id":"/1"}],"Members@odata.count":"1"}`)}, "/1", ""},
		{"wrong count, always the same", map[string]http.HandlerFunc{"GET /l": says(200, `{"Members":[{"@odata.id":"/1"}],"Members@odata.count":9}`)}, "/1", ""},
		{"leads back", map[string]http.HandlerFunc{"GET /l": says(200, `{"Members":[{"@odata.id":"/1"}],"Members@odata.nextLink":"/l"}`)}, "", device.FaultRejected},
		{"no list", map[string]http.HandlerFunc{"GET /l": says(200, `{"Members@odata.count":0}`)}, "", device.FaultUnknown},
		{"not there", map[string]http.HandlerFunc{"GET /l": says(404, extended("ResourceMissingAtURI"))}, "", device.FaultUnreachable},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newService(t)
			for what, h := range tt.pages {
				s.set(what, h)
			}
			links, fault := s.client(nil, false).collect(t.Context(), "inventory", "list", "/l", "")
			if got := strings.Join(paths(links), " "); got != tt.want || (fault == nil) != (tt.class == "") || fault != nil && fault.Class != tt.class {
				t.Errorf("members %s, %v, want %s, %s", got, fault, tt.want, tt.class)
			}
		})
	}
	t.Run("changes for ever", func(t *testing.T) {
		s := newService(t)
		n := 0
		s.set("GET /l", func(w http.ResponseWriter, r *http.Request) {
			n++
			says(200, fmt.Sprintf(`{"Members":[{"@odata.id":"/%d"}],"Members@odata.count":2}`, n))(w, r)
		})
		_, fault := s.client(nil, false).collect(t.Context(), "inventory", "list", "/l", "")
		wantFault(t, fault, device.FaultBusy, "changes")
		if n != rounds {
			t.Errorf("%d readings, want %d", n, rounds)
		}
	})
	t.Run("endless", func(t *testing.T) {
		s := newService(t)
		n := 0
		s.mu.Lock()
		for i := range mostPages + 1 {
			s.answers[fmt.Sprintf("GET /l?n=%d", i)] = func(w http.ResponseWriter, r *http.Request) {
				n++
				says(200, fmt.Sprintf(`{"Members":[],"Members@odata.nextLink":"/l?n=%d"}`, i+1))(w, r)
			}
		}
		s.mu.Unlock()
		_, fault := s.client(nil, false).collect(t.Context(), "inventory", "list", "/l?n=0", "")
		wantFault(t, fault, device.FaultRejected, "no end")
		if n != mostPages {
			t.Errorf("%d pages", n)
		}
	})
	for _, status := range []int{400, 501, 507} {
		t.Run(fmt.Sprintf("expand is refused with %d", status), func(t *testing.T) {
			s := newService(t)
			s.set("GET /l", says(200, `{"Members":[{"@odata.id":"/1"}],"Members@odata.count":1}`))
			s.set("GET /l?$expand=.", says(status, extended("QueryNotSupported")))
			links, fault := s.client(nil, false).collect(t.Context(), "inventory", "list", "/l", "$expand=.")
			if fault != nil || len(links) != 1 {
				t.Errorf("members %v, %v", links, fault)
			}
		})
	}
}

// TestAttach_requests: three reads, one change and one look, when the way is known.
func TestAttach_requests(t *testing.T) {
	s := newService(t)
	c := s.client(nil, false)
	if _, err := c.Free(t.Context(), []string{model}); err != nil {
		t.Fatal(err)
	}
	if _, failed := c.ListAttached(t.Context(), []device.Machine{one}); len(failed) > 0 {
		t.Fatal(failed)
	}
	var body, match string
	s.set("PATCH /s/1", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		body, match = string(b), r.Header.Get("If-Match")
		w.WriteHeader(204)
	})
	s.mu.Lock()
	clear(s.counts)
	s.mu.Unlock()
	op, err := c.Attach(t.Context(), fabric.Intent{Machine: one, Model: model, Device: "/b/1"})
	if err != nil || op.State != fabric.Done || len(op.Devices) != 1 || op.Devices[0].UUID != "GPU-0d5c7e11-4444-4c00-b300-000000000001" {
		t.Errorf("attach = %+v, %v", op, err)
	}
	if body != `{"Links":{"ResourceBlocks":[{"@odata.id":"/b/h"},{"@odata.id":"/b/1"}]}}` || match != `"7"` {
		t.Errorf("body %s, If-Match %s", body, match)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	total := 0
	for _, n := range s.counts {
		total += n
	}
	if total != 6 || s.counts["PATCH /s/1"] != 1 {
		t.Errorf("requests %v, want 3 + 1 + 2", s.counts)
	}
}

func TestAttach_answers(t *testing.T) {
	const running = `{"@odata.id":"/t/9","TaskState":"Running","TaskMonitor":"/m/9"}`
	tests := []struct {
		name   string
		answer http.HandlerFunc
		state  fabric.OperationState
		handle string
		after  time.Duration
		class  device.FaultClass
	}{
		{"204", says(204, ""), fabric.Done, "", 0, ""},
		{"200 with the system", says(200, `{"Id":"1"}`), fabric.Done, "", 0, ""},
		{"202 with a monitor", says(202, running, "Location", "/m/8", "Retry-After", "7"), fabric.Pending, "/m/8", 7 * time.Second, ""},
		{"202 with a monitor of another name", says(202, "", "Location", "https://inside/m/8?x=1"), fabric.Pending, "/m/8?x=1", time.Millisecond, ""},
		{"202 with a task", says(202, running), fabric.Pending, "/m/9", time.Millisecond, ""},
		{"202 with half a task", says(202, `{"@odata.id":"/t/9","TaskState":"New"}`), fabric.Pending, "/t/9", time.Millisecond, ""},
		{"202 without a word", says(202, ""), fabric.Pending, composition, time.Millisecond, ""},
		{"200 with a task", says(200, running), fabric.Pending, "/m/9", time.Millisecond, ""},
		{"200 with a task that is done", says(200, `{"TaskState":"Completed"}`), fabric.Done, "", 0, ""},
		{"202 for a long time", says(202, running, "Retry-After", "86400"), fabric.Pending, "/m/9", longestPoll, ""},
		{"202 with a task that failed", says(202, `{"TaskState":"Exception","Messages":[{"MessageId":"NoResourceMatch"}]}`), "", "", 0, device.FaultNoCapacity},
		{"in use, nobody shows by whom", says(409, extended("ResourceBlockInUse")), "", "", 0, device.FaultRejected},
		{"busy", says(503, extended("ResourceInUse"), "Retry-After", "5"), "", "", 0, device.FaultBusy},
		{"405", says(405, ""), "", "", 0, device.FaultRejected},
		{"block is gone", says(404, extended("ResourceBlockNotFound")), "", "", 0, device.FaultRejected},
		{"machine is gone", says(404, extended("ResourceMissingAtURI")), "", "", 0, device.FaultNotFound},
		{"nobody knows", says(500, extended("InternalError")), "", "", 0, device.FaultUnknown},
		{"a proxy", says(504, "<html>"), "", "", 0, device.FaultUnknown},
		{"stale for ever", says(412, extended("PreconditionFailed")), "", "", 0, device.FaultConflict},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newService(t)
			s.set("PATCH /s/1", tt.answer)
			op, err := s.client(nil, false).Attach(t.Context(), fabric.Intent{Machine: one, Model: model, Device: "/b/1"})
			if op.State != tt.state || op.Handle != tt.handle || op.PollAfter != tt.after || (err == nil) != (tt.class == "") {
				t.Errorf("attach = %+v, %v, want %s, handle %s, %s", op, err, tt.state, tt.handle, tt.class)
			}
			if err != nil {
				wantFault(t, err, tt.class, "")
			}
			want := 1
			if tt.name == "stale for ever" {
				want = tries
			}
			if n := s.count("PATCH /s/1"); n != want {
				t.Errorf("%d changes were asked for, want %d", n, want)
			}
		})
	}
}

// TestAttach_otherForm: what is advertised and not supported after all is asked for in another way.
func TestAttach_otherForm(t *testing.T) {
	s := newService(t)
	s.set("GET /s/1", says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{"ResourceBlocks":[{"@odata.id":"/b/h"}]},"Actions":{"#ComputerSystem.AddResourceBlock":{"target":"/add"}}}`))
	s.set("POST /add", says(400, extended("ActionNotSupported")))
	s.set("PATCH /s/1", says(204, ""))
	op, err := s.client(nil, false).Attach(t.Context(), fabric.Intent{Machine: one, Device: "/b/1"})
	if err != nil || op.State != fabric.Done || s.count("PATCH /s/1") != 1 {
		t.Errorf("attach = %+v, %v", op, err)
	}
	s.set("POST /add", says(502, "<html>"))
	_, err = s.client(nil, false).Attach(t.Context(), fabric.Intent{Machine: one, Device: "/b/1"})
	wantFault(t, err, device.FaultUnknown, "502")
	if n := s.count("PATCH /s/1"); n != 1 {
		t.Errorf("another form was tried after one that may have been taken: %d", n)
	}
}

func TestAttach_notAsked(t *testing.T) {
	s := newService(t)
	c := s.client(nil, false)
	s.set("GET /b/9", says(404, extended("ResourceMissingAtURI")))
	for name, tt := range map[string]struct {
		in    fabric.Intent
		class device.FaultClass
		words string
	}{
		"another model":   {fabric.Intent{Machine: one, Model: "x", Device: "/b/1"}, device.FaultRejected, model},
		"unknown model":   {fabric.Intent{Machine: one, Model: "gpu 80gb"}, device.FaultUnsupported, model},
		"no model":        {fabric.Intent{Machine: one}, device.FaultUnsupported, model},
		"unknown device":  {fabric.Intent{Machine: one, Model: model, Device: "/b/9"}, device.FaultRejected, "404"},
		"no path":         {fabric.Intent{Machine: one, Model: model, Device: "b 9"}, device.FaultRejected, "reference"},
		"host block":      {fabric.Intent{Machine: one, Device: "/b/h"}, device.FaultRejected, "host"},
		"unknown machine": {fabric.Intent{Machine: "00000000-0000-4000-8000-000000000002", Model: model}, device.FaultNotFound, "1 systems"},
	} {
		_, err := c.Attach(t.Context(), tt.in)
		t.Log(name)
		wantFault(t, err, tt.class, tt.words)
	}
	_, err := c.Attach(t.Context(), fabric.Intent{Machine: swapped(one), Device: "/b/1"})
	wantFault(t, err, device.FaultNotFound, "byte order")
	for name, in := range map[string]fabric.Intent{"free": {Machine: one, Device: "/b/1"}, "no path": {Machine: one, Device: "x"}} {
		_, err = c.Detach(t.Context(), in)
		t.Log(name)
		wantFault(t, err, device.FaultNotFound, "")
	}
	_, err = c.Detach(t.Context(), fabric.Intent{Machine: one, Device: "/b/h"})
	wantFault(t, err, device.FaultRejected, "host")
	s.set("GET /s/1", says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{}}`))
	_, err = c.Attach(t.Context(), fabric.Intent{Machine: one, Device: "/b/1"})
	wantFault(t, err, device.FaultNotFound, "no list")
	s.set("GET /s/1", says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{"ResourceBlocks":[]}}`, "Allow", "GET"))
	_, err = c.Attach(t.Context(), fabric.Intent{Machine: one, Device: "/b/1"})
	wantFault(t, err, device.FaultNotFound, "neither")
}

// TestList_danglingLink: what only the system's list still has can be taken away.
func TestList_danglingLink(t *testing.T) {
	s := newService(t)
	s.set("GET /s/1", says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{"ResourceBlocks":[{"@odata.id":"/b/h"},{"@odata.id":"/b/9"}]}}`))
	s.set("GET /b/9", says(404, extended("ResourceMissingAtURI")))
	c := s.client(nil, false)
	lists, failed := c.ListAttached(t.Context(), []device.Machine{one})
	if len(failed) > 0 || len(lists[one]) != 1 || lists[one][0].ID != "/b/9" || lists[one][0].Health != device.HealthUnknown {
		t.Errorf("list = %+v, %v", lists, failed)
	}
	var body string
	s.set("PATCH /s/1", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		body = string(b)
		w.WriteHeader(204)
	})
	if op, err := c.Detach(t.Context(), fabric.Intent{Machine: one, Device: "/b/9"}); err != nil || op.State != fabric.Done {
		t.Errorf("detach = %+v, %v", op, err)
	}
	if body != `{"Links":{"ResourceBlocks":[{"@odata.id":"/b/h"}]}}` {
		t.Errorf("body %s", body)
	}
	s.set("GET /b/9", says(500, extended("InternalError")))
	_, failed = c.ListAttached(t.Context(), []device.Machine{one})
	wantFault(t, failed[one], device.FaultUnknown, "InternalError")
}

func TestPoll(t *testing.T) {
	op := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Handle: "/m/1", Intent: fabric.Intent{Machine: one, Device: "/b/1"}}
	there := says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{"ResourceBlocks":[{"@odata.id":"/b/h"},{"@odata.id":"/b/1"}]}}`)
	tests := []struct {
		name   string
		answer http.HandlerFunc
		system http.HandlerFunc // nil: the device is not there
		state  fabric.OperationState
		class  device.FaultClass
		err    bool
	}{
		{"goes on", says(202, ""), nil, fabric.Pending, "", false},
		{"goes on, firmware", says(200, `{"TaskState":"Running"}`), nil, fabric.Pending, "", false},
		{"is done", says(200, `{"Id":"1"}`), nil, fabric.Done, "", false},
		{"is done without a word", says(204, ""), nil, fabric.Done, "", false},
		{"is done, a task", says(200, `{"TaskState":"Completed"}`), nil, fabric.Done, "", false},
		{"was refused", says(409, extended("ResourceBlockInUse")), nil, fabric.Failed, device.FaultConflict, false},
		{"was in the way", says(409, extended("ResourceInUse")), nil, fabric.Failed, device.FaultBusy, false},
		{"was cancelled", says(409, extended("TaskCancelled")), nil, fabric.Failed, device.FaultUnknown, false},
		{"was stale", says(412, extended("PreconditionFailed")), nil, fabric.Failed, device.FaultConflict, false},
		{"has failed", says(500, extended("InternalError")), nil, fabric.Failed, device.FaultUnknown, false},
		{"a stanza has failed", says(200, `{"Manifest":{"Stanzas":[{"Response":`+extended("NoResourceMatch")+`}]}}`), nil, fabric.Failed, device.FaultNoCapacity, false},
		{"forgotten, and not there", says(404, extended("ResourceMissingAtURI")), nil, fabric.Failed, device.FaultUnknown, false},
		{"forgotten, and there", says(410, ""), there, fabric.Done, "", false},
		{"service is busy", says(503, extended("ServiceTemporarilyUnavailable")), nil, fabric.Pending, device.FaultBusy, true},
		{"proxy", says(502, "<html>"), nil, fabric.Pending, device.FaultUnknown, true},
		{"not for us", says(403, extended("InsufficientPrivilege")), nil, fabric.Pending, device.FaultUnauthorized, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newService(t)
			s.set("GET /m/1", tt.answer)
			if tt.system != nil {
				s.set("GET /s/1", tt.system)
			}
			got, err := s.client(nil, false).Poll(t.Context(), op)
			if got.State != tt.state || (err != nil) != tt.err {
				t.Fatalf("poll = %+v, %v, want %s", got, err, tt.state)
			}
			if err == nil && got.Fault != nil {
				err = got.Fault
			}
			if tt.class != "" {
				wantFault(t, err, tt.class, "")
			}
		})
	}
}

// TestPoll_lostHandle: a task that does what we want is found by what it was made of.
func TestPoll_lostHandle(t *testing.T) {
	s := newService(t)
	s.set("GET /t/all", says(200, `{"Members":[{"@odata.id":"/t/1"},{"@odata.id":"/t/2"},{"@odata.id":"/t/3"},{"@odata.id":"/t/4"}],"Members@odata.count":4}`))
	list := `"Payload":{"TargetUri":"/s/1","HttpOperation":"PATCH","JsonBody":"{\"Links\":{\"ResourceBlocks\":[{\"@odata.id\":\"/b/h\"},{\"@odata.id\":\"/b/1\"}]}}"}`
	s.set("GET /t/1", says(200, `{"@odata.id":"/t/1","TaskState":"Running","TaskMonitor":"/m/1",`+list+`}`))
	s.set("GET /t/2", says(200, `{"@odata.id":"/t/2","TaskState":"Completed","TaskMonitor":"/m/2",`+list+`}`))
	s.set("GET /t/3", says(200, `{"@odata.id":"/t/3","TaskState":"Running"}`))
	s.set("GET /t/4", says(404, ""))
	in := fabric.Intent{Machine: one, Device: "/b/1"}
	c := s.client(nil, false)
	op, err := c.Poll(t.Context(), fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Intent: in})
	if err != nil || op.State != fabric.Pending || op.Handle != "/m/1" {
		t.Errorf("poll = %+v, %v", op, err)
	}
	_, err = c.Poll(t.Context(), fabric.Operation{Kind: fabric.KindDetach, State: fabric.Pending, Intent: fabric.Intent{Machine: one, Device: "/b/h"}})
	wantFault(t, err, device.FaultUnknown, "nothing does that")
	// Its list may show it while it is coming.
	s.set("GET /s/1", says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{"ResourceBlocks":[{"@odata.id":"/b/h"},{"@odata.id":"/b/1"}]}}`))
	op, err = c.Poll(t.Context(), fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Intent: in})
	if err != nil || op.State != fabric.Pending || op.Handle != "/m/1" {
		t.Errorf("poll of what is listed = %+v, %v", op, err)
	}
	_, err = c.Poll(t.Context(), fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Handle: "no path", Intent: in})
	wantFault(t, err, device.FaultRejected, "reference")
}

// TestPoll_nobodyKnows: a task that is forgotten, and a caller that does not say what it was about.
func TestPoll_nobodyKnows(t *testing.T) {
	s := newService(t)
	s.set("GET /m/1", says(404, ""))
	op, err := s.client(nil, false).Poll(t.Context(), fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Handle: "/m/1", Intent: fabric.Intent{Machine: one}})
	if err != nil || op.State != fabric.Failed || op.Fault.Class != device.FaultUnknown {
		t.Errorf("poll = %+v, %v", op, err)
	}
}

// TestMachines_oneBroken: a system that does not answer for the moment is not taken for one that is not there, once it is known.
func TestMachines_oneBroken(t *testing.T) {
	s := newService(t)
	c := s.client(nil, false)
	s.set("GET /s", says(200, `{"Members":[{"@odata.id":"/s/1"},{"@odata.id":"/s/2"},{"@odata.id":"/s/3"}],"Members@odata.count":3}`))
	s.set("GET /s/2", says(200, `{"Id":"2","UUID":"00000000-0000-4000-8000-000000000002","PowerState":"On","Links":{"ResourceBlocks":[]}}`))
	s.set("GET /s/3", says(404, ""))
	broken := says(500, extended("InternalError"))
	s.set("GET /s/1", broken)
	_, err := c.Machines(t.Context())
	wantFault(t, err, device.FaultUnknown, "InternalError")
	s.set("GET /s/1", says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{"ResourceBlocks":[]}}`))
	if _, err = c.Machines(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.set("GET /s/1", broken)
	got, err := c.Machines(t.Context())
	if err != nil || len(got) != 2 || got[0].ID != one || got[0].Power != fabric.PowerUnknown || got[1].Power != fabric.PowerOn {
		t.Errorf("machines = %+v, %v", got, err)
	}
}

// TestLinks_move: what was found is looked for anew when it leads nowhere.
func TestLinks_move(t *testing.T) {
	s := newService(t)
	c := s.client(nil, false)
	if _, failed := c.ListAttached(t.Context(), []device.Machine{one}); len(failed) > 0 {
		t.Fatal(failed)
	}
	s.set("GET /s", says(200, `{"Members":[{"@odata.id":"/s/2"}]}`))
	s.mu.Lock()
	s.answers["GET /s/2"], s.answers["GET /s/1"] = s.answers["GET /s/1"], says(404, "")
	s.mu.Unlock()
	if _, failed := c.ListAttached(t.Context(), []device.Machine{one}); len(failed) > 0 {
		t.Error(failed)
	}
}

// TestMachine_replaced: another machine at a known place is noticed, if not at once.
func TestMachine_replaced(t *testing.T) {
	s := newService(t)
	clk := clocktesting.NewFakeClock(time.Unix(1e9, 0))
	c := s.client(clk, false)
	const two device.Machine = "00000000-0000-4000-8000-000000000002"
	look := func(m device.Machine) error {
		_, failed := c.ListAttached(t.Context(), []device.Machine{m})
		return failed[m]
	}
	if err := look(one); err != nil {
		t.Fatal(err)
	}
	s.set("GET /s/1", says(200, `{"Id":"1","UUID":"`+string(two)+`","Links":{"ResourceBlocks":[]}}`))
	wantFault(t, look(two), device.FaultNotFound, "")
	clk.Step(2 * indexLife)
	if err := look(two); err != nil {
		t.Error(err)
	}
	wantFault(t, look(one), device.FaultNotFound, "")
}

func TestWatch(t *testing.T) {
	s := newService(t)
	s.set("GET /e", says(200, `{"ServerSentEventUri":"/stream?x=1"}`))
	cut := make(chan struct{})
	s.set("GET /stream?x=1", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Accept") != "text/event-stream" {
			t.Errorf("Accept %q", r.Header.Get("Accept"))
		}
		io.WriteString(w, ": hello\n\nid: 1\ndata: {}\n\n")
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Error(err)
		}
		select {
		case <-cut:
		case <-r.Context().Done():
		}
	})
	clk := clocktesting.NewFakeClock(time.Unix(1e9, 0))
	c := s.client(clk, false)
	pokes := make(chan struct{}, 100)
	ended := make(chan error, 1)
	go func() { ended <- c.Watch(t.Context(), func() { pokes <- struct{}{} }) }()
	heard := func() {
		t.Helper()
		for range 10000 {
			select {
			case <-pokes:
				return
			case <-clock.RealClock{}.After(time.Millisecond):
				clk.Step(200 * time.Millisecond)
			}
		}
		t.Fatal("no poke")
	}
	heard() // it listens
	heard() // an event
	cut <- struct{}{}
	heard()
	heard()
	s.endSessions() // does not end the stream, and the next one needs a new session
	cut <- struct{}{}
	heard()
	heard()
	if n := s.count("POST /sessions"); n != 2 {
		t.Errorf("%d logins", n)
	}
	// A stream that says nothing any more is given up.
	before := s.count("GET /stream?x=1")
	heard()
	if n := s.count("GET /stream?x=1"); n != before+1 {
		t.Errorf("%d streams, want one more than %d", n, before)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("watch = %v at the end", err)
	}
}

func TestWatch_none(t *testing.T) {
	for _, body := range []string{`{}`, `{"ServiceEnabled":false,"ServerSentEventUri":"/stream"}`} {
		s := newService(t)
		s.set("GET /e", says(200, body))
		wantFault(t, s.client(nil, false).Watch(t.Context(), func() { t.Error("poked") }), device.FaultUnsupported, "no stream")
	}
	s := newService(t)
	s.set("GET /redfish/v1/", says(200, `{"Systems":{"@odata.id":"/s"}}`))
	wantFault(t, s.client(nil, false).Watch(t.Context(), func() { t.Error("poked") }), device.FaultUnsupported, "no stream")
}

// TestLook_tear: what ends between two reads is not taken for what has not come about.
func TestLook_tear(t *testing.T) {
	s := newService(t)
	composed := strings.NewReplacer("Unused", "Composed", `Compositions":0`, `Compositions":1`).Replace(gpu)
	ends := func(w http.ResponseWriter, r *http.Request) { // while the device is read
		s.set("GET /b/1", says(200, composed))
		s.set("GET /s/1", says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{"ResourceBlocks":[{"@odata.id":"/b/h"},{"@odata.id":"/b/1"}]}}`))
		says(200, composed)(w, r)
	}
	s.set("GET /m/1", says(404, ""))
	c := s.client(nil, false)
	if _, failed := c.ListAttached(t.Context(), []device.Machine{one}); len(failed) > 0 {
		t.Fatal(failed)
	}
	s.set("GET /b/1", ends)
	op, err := c.Poll(t.Context(), fabric.Operation{
		Kind: fabric.KindAttach, State: fabric.Pending, Handle: "/m/1", Intent: fabric.Intent{Machine: one, Device: "/b/1"},
	})
	if err != nil || op.State != fabric.Done {
		t.Errorf("poll = %+v, %v", op, err)
	}
}

// TestAttach_here: a device that has come by another call, while this one looks or is refused, is not asked for and not
// refused.
func TestAttach_here(t *testing.T) {
	composed := strings.NewReplacer("Unused", "Composed", `Compositions":0`, `Compositions":1`, `"ComputerSystems":[]`, `"ComputerSystems":[{"@odata.id":"/s/1"}]`).Replace(gpu)
	listed := says(200, `{"Id":"1","UUID":"`+string(one)+`","Links":{"ResourceBlocks":[{"@odata.id":"/b/h"},{"@odata.id":"/b/1"}]}}`)
	for name, tt := range map[string]struct {
		set   func(s *fake)
		asked int
	}{
		"since the list was read": {func(s *fake) { s.set("GET /b/1", says(200, composed)) }, 0},
		"since the device was read": {func(s *fake) {
			s.set("PATCH /s/1", func(w http.ResponseWriter, r *http.Request) {
				s.set("GET /s/1", listed)
				says(409, extended("ResourceBlockInUse"))(w, r)
			})
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newService(t)
			tt.set(s)
			op, err := s.client(nil, false).Attach(t.Context(), fabric.Intent{Machine: one, Model: model, Device: "/b/1"})
			if err != nil || op.State != fabric.Done || s.count("PATCH /s/1") != tt.asked {
				t.Errorf("attach = %+v, %v after %d changes, want it done after %d", op, err, s.count("PATCH /s/1"), tt.asked)
			}
		})
	}
}
