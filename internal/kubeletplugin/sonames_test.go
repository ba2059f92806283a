// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

func TestSONames(t *testing.T) {
	// Any library of this machine that has a SONAME stands for the driver's.
	libs, err := filepath.Glob("/lib*/*/libm.so.6")
	if more, _ := filepath.Glob("/lib*/libm.so.6"); len(libs) == 0 {
		libs = more
	}
	if err != nil || len(libs) == 0 {
		t.Fatalf("no libm.so.6 on this machine: %v", err)
	}
	library, err := os.ReadFile(libs[0])
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	dir := filepath.Join(root, "driver/lib")
	if err = os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"libnvidia-ml.so.570.86": library, "libnvidia-ml.so": nil, "libnvidia-text.so.570.86": []byte("GROUP ( x )"),
	} {
		if err = os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	mount := func(host, container string) *cdispecs.Mount {
		return &cdispecs.Mount{HostPath: "/driver/lib/" + host, ContainerPath: "/usr/lib/" + container, Options: []string{"ro"}}
	}
	given := []*cdispecs.Mount{
		mount("libnvidia-ml.so.570.86", "libnvidia-ml.so.570.86"),
		mount("libnvidia-text.so.570.86", "libnvidia-text.so.570.86"),
		{HostPath: "/driver/bin/nvidia-smi", ContainerPath: "/usr/bin/nvidia-smi"},
	}
	got, err := withSONames(root, cdispecs.ContainerEdits{Mounts: given})
	if err != nil {
		t.Fatal(err)
	}
	want := append(given[:len(given):len(given)], mount("libnvidia-ml.so.570.86", "libm.so.6"), mount("libnvidia-ml.so.570.86", "libnvidia-ml.so"))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("mounts (-want +got):\n%s", diff)
	}

	for name, leave := range map[string]struct {
		root  string
		edits cdispecs.ContainerEdits
	}{
		"hooks make the links": {root, cdispecs.ContainerEdits{Mounts: given, Hooks: []*cdispecs.Hook{{HookName: "createContainer"}}}},
		"not asked for":        {"", cdispecs.ContainerEdits{Mounts: given}},
	} {
		if got, err := withSONames(leave.root, leave.edits); err != nil || !cmp.Equal(given, got) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	given[0].HostPath = "/driver/lib/gone.so.1"
	if _, err := withSONames(root, cdispecs.ContainerEdits{Mounts: given}); err == nil {
		t.Error("a library that is gone was passed over")
	}
}
