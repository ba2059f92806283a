// SPDX-License-Identifier: Apache-2.0

package statefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Save replaces the file.
func Save(path string, state any) error {
	if path == "" {
		return nil
	}
	data, err := json.Marshal(state)
	if err != nil {
		return fmt.Errorf("encode state for %s: %w", path, err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".state-*")
	if err != nil {
		return fmt.Errorf("save state %s: %w", path, err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("save state %s: %w", path, errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// Load reads what a former run left; fresh is true where there was none.
func Load(path string, state any) (fresh bool, err error) {
	if path == "" {
		return true, nil
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("read state: %w", err)
	}
	if err := json.Unmarshal(data, state); err != nil {
		return false, fmt.Errorf("read state %s (remove the file to start afresh): %w", path, err)
	}
	return false, nil
}
