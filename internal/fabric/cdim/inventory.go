// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Types of devices that we handle, in the manager's spelling.
const (
	typeCPU         = "CPU"
	typeGPU         = "GPU"
	typeSource      = "sourceFabricAdapter"      // on the host's side
	typeDestination = "destinationFabricAdapter" // on the IO side
)

// Working states of the adapters.
const (
	statusSource      = "eesv"
	statusDestination = "eeio"
)

// resource is a device as the inventory tells of it in detail.
type resource struct {
	Device     hardware `json:"device"`
	Annotation *struct {
		Available rest.Text `json:"available"`
	} `json:"annotation"`
	Groups   []rest.Text  `json:"resourceGroupIDs"`
	NodeIDs  *[]rest.Text `json:"nodeIDs"`
	Detected rest.Text    `json:"detected"`
}

type hardware struct {
	ID         rest.Text       `json:"deviceID"`
	Type       rest.Text       `json:"type"`
	Model      rest.Text       `json:"model"`
	Serial     rest.Text       `json:"serialNumber"`
	Status     *status         `json:"status"`
	Power      rest.Text       `json:"powerState"`
	Switch     rest.Text       `json:"deviceSwitchInfo"`
	Links      *[]link         `json:"links"`
	Attribute  json.RawMessage `json:"attribute"` // anything
	Constraint *struct {
		NonRemovable []link `json:"nonRemovableDevices"`
	} `json:"constraints"`
}

type status struct {
	State  rest.Text `json:"state"`
	Health rest.Text `json:"health"`
}

type link struct {
	ID rest.Text `json:"deviceID"`
}

// key makes identities comparable: they are UUIDs, written in either case.
func key(id rest.Text) string { return strings.ToLower(string(id)) }

func (r *resource) is(kind string) bool { return strings.EqualFold(string(r.Device.Type), kind) }

// detected is true unless it is said that it is not.
func (r *resource) detected() bool { return !strings.EqualFold(string(r.Detected), "false") }

// available is false where an operator has withdrawn the device.
func (r *resource) available() bool {
	return r.Annotation == nil || !strings.EqualFold(string(r.Annotation.Available), "false")
}

// scope is the part of the installation that is ours; all of it if empty.
type scope struct {
	groups []string
	cxl    string // the switch
}

// excludes says why a device is not ours, "" if it is.
func (s scope) excludes(r *resource) string {
	if s.cxl != "" && string(r.Device.Switch) != s.cxl {
		return "it is behind switch " + orNothing(string(r.Device.Switch))
	}
	if len(s.groups) > 0 && !slices.ContainsFunc(r.Groups, func(g rest.Text) bool { return slices.Contains(s.groups, string(g)) }) {
		return "it is in none of our resource groups"
	}
	return ""
}

func (r *resource) power() fabric.Power {
	switch {
	case strings.EqualFold(string(r.Device.Power), "On"):
		return fabric.PowerOn
	case strings.EqualFold(string(r.Device.Power), "Off"):
		return fabric.PowerOff
	}
	return fabric.PowerUnknown
}

// adapterStatus is in the part of the attributes that each maker fills as he likes.
func (r *resource) adapterStatus() string {
	var a struct {
		Specific struct {
			Status rest.Text `json:"status"`
		} `json:"deviceSpecificInformation"`
	}
	if json.Unmarshal(r.Device.Attribute, &a) != nil {
		return ""
	}
	return string(a.Specific.Status)
}

