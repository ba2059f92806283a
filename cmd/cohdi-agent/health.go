// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/kubeletplugin"
	"github.com/cohdi/cohdi-agent/internal/manager"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nvml"
)

const (
	// healthEvery is how often GPUs are looked at unasked: the driver does not announce its errors without a call
	// that waits for them, which would keep others from the driver.
	healthEvery = 10 * time.Second
	// healthDebounce gathers what happens at once.
	healthDebounce = 200 * time.Millisecond
)

// gpuErrors reports what GPUs complained of since it was asked last.
type gpuErrors interface {
	XIDs(ctx context.Context) ([]nvml.XID, error)
}

// healthMonitor knows how the GPUs of this node are that Pods may have: the kubelet is told, and what is not well is
// not offered. It runs in every agent of the node, since each answers the kubelet.
type healthMonitor struct {
	host   node.Observable
	driver gpuErrors
	leases func() []device.Lease
	// found tells the built-in GPUs and what the fabric says; not ok while that is not known, as in an agent that
	// waits for another one to end.
	found func() (node.Found, bool)
	clock clock.WithTicker
	// sick is told once of each GPU that is not well, by its name; of a unit that failed, its lease tells.
	sick func(name string, id device.GPUUUID, why string)
	// changed is called when Of or Units answer otherwise.
	changed func()

	news  broadcast
	poked chan struct{}

	mu    sync.Mutex // guards the following
	units []kubeletplugin.UnitHealth
	// xids are the errors of GPUs that are here still. A restart forgets them, as it does the driver's other state.
	xids map[device.GPUUUID]uint64
	// seen are the GPUs that are here still and that the driver has shown to this process.
	seen map[device.GPUUUID]bool
}

var _ kubeletplugin.Health = (*healthMonitor)(nil)

// Units implements kubeletplugin.Health.
func (h *healthMonitor) Units() []kubeletplugin.UnitHealth {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.units)
}

// Changed implements kubeletplugin.Health.
func (h *healthMonitor) Changed() <-chan struct{} { return h.news.Changed() }

// Of tells how a built-in GPU is; ok is false before it was looked at.
func (h *healthMonitor) Of(id device.GPUUUID) (health device.Health, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, u := range h.units {
		if u.Fabric == "" && u.Unit == device.BuiltInUnit(id) {
			return u.Health, true
		}
	}
	return "", false
}

func (h *healthMonitor) poke() {
	select {
	case h.poked <- struct{}{}:
	default:
	}
}

// run looks when it is poked and every now and then, until ctx ends.
func (h *healthMonitor) run(ctx context.Context) error {
	for {
		h.look(ctx)
		if !h.sleep(ctx, healthEvery, h.poked) || !h.sleep(ctx, healthDebounce, nil) {
			return nil
		}
	}
}

func (h *healthMonitor) sleep(ctx context.Context, pause time.Duration, poke <-chan struct{}) bool {
	timer := h.clock.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-poke:
	case <-timer.C():
	}
	return true
}

// patient is one GPU to be looked at.
type patient struct {
	kubeletplugin.UnitHealth
	uuid   device.GPUUUID
	fabric string // the fabric's device
	signs  attach.Signs
}

// patients are the units that are attached, or should be, and the built-in GPUs.
func (h *healthMonitor) patients() []patient {
	var all []patient
	for _, l := range h.leases() {
		here := l.Phase == device.Attached || l.Phase == device.Releasing || l.Phase == device.Failed && l.FabricDevice != ""
		if !here {
			continue
		}
		p := patient{UnitHealth: kubeletplugin.UnitHealth{Fabric: l.Fabric, Unit: l.Unit}, uuid: l.UUID, fabric: l.FabricDevice}
		p.signs.Releasing = l.Phase == device.Releasing
		if l.Phase == device.Failed {
			p.signs.Failure = l.Failure
		}
		all = append(all, p)
	}
	found, _ := h.found()
	for _, g := range found.GPUs {
		if g.Owner == attach.BuiltIn {
			all = append(all, patient{UnitHealth: kubeletplugin.UnitHealth{Unit: device.BuiltInUnit(g.UUID)}, uuid: g.UUID})
		}
	}
	for i := range all {
		for _, d := range found.Listed {
			if d.ID == all[i].fabric && d.ID != "" {
				all[i].signs.Fabric, all[i].signs.FabricText = d.Health, d.HealthText
			}
		}
	}
	slices.SortFunc(all, func(a, b patient) int { return strings.Compare(string(a.Unit), string(b.Unit)) })
	return all
}

