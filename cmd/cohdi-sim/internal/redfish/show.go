// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// object is a resource.
type object = map[string]any

func ref(path string) object { return object{"@odata.id": path} }

func refs(paths []string) []object {
	out := []object{}
	for _, p := range paths {
		out = append(out, ref(p))
	}
	return out
}

// view is the chassis with what is under way.
type view struct {
	simapi.State
	policies simapi.RedfishPolicies
	// lists are the devices that each machine's list shows, in their order.
	lists map[string][]string
	// busy are the devices that something is under way with.
	busy map[string]bool
}

// lookLocked makes the view as it shows now.
func (f *Face) lookLocked() view {
	v := view{State: *f.core.State(), lists: map[string][]string{}, busy: map[string]bool{}}
	v.policies = v.Policies.Redfish
	for _, m := range f.core.Machines() {
		for _, d := range m.Listed {
			v.lists[m.Name] = append(v.lists[m.Name], d.ID)
		}
		for _, d := range m.Coming {
			v.busy[d.ID] = true
		}
	}
	for _, j := range f.coming {
		v.busy[j.device] = true
		if j.attach && v.policies.Composing == "listed" && !slices.Contains(v.lists[j.machine], j.device) {
			v.lists[j.machine] = append(v.lists[j.machine], j.device)
		}
	}
	for _, d := range v.Devices {
		if d.Phase == simapi.PhaseDetaching {
			v.busy[d.ID] = true
		}
	}
	return v
}

// shown are the devices that the service knows.
func (v view) shown() []simapi.Device {
	return slices.DeleteFunc(slices.Clone(v.Devices), func(d simapi.Device) bool { return d.BuiltIn || d.Vanished })
}

func (v view) device(id string) (simapi.Device, bool) {
	for _, d := range v.shown() {
		if d.ID == id {
			return d, true
		}
	}
	return simapi.Device{}, false
}

func (v view) machine(name string) (simapi.Machine, bool) {
	for _, m := range v.Machines {
		if m.Name == name {
			return m, true
		}
	}
	return simapi.Machine{}, false
}

// user is the machine whose list has the device.
func (v view) user(id string) string {
	for name, list := range v.lists {
		if slices.Contains(list, id) {
			return name
		}
	}
	return ""
}

// tagOf is a resource's ETag: it changes with what it shows, and with what is under way below it.
func tagOf(body object, more string) string {
	data, err := json.Marshal(body)
	if err != nil {
		panic(err) // our own maps
	}
	sum := sha256.Sum256(append(data, more...))
	return `"` + hex.EncodeToString(sum[:8]) + `"`
}

// show answers with a resource as it is, and says what can be done with it.
func (f *Face) show(body object, tag, allow string) answer {
	a := answer{status: http.StatusOK, header: map[string]string{"Allow": allow}, body: body}
	switch f.policies().ETag {
	case "none":
	case "gzip":
		a.header["ETag"] = strings.TrimSuffix(tag, `"`) + `-gzip"`
	default:
		a.header["ETag"] = tag
		body["@odata.etag"] = tag
	}
	return a
}

const readOnly = "GET, HEAD"

func (f *Face) serviceRoot(*http.Request) answer {
	p := f.policies()
	body := object{
		"@odata.type": "#ServiceRoot.v1_15_0.ServiceRoot", "@odata.id": root + "/", "Id": "RootService", "Name": "Root", "RedfishVersion": "1.18.0",
		"ProtocolFeaturesSupported": object{
			"ExpandQuery": object{"ExpandAll": false, "Levels": p.Expand == "yes", "Links": false, "NoLinks": p.Expand == "yes"},
			"FilterQuery": false, "SelectQuery": false, "TopSkipQuery": true,
		},
		"Systems": ref(f.systems()), "SessionService": ref(f.sessionService()), "Tasks": ref(f.taskService()),
		"EventService": ref(f.eventService()), "Links": object{"Sessions": ref(f.names.sessions())},
	}
	if p.Variant == variantZones {
		body["Fabrics"] = ref(f.names.fabrics())
	} else {
		body["CompositionService"] = ref(f.composition())
	}
	return f.show(body, tagOf(body, ""), readOnly)
}

