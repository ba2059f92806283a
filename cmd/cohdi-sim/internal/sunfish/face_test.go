// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// What the service does with a tree of resources, in the order of the requests.
func TestFace_tree(t *testing.T) {
	const zones = base + "/Fabrics/f-0/Zones"
	zone := `{"@odata.type":"#Zone.v1_4_0.Zone","Id":"z12","Name":"zone","ZoneType":"ZoneOfEndpoints","Links":{"Endpoints":[{"@odata.id":"x"}]}}`
	connection := func(id, initiator, target string) string {
		return `{"@odata.type":"#Connection.v1_0_0.Connection","Id":"` + id + `","ConnectionType":"Memory","Links":{"InitiatorEndpoints":[{"@odata.id":"` +
			endpoints + initiator + `"}],"TargetEndpoints":[{"@odata.id":"` + endpoints + target + `"}]}}`
	}
	b := newBench(t, simapi.SunfishPolicies{}, 0)
	for _, step := range []struct {
		what, method, path, body string
		status                   int
		says                     string
	}{
		{"the root", "GET", base, "", 200, `"Fabrics":{"@odata.id":"/redfish/v1/Fabrics"}`},
		{"a slash more", "GET", base + "/", "", 200, `"Systems"`},
		{"what is not there is plain text", "GET", base + "/Fabrics/f-1", "", 404, "Resource /redfish/v1/Fabrics/f-1 not found"},
		{"outside of the tree", "GET", "/", "", 404, "Not found"},
		{"a target", "GET", firstA, "", 200, `"EntityRole":"Target"`},
		{"a machine", "GET", base + "/Systems/n1", "", 200, string(fabrictest.MachineOne)},
		{"a resource without type", "POST", zones, `{"Id":"z"}`, 400, "@odata.type"},
		{"no JSON", "POST", zones, `{`, 400, "@odata.type"},
		{"a collection", "POST", zones, `{"@odata.type":"#ZoneCollection.ZoneCollection"}`, 405, "collection"},
		{"in no collection", "POST", base + "/Fabrics/f-1/Zones", zone, 404, "not found"},
		{"a zone", "POST", zones, zone, 200, `"@odata.id":"/redfish/v1/Fabrics/f-0/Zones/z12"`},
		{"the same zone", "POST", zones, zone, 409, "already exists"},
		{"a zone that the service names", "POST", zones, `{"@odata.type":"#Zone.v1_4_0.Zone"}`, 200, `"Id":"`},
		{"the first level is merged", "PATCH", zones + "/z12", `{"Links":{}}`, 200, `"Links":{},`},
		{"a change of nothing", "PATCH", zones + "/z13", `{"Links":{}}`, 404, "not found"},
		{"a change that is none", "PATCH", zones + "/z12", `[]`, 500, ""},
		{"a change of a collection", "PATCH", zones, `{}`, 405, "collection"},
		{"a change that the agent refuses", "PATCH", base + "/Systems/n1", `{"UUID":"x"}`, 500, ""},
		{"replace is broken", "PUT", zones + "/z12", zone, 500, ""},
		{"a zone ends", "DELETE", zones + "/z12", "", 200, "DELETE: "},
		{"and is no more", "DELETE", zones + "/z12", "", 404, "not found"},
		{"what belongs to the chassis stays", "DELETE", firstA, "", 403, "cannot be deleted"},
		{"a connection of nothing", "POST", connections, connection("c", "I-n1", "T-none"), 500, ""},
		{"a connection of two machines", "POST", connections, connection("c", "I-n1", "I-n2"), 500, ""},
		{"a connection", "POST", connections, connection("c", "I-n1", "T-a-0"), 200, `"Id":"c"`},
		{"a second one of the same target does nothing", "POST", connections, connection("d", "I-n2", "T-a-0"), 200, `"Id":"d"`},
		{"nor does its end", "DELETE", connections + "/d", "", 200, "DELETE: "},
		{"the machine shows its GPU", "GET", base + "/Systems/n1/Processors/GPU1", "", 200, `"Links":{"Endpoints":[{"@odata.id":"` + firstA + `"}]}`},
		{"the connection ends", "DELETE", connections + "/c", "", 200, "DELETE: "},
		{"the machine shows it no more", "GET", base + "/Systems/n1/Processors/GPU1", "", 404, ""},
		{"another agent", "POST", "/EventListener", `{"Events":[{"MessageId":"Foundation.1.0.AggregationSourceDiscovered","MessageArgs":["Redfish","http://agent:5001"]}]}`, 200, ""},
		{"no event", "POST", "/EventListener", `{}`, 400, "no event"},
		{"all over again", "POST", "/ResetResources", "", 204, ""},
	} {
		status, text := b.person(step.method, step.path, step.body)
		if status != step.status || !strings.Contains(text, step.says) || step.says == "" && text != "" && status == 500 {
			t.Errorf("%s: %s %s = %d %s, want %d with %s", step.what, step.method, step.path, status, text, step.status, step.says)
		}
	}
	if sources := b.members(base + "/AggregationService/AggregationSources"); len(sources) != 1 {
		t.Errorf("agents %v after the reset", sources)
	}
}

