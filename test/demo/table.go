// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// row is one GPU of one Pod, or a Pod without a GPU, or a GPU without a Pod.
type row struct{ Pod, Phase, Node, GPU, Claim, Lease string }

func (r row) cells() []string { return []string{r.Pod, r.Phase, r.Node, r.GPU, r.Claim, r.Lease} }

// header are the titles of a row's cells.
func header() row { return row{"POD", "PHASE", "NODE", "GPU", "CLAIM", "LEASE"} }

// rows are the Pods in the order in which they came, then the GPUs that no Pod has.
func (w *world) rows() []row {
	var all []row
	shown := map[device.Unit]bool{}
	for _, pod := range w.podsInOrder() {
		r := row{Pod: pod.Name, Phase: podPhase(pod), Node: pod.Spec.NodeName}
		claims := w.claimsOf(pod)
		given := false
		for _, c := range claims {
			for _, result := range results(c) {
				u, _ := device.UnitOfEntry(result.Device)
				given, shown[u] = true, true
				r.GPU, r.Claim, r.Lease = string(u), deviceSays(c, result), leaseSays(w.leases[u])
				if l := w.leases[u]; l != nil && r.Node == "" {
					r.Node = l.Labels[device.LabelNode]
				}
				all = append(all, r)
			}
		}
		if !given {
			if len(claims) > 0 && pod.DeletionTimestamp == nil {
				r.Claim = "waiting"
			}
			all = append(all, r)
		}
	}
	var rest []row
	for u, l := range w.leases {
		if !shown[u] {
			rest = append(rest, row{Node: l.Labels[device.LabelNode], GPU: string(u), Lease: leaseSays(l)})
		}
	}
	slices.SortFunc(rest, func(a, b row) int { return cmp.Compare(a.GPU, b.GPU) })
	return append(all, rest...)
}

func (w *world) podsInOrder() []*corev1.Pod {
	pods := make([]*corev1.Pod, 0, len(w.pods))
	for _, p := range w.pods {
		pods = append(pods, p)
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(w.steps[a.Name][created].Compare(w.steps[b.Name][created]), cmp.Compare(a.Name, b.Name))
	})
	return pods
}

// podPhase is the Pod's phase, as far as it says enough.
func podPhase(pod *corev1.Pod) string {
	switch {
	case pod.DeletionTimestamp != nil:
		return "Terminating"
	case pod.Status.Phase == "":
		return string(corev1.PodPending)
	}
	return string(pod.Status.Phase)
}

// screen draws tables: in place on a terminal, with a line above for each unit that went back; otherwise a line
// for each row that changed.
type screen struct {
	out io.Writer
	// width is the terminal's; 0 is no terminal, or one that does not say how wide it is.
	width int

	begin time.Time
	last  []row
	lines int // drawn in place so far
}

func newScreen(out *os.File) *screen {
	s := &screen{out: out}
	if size, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
		s.width = max(int(size.Col), 40)
	}
	return s
}

// say prints a line below what was drawn.
func (s *screen) say(format string, args ...any) {
	s.leave()
	fmt.Fprintf(s.out, format+"\n", args...)
}

// start begins a table whose times count from begin.
func (s *screen) start(begin time.Time) {
	s.leave()
	s.begin, s.last = begin, nil
	if s.width == 0 {
		fmt.Fprintln(s.out, "            "+line(header(), nil))
	}
}

// leave keeps the table as it is; the next is drawn below.
func (s *screen) leave() { s.lines = 0 }

// wipe takes the table away that was drawn in place: it goes on below what is said next.
func (s *screen) wipe() {
	if s.lines > 0 {
		fmt.Fprintf(s.out, "\x1b[%dA\r\x1b[J", s.lines)
	}
	s.lines = 0
}

// draw shows the rows.
func (s *screen) draw(rows []row, now time.Time) {
	since := now.Sub(s.begin).Seconds()
	if s.width == 0 {
		for _, r := range rows {
			if !slices.Contains(s.last, r) {
				fmt.Fprintf(s.out, "  +%5.1f s  %s\n", since, line(r, nil))
			}
		}
		for _, r := range s.last {
			if gone(r, rows) {
				fmt.Fprintf(s.out, "  +%5.1f s  %s\n", since, line(row{Pod: r.Pod, GPU: r.GPU, Phase: "gone"}, nil))
			}
		}
		s.last = rows
		return
	}
	// What stays comes above the table, which nothing is left of once it has no rows.
	var stays, table []string
	for _, r := range s.last {
		if gone(r, rows) {
			stays = append(stays, fmt.Sprintf("  %5.1f s  %s", since, line(went(r), rows)))
		}
	}
	if len(rows) > 0 {
		table = append(table, fmt.Sprintf("  %5.1f s  %s", since, line(header(), rows)))
	}
	for _, r := range rows {
		table = append(table, "           "+line(r, rows))
	}
	var b strings.Builder
	if s.lines > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", s.lines)
	}
	for _, l := range append(stays, table...) {
		if len(l) >= s.width {
			l = l[:s.width-1]
		}
		b.WriteString("\r\x1b[2K" + l + "\n")
	}
	b.WriteString("\x1b[J") // what is left of a longer table
	s.lines, s.last = len(table), rows
	fmt.Fprint(s.out, b.String())
}

// went is the row of what is gone: what it was at last stays to be read.
func went(r row) row {
	last := row{Pod: r.Pod, Phase: "gone", Node: r.Node, GPU: r.GPU}
	if r.Lease != "" {
		last.Lease = "was " + r.Lease
	}
	return last
}

// gone tells whether neither the Pod nor the GPU of an old row is in the new ones.
func gone(old row, rows []row) bool {
	return !slices.ContainsFunc(rows, func(now row) bool {
		return old.Pod != "" && now.Pod == old.Pod || old.GPU != "" && now.GPU == old.GPU
	})
}

// line aligns a row's cells with those of all rows; the widths never shrink below what is usual.
func line(r row, all []row) string {
	widths := []int{8, 12, 5, 9, 13, 0}
	for _, other := range all {
		for i, c := range other.cells() {
			widths[i] = max(widths[i], len(c)+1)
		}
	}
	var b strings.Builder
	for i, c := range r.cells() {
		if c == "" {
			c = "-"
		}
		fmt.Fprintf(&b, "%-*s ", widths[i], c)
	}
	return strings.TrimRight(b.String(), " ")
}
