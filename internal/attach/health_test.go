// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"slices"
	"testing"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func TestHealthy(t *testing.T) {
	shown := Signs{Shown: true, Seen: true}
	with := func(change func(*Signs)) Signs {
		s := shown
		change(&s)
		return s
	}
	decided := map[string]bool{}
	for _, tc := range []struct {
		name  string
		signs Signs
		want  device.Health
		why   string
	}{
		{"all is well", shown, device.HealthOK, ""},
		{"the manager has no word", with(func(s *Signs) { s.Fabric = device.HealthUnknown }), device.HealthOK, ""},
		{"the manager warns", with(func(s *Signs) { s.Fabric, s.FabricText = device.HealthWarning, "10" }), device.HealthWarning, "the fabric manager says 10"},
		{"the manager calls it critical", with(func(s *Signs) { s.Fabric, s.FabricText = device.HealthCritical, "20" }), device.HealthCritical, "the fabric manager says 20"},
		{"an error of the GPU", with(func(s *Signs) { s.XID = 79 }), device.HealthCritical, "the driver reported XID 79"},
		{"an error, and then a driver that hangs by it", Signs{XID: 79, NVMLState: "hung"}, device.HealthCritical, "the driver reported XID 79"},
		{"gone from the driver", Signs{Seen: true}, device.HealthCritical, "the driver does not show it any more"},
		{"came after the list of GPUs that is looked at", Signs{}, device.HealthUnknown, "the driver has not shown it to this agent yet"},
		{"no driver to ask", Signs{NVMLState: "not loaded"}, device.HealthUnknown, "NVML does not answer: not loaded"},
		{"goes back, and is off the bus", Signs{Releasing: true}, device.HealthUnknown, "it is being released"},
		{"on its way out", Signs{Draining: true}, device.HealthUnknown, "it is being released"},
		{"its unit failed", with(func(s *Signs) { s.Failure = device.Failure{Reason: "Vanished", Message: "pulled"} }), device.HealthCritical, "Vanished: pulled"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got, why := Healthy(tc.signs); got != tc.want || why != tc.why {
				t.Errorf("%s, %q; want %s, %q", got, why, tc.want, tc.why)
			}
		})
		at := slices.IndexFunc(healthRules(), func(r healthRule) bool { return r.when(&tc.signs) })
		decided[healthRules()[at].name] = true
	}
	for _, r := range healthRules() {
		if !decided[r.name] {
			t.Errorf("no case is decided by %q", r.name)
		}
	}
}

func TestCriticalXID(t *testing.T) {
	for code, want := range map[uint64]bool{13: false, 31: false, 48: true, 79: true, 109: false} {
		if got := CriticalXID(code); got != want {
			t.Errorf("CriticalXID(%d) = %v", code, got)
		}
	}
}
