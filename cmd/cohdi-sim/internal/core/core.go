// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// What went wrong, for the faces to answer.
var (
	ErrNotFound   = errors.New("not found")
	ErrBusy       = errors.New("another update is in progress")
	ErrNoCapacity = errors.New("no free device of that model")
	ErrNoSlot     = errors.New("no free slot on the machine")
	ErrInUse      = errors.New("device is in use")
	ErrStopped    = errors.New("simulator is stopping")
)

const keptOperations = 1000

// Holders finds the processes that have a character device open.
type Holders interface {
	Holders(major, minor uint32) ([]simapi.Holder, error)
}

// Hooks are what the core tells the rest of the simulator. Both are called without locks held.
type Hooks struct {
	// Changed: the node side of this machine may look different.
	Changed func(machine string)
	// XID: the driver of this machine reports an error of the GPU at this address.
	XID func(machine, pciAddress string, code uint64)
}

// Number is the device number of a character device.
type Number struct{ Major, Minor uint32 }

func (n Number) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// Device is one GPU, fixed description first, then state.
type Device struct {
	config.Device
	Index  int    `json:"-"`
	Number Number `json:"-"`

	ReportedSerial string `json:"reportedSerial"`
	OpStatus       string `json:"opStatus"`
	Tenant         string `json:"tenant,omitempty"`
	Vanished       bool   `json:"vanished,omitempty"`
	// BuiltIn: it is part of its machine, and the fabric knows nothing of it.
	BuiltIn bool `json:"builtIn,omitempty"`

	Phase      string    `json:"phase"`
	PhaseSince time.Time `json:"phaseSince"`
	Machine    string    `json:"machine,omitempty"`
	Slot       int       `json:"slot,omitempty"`
	// AttachSeq orders the devices of a machine by when they came.
	AttachSeq int `json:"attachSeq,omitempty"`

	// FailAttach and FailDetach are why its next attach or detach will fail at a manager that shows failures, empty
	// if it will not. Failure is why the last one did; the phase says which: attaching or attached.
	FailAttach string `json:"failAttach,omitempty"`
	FailDetach string `json:"failDetach,omitempty"`
	Failure    string `json:"failure,omitempty"`

	// LinkDown: a test cut the link. Linked: the node's port sees the card. OnBus: the kernel has enumerated it. Bound: the driver has it.
	LinkDown    bool      `json:"linkDown,omitempty"`
	Linked      bool      `json:"linked,omitempty"`
	OnBus       bool      `json:"onBus,omitempty"`
	OnBusSince  time.Time `json:"onBusSince,omitzero"`
	Bound       bool      `json:"bound,omitempty"`
	Minor       int       `json:"minor"`
	Drain       bool      `json:"drain,omitempty"`
	Persistence bool      `json:"persistence,omitempty"`
}

// Machine is a host port and the node behind it.
type Machine struct {
	config.Machine
	Power        bool `json:"power"`
	DriverLoaded bool `json:"driverLoaded"`
	// SlotOff are the slots that the node's slot control has switched off.
	SlotOff map[int]bool `json:"slotOff,omitempty"`
}

// Core is the chassis.
type Core struct {
	clk   clock.WithTicker
	judge Holders
	hooks Hooks
	path  string
	cfg   *config.Config
	log   klog.Logger

	stop    chan struct{}
	work    sync.WaitGroup
	closing sync.Once

	mu         sync.Mutex
	stopped    bool
	rand       *rand.Rand
	timing     simapi.Timing
	policies   simapi.Policies
	machines   []*Machine
	devices    []*Device
	operations []*operation
	lastOp     int
	lastSeq    int
	violations []simapi.Violation
	gates      map[string]chan struct{}
}

// Options are what New needs besides the description of the chassis.
type Options struct {
	Clock     clock.WithTicker
	Judge     Holders
	Hooks     Hooks
	StatePath string
	// Numbers holds a device number for each device of the configuration, in its order.
	Numbers []Number
}

// New builds the chassis and takes over the state that a former run left at o.StatePath.
func New(ctx context.Context, cfg *config.Config, o Options) (*Core, error) {
	if len(o.Numbers) < len(cfg.Devices) {
		return nil, fmt.Errorf("build chassis: %d device numbers for %d devices", len(o.Numbers), len(cfg.Devices))
	}
	c := &Core{
		clk: o.Clock, judge: o.Judge, hooks: o.Hooks, path: o.StatePath, cfg: cfg, log: klog.FromContext(ctx),
		stop: make(chan struct{}), rand: rand.New(rand.NewPCG(cfg.Seed, 1)), //nolint:gosec // picks must be repeatable, not secret
		timing: cfg.Timing, policies: cfg.Policies, gates: map[string]chan struct{}{},
	}
	for _, m := range cfg.Machines {
		c.machines = append(c.machines, &Machine{Machine: m, Power: true, DriverLoaded: !m.NoDriver, SlotOff: map[int]bool{}})
	}
	for i, d := range cfg.Devices {
		c.devices = append(c.devices, &Device{
			Device: d, Index: i, Number: o.Numbers[i], ReportedSerial: *d.FabricSerial, OpStatus: "00",
			Phase: simapi.PhaseFree, PhaseSince: c.clk.Now(), Minor: -1,
		})
	}
	fresh, err := c.load()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if fresh {
		if err := c.placeLocked(); err != nil {
			return nil, err
		}
	}
	c.resumeLocked()
	return c, c.commitLocked()
}

