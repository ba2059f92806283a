// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Decide returns what the leader does next: the offers and labels that fit the World, the lease
// operations, and the refusals that are due.
func Decide(w World) Plan {
	all := views(&w)
	all, unneeded := forget(&w, all)
	o := offers(&w, all)
	p := Plan{Offers: o, Labels: labels(&w, o), Unneeded: unneeded, Foreign: w.foreign, Lacking: w.lacking, Notes: w.notes}
	rules := unitRules()
	for i := range all {
		v := &all[i]
		if v.rivals > 0 {
			p.note("unit %s is allocated to %d claims; one is served, the others wait", v.unit, v.rivals+1)
		}
		r := &rules[slices.IndexFunc(rules, func(r unitRule) bool { return r.when(v) })]
		r.then(v, &p)
		p.Rules = append(p.Rules, r.name)
		p.wakeAt(w.Now, v.times()...)
	}
	for i := range w.Nodes {
		if n := &w.Nodes[i]; !n.AgentReady && !n.AwaySince.IsZero() {
			p.wakeAt(w.Now, n.AwaySince.Add(w.Settings.AgentAway))
		}
	}
	return p
}

// Rules names the rows of the policy for a unit, in their order.
func Rules() []string {
	rows := unitRules()
	names := make([]string, 0, len(rows))
	for i := range rows {
		names = append(names, rows[i].name)
	}
	return names
}

// unitRule is one row of the policy for a unit: the first that applies decides.
type unitRule struct {
	name string
	when func(*view) bool
	then func(*view, *Plan)
	// does says what follows, and why the reason for it, in docs/policy.md.
	does, why string
}

// unitRules is the leader's policy for a unit: who has it, who wants it, what follows. The last row applies
// always.
func unitRules() []unitRule { return slices.Concat(freeRules(), servingRules(), leasedRules()) }

// What the rules ask of a claim: somebody waits for it, at the unit's own node or at another.
func demanded(v *view) bool  { return v.demand != nil && v.demand.Reserved && !v.demand.AttachFailed }
func here(v *view) bool      { return demanded(v) && v.isHolder(v.wanted) }
func elsewhere(v *view) bool { return demanded(v) && !v.isHolder(v.wanted) }

// Nobody has it.
func freeRules() []unitRule {
	return []unitRule{
		{
			"unknown phase", func(v *view) bool { return v.lease != nil && !v.lease.Phase.Known() },
			note("is in a phase that this release does not know: hands off"),
			"note", "A later release, or nobody, knows what is under way; whatever is done could undo it.",
		},
		{
			"another of its Pod failed", (*view).siblingFailed, (*view).refuseWithSibling,
			"refuse", "The Pod cannot start without its other device, and the scheduler, which stops at the first device that is not ready, does not see that one's failure before this one is told, too.",
		},
		{
			"foreign", func(v *view) bool { return v.adopt != nil }, (*view).createAdopted,
			"create a lease that names the device", "The device has been attached to the node without a lease for long enough; the node's agent takes it in, and it becomes idle there.",
		},
		{
			"to be kept", func(v *view) bool { return v.keepFor != nil && v.settled(v.unit.Entry()) }, (*view).createKept,
			"create a lease without an attempt", "The node has fewer units than its minimum; no claim was given this one since its entry was tainted.",
		},
		{
			"free, nobody wants it", func(v *view) bool { return v.lease == nil && !demanded(v) }, nothing,
			"nothing", "An attach starts for a claim that is allocated and reserved; before that no Pod is sure to come.",
		},
		{
			"in use without a lease", func(v *view) bool { return v.lease == nil && v.demand.Attached },
			note("is in use by a claim, and its lease is gone: somebody removed it; the device is reported once the claim ends"),
			"note", "The claim was told that it has its device; a second one must not be attached for it.",
		},
		{
			"free and wanted, but which one", func(v *view) bool { return v.unknownDevice() }, (*view).waitForDevice,
			"refuse, or note", "The very device has to be asked for: where the manager lists what is free, and not this one, somebody else has it; where it could not be asked, it is asked again.",
		},
		{
			"free and wanted", func(v *view) bool { return v.lease == nil }, (*view).createOrRefuse,
			"create the lease, or refuse", "The lease is what makes the node's agent attach it; where the node takes no more, the claim is taken back.",
		},
	}
}

