// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/cohdi/cohdi-agent/internal/claim"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// Violation is an invariant that did not hold.
type Violation struct {
	// Rule is one word; Text says what happened.
	Rule, Text string
	At         time.Duration
	Step       int
}

func (v *Violation) String() string {
	return fmt.Sprintf("%s after %s (step %d): %s", v.Rule, v.At.Round(time.Millisecond), v.Step, v.Text)
}

// judge watches the invariants (the design's, and who may write what).
type judge struct {
	broken *Violation
	// entries are the slice and kind of every entry that was ever published.
	entries map[string]string
	shown   map[string]string // what was last noted of a lease
	// allocated is when the claim's allocation was stored; listed is when a process last read all claims.
	allocated map[string]time.Time
	listed    map[string]time.Time
	// touched is when the unit's lease was last written, made or deleted.
	touched map[device.Unit]time.Time
}

func (s *Sim) breakIt(rule, format string, args ...any) {
	if s.watch.broken != nil || s.closing {
		return
	}
	s.watch.broken = &Violation{Rule: rule, Text: fmt.Sprintf(format, args...), At: s.now().Sub(s.began), Step: s.count.Steps}
	s.note("judge", "%s: %s", rule, s.watch.broken.Text)
}

// changed looks at each change of the API server.
func (s *Sim) changed(c change) {
	switch c.kind {
	case leases:
		before, was := leaseOf(c.before)
		after, is := leaseOf(c.after)
		if c.before != nil && !was || c.after != nil && !is {
			s.watch.touched[before.Unit], s.watch.touched[after.Unit] = s.now(), s.now()
			return // nobody can read it
		}
		s.leaseChanged(c, before, after)
	case poolSlices:
		s.sliceChanged(c)
	case claims:
		s.claimChanged(c)
	case nodes:
		if n, ok := c.after.(*corev1.Node); ok && n.Labels[device.LabelFabric] == "" {
			s.after(s.between("agent sees node "+c.name, 50*time.Millisecond, 2*time.Second), nil, func() {
				if p := s.hosts[c.name].owner; p != nil && !p.dead {
					s.after(0, p, p.labelNode)
				}
			})
		}
	case agents:
	}
}

func (s *Sim) leaseChanged(c change, before, after device.Lease) {
	s.watch.touched[before.Unit], s.watch.touched[after.Unit] = s.now(), s.now()
	if c.after == nil {
		s.note("lease", "%s deleted", before.Unit)
		s.leaseGone(before)
		delete(s.watch.shown, string(before.Unit))
		return
	}
	s.count.States[s.stateOf(after)]++
	unit := string(after.Unit)
	if text := describe(after); s.watch.shown[unit] != text {
		s.watch.shown[unit] = text
		s.note("lease", "%s", text)
	}
	if obj, ok := c.after.(*coordinationv1.Lease); ok && after.Phase != device.Assigned && obj.DeletionTimestamp == nil && len(obj.Finalizers) == 0 && c.before != nil {
		s.detail("lease", "%s has lost its finalizer", unit)
	}
	if c.before != nil && s.writer != nil {
		s.rightWriter(before, after)
	}
	if c.before != nil {
		s.rightMoment(before, after)
	}
	for _, other := range s.leases() {
		if other.Unit != after.Unit && other.Machine == after.Machine && after.FabricDevice != "" && other.FabricDevice == after.FabricDevice {
			s.breakIt("one-unit-one-device", "units %s and %s both have %s", after.Unit, other.Unit, after.FabricDevice)
		}
	}
	if g := s.fabric.byID(after.FabricDevice); g != nil && g.foreign && (s.adopt || after.Wanted == g.id) {
		g.foreign = false // taken in, or there by our own word as far as anybody can tell
	} else if g != nil && g.foreign && g.machine == after.Machine {
		s.breakIt("foreign", "unit %s takes %s, which a person attached", after.Unit, g.id)
	}
}

// describe is what a reader of a scenario needs of a lease.
func describe(l device.Lease) string {
	text := fmt.Sprintf("%s on %s %s", l.Unit, l.Node, l.Phase)
	if l.FabricDevice != "" {
		text += " " + l.FabricDevice
	}
	switch {
	case !l.Attempt.IsZero():
		text += " for " + l.Attempt.Name
	case l.Idle():
		text += ", idle"
	}
	if l.Failure.Reason != "" {
		text += " (" + l.Failure.Reason + ")"
	}
	if l.Deleting {
		text += ", wanted back"
	}
	return text
}

