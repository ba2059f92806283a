// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// ContainerEdits returns what a container needs to use GPUs: the driver's libraries and control nodes once,
// and each GPU's own nodes in the order given. Paths are the host's. hook is the path, on the host, of
// nvidia-cdi-hook, which makes the libraries known to the container's loader; without it (empty) there are
// no hooks, and the container has to find the libraries by itself.
func (d *Driver) ContainerEdits(ctx context.Context, hook string, gpus ...device.GPUUUID) (specs.ContainerEdits, []specs.ContainerEdits, error) {
	var common specs.ContainerEdits
	own := make([]specs.ContainerEdits, 0, len(gpus))
	err := d.Do(ctx, "make the container edits", func(lib nvml.Interface) error {
		maker, err := d.specMaker(lib, hook, klog.FromContext(ctx))
		if err != nil {
			return err
		}
		edits, err := maker.GetCommonEdits()
		if err != nil {
			return fmt.Errorf("find the driver's files: %w", err)
		}
		spec := specs.Spec{ContainerEdits: *edits.ContainerEdits}
		for _, uuid := range gpus {
			devices, err := maker.GetDeviceSpecsByID(string(uuid))
			if err != nil {
				return fmt.Errorf("find the device nodes of %s: %w", uuid, err)
			}
			if len(devices) == 0 {
				return fmt.Errorf("find the device nodes of %s: %w", uuid, ErrNotFound)
			}
			spec.Devices = append(spec.Devices, devices[0])
		}
		if err := d.asOnHost(&spec); err != nil {
			return err
		}
		common = spec.ContainerEdits
		for _, dev := range spec.Devices {
			own = append(own, dev.ContainerEdits)
		}
		return nil
	})
	if err != nil {
		// A call given up may still write to these.
		return specs.ContainerEdits{}, nil, err
	}
	return common, own, nil
}

// driverRoot is where the driver was installed, as this process sees it.
func (d *Driver) driverRoot() string { return filepath.Join(d.hostRoot, d.Status().DriverRoot) }

func (d *Driver) specMaker(lib nvml.Interface, hook string, log klog.Logger) (nvcdi.Interface, error) {
	options := []nvcdi.Option{
		nvcdi.WithLogger(cdiLog{log}),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(lib),
		nvcdi.WithDriverRoot(d.driverRoot()),
		nvcdi.WithDevRoot(d.hostRoot),
		// A second library that would be loaded beside NVML and adds nothing for whole GPUs.
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	}
	if hook == "" {
		options = append(options, nvcdi.WithDisabledHooks(nvcdi.AllHooks))
	} else {
		options = append(options, nvcdi.WithNVIDIACDIHookPath(hook))
	}
	maker, err := nvcdi.New(options...)
	if err != nil {
		return nil, fmt.Errorf("set up the CDI library for the driver below %s: %w", d.driverRoot(), err)
	}
	return maker, nil
}

// cdiLog takes what nvcdi says into our log. It warns of each optional file that a driver lacks, for every
// container, so that all of it is for whoever looks into one.
type cdiLog struct{ log klog.Logger }

const cdiVerbosity = 4

func (l cdiLog) say(format string, args ...any) {
	l.log.V(cdiVerbosity).Info("CDI library", "says", fmt.Sprintf(format, args...))
}

func (l cdiLog) Debugf(format string, args ...any)   { l.say(format, args...) }
func (l cdiLog) Errorf(format string, args ...any)   { l.say(format, args...) }
func (l cdiLog) Infof(format string, args ...any)    { l.say(format, args...) }
func (l cdiLog) Tracef(format string, args ...any)   { l.say(format, args...) }
func (l cdiLog) Warningf(format string, args ...any) { l.say(format, args...) }

// asOnHost turns paths below the host root into those of the host. A driver below a root of its own shows in
// the container where it would be if it were installed there.
func (d *Driver) asOnHost(spec *specs.Spec) error {
	err := root.NewDriverTransformer(
		root.WithDriverRoot(d.driverRoot()), root.WithTargetDriverRoot(d.Status().DriverRoot),
		root.WithDevRoot(d.hostRoot), root.WithTargetDevRoot("/"),
	).Transform(spec)
	if err != nil {
		return fmt.Errorf("turn the paths of the container edits into the host's: %w", err)
	}
	return nil
}
