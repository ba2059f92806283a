// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"net/http"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/cm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/cm"
)

func faceCM() *face {
	return &face{
		name: "cm",
		pool: `
faces: [fm, cm]
cm: {cluster: 5f0c2a10-7d1e-4c55-9a40-0000000000c1}
timing: {attachDelay: 20s, detachDelay: 20s, nodeDelay: 3s}
`,
		settings: settingsCM(),
		start: func(b *bench) (map[string]http.Handler, func()) {
			return map[string]http.Handler{
				"/id_manager/":      b.Faults.Wrap("idm", b.Tokens.Handler()),
				"/fabric_manager/":  b.Faults.Wrap("fm", fm.New(b.Core, b.Tokens, b.Config).Handler()),
				"/cluster_manager/": b.Faults.Wrap("cm", cm.New(b.Core, b.Tokens, b.Config, clock.RealClock{}).Handler()),
			}, b.Core.Close
		},
		manager: func(b *bench) (fabric.Manager, error) {
			return client.New(client.Config{
				Endpoint: b.Server.URL, Tenant: b.Config.Tenant, Cluster: b.Config.CM.Cluster, Credentials: b.dir, FabricManager: true,
				WorkTimeout: b.setting.call, Dial: b.Dial(),
			})
		},
		login:  func(b *bench) map[string]string { return b.Files() },
		change: simapi.Fault{Face: "cm", Path: "/resize$"},
		look:   simapi.Fault{Face: "cm", Method: "GET", Path: "/machines/[^/]+$"},
		busy:   `{"status":409,"detail":{"code":"E03XXXX","message":"another change is in progress"}}`,
		denial: grantDenial, denied: deniedGrant,
		id:    func(_ *bench, d core.Device) string { return d.ReportedSerial },
		blind: failByPath(byUUID),
		refuseDetach: func(b *bench, times int) {
			b.t.Helper()
			reason := "device busy"
			for range times {
				for _, id := range b.has("n1") {
					b.alter(id, simapi.DeviceChange{FailDetach: &reason})
				}
				failed := func() bool {
					for _, d := range b.chassis().State().Devices {
						if d.Failure == reason {
							return true
						}
					}
					return false
				}
				b.until("a detach has failed", 5*time.Minute, failed)
				b.proved("a detach has failed")
				b.until("it is asked again", 5*time.Minute, func() bool { return !failed() })
			}
		},
		stuck: func(b *bench) func() {
			b.t.Helper()
			reason := "hot-plug timed out"
			b.alter("a-0", simapi.DeviceChange{FailAttach: &reason})
			b.alter("a-1", simapi.DeviceChange{FailAttach: &reason})
			return func() {
				none := ""
				for _, id := range []string{"a-0", "a-1"} {
					b.alter(id, simapi.DeviceChange{FailAttach: &none})
				}
			}
		},
		call: 3 * time.Minute, settle: time.Minute,
		requests: 36,
		not: map[string]string{
			"paged lists": "its lists are whole.",
		},
	}
}

func settingsCM() []setting {
	all := []setting{{name: "default"}, {name: "production times", call: 3 * time.Minute}}
	for _, p := range []struct {
		name string
		cm   simapi.CMPolicies
	}{
		{"count at the end", simapi.CMPolicies{Count: "atComplete"}},
		{"coming with id", simapi.CMPolicies{Progress: "withID"}},
		{"coming unseen", simapi.CMPolicies{Progress: "absent"}},
		{"coming unseen, count at the end", simapi.CMPolicies{Progress: "absent", Count: "atComplete"}},
		{"little detail", simapi.CMPolicies{Detail: "partial"}},
		{"little detail, count at the end", simapi.CMPolicies{Detail: "partial", Count: "atComplete"}},
		{"above 409", simapi.CMPolicies{Above: "409"}},
		{"above clamped", simapi.CMPolicies{Above: "clamp"}},
		{"last one wins", simapi.CMPolicies{Below: "lastWins"}},
		{"none free 409", simapi.CMPolicies{Shortage: "409"}},
		{"unknown is ignored", simapi.CMPolicies{Unknown: "ignore"}},
		{"totals are trusted", simapi.CMPolicies{Remaining: "trusted"}},
		{"failed rows vanish", simapi.CMPolicies{Failed: "vanish"}},
		{"empty answers", simapi.CMPolicies{Answer: "empty", Refusal: "empty"}},
		{"text answers", simapi.CMPolicies{Answer: "text", Refusal: "html"}},
	} {
		s := setting{name: p.name, policies: simapi.Policies{CM: p.cm}}
		if p.cm.Detail == "partial" {
			s.not = map[string]string{
				"critical":            "its rows say nothing of health.",
				"duplicate identity":  "a device that shares its device_id has no name at all.",
				"identity is missing": "a device without device_id has no name at all.",
			}
		}
		all = append(all, s)
	}
	return append(all,
		setting{name: "busy", policies: simapi.Policies{Serialization: "busy409"}},
		setting{name: "none waits", policies: simapi.Policies{Serialization: "none"}},
		setting{name: "worst first", policies: simapi.Policies{Pick: "worst"}},
	)
}
