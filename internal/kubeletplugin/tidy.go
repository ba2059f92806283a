// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// resync is how often everything is compared when nothing goes wrong, with jitter.
	resync       = 5 * time.Minute
	resyncJitter = 0.5
	// orphanGrace is how long this process must have seen that a claim is no more before it acts in the
	// kubelet's place: after a forced deletion the kubelet's own Unprepare comes a few seconds later.
	orphanGrace = time.Minute
	// soon is when a round comes that has something left to do which waits for others.
	soon = 20 * time.Second

	tidyBackoff    = 500 * time.Millisecond
	tidyBackoffCap = 20 * time.Second
)

// orphan is a prepared claim that is no more: since when this process knows, and who holds its device.
type orphan struct {
	since   time.Time
	holders string
}

// tidyUntil does the background work until ctx ends: it rebuilds a lost checkpoint, takes claims out of
// leases, removes files without claim, undoes claims that are no more.
func (p *Plugin) tidyUntil(ctx context.Context) {
	work := p.Background()
	backoff := newTidyBackoff()
	for ctx.Err() == nil {
		more, err := work.Round(ctx)
		next := wait.Jitter(resync, resyncJitter)
		if more {
			next = soon
		}
		if err != nil {
			next = backoff.Step()
			if ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Cannot finish the background work of the kubelet plugin, will try again", "after", next)
			}
		} else {
			backoff = newTidyBackoff()
		}
		p.rest(ctx, next, err != nil)
	}
}

func newTidyBackoff() *wait.Backoff {
	const steps = 1 << 30
	return &wait.Backoff{Duration: tidyBackoff, Factor: 2, Jitter: resyncJitter, Steps: steps, Cap: tidyBackoffCap}
}

// rest waits for the next round. While the last one failed, only time helps.
func (p *Plugin) rest(ctx context.Context, d time.Duration, failed bool) {
	untidy := p.untidy
	if failed {
		untidy = nil
	}
	t := p.s.Clock.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-untidy:
	case <-t.C():
	}
}

// tidy does one round. orphans is what it remembers of claims that are no more. busy says that a
// claim could not be looked after, because a call of the kubelet works on it.
func (p *Plugin) tidy(ctx context.Context, orphans map[types.UID]*orphan) (busy bool, err error) {
	if err = p.rebuild(ctx); err != nil {
		return false, err
	}
	strayErr := p.removeStrays(ctx)
	busy, err = p.settleLeases(ctx)
	return busy, errors.Join(strayErr, err, p.undoOrphans(ctx, orphans))
}

// rebuild fills a checkpoint that was lost with what the device leases say, the claims for what no lease speaks of, and
// the CDI specs for claims that are no more, whose containers may run all the same. It errs on the side of "prepared": a claim that the kubelet asks to prepare again is none the worse
// for it, and one that is no more is undone as an orphan.
func (p *Plugin) rebuild(ctx context.Context) error {
	// Not read: only a writer keeps a damaged file aside.
	lost := false
	if err := p.checkpoint.update(ctx, func(r *record) (bool, error) { lost = r.Rebuild; return false, nil }); err != nil {
		return err
	}
	if !lost {
		return nil
	}
	leases, err := p.s.Leases.Held(ctx)
	if err != nil {
		return fmt.Errorf("rebuild the checkpoint from device leases: %w", err)
	}
	claims, err := p.s.Claims.List(ctx)
	if err != nil {
		return fmt.Errorf("rebuild the checkpoint from claims: %w", err)
	}
	specs, err := p.specs.claims()
	if err != nil {
		return fmt.Errorf("rebuild the checkpoint from CDI specs: %w", err)
	}
	names := claimNames(leases, claims)
	err = p.checkpoint.update(ctx, func(r *record) (bool, error) {
		if !r.Rebuild {
			return false, nil
		}
		for _, l := range leases {
			r.adopt(l, names)
		}
		for i := range claims {
			r.adoptClaim(&claims[i], p.s.NodeName, leases)
		}
		r.adoptSpecs(specs, leases)
		r.Rebuild, r.Unprepared = false, nil
		return true, nil
	})
	if err == nil {
		p.released.send()
		klog.FromContext(ctx).Info("Rebuilt the checkpoint from device leases, claims and CDI specs", "leases", len(leases), "specs", len(specs))
	}
	return err
}

