// SPDX-License-Identifier: Apache-2.0

package idm

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const path = "/id_manager/realms/my%20realm/protocol/openid-connect/token"

func settings() *config.Config {
	return &config.Config{
		Realm: "my realm", TokenLifetime: simapi.Duration(time.Minute),
		Credentials: config.Credentials{Username: "u", Password: "p&w=d+%41 x", ClientID: "cdi", ClientSecret: "s& =+%25 t"},
	}
}

func form(changes ...string) string {
	f := url.Values{
		"client_id": {"cdi"}, "client_secret": {"s& =+%25 t"}, "username": {"u"}, "password": {"p&w=d+%41 x"},
		"grant_type": {"password"}, "scope": {"openid"}, "response_type": {"id_token token"},
	}
	for i := 0; i < len(changes); i += 2 {
		f.Set(changes[i], changes[i+1])
	}
	return f.Encode()
}

func login(t *testing.T, m *Manager, method, path, contentType, body string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
	r.Header.Set("Content-Type", contentType)
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, r)
	return w
}

const formType = "application/x-www-form-urlencoded"

func TestToken(t *testing.T) {
	tests := []struct {
		name, method, path, contentType, body string
		status                                int
		want                                  string
	}{
		{"good", "POST", path, formType, form(), 200, `"token_type":"Bearer"`},
		{"charset", "POST", path, formType + "; charset=utf-8", form(), 200, `"session_state"`},
		{"field named response, a literal space", "POST", path, formType, strings.Replace(form("response_type", "x"), "response_type=x", "response=id_token token", 1), 200, `"scope"`},
		{"not encoded", "POST", path, formType, "grant_type=password&client_id=cdi&client_secret=s& =+%25 t&username=u&password=p&w=d+%41 x", 401, "invalid_client"},
		{"wrong client secret", "POST", path, formType, form("client_secret", "x"), 401, "invalid_client"},
		{"wrong password", "POST", path, formType, form("password", "x"), 401, "invalid_grant"},
		{"wrong grant", "POST", path, formType, form("grant_type", "refresh_token"), 400, "unsupported_grant_type"},
		{"no form", "POST", path, "application/json", "{}", 415, "invalid_request"},
		{"unknown realm", "POST", "/id_manager/realms/x/protocol/openid-connect/token", formType, form(), 404, "error"},
		{"GET", "GET", path, formType, "", 405, ""},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			m := New(settings(), clocktesting.NewFakePassiveClock(time.Unix(1000, 0)))
			w := login(t, m, tc.method, tc.path, tc.contentType, tc.body)
			if w.Code != tc.status || !strings.Contains(w.Body.String(), tc.want) {
				t.Errorf("answer %d %s, want %d with %s", w.Code, w.Body, tc.status, tc.want)
			}
			if got := m.Logins(); (got == 1) != (tc.status == 200) {
				t.Errorf("%d logins counted", got)
			}
		})
	}
}

func TestCheck(t *testing.T) {
	clk := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	m := New(settings(), clk)
	get := func() string {
		var out struct {
			Token string `json:"access_token"`
		}
		if err := json.Unmarshal(login(t, m, "POST", path, formType, form()).Body.Bytes(), &out); err != nil {
			t.Fatal(err)
		}
		return out.Token
	}
	check := func(what, header string, want error) {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.Header.Set("Authorization", header)
		if err := m.Check(r); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	token := get()
	if parts := strings.Split(token, "."); len(parts) != 3 {
		t.Errorf("token has %d parts", len(parts))
	}
	check("good", "Bearer "+token, nil)
	check("no header", "", ErrNoToken)
	check("other scheme", "Basic "+token, ErrNoToken)
	check("forged", "Bearer "+token[:len(token)-2]+"xx", ErrBadToken)
	check("no token", "Bearer x", ErrBadToken)
	clk.SetTime(time.Unix(1060, 0))
	check("expired", "Bearer "+token, ErrBadToken)
	token = get()
	m.RevokeAll()
	check("revoked", "Bearer "+token, ErrBadToken)
	m.SetLifetime(time.Hour)
	token = get()
	clk.SetTime(time.Unix(1060+3599, 0))
	check("longer lifetime", "Bearer "+token, nil)
}

func FuzzCheckLogin(f *testing.F) {
	f.Add(form())
	f.Add("grant_type=password&client_id=cdi&client_secret=s& =+%25 t")
	f.Add("%zz=;&")
	f.Fuzz(func(t *testing.T, body string) {
		want := settings().Credentials
		status, _, _ := check(body, want, []string{"password"})
		if status != http.StatusOK {
			return
		}
		form, err := url.ParseQuery(body)
		if err != nil || form.Get("password") != want.Password || form.Get("client_secret") != want.ClientSecret {
			t.Errorf("let in with %q", body)
		}
	})
}

func FuzzVerify(f *testing.F) {
	key := []byte("key")
	f.Add(sign(key, claims{Expires: 1}))
	f.Add("..")
	f.Fuzz(func(t *testing.T, token string) {
		if c, ok := verify(key, token); ok && sign(key, c) == "" {
			t.Error("verified a token that cannot be made")
		}
	})
}
