// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

func TestNew(t *testing.T) {
	const secure, open = "https://cdim.example.com", "http://cdim.example.com:8080"
	tests := []struct {
		name string
		cfg  Config
		want string
	}{
		{"gateway", Config{Dialect: DialectOSS, Gateway: secure, Login: secure + "/auth/", Credentials: "d"}, ""},
		{"direct", Config{Dialect: DialectProduct, ConfigurationManager: open, LayoutApply: open + "/", PlainHTTP: true}, ""},
		{"direct with TLS", Config{Dialect: DialectProduct, ConfigurationManager: secure, LayoutApply: secure}, ""},
		{"no dialect", Config{Gateway: secure, Login: secure, Credentials: "d"}, "dialect"},
		{"plain by mistake", Config{Dialect: DialectOSS, ConfigurationManager: open, LayoutApply: open}, "not encrypted"},
		{"plain gateway by mistake", Config{Dialect: DialectOSS, Gateway: open, Login: secure, Credentials: "d"}, "not encrypted"},
		{"plain login by mistake", Config{Dialect: DialectOSS, Gateway: secure, Login: open, Credentials: "d"}, "not encrypted"},
		{"one service only", Config{Dialect: DialectOSS, ConfigurationManager: secure}, "layout-apply"},
		{"gateway without login", Config{Dialect: DialectOSS, Gateway: secure, Credentials: "d"}, "login"},
		{"login without gateway", Config{Dialect: DialectOSS, ConfigurationManager: secure, LayoutApply: secure, Login: secure}, "no token"},
		{"gateway without credentials", Config{Dialect: DialectOSS, Gateway: secure, Login: secure}, "credentials"},
		{"gateway and services", Config{Dialect: DialectOSS, Gateway: secure, Login: secure, Credentials: "d", LayoutApply: secure}, "which"},
		{"path", Config{Dialect: DialectOSS, ConfigurationManager: secure + "/cdim", LayoutApply: secure}, "form"},
		{"password in the URL", Config{Dialect: DialectOSS, ConfigurationManager: "https://u:p@h", LayoutApply: secure}, "form"},
		{"no URL", Config{Dialect: DialectOSS, ConfigurationManager: "::", LayoutApply: secure}, "configuration-manager"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := New(tt.cfg)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error = %v, want %q in it", err, tt.want)
			}
			if err != nil && strings.Contains(err.Error(), "u:p@") {
				t.Errorf("error = %v shows the password", err)
			}
		})
	}
}

func TestGrant(t *testing.T) {
	tests := []struct {
		name string
		cred rest.Credentials
		want url.Values // without client_id and scope
	}{
		{"user", rest.Credentials{Realm: "r", ClientID: "c", Username: "u", Password: "p"}, url.Values{"grant_type": {"password"}, "username": {"u"}, "password": {"p"}}},
		{
			"user of a client with a secret",
			rest.Credentials{Realm: "r", ClientID: "c", Username: "u", Password: "p", ClientSecret: "s"},
			url.Values{"grant_type": {"password"}, "username": {"u"}, "password": {"p"}, "client_secret": {"s"}},
		},
		{"service account", rest.Credentials{Realm: "r", ClientID: "c", ClientSecret: "s"}, url.Values{"grant_type": {"client_credentials"}, "client_secret": {"s"}}},
		{"half a user", rest.Credentials{Realm: "r", ClientID: "c", Username: "u", ClientSecret: "s"}, nil},
		{"nothing secret", rest.Credentials{Realm: "r", ClientID: "c"}, nil},
		{"no realm", rest.Credentials{ClientID: "c", ClientSecret: "s"}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g, err := grant("https://k/auth", tt.cred)
			if (err == nil) != (tt.want != nil) {
				t.Fatalf("error = %v", err)
			}
			if err != nil {
				return
			}
			tt.want.Set("client_id", "c")
			tt.want.Set("scope", "openid")
			if diff := cmp.Diff(tt.want, g.Form); diff != "" {
				t.Errorf("form (-want +got):\n%s", diff)
			}
			if g.URL != "https://k/auth/realms/r/protocol/openid-connect/token" {
				t.Errorf("URL %s", g.URL)
			}
		})
	}
}