// A claim has it.
func servingRules() []unitRule {
	return []unitRule{
		{
			"its claim is gone", func(v *view) bool { return !v.lease.Attempt.IsZero() && !v.serving }, clearAttempt,
			"clear the attempt", "The claim was deleted or allocated anew, even under the same UID: nobody waits for this attempt.",
		},
		{
			"serving, told that it failed", func(v *view) bool { return v.serving && v.demand.AttachFailed }, nothing,
			"nothing", "The scheduler clears the allocation next.",
		},
		{
			"serving, failed", func(v *view) bool { return v.serving && v.phase() == device.Failed },
			func(v *view, p *Plan) { v.refuse(p, &v.lease.Failure) },
			"refuse", "The holder gave up; only the leader may say so, once the same choice cannot be made again.",
		},
		{
			"serving, holder away", func(v *view) bool {
				return v.serving && !v.demand.Attached && !v.demand.Attempt.Ready() && !v.holderActs()
			}, func(v *view, p *Plan) { v.refuse(p, away(v.lease.Node)) },
			"refuse", "Nobody is there to attach it or to say that it failed, and the Pod would wait for 10 minutes.",
		},
		{
			"serving, does not become free", func(v *view) bool {
				return v.serving && v.phase() == device.Releasing && v.waitedFor() && v.stuck()
			}, (*view).refuseStuck,
			"refuse", "It has to go back before its node can attach it for the claim, and may not for as long as the scheduler waits.",
		},
		{
			"serving", func(v *view) bool { return v.serving }, nothing,
			"nothing", "Its holder carries it on; that the claim is unreserved for a moment is a retry of the scheduler, no release.",
		},
	}
}

// A node has it, for no claim.
func leasedRules() []unitRule {
	free := func(f func(*view) bool) func(*view) bool {
		return func(v *view) bool { return v.lease.Attempt.IsZero() && f(v) }
	}
	return []unitRule{
		{
			"failed and wanted", free(func(v *view) bool { return demanded(v) && v.phase() == device.Failed }),
			func(v *view, p *Plan) { v.refuse(p, &v.lease.Failure) },
			"refuse", "It was allocated before its taint was seen; it would fail again.",
		},
		{
			"asked of nobody, holder away", free(func(v *view) bool { return v.phase() == device.Assigned && !v.holderActs() }),
			op(Drop, "its holder is away and had asked nothing yet"),
			"drop the lease", "The holder cannot ask the fabric without writing to this lease first, so nothing is lost; else the unit waits for an agent that may never return.",
		},
		{
			"wanted where it is", free(func(v *view) bool { return here(v) && !v.lease.Deleting }), (*view).assign,
			"assign it", "It is attached, or on its way, to the very node: hand it over at once, by whichever entry it was allocated.",
		},
		{
			"wanted elsewhere, holder away", free(func(v *view) bool { return elsewhere(v) && !v.holderActs() }),
			func(v *view, p *Plan) { v.refuse(p, away(v.lease.Node)) },
			"refuse", "Nobody is there to give it back.",
		},
		{
			"wanted elsewhere, kept", free(func(v *view) bool { return elsewhere(v) && v.kept && !v.demand.Attempt.Ready() }),
			func(v *view, p *Plan) { v.refuse(p, v.keptFailure()) },
			"refuse", "What a node keeps for its minimum is not taken away by another node's claim; it was allocated before the taint was seen.",
		},
		{
			"wanted elsewhere, idle", free(func(v *view) bool { return elsewhere(v) && v.lease.Idle() }),
			op(Release, "it is wanted on another node"),
			"release", "Its counter is taken by a claim of another node, so no ready allocation of it can follow.",
		},
		{
			"wanted, does not become free", free(func(v *view) bool { return v.waitedFor() && v.stuck() }), (*view).refuseStuck,
			"refuse", "Who holds it longer than a container takes to end, as an administrator's Pod or a process without a claim, may stay for ever, and a detach whose answer was lost may take longer than the scheduler waits; another unit may be free.",
		},
		{
			"wanted, on its way", free(demanded), note("is wanted and becomes free first"),
			"note", "It is still prepared, attaching or going back; its holder ends that first.",
		},
		{
			"cooled down", free(func(v *view) bool {
				return v.cooled() && v.settled(v.unit.ReadyEntry()) && !v.allocatedHere()
			}), op(Release, "it was idle for the cool-down"),
			"release", "Nobody came for it in the cool-down, and its ready entry has been tainted for so long that no allocation of it is under way.",
		},
		{
			"waits", func(*view) bool { return true }, nothing,
			"nothing", "It is idle, kept, in back-off or on its way; the holder or time carries it on.",
		},
	}
}

