// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	"github.com/cohdi/cohdi-agent/internal/fabric/fti"
)

func TestConformance(t *testing.T) {
	fabrictest.Run(t, func(t *testing.T) (fabric.Manager, fabrictest.Control) {
		t.Helper()
		f := newFace(t)
		return f.client(), f
	})
}

func wantFault(t *testing.T, err error, class device.FaultClass) *device.Fault {
	t.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok {
		t.Fatalf("error = %v (%T), want a *device.Fault", err, err)
	}
	if f.Class != class {
		t.Errorf("class = %s, want %s (%v)", f.Class, class, err)
	}
	return f
}

func attachOne() fabric.Intent {
	return fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA}
}

func TestNew(t *testing.T) {
	tests := []struct{ name, endpoint, tenant, dir, err string }{
		{name: "host", endpoint: "fm.example", tenant: tenant, dir: "/x"},
		{name: "host and port", endpoint: "fm.example:8443", tenant: tenant, dir: "/x"},
		{name: "URL with a slash", endpoint: "https://fm.example:8443/", tenant: tenant, dir: "/x"},
		{name: "plain HTTP", endpoint: "http://fm.example", tenant: tenant, dir: "/x", err: "not of the form"},
		{name: "path", endpoint: "https://fm.example/api", tenant: tenant, dir: "/x", err: "not of the form"},
		{name: "password in the URL is not shown", endpoint: "https://u:hush@fm.example", tenant: tenant, dir: "/x", err: "https://u:xxxxx@fm.example"},
		{name: "empty", tenant: tenant, dir: "/x", err: "not of the form"},
		{name: "no tenant", endpoint: "fm.example", dir: "/x", err: "tenant is empty"},
		{name: "no credentials", endpoint: "fm.example", tenant: tenant, err: "credentials directory is empty"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := New(Config{Endpoint: tt.endpoint, Tenant: tt.tenant, Credentials: tt.dir})
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error = %v, want one that contains %q", err, tt.err)
			}
		})
	}
}

