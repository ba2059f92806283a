// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Times of the scheduler (k8s.io/kubernetes v1.37, dynamicresources).
const (
	bindPoll    = 5 * time.Second
	bindTimeout = 10 * time.Minute
	flushEvery  = 5 * time.Minute
)

// pod is a Pod and its claims, which come and go with it.
type pod struct {
	name    string
	uid     types.UID
	devices int // of each claim
	claims  []string
	node    string       // where it must run; empty is anywhere
	model   device.Model // that it asks for; empty is any
	// admin: it watches what is attached to its node, and owns nothing.
	admin bool

	bound   string // where it was bound
	waiting string // where it waits for its devices
	ran     bool
	// deleted: a person deleted it; gone: it is in no API any more.
	deleted, gone bool
	made          time.Time
	grace         time.Duration // that its containers need to end, zero is drawn
	told          time.Time     // since when one of its devices has AttachFailed
}

// kubeScheduler places Pods. Slices and Nodes reach it late; claims are its own doing.
type kubeScheduler struct {
	s      *Sim
	slices *watch
	nodes  *watch
	// assumed are the allocations that are decided and not stored yet.
	assumed map[string]*resourceapi.AllocationResult
	pods    []*pod
}

func newScheduler(s *Sim) *kubeScheduler {
	k := &kubeScheduler{s: s, assumed: map[string]*resourceapi.AllocationResult{}}
	cached := func(name string, kd kind) *watch {
		w := &watch{name: "scheduler " + name, kind: kd, want: func(object) bool { return true }}
		w.put, w.gone = func(object) { k.activate() }, func(object, bool) { k.activate() }
		return w
	}
	k.slices, k.nodes = cached("slices", poolSlices), cached("nodes", nodes)
	s.api.open(k.slices)
	s.api.open(k.nodes)
	k.flush()
	return k
}

// flush tries every Pod again that was found to fit nowhere some minutes ago.
func (k *kubeScheduler) flush() {
	k.s.after(flushEvery, nil, k.flush)
	k.activate()
}

// activate tries every Pod that waits for a place.
func (k *kubeScheduler) activate() {
	for _, p := range k.pods {
		if p.bound == "" && p.waiting == "" && !p.deleted {
			k.s.after(k.s.between("queue "+p.name, 10*time.Millisecond, 300*time.Millisecond), nil, func() { k.try(p) })
		}
	}
}

// taken are the device entries that claims have, stored or assumed, by name.
func (k *kubeScheduler) taken() map[string]bool {
	used := map[string]bool{}
	for _, c := range listOf[*resourceapi.ResourceClaim](k.s.api, claims) {
		for _, r := range results(c) {
			used[r.Device] = true
		}
	}
	for _, a := range k.assumed {
		for _, r := range owned(a) {
			used[r.Device] = true
		}
	}
	return used
}

