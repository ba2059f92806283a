// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// Limits of k8s.io/api/resource/v1 for slices that hold counters.
const (
	setsPerSlice   = resourceapi.ResourceSliceMaxCounterSets
	countersPerSet = resourceapi.ResourceSliceMaxCountersPerCounterSet
)

// Slices lays the pool out: counter slices, then the ready slices, then the fabric slices.
func Slices(o pool.Offers) []resourceslice.Slice {
	return relayout(pool.Offers{}, nil, o)
}

// relayout lays the pool out anew, and takes over those of the former slices whose offers are still the same: that is
// cheaper to find out here than from what is published, and most steps change one entry or none.
func relayout(was pool.Offers, laid []resourceslice.Slice, o pool.Offers) []resourceslice.Slice {
	set := make(map[device.Unit]string, len(o.Units))
	var all []resourceslice.Slice
	for i := range slices.Chunk(o.Units, setsPerSlice*countersPerSet) {
		var sets []resourceapi.CounterSet
		for units := range slices.Chunk(i, countersPerSet) {
			cs := resourceapi.CounterSet{
				Name:     fmt.Sprintf("units-%d", len(set)/countersPerSet),
				Counters: make(map[string]resourceapi.Counter, len(units)),
			}
			for _, u := range units {
				cs.Counters[string(u)] = resourceapi.Counter{Value: one()}
				set[u] = cs.Name
			}
			sets = append(sets, cs)
		}
		all = append(all, resourceslice.Slice{SharedCounters: sets, PerDeviceNodeSelection: new(true)})
	}
	alike := was.Fabric == o.Fabric && slices.Equal(was.Units, o.Units) && len(was.Ready) == len(o.Ready) && len(was.OnCall) == len(o.OnCall) &&
		len(laid) == len(all)+len(o.Ready)+len(o.OnCall)
	if alike {
		copy(all, laid)
	}
	before := slices.Concat(was.Ready, was.OnCall)
	for k, kind := range [][][]pool.Offer{o.Ready, o.OnCall} {
		for n, offers := range kind {
			if alike && slices.EqualFunc(before[k*len(o.Ready)+n], offers, sameOffer) {
				all = append(all, laid[len(all)])
				continue
			}
			s := resourceslice.Slice{PerDeviceNodeSelection: new(true)}
			for i := range offers {
				s.Devices = append(s.Devices, entry(o.Fabric, &offers[i], set))
			}
			all = append(all, s)
		}
	}
	return all
}

func sameOffer(a, b pool.Offer) bool {
	return a.Name == b.Name && a.Model == b.Model && a.Ready == b.Ready && a.Node == b.Node && a.Effect == b.Effect && a.Why == b.Why &&
		slices.Equal(a.Units, b.Units) && maps.Equal(a.Attributes, b.Attributes)
}

// one is what a unit's counter holds and what each of its entries takes.
func one() resource.Quantity { return *resource.NewQuantity(1, resource.DecimalSI) }

func entry(f device.FabricID, o *pool.Offer, set map[device.Unit]string) resourceapi.Device {
	d := resourceapi.Device{Name: o.Name, Attributes: attributes(o.Attributes), ConsumesCounters: consumption(o.Units, set)}
	if o.Effect != pool.NoTaint {
		d.Taints = []resourceapi.DeviceTaint{{
			Key: device.TaintKey, Value: o.Why, Effect: resourceapi.DeviceTaintEffect(o.Effect),
		}}
	}
	if o.Ready {
		d.NodeName = new(o.Node)
		return d
	}
	need := []corev1.NodeSelectorRequirement{
		{Key: device.LabelFabric, Operator: corev1.NodeSelectorOpIn, Values: []string{string(f)}},
	}
	if o.Model != "" { // a unit whose model left the configuration; it is tainted
		need = append(need, corev1.NodeSelectorRequirement{
			Key: o.Model.AttachableLabel(), Operator: corev1.NodeSelectorOpIn, Values: []string{"true"},
		})
	}
	d.NodeSelector = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: need}}}
	// Claim status may be written only for a claim that is bound to exactly one node (KEP-4817).
	d.BindsToNode = new(true)
	d.BindingConditions = []string{device.ConditionAttached}
	d.BindingFailureConditions = []string{device.ConditionAttachFailed}
	return d
}

