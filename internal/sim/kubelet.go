// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Times of a kubelet.
const (
	prepareDeadline = 45 * time.Second
	prepareRetry    = 60 * time.Second
	unprepareRetry  = 5 * time.Second
)

// kubelet runs the Pods of one node.
type kubelet struct {
	s    *Sim
	h    *host
	pods map[string]*running
	// prepared are the GPUs behind each claim that the plugin answered for, until it answered Unprepare.
	prepared map[types.UID][]*gpu
	names    map[types.UID]string
	down     bool
}

func newKubelet(s *Sim, h *host) *kubelet {
	return &kubelet{s: s, h: h, pods: map[string]*running{}, prepared: map[types.UID][]*gpu{}, names: map[types.UID]string{}}
}

// running is a Pod as the kubelet has it.
type running struct {
	pod     *pod
	claims  []*resourceapi.ResourceClaim // as they were when the Pod came here
	ready   map[types.UID]bool
	started bool
	ending  bool
	busy    bool
	call    *process // that answers Prepare
	cancel  context.CancelFunc
}

// take is a Pod that was bound to the node.
func (k *kubelet) take(p *pod) {
	r := &running{pod: p, ready: map[types.UID]bool{}}
	for _, name := range p.claims {
		if c, ok := find[*resourceapi.ResourceClaim](k.s.api, claims, name); ok {
			r.claims = append(r.claims, c)
		}
	}
	k.pods[p.name] = r
	k.s.after(k.s.between("kubelet "+p.name, 50*time.Millisecond, time.Second), nil, func() { k.sync(r) })
}

// agent is who answers a call: during a rolling update either of the two.
func (k *kubelet) agent(key string) *process {
	all := k.s.live(k.h.node)
	if len(all) == 0 || k.down {
		return nil
	}
	if k.s.opt.Seed == 0 {
		return all[len(all)-1]
	}
	return all[k.s.rng("agent for "+key).IntN(len(all))]
}

// sync prepares the next claim of the Pod, or starts its containers.
func (k *kubelet) sync(r *running) {
	if r.ending || r.busy || k.pods[r.pod.name] != r {
		return
	}
	for _, c := range r.claims {
		if !r.ready[c.UID] {
			k.prepare(r, c)
			return
		}
	}
	if r.started {
		return
	}
	k.s.after(k.s.between("start "+r.pod.name, 100*time.Millisecond, time.Second), nil, func() { k.startPod(r) })
}

func (k *kubelet) later(d time.Duration, r *running) {
	k.s.after(d, nil, func() { k.sync(r) })
}

func (k *kubelet) prepare(r *running, c *resourceapi.ResourceClaim) {
	p := k.agent("prepare " + c.Name)
	if p == nil {
		k.later(unprepareRetry, r)
		return
	}
	r.busy, r.call = true, p
	ctx, cancel := context.WithCancel(p.ctx)
	r.cancel = cancel
	k.names[c.UID] = c.Name
	answered := false
	k.s.after(prepareDeadline, nil, func() {
		if !answered {
			cancel()
		}
	})
	k.s.detail(k.h.node, "kubelet asks %s to prepare %s", p.name, c.Name)
	p.launch(func() {
		results, err := p.plugin.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
		p.s.ask(p.name+" answers prepare "+c.Name, func() {
			answered = true
			cancel()
			if p.dead || r.call != p {
				return
			}
			k.preparedAnswer(r, c, results[c.UID], err)
		})
	})
}

