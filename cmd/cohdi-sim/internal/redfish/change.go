// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"bytes"
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// job is one device that comes to a machine or leaves it.
type job struct {
	attach          bool
	machine, device string
}

// target is a machine's list as somebody wants to change it.
type target struct {
	machine simapi.Machine
	path    string
	list    []string
	tag     string
}

func (f *Face) targetLocked(v view, m simapi.Machine) target {
	t := target{machine: m, list: f.list(v, m)}
	if v.policies.Variant == variantZones {
		t.path, t.tag = f.port(m.Fabric, m.Name), tagOf(f.portBody(v, m), f.underWayLocked(m.Name))
	} else {
		t.path, t.tag = f.system(m.Name), f.systemTagLocked(v, m)
	}
	return t
}

// idOf is the device behind a member of a list; host tells that it is the host's own.
func idOf(path string) (id string, host bool) {
	id = path[strings.LastIndexByte(path, '/')+1:]
	return id, strings.HasPrefix(id, hostBlock) || strings.HasPrefix(id, hostPort)
}

// edit applies an update to a list: elements are changed first, then deleted, then added; what is not named is cut off.
func edit(list []string, elements []json.RawMessage) ([]string, *refusal) {
	var out []string
	for i, e := range elements {
		if bytes.Equal(bytes.TrimSpace(e), []byte("null")) {
			if i >= len(list) {
				return nil, refuse(http.StatusBadRequest, "PropertyValueConflict", "there is no element %d to delete", i)
			}
			continue
		}
		var r struct {
			ID *string `json:"@odata.id"`
		}
		if err := json.Unmarshal(e, &r); err != nil {
			return nil, refuse(http.StatusBadRequest, "PropertyValueTypeError", "element %d is no reference", i)
		}
		switch {
		case r.ID != nil:
			out = append(out, *r.ID)
		case i < len(list):
			out = append(out, list[i])
		default:
			return nil, refuse(http.StatusBadRequest, "PropertyMissing", "element %d has no @odata.id", i)
		}
	}
	sorted := slices.Sorted(slices.Values(out))
	if len(slices.Compact(sorted)) != len(out) {
		return nil, refuse(http.StatusBadRequest, "PropertyValueConflict", "an element is named twice")
	}
	return out, nil
}

// jobsLocked are what makes a list into another, if that is allowed.
func (f *Face) jobsLocked(v view, t target, wanted []string) ([]job, *refusal) {
	var jobs []job
	for _, path := range t.list {
		if slices.Contains(wanted, path) {
			continue
		}
		id, host := idOf(path)
		if host {
			status := map[string]int{"400": http.StatusBadRequest, "409": http.StatusConflict, "406": http.StatusNotAcceptable}[v.policies.HostBlock]
			return nil, refuse(status, "PropertyValueConflict", "the host's own part must stay")
		}
		if v.busy[id] {
			return nil, refuse(http.StatusServiceUnavailable, "ResourceInUse", "something is under way with %s", id)
		}
		jobs = append(jobs, job{false, t.machine.Name, id})
	}
	for _, path := range wanted {
		if slices.Contains(t.list, path) {
			continue
		}
		if bad := f.addable(v, t, path); bad != nil {
			return nil, bad
		}
		id, _ := idOf(path)
		jobs = append(jobs, job{true, t.machine.Name, id})
	}
	return jobs, nil
}

func (f *Face) addable(v view, t target, path string) *refusal {
	id, host := idOf(path)
	d, ok := v.device(id)
	own := f.block(id)
	if v.policies.Variant == variantZones {
		own = f.endpoint(t.machine.Fabric, id)
	}
	if host || !ok || path != own {
		return refuse(http.StatusNotFound, "ResourceBlockNotFound", "there is no %s", path)
	}
	state, _, _, _ := v.stateOf(d)
	switch {
	case d.Fabric != t.machine.Fabric:
		return refuse(http.StatusBadRequest, "IncompatibleZone", "%s and %s share no zone", id, t.machine.Name)
	case state == "Composing":
		return refuse(http.StatusServiceUnavailable, "ResourceInUse", "something is under way with %s", id)
	case state != "Unused":
		return refuse(http.StatusConflict, "ResourceBlockInUse", "block is in use")
	}
	return nil
}

