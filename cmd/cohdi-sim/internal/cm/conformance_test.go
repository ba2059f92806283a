// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/idm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cm"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const conformanceChassis = `
faces: [fm, cm]
cm:
  cluster: 5f0c2a10-7d1e-4c55-9a40-0000000000c1
  limits: {` + fabrictest.ModelA + `: {min: 0, max: 2}}
tenant: 5f0c2a10-7d1e-4c55-9a40-000000000001
realm: some realm
credentials: {username: agent, password: "p&w=d+100% s", client_id: cdi, client_secret: "s3cret/&= +%41"}
fabrics: [{id: 0, uuid: f-0}]
machines:
  - {name: n1, uuid: ` + string(fabrictest.MachineOne) + `}
  - {name: n2, uuid: ` + string(fabrictest.MachineTwo) + `}
devices:
  - {id: a, count: 2, model: ` + fabrictest.ModelA + `}
  - {id: b, count: 1, model: ` + fabrictest.ModelB + `}
timing: {attachDelay: 20s, detachDelay: 20s}
`

// policies are all values of the face's policies that are not the default, and some that go together.
func policies() map[string]simapi.Policies {
	all := map[string]simapi.Policies{"default": {}}
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
	t      *testing.T
	cfg    *config.Config
	clk    *clocktesting.FakeClock
	core   *core.Core
	faults *fault.Injector
	tokens *idm.Manager
	server *httptest.Server
}

func newHands(t *testing.T, p simapi.Policies) *hands {
	t.Helper()
	cfg, err := config.Parse([]byte(conformanceChassis))
	if err != nil {
		t.Fatal(err)
	}
	h := &hands{t: t, cfg: cfg, clk: clocktesting.NewFakeClock(time.Unix(1e9, 0))}
	// Tokens and faults go by the real clock: time that passes while the chassis works is not what they are about.
	h.faults, h.tokens = fault.New(clock.RealClock{}), idm.New(cfg, clock.RealClock{})
	h.core, err = core.New(t.Context(), cfg, core.Options{Clock: h.clk, Numbers: make([]core.Number, len(cfg.Devices))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.core.Close)
	if err := h.core.SetPolicies(p); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/id_manager/", h.faults.Wrap("idm", h.tokens.Handler()))
	mux.Handle("/fabric_manager/", h.faults.Wrap("fm", fm.New(h.core, h.tokens, cfg).Handler()))
	mux.Handle("/cluster_manager/", h.faults.Wrap("cm", New(h.core, h.tokens, cfg, h.clk).Handler()))
	h.server = httptest.NewTLSServer(mux)
	t.Cleanup(h.server.Close)
	return h
}

// client is an agent's; each has logged in by itself.
func (h *hands) client(change ...func(*client.Config)) *client.Client {
	h.t.Helper()
	c := client.Config{
		Endpoint: strings.TrimPrefix(h.server.URL, "https://"), Tenant: h.cfg.Tenant, Cluster: h.cfg.CM.Cluster, Credentials: h.secret(),
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

// secret is the directory that a Kubernetes Secret would be mounted at.
func (h *hands) secret() string {
	h.t.Helper()
	dir := h.t.TempDir()
	for name, content := range map[string]string{
		"username": h.cfg.Credentials.Username, "password": h.cfg.Credentials.Password, "client_id": h.cfg.Credentials.ClientID,
		"client_secret": h.cfg.Credentials.ClientSecret, "realm": h.cfg.Realm,
		"ca.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.server.Certificate().Raw})),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			h.t.Fatal(err)
		}
	}
	return dir
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
	v, err := h.core.Machine(string(m))
	if err != nil {
		return nil
	}
	var out []string
	for _, d := range v.Listed {
		out = append(out, d.ReportedSerial)
	}
	return out
}

func (h *hands) FreeCount(model string) int {
	h.t.Helper()
	h.settle()
	_, n, _, err := h.core.Free("n1", model)
	if err != nil {
		h.t.Fatal(err)
	}
	return n
}

func (h *hands) Fate(f fabrictest.Fate) bool {
	h.t.Helper()
	const page = "<html><body>Bad gateway</body></html>"
	if f == fabrictest.CredentialsEnded {
		h.tokens.RevokeAll()
		return true
	}
	if f == fabrictest.Truncated && h.core.Policies().CM.Answer == "empty" {
		return false // an empty answer cannot end early
	}
	rule, ok := map[fabrictest.Fate]simapi.Fault{
		fabrictest.Busy: {
			Action: simapi.ActionStatus, Status: 409, Content: `{"status":409,"detail":{"code":"E03XXXX","message":"another change is in progress"}}`,
		},
		fabrictest.LostBefore:  {Action: simapi.ActionDropBefore},
		fabrictest.LostAfter:   {Action: simapi.ActionDropAfter},
		fabrictest.ErrorBefore: {Action: simapi.ActionStatus, Status: 502, Content: page, ContentType: "text/html"},
		fabrictest.ErrorAfter:  {Action: simapi.ActionStatusAfterEffect, Status: 502, Content: page, ContentType: "text/html"},
		fabrictest.Truncated:   {Action: simapi.ActionReset},
		fabrictest.NoWords:     {Action: simapi.ActionStatusAfterEffect, Status: 200},
		fabrictest.Hang:        {Action: simapi.ActionHang},
	}[f]
	rule.Face, rule.Path, rule.Count = "cm", "/resize$", 1
	if ok {
		h.add(rule)
	}
	return ok
}

func (h *hands) add(f simapi.Fault) {
	h.t.Helper()
	if _, err := h.faults.Add(f); err != nil {
		h.t.Fatal(err)
	}
}

func (h *hands) FailReads(m device.Machine, fail bool) {
	h.t.Helper()
	const name = "reads"
	if !fail {
		h.faults.Clear(name)
		return
	}
	h.add(simapi.Fault{Name: name, Method: "GET", Path: string(m), Action: simapi.ActionStatus, Status: 500})
}

func (h *hands) Shut() {
	h.t.Helper()
	if err := h.server.Listener.Close(); err != nil {
		h.t.Fatal(err)
	}
	h.server.CloseClientConnections()
}

func (h *hands) RefuseLogin() {
	h.t.Helper()
	h.tokens.RevokeAll()
	h.add(simapi.Fault{
		Face: "idm", Action: simapi.ActionStatus, Status: 401, Content: `{"error":"invalid_grant","error_description":"Invalid user credentials"}`,
	})
}
