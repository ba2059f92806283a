// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
)

type noLeases struct{}

func (noLeases) List() []device.Lease { return nil }

// What the node's own pool holds: built-in GPUs that are well, once all was looked at, and nothing where somebody
// else offers them.
func TestOwnPool(t *testing.T) {
	w := newWard()
	w.leases = nil
	w.sight.Bus = []attach.Function{{Address: device.PCIAddress{Bus: 0x17}}}
	w.sight.NVML = []attach.GPU{{Address: device.PCIAddress{Bus: 0x17}, UUID: builtGPU, Name: "NVIDIA H100"}}
	m := &membership{a: &agent{health: w.healthMonitor}, cfg: config.Config{IfAdvertisedElsewhere: config.Withhold}}
	m.own = newOwnPool(m)
	w.healthMonitor.found = m.whose
	offered := func(what string, want ...string) {
		t.Helper()
		offers, known := m.own.offers()
		if !known {
			offers = nil
		}
		var got []string
		for _, o := range offers {
			got = append(got, o.Name+" "+o.Attributes["productName"])
		}
		if diff := cmp.Diff(want, got); diff != "" || known == (what == "not known") {
			t.Errorf("%s: known %v (-want +got):\n%s", what, known, diff)
		}
	}
	offered("not known")
	m.survey = node.NewSurvey(node.SurveyConfig{
		NoFabric: true, Leases: noLeases{}, Host: w, LocalDeadline: time.Minute, Resync: time.Hour,
		Clock: clocktesting.NewFakeClock(time.Unix(1000, 0)), Changed: func(node.Found) {},
	})
	m.survey.Step(t.Context())
	offered("not known") // whether somebody else offers them
	m.looked = true
	offered("not known") // where the node belongs
	m.placed = true
	offered("not known") // how they are
	w.look(t.Context())
	const gpu = "gpu-00000000-0000-4000-8000-000000000002 NVIDIA H100"
	offered("all is known", gpu)
	m.conflict = true
	offered("somebody else offers them")
	m.cfg.IfAdvertisedElsewhere = config.Ignore
	offered("and that is to be ignored", gpu)
	w.sight.NVML = nil
	w.look(t.Context())
	offered("it is not well")
}

// Each foreign device is told of once, and anew when it was away.
func TestTellForeign(t *testing.T) {
	a := &agent{obs: testObserver(t)}
	var told reasons
	a.obs.setEvents(nodestatus.NewEvents(&told, "n1", "uid"))
	first, second := device.OnFabric{ID: "res-1"}, device.OnFabric{ID: "res-2"}
	for _, step := range []struct {
		all  []device.OnFabric
		want int
	}{
		{nil, 0},
		{[]device.OnFabric{first}, 1},
		{[]device.OnFabric{first, second}, 2},
		{[]device.OnFabric{first, second}, 2},
		{[]device.OnFabric{second}, 2},
		{[]device.OnFabric{first, second}, 3},
	} {
		a.tellForeign("0", step.all, 0)
		if len(told) != step.want {
			t.Errorf("after %v: told %v, want %d events", step.all, told, step.want)
		}
	}
}

// What becomes of a foreign device is said by the configuration that holds.
func TestAdoptAfter(t *testing.T) {
	for word, want := range map[config.ForeignDevices]time.Duration{config.ForeignReport: 0, config.ForeignAdopt: time.Hour} {
		m := &membership{cfg: config.Config{ForeignDevices: word, Timings: config.Timings{AdoptAfter: time.Hour}}}
		if got := m.adoptAfter(); got != want {
			t.Errorf("foreignDevices: %s: %s, want %s", word, got, want)
		}
	}
}

func TestCountOwners(t *testing.T) {
	placed := func(o attach.Owner) attach.Placed { return attach.Placed{Owner: o} }
	got := countOwners(node.Found{Places: attach.Places{
		GPUs:    []attach.Placed{placed(attach.BuiltIn), placed(attach.BuiltIn), placed(attach.Foreign), placed(attach.Leased)},
		Foreign: []device.OnFabric{{ID: "res-1"}, {ID: "res-2"}},
	}})
	if diff := cmp.Diff(map[string]int{"built-in": 2, "foreign": 2, "leased": 1, "unclassified": 0}, got); diff != "" {
		t.Errorf("count (-want +got):\n%s", diff)
	}
}
