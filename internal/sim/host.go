// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/kubeletplugin"
	"github.com/cohdi/cohdi-agent/internal/node"
)

// host is one node's machine: bus, driver, processes.
type host struct {
	s       *Sim
	node    string
	machine device.Machine
	skew    time.Duration
	bootID  string
	boots   int
	dir     string
	agents  int // how many Pods of the agent there were
	// bootedAt is when it last booted; awayUntil is how long no agent starts here.
	bootedAt, awayUntil time.Time

	// unmodelUntil is how long the node's configuration lacks the model.
	unmodelUntil time.Time

	// crude: its driver cannot drain, so nothing keeps a process from opening a GPU that is about to go.
	crude bool

	bus []*function
	// open are the processes that have a GPU open, by GPU.
	open map[*gpu][]handle
	// owner is the agent that has the host-wide lock.
	owner *process
}

// handle is a process that has a GPU open, since when.
type handle struct {
	who   string
	since time.Time
}

func (h *host) openedBy(g *gpu, who string) {
	h.open[g] = append(h.open[g], handle{who, h.s.now()})
}

func (h *host) holders(g *gpu) []string {
	all := []string{}
	for _, o := range h.open[g] {
		all = append(all, o.who)
	}
	return all
}

// function is a GPU on the bus.
type function struct {
	at    device.PCIAddress
	g     *gpu
	minor int
	// bound: the driver is bound; seen: NVML knows it. drained is the process that drained it, nil if none did.
	bound, seen bool
	drained     *process
}

// How hard a device that was linked is to find: it appears by itself, when the empty slots are scanned, or
// when the whole bus is.
const (
	showsItself = iota
	needsRescan
	needsRescanAll
)

func (h *host) functionOf(g *gpu) *function {
	for _, f := range h.bus {
		if f.g == g {
			return f
		}
	}
	return nil
}

func (h *host) functionAt(a device.PCIAddress) *function {
	for _, f := range h.bus {
		if f.at == a {
			return f
		}
	}
	return nil
}

// linked: the fabric gave the machine a device.
func (h *host) linked(g *gpu) {
	if h.s.chance("shy "+g.id, 4) {
		return // until somebody scans
	}
	in := h.s.between("appear "+g.id, 500*time.Millisecond, 4*time.Second)
	h.s.after(in, nil, func() { h.appear(g) })
}

func (h *host) unlinked(g *gpu) {
	if f := h.functionOf(g); f != nil {
		h.bus = slices.DeleteFunc(h.bus, func(has *function) bool { return has == f })
		h.s.detail(h.node, "%s left %s", g.id, f.at)
	}
	delete(h.open, g)
	h.s.hostChanged(h)
}

// appear shows a linked device at the first free slot.
func (h *host) appear(g *gpu) {
	if g.machine != h.machine || h.functionOf(g) != nil {
		return
	}
	f := &function{g: g, bound: true, seen: true}
	for f.at = (device.PCIAddress{Bus: 2}); h.functionAt(f.at) != nil; f.at.Bus++ {
		f.minor++
	}
	if h.s.chance("unbound "+g.id, 4) {
		f.bound = false
	}
	if !f.bound || h.s.chance("unseen "+g.id, 3) {
		f.seen = false
	}
	h.bus = append(h.bus, f)
	slices.SortFunc(h.bus, func(a, b *function) int { return a.at.Compare(b.at) })
	h.s.detail(h.node, "%s is on the bus at %s", g.id, f.at)
	h.s.hostChanged(h)
}

// usable: a process on this machine could compute on it.
func (h *host) usable(g *gpu) bool {
	f := h.functionOf(g)
	return f != nil && f.bound && f.seen && g.machine == h.machine
}

// view is the host as the agent of one process sees it.
type view struct{ p *process }

var (
	_ node.Host               = view{}
	_ kubeletplugin.GPUs      = pluginView{}
	_ kubeletplugin.SpecMaker = pluginView{}
)

func hostCall(key string, least, most time.Duration) request {
	return request{
		key: "host " + key, least: least, most: most,
		lost: func(cause error) error { return fmt.Errorf("%s did not end: %w", key, cause) },
		no:   func() error { return errors.New(key + ": input/output error") },
	}
}

func (v view) Observe(ctx context.Context) (node.Sight, error) {
	h := v.p.host
	return invoke(ctx, v.p, hostCall("observe", 2*time.Millisecond, 30*time.Millisecond), func() (node.Sight, error) {
		var sight node.Sight
		for _, f := range h.bus {
			fn := attach.Function{Address: f.at}
			if f.bound {
				fn.Driver = "nvidia"
			}
			sight.Bus = append(sight.Bus, fn)
			if !f.seen {
				continue
			}
			g := attach.GPU{Address: f.at, UUID: f.g.uuid, Draining: f.drained != nil}
			if f.drained != nil && f.drained != v.p {
				g.UUID = "" // the driver hides it from who began after the drain
			}
			sight.NVML = append(sight.NVML, g)
		}
		return sight, nil
	})
}

// do is a call to the host that only may fail.
func (v view) do(ctx context.Context, key string, least, most time.Duration, f func() error) error {
	_, err := invoke(ctx, v.p, hostCall(key, least, most), func() (struct{}, error) { return struct{}{}, f() })
	return err
}

func (v view) scan(ctx context.Context, key string, hard int) error {
	return v.do(ctx, key, 200*time.Millisecond, 2*time.Second, func() error {
		for _, g := range v.p.s.fabric.on(v.p.host.machine) {
			if v.p.host.functionOf(g) == nil && (hard == needsRescanAll || !v.p.s.chance("hidden "+g.id, 3)) {
				v.p.host.appear(g)
			}
		}
		return nil
	})
}

