// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// zones is a service without composition: a host port and what is attached to it are the endpoints of one zone. It lives
// for one call.
type zones struct {
	c *Client
	root
	// seen is what was read with the host, for what is read of its devices right after.
	seen *chart
}

// chart is all zones of all fabrics, and where their endpoints are listed.
type chart struct {
	ports []port
	ends  []string
}

// port is a zone of endpoints.
type port struct {
	doc
	id      string
	members []string
	actions actions
	// fabric is the one that it is of.
	fabric string
	// fault is why it could not be read.
	fault *device.Fault
}

func decodePort(body []byte) (port, error) {
	var z struct {
		ID       rest.Text `json:"Id"`
		ZoneType rest.Text
		Links    *struct{ Endpoints []link }
		Actions  actions
	}
	if err := json.Unmarshal(body, &z); err != nil {
		return port{}, fmt.Errorf("decode zone: %w", err)
	}
	if z.Links == nil {
		return port{}, errors.New("decode zone: no Links in it")
	}
	return port{id: rest.Tidy(string(z.ID)), members: paths(z.Links.Endpoints), actions: z.Actions}, nil
}

// endpoint is where something is connected to the fabric.
type endpoint struct {
	// initiator: it is a host's side. target: it is a device's.
	initiator, target bool
	// entities are what is connected.
	entities []string
	// zones are those that it is in by its own account; told is false where it does not say.
	zones  []string
	told   bool
	status status
}

func decodeEndpoint(body []byte) (endpoint, error) {
	var e struct {
		ID     rest.Text `json:"Id"`
		Status *status
		Ends   []struct {
			EntityRole, EntityType rest.Text
			EntityLink             link
		} `json:"ConnectedEntities"`
		Links struct{ Zones *[]link }
	}
	if err := json.Unmarshal(body, &e); err != nil {
		return endpoint{}, fmt.Errorf("decode endpoint: %w", err)
	}
	if e.ID == "" {
		return endpoint{}, errors.New("decode endpoint: no Id in it")
	}
	var out endpoint
	if e.Status != nil {
		out.status = *e.Status
	}
	if e.Links.Zones != nil {
		out.zones, out.told = paths(*e.Links.Zones), true
	}
	for _, end := range e.Ends {
		out.initiator = out.initiator || strings.EqualFold(string(end.EntityRole), "Initiator")
		if strings.EqualFold(string(end.EntityRole), "Target") && strings.EqualFold(string(end.EntityType), "Processor") {
			out.target = true
		}
		if end.EntityLink.to != "" {
			out.entities = append(out.entities, end.EntityLink.to)
		}
	}
	return out, nil
}

// chart reads the zones of all fabrics.
func (w *zones) chart(ctx context.Context, what string) (*chart, *device.Fault) {
	fabrics, fault := w.c.collect(ctx, "inventory", what, w.fabrics, "")
	if fault != nil {
		return nil, fault
	}
	out := &chart{}
	for _, f := range fabrics {
		var parts struct {
			ID               rest.Text `json:"Id"`
			Zones, Endpoints link
		}
		d, fault := w.c.get(ctx, "inventory", what, f.to)
		if fault != nil {
			return nil, elsewhere(fault)
		}
		if err := json.Unmarshal(d.Body, &parts); err != nil {
			return nil, d.Strange(what, err)
		}
		if parts.Zones.to == "" || parts.Endpoints.to == "" {
			continue // a fabric of another kind
		}
		ports, fault := w.portsAt(ctx, what, parts.Zones.to)
		if fault != nil {
			return nil, fault
		}
		for i := range ports {
			ports[i].fabric = rest.Tidy(string(parts.ID))
		}
		out.ports, out.ends = append(out.ports, ports...), append(out.ends, parts.Endpoints.to)
	}
	return out, nil
}

// portsAt reads the zones of a fabric; one that cannot be read is among them.
func (w *zones) portsAt(ctx context.Context, what, path string) ([]port, *device.Fault) {
	links, fault := w.c.collect(ctx, "inventory", what, path, "")
	if fault != nil {
		return nil, fault
	}
	all, fault := each(ctx, links, func(ctx context.Context, l link) (port, *device.Fault) {
		z, d, unread := read(ctx, w.c, "inventory", what, l.to, decodePort)
		z.doc, z.fault = d, unread
		return z, nil
	})
	return slices.DeleteFunc(all, func(z port) bool { return z.fault != nil && z.fault.Class == device.FaultNotFound }), fault
}

// current is what was read with the host, or is read now.
func (w *zones) current(ctx context.Context, what string) (*chart, *device.Fault) {
	if w.seen != nil {
		return w.seen, nil
	}
	return w.chart(ctx, what)
}