func nothing(*view, *Plan) {}

func note(text string) func(*view, *Plan) {
	return func(v *view, p *Plan) { p.note("unit %s %s", v.unit, text) }
}

func (p *Plan) note(format string, args ...any) {
	p.Notes = append(p.Notes, fmt.Sprintf(format, args...))
}

func op(k OpKind, why string) func(*view, *Plan) {
	return func(v *view, p *Plan) {
		l := *v.lease
		l.Kept = l.Kept && k != Release
		p.Ops = append(p.Ops, Op{Kind: k, Lease: l, Attempt: l.Attempt, Why: why})
	}
}

// clearAttempt takes the claim off the lease. What the node should have anyway is kept from then on.
func clearAttempt(v *view, p *Plan) {
	l := *v.lease
	l.Kept = v.kept
	p.Ops = append(p.Ops, Op{Kind: Clear, Lease: l, Attempt: l.Attempt, Why: "no claim has this allocation any more"})
}

// allocatedHere: a claim was given the unit where it is, and nobody waits for it yet.
func (v *view) allocatedHere() bool { return v.demand != nil && v.isHolder(v.wanted) }

// settled: the entry has been tainted for long enough that no allocation of it is under way.
func (v *view) settled(entry string) bool {
	at := v.settledAt(entry)
	return !at.IsZero() && !v.w.Now.Before(at)
}

// createOrRefuse makes the lease of a free unit for the claim's node, if the node can take it.
func (v *view) createOrRefuse(p *Plan) {
	if f := v.w.place(v.demand.Attempt.Node, p.created()).of(v.model).refuses(v); f != nil {
		v.refuse(p, f)
		return
	}
	v.create(p, v.wanted, device.Lease{Attempt: v.demand.Attempt}, "claim "+v.demand.Attempt.Claim()+" was allocated")
}

// unknownDevice: the unit is a certain device, and the manager does not list it as free.
func (v *view) unknownDevice() bool {
	return v.lease == nil && v.w.Settings.Addressable && v.device == "" && v.model != nil
}

func (v *view) waitForDevice(p *Plan) {
	if v.uncertain {
		p.note("unit %s is wanted, and the manager's list of free devices, which says what it is, could not be read", v.unit)
		return
	}
	v.refuse(p, &device.Failure{Reason: "NoCapacity", Blame: device.BlameUnit, Message: "the fabric manager does not list it as free any more"})
}

func (v *view) createKept(p *Plan) {
	v.create(p, v.keepFor, device.Lease{Kept: true}, "the node keeps at least "+strconv.Itoa(v.w.limit(v.keepFor, v.model).Min)+" of the model")
}

// createAdopted makes a lease for a device that is attached already: its holder only has to find it on the node.
func (v *view) createAdopted(p *Plan) {
	v.create(p, v.w.node(v.adopt.Node), device.Lease{FabricDevice: v.adopt.Device.ID}, "device "+v.adopt.Device.ID+" was attached without a lease")
	p.Ops[len(p.Ops)-1].Lease.Phase = device.Attaching
}

