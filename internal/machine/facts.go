// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"slices"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// AnnotationObject on a Node names its Machine object, on platforms that manage bare metal by Metal3.
const AnnotationObject = "machine.openshift.io/machine"

// Evidence is what a Node and the configuration say of the Node's machine. Two are the same if they say the same.
type Evidence struct {
	ProviderID string
	// Annotation is that of device.AnnotationMachine; Annotated tells it from an empty one.
	Annotation string
	Annotated  bool
	// Configured is the machine that the configuration names for the Node, empty if none.
	Configured device.Machine
	// Object is the annotation AnnotationObject.
	Object     string
	SystemUUID string
}

// Place is a machine on a fabric.
type Place struct {
	Fabric  device.FabricID
	Machine device.Machine
}

// Facts are all that Decide goes by.
type Facts struct {
	Evidence
	// Was is where the agent of the Node has placed it before, as the Node's labels say; a part may be empty.
	Was Place
	// Listed are the fabrics whose manager lists the machine. Unasked are those whose manager did not answer.
	Listed  map[device.Machine][]device.FabricID
	Unasked []device.FabricID
	// Chain is what was found behind Start; nil before it was followed.
	Chain *Chain
}

// Start is where the chain to the BareMetalHost begins: at a Machine object, or at the host itself. Where the Node
// says both, they have to meet.
type Start struct {
	// Namespace and Name are the Machine object's, empty if the Node names none.
	Namespace, Name string
	Host            Host
}

// Chain is what was found at the end of the chain, or where it broke.
type Chain struct {
	// Machine is the fabric's name of the machine, as written on the host; Host is that host, for people.
	Machine, Host string
	// Problem says where the chain broke. Passing: it may be whole the next time.
	Problem string
	Passing bool
}

// Start returns where the chain begins. ok is false where the Node is not of Metal3's kind, or names no object;
// problem says why it names none though it is.
func (e *Evidence) Start() (s Start, problem string, ok bool) {
	p := ParseProviderID(e.ProviderID)
	if e.Object != "" {
		namespace, name, valid := ParseObject(e.Object)
		if !valid {
			return Start{}, "annotation " + AnnotationObject + " " + Quote(e.Object) + " is not <namespace>/<name>", false
		}
		return Start{Namespace: namespace, Name: name, Host: p.Host}, "", true
	}
	switch {
	case p.Host.Name != "":
		return Start{Host: p.Host}, "", true
	case p.Metal3:
		return Start{}, "the provider id does not name its BareMetalHost, and no annotation " + AnnotationObject + " leads there", false
	}
	return Start{}, "", false
}

// swapped is the UUID with the bytes of its first three groups in the other order. Firmware stores those groups with the
// lowest byte first since SMBIOS 2.6, and who reads them otherwise gets another UUID for the same machine.
func swapped(m device.Machine) device.Machine {
	b := []byte(m)
	for _, group := range [][2]int{{0, 8}, {9, 13}, {14, 18}} {
		g := b[group[0]:group[1]]
		slices.Reverse(g)
		for i := 0; i < len(g); i += 2 {
			g[i], g[i+1] = g[i+1], g[i]
		}
	}
	return device.Machine(b)
}

// Named is the machine that provider id, annotation or configuration name, in this order, whether a manager lists it
// or not. Agents before this one said no more on their Nodes than the fabric.
func (e *Evidence) Named() device.Machine {
	f := &Facts{Evidence: *e}
	for _, read := range sources()[:3] {
		if r := read(f); r.trust != seen && len(r.machines) == 1 {
			return r.machines[0]
		}
	}
	return ""
}
