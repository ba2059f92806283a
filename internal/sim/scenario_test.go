// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var (
	rewrite = flag.Bool("rewrite", false, "write the traces of the scenarios anew, for review as a diff")
	untold  = flag.Bool("no-traces", false, "only what breaks an invariant fails a scenario, not another trace")
)

// tally adds up what runs did, from several goroutines.
type tally struct {
	mu  sync.Mutex
	sum Counts
}

func (c *tally) add(o Counts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sum.add(o)
}

// toldBy is what the scenarios that were played did.
var toldBy = &tally{sum: Counts{Faults: map[string]int{}, Rules: map[string]int{}, States: map[string]int{}}}

// TestScenarios plays testdata/*.txt: commands, a line of dashes, the trace that they give. Draws always
// fall the shortest way there, so that a trace shows what the commands do and nothing else.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("there are no scenarios", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			input, want, _ := strings.Cut(string(text), "----\n")
			script, err := ParseScript(input)
			if err != nil {
				t.Fatal(err)
			}
			res := play(t, script, Options{}, false)
			toldBy.add(res.Counts)
			if res.Violation != nil {
				t.Errorf("scenario %s: %v", strings.TrimSuffix(filepath.Base(file), ".txt"), res.Violation)
			}
			if *untold {
				return
			}
			got := strings.Join(res.Trace, "\n") + "\n"
			if *rewrite {
				if err := os.WriteFile(file, []byte(input+"----\n"+got), 0o600); err != nil {
					t.Fatal(err)
				}
				return
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("trace (-want +got), -rewrite writes it anew:\n%s", d)
			}
		})
	}
}