// try looks for a node that has all that the Pod's claims ask for.
func (k *kubeScheduler) try(p *pod) {
	if p.bound != "" || p.waiting != "" || p.deleted || p.gone {
		return
	}
	for _, name := range p.claims {
		c, ok := find[*resourceapi.ResourceClaim](k.s.api, claims, name)
		if !ok || c.Status.Allocation != nil {
			return // what it had before is not taken back yet
		}
	}
	all := sorted[*corev1.Node](k.nodes)
	if k.s.opt.Seed != 0 {
		k.s.rng("order of nodes for "+p.name).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
	for _, n := range all {
		if p.node != "" && n.Name != p.node || !nodeReady(n) {
			continue
		}
		if found := k.fit(p, n); found != nil {
			k.reserve(p, n, found)
			return
		}
	}
	k.s.detail("schedule", "%s fits nowhere", p.name)
}

// fit allocates the Pod's devices on a node, first fit in the order of slices and devices.
func (k *kubeScheduler) fit(p *pod, n *corev1.Node) [][]resourceapi.Device {
	listed := sorted[*resourceapi.ResourceSlice](k.slices)
	used := k.taken()
	free := map[string]int64{} // counters
	for _, s := range listed {
		for _, set := range s.Spec.SharedCounters {
			for name, c := range set.Counters {
				free[set.Name+"/"+name] = c.Value.Value()
			}
		}
	}
	consume := func(d *resourceapi.Device) {
		for _, c := range d.ConsumesCounters {
			for name, v := range c.Counters {
				free[c.CounterSet+"/"+name] -= v.Value.Value()
			}
		}
	}
	if p.admin {
		return watched(p, n, listed)
	}
	var devices []*resourceapi.Device
	for _, s := range listed {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			devices = append(devices, d)
			if used[d.Name] {
				consume(d) // a counter counts only while a device of that name is listed
			}
		}
	}
	complete := len(listed) > 0 && int64(len(listed)) == listed[0].Spec.Pool.ResourceSliceCount
	var found [][]resourceapi.Device
	for range p.claims {
		var mine []resourceapi.Device
		for range p.devices {
			i := slices.IndexFunc(devices, func(d *resourceapi.Device) bool {
				return !used[d.Name] && asksFor(p, d) && fits(d, n) && counts(d, free)
			})
			if i < 0 || !complete {
				return nil
			}
			used[devices[i].Name] = true
			consume(devices[i])
			mine = append(mine, *devices[i])
		}
		found = append(found, mine)
	}
	return found
}

func asksFor(p *pod, d *resourceapi.Device) bool {
	return p.model == "" || *d.Attributes["model"].StringValue == string(p.model)
}

// watched are the devices on the node, whoever has them: a request with admin access tolerates every taint.
func watched(p *pod, n *corev1.Node, listed []*resourceapi.ResourceSlice) [][]resourceapi.Device {
	var all []resourceapi.Device
	for _, s := range listed {
		for i := range s.Spec.Devices {
			if d := &s.Spec.Devices[i]; d.NodeName != nil && *d.NodeName == n.Name {
				all = append(all, *d)
			}
		}
	}
	if len(all) == 0 {
		return nil
	}
	found := make([][]resourceapi.Device, 0, len(p.claims))
	for range p.claims {
		found = append(found, all)
	}
	return found
}

func counts(d *resourceapi.Device, free map[string]int64) bool {
	for _, c := range d.ConsumesCounters {
		for name, v := range c.Counters {
			if free[c.CounterSet+"/"+name] < v.Value.Value() {
				return false
			}
		}
	}
	return true
}

func fits(d *resourceapi.Device, n *corev1.Node) bool {
	if len(d.Taints) > 0 {
		return false
	}
	if d.NodeName != nil {
		return *d.NodeName == n.Name
	}
	for _, term := range d.NodeSelector.NodeSelectorTerms {
		for _, e := range term.MatchExpressions {
			if !slices.Contains(e.Values, n.Labels[e.Key]) {
				return false
			}
		}
	}
	return true
}

// reserve keeps the choice in mind and stores it.
func (k *kubeScheduler) reserve(p *pod, n *corev1.Node, found [][]resourceapi.Device) {
	p.waiting = n.Name
	at := metav1.NewTime(k.s.now().Truncate(time.Second))
	for i, name := range p.claims {
		a := &resourceapi.AllocationResult{
			AllocationTimestamp: &at,
			NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{n.Name}}},
			}}},
		}
		for j, d := range found[i] {
			r := resourceapi.DeviceRequestAllocationResult{
				Request: fmt.Sprintf("r%d", j), Driver: device.Driver, Pool: fabricID.Pool(), Device: d.Name,
				BindingConditions: d.BindingConditions, BindingFailureConditions: d.BindingFailureConditions,
			}
			if p.admin {
				r.AdminAccess = new(true)
			}
			a.Devices.Results = append(a.Devices.Results, r)
		}
		k.assumed[name] = a
	}
	k.s.after(k.s.between("bind "+p.name, 20*time.Millisecond, 2*time.Second), nil, func() { k.store(p) })
}

