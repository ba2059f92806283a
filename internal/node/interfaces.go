// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"time"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
)

// Leases are the device leases of this node. What Update and Delete did shows in List at once.
type Leases interface {
	// List also returns what cannot be read, in phase Unreadable.
	List() []device.Lease
	// Update writes all that the holder may write; it fails if the stored version differs.
	Update(ctx context.Context, l device.Lease) (device.Lease, error)
	// Delete drops the finalizer and the object; gone already is success.
	Delete(ctx context.Context, l device.Lease) error
}

// Fabric is the manager, for this node's machine. Its errors are *device.Fault; another error counts as
// one of unknown outcome.
type Fabric interface {
	ListAttached(ctx context.Context, m device.Machine) ([]device.OnFabric, error)
	// Attach asks for one more device, Detach to take the device away.
	Attach(ctx context.Context, c Call) (Work, error)
	Detach(ctx context.Context, c Call) (Work, error)
	// Poll looks at what the manager does for an Attach (SendAttach) or Detach (SendDetach) of any process. Its error is
	// about the look and says nothing of the work.
	Poll(ctx context.Context, k attach.Kind, c Call, handle string) (Work, error)
}

// Batcher is a manager that detaches several devices by one call.
type Batcher interface {
	// DetachAll asks to take the devices away, and answers of each, in their order, what Detach would.
	DetachAll(ctx context.Context, calls []Call) []Answer
}

// Answer is what became of a call.
type Answer struct {
	Work Work
	Err  error
}

// Call is what is asked of the manager.
type Call struct {
	Machine device.Machine
	// Model is the manager's word.
	Model string
	// Device is the fabric's identity of the device: for an attach only where the caller chooses it.
	Device string
	// Before are the fabric's devices that the machine had when an attach was decided: one more than these is all that
	// is wanted.
	Before []string
}

// Work is how far the manager is: done if zero.
type Work struct {
	// Handle is the manager's name for what it still does; it is looked at after PollAfter.
	Handle    string
	PollAfter time.Duration
	// Fault is why it failed; where it still has a Handle, what keeps it.
	Fault *device.Fault
}

// Sight is what the host shows of its GPUs.
type Sight struct {
	Bus  []attach.Function
	NVML []attach.GPU
	// NVMLState is empty when NVML answers, else why it does not.
	NVMLState string
}

// Turns is the line of the nodes at a manager that does one thing at a time for all of them.
type Turns interface {
	// Want says whether the manager is to do something for this node. It must not block.
	Want(want bool)
	// Before tells how many nodes are before this one; mine is that it is its turn.
	Before() (before int, mine bool)
}

// Host is this machine's kernel, driver and processes. Every call ends when ctx does.
type Host interface {
	Observe(ctx context.Context) (Sight, error)
	// Rescan makes the kernel look where a device can have come: at the address, if it is not zero, and at
	// the empty hot-plug slots. RescanAll makes it look everywhere.
	Rescan(ctx context.Context, was device.PCIAddress) error
	RescanAll(ctx context.Context) error
	Bind(ctx context.Context, a device.PCIAddress) error
	Discover(ctx context.Context) error
	Drain(ctx context.Context, a device.PCIAddress) error
	Undrain(ctx context.Context, a device.PCIAddress) error
	// Remove takes the function off the bus and returns when it is gone.
	Remove(ctx context.Context, a device.PCIAddress) error
	// Holders are the processes that have the GPU at the address open, for people.
	Holders(ctx context.Context, a device.PCIAddress) ([]string, error)
}

// Claims tells a claim that its device can be used.
type Claims interface {
	// TellAttached writes Attached=True for the lease's attempt; there already is success.
	TellAttached(ctx context.Context, l device.Lease) error
}

// Prepared answers from the plugin's checkpoint.
type Prepared interface {
	// Prepared names the claims that the unit is prepared for, for people; known is false while the checkpoint
	// is being rebuilt.
	Prepared(f device.FabricID, u device.Unit) (claims []string, known bool)
}

// Observer hears what happened, for metrics, events and logs. Its methods must not block.
type Observer interface {
	// Stored: the holder wrote the lease; before is what it was.
	Stored(ctx context.Context, before, after device.Lease)
	// Deleted: the unit is back in the pool.
	Deleted(ctx context.Context, l device.Lease)
	// Told: the claim was told that its device can be used.
	Told(ctx context.Context, l device.Lease)
	// Acted: an action ended.
	Acted(ctx context.Context, l device.Lease, k attach.Kind, took time.Duration, err error)
}

// Model resolves the configuration's name of a model to the manager's; empty is unknown.
type Model func(device.Model) (fabricModel string)