// health joins state, health and detection; only what is said to be critical is.
func (r *resource) health() (device.Health, string) {
	if !r.detected() {
		return device.HealthUnknown, "the manager does not detect the device"
	}
	if r.Device.Status == nil {
		return device.HealthUnknown, "the manager gives no status"
	}
	state, word := string(r.Device.Status.State), string(r.Device.Status.Health)
	said := fmt.Sprintf("the manager's status is %s, %s", orNothing(state), orNothing(word))
	switch {
	case strings.EqualFold(word, "Critical"):
		return device.HealthCritical, said
	case strings.EqualFold(word, "Warning"), strings.EqualFold(word, "OK") && state != "" && !strings.EqualFold(state, "Enabled"):
		return device.HealthWarning, said
	case strings.EqualFold(word, "OK"):
		return device.HealthOK, ""
	}
	return device.HealthUnknown, said
}

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return rest.Tidy(s)
}

// inventory is what there is and how it is linked, at one moment.
type inventory struct {
	byKey    map[string]*resource
	gpus     []*resource // as listed
	machines map[device.Machine]*resource
	// joined are the devices at the other ends of each device's links, whichever end told of them.
	joined map[string]map[string]bool
	// hosts are the CPUs that each GPU belongs to, and on the GPUs of each CPU.
	hosts map[*resource][]string
	on    map[string][]*resource
	// fixed are devices that are part of a machine.
	fixed map[string]bool
	// strays are GPUs with links that lead to no CPU; unnamed are CPUs whose id cannot name a machine.
	strays, unnamed []string
}