// precondition checks If-Match.
func (f *Face) precondition(r *http.Request, tag string) *refusal {
	match, policy := r.Header.Get("If-Match"), f.policies().ETag
	switch {
	case policy == "none", match == "*":
		return nil
	case match == "" && policy == "required":
		return refuse(http.StatusPreconditionRequired, "PreconditionRequired", "If-Match needed")
	case match != "" && match != tag:
		return refuse(http.StatusPreconditionFailed, "PreconditionFailed", "ETag does not match")
	}
	return nil
}

func (f *Face) patchSystem(r *http.Request) answer {
	return f.patch(r, "list", "ResourceBlocks", f.policies().Variant != variantZones)
}

func (f *Face) patch(r *http.Request, form, property string, here bool) answer {
	var body struct{ Links map[string]json.RawMessage }
	if bad := decode(r, &body); bad != nil {
		return f.refusal(bad)
	}
	f.mu.Lock()
	v := f.lookLocked()
	m, ok := v.machine(r.PathValue("id"))
	if !ok {
		f.mu.Unlock()
		return f.refusal(f.missing(r))
	}
	jobs, bad := f.patchLocked(r, v, m, body.Links, property)
	switch {
	case !here || !f.offers(form):
		bad = refuse(http.StatusMethodNotAllowed, "OperationNotAllowed", "this cannot be updated")
	case bad == nil && len(jobs) == 0:
		bad = refuse(http.StatusOK, "NoOperation", "nothing is to be changed")
	}
	if bad != nil {
		f.mu.Unlock()
		return f.refusal(bad)
	}
	return f.beginLocked(r, jobs, m)
}

func (f *Face) patchLocked(r *http.Request, v view, m simapi.Machine, links map[string]json.RawMessage, property string) ([]job, *refusal) {
	t := f.targetLocked(v, m)
	if bad := f.precondition(r, t.tag); bad != nil {
		return nil, bad
	}
	var elements []json.RawMessage
	if err := json.Unmarshal(links[property], &elements); err != nil {
		return nil, refuse(http.StatusBadRequest, "PropertyMissing", "Links.%s is not there, or no list", property)
	}
	wanted, bad := edit(t.list, elements)
	if bad != nil {
		return nil, bad
	}
	return f.jobsLocked(v, t, wanted)
}

func (f *Face) addBlock(r *http.Request) answer {
	return f.act(r, true, "ResourceBlock", "ComputerSystemETag", f.policies().Variant != variantZones)
}

func (f *Face) removeBlock(r *http.Request) answer {
	return f.act(r, false, "ResourceBlock", "ComputerSystemETag", f.policies().Variant != variantZones)
}

// act is one of the actions that add or remove one member.
func (f *Face) act(r *http.Request, attach bool, thing, hostTag string, here bool) answer {
	var body map[string]json.RawMessage
	if bad := decode(r, &body); bad != nil {
		return f.refusal(bad)
	}
	f.mu.Lock()
	v := f.lookLocked()
	m, ok := v.machine(r.PathValue("id"))
	if !ok || !here || !f.offers("actions") {
		f.mu.Unlock()
		return f.refusal(f.missing(r))
	}
	jobs, bad := f.actLocked(v, m, attach, thing, hostTag, body)
	if bad == nil && len(jobs) == 0 {
		bad = refuse(http.StatusOK, "NoOperation", "nothing is to be changed")
	}
	if bad != nil {
		f.mu.Unlock()
		return f.refusal(bad)
	}
	return f.beginLocked(r, jobs, m)
}

func (f *Face) actLocked(v view, m simapi.Machine, attach bool, thing, hostTag string, body map[string]json.RawMessage) ([]job, *refusal) {
	var named struct {
		ID string `json:"@odata.id"`
	}
	// A bare string is no reference.
	if err := json.Unmarshal(body[thing], &named); err != nil || named.ID == "" {
		return nil, refuse(http.StatusBadRequest, "ActionParameterValueTypeError", "%s is no reference", thing)
	}
	t := f.targetLocked(v, m)
	if v.policies.ETag != "none" {
		tags := map[string]string{hostTag: t.tag, thing + "ETag": f.memberTag(v, named.ID)}
		for name, tag := range tags {
			var given string
			if raw, ok := body[name]; ok && (json.Unmarshal(raw, &given) != nil || given != tag) {
				return nil, refuse(http.StatusPreconditionRequired, "PreconditionRequired", "%s does not match", name)
			}
		}
	}
	wanted := slices.DeleteFunc(slices.Clone(t.list), func(p string) bool { return p == named.ID })
	switch {
	case attach:
		wanted = append(wanted, named.ID)
	case len(wanted) == len(t.list):
		return nil, refuse(http.StatusNotFound, "ResourceBlockNotFound", "%s is not here", named.ID)
	}
	return f.jobsLocked(v, t, wanted)
}

