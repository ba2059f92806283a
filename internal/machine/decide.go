// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Why a Node has no place, in a word.
const (
	// Unknown: nothing names a machine that could be one.
	Unknown = "MachineUnknown"
	// NotInFabric: what names the machine is clear, and no manager lists it.
	NotInFabric = "NotInFabric"
	// Ambiguous: more than one machine, or more than one fabric, could be meant.
	Ambiguous = "MachineAmbiguous"
	// Shared: another Node has the machine already.
	Shared = "MachineShared"
	// Unreachable: a manager that could list the machine did not answer.
	Unreachable = "Unreachable"
)

// Decision is where a Node belongs, or why that cannot be said.
type Decision struct {
	Place
	// By is the source that named it.
	By string
	// Notes are other sources that name something else: they count less, and one of them may be wrong.
	Notes []string
	// Follow: the chain has to be followed before anything can be said.
	Follow bool
	// Reason and Message say why there is no place. Passing: it is not known for the moment.
	Reason, Message string
	Passing         bool
}

// trust is what it means that no manager lists what a source names.
type trust int

const (
	// seen: nothing; it need not be a machine's name at all.
	seen trust = iota
	// named: the Node is in no fabric, unless a person says otherwise.
	named
	// said: a person has said so, and is told that it is wrong.
	said
)

// reading is what one source says.
type reading struct {
	trust    trust
	machines []device.Machine // more than one if it can be read in more than one way
	// what it says, for people; where it names no machine, why.
	what string
	// faulty: a person meant to name a machine and did not.
	faulty bool
	// follow: what it says is not known before the chain was followed. passing: it may say more the next time.
	follow, passing bool
}

// sources are asked in this order; the first that names a machine which a manager lists decides.
func sources() []func(*Facts) reading {
	return []func(*Facts) reading{
		// The platform has made the Node with it, and it cannot be changed.
		providerID,
		// A person says it of this Node.
		annotation,
		// A person says it of all Nodes, far from them.
		configured,
		// The platform keeps it on the host's object, to which the Node leads.
		chain,
		// Some managers call a machine what its firmware does; nobody says that this one does.
		systemUUID,
	}
}

func providerID(f *Facts) reading {
	p := ParseProviderID(f.ProviderID)
	r := reading{trust: named, what: "provider id " + Quote(f.ProviderID)}
	switch {
	case p.Machine == "":
		r.what = "the provider id " + Quote(f.ProviderID) + " names none"
		return r
	case p.Metal3:
		r.trust = seen
	}
	r.machines = []device.Machine{p.Machine}
	return r
}

func annotation(f *Facts) reading {
	r := reading{trust: said, what: "annotation " + device.AnnotationMachine}
	if !f.Annotated {
		r.what = "there is no " + r.what
		return r
	}
	m, err := device.ParseMachine(f.Annotation)
	if err != nil {
		r.what, r.faulty = r.what+" "+Quote(f.Annotation)+" is not a UUID (8-4-4-4-12 hexadecimal digits)", true
		return r
	}
	r.machines = []device.Machine{m}
	return r
}

func configured(f *Facts) reading {
	if f.Configured == "" {
		return reading{trust: said, what: "the configuration's machines do not have the Node"}
	}
	return reading{trust: said, what: "the configuration's machines", machines: []device.Machine{f.Configured}}
}

func chain(f *Facts) reading {
	_, problem, ok := f.Start()
	r := reading{trust: named, what: problem}
	switch {
	case !ok:
		return r
	case f.Chain == nil:
		r.follow = true
		return r
	case f.Chain.Problem != "":
		r.what, r.passing = f.Chain.Problem, f.Chain.Passing
		return r
	}
	m, err := device.ParseMachine(f.Chain.Machine)
	if err != nil {
		r.what = f.Chain.Host + " names the machine " + Quote(f.Chain.Machine) + ", which is not a UUID"
		return r
	}
	r.what, r.machines = f.Chain.Host, []device.Machine{m}
	return r
}

func systemUUID(f *Facts) reading {
	r := reading{trust: seen, what: "system UUID " + Quote(f.SystemUUID)}
	m, err := device.ParseMachine(f.SystemUUID)
	if err != nil {
		r.what = "the system UUID " + Quote(f.SystemUUID) + " is none"
		return r
	}
	r.machines = []device.Machine{m}
	if other := swapped(m); other != m {
		r.machines = append(r.machines, other)
	}
	return r
}

