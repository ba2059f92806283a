// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"encoding/json"
	"errors"
	"fmt"
)

const gpuType = "gpu"

type envelope struct {
	Data struct {
		TenantUUID string `json:"tenant_uuid"`
		Cluster    struct {
			UUID    string  `json:"cluster_uuid"`
			Machine machine `json:"machine"`
		} `json:"cluster"`
	} `json:"data"`
}

type machine struct {
	UUID         string `json:"uuid"`
	Name         string `json:"name"`
	Status       string `json:"status"`
	StatusReason string `json:"status_reason"`
	Specs        []spec `json:"resspecs"`
}

type spec struct {
	UUID     string   `json:"spec_uuid"`
	Type     string   `json:"type"`
	Selector selector `json:"selector"`
	Min      *int     `json:"min_resspec_count"`
	Max      *int     `json:"max_resspec_count"`
	Count    int      `json:"device_count"`
	Devices  []row    `json:"devices"`
}

type selector struct {
	Version    string `json:"version"`
	Expression struct {
		Conditions []condition `json:"conditions"`
	} `json:"expression"`
}

type condition struct {
	Column   string `json:"column"`
	Operator string `json:"operator"`
	Value    string `json:"value"`
}

func isModel(model string) selector {
	s := selector{Version: "type_conditions"}
	s.Expression.Conditions = []condition{{Column: "model", Operator: "eq", Value: model}}
	return s
}

type row struct {
	ID     string `json:"device_id"`
	Status string `json:"status"`
	Reason string `json:"status_reason"`
	Detail any    `json:"detail"`
}

type detail struct {
	FabricUUID string    `json:"fabric_uuid"`
	FabricID   int       `json:"fabric_id"`
	UUID       string    `json:"res_uuid"`
	GID        string    `json:"fabr_gid"`
	Type       string    `json:"res_type"`
	Name       string    `json:"res_name"`
	Status     int       `json:"res_status"`
	OpStatus   string    `json:"res_op_status"`
	Specs      []resspec `json:"resspecs"`
	TenantUUID string    `json:"tenant_uuid"`
	Machine    string    `json:"mach_uuid"`
}

type resspec struct {
	UUID      string `json:"resspec_uuid"`
	Product   string `json:"productname"`
	Model     string `json:"model"`
	Vendor    string `json:"vendor"`
	Removable bool   `json:"removable"`
}

type group struct {
	UUID     string   `json:"uuid"`
	Name     string   `json:"name"`
	Machines []string `json:"mach_ids,omitempty"`
}

type groups struct {
	Groups []group `json:"nodegroups"`
}

type errorBody struct {
	Status int         `json:"status"`
	Detail errorDetail `json:"detail"`
}

type errorDetail struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// change is one resize: Devices are those to remove, nil for an increase.
type change struct {
	Spec    string   `json:"spec_uuid"`
	Count   *int     `json:"device_count"`
	Devices []string `json:"devices"`
}

// decodeResize reads the body of a resize, which has one of two forms.
func decodeResize(body []byte) (c change, isRemoval bool, _ error) {
	var r struct {
		Increase *change `json:"increase_resource_count"`
		Remove   *change `json:"remove_resources"`
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return change{}, false, fmt.Errorf("body is not a resize: %w", err)
	}
	if (r.Increase == nil) == (r.Remove == nil) {
		return change{}, false, errors.New("want one of increase_resource_count and remove_resources")
	}
	c = change{}
	if r.Increase != nil {
		c = *r.Increase
		c.Devices = nil
	} else {
		c, isRemoval = *r.Remove, true
		if len(c.Devices) == 0 {
			return change{}, false, errors.New("devices is empty")
		}
	}
	if c.Count == nil || *c.Count < 0 {
		return change{}, false, errors.New("device_count is missing or negative")
	}
	return c, isRemoval, nil
}
