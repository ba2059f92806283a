// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// The model is a small cluster around one unit and two nodes: the scheduler, which sees taints late, one claim
// after the other, the holder, a person, the manager, what the API server shows of the pool, and the leader's
// caches, which see a claim late. The policy is the real one; everything else may do at any moment what it can
// do at all.

// What an entry shows.
const (
	untaintedE = iota
	noScheduleE
	noExecuteE
)

// What the holder is with the unit.
const (
	inHand = iota // on its way, in use, or still prepared
	idleU
	cooledU
)

// Whose attempt the lease stores.
const (
	nobodys = iota
	claims1 // the present claim's
	gones   // of a claim that is no more
)

// How far the claim is.
const (
	noClaim = iota
	allocated1
	reserved1
)

// cluster is one state of it. It is comparable: a set of them is what has been seen.
type cluster struct {
	// The lease.
	phase                      int8 // 0 is none, else 1 + index in device.Phases
	node, attempt, use, note   int8 // note: whose claim it is prepared for by its ready entry
	kept, deleting, blame, old bool // blame: the node's fault; old: its back-off is over
	// The claim.
	claim, want                 int8
	ready, seen, attached, fail bool // by the ready entry; in the leader's cache; what it was told
	// What is shown of the pool.
	onCall, atOnce             int8
	onCallSettled, readSettled bool
	readyNode                  int8 // 0 is nowhere, else 1 + node
	label                      [2]bool
	// The manager has it; the agent of the first node is away.
	free, away bool
}

func nodeName(i int8) string { return []string{"n1", "n2"}[i] }

func (c cluster) in(p device.Phase) bool {
	return c.phase > 0 && device.Phases()[c.phase-1] == p
}

func phaseOf(p device.Phase) int8 { return int8(1 + slices.Index(device.Phases(), p)) }

func (c cluster) entry() string {
	if c.ready {
		return "a100-0-ready"
	}
	return "a100-0"
}

// observe is what the leader's loop would show the policy.
func (c cluster) observe(minimum int) World {
	w := World{
		Now: now, Fabric: "0",
		Settings:  Settings{CoolDown: 10 * time.Minute, ReadySettle: 10 * time.Second, AgentAway: 2 * time.Minute},
		Models:    []Model{{Name: "a100", Min: minimum}},
		Published: Published{Units: []device.Unit{"a100-0"}, Effects: map[string]Effect{}, TaintedSince: map[string]time.Time{}},
	}
	n := 0
	if c.free {
		n = 1
	}
	w.Inventory.Free = map[device.Model]Supply{"a100": {Count: n}}
	for i := range int8(2) {
		name := nodeName(i)
		w.Nodes = append(w.Nodes, Node{
			Name: name, UID: "uid-" + name, Machine: device.Machine("m-" + name), Member: true, AgentReady: true,
			Attachable: map[device.Model]bool{"a100": c.label[i]},
		})
	}
	if c.away {
		agentAway(time.Hour)(&w.Nodes[0])
	}
	show := func(entry string, effect int8, settled bool) {
		w.Published.Effects[entry] = []Effect{NoTaint, NoSchedule, NoExecute}[effect]
		if effect != untaintedE {
			w.Published.TaintedSince[entry] = now
			if settled {
				w.Published.TaintedSince[entry] = ago(time.Minute)
			}
		}
	}
	show("a100-0", c.onCall, c.onCallSettled)
	show("a100-0-ready", c.atOnce, c.readSettled)
	if c.claim != noClaim && c.seen {
		demand("c", nodeName(c.want), c.entry(), func(d *Demand) {
			d.Reserved, d.Attached, d.AttachFailed = c.claim == reserved1, c.attached, c.fail
		})(&w)
	}
	if c.phase > 0 {
		w.Leases = []device.Lease{c.lease()}
		w.Inventory.Leased = map[device.Unit]string{"a100-0": w.Leases[0].FabricDevice}
		w.Inventory.Free["a100"] = Supply{}
	}
	return w
}