// create makes the unit's lease, beginning with what is given.
func (v *view) create(p *Plan, n *Node, l device.Lease, why string) {
	l.Fabric, l.Unit, l.Model = v.w.Fabric, v.unit, v.modelName()
	l.Node, l.NodeUID, l.Machine = n.Name, n.UID, n.Machine
	l.Phase, l.AcquiredAt, l.ChangedAt = device.Assigned, v.w.Now, v.w.Now
	if l.Wanted = v.device; v.adopt != nil && v.w.Settings.Addressable {
		l.Wanted = v.adopt.Device.ID
	}
	p.Ops = append(p.Ops, Op{Kind: Create, Lease: l, Attempt: l.Attempt, Why: why})
}

// assign gives a unit to the claim where it is; an attach that is still under way starts its time anew.
func (v *view) assign(p *Plan) {
	l := *v.lease
	l.Attempt, l.AcquiredAt, l.IdleSince, l.HeldBy = v.demand.Attempt, v.w.Now, time.Time{}, ""
	l.Transitions++
	p.Ops = append(p.Ops, Op{Kind: Assign, Lease: l, Attempt: v.demand.Attempt, Why: "claim " + v.demand.Attempt.Claim() + " was allocated"})
}

// created are the leases that the plan makes.
func (p *Plan) created() []*device.Lease {
	var made []*device.Lease
	for i := range p.Ops {
		if o := &p.Ops[i]; o.Kind == Create {
			made = append(made, &o.Lease)
		}
	}
	return made
}

func away(node string) *device.Failure {
	return &device.Failure{Reason: "AgentAway", Blame: device.BlameNode, Message: fmt.Sprintf("the agent on node %s is not ready, so nothing can be attached there", node)}
}

func (v *view) keptFailure() *device.Failure {
	return &device.Failure{Reason: "Kept", Blame: device.BlameUnit, Message: fmt.Sprintf("node %s keeps it, to have the least number of units of model %s that it must have", v.lease.Node, v.model.Name)}
}

// nodeRule is one reason why a node is given no more units of a model. The node's label keeps the scheduler
// from choosing it; what was allocated before the label went is refused only where it could not work.
type nodeRule struct {
	reason  string
	refuses bool
	when    func(*place) bool
	// message is for the claim that is refused, and for notes.
	message func(*place) string
	why     string
}

func nodeRules() []nodeRule {
	say := func(text string) func(*place) string {
		return func(c *place) string { return "node " + c.name + " " + text }
	}
	return []nodeRule{
		{
			"NotInFabric", true, func(c *place) bool { return c.node == nil || !c.node.Member || c.node.Machine == "" },
			func(c *place) string {
				return fmt.Sprintf("node %s is not a member of fabric %s: its agent has not said so, or its machine is unknown", c.name, c.w.Fabric)
			},
			"The fabric cannot attach anything to it.",
		},
		{
			"MachineShared", true, func(c *place) bool { return c.w.shared(c.node) },
			func(c *place) string {
				return fmt.Sprintf("node %s is on machine %s as it says, and so is %s: what names the machine of one is wrong", c.name, c.node.Machine, c.w.others(c.node))
			},
			"Two agents would each take what comes to the machine for theirs, and detach it from under the other.",
		},
		{
			"AgentAway", true, func(c *place) bool { return !c.w.serves(c.node) }, func(c *place) string { return away(c.name).Message },
			"Nobody is there to attach it, for longer than a rolling update takes.",
		},
		{
			"UnknownModel", true, func(c *place) bool { return c.model == nil },
			func(*place) string { return "the configuration has no model for the unit any more" },
			"Nobody knows what to ask the manager for.",
		},
		{
			"FabricDown", false, func(c *place) bool { return c.node.FabricDown }, say("cannot work with the fabric manager"),
			"Its agent cannot work with the manager; what waits there already keeps its time, since that may pass.",
		},
		{
			"GPUConflict", false, func(c *place) bool { return c.node.Conflict }, say("has GPUs that somebody else advertises, too"),
			"Another driver or device plugin advertises the node's GPUs: one GPU could go to two Pods.",
		},
		{
			"NodeFull", true, func(c *place) bool { return c.count() >= c.limit.Max },
			func(c *place) string {
				if c.limit.Max == 0 {
					return fmt.Sprintf("node %s must have no units of model %s, says the fabric manager", c.name, c.model.Name)
				}
				return fmt.Sprintf("node %s already has %d units of model %s, the most it may hold", c.name, c.limit.Max, c.model.Name)
			},
			"The maximum per node, the configuration's or the manager's own, whichever is less.",
		},
		{
			"NoSlot", true, func(c *place) bool { return c.slots() > 0 && len(c.has)+c.foreign >= c.slots() },
			func(c *place) string { return fmt.Sprintf("all %d slots of node %s are taken", c.slots(), c.name) },
			"The machine has no room for one more unit, of whatever model.",
		},
		{
			"ModelsExclude", true, func(c *place) bool { return c.excluding() != "" },
			func(c *place) string {
				return fmt.Sprintf("node %s has units of model %s, beside which it must have none of %s", c.name, c.excluding(), c.model.Name)
			},
			"The configuration says that the two models must not be on one node.",
		},
		{
			"InDoubt", true, func(c *place) bool { return c.inDoubt() }, say("has, or may yet get, a device of which nobody can tell which GPU it is"),
			"Where only its arrival tells which GPU a device is, what comes next could not be told from it, so its agent asks for nothing.",
		},
		{
			"NodeFailed", false, func(c *place) bool { return c.blamed() }, say("failed an attach lately"),
			"What failed speaks against this node with this model, until its back-off is over.",
		},
		{
			"UnitsFailed", false, func(c *place) bool { return c.failedUnits() > 1 }, say("had two units fail lately"),
			"A second unit that fails on one node speaks against the node, not against the units.",
		},
	}
}

