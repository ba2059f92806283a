// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/claim"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/leader"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/internal/pool"
	"github.com/cohdi/cohdi-agent/internal/publish"
)

// What is not worth a setting: each is short against what it bounds or waits for.
const (
	// appear is how long the kernel gets to show a device by itself: a link that comes up takes 1 to 2 s.
	appear = 3 * time.Second
	// look, retry, busy and hold pace what does not announce itself.
	look  = time.Second
	retry = 500 * time.Millisecond
	busy  = 5 * time.Second
	hold  = 10 * time.Second
	// freshFor is how long a list of the fabric counts as what is there now.
	freshFor = 5 * time.Second
	// callDeadline is what a call gets above what the manager may work on it: the client gives up by itself.
	callDeadline  = 20 * time.Second
	localDeadline = 40 * time.Second
	writeDeadline = 10 * time.Second
	countPause    = time.Second
	debounce      = 20 * time.Millisecond
)

func (m *membership) nodeConfig(at seat, f config.Fabric) node.Config {
	models, can := m.managers[f.ID].models, m.managers[f.ID].Capabilities()
	return node.Config{
		Node: m.a.o.node, Machine: at.machine, Fabric: f.ID,
		Settings: attach.Settings{
			Parallel: can.Exclusion == fabric.ExclusionNone && can.Identity, Batch: can.Batch, Arrival: !can.Identity,
			Deadline: m.cfg.Timings.AttachDeadline, Patience: patience(can.Exclusion), MaxCall: max(f.CallTimeout, can.MaxCall), Settle: max(f.Settle, can.Settle), Look: look, Appear: appear, Retry: retry,
			Busy: busy, Hold: hold, RetryAfter: m.cfg.Timings.RetryAfter,
		},
		FreshFor: freshFor, Resync: m.cfg.Timings.NodeList, CallDeadline: f.CallTimeout + callDeadline, LocalDeadline: localDeadline,
		Leases: allLeases{m.a.leases}, Manager: managerOfNode{m.managers[f.ID]}, Batcher: managerOfNode{m.managers[f.ID]}.batcher(), Host: m.a.machine,
		Claims: claim.New(claim.Options{Client: m.a.client, Clock: m.a.clock}), Prepared: m.a.machine, Observer: m.a.obs,
		Model: func(name device.Model) string { return models[name] }, Clock: m.a.clock,
	}
}

// queueMost is how long an attach may take where nodes wait for each other at the manager: less than the 10 minutes
// after which the scheduler gives up by itself.
const queueMost = 9 * time.Minute

// queues: one call occupies more than the machine that it is for, so that nodes take turns.
func queues(e fabric.Exclusion) bool {
	return e == fabric.ExclusionGlobal || e == fabric.ExclusionFabric
}

// patience is how long an attach may take where that is so.
func patience(e fabric.Exclusion) time.Duration {
	if queues(e) {
		return queueMost
	}
	return 0
}

// addressable: the manager lists what is free, and takes the very device that is asked for.
func addressable(can fabric.Capabilities) bool {
	return can.AddressableAttach && can.Free == fabric.FreeList
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
	a := t.m.a
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
			ForgetUnit: t.m.cfg.Timings.ForgetUnit, Addressable: addressable(t.m.managers[t.fabric.ID].Capabilities()),
			Adopt: t.m.cfg.ForeignDevices == config.ForeignAdopt, AdoptAfter: t.m.cfg.Timings.AdoptAfter,
		},
		CountEvery: t.m.cfg.Timings.LeaderList, CountPause: countPause, LimitEvery: t.m.cfg.Timings.NodeList, Debounce: debounce, Retry: retry,
		CallDeadline: t.fabric.CallTimeout + callDeadline, WriteDeadline: writeDeadline,
		Leases: allLeases{leases}, Claims: demands, Nodes: members, Publisher: publisher,
		Manager: managerOfFabric{t.m.managers[t.fabric.ID]}, Limiter: managerOfFabric{t.m.managers[t.fabric.ID]}.limiter(), Election: t.election, Observer: &leaderObserver{observer: a.obs, fabric: t.fabric.ID, consumers: claim.New(claims).Consumers, onlookers: demands.Onlookers}, Clock: a.clock,
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
	if watcher, can := t.m.managers[t.fabric.ID].Manager.(fabric.Watcher); can {
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
