// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"net/http"
	"path/filepath"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/sunfish"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/sunfish"
)

const (
	sunfishChange = "sunfish change"
	// lagging is the kind whose machines show late what was done.
	lagging = "lagging"
)

func faceSunfish() *face {
	f := &face{
		name:     "sunfish",
		pool:     "timing: {attachDelay: 5s, detachDelay: 5s, nodeDelay: 3s}\n",
		settings: settingsSunfish(),
		start:    startSunfish,
		manager: func(b *bench) (fabric.Manager, error) {
			return client.New(client.Config{
				Endpoint: b.Server.URL, PlainHTTP: true, Credentials: b.dir, CallTimeout: b.setting.call, Settle: b.setting.settle, Dial: b.Dial(),
			})
		},
		login:   func(*bench) map[string]string { return nil },
		change:  simapi.Fault{Face: sunfishChange, Path: "/Connections(/|$)"},
		look:    simapi.Fault{Face: "sunfish", Method: "GET", Path: "/Systems/n[12]/Processors|/Connections(/|$)"},
		busy:    "the service is busy",
		partial: simapi.Fault{Face: "agent", Method: "POST"},
		id:      func(_ *bench, d core.Device) string { return "/redfish/v1/Fabrics/f-0/Endpoints/T-" + d.ID },
		blind:   failByPath(func(m device.Machine) string { return "/Systems/" + nodeOf(m) + "(/|$)" }),
		refuseDetach: func(b *bench, times int) {
			b.t.Helper()
			b.fault(simapi.Fault{Face: "agent", Method: "DELETE", Action: simapi.ActionStatus, Status: http.StatusConflict, Content: "the slot is locked"}, times)
		},
		call: 3 * time.Minute, settle: time.Minute,
		requests: 120, dear: 3,
		not: map[string]string{
			"paged lists": "its lists are whole.",
			"stuck work":  "every call ends with the work; there is none that waits for a person.",
		},
	}
	for _, r := range rows() {
		if r.login {
			f.not[r.name] = "it asks nobody who he is."
		}
	}
	return f
}

func settingsSunfish() []setting {
	all := []setting{
		{name: "default", open: true},
		{name: "production times", open: true, call: 3 * time.Minute},
		{name: "machines that lag", open: true, kind: lagging, requests: 220},
		{name: "targets are checked", open: true, policies: simapi.Policies{Sunfish: simapi.SunfishPolicies{SameTarget: "reject"}}},
		{name: "machines show no GPU", open: true, policies: simapi.Policies{Sunfish: simapi.SunfishPolicies{Extension: "off"}}},
	}
	for i := range all {
		all[i].mute = true // its agent's refusal comes as an error that says nothing
	}
	return all
}

func startSunfish(b *bench) (map[string]http.Handler, func()) {
	b.t.Helper()
	path := ""
	if b.StatePath() != "" {
		path = filepath.Join(filepath.Dir(b.StatePath()), "connections.json")
	}
	c := b.Core
	if b.setting.kind == lagging {
		stale := simapi.Duration(10 * time.Second)
		b.Config.Timing.StaleDelay = &stale
		c.SetTiming(b.Config.Timing)
	}
	f, err := sunfish.New(b.t.Context(), sunfish.Options{
		Core: c, Faults: b.Faults, Clock: clock.RealClock{}, Fabrics: b.Config.Fabrics, StatePath: path, AgentTimeout: time.Hour,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	stop := func() {
		f.Stop()
		c.Close()
		f.Close()
	}
	name := func(r *http.Request) string {
		if r.Method != http.MethodGet {
			return sunfishChange
		}
		return "sunfish"
	}
	return map[string]http.Handler{"/": b.split(name, f.Handler())}, stop
}
