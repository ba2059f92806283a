// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
)

// Lister reads what the fabric lists on a machine.
type Lister interface {
	ListAttached(ctx context.Context, m device.Machine) ([]device.OnFabric, error)
}

// Observable shows the GPUs of this host.
type Observable interface {
	Observe(ctx context.Context) (Sight, error)
}

// SurveyHost is an Observable whose driver can be made to see what has come.
type SurveyHost interface {
	Observable
	Discover(ctx context.Context) error
}

// SurveyConfig is what a Survey is made of.
type SurveyConfig struct {
	Node    string
	Machine device.Machine
	// Manager is nil where no fabric can be asked about this node's machine: NoFabric says that none has it,
	// else Trouble says why.
	Manager  Lister
	NoFabric bool
	Trouble  string
	// BuiltIn are the addresses that the configuration calls built-in.
	BuiltIn map[device.PCIAddress]bool

	Leases interface{ List() []device.Lease }
	Host   SurveyHost
	// Resync is how often the list is read unasked. The nodes of a fabric should not all use the same.
	Resync time.Duration
	// RetryFirst and RetryMost pace what failed, or did not help.
	RetryFirst, RetryMost time.Duration
	// Debounce is how long what happens is gathered before it is looked at.
	Debounce                    time.Duration
	CallDeadline, LocalDeadline time.Duration
	Clock                       clock.WithTicker
	// Changed is told what was found whenever that is another. It must not block.
	Changed func(Found)
}

// Found is what a Survey knows.
type Found struct {
	attach.Places
	// Listed is what the manager lists on this machine, as last read.
	Listed []device.OnFabric
	// Trouble is why the list could not be read, empty if it could.
	Trouble string
	// Pending: no list was read yet, so that what is not known may be known soon.
	Pending bool
}

// Survey tells whose the GPUs of this node are. It changes nothing, but has NVML look at what came by itself.
type Survey struct {
	cfg   SurveyConfig
	poked chan struct{}

	// Of Run's goroutine only.
	since    map[device.PCIAddress]attach.Present
	listed   []device.OnFabric
	listedAt time.Time
	triedAt  time.Time
	pause    time.Duration
	trouble  string
	ours     map[string]bool
	pooled   map[device.GPUUUID]bool
	// left are the GPUs that were seen to leave the bus after the list was asked for: what it says of them is over.
	left map[device.GPUUUID]bool
	// discovered are the GPUs for which NVML was asked to look.
	discovered map[device.PCIAddress]bool

	mu    sync.Mutex // guards the following
	found Found
	known bool
}

// NewSurvey returns a survey; Run starts it.
func NewSurvey(cfg SurveyConfig) *Survey {
	return &Survey{
		cfg: cfg, poked: make(chan struct{}, 1), since: map[device.PCIAddress]attach.Present{},
		trouble: cfg.Trouble, pause: cfg.RetryFirst, ours: map[string]bool{}, pooled: map[device.GPUUUID]bool{},
		left: map[device.GPUUUID]bool{}, discovered: map[device.PCIAddress]bool{},
	}
}

// Poke asks for a look. It never blocks.
func (s *Survey) Poke() {
	select {
	case s.poked <- struct{}{}:
	default:
	}
}

// Found returns what is known; ok is false before the first look.
func (s *Survey) Found() (f Found, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.found, s.known
}

// Run looks whenever it is poked and slowly in any case, until ctx ends.
func (s *Survey) Run(ctx context.Context) {
	for {
		wake := s.Step(ctx)
		if !s.sleep(ctx, max(wake.Sub(s.cfg.Clock.Now()), 0), s.poked) || !s.sleep(ctx, s.cfg.Debounce, nil) {
			return
		}
	}
}

// sleep waits for the pause or a poke; false is the end of ctx.
func (s *Survey) sleep(ctx context.Context, pause time.Duration, poke <-chan struct{}) bool {
	timer := s.cfg.Clock.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-poke:
	case <-timer.C():
	}
	return true
}

// Step looks once and reads the manager's list if that is due or would tell more. It returns when to look again
// though nothing happened.
func (s *Survey) Step(ctx context.Context) time.Time {
	look, cancel := context.WithTimeout(ctx, s.cfg.LocalDeadline)
	sight, err := s.observe(look)
	cancel()
	if err != nil {
		klog.FromContext(ctx).Error(err, "The host's GPUs cannot be observed; whose they are stays as it was known")
		return s.cfg.Clock.Now().Add(s.cfg.RetryFirst)
	}
	places := s.classify(sight)
	if s.due(places.ListAgain) {
		s.list(ctx)
		places = s.classify(sight)
		if places.ListAgain || s.trouble != "" {
			s.pause = min(2*s.pause, s.cfg.RetryMost)
		} else {
			s.pause = s.cfg.RetryFirst
		}
	}
	s.tell(Found{Places: places, Listed: s.listed, Trouble: s.trouble, Pending: s.cfg.Manager != nil && s.listedAt.IsZero()})
	return s.next(places.ListAgain)
}

// observe has NVML look, once, for a GPU that came and is not on any unit's way.
func (s *Survey) observe(ctx context.Context) (Sight, error) {
	sight, err := s.cfg.Host.Observe(ctx)
	if err != nil || !s.undiscovered(sight) {
		return sight, err
	}
	if err := s.cfg.Host.Discover(ctx); err != nil {
		klog.FromContext(ctx).Info("The driver's library does not look for GPUs that came; whose they are stays unknown", "err", err)
		return sight, nil
	}
	return s.cfg.Host.Observe(ctx)
}

