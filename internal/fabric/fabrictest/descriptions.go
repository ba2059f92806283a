// SPDX-License-Identifier: Apache-2.0

package fabrictest

import (
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// besideRepository is where descriptions are looked for if nobody says where they are, from the root of the repository.
const besideRepository = "../shared/fabric"

// Descriptions declares the flag that says where others' descriptions of the managers' messages are: a directory with samples
// and openapi below it. A test package declares it once. What it returns finds a file there; the test is skipped where there
// are none, which the repository is complete without. A directory that was named has to be there.
func Descriptions() func(tb testing.TB, name string) string {
	given := flag.String("descriptions", "", "directory with samples and OpenAPI files of the managers' messages; "+
		besideRepository+" from the root of the repository if empty, without which what needs them is skipped")
	return func(tb testing.TB, name string) string {
		tb.Helper()
		dir := *given
		if dir == "" {
			dir = filepath.Join(root(tb), besideRepository)
			if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
				tb.Skipf("descriptions of the managers' messages are not at hand: no directory %s, and none is named by -descriptions", dir)
			}
		}
		return filepath.Join(dir, filepath.FromSlash(name))
	}
}

// root is the directory of the module that the test belongs to.
func root(tb testing.TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			tb.Fatal("no go.mod above the test")
		}
		dir = parent
	}
}