// refuses says why a claim's unit cannot be attached to the place, nil if it can.
func (c *place) refuses(v *view) *device.Failure {
	for i := range c.w.nodeRules {
		if r := &c.w.nodeRules[i]; r.refuses && r.when(c) {
			blame := device.BlameNode
			if c.model == nil {
				blame = device.BlameUnit
			}
			return &device.Failure{Reason: r.reason, Blame: blame, Message: strings.Replace(r.message(c), "the unit", "unit "+string(v.unit), 1)}
		}
	}
	return nil
}

// closed says why the scheduler may not choose the place, "" if it may.
func (c *place) closed() string {
	for i := range c.w.nodeRules {
		if r := &c.w.nodeRules[i]; r.when(c) {
			return r.message(c)
		}
	}
	return ""
}

// forget leaves out the units at the end of the pool that have been of no use for long enough; no entry moves by
// that. It returns what is of no use now, the units left out included.
func forget(w *World, all []view) (left []view, unneeded []device.Unit) {
	for i := range all {
		if all[i].unneeded() {
			unneeded = append(unneeded, all[i].unit)
		}
	}
	for w.Settings.ForgetUnit > 0 && len(all) > 0 {
		v := &all[len(all)-1]
		since := w.UnneededSince[v.unit]
		if !v.unneeded() || since.IsZero() || w.Now.Before(since.Add(w.Settings.ForgetUnit)) {
			break
		}
		all = all[:len(all)-1]
	}
	return all, unneeded
}

// unneeded: the manager does not have the unit, and nobody has it or wants it.
func (v *view) unneeded() bool {
	return v.lease == nil && v.demand == nil && v.adopt == nil && !v.offered && !v.unhealthy && !v.uncertain
}

// keep decides for the minimum per node: which units stay where they are, and which free ones are attached in
// advance. The free ones are taken from the end, where the scheduler comes last, and only where no claim
// names them; their entry is tainted for a while before.
func keep(w *World, all []view) {
	var planned []*device.Lease
	at := map[string][]*view{}
	for i := range all {
		if v := &all[i]; v.lease != nil {
			at[v.lease.Node] = append(at[v.lease.Node], v)
		}
	}
	for i := range w.Models {
		m := &w.Models[i]
		if m.Min == 0 && len(w.Inventory.Limits) == 0 {
			continue
		}
		stock := stockOf(all, m)
		for _, name := range slices.Sorted(maps.Keys(w.nodes)) {
			n := w.nodes[name]
			if !n.Member || n.Machine == "" {
				continue
			}
			least := w.limit(n, m).Min
			lack := least - keepOn(n, m, at[name], least)
			for ; lack > 0 && len(stock) > 0; lack-- {
				if c := w.place(name, planned).of(m); c.closed() != "" {
					break
				}
				v := stock[len(stock)-1]
				stock = stock[:len(stock)-1]
				v.keepFor = n
				planned = append(planned, &device.Lease{Unit: v.unit, Model: m.Name, Node: name, Machine: n.Machine, Phase: device.Assigned})
			}
			if lack > 0 {
				why := cmp.Or(w.place(name, planned).of(m).closed(), "no more are free")
				l := Lack{Node: name, NodeUID: n.UID, Model: m.Name, Least: least, Lacks: lack, Why: why}
				w.lacking = append(w.lacking, l)
				w.note("%s", l)
			}
		}
	}
}

