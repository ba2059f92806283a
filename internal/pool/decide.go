// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Decide returns what the leader does next: the offers and labels that fit the World, the lease
// operations, and the refusals that are due.
func Decide(w World) Plan {
	all := views(&w)
	p := Plan{Offers: offers(&w, all), Labels: labels(&w)}
	for i := range all {
		v := &all[i]
		if v.rivals > 0 {
			p.Notes = append(p.Notes, fmt.Sprintf("unit %s is allocated to %d claims; one is served, the others wait", v.unit, v.rivals+1))
		}
		for _, r := range unitRules() {
			if r.when(v) {
				r.then(v, &p)
				break
			}
		}
		p.wakeAt(w.Now, v.times()...)
	}
	for i := range w.Nodes {
		if n := &w.Nodes[i]; !n.AgentReady && !n.AwaySince.IsZero() {
			p.wakeAt(w.Now, n.AwaySince.Add(w.Settings.AgentAway))
		}
	}
	return p
}

// unitRule is one row of the policy for a unit: the first that applies decides.
type unitRule struct {
	name string
	when func(*view) bool
	then func(*view, *Plan)
}

// unitRules is the leader's policy for a unit: who has it, who wants it, what follows.
func unitRules() []unitRule {
	free := func(f func(*view) bool) func(*view) bool { // leased, but to no claim
		return func(v *view) bool { return v.lease != nil && v.lease.Attempt.IsZero() && f(v) }
	}
	demanded := func(v *view) bool { return v.demand != nil && v.demand.Reserved && !v.demand.AttachFailed }
	here := func(v *view) bool { return demanded(v) && v.isHolder(v.wanted) }
	elsewhere := func(v *view) bool { return demanded(v) && !v.isHolder(v.wanted) }
	return []unitRule{
		{"unknown phase", func(v *view) bool { return v.lease != nil && !v.lease.Phase.Known() }, note("is in a phase that this release does not know: hands off")},

		// Nobody has it.
		{"free, nobody wants it", func(v *view) bool { return v.lease == nil && !demanded(v) }, nothing},
		{"free and wanted", func(v *view) bool { return v.lease == nil }, (*view).createOrRefuse},

		// A claim has it.
		{"its claim is gone", func(v *view) bool { return !v.lease.Attempt.IsZero() && !v.serving }, op(Clear, "no claim has this allocation any more")},
		{"serving, told that it failed", func(v *view) bool { return v.serving && v.demand.AttachFailed }, nothing},
		{"serving, failed", func(v *view) bool { return v.serving && v.phase() == device.Failed }, func(v *view, p *Plan) { v.refuse(p, &v.lease.Failure) }},
		{"serving, holder away", func(v *view) bool {
			return v.serving && !v.demand.Attached && !v.demand.Attempt.Ready() && !v.holderActs()
		}, func(v *view, p *Plan) { v.refuse(p, away(v.lease.Node)) }},
		{"serving", func(v *view) bool { return v.serving }, nothing},

		// A node has it, for no claim.
		{"failed and wanted", free(func(v *view) bool { return demanded(v) && v.phase() == device.Failed }), func(v *view, p *Plan) { v.refuse(p, &v.lease.Failure) }},
		{"asked of nobody, holder away", free(func(v *view) bool { return v.phase() == device.Assigned && !v.holderActs() }), op(Drop, "its holder is away and had asked nothing yet")},
		{"wanted where it is", free(func(v *view) bool { return here(v) && !v.lease.Deleting }), (*view).assign},
		{"wanted elsewhere, holder away", free(func(v *view) bool { return elsewhere(v) && !v.holderActs() }), func(v *view, p *Plan) { v.refuse(p, away(v.lease.Node)) }},
		{"wanted elsewhere, idle", free(func(v *view) bool { return elsewhere(v) && v.lease.Idle() }), op(Release, "it is wanted on another node")},
		{"wanted, on its way", free(demanded), note("is wanted and becomes free first")},
		{"cooled down", free(func(v *view) bool { return v.cooled() && v.settled() && !v.allocatedHere() }), op(Release, "it was idle for the cool-down")},
		{"waits", func(*view) bool { return true }, nothing},
	}
}

func nothing(*view, *Plan) {}

func note(text string) func(*view, *Plan) {
	return func(v *view, p *Plan) { p.Notes = append(p.Notes, fmt.Sprintf("unit %s %s", v.unit, text)) }
}

func op(k OpKind, why string) func(*view, *Plan) {
	return func(v *view, p *Plan) {
		p.Ops = append(p.Ops, Op{Kind: k, Lease: *v.lease, Attempt: v.lease.Attempt, Why: why})
	}
}

// allocatedHere: a claim was given the unit where it is, and nobody waits for it yet.
func (v *view) allocatedHere() bool { return v.demand != nil && v.isHolder(v.wanted) }

// settled: the ready entry has been tainted for long enough that no allocation of it is under way.
func (v *view) settled() bool {
	at := v.settledAt()
	return !at.IsZero() && !v.w.Now.Before(at)
}

