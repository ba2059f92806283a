// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// replaceFile puts data in place of the file at path so that a reader, and a crash at any point, finds
// the old content or the new. The temporary file's name starts with a dot and the file's own name.
// check, if any, sees the temporary file before it takes the name.
func replaceFile(path string, data []byte, mode os.FileMode, check func(tmp string) error) (err error) {
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, tempPattern(filepath.Base(path)))
	if err != nil {
		return fmt.Errorf("create a temporary file for %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ignoreMissing(os.Remove(tmp.Name())))
		}
	}()
	_, err = tmp.Write(data)
	if err == nil {
		err = tmp.Chmod(mode)
	}
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return fmt.Errorf("write %s: %w", tmp.Name(), err)
	}
	if check != nil {
		if err = check(tmp.Name()); err != nil {
			return err
		}
	}
	if err = os.Rename(tmp.Name(), path); err != nil {
		return fmt.Errorf("put %s in place: %w", path, err)
	}
	return syncDir(dir)
}

// tempPattern is the os.CreateTemp pattern, and the glob pattern, of temporary files for a file.
func tempPattern(base string) string { return "." + base + ".*.tmp" }

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open %s to sync it: %w", dir, err)
	}
	if err = errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
