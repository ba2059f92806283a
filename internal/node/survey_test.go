// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
)

// site is everything around a survey.
type site struct {
	t      *testing.T
	clock  *clocktesting.FakeClock
	sight  Sight
	leases []device.Lease
	listed []device.OnFabric
	fault  error
	asked  int
	told   int
	survey *Survey
	// hidden are GPUs on the bus that NVML shows once it is asked to look; looked counts that.
	hidden []attach.GPU
	looked int
}

func (s *site) Observe(context.Context) (Sight, error) { return s.sight, nil }
func (s *site) Discover(context.Context) error {
	s.looked++
	s.sight.NVML, s.hidden = append(s.sight.NVML, s.hidden...), nil
	return nil
}
func (s *site) List() []device.Lease { return s.leases }
func (s *site) ListAttached(context.Context, device.Machine) ([]device.OnFabric, error) {
	s.asked++
	s.clock.Step(time.Millisecond)
	return s.listed, s.fault
}

const (
	surveyResync = 10 * time.Minute
	surveyRetry  = 5 * time.Second
)

func newSite(t *testing.T, change func(*SurveyConfig)) *site {
	t.Helper()
	s := &site{t: t, clock: clocktesting.NewFakeClock(time.Unix(1000, 0))}
	cfg := SurveyConfig{
		Node: "n1", Machine: "m1", Manager: s, Leases: s, Host: s, Resync: surveyResync, RetryFirst: surveyRetry, RetryMost: time.Minute,
		Debounce: time.Millisecond, CallDeadline: time.Minute, LocalDeadline: time.Minute, Clock: s.clock, Changed: func(Found) { s.told++ },
	}
	if change != nil {
		change(&cfg)
	}
	s.survey = NewSurvey(cfg)
	return s
}

func busAddress(n int) device.PCIAddress { return device.PCIAddress{Bus: uint8(0x3d + n)} }
func gpuID(n int) device.GPUUUID         { return device.GPUUUID(fmt.Sprintf("GPU-%d", n)) }

// plug puts GPU n on the bus, seen by NVML.
func (s *site) plug(n int) {
	s.sight.Bus = append(s.sight.Bus, attach.Function{Address: busAddress(n), Driver: "nvidia"})
	s.sight.NVML = append(s.sight.NVML, attach.GPU{Address: busAddress(n), UUID: gpuID(n), Name: "A100"})
}

func onFabric(n int) device.OnFabric {
	return device.OnFabric{ID: fmt.Sprintf("res-%d", n), UUID: gpuID(n), Model: "M"}
}

// expect looks once, a second later, and compares whose the GPUs are and how often the manager was asked so far.
func (s *site) expect(what string, asked int, want ...attach.Owner) {
	s.t.Helper()
	s.clock.Step(time.Second)
	s.survey.Step(s.t.Context())
	f, ok := s.survey.Found()
	if !ok {
		s.t.Fatal("nothing was found")
	}
	var got []attach.Owner
	for _, g := range f.GPUs {
		got = append(got, g.Owner)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Errorf("%s (-want +got):\n%s%+v", what, diff, f)
	}
	if s.asked != asked {
		s.t.Errorf("%s: the manager was asked %d times, want %d", what, s.asked, asked)
	}
}

func TestSurveyOfBuiltInGPUs(t *testing.T) {
	s := newSite(t, nil)
	s.plug(0)
	s.expect("at the start", 1, attach.BuiltIn)
	s.expect("and nothing happens", 1, attach.BuiltIn)
	if s.told != 1 {
		t.Errorf("told %d times of one finding", s.told)
	}
	s.sight.NVML, s.sight.NVMLState = nil, "hung"
	s.expect("the driver hangs", 1, attach.BuiltIn)
	s.sight.NVMLState = ""
	s.expect("the driver does not show it", 1, attach.Unclassified)
	s.sight = Sight{}
	s.plug(0)
	s.expect("it does again", 1, attach.BuiltIn)
	s.clock.Step(surveyResync)
	s.expect("some time later", 2, attach.BuiltIn)
	s.fault = errors.New("down")
	s.clock.Step(surveyResync)
	s.expect("the manager is down", 3, attach.BuiltIn)
	s.expect("the manager is still down", 3, attach.BuiltIn)
	if f, _ := s.survey.Found(); f.Trouble != "down" {
		t.Errorf("trouble %q", f.Trouble)
	}
}

func TestSurveyOfForeignDevices(t *testing.T) {
	s := newSite(t, nil)
	s.expect("an empty bus", 1)
	s.clock.Step(surveyRetry)
	s.listed = []device.OnFabric{onFabric(1)}
	s.plug(1)
	s.expect("somebody attaches a device", 2, attach.Foreign)
	if f, _ := s.survey.Found(); len(f.Foreign) != 1 || f.Foreign[0].ID != "res-1" {
		t.Errorf("foreign: %+v", f.Foreign)
	}
	// The manager forgets it before the bus does.
	s.listed = nil
	s.clock.Step(surveyResync)
	s.expect("it is detached and still on the bus", 3, attach.Unclassified)
	s.sight = Sight{}
	s.expect("it is gone", 3)
	s.plug(1)
	s.clock.Step(surveyRetry)
	s.expect("the same card was put in for good", 4, attach.BuiltIn)
}

