// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
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

// TestVariantsApply: what the patches change is still there.
func TestVariantsApply(t *testing.T) {
	root := filepath.Join("..", "..")
	files, err := filepath.Glob(filepath.Join(root, dir, "*.patch"))
	if err != nil || len(files) == 0 {
		t.Fatal("there are no variants", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		p, err := parsePatch(string(text))
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
		for name, hunks := range p.files {
			source, err := os.ReadFile(filepath.Join(root, name))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := apply(string(source), hunks); err != nil {
				t.Errorf("%s: %s: %v", filepath.Base(file), name, err)
			}
		}
	}
}
