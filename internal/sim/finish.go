// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// How long the cluster gets to come to rest: back-offs of failed units, of quarantined devices, the
// scheduler's time-out, each once more than once.
const (
	timeToServe  = 60 * time.Minute
	timeToReturn = 60 * time.Minute
	// quietMost is longer than anything waits before it is tried again.
	quietMost = 11 * time.Minute
)

// finish ends what goes wrong and checks that all that is wanted and can be served is served, and that all
// goes back when nothing is wanted any more.
func (s *Sim) finish() {
	s.calmDown()
	s.runUntil(s.now().Add(time.Minute), nil)
	s.runStable(timeToServe, quietMost)
	if s.watch.broken != nil {
		return
	}
	s.servedAll()
	for _, p := range s.scheduler.pods {
		s.deletePod(p, false)
	}
	for end := s.now().Add(timeToReturn + s.coolDown); s.watch.broken == nil && s.now().Before(end) && s.remains() != ""; {
		s.runUntil(s.now().Add(time.Minute), nil)
	}
	if what := s.remains(); s.watch.broken == nil && what != "" {
		s.breakIt("not-returned", "%s", what)
	}
}

// calmDown ends what goes wrong by itself after a while, and what was to go wrong.
func (s *Sim) calmDown() {
	s.note("judge", "nothing goes wrong any more")
	s.calm, s.faults = s.now(), nil
	s.fabric.downUntil, s.fabric.busyUntil = s.now(), s.now()
	for _, g := range s.fabric.gpus {
		g.unnamedUntil = s.now()
	}
	for _, h := range s.order {
		h.unmodelUntil = s.now()
	}
	s.repair()
	for _, p := range s.scheduler.pods {
		if p.admin { // what it watches stays as long as it does
			s.deletePod(p, false)
		}
	}
	for _, p := range s.procs {
		p.steps.poke()
	}
}

// servedAll: no Pod waits for what is there.
func (s *Sim) servedAll() {
	free := map[device.Model]int{}
	for _, g := range s.fabric.gpus {
		if g.machine == "" && g.health != device.HealthCritical {
			free[g.model]++
			free[""]++
		}
	}
	for _, p := range s.scheduler.pods {
		need := p.devices * len(p.claims)
		if p.deleted || p.ran || p.admin || need > free[p.model] {
			continue
		}
		for _, h := range s.order {
			if (p.node == "" || p.node == h.node) && s.hasRoom(h, p.model, need) {
				s.noteOffers()
				s.breakIt("not-served", "%s needs %d devices, %d are free, and it does not run; it waits on %q, was bound to %q",
					p.name, need, free[p.model], p.waiting, p.bound)
				return
			}
		}
	}
}

// hasRoom: the configuration lets the node have so many more of the model.
func (s *Sim) hasRoom(h *host, m device.Model, need int) bool {
	has := map[bool]int{} // whether it is of the model
	for _, g := range s.fabric.on(h.machine) {
		has[m == "" || g.model == m]++
	}
	return (s.maxPerNode == 0 || has[true]+need <= s.maxPerNode) && (s.slots == 0 || has[true]+has[false]+need <= s.slots) &&
		(!s.exclude || has[false] == 0)
}

// noteOffers shows what the scheduler could choose from.
func (s *Sim) noteOffers() {
	for _, o := range sorted[*resourceapi.ResourceSlice](s.scheduler.slices) {
		for i := range o.Spec.Devices {
			d := &o.Spec.Devices[i]
			taints := make([]string, 0, len(d.Taints))
			for _, t := range d.Taints {
				taints = append(taints, string(t.Effect)+"="+t.Value)
			}
			s.note("offer", "%s on %q %v", d.Name, ptr.Deref(d.NodeName, ""), taints)
		}
	}
	for _, n := range sorted[*corev1.Node](s.scheduler.nodes) {
		s.note("offer", "%s %v", n.Name, n.Labels)
	}
}

// remains says what is left of what nobody wants, empty if nothing is.
func (s *Sim) remains() string {
	for _, g := range s.fabric.gpus {
		if g.machine != "" && g.machine != tenant && !g.foreign && !s.keeps(g) {
			return fmt.Sprintf("%s is still attached to %s", g.id, s.hostOf(g.machine).node)
		}
	}
	for _, name := range keys(s.api.objects[leases]) {
		l, _ := leaseOf(s.api.objects[leases][name])
		if g := s.fabric.byID(l.FabricDevice); g != nil && s.keeps(g) {
			continue
		}
		return "there is still a lease: " + describe(l)
	}
	for _, name := range keys(s.api.objects[claims]) {
		return fmt.Sprintf("claim %s is still there", name)
	}
	for _, h := range s.order {
		for _, uid := range h.specs() {
			return fmt.Sprintf("on %s there is still a CDI spec for claim %s", h.node, uid)
		}
		if len(s.kubelets[h.node].pods) > 0 {
			return fmt.Sprintf("the kubelet of %s still has Pods", h.node)
		}
		for _, p := range s.live(h.node) {
			for _, u := range s.scheduler.units() {
				if by, known := p.plugin.PreparedBy(fabricID, u); !known || len(by) > 0 {
					return fmt.Sprintf("on %s unit %s is still prepared (known: %t)", h.node, u, known)
				}
			}
		}
	}
	return ""
}

// keeps tells whether the device waits on its node for the node's minimum.
func (s *Sim) keeps(g *gpu) bool {
	has := 0
	for _, other := range s.fabric.on(g.machine) {
		if other.model == g.model && !other.foreign {
			has++
		}
	}
	return has <= s.minPerNode && slices.ContainsFunc(s.leases(), func(l device.Lease) bool { return l.FabricDevice == g.id && l.Idle() })
}

// units are the units of the pool as the scheduler sees it.
func (k *kubeScheduler) units() []device.Unit {
	var all []device.Unit
	for _, o := range sorted[*resourceapi.ResourceSlice](k.slices) {
		for i := range o.Spec.Devices {
			if u, ready := device.UnitOfEntry(o.Spec.Devices[i].Name); ready {
				all = append(all, u)
			}
		}
	}
	return all
}
