// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// TestContainerEdits: paths are the host's, in the order of the GPUs asked for, and no GPU gets another's node.
func TestContainerEdits(t *testing.T) {
	a, b := h100(0x1a, 0), h100(0x1b, 1)
	serve(t, a, b)
	d := newDriver(t)
	dev := filepath.Join(hostRoot, "dev")
	if err := os.MkdirAll(dev, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dev) })
	for i, name := range []string{"nvidia0", "nvidia1", "nvidiactl"} {
		if err := unix.Mknod(filepath.Join(dev, name), unix.S_IFCHR|0o666, int(unix.Mkdev(195, uint32(i)))); err != nil {
			t.Skipf("cannot make device nodes: %v", err)
		}
	}

	common, own, err := d.ContainerEdits(t.Context(), "", device.GPUUUID(b.uuid), device.GPUUUID(a.uuid))
	if err != nil {
		t.Fatal(err)
	}
	if len(own) != 2 {
		t.Fatalf("edits of %d GPUs, want 2", len(own))
	}
	var nodes []string
	for _, n := range append(append(common.DeviceNodes, own[0].DeviceNodes...), own[1].DeviceNodes...) {
		nodes = append(nodes, n.Path+" "+n.HostPath)
	}
	if diff := cmp.Diff([]string{"/dev/nvidiactl /dev/nvidiactl", "/dev/nvidia1 /dev/nvidia1", "/dev/nvidia0 /dev/nvidia0"}, nodes); diff != "" {
		t.Errorf("device nodes (-want +got):\n%s", diff)
	}
	mounts := map[string]string{}
	for _, m := range common.Mounts {
		mounts[m.ContainerPath] = m.HostPath
	}
	const dir = "/usr/lib/x86_64-linux-gnu/"
	for _, lib := range []string{dir + "libcuda.so.570.86.15", dir + "libnvidia-ml.so.570.86.15"} {
		if want := "/run/nvidia/driver" + lib; mounts[lib] != want {
			t.Errorf("%s is mounted from %q, want %q", lib, mounts[lib], want)
		}
	}
	if len(common.Hooks) != 0 {
		t.Errorf("hooks without a hook program: %v", common.Hooks)
	}

	if common, _, err = d.ContainerEdits(t.Context(), "/opt/nvidia-cdi-hook", device.GPUUUID(a.uuid)); err != nil || len(common.Hooks) == 0 {
		t.Fatalf("with a hook program: hooks %v, %v", common.Hooks, err)
	}
	if got := common.Hooks[0].Path; got != "/opt/nvidia-cdi-hook" {
		t.Errorf("hook path %q", got)
	}

	if _, _, err = d.ContainerEdits(t.Context(), "", "GPU-00000000-0000-4000-8000-0000000000ff"); err == nil {
		t.Error("edits of a GPU that is not there: no error")
	}
	nowhere := New(Options{HostRoot: t.TempDir(), Clock: d.clock})
	if _, _, err = nowhere.ContainerEdits(t.Context(), ""); !errors.Is(err, ErrNoLibrary) {
		t.Errorf("without a driver: %v", err)
	}
}
