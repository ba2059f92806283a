// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const (
	maxBody   = 1 << 20
	maxLog    = 20000
	maxLogged = 4 << 10
)

type rule struct {
	simapi.FaultState
	path *regexp.Regexp
}

// Injector holds the rules and the request log.
type Injector struct {
	clk clock.WithTicker

	mu    sync.Mutex
	rules []*rule
	made  int
	log   []simapi.Request
	seen  int
}

// New has no rules yet.
func New(clk clock.WithTicker) *Injector { return &Injector{clk: clk} }

// Add checks a rule and puts it behind those that are there; of several that match, the first one acts.
func (i *Injector) Add(f simapi.Fault) (simapi.FaultState, error) {
	actions := simapi.FaultActions()
	if !slices.Contains(actions, f.Action) {
		return simapi.FaultState{}, fmt.Errorf("action %q is none of %s", f.Action, strings.Join(actions, ", "))
	}
	needsStatus := f.Action == simapi.ActionStatus || f.Action == simapi.ActionStatusAfterEffect
	if needsStatus && (f.Status < 200 || f.Status > 599) {
		return simapi.FaultState{}, fmt.Errorf("action %s: status %d is not in 200 to 599", f.Action, f.Status)
	}
	if f.Nth < 0 || f.Count < 0 || f.Items < 0 {
		return simapi.FaultState{}, fmt.Errorf("nth %d, count %d, items %d: must not be negative", f.Nth, f.Count, f.Items)
	}
	re, err := regexp.Compile(f.Path)
	if err != nil {
		return simapi.FaultState{}, fmt.Errorf("path: %w", err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.made++
	if f.Name == "" {
		f.Name = fmt.Sprintf("fault-%d", i.made)
	}
	r := &rule{FaultState: simapi.FaultState{Fault: f}, path: re}
	i.rules = append(i.rules, r)
	return r.FaultState, nil
}

// Rules lists the rules with their counters, spent ones too.
func (i *Injector) Rules() []simapi.FaultState {
	i.mu.Lock()
	defer i.mu.Unlock()
	out := []simapi.FaultState{}
	for _, r := range i.rules {
		out = append(out, r.FaultState)
	}
	return out
}

// Clear removes the rules of that name, or all where name is empty.
func (i *Injector) Clear(name string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.rules = slices.DeleteFunc(i.rules, func(r *rule) bool { return name == "" || r.Name == name })
}

// Log returns the requests, oldest first.
func (i *Injector) Log() []simapi.Request {
	i.mu.Lock()
	defer i.mu.Unlock()
	return append([]simapi.Request{}, i.log...)
}

func (i *Injector) match(face string, r *http.Request, body []byte) (simapi.Fault, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, f := range i.rules {
		if f.Face != "" && f.Face != face || f.Method != "" && !strings.EqualFold(f.Method, r.Method) ||
			!f.path.MatchString(r.URL.Path) || !bytes.Contains(body, []byte(f.Body)) {
			continue
		}
		f.Seen++
		if f.Seen < f.Nth || f.Count > 0 && f.Hits >= f.Count {
			continue
		}
		f.Hits++
		return f.Fault, true
	}
	return simapi.Fault{}, false
}

func (i *Injector) begin(face string, r *http.Request, body []byte, fault string) simapi.Request {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.seen++
	out := simapi.Request{
		ID: i.seen, Time: i.clk.Now(), Face: face, Method: r.Method, Path: r.URL.Path, Query: r.URL.RawQuery, Fault: fault,
	}
	// A login holds the password.
	if face != "idm" && (face != "redfish" || !bytes.Contains(body, []byte(`"Password"`))) {
		out.Body = string(body[:min(len(body), maxLogged)])
	}
	return out
}

func (i *Injector) end(e simapi.Request, status int, answered bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	e.Status, e.Answered, e.Millis = status, answered, i.clk.Since(e.Time).Milliseconds()
	if len(i.log) == maxLog {
		i.log = slices.Delete(i.log, 0, maxLog/10)
	}
	i.log = append(i.log, e)
}

type limitKey struct{}

// Limit is how many devices a face may really attach for this request; negative is no limit.
func Limit(ctx context.Context) int {
	if n, ok := ctx.Value(limitKey{}).(int); ok {
		return n
	}
	return -1
}

// Wrap puts the injector in front of a face.
func (i *Injector) Wrap(face string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
		if err != nil {
			return // the client has gone
		}
		if len(body) > maxBody {
			http.Error(w, "request body is too large", http.StatusRequestEntityTooLarge)
			return
		}
		f, hit := i.match(face, r, body)
		x := &exchange{
			injector: i, fault: f, w: w, r: r, body: body, next: next, entry: i.begin(face, r, body, f.Name),
		}
		if !hit {
			x.forward(r.Context(), w)
			return
		}
		x.act(r.Context())
	})
}

// exchange is one request and what becomes of it.
type exchange struct {
	injector *Injector
	fault    simapi.Fault
	entry    simapi.Request
	w        http.ResponseWriter
	r        *http.Request
	body     []byte
	next     http.Handler
}

