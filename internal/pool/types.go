// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"math"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// SliceDevices is the most devices a ResourceSlice holds when they consume counters or carry taints
// (k8s.io/api/resource/v1, ResourceSliceMaxDevicesWithTaintsOrConsumesCounters).
const SliceDevices = 64

// Nowhere is the node name of a ready entry whose unit is attached to no node. No Node can have it: a
// Node's name cannot hold an empty label's dots, and nobody names a Node in our domain.
const Nowhere = "nowhere." + device.Driver

// mostUnits bounds the pool of a fabric, whatever the manager says is free: entries are permanent, and each
// costs the API server and the scheduler.
const mostUnits = 1024

// Model is a kind of pooled device as the configuration describes it.
type Model struct {
	Name device.Model
	// FabricModel is the manager's word for it.
	FabricModel string
	// Attributes are published on every entry of the model, under the same names for all models.
	Attributes map[string]string
	// Min is how many units each node of the fabric has attached in advance; Max is the most that one node
	// may hold, 0 is no limit.
	Min, Max int
	// Excludes are models of which a node must have none beside this one. One of a pair that says so is enough.
	Excludes []device.Model
}

// Settings are the leader's times and limits.
type Settings struct {
	// CoolDown is how long a unit stays idle on its node before it goes back to the pool.
	CoolDown time.Duration
	// ReadySettle is how long a ready entry has been tainted before its unit may be called back: an
	// allocation decided before the taint was seen has reached the API server by then.
	ReadySettle time.Duration
	// AgentAway is how long an agent may be away, as in a rolling update, before its node is withdrawn.
	AgentAway time.Duration
	// ForgetUnit is how long a unit at the end of the pool has been of no use, and named by no claim or lease,
	// before it is listed no more; 0 is for ever.
	ForgetUnit time.Duration
	// Arrival: the manager does not say which GPU its device is, so that one in doubt keeps others from its machine.
	Arrival bool
	// Addressable: each unit is a certain device of the manager's list, and that one is asked for.
	Addressable bool
	// Adopt: foreign devices are taken in when they have been attached for AdoptAfter.
	Adopt      bool
	AdoptAfter time.Duration
	// Slots is how many units a node's machine has room for, of all models together; 0 is no limit. NodeSlots
	// are the nodes that differ.
	Slots     int
	NodeSlots map[string]int
}

// NeedsAttached tells whether what the machines have without a lease decides something. It costs the manager a request for
// each machine; else every node tells for itself.
func (s *Settings) NeedsAttached() bool { return s.Adopt || s.Slots > 0 || len(s.NodeSlots) > 0 }

// Demand is one device that a claim was allocated from the fabric's pool (admin access aside).
type Demand struct {
	Attempt device.Attempt
	// Reserved: some Pod is there to use it. An attach starts only then; that it is false again is no
	// release, since every retry of the scheduler empties it for a moment.
	Reserved bool
	// Consumers are the UIDs of the Pods that the claim is reserved for.
	Consumers []string
	// Attached and AttachFailed are the device's conditions on the claim.
	Attached, AttachFailed bool
}

// Node is what the leader knows of a node of its fabric.
type Node struct {
	Name    string
	UID     string
	Machine device.Machine
	// Member: its agent says, by label, that the node belongs to this fabric.
	Member bool
	// AgentReady: its agent runs and the node is alive. AwaySince is when this observer saw that end.
	AgentReady bool
	AwaySince  time.Time
	// FabricDown: its agent says that it cannot work with the manager (a condition of the Node). Nothing
	// new is offered there; what waits there keeps its time.
	FabricDown bool
	// Conflict: somebody else advertises the node's GPUs, so none of ours is to be had there.
	Conflict bool
	// Attachable are the models whose label the Node carries now; Idle tells the same of the idle label.
	Attachable map[device.Model]bool
	Idle       bool
}

// Effect is what a taint on an entry does.
type Effect string

// Effects of taints. NoTaint leaves the entry to be chosen.
const (
	NoTaint    Effect = ""
	NoSchedule Effect = "NoSchedule"
	NoExecute  Effect = "NoExecute"
)

// Offer is one entry of the pool: a way to use units.
type Offer struct {
	Name  string
	Units []device.Unit
	Model device.Model
	// Ready: the unit is attached to Node and is handed out at once; otherwise any member node with the
	// model's attachable label may have it attached, and the claim waits for that.
	Ready bool
	Node  string
	// Effect is the entry's taint, Why its value (one word).
	Effect Effect
	Why    string
	// Attributes have the same names on every entry of the pool.
	Attributes map[string]string
}

// Offers is the whole pool in the order in which the scheduler tries it: all ready slices, then all
// fabric slices. Units is the permanent order; unit i has its entries in slice i/SliceDevices of each
// kind, for ever.
type Offers struct {
	Fabric device.FabricID
	Units  []device.Unit
	Ready  [][]Offer
	OnCall [][]Offer
}

// Published is what the API server shows of the pool now.
type Published struct {
	// Units is the permanent order as it was published, empty where nothing is.
	Units []device.Unit
	// Effects are the taints that stand on each entry, by entry name.
	Effects map[string]Effect
	// TaintedSince is when this observer first saw the taint on the entry, by entry name.
	TaintedSince map[string]time.Time
}

