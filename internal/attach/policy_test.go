// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

var update = flag.Bool("update", false, "write docs/policy.md anew")

// TestPolicy: docs/policy.md shows the tables as they are, each row with the actions that the situations of
// the other tests lead to.
func TestPolicy(t *testing.T) {
	var b strings.Builder
	for _, p := range device.Phases() {
		fmt.Fprintf(&b, "\n### %s\n\n| situation | the holder | why |\n| --- | --- | --- |\n", p)
		for _, r := range rulesOf(p) {
			sentence(t, string(p)+", "+r.name, r.why)
			fmt.Fprintf(&b, "| %s | %s | %s |\n", r.name, actions(p, r.name), r.why)
		}
	}
	b.WriteString("\n### Whose a GPU on the bus is\n\n| situation | it is | why |\n| --- | --- | --- |\n")
	for _, r := range placesOf() {
		sentence(t, r.name, r.why)
		fmt.Fprintf(&b, "| %s | %s | %s |\n", r.name, r.owner, r.why)
	}
	b.WriteString("\n### How a GPU is\n\n| sign | health | why |\n| --- | --- | --- |\n")
	for _, r := range healthRules() {
		sentence(t, r.name, r.why)
		fmt.Fprintf(&b, "| %s | %s | %s |\n", r.name, r.health, r.why)
	}
	section(t, "attach", b.String())
}

func actions(p device.Phase, rule string) string {
	var all []string
	for _, k := range Kinds() {
		if slices.ContainsFunc(table[p], func(r row) bool { return r.rule == rule && r.want == k }) {
			all = append(all, "`"+string(k)+"`")
		}
	}
	slices.Reverse(all) // to wait comes last
	return strings.Join(all, " or ")
}

// section compares the part of docs/policy.md between the package's markers with what it should be, and with
// -update writes it.
func section(t *testing.T, name, want string) {
	t.Helper()
	const page = "../../docs/policy.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- "+name+": begin -->\n", "<!-- "+name+": end -->\n"
	before, rest, ok := strings.Cut(string(text), begin)
	got, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no part between %q and %q", page, begin, end)
	}
	if got == want {
		return
	}
	if !*update {
		t.Fatalf("%s is out of date; run go test -p 1 ./internal/attach ./internal/pool -run Policy -update (-want +got):\n%s", page, cmp.Diff(want, got))
	}
	if err := os.WriteFile(page, []byte(before+begin+want+end+after), 0o600); err != nil {
		t.Fatal(err)
	}
}

// sentence checks that a row gives one reason.
func sentence(t *testing.T, row, why string) {
	t.Helper()
	if !strings.HasSuffix(why, ".") || strings.Contains(why, ". ") || strings.Contains(why, "|") {
		t.Errorf("%s: %q is not one sentence", row, why)
	}
}

// TestExcludes: what may run side by side on one machine.
func TestExcludes(t *testing.T) {
	const attaches, detaches, fails = device.Attaching, device.Releasing, device.Failed
	for _, tc := range []struct {
		other            Kind
		phase            device.Phase
		serial, parallel bool
	}{
		{SendAttach, device.Assigned, true, false},
		{StoreIntent, attaches, true, false},
		{SendAttach, attaches, true, false},
		{SendAttach, detaches, true, true},
		{SendAttach, fails, true, true},
		{SendDetach, attaches, true, true},
		{SendDetach, detaches, true, false},
		{SendDetach, fails, true, true},
		{Rescan, attaches, true, true},
		{RescanAll, detaches, true, true},
		{ListFabric, attaches, false, false},
		{Remove, detaches, false, false},
	} {
		for parallel, want := range map[bool]bool{false: tc.serial, true: tc.parallel} {
			s := Settings{Parallel: parallel}
			if got := s.Excludes(tc.other, tc.phase); got != want {
				t.Errorf("%s beside a unit in phase %s, parallel %v: excluded %v, want %v", tc.other, tc.phase, parallel, got, want)
			}
		}
	}
}

// TestJoins: what may be one call with what was decided at the same moment.
func TestJoins(t *testing.T) {
	for _, tc := range []struct {
		other Kind
		phase device.Phase
		n     int
		want  bool
	}{
		{SendDetach, device.Releasing, 1, true},
		{SendDetach, device.Releasing, 2, true},
		{SendDetach, device.Releasing, 3, false},
		{SendDetach, device.Assigned, 1, false},
		{SendDetach, device.Attaching, 1, false},
		{SendDetach, device.Failed, 1, false},
		{SendAttach, device.Releasing, 1, false},
		{SendAttach, device.Attaching, 1, false},
		{StoreIntent, device.Attaching, 1, false},
		{Rescan, device.Releasing, 1, false},
	} {
		for batch, want := range map[int]bool{0: false, 1: false, 3: tc.want} {
			s := Settings{Batch: batch}
			if got := s.Joins(tc.other, tc.phase, tc.n); got != want {
				t.Errorf("%s of %d beside a unit in phase %s, %d in a call: joins %v, want %v", tc.other, tc.n, tc.phase, batch, got, want)
			}
		}
	}
}