// stockOf are the free units that may be attached in advance.
func stockOf(all []view, m *Model) []*view {
	var stock []*view
	for i := range all {
		if v := &all[i]; v.model == m && v.lease == nil && v.demand == nil && v.offered && !v.unknownDevice() {
			stock = append(stock, v)
		}
	}
	return stock
}

// keepOn marks the units that the minimum keeps on the node, and returns how many: those that were attached
// for it come first.
func keepOn(n *Node, m *Model, at []*view, least int) int {
	var here []*view
	for _, v := range at {
		coming := v.phase() == device.Assigned || v.phase() == device.Attaching || v.phase() == device.Attached
		if coming && v.model == m && v.isHolder(n) && !v.lease.Deleting {
			here = append(here, v)
		}
	}
	slices.SortStableFunc(here, func(a, b *view) int { return cmp.Compare(a.keepRank(), b.keepRank()) })
	here = here[:min(len(here), least)]
	for _, v := range here {
		v.kept = true
	}
	return len(here)
}

// keepRank puts what was attached for the minimum before what is in use, and that before what is idle.
func (v *view) keepRank() int {
	switch {
	case v.lease.Kept:
		return 0
	case !v.lease.Attempt.IsZero():
		return 1
	}
	return 2
}

// refuse takes the allocation back, on every device of that Pod's claims that is not attached yet, as
// soon as the same choice cannot be made again.
func (v *view) refuse(p *Plan, f *device.Failure) {
	if !v.excluded() {
		p.note("claim %s is refused (%s) once the scheduler cannot choose the same again", v.demand.Attempt.Claim(), f.Reason)
		return
	}
	r := Refusal{Reason: f.Reason, Message: fmt.Sprintf("%s on node %s: %s", v.unit, v.demand.Attempt.Node, f.Message)}
	for i := range v.w.Demands {
		d := &v.w.Demands[i]
		if d.Attached || d.AttachFailed || d.Attempt.Ready() {
			continue
		}
		if v.demand.sibling(d) {
			r.Attempts = append(r.Attempts, d.Attempt)
		}
	}
	if len(r.Attempts) > 0 {
		p.Refusals = append(p.Refusals, r)
	}
}

// siblingFailed: another device of the claim, or of its Pod's claims, was told that it failed, and this one heard
// nothing, as when only some of a refusal's writes went through.
func (v *view) siblingFailed() bool {
	return demanded(v) && !v.demand.Attached && !v.demand.Attempt.Ready() &&
		slices.ContainsFunc(v.w.Demands, func(d Demand) bool { return d.AttachFailed && v.demand.sibling(&d) })
}

func (v *view) refuseWithSibling(p *Plan) {
	p.Refusals = append(p.Refusals, Refusal{
		Attempts: []device.Attempt{v.demand.Attempt}, Reason: "OtherDeviceFailed",
		Message: fmt.Sprintf("%s on node %s: another device of the same Pod could not be attached", v.unit, v.demand.Attempt.Node),
	})
}

// sibling: the other demand is of the same claim, or a Pod is there to use both.
func (d *Demand) sibling(other *Demand) bool {
	return d.Attempt.UID == other.Attempt.UID || slices.ContainsFunc(d.Consumers, func(pod string) bool { return slices.Contains(other.Consumers, pod) })
}

