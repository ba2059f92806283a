// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/chassis"
)

const head = "apiVersion: agent.gpu.cohdi.io/v1alpha1\nkind: Config\n"

const full = head + `fabrics:
- id: "0"
  manager: fm
  endpoint: https://fm.example.com:8443/
  tenant: 3b5d7a52-0000-4000-8000-000000000001
  managerFabric: 3
  credentials: /run/secrets/fm
  settle: 90s
  nodeSelector: {example.com/rack: r1}
  models:
  - name: a100
    fabricModel: NVIDIA-A100-PCIE-40GB
    maxPerNode: 4
    attributes: {productName: NVIDIA A100-PCIE-40GB, gpu.nvidia.com/architecture: Ampere}
  - name: l40s
    fabricModel: NVIDIA-L40S
    attributes:
      productName: NVIDIA L40S
      gpu.nvidia.com/architecture: ""
machines:
  node-1: 9B1D3E20-1111-4A6B-8C00-00000000A001
timings: {attachDeadline: 3m, coolDown: 0s, readySettle: 5s, leaderList: 20s, nodeList: 5m, agentAway: 2m, retryAfter: 30s}
logging: {format: json}
driverRoots: [/run/nvidia/driver]
foreignDevices: report
ifAdvertisedElsewhere: ignore
builtIn:
  node-1: ["0000:17:00.0", "10000:3a:00.0"]
`

func TestParse(t *testing.T) {
	got, err := Parse([]byte(full), "config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Fabrics: []Fabric{{
			ID: "0", Manager: ManagerFM, Endpoint: "https://fm.example.com:8443",
			Tenant: "3b5d7a52-0000-4000-8000-000000000001", ManagerFabric: 3, Credentials: "/run/secrets/fm",
			CallTimeout: 3 * time.Minute, Exclusion: ExclusionMachine, Settle: 90 * time.Second, NodeSelector: map[string]string{"example.com/rack": "r1"},
			Models: []Model{{
				Name: "a100", FabricModel: "NVIDIA-A100-PCIE-40GB", MaxPerNode: 4,
				Attributes: map[string]string{"productName": "NVIDIA A100-PCIE-40GB", "gpu.nvidia.com/architecture": "Ampere"},
			}, {
				Name: "l40s", FabricModel: "NVIDIA-L40S",
				Attributes: map[string]string{"productName": "NVIDIA L40S", "gpu.nvidia.com/architecture": ""},
			}},
		}},
		Machines: map[string]device.Machine{"node-1": "9b1d3e20-1111-4a6b-8c00-00000000a001"},
		BuiltIn:  map[string][]device.PCIAddress{"node-1": {{Bus: 0x17}, {Domain: 0x10000, Bus: 0x3a}}},
		Timings: Timings{
			AttachDeadline: 3 * time.Minute, CoolDown: 0, ReadySettle: 5 * time.Second, LeaderList: 20 * time.Second,
			NodeList: 5 * time.Minute, AgentAway: 2 * time.Minute, RetryAfter: 30 * time.Second,
			ForgetUnit: 24 * time.Hour, AdoptAfter: 10 * time.Minute,
		},
		Logging: Logging{Format: LogJSON}, DriverRoots: []string{"/run/nvidia/driver"},
		ForeignDevices: ForeignReport, IfAdvertisedElsewhere: Ignore,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
}

