// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"maps"
	"net/http"
	"testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	client "github.com/cohdi/cohdi-agent/internal/fabric/fm"
)

// hands are what the conformance suite has on the chassis.
type hands struct{ *facetest.Chassis }

var full = facetest.Full()

// policies are all values of the face's policies; or those alone that differ most. That none is free cannot be told from a
// success without words (empty200): no driver can do what the suite asks there.
func policies() map[string]simapi.Policies {
	all := map[string]simapi.Policies{"default": {}, "allResources_busy409_409": {AttachAnswer: "allResources", Serialization: "busy409", NoCapacity: "409"}}
	if !*full {
		return all
	}
	maps.Copy(all, map[string]simapi.Policies{
		"reordered":     {AttachAnswer: "reordered"},
		"withoutSerial": {AttachAnswer: "withoutSerial"},
		"empty_204":     {AttachAnswer: "empty", DetachAnswer: "204"},
		"perFabric":     {Serialization: "perFabric"},
		"none":          {Serialization: "none"},
		"worst":         {Pick: "worst"},
		"400_partial":   {NoCapacity: "400", Shortage: "partial"},
		"404":           {UnknownModel: "404"},
		"200":           {UnknownDetach: "200", DetachInUse: "409"},
	})
	return all
}

// TestFace_conformance lets the agent's client, which was written from the same facts and without sight of this face, do
// everything that it can do, under each policy.
func TestFace_conformance(t *testing.T) {
	for name, p := range policies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fabrictest.Run(t, func(t *testing.T) (fabric.Manager, fabrictest.Control) {
				t.Helper()
				c := hands{facetest.New(t, facetest.Pool, facetest.Options{Policies: p})}
				c.Serve(true, map[string]http.Handler{
					"/id_manager/": c.Faults.Wrap("idm", c.Tokens.Handler()),
					"/":            c.Faults.Wrap("fm", New(c.Core, c.Tokens, c.Config).Handler()),
				})
				m, err := client.New(client.Config{Endpoint: c.Server.URL, Tenant: c.Config.Tenant, Credentials: c.Secret(c.Files())})
				if err != nil {
					t.Fatal(err)
				}
				return m, c
			})
		})
	}
}

func (c hands) Attached(m device.Machine) []string {
	return c.Listed(m, func(d core.Device) string { return d.ResUUID })
}

func (c hands) Fate(f fabrictest.Fate) bool {
	c.T.Helper()
	if f == fabrictest.CredentialsEnded {
		c.Tokens.RevokeAll()
		return true
	}
	if f == fabrictest.Truncated && c.Core.Policies().DetachAnswer == "204" {
		return false // no body, no end of it
	}
	rule, ok := facetest.Fate(f, `{"status":409,"detail":{"code":"E02XXXX","message":"another update is in progress"}}`)
	if ok {
		rule.Face, rule.Path = "fm", "/update$"
		c.Add(rule)
	}
	return ok
}

func (c hands) FailReads(m device.Machine, fail bool) {
	c.T.Helper()
	const name = "reads"
	if !fail {
		c.Faults.Clear(name)
		return
	}
	c.Add(simapi.Fault{Name: name, Face: "fm", Method: "GET", Path: string(m), Action: simapi.ActionStatus, Status: 500})
}