// createOrRefuse makes the lease of a free unit for the claim's node, if the node can take it.
func (v *view) createOrRefuse(p *Plan) {
	if f := v.refuseNode(p); f != nil {
		v.refuse(p, f)
		return
	}
	model := device.Model("")
	if v.model != nil {
		model = v.model.Name
	}
	p.Ops = append(p.Ops, Op{
		Kind: Create, Attempt: v.demand.Attempt, Why: "claim " + v.demand.Attempt.Claim() + " was allocated",
		Lease: device.Lease{
			Fabric: v.w.Fabric, Unit: v.unit, Model: model,
			Node: v.wanted.Name, NodeUID: v.wanted.UID, Machine: v.wanted.Machine,
			Phase: device.Assigned, Attempt: v.demand.Attempt, AcquiredAt: v.w.Now, ChangedAt: v.w.Now,
		},
	})
}

// assign gives a unit to the claim where it is; an attach that is still under way starts its time anew.
func (v *view) assign(p *Plan) {
	l := *v.lease
	l.Attempt, l.AcquiredAt, l.IdleSince, l.HeldBy = v.demand.Attempt, v.w.Now, time.Time{}, ""
	l.Transitions++
	p.Ops = append(p.Ops, Op{Kind: Assign, Lease: l, Attempt: v.demand.Attempt, Why: "claim " + v.demand.Attempt.Claim() + " was allocated"})
}

// refuseNode says why the demand's node cannot be given the unit, nil if it can. What the plan makes already
// counts.
func (v *view) refuseNode(p *Plan) *device.Failure {
	n := v.wanted
	switch {
	case n == nil || !n.Member || n.Machine == "":
		return &device.Failure{Reason: "NotInFabric", Blame: device.BlameNode, Message: fmt.Sprintf("node %s is not a member of fabric %s: its agent has not said so, or its machine is unknown", v.demand.Attempt.Node, v.w.Fabric)}
	case !v.w.serves(n):
		return away(n.Name)
	case v.model == nil:
		return &device.Failure{Reason: "UnknownModel", Blame: device.BlameUnit, Message: fmt.Sprintf("the configuration has no model for unit %s any more", v.unit)}
	case v.model.Max > 0 && v.w.held(n, v.model.Name)+p.made(n, v.model.Name) >= v.model.Max:
		return &device.Failure{Reason: "NodeFull", Blame: device.BlameNode, Message: fmt.Sprintf("node %s already has %d units of model %s, the most it may hold", n.Name, v.model.Max, v.model.Name)}
	}
	return nil
}

func away(node string) *device.Failure {
	return &device.Failure{Reason: "AgentAway", Blame: device.BlameNode, Message: fmt.Sprintf("the agent on node %s is not ready, so nothing can be attached there", node)}
}

// held counts the units of the model that the machine of the node has, or is about to have.
func (w *World) held(node *Node, m device.Model) int {
	n := 0
	for i := range w.Leases {
		if w.Leases[i].Model == m && on(&w.Leases[i], node) {
			n++
		}
	}
	return n
}

// on tells whether the unit is on that node's machine, not on another that had the same name.
func on(l *device.Lease, n *Node) bool { return l.Node == n.Name && l.Machine == n.Machine }

func (p *Plan) made(node *Node, m device.Model) int {
	n := 0
	for _, o := range p.Ops {
		if o.Kind == Create && o.Lease.Model == m && o.Lease.Node == node.Name {
			n++
		}
	}
	return n
}