func (c cluster) lease() device.Lease {
	name := nodeName(c.node)
	l := device.Lease{
		Fabric: "0", Unit: "a100-0", Model: "a100", Node: name, NodeUID: "uid-" + name, Machine: device.Machine("m-" + name),
		Phase: device.Phases()[c.phase-1], Kept: c.kept, Deleting: c.deleting, AcquiredAt: ago(time.Minute), Version: "7",
	}
	switch c.attempt {
	case claims1:
		l.Attempt = attemptOf("c", nodeName(c.want), c.entry())
	case gones:
		l.Attempt = attemptOf("before", name, "a100-0")
	}
	if c.in(device.Attached) || c.in(device.Releasing) {
		l.FabricDevice, l.UUID = "d", "GPU-x"
	}
	if c.in(device.Failed) {
		l.Failure = device.Failure{Reason: "Broken", Blame: device.BlameUnit, RetryAfter: now.Add(time.Minute)}
		if c.blame {
			l.Failure.Blame = device.BlameNode
		}
		if c.old {
			l.Failure.RetryAfter = ago(time.Second)
		}
	}
	switch c.use {
	case idleU:
		l.IdleSince = ago(time.Minute)
	case cooledU:
		l.IdleSince = ago(time.Hour)
	}
	if c.note != nobodys {
		l.PreparedFor = []string{"uid-c"}
	}
	return l
}

// decision is what a plan says of the unit.
type decision struct {
	onCall, atOnce, readyNode int8
	label                     [2]bool
	op                        OpKind
	lease                     struct {
		node int8
		kept bool
	}
	refuses bool
}

func (c cluster) decide(minimum int) decision {
	p := Decide(c.observe(minimum))
	var d decision
	effect := func(o Offer) int8 { return int8(slices.Index([]Effect{NoTaint, NoSchedule, NoExecute}, o.Effect)) }
	d.onCall, d.atOnce = effect(p.Offers.OnCall[0][0]), effect(p.Offers.Ready[0][0])
	d.readyNode = int8(1 + slices.Index([]string{"n1", "n2"}, p.Offers.Ready[0][0].Node))
	for i := range p.Labels {
		d.label[i] = p.Labels[i].Attachable["a100"]
	}
	if len(p.Ops) > 0 {
		d.op, d.lease.kept = p.Ops[0].Kind, p.Ops[0].Lease.Kept
		d.lease.node = int8(slices.Index([]string{"n1", "n2"}, p.Ops[0].Lease.Node))
	}
	d.refuses = len(p.Refusals) > 0
	return d
}

// crime says what a decision does to the cluster that must never be, whatever the leader saw.
func (c cluster) crime(d decision) string {
	bound := c.claim != noClaim && c.seen && c.want == c.node && (c.attached || c.ready)
	switch {
	case d.op == Create && c.phase > 0:
		return "a second lease for one unit"
	case d.op == Release && (bound || c.note != nobodys || c.use == inHand):
		return "what somebody has is called back"
	case d.op == Drop && (!c.in(device.Assigned) || c.attempt != nobodys):
		return "what its holder may work on is dropped"
	case d.op == Clear && c.attempt == claims1:
		return "a living attempt is cleared"
	case d.refuses && c.onCall == untaintedE && c.label[c.want]:
		return "a claim is refused and may be given the same again"
	case d.refuses && (c.attached || c.ready):
		return "a Pod that is bound is refused"
	case d.atOnce == untaintedE && (c.use == inHand || c.note != nobodys || c.attempt != nobodys || c.deleting):
		return "what somebody has is offered"
	case d.atOnce == untaintedE && d.readyNode != c.node+1:
		return "it is offered where it is not"
	}
	return ""
}

// next is a cluster and how it comes about.
type next struct {
	cluster
	by string
}

// leads are the parts of a decision, each of which may be carried out by itself, or later; what takes
// something away is checked against the API server first, as the loop does.
func (c cluster) leads(d decision) []next {
	var all []next
	to := func(by string, f func(*cluster)) { n := c; f(&n); all = append(all, next{n.plainly(), by}) }
	to("leader: entry", func(n *cluster) {
		if n.onCall != d.onCall {
			n.onCall, n.onCallSettled = d.onCall, n.onCallSettled && d.onCall != untaintedE && n.onCall != untaintedE
		}
	})
	to("leader: ready entry", func(n *cluster) {
		if n.atOnce != d.atOnce {
			n.atOnce, n.readSettled = d.atOnce, n.readSettled && d.atOnce != untaintedE && n.atOnce != untaintedE
		}
		n.readyNode = d.readyNode
	})
	to("leader: labels", func(n *cluster) { n.label = d.label })
	live := c.claim != noClaim
	switch {
	case d.op == Create && d.lease.kept && live, d.op == Release && live && c.want == c.node, d.op == Clear && c.attempt != gones:
	case d.op != "":
		to("leader: "+string(d.op), func(n *cluster) { n.operated(d) })
	}
	if d.refuses {
		to("leader: refuse", func(n *cluster) { n.fail = true })
	}
	return all
}