// excluded: what is published keeps the scheduler from choosing this unit on this node again.
func (v *view) excluded() bool {
	if v.w.Published.Effects[v.demand.Attempt.Entry] != NoTaint {
		return true
	}
	if v.wanted == nil {
		return true
	}
	return v.model != nil && !v.demand.Attempt.Ready() && !v.wanted.Attachable[v.model.Name]
}

// patience is how long a claim waits for a unit that somebody keeps.
const patience = time.Minute

// patientUntil is when the claim has waited for its unit for long enough. The time is the API server's: another clock
// makes the wait somewhat longer or shorter.
func (v *view) patientUntil() time.Time {
	at, err := time.Parse(time.RFC3339, v.demand.Attempt.AllocatedAt)
	if err != nil || at.After(v.w.Now) {
		at = v.w.Now
	}
	return at.Add(patience)
}

// waitedFor: a claim has waited for the unit for long enough.
func (v *view) waitedFor() bool {
	return demanded(v) && !v.demand.Attached && !v.demand.Attempt.Ready() && !v.w.Now.Before(v.patientUntil())
}

// stuck: somebody keeps the unit, or it should have become free by now.
func (v *view) stuck() bool { return v.lease.HeldBy != "" || !v.w.Now.Before(v.lateAt()) }

func (v *view) refuseStuck(p *Plan) {
	f := &device.Failure{Reason: "NotFreeYet", Blame: device.BlameUnit, Message: fmt.Sprintf("it does not become free on node %s, where it is %s", v.lease.Node, v.phase())}
	if v.lease.HeldBy != "" {
		f.Reason, f.Message = "InUse", "on node "+v.lease.Node+" it is held open by "+v.lease.HeldBy
	}
	v.refuse(p, f)
}

// lateAfter is how long a unit that nobody uses any more is in one phase, where all goes well. A claim that waits for
// it after that has 10 minutes in all, the scheduler's time for binding.
const lateAfter = 4 * time.Minute

// lateAt is when the unit has been in its phase for too long, by its holder's clock. A time in the future counts as now.
func (v *view) lateAt() time.Time {
	since := v.lease.ChangedAt
	if since.After(v.w.Now) {
		since = v.w.Now
	}
	return since.Add(lateAfter)
}

// times are the moments at which the unit's decision may change by itself.
func (v *view) times() []time.Time {
	if v.keepFor != nil {
		return []time.Time{v.settledAt(v.unit.Entry())}
	}
	if v.lease == nil {
		return nil
	}
	var at []time.Time
	if demanded(v) {
		at = append(at, v.patientUntil(), v.lateAt())
	} else if v.phase() == device.Releasing {
		at = append(at, v.lateAt())
	}
	if v.lease.Idle() && !v.kept {
		at = append(at, v.coolUntil(), v.settledAt(v.unit.ReadyEntry()))
	}
	if v.phase() == device.Failed {
		at = append(at, backOff(v.lease))
	}
	return at
}

// wakeAt keeps the earliest of the times that are still to come.
func (p *Plan) wakeAt(now time.Time, at ...time.Time) {
	for _, t := range at {
		if t.After(now) && (p.Wake.IsZero() || t.Before(p.Wake)) {
			p.Wake = t
		}
	}
}

// labels are what each Node should carry. A unit that waits there, idle, counts while its ready entry may be chosen: a Pod
// that is sent there for it later would wait in vain.
func labels(w *World, o Offers) []NodeLabels {
	idle := map[string]bool{}
	for _, ready := range o.Ready {
		for k := range ready {
			idle[ready[k].Node] = idle[ready[k].Node] || ready[k].Effect == NoTaint
		}
	}
	all := make([]NodeLabels, 0, len(w.Nodes))
	for i := range w.Nodes {
		n := &w.Nodes[i]
		l := NodeLabels{Node: n.Name, Attachable: map[device.Model]bool{}, Idle: idle[n.Name]}
		c := w.place(n.Name, nil)
		for j := range w.Models {
			l.Attachable[w.Models[j].Name] = c.of(&w.Models[j]).closed() == ""
		}
		all = append(all, l)
	}
	slices.SortFunc(all, func(a, b NodeLabels) int { return cmp.Compare(a.Node, b.Node) })
	return all
}