func consumption(units []device.Unit, set map[device.Unit]string) []resourceapi.DeviceCounterConsumption {
	bySet := map[string]map[string]resourceapi.Counter{}
	for _, u := range units {
		name := set[u]
		if bySet[name] == nil {
			bySet[name] = map[string]resourceapi.Counter{}
		}
		bySet[name][string(u)] = resourceapi.Counter{Value: one()}
	}
	var all []resourceapi.DeviceCounterConsumption
	for _, name := range slices.Sorted(maps.Keys(bySet)) {
		all = append(all, resourceapi.DeviceCounterConsumption{CounterSet: name, Counters: bySet[name]})
	}
	return all
}

// attributes are strings, cut to what the API takes.
func attributes(in map[string]string) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	out := make(map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, len(in))
	for k, v := range in {
		if len(v) > resourceapi.DeviceAttributeMaxValueLength {
			v = strings.ToValidUTF8(v[:resourceapi.DeviceAttributeMaxValueLength], "")
		}
		out[resourceapi.QualifiedName(k)] = resourceapi.DeviceAttribute{StringValue: new(v)}
	}
	return out
}

// withdrawn is the pool with nothing to be had: every entry is there and tainted.
func withdrawn(in []resourceslice.Slice) []resourceslice.Slice {
	out := make([]resourceslice.Slice, 0, len(in))
	for _, s := range in {
		s.Devices = slices.Clone(s.Devices)
		for i := range s.Devices {
			s.Devices[i].Taints = []resourceapi.DeviceTaint{{
				Key: device.TaintKey, Value: "FeatureGate", Effect: resourceapi.DeviceTaintEffectNoSchedule,
			}}
		}
		out = append(out, s)
	}
	return out
}

// whole returns what was asked of the API server when it stored the slices; ok is false unless they are
// the whole pool in one generation.
func whole(all []*resourceapi.ResourceSlice) (asked []resourceslice.Slice, ok bool) {
	for _, s := range all {
		if s.Spec.Pool.Generation != all[0].Spec.Pool.Generation || s.Spec.Pool.ResourceSliceCount != int64(len(all)) {
			return nil, false
		}
		devices := slices.Clone(s.Spec.Devices)
		for i := range devices {
			devices[i].Taints = slices.Clone(devices[i].Taints)
			for j := range devices[i].Taints {
				devices[i].Taints[j].TimeAdded = nil // set by the API server
			}
		}
		asked = append(asked, resourceslice.Slice{
			Devices: devices, SharedCounters: s.Spec.SharedCounters, PerDeviceNodeSelection: s.Spec.PerDeviceNodeSelection,
		})
	}
	return asked, true
}

// Shown tells what slices of the API server show, whatever generation they are of: an entry counts as tainted
// only if it is so wherever it stands.
func Shown(all []*resourceapi.ResourceSlice) pool.Published {
	p := pool.Published{Effects: map[string]pool.Effect{}}
	for _, s := range all {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			before, seen := p.Effects[d.Name]
			if u, ready := device.UnitOfEntry(d.Name); ready && !seen {
				p.Units = append(p.Units, u)
			}
			if !seen || before != pool.NoTaint {
				p.Effects[d.Name] = effectOf(d)
			}
		}
	}
	return p
}

// effectOf returns what our taint on the entry does. A taint that a person's rule adds is not ours to
// count on.
func effectOf(d *resourceapi.Device) pool.Effect {
	for _, t := range d.Taints {
		if t.Key == device.TaintKey {
			return pool.Effect(t.Effect)
		}
	}
	return pool.NoTaint
}
