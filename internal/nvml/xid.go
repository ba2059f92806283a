// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// XID is an error of a GPU that the driver reported. NVIDIA's list of XID errors says what a code means.
type XID struct {
	PCI  device.PCIAddress
	UUID device.GPUUUID
	Code uint64
}

const (
	// mostEvents bounds what one look takes from one GPU: a GPU in agony reports without end.
	mostEvents = 256
	// mostListened bounds the GPUs that are listened to; no machine has room for more.
	mostListened = 64
	// mostHeard bounds what waits for the next caller of XIDs.
	mostHeard = 4 * mostEvents
)

// listened is a GPU and the library's set of its events. Each has a set of its own: once a GPU is lost, a set that it is
// in answers with nothing else. It ends with the library's session.
type listened struct {
	handle nvml.Device
	pci    device.PCIAddress
	uuid   device.GPUUUID
	// set is nil for a GPU that reports no events: it is in the list so that it is not asked again.
	set nvml.EventSet
	// busy is guarded by Driver.mu: a call with the set is under way, and may hang; nobody else may use or free it.
	busy bool
}

// XIDs returns the errors that GPUs reported since the last call, also beside an error: what was read before it. The
// first call only begins to listen. After the library was closed, as for a GPU that leaves, this call or Inventory
// begins anew: what happens in between is not told, what was unread before is. It does not wait for an error.
// ErrUnsupported: this driver reports none.
func (d *Driver) XIDs(ctx context.Context) ([]XID, error) {
	var found []XID
	err := d.run(ctx, "read errors of GPUs", func(s *session) error {
		err := s.xids()
		s.publish(func() { found, d.heard = d.heard, nil })
		return err
	})
	d.mu.Lock() // whoever is given up may be about to publish
	defer d.mu.Unlock()
	return found, err
}

func (s *session) xids() error {
	s.d.mu.Lock()
	s.d.listens = true
	s.d.mu.Unlock()
	lib, err := s.library()
	if err != nil {
		return err
	}
	err = s.listen(lib)
	err = errors.Join(err, s.hear())
	if err != nil {
		return s.recover(err)
	}
	return s.letGo(lib)
}

// listenAgain does so after the library was closed and opened, if anybody listened before. What cannot be listened to,
// the next call of XIDs will tell.
func (s *session) listenAgain(lib *library) {
	s.d.mu.Lock()
	wanted := s.d.listens && s.d.open && !s.gone
	s.d.mu.Unlock()
	if wanted {
		_ = s.listen(lib) //nolint:errcheck // told by XIDs
	}
}