// undiscovered: the driver has a GPU that NVML does not show. While a unit comes or goes that is its holder's.
func (s *Survey) undiscovered(sight Sight) bool {
	maps.DeleteFunc(s.discovered, func(at device.PCIAddress, _ bool) bool {
		return !slices.ContainsFunc(sight.Bus, func(f attach.Function) bool { return f.Address == at })
	})
	if sight.NVMLState != "" || slices.ContainsFunc(s.cfg.Leases.List(), func(l device.Lease) bool {
		return l.Node == s.cfg.Node && l.Phase != device.Attached && l.Phase != device.Failed
	}) {
		return false
	}
	found := false
	for _, f := range sight.Bus {
		shown := slices.ContainsFunc(sight.NVML, func(g attach.GPU) bool { return g.Address == f.Address })
		if f.Driver != "" && !shown && !s.discovered[f.Address] {
			s.discovered[f.Address], found = true, true
		}
	}
	return found
}

// classify takes what the host shows now.
func (s *Survey) classify(sight Sight) attach.Places {
	gpus := s.present(sight)
	var leases []device.Lease
	for _, l := range s.cfg.Leases.List() {
		if l.Node == s.cfg.Node {
			leases = append(leases, l)
		}
	}
	s.listed = attach.Identified(s.listed, sight.NVML)
	s.remember(gpus, leases)
	return attach.Classify(attach.Surroundings{
		GPUs: gpus, Leases: leases, Listed: s.listed, ListedAt: s.listedAt, NoFabric: s.cfg.NoFabric, Trouble: s.trouble,
		Configured: s.cfg.BuiltIn, Ours: s.ours, Pooled: s.pooled,
	})
}

// present says since when each GPU is here. One that NVML begins or ceases to show is the same; one with another
// identity has come. While NVML does not answer, each is what it was.
func (s *Survey) present(sight Sight) []attach.Present {
	since := s.cfg.Clock.Now()
	if !since.After(s.listedAt) {
		since = s.listedAt.Add(1) // what is seen only now came after the last list, whatever the clock says
	}
	now := map[device.PCIAddress]attach.Present{}
	gpus := make([]attach.Present, 0, len(sight.Bus))
	for _, f := range sight.Bus {
		g := attach.Present{Address: f.Address, Since: since}
		for _, shown := range sight.NVML {
			if shown.Address == f.Address {
				g.UUID, g.Name = shown.UUID, shown.Name
			}
		}
		seen := g
		if before, ok := s.since[f.Address]; ok && (before.UUID == "" || g.UUID == "" || before.UUID == g.UUID) {
			g.Since, seen.Since = before.Since, before.Since
			if g.UUID == "" {
				seen.UUID, seen.Name = before.UUID, before.Name
			}
			if sight.NVMLState != "" {
				g = seen
			}
		}
		now[f.Address] = seen
		gpus = append(gpus, g)
	}
	s.noteLeft(now)
	s.since = now
	return gpus
}

// noteLeft keeps which GPUs were here and are not.
func (s *Survey) noteLeft(now map[device.PCIAddress]attach.Present) {
	for at, before := range s.since {
		if before.UUID != "" && now[at].UUID != before.UUID {
			s.left[before.UUID] = true
		}
	}
}

// remember keeps which GPUs on the bus came from the pool, and which devices were ours.
func (s *Survey) remember(gpus []attach.Present, leases []device.Lease) {
	onBus := map[device.GPUUUID]bool{}
	for _, g := range gpus {
		onBus[g.UUID] = true
	}
	maps.DeleteFunc(s.pooled, func(id device.GPUUUID, _ bool) bool { return !onBus[id] })
	for _, l := range leases {
		if l.UUID != "" && onBus[l.UUID] {
			s.pooled[l.UUID] = true
		}
		if l.FabricDevice != "" {
			s.ours[l.FabricDevice] = true
		}
	}
	for _, d := range s.listed {
		if d.UUID != "" && onBus[d.UUID] && !s.left[d.UUID] {
			s.pooled[d.UUID] = true
		}
	}
}

// due tells whether the manager is to be asked now.
func (s *Survey) due(again bool) bool {
	return s.cfg.Manager != nil && (s.triedAt.IsZero() || !s.cfg.Clock.Now().Before(s.next(again)))
}

// next is when the manager is to be asked next, or, where there is none, when to look again.
func (s *Survey) next(again bool) time.Time {
	switch {
	case s.cfg.Manager == nil:
		return s.cfg.Clock.Now().Add(s.cfg.Resync)
	case s.triedAt.IsZero():
		return s.cfg.Clock.Now()
	case again || s.trouble != "":
		return s.triedAt.Add(s.pause)
	}
	return s.triedAt.Add(s.cfg.Resync)
}

// list reads the manager's list. One that could not be read leaves the last one in force.
func (s *Survey) list(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, s.cfg.CallDeadline)
	defer cancel()
	asked, ours := s.cfg.Clock.Now(), map[string]bool{}
	for _, l := range s.cfg.Leases.List() {
		if l.Node == s.cfg.Node && l.FabricDevice != "" {
			ours[l.FabricDevice] = true
		}
	}
	listed, err := s.cfg.Manager.ListAttached(call, s.cfg.Machine)
	s.triedAt = s.cfg.Clock.Now()
	if err != nil {
		s.trouble = err.Error()
		return
	}
	s.listed, s.listedAt, s.ours, s.trouble = listed, asked, ours, ""
	clear(s.left)
}

func (s *Survey) tell(f Found) {
	s.mu.Lock()
	same := s.known && sameFound(s.found, f)
	s.found, s.known = f, true
	s.mu.Unlock()
	if !same {
		s.cfg.Changed(f)
	}
}

func sameFound(a, b Found) bool {
	return a.Trouble == b.Trouble && a.Pending == b.Pending && slices.Equal(a.GPUs, b.GPUs) && slices.Equal(a.Foreign, b.Foreign) && slices.Equal(a.Listed, b.Listed)
}
