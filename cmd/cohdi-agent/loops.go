// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/claim"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/leader"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/manager"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/internal/pool"
	"github.com/cohdi/cohdi-agent/internal/publish"
)

// What is not worth a setting.
const (
	writeDeadline = 10 * time.Second
	countPause    = time.Second
	debounce      = 20 * time.Millisecond
	leaderRetry   = 500 * time.Millisecond
)

func (m *membership) nodeConfig(at seat, f config.Fabric) node.Config {
	c := m.managers[f.ID].NodeConfig(manager.Times{
		AttachDeadline: m.cfg.Timings.AttachDeadline, RetryAfter: m.cfg.Timings.RetryAfter, CallTimeout: f.CallTimeout, Settle: f.Settle,
		Resync: m.cfg.Timings.NodeList,
	})
	c.Settings.Busy += rand.N(c.Settings.Busy / 4) //nolint:gosec // jitter: nodes that were refused together ask again one by one
	c.Node, c.Machine, c.Fabric = m.a.o.node, at.machine, f.ID
	c.Leases, c.Claims, c.Prepared = allLeases{m.a.leases}, claim.New(claim.Options{Client: m.a.client, Clock: m.a.clock}), m.a.machine
	c.Host, c.Observer, c.Clock = m.a.machine, m.a.obs, m.a.clock
	return c
}

// term runs this agent's part in the election of its fabric, and leads while it is elected.
type term struct {
	m      *membership
	fabric config.Fabric
	seat   seat

	mu       sync.Mutex // guards the following
	election *lease.Election
	loop     *leader.Loop
	dropped  []string
}

func (t *term) run(ctx context.Context) error {
	election, err := lease.NewElection(lease.ElectionOptions{
		Client: t.m.a.client, Clock: t.m.a.clock, Fabric: t.fabric.ID, Node: t.m.a.o.node, PodUID: t.m.a.o.podUID,
	})
	if err != nil {
		return err
	}
	t.mu.Lock()
	t.election = election
	t.mu.Unlock()
	election.Run(ctx, func(ctx context.Context) {
		log := klog.FromContext(ctx)
		log.Info("This agent leads the fabric")
		t.m.a.metrics.SetLeader(t.fabric.ID, true)
		defer t.m.a.metrics.SetLeader(t.fabric.ID, false)
		if err := t.lead(ctx); err != nil && ctx.Err() == nil {
			log.Error(err, "The fabric cannot be led; leadership is given up")
			t.m.a.fail(err)
		}
		log.Info("This agent leads the fabric no more")
	})
	return nil
}

// poke makes the leader's loop look again, if there is one.
func (t *term) poke() {
	t.mu.Lock()
	loop := t.loop
	t.mu.Unlock()
	if loop != nil {
		loop.Poke()
	}
}

func (t *term) models() []pool.Model {
	all := make([]pool.Model, 0, len(t.fabric.Models))
	for _, m := range t.fabric.Models {
		all = append(all, pool.Model{
			Name: m.Name, FabricModel: m.FabricModel, Attributes: m.Attributes, Min: m.MinPerNode, Max: m.MaxPerNode, Excludes: m.Excludes,
		})
	}
	return all
}

func (t *term) modelNames() []device.Model {
	all := make([]device.Model, 0, len(t.fabric.Models))
	for _, m := range t.fabric.Models {
		all = append(all, m.Name)
	}
	return all
}