// stateOf is what a lease says and how its device is, without names and times.
func (s *Sim) stateOf(l device.Lease) string {
	yes := func(is bool, word string) string {
		if is {
			return " " + word
		}
		return ""
	}
	text := string(l.Phase) + yes(!l.Attempt.IsZero(), "attempt") + yes(l.Attempt.Ready(), "ready") + yes(l.Idle(), "idle") + yes(l.Kept, "kept") +
		yes(l.Deleting, "deleting") + yes(l.HeldBy != "", "held") + yes(len(l.PreparedFor) > 0, "noted") + yes(!l.AskedAt.IsZero(), "asked") + " " + l.Failure.Reason
	h, g := s.hosts[l.Node], s.fabric.byID(l.FabricDevice)
	if g == nil || h == nil {
		return text
	}
	text += ", device" + yes(g.machine == h.machine, "here") + yes(g.machine == "", "free") + yes(g.health == device.HealthCritical, "critical") +
		yes(s.kubelets[h.node].uses(g), "prepared") + yes(len(h.open[g]) > 0, "open")
	if f := h.functionOf(g); f != nil {
		text += " on the bus" + yes(f.bound, "bound") + yes(f.seen, "seen") + yes(f.drained != nil, "drained")
	}
	return text
}

func (s *Sim) leases() []device.Lease {
	var all []device.Lease
	for _, o := range listOf[*coordinationv1.Lease](s.api, leases) {
		if l, ok := leaseOf(o); ok {
			all = append(all, l)
		}
	}
	return all
}

// leaseGone: what was asked for it is answered, and nothing of it is on the machine.
func (s *Sim) leaseGone(l device.Lease) {
	if g := s.fabric.byID(l.FabricDevice); g != nil && g.machine == l.Machine && !g.foreign {
		s.breakIt("no-amnesia", "the lease of unit %s is gone, and %s is still attached to %s", l.Unit, g.id, l.Node)
	}
}

// handsOff: no agent writes to a lease that it cannot read.
func (s *Sim) handsOff(before *coordinationv1.Lease) {
	if before == nil {
		return
	}
	if _, ok := leaseOf(before); !ok {
		s.breakIt("hands-off", "lease %s, which nobody can read, is written", before.Name)
	}
}

// rightWriter: the leader and the holder each write what is theirs.
func (s *Sim) rightWriter(before, after device.Lease) {
	p := s.writer
	lost := ""
	switch {
	case before.FabricDevice != "" && after.FabricDevice == "" && after.Phase != device.Assigned:
		lost = "its device " + before.FabricDevice
	case before.UUID != "" && after.UUID == "" && after.Phase != device.Assigned:
		lost = "its GPU's identity"
	case !before.AskedAt.IsZero() && after.AskedAt.IsZero() && after.Phase == before.Phase && (after.Phase != device.Failed || p.node != before.Node):
		lost = "what was asked for it"
	}
	if lost != "" {
		s.breakIt("lost-write", "%s wrote the lease of unit %s over a newer one: it lost %s", p.name, after.Unit, lost)
	}
	if gone := slices.DeleteFunc(slices.Clone(before.PreparedFor), func(uid string) bool { return slices.Contains(after.PreparedFor, uid) }); len(gone) > 0 && p.node != before.Node {
		s.breakIt("lost-write", "%s took claim %v off the lease of unit %s, which is %s's to do", p.name, gone, after.Unit, before.Node)
	}
	if before.Phase == device.Attached && (after.Phase == device.Assigned || after.Phase == device.Attaching) {
		s.breakIt("lost-write", "%s wrote phase %s over %s on unit %s", p.name, after.Phase, before.Phase, after.Unit)
	}
}

