// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// blocks is a service with composition: systems of resource blocks.
type blocks struct {
	c *Client
	root
	service
}

func (w *blocks) machines(ctx context.Context, what string) ([]fabric.Machine, *device.Fault) {
	links, fault := w.c.collect(ctx, "machines", what, w.systems, w.expand)
	if fault != nil {
		return nil, fault
	}
	zones, fault := w.readZones(ctx, what)
	if fault != nil {
		return nil, fault
	}
	systems, fault := each(ctx, links, func(ctx context.Context, l link) (system, *device.Fault) {
		if l.raw != nil {
			if s, err := decodeSystem(l.raw); err == nil {
				w.c.note(l.to, s.machine)
				return s, nil
			}
		}
		p := w.c.readSystem(ctx, what, l.to)
		return w.c.known(l.to, p)
	})
	if fault != nil {
		return nil, fault
	}
	var out []fabric.Machine
	for i := range systems {
		s := &systems[i]
		if s.machine == "" || !s.composable {
			continue
		}
		m := fabric.Machine{ID: s.machine, Name: s.name, Power: s.power}
		for _, z := range zones {
			if m.Fabric == "" && slices.ContainsFunc(s.blocks, z.has) {
				m.Fabric = z.id
			}
		}
		out = append(out, m)
	}
	return out, nil
}

// zone is a set of blocks that may be joined.
type zone struct {
	id      string
	members []string
}

func (z zone) has(path string) bool { return slices.Contains(z.members, path) }

func decodeBlockZone(body []byte) (zone, error) {
	var z struct {
		ID    rest.Text `json:"Id"`
		Links struct{ ResourceBlocks []link }
	}
	if err := json.Unmarshal(body, &z); err != nil {
		return zone{}, fmt.Errorf("decode resource zone: %w", err)
	}
	return zone{rest.Tidy(string(z.ID)), paths(z.Links.ResourceBlocks)}, nil
}

func (w *blocks) readZones(ctx context.Context, what string) ([]zone, *device.Fault) {
	if w.zones == "" {
		return nil, nil
	}
	links, fault := w.c.collect(ctx, "inventory", what, w.zones, "")
	if fault != nil {
		return nil, fault
	}
	return each(ctx, links, func(ctx context.Context, l link) (zone, *device.Fault) {
		z, _, unread := read(ctx, w.c, "inventory", what, l.to, decodeBlockZone)
		if unread != nil {
			z = zone{} // allows nothing
		}
		return z, nil
	})
}

// reachable are the blocks that share a zone with some block of the host. Where zones say nothing about the host, the
// service decides.
func (w *blocks) reachable(ctx context.Context, what string, h *host) (func(*unit) bool, *device.Fault) {
	zones, fault := w.readZones(ctx, what)
	if fault != nil {
		return nil, fault
	}
	zones = slices.DeleteFunc(zones, func(z zone) bool { return !slices.ContainsFunc(h.members, z.has) })
	return func(u *unit) bool {
		return len(zones) == 0 || slices.ContainsFunc(zones, func(z zone) bool { return z.has(u.path) })
	}, nil
}

func (w *blocks) host(ctx context.Context, what string, m device.Machine) (*host, *device.Fault) {
	p, fault := w.c.find(ctx, what, w.root, m)
	if fault != nil {
		return nil, fault
	}
	if !p.composable {
		return nil, &device.Fault{Class: device.FaultNotFound, Op: what, Message: fmt.Sprintf("system %s has no list of resource blocks: nothing can be attached to it", p.id)}
	}
	return &host{path: p.path, etag: p.etag(), members: p.blocks, offer: offer{
		add: p.actions[actionAddBlock], remove: p.actions[actionRemoveBlock], update: mayPatch(p.Header), compose: w.compose,
	}}, nil
}

func (w *blocks) unit(ctx context.Context, what, path string) (*unit, *device.Fault) {
	b, d, fault := read(ctx, w.c, "inventory", what, path, decodeBlock)
	if fault != nil {
		return nil, fault
	}
	return w.complete(ctx, what, path, d.etag(), b)
}

func (w *blocks) composing(ctx context.Context, what, path string) (bool, *device.Fault) {
	b, _, fault := read(ctx, w.c, "inventory", what, path, decodeBlock)
	return b.composing(), fault
}

