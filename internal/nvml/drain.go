// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Rediscover makes the library see the GPUs that are on the bus now. If want is given and the driver does
// not know all of them after that, it returns ErrNotFound: their driver may not be bound yet.
func (d *Driver) Rediscover(ctx context.Context, want ...device.PCIAddress) error {
	return d.run(ctx, "rediscover GPUs", func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		if len(want) > 0 && s.sees(lib, want) == nil {
			return nil
		}
		err = s.discover(lib)
		if err != nil && !errors.Is(err, ErrUnsupported) {
			return s.recover(err)
		}
		if err == nil && (len(want) == 0 || s.sees(lib, want) == nil) {
			_, err = s.count(lib)
			return err
		}
		// The library cannot discover, or did not take it into its list.
		if lib, err = s.restart(); err != nil {
			return err
		}
		if _, err = s.count(lib); err != nil {
			return err
		}
		return s.sees(lib, want)
	})
}

func (s *session) sees(lib *library, want []device.PCIAddress) error {
	for _, pci := range want {
		if _, err := s.handle(lib, pci); err != nil {
			return err
		}
	}
	return nil
}

// discover asks the driver to probe the bus. A refusal by the system counts as not supported: initialising
// anew does without.
func (s *session) discover(lib *library) error {
	name, err := s.call(lib, "nvmlDeviceDiscoverGpus")
	if err != nil {
		return err
	}
	_, ret := lib.nvml.DeviceDiscoverGpus()
	if ret == nvml.ERROR_NO_PERMISSION || ret == nvml.ERROR_OPERATING_SYSTEM {
		ret = nvml.ERROR_NOT_SUPPORTED
	}
	return failure(name, "", ret)
}

// Drain makes the driver take no new work on the GPU: persistence mode off, then drain state on, as
// nvidia-smi does. Afterwards this process holds nothing of the GPU, also when Drain returned an error,
// unless that is ErrHung. It may be repeated. ErrUnsupported means that the driver has no drain state:
// persistence mode is off all the same and removal can go on. ErrNotFound means that the driver has no such
// GPU, so that there is nothing to drain.
func (d *Driver) Drain(ctx context.Context, pci device.PCIAddress) error {
	return d.run(ctx, "drain "+pci.String(), func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		err = s.drain(lib, pci)
		// From here a new session does not see the GPU; the old one held its device node.
		return errors.Join(err, s.shutdown())
	})
}

func (s *session) drain(lib *library, pci device.PCIAddress) error {
	draining, err := s.queryDrain(lib, pci)
	switch {
	case err == nil && draining:
		s.setLeaving(pci, false)
		return nil
	case err != nil && !errors.Is(err, ErrUnsupported):
		return err
	}
	dev, err := s.handle(lib, pci)
	if err != nil {
		return err
	}
	was, err := s.persistence(lib, dev, pci)
	if err != nil {
		return err
	}
	s.setLeaving(pci, was)
	if was {
		if err = s.setPersistence(lib, dev, pci, nvml.FEATURE_DISABLED); err != nil {
			return err
		}
	}
	return s.setDrain(lib, pci, nvml.FEATURE_ENABLED)
}

// setLeaving notes that the GPU is on its way out. A repeated Drain must not forget what the first saw.
func (s *session) setLeaving(pci device.PCIAddress, persistence bool) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if !s.gone {
		s.d.leaving[pci] = s.d.leaving[pci] || persistence
	}
}

// Undrain calls a removal off: drain state off, and persistence mode on again if Drain switched it off.
func (d *Driver) Undrain(ctx context.Context, pci device.PCIAddress) error {
	return d.run(ctx, "undrain "+pci.String(), func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		if err = s.setDrain(lib, pci, nvml.FEATURE_DISABLED); err != nil && !errors.Is(err, ErrUnsupported) {
			return s.recover(err)
		}
		d.mu.Lock()
		persistence := d.leaving[pci]
		d.mu.Unlock()
		// The session may be one that began while the GPU was hidden.
		if lib, err = s.restart(); err != nil {
			return err
		}
		if persistence {
			dev, err := s.handle(lib, pci)
			if err != nil {
				return err
			}
			if err = s.setPersistence(lib, dev, pci, nvml.FEATURE_ENABLED); err != nil {
				return err
			}
		}
		d.forget(pci)
		return nil
	})
}

