// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// DefaultCallTimeout is the deadline of one NVML call. Initialising a GPU takes seconds, scrubbing its
// memory several more.
const DefaultCallTimeout = 30 * time.Second

// State tells how far this node's driver can be used.
type State string

// The states of a node's driver.
const (
	// StateUnknown: nobody has looked yet.
	StateUnknown State = "Unknown"
	// StateNoLibrary: no driver is installed.
	StateNoLibrary State = "NoLibrary"
	// StateDriverNotLoaded: the library is installed, the kernel module is not loaded.
	StateDriverNotLoaded State = "DriverNotLoaded"
	// StateReady: the driver answers. It may know no GPU: that is normal before the first one is attached.
	StateReady State = "Ready"
	// StateFailed: the driver answers with an error, told by Reason.
	StateFailed State = "Failed"
	// StateHung: at least one call has not come back.
	StateHung State = "Hung"
)

// Status is what was last seen of the driver.
type Status struct {
	State State
	// GPUs counts those the driver knows, in StateReady.
	GPUs int
	// Reason is for people; it is empty in StateReady.
	Reason string
	// Library is the path of the library as this process sees it.
	Library string
	// DriverRoot is the directory that the driver was installed under, as the host sees it.
	DriverRoot string
}

// Options say where to look and how long to wait. Clock must be set.
type Options struct {
	// HostRoot is where the host's file system is seen; "/" if empty.
	HostRoot string
	// DriverRoots are directories below HostRoot that a driver may be installed under; the host itself and
	// the driver container's mount if empty.
	DriverRoots []string
	// CallTimeout is the deadline of one NVML call; DefaultCallTimeout if zero.
	CallTimeout time.Duration
	Clock       clock.WithTicker
}

// Driver is this node's NVIDIA driver. There must be one in a process: the library's state is the process's.
type Driver struct {
	hostRoot    string
	driverRoots []string
	callTimeout time.Duration
	clock       clock.WithTicker

	// turn holds one token: who takes it may call the library.
	turn chan struct{}

	// mu guards what follows; it is never held during a call to the library.
	mu     sync.Mutex
	status Status
	hung   map[*session]struct{}
	lib    *library
	open   bool // initialised by us, once
	// leaving are the GPUs between Drain and Undrain or Remove; the value tells whether persistence mode was
	// on before.
	leaving map[device.PCIAddress]bool
	seen    map[device.PCIAddress]GPU // in the last Inventory
	events  []*listened               // the GPUs that are listened to
	heard   []XID                     // what nobody was told yet
	listens bool                      // somebody has asked for XIDs
}

// library is a loaded library. It is never unloaded: calls are bound to it for the life of the process.
type library struct {
	at      location
	nvml    nvml.Interface
	symbols *dl.DynamicLibrary

	mu    sync.Mutex
	known map[string]bool
}

// New returns the node's driver without looking for it: the first call does.
func New(o Options) *Driver {
	d := &Driver{
		hostRoot:    o.HostRoot,
		driverRoots: o.DriverRoots,
		callTimeout: o.CallTimeout,
		clock:       o.Clock,
		turn:        make(chan struct{}, 1),
		status:      Status{State: StateUnknown, Reason: "not looked for yet"},
		hung:        map[*session]struct{}{},
		leaving:     map[device.PCIAddress]bool{},
		seen:        map[device.PCIAddress]GPU{},
	}
	if d.hostRoot == "" {
		d.hostRoot = "/"
	}
	if len(d.driverRoots) == 0 {
		d.driverRoots = []string{"/", "/run/nvidia/driver"}
	}
	if d.callTimeout == 0 {
		d.callTimeout = DefaultCallTimeout
	}
	d.turn <- struct{}{}
	return d
}

// Status returns what was last seen, without a call to the driver.
func (d *Driver) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	st := d.status
	if d.lib != nil {
		st.Library, st.DriverRoot = d.lib.at.path, d.lib.at.driverRoot
	}
	if len(d.hung) > 0 {
		st.State, st.Reason = StateHung, d.hungTextLocked()
	}
	return st
}

// Refresh looks for library, driver and GPUs again. It returns no error: what went wrong is the status.
func (d *Driver) Refresh(ctx context.Context) Status {
	err := d.run(ctx, "look at the driver", func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		if _, err = s.driverVersion(lib); err != nil {
			return err
		}
		_, err = s.count(lib)
		return err
	})
	if err != nil {
		d.note(err)
	}
	return d.Status()
}

// Release lets go of every device node that this process holds through the library. The next call
// initialises it again.
func (d *Driver) Release(ctx context.Context) error {
	return d.run(ctx, "release the driver", func(s *session) error { return s.shutdown() })
}

// note takes an error into the status. Errors of one GPU or of a caller in a hurry are not the driver's.
func (d *Driver) note(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	st := Status{State: StateFailed, Reason: err.Error()}
	switch {
	case errors.Is(err, ErrNoLibrary):
		st.State = StateNoLibrary
	case errors.Is(err, ErrDriverNotLoaded):
		st.State = StateDriverNotLoaded
	case errors.Is(err, ErrHung), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return
	}
	d.status = st
}

