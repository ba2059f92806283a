// SPDX-License-Identifier: Apache-2.0

package facetest

import (
	"context"
	"encoding/pem"
	"flag"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/idm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// Pool is the chassis that fabrictest wants, to be followed by what the face needs. Logins are hard to encode.
const Pool = `
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

// Full is the flag that has a face's tests play all kinds of installations, and not those alone that differ most. A test
// package declares it once.
func Full() *bool {
	return flag.Bool("full", false, "play all kinds of installations, and not a sample")
}

// Page is what a gateway says that is not the manager.
const Page = "<html><body>Bad gateway</body></html>"

// Options of a chassis.
type Options struct {
	// Clock is the hardware's; the real one if nil. Tokens and faults go by the real one in any case.
	Clock clock.WithTicker
	// Skew is how far the manager's clock is ahead.
	Skew     time.Duration
	Policies simapi.Policies
	// InMemory: connections are not sockets.
	InMemory bool
	// StatePath is where the chassis keeps its state; in memory only if empty.
	StatePath string
}

// Chassis is a simulated chassis with a face in front of it.
type Chassis struct {
	T      testing.TB
	Config *config.Config
	Core   *core.Core
	Faults *fault.Injector
	Tokens *idm.Manager
	// Server is set by Serve.
	Server *httptest.Server

	clk  clock.WithTicker
	skew time.Duration
	path string
	wire *wire // nil where connections are sockets
}

// New builds a chassis of a description.
func New(tb testing.TB, description string, o Options) *Chassis {
	tb.Helper()
	cfg, err := config.Parse([]byte(description))
	if err != nil {
		tb.Fatal(err)
	}
	c := &Chassis{T: tb, Config: cfg, Faults: fault.New(clock.RealClock{}), Tokens: idm.New(cfg, skewed{by: o.Skew}), clk: o.Clock, skew: o.Skew, path: o.StatePath}
	if c.clk == nil {
		c.clk = clock.RealClock{}
	}
	if o.InMemory {
		c.wire = newWire()
	}
	if err := config.CheckPolicies(o.Policies); err != nil {
		tb.Fatal(err)
	}
	cfg.Policies = config.MergePolicies(cfg.Policies, o.Policies)
	c.Build()
	tb.Cleanup(func() { c.Core.Close() })
	return c
}

// Build builds the chassis anew, with the state that the last one has kept.
func (c *Chassis) Build() {
	c.T.Helper()
	var err error
	if c.Core, err = core.New(c.T.Context(), c.Config, core.Options{Clock: c.clk, StatePath: c.path, Numbers: make([]core.Number, len(c.Config.Devices))}); err != nil {
		c.T.Fatal(err)
	}
}

// StatePath is where the chassis keeps its state, if it does.
func (c *Chassis) StatePath() string { return c.path }

// ManagerClock is the manager's, which may be ahead of the agent's.
func (c *Chassis) ManagerClock() clock.WithTicker { return skewed{by: c.skew} }

// skewed is a clock that is ahead.
type skewed struct {
	clock.RealClock
	by time.Duration
}

func (s skewed) Now() time.Time { return s.RealClock.Now().Add(s.by) }

func (s skewed) Since(t time.Time) time.Duration { return s.Now().Sub(t) }

// Serve puts handlers, by the prefix of their paths, where the agent's driver finds them: with TLS or without.
func (c *Chassis) Serve(secure bool, handlers map[string]http.Handler) {
	mux := http.NewServeMux()
	for prefix, h := range handlers {
		mux.Handle(prefix, h)
	}
	c.Server = httptest.NewUnstartedServer(mux)
	if c.wire != nil {
		_ = c.Server.Listener.Close() // nobody has seen it yet
		c.Server.Listener = c.wire
	}
	if secure {
		c.Server.StartTLS()
	} else {
		c.Server.Start()
	}
	c.T.Cleanup(c.Server.Close)
}

// Dial is how a driver reaches the server; nil where any driver does.
func (c *Chassis) Dial() func(ctx context.Context, network, address string) (net.Conn, error) {
	if c.wire == nil {
		return nil
	}
	return c.wire.Dial
}

// Files are those of a Secret for the password grant.
func (c *Chassis) Files() map[string]string {
	login := c.Config.Credentials
	return map[string]string{
		"username": login.Username, "password": login.Password, "client_id": login.ClientID, "client_secret": login.ClientSecret, "realm": c.Config.Realm,
	}
}

// Secret is the directory that a Kubernetes Secret with these files would be mounted at, and the server's CA beside them.
func (c *Chassis) Secret(files map[string]string) string {
	c.T.Helper()
	dir := c.T.TempDir()
	all := maps.Clone(files)
	if cert := c.Server.Certificate(); cert != nil {
		all["ca.crt"] = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}))
	}
	for name, content := range all {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			c.T.Fatal(err)
		}
	}
	return dir
}

// Add adds a fault.
func (c *Chassis) Add(f simapi.Fault) {
	c.T.Helper()
	if _, err := c.Faults.Add(f); err != nil {
		c.T.Fatal(err)
	}
}

// Listed are the devices that a machine really has, by what id says of each, in the order of that.
func (c *Chassis) Listed(m device.Machine, id func(core.Device) string) []string {
	v, err := c.Core.Machine(string(m))
	if err != nil {
		return nil
	}
	var out []string
	for _, d := range v.Listed {
		out = append(out, id(d))
	}
	slices.Sort(out)
	return out
}

// FreeCount is what is really free of a model.
func (c *Chassis) FreeCount(model string) int {
	c.T.Helper()
	_, n, _, err := c.Core.Free("n1", model)
	if err != nil {
		c.T.Fatal(err)
	}
	return n
}

// Fate is the fault that brings a fate about, to be met once by what else the rule matches; false is one that needs more
// than that. busy is the manager's own word for it.
func Fate(f fabrictest.Fate, busy string) (simapi.Fault, bool) {
	rule, ok := map[fabrictest.Fate]simapi.Fault{
		fabrictest.Busy:        {Action: simapi.ActionStatus, Status: http.StatusConflict, Content: busy},
		fabrictest.LostBefore:  {Action: simapi.ActionDropBefore},
		fabrictest.LostAfter:   {Action: simapi.ActionDropAfter},
		fabrictest.ErrorBefore: {Action: simapi.ActionStatus, Status: http.StatusBadGateway, Content: Page, ContentType: "text/html"},
		fabrictest.ErrorAfter:  {Action: simapi.ActionStatusAfterEffect, Status: http.StatusBadGateway, Content: Page, ContentType: "text/html"},
		fabrictest.Truncated:   {Action: simapi.ActionReset},
		fabrictest.NoWords:     {Action: simapi.ActionStatusAfterEffect, Status: http.StatusOK},
		fabrictest.Hang:        {Action: simapi.ActionHang},
	}[f]
	rule.Count = 1
	return rule, ok
}

// Shut makes the server refuse connections from now on.
func (c *Chassis) Shut() {
	c.T.Helper()
	if err := c.Server.Listener.Close(); err != nil {
		c.T.Fatal(err)
	}
	c.Server.CloseClientConnections()
}

// RefuseLogin makes tokens worthless and gives out no more.
func (c *Chassis) RefuseLogin() {
	c.T.Helper()
	c.Tokens.RevokeAll()
	c.Add(simapi.Fault{
		Name: "login", Face: "idm", Action: simapi.ActionStatus, Status: http.StatusUnauthorized,
		Content: `{"error":"invalid_grant","error_description":"Invalid user credentials"}`,
	})
}
