// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestPatch(t *testing.T) {
	const text = "what is broken\n--- a/x.go\n+++ b/x.go\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"
	p, err := parsePatch(text)
	if err != nil {
		t.Fatal(err)
	}
	got, err := apply("0\na\nb\nc\nd\n", p.files["x.go"])
	if err != nil || got != "0\na\nB\nc\nd\n" || p.what != "what is broken" {
		t.Errorf("got %q of %q, %v", got, p.what, err)
	}
	for _, source := range []string{"a\nx\nc\n", "a\nb\nc\na\nb\nc\n"} {
		if got, err := apply(source, p.files["x.go"]); err == nil || !strings.Contains(err.Error(), "does not apply") {
			t.Errorf("apply to %q: %q, %v; want an error", source, got, err)
		}
	}
	for _, bad := range []string{"", "what\n", "what\n--- a/x\n+++ b/x\n a\n"} {
		if _, err := parsePatch(bad); err == nil {
			t.Errorf("parse %q: no error", bad)
		}
	}
}
