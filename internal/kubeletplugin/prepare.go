// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// patience is how long Prepare waits for what is not there yet: an error costs the Pod about a
	// minute, and the kubelet gives up on a call after 45 s.
	patience = 40 * time.Second
	// answerTime is kept of the kubelet's own deadline, so that it reads our reason, not its own.
	answerTime = 3 * time.Second
	// lookAgain bounds the wait for a change that nobody tells us of.
	lookAgain = time.Second
)

// errPatience: Prepare has waited long enough.
var errPatience = errors.New("waited long enough")

// notYet is a reason to wait, worded to follow "waiting for".
type notYet struct{ what string }

func (n *notYet) Error() string { return "waiting for " + n.what }

func waitFor(format string, args ...any) error { return &notYet{fmt.Sprintf(format, args...)} }

// PrepareResourceClaims implements kubeletplugin.DRAPlugin. The claims of a Pod wait side by side.
func (p *Plugin) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	ctx, cancel := p.withPatience(ctx)
	defer cancel()
	var (
		mu      sync.Mutex
		all     sync.WaitGroup
		results = make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	)
	for _, claim := range claims {
		all.Go(func() {
			began := p.s.Clock.Now()
			devices, err := p.prepare(ctx, claim)
			if err != nil {
				err = fmt.Errorf("prepare claim %s/%s on node %s: %w", claim.Namespace, claim.Name, p.s.NodeName, err)
			}
			p.s.Observer.Prepared(outcome(err), p.s.Clock.Since(began))
			mu.Lock()
			defer mu.Unlock()
			results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
		})
	}
	all.Wait()
	return results, nil
}

// withPatience ends the context with errPatience when Prepare has to answer.
func (p *Plugin) withPatience(ctx context.Context) (context.Context, func()) {
	limit := patience
	if deadline, ok := ctx.Deadline(); ok {
		limit = min(limit, max(0, deadline.Sub(p.s.Clock.Now())-answerTime))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	timer := p.s.Clock.NewTimer(limit)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-timer.C():
			cancel(errPatience)
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		timer.Stop()
		cancel(context.Canceled)
		<-ended
	}
}

// prepare brings one claim to PrepareCompleted, or leaves no trace of the try.
func (p *Plugin) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) (_ []kubeletplugin.Device, err error) {
	devices, err := demanded(claim, p.s.NodeName)
	if err != nil {
		return nil, err
	}
	began := p.s.Clock.Now()
	ctx, done, err := p.claims.take(ctx, claim.UID)
	if err != nil {
		return nil, fmt.Errorf("another call for the same claim is at work: %w", err)
	}
	defer func() {
		done()
		if err != nil {
			p.wakeTidy() // not before: it leaves a claim alone that is being worked on
		}
	}()
	var reason error
	for {
		// Before the look, so that a change in between wakes us.
		wake := []<-chan struct{}{p.s.Leases.Changed(), p.s.GPUs.Changed(), p.released.next()}
		answer, err := p.tryPrepare(ctx, claim, devices)
		if err == nil {
			return answer, nil
		}
		var wait *notYet
		if !errors.As(err, &wait) && ctx.Err() == nil {
			return nil, errors.Join(err, p.undo(ctx, claim.UID))
		}
		// A look that the end of the call cut short knows less than the one before.
		if reason == nil || ctx.Err() == nil {
			reason = err
		}
		if err = p.sleep(ctx, wake); err != nil {
			waited := p.s.Clock.Since(began).Round(time.Second)
			return nil, errors.Join(fmt.Errorf("%w (%w after %s)", reason, err, waited), p.undo(ctx, claim.UID))
		}
	}
}

// sleep waits for one of the wakers, or a moment.
func (p *Plugin) sleep(ctx context.Context, wake []<-chan struct{}) error {
	t := p.s.Clock.NewTimer(lookAgain)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-wake[0]:
	case <-wake[1]:
	case <-wake[2]:
	case <-t.C():
	}
	return context.Cause(ctx)
}

