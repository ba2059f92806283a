// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write docs/policy.md anew")

// TestPolicy: docs/policy.md shows the tables as they are.
func TestPolicy(t *testing.T) {
	var b strings.Builder
	for _, part := range []struct {
		title string
		rules []unitRule
	}{{"Nobody has the unit", freeRules()}, {"A claim has it", servingRules()}, {"A node has it, for no claim", leasedRules()}} {
		fmt.Fprintf(&b, "\n### %s\n\n| situation | the leader | why |\n| --- | --- | --- |\n", part.title)
		for _, r := range part.rules {
			sentence(t, r.name, r.why)
			fmt.Fprintf(&b, "| %s | %s | %s |\n", r.name, r.does, r.why)
		}
	}
	b.WriteString("\n### A node gets no more units of a model\n\n| reason | a claim that was allocated before | why |\n| --- | --- | --- |\n")
	for _, r := range nodeRules() {
		sentence(t, r.reason, r.why)
		then := "is served all the same"
		if r.refuses {
			then = "is refused"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", r.reason, then, r.why)
	}
	for _, part := range []struct {
		title string
		rules []taintRule
	}{{"What the entry `<unit>` says", onCallRules()}, {"What the entry `<unit>-ready` says", readyRules()}} {
		fmt.Fprintf(&b, "\n### %s\n\n| the unit is | taint | why |\n| --- | --- | --- |\n", part.title)
		for _, r := range part.rules {
			sentence(t, r.state, r.why)
			fmt.Fprintf(&b, "| %s | %s | %s |\n", r.state, taintWords(r), r.why)
		}
	}
	section(t, "pool", b.String())
}

func taintWords(r taintRule) string {
	switch {
	case r.effect == NoTaint:
		return "none"
	case r.word == itsReason:
		return fmt.Sprintf("`%s`, %s", r.effect, r.word)
	}
	return fmt.Sprintf("`%s`, `%s`", r.effect, r.word)
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
