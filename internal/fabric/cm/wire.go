// SPDX-License-Identifier: Apache-2.0

package cm

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

// envelope is the frame of what the CM says of a machine.
type envelope struct {
	Data *struct {
		Cluster *struct {
			Machine *machine `json:"machine"`
		} `json:"cluster"`
	} `json:"data"`
}

type machine struct {
	UUID  fti.Text `json:"uuid"`
	Specs []spec   `json:"resspecs"`
}

// spec is what a machine is to have of one kind of device.
type spec struct {
	UUID     fti.Text `json:"spec_uuid"`
	Type     fti.Text `json:"type"`
	Selector *struct {
		Expression *struct {
			Conditions []fti.Condition `json:"conditions"`
		} `json:"expression"`
	} `json:"selector"`
	// Min and Max are null where the node group has no limit.
	Min fti.Text `json:"min_resspec_count"`
	Max fti.Text `json:"max_resspec_count"`
	// Count is what the machine is to have or what it has: managers differ while a change is under way.
	Count   fti.Text `json:"device_count"`
	Devices []row    `json:"devices"`
}

// row is one device of a spec.
type row struct {
	ID     fti.Text `json:"device_id"`
	Status fti.Text `json:"status"`
	Reason fti.Text `json:"status_reason"`
	// Detail may be missing in part or in all.
	Detail struct {
		UUID     fti.Text `json:"res_uuid"`
		OpStatus fti.Text `json:"res_op_status"`
		Specs    []struct {
			Model fti.Text `json:"model"`
		} `json:"resspecs"`
	} `json:"detail"`
}

// The words of a row's status that are known; any other means that something is under way.
const (
	addComplete  fti.Text = "ADD_COMPLETE"
	addFailed    fti.Text = "ADD_FAILED"
	removeFailed fti.Text = "REMOVE_FAILED"
)

// decodeMachine reads what the CM says of the machine. ok is false if it is about another one.
func decodeMachine(body []byte, id device.Machine) (m machine, ok bool, _ error) {
	var e envelope
	if err := json.Unmarshal(body, &e); err != nil {
		return machine{}, false, fmt.Errorf("decode answer: %w", err)
	}
	if e.Data == nil || e.Data.Cluster == nil || e.Data.Cluster.Machine == nil {
		return machine{}, false, errors.New("decode answer: no machine in it")
	}
	m = *e.Data.Cluster.Machine
	if m.UUID == "" {
		// Taken at its word if it says something; an empty frame is no word that nothing is attached.
		return m, len(m.Specs) > 0, nil
	}
	got, err := device.ParseMachine(string(m.UUID))
	return m, err == nil && got == id, nil
}

// spec finds the specification of a model, by the exact word.
func (m *machine) spec(model string) (*spec, bool) {
	for i := range m.Specs {
		if s := &m.Specs[i]; s.Type == fti.ResourceGPU && s.UUID != "" && s.model() == model {
			return s, true
		}
	}
	return nil, false
}

// models are the words that the machine has specifications for.
func (m *machine) models() []string {
	var all []string
	for i := range m.Specs {
		if s := &m.Specs[i]; s.Type == fti.ResourceGPU {
			all = append(all, strconv.Quote(s.model()))
		}
	}
	return all
}

func (s *spec) model() string {
	if s.Selector == nil || s.Selector.Expression == nil {
		return ""
	}
	return fti.Model(s.Selector.Expression.Conditions)
}

// mostDevices is more than any machine has.
const mostDevices = 1 << 16

// count is device_count, without which no total can be computed.
func (s *spec) count() (int, error) {
	n, err := strconv.Atoi(string(s.Count))
	if err != nil || n < 0 || n > mostDevices {
		return 0, fmt.Errorf("decode answer: device_count %q is not a count", s.Count)
	}
	return n, nil
}

// limit reads the limits of the machine's node group; null and what is no count are no limit.
func (s *spec) limit() fabric.Limit {
	l := fabric.Limit{Max: fabric.NoLimit}
	if n, err := strconv.Atoi(string(s.Min)); err == nil && n > 0 {
		l.Min = n
	}
	if n, err := strconv.Atoi(string(s.Max)); err == nil && n >= 0 {
		l.Max = n
	}
	return l
}

// known tells whether the row's status is one of those that are documented, which are all final.
func (r *row) known() bool {
	return r.Status == addComplete || r.Status == addFailed || r.Status == removeFailed
}

// removing tells that the word says so.
func (r *row) removing() bool { return !r.known() && strings.HasPrefix(string(r.Status), "REMOVE") }

// adding tells that the word says so.
func (r *row) adding() bool { return !r.known() && strings.HasPrefix(string(r.Status), "ADD") }

