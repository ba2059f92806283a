// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func TestBuiltInOffers(t *testing.T) {
	gpu := func(id device.GPUUUID, h device.Health) BuiltIn {
		return BuiltIn{UUID: id, PCI: device.PCIAddress{Bus: 0x17}, Name: "NVIDIA H100", Health: h}
	}
	gpus := []BuiltIn{
		gpu("GPU-4", device.HealthOK), gpu("GPU-3", device.HealthWarning), gpu("GPU-2", device.HealthCritical), gpu("GPU-1", device.HealthUnknown),
	}
	names := func(o []Offer) (all []string) {
		for _, e := range o {
			all = append(all, e.Name)
		}
		return all
	}
	if diff := cmp.Diff([]string{"gpu-3", "gpu-4"}, names(BuiltInOffers(nil, gpus, false))); diff != "" {
		t.Errorf("offers (-want +got):\n%s", diff)
	}
	if got := BuiltInOffers(nil, gpus, true); len(got) != 0 {
		t.Errorf("offered though somebody else does: %v", got)
	}
	want := map[string]string{"model": "", "fabric": "", "uuid": "GPU-4", "pciBusID": "0000:17:00.0", "productName": "NVIDIA H100", "link": ""}
	models := []Model{{Name: "a100", Attributes: map[string]string{"productName": "NVIDIA A100", "link": "cxl"}}}
	if diff := cmp.Diff(want, BuiltInOffers(models, gpus, false)[1].Attributes); diff != "" {
		t.Errorf("attributes (-want +got):\n%s", diff)
	}
	delete(want, "link")
	if diff := cmp.Diff(want, BuiltInOffers(nil, gpus, false)[1].Attributes); diff != "" {
		t.Errorf("attributes without a fabric (-want +got):\n%s", diff)
	}
}

// A selector on an attribute that one device lacks fails the whole Pod: all entries have the same names.
func TestBuiltInAttributesAreThoseOfAFabric(t *testing.T) {
	for _, attributes := range []map[string]string{{}, {"productName": "NVIDIA A100"}, {"memory": "80Gi"}} {
		models := []Model{{Name: "a100", Attributes: attributes}}
		plan := Decide(World{
			Now: time.Unix(1000, 0), Fabric: "0", Models: models,
			Inventory: Inventory{Free: map[device.Model]Supply{"a100": {Count: 1}}},
		})
		entries := slices.Concat(slices.Concat(plan.Offers.Ready...), slices.Concat(plan.Offers.OnCall...))
		if len(entries) != 2 {
			t.Fatalf("%d entries of one unit", len(entries))
		}
		own := BuiltInOffers(models, []BuiltIn{{UUID: "GPU-1", Health: device.HealthOK}}, false)
		for _, e := range entries {
			want, got := slices.Sorted(maps.Keys(e.Attributes)), slices.Sorted(maps.Keys(own[0].Attributes))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("names of attributes (-%s +built-in):\n%s", e.Name, diff)
			}
		}
	}
}
