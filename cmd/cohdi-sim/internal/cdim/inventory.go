// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// Types of devices.
const (
	typeCPU         = "CPU"
	typeGPU         = "GPU"
	typeSource      = "sourceFabricAdapter"
	typeDestination = "destinationFabricAdapter"
)

const (
	defaultGroup = "00000000-0000-7000-8000-000000000000"
	// otherGroup has what another tenant took.
	otherGroup = "00000000-0000-7000-8000-000000000001"
	maker      = "emu"
)

// derived makes an identity for something that the chassis does not name.
func derived(kind, id string) string {
	h := sha256.Sum256([]byte("cdim " + kind + "\x00" + id))
	h[6], h[8] = h[6]&0x0f|0x50, h[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

func sourceOf(m simapi.Machine) string      { return derived("source", m.UUID) }
func destinationOf(m simapi.Machine) string { return derived("destination", m.UUID) }

// view is the inventory at one moment, by ascending id.
type view struct {
	all   []resource
	nodes []nodeBody
}

// look makes the inventory as it shows now.
func (f *Face) look() view {
	s := f.core.State()
	f.mu.Lock()
	defer f.mu.Unlock()
	on := map[string][]simapi.Device{}
	var gpus []resource
	for _, d := range s.Devices {
		if d.BuiltIn {
			continue
		}
		machine := f.lag.On(d)
		on[machine] = append(on[machine], d)
		i := slices.IndexFunc(s.Machines, func(m simapi.Machine) bool { return m.Name == machine })
		if i < 0 {
			gpus = append(gpus, f.gpuLocked(d, nil, s.Policies))
			continue
		}
		gpus = append(gpus, f.gpuLocked(d, &s.Machines[i], s.Policies))
	}
	var v view
	for _, m := range s.Machines {
		v.all = append(v.all, f.hostLocked(m, on[m.Name], s.Policies)...)
	}
	v.all = append(v.all, gpus...)
	slices.SortFunc(v.all, func(a, b resource) int { return strings.Compare(a.Device.ID, b.Device.ID) })
	for _, m := range s.Machines {
		n := nodeBody{ID: m.UUID, Resources: []resource{}}
		for _, r := range v.all {
			if r.NodeIDs != nil && slices.Contains(*r.NodeIDs, m.UUID) {
				r.NodeIDs = nil
				n.Resources = append(n.Resources, r)
			}
		}
		// A CPU without links is no node.
		if len(n.Resources) > 0 {
			v.nodes = append(v.nodes, n)
		}
	}
	return v
}

func (f *Face) resourceLocked(id, kind string, d detail) resource {
	yes, nodes := true, []string{}
	if d.Attribute == nil {
		d.Attribute = map[string]any{}
	}
	if d.Links == nil {
		d.Links = []linkBody{}
	}
	return resource{
		Device: deviceBody{ID: id, Type: kind, Status: statusBody{"Enabled", "OK"}, detail: &d}, Groups: []string{defaultGroup},
		Annotation: annotation{Available: !f.withdrawn[id]}, Detected: &yes, NodeIDs: &nodes,
	}
}

// serialOf is what the inventory says of a GPU's serial number.
func serialOf(d simapi.Device, policy string) string {
	switch policy {
	case "none":
		return ""
	case "board":
		return d.Serial
	default: // own
		return "CHASSIS-" + d.ID
	}
}

func (f *Face) gpuLocked(d simapi.Device, m *simapi.Machine, p simapi.Policies) resource {
	no := false
	r := f.resourceLocked(d.ResUUID, typeGPU, detail{
		Manufacturer: maker, Model: d.Model, Serial: serialOf(d, p.CDIM.Serial), Power: "On", PowerControl: &no, Switch: switchOf(d.Fabric),
	})
	if d.OpStatus != "" {
		r.Device.Status.Health = map[byte]string{'0': "OK", '1': "Warning", '2': "Critical"}[d.OpStatus[0]]
	} else {
		r.Device.Status.Health = ""
	}
	switch {
	case d.Vanished:
		r.Device.Status.State, r.Detected = "Absent", &no
	case d.Tenant != "":
		cpu := derived("tenant", d.Tenant)
		r.Device.Links, r.NodeIDs, r.Groups = []linkBody{{typeCPU, cpu}}, &[]string{cpu}, []string{otherGroup}
	case m != nil:
		r.Device.Links, r.NodeIDs = f.gpuLinks(*m, p), &[]string{m.UUID}
	}
	return r
}

func (f *Face) gpuLinks(m simapi.Machine, p simapi.Policies) []linkBody {
	if f.dialect != dialectProduct {
		return []linkBody{{typeCPU, m.UUID}}
	}
	typed, eeio := linkBody{typeDestination, destinationOf(m)}, linkBody{"eeio", destinationOf(m)}
	switch p.CDIM.AdapterLink {
	case "typed":
		return []linkBody{typed}
	case "eeio":
		return []linkBody{eeio}
	case "nodeOnly":
		return []linkBody{}
	}
	return []linkBody{typed, eeio}
}

// hostLocked is the CPU, with its adapters in the product.
func (f *Face) hostLocked(m simapi.Machine, gpus []simapi.Device, p simapi.Policies) []resource {
	yes, power := true, "On"
	if !m.Power {
		power = "Off"
	}
	var toGPUs []linkBody
	for _, d := range gpus {
		toGPUs = append(toGPUs, linkBody{typeGPU, d.ResUUID})
	}
	d := detail{Manufacturer: maker, Model: "EMU CPU", Power: power, PowerControl: &yes, Switch: switchOf(m.Fabric)}
	if f.dialect != dialectProduct {
		d.Links = toGPUs
		cpu := f.resourceLocked(m.UUID, typeCPU, d)
		if len(gpus) > 0 {
			cpu.NodeIDs = &[]string{m.UUID}
		}
		return []resource{cpu}
	}
	if p.CDIM.AdapterLink == "nodeOnly" {
		toGPUs = nil
	}
	d.Links = []linkBody{{typeSource, sourceOf(m)}}
	out := []resource{
		f.resourceLocked(m.UUID, typeCPU, d),
		f.resourceLocked(sourceOf(m), typeSource, detail{
			Attribute: adapterStatus("eesv"), Links: []linkBody{{typeCPU, m.UUID}, {typeDestination, destinationOf(m)}},
		}),
		f.resourceLocked(destinationOf(m), typeDestination, detail{
			Attribute: adapterStatus("eeio"), Links: append([]linkBody{{typeSource, sourceOf(m)}}, toGPUs...),
		}),
	}
	for i := range out {
		out[i].NodeIDs = &[]string{m.UUID}
	}
	return out
}

func adapterStatus(s string) map[string]any {
	return map[string]any{"deviceSpecificInformation": map[string]any{"status": s}}
}

func switchOf(fabric int) string { return "sw-" + strconv.Itoa(fabric) }

func summary(r resource) resource {
	r.Device.detail = nil
	return r
}

// boolean reads a query parameter as the service does.
func boolean(w http.ResponseWriter, r *http.Request, name string) (value, ok bool) {
	text := r.URL.Query().Get(name)
	switch strings.ToLower(text) {
	case "", "false":
		return false, true
	case "true":
		return true, true
	}
	refuseRead(w, http.StatusBadRequest, "badRequest", "bad query parameter", name)
	return false, false
}

func (f *Face) listResources(w http.ResponseWriter, r *http.Request) {
	full, ok := boolean(w, r, "detail")
	if !ok {
		return
	}
	list := f.look().all
	for i := range list {
		if !full {
			list[i] = summary(list[i])
		}
	}
	replyList(w, "resources", list)
}

func replyList[T any](w http.ResponseWriter, name string, list []T) {
	if list == nil {
		list = []T{}
	}
	reply(w, http.StatusOK, map[string]any{"count": len(list), name: list})
}

func (f *Face) find(w http.ResponseWriter, id string) (resource, bool) {
	for _, r := range f.look().all {
		if r.Device.ID == id {
			return r, true
		}
	}
	refuseRead(w, http.StatusNotFound, "notFound", "resource not found", id)
	return resource{}, false
}

func (f *Face) getResource(w http.ResponseWriter, r *http.Request) {
	if found, ok := f.find(w, r.PathValue("id")); ok {
		reply(w, http.StatusOK, found)
	}
}

// inGroups filters by the repeated parameter.
func inGroups(r *http.Request, list []resource) []resource {
	wanted := r.URL.Query()["resourceGroupID"]
	if len(wanted) == 0 {
		return list
	}
	return slices.DeleteFunc(list, func(one resource) bool {
		return !slices.ContainsFunc(one.Groups, func(g string) bool { return slices.Contains(wanted, g) })
	})
}

func (f *Face) listAvailable(w http.ResponseWriter, r *http.Request) {
	replyList(w, "resources", slices.DeleteFunc(inGroups(r, f.look().all), func(one resource) bool { return !one.Annotation.Available }))
}

func (f *Face) listUnused(w http.ResponseWriter, r *http.Request) {
	var out []resource
	for _, one := range inGroups(r, f.look().all) {
		if !*one.Detected || one.Device.Status != (statusBody{"Enabled", "OK"}) || !one.Annotation.Available || len(one.Device.Links) > 0 {
			continue
		}
		one.Detected, one.NodeIDs = nil, nil
		out = append(out, one)
	}
	replyList(w, "resources", out)
}

func (f *Face) annotate(w http.ResponseWriter, r *http.Request) {
	found, ok := f.find(w, r.PathValue("id"))
	if !ok {
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return // the client has gone
	}
	var a struct {
		Available *bool `json:"available"`
	}
	if json.Unmarshal(body, &a) != nil || a.Available == nil {
		refuseRead(w, http.StatusBadRequest, "badRequest", "bad request body", "available")
		return
	}
	f.mu.Lock()
	f.withdrawn[found.Device.ID] = !*a.Available
	err = f.saveLocked()
	f.mu.Unlock()
	if err != nil {
		refuseRead(w, http.StatusInternalServerError, "internalServerError", err.Error(), "")
		return
	}
	reply(w, http.StatusOK, a)
}

func (f *Face) listNodes(w http.ResponseWriter, r *http.Request) {
	full, ok := boolean(w, r, "detail")
	if !ok {
		return
	}
	nodes := f.look().nodes
	if !full || f.dialect != dialectProduct {
		for _, n := range nodes {
			for i := range n.Resources {
				n.Resources[i] = summary(n.Resources[i])
			}
		}
	}
	replyList(w, "nodes", nodes)
}

func (f *Face) getNode(w http.ResponseWriter, r *http.Request) {
	for _, n := range f.look().nodes {
		if n.ID == r.PathValue("id") {
			reply(w, http.StatusOK, n)
			return
		}
	}
	refuseRead(w, http.StatusNotFound, "notFound", "node not found", r.PathValue("id"))
}

func (f *Face) listGroups(w http.ResponseWriter, _ *http.Request) {
	replyList(w, "resourceGroups", []map[string]string{{"id": defaultGroup, "name": "default"}, {"id": otherGroup, "name": "other"}})
}

// refresh is the collector's delivery: reads show the core at once.
func (f *Face) refresh(w http.ResponseWriter, _ *http.Request) {
	f.lag.CatchUp()
	ids := []string{}
	for _, r := range f.look().all {
		ids = append(ids, r.Device.ID)
	}
	reply(w, http.StatusCreated, map[string]any{"count": len(ids), "deviceIDs": ids})
}