func TestParseFillsDefaults(t *testing.T) {
	got, err := Parse([]byte(head+`fabrics:
- {id: lab, manager: fm, endpoint: "https://fm", tenant: 3B5D7A52-0000-4000-8000-000000000001, models: [{name: a100, fabricModel: A}]}
`), "config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Fabrics = []Fabric{{
		ID: "lab", Manager: ManagerFM, Endpoint: "https://fm", Tenant: "3B5D7A52-0000-4000-8000-000000000001", Credentials: "/etc/cohdi-agent/fabrics/lab",
		CallTimeout: 3 * time.Minute, Exclusion: ExclusionMachine, Settle: time.Minute, Models: []Model{{Name: "a100", FabricModel: "A"}},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
}

// TestParseCM: a fabric with a Cluster Manager.
func TestParseCM(t *testing.T) {
	got, err := Parse([]byte(head+`fabrics:
- id: lab
  manager: cm
  endpoint: https://cm
  tenant: 3b5d7a52-0000-4000-8000-000000000001
  cluster: 3B5D7A52-0000-4000-8000-0000000000C1
  models: [{name: a100, fabricModel: A}]
`), "config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Fabrics = []Fabric{{
		ID: "lab", Manager: ManagerCM, Endpoint: "https://cm", Tenant: "3b5d7a52-0000-4000-8000-000000000001",
		Cluster: "3B5D7A52-0000-4000-8000-0000000000C1", Credentials: "/etc/cohdi-agent/fabrics/lab",
		CallTimeout: 3 * time.Minute, Exclusion: ExclusionMachine, Settle: time.Minute, Models: []Model{{Name: "a100", FabricModel: "A"}},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
}

// TestParseCDIM: a fabric of project-cdim, by its services' own ports.
func TestParseCDIM(t *testing.T) {
	got, err := Parse([]byte(head+`fabrics:
- id: lab
  manager: cdim
  cdim:
    dialect: oss
    configurationManager: http://10.0.0.1:8001
    layoutApply: http://10.0.0.1:8002
    plainHTTP: true
    resourceGroups: [team-a]
    switch: CXL-A
  models: [{name: a100, fabricModel: A}]
`), "config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Fabrics = []Fabric{{
		ID: "lab", Manager: ManagerCDIM, Credentials: "/etc/cohdi-agent/fabrics/lab",
		CDIM: &CDIM{
			Dialect: "oss", ConfigurationManager: "http://10.0.0.1:8001", LayoutApply: "http://10.0.0.1:8002", PlainHTTP: true,
			ResourceGroups: []string{"team-a"}, Switch: "CXL-A",
		},
		CallTimeout: 5 * time.Minute, Exclusion: ExclusionMachine, Settle: 11 * time.Minute, Models: []Model{{Name: "a100", FabricModel: "A"}},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
}

// TestParseCDIMErrors: a CDIM that cannot be reached so.
func TestParseCDIMErrors(t *testing.T) {
	const services = "configurationManager: https://c, layoutApply: https://l"
	for _, tc := range []struct{ fields, cdim, want string }{
		{"", "{dialect: oss, " + services + "}", ""},
		{"", "{dialect: product, gateway: https://g, login: https://g/auth}", ""},
		{"", "{dialect: perl, " + services + "}", `c.yaml:6: fabrics[0].cdim.dialect: is "perl", must be "oss" or "product"`},
		{"", "{" + services + "}", "c.yaml:6: fabrics[0].cdim: the field dialect is missing"},
		{"", "{dialect: oss, configurationManager: http://c, layoutApply: https://l}", `c.yaml:6: fabrics[0].cdim: CDIM configuration-manager "http://c" is not encrypted`},
		{"", "{dialect: oss, plainHTTP: maybe, " + services + "}", `c.yaml:6: fabrics[0].cdim.plainHTTP: is "maybe", must be true or false`},
		{"", "{dialect: oss, gateway: https://g, " + services + "}", "c.yaml:6: fabrics[0].cdim: CDIM gateway is given beside"},
		{"  tenant: 3b5d7a52-0000-4000-8000-000000000001\n", "{dialect: oss, " + services + "}", "c.yaml:7: fabrics[0].tenant: is a field of manager: fm and cm alone"},
		{"  exclusion: none\n", "{dialect: oss, " + services + "}", "c.yaml:7: fabrics[0].exclusion: is a field of manager: fm and cm alone"},
	} {
		_, err := Parse([]byte(head+"fabrics:\n- id: lab\n  manager: cdim\n  cdim: "+tc.cdim+"\n"+tc.fields+"  models: [{name: a100, fabricModel: A}]\n"), "c.yaml")
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s%s:\n  error %v\n  want %s", tc.cdim, tc.fields, err, tc.want)
		}
	}
	_, err := Parse([]byte(head+"fabrics:\n- id: lab\n  manager: cdim\n  models: [{name: a100, fabricModel: A}]\n"), "c.yaml")
	if err == nil || !strings.Contains(err.Error(), "the field cdim is missing, which manager: cdim needs") {
		t.Errorf("error = %v", err)
	}
}

// TestParseRedfishAndSunfish: fabrics of such services.
func TestParseRedfishAndSunfish(t *testing.T) {
	got, err := Parse([]byte(head+`fabrics:
- id: a
  manager: redfish
  endpoint: https://r:8443
  redfish: {basic: true, noIdentities: true}
  models: [{name: a100, fabricModel: A}]
- id: b
  manager: sunfish
  sunfish: {endpoint: "http://s:5000", plainHTTP: true, fabric: PCIe}
  models: [{name: a100, fabricModel: A}]
`), "config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Fabrics = []Fabric{
		{
			ID: "a", Manager: ManagerRedfish, Endpoint: "https://r:8443", Redfish: &Redfish{Basic: true, NoIdentities: true}, Credentials: "/etc/cohdi-agent/fabrics/a",
			CallTimeout: 5 * time.Minute, Exclusion: ExclusionMachine, Settle: time.Minute, Models: []Model{{Name: "a100", FabricModel: "A"}},
		},
		{
			ID: "b", Manager: ManagerSunfish, Sunfish: &Sunfish{Endpoint: "http://s:5000", PlainHTTP: true, Fabric: "PCIe"}, Credentials: "/etc/cohdi-agent/fabrics/b",
			CallTimeout: 3 * time.Minute, Exclusion: ExclusionMachine, Settle: time.Minute, Models: []Model{{Name: "a100", FabricModel: "A"}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
	for _, tc := range []struct{ fields, want string }{
		{"manager: sunfish\n", "the field sunfish is missing, which manager: sunfish needs"},
		{"manager: sunfish\n  sunfish: {endpoint: \"http://s\"}\n", "fabrics[0].sunfish: "},
		{"manager: sunfish\n  sunfish: {plainHTTP: true}\n", "fabrics[0].sunfish: the field endpoint is missing"},
		{"manager: redfish\n", "the field endpoint is missing, which manager: redfish needs"},
		{"manager: redfish\n  endpoint: https://r\n  sunfish: {endpoint: \"https://s\"}\n", "fabrics[0].sunfish: is a field of manager: sunfish alone"},
		{"manager: redfish\n  endpoint: https://r\n  redfish: {basic: perhaps}\n", "fabrics[0].redfish.basic: is \"perhaps\", must be true or false"},
	} {
		_, err := Parse([]byte(head+"fabrics:\n- id: lab\n  "+tc.fields+"  models: [{name: a100, fabricModel: A}]\n"), "c.yaml")
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s:\n  error %v\n  want %s", tc.fields, err, tc.want)
		}
	}
}

// TestParseChassis: the demonstration's configurations, one for each kind of manager that has a chassis.
func TestParseChassis(t *testing.T) {
	const root = "../../../.."
	kinds, err := chassis.Managers(root)
	if err != nil || len(kinds) < 5 {
		t.Fatalf("managers %v, %v", kinds, err)
	}
	for _, manager := range kinds {
		files, err := chassis.Files(root, manager)
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(files.Agent)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Parse(data, files.Agent)
		if err != nil {
			t.Error(err)
		} else if c.Fabrics[0].Manager != manager {
			t.Errorf("%s: manager %s, want %s", files.Agent, c.Fabrics[0].Manager, manager)
		}
	}
}

// TestParseLimits: what says how many devices go where.
func TestParseLimits(t *testing.T) {
	got, err := Parse([]byte(head+`fabrics:
- id: lab
  manager: fm
  endpoint: https://fm
  tenant: 3b5d7a52-0000-4000-8000-000000000001
  exclusion: none
  slotsPerNode: 8
  slots: {node-1: 4}
  models:
  - {name: a100, fabricModel: A, minPerNode: 1, maxPerNode: 4, excludes: [l40s]}
  - {name: l40s, fabricModel: L, minPerNode: 2}
foreignDevices: adopt
timings: {forgetUnit: 48h, adoptAfter: 1h}
`), "config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Fabrics = []Fabric{{
		ID: "lab", Manager: ManagerFM, Endpoint: "https://fm", Tenant: "3b5d7a52-0000-4000-8000-000000000001", Credentials: "/etc/cohdi-agent/fabrics/lab", CallTimeout: 3 * time.Minute, Settle: time.Minute,
		Exclusion:    ExclusionNone,
		SlotsPerNode: 8, Slots: map[string]int{"node-1": 4},
		Models: []Model{
			{Name: "a100", FabricModel: "A", MinPerNode: 1, MaxPerNode: 4, Excludes: []device.Model{"l40s"}},
			{Name: "l40s", FabricModel: "L", MinPerNode: 2},
		},
	}}
	want.ForeignDevices, want.Timings.ForgetUnit, want.Timings.AdoptAfter = ForeignAdopt, 48*time.Hour, time.Hour
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
}

func TestParseErrors(t *testing.T) {
	for _, tc := range []struct {
		name string
		// old is replaced by new in the full configuration; an empty old makes new the whole file.
		old, new string
		want     string
	}{
		{"empty", "", "", "c.yaml:1: is empty; it needs at least apiVersion: agent.gpu.cohdi.io/v1alpha1 and kind: Config"},
		{"only a comment", "", "# nothing\n", "c.yaml:1: is empty; it needs at least apiVersion: agent.gpu.cohdi.io/v1alpha1 and kind: Config"},
		{"a list", "", "- a\n", "c.yaml:1: is a list, must be a map"},
		{"no version", "", "kind: Config\n", "c.yaml:1: the field apiVersion is missing"},
		{"another version", "v1alpha1", "v9", `c.yaml:1: apiVersion: is "agent.gpu.cohdi.io/v9", must be "agent.gpu.cohdi.io/v1alpha1"`},
		{"two documents", "", head + "---\nkind: Config\n", "c.yaml:3: a second document begins; one is allowed"},
		{"manifest", "", "---\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: x\n---\nkind: ConfigMap\n", "c.yaml:2: is a manifest of Kubernetes, a Namespace; give the content of config.yaml"},
		{"ConfigMap", "", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata: {config.yaml: x}\n", "c.yaml:1: is a manifest of Kubernetes, a ConfigMap; give the content of config.yaml"},
		{"not YAML", "", head + "fabrics: [\n", "c.yaml:3: is not YAML: did not find expected node content"},
		{"unknown field", "foreignDevices: report", "foreignDevice: report", "c.yaml:27: foreignDevice: is not a field; fields here are apiVersion, builtIn, driverRoots, fabrics, foreignDevices, ifAdvertisedElsewhere, kind, logging, machines, timings"},
		{"unknown field below", "maxPerNode: 4", "max: 4", "c.yaml:15: fabrics[0].models[0].max: is not a field; fields here are attributes, excludes, fabricModel, maxPerNode, minPerNode, name"},
		{"twice", "kind: Config", "kind: Config\nkind: Config", "c.yaml:3: kind: stands here again, first on line 2"},
		{"alias", "", head + "logging: &x {format: text}\ntimings: *x\n", "c.yaml:4: timings: is the alias *x; write the value out"},
		{"null", "managerFabric: 3", "managerFabric:", "c.yaml:8: fabrics[0].managerFabric: is empty, must be a whole number from 0 to 2147483647; leave the field out for its default"},
		{"id with a dash", `id: "0"`, "id: rack-1", `c.yaml:4: fabrics[0].id: is "rack-1", must be 1 to 20 lower-case letters and digits`},
		{"id too long", `id: "0"`, "id: abcdefghijklmnopqrstu", `c.yaml:4: fabrics[0].id: is "abcdefghijklmnopqrstu", must be 1 to 20 lower-case letters and digits`},
		{"manager", "manager: fm", "manager: xx", `c.yaml:5: fabrics[0].manager: is "xx", must be "fm" or "cm" or "cdim" or "redfish" or "sunfish"`},
		{"no cluster", "manager: fm", "manager: cm", "c.yaml:4: fabrics[0]: the field cluster is missing, which manager: cm needs"},
		{"cluster of another manager", "managerFabric: 3", "cluster: 3b5d7a52-0000-4000-8000-0000000000c1", "c.yaml:8: fabrics[0].cluster: is a field of manager: cm alone"},
		{"cluster's name", "managerFabric: 3", "cluster: lab", `c.yaml:8: fabrics[0].cluster: is "lab", must be the cluster's UUID at the manager`},
		{"side by side with totals", "manager: fm\n", "manager: cm\n  cluster: 3b5d7a52-0000-4000-8000-0000000000c1\n  exclusion: none\n", `c.yaml:7: fabrics[0].exclusion: is "none", which manager: cm cannot do`},
		{"plain http", "https://fm.example.com:8443/", "http://fm", `c.yaml:6: fabrics[0].endpoint: is "http://fm", must be an https URL of the form https://host[:port]`},
		{"endpoint with path", "https://fm.example.com:8443/", "https://fm/api", `c.yaml:6: fabrics[0].endpoint: is "https://fm/api", must be an https URL of the form https://host[:port]`},
		{"password in endpoint", "https://fm.example.com:8443/", "https://u:secret@fm", "c.yaml:6: fabrics[0].endpoint: holds a user name; credentials belong into the Secret cohdi-fabric-<id>, the endpoint is an https URL of the form https://host[:port]"},
		{"no tenant", "  tenant: 3b5d7a52-0000-4000-8000-000000000001\n", "", "c.yaml:4: fabrics[0]: the field tenant is missing"},
		{"empty tenant", "3b5d7a52-0000-4000-8000-000000000001", `" "`, `c.yaml:7: fabrics[0].tenant: is " ", must be the tenant's UUID at the manager`},
		{"tenant's name", "3b5d7a52-0000-4000-8000-000000000001", "lab", `c.yaml:7: fabrics[0].tenant: is "lab", must be the tenant's UUID at the manager`},
		{"relative directory", "/run/secrets/fm", "../fm", `c.yaml:9: fabrics[0].credentials: is "../fm", must be an absolute path without . and .. in it`},
		{"duration without unit", "settle: 90s", "settle: 90", `c.yaml:10: fabrics[0].settle: is "90", must be a duration from 1s to 1h, like 90s or 4m`},
		{"label", "example.com/rack", "a/b/c", "c.yaml:11: fabrics[0].nodeSelector.a/b/c: is not a label: "},
		{"label value", "r1}", `"r 1"}`, `c.yaml:11: fabrics[0].nodeSelector.example.com/rack: is "r 1", not a label's value: `},
		{"model name", "name: a100", "name: A100", `c.yaml:13: fabrics[0].models[0].name: is "A100", must be a DNS label`},
		{"model twice", "name: l40s", "name: a100", `c.yaml:17: fabrics[0].models[1].name: "a100" is the name of another model of this fabric, too`},
		{"manager's model twice", "fabricModel: NVIDIA-L40S", "fabricModel: NVIDIA-A100-PCIE-40GB", `c.yaml:18: fabrics[0].models[1].fabricModel: "NVIDIA-A100-PCIE-40GB" is the model "a100" already: the manager cannot tell them apart`},
		{"no limit", "maxPerNode: 4", "maxPerNode: 0", `c.yaml:15: fabrics[0].models[0].maxPerNode: is "0", must be a whole number from 1 to 1024`},
		{"attribute name", "{productName: NVIDIA A100-PCIE-40GB", "{product-name: NVIDIA A100-PCIE-40GB", "c.yaml:16: fabrics[0].models[0].attributes.product-name: is not an attribute name"},
		{"attribute too long", "Ampere", strings.Repeat("x", 65), "must be a text of at most 64 bytes"},
		{"attributes differ", "productName: NVIDIA L40S", "name: NVIDIA L40S", `c.yaml:4: fabrics: all models must have attributes of the same names, "" where one does not apply; these differ: a100: [gpu.nvidia.com/architecture, productName]; l40s: [gpu.nvidia.com/architecture, name]`},
		{"machine", "9B1D3E20-1111-4A6B-8C00-00000000A001", "x", `c.yaml:23: machines.node-1: machine "x" is not a UUID (8-4-4-4-12 hexadecimal digits)`},
		{"machine twice", "machines:\n", "machines:\n  node-0: 9b1d3e20-1111-4a6b-8c00-00000000a001\n", "c.yaml:24: machines.node-1: 9b1d3e20-1111-4a6b-8c00-00000000a001 is the machine of node node-0 already"},
		{"node name", "node-1:", "Node_1:", "c.yaml:23: machines.Node_1: is not a Node's name: "},
		{"deadline beyond the scheduler's", "attachDeadline: 3m", "attachDeadline: 20m", `c.yaml:24: timings.attachDeadline: is "20m", must be a duration from 10s to 9m, like 90s or 4m`},
		{"no driver root", "[/run/nvidia/driver]", "[]", "c.yaml:26: driverRoots: is empty; leave the field out for its default"},
		{"foreign devices", "foreignDevices: report", "foreignDevices: take", `c.yaml:27: foreignDevices: is "take", must be "report" or "adopt"`},
		{"more at least than at most", "maxPerNode: 4", "maxPerNode: 4\n    minPerNode: 5", "c.yaml:16: fabrics[0].models[0].minPerNode: is 5, more than maxPerNode, which is 4"},
		{"nothing at least", "maxPerNode: 4", "minPerNode: 0", `c.yaml:15: fabrics[0].models[0].minPerNode: is "0", must be a whole number from 1 to 1024`},
		{"excludes nobody", "maxPerNode: 4", "excludes: [h100]", `c.yaml:15: fabrics[0].models[0].excludes: "h100" is not the name of another model of this fabric`},
		{"excludes itself", "maxPerNode: 4", "excludes: [l40s, a100]", `c.yaml:15: fabrics[0].models[0].excludes: "a100" is not the name of another model of this fabric`},
		{"excludes a word", "maxPerNode: 4", "excludes: l40s", `c.yaml:15: fabrics[0].models[0].excludes: is "l40s", must be a list`},
		{"no slots", "settle: 90s", "slotsPerNode: 0", `c.yaml:10: fabrics[0].slotsPerNode: is "0", must be a whole number from 1 to 1024`},
		{"slots of nobody", "settle: 90s", "slots: {Node_1: 4}", "c.yaml:10: fabrics[0].slots.Node_1: is not a Node's name: "},
		{"slots in words", "settle: 90s", "slots: {node-1: four}", `c.yaml:10: fabrics[0].slots.node-1: is "four", must be a whole number from 1 to 1024`},
		{"forgets too soon", "retryAfter: 30s", "forgetUnit: 1m", `c.yaml:24: timings.forgetUnit: is "1m", must be a duration from 1h to 8760h, like 90s or 4m`},
		{"adopts too soon", "retryAfter: 30s", "adoptAfter: 1m", `c.yaml:24: timings.adoptAfter: is "1m", must be a duration from 5m to 720h, like 90s or 4m`},
		{"word", "ifAdvertisedElsewhere: ignore", "ifAdvertisedElsewhere: [x]", `c.yaml:28: ifAdvertisedElsewhere: is a list, must be "withhold" or "ignore"`},
		{"built-in of no node", "  node-1: [\"0000:17", "  Node_1: [\"0000:17", "c.yaml:30: builtIn.Node_1: is not a Node's name: "},
		{"built-in everywhere", `  node-1: ["0000:17:00.0", "10000:3a:00.0"]`, `- "0000:17:00.0"`, "c.yaml:30: builtIn: is a list, must be a map"},
		{"one built-in", `["0000:17:00.0", "10000:3a:00.0"]`, `"0000:17:00.0"`, `c.yaml:30: builtIn.node-1: is "0000:17:00.0", must be a list`},
		{"no address", "0000:17:00.0", "GPU 0", `c.yaml:30: builtIn.node-1[0]: is "GPU 0", must be the PCI address of a GPU, as "0000:17:00.0"`},
		{"address zero", "0000:17:00.0", "0000:00:00.0", `c.yaml:30: builtIn.node-1[0]: is "0000:00:00.0", must be the PCI address`},
		{"address twice", "10000:3a:00.0", "17:00.0", "c.yaml:30: builtIn.node-1[1]: 0000:17:00.0 stands in this list already"},
		{"key that is a list", "logging: {format: json}", "? [a]\n: b", "c.yaml:25: is a list, must be a word in front of the colon"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			data := tc.new
			if tc.old != "" {
				if data = strings.Replace(full, tc.old, tc.new, 1); data == full {
					t.Fatalf("the configuration does not contain %q", tc.old)
				}
			}
			_, err := Parse([]byte(data), "c.yaml")
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("the error prints a password: %v", err)
			}
		})
	}
}

func TestParseReportsAll(t *testing.T) {
	_, err := Parse([]byte(`kind: config
timings: {coolDown: -1s}
fabrics: [{id: A}, {id: a, manager: fm, endpoint: https://a, tenant: 3b5d7a52-0000-4000-8000-000000000001, models: []}]
`), "c.yaml")
	want := `c.yaml:1: kind: is "config", must be "Config"
c.yaml:1: the field apiVersion is missing
c.yaml:2: timings.coolDown: is "-1s", must be a duration from 0s to 720h, like 90s or 4m
c.yaml:3: fabrics[0].id: is "A", must be 1 to 20 lower-case letters and digits
c.yaml:3: fabrics[0]: the field manager is missing
c.yaml:3: fabrics[0]: the field models is missing
c.yaml:3: fabrics[1].models: is empty; a fabric has at least one model`
	if err == nil || err.Error() != want {
		t.Errorf("got:\n%v\nwant:\n%s", err, want)
	}
}

// The configuration that is shipped reads, and so does its commented example.
func TestParseManifest(t *testing.T) {
	data, err := os.ReadFile("../../../../deploy/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	shipped := ""
	for d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096); shipped == ""; {
		var m corev1.ConfigMap
		if err = d.Decode(&m); errors.Is(err, io.EOF) {
			t.Fatal("the manifest holds no ConfigMap")
		} else if err == nil && m.Kind == "ConfigMap" {
			shipped = m.Data["config.yaml"]
		}
	}
	c, err := Parse([]byte(shipped), "config.yaml")
	if err != nil || len(c.Fabrics) != 0 {
		t.Errorf("as shipped: %+v, %v; want no fabric", c, err)
	}
	var example strings.Builder
	for line := range strings.Lines(shipped) {
		code := strings.TrimPrefix(strings.TrimPrefix(line, "#"), " ")
		if word, _, ok := strings.Cut(strings.TrimSpace(code), ":"); line == code || ok && !strings.Contains(word, " ") || strings.HasPrefix(strings.TrimSpace(code), "- ") {
			example.WriteString(code)
		}
	}
	c, err = Parse([]byte(example.String()), "config.yaml")
	if err != nil || len(c.Fabrics) != 1 || len(c.Fabrics[0].Models) != 1 || len(c.Machines) != 1 {
		t.Errorf("the example: %+v, %v; want one fabric, one model, one machine, in\n%s", c, err, example.String())
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(full))
	f.Add([]byte(head))
	f.Add([]byte("? [a]\n: &x {<<: *x}\n---\n"))
	f.Add([]byte("fabrics: [{id: &a [*a]}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data, "c.yaml")
		if err != nil {
			for line := range strings.Lines(err.Error()) {
				if strings.TrimSpace(line) == "" {
					t.Errorf("an empty line in %q", err)
				}
			}
			return
		}
		for _, f := range c.Fabrics {
			if f.ID == "" || f.Endpoint == "" || f.Settle <= 0 || len(f.Models) == 0 {
				t.Errorf("accepted the fabric %+v", f)
			}
		}
	})
}

func TestFabricSelects(t *testing.T) {
	f := Fabric{NodeSelector: map[string]string{"a": "1", "b": ""}}
	for _, tc := range []struct {
		labels map[string]string
		want   bool
	}{
		{map[string]string{"a": "1", "b": "", "c": "2"}, true},
		{map[string]string{"a": "1"}, false},
		{map[string]string{"a": "2", "b": ""}, false},
		{nil, false},
	} {
		if got := f.Selects(tc.labels); got != tc.want {
			t.Errorf("Selects(%v) = %v", tc.labels, got)
		}
	}
	if !(Fabric{}).Selects(nil) {
		t.Error("a fabric without a selector does not take every node")
	}
}
