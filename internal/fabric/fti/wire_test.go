// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func jwt(payload string) string {
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".c2ln"
}

func TestDecodeToken(t *testing.T) {
	tests := []struct {
		name, body string
		life       time.Duration
		err        string
	}{
		{name: "expires_in", body: `{"access_token":"a","expires_in":300}`, life: 300 * time.Second},
		{name: "as text", body: `{"access_token":"a","expires_in":"300"}`, life: 300 * time.Second},
		{name: "as float", body: `{"access_token":"a","expires_in":300.5}`, life: 300500 * time.Millisecond},
		{name: "only inside", body: `{"access_token":"` + jwt(`{"exp":1000,"iat":400}`) + `"}`, life: 600 * time.Second},
		{name: "the shorter counts", body: `{"access_token":"` + jwt(`{"exp":1000,"iat":900}`) + `","expires_in":300}`, life: 100 * time.Second},
		{name: "ended by the manager's clock, but not by ours", body: `{"access_token":"` + jwt(`{"exp":1000000000}`) + `","expires_in":300}`, life: 300 * time.Second},
		{name: "says nothing", body: `{"access_token":"opaque"}`, life: defaultLifetime},
		{name: "negative", body: `{"access_token":"opaque","expires_in":-5}`, life: defaultLifetime},
		{name: "beyond reason", body: `{"access_token":"opaque","expires_in":1e300}`, life: defaultLifetime},
		{name: "no token", body: `{"expires_in":300}`, err: "no access_token"},
		{name: "HTML", body: `<html>`, err: "not the JSON"},
		{name: "token that breaks the header", body: `{"access_token":"a\r\nb"}`, err: "no header may hold"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			value, life, err := decodeToken([]byte(tt.body))
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error = %v, want one that contains %q", err, tt.err)
				}
				return
			}
			if err != nil || value == "" || life != tt.life {
				t.Errorf("token %q lives %s, %v, want %s", value, life, err, tt.life)
			}
		})
	}
}

func FuzzDecodeRefusal(f *testing.F) {
	f.Add([]byte(`{"status":404,"detail":{"code":"E1","message":"hush"}}`))
	f.Add([]byte(`{"error":"invalid_grant","error_description":"hush"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		code, message := decodeRefusal(body, "hush")
		for _, s := range []string{code, message} {
			if len(s) > LongestText+len("…") || !utf8.ValidString(s) || strings.ContainsAny(s, "\n\r\x00") || strings.Contains(s, "hush") {
				t.Errorf("%q of %q", s, body)
			}
		}
	})
}

func FuzzDecodeToken(f *testing.F) {
	f.Add([]byte(`{"access_token":"` + jwt(`{"exp":1000,"iat":400}`) + `","expires_in":300}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		value, life, err := decodeToken(body)
		if err == nil && (value == "" || life <= 0 || strings.ContainsAny(value, "\r\n")) {
			t.Errorf("token %q lives %s of %q", value, life, body)
		}
	})
}

func FuzzText(f *testing.F) {
	for _, s := range []string{`"00"`, `0`, `null`, `true`, `{"a":1}`, `"\ud800"`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var got Text
		if err := json.Unmarshal(body, &got); err == nil {
			if health, said := Health(got); health != device.HealthOK && said == "" {
				t.Errorf("health %s of %q without words", health, body)
			}
		}
	})
}