// script answers requests by their method and path below the API.
type script map[string]func(w http.ResponseWriter, body string)

func says(status int, body string) func(http.ResponseWriter, string) {
	return func(w http.ResponseWriter, _ string) {
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

func (s script) client(t *testing.T, dialect Dialect) *Client {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		what := r.Method + " " + strings.TrimPrefix(r.URL.Path, "/cdim/api/v1")
		answer, ok := s[what]
		if !ok {
			t.Errorf("request %s", what)
			w.WriteHeader(http.StatusTeapot)
			return
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		answer(w, string(body))
	}))
	t.Cleanup(server.Close)
	c, err := New(Config{Dialect: dialect, ConfigurationManager: server.URL, LayoutApply: server.URL, PlainHTTP: true, Poll: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
	return c
}

func (s script) with(what string, answer func(http.ResponseWriter, string)) script {
	out := script{what: answer}
	for k, v := range s {
		if k != what {
			out[k] = v
		}
	}
	return out
}

// stocked has one machine in either dialect, a free GPU, and one that is on the machine.
func stocked() script {
	return script{
		"GET /resources": says(200, string(list(
			cpu(cpuOne, gpuTwo, source), gpu(gpuOne), gpu(gpuTwo, cpuOne, adapter),
			thing(source, typeSource, attribute(statusSource), cpuOne, adapter), thing(adapter, typeDestination, attribute(statusDestination), source),
		))),
		"GET /layout-apply": says(200, `{"count":0,"totalCount":0,"applyResults":[]}`),
	}
}

func TestChange_body(t *testing.T) {
	for _, tt := range []struct {
		dialect Dialect
		detach  bool
		want    string
	}{
		{DialectOSS, false, `{"operationID":1,"operation":"connect","targetCPUID":"` + cpuOne + `","targetDeviceID":"` + gpuOne + `","dependencies":[]}`},
		{DialectOSS, true, `{"operationID":1,"operation":"disconnect","targetCPUID":"` + cpuOne + `","targetDeviceID":"` + gpuTwo + `","dependencies":[]}`},
		{DialectProduct, false, `{"operationID":1,"operation":"connect","sourceDeviceID":"` + adapter + `","destinationDeviceID":"` + gpuOne + `","dependencies":[]}`},
		{DialectProduct, true, `{"operationID":1,"operation":"disconnect","sourceDeviceID":"` + adapter + `","destinationDeviceID":"` + gpuTwo + `","dependencies":[]}`},
	} {
		var got string
		c := stocked().with("POST /layout-apply", func(w http.ResponseWriter, body string) {
			got = body
			says(202, `{"applyID":"0a1b2c3d4e"}`)(w, body)
		}).client(t, tt.dialect)
		change, in := c.Attach, fabric.Intent{Machine: one, Model: model, Device: gpuOne}
		if tt.detach {
			change, in = c.Detach, fabric.Intent{Machine: one, Model: model, Device: gpuTwo}
		}
		op, err := change(t.Context(), in)
		if err != nil || op.State != fabric.Pending || op.Handle != "0a1b2c3d4e" || op.PollAfter != time.Millisecond || op.Intent.Device != in.Device {
			t.Errorf("%s: %+v, %v", tt.dialect, op, err)
		}
		if diff := cmp.Diff(`{"procedures":[`+tt.want+`]}`, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.dialect, diff)
		}
	}
}

func TestAttach_refusals(t *testing.T) {
	tests := []struct {
		name   string
		status int
		body   string
		class  device.FaultClass
		words  string
	}{
		{"another job", 409, `{"code":"E40010","message":"Already running."}`, device.FaultBusy, "Already"},
		{"suspended job", 409, `{"code":"E40027","message":"Suspended data exist. applyID: 0a1b2c3d50"}`, device.FaultSuspended, "0a1b2c3d50"},
		{"conflict of another kind", 409, `{"code":"E40028","message":"worker process"}`, device.FaultConflict, "E40028"},
		{"conflict without words", 409, ``, device.FaultBusy, ""},
		{"form", 400, `{"code":"E40001","message":"'targetCPUID' is a required property"}`, device.FaultRejected, "dialect oss"},
		{"path unknown to the gateway", 404, `{"message":"no Route matched with those values"}`, device.FaultRejected, "Route"},
		{"too many", 429, `{"message":"API rate limit exceeded"}`, device.FaultBusy, "rate"},
		{"nobody asked us for a token before", 401, `{"message":"Unauthorized"}`, device.FaultUnauthorized, ""},
		{"not allowed", 403, `{"message":"You cannot consume this service"}`, device.FaultUnauthorized, "consume"},
		{"server trouble", 500, `{"code":"E40018","message":"Could not connect to ApplyStatusDB."}`, device.FaultUnknown, "E40018"},
		{"gateway timeout", 504, `<html>Gateway&nbsp;Time-out</html>`, device.FaultUnknown, "html"},
		{"moved", 307, ``, device.FaultRejected, ""},
		{"success without an id", 202, `{}`, device.FaultUnknown, "applyID"},
		{"success with a path as id", 202, `{"applyID":"../x"}`, device.FaultUnknown, "applyID"},
		{"success in another tongue", 200, `ok`, device.FaultUnknown, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := stocked().with("POST /layout-apply", says(tt.status, tt.body)).client(t, DialectOSS)
			_, err := c.Attach(t.Context(), fabric.Intent{Machine: one, Model: model, Device: gpuOne})
			wantFault(t, err, tt.class, tt.words)
		})
	}
}