// The form of the peer's client: a count of a model for a node, spelled in two ways.
func TestFace_composition(t *testing.T) {
	const system = base + "/Systems/System"
	b := newBench(t, simapi.SunfishPolicies{}, 0)
	write := func(node, annotation string, count int, kind, model string) int {
		t.Helper()
		body, err := json.Marshal(object{"Name": node, "Processors": object{"Members": []object{{annotation: count, "ProcessorType": kind, "Model": model}}}})
		if err != nil {
			t.Fatal(err)
		}
		status, _ := b.person(http.MethodPatch, system, string(body))
		return status
	}
	for _, step := range []struct {
		what, node, annotation string
		count                  int
		kind, model            string
		status                 int
		has                    []string
	}{
		{"one", "n1", "@Redfish.RequestCount", 1, "GPU", fabrictest.ModelA, 200, []string{firstA}},
		{"one is there", "n1", "@Redfish.RequestCount", 1, "GPU", fabrictest.ModelA, 200, []string{firstA}},
		{"two, spelled as the standard has it", "n1", "@Redfish.RequestedCount", 2, "GPU", fabrictest.ModelA, 200, []string{firstA, secondA}},
		{"more than there are", "n1", "@Redfish.RequestedCount", 9, "GPU", fabrictest.ModelA, 200, []string{firstA, secondA}},
		{"a model that the client does not know", "n1", "@Redfish.RequestCount", 0, "", "", 200, []string{firstA, secondA}},
		{"no such node", "n9", "@Redfish.RequestCount", 1, "GPU", fabrictest.ModelA, 404, []string{firstA, secondA}},
		{"no count", "n1", "Count", 1, "GPU", fabrictest.ModelA, 400, []string{firstA, secondA}},
		{"less than nothing", "n1", "@Redfish.RequestCount", -1, "GPU", fabrictest.ModelA, 400, []string{firstA, secondA}},
		{"none of a model that is not there", "n1", "@Redfish.RequestCount", 0, "GPU", fabrictest.ModelB, 200, []string{firstA, secondA}},
		{"none: all of the model go", "n1", "@Redfish.RequestCount", 0, "GPU", fabrictest.ModelA, 200, nil},
	} {
		if status := write(step.node, step.annotation, step.count, step.kind, step.model); status != step.status {
			t.Errorf("%s: %d, want %d", step.what, status, step.status)
		}
		if has := b.Attached(one); !slices.Equal(has, step.has) {
			t.Errorf("%s: the machine has %v, want %v", step.what, has, step.has)
		}
		// Whoever looks for endpoints sees the same.
		if made := b.members(connections); len(made) != len(step.has) {
			t.Errorf("%s: Connections %v", step.what, made)
		}
	}
	if err := b.Core.SetPolicies(simapi.Policies{Sunfish: simapi.SunfishPolicies{SystemAnswer: "204"}}); err != nil {
		t.Fatal(err)
	}
	if status := write("n1", "@Redfish.RequestCount", 1, "GPU", fabrictest.ModelB); status != http.StatusNoContent {
		t.Errorf("%d, want 204", status)
	}
}

// FuzzFace: no request brings the service down, and what it keeps can be shown.
func FuzzFace(f *testing.F) {
	f.Add("POST", connections, `{"@odata.type":"#Connection.v1_0_0.Connection","Id":"c","Links":{"InitiatorEndpoints":[{"@odata.id":"`+endpoints+`I-n1"}],"TargetEndpoints":[{"@odata.id":"`+firstA+`"}]}}`)
	f.Add("POST", base+"/Systems", `{"@odata.type":"#X.X","@odata.id":"/redfish/v1/Systems/../x","Links":{"TargetEndpoints":7}}`)
	f.Add("PATCH", base+"/Systems/System", `{"Name":"n1","Processors":{"Members":[{"@Redfish.RequestCount":1,"ProcessorType":"GPU","Model":"Model-A"}]}}`)
	f.Add("PATCH", base, `{"Fabrics":null}`)
	f.Add("DELETE", connections+"/agent-a-0", ``)
	f.Add("POST", "/EventListener", `{"Context":"agent","Events":[{"MessageId":".ResourceCreated","OriginOfCondition":{"@odata.id":"/"}},{"MessageId":".AggregationSourceDiscovered","MessageArgs":["",""]}]}`)
	f.Fuzz(func(t *testing.T, method, path, body string) {
		if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, " \r\n\t?#%") || !slices.Contains([]string{"GET", "POST", "PATCH", "DELETE", "PUT"}, method) {
			return
		}
		r, err := http.NewRequestWithContext(t.Context(), method, "http://s"+path, strings.NewReader(body))
		if err != nil {
			return
		}
		b := newBench(t, simapi.SunfishPolicies{}, 0)
		b.face.Handler().ServeHTTP(httptest.NewRecorder(), r)
		for at := range b.face.look() {
			if status, text := b.person(http.MethodGet, at, ""); status != http.StatusOK || !json.Valid([]byte(text)) {
				t.Errorf("GET %s = %d %s", at, status, text)
			}
		}
	})
}
