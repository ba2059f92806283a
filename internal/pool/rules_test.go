// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func ago(d time.Duration) time.Time { return now.Add(-d) }

// mod is one part of a situation around unit a100-0.
type mod func(*World)

// calm is a fabric of two nodes and four units of one model, two of another; all is free and published so.
func calm() World {
	w := World{
		Now: now, Fabric: "0",
		Settings: Settings{CoolDown: 10 * time.Minute, ReadySettle: 10 * time.Second, AgentAway: 2 * time.Minute},
		Models: []Model{
			{Name: "a100", Attributes: map[string]string{"productName": "NVIDIA A100", "memory": "80Gi"}},
			{Name: "h100", Attributes: map[string]string{"productName": "NVIDIA H100"}},
		},
		Inventory: Inventory{Free: map[device.Model]Supply{"a100": {Count: 4}, "h100": {Count: 2}}, Leased: map[device.Unit]string{}},
		Published: Published{
			Units:   []device.Unit{"a100-0", "a100-1", "a100-2", "a100-3", "h100-0", "h100-1"},
			Effects: map[string]Effect{}, TaintedSince: map[string]time.Time{},
		},
	}
	for _, name := range []string{"n1", "n2"} {
		w.Nodes = append(w.Nodes, Node{
			Name: name, UID: "uid-" + name, Machine: device.Machine("m-" + name), Member: true, AgentReady: true,
			Attachable: map[device.Model]bool{"a100": true, "h100": true},
		})
	}
	for _, u := range w.Published.Units {
		w.Published.Effects[u.Entry()] = NoTaint
		w.Published.Effects[u.ReadyEntry()] = NoSchedule
	}
	return w
}

func (w *World) free(m device.Model, n int) { w.Inventory.Free[m] = Supply{Count: n} }

func (w *World) with(mods ...mod) {
	for _, m := range mods {
		m(w)
	}
}

func attemptOf(claim, node, entry string) device.Attempt {
	return device.Attempt{Namespace: "team", Name: claim, UID: "uid-" + claim, AllocatedAt: "2026-01-02T03:04:00Z", Node: node, Pool: "fabric-0", Entry: entry}
}

// demand says that a claim of a Pod of its own was given the entry on the node, and is reserved.
func demand(claim, node, entry string, change ...func(*Demand)) mod {
	return func(w *World) {
		d := Demand{Attempt: attemptOf(claim, node, entry), Reserved: true, Consumers: []string{"pod-" + claim}}
		for _, c := range change {
			c(&d)
		}
		w.Demands = append(w.Demands, d)
	}
}

func arrival(w *World)          { w.Settings.Arrival = true }
func askedFor(l *device.Lease)  { l.AskedAt = ago(time.Minute) }
func addressable(w *World)      { w.Settings.Addressable = true }
func unread(m device.Model) mod { return func(w *World) { delete(w.Inventory.Free, m) } }

func unreserved(d *Demand)         { d.Reserved, d.Consumers = false, nil }
func toldAttached(d *Demand)       { d.Attached = true }
func toldFailed(d *Demand)         { d.AttachFailed = true }
func ofPod(p string) func(*Demand) { return func(d *Demand) { d.Consumers = []string{p} } }
func allocated(at string) func(*Demand) {
	return func(d *Demand) { d.Attempt.AllocatedAt = at }
}

// leased says that n1 has the lease of the unit.
func leased(u device.Unit, p device.Phase, change ...func(*device.Lease)) mod {
	return func(w *World) {
		l := device.Lease{
			Fabric: "0", Unit: u, Model: "a100", Node: "n1", NodeUID: "uid-n1", Machine: "m-n1", Phase: p,
			AcquiredAt: ago(time.Minute), ChangedAt: ago(time.Minute), ObjectUID: "o1", Version: "7",
		}
		if p == device.Attached || p == device.Releasing {
			l.FabricDevice, l.UUID, l.PCI = "d-"+string(u), "GPU-00000000-0000-4000-8000-000000000001", device.PCIAddress{Bus: 0x3b}
			w.Inventory.Leased[u] = l.FabricDevice
			w.free("a100", w.Inventory.Free["a100"].Count-1)
		}
		for _, c := range change {
			c(&l)
		}
		w.Leases = append(w.Leases, l)
	}
}

func serving(claim, entry string) func(*device.Lease) {
	return func(l *device.Lease) { l.Attempt = attemptOf(claim, "n1", entry) }
}

func idle(d time.Duration) func(*device.Lease) { return func(l *device.Lease) { l.IdleSince = ago(d) } }

// waiting says that the lease serves a claim that was allocated then.
func waiting(claim, at string) func(*device.Lease) {
	return func(l *device.Lease) {
		serving(claim, "a100-0")(l)
		l.Attempt.AllocatedAt = at
	}
}

func tooLong(l *device.Lease)      { l.ChangedAt = ago(lateAfter + time.Minute) }
func deleting(l *device.Lease)     { l.Deleting = true }
func noted(l *device.Lease)        { l.PreparedFor = []string{"uid-x"} }
func held(l *device.Lease)         { l.HeldBy = "python (7)" }
func otherUID(l *device.Lease)     { l.NodeUID = "uid-of-before" }
func otherMachine(l *device.Lease) { l.Machine = "m-of-before" }
func failed(reason string, b device.Blame) func(*device.Lease) {
	return func(l *device.Lease) {
		l.Failure = device.Failure{Reason: reason, Message: "the manager's words", Blame: b, RetryAfter: now.Add(time.Minute)}
	}
}

func node(name string, change func(*Node)) mod {
	return func(w *World) {
		for i := range w.Nodes {
			if w.Nodes[i].Name == name {
				change(&w.Nodes[i])
			}
		}
	}
}

func agentAway(d time.Duration) func(*Node) {
	return func(n *Node) { n.AgentReady, n.AwaySince = false, ago(d) }
}
func stranger(n *Node)   { n.Member = false }
func noMachine(n *Node)  { n.Machine = "" }
func withdrawn(n *Node)  { n.Attachable = map[device.Model]bool{} }
func fabricDown(n *Node) { n.FabricDown = true }
func noNode(name string) mod {
	return func(w *World) {
		var left []Node
		for _, n := range w.Nodes {
			if n.Name != name {
				left = append(left, n)
			}
		}
		w.Nodes = left
	}
}