// rightMoment: a unit is called back, or taken from its claim, only when that is so.
func (s *Sim) rightMoment(before, after device.Lease) {
	if before.Phase == device.Attached && after.Phase == device.Releasing && !after.Deleting && s.writer != nil && s.api.leads(s.writer) {
		s.calledBack(after)
	}
	if !before.Attempt.IsZero() && after.Attempt.IsZero() && s.stillHas(before.Attempt) {
		s.breakIt("taken-from-claim", "unit %s was taken from claim %s, which has it", after.Unit, before.Attempt.Name)
	}
	if before.Phase == device.Attaching && after.Phase == device.Attached {
		h := s.hosts[after.Node]
		g := s.fabric.byID(after.FabricDevice)
		if g != nil && g.uuid != after.UUID {
			s.breakIt("identity", "unit %s is attached as %s, and %s is %s", after.Unit, after.UUID, g.id, g.uuid)
		}
		if g != nil && h != nil && !h.usable(g) && !s.upset(g) {
			s.breakIt("identity", "unit %s is attached, and %s cannot be used on %s", after.Unit, g.id, after.Node)
		}
	}
}

// calledBack: nobody can be given the unit where it is any more, and nobody was.
func (s *Sim) calledBack(l device.Lease) {
	for _, c := range listOf[*resourceapi.ResourceClaim](s.api, claims) {
		for _, r := range results(c) {
			u, _ := device.UnitOfEntry(r.Device)
			switch at, _ := nodeOfClaim(c); {
			case u != l.Unit:
			case at != l.Node, s.nodeUID(at) != l.NodeUID:
				return // wanted elsewhere, or on a Node that was made anew: its counter is taken
			case s.watch.allocated[c.Name].Before(s.watch.listed[s.writer.name]):
				s.breakIt("called-back", "unit %s is called back from %s, and claim %s was given it there", l.Unit, l.Node, c.Name)
			default:
				return // given while it was being called back: it cancels that, or is attached again
			}
		}
	}
	for _, o := range listOf[*resourceapi.ResourceSlice](s.api, poolSlices) {
		for i := range o.Spec.Devices {
			d := &o.Spec.Devices[i]
			if d.Name == l.Unit.ReadyEntry() && len(d.Taints) == 0 {
				s.breakIt("called-back", "unit %s is called back from %s while its ready entry can be chosen", l.Unit, l.Node)
			}
		}
	}
}

func (s *Sim) nodeUID(name string) string {
	if n, ok := s.api.objects[nodes][name]; ok {
		return string(n.GetUID())
	}
	return ""
}

func nodeOfClaim(c *resourceapi.ResourceClaim) (string, bool) {
	for _, t := range c.Status.Allocation.NodeSelector.NodeSelectorTerms {
		for _, f := range t.MatchFields {
			return f.Values[0], true
		}
	}
	return "", false
}

func (s *Sim) stillHas(a device.Attempt) bool {
	c, ok := find[*resourceapi.ResourceClaim](s.api, claims, a.Name)
	if !ok {
		return false
	}
	ds, _ := claim.Demands(fabricID, c)
	return slices.ContainsFunc(ds, func(d pool.Demand) bool { return d.Attempt == a })
}

// upset: something from outside happened to the device a moment ago.
func (s *Sim) upset(g *gpu) bool { return !g.upset.IsZero() && s.now().Sub(g.upset) < 2*time.Minute }

// sliceChanged: an entry that was published stays, in its slice.
func (s *Sim) sliceChanged(c change) {
	if c.after == nil {
		s.breakIt("permanent", "slice %s was deleted", c.name)
		return
	}
	o, ok := c.after.(*resourceapi.ResourceSlice)
	if !ok {
		return
	}
	have := map[string]bool{}
	for i := range o.Spec.Devices {
		name := o.Spec.Devices[i].Name
		have[name] = true
		if was, ok := s.watch.entries[name]; ok && was != c.name {
			s.breakIt("permanent", "entry %s moved from slice %s to %s", name, was, c.name)
		}
		s.watch.entries[name] = c.name
	}
	for _, name := range keys(s.watch.entries) {
		if s.watch.entries[name] == c.name && !have[name] {
			s.breakIt("permanent", "entry %s was delisted", name)
		}
	}
	s.after(s.between("eviction", 100*time.Millisecond, 2*time.Second), nil, s.evict)
}