func wantFault(t *testing.T, err error, class device.FaultClass, words string) {
	t.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok || f.Class != class || !strings.Contains(f.Error(), words) {
		t.Errorf("error = %v, want class %s and %q in it", err, class, words)
	}
}

func TestAttach_notAsked(t *testing.T) {
	tests := []struct {
		name  string
		in    fabric.Intent
		class device.FaultClass
		words string
	}{
		{"other model", fabric.Intent{Machine: one, Model: "GPU 80Gb", Device: gpuOne}, device.FaultRejected, model},
		{"unknown model", fabric.Intent{Machine: one, Model: "gpu 80GB"}, device.FaultUnsupported, model},
		{"no model", fabric.Intent{Machine: one}, device.FaultUnsupported, model},
		{"no device", fabric.Intent{Machine: one, Model: model}, device.FaultRejected, "choose"},
		{"unknown device", fabric.Intent{Machine: one, Model: model, Device: "x"}, device.FaultRejected, "no such GPU"},
		{"device is a CPU", fabric.Intent{Machine: one, Device: cpuOne}, device.FaultRejected, "no such GPU"},
		{"unknown machine", fabric.Intent{Machine: two, Model: model, Device: gpuOne}, device.FaultNotFound, "1 CPUs"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := stocked().client(t, DialectOSS).Attach(t.Context(), tt.in) // the script knows no POST
			wantFault(t, err, tt.class, tt.words)
		})
	}
	t.Run("inventory is not to be had", func(t *testing.T) {
		c := script{"GET /resources": says(502, "<html>")}.client(t, DialectOSS)
		_, err := c.Attach(t.Context(), fabric.Intent{Machine: one, Model: model, Device: gpuOne})
		wantFault(t, err, device.FaultUnreachable, "502") // definite: no change was asked for
		_, failed := c.ListAttached(t.Context(), []device.Machine{one})
		wantFault(t, failed[one], device.FaultUnknown, "502")
	})
	t.Run("no adapters", func(t *testing.T) {
		c := script{"GET /resources": says(200, string(list(cpu(cpuOne), gpu(gpuOne))))}.client(t, DialectProduct)
		_, err := c.Attach(t.Context(), fabric.Intent{Machine: one, Model: model, Device: gpuOne})
		wantFault(t, err, device.FaultNotFound, "eesv")
	})
}

