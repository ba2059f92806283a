// SPDX-License-Identifier: Apache-2.0

package cohdi_test

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/cohdi/cohdi-agent"

// tier is where a package stands: lower tiers know nothing of higher ones, and packages of one tier do
// not know each other.
type tier int

const (
	words tier = iota + 1
	policy
	adapter
	loop
	joins // may know everything
)

// tiers is the map of the design. A package below one of these stands with it.
var tiers = map[string]tier{
	"internal/device": words,

	"internal/attach":  policy,
	"internal/machine": policy,
	"internal/pool":    policy,

	"internal/fabric":        adapter,
	"internal/hotplug":       adapter,
	"internal/metal3":        adapter,
	"internal/nvml":          adapter,
	"internal/lease":         adapter,
	"internal/claim":         adapter,
	"internal/kubeletplugin": adapter,
	"internal/nodestatus":    adapter,
	"internal/publish":       adapter,
	"internal/metrics":       adapter,

	"internal/node":   loop,
	"internal/leader": loop,

	"internal/manager": joins,
	"internal/sim":     joins,
	"cmd":              joins,
	"test":             joins,
}

// place returns the entry of the map that a directory stands with.
func place(dir string) (string, tier) {
	for d := dir; d != "."; d = path.Dir(d) {
		if t, ok := tiers[d]; ok {
			return d, t
		}
	}
	return "", 0
}

// mayImport tells whether a package of one directory may import one of another, both in this module.
func mayImport(from, to string) bool {
	a, ta := place(from)
	b, tb := place(to)
	switch {
	case ta == 0 || tb == 0:
		return false
	case ta == joins:
		return true
	case a == b:
		return true
	}
	return tb <= policy && tb < ta
}

// forbidden are imports that only certain directories may have.
var forbidden = []struct {
	what    func(imported string) bool
	allowed func(dir string) bool
	why     string
}{
	{is("os/exec"), below("test"), "sysfs, netlink and NVML; never a sub process"},
	{under("k8s.io/client-go/tools/remotecommand"), below(), "we are on the node; never exec into a Pod"},
	{under("k8s.io/kubernetes"), below(), "not a library"},
	{under("github.com/NVIDIA/go-nvml"), below("internal/nvml"), "only internal/nvml loads the driver's library"},
	{func(p string) bool {
		return p == "os" || p == "net" || strings.HasPrefix(p, "net/") || p == "syscall" || strings.HasPrefix(p, "k8s.io/")
	}, func(dir string) bool { _, t := place(dir); return t != words && t != policy }, "words and policy are pure"},
}

func is(p string) func(string) bool { return func(q string) bool { return p == q } }
func under(p string) func(string) bool {
	return func(q string) bool { return q == p || strings.HasPrefix(q, p+"/") }
}

func below(dirs ...string) func(string) bool {
	return func(dir string) bool {
		return slices.ContainsFunc(dirs, func(d string) bool { return under(d)(dir) })
	}
}

// calls that hide an input: the clock, the environment, the caller's deadline.
var hidden = map[string][]string{
	"time":    {"Now", "Sleep", "After", "Since", "Until", "Tick", "NewTicker", "NewTimer", "AfterFunc"},
	"os":      {"Getenv", "LookupEnv", "Environ"},
	"context": {"Background", "TODO"},
}

// source is one parsed file of this module.
type source struct {
	name string // slash-separated, from the root
	file *ast.File
	text []byte
}

func (s *source) dir() string  { return path.Dir(s.name) }
func (s *source) isTest() bool { return strings.HasSuffix(s.name, "_test.go") }

// sources parses every Go file of this module in this process: a child process's reads are invisible to
// the test cache, and a forbidden import would pass as "(cached)".
func sources(t *testing.T, fset *token.FileSet) []source {
	t.Helper()
	var all []source
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
				return fs.SkipDir
			}
			_, err = os.Stat(filepath.Join(name, "go.mod"))
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err == nil && name != ".":
				return fs.SkipDir // another module
			}
			return err
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(fset, name, text, parser.ParseComments)
		if err != nil {
			return err
		}
		all = append(all, source{name: filepath.ToSlash(name), file: file, text: text})
		return nil
	})
	if err != nil {
		t.Fatalf("parse the module: %v", err)
	}
	if len(all) < 20 {
		t.Fatalf("only %d Go files found: the walk is wrong", len(all))
	}
	return all
}

func imports(f *ast.File) []string {
	paths := make([]string, 0, len(f.Imports))
	for _, i := range f.Imports {
		if p, err := strconv.Unquote(i.Path.Value); err == nil {
			paths = append(paths, p)
		}
	}
	return paths
}

