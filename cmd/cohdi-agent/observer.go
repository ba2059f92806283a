// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/claim"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/kubeletplugin"
	"github.com/cohdi/cohdi-agent/internal/leader"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// observer tells what the loops and the plugin did: a log line per change, an event where a person looks,
// and metrics.
type observer struct {
	log     klog.Logger
	clock   clock.PassiveClock
	metrics *metrics.Metrics
	stages  *stages
	// changed is called when the plugin's checkpoint changed.
	changed func()
	failed  repeats

	mu     sync.Mutex // guards the following
	events *nodestatus.Events
	// early is what happened before there were events, which need the Node's UID.
	early []func(*nodestatus.Events)
}

// mostEarly bounds what is kept for later: an agent may wait for long for its predecessor to end.
const mostEarly = 100

var (
	_ node.Observer          = (*observer)(nil)
	_ leader.Observer        = (*leaderObserver)(nil)
	_ kubeletplugin.Observer = (*observer)(nil)
)

// leaderObserver is the observer of one fabric's leader.
type leaderObserver struct {
	*observer
	fabric device.FabricID
	// consumers reads who waits for a claim that has this allocation.
	consumers func(ctx context.Context, a device.Attempt) ([]claim.Consumer, error)
	// noted are the notes of the last plan, and lacks what nodes lack of their minimum; of the leader's loop only.
	noted []string
	lacks map[lackOf]*lack
	// onlookers are claims that wait in vain, and looked those that were told so; of the leader's loop only.
	onlookers func() []claim.Onlooker
	looked    map[device.Attempt]bool
}

// lackOf is a node that has less than its minimum of a model.
type lackOf struct {
	node, uid string
	model     device.Model
}

// lack is what is known of it: since when it is so, or has ended, and what the Node was told.
type lack struct {
	text, told string
	since      time.Time
}

// lackSettles is how long a lack has to last before a Node is told, or that it has ended: a failed attach, or a leader that
// has just begun, makes no event.
const lackSettles = time.Minute

// consumersDeadline bounds the look for the Pods of a refused claim: the scheduler takes their names off the claim
// soon.
const consumersDeadline = 5 * time.Second

// said leaves out the pairs of a log line whose value is empty: a unit without a claim has no claim called "/".
func said(pairs ...any) []any {
	kept := make([]any, 0, len(pairs))
	for i := 0; i+1 < len(pairs); i += 2 {
		value := reflect.ValueOf(pairs[i+1])
		empty := !value.IsValid() || value.Kind() == reflect.String && value.Len() == 0
		if z, ok := pairs[i+1].(interface{ IsZero() bool }); ok {
			empty = z.IsZero()
		}
		if !empty {
			kept = append(kept, pairs[i], pairs[i+1])
		}
	}
	return kept
}

// claimOf names the attempt's claim; nothing if there is no attempt.
func claimOf(a device.Attempt) string {
	if a.IsZero() {
		return ""
	}
	return a.Claim()
}

// reasonOf is the metrics' word for a failed action.
func reasonOf(k attach.Kind) string {
	switch k {
	case attach.SendAttach, attach.SendDetach, attach.Poll, attach.ListFabric:
		return "Fabric"
	case attach.Tell:
		return "ClaimStatus"
	case attach.Remove, attach.Rescan, attach.RescanAll, attach.Bind:
		return "Bus"
	case attach.Store, attach.StoreIntent, attach.Delete:
		return "Lease"
	case attach.Wait, attach.Discover, attach.FindHolders, attach.Drain, attach.Undrain:
		return metrics.Other
	}
	return metrics.Other
}

func (o *observer) setEvents(e *nodestatus.Events) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = e
	for _, f := range o.early {
		f(e)
	}
	o.early = nil
}

// onEvents lets f say something, as soon as there are events.
func (o *observer) onEvents(f func(*nodestatus.Events)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.events != nil:
		f(o.events)
	case len(o.early) < mostEarly:
		o.early = append(o.early, f)
	}
}

// Stored implements node.Observer.
func (o *observer) Stored(_ context.Context, before, after device.Lease) {
	o.onEvents(func(e *nodestatus.Events) { e.Stored(before, after) })
	o.stages.stored(before, after, o.clock.Now())
	if after.Phase == device.Failed && before.Phase != device.Failed {
		o.metrics.Failed(failedAs(before, after))
	}
	if before.Phase == after.Phase && before.Idle() == after.Idle() && before.HeldBy == after.HeldBy && before.Failure.Message == after.Failure.Message {
		return
	}
	log := o.log.WithValues(said("unit", after.Unit, "phase", after.Phase, "claim", claimOf(after.Attempt),
		"inPhase", after.ChangedAt.Sub(before.ChangedAt).Round(time.Millisecond))...)
	switch {
	case after.Phase == device.Failed:
		log.Info("Unit failed", said("reason", after.Failure.Reason, "message", after.Failure.Message, "retryAfter", after.Failure.RetryAfter)...)
	case after.HeldBy != "" && after.HeldBy != before.HeldBy:
		log.Info("Unit is held open by a process though no claim has it", "heldBy", after.HeldBy)
	default:
		log.Info("Unit", said("device", after.FabricDevice, "pci", after.PCI, "uuid", after.UUID, "idle", after.Idle())...)
	}
}

