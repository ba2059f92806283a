// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"net/http"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/fabric"
)

// offer is what the service advertises for a host.
type offer struct {
	// add and remove are the targets of the actions, "" where there are none.
	add, remove string
	// update: the list may be written.
	update bool
	// compose is the target of the action that takes manifests.
	compose string
	// words are those for a zone; else they are a system's.
	zone bool
}

// mayPatch tells whether a resource may be updated: it may unless the service says that it may not.
func mayPatch(h http.Header) bool {
	allow := strings.Join(h.Values("Allow"), ",")
	return allow == "" || slices.ContainsFunc(strings.Split(allow, ","), func(m string) bool {
		return strings.EqualFold(strings.TrimSpace(m), http.MethodPatch)
	})
}

// change is what is to be asked of a host.
type change struct {
	kind fabric.OperationKind
	host *host
	unit *unit
}

// form is one way to ask for a change.
type form struct {
	name    string
	offered func(o offer, k fabric.OperationKind) bool
	call    func(ch change) call
}

// forms are the ways to ask, the better ones first: an action names the one block, the others the whole list.
func forms() []form {
	return []form{
		{"action", func(o offer, k fabric.OperationKind) bool { return o.action(k) != "" }, actionCall},
		{"list", func(o offer, _ fabric.OperationKind) bool { return o.update }, listCall},
		{"manifest", func(o offer, _ fabric.OperationKind) bool { return o.compose != "" }, manifestCall},
	}
}

func (o offer) action(k fabric.OperationKind) string {
	if k == fabric.KindAttach {
		return o.add
	}
	return o.remove
}

// reference is how a body names a resource.
type reference struct {
	ID string `json:"@odata.id"`
}

func actionCall(ch change) call {
	thing, thingTag, hostTag := "ResourceBlock", "ResourceBlockETag", "ComputerSystemETag"
	if ch.host.offer.zone {
		thing, thingTag, hostTag = "Endpoint", "EndpointETag", "ZoneETag"
	}
	body := map[string]any{thing: reference{ch.unit.path}}
	if ch.unit.etag != "" {
		body[thingTag] = ch.unit.etag
	}
	if ch.host.etag != "" {
		body[hostTag] = ch.host.etag
	}
	return call{method: http.MethodPost, path: ch.host.offer.action(ch.kind), body: body}
}

// after is the host's list when the change is done. It names all that is to stay, in its order: a list that is written
// takes the place of what was there.
func (ch change) after() []reference {
	out := make([]reference, 0, len(ch.host.members)+1)
	for _, m := range ch.host.members {
		if m != ch.unit.path {
			out = append(out, reference{m})
		}
	}
	if ch.kind == fabric.KindAttach {
		out = append(out, reference{ch.unit.path})
	}
	return out
}

func (ch change) links() map[string]any {
	name := "ResourceBlocks"
	if ch.host.offer.zone {
		name = "Endpoints"
	}
	return map[string]any{"Links": map[string]any{name: ch.after()}}
}

func listCall(ch change) call {
	return call{method: http.MethodPatch, path: ch.host.path, etag: ch.host.etag, body: ch.links()}
}

// manifestCall composes the system that is there already, of what it is to have.
func manifestCall(ch change) call {
	request := ch.links()
	request["@odata.id"] = ch.host.path
	if ch.host.etag != "" {
		request["@odata.etag"] = ch.host.etag
	}
	return call{method: http.MethodPost, path: ch.host.offer.compose, body: map[string]any{
		"RequestFormat": "Manifest", "RequestType": "Apply",
		"Manifest": map[string]any{"Expand": "None", "Stanzas": []any{map[string]any{
			"StanzaId": "1", "StanzaType": "ComposeSystem", "Request": request,
		}}},
	}}
}
