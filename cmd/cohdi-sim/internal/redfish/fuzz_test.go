// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// FuzzFace: no request brings the service down, in either variant, each answer is JSON, and the chassis stays in order.
func FuzzFace(f *testing.F) {
	f.Add("GET", root+"/", "", "", "")
	f.Add("GET", root+"/CompositionService/ResourceBlocks", "$skip=1&$top=9&$expand=.", "", "")
	f.Add("POST", root+"/SessionService/Sessions", "", "", `{"UserName":"agent","Password":7}`)
	f.Add("PATCH", root+"/Systems/n1", "", `"x"`, `{"Links":{"ResourceBlocks":[{},null,{"@odata.id":"/redfish/v1/CompositionService/ResourceBlocks/a-0"}]}}`)
	f.Add("POST", root+"/Systems/n1/Actions/ComputerSystem.AddResourceBlock", "", "", `{"ResourceBlock":{"@odata.id":"/redfish/v1/CompositionService/ResourceBlocks/a-0"}}`)
	f.Add("POST", root+"/CompositionService/Actions/CompositionService.Compose", "", "", `{"RequestFormat":"Manifest","RequestType":"Apply","Manifest":{"Stanzas":[{"StanzaId":"1","StanzaType":"ComposeSystem","Request":{"@odata.id":"/redfish/v1/Systems/n1"}}]}}`)
	f.Add("PATCH", root+"/CompositionService/ResourceBlocks/a-0", "", "", `{"CompositionStatus":{"Reserved":null}}`)
	f.Fuzz(func(t *testing.T, method, path, query, tag, body string) {
		if !slices.Contains([]string{"GET", "POST", "PATCH", "DELETE"}, method) || !strings.HasPrefix(path, "/") || path == root+"/EventService/SSE" {
			return
		}
		for _, p := range []simapi.RedfishPolicies{{Work: "sync200"}, {Variant: variantZones, Work: "sync204"}, {Forms: "manifest", Work: "sync200"}} {
			c := facetest.New(t, facetest.Pool+"timing: {attachDelay: 0s, detachDelay: 0s}\n", facetest.Options{Policies: simapi.Policies{Redfish: p}})
			face := New(t.Context(), Options{Core: c.Core, Config: c.Config, Faults: c.Faults, Clock: clock.RealClock{}})
			r := &http.Request{
				Method: method, URL: &url.URL{Path: path, RawQuery: query}, Header: http.Header{"If-Match": {tag}},
				Body: httptest.NewRequestWithContext(t.Context(), method, "/", strings.NewReader(body)).Body,
			}
			r.SetBasicAuth(c.Config.Credentials.Username, c.Config.Credentials.Password)
			w := httptest.NewRecorder()
			face.Handler().ServeHTTP(w, r)
			if strings.HasPrefix(w.Header().Get("Content-Type"), "application/json") && !json.Valid(w.Body.Bytes()) {
				t.Errorf("%s %s?%s = %d %s", method, path, query, w.Code, w.Body)
			}
			face.Stop()
			c.Core.Close()
			face.Close()
			if v := c.Core.Violations(); slices.ContainsFunc(v, func(v simapi.Violation) bool { return v.Kind == simapi.Invariant }) {
				t.Errorf("%s %s: the chassis is not in order: %+v", method, path, v)
			}
		}
	})
}
