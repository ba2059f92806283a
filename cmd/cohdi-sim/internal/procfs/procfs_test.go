// SPDX-License-Identifier: Apache-2.0

package procfs

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestHolders(t *testing.T) {
	// /dev/full has a number that hardly anybody opens; the link shows that only the number counts, not the path.
	const major, minor = 1, 7
	mine := func() bool {
		t.Helper()
		holders, err := Proc("/proc").Holders(major, minor)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range holders {
			if h.PID == os.Getpid() {
				if h.Command == "" {
					t.Error("holder without command")
				}
				return true
			}
		}
		return false
	}
	if mine() {
		t.Fatal("holds /dev/full before the test opened it")
	}
	link := filepath.Join(t.TempDir(), "other-name")
	if err := os.Symlink("/dev/full", link); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(link, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if !mine() {
		t.Error("open device is not found")
	}
	if err := unix.Close(fd); err != nil {
		t.Fatal(err)
	}
	if mine() {
		t.Error("closed device is still found")
	}
}

func TestHolders_noProc(t *testing.T) {
	if _, err := Proc(filepath.Join(t.TempDir(), "absent")).Holders(1, 7); err == nil {
		t.Error("no error without /proc")
	}
}
