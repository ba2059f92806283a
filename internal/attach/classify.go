// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Owner says whose a GPU on this node is.
type Owner string

// Owners of GPUs.
const (
	// Leased: a device lease of ours names it.
	Leased Owner = "leased"
	// BuiltIn: it is part of this machine and of no pool.
	BuiltIn Owner = "built-in"
	// Foreign: the fabric manager lists it on this machine, and no lease of ours says why.
	Foreign Owner = "foreign"
	// Unclassified: not known, so that nobody is given it.
	Unclassified Owner = "unclassified"
)

// Owners returns every owner, for metrics that exist from the start.
func Owners() []Owner { return []Owner{Leased, BuiltIn, Foreign, Unclassified} }

// Present is a GPU on this node's bus.
type Present struct {
	Address device.PCIAddress
	// UUID is empty while NVML does not show the GPU; Name is the driver's word for the model.
	UUID device.GPUUUID
	Name string
	// Since is when this process first saw it here. A list that was asked for at that very moment was asked for
	// after that.
	Since time.Time
}

// Surroundings are all that tells whose the GPUs of a node are.
type Surroundings struct {
	GPUs []Present
	// Leases are those that name this node.
	Leases []device.Lease
	// Listed are the machine's devices as the fabric manager last listed them. The list is complete or there is
	// none: ListedAt is when it was asked for, zero if never.
	Listed   []device.OnFabric
	ListedAt time.Time
	// NoFabric: no fabric has this node's machine, so that none can have attached anything.
	NoFabric bool
	// Trouble is why there is no list, for people.
	Trouble string
	// Configured are the addresses that the configuration calls built-in on this node.
	Configured map[device.PCIAddress]bool
	// Ours are the fabric devices that a lease has named since the list was asked for, Pooled the GPUs on the
	// bus that a lease or a list has named before.
	Ours   map[string]bool
	Pooled map[device.GPUUUID]bool
}

// Placed is a GPU on this node's bus, and whose it is.
type Placed struct {
	Present
	Owner Owner
	// Unit is the leased unit.
	Unit device.Unit
	// Why is for people.
	Why string
}

// Places is what follows from Surroundings.
type Places struct {
	GPUs []Placed
	// Foreign are devices on the fabric's list, also those that the bus does not show.
	Foreign []device.OnFabric
	// ListAgain: a newer list would tell more.
	ListAgain bool
}

// place is one row: the first that applies decides.
type place struct {
	name  string
	when  func(*Surroundings, *Present) bool
	owner Owner
	// says is for the person who asks whose this GPU is.
	says func(*Surroundings, *Present) string
	// again: a newer list may change it.
	again bool
	// why is the reason for the row, in docs/policy.md.
	why string
}

// said is a reason that needs no more words.
func said(text string) func(*Surroundings, *Present) string {
	return func(*Surroundings, *Present) string { return text }
}

// placesOf is the whole policy. That a GPU is built-in is said last, and only when nothing speaks against it: one
// that is published and comes from the pool could be given to two Pods.
func placesOf() []place {
	return []place{
		{name: "leased", when: func(s *Surroundings, g *Present) bool { return s.lease(g) != nil }, owner: Leased, says: func(s *Surroundings, g *Present) string {
			return "it is unit " + string(s.lease(g).Unit)
		}, why: "A lease's word comes first: the unit is handed out by it, and by nothing else."},
		{name: "no identity", when: func(_ *Surroundings, g *Present) bool { return g.UUID == "" }, owner: Unclassified, says: said("the driver does not show it"), why: "What cannot be named cannot be handed out."},
		{name: "configured", when: func(s *Surroundings, g *Present) bool { return s.Configured[g.Address] }, owner: BuiltIn, says: said("the configuration says so"), why: "A person knows better than any list."},
		{name: "listed, ours a moment ago", when: func(s *Surroundings, g *Present) bool {
			d := s.listed(g)
			return d != nil && s.Ours[d.ID]
		}, owner: Unclassified, says: said("it has just gone back to the pool"), again: true, why: "The list is of before our release; a newer one does not have it."},
		{name: "listed, may answer a call", when: func(s *Surroundings, g *Present) bool {
			d := s.listed(g)
			return d != nil && s.mayAnswer(d)
		}, owner: Unclassified, says: said("it may be what a call of ours has brought"), why: "Which device answers a call that is open is decided by the unit's own rows."},
		{name: "listed before it came", when: func(s *Surroundings, g *Present) bool {
			return s.listed(g) != nil && s.ListedAt.Before(g.Since)
		}, owner: Unclassified, says: said("the fabric manager listed it before it came; the list is read again"), again: true, why: "What the list says is of another stay of this GPU on this machine."},
		{name: "listed", when: func(s *Surroundings, g *Present) bool { return s.listed(g) != nil }, owner: Foreign, says: func(s *Surroundings, g *Present) string {
			return fmt.Sprintf("the fabric manager lists it as %s, and no device lease says why", s.listed(g).ID)
		}, why: "Somebody else had it attached: it is theirs."},
		{name: "call under way", when: (*Surroundings).calledSince, owner: Unclassified, says: said("it came while a unit was being attached, and may be that unit"), why: "The manager's list may lag behind the bus."},
		{name: "pooled before", when: func(s *Surroundings, g *Present) bool { return s.Pooled[g.UUID] }, owner: Unclassified, says: said("it came from the pool, and is still here though the fabric manager does not list it"), why: "A GPU that is on its way back to the pool may be given to another machine at any moment."},
		{name: "in no fabric", when: func(s *Surroundings, _ *Present) bool { return s.NoFabric }, owner: BuiltIn, says: said("this node is in no fabric"), why: "Nobody can attach anything to such a machine."},
		{name: "no list", when: func(s *Surroundings, _ *Present) bool { return s.ListedAt.IsZero() }, owner: Unclassified, says: func(s *Surroundings, _ *Present) string {
			return "the fabric manager's list was not read: " + s.Trouble
		}, again: true, why: "Without the list a GPU of the pool looks like one that is built in."},
		{name: "list is older", when: func(s *Surroundings, g *Present) bool { return s.ListedAt.Before(g.Since) }, owner: Unclassified, says: said("it came after the fabric manager's list was read"), again: true, why: "What came after the list was read may be on the next one."},
		{name: "list has no identities", when: (*Surroundings).blind, owner: Unclassified, says: said("the fabric manager lists a device without its GPU UUID, which may be this one"), why: "One that is published and comes from the pool could be given to two Pods."},
		{name: "built-in", when: func(*Surroundings, *Present) bool { return true }, owner: BuiltIn, says: said("the fabric manager does not list it on this machine"), why: "A complete list that was read after the GPU came does not have it."},
	}
}