// demanded reads what the claim was given of our devices.
func demanded(claim *resourceapi.ResourceClaim, node string) ([]preparedDevice, error) {
	if !validUID(claim.UID) {
		return nil, fmt.Errorf("the claim's UID %q cannot name a file", claim.UID)
	}
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated")
	}
	var devices []preparedDevice
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.Driver != device.Driver {
			continue
		}
		d, ok := demandedDevice(r, node)
		if !ok {
			return nil, fmt.Errorf("device %s/%s is neither of a fabric's pool nor of this node's own: this agent does not publish it", r.Pool, r.Device)
		}
		devices = append(devices, d)
	}
	if len(devices) == 0 {
		return nil, fmt.Errorf("no device of driver %s is allocated to the claim", device.Driver)
	}
	return devices, nil
}

func demandedDevice(r resourceapi.DeviceRequestAllocationResult, node string) (preparedDevice, bool) {
	d := preparedDevice{Request: r.Request, Pool: r.Pool, Entry: r.Device, Admin: ptr.Deref(r.AdminAccess, false)}
	if id, builtIn := device.Unit(r.Device).BuiltIn(); builtIn && r.Pool == node {
		d.Unit, d.UUID = device.Unit(r.Device), id
		return d, true
	}
	var ok bool
	d.Fabric, ok = device.FabricOfPool(r.Pool)
	d.Unit, _ = device.UnitOfEntry(r.Device)
	return d, ok
}

// tryPrepare goes the whole way once, if everything is there. Each step finds what an earlier try did.
func (p *Plugin) tryPrepare(ctx context.Context, claim *resourceapi.ResourceClaim, devices []preparedDevice) ([]kubeletplugin.Device, error) {
	leases, gpus, err := p.resolve(ctx, claim, devices)
	if err != nil {
		return nil, err
	}
	devices = slices.Clone(devices)
	for i := range devices {
		devices[i].UUID = gpus[i].UUID
	}
	fresh, completed, err := p.reserve(ctx, claim, devices)
	if err != nil {
		return nil, err
	}
	if err = p.confirm(ctx, claim, devices, leases, fresh); err != nil {
		return nil, errors.Join(err, p.undo(ctx, claim.UID))
	}
	common, own, err := p.s.Specs.Edits(ctx, gpus)
	if err != nil {
		return nil, waitFor("the driver's files: %v", err)
	}
	if err = checkEdits(gpus, common, own); err != nil {
		return nil, err
	}
	if err = p.specs.write(claim.UID, devices, common, own); err != nil {
		return nil, waitFor("the CDI spec to be written: %v", err)
	}
	if !completed {
		if err = p.complete(ctx, claim.UID); err != nil {
			return nil, err
		}
		klog.FromContext(ctx).Info("Prepared claim", "claim", klog.KObj(claim), "uid", claim.UID, "devices", unitsOf(devices))
	}
	return answer(claim.UID, devices, gpus), nil
}

// resolve reads lease and GPU of each device and says what is missing.
func (p *Plugin) resolve(ctx context.Context, claim *resourceapi.ResourceClaim, devices []preparedDevice) ([]device.Lease, []GPU, error) {
	leases, gpus := make([]device.Lease, len(devices)), make([]GPU, len(devices))
	for i, d := range devices {
		lease, err := p.usable(ctx, claim, d)
		if err != nil {
			return nil, nil, err
		}
		gpu, found, err := p.s.GPUs.GPU(ctx, lease.UUID)
		if err != nil {
			return nil, nil, waitFor("GPU %s of unit %s: %v", lease.UUID, d.Unit, err)
		}
		if !found {
			return nil, nil, waitFor("GPU %s of unit %s to be seen by the driver", lease.UUID, d.Unit)
		}
		leases[i], gpus[i] = lease, gpu
	}
	return leases, gpus, nil
}