// collection is one page of a list. Members are whole where the service is asked to expand them.
func (f *Face) collection(r *http.Request, kind, path string, members []string, whole func(path string) object) answer {
	size, err := strconv.Atoi(f.policies().PageSize)
	if err != nil {
		panic(err) // checked
	}
	q := r.URL.Query()
	skip, _ := strconv.Atoi(q.Get("$skip")) //nolint:errcheck // checked; none is 0
	if top, err := strconv.Atoi(q.Get("$top")); err == nil && top < size {
		size = top
	}
	end := min(skip+size, len(members))
	body := object{
		"@odata.type": "#" + kind + "." + kind, "@odata.id": path, "Name": kind, "Members@odata.count": len(members),
	}
	list := []object{}
	for _, m := range members[min(skip, end):end] {
		if q.Get("$expand") != "" && whole != nil {
			list = append(list, whole(m))
		} else {
			list = append(list, ref(m))
		}
	}
	body["Members"] = list
	if end < len(members) {
		next := path + "?$skip=" + strconv.Itoa(end)
		if e := q.Get("$expand"); e != "" {
			next += "&$expand=" + e
		}
		body["Members@odata.nextLink"] = next
	}
	return answer{status: http.StatusOK, header: map[string]string{"Allow": readOnly}, body: body}
}

func (f *Face) getComposition(r *http.Request) answer {
	p := f.policies()
	if p.Variant == variantZones {
		return f.refusal(f.missing(r))
	}
	body := object{
		"@odata.type": "#CompositionService.v1_2_3.CompositionService", "@odata.id": f.composition(), "Id": "CompositionService",
		"Name": "Composition", "Status": object{"State": "Enabled", "Health": "OK"}, "ServiceEnabled": true,
		"AllowOverprovisioning": false, "AllowZoneAffinity": false,
		"ResourceBlocks": ref(f.blocks()), "ResourceZones": ref(f.resourceZones()), "Actions": object{},
	}
	if p.Forms == "manifest" {
		body["Actions"] = object{"#CompositionService.Compose": object{"target": f.compose()}}
	}
	return f.show(body, tagOf(body, ""), readOnly)
}

func (f *Face) listBlocks(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	var members []string
	bodies := map[string]object{}
	for _, m := range v.Machines {
		members = append(members, f.block(hostBlock+m.Name))
		bodies[f.block(hostBlock+m.Name)] = f.hostBlock(m)
	}
	for _, d := range v.shown() {
		path := f.block(d.ID)
		members = append(members, path)
		b := f.blockBody(v, d)
		b["@odata.etag"] = tagOf(b, "")
		if v.policies.ETag == "none" {
			delete(b, "@odata.etag")
		}
		b["Processors"] = []object{f.processorBody(v, d, f.processor(d.ID))}
		bodies[path] = b
	}
	return f.collection(r, "ResourceBlockCollection", f.blocks(), members, func(path string) object { return bodies[path] })
}

func (f *Face) hostBlock(m simapi.Machine) object {
	id := hostBlock + m.Name
	return object{
		"@odata.type": "#ResourceBlock.v1_4_0.ResourceBlock", "@odata.id": f.block(id), "Id": id, "Name": id,
		"ResourceBlockType": []string{"Compute"}, "Pool": "Active", "Status": object{"State": "Enabled", "Health": "OK"},
		"CompositionStatus": object{
			"CompositionState": "Composed", "Reserved": false, "SharingCapable": false, "SharingEnabled": false, "MaxCompositions": 1, "NumberOfCompositions": 1,
		},
		"Processors": []object{},
		"Links":      object{"ComputerSystems": []object{ref(f.system(m.Name))}, "Chassis": []object{}, "Zones": []object{ref(f.resourceZone(m.Fabric))}},
	}
}

// stateOf is a device's composition state, the pool that it is in, and who has it.
func (v view) stateOf(d simapi.Device) (state, pool string, user string, compositions int) {
	user = v.user(d.ID)
	switch {
	case v.busy[d.ID] && user != "" && d.Phase != simapi.PhaseFree:
		return "Composing", "Active", user, 1
	case v.busy[d.ID]:
		return "Composing", "Free", user, 0
	case d.Phase != simapi.PhaseFree:
		return "Composed", "Active", user, 1
	case d.Tenant != "":
		return "Composed", "Active", "", 1
	}
	return "Unused", "Free", "", 0
}

