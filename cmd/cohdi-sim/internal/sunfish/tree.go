// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const (
	agentSource = base + "/AggregationService/AggregationSources/agent"
	pool        = base + "/Chassis/Pool"

	connectionType = "#Connection.v1_0_0.Connection"
)

func initiatorOf(fabric, machine string) string { return fabric + "/Endpoints/I-" + machine }
func targetOf(fabric, device string) string     { return fabric + "/Endpoints/T-" + device }
func systemOf(machine string) string            { return base + "/Systems/" + machine }
func gpuOf(device string) string                { return pool + "/Processors/" + device }

func (f *Face) fabricOf(id int) string {
	for _, one := range f.fabrics {
		if one.ID == id {
			return base + "/Fabrics/" + one.UUID
		}
	}
	return base + "/Fabrics/none"
}

func ref(at string) object { return object{"@odata.id": at} }

func refs(all ...string) []object {
	out := []object{}
	for _, at := range all {
		out = append(out, ref(at))
	}
	return out
}

func connectionOf(at, initiator, target string) object {
	return object{
		"@odata.type": connectionType, "@odata.id": at, "Id": path.Base(at), "Name": path.Base(at),
		"Links": object{"InitiatorEndpoints": refs(initiator), "TargetEndpoints": refs(target)},
	}
}

// tree is everything that the service shows, by path.
type tree map[string]object

// put adds a resource, and it to its collection.
func (t tree) put(at, kind string, o object) {
	o["@odata.id"], o["@odata.type"], o["Id"] = at, "#"+kind, path.Base(at)
	if _, named := o["Name"]; !named {
		o["Name"] = path.Base(at)
	}
	t[at] = o
	t.list(path.Dir(at), at)
}

// list adds members to a collection, which need not be there.
func (t tree) list(collection string, members ...string) {
	c, ok := t[collection]
	if !ok {
		name := path.Base(collection)
		c = object{"@odata.id": collection, "@odata.type": "#" + strings.TrimSuffix(name, "s") + "Collection." + strings.TrimSuffix(name, "s") + "Collection", "Name": name}
		t[collection] = c
	}
	all := refs(members...)
	if before, ok := c["Members"].([]object); ok {
		all = append(before, all...)
	}
	c["Members"], c["Members@odata.count"] = all, len(all)
}

func (f *Face) managed() object {
	return object{"Sunfish_RM": object{"@odata.type": "#SunfishExtensions.v1_0_0.ResourceExtensions", "ManagingAgent": ref(agentSource)}}
}

// look makes the tree as it shows now.
func (f *Face) look() tree {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.core.State() // under the lock, so that it is not older than the wires
	f.noticeLocked(s)
	t := tree{}
	r := object{"@odata.id": base, "@odata.type": "#ServiceRoot.v1_14_0.ServiceRoot", "Id": "RootService", "Name": "Sunfish", "RedfishVersion": "1.14.0"}
	t[base] = r
	r["Systems"], r["Chassis"], r["AggregationService"] = ref(base+"/Systems"), ref(base+"/Chassis"), ref(base+"/AggregationService")
	t.put(base+"/Systems/System", "ComputerSystem.v1_20_0.ComputerSystem", object{"SystemType": "Composed", "Processors": object{"Members": []object{}}})
	t.list(base + "/AggregationService/AggregationSources")
	t[agentSource] = object{"@odata.id": agentSource, "@odata.type": "#AggregationSource.v1_2_0.AggregationSource", "Id": "agent", "Name": "agent", "HostName": "http://agent"}
	t.list(path.Dir(agentSource), agentSource)
	for _, m := range s.Machines {
		f.hostLocked(t, s, m)
	}
	t.put(pool, "Chassis.v1_22_0.Chassis", object{"ChassisType": "Expansion", "Processors": ref(pool + "/Processors")})
	t.list(pool + "/Processors")
	for i := range s.Devices {
		f.poolLocked(t, &s.Devices[i])
	}
	if s.Policies.Sunfish.Offers != systems {
		r["Fabrics"] = ref(base + "/Fabrics")
		f.fabricsLocked(t, s)
	}
	for at, o := range f.copies {
		dir := path.Dir(at)
		if _, there := t[dir]; !there && s.Policies.Sunfish.Offers == systems {
			continue
		}
		if _, there := t[at]; !there {
			t.list(dir, at)
		}
		t[at] = o
	}
	return t
}