// placeLocked attaches what the configuration says was attached from the start.
func (c *Core) placeLocked() error {
	for _, d := range c.devices {
		if d.AttachedTo == "" {
			continue
		}
		m, err := c.machineLocked(d.AttachedTo)
		if err != nil {
			return err
		}
		slot, ok := c.freeSlotLocked(m)
		if !ok {
			return fmt.Errorf("place device %s on %s: %w", d.ID, m.Name, ErrNoSlot)
		}
		c.assignLocked(d, m, slot)
		c.setPhaseLocked(d, simapi.PhaseAttached)
		d.Linked = true
		c.enumerateLocked(m, d)
	}
	return nil
}

// Close ends all waiting operations where they stand and waits for their goroutines.
func (c *Core) Close() {
	c.closing.Do(func() {
		c.mu.Lock()
		c.stopped = true
		c.mu.Unlock()
		close(c.stop)
	})
	c.work.Wait()
}

// spawnLocked runs f in a goroutine that Close waits for, unless the core is stopping.
func (c *Core) spawnLocked(f func()) bool {
	if c.stopped {
		return false
	}
	c.work.Go(f)
	return true
}

func (c *Core) machineLocked(nameOrUUID string) (*Machine, error) {
	for _, m := range c.machines {
		if m.Name == nameOrUUID || m.UUID == nameOrUUID {
			return m, nil
		}
	}
	return nil, fmt.Errorf("machine %q: %w", nameOrUUID, ErrNotFound)
}

func (c *Core) deviceLocked(id string) (*Device, error) {
	for _, d := range c.devices {
		if d.ID == id || d.ResUUID == id || d.UUID == id {
			return d, nil
		}
	}
	return nil, fmt.Errorf("device %q: %w", id, ErrNotFound)
}

func (c *Core) freeSlotLocked(m *Machine) (int, bool) {
	used := map[int]bool{}
	for _, d := range c.devices {
		if d.Machine == m.Name {
			used[d.Slot] = true
		}
	}
	for s := 1; s <= m.Slots; s++ {
		if !used[s] {
			return s, true
		}
	}
	return 0, false
}

func (c *Core) assignLocked(d *Device, m *Machine, slot int) {
	c.lastSeq++
	d.Machine, d.Slot, d.AttachSeq = m.Name, slot, c.lastSeq
}

func (c *Core) setPhaseLocked(d *Device, phase string) {
	d.Phase, d.PhaseSince = phase, c.clk.Now()
}

func (c *Core) releaseLocked(d *Device) {
	c.unplugLocked(d)
	d.Machine, d.Slot, d.AttachSeq = "", 0, 0
	d.Linked, d.LinkDown, d.BuiltIn, d.Failure = false, false, false, ""
	c.setPhaseLocked(d, simapi.PhaseFree)
}

// usable: free, ours, and there.
func usable(d *Device, fabric int, model string) bool {
	return d.Phase == simapi.PhaseFree && d.Tenant == "" && !d.Vanished && d.Fabric == fabric && d.Model == model
}

// Free counts the free devices of a model that the tenant can have; known is false for a model nobody has.
func (c *Core) Free(machine, model string) (fabric, count int, known bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := c.machineLocked(machine)
	if err != nil {
		return 0, 0, false, err
	}
	for _, d := range c.devices {
		if d.Model == model {
			known = true
		}
		if usable(d, m.Fabric, model) {
			count++
		}
	}
	return m.Fabric, count, known, nil
}

// Machines returns copies of all machines with the devices that the fabric lists on each, in the order they came.
func (c *Core) Machines() []MachineView {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]MachineView, 0, len(c.machines))
	for _, m := range c.machines {
		out = append(out, c.viewLocked(m))
	}
	return out
}

// Machine returns a copy of one machine, found by name or uuid.
func (c *Core) Machine(nameOrUUID string) (MachineView, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := c.machineLocked(nameOrUUID)
	if err != nil {
		return MachineView{}, err
	}
	return c.viewLocked(m), nil
}

