// SPDX-License-Identifier: Apache-2.0

package hostroot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
)

const nvidiaSMI = `#!/bin/sh
# Stands for the driver's tool, so that a container's view of the driver is complete.
echo "NVIDIA-SMI: simulated driver"
ls -l /dev/nvidia* 2>/dev/null
`

// stubNames are the libraries of a driver that a CUDA container needs, besides NVML.
func stubNames() []string {
	return []string{"libcuda", "libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libnvidia-opencl", "libnvidia-gpucomp", "libcudadebugger"}
}

// LibDir is the directory of the driver's libraries below the driver root, as Debian lays it out.
func LibDir() string {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return filepath.Join("usr/lib", triplet)
}

// DriverRoot is where the driver's files are, below the host root.
func (r *Root) DriverRoot() string { return filepath.Join(r.dir, "run/nvidia/driver") }

// InstallDriver copies the driver's files below the driver root. What is there with the same content stays.
func (r *Root) InstallDriver(d config.Driver) error {
	lib := filepath.Join(r.DriverRoot(), LibDir())
	bin := filepath.Join(r.DriverRoot(), "usr/bin")
	if err := errors.Join(makeDir(lib), makeDir(bin)); err != nil {
		return fmt.Errorf("make driver root: %w", err)
	}
	var errs []error
	if d.NVMLLibrary != "" {
		errs = append(errs, installLibrary(d.NVMLLibrary, lib, "libnvidia-ml", d.Version))
	}
	if d.Stub != "" {
		for _, name := range stubNames() {
			errs = append(errs, installLibrary(d.Stub, lib, name, d.Version))
		}
	}
	for _, f := range d.Files {
		to := filepath.Join(r.DriverRoot(), filepath.Clean("/"+f.Path))
		errs = append(errs, makeDir(filepath.Dir(to)), copyFile(f.Source, to))
	}
	smi := filepath.Join(bin, "nvidia-smi")
	errs = append(errs, write(smi, nvidiaSMI), os.Chmod(smi, 0o755)) //nolint:gosec // a program
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("install the driver's files in %s: %w", r.DriverRoot(), err)
	}
	return nil
}

// installLibrary makes name.so.<version> and the two links that a driver installs with it.
func installLibrary(source, dir, name, version string) error {
	full := name + ".so." + version
	if err := copyFile(source, filepath.Join(dir, full)); err != nil {
		return err
	}
	return errors.Join(symlink(full, filepath.Join(dir, name+".so.1")), symlink(name+".so.1", filepath.Join(dir, name+".so")))
}

// copyFile replaces by rename: a process may have the old library mapped.
func copyFile(source, target string) error {
	data, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(target); err == nil && string(old) == string(data) {
		return nil
	}
	tmp := target + ".new"
	return errors.Join(os.WriteFile(tmp, data, 0o755), os.Rename(tmp, target)) //nolint:gosec // a library that everybody may load
}