// Decide returns where the Node belongs.
func Decide(f *Facts) Decision {
	var d Decision
	var unlisted *reading // named what no manager lists
	var nothing []string  // what the sources say that decide nothing
	pending := false
	for _, read := range sources() {
		r := read(f)
		switch {
		case d.Machine != "":
			d.note(f, &r)
			continue
		case unlisted != nil && r.trust != said:
			continue // what is clear and wrong is not put right by a guess
		}
		v := f.weigh(&r)
		switch {
		case v.stop:
			return v.decision
		case v.decision.Machine != "":
			d = v.decision
			if unlisted != nil {
				d.Notes = append(d.Notes, fmt.Sprintf("%s counts, though %s names %s, which no manager lists", d.By, unlisted.what, unlisted.machines[0]))
			}
		case v.unlisted:
			unlisted = &r
		case r.what != "":
			nothing = append(nothing, v.nothing(&r))
		}
		pending = pending || v.pending || r.passing
	}
	switch {
	case d.Machine != "":
		return d
	case unlisted != nil:
		return notListed(unlisted)
	}
	return Decision{
		Reason: Unknown, Passing: pending,
		Message: "the machine of this node is not known: " + strings.Join(nothing, "; "),
	}
}

// verdict is what one reading comes to.
type verdict struct {
	decision Decision
	// stop: nothing after it counts. unlisted: it names what no manager lists. pending: whether one does is not known.
	stop, unlisted, pending bool
}

// nothing says why a reading did not decide.
func (v *verdict) nothing(r *reading) string {
	if len(r.machines) == 0 {
		return r.what
	}
	if v.pending {
		return r.what + " is none that a manager lists, as far as they answer"
	}
	return r.what + " is none that a manager lists"
}

// weigh compares what a source says with what the managers list.
func (f *Facts) weigh(r *reading) verdict {
	switch {
	case r.faulty:
		return verdict{stop: true, decision: Decision{Reason: Unknown, Message: "the machine of this node is not known: " + r.what}}
	case r.follow:
		return verdict{stop: true, decision: Decision{Follow: true}}
	case len(r.machines) == 0:
		return verdict{}
	}
	var listed []device.Machine
	for _, m := range r.machines {
		if len(f.listing(r, m)) > 0 {
			listed = append(listed, m)
		}
	}
	switch {
	case len(listed) > 1:
		return verdict{stop: true, decision: Decision{Reason: Ambiguous, Message: fmt.Sprintf(
			"the fabric managers list %s and %s, and the node's %s can be read as either: name the right one by the Node's annotation %s",
			listed[0], listed[1], r.what, device.AnnotationMachine)}}
	case len(listed) == 1:
		return f.place(r, listed[0])
	case len(f.Unasked) == 0:
		return verdict{stop: r.trust == said, unlisted: r.trust == named, decision: notListed(r)}
	case r.trust == seen:
		return verdict{pending: true}
	}
	return verdict{stop: true, decision: Decision{Reason: Unreachable, Passing: true, Message: fmt.Sprintf(
		"not every fabric manager could be asked whether it has machine %s, which the node's %s names", r.machines[0], r.what)}}
}

// listing are the fabrics that have the machine. A manager that does not answer has it if the node was there.
func (f *Facts) listing(r *reading, m device.Machine) []device.FabricID {
	all := f.Listed[m]
	was := m == f.Was.Machine || f.Was.Machine == "" && r.trust != seen
	if was && slices.Contains(f.Unasked, f.Was.Fabric) {
		all = append(slices.Clip(all), f.Was.Fabric)
	}
	return all
}

// place puts the node on a machine that is listed.
func (f *Facts) place(r *reading, m device.Machine) verdict {
	fabrics := f.listing(r, m)
	at := fabrics[0]
	if len(fabrics) > 1 {
		// A fabric that is configured anew does not take a node away from where it works.
		if !slices.Contains(fabrics, f.Was.Fabric) {
			return verdict{stop: true, decision: Decision{Reason: Ambiguous, Message: fmt.Sprintf(
				"machine %s is listed by the managers of fabrics %v: a node is in one fabric, so give the fabrics a nodeSelector",
				m, slices.Sorted(slices.Values(fabrics)))}}
		}
		at = f.Was.Fabric
	}
	return verdict{decision: Decision{Place: Place{at, m}, By: r.what}}
}

// note says that a source which counts less names another machine. What the firmware says counts only if a manager
// lists it.
func (d *Decision) note(f *Facts, r *reading) {
	for _, m := range r.machines {
		lists := len(f.Listed[m]) > 0
		if m == d.Machine || slices.Contains(r.machines, d.Machine) || r.trust == seen && !lists {
			continue
		}
		which := "which no manager lists"
		if lists {
			which = "which a manager lists, too"
		}
		d.Notes = append(d.Notes, fmt.Sprintf("%s counts, though %s names %s, %s", d.By, r.what, m, which))
	}
	if r.faulty {
		d.Notes = append(d.Notes, r.what)
	}
}

func notListed(r *reading) Decision {
	return Decision{Reason: NotInFabric, Message: fmt.Sprintf("no configured fabric manager has machine %s, which the node's %s names", r.machines[0], r.what)}
}

// Quote quotes foreign text of a length fit for a condition.
func Quote(text string) string {
	const most = 100
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return strconv.Quote(text)
}
