// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

var samples = facetest.NewSamples()

// Why a face does without what a sample has.
const (
	chassisLess = "no chassis are shown"
	poolLess    = "blocks are in one list, and nobody reserves"
	blocksTell  = "what a system has is told by its blocks"
	cardLess    = "no PCIe devices are shown"
	argsLess    = "the arguments are in the words alone"
)

// TestFace_samples compares what the agent's client asks, and what the face answers, with samples.
func TestFace_samples(t *testing.T) {
	samples.Find(t, "samples")
	asked := &facetest.Record{}
	b := newBench(t, setting{record: asked})
	same := func(sample string, message object, known map[string]string) {
		t.Helper()
		data, err := json.Marshal(message)
		if err != nil {
			t.Fatal(err)
		}
		samples.Same(t, sample, data, known)
	}
	f, m := b.face, b.client()
	attach := func(unit string) {
		t.Helper()
		if _, err := m.Attach(t.Context(), fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA, Device: unit}); err != nil {
			t.Fatalf("attach %s: %v", unit, err)
		}
	}
	same("redfish-root-200.json", b.get(root+"/"), map[string]string{
		"/Chassis": chassisLess, "/Fabrics": "the blocks are in no fabric: the other variant has those", "/UUID": "nobody asks for it", "/@odata.etag": "it has one, too",
	})
	same("redfish-compositionservice-200.json", b.get(f.composition()), map[string]string{
		"/FreePool": poolLess, "/ActivePool": poolLess, "/CompositionReservations": poolLess, "/ReservationDuration": poolLess,
		"/Actions/#CompositionService.Compose": "the other forms are offered", "/@odata.etag": "it has one, too",
	})
	same("redfish-blocks-200-page1.json", b.get(f.blocks()), nil)
	same("redfish-blocks-200-page2.json", b.get(f.blocks()+"?$skip=3"), nil)
	known := map[string]string{"/Links/Chassis[]": chassisLess}
	same("redfish-block-200-free.json", b.get(f.block("a-1")), known)
	same("redfish-zone-200.json", b.get(f.resourceZone(0)), map[string]string{"/@odata.etag": "it has one, too"})
	same("redfish-capabilities-200.json", b.get(f.capabilities()), map[string]string{
		"/@Redfish.ResourceBlockLimits": "what a machine can have is found out by trying", "/@odata.etag": "it has one, too",
	})
	same("redfish-processor-200.json", b.get(f.processor("a-0")), map[string]string{
		"/Links": cardLess, "/PartNumber": "nobody asks for it", "/Location/PartLocation/LocationOrdinalValue": "the label names the slot", "/@odata.etag": "it has one, too",
	})

	attach(f.block("a-1"))
	same("redfish-add-block-request.json", decoded(t, asked.Last("POST", "AddResourceBlock").Request), nil)
	task := map[string]string{"/Payload": "standard services show what was asked"}
	same("redfish-task-202-running.json", decoded(t, asked.Last("POST", "AddResourceBlock").Answer), task)
	b.rest()
	attach(f.block("a-0"))
	same("redfish-block-200-composing.json", b.get(f.block("a-0")), map[string]string{"/Links/Chassis[]": chassisLess, "/Links/ComputerSystems[]": "it is listed with its system"})
	b.rest()
	same("redfish-block-200-composed.json", b.get(f.block("a-0")), known)
	system := map[string]string{"/Processors": blocksTell, "/PCIeDevices": cardLess, "/SerialNumber": "the UUID names it"}
	same("redfish-system-200-after.json", b.get(f.system("n1")), system)
	task["/@odata.etag"] = "it has one, too"
	same("redfish-task-200-completed.json", b.get(f.task("2")), task)
	b.Add(simapi.Fault{Face: "hw", Action: simapi.ActionDropBefore, Count: 1})
	if _, err := m.Detach(t.Context(), fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA, Device: f.block("a-0")}); err != nil {
		t.Fatal(err)
	}
	same("redfish-remove-block-request.json", decoded(t, asked.Last("POST", "RemoveResourceBlock").Request), map[string]string{
		"/ResourceBlockETag": "the state that was seen is named here, too", "/ComputerSystemETag": "the same",
	})
	b.rest()
	same("redfish-task-200-exception.json", b.get(f.task("3")), task)
	reply := asked.Last("POST", f.names.sessions())
	same("redfish-session-request.json", decoded(t, reply.Request), nil)
	same("redfish-session-201.json", decoded(t, reply.Answer), nil)
	event, err := f.eventBody(17, job{attach: true, machine: "n1", device: "a-0"})
	if err != nil {
		t.Fatal(err)
	}
	samples.Same(t, "redfish-event-sse-data.json", event, nil)
	b.refusals(same)
	forms(t, same)
	const twice, unasked, otherForm = "another sample is of this shape", "nobody asks for it", "the agent's client does it in another way"
	samples.All(t, "redfish-", map[string]string{
		"redfish-block-200-failed.json": twice, "redfish-block-200-reserved.json": twice, "redfish-system-200-before.json": twice, "redfish-task-200-cancelled.json": twice,
		"redfish-error-401.json": twice, "redfish-error-503.json": twice, "redfish-error-503-sessions.json": twice, "redfish-error-400-no-match.json": twice,
		"redfish-error-409-busy.json":        twice,
		"redfish-block-reserve-request.json": unasked, "redfish-pciedevice-200.json": cardLess, "redfish-pciefunction-200.json": cardLess,
		"redfish-processor-200-no-identity.json": twice, "redfish-create-constrained-request.json": unasked, "redfish-create-specific-request.json": unasked, "redfish-subscription-request.json": unasked,
		"redfish-compose-manifest-200.json": unasked, "redfish-system-patch-attach-placeholders.json": otherForm, "redfish-system-patch-detach-null.json": otherForm,
	})
}