// failedAs is the word, in the metric of errors, for what became of a unit: what was attached once is no failed attach.
func failedAs(before, after device.Lease) string {
	switch {
	case before.Phase != device.Attached:
		return "AttachFailed"
	case after.Failure.Reason == "Vanished":
		return "GPULost"
	}
	return "GPUUnhealthy"
}

// Deleted implements node.Observer.
func (o *observer) Deleted(_ context.Context, l device.Lease) {
	o.onEvents(func(e *nodestatus.Events) { e.Deleted(l) })
	o.stages.deleted(l, o.clock.Now())
	o.failed.forget(l, "")
	o.log.Info("Unit is back in the pool", said("unit", l.Unit, "device", l.FabricDevice, "took", o.clock.Since(l.ChangedAt).Round(time.Millisecond))...)
}

// Told implements node.Observer.
func (o *observer) Told(_ context.Context, l device.Lease) {
	o.stages.told(l, o.clock.Now())
	o.log.Info("Claim was told that its device can be used", said("unit", l.Unit, "claim", claimOf(l.Attempt), "uuid", l.UUID)...)
}

// Acted implements node.Observer.
func (o *observer) Acted(_ context.Context, l device.Lease, k attach.Kind, took time.Duration, err error) {
	o.stages.acted(l, k, took, o.clock.Now(), err)
	if err == nil {
		o.failed.forget(l, k)
	}
	switch {
	case err == nil && (k == attach.Rescan || k == attach.RescanAll):
		o.log.Info("The kernel was asked to look for a device that did not appear by itself", said("unit", l.Unit, "device", l.FabricDevice,
			"everywhere", k == attach.RescanAll, "took", took)...)
	case err == nil:
		o.log.V(2).Info("Done", "unit", l.Unit, "action", k, "took", took)
	case errors.Is(err, lease.ErrConflict), errors.Is(err, context.Canceled), errors.Is(err, errOtherAgent):
		o.log.V(2).Info("Looks again", "unit", l.Unit, "action", k, "err", err)
	default:
		o.notDone(l, k, took, err)
	}
}

// notDone tells and counts a failure. One that repeats itself is told now and then, with how often it did.
func (o *observer) notDone(l device.Lease, k attach.Kind, took time.Duration, err error) {
	tell, kept := o.failed.tell(failure{fabric: l.Fabric, unit: l.Unit, action: k, text: err.Error()}, o.clock.Now())
	if !tell {
		return
	}
	o.metrics.Failed(reasonOf(k))
	pairs := []any{"unit", l.Unit, "action", k, "took", took}
	if kept > 0 {
		pairs = append(pairs, "alsoSinceLastTold", kept)
	}
	o.log.Error(err, "An action did not go through; what follows is decided anew", pairs...)
}

// Configured tells that the configuration has changed and is faulty, or with nil that it is in order again.
func (o *observer) Configured(err error) {
	if err == nil {
		o.log.Info("The configuration is in order again")
		o.onEvents(func(e *nodestatus.Events) { e.ConfigInOrder() })
		return
	}
	o.metrics.Failed("Config")
	o.log.Error(err, "The configuration has changed and is faulty; the last good one goes on")
	o.onEvents(func(e *nodestatus.Events) { e.ConfigFaulty(err) })
}

// Operated implements leader.Observer.
func (o *observer) Operated(_ context.Context, op pool.Op, err error) {
	if err != nil {
		return
	}
	o.log.Info("Lease", said("operation", op.Kind, "unit", op.Lease.Unit, "node", op.Lease.Node, "claim", claimOf(op.Attempt), "why", op.Why)...)
	if op.Kind == pool.Release {
		o.onEvents(func(e *nodestatus.Events) { e.Released(op.Lease) })
	}
}

// Refused implements leader.Observer.
func (o *observer) Refused(_ context.Context, r pool.Refusal) {
	o.metrics.Failed("AttachRefused")
	for _, a := range r.Attempts {
		o.log.Info("Allocation is taken back", said("claim", claimOf(a), "device", a.Entry, "node", a.Node, "reason", r.Reason, "message", r.Message)...)
	}
	o.onEvents(func(e *nodestatus.Events) { e.Refused(r.Attempts, nil, r.Reason, r.Message) })
}

// Refused also tells the Pods that wait: a person looks there first. Who they are has to be asked, and nothing waits
// for that.
func (o *leaderObserver) Refused(ctx context.Context, r pool.Refusal) {
	o.observer.Refused(ctx, r)
	go o.tellPods(ctx, r)
}