func TestDetach_notAsked(t *testing.T) {
	for name, in := range map[string]fabric.Intent{
		"free":            {Machine: one, Device: gpuOne},
		"unknown device":  {Machine: one, Device: "x"},
		"unknown machine": {Machine: two, Device: gpuTwo},
	} {
		_, err := stocked().client(t, DialectOSS).Detach(t.Context(), in)
		t.Log(name)
		wantFault(t, err, device.FaultNotFound, "")
	}
}

// TestDetachAll: one job for all that is there; what is not there, and what becomes of the job, is said of each.
func TestDetachAll(t *testing.T) {
	const gpuThree = "bbbbbbbb-0000-4000-8000-000000000003"
	three := stocked().with("GET /resources", says(200, string(list(
		cpu(cpuOne, gpuOne, gpuTwo, source), gpu(gpuOne, cpuOne, adapter), gpu(gpuTwo, cpuOne, adapter), gpu(gpuThree),
		thing(source, typeSource, attribute(statusSource), cpuOne, adapter), thing(adapter, typeDestination, attribute(statusDestination), source),
	))))
	steps := map[Dialect]string{
		DialectOSS: `{"operationID":1,"operation":"disconnect","targetCPUID":"` + cpuOne + `","targetDeviceID":"` + gpuOne + `","dependencies":[]},` +
			`{"operationID":2,"operation":"disconnect","targetCPUID":"` + cpuOne + `","targetDeviceID":"` + gpuTwo + `","dependencies":[]}`,
		DialectProduct: `{"operationID":1,"operation":"disconnect","sourceDeviceID":"` + adapter + `","destinationDeviceID":"` + gpuOne + `","dependencies":[]},` +
			`{"operationID":2,"operation":"disconnect","sourceDeviceID":"` + adapter + `","destinationDeviceID":"` + gpuTwo + `","dependencies":[]}`,
	}
	job := func(dialect Dialect) string {
		return `{"applyResults":[{"applyID":"0a1b2c3d4e","status":"IN_PROGRESS","procedures":[` + steps[dialect] + `]}]}`
	}
	ins := []fabric.Intent{{Machine: one, Device: gpuOne}, {Machine: one, Device: gpuThree}, {Machine: one, Device: gpuTwo}, {Machine: one}}
	for _, tt := range []struct {
		name   string
		status int
		answer string
		jobs   bool
		class  device.FaultClass // of those that are there; none is that the job has begun
	}{
		{name: "begun", status: 202, answer: `{"applyID":"0a1b2c3d4e"}`},
		{name: "answer lost, it runs", status: 502, jobs: true},
		{name: "answer lost, and no job does it", status: 502, class: device.FaultUnknown},
		{name: "ours of before a crash runs", status: 409, answer: `{"code":"E40010"}`, jobs: true},
		{name: "another runs", status: 409, answer: `{"code":"E40010"}`, class: device.FaultBusy},
		{name: "one waits for a person", status: 409, answer: `{"code":"E40027"}`, class: device.FaultSuspended},
		{name: "form", status: 400, answer: `{"code":"E40001"}`, class: device.FaultRejected},
	} {
		for dialect, want := range steps {
			t.Run(tt.name+", "+string(dialect), func(t *testing.T) {
				var bodies []string
				s := three.with("POST /layout-apply", func(w http.ResponseWriter, body string) {
					bodies = append(bodies, body)
					says(tt.status, tt.answer)(w, body)
				})
				if tt.jobs {
					s = s.with("GET /layout-apply", says(200, job(dialect)))
				}
				begun := s.client(t, dialect).DetachAll(t.Context(), ins)
				if diff := cmp.Diff([]string{`{"procedures":[` + want + `]}`}, bodies); diff != "" {
					t.Errorf("jobs (-want +got):\n%s", diff)
				}
				if len(begun) != len(ins) {
					t.Fatalf("begun %+v", begun)
				}
				wantFault(t, begun[1].Err, device.FaultNotFound, gpuThree)
				wantFault(t, begun[3].Err, device.FaultRejected, "no device")
				for _, i := range []int{0, 2} {
					if tt.class != "" {
						wantFault(t, begun[i].Err, tt.class, ins[i].Device)
						continue
					}
					if op := begun[i].Operation; begun[i].Err != nil || op.State != fabric.Pending || op.Kind != fabric.KindDetach || op.Handle != "0a1b2c3d4e" || op.Intent.Device != ins[i].Device {
						t.Errorf("%s: %+v, %v", ins[i].Device, op, begun[i].Err)
					}
				}
			})
		}
	}
	t.Run("nothing is there", func(t *testing.T) {
		begun := three.client(t, DialectOSS).DetachAll(t.Context(), []fabric.Intent{ins[1], ins[1]}) // the script knows no POST
		for _, b := range begun {
			wantFault(t, b.Err, device.FaultNotFound, gpuThree)
		}
	})
	t.Run("inventory is not to be had", func(t *testing.T) {
		begun := three.with("GET /resources", says(502, "<html>")).client(t, DialectOSS).DetachAll(t.Context(), ins[:2])
		for _, b := range begun {
			wantFault(t, b.Err, device.FaultUnreachable, "502")
		}
		if begun[0].Err == begun[1].Err { //nolint:errorlint // the very same
			t.Error("two devices share one fault")
		}
	})
}

