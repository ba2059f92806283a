// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	"github.com/cohdi/cohdi-agent/internal/fabric/sunfish"
)

const sunfishChassis = `
listen: {fm: "127.0.0.1:0", control: "127.0.0.1:0", sunfish: "127.0.0.1:0"}
policies: {sunfish: {sameTarget: reject}}
tenant: t-1
realm: r
credentials: {username: u, password: p, client_id: c, client_secret: s}
fabrics: [{id: 0, uuid: f-0}]
machines: [{name: n1, uuid: 00000000-0000-4000-8000-000000000001, noNode: true}]
devices: [{id: gpu, count: 2, model: A}]
`

// TestSimulator_servesSunfish: the service is one more face of the chassis, and has its Connections after a restart.
func TestSimulator_servesSunfish(t *testing.T) {
	dir := t.TempDir()
	b := startChassis(t, dir, sunfishChassis)
	c, err := sunfish.New(sunfish.Config{Endpoint: "http://" + b.simulator.SunfishAddress(), PlainHTTP: true, Poll: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	op, err := c.Attach(t.Context(), fabric.Intent{Machine: "00000000-0000-4000-8000-000000000001", Model: "A"})
	if err == nil {
		op, err = fabrictest.Wait(t.Context(), clock.RealClock{}, c, op)
	}
	if err != nil || op.State != fabric.Done {
		t.Fatalf("attach = %+v, %v", op, err)
	}
	state, err := b.State(t.Context())
	if err != nil || len(state.Attached("n1")) != 1 || state.Policies.Sunfish.SameTarget != "reject" {
		t.Errorf("state %+v, %v", state, err)
	}
	free, err := c.Free(t.Context(), []string{"A"})
	if err != nil || free["A"].Count != 1 {
		t.Errorf("free = %+v, %v", free, err)
	}
	log, err := b.Log(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	faces := map[string]int{}
	for _, r := range log {
		faces[r.Face]++
	}
	if faces["agent"] != 1 || faces["sunfish"] < 8 {
		t.Errorf("requests by face: %v", faces)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