func (o *leaderObserver) tellPods(ctx context.Context, r pool.Refusal) {
	ctx, cancel := context.WithTimeout(ctx, consumersDeadline)
	defer cancel()
	var pods []nodestatus.Pod
	for _, a := range r.Attempts {
		all, err := o.consumers(ctx, a)
		if err != nil {
			o.log.V(1).Info("Who waits for a refused claim could not be read", "claim", a.Claim(), "err", err)
			continue
		}
		for _, p := range podsOf(all) {
			if !slices.Contains(pods, p) {
				pods = append(pods, p)
			}
		}
	}
	if len(pods) > 0 {
		o.onEvents(func(e *nodestatus.Events) { e.Refused(nil, pods, r.Reason, r.Message) })
	}
}

// Counted implements leader.Observer.
func (o *leaderObserver) Counted(_ context.Context, free map[device.Model]pool.Supply, err error) {
	counts := make(map[device.Model]int, len(free))
	for model, s := range free {
		counts[model] = s.Count
	}
	o.metrics.SetFree(o.fabric, counts)
	if err != nil {
		o.log.Error(err, "The fabric manager did not say what is free; the pool stays as it is")
	}
}

// Decided implements leader.Observer.
func (o *leaderObserver) Decided(_ context.Context, p pool.Plan) {
	o.metrics.SetForeign(o.fabric, len(p.Foreign))
	o.lacking(p.Lacking)
	o.onlooking(o.onlookers())
	for _, n := range p.Notes { // each plan says anew what is left alone; a person hears it once
		if !slices.Contains(o.noted, n) {
			o.log.Info("The leader notes", "note", n)
		}
	}
	o.noted = p.Notes
}

// lacking tells each Node, once, what it lacks and that this has ended.
func (o *leaderObserver) lacking(all []pool.Lack) {
	now, texts, of := o.clock.Now(), map[lackOf]string{}, map[device.Model]int{}
	for _, l := range all {
		of[l.Model] += l.Lacks
		texts[lackOf{l.Node, l.NodeUID, l.Model}] = l.String()
	}
	o.metrics.SetLacking(o.fabric, of)
	for at := range texts {
		if o.lacks[at] == nil {
			if o.lacks == nil {
				o.lacks = map[lackOf]*lack{}
			}
			o.lacks[at] = &lack{}
		}
	}
	for at, l := range o.lacks {
		if text := texts[at]; text != l.text || l.since.IsZero() {
			l.text, l.since = text, now
		}
		if l.text == "" && l.told == "" {
			delete(o.lacks, at)
			continue
		}
		if l.text != l.told && !now.Before(l.since.Add(lackSettles)) {
			text := l.text
			l.told = text
			o.onEvents(func(e *nodestatus.Events) { e.Lacking(at.node, at.uid, at.model, text) })
		}
	}
}

// onlooking tells each claim, once for each allocation, that it waits in vain.
func (o *leaderObserver) onlooking(all []claim.Onlooker) {
	looked := make(map[device.Attempt]bool, len(all))
	for _, l := range all {
		looked[l.Attempt] = o.looked[l.Attempt]
		if looked[l.Attempt] || len(l.Pods) == 0 {
			continue
		}
		looked[l.Attempt] = true
		o.log.Info("A claim with admin access waits for a device that nobody attaches", "claim", claimOf(l.Attempt), "device", l.Attempt.Entry)
		o.onEvents(func(e *nodestatus.Events) { e.Onlooker(l.Attempt, podsOf(l.Pods)) })
	}
	o.looked = looked
}

func podsOf(all []claim.Consumer) []nodestatus.Pod {
	var pods []nodestatus.Pod
	for _, c := range all {
		if c.Resource == "pods" {
			pods = append(pods, nodestatus.Pod{Namespace: c.Namespace, Name: c.Name, UID: c.UID})
		}
	}
	return pods
}

// Prepared implements kubeletplugin.Observer.
func (o *observer) Prepared(outcome kubeletplugin.Outcome, took time.Duration) {
	o.metrics.Prepared(took)
	if outcome == kubeletplugin.Refused || outcome == kubeletplugin.TimedOut {
		o.metrics.Failed("Prepare")
	}
}

// Unprepared implements kubeletplugin.Observer.
func (o *observer) Unprepared(outcome kubeletplugin.Outcome, took time.Duration) {
	o.metrics.Unprepared(took)
	if outcome != kubeletplugin.Done {
		o.metrics.Failed("Unprepare")
	}
}

// CheckpointDamaged implements kubeletplugin.Observer.
func (o *observer) CheckpointDamaged(kept string, cause error) {
	o.metrics.Failed("Checkpoint")
	o.log.Error(cause, "The plugin's checkpoint cannot be read; it is kept aside and rebuilt from leases and claims, nothing is released meanwhile", "kept", kept)
	o.onEvents(func(e *nodestatus.Events) { e.CheckpointDamaged(kept, cause) })
}

// OrphanUndone implements kubeletplugin.Observer.
func (o *observer) OrphanUndone(namespace, name string, claim types.UID, units []device.Unit) {
	o.log.Info("A claim that is no more was unprepared without the kubelet's word", "claim", klog.KRef(namespace, name), "claimUID", claim, "units", units)
	o.onEvents(func(e *nodestatus.Events) { e.Unprepared(namespace, name, claim, units) })
}

// PreparedChanged implements kubeletplugin.Observer.
func (o *observer) PreparedChanged() { o.changed() }