// TestFind: whose job is it that runs, or has just ended?
func TestFind(t *testing.T) {
	now := time.Now()
	job := func(id, status, device string, age time.Duration) string {
		return `{"applyID":"` + id + `","status":"` + status + `","startedAt":"` + now.Add(-age).UTC().Format(time.RFC3339) + `","procedures":[
			{"operationID":1,"operation":"connect","targetCPUID":"` + cpuOne + `","targetDeviceID":"` + device + `"}]}`
	}
	tests := []struct {
		name   string
		status int
		jobs   []string
		handle string
		class  device.FaultClass
		words  string
	}{
		{"lost, runs", 502, []string{job("0a1b2c3d4e", stateInProgress, gpuOne, time.Hour)}, "0a1b2c3d4e", "", ""},
		{"lost, has ended", 502, []string{job("0a1b2c3d4e", stateCompleted, gpuOne, 0)}, "0a1b2c3d4e", "", ""},
		{"lost, an old one", 502, []string{job("0a1b2c3d4e", stateCompleted, gpuOne, time.Minute)}, "", device.FaultUnknown, ""},
		{"lost, another's", 502, []string{job("0a1b2c3d4e", stateInProgress, gpuTwo, 0)}, "", device.FaultUnknown, ""},
		{"lost, the newest counts", 502, []string{job("0a1b2c3d4f", stateInProgress, gpuOne, 0), job("0a1b2c3d4e", stateFailed, gpuOne, 0)}, "0a1b2c3d4f", "", ""},
		{"lost, no id", 502, []string{job("", stateInProgress, gpuOne, 0)}, "", device.FaultUnknown, ""},
		{"busy, ours", 409, []string{job("0a1b2c3d4e", stateCanceling, gpuOne, time.Hour)}, "0a1b2c3d4e", "", ""},
		{"busy, ours has ended", 409, []string{job("0a1b2c3d4e", stateCompleted, gpuOne, 0)}, "", device.FaultBusy, ""},
		{"busy, another's", 409, []string{job("0a1b2c3d4e", stateInProgress, gpuTwo, 0)}, "", device.FaultBusy, "job 0a1b2c3d4e, IN_PROGRESS"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := stocked().with("POST /layout-apply", says(tt.status, `{"code":"E40010"}`)).
				with("GET /layout-apply", says(200, `{"applyResults":[`+strings.Join(tt.jobs, ",")+`]}`)).client(t, DialectOSS)
			op, err := c.Attach(t.Context(), fabric.Intent{Machine: one, Model: model, Device: gpuOne})
			if op.Handle != tt.handle || (err == nil) != (tt.class == "") {
				t.Fatalf("attach = %+v, %v, want job %q", op, err, tt.handle)
			}
			if err != nil {
				wantFault(t, err, tt.class, tt.words)
			}
		})
	}
	for name, answer := range map[string]func(http.ResponseWriter, string){
		"list fails": says(500, `{"code":"E40019"}`), "list is none": says(200, `{}`), "list is no JSON": says(200, `<html>`),
	} {
		c := stocked().with("POST /layout-apply", says(409, `{"code":"E40010"}`)).with("GET /layout-apply", answer).client(t, DialectOSS)
		_, err := c.Attach(t.Context(), fabric.Intent{Machine: one, Model: model, Device: gpuOne})
		t.Log(name)
		wantFault(t, err, device.FaultBusy, "E40010")
	}
}

