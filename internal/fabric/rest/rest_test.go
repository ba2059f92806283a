// SPDX-License-Identifier: Apache-2.0

package rest

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// keycloak gives out tokens until it is told to refuse.
type keycloak struct {
	*httptest.Server
	dir    string
	clock  *clocktesting.FakePassiveClock
	logins atomic.Int32
	answer atomic.Pointer[func(w http.ResponseWriter)]
	gate   chan struct{} // closed: a login is answered
	began  chan struct{} // one for each login
}

func newKeycloak(t *testing.T) *keycloak {
	t.Helper()
	k := &keycloak{dir: t.TempDir(), clock: clocktesting.NewFakePassiveClock(time.Unix(1e9, 0)), gate: make(chan struct{}), began: make(chan struct{}, 100)}
	close(k.gate)
	k.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := k.logins.Add(1)
		k.began <- struct{}{}
		<-k.gate
		if a := k.answer.Load(); a != nil {
			(*a)(w)
			return
		}
		json.NewEncoder(w).Encode(map[string]any{"access_token": fmt.Sprintf("token-%d", n), "expires_in": 300})
	}))
	t.Cleanup(k.Close)
	k.file(t, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: k.Certificate().Raw})))
	k.file(t, "password", "p&w %\n")
	return k
}

func (k *keycloak) file(t *testing.T, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(k.dir, name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (k *keycloak) tokens() *Tokens {
	return NewTokens(NewClient(k.dir, k.clock, nil), k.dir, func(c Credentials) (Grant, error) {
		return Grant{URL: k.URL + "/token", Form: url.Values{"password": {c.Password}}}, nil
	})
}

func (k *keycloak) says(status int, body string) {
	f := func(w http.ResponseWriter) {
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
	k.answer.Store(&f)
}

func TestTokens_oneLoginForAll(t *testing.T) {
	k := newKeycloak(t)
	k.gate = make(chan struct{})
	tokens := k.tokens()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if token, fault := tokens.Get(t.Context()); fault != nil || token != "token-1" {
				t.Errorf("token %q, %v", token, fault)
			}
		})
	}
	close(k.gate)
	wg.Wait()
	if n := k.logins.Load(); n != 1 {
		t.Errorf("%d logins", n)
	}
}

func TestTokens_lifetime(t *testing.T) {
	k := newKeycloak(t)
	tokens := k.tokens()
	get := func(after time.Duration, want string) {
		t.Helper()
		k.clock.SetTime(time.Unix(1e9, 0).Add(after))
		token, fault := tokens.Get(t.Context())
		if fault != nil || token != want {
			t.Errorf("token after %s = %q, %v, want %q", after, token, fault, want)
		}
	}
	get(0, "token-1")
	get(269*time.Second, "token-1")
	get(271*time.Second, "token-2") // renewed before it ends
	tokens.Drop("token-1")          // somebody else's news are old
	get(272*time.Second, "token-2")
	tokens.Drop("token-2")
	get(273*time.Second, "token-3")
	k.says(503, "")
	get(273*time.Second+280*time.Second, "token-3") // its renewal may wait
	k.clock.SetTime(k.clock.Now().Add(21 * time.Second))
	if _, fault := tokens.Get(t.Context()); fault == nil || fault.Class != device.FaultUnreachable {
		t.Errorf("fault = %v, want one of a login that is not to be had", fault)
	}
}

func TestTokens_refused(t *testing.T) {
	k := newKeycloak(t)
	k.says(401, `{"error":"invalid_grant","error_description":"bad: `+url.QueryEscape("p&w %")+` and p&w %"}`)
	tokens := k.tokens()
	for range 5 {
		_, fault := tokens.Get(t.Context())
		if fault == nil || fault.Class != device.FaultUnauthorized || fault.Code != "invalid_grant" || strings.Contains(fault.Error(), "p&w") || strings.Contains(fault.Error(), "p%26w") {
			t.Fatalf("fault = %v", fault)
		}
	}
	if n := k.logins.Load(); n != 1 {
		t.Errorf("%d tries with the same credentials", n)
	}
	k.file(t, "password", "another")
	k.answer.Store(nil)
	if _, fault := tokens.Get(t.Context()); fault != nil {
		t.Errorf("new credentials: %v", fault)
	}
}

