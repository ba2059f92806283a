// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"math/rand/v2"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/manager"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/internal/pool"
	"github.com/cohdi/cohdi-agent/internal/publish"
)

// surveyDebounce gathers what happens at once, as when a GPU comes and its lease is written.
const surveyDebounce = 300 * time.Millisecond

// outlook is what a survey of this node's GPUs goes by; by another one, another survey begins.
type outlook struct {
	at seat
	// none: no fabric has this node's machine.
	none bool
}

// outlook returns what is known of the node's place now, and why nothing is. That no fabric has the node stays true
// while a manager cannot be asked again.
func (m *membership) outlook(known bool) (o outlook, trouble string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if known {
		m.placed = true
		m.none = m.seat == seat{} && m.why == notInFabric
	}
	return outlook{at: m.seat, none: m.none}, m.whyNot
}

// survey runs a survey by the outlook; the returned function ends it and waits for that.
func (m *membership) surveyBy(ctx context.Context, o outlook, trouble string) func() {
	a := m.a
	cfg := node.SurveyConfig{
		Node: a.o.node, Machine: o.at.machine, NoFabric: o.none, Trouble: trouble, BuiltIn: map[device.PCIAddress]bool{},
		Leases: a.leases, Host: a.machine, RetryFirst: retryFirst, RetryMost: retryMost, Debounce: surveyDebounce,
		Resync:       m.cfg.Timings.NodeList + rand.N(m.cfg.Timings.NodeList/10+1), //nolint:gosec // jitter
		CallDeadline: manager.CallDeadline, LocalDeadline: manager.LocalDeadline, Clock: a.clock, Changed: m.found(o.at.fabric),
	}
	for _, at := range m.cfg.BuiltIn[a.o.node] {
		cfg.BuiltIn[at] = true
	}
	if o.at.fabric != "" {
		cfg.Manager, cfg.Trouble = m.managers[o.at.fabric].OfNode(), "not yet"
	}
	survey := node.NewSurvey(cfg)
	m.mu.Lock()
	m.survey = survey
	m.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		survey.Run(ctx)
	}()
	return func() { cancel(); <-ended }
}

// whose is what is known of this node's GPUs; ok is false while nothing is.
func (m *membership) whose() (node.Found, bool) {
	m.mu.Lock()
	survey := m.survey
	m.mu.Unlock()
	if survey == nil {
		return node.Found{}, false
	}
	return survey.Found()
}

// found tells everybody what a survey has found.
func (m *membership) found(fabric device.FabricID) func(node.Found) {
	return func(f node.Found) {
		m.a.tellForeign(fabric, f.Foreign, m.adoptAfter())
		m.a.metrics.SetGPUs(countOwners(f))
		m.a.health.poke()
		m.own.poke()
	}
}

// countOwners counts the GPUs on the bus, and foreign devices as the fabric lists them.
func countOwners(f node.Found) map[string]int {
	n := map[string]int{}
	for _, o := range attach.Owners() {
		n[string(o)] = 0
	}
	for _, g := range f.GPUs {
		if g.Owner != attach.Foreign {
			n[string(g.Owner)]++
		}
	}
	n[string(attach.Foreign)] = len(f.Foreign)
	return n
}

// adoptAfter is how long a foreign device has to be there until it is taken in, 0 where it is only told of.
func (m *membership) adoptAfter() time.Duration {
	if m.cfg.ForeignDevices != config.ForeignAdopt {
		return 0
	}
	return m.cfg.Timings.AdoptAfter
}

// tellForeign says once of each foreign device that it is there, and again when it was away meanwhile.
func (a *agent) tellForeign(fabric device.FabricID, all []device.OnFabric, adoptAfter time.Duration) {
	fate := "it is left alone"
	if adoptAfter > 0 {
		fate = "it is taken in when it has been there for " + adoptAfter.String()
	}
	now := map[string]bool{}
	for _, d := range all {
		now[d.ID] = true
		if a.foreign[d.ID] {
			continue
		}
		a.obs.log.Info("The fabric manager lists a device on this machine that nobody of ours has attached; "+fate,
			"fabric", fabric, "device", d.ID, "model", d.Model, "gpu", d.UUID)
		a.obs.onEvents(func(e *nodestatus.Events) { e.Foreign(fabric, d, adoptAfter) })
	}
	a.foreign = now
}

// ownPool publishes the GPUs that are built into this node.
type ownPool struct {
	m     *membership
	poked chan struct{}
}

func newOwnPool(m *membership) *ownPool { return &ownPool{m: m, poked: make(chan struct{}, 1)} }

func (p *ownPool) poke() {
	select {
	case p.poked <- struct{}{}:
	default:
	}
}

// run publishes whenever it is poked and something has changed, until ctx ends.
func (p *ownPool) run(ctx context.Context) {
	var last []pool.Offer
	first := true
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.poked:
		}
		offers, known := p.offers()
		if !known || !first && reflect.DeepEqual(last, offers) {
			continue
		}
		// Nothing is watched on a node that has nothing and had nothing.
		if len(offers) == 0 && !p.m.a.published && !p.m.a.watch.HasPool(p.m.a.o.node) {
			continue
		}
		if err := p.m.a.plugin.Publish(ctx, publish.NodePool(p.m.a.o.node, offers)); err != nil {
			p.m.a.metrics.Failed("Publish")
			klog.FromContext(ctx).Error(err, "The node's own GPUs cannot be published")
			continue
		}
		klog.FromContext(ctx).Info("The node's own pool is published", "gpus", len(offers))
		last, first, p.m.a.published = offers, false, true
	}
}

// offers returns what the node's own pool should hold; known is false until everything was looked at once. Until then
// what an agent before has published stays: it was looked at then.
func (p *ownPool) offers() (all []pool.Offer, known bool) {
	found, ok := p.m.whose()
	conflict, looked := p.m.conflicts()
	switch {
	case conflict:
		return nil, true
	case !ok, !looked, found.Pending, !p.m.isPlaced():
		return nil, false
	}
	var gpus []pool.BuiltIn
	for _, g := range found.GPUs {
		if g.Owner != attach.BuiltIn {
			continue
		}
		health, looked := p.m.a.health.Of(g.UUID)
		if !looked {
			return nil, false
		}
		gpus = append(gpus, pool.BuiltIn{UUID: g.UUID, PCI: g.Address, Name: g.Name, Health: health})
	}
	return pool.BuiltInOffers(p.m.models(), gpus, conflict), true
}

// isPlaced tells whether it was known once in which fabric this node is, or that it is in none.
func (m *membership) isPlaced() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.placed
}

// conflicts tells whether GPUs of this node are withheld because somebody else advertises them.
func (m *membership) conflicts() (withheld, looked bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.conflict && m.cfg.IfAdvertisedElsewhere == config.Withhold, m.looked
}

// models are those of all fabrics.
func (m *membership) models() []pool.Model {
	var all []pool.Model
	for i := range m.cfg.Fabrics {
		for _, model := range m.cfg.Fabrics[i].Models {
			all = append(all, pool.Model{Name: model.Name, Attributes: model.Attributes})
		}
	}
	return all
}