func (f *Face) hostLocked(t tree, s *simapi.State, m simapi.Machine) {
	at, power := systemOf(m.Name), "On"
	if !m.Power {
		power = "Off"
	}
	o := object{
		"Name": m.Name, "HostName": m.Name, "UUID": m.UUID, "SystemType": "Physical", "PowerState": power,
		"Status": object{"State": "Enabled", "Health": "OK"}, "Links": object{"Endpoints": refs(initiatorOf(f.fabricOf(m.Fabric), m.Name))}, "Oem": f.managed(),
	}
	t.put(at, "ComputerSystem.v1_20_0.ComputerSystem", o)
	if s.Policies.Sunfish.Extension == off {
		return
	}
	o["Processors"] = ref(at + "/Processors")
	t.list(at + "/Processors")
	t.put(at+"/Processors/CPU0", "Processor.v1_18_0.Processor", object{"ProcessorType": "CPU", "Model": "EMU CPU"})
	used := map[int]bool{}
	for i := range s.Devices {
		d := &s.Devices[i]
		if f.lag.On(*d) != m.Name {
			continue
		}
		slot := d.Slot
		for used[slot] || slot == 0 { // one that has left is still shown
			slot++
		}
		used[slot] = true
		p := f.processor(d)
		p["Links"] = object{"Endpoints": []object{}}
		if !d.BuiltIn {
			p["Links"] = object{"Endpoints": refs(targetOf(f.fabricOf(d.Fabric), d.ID))}
		}
		t.put(fmt.Sprintf("%s/Processors/GPU%d", at, slot), "Processor.v1_18_0.Processor", p)
	}
}

// processor is a GPU, wherever it is shown.
func (f *Face) processor(d *simapi.Device) object {
	state, health, serial := "Enabled", any(nil), d.Serial
	if d.FabricSerial != d.UUID { // what somebody makes of its identity is all that is told of it
		serial = ""
	}
	if d.OpStatus != "" {
		if word, ok := map[byte]string{'0': "OK", '1': "Warning", '2': "Critical"}[d.OpStatus[0]]; ok {
			health = word
		}
	}
	if d.Vanished {
		state = "Absent"
	}
	return object{
		"ProcessorType": "GPU", "Model": d.Model, "SerialNumber": serial, "UUID": strings.TrimPrefix(d.FabricSerial, "GPU-"),
		"Status": object{"State": state, "Health": health},
	}
}

func (f *Face) poolLocked(t tree, d *simapi.Device) {
	if !d.BuiltIn {
		t.put(gpuOf(d.ID), "Processor.v1_18_0.Processor", f.processor(d))
	}
}

func (f *Face) fabricsLocked(t tree, s *simapi.State) {
	for _, one := range f.fabrics {
		at := f.fabricOf(one.ID)
		t.put(at, "Fabric.v1_3_0.Fabric", object{
			"FabricType": "PCIe", "Endpoints": ref(at + "/Endpoints"), "Connections": ref(at + "/Connections"), "Zones": ref(at + "/Zones"), "Oem": f.managed(),
		})
		for _, c := range []string{"/Endpoints", "/Connections", "/Zones"} {
			t.list(at + c)
		}
	}
	t.list(base + "/Fabrics")
	for _, m := range s.Machines {
		f.endpoint(t, initiatorOf(f.fabricOf(m.Fabric), m.Name), "Initiator", "ComputerSystem", systemOf(m.Name))
	}
	for _, d := range s.Devices {
		if d.BuiltIn {
			continue
		}
		fabric := f.fabricOf(d.Fabric)
		f.endpoint(t, targetOf(fabric, d.ID), "Target", "Processor", gpuOf(d.ID))
		if d.Tenant != "" {
			at := fabric + "/Connections/tenant-" + d.ID
			t[at] = connectionOf(at, fabric+"/Endpoints/I-of-another-tenant", targetOf(fabric, d.ID))
			t.list(path.Dir(at), at)
		}
	}
}

func (f *Face) endpoint(t tree, at, role, kind, entity string) {
	t.put(at, "Endpoint.v1_8_0.Endpoint", object{
		"EndpointProtocol": "PCIe", "Oem": f.managed(), "Links": object{"Ports": []object{}, "Zones": []object{}},
		"ConnectedEntities": []object{{"EntityType": kind, "EntityRole": role, "EntityLink": ref(entity)}},
	})
}

// find knows endpoints by their paths.
func (f *Face) find(s *simapi.State, fabric, initiator, target string) (m simapi.Machine, d simapi.Device, ok bool) {
	i := slices.IndexFunc(s.Machines, func(m simapi.Machine) bool { return initiatorOf(f.fabricOf(m.Fabric), m.Name) == initiator })
	j := slices.IndexFunc(s.Devices, func(d simapi.Device) bool {
		return targetOf(f.fabricOf(d.Fabric), d.ID) == target && !d.BuiltIn && d.Tenant == "" && !d.Vanished
	})
	if i < 0 || j < 0 || f.fabricOf(s.Machines[i].Fabric) != fabric || f.fabricOf(s.Devices[j].Fabric) != fabric {
		return m, d, false
	}
	return s.Machines[i], s.Devices[j], true
}

// connected tells whether a Connection that is to be made has a target that another one has.
func (f *Face) connected(o object) bool {
	wanted := targets(o)
	if len(wanted) == 0 {
		return false
	}
	for at, other := range f.look() {
		if path.Base(path.Dir(at)) == "Connections" && slices.ContainsFunc(targets(other), func(t string) bool { return slices.Contains(wanted, t) }) {
			return true
		}
	}
	return false
}
