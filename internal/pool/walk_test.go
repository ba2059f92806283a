// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// axis is one thing about a unit that the world can show in several ways.
type axis struct {
	name string
	ways []mod
}

func nothing1(*World) {}

func ofLease(change ...func(*device.Lease)) mod {
	return func(w *World) {
		for i := range w.Leases {
			for _, c := range change {
				c(&w.Leases[i])
			}
		}
	}
}

func readyTaint(since time.Duration) mod { return tainted("a100-0-ready", since) }

// axes span every combination of what a leader can see of one unit: who holds it, for whom, who wants it,
// and what of that is published.
func axes() []axis {
	lease := func(p device.Phase) mod { return leased("a100-0", p) }
	both := func(mods ...mod) mod { return func(w *World) { w.with(mods...) } }
	return []axis{
		{"lease", []mod{
			nothing1, lease(device.Assigned), lease(device.Attaching), lease(device.Attached), lease(device.Releasing),
			both(lease(device.Failed), ofLease(failed("Rejected", device.BlameUnit))),
			both(lease(device.Failed), ofLease(failed("Vanished", device.BlameUnit))), lease("Dreaming"),
		}},
		{"attempt", []mod{nothing1, ofLease(serving("a", "a100-0")), ofLease(serving("a", "a100-0-ready"))}},
		{"use", []mod{nothing1, ofLease(idle(time.Minute)), ofLease(idle(time.Hour)), ofLease(idle(time.Hour), noted)}},
		{"minimum", []mod{nothing1, least(1), ofLease(kept)}},
		{"deleting", []mod{nothing1, ofLease(deleting)}},
		{"holder", []mod{
			nothing1, node("n1", agentAway(time.Minute)), node("n1", agentAway(time.Hour)), noNode("n1"),
			ofLease(otherUID), ofLease(otherMachine),
		}},
		{"claim a", []mod{nothing1, demand("a", "n1", "a100-0"), demand("a", "n1", "a100-0", unreserved), demand("a", "n1", "a100-0", toldAttached), demand("a", "n1", "a100-0", toldFailed), demand("a", "n1", "a100-0-ready")}},
		{"claim b", []mod{nothing1, demand("b", "n1", "a100-0", allocated("2026-01-02T03:04:01Z")), demand("b", "n1", "a100-0-ready", unreserved), demand("b", "n2", "a100-0"), demand("b", "gone", "a100-0")}},
		{"entry", []mod{nothing1, tainted("a100-0", 0), tainted("a100-0", time.Minute)}},
		{"ready entry", []mod{nothing1, untainted("a100-0-ready"), readyTaint(0), readyTaint(time.Minute)}},
		{"labels", []mod{nothing1, both(node("n1", withdrawn), node("n2", withdrawn))}},
	}
}

// TestEveryCombination walks through all of them and holds each plan against what must never be.
func TestEveryCombination(t *testing.T) {
	of, n, bad := axes(), 0, 0
	at := make([]int, len(of))
	ops, refusals := map[OpKind]int{}, 0
	for more := true; more; more = advance(at, of) {
		if pointless(at) {
			continue
		}
		w := calm()
		w.Models, w.Published.Units = w.Models[:1], w.Published.Units[:1]
		for i, a := range of {
			a.ways[at[i]](&w)
		}
		p := Decide(w)
		n++
		for _, o := range p.Ops {
			ops[o.Kind]++
		}
		refusals += len(p.Refusals)
		if complaints := wrongs(&w, &p); len(complaints) > 0 && bad < 20 {
			bad++
			situation := map[string]int{}
			for i, a := range of {
				situation[a.name] = at[i]
			}
			t.Errorf("%v: %+v: %v", situation, outcomeOf(p), complaints)
		}
		if n%997 == 0 {
			if diff := cmp.Diff(p, Decide(w)); diff != "" {
				t.Fatalf("two plans for one world:\n%s", diff)
			}
		}
	}
	t.Logf("%d combinations: operations %v, %d refusals", n, ops, refusals)
	if refusals == 0 || len(ops) != 5 {
		t.Error("the walk misses something")
	}
}

