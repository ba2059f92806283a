// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

func TestCheckPath(t *testing.T) {
	for link, want := range map[string]string{
		"/redfish/v1/Systems":                     "/redfish/v1/Systems",
		"/redfish/v1/Systems/":                    "/redfish/v1/Systems",
		"/redfish/v1/Fabrics/CXL/Endpoints/":      "/redfish/v1/Fabrics/CXL/Endpoints",
		"/redfish/v1/Systems/a:b@c,d":             "/redfish/v1/Systems/a:b@c,d",
		"":                                        "",
		"/redfish/v1":                             "",
		"/redfish/v1/../../etc":                   "",
		"/redfish/v1/./x":                         "",
		"/redfish/v1//x":                          "",
		"/redfish/v2/x":                           "",
		"http://elsewhere/redfish/v1/x":           "",
		"/redfish/v1/x?y":                         "",
		"/redfish/v1/x%2fy":                       "",
		"/redfish/v1/x y":                         "",
		"/redfish/v1/" + strings.Repeat("x", 600): "",
	} {
		got, err := checkPath(link)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", link, got, err, want)
		}
	}
}

func TestDecodeSystem(t *testing.T) {
	for name, tc := range map[string]struct {
		body string
		want system
	}{
		"whole": {
			`{"UUID":"00000000-0000-4000-8000-00000000000A","Name":"n1","PowerState":"On","Processors":{"@odata.id":"/redfish/v1/Systems/1/Processors"},"X":{}}`,
			system{"00000000-0000-4000-8000-00000000000a", "n1", fabric.PowerOn, base + "/Systems/1/Processors"},
		},
		"off":                        {`{"UUID":null,"PowerState":"Off"}`, system{"", "", fabric.PowerOff, ""}},
		"processors in another form": {`{"UUID":"x","PowerState":"PoweringOn","Processors":{"Members":[]}}`, system{"", "", fabric.PowerUnknown, ""}},
		"processors are a word":      {`{"Processors":"x"}`, system{"", "", fabric.PowerUnknown, ""}},
	} {
		got, err := decodeSystem([]byte(tc.body))
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(system{})); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
}

func TestDecodeEndpoint(t *testing.T) {
	entity := func(role, kind, to string) string {
		return `{"EntityRole":"` + role + `","EntityType":"` + kind + `","EntityLink":{"@odata.id":"` + to + `"}}`
	}
	for name, tc := range map[string]struct {
		entities string
		want     endpoint
	}{
		"a machine":             {entity("Initiator", "ComputerSystem", base+"/Systems/1"), endpoint{initiates: []string{base + "/Systems/1"}}},
		"a GPU":                 {entity("Target", "Processor", base+"/Chassis/P/Processors/g"), endpoint{gpu: base + "/Chassis/P/Processors/g"}},
		"memory":                {entity("Target", "FabricBridge", base+"/Chassis/P/FabricAdapters/2"), endpoint{}},
		"a machine's processor": {entity("Initiator", "Processor", base+"/Systems/1/Processors/0"), endpoint{initiates: []string{base + "/Systems/1/Processors/0"}}},
		"two GPUs":              {entity("Target", "Processor", base+"/a") + "," + entity("Target", "Processor", base+"/b"), endpoint{gpu: base + "/a"}},
		"a link to elsewhere":   {entity("Target", "Processor", "http://x/y"), endpoint{}},
		"no link":               {`{"EntityRole":"Target","EntityType":"Processor","EntityLink":null}`, endpoint{}},
	} {
		got, err := decodeEndpoint([]byte(`{"ConnectedEntities":[` + tc.entities + `]}`))
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(endpoint{})); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
}

func TestProcessor_describe(t *testing.T) {
	for _, tc := range []struct {
		status string
		want   device.Health
		usable bool
		says   string
	}{
		{`{"State":"Enabled","Health":"OK"}`, device.HealthOK, true, ""},
		{`{"Health":"OK"}`, device.HealthOK, true, ""},
		{`null`, device.HealthUnknown, true, "nothing, nothing"},
		{`{"State":"Enabled","Health":null}`, device.HealthUnknown, true, "Enabled, nothing"},
		{`{"State":"Absent","Health":null}`, device.HealthUnknown, false, "Absent"},
		{`{"State":"Absent","Health":"OK"}`, device.HealthWarning, false, "Absent"},
		{`{"State":"Enabled","Health":"Warning"}`, device.HealthWarning, false, "Warning"},
		{`{"State":"Enabled","Health":"Critical"}`, device.HealthCritical, false, "Critical"},
	} {
		p, err := decodeProcessor([]byte(`{"ProcessorType":"GPU","Model":"M","UUID":"1B7E8D9C-0000-4000-8000-00000000ABCD","Status":` + tc.status + `}`))
		if err != nil || !p.gpu || p.model != "M" || p.uuid != "GPU-1b7e8d9c-0000-4000-8000-00000000abcd" {
			t.Fatalf("%s: %+v, %v", tc.status, p, err)
		}
		if got, text := p.describe(); got != tc.want || !strings.Contains(text, tc.says) || (tc.says == "") != (text == "") || usable(p) != tc.usable {
			t.Errorf("%s: %s %q, usable %v", tc.status, got, text, usable(p))
		}
	}
}

