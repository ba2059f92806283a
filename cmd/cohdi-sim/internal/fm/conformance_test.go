// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/idm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	client "github.com/cohdi/cohdi-agent/internal/fabric/fm"
)

const conformanceChassis = `
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
`

// hands are what the conformance suite has on the chassis.
type hands struct {
	t      *testing.T
	core   *core.Core
	faults *fault.Injector
	tokens *idm.Manager
	server *httptest.Server
}

// TestFace_conformance lets the agent's client, which was written from the same facts and without sight of this face, do
// everything that it can do.
func TestFace_conformance(t *testing.T) {
	fabrictest.Run(t, func(t *testing.T) (fabric.Manager, fabrictest.Control) {
		t.Helper()
		cfg, err := config.Parse([]byte(conformanceChassis))
		if err != nil {
			t.Fatal(err)
		}
		c := &hands{t: t, faults: fault.New(clock.RealClock{}), tokens: idm.New(cfg, clock.RealClock{})}
		c.core, err = core.New(t.Context(), cfg, core.Options{Clock: clock.RealClock{}, Numbers: make([]core.Number, len(cfg.Devices))})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.core.Close)
		mux := http.NewServeMux()
		mux.Handle("/id_manager/", c.faults.Wrap("idm", c.tokens.Handler()))
		mux.Handle("/", c.faults.Wrap("fm", New(c.core, c.tokens, cfg).Handler()))
		c.server = httptest.NewTLSServer(mux)
		t.Cleanup(c.server.Close)
		m, err := client.New(client.Config{
			Endpoint: strings.TrimPrefix(c.server.URL, "https://"), Tenant: cfg.Tenant, Credentials: c.secret(cfg),
		})
		if err != nil {
			t.Fatal(err)
		}
		return m, c
	})
}

// secret is the directory that a Kubernetes Secret would be mounted at.
func (c *hands) secret(cfg *config.Config) string {
	c.t.Helper()
	dir := c.t.TempDir()
	for name, content := range map[string]string{
		"username": cfg.Credentials.Username, "password": cfg.Credentials.Password, "client_id": cfg.Credentials.ClientID,
		"client_secret": cfg.Credentials.ClientSecret, "realm": cfg.Realm,
		"ca.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.server.Certificate().Raw})),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			c.t.Fatal(err)
		}
	}
	return dir
}

func (c *hands) Attached(m device.Machine) []string {
	c.t.Helper()
	v, err := c.core.Machine(string(m))
	if err != nil {
		return nil
	}
	var out []string
	for _, d := range v.Listed {
		out = append(out, d.ResUUID)
	}
	return out
}

func (c *hands) FreeCount(model string) int {
	c.t.Helper()
	_, n, _, err := c.core.Free("n1", model)
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

func (c *hands) Fate(f fabrictest.Fate) bool {
	c.t.Helper()
	const page = "<html><body>Bad gateway</body></html>"
	if f == fabrictest.CredentialsEnded {
		c.tokens.RevokeAll()
		return true
	}
	rule, ok := map[fabrictest.Fate]simapi.Fault{
		fabrictest.Busy: {
			Action: simapi.ActionStatus, Status: 409, Content: `{"status":409,"detail":{"code":"E02XXXX","message":"another update is in progress"}}`,
		},
		fabrictest.LostBefore:  {Action: simapi.ActionDropBefore},
		fabrictest.LostAfter:   {Action: simapi.ActionDropAfter},
		fabrictest.ErrorBefore: {Action: simapi.ActionStatus, Status: 502, Content: page, ContentType: "text/html"},
		fabrictest.ErrorAfter:  {Action: simapi.ActionStatusAfterEffect, Status: 502, Content: page, ContentType: "text/html"},
		fabrictest.Truncated:   {Action: simapi.ActionReset},
		fabrictest.NoWords:     {Action: simapi.ActionStatusAfterEffect, Status: 200},
		fabrictest.Hang:        {Action: simapi.ActionHang},
	}[f]
	rule.Face, rule.Path, rule.Count = "fm", "/update$", 1
	if ok {
		c.add(rule)
	}
	return ok
}

func (c *hands) add(f simapi.Fault) {
	c.t.Helper()
	if _, err := c.faults.Add(f); err != nil {
		c.t.Fatal(err)
	}
}

func (c *hands) FailReads(m device.Machine, fail bool) {
	c.t.Helper()
	const name = "reads"
	if !fail {
		c.faults.Clear(name)
		return
	}
	c.add(simapi.Fault{Name: name, Face: "fm", Method: "GET", Path: string(m), Action: simapi.ActionStatus, Status: 500})
}

func (c *hands) Shut() {
	c.t.Helper()
	if err := c.server.Listener.Close(); err != nil {
		c.t.Fatal(err)
	}
	c.server.CloseClientConnections()
}

func (c *hands) RefuseLogin() {
	c.t.Helper()
	c.tokens.RevokeAll()
	c.add(simapi.Fault{
		Face: "idm", Action: simapi.ActionStatus, Status: 401, Content: `{"error":"invalid_grant","error_description":"Invalid user credentials"}`,
	})
}