// own tells whether a GPU that is built into this node is still that: a lease that names it says otherwise. What
// stands for its lease holds its identity alone.
func (p *Plugin) own(ctx context.Context, d preparedDevice) (device.Lease, error) {
	held, err := p.s.Leases.Held(ctx)
	if err != nil {
		return device.Lease{}, waitFor("the device leases of this node, which may name GPU %s: %v", d.UUID, err)
	}
	for _, l := range held {
		if l.UUID == d.UUID {
			return l, waitFor("GPU %s to be built into this node again: it is unit %s of fabric %s", d.UUID, l.Unit, l.Fabric)
		}
	}
	return device.Lease{UUID: d.UUID}, nil
}

// usable reads the unit's lease and tells whether the claim may use the unit here and now.
func (p *Plugin) usable(ctx context.Context, claim *resourceapi.ResourceClaim, d preparedDevice) (device.Lease, error) {
	if d.builtIn() {
		return p.own(ctx, d)
	}
	l, found, err := p.s.Leases.Get(ctx, d.Fabric, d.Unit)
	if err != nil {
		return l, waitFor("the device lease of unit %s: %v", d.Unit, err)
	}
	if !found {
		return l, waitFor("unit %s to be assigned: it has no device lease", d.Unit)
	}
	_, ready := device.UnitOfEntry(d.Entry)
	mine := l.Attempt.UID == string(claim.UID) && l.Attempt.AllocatedAt == allocatedAt(claim)
	others := slices.ContainsFunc(l.PreparedFor, func(uid string) bool { return uid != string(claim.UID) })
	switch {
	case l.Node != p.s.NodeName:
		return l, waitFor("unit %s to be assigned to this node: node %s holds it", d.Unit, l.Node)
	case l.Phase == device.Failed:
		return l, waitFor("unit %s to be attached: it failed with %s: %s", d.Unit, l.Failure.Reason, l.Failure.Message)
	case l.Phase != device.Attached:
		return l, waitFor("unit %s to be attached: it is in phase %s", d.Unit, l.Phase)
	case l.UUID == "":
		return l, waitFor("the GPU of unit %s to be identified", d.Unit)
	case d.Admin:
		return l, nil
	case !ready && !mine, !l.Attempt.IsZero() && !mine:
		return l, waitFor("unit %s to serve this claim: it serves %s", d.Unit, attemptText(l.Attempt))
	case others:
		return l, waitFor("unit %s to be unprepared for claim of UID %s", d.Unit, l.PreparedFor[0])
	case mine, slices.Contains(l.PreparedFor, string(claim.UID)):
		return l, nil
	case !l.Idle():
		return l, waitFor("unit %s to be idle: its lease says neither idle nor this claim", d.Unit)
	}
	return l, nil
}

func attemptText(a device.Attempt) string {
	if a.IsZero() {
		return "no claim"
	}
	return "claim " + a.Claim() + " allocated at " + a.AllocatedAt
}

// reserve writes ahead that the claim gets the devices, unless another one has them. fresh tells that
// it had not been written before, completed that an earlier call went the whole way.
func (p *Plugin) reserve(ctx context.Context, claim *resourceapi.ResourceClaim, devices []preparedDevice) (fresh, completed bool, err error) {
	err = p.checkpoint.update(ctx, func(r *record) (bool, error) {
		if r.Rebuild {
			return false, waitFor("the checkpoint to be rebuilt from device leases")
		}
		if owner, d, conflict := r.conflict(claim.UID, devices); conflict {
			return false, waitFor("unit %s to be unprepared for %s", d.Unit, r.Claims[owner].claimText(owner))
		}
		e := &entry{
			Namespace: claim.Namespace, Name: claim.Name, State: prepareStarted,
			AllocatedAt: allocatedAt(claim), Devices: devices,
		}
		old := r.Claims[claim.UID]
		switch {
		case old == nil:
			fresh = true
		case old.Rebuilt:
			// What it held is known now. It may have been answered: it stays completed.
			e.State = prepareCompleted
		case old.AllocatedAt != e.AllocatedAt:
			return false, waitFor("this claim to be unprepared for its allocation at %s", old.AllocatedAt)
		default:
			e.State = old.State
			if slices.Equal(old.Devices, e.Devices) {
				completed = e.State == prepareCompleted
				return false, nil
			}
		}
		completed = e.State == prepareCompleted
		r.Claims[claim.UID] = e
		return true, nil
	})
	return fresh, completed, err
}