// pointless tells combinations of what there is none of: an attempt on no lease, use of what is not attached.
func pointless(at []int) bool {
	lease, attempt, use, minimum, deleting, holder, b, entry, labels := at[0], at[1], at[2], at[3], at[4], at[5], at[7], at[8], at[10]
	const none, attached, justNow = 0, 3, 1
	if minimum > 0 && (b > 0 || labels > 0) { // the model goes further
		return true
	}
	return lease == none && (attempt > 0 || minimum > 1 || deleting > 0 || holder > 3) || lease != attached && use > 0 ||
		lease != none && entry == justNow // since when counts for what is free
}

func advance(at []int, of []axis) bool {
	for i := range at {
		if at[i]++; at[i] < len(of[i].ways) {
			return true
		}
		at[i] = 0
	}
	return false
}

// wrongs says what a plan breaks, in terms of the world and not of the rules.
func wrongs(w *World, p *Plan) []string {
	var bad []string
	never := func(yes bool, what string) {
		if yes {
			bad = append(bad, what)
		}
	}
	var lease device.Lease
	has := len(w.Leases) > 0
	if has {
		lease = w.Leases[0]
	}
	holder := slices.IndexFunc(w.Nodes, func(n Node) bool { return has && n.Name == lease.Node && n.Machine == lease.Machine })
	acts := holder >= 0 && (w.Nodes[holder].AgentReady || w.Now.Before(w.Nodes[holder].AwaySince.Add(w.Settings.AgentAway)))
	keeps := keepsIt(w, lease, holder)
	served := has && slices.ContainsFunc(w.Demands, func(d Demand) bool { return d.Attempt == lease.Attempt })
	never(len(p.Ops) > 1, "does two things to one lease")
	for _, o := range p.Ops {
		never(has && !lease.Phase.Known(), "touches what a later release does")
		d := slices.IndexFunc(w.Demands, func(d Demand) bool { return d.Attempt == o.Attempt })
		switch o.Kind {
		case Create:
			never(has, "makes a second lease for one unit")
			never(o.Lease.Machine == "", "makes a lease for no machine")
			if o.Lease.Kept {
				since := w.Published.TaintedSince["a100-0"]
				never(!o.Attempt.IsZero() || len(w.Demands) > 0, "keeps what a claim has")
				never(w.Models[0].Min == 0, "keeps what need not be kept")
				never(since.IsZero() || w.Now.Before(since.Add(w.Settings.ReadySettle)), "keeps what may just be given to a Pod")
				continue
			}
			never(d < 0 || !w.Demands[d].Reserved || w.Demands[d].AttachFailed, "makes a lease for nobody")
			never(o.Lease.Node != o.Attempt.Node, "makes a lease for another node")
		case Assign:
			never(!has || !lease.Attempt.IsZero(), "gives away what serves a claim")
			never(d < 0 || !w.Demands[d].Reserved || w.Demands[d].AttachFailed, "assigns to nobody")
			never(o.Attempt.Node != lease.Node || lease.Machine != "m-n1" || lease.NodeUID != "uid-n1", "assigns to another node")
			never(lease.Phase == device.Failed || lease.Deleting, "assigns what is going away")
			never(o.Lease.Version != lease.Version || !o.Lease.IdleSince.IsZero(), "assigns what it did not see, or leaves it idle")
		case Clear:
			never(served || lease.Attempt.IsZero(), "clears a living attempt")
		case Release:
			never(!lease.Idle(), "calls back what is not idle")
			never(keeps && !slices.ContainsFunc(w.Demands, func(d Demand) bool { return d.Attempt.Ready() }), "calls back what its node keeps")
			elsewhere := slices.ContainsFunc(w.Demands, func(d Demand) bool {
				return d.Reserved && !d.AttachFailed && (d.Attempt.Node != lease.Node || lease.NodeUID != "uid-n1")
			})
			cooled := !w.Now.Before(lease.IdleSince.Add(w.Settings.CoolDown))
			since := w.Published.TaintedSince["a100-0-ready"]
			settled := !since.IsZero() && !w.Now.Before(since.Add(w.Settings.ReadySettle))
			never(!elsewhere && (!cooled || !settled), "calls back what may just be given to a Pod")
		case Drop:
			never(lease.Phase != device.Assigned || !lease.Attempt.IsZero() || acts, "drops what its holder may be working on")
		}
	}
	for _, r := range p.Refusals {
		never(len(r.Attempts) == 0 || r.Reason == "" || r.Message == "", "refuses nothing, or without a word")
		for _, a := range r.Attempts {
			d := w.Demands[slices.IndexFunc(w.Demands, func(d Demand) bool { return d.Attempt == a })]
			never(d.Attached || d.AttachFailed || a.Ready(), "refuses what is attached, refused or bound already")
			never(slices.ContainsFunc(p.Ops, func(o Op) bool { return o.Attempt == a && o.Kind != Clear }), "refuses what it serves")
			n := slices.IndexFunc(w.Nodes, func(n Node) bool { return n.Name == a.Node })
			never(w.Published.Effects[a.Entry] == NoTaint && n >= 0 && w.Nodes[n].Attachable["a100"], "refuses what would be chosen again")
		}
	}
	return append(bad, wrongOffers(w, p, lease, acts, keeps)...)
}

