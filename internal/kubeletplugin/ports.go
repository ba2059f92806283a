// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Leases is what the plugin needs of the device leases.
type Leases interface {
	// Get reads one lease from the API server itself, no cache between: the plugin compares it with
	// what it has just written down. found is false where there is none.
	Get(ctx context.Context, fabric device.FabricID, unit device.Unit) (l device.Lease, found bool, err error)
	// Held reads every lease that names this node as its holder, from the API server itself.
	Held(ctx context.Context) ([]device.Lease, error)
	// PrepareReady stores l with the claim added to PreparedFor. Any change of the lease since it was
	// read, even one that changes nothing visible, is an error.
	PrepareReady(ctx context.Context, l device.Lease, claim types.UID) error
	// Unprepared stores l with the claim taken out of PreparedFor, under the same condition.
	Unprepared(ctx context.Context, l device.Lease, claim types.UID) error
	// Changed returns a channel that is closed when a lease of this node changes next.
	Changed() <-chan struct{}
}

// GPU is one GPU as the driver sees it now.
type GPU struct {
	UUID  device.GPUUUID
	PCI   device.PCIAddress
	Minor int
	// Name is the driver's product name; empty where it gives none.
	Name string
}

// GPUs is what the plugin needs of the node's hardware.
type GPUs interface {
	// GPU finds a GPU by its identity, now. found is false where the driver does not list it.
	GPU(ctx context.Context, uuid device.GPUUUID) (g GPU, found bool, err error)
	// Holders names the processes that have the GPU's device node open, for people; empty if none.
	// A GPU that is gone has none.
	Holders(ctx context.Context, uuid device.GPUUUID) (string, error)
	// Changed returns a channel that is closed when a GPU comes or goes next.
	Changed() <-chan struct{}
}

// SpecMaker makes the container edits for GPUs: common ones, and those of each GPU in the order given.
// Paths in them are the host's.
type SpecMaker interface {
	Edits(ctx context.Context, gpus []GPU) (common cdispecs.ContainerEdits, own []cdispecs.ContainerEdits, err error)
}

// Claims reads resource claims from the API server itself.
type Claims interface {
	// Get returns the claim of that name; found is false where there is none.
	Get(ctx context.Context, namespace, name string) (c *resourceapi.ResourceClaim, found bool, err error)
	// List returns every claim of the cluster.
	List(ctx context.Context) ([]resourceapi.ResourceClaim, error)
}

// UnitHealth is the health of one attached unit, or of a GPU that is built into the node.
type UnitHealth struct {
	// Fabric is empty for what is built-in.
	Fabric  device.FabricID
	Unit    device.Unit
	Health  device.Health
	Message string
	// At is when it was last looked at.
	At time.Time
}

// Health knows how the GPUs of this node are.
type Health interface {
	// Units returns the health of every unit that is attached to this node, and of its built-in GPUs.
	Units() []UnitHealth
	// Changed returns a channel that is closed when the health of a unit changes next.
	Changed() <-chan struct{}
}

// Outcome is how a Prepare or Unprepare of one claim ended.
type Outcome string

// The outcomes. TimedOut: what it waited for did not come. Cancelled: the kubelet or an Unprepare
// called it off.
const (
	Done      Outcome = "done"
	TimedOut  Outcome = "timed_out"
	Cancelled Outcome = "cancelled"
	Refused   Outcome = "refused"
)

// Outcomes returns every outcome, for metrics that exist from the start.
func Outcomes() []Outcome { return []Outcome{Done, TimedOut, Cancelled, Refused} }

// Observer is told what happened. Its methods must not block and not call back.
type Observer interface {
	// Prepared and Unprepared are called once for each claim of a call of the kubelet.
	Prepared(o Outcome, took time.Duration)
	Unprepared(o Outcome, took time.Duration)
	// CheckpointDamaged says that the checkpoint could not be read and where it was kept.
	CheckpointDamaged(kept string, cause error)
	// OrphanUndone says that a claim that is no more was unprepared without the kubelet's word.
	OrphanUndone(namespace, name string, claim types.UID, units []device.Unit)
	// PreparedChanged says that PreparedBy may answer differently now.
	PreparedChanged()
}
