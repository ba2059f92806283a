// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// XID is an error of a GPU that the driver reported. NVIDIA's list of XID errors says what a code means.
type XID struct {
	PCI  device.PCIAddress
	UUID device.GPUUUID
	Code uint64
}

// mostEvents bounds what one look takes: a GPU in agony reports without end.
const mostEvents = 256

// listener is the library's set of events and the GPUs that are in it. It ends with the library's session.
type listener struct {
	set  nvml.EventSet
	gpus []listened
}

type listened struct {
	handle nvml.Device
	pci    device.PCIAddress
	uuid   device.GPUUUID
}

// XIDs returns the errors that GPUs reported since the last call. The first call only begins to listen, and
// so does the first one after the library was closed, as for a GPU that leaves: what happens meanwhile is
// not told. It does not wait for an error. ErrUnsupported: this driver reports none.
func (d *Driver) XIDs(ctx context.Context) ([]XID, error) {
	var found []XID
	err := d.run(ctx, "read errors of GPUs", func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		all, err := s.xids(lib)
		if err != nil {
			// A set that failed once, as when a GPU in it is lost, tells nothing reliable any more.
			return errors.Join(s.recover(err), s.unlisten())
		}
		s.publish(func() { found = all })
		return s.letGo(lib)
	})
	return found, err
}

func (s *session) xids(lib *library) ([]XID, error) {
	l, err := s.listen(lib)
	if err != nil {
		return nil, err
	}
	name, err := s.call(lib, "nvmlEventSetWait_v2", "nvmlEventSetWait")
	if err != nil {
		return nil, err
	}
	var found []XID
	for range mostEvents {
		e, ret := l.set.Wait(0)
		if ret == nvml.ERROR_TIMEOUT {
			break
		}
		if err = failure(name, "", ret); err != nil {
			return nil, err
		}
		for _, g := range l.gpus {
			if g.handle == e.Device && e.EventType == nvml.EventTypeXidCriticalError {
				found = append(found, XID{PCI: g.pci, UUID: g.uuid, Code: e.EventData})
			}
		}
	}
	return found, nil
}

// listen returns a set that has all GPUs of the library's list in it.
func (s *session) listen(lib *library) (*listener, error) {
	l := s.d.listener()
	if l == nil {
		name, err := s.call(lib, "nvmlEventSetCreate")
		if err != nil {
			return nil, err
		}
		set, ret := lib.nvml.EventSetCreate()
		if err = failure(name, "", ret); err != nil {
			return nil, err
		}
		l = &listener{set: set}
		if !s.d.setListener(s, l) {
			return nil, errors.Join(ErrHung, failure("nvmlEventSetFree", "", set.Free()))
		}
	}
	count, err := s.count(lib)
	if err != nil {
		return nil, err
	}
	for i := range count {
		if err = s.register(lib, l, i); err != nil && !errors.Is(err, ErrLost) {
			return nil, err
		}
	}
	return l, nil
}

// register adds a GPU of the library's list to the set, unless it is there.
func (s *session) register(lib *library, l *listener, index int) error {
	name, err := s.call(lib, "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
	if err != nil {
		return err
	}
	on := fmt.Sprintf("GPU %d", index)
	dev, ret := lib.nvml.DeviceGetHandleByIndex(index)
	if err = failure(name, on, ret); err != nil {
		return err
	}
	for _, g := range l.gpus {
		if g.handle == dev {
			return nil
		}
	}
	g := s.read(lib, dev)
	if g.Problem != nil {
		return g.Problem
	}
	if name, err = s.call(lib, "nvmlDeviceRegisterEvents"); err != nil {
		return err
	}
	ret = dev.RegisterEvents(nvml.EventTypeXidCriticalError, l.set)
	if err = failure(name, g.PCI.String(), ret); err != nil && !errors.Is(err, ErrUnsupported) {
		return err
	}
	// One that reports no events is in the list all the same: it is not asked again.
	l.gpus = append(l.gpus, listened{handle: dev, pci: g.PCI, uuid: g.UUID})
	return nil
}

// unlisten frees the set of events, if there is one.
func (s *session) unlisten() error {
	l := s.d.listener()
	if l == nil || !s.d.setListener(s, nil) {
		return nil
	}
	s.begin("nvmlEventSetFree")
	return failure("nvmlEventSetFree", "", l.set.Free())
}

func (d *Driver) listener() *listener {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.events
}

// setListener is false where the session was given up.
func (d *Driver) setListener(s *session, l *listener) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.gone {
		return false
	}
	d.events = l
	return true
}