// tainted says that the entry is published with a taint since then.
func tainted(entry string, d time.Duration) mod {
	return func(w *World) { w.Published.Effects[entry], w.Published.TaintedSince[entry] = NoSchedule, ago(d) }
}

func untainted(entry string) mod {
	return func(w *World) { w.Published.Effects[entry] = NoTaint }
}
func most(n int) mod        { return func(w *World) { w.Models[0].Max = n } }
func unconfigured(w *World) { w.Models = w.Models[1:] }

func with(mods ...mod) []mod { return mods }

// limited: the fabric manager has limits of its own for n1.
func limited(of map[device.Model]Limit) mod {
	return func(w *World) { w.Inventory.Limits = map[device.Machine]map[device.Model]Limit{"m-n1": of} }
}

func least(n int) mod      { return func(w *World) { w.Models[0].Min = n } }
func slots(n int) mod      { return func(w *World) { w.Settings.Slots = n } }
func conflict(n *Node)     { n.Conflict = true }
func kept(l *device.Lease) { l.Kept = true }
func became(l *device.Lease) {
	l.FabricDevice = "d-" + string(l.Unit)
}

func slotsOf(node string, n int) mod {
	return func(w *World) { w.Settings.NodeSlots = map[string]int{node: n} }
}

func exclude(model int, other device.Model) mod {
	return func(w *World) { w.Models[model].Excludes = []device.Model{other} }
}

func ofH100(l *device.Lease) { l.Model = "h100" }

// stray says that device d-9 has been attached to n1 for that long without a lease, and may be taken in.
func stray(d time.Duration) mod {
	return func(w *World) {
		w.Models[0].FabricModel = "NVIDIA-A100"
		w.Settings.Adopt, w.Settings.AdoptAfter = true, 10*time.Minute
		w.Inventory.Attached = map[device.Machine][]device.OnFabric{
			"m-n1": {{ID: "d-9", Model: "NVIDIA-A100", UUID: "GPU-9"}}, "m-n2": nil,
		}
		w.Inventory.AttachedAt = now
		w.ForeignSince = map[string]time.Time{"m-n1/d-9": ago(d)}
	}
}

// only says that the fabric has but these nodes.
func only(names ...string) mod {
	return func(w *World) {
		w.Nodes = slices.DeleteFunc(w.Nodes, func(n Node) bool { return !slices.Contains(names, n.Name) })
	}
}

// last leaves the pool with nothing but a100-0.
func last(w *World) {
	w.Models, w.Published.Units, w.Inventory.Free = w.Models[:1], w.Published.Units[:1], map[device.Model]Supply{"a100": {Count: 1}}
}

// outcome is what the plan says of unit a100-0, in few words.
type outcome struct {
	Ops      []string // "<operation> <unit> <claim>"
	Refusals []string // "<reason>: <claim>/<entry> …"
	Notes    int
}

func outcomeOf(p Plan) outcome {
	var o outcome
	for _, op := range p.Ops {
		s := string(op.Kind) + " " + string(op.Lease.Unit)
		if !op.Attempt.IsZero() {
			s += " " + op.Attempt.Name
		}
		o.Ops = append(o.Ops, s)
	}
	for _, r := range p.Refusals {
		s := r.Reason + ":"
		for _, a := range r.Attempts {
			s += " " + a.Name + "/" + a.Entry
		}
		o.Refusals = append(o.Refusals, s)
	}
	o.Notes = len(p.Notes)
	return o
}

type row struct {
	situation string
	mods      []mod
	rule      string // of a100-0
	want      outcome
}

