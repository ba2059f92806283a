// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cohdi/cohdi-agent/internal/device"
)

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
