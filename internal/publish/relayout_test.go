// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// manyOffers are a pool of some slices of each kind.
func manyOffers(units int) pool.Offers {
	o := pool.Offers{Fabric: "0"}
	for i := range units {
		o.Units = append(o.Units, device.NumberedUnit("a100", i))
	}
	for chunk := range slices.Chunk(o.Units, pool.SliceDevices) {
		var ready, onCall []pool.Offer
		for _, u := range chunk {
			a := map[string]string{"model": "a100", "uuid": ""}
			ready = append(ready, pool.Offer{Name: u.ReadyEntry(), Units: []device.Unit{u}, Model: "a100", Ready: true, Node: pool.Nowhere, Effect: pool.NoSchedule, Why: "NotAttached", Attributes: a})
			onCall = append(onCall, pool.Offer{Name: u.Entry(), Units: []device.Unit{u}, Model: "a100", Attributes: maps.Clone(a)})
		}
		o.Ready, o.OnCall = append(o.Ready, ready), append(o.OnCall, onCall)
	}
	return o
}

// anew is a copy that shares nothing with what it was made of.
func anew(o pool.Offers) pool.Offers {
	clone := func(all [][]pool.Offer) [][]pool.Offer {
		var out [][]pool.Offer
		for _, chunk := range all {
			chunk = slices.Clone(chunk)
			for i := range chunk {
				chunk[i].Units, chunk[i].Attributes = slices.Clone(chunk[i].Units), maps.Clone(chunk[i].Attributes)
			}
			out = append(out, chunk)
		}
		return out
	}
	return pool.Offers{Fabric: o.Fabric, Units: slices.Clone(o.Units), Ready: clone(o.Ready), OnCall: clone(o.OnCall)}
}

// TestRelayout: what is taken over from the former layout is what a layout from scratch has, whatever has changed.
func TestRelayout(t *testing.T) {
	changes := map[string]func(*pool.Offers, *pool.Offer){
		"nothing":   func(*pool.Offers, *pool.Offer) {},
		"name":      func(_ *pool.Offers, o *pool.Offer) { o.Name += "x" },
		"units":     func(_ *pool.Offers, o *pool.Offer) { o.Units = append(o.Units, "a100-0") },
		"model":     func(_ *pool.Offers, o *pool.Offer) { o.Model = "h100" },
		"ready":     func(_ *pool.Offers, o *pool.Offer) { o.Ready = !o.Ready },
		"node":      func(_ *pool.Offers, o *pool.Offer) { o.Node = "n1" },
		"effect":    func(_ *pool.Offers, o *pool.Offer) { o.Effect = pool.NoExecute },
		"why":       func(_ *pool.Offers, o *pool.Offer) { o.Why = "InUse" },
		"attribute": func(_ *pool.Offers, o *pool.Offer) { o.Attributes["uuid"] = "GPU-1" },
		"order":     func(all *pool.Offers, _ *pool.Offer) { slices.Reverse(all.OnCall[0]) },
		"fabric":    func(all *pool.Offers, _ *pool.Offer) { all.Fabric = "1" },
		"order of units": func(all *pool.Offers, _ *pool.Offer) {
			all.Units[0], all.Units[len(all.Units)-1] = all.Units[len(all.Units)-1], all.Units[0]
		},
		"one more": func(all *pool.Offers, _ *pool.Offer) { *all = manyOffers(len(all.Units) + 1) },
		"none":     func(all *pool.Offers, _ *pool.Offer) { *all = pool.Offers{Fabric: "0"} },
	}
	r := rand.New(rand.NewPCG(1, 1))
	for name, change := range changes {
		for _, units := range []int{1, pool.SliceDevices, 3*pool.SliceDevices + 1, 300} {
			was := manyOffers(units)
			laid := Slices(was)
			now := anew(was)
			kind := [][][]pool.Offer{now.Ready, now.OnCall}[r.IntN(2)]
			chunk := kind[r.IntN(len(kind))]
			change(&now, &chunk[r.IntN(len(chunk))])
			got := relayout(was, laid, now)
			if diff := cmp.Diff(Slices(now), got); diff != "" {
				t.Errorf("%s of %d units (-from scratch +got):\n%s", name, units, diff)
			}
			if kept := shared(laid, got); name == "nothing" && kept != len(laid) || name == "why" && kept != len(laid)-1 {
				t.Errorf("%s of %d units: %d of %d slices are taken over", name, units, kept, len(laid))
			}
		}
	}
}

func shared(a, b []resourceslice.Slice) int {
	n := 0
	for i := range min(len(a), len(b)) {
		if identical(&a[i], &b[i]) {
			n++
		}
	}
	return n
}

// BenchmarkPublish: one entry of 500 units changes.
func BenchmarkPublish(b *testing.B) {
	o := manyOffers(500)
	laid := Slices(o)
	for i := 0; b.Loop(); i++ {
		next := anew(o)
		next.Ready[0][0].Why = fmt.Sprint(i)
		laid = relayout(o, laid, next)
		o = next
	}
}
