// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/cohdi/cohdi-agent/internal/fabric"
)

// TestCapabilities: docs/fabrics.md says what the drivers say of their managers.
func TestCapabilities(t *testing.T) {
	compare(t, "capabilities", capabilities(t), func(s string) string { return s })
}

// capabilities is a row for each thing that a manager may do, a column for each face.
func capabilities(t *testing.T) string {
	t.Helper()
	can := map[string]fabric.Capabilities{}
	for _, f := range all() {
		synctest.Test(t, func(t *testing.T) {
			// As an agent is set up without a word on it.
			s := f.settings[0]
			s.call, s.settle = f.call, f.settle
			can[f.name] = newBench(t, f, s, &row{}).leader.Capabilities()
		})
	}
	yes := func(b bool) string {
		if b {
			return "yes"
		}
		return "no"
	}
	var out strings.Builder
	out.WriteString("| |")
	for _, f := range all() {
		out.WriteString(" " + f.name + " |")
	}
	out.WriteString("\n| --- |" + strings.Repeat(" --- |", len(all())) + "\n")
	for _, line := range []struct {
		what string
		says func(fabric.Capabilities) string
	}{
		{"the caller chooses the device of an attach", func(c fabric.Capabilities) string { return yes(c.AddressableAttach) }},
		{"the caller chooses the device of a detach", func(c fabric.Capabilities) string { return yes(c.AddressableDetach) }},
		{"what is free", func(c fabric.Capabilities) string {
			return map[fabric.FreeKind]string{fabric.FreeNone: "not said", fabric.FreeCount: "counted", fabric.FreeList: "listed"}[c.Free]
		}},
		{"a call returns", func(c fabric.Capabilities) string {
			if c.Asynchronous {
				return "at once; the work goes on"
			}
			return "when the work is done"
		}},
		{"one change occupies", func(c fabric.Capabilities) string {
			return map[fabric.Exclusion]string{
				fabric.ExclusionUnknown: "what is not known", fabric.ExclusionNone: "nothing else", fabric.ExclusionMachine: "its machine",
				fabric.ExclusionFabric: "its fabric", fabric.ExclusionGlobal: "the whole installation",
			}[c.Exclusion]
		}},
		{"one call may detach", func(c fabric.Capabilities) string {
			if c.Batch > 1 {
				return fmt.Sprintf("%d devices of a machine", c.Batch)
			}
			return "one device"
		}},
		{"it says which GPU a device is", func(c fabric.Capabilities) string { return yes(c.Identity) }},
		{"limits of a machine", func(c fabric.Capabilities) string { return yes(c.Limits) }},
		{"it tells of changes", func(c fabric.Capabilities) string { return yes(c.Events) }},
		{"one changing call may take", func(c fabric.Capabilities) string { return c.MaxCall.String() }},
		{"its list lags behind by up to", func(c fabric.Capabilities) string { return c.Settle.String() }},
	} {
		fmt.Fprintf(&out, "| %s |", line.what)
		for _, f := range all() {
			out.WriteString(" " + line.says(can[f.name]) + " |")
		}
		out.WriteString("\n")
	}
	return out.String()
}