// said is the row's status for people.
func (r *row) said() string {
	text := string(r.Status)
	if r.Reason != "" {
		text += ": " + string(r.Reason)
	}
	return "the manager says " + fti.Tidy(text)
}

// named is a row with the name that it goes by.
type named struct {
	*row
	spec *spec
	// name is the device_id: it detaches. It is the res_uuid for a device that has no device_id, or one that
	// another has, too; and empty for one that has neither, or whose device_id may still come.
	name string
	// shared: several devices have this device_id.
	shared bool
}

// rows are the GPUs among the machine's devices, each once.
func (m *machine) rows() []named {
	type identity struct{ id, uuid fti.Text }
	seen := make(map[identity]bool)
	owners := make(map[fti.Text]int)
	var all []named
	for i := range m.Specs {
		s := &m.Specs[i]
		if s.Type != fti.ResourceGPU {
			continue
		}
		for j := range s.Devices {
			r := &s.Devices[j]
			key := identity{r.ID, r.Detail.UUID}
			if key != (identity{}) && seen[key] {
				continue
			}
			seen[key] = true
			owners[r.ID]++
			all = append(all, named{row: r, spec: s})
		}
	}
	taken := make(map[string]bool)
	for i := range all {
		d := &all[i]
		d.shared = d.ID != "" && owners[d.ID] > 1
		d.name = string(d.ID)
		if d.name == "" && d.known() || d.shared && taken[d.name] {
			d.name = string(d.Detail.UUID)
		}
		if taken[d.name] {
			d.name = ""
		}
		taken[d.name] = d.name != ""
	}
	return all
}

// gpus returns what is attached. unnamed counts those that nobody could name or detach.
func (m *machine) gpus(id device.Machine) (gpus []device.OnFabric, unnamed int) {
	for _, d := range m.rows() {
		switch {
		case d.name != "":
			gpus = append(gpus, d.onFabric(id))
		case d.Status == addComplete || d.Status == removeFailed:
			unnamed++
		}
	}
	return gpus, unnamed
}

func (d *named) onFabric(id device.Machine) device.OnFabric {
	out := device.OnFabric{ID: d.name, Machine: id, Model: d.spec.model()}
	if out.Model == "" && len(d.Detail.Specs) > 0 {
		out.Model = string(d.Detail.Specs[0].Model)
	}
	out.Health, out.HealthText = fti.Health(d.Detail.OpStatus)
	switch {
	case d.Status == addFailed:
		out.Health, out.HealthText = device.HealthCritical, d.said()
	case d.Status != addComplete:
		out.HealthText = d.said()
	}
	if d.shared {
		// Matching by it would take one for the other.
		out.HealthText = fmt.Sprintf("the manager gives %s to several devices", fti.Tidy(string(d.ID)))
		return out
	}
	out.UUID, out.Serial = device.ParseIdentity(string(d.ID))
	return out
}

// resize is the body of a change: one of the two.
type resize struct {
	Increase *increase `json:"increase_resource_count,omitempty"`
	Remove   *remove   `json:"remove_resources,omitempty"`
}

type increase struct {
	Spec  fti.Text `json:"spec_uuid"`
	Count int      `json:"device_count"`
}

type remove struct {
	Spec    fti.Text   `json:"spec_uuid"`
	Count   int        `json:"device_count"`
	Devices []fti.Text `json:"devices"`
}

// accepted tells whether the body of a 2xx can be the CM's: its form is not documented, and text is one, but
// a web page is a proxy's and JSON that ends early may be the half of a refusal.
func accepted(a fti.Reply) bool {
	body := strings.TrimSpace(string(a.Body))
	return a.Silent() || !strings.HasPrefix(body, "<") && !strings.HasPrefix(body, "{") && !strings.HasPrefix(body, "[")
}

// decodeGroups reads the list of node groups; it has no frame.
func decodeGroups(body []byte) ([]string, error) {
	var r struct {
		Groups []struct {
			UUID fti.Text `json:"uuid"`
		} `json:"nodegroups"`
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("decode answer: %w", err)
	}
	if r.Groups == nil {
		return nil, errors.New("decode answer: no nodegroups in it")
	}
	var all []string
	for _, g := range r.Groups {
		if g.UUID != "" {
			all = append(all, string(g.UUID))
		}
	}
	return all, nil
}

// decodeGroup reads the machines of a node group, as the manager writes them.
func decodeGroup(body []byte) ([]string, error) {
	var r struct {
		UUID     fti.Text   `json:"uuid"`
		Machines []fti.Text `json:"mach_ids"`
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("decode answer: %w", err)
	}
	if r.UUID == "" && r.Machines == nil {
		return nil, errors.New("decode answer: no node group in it")
	}
	all := make([]string, 0, len(r.Machines))
	for _, m := range r.Machines {
		all = append(all, string(m))
	}
	return all, nil
}
