// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// GPU is one GPU that the driver knows.
type GPU struct {
	PCI    device.PCIAddress
	UUID   device.GPUUUID
	Minor  int // of /dev/nvidia<minor>, -1 if unknown; it moves to another GPU when this one has gone
	Name   string
	Serial string // empty where the product has none

	MemoryBytes       uint64
	Architecture      string // "Hopper"; empty where the library cannot tell
	ComputeCapability string // "9.0"; empty where the library cannot tell
	Persistence       bool
	MIG               bool
	// Draining: the driver takes no new work on it. NVML hides such a GPU, so the other fields are what was seen
	// before; after a restart of this process they are what /proc tells, at most UUID, Minor and Name.
	Draining bool

	// Problem tells why the GPU cannot be used yet; the fields read so far are set. It is worth another look:
	// a GPU that just came may be half initialised.
	Problem error
}

// Process is a process that uses a GPU. Its PID is the host's.
type Process struct {
	PID       int
	UsedBytes uint64
}

// Versions are those of the driver's parts.
type Versions struct {
	Driver string // "570.86.15"
	NVML   string
	CUDA   string // "12.8"; the newest that the driver supports
}

// Inventory lists the GPUs that the driver knows, by PCI address. It is empty, without error, where the
// driver has none. It does not show GPUs that came since the last Rediscover. The driver hides drained GPUs;
// they are in the list if their addresses are given with onBus.
func (d *Driver) Inventory(ctx context.Context, onBus ...device.PCIAddress) ([]GPU, error) {
	var gpus []GPU
	err := d.run(ctx, "list GPUs", func(s *session) error {
		list, err := s.inventory(onBus)
		if err == nil {
			s.publish(func() { gpus = list })
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return gpus, nil
}

// publish runs set unless the caller has gone: what a given-up call found must not reach variables that
// somebody else uses by now.
func (s *session) publish(set func()) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if !s.gone && s.ctx.Err() == nil {
		set()
	}
}

func (s *session) inventory(onBus []device.PCIAddress) ([]GPU, error) {
	lib, err := s.library()
	if err != nil {
		return nil, err
	}
	gpus, lost, err := s.enumerate(lib)
	if err == nil && lost {
		// Handles do not follow a GPU that vanished; a new list does not have it.
		if lib, err = s.restart(); err != nil {
			return nil, err
		}
		gpus, _, err = s.enumerate(lib)
	}
	if err != nil {
		return nil, s.recover(err)
	}
	s.d.noteReady(len(gpus))
	if gpus, err = s.addDraining(lib, gpus, onBus); err != nil {
		return nil, s.recover(err)
	}
	slices.SortFunc(gpus, func(a, b GPU) int { return a.PCI.Compare(b.PCI) })
	s.remember(gpus)
	err = s.letGo(lib)
	s.listenAgain(lib)
	return gpus, err
}

// addDraining marks the GPUs in drain state, and adds those that are hidden by it.
func (s *session) addDraining(lib *library, gpus []GPU, onBus []device.PCIAddress) ([]GPU, error) {
	if !lib.has("nvmlDeviceQueryDrainState") {
		return gpus, nil
	}
	for _, pci := range onBus {
		on, err := s.queryDrain(lib, pci)
		switch {
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrUnsupported), err == nil && !on:
			continue
		case err != nil:
			return nil, err
		}
		i := slices.IndexFunc(gpus, func(g GPU) bool { return g.PCI == pci })
		if i < 0 {
			i = len(gpus)
			g, ok := s.remembered(pci)
			if !ok {
				g = fromProc(s.d.hostRoot, pci)
			}
			gpus = append(gpus, g)
		}
		gpus[i].Draining = true
	}
	return gpus, nil
}

// remember keeps what was read of each GPU, for when its drain state hides it.
func (s *session) remember(gpus []GPU) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if s.gone {
		return
	}
	maps.DeleteFunc(s.d.seen, func(pci device.PCIAddress, _ GPU) bool {
		_, leaving := s.d.leaving[pci]
		return !leaving
	})
	for _, g := range gpus {
		s.d.seen[g.PCI] = g
	}
}

