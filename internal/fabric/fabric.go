// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"context"
	"math"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Manager is one fabric as its manager serves it.
type Manager interface {
	// Capabilities never changes and never blocks.
	Capabilities() Capabilities

	// Machines lists the machines that the manager knows, those of other fabrics too. A machine that it
	// names in no usable form is left out.
	Machines(ctx context.Context) ([]Machine, error)

	// ListAttached reads what is attached to each of the machines. Every machine is in exactly one of the
	// two results: a failure for one does not hide the others, and "not known" is a failure, never an
	// empty list.
	ListAttached(ctx context.Context, machines []device.Machine) (map[device.Machine][]device.OnFabric, map[device.Machine]error)

	// Free reads what is free of each model, in the manager's own words for models. A model that could not
	// be read is missing from the result, and the error says why; the others are there.
	Free(ctx context.Context, models []string) (map[string]Supply, error)

	// Attach asks once for one more device. It is not idempotent on any manager: after a fault that is not
	// definite, list before asking again. FaultNoCapacity and FaultUnsupported speak against the model,
	// FaultNotFound against the machine, FaultRejected against the device, where one is named.
	Attach(ctx context.Context, in Intent) (Operation, error)

	// Detach asks once to take a device away. FaultNotFound means that the manager does not know the
	// device, or not on this machine: list, and it is done when the list lacks it.
	Detach(ctx context.Context, in Intent) (Operation, error)

	// Poll looks at an operation. One that is neither Pending nor Suspended any more is returned as it is. The
	// kind, state, intent and handle are enough, so that any process can go on with what another began; without
	// a handle, a manager that lists its work looks for some that does what is intended. An error is about the
	// look and says nothing of the operation, whatever its class.
	Poll(ctx context.Context, op Operation) (Operation, error)

	// Health returns nil if the manager accepts our credentials and answers.
	Health(ctx context.Context) error

	// Close lets go of connections and sessions. Nothing may be called after it.
	Close(ctx context.Context) error
}

// Limiter is a Manager that knows how many devices of a model a machine must and may have.
type Limiter interface {
	// Limits of a machine, in the manager's own words for models. A model that the machine cannot have is
	// missing from the result.
	Limits(ctx context.Context, m device.Machine, models []string) (map[string]Limit, error)
}

// Watcher is a Manager that tells when something may have changed.
type Watcher interface {
	// Watch calls poke whenever something may have changed, and once each time that it begins to listen, since what
	// happened before is not told. It blocks until ctx ends, or the manager is closed, and listens again when it was cut
	// off. What it tells is a hint: nothing may rely on it. poke must not block. A fault is of a manager that tells
	// nothing at all, FaultUnsupported.
	Watch(ctx context.Context, poke func()) error
}

// Batcher is a Manager that takes several devices from a machine by one call.
type Batcher interface {
	// DetachAll is Detach for each of the intents: at most Capabilities.Batch, of one machine, each of another device. The
	// answers are in their order. What is refused before the call, such as a device that is not there, keeps no other from
	// going; what becomes of the call is said of each that was in it. Poll looks at each operation by itself.
	DetachAll(ctx context.Context, ins []Intent) []Begun
}

// Begun is how a change began.
type Begun struct {
	Operation Operation
	Err       error
}

// Limit is how many devices of a model a machine must and may have.
type Limit struct {
	// Min is 0 and Max is NoLimit where the manager does not say.
	Min, Max int
}

// NoLimit is a Max that is none.
const NoLimit = math.MaxInt

// Intent is what is asked of a manager.
type Intent struct {
	Machine device.Machine
	// Model is the manager's own word.
	Model string
	// Device is the fabric's identity of the device: always for a detach; for an attach only where
	// Capabilities.AddressableAttach.
	Device string
	// Before are the devices that the machine had when the intent was made, for managers that are told a total
	// and not a change: an attach is over as soon as there is one more. Nil where the caller does not say.
	Before []string
}

// Machine is a machine as the manager lists it.
type Machine struct {
	ID   device.Machine
	Name string
	// Fabric is the manager's own id of the switch domain, "" where it does not say.
	Fabric string
	Power  Power
}

// Power is whether a machine is switched on.
type Power string

// The states of power.
const (
	PowerOn      Power = "On"
	PowerOff     Power = "Off"
	PowerUnknown Power = "Unknown"
)

// Supply is what is free of a model.
type Supply struct {
	Count int
	// Devices are set where the manager lists free devices (FreeList).
	Devices []device.OnFabric
}

// OperationKind is what an operation does.
type OperationKind string

// The kinds of operations.
const (
	KindAttach OperationKind = "Attach"
	KindDetach OperationKind = "Detach"
)

// OperationState is how far an operation is.
type OperationState string

// The states of an operation.
const (
	// Pending: the manager works on it; look again after PollAfter.
	Pending OperationState = "Pending"
	// Done: the manager says that it is done; the list has the last word.
	Done OperationState = "Done"
	// Failed: the manager gave up, Fault says why.
	Failed OperationState = "Failed"
	// Suspended: the manager waits for a person; it may go on by itself after that.
	Suspended OperationState = "Suspended"
)

// Operation is what became of an intent.
type Operation struct {
	Kind   OperationKind
	State  OperationState
	Intent Intent
	// Handle is the manager's name for the work, "" where the call itself was the work.
	Handle string
	// Devices are those that the manager named in its answer. It may name none, more than were asked
	// for, or others.
	Devices []device.OnFabric
	// Fault is set in Failed and Suspended. In Suspended it is never definite: a person may have the work go on.
	Fault *device.Fault
	// PollAfter is how long to wait before the next Poll.
	PollAfter time.Duration
}

// Capabilities say what a kind of manager can do.
type Capabilities struct {
	// AddressableAttach: the caller chooses the device; else the manager chooses one of the model.
	AddressableAttach bool
	// AddressableDetach: the caller chooses the device.
	AddressableDetach bool
	Free              FreeKind
	// Asynchronous: operations may be Pending.
	Asynchronous bool
	Exclusion    Exclusion
	// Identity: the list holds what the node can match (GPU UUID).
	Identity bool
	// Limits: the manager says how many devices a machine must and may have; it is a Limiter.
	Limits bool
	// Batch is how many devices of a machine one call may detach; where it is more than one, the manager is a Batcher. An
	// attach has its call for itself. Where only its arrival tells which GPU came, no other may come to the machine at that
	// time, as one does whose detach fails or is undone. And a claim that waits does not wait for devices that go.
	Batch int
	// Events: the manager may tell when something has changed; it is a Watcher.
	Events bool
	// MaxCall is how long one changing call may take.
	MaxCall time.Duration
	// Settle is how long the list may lag behind an operation that is done.
	Settle time.Duration
}

// FreeKind is how a manager tells what is free.
type FreeKind string

// The ways of telling.
const (
	FreeNone  FreeKind = "None"
	FreeCount FreeKind = "Count"
	FreeList  FreeKind = "List"
)

// Exclusion is how much of the manager one changing call occupies.
type Exclusion string

// The scopes of exclusion. While it is unknown, callers keep to one changing call per machine.
const (
	ExclusionUnknown Exclusion = "Unknown"
	ExclusionNone    Exclusion = "None"
	ExclusionMachine Exclusion = "Machine"
	ExclusionFabric  Exclusion = "Fabric"
	ExclusionGlobal  Exclusion = "Global"
)
