// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/idm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cdim"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const chassis = `
tenant: unused
realm: CDIM
credentials: {username: agent, password: "p&w=d+100% s", client_id: cdim-client, client_secret: "s3cret/&= +%41"}
fabrics: [{id: 0, uuid: f-0}]
machines:
  - {name: n1, uuid: ` + string(fabrictest.MachineOne) + `}
  - {name: n2, uuid: ` + string(fabrictest.MachineTwo) + `}
devices:
  - {id: a, count: 2, model: ` + fabrictest.ModelA + `}
  - {id: b, count: 1, model: ` + fabrictest.ModelB + `}
timing: {attachDelay: 50ms, detachDelay: 20ms}
`

// setting is one way in which an installation may be.
type setting struct {
	dialect string
	gateway bool
	// account logs in as a service account and not as a user.
	account  bool
	policies simapi.Policies
	stale    time.Duration
}

// bench is an installation with hands on its chassis.
type bench struct {
	t       *testing.T
	cfg     *config.Config
	setting setting
	core    *core.Core
	faults  *fault.Injector
	tokens  *idm.Manager
	face    *Face
	server  *httptest.Server
	dir     string

	mu     sync.Mutex
	unseen map[device.Machine]bool
}

func newBench(t *testing.T, s setting) *bench {
	t.Helper()
	cfg, err := config.Parse([]byte(chassis))
	if err != nil {
		t.Fatal(err)
	}
	clk := clock.RealClock{}
	b := &bench{t: t, cfg: cfg, setting: s, faults: fault.New(clk), tokens: idm.New(cfg, clk), unseen: map[device.Machine]bool{}}
	if b.core, err = core.New(t.Context(), cfg, core.Options{Clock: clk, Numbers: make([]core.Number, len(cfg.Devices))}); err != nil {
		t.Fatal(err)
	}
	if err = b.core.SetPolicies(s.policies); err != nil {
		t.Fatal(err)
	}
	stale := simapi.Duration(s.stale)
	b.core.SetTiming(simapi.Timing{StaleDelay: &stale})
	b.face, err = New(t.Context(), Options{Core: b.core, Faults: b.faults, Clock: clk, Dialect: s.dialect, HardwareTimeout: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, v := range b.core.Violations() {
			if v.Kind == simapi.Invariant {
				t.Errorf("the chassis is not in order: %+v", v)
			}
		}
		b.face.Stop()
		b.core.Close()
		b.face.Close()
	})
	b.serve()
	b.secret()
	return b
}

func (b *bench) serve() {
	if !b.setting.gateway {
		b.server = httptest.NewServer(b.faults.Wrap("cdim", b.blind(b.face.Handler())))
	} else {
		mux := http.NewServeMux()
		mux.Handle("/realms/", b.faults.Wrap("idm", b.tokens.Keycloak()))
		mux.Handle("/", b.faults.Wrap("cdim", b.blind(b.face.Gateway(b.tokens))))
		b.server = httptest.NewTLSServer(mux)
	}
	b.t.Cleanup(b.server.Close)
}

// blind makes the collector lose sight of machines.
func (b *bench) blind(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if len(b.unseen) == 0 || !strings.HasSuffix(r.URL.Path, "/resources") {
			next.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		var list map[string]any
		if err := json.Unmarshal(rec.Body.Bytes(), &list); err != nil {
			b.t.Error(err)
		}
		all, _ := list["resources"].([]any)
		for _, one := range all {
			r, _ := one.(map[string]any)
			d, _ := r["device"].(map[string]any)
			id, _ := d["deviceID"].(string)
			if b.unseen[device.Machine(id)] {
				r["detected"] = false
			}
		}
		reply(w, rec.Code, list)
	})
}

// secret is the directory that a Kubernetes Secret would be mounted at.
func (b *bench) secret() {
	b.t.Helper()
	b.dir = b.t.TempDir()
	if !b.setting.gateway {
		return
	}
	files := map[string]string{
		"client_id": b.cfg.Credentials.ClientID, "client_secret": b.cfg.Credentials.ClientSecret, "realm": b.cfg.Realm,
		"ca.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: b.server.Certificate().Raw})),
	}
	if !b.setting.account {
		files["username"], files["password"] = b.cfg.Credentials.Username, b.cfg.Credentials.Password
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(b.dir, name), []byte(content), 0o600); err != nil {
			b.t.Fatal(err)
		}
	}
}

// client is a new one each time, as each process has its own.
func (b *bench) client() *client.Client {
	b.t.Helper()
	cfg := client.Config{
		Dialect: client.Dialect(b.setting.dialect), Credentials: b.dir, Poll: 100 * time.Millisecond, Settle: 20*b.setting.stale + time.Millisecond,
	}
	if b.setting.gateway {
		cfg.Gateway, cfg.Login = b.server.URL, b.server.URL
	} else {
		cfg.ConfigurationManager, cfg.LayoutApply, cfg.PlainHTTP = b.server.URL, b.server.URL, true
	}
	c, err := client.New(cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if err := c.Close(b.t.Context()); err != nil {
			b.t.Error(err)
		}
	})
	return c
}

// full runs all settings; otherwise those that differ most.
var full = flag.Bool("full", false, "run the conformance suite for all kinds of installations, and not for a sample")

func settings() map[string]setting {
	out := map[string]setting{
		"oss/gateway, stale": {dialect: "oss", gateway: true, account: true, stale: 200 * time.Millisecond},
		"product/direct":     {dialect: "product"},
	}
	if !*full {
		return out
	}
	for _, dialect := range []string{"oss", "product"} {
		out[dialect+"/direct"] = setting{dialect: dialect}
		out[dialect+"/direct, stale"] = setting{dialect: dialect, stale: 200 * time.Millisecond}
		out[dialect+"/gateway"] = setting{dialect: dialect, gateway: true}
		out[dialect+"/gateway, stale"] = setting{dialect: dialect, gateway: true, account: true, stale: 200 * time.Millisecond}
		out[dialect+"/strict"] = setting{dialect: dialect, policies: simapi.Policies{CDIM: simapi.CDIMPolicies{JobCheck: "strict"}}}
	}
	for _, links := range []string{"typed", "eeio", "nodeOnly"} {
		out["product/adapter link "+links] = setting{dialect: "product", policies: simapi.Policies{CDIM: simapi.CDIMPolicies{AdapterLink: links}}}
	}
	return out
}

// TestFace_conformance lets the agent's client do everything that it can do, in each kind of installation.
func TestFace_conformance(t *testing.T) {
	for name, s := range settings() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fabrictest.Run(t, func(t *testing.T) (fabric.Manager, fabrictest.Control) {
				t.Helper()
				b := newBench(t, s)
				return b.client(), b
			})
		})
	}
}

func (b *bench) Open() bool { return !b.setting.gateway }

func (b *bench) Attached(m device.Machine) []string {
	b.t.Helper()
	v, err := b.core.Machine(string(m))
	if err != nil {
		return nil
	}
	var out []string
	for _, d := range v.Listed {
		out = append(out, d.ResUUID)
	}
	slices.Sort(out)
	return out
}

func (b *bench) FreeCount(model string) int {
	b.t.Helper()
	_, n, _, err := b.core.Free("n1", model)
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

func (b *bench) Fate(f fabrictest.Fate) bool {
	b.t.Helper()
	const page = "<html><body>Bad gateway</body></html>"
	if f == fabrictest.CredentialsEnded {
		b.tokens.RevokeAll()
		return b.setting.gateway
	}
	rule, ok := map[fabrictest.Fate]simapi.Fault{
		fabrictest.Busy: {
			Action: simapi.ActionStatus, Status: 409, Content: `{"code":"E40010","message":"Already running. Cannot start multiple instances."}`,
		},
		fabrictest.LostBefore:  {Action: simapi.ActionDropBefore},
		fabrictest.LostAfter:   {Action: simapi.ActionDropAfter},
		fabrictest.ErrorBefore: {Action: simapi.ActionStatus, Status: 502, Content: page, ContentType: "text/html"},
		fabrictest.ErrorAfter:  {Action: simapi.ActionStatusAfterEffect, Status: 502, Content: page, ContentType: "text/html"},
		fabrictest.Truncated:   {Action: simapi.ActionReset},
		fabrictest.NoWords:     {Action: simapi.ActionStatusAfterEffect, Status: 202},
		fabrictest.Hang:        {Action: simapi.ActionHang},
		fabrictest.WorkRefused: {
			Face: "hw", Action: simapi.ActionStatus, Status: 409, Content: `{"code":"EF011BAS000","message":"conflict"}`,
		},
		fabrictest.WorkLostBefore: {Face: "hw", Action: simapi.ActionDropBefore},
		fabrictest.WorkLostAfter:  {Face: "hw", Action: simapi.ActionDropAfter},
	}[f]
	if !ok {
		return false
	}
	if rule.Face == "" {
		rule.Face, rule.Method, rule.Path = "cdim", "POST", "/layout-apply$"
	}
	rule.Count, rule.Name = 1, string(f)
	b.add(rule)
	if f != fabrictest.Hang { // the caller may have given up before
		b.t.Cleanup(func() {
			for _, r := range b.faults.Rules() {
				if r.Name == rule.Name && r.Hits != 1 {
					b.t.Errorf("fate %s has met %d calls", f, r.Hits)
				}
			}
		})
	}
	return true
}

func (b *bench) add(f simapi.Fault) {
	b.t.Helper()
	if _, err := b.faults.Add(f); err != nil {
		b.t.Fatal(err)
	}
}

// FailReads of one machine means here that the inventory does not see it: all machines are in one answer.
func (b *bench) FailReads(m device.Machine, fail bool) {
	b.t.Helper()
	const name = "reads"
	if m != "" {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.unseen[m] = fail; !fail {
			delete(b.unseen, m)
		}
		return
	}
	if !fail {
		b.faults.Clear(name)
		return
	}
	b.add(simapi.Fault{Name: name, Face: "cdim", Method: "GET", Action: simapi.ActionStatus, Status: 500})
}

func (b *bench) Shut() {
	b.t.Helper()
	if err := b.server.Listener.Close(); err != nil {
		b.t.Fatal(err)
	}
	b.server.CloseClientConnections()
}

func (b *bench) RefuseLogin() {
	b.t.Helper()
	b.tokens.RevokeAll()
	b.add(simapi.Fault{
		Face: "idm", Action: simapi.ActionStatus, Status: 401, Content: `{"error":"invalid_grant","error_description":"Invalid user credentials"}`,
	})
}

// person calls the services as an operator does, past all faults and tokens.
func (b *bench) person(method, path string, body string) (int, map[string]any) {
	b.t.Helper()
	rec := httptest.NewRecorder()
	b.face.Handler().ServeHTTP(rec, httptest.NewRequestWithContext(b.t.Context(), method, api+path, bytes.NewBufferString(body)))
	var out map[string]any
	if rec.Body.Len() > 0 {
		if err := json.Unmarshal(rec.Body.Bytes(), &out); err != nil {
			b.t.Fatalf("%s %s: %v in %s", method, path, err, rec.Body)
		}
	}
	return rec.Code, out
}
