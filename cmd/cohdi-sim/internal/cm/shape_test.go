// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"net/http"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cm"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

var samples = facetest.NewSamples()

// TestFace_shapes compares what the agent's client asks, and what the face answers, with samples.
func TestFace_shapes(t *testing.T) {
	same := func(sample string, message []byte, known map[string]string) {
		t.Helper()
		samples.Same(t, sample, message, known)
	}
	samples.Find(t, "samples")
	ctx := t.Context()
	h := newChassis(t, conformanceChassis, simapi.Policies{})
	face := &facetest.Record{}
	h.Serve(true, map[string]http.Handler{
		"/id_manager/":      h.Tokens.Handler(),
		"/fabric_manager/":  fm.New(h.core, h.Tokens, h.Config).Handler(),
		"/cluster_manager/": face.Wrap(New(h.core, h.Tokens, h.Config, h.clk).Handler()),
	})
	h.dir = h.Secret(h.Files())
	m := h.client()
	machine := func() []byte {
		t.Helper()
		if _, failed := m.ListAttached(ctx, []device.Machine{one}); len(failed) > 0 {
			t.Fatal(failed)
		}
		return face.Last("GET", "/machines/").Answer
	}
	attach := func() {
		t.Helper()
		if _, err := m.Attach(ctx, fabric.Intent{Machine: one, Model: fabrictest.ModelA}); err != nil {
			t.Fatal(err)
		}
	}
	same("cm-machine-200-empty.json", machine(), nil)
	attach()
	resize := face.Last("POST", "/resize")
	same("cm-resize-add-request.json", resize.Request, nil)
	same("cm-resize-200.json", resize.Answer, nil)
	h.settle()
	same("cm-machine-200-complete.json", machine(), nil)
	attach()
	h.clk.Step(time.Second)
	same("cm-machine-200-adding-counted.json", machine(), nil)
	h.settle()
	listed := h.Attached(one)
	why := "device busy"
	if err := h.core.ChangeDevice(h.core.State().Devices[0].ID, simapi.DeviceChange{FailDetach: &why}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Detach(ctx, fabric.Intent{Machine: one, Model: fabrictest.ModelA, Device: listed[0]}); err != nil {
		t.Fatal(err)
	}
	same("cm-resize-remove-request.json", face.Last("POST", "/resize").Request, nil)
	h.settle()
	same("cm-machine-200-remove-failed.json", machine(), nil)
	if err := h.core.SetPolicies(simapi.Policies{CM: simapi.CMPolicies{Detail: "partial"}}); err != nil {
		t.Fatal(err)
	}
	same("cm-machine-200-partial-detail.json", machine(), nil)
	if _, err := h.client(func(c *client.Config) { c.FabricManager = false }).Machines(ctx); err != nil {
		t.Fatal(err)
	}
	same("cm-nodegroups-200.json", face.Last("GET", "/nodegroups$").Answer, nil)
	same("cm-nodegroup-200.json", face.Last("GET", "/nodegroups/").Answer, nil)
	if _, failed := m.ListAttached(ctx, []device.Machine{fabrictest.MachineUnknown}); len(failed) == 0 {
		t.Error("an unknown machine is listed")
	}
	same("cm-error-404.json", face.Last("GET", "/machines/").Answer, nil)
	const twice = "another sample is of this shape"
	samples.All(t, "cm-", map[string]string{
		"cm-machine-200-null-limits.json": "the limits of a model are null where there are none, and numbers else: cm-machine-200-empty.json has both",
		"cm-machine-200-add-failed.json":  twice, "cm-machine-200-adding-uncounted.json": twice, "cm-machine-200-critical.json": twice,
	})
}