// refuse takes the allocation back, on every device of that Pod's claims that is not attached yet, as
// soon as the same choice cannot be made again.
func (v *view) refuse(p *Plan, f *device.Failure) {
	if !v.excluded() {
		p.Notes = append(p.Notes, fmt.Sprintf("claim %s is refused (%s) once the scheduler cannot choose the same again", v.demand.Attempt.Claim(), f.Reason))
		return
	}
	r := Refusal{Reason: f.Reason, Message: fmt.Sprintf("%s on node %s: %s", v.unit, v.demand.Attempt.Node, f.Message)}
	for _, d := range v.w.Demands {
		if d.Attached || d.AttachFailed || d.Attempt.Ready() {
			continue
		}
		if d.Attempt == v.demand.Attempt || d.Attempt.UID == v.demand.Attempt.UID || slices.ContainsFunc(d.Consumers, func(pod string) bool { return slices.Contains(v.demand.Consumers, pod) }) {
			r.Attempts = append(r.Attempts, d.Attempt)
		}
	}
	if len(r.Attempts) > 0 {
		p.Refusals = append(p.Refusals, r)
	}
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

// times are the moments at which the unit's decision may change by itself.
func (v *view) times() []time.Time {
	if v.lease == nil {
		return nil
	}
	var at []time.Time
	if v.lease.Idle() {
		at = append(at, v.coolUntil(), v.settledAt())
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

// labels are what each Node should carry.
func labels(w *World) []NodeLabels {
	all := make([]NodeLabels, 0, len(w.Nodes))
	for i := range w.Nodes {
		n := &w.Nodes[i]
		l := NodeLabels{Node: n.Name, Attachable: map[device.Model]bool{}}
		for j := range w.Models {
			m := &w.Models[j]
			l.Attachable[m.Name] = w.serves(n) && !n.FabricDown && !n.Conflict && !w.full(n, m) && !w.backsOff(n, m.Name)
		}
		for k := range w.Leases {
			l.Idle = l.Idle || on(&w.Leases[k], n) && w.Leases[k].Idle() && w.serves(n)
		}
		all = append(all, l)
	}
	slices.SortFunc(all, func(a, b NodeLabels) int { return cmp.Compare(a.Node, b.Node) })
	return all
}

func (w *World) full(node *Node, m *Model) bool {
	return m.Max > 0 && w.held(node, m.Name) >= m.Max
}

// backsOff: something failed on the node that speaks against the node, or a second unit failed there.
func (w *World) backsOff(node *Node, m device.Model) bool {
	units := 0
	for i := range w.Leases {
		l := &w.Leases[i]
		if !on(l, node) || l.Model != m || !w.Now.Before(backOff(l)) {
			continue
		}
		switch l.Failure.Blame {
		case device.BlameNode:
			return true
		case device.BlameUnit:
			units++
		case device.BlameModel:
		}
	}
	return units > 1
}

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
	for chunk := range slices.Chunk(all, SliceDevices) {
		ready := make([]Offer, 0, len(chunk))
		onCall := make([]Offer, 0, len(chunk))
		for i := range chunk {
			o.Units = append(o.Units, chunk[i].unit)
			ready = append(ready, chunk[i].readyOffer(keys))
		}
		byRank := slices.Clone(chunk)
		slices.SortStableFunc(byRank, func(a, b view) int { return cmp.Compare(a.rank(), b.rank()) })
		for i := range byRank {
			onCall = append(onCall, byRank[i].offer(keys))
		}
		o.Ready, o.OnCall = append(o.Ready, ready), append(o.OnCall, onCall)
	}
	return o
}

func (v *view) rank() int {
	if v.lease != nil && v.lease.Idle() {
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
func (v *view) offer(keys []string) Offer {
	o := Offer{Name: v.unit.Entry(), Units: []device.Unit{v.unit}, Model: v.modelName(), Attributes: v.attributes(keys, "", "")}
	o.Effect, o.Why = v.onCallTaint()
	return o
}

// readyOffer is the unit's entry for the node that has it.
func (v *view) readyOffer(keys []string) Offer {
	o := Offer{Name: v.unit.ReadyEntry(), Units: []device.Unit{v.unit}, Model: v.modelName(), Ready: true, Node: Nowhere}
	uuid, pci := device.GPUUUID(""), ""
	if v.lease != nil && v.lease.UUID != "" {
		o.Node, uuid, pci = v.lease.Node, v.lease.UUID, v.lease.PCI.String()
	}
	o.Attributes = v.attributes(keys, uuid, pci)
	o.Effect, o.Why = v.readyTaint()
	return o
}

// onCallTaint says why no claim may be given the unit for attaching.
func (v *view) onCallTaint() (Effect, string) {
	switch {
	case v.model == nil:
		return NoSchedule, "UnknownModel"
	case v.lease == nil && v.offered:
		return NoTaint, ""
	case v.lease == nil:
		return NoSchedule, "NoCapacity"
	case v.phase() == device.Failed:
		return v.failedTaint(false)
	case v.lease.Deleting:
		return NoSchedule, "Releasing"
	case !v.lease.Attempt.IsZero():
		return NoTaint, "" // its counter is taken
	case !v.holderActs():
		return NoSchedule, "AgentAway" // nobody would release it
	case v.phase() == device.Releasing, v.lease.Idle():
		return NoTaint, "" // it is to be had after one release
	}
	return NoSchedule, "NotFreeYet"
}

// readyTaint says why no claim may be given the unit where it is.
func (v *view) readyTaint() (Effect, string) {
	switch {
	case v.lease == nil:
		return NoSchedule, "NotAttached"
	case v.phase() == device.Failed:
		return v.failedTaint(true)
	case !v.lease.Attempt.IsZero():
		return NoSchedule, "InUse"
	case !v.lease.Idle():
		return NoSchedule, string(v.lease.Phase)
	case v.cooled():
		return NoSchedule, "CoolDown"
	case !v.isHolder(v.holder) || !v.w.serves(v.holder):
		return NoSchedule, "AgentAway"
	case v.holder.Conflict:
		return NoSchedule, "GPUConflict"
	}
	return NoTaint, ""
}

// failedTaint evicts the Pod that was bound to a device that is gone or did not come; a Pod that still waits
// for its binding is refused instead.
func (v *view) failedTaint(ready bool) (Effect, string) {
	running := v.serving && v.demand.Attempt.Ready() == ready && (v.demand.Attached || ready)
	if running {
		return NoExecute, v.lease.Failure.Reason
	}
	return NoSchedule, v.lease.Failure.Reason
}
