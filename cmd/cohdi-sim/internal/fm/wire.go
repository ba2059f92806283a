// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
)

const gpuType = "gpu"

type envelope struct {
	Data struct {
		Machines []machine `json:"machines"`
	} `json:"data"`
}

// machine is what the manager tells about one; the answer to an attach has fewer fields.
type machine struct {
	FabricUUID string `json:"fabric_uuid"`
	FabricID   int    `json:"fabric_id"`
	UUID       string `json:"mach_uuid"`
	*machineDetail
	ID         int        `json:"mach_id"`
	Name       string     `json:"mach_name"`
	TenantUUID string     `json:"tenant_uuid"`
	Resources  []resource `json:"resources"`
}

type machineDetail struct {
	IDNonLiqid   *int      `json:"mach_id_nonliqid"`
	Status       int       `json:"mach_status"`
	OpStatus     string    `json:"mach_op_status"`
	StatusDetail string    `json:"mach_status_detail"`
	Owner        string    `json:"mach_owner"`
	BootSSD      *string   `json:"boot_ssd"`
	LANPorts     []lanPort `json:"lanports"`
}

type lanPort struct {
	UUID       string `json:"lanport_uuid"`
	SubnetUUID string `json:"subnet_uuid"`
	Index      int    `json:"lanport_idx"`
	MAC        string `json:"mac_address"`
	Class      string `json:"nw_class_cu"`
	IP         string `json:"ip_address"`
}

type resource struct {
	UUID          string        `json:"res_uuid"`
	Name          string        `json:"res_name"`
	Type          string        `json:"res_type"`
	Status        int           `json:"res_status"`
	OpStatus      string        `json:"res_op_status"`
	ConditionUUID string        `json:"condition_uuid,omitempty"`
	Serial        *string       `json:"res_serial_num,omitempty"`
	Spec          *resourceSpec `json:"res_spec,omitempty"`
}

type resourceSpec struct {
	Condition []condition `json:"condition"`
}

type condition struct {
	Column   string `json:"column"`
	Operator string `json:"operator"`
	Value    string `json:"value"`
}

type available struct {
	FabricID int `json:"fabric_id"`
	Reserved int `json:"reserved_res_num_per_fabric"`
}

type errorBody struct {
	Status int         `json:"status"`
	Detail errorDetail `json:"detail"`
}

type errorDetail struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Data    any    `json:"data,omitempty"`
}

// update is the body of both kinds of update.
type update struct {
	Tenants *struct {
		TenantUUID string `json:"tenant_uuid"`
		Machines   []struct {
			UUID      string `json:"mach_uuid"`
			Resources []struct {
				Specs []spec `json:"res_specs"`
			} `json:"resources"`
		} `json:"machines"`
	} `json:"tenants"`
}

type spec struct {
	Type string        `json:"res_type"`
	Spec *resourceSpec `json:"res_spec"`
	UUID string        `json:"res_uuid"`
	Num  int           `json:"res_num"`
}

// decodeUpdate reads the body of an update of the machine in the path and returns its specs, at least one.
func decodeUpdate(body []byte, machine, tenant string) ([]spec, error) {
	var u update
	if err := json.Unmarshal(body, &u); err != nil {
		return nil, fmt.Errorf("body is not an update: %w", err)
	}
	if u.Tenants == nil {
		return nil, errors.New("tenants is missing")
	}
	if u.Tenants.TenantUUID != tenant {
		return nil, errors.New("tenant_uuid of the body is not that of the query")
	}
	if len(u.Tenants.Machines) != 1 || u.Tenants.Machines[0].UUID != machine {
		return nil, errors.New("machines must be the one of the path")
	}
	var out []spec
	for _, r := range u.Tenants.Machines[0].Resources {
		out = append(out, r.Specs...)
	}
	if len(out) == 0 {
		return nil, errors.New("res_specs is empty")
	}
	for _, s := range out {
		if s.Type != gpuType {
			return nil, fmt.Errorf("res_type %q is not known here", s.Type)
		}
	}
	return out, nil
}

const maxPerSpec = 1024

// attachSpecs are the models and counts that an attach asks for.
func attachSpecs(specs []spec) ([]core.Spec, error) {
	var out []core.Spec
	for _, s := range specs {
		if s.Num < 1 || s.Num > maxPerSpec {
			return nil, fmt.Errorf("res_num %d is not in 1 to %d", s.Num, maxPerSpec)
		}
		if s.Spec == nil || len(s.Spec.Condition) != 1 {
			return nil, errors.New("res_spec must have one condition")
		}
		model, err := s.Spec.Condition[0].model()
		if err != nil {
			return nil, err
		}
		out = append(out, core.Spec{Model: model, Count: s.Num})
	}
	return out, nil
}

// detachUUIDs are the devices that a detach names.
func detachUUIDs(specs []spec) ([]string, error) {
	var out []string
	for _, s := range specs {
		if s.UUID == "" || s.Num != 1 {
			return nil, fmt.Errorf("res_uuid %q with res_num %d: want one device and 1", s.UUID, s.Num)
		}
		out = append(out, s.UUID)
	}
	return out, nil
}

func (c condition) model() (string, error) {
	if c.Column != "model" || c.Operator != "eq" || c.Value == "" {
		return "", fmt.Errorf("condition %s %s %q: want model eq and a value", c.Column, c.Operator, c.Value)
	}
	return c.Value, nil
}

func decodeCondition(s string) (string, error) {
	var c condition
	if err := json.Unmarshal([]byte(s), &c); err != nil {
		return "", fmt.Errorf("condition is not a JSON object: %w", err)
	}
	return c.model()
}

func gpuResource(d core.Device, withSerial bool) resource {
	serial := d.ReportedSerial
	if !withSerial {
		serial = ""
	}
	return resource{
		UUID: d.ResUUID, Name: gpuType + strconv.Itoa(d.Index), Type: gpuType, Status: 4, OpStatus: d.OpStatus,
		ConditionUUID: fmt.Sprintf("8a8a8a8a-5555-4d00-8400-%012d", d.Index), Serial: &serial,
		Spec: &resourceSpec{Condition: []condition{{Column: "model", Operator: "eq", Value: d.Model}}},
	}
}