// complete adds what the block's components say. A block of a host is none of ours, whatever is in it.
func (w *blocks) complete(ctx context.Context, what, path, etag string, b block) (*unit, *device.Fault) {
	if b.is("Compute", "ComputerSystem") {
		return &unit{path: path, etag: etag, fixed: true}, nil
	}
	parts, fault := each(ctx, b.processors, func(ctx context.Context, l link) (processor, *device.Fault) {
		return w.c.processor(ctx, what, l)
	})
	if fault != nil {
		return nil, fault
	}
	u := b.unit(parts)
	u.path, u.etag = path, etag
	return u, nil
}

func (b *block) composing() bool { return strings.EqualFold(b.state, "Composing") }

// unit is what a block with these components comes to.
func (b *block) unit(parts []processor) *unit {
	parts = slices.DeleteFunc(slices.Clone(parts), func(p processor) bool { return !p.attachable() })
	u := &unit{fixed: len(parts) == 0, counted: len(parts), composing: b.composing(), users: b.systems}
	all := []status{b.status}
	for _, p := range parts {
		u.model, u.uuid, u.serial = p.model, p.uuid, p.serial
		all = append(all, p.status)
	}
	u.health, u.text = health(all...)
	if strings.EqualFold(b.state, "Failed") {
		u.health, u.text = device.HealthCritical, "its composition has failed; "+u.text
	}
	u.taken = b.taken(u, all)
	return u
}

// taken says why a block cannot be had now, "" if it can.
func (b *block) taken(u *unit, parts []status) string {
	is := func(s string) bool { return strings.EqualFold(b.state, s) }
	switch {
	case u.counted != 1:
		return fmt.Sprintf("there are %d devices in it, and one is asked for", u.counted)
	case b.composing():
		return "it is being composed"
	case b.compositions > 0 || len(b.systems) > 0 || is("Composed") || is("ComposedAndAvailable"):
		return "it is in use, by " + orNothing(strings.Join(b.systems, ", "))
	case !is("Unused"):
		return "its composition state is " + orNothing(b.state)
	case b.reserved:
		return "another client has reserved it"
	case b.pool != "" && !strings.EqualFold(b.pool, "Free"):
		return "it is in the pool " + orNothing(b.pool)
	case u.health == device.HealthCritical:
		return "it is not healthy: " + u.text
	}
	for _, s := range parts {
		if !s.ready() {
			return "its state is " + orNothing(string(s.State))
		}
	}
	return ""
}

func (w *blocks) units(ctx context.Context, what string) ([]*unit, *device.Fault) {
	links, fault := w.c.collect(ctx, "inventory", what, w.blocks, w.expand)
	if fault != nil {
		return nil, fault
	}
	return sound(ctx, links, func(ctx context.Context, l link) (*unit, *device.Fault) {
		if l.raw != nil {
			if b, err := decodeBlock(l.raw); err == nil {
				return w.complete(ctx, what, l.to, etagOf(l.raw, nil), b)
			}
		}
		return w.unit(ctx, what, l.to)
	})
}

// sound reads all and returns what could be read and is no part of a host. What cannot be read cannot be attached either.
func sound[A any](ctx context.Context, all []A, do func(context.Context, A) (*unit, *device.Fault)) ([]*unit, *device.Fault) {
	type outcome struct {
		*unit
		fault *device.Fault
	}
	got, fault := each(ctx, all, func(ctx context.Context, one A) (outcome, *device.Fault) {
		u, fault := do(ctx, one)
		return outcome{u, fault}, nil
	})
	if fault != nil {
		return nil, fault
	}
	var units []*unit
	read := 0
	for _, o := range got {
		switch {
		case o.fault == nil && o.fixed:
			read++
		case o.fault == nil:
			read++
			units = append(units, o.unit)
		case o.fault.Class != device.FaultNotFound: // it went meanwhile
			fault = o.fault
		}
	}
	if fault != nil && read == 0 {
		return nil, fault
	}
	if fault != nil {
		klog.FromContext(ctx).V(1).Info("Some devices of the fabric could not be read, left out", "err", fault)
	}
	return units, nil
}
