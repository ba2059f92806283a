// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Reasons of events. Alerts and scripts match them: they are API.
const (
	ReasonAttaching    = "GPUAttaching"
	ReasonAttached     = "GPUAttached"
	ReasonAttachFailed = "GPUAttachFailed"
	ReasonFailed       = "GPUFailed"
	ReasonIdle         = "GPUIdle"
	ReasonHeld         = "GPUHeld"
	ReasonReleasing    = "GPUReleasing"
	ReasonReturned     = "GPUReturned"
	ReasonRefused      = "GPURefused"
	ReasonOnlooker     = "GPUAdminAccess"
	ReasonLost         = "GPULost"
	ReasonConflict     = "GPUConflict"
	ReasonForeign      = "GPUForeign"
	ReasonLacking      = "GPUMinimumLacking"
	ReasonMinimumMet   = "GPUMinimumMet"
	ReasonUnhealthy    = "GPUUnhealthy"
	ReasonCheckpoint   = "CheckpointDamaged"
	ReasonUnprepared   = "ClaimUnprepared"
	ReasonConfig       = "ConfigFaulty"
	ReasonConfigAgain  = "ConfigInOrder"
)

// What was done when the event happened; the API wants a word for it.
const (
	actionAttach  = "Attach"
	actionRelease = "Release"
	actionObserve = "Observe"
)

// longestNote is the API's limit.
const longestNote = 1024

// Pod names a Pod that an event is about.
type Pod struct {
	Namespace, Name, UID string
}

// Events records what happened to units where people look for it. Equal ones in a row are counted by the
// API machinery, so the notes say nothing that changes from one to the next.
type Events struct {
	recorder events.EventRecorder
	node     corev1.ObjectReference
}

// StartRecorder sends events to the API server until ctx ends. It never blocks its callers: what cannot be
// sent is dropped.
func StartRecorder(ctx context.Context, client kubernetes.Interface) (events.EventRecorder, error) {
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		return nil, fmt.Errorf("start recording events: %w", err)
	}
	context.AfterFunc(ctx, broadcaster.Shutdown)
	return broadcaster.NewRecorder(scheme.Scheme, device.Driver), nil
}

// NewEvents returns Events of the agent on a Node.
func NewEvents(recorder events.EventRecorder, node string, uid types.UID) *Events {
	return &Events{recorder: recorder, node: corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: node, UID: uid}}
}

// event is one line to be told.
type event struct {
	onClaim              bool // else on the Node
	warning              bool
	reason, action, note string
	// unit is what an event on the Node is about, its device lease for a unit. The API machinery counts events of
	// one reason as one and keeps the first note, unless they are about different objects.
	unit *corev1.ObjectReference
}

// gpuRef names a GPU that no object stands for.
func (e *Events) gpuRef(id string) *corev1.ObjectReference { return e.part("gpu", id) }

// leaseRef names a unit's device lease: another one each time the unit leaves the pool.
func leaseRef(l device.Lease) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		Kind: "Lease", APIVersion: "coordination.k8s.io/v1", Namespace: device.LeaseNamespace,
		Name: device.LeaseName(l.Fabric, l.Unit), UID: types.UID(l.ObjectUID),
	}
}

// Stored tells what the holder's write of a lease means.
func (e *Events) Stored(before, after device.Lease) {
	for _, ev := range changes(before, after) {
		claim := after.Attempt
		if claim.IsZero() {
			claim = before.Attempt
		}
		e.record(ev, claim)
	}
}

// Released tells that a unit was asked to go back: a leader has written that into the holder's lease, which
// the holder's own writes do not show.
func (e *Events) Released(l device.Lease) {
	holder := e.node
	if l.Node != holder.Name {
		holder.Name, holder.UID = l.Node, types.UID(l.NodeUID)
	}
	(&Events{recorder: e.recorder, node: holder}).record(releasing(l), device.Attempt{})
}

// Deleted tells that a unit is back in the pool.
func (e *Events) Deleted(l device.Lease) {
	e.record(event{
		reason: ReasonReturned, action: actionRelease,
		note: fmt.Sprintf("GPU %s (%s) is back in the pool of fabric %s", l.Unit, l.Model, l.Fabric), unit: leaseRef(l),
	}, device.Attempt{})
}

