// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	client "github.com/cohdi/cohdi-agent/internal/fabric/redfish"
)

const chassis = facetest.Pool + `
timing: {attachDelay: 30ms, detachDelay: 20ms}
seed: 7
`

// setting is one way in which a service may be.
type setting struct {
	policies simapi.RedfishPolicies
	random   bool
	basic    bool
	// nameless is a client that is told that GPUs have no identity.
	nameless bool
	// record sees what is asked and answered, where it is set.
	record *facetest.Record
}

// bench is a service with hands on its chassis.
type bench struct {
	*facetest.Chassis
	t       *testing.T
	setting setting
	face    *Face
	dir     string
	shut    atomic.Bool
	// asked counts the requests for a change of what is attached that reached the service.
	asked atomic.Int32
	// before is called with each request before it is answered.
	before atomic.Pointer[func(r *http.Request)]
}

func newBench(t *testing.T, s setting) *bench {
	t.Helper()
	if s.random {
		return newBenchOf(t, s, chassis+"redfish: {uris: random}\n")
	}
	return newBenchOf(t, s, chassis)
}

func newBenchOf(t *testing.T, s setting, description string) *bench {
	t.Helper()
	b := &bench{Chassis: facetest.New(t, description, facetest.Options{Policies: simapi.Policies{Redfish: s.policies}}), t: t, setting: s}
	b.face = New(t.Context(), Options{Core: b.Core, Config: b.Config, Faults: b.Faults, Clock: clock.RealClock{}, HardwareTimeout: 2 * time.Second})
	t.Cleanup(func() {
		for _, v := range b.Core.Violations() {
			if v.Kind == simapi.Invariant {
				t.Errorf("the chassis is not in order: %+v", v)
			}
		}
		b.face.Stop()
		b.Core.Close()
		b.face.Close()
	})
	handler := b.face.Handler()
	if s.record != nil {
		handler = s.record.Wrap(handler)
	}
	b.Serve(true, map[string]http.Handler{"/": b.Faults.Wrap("redfish", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f := b.before.Load(); f != nil {
			(*f)(r)
		}
		if r.Method == http.MethodPatch || r.Method == http.MethodPost && r.URL.Path != b.face.names.sessions() {
			b.asked.Add(1)
		}
		handler.ServeHTTP(w, r)
	}))})
	b.dir = b.Secret(b.Files())
	return b
}

// client is a new one each time, as each process has its own.
func (b *bench) client() *client.Client {
	b.t.Helper()
	c, err := client.New(client.Config{Endpoint: b.Server.URL, Credentials: b.dir, Basic: b.setting.basic, NoIdentity: b.setting.nameless, Poll: 100 * time.Millisecond, Settle: time.Second})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if err := c.Close(context.WithoutCancel(b.t.Context())); err != nil && !b.shut.Load() {
			b.t.Error(err)
		}
	})
	return c
}

var full = facetest.Full()

func settings() map[string]setting {
	out := map[string]setting{
		"actions, tasks, random paths": {random: true},
		"list, synchronous, ETags required": {policies: simapi.RedfishPolicies{
			Forms: "list", Work: "sync204", ETag: "required", Composing: "unlisted", Expand: "yes", Errors: "plain",
		}},
		"zones": {policies: simapi.RedfishPolicies{Variant: "zones", Forms: "list", Work: "sync200", ETag: "none"}, random: true, basic: true},
	}
	if !*full {
		return out
	}
	for _, forms := range []string{"all", "actions", "list", "manifest"} {
		for _, work := range []string{"task202", "task200", "bare202", "sync200", "sync204", "early200"} {
			out["composition/"+forms+"/"+work] = setting{policies: simapi.RedfishPolicies{Forms: forms, Work: work}, random: true}
			out["composition/"+forms+"/"+work+"/unlisted"] = setting{policies: simapi.RedfishPolicies{Forms: forms, Work: work, Composing: "unlisted"}}
		}
		for _, etag := range []string{"required", "none", "gzip"} {
			out["composition/"+forms+"/"+etag] = setting{policies: simapi.RedfishPolicies{Forms: forms, ETag: etag}}
		}
	}
	for _, forms := range []string{"all", "actions", "list"} {
		for _, work := range []string{"task202", "sync200", "sync204"} {
			out["zones/"+forms+"/"+work] = setting{policies: simapi.RedfishPolicies{Variant: "zones", Forms: forms, Work: work}}
		}
	}
	out["no identity"] = setting{policies: simapi.RedfishPolicies{Identity: "none"}, nameless: true}
	for name, p := range map[string]simapi.RedfishPolicies{
		"after task":      {AfterTask: "task"},
		"task is gone":    {AfterTask: "gone"},
		"retry seconds":   {RetryAfter: "seconds"},
		"retry date":      {RetryAfter: "date"},
		"retry none":      {RetryAfter: "none"},
		"pages of one":    {PageSize: "1"},
		"large pages":     {PageSize: "50", Expand: "yes"},
		"prefixed":        {Identity: "prefixed"},
		"UUID in serial":  {Identity: "inSerial"},
		"null status":     {Identity: "nullStatus"},
		"plain errors":    {Errors: "plain"},
		"root is same":    {Root: "same", Events: "none"},
		"host block 406":  {HostBlock: "406", Forms: "list"},
		"bare, unlisted":  {Work: "bare202", Composing: "unlisted"},
		"early, unlisted": {Work: "early200", Composing: "unlisted"},
	} {
		out[name] = setting{policies: p}
	}
	return out
}

