// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
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
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	client "github.com/cohdi/cohdi-agent/internal/fabric/sunfish"
)

const chassis = facetest.Pool + `
timing: {attachDelay: 20ms, detachDelay: 10ms}
`

// The endpoints of the devices: by these the client knows them.
const (
	endpoints = base + "/Fabrics/f-0/Endpoints/"
	firstA    = endpoints + "T-a-0"
	secondA   = endpoints + "T-a-1"
	onlyB     = endpoints + "T-b-0"

	connections = base + "/Fabrics/f-0/Connections"
)

// bench is an installation with hands on its chassis.
type bench struct {
	*facetest.Chassis
	t     *testing.T
	face  *Face
	stale time.Duration

	mu sync.Mutex
	// before is done once before the next Connection is asked for.
	before func()
}

func newBench(t *testing.T, policies simapi.SunfishPolicies, stale time.Duration) *bench {
	t.Helper()
	b := &bench{Chassis: facetest.New(t, chassis, facetest.Options{Policies: simapi.Policies{Sunfish: policies}}), t: t, stale: stale}
	delay := simapi.Duration(stale)
	b.Core.SetTiming(simapi.Timing{StaleDelay: &delay})
	var err error
	if b.face, err = New(t.Context(), Options{
		Core: b.Core, Faults: b.Faults, Clock: clock.RealClock{}, Fabrics: b.Config.Fabrics, AgentTimeout: 2 * time.Second,
	}); err != nil {
		t.Fatal(err)
	}
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
	served := b.Faults.Wrap("sunfish", b.face.Handler())
	b.Serve(false, map[string]http.Handler{"/": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			b.mu.Lock()
			do := b.before
			b.before = nil
			b.mu.Unlock()
			if do != nil {
				do()
			}
		}
		served.ServeHTTP(w, r)
	})})
	return b
}

// settle is how long the client gives the machines to show what was done.
func (b *bench) settle() time.Duration { return 4*b.stale + 50*time.Millisecond }

// client is a new one each time, as each process has its own.
func (b *bench) client() *client.Client {
	b.t.Helper()
	c, err := client.New(client.Config{Endpoint: b.Server.URL, PlainHTTP: true, Poll: 20 * time.Millisecond, Settle: b.settle()})
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

// setting is one kind of installation.
type setting struct {
	policies simapi.SunfishPolicies
	stale    time.Duration
}

// settings are those that differ most, or all of them.
func settings() map[string]setting {
	out := map[string]setting{
		"machines that lag":    {stale: 100 * time.Millisecond},
		"machines show no GPU": {policies: simapi.SunfishPolicies{Extension: off}},
	}
	if *full {
		out["as real"] = setting{}
		out["targets are checked"] = setting{policies: simapi.SunfishPolicies{SameTarget: rejected}}
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
				b := newBench(t, s.policies, s.stale)
				return b.client(), b
			})
		})
	}
}

// Open: the service asks nobody who he is.
func (*bench) Open() bool { return true }

func (b *bench) Attached(m device.Machine) []string {
	b.t.Helper()
	return b.Listed(m, func(d core.Device) string { return endpoints + "T-" + d.ID })
}

func (b *bench) Fate(f fabrictest.Fate) bool {
	b.t.Helper()
	blind := b.Core.Policies().Sunfish.Extension == off
	rule, ok := map[fabrictest.Fate]simapi.Fault{
		fabrictest.Busy:           {Action: simapi.ActionStatus, Status: http.StatusTooManyRequests, Content: "slow down", ContentType: "text/plain"},
		fabrictest.ErrorBefore:    {Action: simapi.ActionStatus, Status: http.StatusInternalServerError},
		fabrictest.WorkLostBefore: {Face: "agent", Action: simapi.ActionDropBefore},
		fabrictest.WorkLostAfter:  {Face: "agent", Action: simapi.ActionDropAfter},
	}[f]
	if !ok {
		rule, ok = facetest.Fate(f, "slow down")
	}
	switch {
	case !ok:
		return false
	case f == fabrictest.WorkLostAfter && (blind || len(b.Attached(fabrictest.MachineOne)) > 0):
		// Nothing shows what came; and what has gone stays connected until it is detached again: TestFace_copyStays.
		return false
	}
	if rule.Face == "" {
		rule.Face = "sunfish"
	}
	rule.Count, rule.Name, rule.Path = 1, string(f), "/Connections"
	for _, method := range []string{http.MethodPost, http.MethodDelete} {
		rule.Method = method
		b.Add(rule)
	}
	if f != fabrictest.Hang { // the caller may have given up before
		b.t.Cleanup(func() {
			hits := 0
			for _, r := range b.Faults.Rules() {
				if r.Name == rule.Name {
					hits += r.Hits
				}
			}
			if hits != 1 {
				b.t.Errorf("fate %s has met %d calls", f, hits)
			}
		})
	}
	return true
}

func (b *bench) FailReads(m device.Machine, fail bool) {
	b.t.Helper()
	const name = "reads"
	if !fail {
		b.Faults.Clear(name)
		return
	}
	rule := simapi.Fault{Name: name, Face: "sunfish", Method: "GET", Action: simapi.ActionStatus, Status: 500}
	if m != "" {
		v, err := b.Core.Machine(string(m))
		if err != nil {
			b.t.Fatal(err)
		}
		rule.Path = "/Systems/" + v.Name + "(/|$)"
	}
	b.Add(rule)
}

func (*bench) RefuseLogin() {}

// person calls the service as an operator does, past all faults.
func (b *bench) person(method, at, body string) (int, string) {
	b.t.Helper()
	rec := httptest.NewRecorder()
	b.face.Handler().ServeHTTP(rec, httptest.NewRequestWithContext(b.t.Context(), method, at, strings.NewReader(body)))
	return rec.Code, rec.Body.String()
}

// members lists a collection.
func (b *bench) members(at string) []string {
	b.t.Helper()
	status, body := b.person(http.MethodGet, at, "")
	var c struct {
		Members []reference `json:"Members"`
	}
	if err := json.Unmarshal([]byte(body), &c); status != http.StatusOK || err != nil {
		b.t.Fatalf("GET %s: %d %s", at, status, body)
	}
	out := []string{}
	for _, m := range c.Members {
		out = append(out, m.ID)
	}
	return out
}
