// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// NVIDIASpecs makes container edits for NVIDIA GPUs: the GPU's own device node, the driver's control
// nodes, and the driver's libraries and tools.
//
// They use no hooks. nvcdi's hooks run nvidia-cdi-hook on the host at each container start, and a node
// whose driver came without the container toolkit has none: then no container would start. What the
// hooks would do is done with mounts: each library appears under its SONAME too, so that the loader
// finds it without ldconfig.
type NVIDIASpecs struct {
	// HostRoot is where the host's root directory is mounted here; "/" on the host itself.
	HostRoot string
	// DriverRoots are where the driver's files may be, as host paths, the first with libraries wins.
	DriverRoots []string
	// WithNVML calls use with the option that hands nvcdi an initialised NVML. It must not return nil
	// before use has returned.
	WithNVML func(ctx context.Context, use func(nvcdi.Option) error) error
}

var _ SpecMaker = NVIDIASpecs{}

// voidDevices keeps a legacy runtime hook from adding devices that the image asks for.
const voidDevices = "NVIDIA_VISIBLE_DEVICES=void"

// Edits implements SpecMaker.
func (n NVIDIASpecs) Edits(ctx context.Context, gpus []GPU) (common cdispecs.ContainerEdits, own []cdispecs.ContainerEdits, err error) {
	root, found := n.driverRoot()
	if !found {
		common, own, err = n.plain(gpus)
	} else {
		common, own, err = n.full(ctx, root, gpus)
	}
	if err != nil {
		return cdispecs.ContainerEdits{}, nil, err
	}
	for i, gpu := range gpus {
		node := fmt.Sprintf("/dev/nvidia%d", gpu.Minor)
		if !slices.ContainsFunc(own[i].DeviceNodes, func(d *cdispecs.DeviceNode) bool { return d.Path == node }) {
			return cdispecs.ContainerEdits{}, nil, fmt.Errorf("no device node %s for GPU %s on the host", node, gpu.UUID)
		}
	}
	return common, own, nil
}

// driverRoot finds the driver's files, as a path here.
func (n NVIDIASpecs) driverRoot() (string, bool) {
	for _, root := range n.DriverRoots {
		here := filepath.Join(n.HostRoot, root)
		for _, dir := range []string{"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"} {
			libs, err := filepath.Glob(filepath.Join(here, dir, "libnvidia-ml.so.*.*"))
			if err == nil && len(libs) > 0 {
				return here, true
			}
		}
	}
	return "", false
}

// full asks nvcdi.
func (n NVIDIASpecs) full(ctx context.Context, root string, gpus []GPU) (cdispecs.ContainerEdits, []cdispecs.ContainerEdits, error) {
	var common cdispecs.ContainerEdits
	var own []cdispecs.ContainerEdits
	err := n.WithNVML(ctx, func(nvml nvcdi.Option) error {
		lib, err := nvcdi.New(nvml,
			nvcdi.WithMode(nvcdi.ModeNvml),
			nvcdi.WithLogger(nvcdiLogger{klog.FromContext(ctx).V(5)}),
			nvcdi.WithDriverRoot(root),
			nvcdi.WithDevRoot(n.HostRoot),
			nvcdi.WithVendor(cdiVendor), nvcdi.WithClass(cdiClass),
			nvcdi.WithDisabledHooks(nvcdi.AllHooks),
			// It would load one more library of the host into this process.
			nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
		)
		if err != nil {
			return fmt.Errorf("open the driver root %s: %w", root, err)
		}
		edits, err := lib.GetCommonEdits()
		if err != nil {
			return fmt.Errorf("find the driver's files below %s: %w", root, err)
		}
		common = *edits.ContainerEdits
		for _, gpu := range gpus {
			// One at a time: each GPU is known by its UUID, not by its place in a list.
			devices, err := lib.GetDeviceSpecsByID(string(gpu.UUID))
			if err != nil {
				return fmt.Errorf("find the device nodes of GPU %s: %w", gpu.UUID, err)
			}
			if len(devices) == 0 {
				return fmt.Errorf("find the device nodes of GPU %s: there are none", gpu.UUID)
			}
			own = append(own, devices[0].ContainerEdits)
		}
		return nil
	})
	if err != nil {
		return cdispecs.ContainerEdits{}, nil, fmt.Errorf("make CDI edits: %w", err)
	}
	n.toHost(&common)
	common.Mounts, err = n.withSONames(common.Mounts)
	if err != nil {
		return cdispecs.ContainerEdits{}, nil, err
	}
	for i := range own {
		n.toHost(&own[i])
	}
	return common, own, nil
}

