// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/kubeletplugin"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nvml"
)

const (
	pooledGPU = device.GPUUUID("GPU-00000000-0000-4000-8000-000000000001")
	builtGPU  = device.GPUUUID("GPU-00000000-0000-4000-8000-000000000002")
	lateGPU   = device.GPUUUID("GPU-00000000-0000-4000-8000-000000000003")
)

// ward is everything around a health monitor.
type ward struct {
	sight   node.Sight
	err     error
	xids    []nvml.XID
	asked   int
	leases  []device.Lease
	found   node.Found
	sick    []string
	changes int
	*healthMonitor
}

func (w *ward) Observe(context.Context) (node.Sight, error) { return w.sight, w.err }
func (w *ward) Discover(context.Context) error              { return nil }
func (w *ward) XIDs(context.Context) ([]nvml.XID, error) {
	w.asked++
	news := w.xids
	w.xids = nil
	return news, nil
}

// newWard has a unit that is attached and a built-in GPU, both shown by the driver.
func newWard() *ward {
	w := &ward{
		leases: []device.Lease{{Fabric: "0", Unit: "a100-0", Phase: device.Attached, UUID: pooledGPU, FabricDevice: "res-1"}},
		found: node.Found{Places: attach.Places{GPUs: []attach.Placed{
			{Present: attach.Present{UUID: builtGPU}, Owner: attach.BuiltIn}, {Present: attach.Present{UUID: pooledGPU}, Owner: attach.Leased},
		}}},
		sight: node.Sight{NVML: []attach.GPU{{UUID: pooledGPU}, {UUID: builtGPU}}},
	}
	w.healthMonitor = &healthMonitor{
		host: w, driver: w, leases: func() []device.Lease { return w.leases }, found: func() (node.Found, bool) { return w.found, true },
		clock: clocktesting.NewFakeClock(time.Unix(1000, 0)), poked: make(chan struct{}, 1),
		sick:    func(name string, _ device.GPUUUID, why string) { w.sick = append(w.sick, name+": "+why) },
		changed: func() { w.changes++ },
	}
	return w
}

func TestHealthMonitor(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*ward)
		want   []string
		sick   []string
	}{
		{"all is well", func(*ward) {}, []string{"0/a100-0 OK", "/" + string(device.BuiltInUnit(builtGPU)) + " OK"}, nil},
		{"an error of a GPU", func(w *ward) { w.xids = []nvml.XID{{UUID: builtGPU, Code: 79}} }, []string{
			"0/a100-0 OK", "/" + string(device.BuiltInUnit(builtGPU)) + " Critical the driver reported XID 79",
		}, []string{string(device.BuiltInUnit(builtGPU)) + ": the driver reported XID 79"}},
		{"an error of a program", func(w *ward) { w.xids = []nvml.XID{{UUID: pooledGPU, Code: 31}} }, []string{
			"0/a100-0 OK", "/" + string(device.BuiltInUnit(builtGPU)) + " OK",
		}, nil},
		{"the driver does not answer", func(w *ward) { w.sight = node.Sight{NVMLState: "hung"} }, []string{
			"0/a100-0 Unknown NVML does not answer: hung", "/" + string(device.BuiltInUnit(builtGPU)) + " Unknown NVML does not answer: hung",
		}, nil},
		{"the bus cannot be read", func(w *ward) { w.err = errors.New("no sysfs") }, []string{
			"0/a100-0 Unknown NVML does not answer: no sysfs", "/" + string(device.BuiltInUnit(builtGPU)) + " Unknown NVML does not answer: no sysfs",
		}, nil},
		{"one is gone", func(w *ward) { w.sight.NVML = w.sight.NVML[1:] }, []string{
			"0/a100-0 Critical the driver does not show it any more", "/" + string(device.BuiltInUnit(builtGPU)) + " OK",
		}, []string{"a100-0: the driver does not show it any more"}},
		{"one came after the list of GPUs that is looked at", func(w *ward) {
			w.leases = append(w.leases, device.Lease{Fabric: "0", Unit: "a100-1", Phase: device.Attached, UUID: lateGPU})
		}, []string{
			"0/a100-0 OK", "0/a100-1 Unknown the driver has not shown it to this agent yet", "/" + string(device.BuiltInUnit(builtGPU)) + " OK",
		}, nil},
		{"the fabric calls it critical", func(w *ward) {
			w.found.Listed = []device.OnFabric{{ID: "res-1", Health: device.HealthCritical, HealthText: "20"}}
		}, []string{
			"0/a100-0 Critical the fabric manager says 20", "/" + string(device.BuiltInUnit(builtGPU)) + " OK",
		}, []string{"a100-0: the fabric manager says 20"}},
		{"a unit has failed, as its lease tells", func(w *ward) {
			w.leases[0].Phase, w.leases[0].Failure = device.Failed, device.Failure{Reason: "Vanished", Message: "pulled"}
		}, []string{"0/a100-0 Critical Vanished: pulled", "/" + string(device.BuiltInUnit(builtGPU)) + " OK"}, nil},
		{"a unit is only coming", func(w *ward) { w.leases[0].Phase = device.Attaching }, []string{"/" + string(device.BuiltInUnit(builtGPU)) + " OK"}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWard()
			w.xids = []nvml.XID{{UUID: pooledGPU, Code: 79}} // of before they were looked at, as of a former stay on the bus
			w.look(t.Context())
			w.changes = 0
			tc.change(w)
			w.look(t.Context())
			w.look(t.Context()) // nothing is told twice
			var got []string
			for _, u := range w.Units() {
				line := fmt.Sprintf("%s/%s %s", u.Fabric, u.Unit, u.Health)
				if u.Message != "" {
					line += " " + u.Message
				}
				got = append(got, line)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("units (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.sick, w.sick); diff != "" {
				t.Errorf("told (-want +got):\n%s", diff)
			}
			if w.changes > 1 {
				t.Errorf("changed %d times", w.changes)
			}
		})
	}
}

// A GPU's error is of that GPU while it is here: what comes back from the pool is taken for well.
func TestHealthMonitorForgets(t *testing.T) {
	w := newWard()
	w.xids = []nvml.XID{{UUID: pooledGPU, Code: 79}}
	w.look(t.Context())
	lease := w.leases
	w.leases = nil
	w.look(t.Context())
	if _, ok := w.Of(pooledGPU); ok || len(w.Units()) != 1 {
		t.Errorf("units %v", w.Units())
	}
	shown := w.sight.NVML
	w.leases, w.sight.NVML = lease, shown[1:] // that it was shown is of its former stay, too
	w.look(t.Context())
	if len(w.sick) != 0 || w.Units()[0].Health != device.HealthUnknown {
		t.Errorf("told %v of %v", w.sick, w.Units())
	}
	w.sight.NVML = shown
	w.look(t.Context())
	if i := slices.IndexFunc(w.Units(), func(u kubeletplugin.UnitHealth) bool { return u.Health != device.HealthOK }); i >= 0 {
		t.Errorf("unit %v", w.Units()[i])
	}
	if h, ok := w.Of(builtGPU); !ok || h != device.HealthOK {
		t.Errorf("the built-in GPU is %s, %v", h, ok)
	}
	// Nothing here, nothing asked.
	w.leases, w.found, w.asked = nil, node.Found{}, 0
	w.look(t.Context())
	if w.asked != 0 || len(w.Units()) != 0 {
		t.Errorf("the driver was asked %d times about %v", w.asked, w.Units())
	}
}
