// SPDX-License-Identifier: Apache-2.0

package control_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/control"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

func newAPI(tb testing.TB) (*facetest.Chassis, http.Handler) {
	tb.Helper()
	c := facetest.New(tb, facetest.Pool+"timing: {attachDelay: 0s, detachDelay: 0s}\n", facetest.Options{})
	api := &control.API{
		Core: c.Core, Faults: c.Faults, Tokens: c.Tokens, Ready: func() bool { return false }, HostRoot: func(string) string { return "" },
	}
	return c, api.Handler()
}

func call(tb testing.TB, h http.Handler, method, path, body string) (int, string) {
	tb.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(tb.Context(), method, path, strings.NewReader(body)))
	return w.Code, w.Body.String()
}

// TestAPI_refuses: an error has the status that says whose fault it is.
func TestAPI_refuses(t *testing.T) {
	_, h := newAPI(t)
	for _, tt := range []struct {
		method, path, body string
		status             int
		says               string
	}{
		{"GET", "/ready", "", 503, "not all faces serve"},
		{"POST", "/fault", `{"acton":"hang"}`, 400, "acton"},
		{"POST", "/fault", `{`, 400, "read body"},
		{"POST", "/device/z", `{}`, 404, "not found"},
		{"POST", "/device/a-0", `{"health":"Good"}`, 400, "Good"},
		{"POST", "/attach", `{"machine":"n1","device":"z"}`, 404, "not found"},
		{"POST", "/detach", `{"device":"z"}`, 404, "not found"},
		{"POST", "/policies", `{"pick":"best"}`, 400, "best"},
		{"GET", "/job", "", 400, "no CDIM"},
		{"POST", "/job/0123456789", `{"action":"resume"}`, 400, "no CDIM"},
		{"POST", "/loseWorker", "", 400, "no CDIM"},
		{"POST", "/forgetTasks", "", 400, "no Redfish"},
	} {
		if status, text := call(t, h, tt.method, tt.path, tt.body); status != tt.status || !strings.Contains(text, tt.says) {
			t.Errorf("%s %s = %d %s, want %d about %q", tt.method, tt.path, status, text, tt.status, tt.says)
		}
	}
}

// FuzzAPI: no request brings the API down, each answer is JSON, and the chassis stays in order.
func FuzzAPI(f *testing.F) {
	f.Add("POST", "/device/a-0", `{"action":"buildIn","machine":"n1","xid":79}`)
	f.Add("POST", "/device/a-0", `{"opStatus":"","failAttach":"x"}`)
	f.Add("POST", "/machine/n1", `{"power":false,"hotplug":"rescan","driverLoaded":true}`)
	f.Add("POST", "/fault", `{"action":"slow","path":"(","delay":"1s"}`)
	f.Add("POST", "/timing", `{"staleDelay":"-1s"}`)
	f.Add("POST", "/policies", `{"cm":{"count":"atComplete"}}`)
	f.Add("POST", "/token", `{"revokeAll":true,"lifetime":"0s"}`)
	f.Add("POST", "/attach", `{"machine":"n2","device":"b-0"}`)
	f.Add("DELETE", "/fault", ``)
	f.Fuzz(func(t *testing.T, method, path, body string) {
		if !slices.Contains([]string{"GET", "POST", "DELETE"}, method) || !strings.HasPrefix(path, "/") || strings.Contains(body, "Delay") {
			return // a delay is waited for
		}
		c, h := newAPI(t)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, &http.Request{
			Method: method, URL: &url.URL{Path: path}, Body: httptest.NewRequestWithContext(t.Context(), method, "/", strings.NewReader(body)).Body,
		})
		if w.Header().Get("Content-Type") == "application/json" && !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s %s = %d %s", method, path, w.Code, w.Body)
		}
		c.Core.Close()
		if v := c.Core.Violations(); slices.ContainsFunc(v, func(v simapi.Violation) bool { return v.Kind == simapi.Invariant }) {
			t.Errorf("%s %s %s: the chassis is not in order: %+v", method, path, body, v)
		}
		if status, text := call(t, h, "GET", "/state", ""); status != http.StatusOK || !json.Valid([]byte(text)) {
			t.Errorf("state after %s %s: %d %s", method, path, status, text)
		}
	})
}