// MachineView is a copy of a machine and its devices.
type MachineView struct {
	Machine
	// Listed are the devices that the fabric reports on it: attached or being detached.
	Listed []Device
	// Coming are those that are being attached, or failed to be.
	Coming []Device
	// OnBus are those that its kernel has enumerated, by slot.
	OnBus []Device
	// Linked are the slots whose port sees a card.
	Linked map[int]bool
}

func (c *Core) viewLocked(m *Machine) MachineView {
	v := MachineView{Machine: *m, Linked: map[int]bool{}}
	v.SlotOff = map[int]bool{}
	maps.Copy(v.SlotOff, m.SlotOff)
	for _, d := range c.devices {
		if d.Machine != m.Name {
			continue
		}
		if (d.Phase == simapi.PhaseAttached || d.Phase == simapi.PhaseDetaching) && !d.BuiltIn {
			v.Listed = append(v.Listed, *d)
		}
		if d.Phase == simapi.PhaseAttaching {
			v.Coming = append(v.Coming, *d)
		}
		if d.OnBus {
			v.OnBus = append(v.OnBus, *d)
		}
		v.Linked[d.Slot] = v.Linked[d.Slot] || d.Linked
	}
	slices.SortFunc(v.Listed, func(a, b Device) int { return a.AttachSeq - b.AttachSeq })
	slices.SortFunc(v.Coming, func(a, b Device) int { return a.AttachSeq - b.AttachSeq })
	slices.SortFunc(v.OnBus, func(a, b Device) int { return a.Slot - b.Slot })
	return v
}

// Policies returns how the manager behaves now.
func (c *Core) Policies() simapi.Policies {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.policies
}

// SetPolicies changes the named behaviours.
func (c *Core) SetPolicies(p simapi.Policies) error {
	if err := config.CheckPolicies(p); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.policies = config.MergePolicies(c.policies, p)
	return nil
}

// SetTiming changes the named delays for operations that start from now on.
func (c *Core) SetTiming(t simapi.Timing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range []struct{ to, from **simapi.Duration }{
		{&c.timing.AttachDelay, &t.AttachDelay},
		{&c.timing.DetachDelay, &t.DetachDelay},
		{&c.timing.NodeDelay, &t.NodeDelay},
		{&c.timing.StaleDelay, &t.StaleDelay},
	} {
		if *p.from != nil {
			*p.to = *p.from
		}
	}
}

// State is a copy of everything.
func (c *Core) State() *simapi.State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &simapi.State{Time: c.clk.Now(), Timing: c.timing, Policies: c.policies, Violations: len(c.violations)}
	for _, m := range c.machines {
		s.Machines = append(s.Machines, simapi.Machine{
			Name: m.Name, UUID: m.UUID, Fabric: m.Fabric, Slots: m.Slots, Power: m.Power,
			Hotplug: m.Hotplug, DriverLoaded: m.DriverLoaded,
		})
	}
	for _, d := range c.devices {
		s.Devices = append(s.Devices, d.api())
	}
	for _, o := range c.operations {
		s.Operations = append(s.Operations, o.Operation)
	}
	return s
}

func (d *Device) api() simapi.Device {
	out := simapi.Device{
		ID: d.ID, ResUUID: d.ResUUID, Model: d.Model, UUID: d.UUID, Serial: d.Serial, FabricSerial: d.ReportedSerial,
		Fabric: d.Fabric, OpStatus: d.OpStatus, Tenant: d.Tenant, Vanished: d.Vanished, BuiltIn: d.BuiltIn, Failure: d.Failure, Phase: d.Phase,
		PhaseSince: d.PhaseSince, Machine: d.Machine, Slot: d.Slot, OnBus: d.OnBus, Bound: d.Bound, Minor: d.Minor,
		Drain: d.Drain, Persistence: d.Persistence, DeviceNumber: d.Number.String(),
	}
	if d.OnBus {
		out.PCIAddress = d.Address()
		since := d.OnBusSince
		out.OnBusSince = &since
	}
	return out
}

// Violations returns what was recorded, oldest first.
func (c *Core) Violations() []simapi.Violation {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]simapi.Violation{}, c.violations...)
}

// ClearViolations forgets them.
func (c *Core) ClearViolations() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.violations = nil
	return c.commitLocked()
}

func (c *Core) violateLocked(v simapi.Violation) {
	v.Time = c.clk.Now()
	c.violations = append(c.violations, v)
	c.log.Info("Violation", "kind", v.Kind, "machine", v.Machine, "device", v.Device, "detail", v.Detail, "holders", v.Holders)
}

func (c *Core) changed(machine string) {
	if c.hooks.Changed != nil && machine != "" {
		c.hooks.Changed(machine)
	}
}
