// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// newModule makes a module folder with what decides over a build.
func newModule(t *testing.T, gomod string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{"go.mod": gomod, "go.sum": "sum\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestFlags(t *testing.T) {
	tests := map[string]struct {
		family  family
		gomod   string
		want    []string
		wantErr string
	}{
		"stamps the required version": {
			family: family{name: "x", module: "example.com/x/v2", stamps: []string{"a.V={v}", "b.N={n}", "c.M={major}.{minor}"}, tags: "t"},
			gomod:  "module m\n\nrequire (\n\texample.com/x/v2/more v9.9.9\n\texample.com/x/v2 v2.15.3 // indirect\n)\n",
			want:   []string{"-trimpath", "-ldflags", "-s -w -X a.V=v2.15.3 -X b.N=2.15.3 -X c.M=2.15", "-tags", "t"},
		},
		"finds a requirement on a line of its own": {
			family: family{name: "x", module: "example.com/x", stamps: []string{"a.V={v}"}},
			gomod:  "module m\n\nrequire example.com/x v1.0.0\n",
			want:   []string{"-trimpath", "-ldflags", "-s -w -X a.V=v1.0.0"},
		},
		"says that nothing is required": {
			family: family{name: "x", module: "example.com/x"}, gomod: "module m\n", wantErr: "does not require example.com/x",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, _, err := tc.family.flags(newModule(t, tc.gomod))
			if tc.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
					t.Fatalf("got %v, want %q", err, tc.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("flags (-want +got):\n%s", diff)
			}
		})
	}
}

func TestStampChangesWithItsInput(t *testing.T) {
	f := family{name: "x"}
	dir := newModule(t, "module m\n")
	stamp := func(f family, flags ...string) string {
		t.Helper()
		s, err := f.stamp(dir, flags)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first := stamp(f, "-a")
	if again := stamp(f, "-a"); again != first {
		t.Errorf("the same input gives %q and %q", first, again)
	}
	seen := map[string]string{first: "first"}
	check := func(what, s string) {
		if other, ok := seen[s]; ok {
			t.Errorf("%s gives the stamp of %s", what, other)
		}
		seen[s] = what
	}
	check("another flag", stamp(f, "-b"))
	check("a static build", stamp(family{name: "x", static: true}, "-a"))
	if err := os.WriteFile(filepath.Join(dir, "go.sum"), []byte("other\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	check("another go.sum", stamp(f, "-a"))
}

func TestGoName(t *testing.T) {
	for pkg, want := range map[string]string{
		"go.etcd.io/etcd/server/v3":                   "server",
		"k8s.io/kubernetes/cmd/kubelet":               "kubelet",
		"github.com/containerd/containerd/v2/cmd/ctr": "ctr",
	} {
		if got := goName(pkg); got != want {
			t.Errorf("%s: got %s, want %s", pkg, got, want)
		}
	}
}

// TestFamiliesHaveModules holds the list of families and the folders together.
func TestFamiliesHaveModules(t *testing.T) {
	for _, f := range families() {
		gomod, err := os.ReadFile(filepath.Join(f.name, "go.mod"))
		if err != nil {
			t.Errorf("family %s: %v", f.name, err)
			continue
		}
		for pkg := range f.programs {
			if !strings.Contains(string(gomod), pkg+"\n") {
				t.Errorf("family %s: go.mod has no tool directive for %s", f.name, pkg)
			}
		}
		if _, _, err := f.flags(f.name); err != nil {
			t.Error(err)
		}
	}
}
