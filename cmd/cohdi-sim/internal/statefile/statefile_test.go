// SPDX-License-Identifier: Apache-2.0

package statefile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type state struct{ N int }

func TestSaveAndLoad(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	var got state
	if fresh, err := Load(path, &got); !fresh || err != nil {
		t.Errorf("no file: fresh %t, %v", fresh, err)
	}
	for n := range 3 {
		if err := Save(path, state{n}); err != nil {
			t.Fatal(err)
		}
		if fresh, err := Load(path, &got); fresh || err != nil || got.N != n {
			t.Errorf("loaded %+v, fresh %t, %v; want %d", got, fresh, err, n)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
}

func TestInMemory(t *testing.T) {
	var got state
	if err := Save("", state{1}); err != nil {
		t.Error(err)
	}
	if fresh, err := Load("", &got); !fresh || err != nil || got.N != 0 {
		t.Errorf("loaded %+v, fresh %t, %v", got, fresh, err)
	}
}

func TestRefuses(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	var got state
	for what, err := range map[string]error{
		"remove the file":  second(Load(path, &got)),
		"read state":       second(Load(dir, &got)),
		"encode state for": Save(path, func() {}),
		"save state":       Save(filepath.Join(dir, "none", "state.json"), state{}),
	} {
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("error %v, want one about %q", err, what)
		}
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "{" {
		t.Errorf("the file that could not be read is now %q, %v", data, err)
	}
}

func second(_ bool, err error) error { return err }

// FuzzLoad: whatever stands in the file, it is read or refused.
func FuzzLoad(f *testing.F) {
	f.Add([]byte(`{"N":1}`))
	f.Add([]byte(`{"N":`))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "state.json")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		var got state
		if fresh, err := Load(path, &got); fresh || err != nil && !strings.Contains(err.Error(), path) {
			t.Errorf("fresh %t, %v", fresh, err)
		}
	})
}