// store writes the allocations; where that fails, the choice is forgotten.
func (k *kubeScheduler) store(p *pod) {
	if p.deleted || k.s.chance("scheduler's write "+p.name, 30) {
		k.forget(p)
		k.retry(p)
		return
	}
	var names []string
	for _, name := range p.claims {
		c, ok := find[*resourceapi.ResourceClaim](k.s.api, claims, name)
		if !ok {
			continue
		}
		c.Status.Allocation = k.assumed[name]
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: p.name, UID: p.uid}}
		for _, r := range c.Status.Allocation.Devices.Results {
			names = append(names, r.Device)
		}
		delete(k.assumed, name)
		if _, err := k.s.api.update(claims, c); err != nil {
			panic(err) // it was just read
		}
	}
	k.s.note("schedule", "%s gets %s on %s", p.name, strings.Join(names, ","), p.waiting)
	k.poll(p)
}

// stored tells whether all that the Pod asks for is allocated, and nothing of it is being taken back.
func (k *kubeScheduler) stored(p *pod) bool {
	for _, name := range p.claims {
		c, ok := find[*resourceapi.ResourceClaim](k.s.api, claims, name)
		if !ok || c.Status.Allocation == nil || len(c.Status.ReservedFor) == 0 {
			return false
		}
	}
	return true
}

func (k *kubeScheduler) forget(p *pod) {
	for _, name := range p.claims {
		delete(k.assumed, name)
	}
	p.waiting = ""
	k.activate() // others may take it
}

func (k *kubeScheduler) retry(p *pod) {
	k.s.after(k.s.between("backoff "+p.name, time.Second, 10*time.Second), nil, func() { k.try(p) })
}

// poll looks at the binding conditions, at once and then every 5 s. It stops at the first device that is not
// ready.
func (k *kubeScheduler) poll(p *pod) {
	if p.deleted || p.waiting == "" || !k.stored(p) {
		return
	}
	for _, name := range p.claims {
		c, ok := find[*resourceapi.ResourceClaim](k.s.api, claims, name)
		if !ok || c.Status.Allocation == nil {
			k.takeBack(p, "its claim is gone")
			return
		}
		for _, r := range results(c) {
			switch conditionOf(c, r) {
			case device.ConditionAttachFailed:
				k.takeBack(p, r.Device+" failed")
				return
			case device.ConditionAttached:
				continue
			}
			if k.s.now().Sub(c.Status.Allocation.AllocationTimestamp.Time) > bindTimeout {
				k.takeBack(p, "the binding timed out")
				return
			}
			k.s.after(bindPoll, nil, func() { k.poll(p) })
			return
		}
	}
	p.bound, p.waiting = p.waiting, ""
	k.s.note("schedule", "%s is bound to %s", p.name, p.bound)
	k.s.kubelets[p.bound].take(p)
}

// conditionOf is what the claim was told of a device; one without binding conditions is ready.
func conditionOf(c *resourceapi.ResourceClaim, r resourceapi.DeviceRequestAllocationResult) string {
	if len(r.BindingConditions) == 0 {
		return device.ConditionAttached
	}
	for _, d := range c.Status.Devices {
		if d.Device != r.Device || d.Pool != r.Pool {
			continue
		}
		for _, failed := range r.BindingFailureConditions {
			if meta.IsStatusConditionTrue(d.Conditions, failed) {
				return device.ConditionAttachFailed
			}
		}
		if meta.IsStatusConditionTrue(d.Conditions, r.BindingConditions[0]) {
			return device.ConditionAttached
		}
	}
	return ""
}

// takeBack empties reservedFor, and after a while clears the allocation and what the devices said.
func (k *kubeScheduler) takeBack(p *pod, why string) {
	k.s.note("schedule", "%s is taken back from %s: %s", p.name, p.waiting, why)
	p.told = time.Time{}
	k.change(p, func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil })
	k.s.after(k.s.between("take back "+p.name, time.Second, 3*time.Second), nil, func() {
		if p.deleted {
			return
		}
		k.change(p, deallocate)
		k.forget(p)
		k.retry(p)
	})
}

func deallocate(c *resourceapi.ResourceClaim) {
	c.Status.Allocation, c.Status.ReservedFor, c.Status.Devices = nil, nil, nil
	for key := range c.Annotations {
		if strings.HasPrefix(key, "manager/") {
			delete(c.Annotations, key)
		}
	}
}

