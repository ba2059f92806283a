// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const cpuSpec = "ee00ee00-8888-4100-f700-0000000000c0"

func specUUID(index int) string { return fmt.Sprintf("ee00ee00-8888-4100-f700-%012d", index+1) }

// modelOf finds the model of a specification that machines of the fabric have.
func (f *Face) modelOf(fabric int, spec string) (string, bool) {
	for i, model := range f.models {
		if specUUID(i) == spec {
			return model, f.hasModel(fabric, model)
		}
	}
	return "", false
}

func (f *Face) hasModel(fabric int, model string) bool {
	for i := range f.cfg.Devices {
		if d := &f.cfg.Devices[i]; d.Fabric == fabric && d.Model == model {
			return true
		}
	}
	return false
}

func (f *Face) machine(v *core.MachineView) machine {
	m := machine{UUID: v.UUID, Name: v.Name, Status: "ADD_COMPLETE", Specs: []spec{{
		UUID: cpuSpec, Type: "cpu", Selector: isModel("XEON-32C"), Count: 1, Devices: []row{},
	}}}
	for i, model := range f.models {
		if !f.hasModel(v.Fabric, model) {
			continue
		}
		limits, s := f.cfg.CM.Limits[model], f.stand(v, model)
		m.Specs = append(m.Specs, spec{
			UUID: specUUID(i), Type: gpuType, Selector: isModel(model), Min: limits.Min, Max: limits.Max,
			Count: s.shown(f.core.Policies().CM.Count), Devices: f.rows(v, s),
		})
	}
	return m
}

// stand is what a machine has of one model.
type stand struct {
	model                            string
	attached, leaving, coming, unmet []core.Device
	short                            int
}

func (f *Face) stand(v *core.MachineView, model string) stand {
	s := stand{model: model, short: len(f.shortfalls[place{v.Name, model}])}
	for _, d := range v.Listed {
		switch {
		case d.Model != model:
		case d.Phase == simapi.PhaseDetaching:
			s.leaving = append(s.leaving, d)
		default:
			s.attached = append(s.attached, d)
		}
	}
	for _, d := range v.Coming {
		switch {
		case d.Model != model:
		case d.Failure != "":
			s.unmet = append(s.unmet, d)
		default:
			s.coming = append(s.coming, d)
		}
	}
	return s
}

// shown is device_count: what the machine is to have, or what it has.
func (s *stand) shown(policy string) int {
	if policy == "atComplete" {
		return len(s.attached) + len(s.leaving)
	}
	return len(s.attached) + len(s.coming) + len(s.unmet) + s.short
}

// wanted is what an increase is measured against.
func (s *stand) wanted(policy string) int {
	if policy == "atComplete" {
		return s.shown(policy) + len(s.coming)
	}
	return s.shown(policy)
}

// uncounted are those in device_count that are no devices.
func (s *stand) uncounted(policy string) int {
	if policy == "atComplete" {
		return 0
	}
	return s.short
}

func (f *Face) rows(v *core.MachineView, s stand) []row {
	out := []row{}
	add := func(d core.Device, id, status string) {
		out = append(out, row{ID: id, Status: status, Reason: d.Failure, Detail: f.detail(v, d)})
	}
	for _, d := range s.attached {
		if d.Failure != "" {
			add(d, d.ReportedSerial, "REMOVE_FAILED")
			continue
		}
		add(d, d.ReportedSerial, "ADD_COMPLETE")
	}
	for _, d := range s.leaving {
		add(d, d.ReportedSerial, f.cfg.CM.Removing)
	}
	for _, d := range s.unmet {
		add(d, d.ReportedSerial, "ADD_FAILED")
	}
	for _, d := range s.coming {
		switch f.core.Policies().CM.Progress {
		case "absent":
		case "withID":
			add(d, d.ReportedSerial, f.cfg.CM.Adding)
		default: // noID
			add(d, "", f.cfg.CM.Adding)
		}
	}
	for range s.short {
		out = append(out, row{Status: "ADD_FAILED", Reason: core.ErrNoCapacity.Error(), Detail: struct{}{}})
	}
	return out
}

func (f *Face) detail(v *core.MachineView, d core.Device) any {
	name := fmt.Sprintf("%s%d", gpuType, d.Index)
	if f.core.Policies().CM.Detail == "partial" {
		return map[string]string{"res_name": name}
	}
	return detail{
		FabricUUID: f.fabrics[v.Fabric], FabricID: v.Fabric, UUID: d.ResUUID, GID: fmt.Sprintf("0x%08x", d.Index), Type: gpuType,
		Name: name, Status: 4, OpStatus: d.OpStatus, TenantUUID: f.cfg.Tenant, Machine: v.UUID,
		Specs: []resspec{{
			UUID:    fmt.Sprintf("dd00dd00-7777-4f00-e600-%012d", slices.Index(f.models, d.Model)+1),
			Product: d.ProductName, Model: d.Model, Vendor: "NVIDIA", Removable: true,
		}},
	}
}