// Classify tells whose the GPUs of this node are, and which devices of its machine are foreign.
func Classify(s Surroundings) Places {
	var p Places
	for i := range s.GPUs {
		g := &s.GPUs[i]
		for _, r := range placesOf() {
			if !r.when(&s, g) {
				continue
			}
			placed := Placed{Present: *g, Owner: r.owner, Why: r.says(&s, g)}
			if l := s.lease(g); r.owner == Leased && l != nil {
				placed.Unit = l.Unit
			}
			p.GPUs = append(p.GPUs, placed)
			p.ListAgain = p.ListAgain || r.again
			break
		}
	}
	for i := range s.Listed {
		d := &s.Listed[i]
		switch {
		case s.claimed(d), s.mayAnswer(d):
		case s.Ours[d.ID]:
			p.ListAgain = true
		default:
			p.Foreign = append(p.Foreign, *d)
		}
	}
	slices.SortFunc(p.Foreign, func(a, b device.OnFabric) int { return strings.Compare(a.ID, b.ID) })
	return p
}

// lease is the device lease that has the GPU: by its identity, or by its address while that is unknown.
func (s *Surroundings) lease(g *Present) *device.Lease {
	listed := s.listed(g)
	for i := range s.Leases {
		l := &s.Leases[i]
		if g.UUID == "" && l.PCI == g.Address && !l.PCI.IsZero() ||
			g.UUID != "" && l.UUID == g.UUID ||
			listed != nil && l.FabricDevice == listed.ID {
			return l
		}
	}
	return nil
}

// listed is the GPU in the fabric manager's list.
func (s *Surroundings) listed(g *Present) *device.OnFabric {
	for i := range s.Listed {
		if s.Listed[i].UUID == g.UUID && g.UUID != "" {
			return &s.Listed[i]
		}
	}
	return nil
}

func (s *Surroundings) claimed(d *device.OnFabric) bool {
	return slices.ContainsFunc(s.Leases, func(l device.Lease) bool { return l.FabricDevice == d.ID })
}

// asking: the manager was asked for a device, and it is not known which one came.
func asking(l device.Lease) bool { return l.FabricDevice == "" && !l.AskedAt.IsZero() }

// mayAnswer: a call of ours was made, and the device was not there before.
func (s *Surroundings) mayAnswer(d *device.OnFabric) bool {
	return !s.claimed(d) && slices.ContainsFunc(s.Leases, func(l device.Lease) bool {
		return asking(l) && !slices.Contains(l.SetBefore, d.ID)
	})
}

// calledSince: the GPU came after a call of ours was made, and it is not known which GPU that brought.
func (s *Surroundings) calledSince(g *Present) bool {
	return slices.ContainsFunc(s.Leases, func(l device.Lease) bool {
		return l.UUID == "" && !l.AskedAt.IsZero() && !g.Since.Before(l.AskedAt)
	})
}

// blind: a listed device cannot be told from any GPU, and no lease says which one it is.
func (s *Surroundings) blind(*Present) bool {
	return slices.ContainsFunc(s.Listed, func(d device.OnFabric) bool {
		return d.UUID == "" && !slices.ContainsFunc(s.Leases, func(l device.Lease) bool { return l.FabricDevice == d.ID && l.UUID != "" })
	})
}
