// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func TestClassify(t *testing.T) {
	came := time.Unix(1000, 0)
	at := device.PCIAddress{Bus: 0x3d}
	const mine, other = device.GPUUUID("GPU-1"), device.GPUUUID("GPU-2")
	gpu := Present{Address: at, UUID: mine, Since: came}
	listed := device.OnFabric{ID: "res-1", Model: "M", UUID: mine}
	lease := device.Lease{Unit: "a100-0", Phase: device.Attached, FabricDevice: "res-1", UUID: mine, PCI: at}
	asked := func(t time.Time, before ...string) device.Lease {
		return device.Lease{Unit: "a100-0", Phase: device.Attaching, AskedAt: t, SetBefore: before}
	}
	// A GPU on the bus, and a list that was asked for after it came and does not have it.
	base := Surroundings{GPUs: []Present{gpu}, ListedAt: came.Add(time.Second)}
	for _, tc := range []struct {
		name    string
		change  func(*Surroundings)
		want    Owner
		foreign []string
		again   bool
	}{
		{name: "absent from a newer list", want: BuiltIn},
		{name: "leased by its identity, elsewhere on the bus", change: func(s *Surroundings) {
			l := lease
			l.PCI = device.PCIAddress{Bus: 1}
			s.Leases, s.Listed = []device.Lease{l}, []device.OnFabric{listed}
		}, want: Leased},
		{name: "leased by its address, not shown by NVML", change: func(s *Surroundings) {
			s.GPUs[0].UUID, s.Leases = "", []device.Lease{lease}
		}, want: Leased},
		{name: "leased by what the fabric says of its device", change: func(s *Surroundings) {
			l := lease
			l.Phase, l.UUID, l.PCI = device.Attaching, "", device.PCIAddress{}
			s.Leases, s.Listed = []device.Lease{l}, []device.OnFabric{listed}
		}, want: Leased},
		{name: "at the address of a leased one", change: func(s *Surroundings) {
			l := lease
			l.UUID, l.FabricDevice = other, "res-2"
			s.Leases = []device.Lease{l}
		}, want: BuiltIn},
		{name: "leased, whatever the configuration says", change: func(s *Surroundings) {
			s.Leases, s.Configured = []device.Lease{lease}, map[device.PCIAddress]bool{at: true}
		}, want: Leased},
		{name: "not shown by NVML", change: func(s *Surroundings) { s.GPUs[0].UUID = "" }, want: Unclassified},
		{name: "configured, without any list", change: func(s *Surroundings) {
			s.ListedAt, s.Configured = time.Time{}, map[device.PCIAddress]bool{at: true}
		}, want: BuiltIn},
		{name: "configured, and not shown by NVML", change: func(s *Surroundings) {
			s.GPUs[0].UUID, s.Configured = "", map[device.PCIAddress]bool{at: true}
		}, want: Unclassified},
		{name: "on the list", change: func(s *Surroundings) { s.Listed = []device.OnFabric{listed} }, want: Foreign, foreign: []string{"res-1"}},
		{name: "on a list that is older than it", change: func(s *Surroundings) {
			s.Listed, s.ListedAt = []device.OnFabric{listed}, came.Add(-1)
		}, want: Unclassified, again: true, foreign: []string{"res-1"}},
		{name: "on the list, not on the bus", change: func(s *Surroundings) {
			s.GPUs, s.Listed = nil, []device.OnFabric{listed}
		}, foreign: []string{"res-1"}},
		{name: "on the list, and a lease had it a moment ago", change: func(s *Surroundings) {
			s.Listed, s.Ours = []device.OnFabric{listed}, map[string]bool{"res-1": true}
		}, want: Unclassified, again: true},
		{name: "on the list, after a call of ours", change: func(s *Surroundings) {
			s.Listed, s.Leases = []device.OnFabric{listed}, []device.Lease{asked(came)}
		}, want: Unclassified},
		{name: "on the list, and there before a call of ours", change: func(s *Surroundings) {
			s.Listed, s.Leases = []device.OnFabric{listed}, []device.Lease{asked(came, "res-1")}
		}, want: Foreign, foreign: []string{"res-1"}},
		{name: "came during a call of ours", change: func(s *Surroundings) { s.Leases = []device.Lease{asked(came)} }, want: Unclassified},
		{name: "came during a call of ours, of which the fabric has named the device", change: func(s *Surroundings) {
			l := asked(came)
			l.FabricDevice = "res-1"
			s.Leases, s.ListedAt = []device.Lease{l}, came.Add(-1)
		}, want: Unclassified},
		{name: "was there before a call of ours", change: func(s *Surroundings) {
			s.Leases = []device.Lease{asked(came.Add(time.Minute))}
		}, want: BuiltIn},
		{name: "came from the pool once", change: func(s *Surroundings) { s.Pooled = map[device.GPUUUID]bool{mine: true} }, want: Unclassified},
		{name: "node in no fabric", change: func(s *Surroundings) { s.ListedAt, s.NoFabric = time.Time{}, true }, want: BuiltIn},
		{name: "node in no fabric, leased all the same", change: func(s *Surroundings) {
			s.ListedAt, s.NoFabric, s.Leases = time.Time{}, true, []device.Lease{lease}
		}, want: Leased},
		{name: "no list", change: func(s *Surroundings) { s.ListedAt = time.Time{} }, want: Unclassified, again: true},
		{name: "came before the list, by a clock that stands still", change: func(s *Surroundings) { s.ListedAt = came }, want: BuiltIn},
		{name: "came after the list", change: func(s *Surroundings) { s.ListedAt = came.Add(-1) }, want: Unclassified, again: true},
		{name: "list without identities", change: func(s *Surroundings) {
			s.Listed, s.Leases = []device.OnFabric{{ID: "res-2"}}, []device.Lease{{Unit: "a100-0", FabricDevice: "res-2"}}
		}, want: Unclassified},
		{name: "list of others", change: func(s *Surroundings) {
			s.Listed = []device.OnFabric{{ID: "res-2", UUID: other}}
		}, want: BuiltIn, foreign: []string{"res-2"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := base
			s.GPUs = []Present{gpu}
			if tc.change != nil {
				tc.change(&s)
			}
			got := Classify(s)
			if len(got.GPUs) != len(s.GPUs) {
				t.Fatalf("%d of %d GPUs are placed", len(got.GPUs), len(s.GPUs))
			}
			for _, g := range got.GPUs {
				if g.Owner != tc.want || g.Why == "" || (g.Owner == Leased) != (g.Unit != "") {
					t.Errorf("%+v, want %s", g, tc.want)
				}
			}
			var foreign []string
			for _, d := range got.Foreign {
				foreign = append(foreign, d.ID)
			}
			if diff := cmp.Diff(tc.foreign, foreign); diff != "" {
				t.Errorf("foreign (-want +got):\n%s", diff)
			}
			if got.ListAgain != tc.again {
				t.Errorf("list again: %v", got.ListAgain)
			}
		})
	}
}

