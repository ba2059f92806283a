// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Phase is how far a unit has come on its way to a node or back. A phase that this release does not
// know means hands off.
type Phase string

// The phases of a device lease:
//
//	Assigned ─▶ Attaching ─▶ Attached ─▶ Releasing ─▶ (lease deleted)
//	    │           │           │             │
//	    └───────────┴──▶ Failed ◀┘             └─▶ Attached, when an allocation slipped in
//	                        └─▶ Releasing, after retry-after
const (
	Assigned  Phase = "Assigned"
	Attaching Phase = "Attaching"
	Attached  Phase = "Attached"
	Releasing Phase = "Releasing"
	Failed    Phase = "Failed"
)

// Unreadable stands for the phase of a lease that cannot be read, as by an older release: nobody knows who
// has the unit. It is never stored, and as an unknown phase it means hands off.
const Unreadable Phase = "Unreadable"

// Phases returns every phase that this release knows, in the order of a unit's way.
func Phases() []Phase { return []Phase{Assigned, Attaching, Attached, Releasing, Failed} }

// Known tells whether this release knows the phase.
func (p Phase) Known() bool { return slices.Contains(Phases(), p) }

// Attempt is one try to serve a claim. The claim's UID alone does not name it: a claim is allocated
// anew under the same UID.
type Attempt struct {
	Namespace, Name, UID string
	// AllocatedAt is the claim's status.allocation.allocationTimestamp as the API prints it.
	AllocatedAt string
	Node        string
	Pool        string
	Entry       string
}

// IsZero tells whether there is no attempt.
func (a Attempt) IsZero() bool { return a == Attempt{} }

// Claim prints the claim for people.
func (a Attempt) Claim() string { return a.Namespace + "/" + a.Name }

// Ready tells whether the claim was given the unit where it is attached already: such an entry has no
// binding condition, nobody waits to be told.
func (a Attempt) Ready() bool {
	_, ready := UnitOfEntry(a.Entry)
	return ready
}

// String prints the attempt as ParseAttempt reads it. None of its parts can hold a space.
func (a Attempt) String() string {
	if a.IsZero() {
		return ""
	}
	return strings.Join([]string{a.Namespace + "/" + a.Name + "/" + a.UID, a.AllocatedAt, a.Node, a.Pool + "/" + a.Entry}, " ")
}

// ParseAttempt reads what String prints; empty input is no attempt.
func ParseAttempt(s string) (Attempt, error) {
	if s == "" {
		return Attempt{}, nil
	}
	bad := fmt.Errorf("attempt %q is not of the form <namespace>/<name>/<uid> <allocation time> <node> <pool>/<device>", s)
	f := strings.Split(s, " ")
	if len(f) != 4 {
		return Attempt{}, bad
	}
	claim, offer := strings.Split(f[0], "/"), strings.Split(f[3], "/")
	if len(claim) != 3 || len(offer) < 2 {
		return Attempt{}, bad
	}
	a := Attempt{
		Namespace: claim[0], Name: claim[1], UID: claim[2], AllocatedAt: f[1], Node: f[2],
		// A pool name may hold slashes (it is one or more DNS subdomains), a device name may not.
		Pool: strings.Join(offer[:len(offer)-1], "/"), Entry: offer[len(offer)-1],
	}
	if slices.Contains([]string{a.Namespace, a.Name, a.UID, a.AllocatedAt, a.Node, a.Pool, a.Entry}, "") {
		return Attempt{}, bad
	}
	return a, nil
}

// Blame says what a failure speaks against, and so what the leader withdraws before it lets the
// scheduler choose again.
type Blame string

// What a failure can speak against.
const (
	// BlameUnit: the same unit would fail elsewhere too.
	BlameUnit Blame = "unit"
	// BlameNode: any unit would fail on this node.
	BlameNode Blame = "node"
	// BlameModel: the pool has no more of this model; neither unit nor node is at fault.
	BlameModel Blame = "model"
)

// Failure is why a unit is in phase Failed.
type Failure struct {
	// Reason is one CamelCase word, fit for a condition's reason.
	Reason string
	// Message is for a person: what was tried, what came back, what to do.
	Message string
	Blame   Blame
	// RetryAfter is when the unit may be tried again, by the holder's clock.
	RetryAfter time.Time
}

// Lease is the device lease of one unit as it is stored: who holds it, for which attempt, in which
// phase, and all that detaching it needs. Times are the writers' clocks: good for back-off and for
// people, never for safety.
type Lease struct {
	Fabric FabricID
	Unit   Unit
	Model  Model
	// Node is the holder; NodeUID and Machine are that Node's when the lease was taken. A Node of the
	// same name with another UID or machine is not the holder.
	Node    string
	NodeUID string
	Machine Machine

	Phase   Phase
	Attempt Attempt
	// Kept: the unit is wanted here though no claim has it. The leader alone writes it.
	Kept    bool
	Failure Failure

	// SetBefore are the fabric devices that the machine had, and no other lease named, before the manager
	// was asked to attach, in order; AskedAt is when that was stored. What appears beyond them, and no other
	// lease names, answers the call.
	SetBefore []string
	AskedAt   time.Time
	// Wanted is the very device that the unit is, where the manager lets the caller choose; only that one answers
	// the call. The leader writes it.
	Wanted string
	// GPUsBefore are the GPUs that the node had when the call was prepared: UUIDs, and the addresses of those whose
	// UUID the driver did not show. Where the manager does not say which GPU its device is, the one that is not
	// among them is. Nil where that is not known.
	GPUsBefore []string
	// Work is the manager's name for what it does for the unit, so that any process can ask what became of it.
	Work string
	// FabricDevice is the device that the unit has become; empty before that.
	FabricDevice string
	PCI          PCIAddress
	UUID         GPUUUID

	// PreparedFor are the UIDs of the claims that the kubelet plugin answered Prepare for on a ready
	// offer, written before the answer, so that they race safely with Releasing.
	PreparedFor []string
	// HeldBy names who keeps the device open though no claim has it, for people.
	HeldBy string
	// IdleSince is set while the device is attached and nobody has it.
	IdleSince time.Time

	AcquiredAt  time.Time
	ChangedAt   time.Time
	Transitions int32

	// Deleting: somebody deleted the lease object, which is a wish to release.
	Deleting bool
	// ObjectUID and Version are the stored object's; an update carries both.
	ObjectUID, Version string
}

// Idle tells whether the unit waits, attached, for anybody.
func (l Lease) Idle() bool {
	return l.Phase == Attached && l.Attempt.IsZero() && !l.IdleSince.IsZero() && len(l.PreparedFor) == 0 && !l.Deleting
}