func (c *cluster) operated(d decision) {
	switch d.op {
	case Create:
		c.phase, c.node, c.kept, c.use, c.free = phaseOf(device.Assigned), d.lease.node, d.lease.kept, inHand, true
		if !c.kept {
			c.attempt = claims1
		}
	case Assign:
		c.attempt, c.use = claims1, inHand
	case Clear:
		c.attempt, c.kept = nobodys, d.lease.kept
	case Release:
		c.phase, c.use, c.kept = phaseOf(device.Releasing), inHand, false
	case Drop:
		c.noLease()
	}
}

func (c *cluster) noLease() {
	c.phase, c.node, c.attempt, c.use = 0, 0, nobodys, inHand
	c.note = nobodys
	c.kept, c.deleting, c.blame, c.old = false, false, false, false
}

func (c *cluster) noClaim() {
	if c.attempt == claims1 {
		c.attempt = gones
	}
	if c.note == claims1 {
		c.note = gones
	}
	c.claim, c.want, c.ready, c.seen, c.attached, c.fail = noClaim, 0, false, false, false, false
}

// happening is something that others do.
type happening struct {
	name string
	can  func(cluster) bool
	do   func(*cluster)
}

func (c cluster) acts() bool   { return c.phase > 0 && (c.node == 1 || !c.away) }
func (c cluster) wanted() bool { return (c.attempt != nobodys || c.kept) && !c.deleting }

// happenings are all that others can do at any moment.
func happenings() []happening {
	all := []happening{
		// Scheduler, kubelet and people.
		{"claim is seen", func(c cluster) bool { return c.claim != noClaim && !c.seen }, func(c *cluster) { c.seen = true }},
		{"reserve", func(c cluster) bool { return c.claim == allocated1 && !c.fail }, func(c *cluster) { c.claim = reserved1 }},
		{"scheduler tries again", func(c cluster) bool { return c.claim == reserved1 && !c.attached && !c.ready }, func(c *cluster) { c.claim = allocated1 }},
		{"claim goes", func(c cluster) bool { return c.claim != noClaim }, (*cluster).noClaim},
		{"allocation is cleared", func(c cluster) bool { return c.fail }, (*cluster).noClaim},
		{"evict", func(c cluster) bool {
			return c.claim != noClaim && (c.ready && c.atOnce == noExecuteE || !c.ready && c.attached && c.onCall == noExecuteE)
		}, (*cluster).noClaim},
		{"prepare where it is", func(c cluster) bool {
			return c.claim == reserved1 && c.ready && c.acts() && c.want == c.node && c.in(device.Attached) && c.note == nobodys && !c.deleting &&
				(c.attempt == claims1 || c.use != inHand)
		}, func(c *cluster) { c.note = claims1 }},
		{"unprepare", func(c cluster) bool { return c.note == gones }, func(c *cluster) { c.note, c.use = nobodys, inHand }},
		{"delete the lease", func(c cluster) bool { return c.phase > 0 && !c.deleting }, func(c *cluster) { c.deleting = true }},
		// Manager, time, agents.
		{"manager gives it away", func(c cluster) bool { return c.phase == 0 && c.free }, func(c *cluster) { c.free = false }},
		{"manager has it", func(c cluster) bool { return !c.free }, func(c *cluster) { c.free = true }},
		{"agent goes", func(c cluster) bool { return !c.away }, func(c *cluster) { c.away = true }},
		{"agent comes", func(c cluster) bool { return c.away }, func(c *cluster) { c.away = false }},
		{"settled", func(c cluster) bool {
			return c.onCall != untaintedE && !c.onCallSettled || c.atOnce != untaintedE && !c.readSettled
		}, func(c *cluster) {
			c.onCallSettled, c.readSettled = c.onCall != untaintedE, c.atOnce != untaintedE
		}},
		{"cooled", func(c cluster) bool { return c.use == idleU }, func(c *cluster) { c.use = cooledU }},
		{"back-off over", func(c cluster) bool { return c.in(device.Failed) && !c.old }, func(c *cluster) { c.old = true }},
	}
	for i := range int8(2) { // the scheduler sees a taint late
		all = append(all, happening{"allocate on call on " + nodeName(i), func(c cluster) bool {
			return c.claim == noClaim && c.label[i] && (c.onCall == untaintedE || !c.onCallSettled)
		}, func(c *cluster) { c.claim, c.want = allocated1, i }})
		all = append(all, happening{"allocate at once on " + nodeName(i), func(c cluster) bool {
			return c.claim == noClaim && c.readyNode == i+1 && (c.atOnce == untaintedE || !c.readSettled)
		}, func(c *cluster) { c.claim, c.want, c.ready = allocated1, i, true }})
	}
	return append(all, holding()...)
}

