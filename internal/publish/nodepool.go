// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cohdi/cohdi-agent/internal/pool"
)

// NodePool lays a node's own pool out, which is called like the node. It is the node's agent that publishes it;
// without offers there is no pool.
func NodePool(node string, offers []pool.Offer) resourceslice.DriverResources {
	if len(offers) == 0 {
		return resourceslice.DriverResources{}
	}
	var p resourceslice.Pool
	for chunk := range slices.Chunk(offers, resourceapi.ResourceSliceMaxDevices) {
		var s resourceslice.Slice
		for i := range chunk {
			s.Devices = append(s.Devices, resourceapi.Device{Name: chunk[i].Name, Attributes: attributes(chunk[i].Attributes)})
		}
		p.Slices = append(p.Slices, s)
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: p}}
}
