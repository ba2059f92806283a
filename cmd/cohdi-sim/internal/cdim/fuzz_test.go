// SPDX-License-Identifier: Apache-2.0

package cdim

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
)

// FuzzDecodeProcedures: what is taken has what its dialect wants, and where it is checked an order.
func FuzzDecodeProcedures(f *testing.F) {
	f.Add([]byte(`{"procedures":[{"operationID":1,"operation":"connect","targetCPUID":"c","targetDeviceID":"d","dependencies":[]}]}`), false)
	f.Add([]byte(`{"procedures":[{"operationID":1,"operation":"connect","sourceDeviceID":"c","destinationDeviceID":"d","dependencies":[2]},{"operationID":2,"operation":"boot","targetDeviceID":"x","dependencies":[1]}]}`), true)
	f.Add([]byte(`{"procedures":[null]}`), true)
	f.Fuzz(func(t *testing.T, body []byte, strict bool) {
		for _, dialect := range []string{"oss", dialectProduct} {
			list, err := decodeProcedures(body, dialect, strict)
			if err != nil {
				continue
			}
			for i, p := range list {
				if p.Dependencies == nil || !slices.Contains([]string{opConnect, opDisconnect, opBoot, opShutdown}, p.Operation) {
					t.Errorf("took %+v", p)
				}
				if strict && slices.ContainsFunc(list[:i], func(o procedure) bool { return o.ID == p.ID }) {
					t.Errorf("took operationID %d twice", p.ID)
				}
			}
		}
	})
}

// FuzzFace: no request brings the services down, and each answer is JSON.
func FuzzFace(f *testing.F) {
	f.Add("GET", "/resources", "detail=true", "")
	f.Add("GET", "/layout-apply", "limit=2&offset=1&sortBy=endedAt&orderBy=asc&fields=procedures&status=FAILED&startedAtSince=2026-01-01T00:00:00Z", "")
	f.Add("GET", "/resources/unused", "resourceGroupID=a&resourceGroupID=b", "")
	f.Add("POST", "/layout-apply", "", `{"procedures":[]}`)
	f.Add("PUT", "/layout-apply/0123456789", "action=cancel&rollbackOnCancel=true", "")
	f.Add("PUT", "/resources/x/annotation", "", `{"available":null}`)
	f.Add("PUT", "/devices/x/aggregations", "", `{"action":"connect","destinationDeviceID":"y"}`)
	f.Fuzz(func(t *testing.T, method, path, query, body string) {
		if !slices.Contains([]string{"GET", "POST", "PUT", "DELETE"}, method) || !strings.HasPrefix(path, "/") {
			return
		}
		c := facetest.New(t, facetest.Pool, facetest.Options{})
		face, err := New(t.Context(), Options{Core: c.Core, Faults: c.Faults, Clock: clock.RealClock{}, Dialect: "oss"})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			face.Stop()
			c.Core.Close()
			face.Close()
		}()
		for _, h := range []http.Handler{face.Handler(), face.hardware()} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, &http.Request{
				Method: method, URL: &url.URL{Path: api + path, RawQuery: query}, Body: httptest.NewRequestWithContext(t.Context(), method, "/", strings.NewReader(body)).Body,
			})
			if own := strings.HasPrefix(w.Header().Get("Content-Type"), "application/json"); own && !json.Valid(w.Body.Bytes()) {
				t.Errorf("%s %s?%s = %d %s", method, path, query, w.Code, w.Body)
			}
		}
	})
}
