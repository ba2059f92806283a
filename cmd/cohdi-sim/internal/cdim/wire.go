// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
)

// Error codes of layout-apply.
const (
	codeRequest   = "E40001"
	codeTimeout   = "E40003"
	codeConnect   = "E40007"
	codeRunning   = "E40010"
	codeNoJob     = "E40020"
	codeEnded     = "E40022"
	codeDelete    = "E40024"
	codeSuspended = "E40027"
	codeWorker    = "E40028"
)

type resource struct {
	Device     deviceBody `json:"device"`
	Groups     []string   `json:"resourceGroupIDs"`
	Annotation annotation `json:"annotation"`
	Detected   *bool      `json:"detected,omitempty"`
	NodeIDs    *[]string  `json:"nodeIDs,omitempty"`
}

type annotation struct {
	Available bool `json:"available"`
}

// deviceBody has only the first three fields in a summary.
type deviceBody struct {
	ID     string     `json:"deviceID"`
	Type   string     `json:"type"`
	Status statusBody `json:"status"`
	*detail
}

type detail struct {
	Manufacturer string         `json:"manufacturer,omitempty"`
	Model        string         `json:"model,omitempty"`
	Serial       string         `json:"serialNumber,omitempty"`
	Attribute    map[string]any `json:"attribute"`
	Power        string         `json:"powerState,omitempty"`
	PowerControl *bool          `json:"powerCapability,omitempty"`
	Switch       string         `json:"deviceSwitchInfo,omitempty"`
	Links        []linkBody     `json:"links"`
}

type statusBody struct {
	State  string `json:"state"`
	Health string `json:"health"`
}

type linkBody struct {
	Type string `json:"type"`
	ID   string `json:"deviceID"`
}

type nodeBody struct {
	ID        string     `json:"id"`
	Resources []resource `json:"resources"`
}

// procedure is one of a job, in either dialect.
type procedure struct {
	ID           int    `json:"operationID"`
	Operation    string `json:"operation"`
	TargetCPU    string `json:"targetCPUID,omitempty"`
	TargetDevice string `json:"targetDeviceID,omitempty"`
	Source       string `json:"sourceDeviceID,omitempty"`
	Destination  string `json:"destinationDeviceID,omitempty"`
	Dependencies []int  `json:"dependencies"`
}

// ends are the two sides of a link: the host's (CPU or adapter) and the device.
func (p procedure) ends() (host, device string) {
	if p.Source != "" {
		return p.Source, p.Destination
	}
	return p.TargetCPU, p.TargetDevice
}

// decodeProcedures applies the schema of a dialect, and, where strict, what the real one leaves to its caller.
func decodeProcedures(body []byte, dialect string, strict bool) ([]procedure, error) {
	var list struct {
		Procedures *[]map[string]json.RawMessage `json:"procedures"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("body is not JSON: %w", err)
	}
	if list.Procedures == nil {
		return nil, errors.New("'procedures' is a required property")
	}
	out := make([]procedure, 0, len(*list.Procedures))
	for _, raw := range *list.Procedures {
		p, err := decodeProcedure(raw, dialect)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	if strict {
		return out, checkOrder(out)
	}
	return out, nil
}

func decodeProcedure(raw map[string]json.RawMessage, dialect string) (procedure, error) {
	var p procedure
	text, err := json.Marshal(raw)
	if err != nil {
		return p, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return p, err
	}
	required := []string{"operationID", "operation", "dependencies"}
	switch p.Operation {
	case opConnect, opDisconnect:
		if dialect == dialectProduct {
			required = append(required, "sourceDeviceID", "destinationDeviceID")
		} else {
			required = append(required, "targetCPUID", "targetDeviceID")
		}
	case opBoot, opShutdown:
		required = append(required, "targetDeviceID")
	default:
		return p, fmt.Errorf("'%s' is not one of ['boot', 'shutdown', 'connect', 'disconnect']", p.Operation)
	}
	for _, name := range required {
		if _, ok := raw[name]; !ok {
			return p, fmt.Errorf("'%s' is a required property", name)
		}
	}
	if p.Dependencies == nil {
		return p, errors.New("'dependencies' is not of type 'array'")
	}
	return p, nil
}

// checkOrder refuses what could never run.
func checkOrder(list []procedure) error {
	byID := map[int]procedure{}
	for _, p := range list {
		if _, twice := byID[p.ID]; twice {
			return fmt.Errorf("operationID %d is given twice", p.ID)
		}
		byID[p.ID] = p
	}
	state := map[int]int{} // 1 is being visited, 2 is done
	var visit func(id int) error
	visit = func(id int) error {
		p, ok := byID[id]
		if !ok {
			return fmt.Errorf("dependency %d is no operation", id)
		}
		if state[id] == 1 {
			return fmt.Errorf("operation %d waits for itself", id)
		}
		if state[id] == 2 {
			return nil
		}
		state[id] = 1
		for _, next := range p.Dependencies {
			if err := visit(next); err != nil {
				return err
			}
		}
		state[id] = 2
		return nil
	}
	for _, p := range list {
		if err := visit(p.ID); err != nil {
			return err
		}
	}
	return nil
}

// result is what became of a procedure.
type result struct {
	ID        int             `json:"operationID"`
	Status    string          `json:"status"`
	URI       string          `json:"uri,omitempty"`
	Method    string          `json:"method,omitempty"`
	Query     *string         `json:"queryParameter,omitempty"`
	Request   map[string]any  `json:"requestBody,omitempty"`
	Code      int             `json:"statusCode,omitempty"`
	StartedAt string          `json:"startedAt,omitempty"`
	EndedAt   string          `json:"endedAt,omitempty"`
	Response  json.RawMessage `json:"responseBody,omitempty"`
}

type codeBody struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	reply(w, status, codeBody{code, message})
}

// refuseRead is the configuration-manager's form.
func refuseRead(w http.ResponseWriter, status int, code, message, details string) {
	reply(w, status, struct {
		codeBody
		Details string `json:"details"`
	}{codeBody{code, message}, details})
}

func reply(w http.ResponseWriter, status int, body any) {
	data, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(data) //nolint:errcheck // the client has gone
}

// visible cuts a job down to the fields that a list shows.
func visible(j jobBody, fields []string) jobBody {
	if !slices.Contains(fields, "procedures") {
		j.Procedures = nil
	}
	if !slices.Contains(fields, "applyResult") {
		j.Results = nil
	}
	if !slices.Contains(fields, "rollbackProcedures") {
		j.RollbackProcedures = nil
	}
	if !slices.Contains(fields, "rollbackResult") {
		j.RollbackResults = nil
	}
	if !slices.Contains(fields, "resumeProcedures") {
		j.ResumeProcedures = nil
	}
	if !slices.Contains(fields, "resumeResult") {
		j.ResumeResults = nil
	}
	return j
}
