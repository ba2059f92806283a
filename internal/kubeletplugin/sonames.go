// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// withSONames returns the edits' mounts, and one more of each library for each name by which a loader or
// dlopen asks for it. The driver's files carry a version in their names; the links to them are made by
// nvidia-cdi-hook when the container starts. A node whose driver came without the container toolkit has
// no such program, and a hook that is missing on the host stops every container: so where the edits have
// no hooks, mounts do the same.
func withSONames(hostRoot string, e cdispecs.ContainerEdits) ([]*cdispecs.Mount, error) {
	if hostRoot == "" || len(e.Hooks) > 0 {
		return e.Mounts, nil
	}
	taken := map[string]bool{}
	for _, m := range e.Mounts {
		taken[m.ContainerPath] = true
	}
	mounts := slices.Clone(e.Mounts)
	for _, m := range e.Mounts {
		if !strings.Contains(filepath.Base(m.ContainerPath), ".so.") {
			continue
		}
		names, err := libraryNames(filepath.Join(hostRoot, m.HostPath))
		if err != nil {
			return nil, fmt.Errorf("read by which names %s is asked for: %w", m.HostPath, err)
		}
		for _, name := range names {
			path := filepath.Join(filepath.Dir(m.ContainerPath), name)
			if taken[path] {
				continue
			}
			taken[path] = true
			link := *m
			link.ContainerPath = path
			mounts = append(mounts, &link)
		}
	}
	return mounts, nil
}

// libraryNames are the names by which the library is asked for besides its file's own.
func libraryNames(file string) ([]string, error) {
	f, err := elf.Open(file)
	var format *elf.FormatError
	if errors.As(err, &format) || errors.Is(err, io.EOF) {
		return nil, nil // a linker script: it has the one name
	}
	if err != nil {
		return nil, err
	}
	names, err := f.DynString(elf.DT_SONAME)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	base, _, _ := strings.Cut(filepath.Base(file), ".so.")
	plain := base + ".so"
	// Many programs open libcuda.so, and drivers do not always install it.
	if _, err := os.Lstat(filepath.Join(filepath.Dir(file), plain)); err == nil || base == "libcuda" {
		names = append(names, plain)
	}
	return slices.DeleteFunc(names, func(n string) bool { return n == "" || n != filepath.Base(n) }), nil
}