// changes returns what a person should hear of a lease that was written anew.
func changes(before, after device.Lease) []event {
	var all []event
	add := func(onClaim, warning bool, reason, action, note string, args ...any) {
		all = append(all, event{onClaim, warning, reason, action, fmt.Sprintf(note, args...), leaseRef(after)})
	}
	claimed := !after.Attempt.IsZero()
	switch {
	case before.Phase == device.Failed && after.Phase == device.Failed && before.Failure.Message != after.Failure.Message:
		add(false, true, ReasonFailed, actionObserve, "GPU %s (%s): %s: %s", after.Unit, after.Model, after.Failure.Reason, after.Failure.Message)
		all[len(all)-1].unit.ResourceVersion = after.Version // it says more than the first one did
	case before.Phase == after.Phase:
	case after.Phase == device.Attaching && claimed:
		add(true, false, ReasonAttaching, actionAttach, "attaching a GPU (%s, unit %s) to node %s", after.Model, after.Unit, after.Node)
	case after.Phase == device.Attached && before.Phase != device.Releasing:
		where := fmt.Sprintf("GPU %s (%s) is attached at %s as %s", after.Unit, after.Model, after.PCI, after.UUID)
		if claimed {
			add(true, false, ReasonAttached, actionAttach, "%s on node %s", where, after.Node)
			where += " for claim " + after.Attempt.Claim()
		}
		add(false, false, ReasonAttached, actionAttach, "%s", where)
	case after.Phase == device.Attached:
		add(false, false, ReasonAttached, actionObserve, "GPU %s (%s) stays: it is wanted here again", after.Unit, after.Model)
	case after.Phase == device.Failed && before.Phase == device.Attached && claimed:
		for _, onClaim := range []bool{false, true} {
			add(onClaim, true, ReasonLost, actionObserve, "GPU %s (%s) was lost on node %s while the claim had it: %s: %s",
				after.Unit, after.Model, after.Node, after.Failure.Reason, after.Failure.Message)
		}
	case after.Phase == device.Failed:
		if claimed && before.Phase != device.Releasing {
			add(true, true, ReasonAttachFailed, actionAttach, "attach of GPU %s (%s) to node %s: %s: %s",
				after.Unit, after.Model, after.Node, after.Failure.Reason, after.Failure.Message)
		}
		add(false, true, ReasonFailed, actionObserve, "GPU %s (%s), %s: %s: %s", after.Unit, after.Model,
			strings.ToLower(string(before.Phase)), after.Failure.Reason, after.Failure.Message)
	case after.Phase == device.Releasing:
		all = append(all, releasing(after))
	}
	if !before.Idle() && after.Idle() {
		add(false, false, ReasonIdle, actionObserve, "GPU %s (%s) is idle: any Pod on this node can have it at once", after.Unit, after.Model)
	}
	if after.HeldBy != "" && before.HeldBy != after.HeldBy {
		add(false, true, ReasonHeld, actionObserve, "GPU %s (%s) has no claim but is held open by %s", after.Unit, after.Model, after.HeldBy)
		all[len(all)-1].unit.ResourceVersion = after.Version // another process is another event
	}
	return all
}

func releasing(l device.Lease) event {
	return event{
		reason: ReasonReleasing, action: actionRelease, note: fmt.Sprintf("GPU %s (%s) goes back to the pool", l.Unit, l.Model), unit: leaseRef(l),
	}
}

// Refused tells a claim, and the Pods that wait for it, that the leader took an allocation back.
func (e *Events) Refused(attempts []device.Attempt, pods []Pod, reason, message string) {
	for _, a := range attempts {
		e.record(event{onClaim: true, warning: true, reason: ReasonRefused, action: actionAttach, note: reason + ": " + message}, a)
	}
	for _, p := range pods {
		e.pod(p, ReasonRefused, actionAttach, reason+": "+message)
	}
}

// Onlooker tells a claim with admin access, and the Pods that wait for it, that nothing is attached for it.
func (e *Events) Onlooker(a device.Attempt, pods []Pod) {
	note := fmt.Sprintf("device %s, which the claim was given with admin access, has to be attached first, and nothing is attached for an administrator; "+
		"let the claim select what is attached: device.attributes[%q].uuid != \"\"", a.Entry, device.Driver)
	e.record(event{onClaim: true, warning: true, reason: ReasonOnlooker, action: actionAttach, note: note}, a)
	for _, p := range pods {
		e.pod(p, ReasonOnlooker, actionAttach, note)
	}
}

// Conflict tells the Node that somebody else advertises its GPUs.
func (e *Events) Conflict(found []Advertiser) {
	if c := ConflictCondition(found); c.Status == corev1.ConditionTrue {
		e.record(event{warning: true, reason: ReasonConflict, action: actionObserve, note: c.Message}, device.Attempt{})
	}
}

// Foreign tells the Node of a device that the fabric manager lists on its machine and that nobody of ours attached.
// adoptAfter is how long it has to be there until it is taken in, 0 where that is not wanted.
func (e *Events) Foreign(f device.FabricID, d device.OnFabric, adoptAfter time.Duration) {
	fate := "it is neither handed out nor detached"
	if adoptAfter > 0 {
		fate = fmt.Sprintf("once it has been there for %s it is taken in as an idle GPU, if its model is configured, its identity is known and it is not critical", adoptAfter)
	}
	e.record(event{
		warning: true, reason: ReasonForeign, action: actionObserve, unit: e.gpuRef(d.ID),
		note: fmt.Sprintf("fabric %s lists device %s (%s, %s) on this node's machine, and no device lease says why: another tenant or a person attached it; %s",
			f, d.ID, d.Model, cmp.Or(string(d.UUID), "of unknown identity"), fate),
	}, device.Attempt{})
}