// toHost turns paths as they are here into the host's.
func (n NVIDIASpecs) toHost(e *cdispecs.ContainerEdits) {
	// One at the end of the list gets the list's capacity otherwise, and two lists share memory.
	e.DeviceNodes, e.Mounts = slices.Clone(e.DeviceNodes), slices.Clone(e.Mounts)
	for i, d := range e.DeviceNodes {
		c := *d
		if c.HostPath == "" {
			c.HostPath = c.Path
		}
		c.HostPath, c.Path = n.hostPath(c.HostPath), n.hostPath(c.Path)
		if c.HostPath == c.Path {
			c.HostPath = ""
		}
		e.DeviceNodes[i] = &c
	}
	for i, m := range e.Mounts {
		c := *m
		c.HostPath, c.ContainerPath = n.hostPath(c.HostPath), n.hostPath(c.ContainerPath)
		e.Mounts[i] = &c
	}
}

func (n NVIDIASpecs) hostPath(path string) string {
	root := strings.TrimSuffix(filepath.Clean(n.HostRoot), "/")
	if rest, ok := strings.CutPrefix(path, root+"/"); ok && root != "" {
		return "/" + rest
	}
	return path
}

// withSONames adds a mount of each library under its SONAME, and under its plain name where the host
// has it so.
func (n NVIDIASpecs) withSONames(mounts []*cdispecs.Mount) ([]*cdispecs.Mount, error) {
	taken := map[string]bool{}
	for _, m := range mounts {
		taken[m.ContainerPath] = true
	}
	out := slices.Clone(mounts)
	for _, m := range mounts {
		if !strings.Contains(filepath.Base(m.ContainerPath), ".so.") {
			continue
		}
		names, err := n.libraryNames(filepath.Join(n.HostRoot, m.HostPath))
		if err != nil {
			return nil, fmt.Errorf("read the names of library %s: %w", m.HostPath, err)
		}
		for _, name := range names {
			path := filepath.Join(filepath.Dir(m.ContainerPath), name)
			if taken[path] {
				continue
			}
			taken[path] = true
			c := *m
			c.ContainerPath = path
			out = append(out, &c)
		}
	}
	return out, nil
}

// libraryNames are the names by which a loader or dlopen asks for the library.
func (n NVIDIASpecs) libraryNames(file string) ([]string, error) {
	f, err := elf.Open(file)
	var format *elf.FormatError
	if errors.As(err, &format) {
		return nil, nil // a linker script or a stub: it has the one name
	}
	if err != nil {
		return nil, err
	}
	sonames, err := f.DynString(elf.DT_SONAME)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	plain, _, _ := strings.Cut(filepath.Base(file), ".so.")
	plain += ".so"
	if _, err := os.Lstat(filepath.Join(filepath.Dir(file), plain)); err == nil || plain == "libcuda.so" {
		// Many programs open libcuda.so, and drivers do not always install it.
		sonames = append(sonames, plain)
	}
	return sonames, nil
}

// plain serves a node on which the driver's files cannot be found: the container brings its own.
func (n NVIDIASpecs) plain(gpus []GPU) (common cdispecs.ContainerEdits, own []cdispecs.ContainerEdits, err error) {
	common.Env = []string{voidDevices}
	for _, name := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"} {
		if n.isDevice(name) {
			common.DeviceNodes = append(common.DeviceNodes, &cdispecs.DeviceNode{Path: "/dev/" + name})
		}
	}
	for _, gpu := range gpus {
		var e cdispecs.ContainerEdits
		if name := fmt.Sprintf("nvidia%d", gpu.Minor); n.isDevice(name) {
			e.DeviceNodes = []*cdispecs.DeviceNode{{Path: "/dev/" + name}}
		}
		own = append(own, e)
	}
	return common, own, nil
}

func (n NVIDIASpecs) isDevice(name string) bool {
	info, err := os.Stat(filepath.Join(n.HostRoot, "dev", name))
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// nvcdiLogger takes nvcdi's chatter, which is for those who look for a missing file.
type nvcdiLogger struct{ to logr.Logger }

func (l nvcdiLogger) say(level, format string, args []any) {
	l.to.Info("nvcdi", "level", level, "says", fmt.Sprintf(format, args...))
}

// Tracef implements nvcdi's logger, as the others do.
func (l nvcdiLogger) Tracef(format string, args ...any) { l.say("trace", format, args) }

// Debugf: see Tracef.
func (l nvcdiLogger) Debugf(format string, args ...any) { l.say("debug", format, args) }

// Infof: see Tracef.
func (l nvcdiLogger) Infof(format string, args ...any) { l.say("info", format, args) }

// Warningf: see Tracef.
func (l nvcdiLogger) Warningf(format string, args ...any) { l.say("warning", format, args) }

// Errorf: see Tracef.
func (l nvcdiLogger) Errorf(format string, args ...any) { l.say("error", format, args) }