func TestImports(t *testing.T) {
	for _, s := range sources(t, token.NewFileSet()) {
		if s.dir() == "." {
			continue
		}
		if _, where := place(s.dir()); where == 0 {
			t.Errorf("%s: directory %s is not on the map of packages: give it a tier", s.name, s.dir())
			continue
		}
		for _, p := range imports(s.file) {
			if to, ours := strings.CutPrefix(p, module+"/"); ours && !mayImport(s.dir(), to) {
				t.Errorf("%s imports %s: %s does not know %s", s.name, p, s.dir(), to)
			}
			for _, f := range forbidden {
				if f.what(p) && !f.allowed(s.dir()) && !s.isTest() {
					t.Errorf("%s imports %s: %s", s.name, p, f.why)
				}
			}
		}
	}
}

func TestMayImport(t *testing.T) {
	for _, tc := range []struct {
		from, to string
		want     bool
	}{
		{"internal/device", "internal/attach", false},
		{"internal/attach", "internal/device", true},
		{"internal/attach", "internal/pool", false},
		{"internal/fabric/fm", "internal/fabric", true},
		{"internal/fabric/cm", "internal/fabric/fti", true},
		{"internal/fabric/fti", "internal/lease", false},
		{"internal/lease", "internal/claim", false},
		{"internal/lease", "internal/pool", true},
		{"internal/metal3", "internal/machine", true},
		{"internal/machine", "internal/metal3", false},
		{"internal/node", "internal/attach", true},
		{"internal/node", "internal/lease", false},
		{"internal/node", "internal/leader", false},
		{"internal/claim", "internal/leader", false},
		{"cmd/cohdi-agent", "internal/node", true},
		{"internal/nvml", "cmd/cohdi-sim/simapi", false},
		{"internal/util", "internal/device", false},
	} {
		if got := mayImport(tc.from, tc.to); got != tc.want {
			t.Errorf("mayImport(%s, %s) = %v", tc.from, tc.to, got)
		}
	}
}

// TestPackageComments: one attached package comment per package, in doc.go, that begins as godoc wants it.
func TestPackageComments(t *testing.T) {
	docs, seen := map[string][]string{}, map[string]string{}
	for _, s := range sources(t, token.NewFileSet()) {
		if s.isTest() {
			if s.file.Doc != nil && isPackageComment(s.file) {
				t.Errorf("%s: a test file has a package comment", s.name)
			}
			continue
		}
		seen[s.dir()] = s.file.Name.Name
		if s.file.Doc == nil {
			continue
		}
		docs[s.dir()] = append(docs[s.dir()], s.name)
		if path.Base(s.name) != "doc.go" {
			t.Errorf("%s: the package comment stands in doc.go, and only there", s.name)
		}
		want := "Package " + s.file.Name.Name + " "
		if s.file.Name.Name == "main" {
			want = "Command " + path.Base(s.dir()) + " "
		}
		if !strings.HasPrefix(s.file.Doc.Text(), want) {
			t.Errorf("%s: the package comment does not begin with %q", s.name, want)
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(seen)) {
		if n := len(docs[dir]); n != 1 {
			t.Errorf("package %s has %d package comments, want one, attached, in %s/doc.go: %v", seen[dir], n, dir, docs[dir])
		}
	}
}

func isPackageComment(f *ast.File) bool { return strings.HasPrefix(f.Doc.Text(), "Package ") }

func TestLicenceLines(t *testing.T) {
	for _, s := range sources(t, token.NewFileSet()) {
		if !strings.HasPrefix(string(s.text), "// SPDX-License-Identifier: Apache-2.0\n") {
			t.Errorf("%s: the first line is not the SPDX line", s.name)
		}
	}
}

// TestHiddenInputs: no clock, environment or root context but the caller's, outside commands and tests.
func TestHiddenInputs(t *testing.T) {
	fset := token.NewFileSet()
	for _, s := range sources(t, fset) {
		if s.isTest() || below("cmd", "test", "internal/sim")(s.dir()) {
			continue
		}
		names := map[string]string{} // what the file calls the package
		for _, i := range s.file.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if _, listed := hidden[p]; err != nil || !listed {
				continue
			}
			names[p] = p
			if i.Name != nil {
				names[i.Name.Name] = p
			}
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, ok := sel.X.(*ast.Ident)
			if ok && x.Obj == nil && slices.Contains(hidden[names[x.Name]], sel.Sel.Name) {
				t.Errorf("%s: %s.%s: take a clock, a flag or the caller's context", fset.Position(n.Pos()), x.Name, sel.Sel.Name)
			}
			return true
		})
	}
}
