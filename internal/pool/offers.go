// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"maps"
	"slices"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// offers lays out the pool: unit i in slice i/SliceDevices of each kind, for ever; within a fabric slice,
// units that are idle on some node come last, since first fit would take them from there.
func offers(w *World, all []view) Offers {
	o := Offers{Fabric: w.Fabric}
	names := map[string]bool{}
	for _, m := range w.Models {
		for k := range m.Attributes {
			names[k] = true
		}
	}
	keys := slices.Sorted(maps.Keys(names))
	readyRows, onCallRows := readyRules(), onCallRules()
	for chunk := range slices.Chunk(all, SliceDevices) {
		ready := make([]Offer, 0, len(chunk))
		onCall := make([]Offer, 0, len(chunk))
		for i := range chunk {
			o.Units = append(o.Units, chunk[i].unit)
			ready = append(ready, chunk[i].readyOffer(keys, readyRows))
		}
		byRank := slices.Clone(chunk)
		slices.SortStableFunc(byRank, func(a, b view) int { return cmp.Compare(a.rank(), b.rank()) })
		for i := range byRank {
			onCall = append(onCall, byRank[i].offer(keys, onCallRows))
		}
		o.Ready, o.OnCall = append(o.Ready, ready), append(o.OnCall, onCall)
	}
	return o
}

func (v *view) rank() int {
	if v.lease != nil && (v.lease.Idle() || v.phase() == device.Releasing) {
		return 1
	}
	return 0
}

// attributes carry the same names on every entry of the pool.
func (v *view) attributes(keys []string, uuid device.GPUUUID, pci string) map[string]string {
	a := map[string]string{"model": "", "uuid": string(uuid), "pciBusID": pci, "fabric": string(v.w.Fabric)}
	for _, k := range keys {
		a[k] = ""
	}
	if v.model != nil {
		maps.Copy(a, v.model.Attributes)
		a["model"] = string(v.model.Name)
	}
	return a
}

func (v *view) modelName() device.Model {
	if v.model == nil {
		return ""
	}
	return v.model.Name
}

// offer is the unit's entry for nodes that do not have it yet.
func (v *view) offer(keys []string, rules []taintRule) Offer {
	o := Offer{Name: v.unit.Entry(), Units: []device.Unit{v.unit}, Model: v.modelName(), Attributes: v.attributes(keys, "", "")}
	o.Effect, o.Why = taint(rules, v)
	return o
}

// readyOffer is the unit's entry for the node that has it.
func (v *view) readyOffer(keys []string, rules []taintRule) Offer {
	o := Offer{Name: v.unit.ReadyEntry(), Units: []device.Unit{v.unit}, Model: v.modelName(), Ready: true, Node: Nowhere}
	uuid, pci := device.GPUUUID(""), ""
	if v.lease != nil && v.lease.UUID != "" {
		o.Node, uuid, pci = v.lease.Node, v.lease.UUID, v.lease.PCI.String()
	}
	o.Attributes = v.attributes(keys, uuid, pci)
	o.Effect, o.Why = taint(rules, v)
	return o
}

// taintRule is one row of what an entry says: the first that applies decides.
type taintRule struct {
	when   func(*view) bool
	effect Effect
	// word is the taint's value, or which value it is.
	word string
	// when and why in docs/policy.md.
	state, why string
}

// itsReason is the word that depends on the lease.
const itsReason = "its reason"

// taint is what the first rule that applies says; the last one applies always.
func taint(rules []taintRule, v *view) (Effect, string) {
	r := rules[slices.IndexFunc(rules, func(r taintRule) bool { return r.when(v) })]
	if r.word == itsReason {
		return r.effect, v.lease.Failure.Reason
	}
	return r.effect, r.word
}

// coming: the unit is on its way to a node.
func (v *view) coming() bool { return v.phase() == device.Assigned || v.phase() == device.Attaching }

// evicted: the Pod that was bound by this entry has lost its device, or will not get it, though the lease may not
// name its claim yet. A Pod that still waits for its binding is refused instead.
func (v *view) evicted(ready bool) bool {
	if v.phase() != device.Failed || v.demand == nil || v.demand.Attempt.Ready() != ready {
		return false
	}
	if ready {
		return v.serving || v.lease.Attempt.IsZero() && demanded(v) && v.isThere(v.wanted)
	}
	return v.serving && v.demand.Attached
}