// listen begins with the GPUs of the library's list that are not listened to yet.
func (s *session) listen(lib *library) error {
	// All that it takes is looked for first: a set that cannot be read is of no use.
	for _, names := range [][]string{
		{"nvmlEventSetCreate"},
		{"nvmlDeviceRegisterEvents"},
		{"nvmlEventSetWait_v2", "nvmlEventSetWait"},
		{"nvmlEventSetFree"},
	} {
		if _, err := s.call(lib, names...); err != nil {
			return err
		}
	}
	count, err := s.count(lib)
	if err != nil {
		return err
	}
	var all []error
	for i := range count {
		err := s.register(lib, i)
		if errors.Is(err, ErrDriverNotLoaded) || s.ctx.Err() != nil {
			return errors.Join(append(all, err)...)
		}
		if err != nil && !errors.Is(err, ErrLost) {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// register begins to listen to a GPU of the library's list, unless somebody does.
func (s *session) register(lib *library, index int) error {
	name, err := s.call(lib, "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
	if err != nil {
		return err
	}
	dev, ret := lib.nvml.DeviceGetHandleByIndex(index)
	if err = failure(name, fmt.Sprintf("GPU %d", index), ret); err != nil {
		return err
	}
	if slices.ContainsFunc(s.d.listenedTo(), func(l *listened) bool { return l.handle == dev }) {
		return nil
	}
	g := s.read(lib, dev)
	if g.Problem != nil {
		return g.Problem
	}
	l := &listened{handle: dev, pci: g.PCI, uuid: g.UUID, busy: true}
	if !s.add(l) {
		return nil
	}
	l.set, err = s.subscribe(lib, l)
	s.d.done(l, err)
	return err
}

// subscribe makes the GPU's set of events. It is nil where the GPU reports none.
func (s *session) subscribe(lib *library, l *listened) (nvml.EventSet, error) {
	s.begin("nvmlEventSetCreate")
	set, ret := lib.nvml.EventSetCreate()
	if err := failure("nvmlEventSetCreate", l.pci.String(), ret); err != nil {
		return nil, err
	}
	s.begin("nvmlDeviceRegisterEvents")
	err := failure("nvmlDeviceRegisterEvents", l.pci.String(), l.handle.RegisterEvents(nvml.EventTypeXidCriticalError, set))
	if err == nil {
		return set, nil
	}
	if errors.Is(err, ErrUnsupported) {
		err = nil
	}
	return nil, errors.Join(err, s.free(set))
}

// hear reads what is unread. A GPU whose set fails is not listened to any more until the next call; that says nothing
// of the others.
func (s *session) hear() error {
	var all []error
	for _, l := range s.d.listenedTo() {
		if err := context.Cause(s.ctx); err != nil {
			return errors.Join(append(all, err)...)
		}
		if !s.take(l) {
			continue
		}
		err := s.readSet(l)
		if s.d.done(l, err); err == nil {
			continue
		}
		if err = errors.Join(err, s.free(l.set)); !errors.Is(err, ErrLost) {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// readSet reads what is unread of one GPU.
func (s *session) readSet(l *listened) error {
	for range mostEvents {
		s.begin("nvmlEventSetWait")
		e, ret := l.set.Wait(0)
		if ret == nvml.ERROR_TIMEOUT {
			return nil
		}
		if err := failure("nvmlEventSetWait", l.pci.String(), ret); err != nil {
			return err
		}
		if e.EventType == nvml.EventTypeXidCriticalError {
			s.d.heardOf(XID{PCI: l.pci, UUID: l.uuid, Code: e.EventData})
		}
	}
	return nil
}

// unlisten frees all sets, which would outlive what they listen to, and keeps what is unread in them.
func (s *session) unlisten() error {
	d := s.d
	d.mu.Lock()
	var mine []*listened
	if !s.gone {
		mine, d.events = d.events, nil
	}
	d.mu.Unlock()
	var all []error
	for _, l := range mine {
		if l.set == nil {
			continue
		}
		// What cannot be read any more is lost with its GPU.
		_ = s.readSet(l) //nolint:errcheck // the set ends here
		all = append(all, s.free(l.set))
	}
	return errors.Join(all...)
}

func (s *session) free(set nvml.EventSet) error {
	s.begin("nvmlEventSetFree")
	return failure("nvmlEventSetFree", "", set.Free())
}

// listenedTo are the GPUs that are listened to.
func (d *Driver) listenedTo() []*listened {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.events)
}

// add takes a GPU into the list; not where the session was given up.
func (s *session) add(l *listened) bool {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.gone || len(d.events) >= mostListened {
		return false
	}
	d.events = append(d.events, l)
	return true
}

// take makes the set this session's own, until done. It is false where another session hangs with it.
func (s *session) take(l *listened) bool {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if s.gone || l.busy || l.set == nil {
		return false
	}
	l.busy = true
	return true
}

// done gives a set back, or takes its GPU from the list after an error. A session that was given up does so, too: while
// it hung nobody else touched the set.
func (d *Driver) done(l *listened, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l.busy = false
	if err != nil {
		d.events = slices.DeleteFunc(d.events, func(other *listened) bool { return other == l })
	}
}

// heardOf keeps an error for the next caller of XIDs. It has been taken from the driver, so it is kept also where the
// session was given up.
func (d *Driver) heardOf(x XID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.heard) < mostHeard {
		d.heard = append(d.heard, x)
	}
}