// keepsIt: the one node that can have the unit should have it, and it is the very Node that has it.
func keepsIt(w *World, lease device.Lease, holder int) bool {
	return w.Models[0].Min > 0 && holder >= 0 && lease.NodeUID == w.Nodes[holder].UID && !lease.Deleting &&
		slices.Contains([]device.Phase{device.Assigned, device.Attaching, device.Attached}, lease.Phase)
}

func wrongOffers(w *World, p *Plan, lease device.Lease, acts, keeps bool) []string {
	var bad []string
	never := func(yes bool, what string) {
		if yes {
			bad = append(bad, what)
		}
	}
	never(!slices.Equal(p.Offers.Units[:1], w.Published.Units) || len(p.Offers.Ready) != 1 || len(p.Offers.OnCall) != 1, "moves the unit")
	at := func(in [][]Offer, name string) Offer {
		return in[0][slices.IndexFunc(in[0], func(o Offer) bool { return o.Name == name })]
	}
	ready, onCall := at(p.Offers.Ready, "a100-0-ready"), at(p.Offers.OnCall, "a100-0")
	never(ready.Effect == NoTaint && (!lease.Idle() || !acts || ready.Node != lease.Node), "offers at once what is not there, or not idle")
	never(ready.Node != Nowhere && lease.UUID == "", "names a node for what is attached nowhere")
	never(ready.Node == "" || onCall.Node != "" || !slices.Equal(ready.Units, onCall.Units), "the entries do not belong together")
	there := slices.ContainsFunc(w.Nodes, func(n Node) bool { // its Pods stay when the Node object is made anew
		return n.Name == lease.Node && n.Machine == lease.Machine
	})
	running := slices.ContainsFunc(w.Demands, func(d Demand) bool {
		bound := d.Attempt.Ready() && d.Reserved && !d.AttachFailed && d.Attempt.Node == lease.Node && there && lease.Attempt.IsZero()
		return d.Attempt == lease.Attempt && (d.Attached || d.Attempt.Ready()) || bound
	})
	never((ready.Effect == NoExecute || onCall.Effect == NoExecute) && (lease.Phase != device.Failed || !running), "evicts a Pod that can run")
	never(lease.Phase == device.Failed && running && ready.Effect != NoExecute && onCall.Effect != NoExecute, "leaves a Pod bound to nothing")
	never(onCall.Effect == NoTaint && lease.Phase == device.Failed, "offers what failed")
	never(onCall.Effect == NoTaint && keeps, "offers to others what its node keeps")
	never(keeps && lease.Idle() && acts && ready.Effect != NoTaint, "withholds what its node keeps for its Pods")
	never(onCall.Effect == NoTaint && lease.Idle() && !acts, "offers what nobody would release")
	for _, l := range p.Labels {
		i := slices.IndexFunc(w.Nodes, func(n Node) bool { return n.Name == l.Node })
		away := !w.Nodes[i].AgentReady && !w.Now.Before(w.Nodes[i].AwaySince.Add(w.Settings.AgentAway))
		never(away && (l.Idle || slices.Contains(slices.Collect(maps.Values(l.Attachable)), true)), "sends Pods to a node without an agent")
	}
	return bad
}
