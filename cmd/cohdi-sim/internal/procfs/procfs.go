// SPDX-License-Identifier: Apache-2.0

package procfs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// Proc is the root of a proc file system, normally /proc.
type Proc string

// Holders lists the processes that have the character device open, by process id.
func (p Proc) Holders(major, minor uint32) ([]simapi.Holder, error) {
	entries, err := os.ReadDir(string(p))
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	want := unix.Mkdev(major, minor)
	var out []simapi.Holder
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p.holds(e.Name(), want) {
			out = append(out, simapi.Holder{PID: pid, Command: p.command(e.Name())})
		}
	}
	slices.SortFunc(out, func(a, b simapi.Holder) int { return a.PID - b.PID })
	return out, nil
}

func (p Proc) holds(pid string, want uint64) bool {
	dir := filepath.Join(string(p), pid, "fd")
	fds, err := os.ReadDir(dir)
	if err != nil {
		return false // gone meanwhile
	}
	for _, fd := range fds {
		path := filepath.Join(dir, fd.Name())
		// Sockets, pipes and anonymous files have no path and are most of what there is.
		if to, err := os.Readlink(path); err != nil || !strings.HasPrefix(to, "/") {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == want {
			return true
		}
	}
	return false
}

func (p Proc) command(pid string) string {
	data, err := os.ReadFile(filepath.Join(string(p), pid, "cmdline"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(strings.ReplaceAll(string(data), "\x00", " "))
}