func (k *kubelet) preparedAnswer(r *running, c *resourceapi.ResourceClaim, res kubeletplugin.PrepareResult, err error) {
	r.busy, r.call = false, nil
	if err == nil {
		err = res.Err
	}
	if k.pods[r.pod.name] != r {
		return
	}
	if err != nil {
		k.s.note(k.h.node, "prepare %s: %v", c.Name, err)
		if r.ending {
			k.stopped(r)
			return
		}
		k.later(prepareRetry, r)
		return
	}
	var gpus []*gpu
	for _, d := range res.Devices {
		uuid := *d.Metadata.Attributes["uuid"].StringValue
		gpus = append(gpus, k.s.fabric.byUUID(device.GPUUUID(uuid)))
	}
	k.s.note(k.h.node, "prepared %s: %s", c.Name, ids(gpus))
	r.ready[c.UID] = true
	if !r.pod.admin {
		k.prepared[c.UID] = gpus
		k.s.answered(k, c, res.Devices, gpus)
	}
	if r.ending {
		k.stopped(r)
		return
	}
	k.sync(r)
}

// uses tells whether a claim has the GPU prepared.
func (k *kubelet) uses(g *gpu) bool {
	for _, gpus := range k.prepared {
		if slices.Contains(gpus, g) {
			return true
		}
	}
	return false
}

func ids(gpus []*gpu) string {
	all := make([]string, 0, len(gpus))
	for _, g := range gpus {
		all = append(all, g.id)
	}
	return strings.Join(all, ",")
}

// startPod starts the containers: they open what the CDI specs say.
func (k *kubelet) startPod(r *running) {
	if r.ending || r.started || k.pods[r.pod.name] != r {
		return
	}
	for _, c := range r.claims {
		if !k.hasSpec(c.UID) {
			k.s.breakIt("spec", "claim %s was answered as prepared on %s, and has no CDI spec", c.Name, k.h.node)
		}
		for _, g := range k.prepared[c.UID] {
			if !k.h.usable(g) {
				// It went between the answer and now: a container does not start.
				k.s.note(k.h.node, "%s cannot start: %s is not usable", r.pod.name, g.id)
				k.s.startedWithout(k, g, r.pod)
				k.later(10*time.Second, r)
				return
			}
		}
	}
	r.started = true
	k.s.note(k.h.node, "%s runs", r.pod.name)
	if !r.pod.ran {
		k.s.count.Served++
	}
	r.pod.ran = true
	for _, c := range r.claims {
		for _, g := range k.prepared[c.UID] {
			k.h.openedBy(g, "container of "+r.pod.name)
		}
	}
}

func (k *kubelet) hasSpec(uid types.UID) bool { return slices.Contains(k.h.specs(), uid) }

// specs are the claims that have a CDI spec on the host.
func (h *host) specs() []types.UID {
	files, err := os.ReadDir(filepath.Join(h.dir, "cdi"))
	if err != nil {
		return nil
	}
	var uids []types.UID
	for _, f := range files {
		name := strings.TrimSuffix(f.Name(), ".json")
		if len(name) >= 36 && !strings.HasPrefix(name, ".") {
			uids = append(uids, types.UID(name[len(name)-36:]))
		}
	}
	return uids
}

// stop ends a Pod: its containers, then its claims. A forced one is gone from the API already.
func (k *kubelet) stop(p *pod) {
	r := k.pods[p.name]
	if r == nil || r.ending {
		return
	}
	if k.down {
		k.s.after(unprepareRetry, nil, func() { k.stop(p) })
		return
	}
	r.ending = true
	if r.busy {
		return // the kubelet waits for its own call
	}
	k.stopped(r)
}

func (k *kubelet) stopped(r *running) {
	grace := k.s.between("grace "+r.pod.name, time.Second, 8*time.Second)
	if r.pod.grace > 0 {
		grace = r.pod.grace
	}
	if !r.started {
		grace = 100 * time.Millisecond
	}
	k.s.after(grace, nil, func() {
		if k.pods[r.pod.name] != r {
			return
		}
		k.closeHandles("container of " + r.pod.name)
		r.started = false
		k.unprepare(r)
	})
}

func (k *kubelet) closeHandles(who string) {
	for g, open := range k.h.open {
		k.h.open[g] = slices.DeleteFunc(open, func(o handle) bool { return o.who == who })
	}
}