// memberTag is the ETag of a block or of an endpoint.
func (f *Face) memberTag(v view, path string) string {
	id, _ := idOf(path)
	d, ok := v.device(id)
	switch {
	case !ok:
		return ""
	case v.policies.Variant == variantZones:
		return tagOf(f.endpointBody(v, d), "")
	}
	return tagOf(f.blockBody(v, d), "")
}

// stanza is a part of a manifest.
type stanza struct {
	ID       string         `json:"StanzaId"`
	Type     string         `json:"StanzaType"`
	Request  stanzaRequest  `json:"Request"`
	Response map[string]any `json:"Response"`
}

type stanzaRequest struct {
	ID    string `json:"@odata.id"`
	ETag  string `json:"@odata.etag,omitempty"`
	Links struct {
		ResourceBlocks []json.RawMessage
	}
}

// postManifest takes a manifest about systems that are there: all of it, or nothing.
func (f *Face) postManifest(r *http.Request) answer {
	var body struct {
		RequestFormat, RequestType string
		Manifest                   struct{ Stanzas []stanza }
	}
	if bad := decode(r, &body); bad != nil {
		return f.refusal(bad)
	}
	if !f.offers("manifest") || f.policies().Variant == variantZones {
		return f.refusal(f.missing(r))
	}
	if body.RequestFormat != "Manifest" || len(body.Manifest.Stanzas) == 0 {
		return f.refusal(refuse(http.StatusBadRequest, "EmptyManifest", "there is no stanza"))
	}
	f.mu.Lock()
	v := f.lookLocked()
	var all []job
	var last simapi.Machine
	broken := false
	for i := range body.Manifest.Stanzas {
		s := &body.Manifest.Stanzas[i]
		m, jobs, bad := f.stanzaLocked(v, s)
		if bad != nil {
			s.Response, broken = bad.body("extended"), true
			continue
		}
		s.Response = ref(s.Request.ID)
		all, last = append(all, jobs...), m
	}
	if broken || body.RequestType != "Apply" || len(all) == 0 {
		f.mu.Unlock()
		return answer{status: http.StatusOK, body: body}
	}
	return f.beginLocked(r, all, last)
}

func (f *Face) stanzaLocked(v view, s *stanza) (simapi.Machine, []job, *refusal) {
	for _, m := range v.Machines {
		if f.system(m.Name) != s.Request.ID {
			continue
		}
		t := f.targetLocked(v, m)
		if s.Type != "ComposeSystem" {
			break
		}
		if s.Request.ETag != "" && v.policies.ETag != "none" && s.Request.ETag != t.tag {
			return m, nil, refuse(http.StatusPreconditionFailed, "PreconditionFailed", "ETag does not match")
		}
		wanted, bad := edit(t.list, s.Request.Links.ResourceBlocks)
		if bad != nil {
			return m, nil, bad
		}
		jobs, bad := f.jobsLocked(v, t, wanted)
		return m, jobs, bad
	}
	return simapi.Machine{}, nil, refuse(http.StatusBadRequest, "UnableToProcessStanzaRequest", "stanza %s is about no system that is here", s.ID)
}

// reserve is an announcement to other clients, and no more than that.
func (f *Face) reserve(r *http.Request) answer {
	var body struct{ CompositionStatus struct{ Reserved *bool } }
	if bad := decode(r, &body); bad != nil {
		return f.refusal(bad)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	d, ok := v.device(r.PathValue("id"))
	switch {
	case !ok:
		return f.refusal(f.missing(r))
	case body.CompositionStatus.Reserved == nil:
		return f.refusal(refuse(http.StatusBadRequest, "PropertyNotWritable", "only Reserved can be written"))
	}
	if bad := f.precondition(r, f.memberTag(v, f.block(d.ID))); bad != nil {
		return f.refusal(bad)
	}
	f.reserved[d.ID] = *body.CompositionStatus.Reserved
	return answer{status: http.StatusNoContent}
}
