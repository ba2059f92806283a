// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"regexp"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Host is the BareMetalHost that a Node runs on, as the Node says it. The namespace and name are those of the object,
// UID and Consumer (the Metal3Machine that has it) are empty where the Node does not say them.
type Host struct {
	Namespace, Name string
	UID             string
	Consumer        string
}

// ProviderID is what a Node's provider id says of its machine.
type ProviderID struct {
	// Machine is what the last segment names, empty if it is no UUID. Behind Metal3 that is the UID of the BareMetalHost,
	// which is a machine's name only by accident.
	Machine device.Machine
	// Metal3: the provider id is of one of Metal3's kinds.
	Metal3 bool
	Host   Host
}

// forms are Metal3's provider ids: by scheme and number of segments, which is where in Host each segment goes.
func forms() map[string]map[int]func([]string) Host {
	byUID := func(s []string) Host { return Host{UID: s[0]} }
	return map[string]map[int]func([]string) Host{
		"baremetalhost": {
			3: func(s []string) Host { return Host{Namespace: s[0], Name: s[1], UID: s[2]} },
		},
		"metal3": {
			1: byUID,
			3: func(s []string) Host { return Host{Namespace: s[0], Name: s[1], Consumer: s[2]} },
		},
	}
}

// ParseProviderID reads a provider id of any kind. What it does not know names nothing, or a machine by its last segment
// (fsas-cdi://<uuid>, <any>:///x/<uuid>, a bare UUID).
func ParseProviderID(id string) ProviderID {
	id = strings.TrimSpace(id)
	scheme, path, has := strings.Cut(id, "://")
	if !has {
		scheme, path = "", id
	}
	segments := strings.Split(strings.TrimLeft(path, "/"), "/")
	var p ProviderID
	if m, err := device.ParseMachine(segments[len(segments)-1]); err == nil {
		p.Machine = m
	}
	known, metal3 := forms()[strings.ToLower(scheme)]
	p.Metal3 = metal3
	read, ok := known[len(segments)]
	if !ok || slices.Contains(segments, "") {
		return p
	}
	if h := read(segments); h.valid() {
		p.Host = h
	}
	return p
}

// objectName is what a Kubernetes object may be called: it becomes part of a request's path.
var objectName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

func (h Host) valid() bool {
	for _, name := range []string{h.Namespace, h.Name, h.Consumer} {
		if name != "" && !objectName.MatchString(name) {
			return false
		}
	}
	return true
}

// ParseObject reads "<namespace>/<name>".
func ParseObject(text string) (namespace, name string, ok bool) {
	namespace, name, ok = strings.Cut(text, "/")
	return namespace, name, ok && objectName.MatchString(namespace) && objectName.MatchString(name)
}