func (f *Face) blockBody(v view, d simapi.Device) object {
	state, pool, user, compositions := v.stateOf(d)
	systems := []object{}
	if user != "" {
		systems = append(systems, ref(f.system(user)))
	}
	return object{
		"@odata.type": "#ResourceBlock.v1_4_0.ResourceBlock", "@odata.id": f.block(d.ID), "Id": d.ID, "Name": "GPU block " + d.ID,
		"ResourceBlockType": []string{"Processor"}, "Pool": pool, "Status": v.statusOf(d),
		"CompositionStatus": object{
			"CompositionState": state, "Reserved": f.reserved[d.ID], "SharingCapable": false, "SharingEnabled": false,
			"MaxCompositions": 1, "NumberOfCompositions": compositions,
		},
		"Processors": []object{ref(f.processor(d.ID))},
		"Links": object{
			"ComputerSystems": systems, "Chassis": []object{}, "Zones": []object{ref(f.resourceZone(d.Fabric))},
		},
	}
}

// statusOf is null where the service has nothing to say.
func (v view) statusOf(d simapi.Device) any {
	if v.policies.Identity == "nullStatus" || d.OpStatus == "" {
		return nil
	}
	health := map[byte]any{'0': "OK", '1': "Warning", '2': "Critical"}[d.OpStatus[0]]
	return object{"State": "Enabled", "Health": health}
}

func (f *Face) processorBody(v view, d simapi.Device, path string) object {
	var uuid, serial any = strings.TrimPrefix(d.FabricSerial, "GPU-"), d.Serial
	if d.FabricSerial != d.UUID { // what somebody makes of its identity is all that is told of it
		serial = ""
	}
	switch v.policies.Identity {
	case "prefixed":
		uuid = "GPU-" + strings.ToUpper(strings.TrimPrefix(d.FabricSerial, "GPU-"))
	case "inSerial":
		uuid, serial = nil, d.FabricSerial
	case "serialOnly":
		uuid = nil
	case "none":
		uuid, serial = nil, nil
	case "duplicate":
		uuid = "0d5c7e11-4444-4c00-b300-000000000001"
	}
	return object{
		"@odata.type": "#Processor.v1_18_0.Processor", "@odata.id": path, "Id": "0", "Name": "GPU", "ProcessorType": "GPU",
		"Manufacturer": "emu", "Model": d.Model, "SerialNumber": serial, "UUID": uuid, "Status": v.statusOf(d),
		"Location": object{"PartLocation": object{"ServiceLabel": "Slot " + d.ID, "LocationType": "Slot"}},
	}
}

func (f *Face) getBlock(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	if m, ok := v.machine(strings.TrimPrefix(r.PathValue("id"), hostBlock)); ok && strings.HasPrefix(r.PathValue("id"), hostBlock) {
		b := f.hostBlock(m)
		return f.show(b, tagOf(b, ""), readOnly)
	}
	d, ok := v.device(r.PathValue("id"))
	if !ok || v.policies.Variant == variantZones {
		return f.refusal(f.missing(r))
	}
	b := f.blockBody(v, d)
	return f.show(b, tagOf(b, ""), readOnly+", PATCH")
}

func (f *Face) getProcessor(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	d, ok := v.device(r.PathValue("id"))
	if !ok {
		return f.refusal(f.missing(r))
	}
	b := f.processorBody(v, d, f.processor(d.ID))
	return f.show(b, tagOf(b, ""), readOnly)
}

func (f *Face) listResourceZones(r *http.Request) answer {
	var members []string
	for _, one := range f.fabrics {
		members = append(members, f.resourceZone(one.ID))
	}
	return f.collection(r, "ZoneCollection", f.resourceZones(), members, nil)
}

func (f *Face) getResourceZone(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	id, err := strconv.Atoi(r.PathValue("id"))
	if err != nil {
		return f.refusal(f.missing(r))
	}
	var members []string
	for _, m := range v.Machines {
		if m.Fabric == id {
			members = append(members, f.block(hostBlock+m.Name))
		}
	}
	for _, d := range v.shown() {
		if d.Fabric == id {
			members = append(members, f.block(d.ID))
		}
	}
	body := object{
		"@odata.type": "#Zone.v1_6_0.Zone", "@odata.id": f.resourceZone(id), "Id": strconv.Itoa(id), "Name": "Zone " + strconv.Itoa(id),
		"ZoneType": "ZoneOfResourceBlocks", "Status": object{"State": "Enabled", "Health": "OK"}, "Links": object{"ResourceBlocks": refs(members)},
		"@Redfish.CollectionCapabilities": object{
			"@odata.type": "#CollectionCapabilities.v1_2_0.CollectionCapabilities",
			"Capabilities": []object{{
				"CapabilitiesObject": ref(f.capabilities()), "UseCase": "ComputerSystemComposition",
				"Links": object{"TargetCollection": ref(f.systems())},
			}},
		},
	}
	return f.show(body, tagOf(body, ""), readOnly)
}

