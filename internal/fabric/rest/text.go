// SPDX-License-Identifier: Apache-2.0

package rest

import (
	"net/url"
	"strings"
)

// LongestText is what of the manager's words is kept, in bytes.
const LongestText = 512

// Tidy makes foreign text fit for one line of a condition. Secrets are hidden before anything is cut, so
// that no part of one is left.
func Tidy(s string, secrets ...string) string {
	s = strings.ToValidUTF8(redact(s, secrets...), "?")
	s = strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }), " ")
	if len(s) > LongestText {
		s = strings.ToValidUTF8(s[:LongestText], "") + "…"
	}
	return s
}

// redact hides secrets that a manager or a proxy may echo.
func redact(s string, secrets ...string) string {
	for _, secret := range secrets {
		for _, form := range []string{secret, url.QueryEscape(secret)} {
			if secret != "" {
				s = strings.ReplaceAll(s, form, "<secret>")
			}
		}
	}
	return s
}