// look asks the driver, unless there is nothing to ask about.
func (h *healthMonitor) look(ctx context.Context) {
	all := h.patients()
	if len(all) == 0 {
		h.keep(nil)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, manager.LocalDeadline)
	defer cancel()
	sight, err := h.host.Observe(ctx)
	if err != nil {
		sight.NVMLState = err.Error()
	}
	h.mu.Lock()
	first := len(h.units) == 0
	h.mu.Unlock()
	if first {
		h.listen(ctx, nil) // what the driver said of GPUs while nobody looked is not of these
	}
	h.listen(ctx, all)
	now := h.clock.Now()
	units := make([]kubeletplugin.UnitHealth, 0, len(all))
	for _, p := range all {
		h.examine(&p, sight)
		p.Health, p.Message = attach.Healthy(p.signs)
		p.At = now
		if p.Health == device.HealthCritical && p.signs.Failure.Reason == "" && h.wasWell(p.UnitHealth) {
			h.sick(string(p.Unit), p.uuid, p.Message)
		}
		units = append(units, p.UnitHealth)
	}
	h.keep(units)
}

// examine adds what the driver shows of a GPU, and has said of it.
func (h *healthMonitor) examine(p *patient, sight node.Sight) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p.signs.NVMLState = sight.NVMLState
	for _, g := range sight.NVML {
		if g.UUID == p.uuid && p.uuid != "" {
			p.signs.Shown, p.signs.Draining = true, g.Draining
			h.seen[p.uuid] = true
		}
	}
	p.signs.Seen, p.signs.XID = h.seen[p.uuid], h.xids[p.uuid]
}

// listen takes what GPUs complained of, and forgets those that have gone.
func (h *healthMonitor) listen(ctx context.Context, all []patient) {
	news, err := h.driver.XIDs(ctx)
	if err != nil && !errors.Is(err, nvml.ErrUnsupported) {
		klog.FromContext(ctx).V(1).Info("The driver's errors of GPUs could not be read", "err", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.xids == nil {
		h.xids, h.seen = map[device.GPUUUID]uint64{}, map[device.GPUUUID]bool{}
	}
	for _, x := range news {
		klog.FromContext(ctx).Info("The driver reports an error of a GPU", "xid", x.Code, "gpu", x.UUID, "pci", x.PCI, "critical", attach.CriticalXID(x.Code))
		if attach.CriticalXID(x.Code) {
			h.xids[x.UUID] = x.Code
		}
	}
	gone := func(id device.GPUUUID) bool {
		return !slices.ContainsFunc(all, func(p patient) bool { return p.uuid == id })
	}
	maps.DeleteFunc(h.xids, func(id device.GPUUUID, _ uint64) bool { return gone(id) })
	maps.DeleteFunc(h.seen, func(id device.GPUUUID, _ bool) bool { return gone(id) })
}

func (h *healthMonitor) wasWell(now kubeletplugin.UnitHealth) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, u := range h.units {
		if u.Fabric == now.Fabric && u.Unit == now.Unit {
			return u.Health != device.HealthCritical
		}
	}
	return true
}

func (h *healthMonitor) keep(units []kubeletplugin.UnitHealth) {
	same := func(a, b kubeletplugin.UnitHealth) bool {
		a.At, b.At = time.Time{}, time.Time{}
		return a == b
	}
	h.mu.Lock()
	changed := !slices.EqualFunc(h.units, units, same)
	h.units = units
	h.mu.Unlock()
	if changed {
		h.news.send()
		h.changed()
	}
}