// claimChanged: one unit is allocated to one claim.
func (s *Sim) claimChanged(c change) {
	o, ok := c.after.(*resourceapi.ResourceClaim)
	if !ok {
		return
	}
	mine := units(o)
	if b, ok := c.before.(*resourceapi.ResourceClaim); (!ok || len(units(b)) == 0) && len(mine) > 0 {
		s.watch.allocated[o.Name] = s.now()
	}
	for _, other := range listOf[*resourceapi.ResourceClaim](s.api, claims) {
		if other.Name == o.Name {
			continue
		}
		for _, u := range units(other) {
			if slices.Contains(mine, u) {
				s.breakIt("one-unit-one-claim", "unit %s is allocated to claims %s and %s", u, o.Name, other.Name)
			}
		}
	}
}

func units(c *resourceapi.ResourceClaim) []device.Unit {
	var all []device.Unit
	for _, r := range results(c) {
		u, _ := device.UnitOfEntry(r.Device)
		all = append(all, u)
	}
	return all
}

// asked: a call to attach was sent; that it would be is stored.
func (s *Sim) asked(p *process, m device.Machine) {
	stored := slices.ContainsFunc(s.leases(), func(l device.Lease) bool {
		return l.Machine == m && l.Phase == device.Attaching && l.FabricDevice == "" && !l.AskedAt.IsZero()
	})
	if !stored {
		s.breakIt("write-ahead", "%s asks the manager for a device, and no lease says so", p.name)
	}
}

// askedAtOnce: one call takes several devices of one machine, as many as the manager takes.
func (s *Sim) askedAtOnce(p *process, calls []node.Call) {
	ids := map[string]bool{}
	for _, call := range calls {
		ids[call.Device] = true
		if call.Machine != p.host.machine {
			s.breakIt("batch", "%s has %s detached from %s beside its own", p.name, call.Device, call.Machine)
		}
	}
	if most := s.manner.batch; len(ids) != len(calls) || len(calls) < 2 || len(calls) > most {
		s.breakIt("batch", "%s asks for %d detaches of %d devices by one call, which takes 2 to %d", p.name, len(calls), len(ids), most)
	}
}

// taking: a device is about to be taken from the bus or from the machine.
func (s *Sim) taking(p *process, g *gpu, how string) {
	s.preparedFor(p, g, how)
	h := p.host
	for _, o := range h.open[g] {
		// Where the driver cannot drain, a process may open the device between the last look and this.
		if !h.crude || s.now().Sub(o.since) > 5*time.Second {
			s.breakIt("in-use", "%s is %s on %s while %s has it open", g.id, how, p.node, o.who)
		}
	}
	if g.foreign {
		s.breakIt("foreign", "%s, which a person attached, is %s on %s", g.id, how, p.node)
	}
}

func (s *Sim) preparedFor(p *process, g *gpu, how string) {
	k := s.kubelets[p.node]
	for _, uid := range keysOf(k.prepared) {
		if slices.Contains(k.prepared[uid], g) {
			s.breakIt("in-use", "%s is %s on %s while claim %s is prepared", g.id, how, p.node, k.names[uid])
		}
	}
}

// told: a condition is written on a claim.
func (s *Sim) told(p *process, c *resourceapi.ResourceClaim, entry, what, reason, message string) {
	s.note("claim", "%s %s: %s", c.Name, entry, strings.TrimPrefix(what, device.Driver+"/")+because(what, reason))
	if what != device.ConditionAttached {
		return
	}
	u, _ := device.UnitOfEntry(entry)
	for _, l := range s.leases() {
		if l.Unit != u {
			continue
		}
		g := s.fabric.byUUID(l.UUID)
		h := s.hosts[l.Node]
		if g == nil || !h.usable(g) && !s.upset(g) {
			s.breakIt("told-too-early", "claim %s is told that %s is attached, which cannot be used on %s", c.Name, u, l.Node)
		}
		if l.Attempt.UID != string(c.UID) && !strings.HasPrefix(message, "late") {
			s.detail("judge", "claim %s is told of unit %s, which serves %s by now", c.Name, u, l.Attempt.Name)
		}
		return
	}
	s.breakIt("told-too-early", "claim %s is told that %s is attached, which has no lease", c.Name, u)
	_ = p
}

func because(what, reason string) string {
	if what == device.ConditionAttachFailed {
		return " " + reason
	}
	return ""
}