func TestLogin_oneForAll(t *testing.T) {
	f := newFace(t)
	c := f.client()
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if err := c.Health(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if f.logins != 1 {
		t.Errorf("%d logins for 50 calls at once, want 1", f.logins)
	}
	// The manager restarts: all tokens are worthless, though they have not ended.
	f.mu.Lock()
	f.token = "other"
	f.mu.Unlock()
	for range 50 {
		wg.Go(func() {
			if err := c.Health(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if f.logins != 2 {
		t.Errorf("%d logins after all tokens were revoked, want 2", f.logins)
	}
}

func TestLogin_lifetime(t *testing.T) {
	// The node's clock has nothing to do with the manager's.
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	f := newFace(t)
	c := f.client(func(cfg *Config) { cfg.Clock = clock })
	logins := func(want int) {
		t.Helper()
		if err := c.Health(t.Context()); err != nil {
			t.Fatal(err)
		}
		if f.logins != want {
			t.Errorf("%d logins, want %d", f.logins, want)
		}
	}
	logins(1)
	clock.SetTime(clock.Now().Add(269 * time.Second))
	logins(1)
	clock.SetTime(clock.Now().Add(2 * time.Second)) // 29 s before the end
	logins(2)

	// The id_manager is down while the token is about to end: it is used as long as it is good.
	clock.SetTime(clock.Now().Add(280 * time.Second))
	f.mu.Lock()
	f.override = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasPrefix(r.URL.Path, "/id_manager") {
			return false
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	}
	f.mu.Unlock()
	logins(2)
	clock.SetTime(clock.Now().Add(21 * time.Second))
	fault := wantFault(t, c.Health(t.Context()), device.FaultUnreachable)
	if fault.Status != http.StatusServiceUnavailable || !strings.Contains(fault.Op, "log in") {
		t.Errorf("fault = %v, want HTTP 503 of the login", fault)
	}
}

func TestLogin_refused(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	f := newFace(t)
	f.refuse = true
	c := f.client(func(cfg *Config) { cfg.Clock = clock })
	for range 5 {
		_, err := c.Attach(t.Context(), attachOne())
		fault := wantFault(t, err, device.FaultUnauthorized)
		if fault.Status != http.StatusUnauthorized || fault.Code != "invalid_grant" {
			t.Errorf("fault = %v, want the id_manager's words", fault)
		}
		for _, s := range []string{password, secret, url.QueryEscape(password), url.QueryEscape(secret)} {
			if strings.Contains(err.Error(), s) {
				t.Errorf("error holds %q: %v", s, err)
			}
		}
	}
	if n := len(f.log()); n != 1 {
		t.Errorf("%d logins with credentials that were refused a moment ago, want 1", n)
	}
	clock.SetTime(clock.Now().Add(fti.RefusedPause))
	wantFault(t, c.Health(t.Context()), device.FaultUnauthorized)
	if n := len(f.log()); n != 2 {
		t.Errorf("%d logins after the pause, want 2", n)
	}
}

func TestLogin_credentialsAreReadAgain(t *testing.T) {
	f := newFace(t)
	f.file("password", "old")
	c := f.client()
	wantFault(t, c.Health(t.Context()), device.FaultUnauthorized)
	f.file("password", password+"\n")
	if err := c.Health(t.Context()); err != nil {
		t.Errorf("after the Secret was corrected: %v", err)
	}
	if err := os.Remove(filepath.Join(f.dir, "client_secret")); err != nil {
		t.Fatal(err)
	}
	f.RefuseLogin()
	wantFault(t, c.Health(t.Context()), device.FaultUnauthorized)
}

func TestLogin_missingFile(t *testing.T) {
	for _, name := range []string{"username", "password", "client_id", "realm"} {
		t.Run(name, func(t *testing.T) {
			f := newFace(t)
			if err := os.Remove(filepath.Join(f.dir, name)); err != nil {
				t.Fatal(err)
			}
			c := f.client()
			_, err := c.Attach(t.Context(), attachOne())
			if wantFault(t, err, device.FaultUnauthorized); !strings.Contains(err.Error(), name) {
				t.Errorf("error %v does not name the file", err)
			}
			f.file(name, "\n")
			_, err = c.Attach(t.Context(), attachOne())
			if wantFault(t, err, device.FaultUnauthorized); !strings.Contains(err.Error(), "is empty") {
				t.Errorf("error %v does not say that the file is empty", err)
			}
		})
	}
}

func TestTLS(t *testing.T) {
	f := newFace(t)
	c := f.client()
	good, err := os.ReadFile(filepath.Join(f.dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	other := httptest.NewTLSServer(http.NotFoundHandler())
	defer other.Close()

	if err = os.Remove(filepath.Join(f.dir, "ca.crt")); err != nil {
		t.Fatal(err)
	}
	_, err = c.Attach(t.Context(), attachOne()) // the system's roots do not know the test's
	fault := wantFault(t, err, device.FaultUnreachable)
	if !fault.Definite() || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("fault = %v, want a definite one about the certificate", err)
	}
	f.file("ca.crt", "nonsense")
	_, err = c.Attach(t.Context(), attachOne())
	if wantFault(t, err, device.FaultUnreachable); !strings.Contains(err.Error(), "no PEM certificate") {
		t.Errorf("error = %v, want the CA bundle blamed", err)
	}
	f.file("ca.crt", string(good)) // rotated: no restart is needed
	if err := c.Health(t.Context()); err != nil {
		t.Errorf("after the CA bundle was corrected: %v", err)
	}
	if n := slices.Index(f.log(), "PATCH /machines/"+string(fabrictest.MachineOne)+"/update"); n >= 0 {
		t.Error("an attach went to a manager that was not trusted")
	}
}

// TestAttach_answers: what the manager may say to an attach and how it is understood. The face answers
// whatever the case says without doing anything.
func TestAttach_answers(t *testing.T) {
	tests := []struct {
		name   string
		status int
		body   string
		want   device.FaultClass // empty: success
		code   string
		text   string
	}{
		{name: "201 with a machine", status: 201, body: `{"data":{"machines":[]}}`},
		{name: "202 without a body", status: 202},
		{name: "204", status: 204},
		{name: "200 with other JSON", status: 200, body: `{"status":"success"}`},
		{name: "200 with HTML", status: 200, body: "<html>Login</html>", want: device.FaultUnknown, text: "<html>Login</html>"},
		{name: "200 truncated", status: 200, body: `{"data":{"machines":[{"mach_u`, want: device.FaultUnknown},
		{name: "502 with HTML", status: 502, body: "<html>\n<h1>Bad Gateway</h1></html>", want: device.FaultUnknown, text: "<html> <h1>Bad Gateway</h1></html>"},
		{name: "500 without a body", status: 500, want: device.FaultUnknown},
		{name: "500 whose message is an object", status: 500, body: `{"status":500,"detail":{"code":"E029999","message":{"why":["x"]}}}`, want: device.FaultUnknown, code: "E029999", text: `{"why":["x"]}`},
		{name: "503", status: 503, want: device.FaultUnknown},
		{name: "408", status: 408, want: device.FaultUnknown},
		{name: "409 while some are free", status: 409, body: `{"status":"409","detail":{"code":42,"message":"in progress"}}`, want: device.FaultBusy, code: "42", text: "in progress"},
		{name: "429", status: 429, want: device.FaultBusy},
		{name: "400 while some are free", status: 400, body: `{"status":400,"detail":{"code":"E1","message":"bad"}}`, want: device.FaultRejected, code: "E1", text: "bad"},
		{name: "404 that says none is free", status: 404, body: `{"error":"no_available_resources","message":"none left"}`, want: device.FaultNoCapacity, code: "no_available_resources", text: "none left"},
		{name: "404", status: 404, body: `nope`, want: device.FaultNotFound, text: "nope"},
		{name: "403", status: 403, want: device.FaultUnauthorized},
		{name: "401 twice", status: 401, body: `{"status":401,"detail":{"code":"E2","message":"no"}}`, want: device.FaultUnauthorized, code: "E2"},
		{name: "405", status: 405, want: device.FaultUnsupported},
		{name: "501", status: 501, want: device.FaultUnsupported},
		{name: "412", status: 412, want: device.FaultConflict},
		{name: "a redirect is not followed", status: 307, want: device.FaultRejected},
		{name: "endless words", status: 400, body: strings.Repeat("x", 3*fti.MaxBody), want: device.FaultRejected},
		{name: "endless success", status: 200, body: strings.Repeat(" ", 2*fti.MaxBody), want: device.FaultUnknown},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFace(t)
			tries := 0
			f.override = func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method != http.MethodPatch {
					return false
				}
				tries++
				w.Header().Set("Location", "/elsewhere")
				w.WriteHeader(tt.status)
				io.WriteString(w, tt.body)
				return true
			}
			_, err := f.client().Attach(t.Context(), attachOne())
			wantTries := 1
			if tt.status == 401 {
				wantTries = 2
			}
			if tries != wantTries {
				t.Errorf("asked %d times, want %d", tries, wantTries)
			}
			if tt.want == "" {
				if err != nil {
					t.Errorf("error = %v, want success", err)
				}
				return
			}
			fault := wantFault(t, err, tt.want)
			if fault.Status != tt.status || tt.code != "" && fault.Code != tt.code || tt.text != "" && fault.Message != tt.text {
				t.Errorf("fault = %+v, want status %d, code %q, text %q", fault, tt.status, tt.code, tt.text)
			}
			if len(fault.Message) > fti.LongestText+3 {
				t.Errorf("%d bytes of the manager's words kept", len(fault.Message))
			}
		})
	}
}

func TestAttach_emptyPoolWhateverTheStatus(t *testing.T) {
	for _, status := range []int{400, 404, 409} {
		f := newFace(t)
		for _, d := range f.devices {
			d.machine = fabrictest.MachineTwo
		}
		f.override = func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPatch {
				return false
			}
			respond(w, status, refusalBody(status, "E02XXXX", "refused"))
			return true
		}
		_, err := f.client().Attach(t.Context(), attachOne())
		if fault := wantFault(t, err, device.FaultNoCapacity); fault.Status != status {
			t.Errorf("fault = %v, want the manager's own status %d", fault, status)
		}
	}
}

func TestAttach_answersWithAll(t *testing.T) {
	f := newFace(t)
	c := f.client()
	if _, err := c.Attach(t.Context(), attachOne()); err != nil {
		t.Fatal(err)
	}
	before := f.Attached(fabrictest.MachineOne)
	f.override = func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPatch {
			return false
		}
		f.update(httptest.NewRecorder(), r)
		respond(w, http.StatusOK, frame(f.machine(fabrictest.MachineOne)))
		return true
	}
	in := attachOne()
	in.Before = before
	op, err := c.Attach(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	if len(op.Devices) != 1 || slices.Contains(before, op.Devices[0].ID) {
		t.Errorf("devices = %+v, want the new one alone", op.Devices)
	}
}

func TestTimeout(t *testing.T) {
	f := newFace(t)
	c := f.client()
	if err := c.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.updateTimeout = 50 * time.Millisecond
	f.Fate(fabrictest.Hang)
	_, err := c.Attach(t.Context(), attachOne())
	fault := wantFault(t, err, device.FaultUnknown)
	if fault.Definite() || !strings.Contains(err.Error(), "no answer within 50ms") {
		t.Errorf("fault = %v, want an unknown outcome that names the limit", err)
	}
}

func TestObserve(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	f := newFace(t)
	c := f.client(func(cfg *Config) {
		cfg.Observe = func(operation string, status int, took time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			seen[operation] = status
			if took < 0 {
				t.Errorf("%s took %s", operation, took)
			}
		}
	})
	op, err := c.Attach(t.Context(), attachOne())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Detach(t.Context(), fabric.Intent{Machine: fabrictest.MachineOne, Device: op.Devices[0].ID}); err != nil {
		t.Fatal(err)
	}
	if _, failed := c.ListAttached(t.Context(), []device.Machine{fabrictest.MachineUnknown}); len(failed) != 1 {
		t.Errorf("failed = %v", failed)
	}
	if _, err := c.Free(t.Context(), []string{fabrictest.ModelA}); err != nil {
		t.Fatal(err)
	}
	f.Shut()
	if _, err := c.Machines(t.Context()); err == nil {
		t.Error("machines of a manager that is shut")
	}
	want := map[string]int{"login": 200, "attach": 200, "detach": 200, "list": 404, "free": 200, "machines": 0}
	mu.Lock()
	defer mu.Unlock()
	for operation, status := range want {
		if got, ok := seen[operation]; !ok || got != status {
			t.Errorf("observed %s: %d (%v), want %d", operation, got, ok, status)
		}
	}
}

func TestFree_membership(t *testing.T) {
	f := newFace(t)
	c := f.client(func(cfg *Config) { cfg.FabricID = 7 })
	_, err := c.Free(t.Context(), []string{fabrictest.ModelA})
	if wantFault(t, err, device.FaultNotFound); !strings.Contains(err.Error(), "fabric 7") {
		t.Errorf("error = %v, want it to name the fabric", err)
	}
	c = f.client()
	for range 3 {
		if _, err := c.Free(t.Context(), []string{fabrictest.ModelA, fabrictest.ModelB}); err != nil {
			t.Fatal(err)
		}
	}
	lists := 0
	for _, r := range f.log() {
		if r == "GET /machines" {
			lists++
		}
	}
	if lists != 2 { // one for each client
		t.Errorf("all machines were listed %d times, want 2", lists)
	}
}

func TestUpperCaseMachine(t *testing.T) {
	f := newFace(t)
	const upper = "ABCDEF00-0000-4000-8000-00000000000A"
	var asked []string
	f.override = func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case strings.HasPrefix(r.URL.Path, "/id_manager"):
			return false
		case strings.HasSuffix(r.URL.Path, "/machines"):
			respond(w, 200, frame(map[string]any{"mach_uuid": upper, "fabric_id": "0"}, map[string]any{"mach_uuid": "junk"}))
		default:
			asked = append(asked, r.URL.Path)
			respond(w, 200, frame(map[string]any{"mach_uuid": upper}))
		}
		return true
	}
	c := f.client()
	machines, err := c.Machines(t.Context())
	if err != nil || len(machines) != 1 || machines[0].ID != device.Machine(strings.ToLower(upper)) || machines[0].Fabric != "0" {
		t.Fatalf("machines = %+v, %v", machines, err)
	}
	if _, failed := c.ListAttached(t.Context(), []device.Machine{machines[0].ID}); len(failed) > 0 {
		t.Error(failed)
	}
	if len(asked) != 1 || !strings.HasSuffix(asked[0], upper) {
		t.Errorf("asked %v, want the manager's own spelling", asked)
	}
}

func TestNoTokenInErrors(t *testing.T) {
	f := newFace(t)
	f.override = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasPrefix(r.URL.Path, "/id_manager") {
			return false
		}
		w.WriteHeader(http.StatusBadGateway)
		io.WriteString(w, strings.Repeat("x", fti.LongestText-8)+" your header was "+r.Header.Get("Authorization"))
		return true
	}
	err := f.client().Health(t.Context())
	if fault := wantFault(t, err, device.FaultUnknown); strings.Contains(fault.Error(), "token-1") || strings.Contains(fault.Error(), "token") {
		t.Errorf("error holds the token: %v", err)
	}
}

func TestLogin_waiterGivesUp(t *testing.T) {
	f := newFace(t)
	c := f.client()
	arrived := make(chan struct{})
	f.override = func(_ http.ResponseWriter, r *http.Request) bool {
		if !strings.HasPrefix(r.URL.Path, "/id_manager") {
			return false
		}
		f.override = nil
		close(arrived)
		f.mu.Unlock()
		<-f.hung
		f.mu.Lock()
		return false
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Health(ctx) }()
	<-arrived
	cancel()
	wantFault(t, <-ended, device.FaultUnreachable)
}
