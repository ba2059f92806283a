// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// bench is a face that counts its work, behind the injector, on a real connection.
type bench struct {
	*Injector
	t     *testing.T
	url   string
	work  *atomic.Int32
	limit *atomic.Int32
}

func start(t *testing.T) bench {
	t.Helper()
	b := bench{New(clock.RealClock{}), t, "", &atomic.Int32{}, &atomic.Int32{}}
	face := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		b.limit.Store(int32(Limit(r.Context())))
		fmt.Fprintf(w, "did %d %s", b.work.Add(1), body)
	})
	s := httptest.NewServer(b.Wrap("fm", face))
	t.Cleanup(s.Close)
	b.url = s.URL
	return b
}

func (b bench) add(f simapi.Fault) {
	b.t.Helper()
	if _, err := b.Add(f); err != nil {
		b.t.Fatal(err)
	}
}

func (b bench) call(ctx context.Context, method, path, body string) (int, string, error) {
	b.t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, b.url+path, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data), err
}

func TestWrap_actions(t *testing.T) {
	tests := []struct {
		name   string
		fault  simapi.Fault
		status int // 0: the connection breaks
		body   string
		work   int32
	}{
		{"status", simapi.Fault{Action: "status", Status: 503, Content: "<html>", ContentType: "text/html"}, 503, "<html>", 0},
		{"status after effect", simapi.Fault{Action: "statusAfterEffect", Status: 500}, 500, "", 1},
		{"drop before", simapi.Fault{Action: "dropBefore"}, 0, "", 0},
		{"drop after", simapi.Fault{Action: "dropAfter"}, 0, "", 1},
		{"dup", simapi.Fault{Action: "dup"}, 200, "did 2 b", 2},
		{"slow", simapi.Fault{Action: "slow", Delay: simapi.Duration(time.Millisecond)}, 200, "did 1 b", 1},
		{"reset", simapi.Fault{Action: "reset"}, 0, "", 1},
		{"partial", simapi.Fault{Action: "partial", Items: 0}, 200, "did 1 b", 1},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			b := start(t)
			b.add(tc.fault)
			status, body, err := b.call(t.Context(), "PATCH", "/x", "b")
			if broken := err != nil; broken != (tc.status == 0) {
				t.Fatalf("answer %d %q, %v", status, body, err)
			}
			if err == nil && (status != tc.status || body != tc.body) {
				t.Errorf("answer %d %q, want %d %q", status, body, tc.status, tc.body)
			}
			if got := b.work.Load(); got != tc.work {
				t.Errorf("the face worked %d times, want %d", got, tc.work)
			}
			if tc.fault.Action == "partial" && b.limit.Load() != 0 {
				t.Errorf("limit %d, want 0", b.limit.Load())
			}
			if rules := b.Rules(); rules[0].Hits != 1 {
				t.Errorf("rule %+v, want one hit", rules[0])
			}
		})
	}
}

func TestWrap_hang(t *testing.T) {
	for _, effect := range []bool{false, true} {
		b := start(t)
		b.add(simapi.Fault{Action: "hang", Effect: effect})
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		_, _, err := b.call(ctx, "PATCH", "/x", "")
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("effect %v: error %v, want the client's deadline", effect, err)
		}
		if got := b.work.Load() == 1; got != effect {
			t.Errorf("effect %v: the face worked: %v", effect, got)
		}
	}
}

func TestWrap_matching(t *testing.T) {
	tests := []struct {
		name  string
		fault simapi.Fault
		want  string // status of each of four calls: e is the error, . is good
	}{
		{"all", simapi.Fault{}, "eeee"},
		{"once", simapi.Fault{Count: 1}, "e..."},
		{"second", simapi.Fault{Nth: 2, Count: 1}, ".e.."},
		{"from the third", simapi.Fault{Nth: 3}, "..ee"},
		{"method", simapi.Fault{Method: "delete"}, ".e.e"},
		{"path", simapi.Fault{Path: "^/a$"}, "ee.."},
		{"body", simapi.Fault{Body: "two"}, ".e.e"},
		{"face", simapi.Fault{Face: "fm"}, "eeee"},
		{"other face", simapi.Fault{Face: "idm"}, "...."},
	}
	calls := []struct{ method, path, body string }{
		{"GET", "/a", "one"}, {"DELETE", "/a", "two"}, {"GET", "/ab", "one"}, {"DELETE", "/ab", "two"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			b := start(t)
			tc.fault.Action, tc.fault.Status, tc.fault.Name = "status", 500, "f"
			b.add(tc.fault)
			got := ""
			for _, c := range calls {
				status, _, err := b.call(t.Context(), c.method, c.path, c.body)
				if err != nil {
					t.Fatal(err)
				}
				got += map[int]string{200: ".", 500: "e"}[status]
			}
			if got != tc.want {
				t.Errorf("hits %s, want %s", got, tc.want)
			}
			log := b.Log()
			for i, e := range log {
				if (e.Fault == "f") != (got[i] == 'e') || e.Path != calls[i].path || e.Body != calls[i].body || !e.Answered {
					t.Errorf("log entry %d: %+v", i, e)
				}
			}
			b.Clear("f")
			if status, _, err := b.call(t.Context(), "DELETE", "/a", "two"); err != nil || status != 200 {
				t.Errorf("after the rule is gone: %d, %v", status, err)
			}
		})
	}
}

// TestWrap_brokenOff: what a face breaks off by itself is in the log, too.
func TestWrap_brokenOff(t *testing.T) {
	i := New(clock.RealClock{})
	s := httptest.NewServer(i.Wrap("fm", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })))
	t.Cleanup(s.Close)
	if _, _, err := (bench{t: t, url: s.URL}).call(t.Context(), "GET", "/x", ""); err == nil {
		t.Fatal("an answer came")
	}
	if log := i.Log(); len(log) != 1 || log[0].Answered || log[0].Status != 0 {
		t.Errorf("log = %+v, want the call without an answer", log)
	}
}

func TestWrap_hidesCredentials(t *testing.T) {
	i := New(clock.RealClock{})
	h := i.Wrap("idm", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "POST", "/token", strings.NewReader("password=x")))
	if log := i.Log(); len(log) != 1 || log[0].Body != "" {
		t.Errorf("log %+v", log)
	}
}

func TestAdd_refuses(t *testing.T) {
	for _, f := range []simapi.Fault{
		{}, {Action: "explode"}, {Action: "status"}, {Action: "status", Status: 99}, {Action: "dup", Path: "("}, {Action: "dup", Nth: -1},
	} {
		if _, err := New(clock.RealClock{}).Add(f); err == nil {
			t.Errorf("accepted %+v", f)
		}
	}
}