// A GPU that came by itself is shown by NVML only when that is asked to look: once, and not while a unit is on its way.
func TestSurveyDiscovers(t *testing.T) {
	s := newSite(t, nil)
	s.expect("an empty bus", 1)
	s.clock.Step(surveyRetry)
	s.leases = []device.Lease{{Node: "n1", Unit: "a100-0", Phase: device.Attaching}}
	s.plug(1)
	s.hidden, s.sight.NVML = s.sight.NVML, nil
	s.survey.Step(t.Context())
	if s.looked != 0 {
		t.Errorf("NVML was asked to look while a unit is on its way")
	}
	s.leases = nil
	s.clock.Step(surveyRetry)
	s.survey.Step(t.Context())
	if f, _ := s.survey.Found(); len(f.GPUs) != 1 || f.GPUs[0].Owner != attach.BuiltIn {
		t.Errorf("found %+v, want a built-in GPU", f.GPUs)
	}
	s.plug(2)
	s.sight.NVML = s.sight.NVML[:1]
	for range 3 {
		s.survey.Step(t.Context())
	}
	if s.looked != 2 {
		t.Errorf("NVML was asked to look %d times, want once for each GPU", s.looked)
	}
}

// A clock that runs on while it is read does not put the first list off.
func TestSurveyListsAtOnce(t *testing.T) {
	s := newSite(t, func(c *SurveyConfig) { c.Clock = clock.RealClock{} })
	s.survey.Step(t.Context())
	if s.asked != 1 {
		t.Errorf("the manager was asked %d times, want at once", s.asked)
	}
}

// On our own units the manager is not asked once more than their way needs.
func TestSurveyOfLeasedUnits(t *testing.T) {
	s := newSite(t, nil)
	s.plug(0)
	s.expect("at the start", 1, attach.BuiltIn)
	l := device.Lease{Node: "n1", Unit: "a100-0", Phase: device.Attaching, AskedAt: s.clock.Now()}
	s.leases = []device.Lease{l}
	s.clock.Step(surveyRetry)
	s.plug(1)
	s.expect("a unit comes", 1, attach.BuiltIn, attach.Unclassified)
	l.FabricDevice = "res-1"
	s.leases, s.listed = []device.Lease{l}, []device.OnFabric{onFabric(1)}
	s.expect("the fabric has named it", 1, attach.BuiltIn, attach.Unclassified)
	l.Phase, l.UUID, l.PCI = device.Attached, gpuID(1), busAddress(1)
	s.leases = []device.Lease{l}
	s.expect("it is attached", 1, attach.BuiltIn, attach.Leased)
	s.clock.Step(surveyResync)
	s.expect("some time later", 2, attach.BuiltIn, attach.Leased)

	s.sight, s.leases, s.listed = Sight{}, nil, nil
	s.plug(0)
	s.clock.Step(surveyRetry)
	s.expect("it is released: the list that had it says nothing of now", 3, attach.BuiltIn)
	if f, _ := s.survey.Found(); len(f.Foreign) != 0 {
		t.Errorf("foreign: %+v", f.Foreign)
	}
}

// A unit that went back to the pool, and was put into the machine for good before the list was read again: that the
// old list names it says nothing of the GPU that has come.
func TestSurveyOfAFormerUnit(t *testing.T) {
	s := newSite(t, nil)
	l := device.Lease{Node: "n1", Unit: "a100-0", Phase: device.Attached, FabricDevice: "res-1", UUID: gpuID(1), PCI: busAddress(1)}
	s.leases, s.listed = []device.Lease{l}, []device.OnFabric{onFabric(1)}
	s.plug(1)
	s.expect("it is attached", 1, attach.Leased)
	s.sight, s.leases, s.listed = Sight{}, nil, nil
	s.expect("it has just gone, and the list was just read", 1)
	s.plug(1)
	s.expect("it is back at once", 1, attach.Unclassified)
	s.clock.Step(surveyRetry)
	s.expect("the list is read again", 2, attach.BuiltIn)
}

// What is not known before the first list is pending, and not after it.
func TestSurveyPending(t *testing.T) {
	s := newSite(t, nil)
	s.plug(0)
	s.fault = errors.New("down")
	s.expect("the manager is down", 1, attach.Unclassified)
	if f, _ := s.survey.Found(); !f.Pending {
		t.Error("it is known though no list was read")
	}
	s.fault = nil
	s.clock.Step(time.Minute)
	s.expect("it is back", 2, attach.BuiltIn)
	if f, _ := s.survey.Found(); f.Pending {
		t.Error("it is pending though the list was read")
	}
}

func TestSurveyWithoutManager(t *testing.T) {
	none := newSite(t, func(c *SurveyConfig) { c.Manager, c.NoFabric = nil, true })
	none.plug(0)
	none.expect("in no fabric", 0, attach.BuiltIn)
	unknown := newSite(t, func(c *SurveyConfig) {
		c.Manager, c.Trouble = nil, "the machine is not known"
		c.BuiltIn = map[device.PCIAddress]bool{busAddress(1): true}
	})
	unknown.plug(0)
	unknown.plug(1)
	unknown.expect("in which fabric is not known", 0, attach.Unclassified, attach.BuiltIn)
	if wake := unknown.survey.Step(t.Context()); !wake.After(unknown.clock.Now()) {
		t.Error("it looks again and again")
	}
}

// Run looks when poked, and ends with its context.
func TestSurveyRuns(t *testing.T) {
	told := make(chan Found, 1)
	s := newSite(t, func(c *SurveyConfig) { c.Changed = func(f Found) { told <- f } })
	s.plug(0)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.survey.Run(ctx)
	}()
	if f := <-told; len(f.GPUs) != 1 {
		t.Errorf("found %+v", f)
	}
	s.survey.Poke()
	cancel()
	<-ended
}