// unprepare goes on until every claim of the Pod is unprepared; then the Pod is gone.
func (k *kubelet) unprepare(r *running) {
	if k.pods[r.pod.name] != r {
		return
	}
	i := slices.IndexFunc(r.claims, func(c *resourceapi.ResourceClaim) bool { return k.names[c.UID] != "" })
	if i < 0 {
		delete(k.pods, r.pod.name)
		k.s.podGone(r.pod)
		return
	}
	c := r.claims[i]
	p := k.agent("unprepare " + c.Name)
	if p == nil {
		k.s.after(unprepareRetry, nil, func() { k.unprepare(r) })
		return
	}
	r.busy, r.call = true, p
	p.launch(func() {
		results, err := p.plugin.UnprepareResourceClaims(p.ctx, []kubeletplugin.NamespacedObject{{
			NamespacedName: types.NamespacedName{Namespace: "default", Name: c.Name}, UID: c.UID,
		}})
		p.s.ask(p.name+" answers unprepare "+c.Name, func() {
			if p.dead || r.call != p {
				return
			}
			if err == nil {
				err = results[c.UID]
			}
			k.unprepared(r, c, err)
		})
	})
}

func (k *kubelet) unprepared(r *running, c *resourceapi.ResourceClaim, err error) {
	r.busy, r.call = false, nil
	if err != nil {
		k.s.note(k.h.node, "unprepare %s: %v", c.Name, err)
		k.s.after(unprepareRetry, nil, func() { k.unprepare(r) })
		return
	}
	k.s.note(k.h.node, "unprepared %s", c.Name)
	for _, p := range k.s.live(k.h.node) {
		k.s.after(0, p, p.tidy) // one after the other: they share files, and who is first must not be left to chance
	}
	delete(k.prepared, c.UID)
	delete(k.names, c.UID)
	k.unprepare(r)
}

// agentGone: the connection to the agent broke; the kubelet asks again.
func (k *kubelet) agentGone(p *process) {
	for _, name := range slices.Sorted(maps.Keys(k.pods)) {
		if r := k.pods[name]; r.call == p {
			k.dropped(r)
		}
	}
}

// dropped: a call for the Pod ended without an answer; it is made again.
func (k *kubelet) dropped(r *running) {
	r.busy, r.call = false, nil
	switch {
	case r.ending && r.started:
		k.stopped(r)
	case r.ending:
		k.s.after(unprepareRetry, nil, func() { k.unprepare(r) })
	default:
		k.later(unprepareRetry, r)
	}
}

// reboot: no container runs, and nothing of what the plugin answered holds; the Pods start anew.
func (k *kubelet) reboot() {
	k.h.open = map[*gpu][]handle{}
	k.prepared = map[types.UID][]*gpu{}
	for _, name := range slices.Sorted(maps.Keys(k.pods)) {
		r := k.pods[name]
		r.busy, r.call, r.started, r.ready = false, nil, false, map[types.UID]bool{}
		if r.ending {
			k.s.after(30*time.Second, nil, func() { k.unprepare(r) })
			continue
		}
		k.later(30*time.Second, r)
	}
}

// restart ends the kubelet for a while: its calls end, the containers go on. It has every claim prepared
// again then, as it does not keep whether that was done.
func (k *kubelet) restart(d time.Duration) {
	if k.down {
		return
	}
	k.down = true
	for _, name := range slices.Sorted(maps.Keys(k.pods)) {
		r := k.pods[name]
		if r.call == nil {
			continue
		}
		if r.cancel != nil {
			r.cancel()
		}
		k.dropped(r)
	}
	k.s.after(d, nil, func() {
		k.down = false
		for _, name := range slices.Sorted(maps.Keys(k.pods)) {
			k.pods[name].ready = map[types.UID]bool{}
			k.sync(k.pods[name])
		}
	})
}

func (k *kubelet) String() string { return fmt.Sprintf("kubelet of %s", k.h.node) }
