// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/cohdi/cohdi-agent/internal/metrics"
)

func TestBuildOf(t *testing.T) {
	setting := func(key, value string) debug.BuildSetting { return debug.BuildSetting{Key: key, Value: value} }
	for name, tc := range map[string]struct {
		info debug.BuildInfo
		want metrics.Build
	}{
		"no repository": {debug.BuildInfo{GoVersion: "go1.26"}, metrics.Build{Version: "v1", Revision: "unknown", GoVersion: "go1.26"}},
		"a commit": {
			debug.BuildInfo{GoVersion: "go1.26", Settings: []debug.BuildSetting{setting("vcs.revision", "abc"), setting("vcs.modified", "false")}},
			metrics.Build{Version: "v1", Revision: "abc", GoVersion: "go1.26"},
		},
		"a changed tree": {
			debug.BuildInfo{GoVersion: "go1.26", Settings: []debug.BuildSetting{setting("vcs.modified", "true"), setting("vcs.revision", "abc")}},
			metrics.Build{Version: "v1", Revision: "abc-dirty", GoVersion: "go1.26"},
		},
		"nothing known": {debug.BuildInfo{}, metrics.Build{Version: "v1", Revision: "unknown", GoVersion: "unknown"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := buildOf("v1", &tc.info); got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

// TestVersion: the command says the same as the metric, and knows what it was compiled with.
func TestVersion(t *testing.T) {
	cmd := root()
	cmd.SetArgs([]string{"version"})
	var out bytes.Buffer
	cmd.SetOut(&out)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	b := build()
	for _, part := range []string{b.Version, b.Revision, b.GoVersion, runtime.Version()} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("%q does not say %q", out.String(), part)
		}
	}
}
