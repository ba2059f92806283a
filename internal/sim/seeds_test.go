// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"flag"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

var (
	seeds    = flag.Int("seeds", fewSeeds, "how many seeds TestSeeds plays")
	from     = flag.Uint64("from", 1, "the first seed")
	failures = flag.Int("failures", 3, "after how many failing seeds TestSeeds stops")
	noShrink = flag.Bool("no-shrink", false, "print a failing seed as it is")
)

// TestSeeds plays random scripts. A seed that fails is shrunk and printed as a script with its trace.
func TestSeeds(t *testing.T) {
	var (
		mu    sync.Mutex
		total = Counts{Faults: map[string]int{}, Rules: map[string]int{}, States: map[string]int{}}
		next  = *from
		bad   int
		done  int
	)
	t.Run("play", func(t *testing.T) {
		for w := range runtime.GOMAXPROCS(0) {
			t.Run(fmt.Sprint(w), func(t *testing.T) {
				t.Parallel()
				for {
					mu.Lock()
					seed := next
					next++
					stop := seed >= *from+uint64(*seeds) || bad >= *failures
					mu.Unlock()
					if stop {
						return
					}
					res := play(t, RandomScript(seed), Options{}, true)
					mu.Lock()
					total.add(res.Counts)
					done++
					if res.Violation != nil {
						bad++
					}
					mu.Unlock()
					if res.Violation != nil {
						tell(t, seed, res.Violation)
					}
				}
			})
		}
	})
	t.Log(summary(done, total))
}

func (c *Counts) add(o Counts) {
	c.Steps += o.Steps
	c.Calls += o.Calls
	c.Jobs += o.Jobs
	c.Parts += o.Parts
	c.Pods += o.Pods
	c.Served += o.Served
	for k, n := range o.Faults {
		c.Faults[k] += n
	}
	for k, n := range o.Rules {
		c.Rules[k] += n
	}
	for k, n := range o.States {
		c.States[k] += n
	}
}

func summary(seeds int, c Counts) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d seeds, %d steps, %d calls, %d Pods, %d of them ran, %d devices were detached by %d jobs of several\nfaults by kind:",
		seeds, c.Steps, c.Calls, c.Pods, c.Served, c.Parts, c.Jobs)
	for _, k := range slices.Sorted(maps.Keys(c.Faults)) {
		fmt.Fprintf(&b, "\n  %-26s %d", k, c.Faults[k])
	}
	var told, never []string
	all := rules()
	for _, r := range all {
		switch {
		case c.Rules[r] > 0:
		case toldBy.sum.Rules[r] > 0:
			told = append(told, r)
		default:
			never = append(never, r)
		}
	}
	fmt.Fprintf(&b, "\nstates in which a device lease was written: %d", len(c.States))
	fmt.Fprintf(&b, "\nrows of the policies that applied: %d of %d", len(all)-len(told)-len(never), len(all))
	for _, part := range []struct {
		what string
		rows []string
	}{{"only in scenarios", told}, {"never", never}} {
		if len(part.rows) > 0 {
			fmt.Fprintf(&b, "\n%s: %d\n  %s", part.what, len(part.rows), strings.Join(part.rows, "\n  "))
		}
	}
	return b.String()
}

// rules are the rows of both policies.
func rules() []string {
	var all []string
	for _, p := range device.Phases() {
		for _, r := range attach.Rules(p) {
			all = append(all, "attach: "+string(p)+": "+r)
		}
	}
	for _, r := range pool.Rules() {
		all = append(all, "pool: "+r)
	}
	return all
}

// tell prints the smallest script that breaks the same invariant.
func tell(t *testing.T, seed uint64, v *Violation) {
	t.Helper()
	script := RandomScript(seed)
	if !*noShrink {
		script = Shrink(script, func(s Script) bool {
			res := play(t, s, Options{}, true)
			return res.Violation != nil && res.Violation.Rule == v.Rule
		})
	}
	res := play(t, script, Options{Verbose: *noShrink}, true)
	t.Errorf("seed %d: %v\nit is enough to\n%s----\n%s", seed, v, script, strings.Join(res.Trace, "\n"))
}

// TestSameSeedSameTrace plays seeds twice: not a byte of what happened may differ.
func TestSameSeedSameTrace(t *testing.T) {
	for seed := *from; seed < *from+8; seed++ {
		first := play(t, RandomScript(seed), Options{Verbose: true}, true)
		again := play(t, RandomScript(seed), Options{Verbose: true}, true)
		if d := cmp.Diff(first.Trace, again.Trace); d != "" {
			t.Fatalf("seed %d gave two traces (-first +again):\n%s", seed, d)
		}
	}
}
