// SPDX-License-Identifier: Apache-2.0

package hostroot

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
)

// The virtual terminals above those that a system logs in on.
const firstTTY, lastTTY, ttyMajor = 20, 63, 4

// Numbers finds n device numbers that open on this machine without any capability and that nobody else uses. It tries them
// through nodes in dir. Non-volatile memory controllers come first where the kernel has that driver, because opening one has
// no effect at all and there are hundreds; virtual terminals are everywhere, but a session leader that opens one gets it as
// its controlling terminal.
func Numbers(dir string, n int) ([]core.Number, error) {
	var out []core.Number
	for _, c := range candidates() {
		if len(out) == n {
			break
		}
		if err := try(filepath.Join(dir, ".try"), c); err != nil {
			if errors.Is(err, os.ErrPermission) {
				return nil, fmt.Errorf("make device nodes in %s (needs root, and a file system that is not mounted nodev): %w", dir, err)
			}
			continue
		}
		out = append(out, c)
	}
	if len(out) < n {
		return nil, fmt.Errorf("find %d device numbers that open for the GPUs: this kernel has only %d", n, len(out))
	}
	return out, nil
}

func candidates() []core.Number {
	var out []core.Number
	for _, major := range majors("/proc/devices", "ndctl", "dimmctl") {
		for minor := range uint32(256) {
			out = append(out, core.Number{Major: major, Minor: minor})
		}
	}
	for minor := uint32(firstTTY); minor <= lastTTY; minor++ {
		out = append(out, core.Number{Major: ttyMajor, Minor: minor})
	}
	return out
}

func majors(path string, names ...string) []uint32 {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	found := map[string]uint32{}
	for s := bufio.NewScanner(f); s.Scan() && !strings.HasPrefix(s.Text(), "Block"); {
		if number, name, ok := strings.Cut(strings.TrimSpace(s.Text()), " "); ok {
			if major, err := strconv.ParseUint(number, 10, 12); err == nil {
				found[name] = uint32(major)
			}
		}
	}
	var out []uint32
	for _, name := range names {
		if major, ok := found[name]; ok {
			out = append(out, major)
		}
	}
	return out
}

func try(path string, n core.Number) error {
	if err := mknod(path, n); err != nil {
		return err
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err == nil {
		err = unix.Close(fd)
	}
	return errors.Join(err, os.Remove(path))
}

// mknod makes a node that everybody may open, in place of whatever was there.
func mknod(path string, n core.Number) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("replace device node: %w", err)
	}
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(n.Major, n.Minor))); err != nil { //nolint:gosec // 32 bits
		return fmt.Errorf("make device node %s (%s): %w", path, n, err)
	}
	if err := os.Chmod(path, 0o666); err != nil { //nolint:gosec // a device node that every container may open
		return fmt.Errorf("open device node to everybody: %w", err)
	}
	return nil
}

// isNode tells whether the path is a character device of that number already.
func isNode(path string, n core.Number) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(n.Major, n.Minor)
}
