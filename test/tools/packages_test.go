// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestPresent(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("no program"), 0o755); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(dir, "missing")
	tests := map[string]struct {
		pkg  debianPackage
		want bool
	}{
		"none of its files":        {pkg: debianPackage{files: []string{missing}}},
		"one of its files":         {pkg: debianPackage{files: []string{missing, text}}, want: true},
		"not a program":            {pkg: debianPackage{files: []string{text}, static: true}},
		"a program with a loader":  {pkg: debianPackage{files: []string{"/bin/sh"}, static: true}},
		"a program without loader": {pkg: debianPackage{files: []string{staticProgram(t)}, static: true}, want: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := tc.pkg.present(); got != tc.want {
				t.Errorf("present: got %v, want %v", got, tc.want)
			}
		})
	}
}

// staticProgram is the Go compiler, which is always here and never linked against the C library.
func staticProgram(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("/usr/local/go/pkg/tool/*/compile")
	if err != nil || len(files) == 0 {
		t.Skip("the Go distribution is not below /usr/local/go")
	}
	return files[0]
}
