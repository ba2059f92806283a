// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

const id device.Machine = "00000000-0000-4000-8000-000000000001"

func gpuJSON(res, status, serial string) string {
	return fmt.Sprintf(`{"res_uuid":%q,"res_type":"gpu","res_op_status":%s,"res_serial_num":%s,"extra":[1],
		"res_spec":{"condition":[{"column":"vendor","operator":"eq","value":"x"},{"column":"model","operator":"eq","value":"A100"}]}}`, res, status, serial)
}

func TestGPUs(t *testing.T) {
	const uuid = `"GPU-0d5c7e11-4444-4c00-b300-000000000001"`
	one := device.OnFabric{ID: "r1", Machine: id, Model: "A100", UUID: "GPU-0d5c7e11-4444-4c00-b300-000000000001", Health: device.HealthOK}
	with := func(change func(*device.OnFabric)) []device.OnFabric {
		d := one
		change(&d)
		return []device.OnFabric{d}
	}
	tests := []struct {
		name      string
		resources string
		want      []device.OnFabric
		skipped   int
	}{
		{name: "null", resources: "null"},
		{name: "none", resources: "[]"},
		{name: "only a CPU", resources: `[{"res_uuid":"c","res_type":"compute"}]`},
		{name: "healthy", resources: "[" + gpuJSON("r1", `"00"`, uuid) + "]", want: []device.OnFabric{one}},
		{name: "one digit", resources: "[" + gpuJSON("r1", `"0"`, uuid) + "]", want: []device.OnFabric{one}},
		{name: "a number for a status", resources: "[" + gpuJSON("r1", `0`, uuid) + "]", want: []device.OnFabric{one}},
		{
			name: "warning", resources: "[" + gpuJSON("r1", `"10"`, uuid) + "]",
			want: with(func(d *device.OnFabric) {
				d.Health, d.HealthText = device.HealthWarning, `the manager's status is "10"`
			}),
		},
		{
			name: "critical", resources: "[" + gpuJSON("r1", `"20"`, uuid) + "]",
			want: with(func(d *device.OnFabric) {
				d.Health, d.HealthText = device.HealthCritical, `the manager's status is "20"`
			}),
		},
		{
			name: "status empty", resources: "[" + gpuJSON("r1", `""`, uuid) + "]",
			want: with(func(d *device.OnFabric) { d.Health, d.HealthText = device.HealthUnknown, `the manager's status is ""` }),
		},
		{
			name: "status null", resources: "[" + gpuJSON("r1", `null`, uuid) + "]",
			want: with(func(d *device.OnFabric) { d.Health, d.HealthText = device.HealthUnknown, `the manager's status is ""` }),
		},
		{
			name: "status odd", resources: "[" + gpuJSON("r1", `"9x"`, uuid) + "]",
			want: with(func(d *device.OnFabric) {
				d.Health, d.HealthText = device.HealthUnknown, `the manager's status is "9x"`
			}),
		},
		{name: "serial null", resources: "[" + gpuJSON("r1", `"00"`, "null") + "]", want: with(func(d *device.OnFabric) { d.UUID = "" })},
		{name: "serial without prefix, in capitals", resources: "[" + gpuJSON("r1", `"00"`, `"0D5C7E11-4444-4C00-B300-000000000001"`) + "]", want: []device.OnFabric{one}},
		{name: "serial is a board number", resources: "[" + gpuJSON("r1", `"00"`, "1652921000123") + "]", want: with(func(d *device.OnFabric) { d.UUID, d.Serial = "", "1652921000123" })},
		{
			name: "two with one serial", resources: "[" + gpuJSON("r1", `"00"`, uuid) + "," + gpuJSON("r2", `"00"`, uuid) + "]",
			want: []device.OnFabric{
				{ID: "r1", Machine: id, Model: "A100", Health: device.HealthOK, HealthText: "the manager gives " + strings.Trim(uuid, `"`) + " to several devices"},
				{ID: "r2", Machine: id, Model: "A100", Health: device.HealthOK, HealthText: "the manager gives " + strings.Trim(uuid, `"`) + " to several devices"},
			},
		},
		{name: "listed twice", resources: "[" + gpuJSON("r1", `"00"`, uuid) + "," + gpuJSON("r1", `"00"`, uuid) + "]", want: []device.OnFabric{one}},
		{name: "no res_uuid", resources: "[" + gpuJSON("", `"00"`, uuid) + "," + gpuJSON("r1", `"00"`, uuid) + "]", want: []device.OnFabric{one}, skipped: 1},
		{name: "no spec", resources: `[{"res_uuid":"r1","res_type":"gpu","res_op_status":"0","res_spec":null}]`, want: []device.OnFabric{{ID: "r1", Machine: id, Health: device.HealthOK}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			machines, err := decodeMachines([]byte(`{"data":{"machines":[{"mach_uuid":"` + string(id) + `","resources":` + tt.resources + `}]}}`))
			if err != nil {
				t.Fatal(err)
			}
			got, skipped := machines[0].gpus(id)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("GPUs (-want +got):\n%s", diff)
			}
			if skipped != tt.skipped {
				t.Errorf("skipped = %d, want %d", skipped, tt.skipped)
			}
		})
	}
}