func (f *Face) getCapabilities(*http.Request) answer {
	body := object{
		"@odata.type": "#ComputerSystem.v1_20_0.ComputerSystem", "@odata.id": f.capabilities(), "Id": "Capabilities", "Name": "Form",
		"Name@Redfish.RequiredOnCreate": true, "Name@Redfish.SetOnlyOnCreate": true, "Links@Redfish.RequiredOnCreate": true,
		"Links": object{
			"ResourceBlocks@Redfish.RequiredOnCreate": true, "ResourceBlocks@Redfish.UpdatableAfterCreate": f.offers("list"),
		},
	}
	return f.show(body, tagOf(body, ""), readOnly)
}

// offers tells whether a form of change is switched on.
func (f *Face) offers(form string) bool {
	p := f.policies().Forms
	return p == "all" && form != "manifest" || p == form
}

func (f *Face) listSystems(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	var members []string
	bodies := map[string]object{}
	for _, m := range v.Machines {
		members = append(members, f.system(m.Name))
		bodies[f.system(m.Name)] = f.systemBody(v, m)
	}
	return f.collection(r, "ComputerSystemCollection", f.systems(), members, func(path string) object { return bodies[path] })
}

// list is what a system's list, or a zone's, shows: the host first.
func (f *Face) list(v view, m simapi.Machine) []string {
	if v.policies.Variant == variantZones {
		out := []string{f.endpoint(m.Fabric, hostPort+m.Name)}
		for _, id := range v.lists[m.Name] {
			out = append(out, f.endpoint(m.Fabric, id))
		}
		return out
	}
	out := []string{f.block(hostBlock + m.Name)}
	for _, id := range v.lists[m.Name] {
		out = append(out, f.block(id))
	}
	return out
}

func (f *Face) systemBody(v view, m simapi.Machine) object {
	body := object{
		"@odata.type": "#ComputerSystem.v1_20_0.ComputerSystem", "@odata.id": f.system(m.Name), "Id": m.Name, "Name": m.Name,
		"SystemType": "Composed", "UUID": strings.ToUpper(m.UUID), "HostName": m.Name, "PowerState": map[bool]string{true: "On", false: "Off"}[m.Power],
		"Status": object{"State": "Enabled", "Health": "OK", "HealthRollup": "OK"}, "Links": object{}, "Actions": object{},
	}
	if v.policies.Variant == variantZones {
		body["SystemType"] = "Physical"
		return body
	}
	body["Links"] = object{"ResourceBlocks": refs(f.list(v, m))}
	if f.offers("actions") {
		acts := object{}
		for _, name := range []string{"AddResourceBlock", "RemoveResourceBlock"} {
			acts["#ComputerSystem."+name] = object{"target": f.action(f.system(m.Name), name)}
		}
		body["Actions"] = acts
	}
	return body
}

// underWay is what is going on with a machine, for its ETag.
func (f *Face) underWayLocked(machine string) string {
	var b strings.Builder
	for _, j := range f.coming {
		if j.machine == machine {
			b.WriteString(strconv.FormatBool(j.attach) + j.device)
		}
	}
	return b.String()
}

func (f *Face) systemTagLocked(v view, m simapi.Machine) string {
	return tagOf(f.systemBody(v, m), f.underWayLocked(m.Name))
}

func (f *Face) getSystem(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.lookLocked()
	m, ok := v.machine(r.PathValue("id"))
	if !ok {
		return f.refusal(f.missing(r))
	}
	allow := readOnly
	if f.offers("list") && v.policies.Variant != variantZones {
		allow += ", PATCH"
	}
	return f.show(f.systemBody(v, m), f.systemTagLocked(v, m), allow)
}

func (f *Face) getSessionService(*http.Request) answer {
	body := object{
		"@odata.type": "#SessionService.v1_1_9.SessionService", "@odata.id": f.sessionService(), "Id": "SessionService", "Name": "Sessions",
		"ServiceEnabled": true, "SessionTimeout": int(time.Duration(f.cfg.SessionTimeout).Seconds()), "Sessions": ref(f.names.sessions()),
	}
	return f.show(body, tagOf(body, ""), readOnly)
}

func (f *Face) listSessions(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	var members []string
	for _, s := range f.sessions {
		members = append(members, f.session(s.id))
	}
	slices.Sort(members)
	return f.collection(r, "SessionCollection", f.names.sessions(), members, nil)
}