func (s *session) remembered(pci device.PCIAddress) (GPU, bool) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	g, ok := s.d.seen[pci]
	return g, ok && g.UUID != ""
}

// letGo closes the library while a GPU is about to leave and its driver cannot hide it from us by its drain
// state: this process would be the one who holds it.
func (s *session) letGo(lib *library) error {
	s.d.mu.Lock()
	leaving := len(s.d.leaving) > 0
	s.d.mu.Unlock()
	if leaving && !lib.has("nvmlDeviceModifyDrainState") {
		return s.shutdown()
	}
	return nil
}

// recover closes the library after an error that says it has lost its driver, so that the next call starts
// over. It returns the error.
func (s *session) recover(err error) error {
	if errors.Is(err, ErrDriverNotLoaded) {
		err = errors.Join(err, s.shutdown())
		s.d.note(err)
	}
	return err
}

// enumerate reads every GPU in the library's list; lost tells that one of them has vanished.
func (s *session) enumerate(lib *library) (gpus []GPU, lost bool, err error) {
	count, err := s.count(lib)
	if err != nil {
		return nil, false, err
	}
	for i := range count {
		name, err := s.call(lib, "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
		if err != nil {
			return nil, false, err
		}
		dev, ret := lib.nvml.DeviceGetHandleByIndex(i)
		g := GPU{Minor: unknownMinor, Problem: failure(name, fmt.Sprintf("GPU %d", i), ret)}
		if ret == nvml.SUCCESS {
			g = s.read(lib, dev)
		}
		switch {
		case errors.Is(g.Problem, ErrLost):
			lost = true
			continue
		case errors.Is(g.Problem, ErrDriverNotLoaded):
			return nil, false, g.Problem
		case s.ctx.Err() != nil:
			return nil, false, context.Cause(s.ctx)
		}
		gpus = append(gpus, g)
	}
	return gpus, lost, nil
}

func (s *session) count(lib *library) (int, error) {
	name, err := s.call(lib, "nvmlDeviceGetCount_v2", "nvmlDeviceGetCount")
	if err != nil {
		return 0, err
	}
	n, ret := lib.nvml.DeviceGetCount()
	if err = failure(name, "", ret); err != nil {
		return 0, err
	}
	s.d.noteReady(n)
	return n, nil
}

func (s *session) driverVersion(lib *library) (string, error) {
	name, err := s.call(lib, "nvmlSystemGetDriverVersion")
	if err != nil {
		return "", err
	}
	v, ret := lib.nvml.SystemGetDriverVersion()
	if err = failure(name, "", ret); err != nil {
		return "", s.recover(err)
	}
	return v, nil
}

// read asks for everything about one GPU.
func (s *session) read(lib *library, dev nvml.Device) GPU {
	g := GPU{Minor: unknownMinor}
	type field struct {
		needed bool
		names  []string
		get    func() nvml.Return
	}
	on := ""
	var info nvml.PciInfo
	var mode nvml.EnableState
	var uuid string
	fields := []field{
		{true, []string{"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"}, func() (ret nvml.Return) {
			info, ret = dev.GetPciInfo()
			g.PCI = address(info)
			on = g.PCI.String()
			return ret
		}},
		{true, []string{"nvmlDeviceGetUUID"}, func() (ret nvml.Return) { uuid, ret = dev.GetUUID(); return ret }},
		{true, []string{"nvmlDeviceGetMinorNumber"}, func() (ret nvml.Return) { g.Minor, ret = dev.GetMinorNumber(); return ret }},
		{true, []string{"nvmlDeviceGetName"}, func() (ret nvml.Return) { g.Name, ret = dev.GetName(); return ret }},
		{false, []string{"nvmlDeviceGetSerial"}, func() (ret nvml.Return) { g.Serial, ret = dev.GetSerial(); return ret }},
		{false, []string{"nvmlDeviceGetMemoryInfo"}, func() (ret nvml.Return) {
			var m nvml.Memory
			m, ret = dev.GetMemoryInfo()
			g.MemoryBytes = m.Total
			return ret
		}},
		{false, []string{"nvmlDeviceGetArchitecture"}, func() (ret nvml.Return) {
			var a nvml.DeviceArchitecture
			a, ret = dev.GetArchitecture()
			g.Architecture = architecture(a)
			return ret
		}},
		{false, []string{"nvmlDeviceGetCudaComputeCapability"}, func() (ret nvml.Return) {
			major, minor, ret := dev.GetCudaComputeCapability()
			if ret == nvml.SUCCESS {
				g.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
			}
			return ret
		}},
		{false, []string{"nvmlDeviceGetPersistenceMode"}, func() (ret nvml.Return) {
			mode, ret = dev.GetPersistenceMode()
			g.Persistence = mode == nvml.FEATURE_ENABLED
			return ret
		}},
		{false, []string{"nvmlDeviceGetMigMode"}, func() (ret nvml.Return) {
			var current int
			current, _, ret = dev.GetMigMode()
			g.MIG = ret == nvml.SUCCESS && current == nvml.DEVICE_MIG_ENABLE
			return ret
		}},
	}
	for _, f := range fields {
		name, err := s.call(lib, f.names...)
		if err == nil {
			err = failure(name, on, f.get())
		}
		if err != nil && (f.needed || !errors.Is(err, ErrUnsupported)) {
			g.Problem = err
			return g
		}
	}
	g.UUID, g.Problem = device.ParseGPUUUID(uuid)
	return g
}

// Processes lists the processes with a context on the GPU. Open files are not in it, nor is a drained GPU
// found.
func (d *Driver) Processes(ctx context.Context, pci device.PCIAddress) ([]Process, error) {
	var procs []Process
	err := d.run(ctx, "list processes on "+pci.String(), func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		dev, err := s.handle(lib, pci)
		if err != nil {
			return s.recover(err)
		}
		list, err := s.processes(lib, dev, pci)
		if err == nil {
			s.publish(func() { procs = list })
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return procs, nil
}

func (s *session) processes(lib *library, dev nvml.Device, pci device.PCIAddress) ([]Process, error) {
	lists := []struct {
		names []string
		get   func() ([]nvml.ProcessInfo, nvml.Return)
	}{
		{versions("nvmlDeviceGetComputeRunningProcesses"), dev.GetComputeRunningProcesses},
		{versions("nvmlDeviceGetGraphicsRunningProcesses"), dev.GetGraphicsRunningProcesses},
		{versions("nvmlDeviceGetMPSComputeRunningProcesses"), dev.GetMPSComputeRunningProcesses},
	}
	byPID := map[int]Process{}
	for _, l := range lists {
		name, err := s.call(lib, l.names...)
		if errors.Is(err, ErrUnsupported) {
			continue
		}
		if err != nil {
			return nil, err
		}
		infos, ret := l.get()
		err = failure(name, pci.String(), ret)
		if errors.Is(err, ErrUnsupported) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, p := range infos {
			byPID[int(p.Pid)] = Process{PID: int(p.Pid), UsedBytes: p.UsedGpuMemory}
		}
	}
	procs := make([]Process, 0, len(byPID))
	for _, p := range byPID {
		procs = append(procs, p)
	}
	slices.SortFunc(procs, func(a, b Process) int { return a.PID - b.PID })
	return procs, nil
}

// versions are the three that a call that lists processes has had, newest first, as go-nvml chooses.
func versions(call string) []string { return []string{call + "_v3", call + "_v2", call} }

// handle returns the handle of the GPU at an address, for use in this session only.
func (s *session) handle(lib *library, pci device.PCIAddress) (nvml.Device, error) {
	name, err := s.call(lib, "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId")
	if err != nil {
		return nil, err
	}
	dev, ret := lib.nvml.DeviceGetHandleByPciBusId(pci.String())
	if err = failure(name, pci.String(), ret); err != nil {
		return nil, err
	}
	return dev, nil
}

// Versions returns the versions of the driver's parts.
func (d *Driver) Versions(ctx context.Context) (Versions, error) {
	var v Versions
	err := d.run(ctx, "read the driver's version", func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		var got Versions
		if got.Driver, err = s.driverVersion(lib); err != nil {
			return err
		}
		if _, err = s.call(lib, "nvmlSystemGetNVMLVersion"); err == nil {
			if text, ret := lib.nvml.SystemGetNVMLVersion(); ret == nvml.SUCCESS {
				got.NVML = text
			}
		}
		if _, err = s.call(lib, "nvmlSystemGetCudaDriverVersion"); err == nil {
			if cuda, ret := lib.nvml.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
				got.CUDA = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
			}
		}
		s.publish(func() { v = got })
		return nil
	})
	return v, err
}

// Do lends the library, initialised, to do: for code that makes CDI specs with it. do must neither keep it nor
// a handle, and must not assume that its caller still waits: it may run on after Do has returned ErrHung.
// A library that lacks a function that such code calls unasked is refused with ErrUnsupported.
func (d *Driver) Do(ctx context.Context, what string, do func(nvml.Interface) error) error {
	return d.run(ctx, what, func(s *session) error {
		lib, err := s.library()
		if err != nil {
			return err
		}
		for _, names := range cdiSymbols() {
			if _, err = s.call(lib, names...); err != nil {
				return err
			}
		}
		s.begin(what)
		return errors.Join(do(lib.nvml), s.letGo(lib))
	})
}

// cdiSymbols are the functions that nvidia-container-toolkit's nvcdi calls without looking them up.
func cdiSymbols() [][]string {
	return [][]string{
		{"nvmlSystemGetDriverVersion"},
		{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
		{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
		{"nvmlDeviceGetHandleByUUID"},
		{"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"},
		{"nvmlDeviceGetUUID"},
		{"nvmlDeviceGetName"},
		{"nvmlDeviceGetIndex"},
		{"nvmlDeviceGetMinorNumber"},
		{"nvmlDeviceIsMigDeviceHandle"},
		{"nvmlDeviceGetMaxMigDeviceCount"},
		{"nvmlDeviceGetMigDeviceHandleByIndex"},
	}
}

// address reads the numbers, not the text: NVML prints the domain with eight digits. A GPU is function 0.
func address(info nvml.PciInfo) device.PCIAddress {
	return device.PCIAddress{Domain: info.Domain, Bus: uint8(info.Bus), Device: uint8(info.Device)} //nolint:gosec // PCI has 8 and 5 bits
}

// pciInfo names a GPU for the calls that take no handle.
func pciInfo(pci device.PCIAddress) *nvml.PciInfo {
	info := &nvml.PciInfo{Domain: pci.Domain, Bus: uint32(pci.Bus), Device: uint32(pci.Device)}
	copyText(info.BusId[:], fmt.Sprintf("%08X:%02X:%02X.0", pci.Domain, pci.Bus, pci.Device))
	copyText(info.BusIdLegacy[:], fmt.Sprintf("%04X:%02X:%02X.0", pci.Domain, pci.Bus, pci.Device))
	return info
}

// copyText fills a C string of the platform's char and leaves its last byte zero.
func copyText[char ~int8 | ~uint8](to []char, text string) {
	for i := 0; i < len(text) && i < len(to)-1; i++ {
		to[i] = char(text[i])
	}
}

func architecture(a nvml.DeviceArchitecture) string {
	switch a {
	case nvml.DEVICE_ARCH_KEPLER:
		return "Kepler"
	case nvml.DEVICE_ARCH_MAXWELL:
		return "Maxwell"
	case nvml.DEVICE_ARCH_PASCAL:
		return "Pascal"
	case nvml.DEVICE_ARCH_VOLTA:
		return "Volta"
	case nvml.DEVICE_ARCH_TURING:
		return "Turing"
	case nvml.DEVICE_ARCH_AMPERE:
		return "Ampere"
	case nvml.DEVICE_ARCH_ADA:
		return "Ada Lovelace"
	case nvml.DEVICE_ARCH_HOPPER:
		return "Hopper"
	case nvml.DEVICE_ARCH_BLACKWELL:
		return "Blackwell"
	case nvml.DEVICE_ARCH_RUBIN:
		return "Rubin"
	default:
		return ""
	}
}