// holding is what the holder does, in success first.
func holding() []happening {
	act := func(name string, p device.Phase, can func(cluster) bool, do func(*cluster)) happening {
		return happening{name, func(c cluster) bool { return c.in(p) && c.acts() && can(c) }, do}
	}
	wanted, unwanted := cluster.wanted, func(c cluster) bool { return !c.wanted() }
	unused := func(c cluster) bool { return c.attempt == nobodys && c.note == nobodys }
	goTo := func(p device.Phase) func(*cluster) { return func(c *cluster) { c.phase = phaseOf(p) } }
	fails := func(node bool) func(*cluster) {
		return func(c *cluster) { c.phase, c.blame, c.use, c.note = phaseOf(device.Failed), node, inHand, nobodys }
	}
	always := func(cluster) bool { return true }
	return []happening{
		act("asks", device.Assigned, wanted, goTo(device.Attaching)),
		act("forgets", device.Assigned, unwanted, (*cluster).noLease),
		act("attached", device.Attaching, always, goTo(device.Attached)),
		act("tells", device.Attached, func(c cluster) bool { return c.attempt == claims1 && !c.ready && !c.attached && !c.fail }, func(c *cluster) { c.attached = true }),
		act("gives back", device.Attached, func(c cluster) bool { return c.deleting && unused(c) }, func(c *cluster) { c.phase, c.use = phaseOf(device.Releasing), inHand }),
		act("idle", device.Attached, func(c cluster) bool { return unused(c) && !c.deleting && c.use == inHand }, func(c *cluster) { c.use = idleU }),
		act("called back in vain", device.Releasing, func(c cluster) bool { return c.attempt == claims1 }, goTo(device.Attached)),
		act("is back", device.Releasing, func(c cluster) bool { return c.attempt == nobodys }, (*cluster).noLease),
		act("goes back after all", device.Failed, func(c cluster) bool { return c.attempt == nobodys && (c.old || c.deleting) }, (*cluster).noLease),
		// Not in success.
		act("gives up the attach", device.Attaching, unwanted, (*cluster).noLease),
		act("fails by the unit", device.Attaching, always, fails(false)),
		act("fails by the node", device.Attaching, always, fails(true)),
		act("vanishes", device.Attached, always, fails(false)),
	}
}

// plainly drops what makes no difference, so that clusters which differ in nothing else are one.
func (c cluster) plainly() cluster {
	if c.phase > 0 {
		c.free = true // what the manager has beside it does not matter
	}
	if c.attempt != nobodys || !c.in(device.Assigned) && !c.in(device.Attaching) {
		c.kept = false
	}
	if !c.in(device.Failed) {
		c.blame, c.old = false, false
	}
	c.onCallSettled = c.onCallSettled && c.onCall != untaintedE
	c.readSettled = c.readSettled && c.atOnce != untaintedE
	return c
}

// full makes TestModel walk through everything at once, which takes minutes.
var full = flag.Bool("full", false, "walk through the whole model at once")

// run is one walk: the node's minimum, and what does not happen in it.
type run struct {
	minimum int
	without []string
}

// runs together have everything happen, each some of it, in a tenth of the states.
func runs() []run {
	if *full {
		return []run{{0, nil}, {1, nil}}
	}
	return []run{
		{0, []string{"agent goes", "fails by the node"}},
		{0, []string{"delete the lease", "fails by the node", "scheduler tries again", "manager gives it away"}},
		{0, []string{"agent goes", "delete the lease", "vanishes", "manager gives it away"}},
		{1, []string{"agent goes", "fails by the node"}},
		{1, []string{"delete the lease", "fails by the node", "vanishes"}},
	}
}

// explorer has walked through every cluster that can come about.
type explorer struct {
	run
	from    map[cluster]cluster
	how     map[cluster]string
	decided map[cluster]decision
}

func explore(t *testing.T, r run) *explorer {
	t.Helper()
	start := cluster{atOnce: noScheduleE, label: [2]bool{true, true}, free: true}
	e := &explorer{run: r, from: map[cluster]cluster{start: start}, how: map[cluster]string{}, decided: map[cluster]decision{}}
	queue, steps := []cluster{start}, 0
	all := slices.DeleteFunc(happenings(), func(h happening) bool { return slices.Contains(r.without, h.name) })
	for len(queue) > 0 {
		c := queue[0]
		queue = queue[1:]
		add := func(n cluster, by string) {
			steps++
			n = n.plainly()
			if _, seen := e.from[n]; !seen {
				e.from[n], e.how[n] = c, by
				queue = append(queue, n)
			}
		}
		d := c.decide(r.minimum)
		e.decided[c] = d
		if crime := c.crime(d); crime != "" {
			t.Fatalf("minimum %d: %s: %+v\n%s", r.minimum, crime, d, e.trace(c))
		}
		for _, n := range c.leads(d) {
			add(n.cluster, n.by)
		}
		for _, h := range all {
			if h.can(c) {
				n := c
				h.do(&n)
				add(n, h.name)
			}
		}
	}
	t.Logf("minimum %d without %q: %d clusters by %d steps", r.minimum, r.without, len(e.from), steps)
	return e
}