var table = []row{
	{"a later release's phase", with(leased("a100-0", "Dreaming")), "unknown phase", outcome{Notes: 1}},

	// Nobody has it.
	{"nothing happens", nil, "free, nobody wants it", outcome{}},
	{"allocated, not reserved", with(demand("c", "n2", "a100-0", unreserved)), "free, nobody wants it", outcome{}},
	{"allocated, told that it failed", with(demand("c", "n2", "a100-0", toldFailed)), "free, nobody wants it", outcome{}},
	{"allocated", with(demand("c", "n2", "a100-0")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}}},
	{"allocated, the manager does not list the very device as free", with(addressable, demand("c", "n2", "a100-0"), tainted("a100-0", time.Second)), "free and wanted, but which one", outcome{Refusals: []string{"NoCapacity: c/a100-0"}}},
	{"allocated, the manager does not list the very device as free, not published so yet", with(addressable, demand("c", "n2", "a100-0")), "free and wanted, but which one", outcome{Notes: 1}},
	{"allocated, the list of free devices could not be read", with(addressable, unread("a100"), demand("c", "n2", "a100-0")), "free and wanted, but which one", outcome{Notes: 1}},
	{"to be kept, the list of free devices could not be read", with(last, only("n1"), least(1), addressable, unread("a100"), tainted("a100-0", time.Minute)), "free, nobody wants it", outcome{Notes: 1}},
	{"its ready entry was allocated before it was tainted", with(demand("c", "n1", "a100-0-ready")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}}},
	{"allocated, the count says that none is left", with(func(w *World) { w.free("a100", 0) }, demand("c", "n1", "a100-0")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}}},
	{"allocated for a node whose agent restarts", with(demand("c", "n2", "a100-0"), node("n2", agentAway(time.Minute))), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}}},
	{"allocated for a node that cannot reach the manager", with(demand("c", "n2", "a100-0"), node("n2", fabricDown)), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}}},
	{"allocated for a node whose agent is away, label still there", with(demand("c", "n2", "a100-0"), node("n2", agentAway(time.Hour))), "free and wanted", outcome{Notes: 1}},
	{"allocated for a node whose agent is away, label gone", with(demand("c", "n2", "a100-0"), node("n2", agentAway(time.Hour)), node("n2", withdrawn)), "free and wanted", outcome{Refusals: []string{"AgentAway: c/a100-0"}}},
	{"allocated for a node that is no member", with(demand("c", "n2", "a100-0"), node("n2", stranger), node("n2", withdrawn)), "free and wanted", outcome{Refusals: []string{"NotInFabric: c/a100-0"}}},
	{"allocated for a node without a machine", with(demand("c", "n2", "a100-0"), node("n2", noMachine), node("n2", withdrawn)), "free and wanted", outcome{Refusals: []string{"NotInFabric: c/a100-0"}}},
	{"allocated for one of two nodes of one machine", with(demand("c", "n2", "a100-0"), node("n1", func(n *Node) { n.Machine = "m-n2" }), node("n2", withdrawn)), "free and wanted", outcome{Refusals: []string{"MachineShared: c/a100-0"}, Notes: 2}},
	{"in use, its lease removed by a person", with(demand("c", "n2", "a100-0", toldAttached)), "in use without a lease", outcome{Notes: 1}},
	{"allocated for a node that is gone", with(demand("c", "n2", "a100-0"), noNode("n2")), "free and wanted", outcome{Refusals: []string{"NotInFabric: c/a100-0"}}},
	{"allocated for a full node", with(most(1), leased("a100-1", device.Attached, serving("b", "a100-1")), demand("b", "n1", "a100-1", toldAttached), demand("c", "n1", "a100-0"), node("n1", withdrawn)), "free and wanted", outcome{Refusals: []string{"NodeFull: c/a100-0"}}},
	{"allocated for a node that the plan itself fills", with(most(1), demand("c", "n1", "a100-0"), demand("d", "n1", "a100-1")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}, Notes: 1}},
	{"allocated, the model was taken out of the configuration", with(unconfigured, demand("c", "n1", "a100-0"), tainted("a100-0", time.Minute)), "free and wanted", outcome{Refusals: []string{"UnknownModel: c/a100-0"}}},
	{"allocated to two claims", with(demand("c", "n1", "a100-0", allocated("2026-01-02T03:04:01Z")), demand("b", "n2", "a100-0", allocated("2026-01-02T03:04:00Z"))), "free and wanted", outcome{Ops: []string{"Create a100-0 b"}, Notes: 1}},
	{"allocated to two claims, nobody waits for the older", with(demand("c", "n1", "a100-0", allocated("2026-01-02T03:04:01Z")), demand("b", "n2", "a100-0", allocated("2026-01-02T03:04:00Z"), toldFailed)), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}, Notes: 1}},

	{"allocated for a node whose slots are taken", with(slots(1), leased("h100-1", device.Attached, ofH100, serving("b", "h100-1")), demand("b", "n1", "h100-1", toldAttached), demand("c", "n1", "a100-0"), node("n1", withdrawn)), "free and wanted", outcome{Refusals: []string{"NoSlot: c/a100-0"}}},
	{"allocated for a node whose slots are taken, label still there", with(slots(1), leased("h100-1", device.Attached, ofH100, serving("b", "h100-1")), demand("b", "n1", "h100-1", toldAttached), demand("c", "n1", "a100-0")), "free and wanted", outcome{Notes: 1}},
	{"allocated beside a model that excludes it", with(exclude(1, "a100"), leased("h100-1", device.Attached, ofH100, serving("b", "h100-1")), demand("b", "n1", "h100-1", toldAttached), demand("c", "n1", "a100-0"), node("n1", withdrawn)), "free and wanted", outcome{Refusals: []string{"ModelsExclude: c/a100-0"}}},
	{"allocated beside a model that excludes it, in the same moment", with(exclude(1, "a100"), demand("c", "n1", "a100-0"), demand("b", "n1", "h100-0")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}, Notes: 1}},
	{"two allocated in the same moment for the last slot", with(slots(1), demand("c", "n1", "a100-0"), demand("b", "n1", "h100-0")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}, Notes: 1}},
	{"allocated for a node where something else failed", with(leased("a100-1", device.Failed, failed("NotUsable", device.BlameNode)), demand("c", "n1", "a100-0")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}}},

	{"allocated for a node that is full, by the manager's limit", with(limited(map[device.Model]Limit{"a100": {Max: 1}}), most(2), leased("a100-1", device.Attached, serving("b", "a100-1")), demand("b", "n1", "a100-1", toldAttached), demand("c", "n1", "a100-0"), node("n1", withdrawn)), "free and wanted", outcome{Refusals: []string{"NodeFull: c/a100-0"}}},
	{"allocated for a node that the manager gives none of the model", with(limited(map[device.Model]Limit{}), demand("c", "n1", "a100-0"), node("n1", withdrawn)), "free and wanted", outcome{Refusals: []string{"NodeFull: c/a100-0"}}},
	{"allocated for another node than the one that the manager limits", with(limited(map[device.Model]Limit{}), demand("c", "n2", "a100-0")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}}},
	{"to be kept, by the manager's limit", with(last, only("n1"), limited(map[device.Model]Limit{"a100": {Min: 1, Max: NoLimit}}), tainted("a100-0", time.Minute)), "to be kept", outcome{Ops: []string{"Create a100-0"}}},
	{"to be kept, by the manager's limit, more than the configuration lets it have", with(last, only("n1"), most(1), limited(map[device.Model]Limit{"a100": {Min: 2, Max: NoLimit}}), leased("a100-1", device.Attached, kept, idle(time.Minute)), tainted("a100-0", time.Minute)), "free, nobody wants it", outcome{}},

	// A device is there without a lease.
	{"foreign device, ripe", with(last, stray(time.Hour)), "free, nobody wants it", outcome{Ops: []string{"Create a100-1"}}},
	{"foreign device, ripe, the manager has no more", with(last, stray(time.Hour), func(w *World) { w.free("a100", 0) }), "foreign", outcome{Ops: []string{"Create a100-0"}}},
	{"foreign device, ripe, the unit has a claim", with(last, stray(time.Hour), func(w *World) { w.free("a100", 0) }, demand("c", "n2", "a100-0")), "free and wanted", outcome{Ops: []string{"Create a100-0 c", "Create a100-1"}}},
	{"foreign device, not ripe", with(last, stray(time.Minute)), "free, nobody wants it", outcome{Notes: 1}},

	// The node should have it.
	{"to be kept, not published so yet", with(last, only("n1"), least(1)), "free, nobody wants it", outcome{}},
	{"to be kept, tainted just now", with(last, only("n1"), least(1), tainted("a100-0", time.Second)), "free, nobody wants it", outcome{}},
	{"to be kept, tainted long enough", with(last, only("n1"), least(1), tainted("a100-0", time.Minute)), "to be kept", outcome{Ops: []string{"Create a100-0"}}},
	{"to be kept, but allocated, nobody there yet", with(last, only("n1"), least(1), tainted("a100-0", time.Minute), demand("c", "n2", "a100-0", unreserved)), "free, nobody wants it", outcome{Notes: 1}},
	{"to be kept, but allocated", with(last, only("n1"), least(1), tainted("a100-0", time.Minute), demand("c", "n1", "a100-0")), "free and wanted", outcome{Ops: []string{"Create a100-0 c"}, Notes: 1}},
	{"to be kept, node is no member", with(last, only("n1"), least(1), tainted("a100-0", time.Minute), node("n1", stranger)), "free, nobody wants it", outcome{}},
	{"to be kept, agent away", with(last, only("n1"), least(1), tainted("a100-0", time.Minute), node("n1", agentAway(time.Hour))), "free, nobody wants it", outcome{Notes: 1}},
	{"to be kept, manager out of reach of the node", with(last, only("n1"), least(1), tainted("a100-0", time.Minute), node("n1", fabricDown)), "free, nobody wants it", outcome{Notes: 1}},
	{"to be kept, the node failed lately", with(last, only("n1"), least(1), tainted("a100-0", time.Minute), leased("a100-1", device.Failed, failed("NotUsable", device.BlameNode))), "free, nobody wants it", outcome{Notes: 1}},
	{"to be kept, no slot", with(last, only("n1"), least(1), slots(1), tainted("a100-0", time.Minute), leased("h100-1", device.Attached, ofH100, idle(time.Minute)), func(w *World) { w.free("a100", 1) }), "free, nobody wants it", outcome{Notes: 1}},
	{"to be kept, none left", with(last, only("n1"), least(1), tainted("a100-0", time.Minute), func(w *World) { w.free("a100", 0) }), "free, nobody wants it", outcome{Notes: 1}},
	{"to be kept beside another", with(only("n1"), least(2), leased("a100-1", device.Attached, serving("b", "a100-1")), demand("b", "n1", "a100-1", toldAttached), leased("a100-2", device.Releasing), leased("a100-3", device.Failed, failed("Rejected", device.BlameUnit)), tainted("a100-0", time.Minute)), "to be kept", outcome{Ops: []string{"Create a100-0"}}},
	{"to be kept by one of two nodes", with(last, least(1), tainted("a100-0", time.Minute)), "to be kept", outcome{Ops: []string{"Create a100-0"}, Notes: 1}},
	{"kept, coming", with(last, only("n1"), least(1), leased("a100-0", device.Assigned, kept)), "waits", outcome{}},
	{"kept, coming, agent away", with(last, only("n1"), least(1), leased("a100-0", device.Assigned, kept), node("n1", agentAway(time.Hour))), "asked of nobody, holder away", outcome{Ops: []string{"Drop a100-0"}}},
	{"kept, idle for long", with(last, only("n1"), least(1), leased("a100-0", device.Attached, kept, idle(time.Hour)), tainted("a100-0-ready", time.Hour)), "waits", outcome{}},
	{"kept, wanted here", with(last, only("n1"), least(1), leased("a100-0", device.Attached, kept, idle(time.Hour)), demand("c", "n1", "a100-0-ready")), "wanted where it is", outcome{Ops: []string{"Assign a100-0 c"}}},
	{"kept, given back", with(last, only("n1"), least(1), leased("a100-0", device.Attached, kept, serving("c", "a100-0-ready"))), "its claim is gone", outcome{Ops: []string{"Clear a100-0 c"}}},
	{"kept, wanted elsewhere, entry not tainted yet", with(last, least(1), leased("a100-0", device.Attached, kept, idle(time.Hour)), demand("c", "n2", "a100-0")), "wanted elsewhere, kept", outcome{Notes: 2}},
	{"kept, wanted elsewhere", with(last, least(1), leased("a100-0", device.Attached, kept, idle(time.Hour)), demand("c", "n2", "a100-0"), tainted("a100-0", 0)), "wanted elsewhere, kept", outcome{Refusals: []string{"Kept: c/a100-0"}, Notes: 1}},
	{"kept, coming, wanted elsewhere", with(last, least(1), leased("a100-0", device.Attaching, kept), demand("c", "n2", "a100-0"), tainted("a100-0", 0)), "wanted elsewhere, kept", outcome{Refusals: []string{"Kept: c/a100-0"}, Notes: 1}},
	{"kept, bound elsewhere by its ready entry of before", with(last, least(1), leased("a100-0", device.Attached, kept, idle(time.Hour)), demand("c", "n2", "a100-0-ready")), "wanted elsewhere, idle", outcome{Ops: []string{"Release a100-0"}, Notes: 1}},
	{"more than is to be kept, cooled down", with(only("n1"), least(1), leased("a100-0", device.Attached, idle(time.Hour)), leased("a100-1", device.Attached, kept, idle(time.Hour)), tainted("a100-0-ready", time.Hour)), "cooled down", outcome{Ops: []string{"Release a100-0"}}},
	{"attached for a claim, the node has just its minimum, cooled down", with(last, only("n1"), least(1), leased("a100-0", device.Attached, idle(time.Hour)), tainted("a100-0-ready", time.Hour)), "waits", outcome{}},
	{"kept, the minimum is gone from the configuration, cooled down", with(leased("a100-0", device.Attached, kept, idle(time.Hour)), tainted("a100-0-ready", time.Hour)), "cooled down", outcome{Ops: []string{"Release a100-0"}}},

	// A claim has it.
	{"its claim was deleted", with(leased("a100-0", device.Attached, serving("c", "a100-0"))), "its claim is gone", outcome{Ops: []string{"Clear a100-0 c"}}},
	{"its claim was deleted while attaching", with(leased("a100-0", device.Attaching, serving("c", "a100-0"))), "its claim is gone", outcome{Ops: []string{"Clear a100-0 c"}}},
	{"its claim was deleted after it failed", with(leased("a100-0", device.Failed, serving("c", "a100-0"), failed("Rejected", device.BlameUnit))), "its claim is gone", outcome{Ops: []string{"Clear a100-0 c"}}},
	{"its claim was allocated anew, to the same unit", with(leased("a100-0", device.Attached, serving("c", "a100-0")), demand("c", "n1", "a100-0", allocated("2026-01-02T03:05:00Z"))), "its claim is gone", outcome{Ops: []string{"Clear a100-0 c"}}},
	{"its claim was allocated anew, elsewhere", with(leased("a100-0", device.Attached, serving("c", "a100-0")), demand("c", "n2", "a100-1", allocated("2026-01-02T03:05:00Z"))), "its claim is gone", outcome{Ops: []string{"Clear a100-0 c", "Create a100-1 c"}}},
	{"attaching", with(leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0")), "serving", outcome{}},
	{"attaching, the scheduler tries again", with(leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0", unreserved)), "serving", outcome{}},
	{"in use", with(leased("a100-0", device.Attached, serving("c", "a100-0")), demand("c", "n1", "a100-0", toldAttached)), "serving", outcome{}},
	{"in use, agent away", with(leased("a100-0", device.Attached, serving("c", "a100-0")), demand("c", "n1", "a100-0", toldAttached), node("n1", agentAway(time.Hour))), "serving", outcome{}},
	{"in use by its ready entry, agent away", with(leased("a100-0", device.Attached, serving("c", "a100-0-ready")), demand("c", "n1", "a100-0-ready"), node("n1", agentAway(time.Hour))), "serving", outcome{}},
	{"in use, and allocated to another", with(leased("a100-0", device.Attached, serving("c", "a100-0")), demand("c", "n1", "a100-0", toldAttached), demand("b", "n1", "a100-0", allocated("2026-01-02T03:00:00Z"))), "serving", outcome{Notes: 1}},
	{"attaching, agent away, label still there", with(leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0"), node("n1", agentAway(time.Hour))), "serving, holder away", outcome{Notes: 1}},
	{"attaching, agent away, label gone", with(leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0"), node("n1", agentAway(time.Hour)), node("n1", withdrawn)), "serving, holder away", outcome{Refusals: []string{"AgentAway: c/a100-0"}}},
	{"attaching, agent restarts", with(leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0"), node("n1", agentAway(time.Minute))), "serving", outcome{}},
	{"attaching on a machine that had the node's name", with(leased("a100-0", device.Attaching, serving("c", "a100-0"), otherMachine), demand("c", "n1", "a100-0"), node("n1", withdrawn)), "serving, holder away", outcome{Refusals: []string{"AgentAway: c/a100-0"}}},
	{"attaching, the Node was made anew on the same machine", with(leased("a100-0", device.Attaching, serving("c", "a100-0"), otherUID), demand("c", "n1", "a100-0")), "serving", outcome{}},
	{"failed, entry not tainted yet", with(leased("a100-0", device.Failed, serving("c", "a100-0"), failed("Rejected", device.BlameUnit)), demand("c", "n1", "a100-0")), "serving, failed", outcome{Notes: 1}},
	{"failed, entry tainted", with(leased("a100-0", device.Failed, serving("c", "a100-0"), failed("Rejected", device.BlameUnit)), demand("c", "n1", "a100-0"), tainted("a100-0", 0)), "serving, failed", outcome{Refusals: []string{"Rejected: c/a100-0"}}},
	{"failed, node withdrawn", with(leased("a100-0", device.Failed, serving("c", "a100-0"), failed("NotUsable", device.BlameNode)), demand("c", "n1", "a100-0"), node("n1", withdrawn)), "serving, failed", outcome{Refusals: []string{"NotUsable: c/a100-0"}}},
	{"failed and told", with(leased("a100-0", device.Failed, serving("c", "a100-0"), failed("Rejected", device.BlameUnit)), demand("c", "n1", "a100-0", toldFailed), tainted("a100-0", 0)), "serving, told that it failed", outcome{}},
	{"one of three devices failed", with(
		leased("a100-0", device.Failed, serving("c", "a100-0"), failed("Rejected", device.BlameUnit)), tainted("a100-0", 0),
		leased("a100-1", device.Attached, serving("c", "a100-1")), leased("a100-2", device.Attaching, serving("c", "a100-2")),
		demand("c", "n1", "a100-0"), demand("c", "n1", "a100-1", toldAttached), demand("c", "n1", "a100-2"),
	), "serving, failed", outcome{Refusals: []string{"Rejected: c/a100-0 c/a100-2"}}},
	{"one of the Pod's two claims failed", with(
		leased("a100-0", device.Failed, serving("c", "a100-0"), failed("Rejected", device.BlameUnit)), tainted("a100-0", 0),
		leased("a100-1", device.Attaching, serving("b", "a100-1")), leased("a100-2", device.Attaching, serving("x", "a100-2")),
		demand("c", "n1", "a100-0", ofPod("p")), demand("b", "n1", "a100-1", ofPod("p")), demand("x", "n1", "a100-2", ofPod("q")),
	), "serving, failed", outcome{Refusals: []string{"Rejected: c/a100-0 b/a100-1"}}},
	{"another of the claim's devices was told that it failed", with(
		leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0"), demand("c", "n1", "a100-1", toldFailed),
	), "another of its Pod failed", outcome{Refusals: []string{"OtherDeviceFailed: c/a100-0"}}},
	{"another of the Pod's claims was told that it failed, before this one had a lease", with(
		demand("c", "n1", "a100-0", ofPod("p")), demand("b", "n1", "a100-1", ofPod("p"), toldFailed),
	), "another of its Pod failed", outcome{Refusals: []string{"OtherDeviceFailed: c/a100-0"}}},
	{"another of the Pod's claims was told that it failed, this one is attached", with(
		leased("a100-0", device.Attached, serving("c", "a100-0")),
		demand("c", "n1", "a100-0", ofPod("p"), toldAttached), demand("b", "n1", "a100-1", ofPod("p"), toldFailed),
	), "serving", outcome{}},
	{"another Pod's claim was told that it failed", with(
		leased("a100-0", device.Attaching, serving("c", "a100-0")), demand("c", "n1", "a100-0", ofPod("p")), demand("b", "n1", "a100-1", ofPod("q"), toldFailed),
	), "serving", outcome{}},
	{"vanished under a bound Pod", with(leased("a100-0", device.Failed, serving("c", "a100-0"), failed("Vanished", device.BlameUnit)), demand("c", "n1", "a100-0", toldAttached), tainted("a100-0", 0)), "serving, failed", outcome{}},

	// A node has it, for no claim.
	{"failed, allocated before it was tainted", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit)), demand("c", "n2", "a100-0"), tainted("a100-0", 0)), "failed and wanted", outcome{Refusals: []string{"Rejected: c/a100-0"}}},
	{"assigned, claim gone, agent away", with(leased("a100-0", device.Assigned), node("n1", agentAway(time.Hour))), "asked of nobody, holder away", outcome{Ops: []string{"Drop a100-0"}}},
	{"assigned to a machine that is gone, wanted", with(leased("a100-0", device.Assigned, otherMachine), demand("c", "n1", "a100-0")), "asked of nobody, holder away", outcome{Ops: []string{"Drop a100-0"}}},
	{"attaching, claim gone, agent away", with(leased("a100-0", device.Attaching), node("n1", agentAway(time.Hour))), "waits", outcome{}},
	{"attaching, claim gone, wanted here", with(leased("a100-0", device.Attaching), demand("c", "n1", "a100-0")), "wanted where it is", outcome{Ops: []string{"Assign a100-0 c"}}},
	{"idle, wanted here by its ready entry", with(leased("a100-0", device.Attached, idle(time.Minute)), demand("c", "n1", "a100-0-ready")), "wanted where it is", outcome{Ops: []string{"Assign a100-0 c"}}},
	{"idle, wanted here by its on-call entry", with(leased("a100-0", device.Attached, idle(time.Minute)), demand("c", "n1", "a100-0")), "wanted where it is", outcome{Ops: []string{"Assign a100-0 c"}}},
	{"on its way back, wanted here", with(leased("a100-0", device.Releasing), demand("c", "n1", "a100-0")), "wanted where it is", outcome{Ops: []string{"Assign a100-0 c"}}},
	{"still prepared, wanted here", with(leased("a100-0", device.Attached), demand("c", "n1", "a100-0")), "wanted where it is", outcome{Ops: []string{"Assign a100-0 c"}}},
	{"idle, wanted elsewhere", with(leased("a100-0", device.Attached, idle(time.Minute)), demand("c", "n2", "a100-0")), "wanted elsewhere, idle", outcome{Ops: []string{"Release a100-0"}}},
	{"idle on a Node of before, wanted on the new one", with(leased("a100-0", device.Attached, idle(time.Minute), otherUID), demand("c", "n1", "a100-0")), "wanted elsewhere, idle", outcome{Ops: []string{"Release a100-0"}}},
	{"idle, agent away, wanted elsewhere, entry not tainted yet", with(leased("a100-0", device.Attached, idle(time.Minute)), demand("c", "n2", "a100-0"), node("n1", agentAway(time.Hour))), "wanted elsewhere, holder away", outcome{Notes: 1}},
	{"idle, agent away, wanted elsewhere, entry tainted", with(leased("a100-0", device.Attached, idle(time.Minute)), demand("c", "n2", "a100-0"), node("n1", agentAway(time.Hour)), tainted("a100-0", 0)), "wanted elsewhere, holder away", outcome{Refusals: []string{"AgentAway: c/a100-0"}}},
	{"on its way back, agent away, wanted elsewhere", with(leased("a100-0", device.Releasing), demand("c", "n2", "a100-0"), node("n1", agentAway(time.Hour)), tainted("a100-0", 0)), "wanted elsewhere, holder away", outcome{Refusals: []string{"AgentAway: c/a100-0"}}},
	{"still prepared, wanted elsewhere", with(leased("a100-0", device.Attached), demand("c", "n2", "a100-0")), "wanted, on its way", outcome{Notes: 1}},
	{"held open, wanted elsewhere just now", with(leased("a100-0", device.Attached, held), demand("c", "n2", "a100-0")), "wanted, on its way", outcome{Notes: 1}},
	{"held open, wanted elsewhere by a clock far ahead", with(leased("a100-0", device.Attached, held), demand("c", "n2", "a100-0", allocated("2027-01-02T03:04:00Z"))), "wanted, on its way", outcome{Notes: 1}},
	{"held open, wanted elsewhere for long, entry not tainted yet", with(leased("a100-0", device.Attached, held), demand("c", "n2", "a100-0", allocated("2026-01-02T03:00:00Z"))), "wanted, does not become free", outcome{Notes: 1}},
	{"held open, wanted elsewhere for long", with(leased("a100-0", device.Attached, held), demand("c", "n2", "a100-0", allocated("2026-01-02T03:00:00Z")), tainted("a100-0", 0)), "wanted, does not become free", outcome{Refusals: []string{"InUse: c/a100-0"}}},
	{"held open on its way back, wanted elsewhere for long", with(leased("a100-0", device.Releasing, held), demand("c", "n2", "a100-0", allocated("2026-01-02T03:00:00Z")), tainted("a100-0", 0)), "wanted, does not become free", outcome{Refusals: []string{"InUse: c/a100-0"}}},
	{"long on its way back, wanted elsewhere just now", with(leased("a100-0", device.Releasing, tooLong), demand("c", "n2", "a100-0")), "wanted, on its way", outcome{Notes: 1}},
	{"long on its way back, wanted elsewhere for long, entry not tainted yet", with(leased("a100-0", device.Releasing, tooLong), demand("c", "n2", "a100-0", allocated("2026-01-02T03:00:00Z"))), "wanted, does not become free", outcome{Notes: 1}},
	{"long on its way back, wanted elsewhere for long", with(leased("a100-0", device.Releasing, tooLong), demand("c", "n2", "a100-0", allocated("2026-01-02T03:00:00Z")), tainted("a100-0", 0)), "wanted, does not become free", outcome{Refusals: []string{"NotFreeYet: c/a100-0"}}},
	{"long on its way back, the Node was made anew since, wanted there for long", with(leased("a100-0", device.Releasing, otherUID, tooLong), demand("c", "n1", "a100-0", allocated("2026-01-02T03:00:00Z")), tainted("a100-0", 0)), "wanted, does not become free", outcome{Refusals: []string{"NotFreeYet: c/a100-0"}}},
	{"long attaching for nobody, wanted elsewhere for long", with(leased("a100-0", device.Attaching, tooLong), demand("c", "n2", "a100-0", allocated("2026-01-02T03:00:00Z")), tainted("a100-0", 0)), "wanted, does not become free", outcome{Refusals: []string{"NotFreeYet: c/a100-0"}}},
	{"on its way back for a short time, wanted elsewhere for long", with(leased("a100-0", device.Releasing), demand("c", "n2", "a100-0", allocated("2026-01-02T03:00:00Z"))), "wanted, on its way", outcome{Notes: 1}},
	{"failed before, held open on its way back, given to a claim just now", with(leased("a100-0", device.Releasing, held, serving("c", "a100-0")), demand("c", "n1", "a100-0")), "serving", outcome{}},
	{"failed before, held open on its way back, its claim has waited for long, entry not tainted yet", with(leased("a100-0", device.Releasing, held, waiting("c", "2026-01-02T03:00:00Z")), demand("c", "n1", "a100-0", allocated("2026-01-02T03:00:00Z"))), "serving, does not become free", outcome{Notes: 1}},
	{"failed before, held open on its way back, its claim has waited for long", with(leased("a100-0", device.Releasing, held, waiting("c", "2026-01-02T03:00:00Z")), demand("c", "n1", "a100-0", allocated("2026-01-02T03:00:00Z")), tainted("a100-0", 0)), "serving, does not become free", outcome{Refusals: []string{"InUse: c/a100-0"}}},
	{"long on its way back, its claim has waited for long", with(leased("a100-0", device.Releasing, tooLong, waiting("c", "2026-01-02T03:00:00Z")), demand("c", "n1", "a100-0", allocated("2026-01-02T03:00:00Z")), tainted("a100-0", 0)), "serving, does not become free", outcome{Refusals: []string{"NotFreeYet: c/a100-0"}}},
	{"idle, just prepared by its ready entry, wanted elsewhere", with(leased("a100-0", device.Attached, idle(time.Minute), noted), demand("c", "n2", "a100-0")), "wanted, on its way", outcome{Notes: 1}},
	{"on its way back, wanted elsewhere", with(leased("a100-0", device.Releasing), demand("c", "n2", "a100-0")), "wanted, on its way", outcome{Notes: 1}},
	{"lease deleted by a person, wanted here", with(leased("a100-0", device.Attached, idle(time.Minute), deleting), demand("c", "n1", "a100-0")), "wanted, on its way", outcome{Notes: 1}},
	{"idle", with(leased("a100-0", device.Attached, idle(time.Minute)), tainted("a100-0-ready", time.Hour)), "waits", outcome{}},
	{"cooled down, entry not tainted yet", with(leased("a100-0", device.Attached, idle(time.Hour)), untainted("a100-0-ready")), "waits", outcome{}},
	{"cooled down, entry tainted just now", with(leased("a100-0", device.Attached, idle(time.Hour)), tainted("a100-0-ready", time.Second)), "waits", outcome{}},
	{"cooled down, entry tainted long enough", with(leased("a100-0", device.Attached, idle(time.Hour)), tainted("a100-0-ready", 10*time.Second)), "cooled down", outcome{Ops: []string{"Release a100-0"}}},
	{"cooled down, allocated here, nobody there yet", with(leased("a100-0", device.Attached, idle(time.Hour)), tainted("a100-0-ready", time.Minute), demand("c", "n1", "a100-0-ready", unreserved)), "waits", outcome{}},
	{"idle since a time to come", with(leased("a100-0", device.Attached, idle(-time.Hour)), tainted("a100-0-ready", time.Hour)), "waits", outcome{}},
	{"cooled down, just prepared by its ready entry", with(leased("a100-0", device.Attached, idle(time.Hour), noted), tainted("a100-0-ready", time.Hour)), "waits", outcome{}},
	{"in back-off", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit))), "waits", outcome{}},
}

func TestDecide(t *testing.T) {
	covered := map[string]bool{}
	for _, r := range table {
		t.Run(r.situation, func(t *testing.T) {
			w := calm()
			w.with(r.mods...)
			for _, v := range views(&w) {
				if v.unit != "a100-0" {
					continue
				}
				for _, rule := range unitRules() {
					if rule.when(&v) {
						covered[rule.name] = true
						if rule.name != r.rule {
							t.Errorf("rule %q, want %q", rule.name, r.rule)
						}
						break
					}
				}
			}
			p := Decide(w)
			if diff := cmp.Diff(r.want, outcomeOf(p)); diff != "" {
				t.Errorf("plan (-want +got):\n%s\nnotes: %q", diff, p.Notes)
			}
		})
	}
	for _, rule := range unitRules() {
		if !covered[rule.name] {
			t.Errorf("no situation of the table is answered by rule %q", rule.name)
		}
	}
}

func TestCreate(t *testing.T) {
	w := calm()
	w.with(demand("c", "n2", "a100-0"))
	want := []Op{{
		Kind: Create, Attempt: attemptOf("c", "n2", "a100-0"), Why: "claim team/c was allocated",
		Lease: device.Lease{
			Fabric: "0", Unit: "a100-0", Model: "a100", Node: "n2", NodeUID: "uid-n2", Machine: "m-n2", Phase: device.Assigned,
			Attempt: attemptOf("c", "n2", "a100-0"), AcquiredAt: now, ChangedAt: now,
		},
	}}
	if diff := cmp.Diff(want, Decide(w).Ops); diff != "" {
		t.Errorf("operations (-want +got):\n%s", diff)
	}
}

func TestAssign(t *testing.T) {
	w := calm()
	w.with(leased("a100-0", device.Attached, idle(time.Minute)), demand("c", "n1", "a100-0-ready"))
	before := w.Leases[0]
	got := Decide(w).Ops[0].Lease
	want := before
	want.Attempt, want.AcquiredAt, want.IdleSince, want.Transitions = attemptOf("c", "n1", "a100-0-ready"), now, time.Time{}, 1
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("lease (-want +got):\n%s", diff)
	}
}

func TestRefusalSpeaksForPeople(t *testing.T) {
	w := calm()
	w.with(leased("a100-0", device.Failed, serving("c", "a100-0"), failed("Rejected", device.BlameUnit)), demand("c", "n1", "a100-0"), tainted("a100-0", 0))
	want := []Refusal{{Attempts: []device.Attempt{attemptOf("c", "n1", "a100-0")}, Reason: "Rejected", Message: "a100-0 on node n1: the manager's words"}}
	if diff := cmp.Diff(want, Decide(w).Refusals); diff != "" {
		t.Errorf("refusals (-want +got):\n%s", diff)
	}
}

// TestForeignPools: what was allocated from other pools is none of this fabric's business.
func TestForeignPools(t *testing.T) {
	w := calm()
	w.with(demand("c", "n1", "a100-0", func(d *Demand) { d.Attempt.Pool = "fabric-1" }), demand("d", "n1", "gpu-0", func(d *Demand) { d.Attempt.Pool = "n1" }))
	p := Decide(w)
	if diff := cmp.Diff(outcome{}, outcomeOf(p)); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(w.Published.Units, p.Offers.Units); diff != "" {
		t.Errorf("units (-want +got):\n%s", diff)
	}
}

func TestWake(t *testing.T) {
	for _, tc := range []struct {
		situation string
		mods      []mod
		want      time.Duration
	}{
		{"nothing", nil, 0},
		{"idle", with(leased("a100-0", device.Attached, idle(time.Minute))), 9 * time.Minute},
		{"cooled down, tainted just now", with(leased("a100-0", device.Attached, idle(time.Hour)), tainted("a100-0-ready", time.Second)), 9 * time.Second},
		{"in back-off", with(leased("a100-0", device.Failed, failed("Rejected", device.BlameUnit))), time.Minute},
		{"agent away", with(node("n1", agentAway(time.Minute))), time.Minute},
		{"to be kept, tainted just now", with(last, only("n1"), least(1), tainted("a100-0", time.Second)), 9 * time.Second},
		{"kept, idle", with(last, only("n1"), least(1), leased("a100-0", device.Attached, kept, idle(time.Minute))), 0},
		{"agent away for good", with(node("n1", agentAway(time.Hour))), 0},
	} {
		w := calm()
		w.with(tc.mods...)
		got := time.Duration(0)
		if wake := Decide(w).Wake; !wake.IsZero() {
			got = wake.Sub(now)
		}
		if got != tc.want {
			t.Errorf("%s: wake in %s, want %s", tc.situation, got, tc.want)
		}
	}
}

// TestKept: what the lease of a unit that is kept looks like, from its making to its end.
func TestKept(t *testing.T) {
	w := calm()
	w.with(last, only("n1"), least(1), tainted("a100-0", time.Minute))
	want := []Op{{
		Kind: Create, Why: "the node keeps at least 1 of the model",
		Lease: device.Lease{
			Fabric: "0", Unit: "a100-0", Model: "a100", Node: "n1", NodeUID: "uid-n1", Machine: "m-n1",
			Phase: device.Assigned, Kept: true, AcquiredAt: now, ChangedAt: now,
		},
	}}
	if diff := cmp.Diff(want, Decide(w).Ops); diff != "" {
		t.Errorf("operations (-want +got):\n%s", diff)
	}
	for _, tc := range []struct {
		what string
		mods []mod
		kept bool
	}{
		{"a claim leaves what the node should keep", with(least(1), leased("a100-0", device.Attaching, serving("c", "a100-0"))), true},
		{"a claim leaves what need not be kept any more", with(leased("a100-0", device.Attaching, kept, serving("c", "a100-0"))), false},
		{"a claim comes to what is kept", with(least(1), leased("a100-0", device.Attached, kept, idle(time.Minute)), demand("c", "n1", "a100-0-ready")), true},
		{"what need not be kept any more is called back", with(leased("a100-0", device.Attached, kept, idle(time.Hour)), tainted("a100-0-ready", time.Hour)), false},
	} {
		w := calm()
		w.with(last, only("n1"))
		w.with(tc.mods...)
		ops := Decide(w).Ops
		if len(ops) != 1 || ops[0].Lease.Kept != tc.kept {
			t.Errorf("%s: %+v, want one with kept=%v", tc.what, ops, tc.kept)
		}
	}
}

// TestKeepFromTheEnd: what is attached in advance comes from where the scheduler looks last, a node after the
// other, and not from what claims have.
func TestKeepFromTheEnd(t *testing.T) {
	w := calm()
	w.with(least(1), demand("c", "n1", "a100-3"), tainted("a100-2", time.Minute), tainted("a100-1", time.Minute))
	want := outcome{Ops: []string{"Create a100-1", "Create a100-2", "Create a100-3 c"}}
	p := Decide(w)
	if diff := cmp.Diff(want, outcomeOf(p)); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
	if p.Ops[0].Lease.Node != "n2" || p.Ops[1].Lease.Node != "n1" {
		t.Errorf("nodes %s, %s", p.Ops[0].Lease.Node, p.Ops[1].Lease.Node)
	}
	if diff := cmp.Diff([]string{"a100-0", "a100-3", "h100-0", "h100-1"}, usable(p.Offers)); diff != "" {
		t.Errorf("usable (-want +got):\n%s", diff)
	}
}

// Nodes that say that they are on one machine are named, each with the other.
func TestSharedMachine(t *testing.T) {
	w := calm()
	w.with(node("n1", func(n *Node) { n.Machine = "m-n2" }))
	p := Decide(w)
	for _, want := range []string{
		"node n1 is given nothing: node n2 is on machine m-n2, too, as it says",
		"node n2 is given nothing: node n1 is on machine m-n2, too, as it says",
	} {
		if !slices.Contains(p.Notes, want) {
			t.Errorf("notes %q lack %q", p.Notes, want)
		}
	}
	w.Nodes = append(w.Nodes, Node{Name: "n9", Machine: "m-n2", Member: true})
	if p = Decide(w); !slices.Contains(p.Notes, "node n9 is given nothing: node n1 (and 1 more) is on machine m-n2, too, as it says") {
		t.Errorf("notes %q do not name three", p.Notes)
	}
}

// TestLacking: what cannot be brought to its minimum is told; what is on its way, or about to be, lacks nothing.
func TestLacking(t *testing.T) {
	away := func(w *World) { w.Nodes[1].AgentReady, w.Nodes[1].AwaySince = false, ago(time.Hour) }
	for _, tc := range []struct {
		situation string
		mods      []mod
		want      []Lack
	}{
		{"no minimum", nil, nil},
		{"enough are free", with(least(2)), nil},
		{"one too few", with(least(2), func(w *World) { w.free("a100", 3) }), []Lack{{"n2", "uid-n2", "a100", 2, 1, "no more are free"}}},
		{"an agent is away", with(least(1), away), []Lack{{"n2", "uid-n2", "a100", 1, 1, "the agent on node n2 is not ready, so nothing can be attached there"}}},
		{"one is on its way", with(least(1), only("n1"), last, leased("a100-0", device.Attaching, kept)), nil},
	} {
		w := calm()
		w.with(tc.mods...)
		if diff := cmp.Diff(tc.want, Decide(w).Lacking); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.situation, diff)
		}
	}
}