// tidy lets failed rows vanish whose time is over, and looks at the machine again.
func (f *Face) tidy(v *core.MachineView) error {
	if f.core.Policies().CM.Failed != "vanish" {
		return nil
	}
	old := func(since time.Time) bool { return f.clk.Since(since) >= time.Duration(f.cfg.CM.FailedFor) }
	for p, all := range f.shortfalls {
		f.shortfalls[p] = slices.DeleteFunc(all, func(s shortfall) bool { return old(s.since) })
	}
	for _, d := range v.Coming {
		if d.Failure == "" || !old(d.PhaseSince) {
			continue
		}
		if err := f.core.ChangeDevice(d.ID, simapi.DeviceChange{Action: simapi.DeviceFree}); err != nil {
			return err
		}
	}
	now, err := f.core.Machine(v.Name)
	*v = now
	return err
}

// increase makes the machine have total devices of the model, if it has fewer.
func (f *Face) increase(v *core.MachineView, model string, total, limit int) (<-chan struct{}, error) {
	p := f.core.Policies().CM
	s := f.stand(v, model)
	// What never came takes no place.
	if most := f.cfg.CM.Limits[model].Max; most != nil && total-s.uncounted(p.Count) > *most {
		switch p.Above {
		case "clamp":
			total = *most + s.uncounted(p.Count)
		case "409":
			return nil, refusal{http.StatusConflict, "more than max_resspec_count"}
		default:
			return nil, refusal{http.StatusBadRequest, "more than max_resspec_count"}
		}
	}
	more := total - s.wanted(p.Count)
	if more <= 0 {
		if p.Below == "lastWins" {
			return nil, f.callOff(s, -more)
		}
		return nil, nil //nolint:nilnil // nothing begins
	}
	_, free, _, err := f.core.Free(v.Name, model)
	if err != nil {
		return nil, err
	}
	short := more - min(more, free)
	if short > 0 && p.Shortage == "409" {
		return nil, core.ErrNoCapacity
	}
	at := place{v.Name, model}
	for range short {
		f.shortfalls[at] = append(f.shortfalls[at], shortfall{f.clk.Now()})
	}
	if more == short {
		return nil, nil //nolint:nilnil // nothing begins
	}
	return f.core.BeginAttach(core.AttachRequest{
		Machine: v.Name, Specs: []core.Spec{{Model: model, Count: more - short}}, Caller: caller, Limit: limit,
	})
}

// callOff gives up devices that are still coming, the last one first.
func (f *Face) callOff(s stand, surplus int) error {
	for _, d := range slices.Backward(s.coming) {
		if surplus == 0 {
			break
		}
		surplus--
		if err := f.core.ChangeDevice(d.ID, simapi.DeviceChange{Action: simapi.DeviceFree}); err != nil {
			return err
		}
	}
	return nil
}

// remove takes the named devices away.
func (f *Face) remove(v *core.MachineView, model string, c change) (<-chan struct{}, error) {
	p := f.core.Policies().CM
	s := f.stand(v, model)
	var gone []core.Device
	counted := 0
	for _, id := range c.Devices {
		is := func(d core.Device) bool { return id != "" && d.ReportedSerial == id }
		if i := slices.IndexFunc(s.attached, is); i >= 0 {
			gone = append(gone, s.attached[i])
			counted++
		} else if i := slices.IndexFunc(s.unmet, is); i >= 0 {
			gone = append(gone, s.unmet[i])
			if p.Count != "atComplete" {
				counted++
			}
		} else if slices.ContainsFunc(s.leaving, is) {
			return nil, core.ErrBusy
		} else if p.Unknown != "ignore" {
			return nil, refusal{http.StatusNotFound, "no such device on the machine"}
		}
	}
	if want := s.shown(p.Count) - counted; p.Remaining != "trusted" && *c.Count != want {
		return nil, refusal{http.StatusBadRequest, fmt.Sprintf("device_count %d does not go with the devices, %d would remain", *c.Count, want)}
	}
	var ends []<-chan struct{}
	for _, d := range gone {
		end, err := f.core.BeginDetach(core.DetachRequest{Machine: v.Name, Device: d.ID, Caller: caller})
		if err != nil {
			return all(ends), err
		}
		ends = append(ends, end)
	}
	return all(ends), nil
}

// all closes when every one has.
func all(ends []<-chan struct{}) <-chan struct{} {
	switch len(ends) {
	case 0:
		return nil
	case 1:
		return ends[0]
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for _, e := range ends {
			<-e
		}
	}()
	return over
}
