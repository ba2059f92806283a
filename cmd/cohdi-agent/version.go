// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime/debug"

	"github.com/cohdi/cohdi-agent/internal/metrics"
)

// version is set when the program is linked: make image and the Dockerfile do that.
var version = "dev"

// unknown stands for what this program was not told of itself.
const unknown = "unknown"

// build is what this program knows of itself.
func build() metrics.Build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return buildOf(version, info)
}

// buildOf reads what the compiler wrote into the program. It knows no revision where the source was compiled
// outside its repository, as in a container build.
func buildOf(version string, info *debug.BuildInfo) metrics.Build {
	b := metrics.Build{Version: version, Revision: unknown, GoVersion: info.GoVersion}
	if b.GoVersion == "" {
		b.GoVersion = unknown
	}
	dirty := ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			b.Revision = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-dirty"
		}
	}
	if b.Revision != unknown {
		b.Revision += dirty
	}
	return b
}

// told prints it for people.
func told(b metrics.Build) string {
	return fmt.Sprintf("cohdi-agent %s (revision %s, %s)", b.Version, b.Revision, b.GoVersion)
}