// refusals are answers to requests that cannot be granted, and what the other forms of a change ask.
func (b *bench) refusals(same func(sample string, message object, known map[string]string)) {
	b.t.Helper()
	args := map[string]string{"/error/@Message.ExtendedInfo[]/MessageArgs[]": argsLess}
	no := func(status int, sample string, known map[string]string, method, path, body string, header ...string) {
		b.t.Helper()
		got, answer := b.person(method, path, body, header...)
		if got != status {
			b.t.Errorf("%s %s = %d %v, want %d", method, path, got, answer, status)
		}
		same(sample, answer, known)
	}
	list := `{"Links":{"ResourceBlocks":[{},{"@odata.id":"` + b.face.block("a-1") + `"}]}}`
	no(http.StatusPreconditionFailed, "redfish-error-412.json", nil, "PATCH", b.face.system("n2"), list, "If-Match", `"other"`)
	no(http.StatusConflict, "redfish-error-409-in-use.json", args, "PATCH", b.face.system("n2"), list)
	if err := b.Core.SetPolicies(simapi.Policies{Redfish: simapi.RedfishPolicies{ETag: "required"}}); err != nil {
		b.t.Fatal(err)
	}
	no(http.StatusPreconditionRequired, "redfish-error-428.json", nil, "PATCH", b.face.system("n2"), list)
}

// forms are the bodies of the other forms of a change.
func forms(t *testing.T, same func(sample string, message object, known map[string]string)) {
	t.Helper()
	manifest := map[string]string{
		"/Manifest/Description": "nobody reads it", "/Manifest/Timestamp": "the same", "/Manifest/Stanzas[]/Request/Name": "the system is there, and is named by its path",
		"/Manifest/Stanzas[]/Request/@odata.id": "the same", "/Manifest/Stanzas[]/Request/@odata.etag": "the state that was seen is named",
		"/Manifest/Stanzas[]/Request/Links/ComputerSystems": "no system ends",
	}
	for sample, s := range map[string]struct {
		policies    simapi.RedfishPolicies
		method, uri string
		known       map[string]string
	}{
		"redfish-system-patch-attach-full.json":  {simapi.RedfishPolicies{Forms: "list"}, "PATCH", "/Systems/", nil},
		"redfish-compose-manifest-request.json":  {simapi.RedfishPolicies{Forms: "manifest"}, "POST", "Compose$", manifest},
		"redfish-zone-add-endpoint-request.json": {simapi.RedfishPolicies{Variant: variantZones, Forms: "actions"}, "POST", "AddEndpoint$", map[string]string{"/EndpointETag": "the state that was seen is named here, too"}},
		"redfish-zone-patch-endpoints.json":      {simapi.RedfishPolicies{Variant: variantZones, Forms: "list"}, "PATCH", "/Zones/", nil},
	} {
		asked := &facetest.Record{}
		b := newBench(t, setting{policies: s.policies, record: asked})
		if _, err := b.client().Attach(t.Context(), fabric.Intent{Machine: fabrictest.MachineTwo, Model: fabrictest.ModelB, Device: b.uri("b-0")}); err != nil {
			t.Fatal(err)
		}
		b.rest()
		same(sample, decoded(t, asked.Last(s.method, s.uri).Request), s.known)
	}
}

func decoded(t *testing.T, message []byte) object {
	t.Helper()
	var out object
	if err := json.Unmarshal(message, &out); err != nil {
		t.Fatalf("%v in %q", err, message)
	}
	return out
}
