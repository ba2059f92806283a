// SPDX-License-Identifier: Apache-2.0

package rest

import (
	"fmt"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Unambiguous takes away the identity of devices that share it: none of them could be matched by it. The list is changed in
// place.
func Unambiguous(list []device.OnFabric) []device.OnFabric {
	count := make(map[device.GPUUUID]int)
	for i := range list {
		count[list[i].UUID]++
	}
	for i := range list {
		d := &list[i]
		if d.UUID != "" && count[d.UUID] > 1 {
			d.HealthText = Tidy(strings.TrimSpace(fmt.Sprintf("the service gives several devices the UUID %s; %s", d.UUID, d.HealthText)))
			d.UUID = ""
		}
	}
	return list
}