// noteReady takes a count of GPUs into the status.
func (d *Driver) noteReady(gpus int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status = Status{State: StateReady, GPUs: gpus}
}

// library returns the library, found, loaded and initialised.
func (s *session) library() (*library, error) {
	lib, err := s.load()
	if err == nil {
		err = s.init(lib)
	}
	if err != nil {
		s.d.note(err)
		return nil, err
	}
	return lib, nil
}

// load finds and loads the library, unless it is loaded already.
func (s *session) load() (*library, error) {
	d := s.d
	d.mu.Lock()
	lib := d.lib
	d.mu.Unlock()
	if lib != nil {
		return lib, nil
	}
	at, ok, err := locate(d.hostRoot, d.driverRoots)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoLibrary, err)
	}
	if !ok {
		return nil, fmt.Errorf("%w (looked for %s below %s in %v)", ErrNoLibrary, libraryName, d.hostRoot, d.driverRoots)
	}
	s.begin("dlopen " + at.path)
	symbols := dl.New(at.path, dl.RTLD_LAZY|dl.RTLD_GLOBAL)
	if err = symbols.Open(); err != nil {
		return nil, fmt.Errorf("load the driver library: %w", err)
	}
	lib = &library{at: at, nvml: nvml.New(nvml.WithLibraryPath(at.path)), symbols: symbols, known: map[string]bool{}}
	for _, symbol := range []string{"nvmlInit_v2", "nvmlShutdown", "nvmlErrorString"} {
		if !lib.has(symbol) {
			return nil, fmt.Errorf("load the driver library: %s has no function %s: not an NVML library", at.path, symbol)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.gone {
		return nil, fmt.Errorf("load %s: %w", at.path, ErrHung)
	}
	d.lib = lib
	return lib, nil
}

// has tells whether the library has a function.
func (l *library) has(symbol string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	known, ok := l.known[symbol]
	if !ok {
		known = l.symbols.Lookup(symbol) == nil
		l.known[symbol] = known
	}
	return known
}

// init initialises the library, unless it is initialised already.
func (s *session) init(lib *library) error {
	d := s.d
	d.mu.Lock()
	open := d.open
	d.mu.Unlock()
	if open {
		return nil
	}
	s.begin("nvmlInit_v2")
	ret := lib.nvml.Init()
	d.mu.Lock()
	gone := s.gone
	d.open = d.open || (ret == nvml.SUCCESS && !gone)
	d.mu.Unlock()
	if gone && ret == nvml.SUCCESS {
		// Nobody waits for it any more, and one count too many would keep the library from ever shutting down.
		return errors.Join(ErrHung, failure("nvmlShutdown", "", lib.nvml.Shutdown()))
	}
	if ret == nvml.ERROR_LIB_RM_VERSION_MISMATCH || (ret != nvml.SUCCESS && replaced(d, lib)) {
		return fmt.Errorf("%w: the driver was replaced since %s was loaded; restart the agent",
			failure("nvmlInit_v2", "", ret), lib.at.path)
	}
	return failure("nvmlInit_v2", "", ret)
}

// replaced tells whether another library file is installed now than the one that is loaded.
func replaced(d *Driver, lib *library) bool {
	now, ok, err := locate(d.hostRoot, d.driverRoots)
	return err == nil && ok && now != lib.at
}

// shutdown closes the library and with it every device node that it holds.
func (s *session) shutdown() error {
	d := s.d
	d.mu.Lock()
	lib, open, hung := d.lib, d.open, d.hungTextLocked()
	if hung == "" {
		d.open = false
	}
	d.mu.Unlock()
	if !open || lib == nil {
		return nil
	}
	if hung != "" {
		// Whoever hangs in the library would be closed under.
		return fmt.Errorf("shut the driver library down: %w: %s", ErrHung, hung)
	}
	err := s.unlisten()
	s.begin("nvmlShutdown")
	return errors.Join(err, failure("nvmlShutdown", "", lib.nvml.Shutdown()))
}

// restart shuts the library down and initialises it, so that its list of GPUs is the driver's of now.
func (s *session) restart() (*library, error) {
	if err := s.shutdown(); err != nil {
		return nil, err
	}
	return s.library()
}

// call announces a call to the first function of names that the library has. A missing function must not
// be called: the dynamic linker would end the process.
func (s *session) call(lib *library, names ...string) (string, error) {
	if err := context.Cause(s.ctx); err != nil {
		return names[0], fmt.Errorf("%s: %w", names[0], err)
	}
	for _, name := range names {
		if lib.has(name) {
			s.begin(name)
			return name, nil
		}
	}
	return names[0], fmt.Errorf("%s: %w: %s lacks the function", names[0], ErrUnsupported, lib.at.path)
}
