// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/cdim"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cdim"
)

func faceCDIM() *face {
	return &face{
		name:     "cdim",
		pool:     "timing: {attachDelay: 15s, detachDelay: 15s, nodeDelay: 3s, staleDelay: 10s}\n",
		settings: settingsCDIM(),
		start:    startCDIM,
		manager: func(b *bench) (fabric.Manager, error) {
			cfg := client.Config{Dialect: client.Dialect(b.setting.kind), Credentials: b.dir, JobTimeout: b.setting.call, Settle: b.setting.settle, Dial: b.Dial()}
			if b.setting.open {
				cfg.ConfigurationManager, cfg.LayoutApply, cfg.PlainHTTP = b.Server.URL, b.Server.URL, true
			} else {
				cfg.Gateway, cfg.Login = b.Server.URL, b.Server.URL
			}
			return client.New(cfg)
		},
		login: func(b *bench) map[string]string {
			if b.setting.open {
				return nil
			}
			return b.Files()
		},
		change: simapi.Fault{Face: "cdim", Method: "POST", Path: "/layout-apply$"},
		look:   simapi.Fault{Face: "cdim", Method: "GET", Path: "/resources$"},
		busy:   `{"code":"E40010","message":"Already running. Cannot start multiple instances."}`,
		denial: grantDenial, denied: deniedGrant,
		id: func(_ *bench, d core.Device) string { return d.ResUUID },
		blind: func(b *bench, m device.Machine, on bool) {
			if !on {
				b.unseen.Store(nil)
				return
			}
			b.unseen.Store(&m)
		},
		refuseDetach: func(b *bench, times int) {
			b.t.Helper()
			b.fault(simapi.Fault{Face: "hw", Body: "disconnect", Action: simapi.ActionStatus, Status: http.StatusConflict, Content: `{"code":"EF011BAS000","message":"conflict"}`}, times)
		},
		afterRestart: func(b *bench) {
			b.t.Helper()
			// What ran is stuck until a person ends it.
			for _, id := range b.jobs("IN_PROGRESS") {
				if status := b.person("PUT", "/layout-apply/"+id+"?action=cancel"); status != http.StatusConflict {
					b.t.Errorf("cancel of a stuck job = %d", status)
				}
			}
		},
		stuck: func(b *bench) func() {
			b.t.Helper()
			b.fault(simapi.Fault{Face: "hw", Action: simapi.ActionStatus, Status: http.StatusServiceUnavailable, Content: `{"code":"ER005BAS001","message":"hardware busy"}`}, 4)
			return func() {
				b.t.Helper()
				waiting := b.jobs("SUSPENDED")
				if len(waiting) != 1 {
					b.t.Fatalf("suspended jobs: %v\n%s", waiting, b.story())
				}
				if status := b.person("PUT", "/layout-apply/"+waiting[0]+"?action=cancel"); status != http.StatusAccepted {
					b.t.Errorf("cancel = %d", status)
				}
			}
		},
		call: 5 * time.Minute, settle: 11 * time.Minute,
		requests: 50,
		not: map[string]string{
			"paged lists":         "its inventory is whole, and of its jobs only the last ones are looked at.",
			"partial attach":      "one device is asked for in each job; parts of a job of several are tried in the face's own tests.",
			"duplicate identity":  "its inventory gives no identity of a GPU.",
			"identity is missing": "its inventory never gives one: every row here goes without.",
		},
	}
}

func settingsCDIM() []setting {
	all := []setting{
		{name: "oss, gateway", kind: "oss"},
		{name: "product, direct", kind: "product", open: true},
		{name: "oss, direct", kind: "oss", open: true},
		{name: "product, gateway", kind: "product"},
		{name: "oss, production times", kind: "oss", call: 5 * time.Minute, settle: 11 * time.Minute},
	}
	for _, p := range []struct {
		name string
		cdim simapi.CDIMPolicies
	}{
		{"strict", simapi.CDIMPolicies{JobCheck: "strict"}},
		{"links typed", simapi.CDIMPolicies{AdapterLink: "typed"}},
		{"links eeio", simapi.CDIMPolicies{AdapterLink: "eeio"}},
		{"no links", simapi.CDIMPolicies{AdapterLink: "nodeOnly"}},
		{"boards' serial numbers", simapi.CDIMPolicies{Serial: "board"}},
		{"no serial numbers", simapi.CDIMPolicies{Serial: "none"}},
	} {
		all = append(all, setting{name: "product, " + p.name, kind: "product", policies: simapi.Policies{CDIM: p.cdim}})
	}
	return all
}

func startCDIM(b *bench) (map[string]http.Handler, func()) {
	b.t.Helper()
	path := ""
	if b.StatePath() != "" {
		path = filepath.Join(filepath.Dir(b.StatePath()), "jobs.json")
	}
	c := b.Core
	f, err := cdim.New(b.t.Context(), cdim.Options{
		Core: c, Faults: b.Faults, Clock: clock.RealClock{}, Dialect: b.setting.kind, StatePath: path, HardwareTimeout: time.Hour,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.operator = f.Handler()
	stop := func() {
		f.Stop()
		c.Close()
		f.Close()
	}
	if b.setting.open {
		return map[string]http.Handler{"/": b.Faults.Wrap("cdim", b.overlook(f.Handler()))}, stop
	}
	return map[string]http.Handler{
		"/realms/": b.Faults.Wrap("idm", b.Tokens.Keycloak()),
		"/":        b.Faults.Wrap("cdim", b.overlook(f.Gateway(b.Tokens))),
	}, stop
}

// overlook makes the collector lose sight of a machine: all machines are in one answer.
func (b *bench) overlook(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m := b.unseen.Load()
		if m == nil || !strings.HasSuffix(r.URL.Path, "/resources") {
			next.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		var list struct {
			Count     int              `json:"count"`
			Resources []map[string]any `json:"resources"`
		}
		if json.Unmarshal(rec.Body.Bytes(), &list) != nil || rec.Code != http.StatusOK {
			pass(w, rec, rec.Body.Bytes())
			return
		}
		for _, one := range list.Resources {
			if d, ok := one["device"].(map[string]any); ok && d["deviceID"] == string(*m) {
				one["detected"] = false
				b.overlooked.Add(1)
			}
		}
		body, err := json.Marshal(list)
		if err != nil {
			panic(err) // what came as JSON
		}
		pass(w, rec, body)
	})
}

// person calls layout-apply as an operator does, past all faults and tokens.
func (b *bench) person(method, path string) int {
	rec := httptest.NewRecorder()
	b.operator.ServeHTTP(rec, httptest.NewRequestWithContext(b.t.Context(), method, "/cdim/api/v1"+path, http.NoBody))
	return rec.Code
}

// jobs are those in a state.
func (b *bench) jobs(status string) []string {
	b.t.Helper()
	rec := httptest.NewRecorder()
	b.operator.ServeHTTP(rec, httptest.NewRequestWithContext(b.t.Context(), http.MethodGet, "/cdim/api/v1/layout-apply?status="+status, http.NoBody))
	var list struct {
		Results []struct {
			ID string `json:"applyID"`
		} `json:"applyResults"`
	}
	if err := json.Unmarshal(rec.Body.Bytes(), &list); err != nil {
		b.t.Fatal(err)
	}
	var ids []string
	for _, j := range list.Results {
		ids = append(ids, j.ID)
	}
	return ids
}