// claimNames finds the names of claims that leases know by UID only.
func claimNames(leases []device.Lease, claims []resourceapi.ResourceClaim) map[types.UID]types.NamespacedName {
	names := map[types.UID]types.NamespacedName{}
	for _, l := range leases {
		if !l.Attempt.IsZero() {
			names[types.UID(l.Attempt.UID)] = types.NamespacedName{Namespace: l.Attempt.Namespace, Name: l.Attempt.Name}
		}
	}
	for i := range claims {
		names[claims[i].UID] = types.NamespacedName{Namespace: claims[i].Namespace, Name: claims[i].Name}
	}
	return names
}

// adoptClaim enters what no lease says of a claim: GPUs that are built into this node, and admin access to units
// that it holds.
func (r *record) adoptClaim(claim *resourceapi.ResourceClaim, node string, leases []device.Lease) {
	if claim.Status.Allocation == nil || !validUID(claim.UID) || r.Unprepared[claim.UID] || !allocatedTo(claim, node) {
		return
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		d, ours := demandedDevice(result, node)
		if !ours || result.Driver != device.Driver {
			continue
		}
		if !d.builtIn() {
			held := slices.IndexFunc(leases, func(l device.Lease) bool { return l.Fabric == d.Fabric && l.Unit == d.Unit })
			if !d.Admin || held < 0 {
				continue
			}
			d.UUID = leases[held].UUID
		}
		e := r.Claims[claim.UID]
		if e == nil {
			e = &entry{State: prepareCompleted, Rebuilt: true, Namespace: claim.Namespace, Name: claim.Name}
			r.Claims[claim.UID] = e
		}
		e.AllocatedAt = allocatedAt(claim)
		e.Devices = append(e.Devices, d)
	}
}

// adoptSpecs enters the claims that only a CDI spec tells of: deleted by force while nobody was there to unprepare
// them. They end as orphans.
func (r *record) adoptSpecs(specs map[types.UID][]specDevice, leases []device.Lease) {
	for _, uid := range slices.Sorted(maps.Keys(specs)) {
		if r.Claims[uid] != nil || r.Unprepared[uid] || !validUID(uid) {
			continue
		}
		e := &entry{State: prepareCompleted, Rebuilt: true}
		for _, s := range specs[uid] {
			unit, _ := device.UnitOfEntry(s.entry)
			held := slices.IndexFunc(leases, func(l device.Lease) bool { return l.Unit == unit })
			if held < 0 {
				continue // nothing of ours that could be taken away
			}
			l := &leases[held]
			e.Devices = append(e.Devices, preparedDevice{Request: s.request, Pool: l.Fabric.Pool(), Entry: s.entry, Fabric: l.Fabric, Unit: unit, UUID: l.UUID})
		}
		if len(e.Devices) > 0 {
			r.Claims[uid] = e
		}
	}
}

// allocatedTo tells whether the claim's Pod can be on the node.
func allocatedTo(claim *resourceapi.ResourceClaim, node string) bool {
	selector := claim.Status.Allocation.NodeSelector
	if selector == nil {
		return true
	}
	for _, term := range selector.NodeSelectorTerms {
		other := slices.ContainsFunc(term.MatchFields, func(r corev1.NodeSelectorRequirement) bool {
			return r.Key == metav1.ObjectNameField && r.Operator == corev1.NodeSelectorOpIn && !slices.Contains(r.Values, node)
		})
		if !other {
			return true
		}
	}
	return false
}

