// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cdim"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const chassis = facetest.Pool + `
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
	// judge sees what is asked and answered, where it is set.
	judge *judge
}

// bench is an installation with hands on its chassis.
type bench struct {
	*facetest.Chassis
	t       testing.TB
	setting setting
	// core and faults are the chassis's.
	core   *core.Core
	faults *fault.Injector
	face   *Face
	dir    string

	mu     sync.Mutex
	unseen map[device.Machine]bool
}

func newBench(t *testing.T, s setting) *bench {
	t.Helper()
	b := &bench{Chassis: facetest.New(t, chassis, facetest.Options{Policies: s.policies}), t: t, setting: s, unseen: map[device.Machine]bool{}}
	b.core, b.faults = b.Core, b.Faults
	stale := simapi.Duration(s.stale)
	b.core.SetTiming(simapi.Timing{StaleDelay: &stale})
	var err error
	b.face, err = New(t.Context(), Options{Core: b.core, Faults: b.faults, Clock: clock.RealClock{}, Dialect: s.dialect, HardwareTimeout: 2 * time.Second})
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
	return b
}

// serve also makes the directory that a Kubernetes Secret would be mounted at.
func (b *bench) serve() {
	if !b.setting.gateway {
		b.Serve(false, map[string]http.Handler{"/": b.faults.Wrap("cdim", b.blind(b.services()))})
		b.dir = b.Secret(nil)
		return
	}
	b.Serve(true, map[string]http.Handler{
		"/realms/": b.faults.Wrap("idm", b.Tokens.Keycloak()),
		"/":        b.faults.Wrap("cdim", b.blind(b.face.Gateway(b.Tokens))),
	})
	files := b.Files()
	if b.setting.account {
		delete(files, "username")
		delete(files, "password")
	}
	b.dir = b.Secret(files)
}

// services are the face's, before the judge.
func (b *bench) services() http.Handler {
	if b.setting.judge == nil {
		return b.face.Handler()
	}
	return b.setting.judge.wrap(b.face.Handler())
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

// client is a new one each time, as each process has its own.
func (b *bench) client() *client.Client {
	b.t.Helper()
	cfg := client.Config{
		Dialect: client.Dialect(b.setting.dialect), Credentials: b.dir, Poll: 100 * time.Millisecond, Settle: 20*b.setting.stale + time.Millisecond,
	}
	if b.setting.gateway {
		cfg.Gateway, cfg.Login = b.Server.URL, b.Server.URL
	} else {
		cfg.ConfigurationManager, cfg.LayoutApply, cfg.PlainHTTP = b.Server.URL, b.Server.URL, true
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

var full = facetest.Full()

// settings are those that differ most, or all of them.
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
	return b.Listed(m, func(d core.Device) string { return d.ResUUID })
}

func (b *bench) Fate(f fabrictest.Fate) bool {
	b.t.Helper()
	if f == fabrictest.CredentialsEnded {
		b.Tokens.RevokeAll()
		return b.setting.gateway
	}
	rule, ok := facetest.Fate(f, `{"code":"E40010","message":"Already running. Cannot start multiple instances."}`)
	if !ok {
		rule, ok = map[fabrictest.Fate]simapi.Fault{
			fabrictest.WorkRefused: {
				Face: "hw", Action: simapi.ActionStatus, Status: 409, Content: `{"code":"EF011BAS000","message":"conflict"}`,
			},
			fabrictest.WorkLostBefore: {Face: "hw", Action: simapi.ActionDropBefore},
			fabrictest.WorkLostAfter:  {Face: "hw", Action: simapi.ActionDropAfter},
		}[f]
	}
	if !ok {
		return false
	}
	if rule.Face == "" {
		rule.Face, rule.Method, rule.Path = "cdim", "POST", "/layout-apply$"
	}
	rule.Count, rule.Name = 1, string(f)
	b.Add(rule)
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
	b.Add(simapi.Fault{Name: name, Face: "cdim", Method: "GET", Action: simapi.ActionStatus, Status: 500})
}

// person calls the services as an operator does, past all faults and tokens.
func (b *bench) person(method, path string, body string) (int, map[string]any) {
	b.t.Helper()
	rec := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(b.t.Context(), method, api+path, bytes.NewBufferString(body))
	r.Header.Set("Content-Type", "application/json")
	b.services().ServeHTTP(rec, r)
	var out map[string]any
	if rec.Body.Len() > 0 {
		if err := json.Unmarshal(rec.Body.Bytes(), &out); err != nil {
			b.t.Fatalf("%s %s: %v in %s", method, path, err, rec.Body)
		}
	}
	return rec.Code, out
}
