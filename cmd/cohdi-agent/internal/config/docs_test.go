// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestDocs: docs/configuration.md has a row for each field that the parser knows, and for no other.
func TestDocs(t *testing.T) {
	// The parser names its fields when it is given one that it does not know, at each level.
	_, err := Parse([]byte("x: 1\nlogging: {x: 1}\ntimings: {x: 1}\nfabrics:\n- x: 1\n  cdim: {x: 1}\n  redfish: {x: 1}\n  sunfish: {x: 1}\n  models:\n  - x: 1\n"), "c.yaml")
	if err == nil {
		t.Fatal("unknown fields are taken")
	}
	var known []string
	for _, m := range regexp.MustCompile(`(?m)^c\.yaml:\d+: (\S*?)x: is not a field; fields here are (.*)$`).FindAllStringSubmatch(err.Error(), -1) {
		above := strings.ReplaceAll(m[1], "[0]", "[]")
		for name := range strings.SplitSeq(m[2], ", ") {
			if name != "logging" && name != "timings" && name != "cdim" && name != "redfish" && name != "sunfish" { // their own fields have rows
				known = append(known, above+name)
			}
		}
	}
	page, err := os.ReadFile("../../../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(string(page), -1) {
		told = append(told, m[1])
	}
	slices.Sort(known)
	slices.Sort(told)
	if diff := cmp.Diff(known, told); diff != "" {
		t.Errorf("fields (-parser +docs/configuration.md):\n%s", diff)
	}
}

// TestDocsRanges: the row of a duration or a number says what is allowed.
func TestDocsRanges(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|.*$").FindAllStringSubmatch(string(page), -1) {
		rows[m[1]] = m[0]
	}
	// The parser says the range of each to whom gives it something else.
	text := map[string]string{"timings.": "timings:\n", "fabrics[].": "fabrics:\n- id: x\n", "fabrics[].models[].": "  models:\n  - name: x\n"}
	indent := map[string]string{"timings.": "  ", "fabrics[].": "  ", "fabrics[].models[].": "    "}
	for name := range rows {
		at := strings.LastIndexByte(name, '.') + 1
		if key := name[at:]; text[name[:at]] != "" && key != "id" && key != "name" && key != "models" {
			text[name[:at]] += indent[name[:at]] + key + ": [not, one]\n"
		}
	}
	_, err = Parse([]byte(head+text["timings."]+text["fabrics[]."]+text["fabrics[].models[]."]), "c.yaml")
	if err == nil {
		t.Fatal("nonsense is taken")
	}
	ranges := regexp.MustCompile(`(?m)^c\.yaml:\d+: (\S+): .*a (?:duration|whole number) from (\S+ to [^,\s]+)`).FindAllStringSubmatch(err.Error(), -1)
	if len(ranges) < 15 {
		t.Errorf("the parser names %d ranges of\n%v", len(ranges), err)
	}
	for _, m := range ranges {
		if row := rows[strings.ReplaceAll(m[1], "[0]", "[]")]; !strings.Contains(row, m[2]) {
			t.Errorf("%s may be from %s, and its row does not say so: %q", m[1], m[2], row)
		}
	}
}
