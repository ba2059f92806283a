// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Settings are the holder's times, and what its manager can do.
type Settings struct {
	// Parallel: the manager takes several attaches, or several detaches, of one machine at once, and its list tells
	// the devices apart.
	Parallel bool
	// Batch is how many devices of one machine a call of the manager may detach; one if zero.
	Batch int
	// Arrival: the manager does not say which GPU its device is; it is known by its arrival on this node. So one unit
	// comes at a time.
	Arrival bool
	// Deadline is how long an attach may take from the moment the lease was taken; where nodes wait for each other at
	// the manager, from when it was asked, and Patience is how long all may take then. Zero: they do not.
	Deadline, Patience time.Duration
	// MaxCall is how long the manager may work on one call, whether or not somebody waits for the answer.
	MaxCall time.Duration
	// Settle is how long a call may still take effect on the fabric after the manager has ended it. Only then
	// one with an unknown outcome may be repeated.
	Settle time.Duration
	// Look is how often the fabric's list is read again while an outcome is unknown.
	Look time.Duration
	// Appear is how long the node waits for the kernel to show an attached device by itself before it
	// asks for a rescan, and between two rescans.
	Appear time.Duration
	// Retry is how long a local action that did not help is left before it is tried again.
	Retry time.Duration
	// Busy is how long to wait before the manager is asked again after it said busy or was not reached.
	Busy time.Duration
	// Hold is how often holders of a device without a claim are looked for again.
	Hold time.Duration
	// Resync is how often the list is read for a unit that waits for a Pod.
	Resync time.Duration
	// RetryAfter is how long a unit that failed is left alone.
	RetryAfter time.Duration
}

// Result is how this process's last call to the manager for this unit ended, since the lease got into
// its present phase. After a restart there is none.
type Result struct {
	// SentAt is when the call was made, At when it ended.
	SentAt, At time.Time
	// Unlisted: the manager did not list the device when it was asked to detach it, so that the list does not tell
	// whether the call has taken effect.
	Unlisted bool
	// Work is the manager's name for what it still does: what came of the call is not known before that has ended.
	// PollAfter is how long to leave it before it is looked at.
	Work      string
	PollAfter time.Duration
	// Fault is nil when the manager said that it was done. Of work that is not over it says what keeps it.
	Fault *device.Fault
}

// Function is one PCI function of a GPU on this node's bus.
type Function struct {
	Address device.PCIAddress
	// Driver is the bound kernel driver's name, empty while there is none.
	Driver string
	// Problem is why the kernel cannot use the function (no address space, …), if it says so.
	Problem string
}

// GPU is one GPU as NVML sees it.
type GPU struct {
	Address device.PCIAddress
	UUID    device.GPUUUID
	// Serial is the board's serial number, empty where it has none. All GPUs of a board have the same.
	Serial string
	// Name is the driver's word for the model.
	Name     string
	Draining bool
}