func TestDescribe(t *testing.T) {
	tests := []struct {
		name, json string
		want       fabric.Machine
		err        bool
	}{
		{name: "on", json: `{"mach_uuid":"` + string(id) + `","mach_name":"n1","fabric_id":0,"mach_status_detail":"ACTIVE PON"}`, want: fabric.Machine{ID: id, Name: "n1", Fabric: "0", Power: fabric.PowerOn}},
		{name: "off", json: `{"mach_uuid":"` + string(id) + `","fabric_id":3,"mach_status_detail":"INACTIVE POFF"}`, want: fabric.Machine{ID: id, Fabric: "3", Power: fabric.PowerOff}},
		{name: "null fabric", json: `{"mach_uuid":"` + string(id) + `","fabric_id":null}`, want: fabric.Machine{ID: id, Power: fabric.PowerUnknown}},
		{name: "no fabric", json: `{"mach_uuid":"` + string(id) + `"}`, want: fabric.Machine{ID: id, Power: fabric.PowerUnknown}},
		{name: "not a UUID", json: `{"mach_uuid":"x"}`, err: true},
		{name: "no UUID", json: `{}`, err: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			machines, err := decodeMachines([]byte(`{"data":{"machines":[` + tt.json + `]}}`))
			if err != nil {
				t.Fatal(err)
			}
			got, err := machines[0].describe()
			if (err != nil) != tt.err || got != tt.want {
				t.Errorf("machine = %+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
}

func TestDecodeAvailable(t *testing.T) {
	tests := []struct {
		name, body, fabric string
		count              int
		err                bool
	}{
		{name: "both", body: `{"fabric_id":0,"reserved_res_num_per_fabric":5}`, fabric: "0", count: 5},
		{name: "no fabric", body: `{"reserved_res_num_per_fabric":0}`},
		{name: "text", body: `{"fabric_id":"1","reserved_res_num_per_fabric":"12"}`, fabric: "1", count: 12},
		{name: "no count", body: `{"fabric_id":0}`, err: true},
		{name: "null count", body: `{"reserved_res_num_per_fabric":null}`, err: true},
		{name: "negative", body: `{"reserved_res_num_per_fabric":-1}`, err: true},
		{name: "HTML", body: `<html>`, err: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f, n, err := decodeAvailable([]byte(tt.body))
			if (err != nil) != tt.err || f != tt.fabric || n != tt.count {
				t.Errorf("got %q, %d, %v", f, n, err)
			}
		})
	}
}

func FuzzDecodeMachines(f *testing.F) {
	f.Add([]byte(`{"data":{"machines":[{"mach_uuid":"00000000-0000-4000-8000-000000000001","fabric_id":null,"resources":[` + gpuJSON("r1", `"00"`, `"s"`) + `]}]}}`))
	f.Add([]byte(`{"data":{"machines":[]}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		machines, err := decodeMachines(body)
		if err != nil {
			return
		}
		if m, ok := pick(machines, id); ok {
			gpus, _ := m.gpus(id)
			seen := map[string]bool{}
			for _, g := range gpus {
				if g.ID == "" || seen[g.ID] || g.Machine != id {
					t.Errorf("listed %+v of %q", g, body)
				}
				seen[g.ID] = true
			}
		}
		for _, m := range machines {
			if d, err := m.describe(); err == nil && d.ID == "" {
				t.Errorf("machine without a name of %q", body)
			}
		}
	})
}

func FuzzDecodeAvailable(f *testing.F) {
	f.Add([]byte(`{"fabric_id":0,"reserved_res_num_per_fabric":5}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if _, n, err := decodeAvailable(body); n < 0 || err != nil && n != 0 {
			t.Errorf("count %d, %v of %q", n, err, body)
		}
	})
}
