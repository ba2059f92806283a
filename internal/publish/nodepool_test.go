// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cohdi/cohdi-agent/internal/pool"
)

func TestNodePool(t *testing.T) {
	if got := NodePool("n1", nil); len(got.Pools) != 0 {
		t.Errorf("a pool without offers: %v", got)
	}
	want := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"n1": {Slices: []resourceslice.Slice{{
		Devices: []resourceapi.Device{{
			Name:       "gpu-1",
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"uuid": {StringValue: new("GPU-1")}, "model": {StringValue: new("")}},
		}},
	}}}}}
	if diff := cmp.Diff(want, NodePool("n1", []pool.Offer{{Name: "gpu-1", Attributes: map[string]string{"uuid": "GPU-1", "model": ""}}})); diff != "" {
		t.Errorf("pool (-want +got):\n%s", diff)
	}
	var many []pool.Offer
	for i := range resourceapi.ResourceSliceMaxDevices + 1 {
		many = append(many, pool.Offer{Name: fmt.Sprint("gpu-", i)})
	}
	if got := NodePool("n1", many).Pools["n1"].Slices; len(got) != 2 || len(got[0].Devices) != resourceapi.ResourceSliceMaxDevices || len(got[1].Devices) != 1 {
		t.Errorf("%d slices of %d GPUs", len(got), len(many))
	}
}