// answered: the plugin told the kubelet that a claim is prepared.
func (s *Sim) answered(k *kubelet, c *resourceapi.ResourceClaim, devices []kubeletplugin.Device, gpus []*gpu) {
	for _, uid := range keysOf(k.prepared) {
		if uid == c.UID {
			continue
		}
		for _, g := range gpus {
			if slices.Contains(k.prepared[uid], g) {
				s.breakIt("one-device-one-claim", "%s is prepared for claims %s and %s on %s", g.id, c.Name, k.names[uid], k.h.node)
			}
		}
	}
	for i, d := range devices {
		u, ready := device.UnitOfEntry(d.DeviceName)
		g := gpus[i]
		if g == nil || g.machine != k.h.machine && !s.upset(g) {
			s.breakIt("told-too-early", "claim %s is prepared with a GPU that is not on %s", c.Name, k.h.node)
			continue
		}
		if !ready {
			continue
		}
		for _, l := range s.leases() {
			if l.Unit == u && !slices.Contains(l.PreparedFor, string(c.UID)) && s.stillPrepared(k, c.UID) {
				s.breakIt("prepare-unwritten", "claim %s is prepared on the ready offer of %s, and the lease does not say so", c.Name, u)
			}
		}
	}
}

func (s *Sim) stillPrepared(k *kubelet, uid types.UID) bool { return k.prepared[uid] != nil }

// startedWithout: a Pod whose claim was answered finds no device.
func (s *Sim) startedWithout(k *kubelet, g *gpu, p *pod) {
	if !s.upset(g) && s.now().Sub(k.h.bootedAt) > 2*time.Minute {
		s.breakIt("in-use", "%s finds no %s on %s, though its claim is prepared", p.name, g.id, k.h.node)
	}
}

func keysOf[V any](m map[types.UID]V) []types.UID {
	all := make([]types.UID, 0, len(m))
	for uid := range m {
		all = append(all, uid)
	}
	slices.Sort(all)
	return all
}

// decided counts the rows of the leader's policy that applied.
func (s *Sim) decided(_ *process, p pool.Plan) {
	for _, r := range p.Rules {
		s.count.Rules["pool: "+r]++
	}
}

// judge looks at what must hold after each step.
func (s *Sim) judge() {
	for _, p := range s.scheduler.pods {
		if p.waiting == "" || p.deleted {
			p.told = time.Time{}
			continue
		}
		s.toldInTime(p)
		failed := false
		for _, name := range p.claims {
			o, ok := s.api.objects[claims][name].(*resourceapi.ResourceClaim)
			if !ok {
				continue
			}
			for _, r := range results(o) {
				failed = failed || conditionOf(o, r) == device.ConditionAttachFailed
			}
		}
		switch {
		case !failed:
			p.told = time.Time{}
		case p.told.IsZero():
			p.told = s.now()
		case s.now().Sub(laterOf(p.told, s.calm)) > toldAllMost:
			s.breakIt("told-all", "%s waits on %s for another device, 2 minutes after one of its devices failed", p.name, p.waiting)
		}
	}
}

// How long a claim may wait for a word: an attach has its deadline, and what failed is told at once.
const toldAllMost = 2 * time.Minute

func (s *Sim) toldMost() time.Duration { return max(attachMost, s.patience()) + 2*time.Minute }

// toldInTime: when nothing goes wrong, a claim hears of its unit, wherever that is.
func (s *Sim) toldInTime(p *pod) {
	if s.calm.IsZero() {
		return
	}
	for _, name := range p.claims {
		o, ok := s.api.objects[claims][name].(*resourceapi.ResourceClaim)
		at, has := s.watch.allocated[name]
		if !ok || !has || len(o.Status.ReservedFor) == 0 || s.now().Sub(laterOf(at, s.calm)) <= s.toldMost() {
			continue
		}
		for _, r := range results(o) {
			u, _ := device.UnitOfEntry(r.Device)
			if s.now().Sub(s.watch.touched[u]) <= s.toldMost() {
				continue // it was held elsewhere, and came free since
			}
			l, _ := leaseOf(s.api.objects[leases][device.LeaseName(fabricID, u)])
			if conditionOf(o, r) == "" {
				s.breakIt("not-told", "claim %s has waited %s for unit %s and heard nothing; its lease: %s", name, s.toldMost(), u, describe(l))
			}
		}
	}
}

func laterOf(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