func (v view) Rescan(ctx context.Context, _ device.PCIAddress) error {
	return v.scan(ctx, "rescan", needsRescan)
}

func (v view) RescanAll(ctx context.Context) error { return v.scan(ctx, "rescan all", needsRescanAll) }

func (v view) at(a device.PCIAddress, then func(f *function) error) func() error {
	return func() error {
		f := v.p.host.functionAt(a)
		if f == nil {
			return fmt.Errorf("there is nothing at %s", a)
		}
		return then(f)
	}
}

func (v view) Bind(ctx context.Context, a device.PCIAddress) error {
	return v.do(ctx, "bind "+a.String(), 100*time.Millisecond, time.Second, v.at(a, func(f *function) error {
		f.bound = true
		v.p.s.hostChanged(v.p.host)
		return nil
	}))
}

func (v view) Discover(ctx context.Context) error {
	return v.do(ctx, "discover", 100*time.Millisecond, time.Second, func() error {
		for _, f := range v.p.host.bus {
			f.seen = f.seen || f.bound && !f.g.dead
		}
		return nil
	})
}

var errInUse = errors.New("in use by another client")

func (v view) Drain(ctx context.Context, a device.PCIAddress) error {
	return v.do(ctx, "drain "+a.String(), 50*time.Millisecond, 500*time.Millisecond, v.at(a, func(f *function) error {
		h := v.p.host
		h.s.preparedFor(v.p, f.g, "drained")
		if h.crude {
			return nil
		}
		if len(h.open[f.g]) > 0 {
			return errInUse
		}
		f.drained = v.p
		h.s.note(h.node, "drained %s", f.g.id)
		return nil
	}))
}

func (v view) Undrain(ctx context.Context, a device.PCIAddress) error {
	return v.do(ctx, "undrain "+a.String(), 50*time.Millisecond, 500*time.Millisecond, v.at(a, func(f *function) error {
		f.drained = nil
		return nil
	}))
}

func (v view) Remove(ctx context.Context, a device.PCIAddress) error {
	return v.do(ctx, "remove "+a.String(), 100*time.Millisecond, time.Second, func() error {
		h := v.p.host
		f := h.functionAt(a)
		if f == nil {
			return nil
		}
		h.s.taking(v.p, f.g, "taken off the bus")
		delete(h.open, f.g) // who opened it since the last look finds it gone
		h.bus = slices.DeleteFunc(h.bus, func(has *function) bool { return has == f })
		h.s.note(h.node, "removed %s from the bus", f.g.id)
		h.s.hostChanged(h)
		return nil
	})
}

func (v view) holdersOf(ctx context.Context, key string, f func() *function) ([]string, error) {
	return invoke(ctx, v.p, hostCall("holders "+key, 10*time.Millisecond, 200*time.Millisecond), func() ([]string, error) {
		fn := f()
		if fn == nil {
			return []string{}, nil
		}
		if fn.drained != nil && fn.drained != v.p {
			return nil, errors.New("the driver hides which device node it is")
		}
		return v.p.host.holders(fn.g), nil
	})
}

// Holders is for the node's loop; its result is for people.
func (v view) Holders(ctx context.Context, a device.PCIAddress) ([]string, error) {
	return v.holdersOf(ctx, a.String(), func() *function { return v.p.host.functionAt(a) })
}

// pluginView is the host as the kubelet plugin sees it.
type pluginView struct{ view }

func (v pluginView) Holders(ctx context.Context, uuid device.GPUUUID) (string, error) {
	who, err := v.holdersOf(ctx, string(uuid), func() *function { return v.p.host.functionOf(v.p.s.fabric.byUUID(uuid)) })
	return strings.Join(who, ", "), err
}

func (v pluginView) GPU(ctx context.Context, uuid device.GPUUUID) (kubeletplugin.GPU, bool, error) {
	type found struct {
		gpu kubeletplugin.GPU
		ok  bool
	}
	f, err := invoke(ctx, v.p, hostCall("find "+string(uuid), 2*time.Millisecond, 20*time.Millisecond), func() (found, error) {
		g := v.p.s.fabric.byUUID(uuid)
		if g == nil {
			return found{}, nil
		}
		fn := v.p.host.functionOf(g)
		if fn == nil || !fn.seen || !fn.bound {
			return found{}, nil
		}
		return found{kubeletplugin.GPU{UUID: uuid, PCI: fn.at, Minor: fn.minor, Name: "A100"}, true}, nil
	})
	return f.gpu, f.ok, err
}

func (v pluginView) Changed() <-chan struct{} { return v.p.gpuNews.next() }

func (v pluginView) Edits(ctx context.Context, gpus []kubeletplugin.GPU) (common cdispecs.ContainerEdits, own []cdispecs.ContainerEdits, err error) {
	own, err = invoke(ctx, v.p, hostCall("edits", 5*time.Millisecond, 50*time.Millisecond), func() ([]cdispecs.ContainerEdits, error) {
		all := make([]cdispecs.ContainerEdits, 0, len(gpus))
		for _, g := range gpus {
			all = append(all, cdispecs.ContainerEdits{DeviceNodes: []*cdispecs.DeviceNode{{Path: fmt.Sprintf("/dev/nvidia%d", g.Minor)}}})
		}
		return all, nil
	})
	return common, own, err
}