func decodeInventory(body []byte) (*inventory, error) {
	var list struct {
		Resources *[]resource `json:"resources"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("decode inventory: %w", err)
	}
	if list.Resources == nil {
		return nil, errors.New("decode inventory: no resources in it")
	}
	v := &inventory{
		byKey: make(map[string]*resource), machines: make(map[device.Machine]*resource),
		joined: make(map[string]map[string]bool), fixed: make(map[string]bool),
		hosts: make(map[*resource][]string), on: make(map[string][]*resource),
	}
	for i := range *list.Resources {
		if err := v.add(&(*list.Resources)[i]); err != nil {
			return nil, err
		}
	}
	for _, g := range v.gpus {
		v.hosts[g] = v.find(g)
		for _, cpu := range v.hosts[g] {
			v.on[cpu] = append(v.on[cpu], g)
		}
		if v.linked(g) && len(v.hosts[g]) == 0 {
			v.strays = append(v.strays, rest.Tidy(string(g.Device.ID)))
		}
	}
	return v, nil
}

func (v *inventory) add(r *resource) error {
	k := key(r.Device.ID)
	if k == "" {
		return nil // nobody could ever name it
	}
	if r.Device.Links != nil {
		for _, l := range *r.Device.Links {
			v.join(k, key(l.ID))
		}
	}
	if r.Device.Constraint != nil {
		for _, l := range r.Device.Constraint.NonRemovable {
			v.fixed[key(l.ID)] = true
		}
	}
	if _, twice := v.byKey[k]; twice {
		return nil // its links count all the same
	}
	v.byKey[k] = r
	switch {
	case r.is(typeGPU):
		if r.Device.Links == nil && r.NodeIDs == nil {
			// A short form. Taken at its word, nothing would be attached anywhere.
			return fmt.Errorf("decode inventory: it does not say what device %s is linked to", rest.Tidy(string(r.Device.ID)))
		}
		v.gpus = append(v.gpus, r)
	case r.is(typeCPU):
		if id, err := device.ParseMachine(string(r.Device.ID)); err == nil {
			v.machines[id] = r
		} else {
			v.unnamed = append(v.unnamed, rest.Tidy(string(r.Device.ID)))
		}
	}
	return nil
}

func (v *inventory) join(a, b string) {
	if b == "" || a == b {
		return
	}
	for _, ends := range [][2]string{{a, b}, {b, a}} {
		if v.joined[ends[0]] == nil {
			v.joined[ends[0]] = make(map[string]bool)
		}
		v.joined[ends[0]][ends[1]] = true
	}
}

// linked: there is a link of whatever kind. The kinds differ between dialects and versions.
func (v *inventory) linked(r *resource) bool {
	return len(v.joined[key(r.Device.ID)]) > 0 || r.NodeIDs != nil && len(*r.NodeIDs) > 0
}

// neighbours are the devices of a type that a device is joined to, in the order of their ids.
func (v *inventory) neighbours(k, kind string) []string {
	var out []string
	for n := range v.joined[k] {
		if r := v.byKey[n]; r != nil && r.is(kind) {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return out
}

// find returns the CPUs that a device belongs to: as the manager says, else those that its links lead to,
// at once or by way of the two adapters.
func (v *inventory) find(r *resource) []string {
	found := make(map[string]bool)
	if r.NodeIDs != nil {
		for _, id := range *r.NodeIDs {
			found[key(id)] = true
		}
	}
	if len(found) == 0 {
		k := key(r.Device.ID)
		for _, cpu := range v.neighbours(k, typeCPU) {
			found[cpu] = true
		}
		for _, adapter := range v.neighbours(k, typeDestination) {
			for _, source := range v.neighbours(adapter, typeSource) {
				for _, cpu := range v.neighbours(source, typeCPU) {
					found[cpu] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// machine finds the CPU.
func (v *inventory) machine(what string, m device.Machine) (*resource, *device.Fault) {
	if cpu, ok := v.machines[m]; ok {
		return cpu, nil
	}
	return nil, &device.Fault{Class: device.FaultNotFound, Op: what, Message: fmt.Sprintf("none of the inventory's %d CPUs has this id", len(v.machines))}
}

// attached are the GPUs on a machine that can be taken away again.
func (v *inventory) attached(what string, m device.Machine) ([]device.OnFabric, *device.Fault) {
	cpu, fault := v.machine(what, m)
	if fault != nil {
		return nil, fault
	}
	if !cpu.detected() {
		return nil, &device.Fault{Class: device.FaultUnknown, Op: what, Message: "the manager does not detect the machine; what it last saw there may be over"}
	}
	gpus := []device.OnFabric{}
	for _, g := range v.on[key(cpu.Device.ID)] {
		hosts := v.hosts[g]
		if v.fixed[key(g.Device.ID)] {
			continue
		}
		if len(hosts) > 1 {
			return nil, &device.Fault{
				Class: device.FaultConflict, Op: what,
				Message: fmt.Sprintf("the inventory shows device %s on several machines: %s", rest.Tidy(string(g.Device.ID)), rest.Tidy(strings.Join(hosts, ", "))),
			}
		}
		d := g.describe()
		d.Machine = m
		gpus = append(gpus, d)
	}
	return gpus, nil
}

func (r *resource) describe() device.OnFabric {
	d := device.OnFabric{ID: string(r.Device.ID), Model: string(r.Device.Model)}
	_, d.Serial = device.ParseIdentity(string(r.Device.Serial)) // a UUID here may be anything's
	d.Health, d.HealthText = r.health()
	return d
}

// knows refuses a model that no GPU has, and names those that there are: a misspelt model is never free.
func (v *inventory) knows(what, model string) *device.Fault {
	models := make(map[string]bool)
	for _, g := range v.gpus {
		models[string(g.Device.Model)] = true
	}
	if model != "" && models[model] {
		return nil
	}
	return &device.Fault{
		Class: device.FaultUnsupported, Op: what,
		Message: rest.Tidy(fmt.Sprintf("no GPU in the inventory is a %q; there are %q", model, slices.Sorted(maps.Keys(models)))),
	}
}

// taken says why a device cannot be attached, "" if it can.
func (v *inventory) taken(r *resource, ours scope) string {
	health, text := r.health()
	switch hosts := v.hosts[r]; {
	case v.fixed[key(r.Device.ID)]:
		return "it is part of a machine"
	case len(hosts) > 0:
		return "it is on machine " + rest.Tidy(strings.Join(hosts, ", "))
	case v.linked(r):
		return "it is linked to something that leads to no machine"
	case !r.available():
		return "an operator has withdrawn it"
	case ours.excludes(r) != "":
		return ours.excludes(r)
	case health != device.HealthOK:
		return text
	}
	return ""
}

func (v *inventory) free(model string, ours scope) []device.OnFabric {
	gpus := []device.OnFabric{}
	for _, g := range v.gpus {
		if string(g.Device.Model) == model && v.taken(g, ours) == "" {
			gpus = append(gpus, g.describe())
		}
	}
	return gpus
}

// wanted is the device that an attach names. One that is on the machine already is not refused: the inventory
// may be old, and connecting once more does no harm.
func (v *inventory) wanted(what string, in fabric.Intent, ours scope) (*resource, *device.Fault) {
	if in.Device == "" {
		if fault := v.knows(what, in.Model); fault != nil {
			return nil, fault
		}
		if len(v.free(in.Model, ours)) == 0 {
			return nil, &device.Fault{Class: device.FaultNoCapacity, Op: what, Message: "none is free"}
		}
		return nil, &device.Fault{Class: device.FaultRejected, Op: what, Message: "no device is given, and this manager does not choose"}
	}
	g, fault := v.gpu(what, in.Device)
	if fault != nil {
		fault.Class = device.FaultRejected // NotFound would be the machine
		return nil, fault
	}
	if in.Model != "" && in.Model != string(g.Device.Model) {
		return nil, &device.Fault{
			Class: device.FaultRejected, Op: what, Message: fmt.Sprintf("it is a %q and not a %q", rest.Tidy(string(g.Device.Model)), in.Model),
		}
	}
	if hosts := v.hosts[g]; len(hosts) == 1 && hosts[0] == string(in.Machine) && !v.fixed[key(g.Device.ID)] {
		return g, nil
	}
	if why := v.taken(g, ours); why != "" {
		return nil, &device.Fault{Class: device.FaultRejected, Op: what, Message: "the device is not free: " + why}
	}
	return g, nil
}

func (v *inventory) gpu(what, id string) (*resource, *device.Fault) {
	if g := v.byKey[key(rest.Text(id))]; g != nil && g.is(typeGPU) {
		return g, nil
	}
	return nil, &device.Fault{Class: device.FaultNotFound, Op: what, Message: "the inventory has no such GPU"}
}

// here is the device that a detach names, if it is on the machine.
func (v *inventory) here(what string, in fabric.Intent) (*resource, *device.Fault) {
	g, fault := v.gpu(what, in.Device)
	if fault != nil {
		return nil, fault
	}
	hosts := v.hosts[g]
	switch {
	case !slices.Contains(hosts, string(in.Machine)):
		return nil, &device.Fault{
			Class: device.FaultNotFound, Op: what, Message: "the device is not there; it is on " + orNothing(strings.Join(hosts, ", ")),
		}
	case v.fixed[key(g.Device.ID)]:
		return nil, &device.Fault{Class: device.FaultRejected, Op: what, Message: "the device is part of the machine"}
	}
	return g, nil
}

// adapterBetween is the IO side's adapter by which the GPU is, or can be, on the machine; nil if there is none.
func (v *inventory) adapterBetween(cpu, gpu *resource) *resource {
	var usable []string
	for _, s := range v.neighbours(key(cpu.Device.ID), typeSource) {
		if !v.works(s, statusSource) {
			continue
		}
		for _, d := range v.neighbours(s, typeDestination) {
			if v.works(d, statusDestination) {
				usable = append(usable, d)
			}
		}
	}
	for _, d := range v.neighbours(key(gpu.Device.ID), typeDestination) {
		if slices.Contains(usable, d) {
			return v.byKey[d]
		}
	}
	if len(usable) == 0 {
		return nil
	}
	return v.byKey[usable[0]]
}

func (v *inventory) works(k, status string) bool {
	r := v.byKey[k]
	return r.detected() && strings.EqualFold(r.adapterStatus(), status)
}