// adopt enters the claims that a lease names.
func (r *record) adopt(l device.Lease, names map[types.UID]types.NamespacedName) {
	uids := make([]types.UID, 0, len(l.PreparedFor)+1)
	for _, uid := range append(slices.Clone(l.PreparedFor), l.Attempt.UID) {
		if uid := types.UID(uid); validUID(uid) && !slices.Contains(uids, uid) && !r.Unprepared[uid] {
			uids = append(uids, uid)
		}
	}
	for _, uid := range uids {
		d := preparedDevice{Pool: l.Fabric.Pool(), Entry: l.Unit.ReadyEntry(), Fabric: l.Fabric, Unit: l.Unit, UUID: l.UUID}
		e := r.Claims[uid]
		if e == nil {
			e = &entry{State: prepareCompleted, Rebuilt: true, Namespace: names[uid].Namespace, Name: names[uid].Name}
			r.Claims[uid] = e
		}
		if string(uid) == l.Attempt.UID {
			d.Pool, d.Entry, e.AllocatedAt = l.Attempt.Pool, l.Attempt.Entry, l.Attempt.AllocatedAt
		}
		if !slices.ContainsFunc(e.Devices, func(has preparedDevice) bool { return has.Fabric == d.Fabric && has.Unit == d.Unit }) {
			e.Devices = append(e.Devices, d)
		}
	}
}

// removeStrays deletes files that belong to no entry. It holds the checkpoint, so that no claim is
// prepared between the look and the deletion.
func (p *Plugin) removeStrays(ctx context.Context) error {
	return p.checkpoint.update(ctx, func(r *record) (bool, error) {
		if r.Rebuild {
			return false, nil
		}
		removed, err := p.specs.removeStrays(func(uid types.UID) bool { return r.Claims[uid] != nil })
		if len(removed) > 0 {
			klog.FromContext(ctx).Info("Removed CDI specs without claim", "files", removed)
		}
		return false, errors.Join(err, p.removeStrayMetadata(r), p.removeTemporary())
	})
}

// removeStrayMetadata deletes what the kubelet helper keeps for claims that are not prepared. It names
// directories by namespace and name, not by UID.
func (p *Plugin) removeStrayMetadata(r *record) error {
	keep := map[string]bool{}
	for _, e := range r.Claims {
		keep[e.Namespace+"_"+e.Name] = true
	}
	dir := filepath.Join(p.s.DataDir, metadataDir)
	found, err := os.ReadDir(dir)
	if err = ignoreMissing(err); err != nil {
		return fmt.Errorf("list device metadata: %w", err)
	}
	for _, f := range found {
		if !keep[f.Name()] {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, f.Name())))
		}
	}
	return err
}

// removeTemporary deletes what crashes left of writing the checkpoint. The caller holds it.
func (p *Plugin) removeTemporary() error {
	left, err := filepath.Glob(filepath.Join(p.s.DataDir, tempPattern(checkpointFile)))
	for _, tmp := range left {
		err = errors.Join(err, ignoreMissing(os.Remove(tmp)))
	}
	return err
}

// settleLeases takes claims that are not prepared out of the leases of this node.
func (p *Plugin) settleLeases(ctx context.Context) (busy bool, err error) {
	leases, err := p.s.Leases.Held(ctx)
	if err != nil {
		return false, fmt.Errorf("look for unprepared claims in device leases: %w", err)
	}
	for _, l := range leases {
		for _, uid := range l.PreparedFor {
			leaseBusy, leaseErr := p.settleLease(ctx, l, types.UID(uid))
			busy, err = busy || leaseBusy, errors.Join(err, leaseErr)
		}
	}
	return busy, err
}

