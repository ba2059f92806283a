// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// VendorNVIDIA is NVIDIA's PCI vendor id.
const VendorNVIDIA = 0x10de

// classDisplay is the base class of VGA and 3D controllers.
const classDisplay = 0x03

const (
	defaultWriteTimeout = 30 * time.Second
	defaultDriver       = "nvidia"
)

// Options say what to look at. The zero value means NVIDIA's display controllers and driver.
type Options struct {
	// Match chooses the functions that Snapshot reports, by vendor id and 24-bit class code.
	// Nil chooses NVIDIA's display controllers.
	Match func(vendor uint16, class uint32) bool
	// Driver is the kernel driver that makes a function usable; "nvidia" if empty.
	Driver string
	// AgentFile is a file that every agent of this host has open, and nobody else; none if empty.
	AgentFile string
	// WriteTimeout is how long Rescan and Remove wait for the kernel; 30 s if zero.
	WriteTimeout time.Duration
	// Clock is the time that deadlines and intervals are measured with; the real one if nil.
	Clock clock.WithTicker
}

// PCI is the PCI bus of one host as its sysfs shows it.
type PCI struct {
	root    string
	match   func(vendor uint16, class uint32) bool
	driver  string
	agents  string
	timeout time.Duration
	clock   clock.WithTicker
	writes  writers
	changes broadcast
}

// New returns the PCI bus of the host whose sys, dev and proc lie below root.
func New(root string, opts Options) *PCI {
	p := &PCI{
		root:    root,
		match:   opts.Match,
		driver:  opts.Driver,
		agents:  opts.AgentFile,
		timeout: opts.WriteTimeout,
		clock:   opts.Clock,
	}
	if p.match == nil {
		p.match = MatchDisplay(VendorNVIDIA)
	}
	if p.driver == "" {
		p.driver = defaultDriver
	}
	if p.timeout <= 0 {
		p.timeout = defaultWriteTimeout
	}
	if p.clock == nil {
		p.clock = clock.RealClock{}
	}
	return p
}

// MatchDisplay matches the display controllers of the given vendors.
func MatchDisplay(vendors ...uint16) func(vendor uint16, class uint32) bool {
	return func(vendor uint16, class uint32) bool {
		return class>>16 == classDisplay && slices.Contains(vendors, vendor)
	}
}

// bus returns a path below sys/bus/pci.
func (p *PCI) bus(elem ...string) string {
	return filepath.Join(append([]string{p.root, "sys/bus/pci"}, elem...)...)
}

// broadcast wakes everyone who waits for "something changed".
type broadcast struct {
	mu sync.Mutex
	ch chan struct{}
}

// wait returns a channel that is closed at the next wake. It is taken before looking, so that a change
// between the look and the wait is not missed.
func (b *broadcast) wait() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *broadcast) wake() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}
