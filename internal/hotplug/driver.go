// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Bind makes the kernel offer an unbound function to its drivers. A function that our driver has is
// done; one that another driver has, or is reserved for, is left alone and DriverError names it.
func (p *PCI) Bind(ctx context.Context, addr device.PCIAddress) error {
	dir := p.bus("devices", addr.String())
	if err := p.checkDriver(addr, dir); err == nil || !errors.Is(err, ErrNoDriver) {
		return err
	}
	override, err := optional(readTrimmed(dir, "driver_override"))
	if err != nil {
		return fmt.Errorf("bind PCI device %s: %w", addr, err)
	}
	// The kernel prints a pointer to nothing as "(null)".
	if override != "" && override != "(null)" && override != p.driver {
		return &DriverError{Address: addr, Driver: override}
	}
	if _, err := os.Stat(p.bus("drivers", p.driver)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("bind PCI device %s: %w: driver %s is not loaded", addr, ErrNoDriver, p.driver)
	}
	ctx, cancel := p.deadline(ctx)
	defer cancel()
	file := p.bus("drivers_probe")
	for {
		// All functions share the file, so wait for another one's probe and then take the turn.
		job, started := p.writes.start(file, addr.String(), p.clock.Now())
		select {
		case <-ctx.Done():
			return &BusyError{Operation: "probe", File: file, Since: job.begun, Cause: context.Cause(ctx)}
		case <-job.done:
		}
		if !started {
			continue
		}
		// A probe that fails returns an error too, but the driver link is the better witness.
		if err := p.checkDriver(addr, dir); err == nil || !errors.Is(err, ErrNoDriver) {
			return err
		}
		if job.err != nil {
			return fmt.Errorf("bind PCI device %s: %w: %w", addr, ErrNoDriver, job.err)
		}
		return fmt.Errorf("bind PCI device %s: %w: the probe of %s did not succeed, see dmesg", addr, ErrNoDriver, p.driver)
	}
}

// checkDriver returns nil if our driver has the function.
func (p *PCI) checkDriver(addr device.PCIAddress, dir string) error {
	there, err := p.present(addr)
	if err != nil {
		return err
	}
	if !there {
		return fmt.Errorf("read driver of PCI device %s: %w", addr, fs.ErrNotExist)
	}
	driver, err := linkBase(dir, "driver")
	switch {
	case err != nil:
		return fmt.Errorf("read driver of PCI device %s: %w", addr, err)
	case driver == "":
		return ErrNoDriver
	case driver != p.driver:
		return &DriverError{Address: addr, Driver: driver}
	}
	return nil
}
