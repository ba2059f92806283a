// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"net/http"
	"os"
	"testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

var samples = facetest.NewSamples()

// TestFace_samples compares what the agent's client asks, and what the face answers, with samples, and lets the face take
// those that are requests of others.
func TestFace_samples(t *testing.T) {
	samples.Find(t, "samples")
	b := newBench(t, simapi.SunfishPolicies{}, 0)
	_, target := b.person("GET", firstA, "")
	samples.Same(t, "sunfish-endpoint-200.json", []byte(target), map[string]string{
		"/ConnectedEntities[]/Identifiers": "what an endpoint leads to has them", "/Links/Ports[]": "no ports are shown",
	})
	if _, err := b.client().Attach(t.Context(), fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA, Device: firstA}); err != nil {
		t.Fatal(err)
	}
	var made string
	for _, r := range b.Faults.Log() {
		if r.Method == http.MethodPost {
			made = r.Body
		}
	}
	samples.Same(t, "sunfish-connection-request.json", []byte(made), map[string]string{
		"/ConnectionType": "what is connected is no memory", "/MemoryChunkInfo": "the same",
	})
	taken := map[string]struct {
		method, path string
		status       int
	}{
		"sunfish-zone-request.json":                 {"POST", base + "/Fabrics/f-0/Zones", http.StatusOK},
		"sunfish-agent-event.json":                  {"POST", "/EventListener", http.StatusOK},
		"sunfish-agent-event-resource-created.json": {"POST", "/EventListener", http.StatusOK},
		// The chassis has no such node; what is asked of a model that nobody knows is nothing.
		"sunfish-cro-attach-request.json":        {"PATCH", base + "/Systems/System", http.StatusNotFound},
		"sunfish-cro-detach-request.json":        {"PATCH", base + "/Systems/System", http.StatusNotFound},
		"sunfish-cro-unknown-model-request.json": {"PATCH", base + "/Systems/System", http.StatusOK},
	}
	reasons := map[string]string{}
	for sample, want := range taken {
		reasons[sample] = "the face takes it"
		body, err := os.ReadFile(samples.Find(t, "samples/"+sample))
		if err != nil {
			t.Fatal(err)
		}
		if status, text := b.person(want.method, want.path, string(body)); status != want.status {
			t.Errorf("%s: %d %s, want %d", sample, status, text, want.status)
		}
	}
	samples.All(t, "sunfish-", reasons)
}