func (d *Driver) forget(pci device.PCIAddress) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.leaving, pci)
}

// Draining tells whether the GPU at an address is in drain state. It finds GPUs that Inventory hides.
func (d *Driver) Draining(ctx context.Context, pci device.PCIAddress) (bool, error) {
	var draining bool
	err := d.run(ctx, "read the drain state of "+pci.String(), func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		on, err := s.queryDrain(lib, pci)
		if err != nil {
			return s.recover(err)
		}
		s.publish(func() { draining = on })
		return nil
	})
	return draining, err
}

// Remove takes the GPU from the driver and from the bus, its link left up. ErrUnsupported: remove it through
// sysfs instead, as virtual machines and old drivers need. ErrInUse: somebody still holds it, it stays
// drained. ErrNotFound: the driver does not have it, which counts as removed here; sysfs has the last word.
func (d *Driver) Remove(ctx context.Context, pci device.PCIAddress) error {
	return d.run(ctx, "remove "+pci.String(), func(s *session) error {
		// A session from before may hold the device node.
		lib, err := s.restart()
		if err != nil {
			return err
		}
		name, err := s.call(lib, "nvmlDeviceRemoveGpu_v2")
		if err != nil {
			return errors.Join(err, s.shutdown())
		}
		ret := lib.nvml.DeviceRemoveGpu_v2(pciInfo(pci), nvml.DETACH_GPU_REMOVE, nvml.PCIE_LINK_KEEP)
		if err = addressed(name, pci, ret); err != nil {
			return errors.Join(err, s.shutdown())
		}
		d.forget(pci)
		_, err = s.count(lib)
		return err
	})
}

// Removed tells that the GPU has left by another way than Remove.
func (d *Driver) Removed(pci device.PCIAddress) { d.forget(pci) }

// addressed is failure for the calls that name a GPU by its address: NVML says "invalid argument" where it
// has no GPU there.
func addressed(call string, pci device.PCIAddress, ret nvml.Return) error {
	if ret == nvml.ERROR_INVALID_ARGUMENT {
		return fmt.Errorf("%s on %s: %w", call, pci, ErrNotFound)
	}
	return failure(call, pci.String(), ret)
}

func (s *session) queryDrain(lib *library, pci device.PCIAddress) (bool, error) {
	name, err := s.call(lib, "nvmlDeviceQueryDrainState")
	if err != nil {
		return false, err
	}
	on, ret := lib.nvml.DeviceQueryDrainState(pciInfo(pci))
	return ret == nvml.SUCCESS && on == nvml.FEATURE_ENABLED, addressed(name, pci, ret)
}

func (s *session) setDrain(lib *library, pci device.PCIAddress, on nvml.EnableState) error {
	name, err := s.call(lib, "nvmlDeviceModifyDrainState")
	if err != nil {
		return err
	}
	return addressed(name, pci, lib.nvml.DeviceModifyDrainState(pciInfo(pci), on))
}

// persistence tells whether persistence mode is on; a driver without it has it off.
func (s *session) persistence(lib *library, dev nvml.Device, pci device.PCIAddress) (bool, error) {
	name, err := s.call(lib, "nvmlDeviceGetPersistenceMode")
	if err == nil {
		var mode nvml.EnableState
		var ret nvml.Return
		mode, ret = dev.GetPersistenceMode()
		if err = failure(name, pci.String(), ret); err == nil {
			return mode == nvml.FEATURE_ENABLED, nil
		}
	}
	if errors.Is(err, ErrUnsupported) {
		err = nil
	}
	return false, err
}

func (s *session) setPersistence(lib *library, dev nvml.Device, pci device.PCIAddress, mode nvml.EnableState) error {
	name, err := s.call(lib, "nvmlDeviceSetPersistenceMode")
	if err != nil {
		return err
	}
	return failure(name, pci.String(), dev.SetPersistenceMode(mode))
}