// TestFace_conformance lets the agent's client do everything that it can do, with each kind of service.
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

// uri is how the service names a device.
func (b *bench) uri(id string) string {
	if b.face.policies().Variant == variantZones {
		return b.face.endpoint(0, id)
	}
	return b.face.block(id)
}

// Attached waits for what is under way.
func (b *bench) Attached(m device.Machine) []string {
	b.t.Helper()
	b.rest()
	return b.Listed(m, func(d core.Device) string { return b.uri(d.ID) })
}

// rest waits until nothing is under way.
func (b *bench) rest() {
	for clk := (clock.RealClock{}); b.busy(); {
		clk.Sleep(5 * time.Millisecond)
	}
}

// busy tells whether something is under way.
func (b *bench) busy() bool {
	b.face.mu.Lock()
	defer b.face.mu.Unlock()
	return len(b.face.coming) > 0
}

func refusalOf(status int, key string) (int, string) {
	data, err := json.Marshal(refuse(status, key, "so be it").body("extended"))
	if err != nil {
		panic(err)
	}
	return status, string(data)
}

func (b *bench) Fate(f fabrictest.Fate) bool {
	b.t.Helper()
	if f == fabrictest.CredentialsEnded {
		b.face.EndSessions()
		return !b.setting.basic
	}
	if !b.tells(f) {
		return false
	}
	status, words := refusalOf(http.StatusServiceUnavailable, "ResourceInUse")
	rule, ok := map[fabrictest.Fate]simapi.Fault{
		fabrictest.Busy:           {Action: simapi.ActionStatus, Status: status, Content: words, Headers: map[string]string{"Retry-After": "5"}},
		fabrictest.NoWords:        {Action: simapi.ActionStatusAfterEffect, Status: http.StatusNoContent},
		fabrictest.WorkRefused:    {Face: "hw", Action: simapi.ActionStatus, Status: http.StatusConflict, Content: "no"},
		fabrictest.WorkLostBefore: {Face: "hw", Action: simapi.ActionDropBefore},
		fabrictest.WorkLostAfter:  {Face: "hw", Action: simapi.ActionDropAfter},
	}[f]
	if !ok {
		rule, ok = facetest.Fate(f, words)
	}
	if !ok {
		return false
	}
	if rule.Face == "" {
		rule.Face, rule.Body = "redfish", "@odata.id" // what names something
	}
	rule.Count, rule.Name = 1, string(f)
	b.Add(rule)
	if f != fabrictest.Hang { // the caller may have given up before
		b.t.Cleanup(func() {
			for _, r := range b.Faults.Rules() {
				if r.Name == rule.Name && r.Hits != 1 {
					b.t.Errorf("fate %s has met %d calls", f, r.Hits)
				}
			}
		})
	}
	return true
}

// tells is false where the service does not tell how work has ended, or has said already that it is done.
func (b *bench) tells(f fabrictest.Fate) bool {
	p := b.face.policies()
	mute := p.Work == "bare202" || p.AfterTask == "gone"
	early := p.Work == "early200"
	return (f != fabrictest.WorkRefused || !mute && !early) && (f != fabrictest.WorkLostBefore || !early)
}

func (b *bench) FailReads(m device.Machine, fail bool) {
	b.t.Helper()
	const name = "reads"
	if !fail {
		b.Faults.Clear(name)
		return
	}
	rule := simapi.Fault{Name: name, Face: "redfish", Method: "GET", Path: "/redfish/v1/.", Action: simapi.ActionStatus, Status: 500}
	if m != "" {
		v, err := b.Core.Machine(string(m))
		if err != nil {
			b.t.Fatal(err)
		}
		rule.Path = "^" + b.face.system(v.Name) + "$"
		if b.face.policies().Variant == variantZones {
			rule.Path += "|^" + b.face.port(0, v.Name) + "$"
		}
	}
	b.Add(rule)
}

func (b *bench) Shut() {
	b.shut.Store(true)
	b.Chassis.Shut()
}

func (b *bench) RefuseLogin() {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.dir, "password"), []byte("another"), 0o600); err != nil {
		b.t.Fatal(err)
	}
	b.face.EndSessions()
}

// person asks the service past all faults, as somebody else who is known.
func (b *bench) person(method, path, body string, header ...string) (int, object) {
	b.t.Helper()
	r := httptest.NewRequestWithContext(b.t.Context(), method, path, bytes.NewBufferString(body))
	r.SetBasicAuth(b.Config.Credentials.Username, b.Config.Credentials.Password)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	rec := httptest.NewRecorder()
	b.face.Handler().ServeHTTP(rec, r)
	var out object
	if rec.Body.Len() > 0 {
		if err := json.Unmarshal(rec.Body.Bytes(), &out); err != nil {
			b.t.Fatalf("%s %s: %v in %s", method, path, err, rec.Body)
		}
	}
	return rec.Code, out
}
