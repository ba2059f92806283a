// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/redfish"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/redfish"
)

// Kinds of Redfish services that an agent has to be told of.
const (
	basic    = "basic"
	nameless = "nameless"
)

const (
	redfishChange = "redfish change"
	zonesVariant  = "zones"
)

// Reasons of Redfish settings.
const (
	noSessions   = "user and password go with each request."
	noTasks      = "it tells nobody of a task."
	noIdentities = "it gives no identity of a GPU: every row here goes without."
)

func faceRedfish() *face {
	const root = "/redfish/v1"
	return &face{
		name:     "redfish",
		pool:     "timing: {attachDelay: 10s, detachDelay: 10s, nodeDelay: 3s}\nredfish: {sessionTimeout: 5m}\n",
		settings: settingsRedfish(),
		start:    startRedfish,
		manager: func(b *bench) (fabric.Manager, error) {
			return client.New(client.Config{
				Endpoint: b.Server.URL, Credentials: b.dir, Basic: b.setting.kind == basic, NoIdentity: b.setting.kind == nameless,
				TaskTimeout: b.setting.call, Settle: b.setting.settle, Dial: b.Dial(),
			})
		},
		login:   func(b *bench) map[string]string { return b.Files() },
		change:  simapi.Fault{Face: redfishChange, Path: redfishChanges},
		look:    simapi.Fault{Face: "redfish", Method: "GET", Path: "/n[12]$"},
		busy:    `{"error":{"code":"Base.1.18.ResourceInUse","message":"something is under way"}}`,
		partial: simapi.Fault{Face: "hw", Method: "PUT"},
		denial:  `{"error":{"code":"Base.1.18.ResourceAtUriUnauthorized","message":"wrong user or password"}}`,
		denied:  "wrong user or password",
		revoke:  func(b *bench) { b.service.Load().EndSessions() },
		id: func(b *bench, d core.Device) string {
			if b.setting.policies.Redfish.Variant == zonesVariant {
				return root + "/Fabrics/0/Endpoints/" + d.ID
			}
			return root + "/CompositionService/ResourceBlocks/" + d.ID
		},
		blind: failByPath(func(m device.Machine) string { return "/" + nodeOf(m) + "$" }),
		refuseDetach: func(b *bench, times int) {
			b.t.Helper()
			b.fault(simapi.Fault{Face: "hw", Method: "DELETE", Action: simapi.ActionStatus, Status: http.StatusConflict, Content: "the slot is locked"}, times)
		},
		stuck: func(b *bench) func() {
			b.t.Helper()
			b.fault(simapi.Fault{Face: "hw", Method: "PUT", Action: simapi.ActionStatus, Status: http.StatusServiceUnavailable, Content: "hot-plug timed out"}, 1)
			return func() { cancelTask(b) }
		},
		laterPage: func(r *http.Request) bool {
			list := strings.HasSuffix(r.URL.Path, "/ResourceBlocks") || strings.HasSuffix(r.URL.Path, "/Endpoints")
			return list && r.URL.Query().Get("$skip") != ""
		},
		call: 5 * time.Minute, settle: time.Minute,
		requests: 80, listing: 20,
		not: map[string]string{},
	}
}

// redfishChanges are the paths of what changes something, which a system's or a zone's own are too.
const redfishChanges = "/n[12](/|$)|/Actions/Compose$"

