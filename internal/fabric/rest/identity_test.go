// SPDX-License-Identifier: Apache-2.0

package rest

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func TestUnambiguous(t *testing.T) {
	const one, two = "GPU-00000000-0000-4000-8000-000000000001", "GPU-00000000-0000-4000-8000-000000000002"
	got := Unambiguous([]device.OnFabric{{ID: "a", UUID: one, HealthText: "fine"}, {ID: "b", UUID: two}, {ID: "c", UUID: one}, {ID: "d"}, {ID: "e"}})
	const shared = "the service gives several devices the UUID " + one + ";"
	want := []device.OnFabric{{ID: "a", HealthText: shared + " fine"}, {ID: "b", UUID: two}, {ID: "c", HealthText: shared}, {ID: "d"}, {ID: "e"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
}