func (p *Plugin) settleLease(ctx context.Context, l device.Lease, claim types.UID) (busy bool, err error) {
	if p.has(claim, l) {
		return false, nil
	}
	// With the claim's turn, no Prepare of it can rely on the note that is being removed.
	ctx, done, ok := p.claims.tryTake(ctx, claim)
	if !ok {
		return true, nil
	}
	defer done()
	l, found, err := p.s.Leases.Get(ctx, l.Fabric, l.Unit)
	if err == nil && found && slices.Contains(l.PreparedFor, string(claim)) && !p.has(claim, l) {
		err = p.s.Leases.Unprepared(ctx, l, claim)
	}
	if err != nil && !errors.Is(context.Cause(ctx), errInterrupted) {
		return false, fmt.Errorf("take claim %s out of the device lease of unit %s: %w", claim, l.Unit, err)
	}
	return false, nil
}

// has tells whether the claim has the lease's unit prepared, or whether that is unknown.
func (p *Plugin) has(claim types.UID, l device.Lease) bool {
	owners, known := p.PreparedBy(l.Fabric, l.Unit)
	return !known || slices.Contains(owners, claim)
}

// undoOrphans unprepares claims that are deleted or allocated anew, when the kubelet has had time to do
// it and no process holds a device.
func (p *Plugin) undoOrphans(ctx context.Context, orphans map[types.UID]*orphan) error {
	r, err := p.checkpoint.read()
	if err != nil || r.Rebuild {
		return err
	}
	for uid := range orphans {
		if r.Claims[uid] == nil {
			delete(orphans, uid)
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(r.Claims)) {
		e := r.Claims[uid]
		gone, getErr := p.gone(ctx, uid, e)
		if getErr != nil {
			err = errors.Join(err, getErr)
			continue
		}
		if !gone {
			delete(orphans, uid)
			continue
		}
		if orphans[uid] == nil {
			orphans[uid] = &orphan{since: p.s.Clock.Now()}
		}
		if p.s.Clock.Since(orphans[uid].since) >= orphanGrace {
			err = errors.Join(err, p.undoOrphan(ctx, uid, e, orphans[uid]))
		}
	}
	return err
}

// gone tells whether the claim that was prepared is no more: deleted, another of the same name, or
// allocated anew.
func (p *Plugin) gone(ctx context.Context, uid types.UID, e *entry) (bool, error) {
	if e.Name == "" {
		return true, nil // it was looked for when the checkpoint was rebuilt
	}
	claim, found, err := p.s.Claims.Get(ctx, e.Namespace, e.Name)
	if err != nil {
		return false, fmt.Errorf("look whether %s still exists: %w", e.claimText(uid), err)
	}
	return !found || claim.UID != uid || !sameAllocation(claim, e), nil
}

func sameAllocation(claim *resourceapi.ResourceClaim, e *entry) bool {
	return claim.Status.Allocation != nil && (e.AllocatedAt == "" || e.AllocatedAt == allocatedAt(claim))
}

func (p *Plugin) undoOrphan(ctx context.Context, uid types.UID, e *entry, o *orphan) error {
	for _, d := range e.Devices {
		holders, err := p.s.GPUs.Holders(ctx, d.UUID)
		if err != nil {
			return fmt.Errorf("look who holds unit %s of %s, which is no more: %w", d.Unit, e.claimText(uid), err)
		}
		if holders == "" {
			continue
		}
		if holders != o.holders {
			o.holders = holders
			klog.FromContext(ctx).Info("A claim that is no more stays prepared: a process holds its device",
				"claim", klog.KRef(e.Namespace, e.Name), "uid", uid, "unit", d.Unit, "holders", holders)
		}
		return nil
	}
	ctx, done, ok := p.claims.tryTake(ctx, uid)
	if !ok {
		return nil // the kubelet is at it
	}
	was, err := p.drop(ctx, uid, e)
	done()
	if err != nil {
		return fmt.Errorf("unprepare %s, which is no more: %w", e.claimText(uid), err)
	}
	if was != nil {
		p.wakeTidy() // its lease and metadata are next
		p.s.Observer.OrphanUndone(e.Namespace, e.Name, uid, unitsOf(e.Devices))
	}
	return nil
}
