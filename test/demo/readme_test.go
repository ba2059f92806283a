// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// root is where the repository is, seen from this package.
const root = "../.."

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// The README sends people to files and make targets; they must be there.
func TestReadme_leads_somewhere(t *testing.T) {
	readme := read(t, "README.md")
	targets := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z0-9-]+):`).FindAllStringSubmatch(read(t, "Makefile"), -1) {
		targets[m[1]] = true
	}
	asked := regexp.MustCompile("[`\\n]make ([a-z][a-z0-9-]*)").FindAllStringSubmatch(readme, -1)
	if len(asked) < 5 {
		t.Fatalf("only %d make targets found in the README: the search is wrong", len(asked))
	}
	for _, m := range asked {
		if !targets[m[1]] {
			t.Errorf("README.md says make %s, which the Makefile does not have", m[1])
		}
	}
	named := regexp.MustCompile(`\]\(([a-zA-Z][^):#]*)\)|[^\w/]((?:deploy|docs|cmd|internal|test)/[\w./-]*\w)`).FindAllStringSubmatch(readme, -1)
	if len(named) < 10 {
		t.Fatalf("only %d files found in the README: the search is wrong", len(named))
	}
	for _, m := range named {
		if _, err := os.Stat(filepath.Join(root, m[1]+m[2])); err != nil {
			t.Errorf("README.md leads to %s: %v", m[1]+m[2], err)
		}
	}
	for _, m := range regexp.MustCompile(`\]\(#([a-z-]+)\)`).FindAllStringSubmatch(readme, -1) {
		heading := "\n## " + strings.ReplaceAll(m[1], "-", " ")
		if !strings.Contains(strings.ToLower(readme), strings.ToLower(heading)) {
			t.Errorf("README.md has no heading for #%s", m[1])
		}
	}
}

// Names in the README that are API are those of the code.
func TestReadme_names(t *testing.T) {
	known := []string{
		device.LabelFabric, device.LabelNode, device.LabelPhase, device.LabelIdle, device.Model("<model>").AttachableLabel(),
		device.ConditionAttached, device.ConditionAttachFailed, device.AnnotationMachine, device.LeaseNamespace, device.AgentNamespace,
	}
	readme := read(t, "README.md")
	for _, name := range known {
		if !strings.Contains(readme, name) {
			t.Errorf("README.md does not speak of %s", name)
		}
	}
	for _, p := range device.Phases() {
		if !strings.Contains(readme, "| `"+string(p)+"` |") {
			t.Errorf("README.md does not explain the phase %s", p)
		}
	}
	metrics := read(t, "internal/metrics/metrics.go")
	for _, m := range regexp.MustCompile("`cohdi_agent_([a-z_]+)`").FindAllStringSubmatch(readme, -1) {
		if !strings.Contains(metrics, `"`+m[1]+`"`) {
			t.Errorf("README.md explains the metric cohdi_agent_%s, which there is not", m[1])
		}
	}
	for what, is := range map[string]struct{ file, pattern, prefix string }{
		"metric": {"internal/metrics/metrics.go", `(?:(?:gauge|counter|histogram)\(|Name: )"([a-z_]+)"`, "cohdi_agent_"},
		"event":  {"internal/nodestatus/events.go", `(?m)^\tReason\w+ += "(\w+)"$`, ""},
	} {
		all := regexp.MustCompile(is.pattern).FindAllStringSubmatch(read(t, is.file), -1)
		if len(all) < 10 {
			t.Fatalf("only %d names of %ss found in %s: the search is wrong", len(all), what, is.file)
		}
		for _, m := range all {
			if !strings.Contains(readme, "`"+is.prefix+m[1]+"`") {
				t.Errorf("README.md does not explain the %s %s%s", what, is.prefix, m[1])
			}
		}
	}
}
