// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// libraryName is the name under which every driver installs the library.
const libraryName = "libnvidia-ml.so.1"

// libraryDirs are the directories, below a driver root, where distributions, driver containers and Google's
// node image put it.
func libraryDirs() []string {
	return []string{
		"usr/lib/x86_64-linux-gnu",
		"usr/lib/aarch64-linux-gnu",
		"usr/lib64",
		"usr/lib",
		"lib64",
		"lib/x86_64-linux-gnu",
		"lib/aarch64-linux-gnu",
		"home/kubernetes/bin/nvidia/lib64",
	}
}

// location is where a driver library was found.
type location struct {
	driverRoot string // as the host sees it: "/", "/run/nvidia/driver"
	path       string // as this process sees it, symbolic links resolved below the host root
	dev, ino   uint64
}

// locate returns the first driver library below hostRoot, in the order of driverRoots. A missing one is no
// error: ok is false.
func locate(hostRoot string, driverRoots []string) (location, bool, error) {
	var unreadable error
	for _, root := range driverRoots {
		for _, dir := range libraryDirs() {
			// Links in a driver container are meant within it, links on the host within the host.
			base := filepath.Join(hostRoot, root)
			path, info, err := resolve(base, filepath.Join(dir, libraryName))
			switch {
			case err == nil && info.Mode().IsRegular():
				at := location{driverRoot: filepath.Join("/", root), path: path}
				if st, ok := info.Sys().(*syscall.Stat_t); ok {
					at.dev, at.ino = st.Dev, st.Ino
				}
				return at, true, nil
			case err != nil && !errors.Is(err, fs.ErrNotExist):
				unreadable = errors.Join(unreadable, err)
			}
		}
	}
	return location{}, false, unreadable
}

// resolve follows the symbolic links of name as a process whose root directory is root would.
func resolve(root, name string) (string, fs.FileInfo, error) {
	const maxLinks = 40 // as the kernel
	at, todo := "", strings.Split(filepath.ToSlash(name), "/")
	var info fs.FileInfo
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		if part == "" || part == "." {
			continue
		}
		// Join cleans "..", which at the root stays there, as in the kernel.
		next := filepath.Join("/", at, part)
		var err error
		info, err = os.Lstat(filepath.Join(root, next))
		if err != nil {
			if errors.Is(err, syscall.ENOTDIR) {
				err = fs.ErrNotExist
			}
			return "", nil, fmt.Errorf("look for the driver library at %s: %w", filepath.Join(root, name), err)
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		if links++; links > maxLinks {
			return "", nil, fmt.Errorf("look for the driver library at %s: more than %d symbolic links", filepath.Join(root, name), maxLinks)
		}
		target, err := os.Readlink(filepath.Join(root, next))
		if err != nil {
			return "", nil, fmt.Errorf("look for the driver library: %w", err)
		}
		if filepath.IsAbs(target) {
			at = ""
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	return filepath.Join(root, at), info, nil
}
