// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// The variant without composition: a host port and what is attached to it are one zone of a fabric.

// fabricOf is the fabric of a request, if it is served.
func (f *Face) fabricOf(r *http.Request) (int, bool) {
	id, err := strconv.Atoi(r.PathValue("fabric"))
	if err != nil || f.policies().Variant != variantZones {
		return 0, false
	}
	for _, one := range f.fabrics {
		if one.ID == id {
			return id, true
		}
	}
	return 0, false
}

func (f *Face) listFabrics(r *http.Request) answer {
	if f.policies().Variant != variantZones {
		return f.refusal(f.missing(r))
	}
	var members []string
	for _, one := range f.fabrics {
		members = append(members, f.fabric(one.ID))
	}
	return f.collection(r, "FabricCollection", f.names.fabrics(), members, nil)
}

func (f *Face) getFabric(r *http.Request) answer {
	id, ok := f.fabricOf(r)
	if !ok {
		return f.refusal(f.missing(r))
	}
	body := object{
		"@odata.type": "#Fabric.v1_3_0.Fabric", "@odata.id": f.fabric(id), "Id": strconv.Itoa(id), "Name": "PCIe", "FabricType": "PCIe",
		"Zones": ref(f.ports(id)), "Endpoints": ref(f.endpoints(id)),
	}
	return f.show(body, tagOf(body, ""), readOnly)
}

func (f *Face) listPorts(r *http.Request) answer {
	id, ok := f.fabricOf(r)
	if !ok {
		return f.refusal(f.missing(r))
	}
	var members []string
	for _, m := range f.core.State().Machines {
		if m.Fabric == id {
			members = append(members, f.port(id, m.Name))
		}
	}
	return f.collection(r, "ZoneCollection", f.ports(id), members, nil)
}

func (f *Face) portBody(v view, m simapi.Machine) object {
	path := f.port(m.Fabric, m.Name)
	body := object{
		"@odata.type": "#Zone.v1_6_0.Zone", "@odata.id": path, "Id": m.Name, "Name": "Host port " + m.Name, "ZoneType": "ZoneOfEndpoints",
		"Status": object{"State": "Enabled", "Health": "OK"}, "Links": object{"Endpoints": refs(f.list(v, m))}, "Actions": object{},
	}
	if f.offers("actions") {
		body["Actions"] = object{
			"#Zone.AddEndpoint":    object{"target": f.action(path, "AddEndpoint")},
			"#Zone.RemoveEndpoint": object{"target": f.action(path, "RemoveEndpoint")},
		}
	}
	return body
}

func (f *Face) getPort(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	m, ok := v.machine(r.PathValue("id"))
	if id, known := f.fabricOf(r); !ok || !known || m.Fabric != id {
		return f.refusal(f.missing(r))
	}
	allow := readOnly
	if f.offers("list") {
		allow += ", PATCH"
	}
	return f.show(f.portBody(v, m), f.targetLocked(v, m).tag, allow)
}

func (f *Face) patchPort(r *http.Request) answer {
	return f.patch(r, "list", "Endpoints", f.policies().Variant == variantZones)
}

func (f *Face) addEndpoint(r *http.Request) answer {
	return f.act(r, true, "Endpoint", "ZoneETag", f.policies().Variant == variantZones)
}

func (f *Face) removeEndpoint(r *http.Request) answer {
	return f.act(r, false, "Endpoint", "ZoneETag", f.policies().Variant == variantZones)
}

func (f *Face) listEndpoints(r *http.Request) answer {
	id, ok := f.fabricOf(r)
	if !ok {
		return f.refusal(f.missing(r))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	var members []string
	for _, m := range v.Machines {
		if m.Fabric == id {
			members = append(members, f.endpoint(id, hostPort+m.Name))
		}
	}
	for _, d := range v.shown() {
		if d.Fabric == id {
			members = append(members, f.endpoint(id, d.ID))
		}
	}
	return f.collection(r, "EndpointCollection", f.endpoints(id), members, nil)
}

// end is an endpoint of one entity.
func end(path, id, role, kind, to string, zones []object, status any) object {
	return object{
		"@odata.type": "#Endpoint.v1_8_0.Endpoint", "@odata.id": path, "Id": id, "Name": id, "EndpointProtocol": "PCIe", "Status": status,
		"ConnectedEntities": []object{{"EntityRole": role, "EntityType": kind, "EntityLink": ref(to)}},
		"Links":             object{"Zones": zones},
	}
}

func (f *Face) endpointBody(v view, d simapi.Device) object {
	zones := []object{}
	if user := v.user(d.ID); user != "" {
		zones = append(zones, ref(f.port(d.Fabric, user)))
	}
	return end(f.endpoint(d.Fabric, d.ID), d.ID, "Target", "Processor", f.boxed(d.ID), zones, v.statusOf(d))
}

func (f *Face) getEndpoint(r *http.Request) answer {
	id, ok := f.fabricOf(r)
	if !ok {
		return f.refusal(f.missing(r))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	name := r.PathValue("id")
	if i := slices.IndexFunc(v.Machines, func(m simapi.Machine) bool { return hostPort+m.Name == name && m.Fabric == id }); i >= 0 {
		m := v.Machines[i]
		body := end(f.endpoint(id, name), name, "Initiator", "RootComplex", f.system(m.Name), []object{ref(f.port(id, m.Name))}, object{"State": "Enabled", "Health": "OK"})
		return f.show(body, tagOf(body, ""), readOnly)
	}
	d, ok := v.device(name)
	if !ok || d.Fabric != id || strings.HasPrefix(name, hostPort) {
		return f.refusal(f.missing(r))
	}
	body := f.endpointBody(v, d)
	return f.show(body, tagOf(body, ""), readOnly)
}

// getBoxed is a processor where there are no blocks.
func (f *Face) getBoxed(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	d, ok := v.device(r.PathValue("id"))
	if !ok || v.policies.Variant != variantZones {
		return answer{status: http.StatusNotFound}
	}
	body := f.processorBody(v, d, f.boxed(d.ID))
	return f.show(body, tagOf(body, ""), readOnly)
}
