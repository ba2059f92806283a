// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"net/http"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	client "github.com/cohdi/cohdi-agent/internal/fabric/fm"
)

// saysDone: some managers answer with all that has come or with nothing, whatever has happened, and lists may lag.
const saysDone = "it answers with success when none is free; nobody can tell that from a success without words, and the claim fails when its time is over."

func faceFM() *face {
	return &face{
		name: "fm",
		pool: "timing: {attachDelay: 5s, detachDelay: 5s, nodeDelay: 3s}\n",
		settings: []setting{
			{name: "default"},
			{name: "production times", call: 3 * time.Minute},
			{name: "all resources", policies: simapi.Policies{AttachAnswer: "allResources"}},
			{name: "reordered", policies: simapi.Policies{AttachAnswer: "reordered"}},
			{name: "without serial", policies: simapi.Policies{AttachAnswer: "withoutSerial", Pick: "random"}},
			{name: "empty answers", policies: simapi.Policies{AttachAnswer: "empty", DetachAnswer: "204"}},
			{name: "busy", policies: simapi.Policies{Serialization: "busy409"}},
			{name: "one for the fabric", policies: simapi.Policies{Serialization: "perFabric"}},
			{name: "none waits", policies: simapi.Policies{Serialization: "none"}},
			{name: "side by side", policies: simapi.Policies{Serialization: "none"}, sideBySide: true},
			{name: "worst first", policies: simapi.Policies{Pick: "worst"}},
			{name: "none free 409", policies: simapi.Policies{NoCapacity: "409", Shortage: "partial"}},
			{name: "none free 400", policies: simapi.Policies{NoCapacity: "400", UnknownModel: "404"}},
			{name: "none free, empty", policies: simapi.Policies{NoCapacity: "empty200"}, not: map[string]string{
				"stolen":                    saysDone,
				"model in another spelling": saysDone,
			}},
			{name: "unknown detach 200", policies: simapi.Policies{UnknownDetach: "200"}},
			{name: "in use 409", policies: simapi.Policies{DetachInUse: "409"}},
		},
		start: func(b *bench) (map[string]http.Handler, func()) {
			return map[string]http.Handler{
				"/id_manager/": b.Faults.Wrap("idm", b.Tokens.Handler()),
				"/":            b.Faults.Wrap("fm", fm.New(b.Core, b.Tokens, b.Config).Handler()),
			}, b.Core.Close
		},
		manager: func(b *bench) (fabric.Manager, error) {
			exclusion := fabric.ExclusionMachine
			if b.setting.sideBySide {
				exclusion = fabric.ExclusionNone
			}
			return client.New(client.Config{
				Endpoint: b.Server.URL, Tenant: b.Config.Tenant, Credentials: b.dir, UpdateTimeout: b.setting.call, Exclusion: exclusion, Dial: b.Dial(),
			})
		},
		login:  func(b *bench) map[string]string { return b.Files() },
		change: simapi.Fault{Face: "fm", Path: "/update$"},
		look:   simapi.Fault{Face: "fm", Method: "GET", Path: "/machines/[^/]+$"},
		busy:   `{"status":409,"detail":{"code":"E02XXXX","message":"another update is in progress"}}`,
		denial: grantDenial, denied: deniedGrant,
		id:           func(_ *bench, d core.Device) string { return d.ResUUID },
		blind:        failByPath(byUUID),
		refuseDetach: refuseChange(`{"status":409,"detail":{"code":"E02XXXX","message":"the device is in use"}}`),
		call:         3 * time.Minute, settle: time.Minute,
		requests: 8,
		not: map[string]string{
			"paged lists": "its lists are whole.",
			"stuck work":  "every call ends with the work; there is none that waits for a person.",
		},
	}
}

// failByPath makes reads of a machine fail, by their path.
func failByPath(of func(m device.Machine) string) func(b *bench, m device.Machine, on bool) {
	return func(b *bench, m device.Machine, on bool) {
		b.t.Helper()
		if on {
			b.Add(simapi.Fault{Name: "blind", Method: "GET", Path: of(m), Action: simapi.ActionStatus, Status: 500, Content: facetest.Page, ContentType: "text/html"})
			return
		}
		b.lift("blind")
	}
}

// byUUID is how a machine is named in paths.
func byUUID(m device.Machine) string { return string(m) }

// refuseChange makes the manager refuse the next changing calls.
func refuseChange(words string) func(b *bench, times int) {
	return func(b *bench, times int) {
		b.t.Helper()
		b.fault(on(simapi.Fault{Action: simapi.ActionStatus, Status: http.StatusConflict, Content: words}, b.face.change), times)
	}
}