// confirm makes sure that nobody has begun to release a unit before the reservation was stored. Whoever
// releases one stores that in the lease first and looks for reservations then; here it is the other way
// round, so one of the two sees the other. A note in the lease counts only if the reservation is as old: what it
// rests on may have been undone, and the note is then taken off by whoever sees that.
func (p *Plugin) confirm(ctx context.Context, claim *resourceapi.ResourceClaim, devices []preparedDevice, leases []device.Lease, fresh bool) error {
	for i, d := range devices {
		if _, ready := device.UnitOfEntry(d.Entry); ready && !d.Admin {
			if !slices.Contains(leases[i].PreparedFor, string(claim.UID)) {
				if err := p.s.Leases.PrepareReady(ctx, leases[i], claim.UID); err != nil {
					return waitFor("the device lease of unit %s to take the claim: %v", d.Unit, err)
				}
				continue
			}
			if fresh {
				// Of a try that was undone. Until it is written anew, the node's loop may be about to take it off.
				err := p.s.Leases.Unprepared(ctx, leases[i], claim.UID)
				return waitFor("the device lease of unit %s to take the claim anew: %v", d.Unit, err)
			}
		}
		if _, err := p.usable(ctx, claim, d); err != nil {
			return err
		}
	}
	return nil
}

func (p *Plugin) complete(ctx context.Context, claim types.UID) error {
	return p.checkpoint.update(ctx, func(r *record) (bool, error) {
		e := r.Claims[claim]
		if e == nil {
			return false, waitFor("the checkpoint, which lost the claim meanwhile")
		}
		e.State = prepareCompleted
		return true, nil
	})
}

// undo takes back what a failed try did, unless an earlier call has told the kubelet already. It works
// after ctx has ended.
func (p *Plugin) undo(ctx context.Context, claim types.UID) error {
	err := p.checkpoint.update(context.WithoutCancel(ctx), func(r *record) (bool, error) {
		e := r.Claims[claim]
		if e == nil || e.State != prepareStarted {
			return false, nil
		}
		// The spec goes first: an entry without spec is found and finished, a spec without entry is a leak.
		if err := p.specs.remove(claim); err != nil {
			return false, err
		}
		delete(r.Claims, claim)
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("undo it: %w", err)
	}
	return nil
}

// answer is what the kubelet is told; the same for the same claim and GPUs.
func answer(claim types.UID, devices []preparedDevice, gpus []GPU) []kubeletplugin.Device {
	out := make([]kubeletplugin.Device, 0, len(devices))
	for i, d := range devices {
		attributes := map[string]resourceapi.DeviceAttribute{
			"uuid": {StringValue: new(string(gpus[i].UUID))},
			"unit": {StringValue: new(string(d.Unit))},
			string(deviceattribute.StandardDeviceAttributePCIBusID): {StringValue: new(gpus[i].PCI.String())},
		}
		if gpus[i].Name != "" {
			attributes["productName"] = resourceapi.DeviceAttribute{StringValue: new(gpus[i].Name)}
		}
		out = append(out, kubeletplugin.Device{
			Requests: []string{d.Request}, PoolName: d.Pool, DeviceName: d.Entry,
			CDIDeviceIDs: []string{cdiID(claim, d)},
			Metadata:     &kubeletplugin.DeviceMetadata{Attributes: attributes},
		})
	}
	return out
}

func unitsOf(devices []preparedDevice) []device.Unit {
	units := make([]device.Unit, 0, len(devices))
	for _, d := range devices {
		units = append(units, d.Unit)
	}
	return units
}
