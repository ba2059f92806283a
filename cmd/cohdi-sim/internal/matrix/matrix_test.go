// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"text/tabwriter"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
)

var (
	full   = facetest.Full()
	update = flag.Bool("update", false, "write docs/fabrics.md anew")
)

// all are the faces, in the order of the table.
func all() []*face { return []*face{faceFM(), faceCM(), faceCDIM(), faceRedfish(), faceSunfish()} }

// cell is what became of a row on a face.
type cell struct {
	runs, requests int
}

// results are what was run, by row and face.
type results struct {
	sync.Mutex
	cells map[string]map[string]*cell
}

func (r *results) add(row, face string, requests int) {
	r.Lock()
	defer r.Unlock()
	if r.cells[row] == nil {
		r.cells[row] = map[string]*cell{}
	}
	c := r.cells[row][face]
	if c == nil {
		c = &cell{}
		r.cells[row][face] = c
	}
	c.runs++
	c.requests = max(c.requests, requests)
}

// TestMatrix plays every row on every face.
func TestMatrix(t *testing.T) {
	res := &results{cells: map[string]map[string]*cell{}}
	t.Run("run", func(t *testing.T) {
		for _, f := range all() {
			for _, r := range rows() {
				if f.not[r.name] != "" {
					continue
				}
				settings := f.settings
				if !*full {
					settings = settings[:1]
				}
				for _, s := range settings {
					if r.login && s.open || s.not[r.name] != "" {
						continue
					}
					t.Run(f.name+"/"+r.name+"/"+s.name, func(t *testing.T) {
						t.Parallel()
						play(t, f, &r, s, res)
					})
				}
			}
		}
	})
	if t.Failed() || !*full {
		return
	}
	fmt.Print(text(res))
	if *update {
		compare(t, "matrix", table(res), nil)
	}
}

// play is one run, in virtual time.
func play(t *testing.T, f *face, r *row, s setting, res *results) {
	t.Helper()
	if r.run == nil {
		t.Fatalf("row %q is not written, and face %s gives no reason why it does not apply", r.name, f.name)
	}
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, f, s, r)
		r.run(b)
		b.finish(r)
		res.add(r.name, f.name, len(b.log()))
	})
}

// TestRows: every fault and every scenario has a row, every row a reason where it is not run, and every reason a row.
func TestRows(t *testing.T) {
	names, ids := map[string]bool{}, map[string]bool{}
	for _, r := range rows() {
		if names[r.name] {
			t.Errorf("two rows are called %q", r.name)
		}
		names[r.name] = true
		for _, id := range r.ids {
			ids[id] = true
		}
		if r.layer != driver && r.layer != recipe || r.asks == "" {
			t.Errorf("row %q: layer %q, asks %q", r.name, r.layer, r.asks)
		}
	}
	for prefix, n := range map[string]int{"FT": faults, "SC": scenarios} {
		for i := range n {
			if id := fmt.Sprint(prefix, i+1); !ids[id] {
				t.Errorf("%s has no row", id)
			}
		}
	}
	if want := faults + scenarios; len(ids) != want {
		t.Errorf("%d ids, want %d: %v", len(ids), want, ids)
	}
	for _, f := range all() {
		reasons := maps.Clone(f.not)
		for _, s := range f.settings {
			maps.Copy(reasons, s.not)
		}
		for name, why := range reasons {
			if !names[name] || !strings.HasSuffix(why, ".") || strings.Contains(why, "|") {
				t.Errorf("face %s does not run %q: %q", f.name, name, why)
			}
		}
		for _, r := range rows() {
			if r.run == nil && f.not[r.name] == "" {
				t.Errorf("face %s runs %q by nothing and gives no reason", f.name, r.name)
			}
		}
	}
}

// shown is a cell for people.
func (r *results) shown(row, face string) string {
	c := &cell{}
	if r != nil && r.cells[row][face] != nil {
		c = r.cells[row][face]
	}
	return fmt.Sprintf("%d× %d", c.runs, c.requests)
}

// text is the table for a terminal.
func text(res *results) string {
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "\nruns × most requests of one\t")
	for _, f := range all() {
		fmt.Fprintf(w, "\t%s", f.name)
	}
	fmt.Fprintln(w)
	for _, r := range rows() {
		fmt.Fprintf(w, "%s\t%s", strings.Join(r.ids, " "), r.name)
		for _, f := range all() {
			if f.not[r.name] != "" {
				fmt.Fprint(w, "\t-")
				continue
			}
			fmt.Fprintf(w, "\t%s", res.shown(r.name, f.name))
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		panic(err) // a builder's
	}
	return out.String() + "\n" + notes()
}

// notes are the reasons why rows are not run.
func notes() string {
	var out strings.Builder
	for _, f := range all() {
		for _, r := range rows() {
			if why := f.not[r.name]; why != "" {
				fmt.Fprintf(&out, "- %s, %s: %s\n", f.name, r.name, why)
			}
			for _, s := range f.settings {
				if why := s.not[r.name]; why != "" {
					fmt.Fprintf(&out, "- %s, %s, not with \"%s\": %s\n", f.name, r.name, s.name, why)
				}
			}
		}
	}
	return out.String()
}

// table is what docs/fabrics.md keeps.
func table(res *results) string {
	var out strings.Builder
	out.WriteString("| row | of | played | what has to be so |")
	for _, f := range all() {
		out.WriteString(" " + f.name + " |")
	}
	out.WriteString("\n| --- | --- | --- | --- |" + strings.Repeat(" --- |", len(all())) + "\n")
	for _, r := range rows() {
		fmt.Fprintf(&out, "| %s | %s | %s | %s |", r.name, strings.Join(r.ids, ", "), r.layer, r.asks)
		for _, f := range all() {
			if f.not[r.name] != "" {
				out.WriteString(" – |")
				continue
			}
			out.WriteString(" " + res.shown(r.name, f.name) + " |")
		}
		out.WriteString("\n")
	}
	return out.String() + "\nWhere a row is not run:\n\n" + notes()
}

// compare compares a part of docs/fabrics.md with what it should be, or writes it, apart from what blank makes equal.
func compare(t *testing.T, part, want string, blank func(string) string) {
	t.Helper()
	const page = "../../../../docs/fabrics.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- "+part+": begin -->\n", "<!-- "+part+": end -->\n"
	before, rest, ok := strings.Cut(string(text), begin)
	got, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no part between %q and %q", page, begin, end)
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+want+end+after), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(strings.Split(blank(want), "\n"), strings.Split(blank(got), "\n")); diff != "" {
		t.Errorf("%s is out of date; run make fabric-conformance UPDATE=1 (-want +got):\n%s", page, diff)
	}
}

// TestTable: docs/fabrics.md shows the rows, the cells and the reasons as they are; how often each was run is what the last
// whole run says.
func TestTable(t *testing.T) {
	if *update {
		t.Skip("TestMatrix writes the table")
	}
	counts := regexp.MustCompile(`\d+× \d+`)
	compare(t, "matrix", table(nil), func(s string) string { return counts.ReplaceAllString(s, "#") })
}
