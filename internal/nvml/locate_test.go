// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"os"
	"path/filepath"
	"testing"
)

func TestLocate(t *testing.T) {
	const so = "libnvidia-ml.so.570.86.15"
	type entry struct{ path, link string }
	for _, tt := range []struct {
		name       string
		files      []entry
		path, root string // empty: not found
		wantErr    bool
	}{
		{name: "nothing"},
		{name: "debian", files: []entry{{"usr/lib/x86_64-linux-gnu/" + so, ""}, {"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", so}}, path: "usr/lib/x86_64-linux-gnu/" + so, root: "/"},
		{name: "arm", files: []entry{{"usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1", ""}}, path: "usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1", root: "/"},
		{name: "red hat", files: []entry{{"usr/lib64/libnvidia-ml.so.1", ""}}, path: "usr/lib64/libnvidia-ml.so.1", root: "/"},
		{name: "google", files: []entry{{"home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1", ""}}, path: "home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1", root: "/"},
		{
			name: "driver container, absolute link meant within it", path: "run/nvidia/driver/opt/nv/" + so, root: "/run/nvidia/driver",
			files: []entry{{"run/nvidia/driver/opt/nv/" + so, ""}, {"run/nvidia/driver/usr/lib64/libnvidia-ml.so.1", "/opt/nv/" + so}},
		},
		{
			name: "host before container", path: "usr/lib64/libnvidia-ml.so.1", root: "/",
			files: []entry{{"run/nvidia/driver/usr/lib64/libnvidia-ml.so.1", ""}, {"usr/lib64/libnvidia-ml.so.1", ""}},
		},
		{name: "directory is a link out of the root", files: []entry{{"real/libnvidia-ml.so.1", ""}, {"usr/lib64", "../../../../../../../real"}}, path: "real/libnvidia-ml.so.1", root: "/"},
		{name: "dangling", files: []entry{{"usr/lib64/libnvidia-ml.so.1", so}}},
		{name: "loop", files: []entry{{"usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.1"}}, wantErr: true},
		{name: "a directory of that name", files: []entry{{"usr/lib64/libnvidia-ml.so.1/x", ""}}},
		{name: "a file where a directory should be", files: []entry{{"usr", ""}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			for _, f := range tt.files {
				p := filepath.Join(root, f.path)
				if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
					t.Fatal(err)
				}
				err := os.WriteFile(p, []byte("x"), 0o600)
				if f.link != "" {
					os.Remove(p)
					err = os.Symlink(f.link, p)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			got, ok, err := locate(root, []string{"/", "/run/nvidia/driver"})
			if ok != (tt.path != "") || (err != nil) != tt.wantErr {
				t.Fatalf("locate = %+v, %v, %v", got, ok, err)
			}
			if !ok {
				return
			}
			if want := filepath.Join(root, tt.path); got.path != want || got.driverRoot != tt.root || got.ino == 0 {
				t.Errorf("locate = %+v, want %s below %s", got, want, tt.root)
			}
		})
	}
}