// hostPort returns the zone with an endpoint that is the system's.
func (w *zones) hostPort(ctx context.Context, what, system string, all *chart) (*port, *device.Fault) {
	var unread *device.Fault
	for i := range all.ports {
		z := &all.ports[i]
		if z.fault != nil {
			unread = z.fault // it may be this one
		}
		for _, path := range z.members {
			e, _, fault := read(ctx, w.c, "inventory", what, path, decodeEndpoint)
			switch {
			case fault != nil && fault.Class == device.FaultNotFound:
			case fault != nil:
				unread = fault
			case e.initiator && slices.Contains(e.entities, system):
				return z, nil
			}
		}
	}
	if unread != nil {
		return nil, renamed(unread, what)
	}
	return nil, &device.Fault{Class: device.FaultNotFound, Op: what, Message: "no zone has an endpoint of system " + system + ": nothing can be attached to it"}
}

func (w *zones) machines(ctx context.Context, what string) ([]fabric.Machine, *device.Fault) {
	all, fault := w.chart(ctx, what)
	if fault != nil {
		return nil, fault
	}
	links, fault := w.c.collect(ctx, "machines", what, w.systems, "")
	if fault != nil {
		return nil, fault
	}
	var out []fabric.Machine
	for _, path := range paths(links) {
		s, unread := w.c.known(path, w.c.readSystem(ctx, what, path))
		if unread != nil {
			return nil, unread
		}
		if s.machine == "" {
			continue
		}
		z, fault := w.hostPort(ctx, what, path, all)
		if fault != nil && fault.Class != device.FaultNotFound {
			return nil, fault
		}
		if fault == nil {
			out = append(out, fabric.Machine{ID: s.machine, Name: s.name, Fabric: z.fabric, Power: s.power})
		}
	}
	return out, nil
}

func (w *zones) host(ctx context.Context, what string, m device.Machine) (*host, *device.Fault) {
	p, fault := w.c.find(ctx, what, w.root, m)
	if fault != nil {
		return nil, fault
	}
	all, fault := w.chart(ctx, what)
	if fault != nil {
		return nil, fault
	}
	z, fault := w.hostPort(ctx, what, p.path, all)
	if fault != nil {
		return nil, fault
	}
	w.seen = all
	return &host{path: z.path, etag: z.etag(), members: z.members, offer: offer{
		add: z.actions[actionAddEndpoint], remove: z.actions[actionRemoveEndpoint], update: mayPatch(z.Header), zone: true,
	}}, nil
}

func (w *zones) unit(ctx context.Context, what, path string) (*unit, *device.Fault) {
	all, fault := w.current(ctx, what)
	if fault != nil {
		return nil, fault
	}
	return w.unitOn(ctx, what, path, all)
}

// composing: an endpoint does not say.
func (w *zones) composing(context.Context, string, string) (bool, *device.Fault) { return false, nil }

func (w *zones) unitOn(ctx context.Context, what, path string, all *chart) (*unit, *device.Fault) {
	e, d, fault := read(ctx, w.c, "inventory", what, path, decodeEndpoint)
	if fault != nil {
		return nil, fault
	}
	if e.initiator || !e.target {
		return &unit{path: path, etag: d.etag(), fixed: true}, nil
	}
	parts, fault := each(ctx, e.entities, func(ctx context.Context, to string) (processor, *device.Fault) {
		return w.c.processor(ctx, what, link{to: to})
	})
	if fault != nil {
		return nil, fault
	}
	b := all.asBlock(path, e)
	u := b.unit(parts)
	u.path, u.etag = path, d.etag()
	return u, nil
}

// asBlock says of an endpoint what a resource block would say of itself. Where a zone could not be read the endpoint's own
// account has to do; without one it may be in that zone.
func (all *chart) asBlock(path string, e endpoint) block {
	b := block{state: "Unused", status: e.status}
	unread := false
	for i := range all.ports {
		switch z := &all.ports[i]; {
		case slices.Contains(z.members, path):
			b.state, b.systems = "Composed", append(b.systems, z.path)
		case z.fault != nil:
			unread = true
		}
	}
	switch {
	case b.state != "Unused" || !unread:
	case !e.told:
		b.state = "unknown, for a zone could not be read"
	case len(e.zones) > 0:
		b.state, b.systems = "Composed", e.zones
	}
	return b
}

func (w *zones) units(ctx context.Context, what string) ([]*unit, *device.Fault) {
	all, fault := w.current(ctx, what)
	if fault != nil {
		return nil, fault
	}
	var ends []string
	for _, list := range all.ends {
		links, fault := w.c.collect(ctx, "inventory", what, list, "")
		if fault != nil {
			return nil, fault
		}
		ends = append(ends, paths(links)...)
	}
	return sound(ctx, ends, func(ctx context.Context, path string) (*unit, *device.Fault) {
		return w.unitOn(ctx, what, path, all)
	})
}

// reachable: the service decides.
func (w *zones) reachable(context.Context, string, *host) (func(*unit) bool, *device.Fault) {
	return func(*unit) bool { return true }, nil
}
