// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
	client "github.com/cohdi/cohdi-agent/internal/fabric/fm"
)

var samples = facetest.NewSamples()

// TestFace_shapes compares what the agent's client asks, and what the face and the id_manager answer, with samples.
func TestFace_shapes(t *testing.T) {
	same := func(sample string, message []byte, known map[string]string) {
		t.Helper()
		samples.Same(t, sample, message, known)
	}
	samples.Find(t, "samples")
	ctx := t.Context()
	c := hands{facetest.New(t, facetest.Pool, facetest.Options{})}
	face, login := &facetest.Record{}, &facetest.Record{}
	c.Serve(true, map[string]http.Handler{
		"/id_manager/": login.Wrap(c.Tokens.Handler()),
		"/":            face.Wrap(New(c.Core, c.Tokens, c.Config).Handler()),
	})
	dir := c.Secret(c.Files())
	m, err := client.New(client.Config{Endpoint: c.Server.URL, Tenant: c.Config.Tenant, Credentials: dir})
	if err != nil {
		t.Fatal(err)
	}
	if _, err = m.Free(ctx, []string{fabrictest.ModelA}); err != nil {
		t.Fatal(err)
	}
	free := face.Last("GET", "/available-reserved-resources")
	same("fm-available-200.json", free.Answer, nil)
	_, query, _ := strings.Cut(free.URI, "?")
	same("fm-available-query.json", facetest.Fields(t, query), nil)
	token := login.Last("POST", "/token")
	same("idm-token-request-cro.form.json", facetest.Fields(t, string(token.Request)), nil)
	same("idm-token-200.json", token.Answer, nil)
	if _, err = m.Machines(ctx); err != nil {
		t.Fatal(err)
	}
	same("fm-machines-list-200.json", face.Last("GET", `/machines\?`).Answer, nil)

	op, err := m.Attach(ctx, fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA})
	if err != nil || len(op.Devices) != 1 {
		t.Fatalf("attach: %+v, %v", op, err)
	}
	attach := face.Last("PATCH", "/update")
	same("fm-attach-request.json", attach.Request, nil)
	same("fm-attach-200.json", attach.Answer, nil)
	list := func() []byte {
		t.Helper()
		if _, failed := m.ListAttached(ctx, []device.Machine{fabrictest.MachineOne}); len(failed) > 0 {
			t.Fatal(failed)
		}
		return face.Last("GET", "/machines/").Answer
	}
	same("fm-machine-200-two-gpus.json", list(), nil)
	health := ""
	if err = c.Core.ChangeDevice(op.Devices[0].ID, simapi.DeviceChange{OpStatus: &health}); err != nil {
		t.Fatal(err)
	}
	same("fm-machine-200-warning-critical-unknown.json", list(), nil)
	if _, err = m.Detach(ctx, fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA, Device: op.Devices[0].ID}); err != nil {
		t.Fatal(err)
	}
	detach := face.Last("DELETE", "/update")
	same("fm-detach-request.json", detach.Request, nil)
	same("fm-detach-200.json", detach.Answer, nil)
	same("fm-machine-200-empty.json", list(), nil)
	// No answer of these is a success.
	for range 3 {
		_, err = m.Attach(ctx, fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelB})
	}
	if err == nil {
		t.Error("there is one of the model, and three were attached")
	}
	same("fm-error-404-mock-exhausted.json", face.Last("PATCH", "/update").Answer, nil)
	if _, failed := m.ListAttached(ctx, []device.Machine{fabrictest.MachineUnknown}); len(failed) == 0 {
		t.Error("an unknown machine is listed")
	}
	same("fm-error-404.json", face.Last("GET", "/machines/").Answer, nil)
	c.Tokens.RevokeAll()
	if err = m.Health(ctx); err != nil { // it logs in again
		t.Error(err)
	}
	same("fm-error-401.json", face.LastOf(http.StatusUnauthorized).Answer, nil)
	same("idm-token-401.json", refusedLogin(t, c), nil)
	if err = c.Core.SetPolicies(simapi.Policies{Serialization: "busy409"}); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	defer close(over)
	if err = c.Core.Exclusively(ctx, "n1", func() (<-chan struct{}, error) { return over, nil }); err != nil {
		t.Fatal(err)
	}
	if _, err = m.Attach(ctx, fabric.Intent{Machine: fabrictest.MachineOne, Model: fabrictest.ModelA}); err == nil {
		t.Error("a busy machine takes an attach")
	}
	same("fm-error-409-busy.json", face.LastOf(http.StatusConflict).Answer, nil)
	const twice, client = "another sample is of this shape", "the agent's client has to understand it, and no policy makes it"
	samples.All(t, "fm-", map[string]string{
		"fm-attach-200-critical.json": twice, "fm-attach-200-no-serial.json": twice, "fm-attach-200-partial.json": twice,
		"fm-attach-200-two.json": twice, "fm-attach-200-warning.json": twice, "fm-attach-200-wrong-model.json": twice,
		"fm-attach-request-two.json": twice, "fm-available-200-over-limit.json": twice, "fm-available-200-zero.json": twice,
		"fm-machine-200-duplicate-serial.json": twice, "fm-machine-200-no-machines.json": client,
		"fm-machines-list-200-null-fabric.json": client, "fm-error-500-object-message.json": client,
	})
	samples.All(t, "idm-", map[string]string{
		"idm-token-request-cdd.form.json": "another client's form", "idm-token-200-bad-jwt.json": client, "idm-token-200-expired.json": twice,
		"idm-token-400.json": twice,
	})
}

// refusedLogin is what the id_manager says to a wrong password.
func refusedLogin(t *testing.T, c hands) []byte {
	t.Helper()
	login := c.Config.Credentials
	form := url.Values{
		"grant_type": {"password"}, "client_id": {login.ClientID}, "client_secret": {login.ClientSecret}, "username": {login.Username}, "password": {"another"},
	}
	r := httptest.NewRequestWithContext(t.Context(), "POST", "/id_manager/realms/"+url.PathEscape(c.Config.Realm)+"/protocol/openid-connect/token", strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	w := httptest.NewRecorder()
	c.Tokens.Handler().ServeHTTP(w, r)
	if w.Code != http.StatusUnauthorized {
		t.Errorf("a wrong password is answered by %d", w.Code)
	}
	return w.Body.Bytes()
}
