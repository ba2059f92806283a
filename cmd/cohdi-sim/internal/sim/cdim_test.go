// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/cdim"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const cdimChassis = `
listen: {fm: "127.0.0.1:0", control: "127.0.0.1:0", cdim: "127.0.0.1:0", cdimDirect: "127.0.0.1:0"}
cdim: {dialect: product}
tenant: t-1
realm: CDIM
credentials: {username: u, password: p, client_id: cdim-client, client_secret: s}
fabrics: [{id: 0, uuid: f-0}]
machines: [{name: n1, uuid: 00000000-0000-4000-8000-000000000001, noNode: true}]
devices: [{id: gpu, count: 2, model: A}]
`

// TestSimulator_servesCDIM: one chassis, the FM and both ways to the CDIM; what one does the others show.
func TestSimulator_servesCDIM(t *testing.T) {
	b := startChassis(t, t.TempDir(), cdimChassis)
	for name, content := range map[string]string{"client_id": "cdim-client", "client_secret": "s", "realm": "CDIM"} {
		if err := os.WriteFile(filepath.Join(b.dir, "tls", name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	gateway, direct := "https://"+b.simulator.CDIMAddress(), "http://"+b.simulator.CDIMDirectAddress()
	for i, cfg := range []cdim.Config{
		{Dialect: cdim.DialectProduct, Gateway: gateway, Login: gateway, Credentials: filepath.Join(b.dir, "tls"), Poll: 100 * time.Millisecond},
		{Dialect: cdim.DialectProduct, ConfigurationManager: direct, LayoutApply: direct, PlainHTTP: true, Poll: 100 * time.Millisecond},
	} {
		c, err := cdim.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		free, err := c.Free(t.Context(), []string{"A"})
		if err != nil || free["A"].Count != 2-i {
			t.Fatalf("free = %+v, %v, want %d", free, err, 2-i)
		}
		op, err := c.Attach(t.Context(), fabric.Intent{
			Machine: "00000000-0000-4000-8000-000000000001", Model: "A", Device: free["A"].Devices[0].ID,
		})
		if err == nil {
			op, err = fabrictest.Wait(t.Context(), clock.RealClock{}, c, op)
		}
		if err != nil || op.State != fabric.Done {
			t.Fatalf("attach = %+v, %v", op, err)
		}
		state, err := b.State(t.Context())
		if err != nil || len(state.Attached("n1")) != i+1 {
			t.Errorf("%d devices attached, %v, want %d", len(state.Attached("n1")), err, i+1)
		}
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	log, err := b.Log(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	faces := map[string]int{}
	for _, r := range log {
		faces[r.Face]++
		if r.Face == "idm" && strings.Contains(r.Body, "client_secret") {
			t.Error("the log shows a login's form")
		}
	}
	if faces["idm"] != 1 || faces["hw"] != 2 || faces["cdim"] < 8 {
		t.Errorf("requests by face: %v", faces)
	}
	if _, err := b.Raw(t.Context(), "POST", "/loseWorker", nil); err == nil {
		t.Error("a worker was lost while no job ran")
	}
	stale := simapi.Duration(time.Hour)
	if err := b.SetTiming(t.Context(), simapi.Timing{StaleDelay: &stale}); err != nil {
		t.Error(err)
	}
}