func settingsRedfish() []setting {
	all := []setting{{name: "default"}, {name: "production times", call: 5 * time.Minute}, {name: "basic", kind: basic}}
	for _, p := range []struct {
		name    string
		redfish simapi.RedfishPolicies
	}{
		{"actions", simapi.RedfishPolicies{Forms: "actions", Work: "task200"}},
		{"actions, no monitor", simapi.RedfishPolicies{Forms: "actions", Work: "bare202"}},
		{"actions, synchronous", simapi.RedfishPolicies{Work: "sync200", Errors: "plain"}},
		{"actions, done too early", simapi.RedfishPolicies{Work: "early200", Errors: "message"}},
		{"actions, ETags required", simapi.RedfishPolicies{ETag: "required", Root: "same"}},
		{"actions, no ETags", simapi.RedfishPolicies{ETag: "none", Composing: "unlisted"}},
		{"list", simapi.RedfishPolicies{Forms: "list"}},
		{"list, unlisted", simapi.RedfishPolicies{Forms: "list", Composing: "unlisted", ETag: "required"}},
		{"list, no monitor", simapi.RedfishPolicies{Forms: "list", Work: "bare202", Composing: "unlisted"}},
		{"list, synchronous", simapi.RedfishPolicies{Forms: "list", Work: "sync204", ETag: "gzip"}},
		{"list, done too early", simapi.RedfishPolicies{Forms: "list", Work: "early200", Composing: "unlisted"}},
		{"list, no ETags", simapi.RedfishPolicies{Forms: "list", ETag: "none"}},
		{"manifest", simapi.RedfishPolicies{Forms: "manifest"}},
		{"manifest, no monitor", simapi.RedfishPolicies{Forms: "manifest", Work: "bare202"}},
		{"manifest, synchronous", simapi.RedfishPolicies{Forms: "manifest", Work: "sync200", ETag: "required"}},
		{"monitor ends as task", simapi.RedfishPolicies{AfterTask: "task", RetryAfter: "seconds"}},
		{"monitor is gone", simapi.RedfishPolicies{AfterTask: "gone", RetryAfter: "none"}},
		{"retry at a date", simapi.RedfishPolicies{RetryAfter: "date"}},
		{"pages of one", simapi.RedfishPolicies{PageSize: "1"}},
		{"expanded pages", simapi.RedfishPolicies{Expand: "yes"}},
		{"one page", simapi.RedfishPolicies{PageSize: "50", Expand: "yes"}},
		{"identity prefixed", simapi.RedfishPolicies{Identity: "prefixed"}},
		{"identity in serial", simapi.RedfishPolicies{Identity: "inSerial"}},
		{"serial number only", simapi.RedfishPolicies{Identity: "serialOnly"}},
		{"no status", simapi.RedfishPolicies{Identity: "nullStatus", Events: "none"}},
		{"no identity", simapi.RedfishPolicies{Identity: "none"}},
		{"zones", simapi.RedfishPolicies{Variant: zonesVariant}},
		{"zones, list", simapi.RedfishPolicies{Variant: zonesVariant, Forms: "list", HostBlock: "406"}},
		{"zones, synchronous", simapi.RedfishPolicies{Variant: zonesVariant, Work: "sync200"}},
		{"zones, list, synchronous", simapi.RedfishPolicies{Variant: zonesVariant, Forms: "list", Work: "sync204", ETag: "none"}},
	} {
		s := setting{name: p.name, policies: simapi.Policies{Redfish: p.redfish}}
		if p.redfish.Identity == "none" {
			s.kind = nameless
		}
		all = append(all, s)
	}
	for i := range all {
		p := all[i].policies.Redfish
		all[i].early = strings.HasPrefix(p.Work, "sync") && p.Composing != "unlisted"
		all[i].mute = p.Work == "bare202" || p.Work == "early200" || p.AfterTask == "gone"
		if p.Variant == zonesVariant {
			all[i].requests, all[i].listing = 110, 20
		}
		all[i].not = exceptRedfish(&all[i])
	}
	return all
}

// exceptRedfish says which rows do not apply to a setting.
func exceptRedfish(s *setting) map[string]string {
	not := map[string]string{}
	p := s.policies.Redfish
	if s.kind == basic {
		for _, row := range []string{"token revoked", "login is down", "login is refused", "clock 5 min ahead", "clock 5 min behind"} {
			not[row] = noSessions
		}
	}
	if s.kind == nameless {
		not["duplicate identity"], not["identity is missing"] = noIdentities, noIdentities
	}
	if p.PageSize == "50" {
		not["paged lists"] = "its lists are whole."
	}
	if p.Work == "bare202" || p.Work == "early200" {
		not["stuck work"] = noTasks
	}
	if p.Identity == "nullStatus" {
		not["critical"] = "it says nothing of health."
	}
	return not
}

func startRedfish(b *bench) (map[string]http.Handler, func()) {
	b.t.Helper()
	c := b.Core
	f := redfish.New(b.t.Context(), redfish.Options{
		Core: c, Config: b.Config, Faults: b.Faults, Clock: b.ManagerClock(), HardwareTimeout: time.Hour,
	})
	b.service.Store(f)
	stop := func() {
		f.Stop()
		c.Close()
		f.Close()
	}
	changes := regexp.MustCompile(redfishChanges)
	name := func(r *http.Request) string {
		switch {
		case r.Method == http.MethodGet:
		case changes.MatchString(r.URL.Path):
			return redfishChange
		case r.Method == http.MethodPost:
			return "idm" // a session is made
		}
		return "redfish"
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", b.ManagerClock().Now().UTC().Format(http.TimeFormat))
		f.Handler().ServeHTTP(w, r)
	})
	return map[string]http.Handler{"/": b.split(name, handler)}, stop
}

// cancelTask has a person cancel the one task that there has been.
func cancelTask(b *bench) {
	b.t.Helper()
	r := httptest.NewRequestWithContext(b.t.Context(), http.MethodDelete, "/redfish/v1/TaskService/TaskMonitors/1", http.NoBody)
	r.SetBasicAuth(b.Config.Credentials.Username, b.Config.Credentials.Password)
	rec := httptest.NewRecorder()
	b.service.Load().Handler().ServeHTTP(rec, r)
	if rec.Code != http.StatusNoContent {
		b.t.Errorf("cancel = %d %s", rec.Code, rec.Body)
	}
}