// The same ends have the same id, others another one.
func TestEncodeConnection(t *testing.T) {
	body, err := encodeConnection(base+"/i", base+"/t")
	if err != nil {
		t.Fatal(err)
	}
	id := connectionID(base+"/i", base+"/t")
	want := `{"@odata.type":"#Connection.v1_0_0.Connection","Id":"` + id + `","Name":"` + id + `","Links":{"InitiatorEndpoints":[{"@odata.id":"/redfish/v1/i"}],"TargetEndpoints":[{"@odata.id":"/redfish/v1/t"}]}}`
	if string(body) != want {
		t.Errorf("body %s, want %s", body, want)
	}
	if j, err := decodeConnection(body); err != nil || !j.joins(base+"/i", base+"/t") || j.joins(base+"/t", base+"/i") {
		t.Errorf("it joins %+v, %v", j, err)
	}
	if connectionID(base+"/i", base+"/u") == id || connectionID(base+"/j", base+"/t") == id || !strings.HasPrefix(id, idPrefix) {
		t.Errorf("id %s", id)
	}
}

// usablePaths checks that nothing leads out of the tree.
func usablePaths(t *testing.T, all ...string) {
	t.Helper()
	for _, p := range all {
		if p == "" {
			continue
		}
		if !strings.HasPrefix(p, base+"/") || strings.Contains(p, "..") && strings.Contains(p+"/", "/../") || strings.ContainsAny(p, " ?#%\\") {
			t.Errorf("path %q", p)
		}
	}
}

func readable(t *testing.T, s string) {
	t.Helper()
	if len(s) > 2*rest.LongestText+100 || !utf8.ValidString(s) || strings.ContainsAny(s, "\n\r") {
		t.Errorf("text %q", s)
	}
}

func FuzzDecodeCollection(f *testing.F) {
	f.Add([]byte(`{"Members":[{"@odata.id":"/redfish/v1/Systems/1"}],"Members@odata.count":1,"Members@odata.nextLink":"/redfish/v1/Systems?$skip=1"}`))
	f.Add([]byte(`{"Members":[{"@odata.id":"/redfish/v1/../x"}]}`))
	f.Add([]byte(`{"Members":null}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		c, err := decodeCollection(body)
		if err != nil {
			return
		}
		for _, m := range c.members {
			if m == "" {
				t.Error("a member without a path")
			}
		}
		usablePaths(t, c.members...)
	})
}

func FuzzDecodeResources(f *testing.F) {
	f.Add([]byte(`{"Fabrics":{"@odata.id":"/redfish/v1/Fabrics"},"Systems":{"@odata.id":"/redfish/v1/Systems/"},"Endpoints":{"@odata.id":"/redfish/v1/Fabrics/f/Endpoints"},"Connections":7}`))
	f.Add([]byte(`{"UUID":"00000000-0000-4000-8000-00000000000A","Name":"n\u0000","PowerState":1,"Processors":{"@odata.id":["x"]}}`))
	f.Add([]byte(`{"ConnectedEntities":[{"EntityRole":"Target","EntityType":"Processor","EntityLink":{"@odata.id":"/redfish/v1/Chassis/P/Processors/g"}},null]}`))
	f.Add([]byte(`{"Links":{"InitiatorEndpoints":[{"@odata.id":"/redfish/v1/i"},null,7],"TargetEndpoints":null}}`))
	f.Add([]byte(`{"ProcessorType":"GPU","Model":7,"UUID":"GPU-x","Status":{"State":null,"Health":"OK"},"Links":{"Endpoints":[{"@odata.id":"/redfish/v1/t"}]}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if r, err := decodeRoot(body); err == nil {
			usablePaths(t, string(r.Fabrics), string(r.Systems))
		}
		if d, err := decodeDomain(body); err == nil {
			usablePaths(t, string(d.Endpoints), string(d.Connections))
		}
		if s, err := decodeSystem(body); err == nil {
			usablePaths(t, s.processors)
			readable(t, s.name)
			if m, err := device.ParseMachine(string(s.machine)); s.machine != "" && (err != nil || m != s.machine) {
				t.Errorf("machine %q", s.machine)
			}
		}
		if e, err := decodeEndpoint(body); err == nil {
			usablePaths(t, append(e.initiates, e.gpu)...)
		}
		if c, err := decodeConnection(body); err == nil {
			usablePaths(t, append(c.initiators, c.targets...)...)
		}
		if p, err := decodeProcessor(body); err == nil {
			usablePaths(t, p.endpoints...)
			_, text := p.describe()
			readable(t, text)
		}
	})
}

func FuzzLink(f *testing.F) {
	f.Add([]byte(`{"@odata.id":"/redfish/v1/Systems/1"}`))
	f.Add([]byte(`"x"`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var l link
		if json.Unmarshal(body, &l) == nil {
			usablePaths(t, string(l))
		}
	})
}
