// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	"github.com/cohdi/cohdi-agent/internal/fabric/redfish"
)

const redfishChassis = `
listen: {fm: "127.0.0.1:0", control: "127.0.0.1:0", redfish: "127.0.0.1:0"}
redfish: {uris: random, sessions: 2}
tenant: t-1
realm: unused
credentials: {username: agent, password: "p&w=d", client_id: c, client_secret: s}
fabrics: [{id: 0, uuid: f-0}]
machines: [{name: n1, uuid: 00000000-0000-4000-8000-000000000001, noNode: true}]
devices: [{id: gpu, count: 2, model: A}]
`

// TestSimulator_servesRedfish: one chassis, the FM and a Redfish service; what one does the other shows, and tests can end
// sessions and change how the service is.
func TestSimulator_servesRedfish(t *testing.T) {
	b := startChassis(t, t.TempDir(), redfishChassis)
	for name, content := range map[string]string{"username": "agent", "password": "p&w=d"} {
		if err := os.WriteFile(filepath.Join(b.dir, "tls", name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := redfish.New(redfish.Config{
		Endpoint: b.simulator.RedfishAddress(), Credentials: filepath.Join(b.dir, "tls"), Poll: 100 * time.Millisecond, Settle: time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	pokes := make(chan struct{}, 100)
	listening, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Watch(listening, func() { pokes <- struct{}{} }) }()
	<-pokes
	for i, forms := range []string{"actions", "list"} {
		if err = b.SetPolicies(t.Context(), simapi.Policies{Redfish: simapi.RedfishPolicies{Forms: forms}}); err != nil {
			t.Fatal(err)
		}
		if err = b.Token(t.Context(), simapi.TokenChange{RevokeAll: true}); err != nil {
			t.Fatal(err)
		}
		op, failed := c.Attach(t.Context(), fabric.Intent{Machine: "00000000-0000-4000-8000-000000000001", Model: "A"})
		if failed == nil {
			op, failed = fabrictest.Wait(t.Context(), clock.RealClock{}, c, op)
		}
		if failed != nil || op.State != fabric.Done {
			t.Fatalf("attach = %+v, %v", op, failed)
		}
		<-pokes // also through the injector
		state, failed := b.State(t.Context())
		if failed != nil || len(state.Attached("n1")) != i+1 {
			t.Errorf("%d devices attached, %v, want %d", len(state.Attached("n1")), failed, i+1)
		}
	}
	stop()
	if err = <-ended; err != nil {
		t.Errorf("watch = %v", err)
	}
	if err = c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	log, err := b.Log(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	logins, logouts := 0, 0
	for _, r := range log {
		if r.Face != "redfish" && r.Face != "hw" {
			t.Errorf("request %+v", r)
		}
		if strings.Contains(r.Body, "p&w") || strings.Contains(r.Body, "Password") {
			t.Error("the log shows a login")
		}
		if r.Status == 201 {
			logins++
		}
		if r.Method == "DELETE" && r.Status == 204 {
			logouts++
		}
	}
	if logins != 3 || logouts != 1 {
		t.Errorf("%d logins and %d logouts, want 3 and 1", logins, logouts)
	}
}