// Lacking tells a Node that it has less than the minimum of a model, and why; an empty text that this is over.
func (e *Events) Lacking(node, uid string, m device.Model, text string) {
	on := &Events{recorder: e.recorder, node: corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: node, UID: types.UID(uid)}}
	ev := event{
		reason: ReasonMinimumMet, action: actionObserve, unit: on.part("minimum", string(m)),
		note: fmt.Sprintf("node %s no longer lacks units of model %s", node, m),
	}
	if text != "" {
		ev.warning, ev.reason, ev.note = true, ReasonLacking, text
		ev.unit = on.part("minimum", fmt.Sprintf("%s-%x", m, hash(text))) // another reason is another event
	}
	on.record(ev, device.Attempt{})
}

// part names something of the Node that no object stands for.
func (e *Events) part(what, id string) *corev1.ObjectReference {
	ref := e.node
	ref.FieldPath = device.Driver + "/" + what + "{" + id + "}"
	return &ref
}

func hash(text string) uint64 {
	id := fnv.New64a()
	_, _ = id.Write([]byte(text)) // never fails
	return id.Sum64()
}

// Unhealthy tells the Node that a GPU should not be used any more; what is the unit's or device's name.
func (e *Events) Unhealthy(what string, uuid device.GPUUUID, why string) {
	e.record(event{
		warning: true, reason: ReasonUnhealthy, action: actionObserve, unit: e.gpuRef(string(uuid)),
		note: fmt.Sprintf("GPU %s (%s) is unhealthy: %s", what, uuid, why),
	}, device.Attempt{})
}

// ConfigFaulty tells the Node that its agent does not take up the configuration as it is now.
func (e *Events) ConfigFaulty(cause error) {
	e.record(event{
		warning: true, reason: ReasonConfig, action: actionObserve,
		unit: e.part("config", fmt.Sprintf("%x", hash(cause.Error()))), // another fault is another event
		note: "the configuration has changed and is faulty; this node's agent goes on with the last good one: " + strings.ReplaceAll(cause.Error(), "\n", "; "),
	}, device.Attempt{})
}

// ConfigInOrder tells the Node that the fault of the configuration is gone.
func (e *Events) ConfigInOrder() {
	e.record(event{
		reason: ReasonConfigAgain, action: actionObserve, note: "the configuration is in order again, and this node's agent goes by it",
	}, device.Attempt{})
}

// CheckpointDamaged tells the Node that what was prepared had to be found out anew.
func (e *Events) CheckpointDamaged(kept string, cause error) {
	e.record(event{
		warning: true, reason: ReasonCheckpoint, action: actionObserve,
		note: fmt.Sprintf("the kubelet plugin's checkpoint could not be read (%v); it is kept as %s and rebuilt from device leases and claims", cause, kept),
	}, device.Attempt{})
}

// Unprepared tells the Node that a claim that is no more was unprepared in the kubelet's place.
func (e *Events) Unprepared(namespace, name string, claim types.UID, units []device.Unit) {
	e.record(event{
		warning: true, reason: ReasonUnprepared, action: actionRelease,
		unit: &corev1.ObjectReference{Kind: "ResourceClaim", APIVersion: "resource.k8s.io/v1", Namespace: namespace, Name: name, UID: claim},
		note: fmt.Sprintf("claim %s/%s is no more and the kubelet did not say so; it was unprepared, and its GPUs are let go: %s", namespace, name, join(units)),
	}, device.Attempt{})
}

func join[T ~string](all []T) string {
	texts := make([]string, 0, len(all))
	for _, v := range all {
		texts = append(texts, string(v))
	}
	return strings.Join(texts, ", ")
}

func (e *Events) record(ev event, claim device.Attempt) {
	kind := corev1.EventTypeNormal
	if ev.warning {
		kind = corev1.EventTypeWarning
	}
	node := e.node
	if !ev.onClaim {
		var related runtime.Object
		if ev.unit != nil {
			related = ev.unit
		}
		e.recorder.Eventf(&node, related, kind, ev.reason, ev.action, "%s", cut(ev.note))
		return
	}
	on := &corev1.ObjectReference{
		Kind: "ResourceClaim", APIVersion: "resource.k8s.io/v1",
		Namespace: claim.Namespace, Name: claim.Name, UID: types.UID(claim.UID),
	}
	e.recorder.Eventf(on, &node, kind, ev.reason, ev.action, "%s", cut(ev.note))
}

func (e *Events) pod(p Pod, reason, action, note string) {
	node := e.node
	on := &corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID)}
	e.recorder.Eventf(on, &node, corev1.EventTypeWarning, reason, action, "%s", cut(note))
}

// cut keeps a note within the API's limit.
func cut(note string) string {
	if len(note) <= longestNote {
		return note
	}
	return strings.ToValidUTF8(note[:longestNote-3], "") + "..."
}
