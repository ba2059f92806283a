// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var replayed = flag.String("replay", "", "a script to play, with every call in its trace")

// TestReplay plays a script that somebody looks into.
func TestReplay(t *testing.T) {
	if *replayed == "" {
		t.Skip("no -replay")
	}
	text, err := os.ReadFile(*replayed)
	if err != nil {
		t.Fatal(err)
	}
	script, err := ParseScript(string(text))
	if err != nil {
		t.Fatal(err)
	}
	res := play(t, script, Options{Verbose: true}, true)
	t.Logf("%v\n%s", res.Violation, strings.Join(res.Trace, "\n"))
}