// Supply is what the manager said is free of a model.
type Supply struct {
	Count int
	// Devices are the very ones, where the manager lists them (an addressable fabric); else nil.
	Devices []device.OnFabric
}

// Inventory is what the fabric manager said.
type Inventory struct {
	// Free is the supply per model; a model that is missing could not be read and keeps its entries.
	Free map[device.Model]Supply
	// Leased is, per unit, the fabric device of its lease when the count was asked for: a lease that
	// is not in it, with that device, may not be reflected in the count.
	Leased map[device.Unit]string
	// Attached is what was attached to each machine, all of it, at AttachedAt by this observer's clock; a machine
	// that is missing could not be read.
	Attached   map[device.Machine][]device.OnFabric
	AttachedAt time.Time
	// Limits are the manager's own for each machine; a machine that is missing has none, or they could not be read. A
	// model that is missing for a machine cannot be there.
	Limits map[device.Machine]map[device.Model]Limit
}

// Limit is how many units of a model a machine must and may have; Max is NoLimit where that is not limited.
type Limit struct{ Min, Max int }

// NoLimit is a Max that is none.
const NoLimit = math.MaxInt

// Foreign is a device that is attached to a member's machine without a lease: another's, or a person's doing.
type Foreign struct {
	Node   string
	Device device.OnFabric
	// beside: a call may bring another device to the machine.
	beside bool
}

// Key names the device where it is.
func (f Foreign) Key() string { return string(f.Device.Machine) + "/" + f.Device.ID }

// Lack is what a node is short of the least number of units of a model that it should have attached.
type Lack struct {
	Node, NodeUID string
	Model         device.Model
	Least, Lacks  int
	// Why no more are attached, for people.
	Why string
}

// String says it for people.
func (l Lack) String() string {
	return fmt.Sprintf("node %s should have %d units of model %s attached, and lacks %d: %s", l.Node, l.Least, l.Model, l.Lacks, l.Why)
}

// World is what the leader observes.
type World struct {
	Now       time.Time
	Fabric    device.FabricID
	Settings  Settings
	Models    []Model
	Inventory Inventory
	Leases    []device.Lease
	Demands   []Demand
	Nodes     []Node
	Published Published
	// UnneededSince is since when each Plan has named the unit in Unneeded. ForeignSince is when what was attached
	// was read from which on each Plan has named the device in Foreign, by Foreign.Key. This observer has seen it.
	UnneededSince map[device.Unit]time.Time
	ForeignSince  map[string]time.Time

	nodes     map[string]*Node            // by name
	leasesOn  map[string][]*device.Lease  // by node
	nodesOf   map[device.Machine][]string // members that say that they are on it
	nodeRules []nodeRule                  // made once, not for each node
	foreign   []Foreign
	foreignOn map[string]int // by node
	lacking   []Lack
	notes     []string // of what concerns no unit
}

// OpKind is what to do with a device lease.
type OpKind string

// Operations on a device lease. Each carries the version of the lease that was decided on.
const (
	// Create makes the lease of a unit that has none: holder, attempt, phase Assigned. A lease that is kept
	// begins without an attempt.
	Create OpKind = "Create"
	// Assign sets the attempt on a lease whose holder is that attempt's node.
	Assign OpKind = "Assign"
	// Clear removes an attempt that no claim has any more.
	Clear OpKind = "Clear"
	// Release asks the holder to give the unit back: phase Releasing.
	Release OpKind = "Release"
	// Drop deletes a lease in phase Assigned whose holder is away: nothing was asked of the fabric yet,
	// and the holder cannot ask without writing to this lease first.
	Drop OpKind = "Drop"
)

// Op is one operation on a device lease.
type Op struct {
	Kind OpKind
	// Lease is the lease as observed; for Create, the lease to be made.
	Lease device.Lease
	// Attempt is what Create and Assign set and what Clear removes.
	Attempt device.Attempt
	// Why is for logs.
	Why string
}

// NodeLabels are the labels that a Node should carry.
type NodeLabels struct {
	Node       string
	Attachable map[device.Model]bool
	Idle       bool
}

// Refusal is an AttachFailed to be written on every given device of a claim's allocation.
type Refusal struct {
	Attempts []device.Attempt
	Reason   string
	Message  string
}

// Plan is what follows from a World. Offers and Labels come first: a refusal is in the Plan only once
// the World shows that the same choice cannot be made again.
type Plan struct {
	Ops      []Op
	Offers   Offers
	Labels   []NodeLabels
	Refusals []Refusal
	// Unneeded are the units that are listed only because a claim could name them, those included that this
	// Plan does not list any more.
	Unneeded []device.Unit
	// Foreign are the devices on our machines that no lease names.
	Foreign []Foreign
	// Lacking are the nodes that have less than their minimum and for which nothing more is on its way, by node.
	Lacking []Lack
	// Notes are for people: what is left alone and why.
	Notes []string
	// Rules are the rows that applied, one for each unit.
	Rules []string
	// Wake is when to decide anew though nothing changed; zero is never.
	Wake time.Time
}