func TestTokens_waiterGivesUp(t *testing.T) {
	k := newKeycloak(t)
	k.gate = make(chan struct{})
	tokens := k.tokens()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan *device.Fault, 1)
	go func() {
		_, fault := tokens.Get(ctx)
		ended <- fault
	}()
	<-k.began
	cancel()
	if fault := <-ended; fault == nil || fault.Class != device.FaultUnreachable || !errors.Is(fault, context.Canceled) {
		t.Errorf("fault = %v", fault)
	}
	close(k.gate) // the login was everybody's
	if token, fault := tokens.Get(t.Context()); fault != nil || token != "token-1" {
		t.Errorf("token %q, %v", token, fault)
	}
}

func TestReadCredentials(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"username": "u\r\n", "client_secret": " s "} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := ReadCredentials(dir); err != nil || got != (Credentials{Username: "u", ClientSecret: " s "}) {
		t.Errorf("credentials %+v, %v", got, err)
	}
	if err := os.Mkdir(filepath.Join(dir, "realm"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadCredentials(dir); err == nil {
		t.Error("a directory in place of a file was read")
	}
}

func TestSend(t *testing.T) {
	k := newKeycloak(t)
	tests := []struct {
		name   string
		ca     string
		answer func(w http.ResponseWriter)
		class  device.FaultClass
		status int
		words  string
	}{
		{name: "answer", answer: func(w http.ResponseWriter) { io.WriteString(w, "12345678") }, status: 200},
		{name: "too long", answer: func(w http.ResponseWriter) { io.WriteString(w, "123456789") }, class: device.FaultUnknown, status: 200, words: "longer than 8"},
		{name: "refused at length", answer: func(w http.ResponseWriter) { w.WriteHeader(400); io.WriteString(w, "123456789") }, status: 400},
		{name: "broken off", answer: func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, class: device.FaultUnknown},
		{name: "ends too early", answer: func(w http.ResponseWriter) { w.Header().Set("Content-Length", "8"); io.WriteString(w, "1") }, class: device.FaultUnknown, status: 200, words: "read answer"},
		{name: "redirect", answer: func(w http.ResponseWriter) { w.Header().Set("Location", "/x"); w.WriteHeader(307) }, status: 307},
		{name: "unknown CA", ca: "none", class: device.FaultUnreachable, words: "no connection"},
		{name: "CA is no PEM", ca: "x", class: device.FaultUnreachable, words: "PEM"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := k.dir
			switch tt.ca {
			case "":
				k.answer.Store(&tt.answer)
			case "none":
				dir = ""
			default:
				dir = t.TempDir()
				if err := os.WriteFile(filepath.Join(dir, fileCA), []byte(tt.ca), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var seen []int
			c := NewClient(dir, nil, func(_ string, status int, _ time.Duration) { seen = append(seen, status) })
			defer c.Close()
			r, fault := c.Send(t.Context(), Request{What: "try", Method: "GET", URL: k.URL, Timeout: time.Minute, Limit: 8}, "token")
			if (fault == nil) != (tt.class == "") || fault != nil && (fault.Class != tt.class || !strings.Contains(fault.Error(), tt.words)) {
				t.Errorf("fault = %v, want class %q and %q in it", fault, tt.class, tt.words)
			}
			if r.Status != tt.status || len(r.Body) > 8 || tt.status != 0 && r.Date.IsZero() {
				t.Errorf("reply %+v, want status %d", r, tt.status)
			}
			if tt.words != "PEM" && (len(seen) != 1 || seen[0] != tt.status) {
				t.Errorf("observed %v, want %d", seen, tt.status)
			}
		})
	}
	t.Run("no answer in time", func(t *testing.T) {
		gate := make(chan struct{})
		slow := func(http.ResponseWriter) { <-gate }
		k.answer.Store(&slow)
		defer close(gate)
		c := NewClient(k.dir, nil, nil)
		_, fault := c.Send(t.Context(), Request{What: "try", Method: "GET", URL: k.URL, Timeout: 50 * time.Millisecond, Limit: 8}, "")
		// On a slow machine the time may be over before there is a connection.
		if fault == nil || !strings.Contains(fault.Error(), "no answer within 50ms") {
			t.Errorf("fault = %v", fault)
		}
	})
}

func TestClassify(t *testing.T) {
	for status, want := range map[int]device.FaultClass{
		401: device.FaultUnauthorized, 403: device.FaultUnauthorized, 404: device.FaultNotFound, 410: device.FaultNotFound,
		409: device.FaultBusy, 423: device.FaultBusy, 429: device.FaultBusy, 412: device.FaultConflict, 428: device.FaultConflict,
		405: device.FaultUnsupported, 501: device.FaultUnsupported, 408: device.FaultUnknown, 400: device.FaultRejected,
		418: device.FaultRejected, 302: device.FaultRejected, 500: device.FaultUnknown, 502: device.FaultUnknown, 600: device.FaultUnknown,
	} {
		if got := Classify(status); got != want {
			t.Errorf("status %d is %s, want %s", status, got, want)
		}
	}
}

func jwt(payload string) string {
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".x"
}

func TestDecodeToken(t *testing.T) {
	tests := []struct {
		name, body string
		lifetime   time.Duration
		fails      bool
	}{
		{name: "as said", body: `{"access_token":"t","expires_in":300}`, lifetime: 5 * time.Minute},
		{name: "as text", body: `{"access_token":"t","expires_in":"300"}`, lifetime: 5 * time.Minute},
		{name: "not said", body: `{"access_token":"t"}`, lifetime: defaultLifetime},
		{name: "the token says less", body: `{"access_token":"` + jwt(`{"exp":1060,"iat":1000}`) + `","expires_in":300}`, lifetime: time.Minute},
		{name: "the token says more", body: `{"access_token":"` + jwt(`{"exp":9000,"iat":1000}`) + `","expires_in":300}`, lifetime: 5 * time.Minute},
		{name: "the token has fractions", body: `{"access_token":"` + jwt(`{"exp":1060.5,"iat":"1000"}`) + `"}`, lifetime: 60500 * time.Millisecond},
		{name: "ended by the manager's clock, but not by ours", body: `{"access_token":"` + jwt(`{"exp":1000000000}`) + `","expires_in":300}`, lifetime: 5 * time.Minute},
		{name: "negative", body: `{"access_token":"opaque","expires_in":-5}`, lifetime: defaultLifetime},
		{name: "nonsense", body: `{"access_token":"t","expires_in":"soon"}`, lifetime: defaultLifetime},
		{name: "endless", body: `{"access_token":"t","expires_in":1e300}`, lifetime: defaultLifetime},
		{name: "no token", body: `{"expires_in":300}`, fails: true},
		{name: "no JSON", body: `secret token`, fails: true},
		{name: "no header", body: `{"access_token":"a\nb"}`, fails: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, lifetime, err := decodeToken([]byte(tt.body))
			if (err != nil) != tt.fails || lifetime != tt.lifetime {
				t.Errorf("lifetime %s, %v, want %s", lifetime, err, tt.lifetime)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("error %v quotes the answer", err)
			}
		})
	}
}

func FuzzDecodeToken(f *testing.F) {
	f.Add([]byte(`{"access_token":"` + jwt(`{"exp":1060,"iat":1000}`) + `","expires_in":300}`))
	f.Add([]byte(`{"access_token":"a.b","expires_in":null}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if token, lifetime, err := decodeToken(body); err == nil && (token == "" || lifetime <= 0) {
			t.Errorf("token %q for %s", token, lifetime)
		}
		code, message := decodeRefusal(body, "secret")
		for _, s := range []string{code, message} {
			if !utf8.ValidString(s) || len(s) > LongestText+4 || strings.Contains(s, "secret") && !strings.Contains(s, "<secret>") {
				t.Errorf("%q is not fit for a condition", s)
			}
		}
	})
}

// TestLogins_close: whoever logs in is told to stop, and what is left can be given back.
func TestLogins_close(t *testing.T) {
	dir := t.TempDir()
	began := make(chan struct{})
	logins := NewLogins(nil, dir, func(ctx context.Context, _ Credentials) (string, time.Duration, *device.Fault) {
		close(began)
		<-ctx.Done()
		return "", 0, &device.Fault{Class: device.FaultUnreachable, Err: context.Cause(ctx)}
	})
	ended := make(chan *device.Fault, 1)
	go func() {
		_, fault := logins.Get(t.Context())
		ended <- fault
	}()
	<-began
	if token := logins.Close(); token != "" {
		t.Errorf("token %q of a login that was called off", token)
	}
	if fault := <-ended; fault == nil || fault.Class != device.FaultUnreachable {
		t.Errorf("fault = %v", fault)
	}
	if _, fault := logins.Get(t.Context()); fault == nil || !strings.Contains(fault.Error(), "closed") {
		t.Errorf("fault = %v after the end", fault)
	}
	kept := NewLogins(nil, dir, func(context.Context, Credentials) (string, time.Duration, *device.Fault) { return "t", NoEnd, nil })
	if _, fault := kept.Get(t.Context()); fault != nil {
		t.Fatal(fault)
	}
	if token := kept.Close(); token != "t" {
		t.Errorf("token %q is left, want the one that was given", token)
	}
}

func TestSend_header(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", "/there")
		io.WriteString(w, r.Header.Get("X-Auth-Token")+" "+r.Header.Get("Accept")+" "+r.URL.RawQuery)
	}))
	t.Cleanup(server.Close)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, fileCA), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	c := NewClient(dir, nil, nil)
	defer c.Close()
	r, fault := c.Send(t.Context(), Request{
		What: "try", Method: "GET", URL: server.URL + "/?$skip=3", Timeout: time.Minute, Limit: 1 << 10,
		Header: http.Header{"X-Auth-Token": {"s3cret"}, "Accept": {"text/x"}}, Secrets: []string{"s3cret"},
	}, "")
	if fault != nil || string(r.Body) != "s3cret text/x $skip=3" || r.Header.Get("Location") != "/there" {
		t.Errorf("reply %+v %s, %v", r, r.Body, fault)
	}
	if s := r.Text(); strings.Contains(s, "s3cret") {
		t.Errorf("text %q shows the secret", s)
	}
}

func TestStream(t *testing.T) {
	more := make(chan struct{})
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/events" {
			w.WriteHeader(404)
			io.WriteString(w, "not here")
			return
		}
		io.WriteString(w, "one\n")
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Error(err)
		}
		<-more
		io.WriteString(w, "two\n")
	}))
	t.Cleanup(server.Close)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, fileCA), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	c := NewClient(dir, nil, nil)
	defer c.Close()
	req := Request{What: "try", Method: "GET", URL: server.URL + "/events", Timeout: time.Minute, Limit: 4}
	body, r, fault := c.Stream(t.Context(), req)
	if fault != nil || r.Status != 200 {
		t.Fatalf("stream = %+v, %v", r, fault)
	}
	defer body.Close()
	first := make([]byte, 4)
	if _, err := io.ReadFull(body, first); err != nil || string(first) != "one\n" {
		t.Fatalf("first %q, %v", first, err)
	}
	close(more)
	if rest, err := io.ReadAll(body); err != nil || string(rest) != "two\n" {
		t.Errorf("rest %q, %v", rest, err)
	}
	req.URL = server.URL + "/elsewhere"
	if body, r, fault := c.Stream(t.Context(), req); body != nil || fault != nil || r.Status != 404 || string(r.Body) != "not " {
		t.Errorf("stream = %+v %s, %v, want a bounded refusal", r, r.Body, fault)
	}
	server.Close()
	if _, _, fault := c.Stream(t.Context(), req); fault == nil || fault.Class != device.FaultUnreachable {
		t.Errorf("fault = %v", fault)
	}
}