// Observation is all that decides about one unit on this node.
type Observation struct {
	Now      time.Time
	Settings Settings
	Lease    device.Lease
	// FabricModel is the manager's word for the lease's model; empty if the configuration lacks the model.
	FabricModel string

	// Here are the machine's devices as the fabric last listed them. Fresh: the list was asked for a
	// moment ago, and after the machine's last changing call ended.
	Here  []device.OnFabric
	Fresh bool
	// ListFault is why the last listing failed, nil if it did not.
	ListFault *device.Fault
	// ListTriedAt is when the last listing ended, in success or not; ListAskedAt is when the last one that
	// succeeded was asked for.
	ListTriedAt, ListAskedAt time.Time
	// Claimed are the fabric devices that other leases of this machine name.
	Claimed map[string]bool

	// Unreadable: a lease of this node cannot be read, so that a device which no other lease names may be its.
	Unreadable bool

	// Running is the action of this unit that is under way in this process, if any.
	Running Kind
	// MachineBusy: what another unit of this machine does, or is about to do, excludes this unit's call (see
	// Settings.Excludes), and this one cannot go with it (see Settings.Joins).
	MachineBusy bool
	// OutOfTurn: the manager does one thing at a time for all nodes, and Before nodes are to have theirs done first.
	OutOfTurn bool
	Before    int
	// OpenUntil is how long an attach for another unit of this machine, which ended without an answer, may
	// still take effect: what appears until then may be that unit's. It is zero if there is none.
	OpenUntil time.Time
	// Awaited counts the attaches for other units of this machine that a device may answer, those included that are
	// under way.
	Awaited map[string]int
	// UnseenSince is since when this process has not seen the GPU of an attached unit; zero while it sees it.
	UnseenSince time.Time
	// MaySend: this process stored the intent of this very attempt and has not sent the call yet.
	MaySend bool
	// FoundAt is when this process first saw the lease, if it was in this phase already: what was asked for it
	// before is not known. It is zero if this process saw the lease come into the phase.
	FoundAt time.Time
	// Last is the last call's result in this phase, nil if this process made none.
	Last *Result
	// Tried is when this process last ended each kind of action in this phase, and with which error.
	Tried map[Kind]Try

	// Bus is what sysfs shows; NVML what the driver's library shows. NVMLState is empty when the library
	// answers, else why it does not.
	Bus       []Function
	NVML      []GPU
	NVMLState string

	// Taken are the addresses at which other units of this machine are attached. BusBefore is what was on
	// the bus when the intent was stored, nil where this process did not store it.
	Taken     map[device.PCIAddress]bool
	BusBefore map[device.PCIAddress]bool
	// Others are the GPUs that other leases of this machine name.
	Others map[device.GPUUUID]bool
	// Unmatched: another unit has a device on this machine, or may get one, and nobody can say which GPU that is.
	Unmatched bool

	// Leaving: another unit's device is being taken off the bus, or is off it and about to leave the fabric.
	Leaving bool

	// Prepared: the plugin has the device prepared for a claim; PreparedKnown is false while the
	// checkpoint is being rebuilt.
	Prepared      bool
	PreparedKnown bool
	// PreparedFor are the claims, for people.
	PreparedFor []string
	// Holders are the processes that have the device open, for people; HoldersAt is when they were
	// looked for, zero if not yet.
	Holders   []string
	HoldersAt time.Time
	// Told: the claim shows our condition for the lease's attempt, as far as this process knows.
	Told bool
}

// Try is the end of one local action.
type Try struct {
	At  time.Time
	Err error
}

// Kind is what to do.
type Kind string

// The actions. Each is done once; then the world is observed again.
const (
	// Wait does nothing until something changes or Decision.Wake.
	Wait Kind = "Wait"

	// ListFabric reads the devices that the fabric lists on this machine.
	ListFabric Kind = "ListFabric"
	// SendAttach asks the manager for one device of the model. The intent is stored before.
	SendAttach Kind = "SendAttach"
	// SendDetach asks the manager to take Decision.Lease.FabricDevice from this machine.
	SendDetach Kind = "SendDetach"
	// Poll asks the manager what became of Decision.Lease.Work.
	Poll Kind = "Poll"

	// Store writes Decision.Lease.
	Store Kind = "Store"
	// StoreIntent writes Decision.Lease, and once that is stored SendAttach may follow.
	StoreIntent Kind = "StoreIntent"
	// Delete forgets the lease: the unit is back in the pool.
	Delete Kind = "Delete"

	// Rescan asks the kernel to look for the device where it can have come: where it was (Decision.Lease.PCI), if
	// it was anywhere, and at the empty hot-plug slots. RescanAll asks it to look everywhere.
	Rescan    Kind = "Rescan"
	RescanAll Kind = "RescanAll"
	// Bind asks the kernel to bind the driver to Decision.Lease.PCI.
	Bind Kind = "Bind"
	// Discover makes NVML see what has come or gone.
	Discover Kind = "Discover"
	// FindHolders looks for processes that have the device open.
	FindHolders Kind = "FindHolders"
	// Drain tells the driver to give the GPU up; Undrain takes that back; Remove takes it off the bus.
	Drain   Kind = "Drain"
	Undrain Kind = "Undrain"
	Remove  Kind = "Remove"

	// Tell writes Attached=True on the claim.
	Tell Kind = "Tell"
)

// Kinds returns every action, for metrics that exist from the start and for tests.
func Kinds() []Kind {
	return []Kind{
		Wait, ListFabric, SendAttach, SendDetach, Poll, Store, StoreIntent, Delete, Rescan, RescanAll, Bind, Discover,
		FindHolders, Drain, Undrain, Remove, Tell,
	}
}

// Decision is the next action and why.
type Decision struct {
	Kind Kind
	// Rule is the row of the policy that applied.
	Rule string
	// Why is for the person who asks what this unit waits for.
	Why string
	// Lease is the lease to write, for Store and StoreIntent; else the lease as observed, with PCI set
	// to the function that Bind is for.
	Lease device.Lease
	// Wake is when to look again though nothing changed; zero is never.
	Wake time.Time
	// Turn: the manager is to do something for the unit as soon as it is this node's turn.
	Turn bool
}
