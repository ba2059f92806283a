// SPDX-License-Identifier: Apache-2.0

package device

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Names that are API: they appear on objects that people and other programs read.
const (
	// Driver is the DRA driver name and the prefix of every label, annotation, condition and
	// finalizer of the agent.
	Driver = "gpu.cohdi.io"

	// ConditionAttached tells the scheduler that every unit of an offer can be used on the node.
	// The holder alone writes it.
	ConditionAttached = Driver + "/Attached"
	// ConditionAttachFailed tells the scheduler to take the allocation back. The leader alone writes it.
	ConditionAttachFailed = Driver + "/AttachFailed"

	// LabelFabric on a Node, a Lease or a slice names the fabric.
	LabelFabric = Driver + "/fabric"
	// LabelNode on a device lease names the holder's node in a form that fits a label value.
	LabelNode = Driver + "/node"
	// LabelPhase on a device lease holds its Phase.
	LabelPhase = Driver + "/phase"
	// LabelIdle on a Node says that a unit waits there for a Pod.
	LabelIdle = Driver + "/idle"
	// LabelElection on an election Lease names the fabric that it leads. Admission policies select by it.
	LabelElection = Driver + "/election"
	// LabelTurn on a turn Lease tells it from device leases; its value says no more than the name.
	LabelTurn = Driver + "/turn"

	// AnnotationUninstalled on the namespace of the leases is "true" when it may be deleted.
	AnnotationUninstalled = Driver + "/uninstalled"
	// AnnotationMachine on a Node names its machine where the provider id does not.
	AnnotationMachine = Driver + "/machine"
	// LabelMachine on a Node says on which machine its agent works, whatever named it.
	LabelMachine = Driver + "/machine"

	// TaintKey is the key of every taint that the leader puts on an offer.
	TaintKey = Driver + "/unavailable"

	// Finalizer keeps a device lease until its unit is back in the pool.
	Finalizer = Driver + "/attached"

	// LeaseNamespace holds device leases and elections. It is not the agents' own namespace, so that
	// deleting the agents does not trap what they hold.
	LeaseNamespace = "cohdi-leases"
	// AgentNamespace holds the agents.
	AgentNamespace = "cohdi-system"
	// AgentName is the name of the DaemonSet, its ServiceAccount and its ConfigMap.
	AgentName = "cohdi-agent"
)

// readySuffix ends the name of the entry for a unit that is attached already.
const readySuffix = "-ready"

// FabricID is the name that our configuration gives to one switch domain.
type FabricID string

// Pool returns the name of the fabric's resource pool.
func (f FabricID) Pool() string { return "fabric-" + string(f) }

// ElectionLease returns the name of the Lease by which the fabric's leader is elected.
func (f FabricID) ElectionLease() string { return "fabric-" + string(f) }

// TurnLease returns the name of the Lease by which nodes take turns at a manager, which several fabrics may share; the
// address tells managers apart.
func TurnLease(address string) string {
	sum := sha256.Sum256([]byte(address))
	return "turn-" + hex.EncodeToString(sum[:5])
}

// FabricOfPool returns the fabric that publishes the pool, and whether the name is of that form.
func FabricOfPool(pool string) (FabricID, bool) {
	id, ok := strings.CutPrefix(pool, "fabric-")
	return FabricID(id), ok && id != ""
}

// Model is the configuration's name for a kind of pooled device, a DNS label.
type Model string

// AttachableLabel is the Node label by which the leader lets the scheduler choose the node for units
// of the model.
func (m Model) AttachableLabel() string { return Driver + "/" + string(m) + ".attachable" }

// Unit names one piece of pooled hardware: on an anonymous fabric "<model>-<n>", on an addressable one
// "<model>-<8 hex of the fabric identity>". It is a DNS label.
type Unit string

// NumberedUnit names the n-th unit of a model on a fabric that only counts.
func NumberedUnit(m Model, n int) Unit { return Unit(string(m) + "-" + strconv.Itoa(n)) }

// AddressableUnit names the unit behind a fabric identity on a fabric that lists its devices.
func AddressableUnit(m Model, fabricDevice string) Unit {
	sum := sha256.Sum256([]byte(fabricDevice))
	return Unit(string(m) + "-" + hex.EncodeToString(sum[:4]))
}

// Number returns n of "<model>-<n>", and whether the unit is of that form for this model.
func (u Unit) Number(m Model) (int, bool) {
	rest, ok := strings.CutPrefix(string(u), string(m)+"-")
	if !ok || rest == "" || (len(rest) > 1 && rest[0] == '0') {
		return 0, false
	}
	n, err := strconv.Atoi(rest)
	return n, err == nil && n >= 0
}

// addressed is the form of what follows the model in an addressable unit's name.
var addressed = regexp.MustCompile(`^[0-9a-f]{8}$`)

// Of tells whether the unit's name is one of the model's, of either kind.
func (u Unit) Of(m Model) bool {
	if _, ok := u.Number(m); ok {
		return true
	}
	rest, ok := strings.CutPrefix(string(u), string(m)+"-")
	return ok && addressed.MatchString(rest)
}

// Entry returns the name of the entry by which the unit is attached on demand.
func (u Unit) Entry() string { return string(u) }

// ReadyEntry returns the name of the entry by which the unit is handed out where it is attached.
func (u Unit) ReadyEntry() string { return string(u) + readySuffix }

// UnitOfEntry returns the unit behind an entry, and whether it is the ready entry.
func UnitOfEntry(entry string) (u Unit, ready bool) {
	name, ready := strings.CutSuffix(entry, readySuffix)
	return Unit(name), ready
}

// BuiltInUnit names a GPU that is part of a node, in the node's own pool: its UUID in lower case, which is a DNS
// label.
func BuiltInUnit(id GPUUUID) Unit { return Unit(strings.ToLower(string(id))) }

// BuiltIn returns the GPU that BuiltInUnit named, and whether the name is of that form.
func (u Unit) BuiltIn() (GPUUUID, bool) {
	if !strings.HasPrefix(string(u), "gpu-") {
		return "", false
	}
	id, err := ParseGPUUUID(string(u))
	return id, err == nil && BuiltInUnit(id) == u
}

// LeaseName returns the name of the unit's device lease. It is never parsed: read the labels.
func LeaseName(f FabricID, u Unit) string { return "device-" + string(f) + "-" + string(u) }

// Machine is the fabric manager's name for a node, a UUID in lower case.
type Machine string

// uuidForm is RFC 9562's text form.
var uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// ParseMachine reads a machine's UUID in any case.
func ParseMachine(s string) (Machine, error) {
	m := strings.ToLower(strings.TrimSpace(s))
	if !uuidForm.MatchString(m) {
		return "", fmt.Errorf("machine %q is not a UUID (8-4-4-4-12 hexadecimal digits)", s)
	}
	return Machine(m), nil
}

// NodeLabelValue returns the node's name as a label value: itself, or, where it is longer than the 63
// characters of a label value, a unique short form.
func NodeLabelValue(node string) string {
	const longest = 63
	if len(node) <= longest {
		return node
	}
	sum := sha256.Sum256([]byte(node))
	tail := hex.EncodeToString(sum[:8])
	return strings.TrimRight(node[:longest-len(tail)-1], "-._") + "-" + tail
}