func (e *explorer) trace(c cluster) string {
	lines := []string{fmt.Sprintf("  %+v", c)}
	for e.from[c] != c {
		lines = append(lines, fmt.Sprintf("  %-28s<- %+v", e.how[c], e.from[c]))
		c = e.from[c]
	}
	slices.Reverse(lines)
	return strings.Join(lines, "\n")
}

// goesOn is the next cluster when the leader gets all done, and then everybody does what is to be expected.
func (e *explorer) goesOn(c cluster, stays bool) (cluster, string) {
	d, ok := e.decided[c]
	if !ok {
		d = c.decide(e.minimum)
		e.decided[c] = d
	}
	for _, n := range c.leads(d) {
		if n.cluster != c {
			return n.cluster, n.by
		}
	}
	order := []string{
		"agent comes", "claim is seen", "evict", "allocation is cleared", "unprepare", "reserve", "settled",
		"asks", "forgets", "attached", "tells", "gives back", "called back in vain", "is back", "idle", "goes back after all",
		"cooled", "back-off over", "manager has it",
	}
	if !stays {
		order = append([]string{"claim goes"}, order...)
	}
	all := happenings()
	for _, name := range order {
		h := all[slices.IndexFunc(all, func(h happening) bool { return h.name == name })]
		if n := c; h.can(c) {
			if h.do(&n); n.plainly() != c {
				return n.plainly(), name
			}
		}
	}
	return c, ""
}

// rest says as what the cluster came to rest, "" if it is at none.
func (c cluster) rest(minimum int) string {
	usable := c.in(device.Attached) && !c.deleting
	switch {
	case c.claim == noClaim && c.phase == 0 && c.onCall == untaintedE && c.atOnce == noScheduleE && c.label == [2]bool{true, true} && minimum == 0:
		return "free for every node"
	case c.claim == noClaim && usable && c.use != inHand && c.attempt == nobodys && c.atOnce == untaintedE && c.onCall == noScheduleE && minimum > 0:
		return "kept, for the node's Pods"
	case c.claim != noClaim && c.in(device.Attached) && c.want == c.node && (c.attempt == claims1 && (c.attached || c.ready) || c.note == claims1):
		return "serves its claim"
	}
	return ""
}

// TestModel: no cluster that can come about leads to what must never be, and from each one the unit comes to
// rest when everybody does what is to be expected.
func TestModel(t *testing.T) {
	for _, r := range runs() {
		e := explore(t, r)
		for _, stays := range []bool{true, false} {
			rests, longest := map[string]int{}, 0
			ways := map[cluster]way{}
			for c := range e.from {
				if !e.follow(c, stays, ways) {
					t.Fatalf("minimum %d, claim stays=%v: no rest\n%s\nfrom there:\n%s", r.minimum, stays, e.trace(c), e.story(c, stays))
				}
				longest = max(longest, ways[c].steps)
				rests[ways[c].end]++
			}
			t.Logf("  claim stays=%v: rests %v, the longest way has %d steps", stays, rests, longest)
		}
	}
}

// way is as what a cluster comes to rest, and in how many steps.
type way struct {
	end   string
	steps int
}

// follow goes on from a cluster until it comes to rest, and stores the way of each in between; false if it never
// rests.
func (e *explorer) follow(c cluster, stays bool, ways map[cluster]way) bool {
	var path []cluster
	for seen := map[cluster]bool{}; !seen[c]; {
		known, ok := ways[c]
		if !ok {
			n, by := e.goesOn(c, stays)
			if by != "" {
				seen[c] = true
				path = append(path, c)
				c = n
				continue
			}
			if known.end = c.rest(e.minimum); known.end == "" {
				return false
			}
			ways[c] = known
		}
		for i, p := range path {
			ways[p] = way{end: known.end, steps: known.steps + len(path) - i}
		}
		return true
	}
	return false
}

func (e *explorer) story(c cluster, stays bool) string {
	var lines []string
	for range 40 {
		n, by := e.goesOn(c, stays)
		lines = append(lines, fmt.Sprintf("  %-28s-> %+v", by, n))
		if c = n; by == "" {
			break
		}
	}
	return strings.Join(lines, "\n")
}
