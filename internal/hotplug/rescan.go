// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Hint says where a function is expected.
type Hint struct {
	// Port is the bridge above it.
	Port device.PCIAddress
	// Address is the function's own address, as it was before.
	Address device.PCIAddress
}

// EmptySlots are the hot-plug slots that no function is in: where a device can come.
func (p *PCI) EmptySlots(ctx context.Context) ([]Hint, error) {
	slots, err := p.slots()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(p.bus("devices"))
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	for _, e := range entries {
		place, _, _ := strings.Cut(e.Name(), ".")
		delete(slots, place)
	}
	hints := make([]Hint, 0, len(slots))
	for _, place := range slices.Sorted(maps.Keys(slots)) {
		if a, err := device.ParsePCIAddress(place + ".0"); err == nil { // a slot that holds no address is not one to fill
			hints = append(hints, Hint{Address: a})
		}
	}
	return hints, ctx.Err()
}

// Rescan lets the kernel look for functions that it did not notice, as narrowly as each hint allows: the
// bus below the port, the port, the bus of the address, all buses; all buses without a hint. It returns
// the files it wrote, each once. The kernel has finished looking when it returns nil; whether anything
// came is for Snapshot to say.
//
// It waits at most the write timeout for each. A rescan that hangs goes on in the kernel, and BusyError says so.
func (p *PCI) Rescan(ctx context.Context, hints ...Hint) ([]string, error) {
	if len(hints) == 0 {
		hints = []Hint{{}}
	}
	var written []string
	for _, hint := range hints {
		file, err := p.rescanFile(hint)
		if err != nil {
			return written, err
		}
		if slices.Contains(written, file) {
			continue
		}
		written = append(written, file)
		if err := p.rescan(ctx, file); err != nil {
			return written, err
		}
	}
	return written, nil
}

func (p *PCI) rescan(ctx context.Context, file string) error {
	ctx, cancel := p.deadline(ctx)
	defer cancel()
	for {
		job, started := p.writes.start(file, "1", p.clock.Now())
		select {
		case <-ctx.Done():
			return &BusyError{Operation: "rescan", File: file, Since: job.begun, Cause: context.Cause(ctx)}
		case <-job.done:
		}
		if job.err != nil {
			return fmt.Errorf("rescan PCI by %s: %w", file, job.err)
		}
		if started {
			return nil
		}
		// Another caller's rescan may have passed the place before the device came: ask once more.
	}
}

// rescanFile chooses the narrowest file that exists.
func (p *PCI) rescanFile(hint Hint) (string, error) {
	all := p.bus("rescan")
	var candidates []string
	if !hint.Port.IsZero() {
		// The file of the bus below the port is narrower than the port's own, which makes the kernel
		// look at the bus that the port sits on. It also lets the kernel resize the port's windows.
		below, err := filepath.Glob(p.bus("devices", hint.Port.String(), "pci_bus", "*", "rescan"))
		if err != nil {
			return "", fmt.Errorf("look for the bus below port %s: %w", hint.Port, err)
		}
		candidates = append(candidates, below...)
		candidates = append(candidates, p.bus("devices", hint.Port.String(), "rescan"))
	}
	if !hint.Address.IsZero() {
		bus := fmt.Sprintf("%04x:%02x", hint.Address.Domain, hint.Address.Bus)
		found, err := filepath.Glob(p.bus("devices", "*", "pci_bus", bus, "rescan"))
		if err != nil {
			return "", fmt.Errorf("look for PCI bus %s: %w", bus, err)
		}
		candidates = append(candidates, found...)
	}
	for _, file := range append(candidates, all) {
		_, err := os.Stat(file)
		if err == nil {
			return file, nil
		}
		if !gone(err) {
			return "", fmt.Errorf("look for rescan file: %w", err)
		}
	}
	return "", fmt.Errorf("find rescan file: %s is missing; is sysfs mounted there?", all)
}

// errTimeout is the cause of a wait that reached the write timeout.
var errTimeout = errors.New("no answer within the write timeout")

// deadline bounds a wait by the write timeout, measured with the injected clock.
func (p *PCI) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := p.clock.NewTimer(p.timeout)
	go func() {
		defer timer.Stop()
		select {
		case <-ctx.Done():
		case <-timer.C():
			cancel(errTimeout)
		}
	}()
	return ctx, func() { cancel(nil) }
}
