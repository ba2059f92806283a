// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"strings"
	"testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/test/chassis"
)

const demo = "../../../../test/chassis/demo.yaml"

// TestParseManagers: the demonstration's chassis with each kind of manager.
func TestParseManagers(t *testing.T) {
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
		data, err := os.ReadFile(files.Chassis)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(data); err != nil {
			t.Errorf("%s: %v", files.Chassis, err)
		}
	}
	if _, err := chassis.Files(root, "none"); err == nil || !strings.Contains(err.Error(), "there are cdim, cm, fm, redfish, sunfish") {
		t.Errorf("error = %v", err)
	}
}

func TestLoad_demo(t *testing.T) {
	c, err := Load(demo)
	if err != nil {
		t.Fatal(err)
	}
	models := map[string]int{}
	for _, d := range c.Devices {
		models[d.Model]++
	}
	if models["NVIDIA A100-PCIE-80GB"] != 2 || models["NVIDIA L40S"] != 2 || len(c.Devices) != 4 {
		t.Errorf("devices by model: %v, want two and two", models)
	}
	if !strings.ContainsAny(c.Credentials.ClientSecret, " ") || !strings.Contains(c.Credentials.ClientSecret, "&") {
		t.Errorf("client secret %q tests no encoding", c.Credentials.ClientSecret)
	}
	if len(c.Faces) != 1 || c.Faces[0] != FaceFM {
		t.Errorf("faces %v, want the fabric manager's alone", c.Faces)
	}
	if c.Policies.Serialization != "perMachine" || c.Policies.AttachAnswer != "newOnly" {
		t.Errorf("policies %+v", c.Policies)
	}
}

func TestParse_refuses(t *testing.T) {
	data, err := os.ReadFile(demo)
	if err != nil {
		t.Fatal(err)
	}
	good := string(data)
	tests := []struct{ name, old, new, want string }{
		{"unknown field", "tenant:", "tenent: x\ntenant:", "tenent"},
		{"machine in no fabric", "name: n1", "name: n1\n    fabric: 7", "fabric"},
		{"machine twice", "name: n2", "name: n1", "twice"},
		{"no tenant", "tenant: 5f0c2a10-7d1e-4c55-9a40-000000000001", `tenant: ""`, "tenant"},
		{"bad policy", "policies:", "policies:\n  pick: best", "pick"},
		{"bad duration", "attachDelay: 2s", "attachDelay: 2", "2s"},
		{"negative duration", "attachDelay: 2s", "attachDelay: -2s", "negative"},
		{"hot-plug mode", "hotplug: event", "hotplug: magic", "magic"},
		{"face", "hotplug: event", "hotplug: event\nfaces: [fm, xx]", "xx"},
		{"face twice", "hotplug: event", "hotplug: event\nfaces: [fm, fm]", "twice"},
		{"cluster manager without a cluster", "hotplug: event", "hotplug: event\nfaces: [fm, cm]", "cm.cluster"},
		{"paths of a Redfish service", "hotplug: event", "hotplug: event\nredfish: {uris: secret}", "redfish.uris"},
		{"no sessions", "hotplug: event", "hotplug: event\nredfish: {sessions: -1}", "at least one"},
		{"bad policy of one manager", "policies:", "policies:\n  cm: {count: never}", "cm.count"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			if !strings.Contains(good, tc.old) {
				t.Fatalf("demo.yaml does not contain %q", tc.old)
			}
			_, err := Parse([]byte(strings.Replace(good, tc.old, tc.new, 1)))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one about %q", err, tc.want)
			}
		})
	}
}

func TestMergePolicies(t *testing.T) {
	base := simapi.Policies{Pick: "first", NoCapacity: "409"}
	base.CM.Count = "atAccept"
	got := MergePolicies(base, simapi.Policies{Pick: "worst", CM: simapi.CMPolicies{Progress: "absent"}})
	if got.CM.Count != "atAccept" || got.CM.Progress != "absent" || got.Pick != "worst" || got.NoCapacity != "409" || base.Pick != "first" {
		t.Errorf("merged %+v, base %+v", got, base)
	}
}

func FuzzParse(f *testing.F) {
	data, err := os.ReadFile(demo)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte("devices: [{id: a, count: 2}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data)
		if err == nil && (c == nil || c.Tenant == "") {
			t.Errorf("accepted a chassis without tenant: %q", data)
		}
	})
}