// A row that never decides is no policy.
func TestEveryPlaceDecides(t *testing.T) {
	came := time.Unix(1000, 0)
	decided := map[string]bool{}
	const states = 1 << 11
	for bits := range states {
		on := func(i int) bool { return bits&(1<<i) != 0 }
		g := Present{Address: device.PCIAddress{Bus: 1}, UUID: "GPU-1", Since: came}
		s := Surroundings{ListedAt: came.Add(time.Second)}
		if on(0) {
			g.UUID = ""
		}
		if on(1) {
			s.Leases = append(s.Leases, device.Lease{Unit: "u", FabricDevice: "res-1", UUID: "GPU-1", PCI: g.Address})
		}
		if on(2) {
			s.Leases = append(s.Leases, device.Lease{Unit: "v", AskedAt: came})
		}
		if on(3) {
			s.Listed = append(s.Listed, device.OnFabric{ID: "res-1", UUID: "GPU-1"})
		}
		if on(4) {
			s.Listed = append(s.Listed, device.OnFabric{ID: "res-2"})
		}
		if on(5) {
			s.ListedAt = time.Time{}
		}
		if on(6) {
			s.ListedAt = came.Add(-1)
		}
		s.NoFabric = on(7)
		s.Configured = map[device.PCIAddress]bool{g.Address: on(8)}
		s.Ours = map[string]bool{"res-1": on(9)}
		s.Pooled = map[device.GPUUUID]bool{"GPU-1": on(10)}
		s.GPUs = []Present{g}
		for _, r := range placesOf() {
			if r.when(&s, &g) {
				decided[r.name] = true
				break
			}
		}
		// What a lease, an open call or the list speaks of is never published.
		for _, p := range Classify(s).GPUs {
			listed := on(3) && !on(0) && !on(8)
			if p.Owner == BuiltIn && (on(0) || on(1) || listed || !on(8) && (on(2) || on(10))) {
				t.Errorf("%+v is built-in of %+v", p, s)
			}
		}
	}
	for _, r := range placesOf() {
		if !decided[r.name] {
			t.Errorf("%q decides nowhere", r.name)
		}
	}
	t.Logf("%d states, %d rows, all decide somewhere", states, len(placesOf()))
}

// A foreign device that was taken in: a lease in phase Attaching that has its device and serves nobody. It becomes
// Attached and idle without a call that changes the fabric.
func TestAdopted(t *testing.T) {
	now := time.Unix(5000, 0)
	at := device.PCIAddress{Bus: 0x3d}
	o := Observation{
		Now: now, Settings: Settings{Deadline: time.Minute, Retry: time.Second, Hold: time.Second, Appear: time.Second, Busy: time.Second, Resync: time.Minute},
		Lease:       device.Lease{Fabric: "0", Unit: "a100-0", Model: "a100", Phase: device.Attaching, FabricDevice: "res-1", AcquiredAt: now, ChangedAt: now},
		FabricModel: "M", Here: []device.OnFabric{{ID: "res-1", Model: "M", UUID: "GPU-1", Health: device.HealthOK}},
		Bus: []Function{{Address: at, Driver: "nvidia"}}, NVML: []GPU{{Address: at, UUID: "GPU-1"}},
		Tried: map[Kind]Try{}, PreparedKnown: true, ListTriedAt: now,
	}
	var did []Kind
	for range 10 {
		d := Next(o)
		did = append(did, d.Kind)
		switch d.Kind {
		case ListFabric:
			o.Fresh = true
		case Store:
			o.Lease = d.Lease
		case FindHolders:
			o.HoldersAt = o.Now
		default:
		}
		if d.Kind == Wait {
			break
		}
	}
	if diff := cmp.Diff([]Kind{ListFabric, Store, FindHolders, Store, Wait}, did); diff != "" {
		t.Errorf("actions (-want +got):\n%s", diff)
	}
	if !o.Lease.Idle() || o.Lease.UUID != "GPU-1" || o.Lease.PCI != at {
		t.Errorf("it ends as %+v", o.Lease)
	}

	// It is taken away before, as by whoever attached it.
	o.Lease = device.Lease{Phase: device.Attaching, FabricDevice: "res-1", AcquiredAt: now, ChangedAt: now}
	o.Here = nil
	if d := Next(o); d.Kind != Store || d.Lease.Phase != device.Failed || d.Lease.Failure.Reason != "Vanished" {
		t.Errorf("taken away: %+v", d)
	}
}