// onCallRules say why no claim may be given the unit for attaching.
func onCallRules() []taintRule {
	return []taintRule{
		{
			func(v *view) bool { return v.evicted(false) }, NoExecute, itsReason, "failed under a bound Pod",
			"The Pod runs with a device that is gone, or would wait for it for ever.",
		},
		{
			func(v *view) bool { return v.model == nil }, NoSchedule, "UnknownModel", "its model left the configuration",
			"Nobody knows what to ask the manager for.",
		},
		{
			func(v *view) bool { return v.keepFor != nil }, NoSchedule, "Kept", "free, to be attached in advance",
			"It is about to be attached to a node that lacks its minimum.",
		},
		{
			func(v *view) bool { return v.lease == nil && v.offered }, NoTaint, "", "free",
			"The manager's count covers it.",
		},
		{
			func(v *view) bool { return v.lease == nil && v.unhealthy }, NoSchedule, "Unhealthy", "free, and critical",
			"The manager lists the device as free and says that it is not fit.",
		},
		{
			func(v *view) bool { return v.lease == nil }, NoSchedule, "NoCapacity", "free, but the manager has fewer",
			"The count fell, or the manager said lately that none is left; the entry stays, since a claim may name it.",
		},
		{
			func(v *view) bool { return v.phase() == device.Failed }, NoSchedule, itsReason, "failed",
			"It is left alone until its back-off is over; a bad device stays attached, so that the manager does not hand it out again.",
		},
		{
			func(v *view) bool { return v.lease.Deleting }, NoSchedule, "Releasing", "its lease was deleted",
			"That is a wish to release it; nothing is assigned to such a lease.",
		},
		{
			func(v *view) bool { return v.kept }, NoSchedule, "Kept", "kept for a node's minimum",
			"It is not taken from there for another node, also not in the moment in which a claim gives it back; on its node the ready entry is to be had.",
		},
		{
			func(v *view) bool {
				return v.serving && !v.demand.Attached && v.holder != nil && v.holder.Machine != v.lease.Machine
			}, NoSchedule, "AgentAway", "a claim waits for it, and the node is on another machine now",
			"The claim is refused next, and the node's label does not keep it from being given the same again.",
		},
		{
			func(v *view) bool {
				return v.serving && !v.demand.Attached && v.phase() == device.Releasing && v.stuck()
			}, NoSchedule, "NotFreeYet", "a claim waits for it, and it is held or late on its way back",
			"The claim is refused next, and must not be given the same again.",
		},
		{
			func(v *view) bool { return !v.lease.Attempt.IsZero() }, NoTaint, "", "a claim has it",
			"Its counter is taken, so nobody else can be given it.",
		},
		{
			func(v *view) bool { return !v.holderActs() }, NoSchedule, "AgentAway", "on a node without an agent",
			"Nobody is there to release it.",
		},
		{
			func(v *view) bool {
				return v.phase() == device.Releasing && !v.stuck() || v.lease.Idle()
			}, NoTaint, "", "idle, or going back, held by nobody and not late",
			"It is to be had after one release; such units are listed last, so that first fit takes free ones before.",
		},
		{
			func(*view) bool { return true }, NoSchedule, "NotFreeYet", "its claim is gone, it is not idle yet, or held or late on its way back",
			"It is still prepared, held open or on its way; how long that takes nobody knows.",
		},
	}
}

// readyRules say why no claim may be given the unit where it is.
func readyRules() []taintRule {
	return []taintRule{
		{
			func(v *view) bool { return v.evicted(true) }, NoExecute, itsReason, "failed under a bound Pod",
			"The Pod runs with a device that is gone, or would wait for it for ever.",
		},
		{
			func(v *view) bool { return v.lease == nil || v.coming() }, NoSchedule, "NotAttached", "free, or on its way to a node",
			"It is attached nowhere yet; one word for both, since each change of an entry is a write of its slice.",
		},
		{
			func(v *view) bool { return v.phase() == device.Failed }, NoSchedule, itsReason, "failed",
			"It cannot be used, or may not.",
		},
		{
			func(v *view) bool {
				return !v.lease.Attempt.IsZero() || !v.lease.Idle() && v.phase() != device.Releasing
			}, NoSchedule, "InUse", "a claim has it, or it is not idle yet",
			"The taint stands before the claim ends, so that the entry is untainted only once the unit is idle: a container or process may still use it.",
		},
		{
			func(v *view) bool { return v.phase() == device.Releasing || v.cooled() }, NoSchedule, "Releasing", "going back, or idle for the cool-down",
			"It goes back once the taint has settled; an allocation decided before is served all the same.",
		},
		{
			func(v *view) bool { return !v.isHolder(v.holder) || !v.w.serves(v.holder) }, NoSchedule, "AgentAway", "idle on a node without an agent, or on another Node of that name",
			"Nobody would prepare it; the kubelet's clean-up does not reach entries that name a node by themselves.",
		},
		{
			func(v *view) bool { return v.holder.Conflict }, NoSchedule, "GPUConflict", "idle, somebody else advertises the node's GPUs",
			"One GPU could go to two Pods.",
		},
		{
			func(*view) bool { return true }, NoTaint, "", "idle",
			"A Pod on that node gets it at once.",
		},
	}
}
