// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func play(t *testing.T, script Script, o Options, finish bool) (res Result) {
	t.Helper()
	dir, err := os.MkdirTemp(memory(), "cohdi-sim-") //nolint:usetesting // it is in memory, and gone after each seed
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	o.Dir = dir
	synctest.Test(t, func(t *testing.T) {
		var err error
		res, err = Run(t.Context(), Bubble{Now: time.Now, Sleep: time.Sleep, Wait: synctest.Wait}, script, o, finish)
		if err != nil {
			t.Error(err)
		}
	})
	return res
}

// memory is a directory that costs no disk: the plugin syncs its files.
func memory() string {
	if st, err := os.Stat("/dev/shm"); err == nil && st.IsDir() {
		return "/dev/shm"
	}
	return ""
}

func TestParseScript(t *testing.T) {
	const text = "# a story\ncluster nodes=2 # two\n\nrun 5s\npod p1 devices=2\n"
	script, err := ParseScript(text)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := script.String(), "cluster nodes=2\nrun 5s\npod p1 devices=2\n"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for _, bad := range []string{"", "run 5s\n", "cluster\nfly\n"} {
		if script, err := ParseScript(bad); err == nil {
			t.Errorf("%q was read as %v", bad, script)
		}
	}
}

// TestBadCommand: a command that cannot be carried out is an error, not a run without it.
func TestBadCommand(t *testing.T) {
	for _, bad := range []string{"run", "run x", "pod", "delete", "fault lost", "fault never fabric", "crash n9", "slow n1", "pause n1 x", "steal 1", "down", "refuse"} {
		script, err := ParseScript("cluster nodes=1\n" + bad + "\n")
		if err != nil {
			t.Fatal(err)
		}
		synctest.Test(t, func(t *testing.T) {
			b := Bubble{Now: time.Now, Sleep: time.Sleep, Wait: synctest.Wait}
			if _, err := Run(t.Context(), b, script, Options{Dir: t.TempDir()}, false); err == nil {
				t.Errorf("%q was carried out", bad)
			}
		})
	}
}

func TestShrink(t *testing.T) {
	script, err := ParseScript("cluster\npod p1\nrun 1s\npod p2\nrun 2s\ncrash n1\nrun 3s\ndelete p1\n")
	if err != nil {
		t.Fatal(err)
	}
	tries := 0
	got := Shrink(script, func(s Script) bool {
		tries++
		return strings.Contains(s.String(), "pod p2") && strings.Contains(s.String(), "crash")
	})
	if want := "cluster\npod p2\ncrash n1\n"; got.String() != want {
		t.Errorf("after %d tries:\n%s\nwant\n%s", tries, got, want)
	}
}