func (k *kubeScheduler) change(p *pod, f func(*resourceapi.ResourceClaim)) {
	for _, name := range p.claims {
		if c, ok := find[*resourceapi.ResourceClaim](k.s.api, claims, name); ok {
			f(c)
			if _, err := k.s.api.update(claims, c); err != nil {
				panic(err) // it was just read
			}
		}
	}
}

// addPod makes a Pod with its claims.
func (s *Sim) addPod(name string, claimsOf, devices int, node string) *pod {
	p := &pod{name: name, uid: s.api.uid(), devices: devices, node: node, made: s.now()}
	for i := range claimsOf {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("%s-c%d", name, i)}}
		if _, err := s.api.create(claims, c); err != nil {
			panic(err)
		}
		p.claims = append(p.claims, c.Name)
	}
	s.count.Pods++
	s.scheduler.pods = append(s.scheduler.pods, p)
	s.note("user", "creates %s", name)
	s.after(s.between("new "+name, 10*time.Millisecond, time.Second), nil, func() { s.scheduler.try(p) })
	return p
}

func (s *Sim) podByName(name string) *pod {
	for _, p := range s.scheduler.pods {
		if p.name == name && !p.gone {
			return p
		}
	}
	return nil
}

// deletePod deletes a Pod; force takes it out of the API at once, while its containers still run.
func (s *Sim) deletePod(p *pod, force bool) {
	if p == nil || p.deleted && !force {
		return
	}
	s.note("user", "deletes %s%s", p.name, map[bool]string{true: " by force"}[force])
	p.deleted = true
	switch {
	case p.bound == "":
		in := s.between("scheduler sees deletion of "+p.name, time.Second, 3*time.Second)
		s.after(in, nil, func() {
			s.scheduler.forget(p)
			s.podGone(p)
		})
	case force:
		s.kubeletSees(p)
		s.podGone(p)
	default:
		s.kubeletSees(p)
	}
}

func (s *Sim) kubeletSees(p *pod) {
	in := s.between("kubelet sees deletion of "+p.name, 100*time.Millisecond, 3*time.Second)
	s.after(in, nil, func() { s.kubelets[p.bound].stop(p) })
}

// podGone: the Pod is no more; its claims follow.
func (s *Sim) podGone(p *pod) {
	if p.gone {
		return
	}
	p.gone = true
	s.note("user", "%s is gone", p.name)
	s.after(s.between("claims of "+p.name, 50*time.Millisecond, 2*time.Second), nil, func() {
		s.scheduler.change(p, deallocate)
		s.after(s.between("claims deleted "+p.name, 10*time.Millisecond, 500*time.Millisecond), nil, func() {
			for _, name := range p.claims {
				s.api.discard(claims, name)
			}
		})
		s.scheduler.activate()
	})
	s.scheduler.pods = slices.DeleteFunc(slices.Clone(s.scheduler.pods), func(o *pod) bool { return o == p })
}

// evict deletes the Pods that use a device with a NoExecute taint.
func (s *Sim) evict() {
	tainted := map[string]bool{}
	for _, obj := range listOf[*resourceapi.ResourceSlice](s.api, poolSlices) {
		for i := range obj.Spec.Devices {
			for _, t := range obj.Spec.Devices[i].Taints {
				if t.Effect == resourceapi.DeviceTaintEffectNoExecute {
					tainted[obj.Spec.Devices[i].Name] = true
				}
			}
		}
	}
	for _, p := range s.scheduler.pods {
		if p.bound == "" || p.deleted {
			continue
		}
		for _, name := range p.claims {
			c, ok := find[*resourceapi.ResourceClaim](s.api, claims, name)
			if ok && slices.ContainsFunc(results(c), func(r resourceapi.DeviceRequestAllocationResult) bool { return tainted[r.Device] }) {
				s.note("evict", "%s: its device is tainted", p.name)
				s.deletePod(p, false)
				break
			}
		}
	}
}

func keys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