// lead runs the fabric's policy until ctx ends. Everything it watches is watched only while it leads.
func (t *term) lead(ctx context.Context) error {
	a, manages := t.m.a, t.m.managers[t.fabric.ID]
	leases, err := lease.NewFabricStore(t.fabric.ID, lease.Options{Client: a.client, Clock: a.clock, Changed: func(string) { t.poke() }})
	if err != nil {
		return err
	}
	machine := func(n *corev1.Node) (device.Machine, error) { return machineOf(n, t.m.cfg.Machines) }
	members, err := nodestatus.NewMembers(nodestatus.MembersOptions{
		Client: a.client, Machine: machine, Models: t.modelNames, Changed: t.poke,
		WithholdOnConflict: t.m.cfg.IfAdvertisedElsewhere == config.Withhold,
	})
	if err != nil {
		return err
	}
	claims := claim.Options{Client: a.client, Clock: a.clock}
	demands, err := claim.NewWatch(t.fabric.ID, claims, func(string) { t.poke() })
	if err != nil {
		return err
	}
	publisher, err := publish.New(publish.Options{Client: a.client, Fabric: t.fabric.ID, Clock: a.clock, Changed: t.poke, Dropped: t.drop})
	if err != nil {
		return err
	}
	loop := leader.New(leader.Config{
		Fabric: t.fabric.ID, Models: t.models,
		Settings: pool.Settings{
			CoolDown: t.m.cfg.Timings.CoolDown, ReadySettle: t.m.cfg.Timings.ReadySettle,
			AgentAway: t.m.cfg.Timings.AgentAway, Slots: t.fabric.SlotsPerNode, NodeSlots: t.fabric.Slots,
			ForgetUnit: t.m.cfg.Timings.ForgetUnit, Addressable: manages.Addressable(), Arrival: !manages.Capabilities().Identity,
			Adopt: t.m.cfg.ForeignDevices == config.ForeignAdopt, AdoptAfter: t.m.cfg.Timings.AdoptAfter,
		},
		CountEvery: t.m.cfg.Timings.LeaderList, CountPause: countPause, LimitEvery: t.m.cfg.Timings.NodeList, Debounce: debounce, Retry: leaderRetry,
		CallDeadline: t.fabric.CallTimeout + manager.CallDeadline, WriteDeadline: writeDeadline,
		Leases: allLeases{leases}, Claims: demands, Nodes: members, Publisher: publisher,
		Manager: manages.OfFabric(), Limiter: manages.Limiter(), Election: t.election, Clock: a.clock,
		Observer: &leaderObserver{observer: a.obs, fabric: t.fabric.ID, consumers: claim.New(claims).Consumers, onlookers: demands.Onlookers},
	})
	var all sync.WaitGroup
	defer all.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	all.Go(func() { leases.Run(ctx) })
	all.Go(func() { members.Run(ctx) })
	all.Go(func() { demands.Run(ctx) })
	all.Go(func() {
		if err := publisher.Run(ctx); err != nil && ctx.Err() == nil {
			a.fail(err)
		}
	})
	if err := t.sync(ctx, leases, members, demands); err != nil {
		return err
	}
	t.setLoop(loop)
	defer t.setLoop(nil)
	if watcher := manages.Watcher(); watcher != nil {
		all.Go(func() {
			if err := watcher.Watch(ctx, loop.Hint); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Info("The fabric manager tells of no changes; it is asked every now and then", "err", err)
			}
		})
	}
	loop.Run(ctx)
	return nil
}

func (t *term) setLoop(l *leader.Loop) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.loop = l
}

// sync waits until everything shows at least what there was when the term began: a leader that knows only
// half of the claims would take devices from the other half.
func (t *term) sync(ctx context.Context, leases *lease.Store, members *nodestatus.Members, demands *claim.Watch) error {
	for !leases.HasSynced() || !demands.HasSynced() {
		timer := t.m.a.clock.NewTimer(50 * time.Millisecond)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C():
		}
	}
	return members.WaitForSync(ctx)
}

// drop hears that the API server lacks a feature that the offers need.
func (t *term) drop(features []string) {
	t.mu.Lock()
	t.dropped = features
	t.mu.Unlock()
	t.m.tellFabric()
}

// allLeases are the device leases as the loops need them: one that cannot be read is there all the same, so
// that its unit is not given away, nor its device to another unit.
type allLeases struct{ *lease.Store }

func (f allLeases) List() []device.Lease {
	all := f.Store.List()
	for _, bad := range f.Unreadable() {
		if bad.Unit != "" {
			all = append(all, device.Lease{Fabric: bad.Fabric, Unit: bad.Unit, Node: bad.Node, Phase: device.Unreadable})
		}
	}
	return all
}

// trouble says what keeps the leader from offering anything.
func (t *term) trouble() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.dropped) == 0 {
		return ""
	}
	return fmt.Sprintf("the API server dropped fields of the offers: its feature gates %v are off; nothing is offered until they are on and the agents are restarted", t.dropped)
}
