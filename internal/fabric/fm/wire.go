// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fti"
)

// envelope is the frame of most answers.
type envelope struct {
	Data *struct {
		Machines []machine `json:"machines"`
	} `json:"data"`
}

type machine struct {
	UUID         fti.Text   `json:"mach_uuid"`
	Name         fti.Text   `json:"mach_name"`
	FabricID     fti.Text   `json:"fabric_id"` // an int, or null where the machine has no fabric
	StatusDetail fti.Text   `json:"mach_status_detail"`
	Resources    []resource `json:"resources"`
}

type resource struct {
	UUID     fti.Text      `json:"res_uuid"`
	Type     fti.Text      `json:"res_type"`
	OpStatus fti.Text      `json:"res_op_status"`
	Serial   fti.Text      `json:"res_serial_num"`
	Spec     *resourceSpec `json:"res_spec"`
}

type resourceSpec struct {
	Condition []fti.Condition `json:"condition"`
}

func encodeCondition(model string) (string, error) {
	b, err := json.Marshal(fti.IsModel(model))
	return string(b), err
}

// decodeMachines reads an envelope. An answer without the frame is not the manager's.
func decodeMachines(body []byte) ([]machine, error) {
	var e envelope
	if err := json.Unmarshal(body, &e); err != nil {
		return nil, fmt.Errorf("decode answer: %w", err)
	}
	if e.Data == nil {
		return nil, errors.New("decode answer: no data in it")
	}
	return e.Data.Machines, nil
}

// pick finds the one machine that was asked for. An answer that names no machine at all in its one element is
// taken at its word if it says something of it: an empty element is no word that nothing is attached.
func pick(machines []machine, id device.Machine) (machine, bool) {
	for _, m := range machines {
		if got, err := device.ParseMachine(string(m.UUID)); err == nil && got == id {
			return m, true
		}
	}
	if len(machines) == 1 && machines[0].UUID == "" && len(machines[0].Resources) > 0 {
		return machines[0], true
	}
	return machine{}, false
}

// describe turns a machine of the wire into the contract's.
func (m machine) describe() (fabric.Machine, error) {
	id, err := device.ParseMachine(string(m.UUID))
	if err != nil {
		return fabric.Machine{}, err
	}
	power := fabric.PowerUnknown
	for word := range strings.FieldsSeq(string(m.StatusDetail)) {
		switch word {
		case "PON":
			power = fabric.PowerOn
		case "POFF":
			power = fabric.PowerOff
		}
	}
	return fabric.Machine{ID: id, Name: string(m.Name), Fabric: string(m.FabricID), Power: power}, nil
}

// gpus returns the GPUs among the machine's resources, each once. skipped counts those without a fabric
// identity, which nobody could ever detach.
func (m machine) gpus(id device.Machine) (gpus []device.OnFabric, skipped int) {
	byUUID := make(map[device.GPUUUID]int)
	seen := make(map[string]bool)
	for _, r := range m.Resources {
		if r.Type != fti.ResourceGPU || seen[string(r.UUID)] {
			continue
		}
		if r.UUID == "" {
			skipped++
			continue
		}
		seen[string(r.UUID)] = true
		d := device.OnFabric{ID: string(r.UUID), Machine: id, Model: r.model()}
		d.Health, d.HealthText = fti.Health(r.OpStatus)
		d.UUID, d.Serial = device.ParseIdentity(string(r.Serial))
		if d.UUID != "" {
			byUUID[d.UUID]++
		}
		gpus = append(gpus, d)
	}
	for i := range gpus {
		// Two devices with one identity: matching by it would take one for the other.
		if byUUID[gpus[i].UUID] > 1 {
			gpus[i].HealthText = fmt.Sprintf("the manager gives %s to several devices", gpus[i].UUID)
			gpus[i].UUID = ""
		}
	}
	return gpus, skipped
}

func (r resource) model() string {
	if r.Spec == nil {
		return ""
	}
	return fti.Model(r.Spec.Condition)
}

// available is the answer to "what is free"; it has no frame.
type available struct {
	FabricID fti.Text `json:"fabric_id"`
	Count    fti.Text `json:"reserved_res_num_per_fabric"`
}

func decodeAvailable(body []byte) (fabricID string, count int, err error) {
	var a available
	if err = json.Unmarshal(body, &a); err != nil {
		return "", 0, fmt.Errorf("decode answer: %w", err)
	}
	count, err = strconv.Atoi(string(a.Count))
	if err != nil || count < 0 {
		return "", 0, fmt.Errorf("decode answer: reserved_res_num_per_fabric %q is not a count", a.Count)
	}
	return string(a.FabricID), count, nil
}

// update is the body of an attach (with a spec) or a detach (with a device).
type update struct {
	Tenants updateTenant `json:"tenants"`
}

type updateTenant struct {
	UUID     string          `json:"tenant_uuid"`
	Machines []updateMachine `json:"machines"`
}

type updateMachine struct {
	UUID      string           `json:"mach_uuid"`
	Resources []updateResource `json:"resources"`
}

type updateResource struct {
	Specs []updateSpec `json:"res_specs"`
}

type updateSpec struct {
	Type   string        `json:"res_type"`
	Device string        `json:"res_uuid,omitempty"`
	Spec   *resourceSpec `json:"res_spec,omitempty"`
	Count  int           `json:"res_num"`
}

func encodeUpdate(tenant, machine string, spec updateSpec) ([]byte, error) {
	return json.Marshal(update{Tenants: updateTenant{
		UUID: tenant,
		Machines: []updateMachine{{
			UUID: machine, Resources: []updateResource{{Specs: []updateSpec{spec}}},
		}},
	}})
}
