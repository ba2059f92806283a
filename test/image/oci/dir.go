// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"fmt"
	"os"
	"path/filepath"
)

// WriteDir lays the image's files out below dir, which must not exist or be empty: the same root
// file system for tools that make their own layer of it.
func WriteDir(img Image, dir string) error {
	for _, f := range img.Files {
		target := filepath.Join(dir, f.Path)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return fmt.Errorf("lay out image %s: %w", img.Name, err)
		}
		if f.Link != "" {
			if err := os.Symlink(f.Link, target); err != nil {
				return fmt.Errorf("lay out image %s: %w", img.Name, err)
			}
			continue
		}
		content, mode, err := f.read()
		if err != nil {
			return fmt.Errorf("lay out image %s: %w", img.Name, err)
		}
		if err := os.WriteFile(target, content, 0o644); err != nil {
			return fmt.Errorf("lay out image %s: %w", img.Name, err)
		}
		// Not by WriteFile: the umask would take part.
		if err := os.Chmod(target, os.FileMode(mode)); err != nil {
			return fmt.Errorf("lay out image %s: %w", img.Name, err)
		}
	}
	return nil
}

// read returns the content and the permission of a regular file.
func (f File) read() (content []byte, mode int64, err error) {
	mode = f.Mode
	if mode == 0 {
		mode = 0o644
	}
	if f.Source == "" {
		return f.Content, mode, nil
	}
	if content, err = os.ReadFile(f.Source); err != nil {
		return nil, 0, fmt.Errorf("read content of %s: %w", f.Path, err)
	}
	return content, mode, nil
}