func (x *exchange) forward(ctx context.Context, w http.ResponseWriter) {
	s := &statusWriter{ResponseWriter: w}
	answered := false
	// A face that breaks off, as one that is killed does, leaves by a panic.
	defer func() { x.injector.end(x.entry, s.status, answered) }()
	x.next.ServeHTTP(s, x.request(ctx))
	if s.status == 0 {
		s.status = http.StatusOK
	}
	answered = true
}

func (x *exchange) request(ctx context.Context) *http.Request {
	r := x.r.Clone(ctx)
	r.Body = io.NopCloser(bytes.NewReader(x.body))
	return r
}

// work does what the face would do, without sending the answer. It does not end when the client leaves.
func (x *exchange) work(ctx context.Context) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	x.next.ServeHTTP(rec, x.request(context.WithoutCancel(ctx)))
	return rec
}

func (x *exchange) act(ctx context.Context) {
	switch x.fault.Action {
	case simapi.ActionStatus:
		x.answer()
	case simapi.ActionStatusAfterEffect:
		x.work(ctx)
		x.answer()
	case simapi.ActionDropBefore:
		x.drop(0)
	case simapi.ActionDropAfter:
		x.drop(x.work(ctx).Code)
	case simapi.ActionHang:
		status := 0
		if x.fault.Effect {
			status = x.work(ctx).Code
		}
		<-ctx.Done()
		x.injector.end(x.entry, status, false)
	case simapi.ActionSlow:
		x.slow(x.work(ctx))
	case simapi.ActionReset:
		x.reset(x.work(ctx))
	case simapi.ActionDup:
		x.work(ctx)
		x.forward(ctx, x.w)
	case simapi.ActionPartial:
		x.forward(context.WithValue(ctx, limitKey{}, x.fault.Items), x.w)
	}
}

func (x *exchange) answer() {
	h := x.w.Header()
	h.Set("Content-Type", "application/json")
	if x.fault.ContentType != "" {
		h.Set("Content-Type", x.fault.ContentType)
	}
	for k, v := range x.fault.Headers {
		h.Set(k, v)
	}
	x.w.WriteHeader(x.fault.Status)
	_, err := io.WriteString(x.w, x.fault.Content)
	x.injector.end(x.entry, x.fault.Status, err == nil)
}

// drop closes the connection; the server does that for this panic, without a word in its log.
func (x *exchange) drop(status int) {
	x.injector.end(x.entry, status, false)
	panic(http.ErrAbortHandler)
}

// slow holds the headers back and then sends the body byte by byte, each part taking the delay as a whole.
func (x *exchange) slow(rec *httptest.ResponseRecorder) {
	delay := time.Duration(x.fault.Delay)
	if !x.wait(delay) {
		x.injector.end(x.entry, rec.Code, false)
		return
	}
	copyHead(x.w, rec)
	body := rec.Body.Bytes()
	for n := range body {
		if !x.wait(delay / time.Duration(len(body))) {
			x.injector.end(x.entry, rec.Code, false)
			return
		}
		if _, err := x.w.Write(body[n : n+1]); err != nil {
			x.injector.end(x.entry, rec.Code, false)
			return
		}
		if f, ok := x.w.(http.Flusher); ok {
			f.Flush()
		}
	}
	x.injector.end(x.entry, rec.Code, true)
}

func (x *exchange) wait(d time.Duration) bool {
	t := x.injector.clk.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C():
		return true
	case <-x.r.Context().Done():
		return false
	}
}

// reset sends half of the body and then a TCP reset.
func (x *exchange) reset(rec *httptest.ResponseRecorder) {
	rec.Header().Set("Content-Length", fmt.Sprint(rec.Body.Len()))
	copyHead(x.w, rec)
	_, werr := x.w.Write(rec.Body.Bytes()[:rec.Body.Len()/2])
	rc := http.NewResponseController(x.w)
	if err := rc.Flush(); err != nil || werr != nil {
		x.drop(rec.Code)
	}
	conn, _, err := rc.Hijack()
	if err != nil {
		x.drop(rec.Code)
	}
	raw := conn
	if t, ok := raw.(interface{ NetConn() net.Conn }); ok {
		raw = t.NetConn()
	}
	if tcp, ok := raw.(*net.TCPConn); ok {
		// With lingering off the kernel sends RST instead of FIN.
		err = tcp.SetLinger(0)
	}
	if err == nil {
		err = raw.Close()
	}
	x.injector.end(x.entry, rec.Code, err != nil)
}

func copyHead(w http.ResponseWriter, rec *httptest.ResponseRecorder) {
	maps.Copy(w.Header(), rec.Header())
	w.WriteHeader(rec.Code)
}

type statusWriter struct {
	http.ResponseWriter
	status int
}

// Unwrap lets a face flush what it has written.
func (s *statusWriter) Unwrap() http.ResponseWriter { return s.ResponseWriter }

func (s *statusWriter) WriteHeader(code int) {
	s.status = code
	s.ResponseWriter.WriteHeader(code)
}
