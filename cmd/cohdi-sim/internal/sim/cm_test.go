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
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/cm"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

const cmChassis = `
listen: {fm: "127.0.0.1:0", control: "127.0.0.1:0"}
faces: [fm, cm]
cm: {cluster: c-1}
tenant: t-1
realm: r
credentials: {username: u, password: p, client_id: c, client_secret: s}
fabrics: [{id: 0, uuid: f-0}]
machines: [{name: n1, uuid: 00000000-0000-4000-8000-000000000001, noNode: true}]
devices: [{id: gpu, count: 2, model: A}]
`

// TestSimulator_servesCM: one chassis and one login for both managers; a policy is changed while it runs.
func TestSimulator_servesCM(t *testing.T) {
	b := startChassis(t, t.TempDir(), cmChassis)
	for name, content := range map[string]string{"username": "u", "password": "p", "client_id": "c", "client_secret": "s", "realm": "r"} {
		if err := os.WriteFile(filepath.Join(b.dir, "tls", name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := cm.New(cm.Config{
		Endpoint: b.fm, Tenant: "t-1", Cluster: "c-1", Credentials: filepath.Join(b.dir, "tls"), FabricManager: true, PollAfter: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err = b.SetPolicies(t.Context(), simapi.Policies{CM: simapi.CMPolicies{Count: "atComplete"}}); err != nil {
		t.Fatal(err)
	}
	const machine = device.Machine("00000000-0000-4000-8000-000000000001")
	var op fabric.Operation
	for n := range 2 {
		op, err = c.Attach(t.Context(), fabric.Intent{Machine: machine, Model: "A"})
		if err == nil {
			_, err = fabrictest.Wait(t.Context(), clock.RealClock{}, c, op)
		}
		if err != nil {
			t.Fatal(err)
		}
		free, ferr := c.Free(t.Context(), []string{"A"})
		if ferr != nil || free["A"].Count != 1-n {
			t.Errorf("free = %+v, %v, want %d", free, ferr, 1-n)
		}
	}
	state, err := b.State(t.Context())
	if err != nil || len(state.Attached("n1")) != 2 || state.Logins != 1 || state.Policies.CM.Count != "atComplete" {
		t.Errorf("state = %+v, %v", state, err)
	}
	log, err := b.Log(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range log {
		if want := map[bool]string{true: "cm", false: "fm"}[strings.HasPrefix(r.Path, "/cluster_manager/")]; r.Face != want && r.Face != "idm" {
			t.Errorf("%s %s is logged for %s", r.Method, r.Path, r.Face)
		}
	}
}

// TestSimulator_servesWhatIsSaid: without a word the fabric manager alone.
func TestSimulator_servesWhatIsSaid(t *testing.T) {
	b := startChassis(t, t.TempDir(), strings.Replace(cmChassis, "faces: [fm, cm]\n", "", 1))
	for path, want := range map[string]int{
		"/fabric_manager/api/v1/machines?tenant_uuid=t-1":                            401,
		"/cluster_manager/cluster_autoscaler/v2/tenants/t-1/clusters/c-1/nodegroups": 404,
	} {
		if status, _, err := b.do("GET", path, "", ""); err != nil || status != want {
			t.Errorf("%s: %d, %v, want %d", path, status, err, want)
		}
	}
}
