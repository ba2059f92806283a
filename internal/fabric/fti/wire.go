// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// ResourceGPU is the managers' word for the kind of device that we handle.
const ResourceGPU = "gpu"

// Text is a JSON string that may come as a number or null.
type Text = rest.Text

// Condition is how the managers say which devices they mean.
type Condition struct {
	Column   Text `json:"column"`
	Operator Text `json:"operator"`
	Value    Text `json:"value"`
}

// IsModel is the condition that a device is of a model.
func IsModel(model string) Condition {
	return Condition{Column: "model", Operator: "eq", Value: Text(model)}
}

// Model is the model that the conditions are about, "" if they are about none.
func Model(conditions []Condition) string {
	for _, c := range conditions {
		if c.Column == "model" && (c.Operator == "eq" || c.Operator == "") {
			return string(c.Value)
		}
	}
	return ""
}

// Health reads the first character of an operation status (res_op_status); the rest is not documented.
func Health(status Text) (device.Health, string) {
	said := fmt.Sprintf("the manager's status is %q", Tidy(string(status)))
	switch {
	case strings.HasPrefix(string(status), "0"):
		return device.HealthOK, ""
	case strings.HasPrefix(string(status), "1"):
		return device.HealthWarning, said
	case strings.HasPrefix(string(status), "2"):
		return device.HealthCritical, said
	}
	return device.HealthUnknown, said
}

// refusal is an error body: the managers' own form, or the plain one of id_manager and others.
type refusal struct {
	Detail *struct {
		Code    Text            `json:"code"`
		Message json.RawMessage `json:"message"` // a string or any JSON
	} `json:"detail"`
	Error       Text `json:"error"`
	Description Text `json:"error_description"`
	Message     Text `json:"message"`
}

// decodeRefusal finds the manager's code and words in whatever came back.
// Secrets are hidden wherever they were echoed.
func decodeRefusal(body []byte, secrets ...string) (code, message string) {
	var r refusal
	if json.Unmarshal(body, &r) != nil {
		return "", Tidy(string(body), secrets...)
	}
	switch {
	case r.Detail != nil:
		message = string(r.Detail.Message)
		var s string
		if json.Unmarshal(r.Detail.Message, &s) == nil {
			message = s
		}
		return Tidy(string(r.Detail.Code), secrets...), Tidy(message, secrets...)
	case r.Error != "":
		message = string(r.Description)
		if message == "" {
			message = string(r.Message)
		}
		return Tidy(string(r.Error), secrets...), Tidy(message, secrets...)
	}
	return "", Tidy(string(body), secrets...)
}

// LongestText is what of the manager's words is kept, in bytes.
const LongestText = rest.LongestText

// Tidy makes foreign text fit for one line of a condition. Secrets are hidden before anything is cut.
func Tidy(s string, secrets ...string) string { return rest.Tidy(s, secrets...) }