func TestPoll_looks(t *testing.T) {
	op := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Handle: "0a1b2c3d4e", Intent: fabric.Intent{Machine: one, Device: gpuOne}}
	tests := []struct {
		name   string
		answer func(http.ResponseWriter, string)
		state  fabric.OperationState
		class  device.FaultClass
		err    bool
	}{
		{"job is deleted", says(404, `{"code":"E40020","message":"Specified 0a1b2c3d4e is not found."}`), fabric.Failed, device.FaultUnknown, false},
		{"path is not there", says(404, `{"message":"no Route matched"}`), fabric.Pending, device.FaultNotFound, true},
		{"gateway is down", says(502, `<html>`), fabric.Pending, device.FaultUnknown, true},
		{"no JSON", says(200, `ok`), fabric.Pending, device.FaultUnknown, true},
		{"no status", says(200, `{}`), fabric.Pending, device.FaultUnknown, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := script{"GET /layout-apply/0a1b2c3d4e": tt.answer}.client(t, DialectOSS).Poll(t.Context(), op)
			if got.State != tt.state || (err != nil) != tt.err {
				t.Fatalf("poll = %+v, %v", got, err)
			}
			if err == nil {
				err = got.Fault
			}
			wantFault(t, err, tt.class, "")
		})
	}
}

// TestPlainHTTP_isSaid: once, in the log, whoever calls first.
func TestPlainHTTP_isSaid(t *testing.T) {
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	c := stocked().client(t, DialectOSS)
	for range 3 {
		if err := c.Health(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(log.String(), "plain HTTP"); n != 1 {
		t.Errorf("said %d times: %s", n, &log)
	}
}

// TestNoTokenInErrors: what a proxy echoes of our token goes nowhere.
func TestNoTokenInErrors(t *testing.T) {
	const token, password = "header.payload.signature", "p&w %"
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/token") {
			if err := r.ParseForm(); err != nil {
				t.Error(err)
			}
			if r.PostForm.Get("username") == "bad" {
				w.WriteHeader(401)
				io.WriteString(w, `{"error":"invalid_grant","error_description":"`+r.PostForm.Encode()+`"}`)
				return
			}
			json.NewEncoder(w).Encode(map[string]any{"access_token": token, "expires_in": 300})
			return
		}
		w.WriteHeader(403)
		io.WriteString(w, `{"message":"`+r.Header.Get("Authorization")+`"}`)
	}))
	t.Cleanup(server.Close)
	for _, user := range []string{"good", "bad"} {
		dir := t.TempDir()
		for name, content := range map[string]string{"username": user, "password": password, "client_id": "c", "realm": "CDIM", "ca.crt": pemOf(server)} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		c, err := New(Config{Dialect: DialectOSS, Gateway: server.URL, Login: server.URL, Credentials: dir})
		if err != nil {
			t.Fatal(err)
		}
		err = c.Health(t.Context())
		wantFault(t, err, device.FaultUnauthorized, "<secret>")
		if s := err.Error(); strings.Contains(s, token) || strings.Contains(s, password) || strings.Contains(s, url.QueryEscape(password)) {
			t.Errorf("error = %v", err)
		}
	}
}

func pemOf(server *httptest.Server) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
}
