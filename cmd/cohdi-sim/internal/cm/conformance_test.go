// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"net/http"
	"runtime"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cm"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const conformanceChassis = facetest.Pool + `
faces: [fm, cm]
cm:
  cluster: 5f0c2a10-7d1e-4c55-9a40-0000000000c1
  limits: {` + fabrictest.ModelA + `: {min: 0, max: 2}}
timing: {attachDelay: 20s, detachDelay: 20s}
`

var full = facetest.Full()

// policies are all values of the face's policies that are not the default, and some that go together; or those alone that
// differ most.
func policies() map[string]simapi.Policies {
	all := map[string]simapi.Policies{"default": {}}
	if !*full {
		all["partial_and_atComplete_absent"] = simapi.Policies{
			Serialization: "busy409", CM: simapi.CMPolicies{Count: "atComplete", Progress: "absent", Detail: "partial", Answer: "empty", Refusal: "html"},
		}
		return all
	}
	for name, p := range map[string]simapi.CMPolicies{
		"count_atComplete":         {Count: "atComplete"},
		"progress_withID":          {Progress: "withID"},
		"progress_absent":          {Progress: "absent"},
		"detail_partial":           {Detail: "partial"},
		"above_409":                {Above: "409"},
		"above_clamp":              {Above: "clamp"},
		"below_lastWins":           {Below: "lastWins"},
		"shortage_409":             {Shortage: "409"},
		"unknown_ignore":           {Unknown: "ignore"},
		"remaining_trusted":        {Remaining: "trusted"},
		"failed_vanish":            {Failed: "vanish"},
		"answer_empty":             {Answer: "empty"},
		"answer_text":              {Answer: "text"},
		"refusal_html":             {Refusal: "html"},
		"refusal_empty":            {Refusal: "empty"},
		"absent_and_atComplete":    {Count: "atComplete", Progress: "absent"},
		"partial_and_withID":       {Detail: "partial", Progress: "withID"},
		"partial_and_atComplete":   {Detail: "partial", Count: "atComplete"},
		"vanish_and_shortage_late": {Failed: "vanish", Count: "atComplete"},
	} {
		all[name] = simapi.Policies{CM: p}
	}
	all["serialization_busy409"] = simapi.Policies{Serialization: "busy409"}
	all["serialization_none"] = simapi.Policies{Serialization: "none"}
	all["pick_worst"] = simapi.Policies{Pick: "worst"}
	return all
}

// TestFace_conformance lets the agent's client do everything that it can do, under each policy. The chassis goes by a clock
// of its own, which moves when the client waits.
func TestFace_conformance(t *testing.T) {
	for name, p := range policies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fabrictest.Run(t, func(t *testing.T) (fabric.Manager, fabrictest.Control) {
				t.Helper()
				h := newHands(t, p)
				return h.client(), h
			})
		})
	}
}

// hands are what the conformance suite has on the chassis.
type hands struct {
	*facetest.Chassis
	t   testing.TB
	clk *clocktesting.FakeClock
	// core and faults are the chassis's.
	core   *core.Core
	faults *fault.Injector
	dir    string
}

// newChassis is one that nobody reaches yet; its time stands until a test moves it.
func newChassis(t *testing.T, description string, p simapi.Policies) *hands {
	t.Helper()
	h := &hands{t: t, clk: clocktesting.NewFakeClock(time.Unix(1e9, 0))}
	h.Chassis = facetest.New(t, description, facetest.Options{Clock: h.clk, Policies: p})
	h.core, h.faults = h.Core, h.Faults
	return h
}

func newHands(t *testing.T, p simapi.Policies) *hands {
	t.Helper()
	h := newChassis(t, conformanceChassis, p)
	h.Serve(true, map[string]http.Handler{
		"/id_manager/":      h.faults.Wrap("idm", h.Tokens.Handler()),
		"/fabric_manager/":  h.faults.Wrap("fm", fm.New(h.core, h.Tokens, h.Config).Handler()),
		"/cluster_manager/": h.faults.Wrap("cm", New(h.core, h.Tokens, h.Config, h.clk).Handler()),
	})
	h.dir = h.Secret(h.Files())
	return h
}

// client is an agent's; each has logged in by itself.
func (h *hands) client(change ...func(*client.Config)) *client.Client {
	h.t.Helper()
	c := client.Config{
		Endpoint: h.Server.URL, Tenant: h.Config.Tenant, Cluster: h.Config.CM.Cluster, Credentials: h.dir,
		FabricManager: true,
	}
	for _, f := range change {
		f(&c)
	}
	m, err := client.New(c)
	if err != nil {
		h.t.Fatal(err)
	}
	return m
}

// driven is the chassis's clock, which moves on when somebody waits by it.
type driven struct{ *clocktesting.FakeClock }

func (d driven) NewTimer(wait time.Duration) clock.Timer {
	t := d.FakeClock.NewTimer(wait)
	d.Step(wait)
	return t
}

// Clock makes the suite move the chassis's time by waiting.
func (h *hands) Clock() clock.WithTicker { return driven{h.clk} }

// settle lets the chassis finish all that it has accepted.
func (h *hands) settle() {
	h.t.Helper()
	for h.working() {
		if h.t.Context().Err() != nil {
			h.t.Fatal("the chassis does not come to an end")
		}
		h.clk.Step(time.Second)
		runtime.Gosched()
	}
}

func (h *hands) working() bool {
	for _, op := range h.core.State().Operations {
		if op.End == nil {
			return true
		}
	}
	return false
}

func (h *hands) Attached(m device.Machine) []string {
	h.t.Helper()
	h.settle()
	return h.Listed(m, func(d core.Device) string { return d.ReportedSerial })
}

func (h *hands) FreeCount(model string) int {
	h.t.Helper()
	h.settle()
	return h.Chassis.FreeCount(model)
}

func (h *hands) Fate(f fabrictest.Fate) bool {
	h.t.Helper()
	if f == fabrictest.CredentialsEnded {
		h.Tokens.RevokeAll()
		return true
	}
	if f == fabrictest.Truncated && h.core.Policies().CM.Answer == "empty" {
		return false // an empty answer cannot end early
	}
	rule, ok := facetest.Fate(f, `{"status":409,"detail":{"code":"E03XXXX","message":"another change is in progress"}}`)
	rule.Face, rule.Path = "cm", "/resize$"
	if ok {
		h.Add(rule)
	}
	return ok
}

func (h *hands) FailReads(m device.Machine, fail bool) {
	h.t.Helper()
	const name = "reads"
	if !fail {
		h.faults.Clear(name)
		return
	}
	h.Add(simapi.Fault{Name: name, Method: "GET", Path: string(m), Action: simapi.ActionStatus, Status: 500})
}
