// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// tree is where the service has what we go by.
type tree struct {
	fabric                          string
	systems, endpoints, connections string
}

// where asks the service what it offers.
func (c *Client) where(ctx context.Context, q question) (tree, *device.Fault) {
	r, fault := read(ctx, c, q, base, decodeRoot)
	if fault != nil {
		return tree{}, missing(fault)
	}
	if r.Fabrics == "" || r.Systems == "" {
		return tree{}, unsupported(q, "neither Fabrics nor Systems are in its root")
	}
	fabrics, fault := c.list(ctx, q, string(r.Fabrics))
	if fault != nil {
		return tree{}, fault
	}
	fabrics = slices.DeleteFunc(fabrics, func(f string) bool { return c.fabric != "" && path.Base(f) != c.fabric })
	switch {
	case len(fabrics) == 0 && c.fabric != "":
		return tree{}, &device.Fault{Class: device.FaultRejected, Op: q.what, Message: fmt.Sprintf("the service has no fabric %q", c.fabric)}
	case len(fabrics) == 0:
		return tree{}, unsupported(q, "it has no Fabrics")
	case len(fabrics) > 1:
		return tree{}, &device.Fault{
			Class: device.FaultRejected, Op: q.what, Message: rest.Tidy(fmt.Sprintf("the service has several fabrics (%s): the configuration has to name one", strings.Join(fabrics, ", "))),
		}
	}
	d, fault := read(ctx, c, q, fabrics[0], decodeDomain)
	if fault != nil {
		return tree{}, missing(fault)
	}
	if d.Endpoints == "" || d.Connections == "" {
		return tree{}, unsupported(q, "fabric "+fabrics[0]+" has no Endpoints or no Connections")
	}
	return tree{fabric: path.Base(fabrics[0]), systems: string(r.Systems), endpoints: string(d.Endpoints), connections: string(d.Connections)}, nil
}

func unsupported(q question, why string) *device.Fault {
	return &device.Fault{
		Class: device.FaultUnsupported, Op: q.what,
		Message: "the service connects no endpoints: " + why + "; the form that writes a count of a model to Systems/System names no device, so that nobody could tell what came or give it back, and is not used",
	}
}

// view is what there is and how it is connected.
type view struct {
	tree
	all   map[string]endpoint
	joins map[string]connection
	// systems are the machines; dark are those that cannot be read.
	systems map[string]system
	dark    map[string]*device.Fault
}

func (c *Client) look(ctx context.Context, q question) (*view, *device.Fault) {
	at, fault := c.where(ctx, q)
	if fault != nil {
		return nil, fault
	}
	return c.lookAt(ctx, q, at, false)
}

// lookAt reads the endpoints, the Connections and the Systems; fresh reads those anew that are known.
func (c *Client) lookAt(ctx context.Context, q question, at tree, fresh bool) (*view, *device.Fault) {
	v := &view{tree: at}
	var fault *device.Fault
	var failed map[string]*device.Fault
	v.all, failed, fault = all(ctx, c, q, source[endpoint]{path: at.endpoints, known: &c.endpoints, fresh: fresh, decode: decodeEndpoint})
	if fault = whole(failed, fault); fault != nil {
		return nil, fault
	}
	v.systems, v.dark, fault = all(ctx, c, q, source[system]{path: at.systems, known: &c.systems, fresh: fresh, decode: decodeSystem})
	if fault != nil {
		return nil, fault
	}
	v.joins, fault = c.joined(ctx, q, at)
	return v, fault
}

// joined reads the Connections. Those that we made are what their ids say, and remembered; others may be made anew with
// other ends.
func (c *Client) joined(ctx context.Context, q question, at tree) (map[string]connection, *device.Fault) {
	members, fault := c.list(ctx, q, at.connections)
	if fault != nil {
		return nil, fault
	}
	c.connections.keep(at.connections, members)
	var ours, others []string
	for _, m := range members {
		if strings.HasPrefix(path.Base(m), idPrefix) {
			ours = append(ours, m)
		} else {
			others = append(others, m)
		}
	}
	joins, failed := each(ctx, c, q, source[connection]{known: &c.connections, decode: decodeConnection}, ours)
	more, failedToo := each(ctx, c, q, source[connection]{decode: decodeConnection}, others)
	if fault := whole(failed, whole(failedToo, nil)); fault != nil {
		return nil, fault
	}
	maps.Copy(joins, more)
	return joins, nil
}

// system finds the machine.
func (v *view) system(q question, m device.Machine) (string, *device.Fault) {
	for p, s := range v.systems {
		if s.machine == m {
			if len(v.initiators(p)) == 0 {
				return "", &device.Fault{Class: device.FaultNotFound, Op: q.what, Message: "fabric " + v.fabric + " has no initiator endpoint of " + p}
			}
			return p, nil
		}
	}
	if fault := whole(v.dark, nil); fault != nil { // it may be this one
		mine := *fault
		mine.Op = q.what
		return "", &mine
	}
	return "", &device.Fault{Class: device.FaultNotFound, Op: q.what, Message: fmt.Sprintf("none of the service's %d systems has this UUID", len(v.systems))}
}

// sure finds the machine and reads its System anew: another machine may have the place of one that left.
func (c *Client) sure(ctx context.Context, q question, v *view, m device.Machine) (string, *device.Fault) {
	at, fault := v.system(q, m)
	if fault != nil {
		return "", fault
	}
	now, fault := read(ctx, c, q, at, decodeSystem)
	if fault != nil {
		return "", fault
	}
	c.systems.set(at, now)
	if now.machine != m {
		return "", &device.Fault{Class: device.FaultConflict, Op: q.what, Message: fmt.Sprintf("%s was this machine and is %q now", at, now.machine)}
	}
	v.systems[at] = now
	return at, nil
}

// initiators are the endpoints of a machine, or of a part of it.
func (v *view) initiators(system string) []string {
	var out []string
	for p, e := range v.all {
		if slices.ContainsFunc(e.initiates, func(of string) bool { return of == system || strings.HasPrefix(of, system+"/") }) {
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return out
}

// connected are the GPUs that are connected to a machine.
func (v *view) connected(system string) []string {
	mine := v.initiators(system)
	found := map[string]bool{}
	for _, j := range v.joins {
		if !slices.ContainsFunc(j.initiators, func(i string) bool { return slices.Contains(mine, i) }) {
			continue
		}
		for _, target := range j.targets {
			if v.all[target].gpu != "" {
				found[target] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// between are the Connections that join the machine and the device.
func (v *view) between(system, target string) []string {
	var out []string
	for _, i := range v.initiators(system) {
		for p, j := range v.joins {
			if j.joins(i, target) && !slices.Contains(out, p) {
				out = append(out, p)
			}
		}
	}
	slices.Sort(out)
	return out
}

// holders are the machines that a device is connected to, and what else has a Connection with it.
func (v *view) holders(target string) (systems []string, connected bool) {
	for p := range v.systems {
		if len(v.between(p, target)) > 0 {
			systems = append(systems, p)
		}
	}
	slices.Sort(systems)
	for _, j := range v.joins {
		connected = connected || slices.Contains(j.targets, target)
	}
	return systems, connected
}

// shown are the GPUs of the fabric that a machine shows, by their endpoints. Nothing of that is remembered: another GPU
// may have the place of one that left.
func (c *Client) shown(ctx context.Context, q question, v *view, system string) (map[string]processor, *device.Fault) {
	from := v.systems[system].processors
	if from == "" {
		return nil, nil
	}
	found, failed, fault := all(ctx, c, q, source[processor]{path: from, decode: decodeProcessor})
	if fault = whole(failed, fault); fault != nil {
		return nil, fault
	}
	shown := map[string]processor{}
	for _, p := range found {
		for _, e := range p.endpoints {
			if p.gpu && v.all[e].gpu != "" {
				shown[e] = p
			}
		}
	}
	return shown, nil
}

// gpu is the device behind an endpoint, as the pool has it now.
func (c *Client) gpu(ctx context.Context, q question, v *view, target string) (processor, *device.Fault) {
	p := v.all[target].gpu
	g, fault := read(ctx, c, q, p, decodeProcessor)
	if fault != nil {
		return processor{}, missing(fault)
	}
	c.pool.set(p, g)
	return g, nil
}

// stock is what there is in the pool, and what of it is taken.
type stock struct {
	models map[string]string // by endpoint
	taken  map[string]bool
	failed map[string]*device.Fault
}

// stock reads the models of all GPUs and what the machines show.
func (c *Client) stock(ctx context.Context, q question, v *view) *stock {
	s := &stock{models: map[string]string{}, taken: map[string]bool{}}
	var paths []string
	for _, e := range v.all {
		if e.gpu != "" {
			paths = append(paths, e.gpu)
		}
	}
	slices.Sort(paths)
	gpus, failed := each(ctx, c, q, source[processor]{known: &c.pool, decode: decodeProcessor}, slices.Compact(paths))
	s.failed = failed
	for target, e := range v.all {
		if p, ok := gpus[e.gpu]; ok && p.gpu {
			s.models[target] = p.model
		}
	}
	for _, j := range v.joins {
		for _, target := range j.targets {
			s.taken[target] = true
		}
	}
	for p := range v.systems {
		shown, fault := c.shown(ctx, q, v, p)
		if fault != nil {
			// What it has is connected, unless an answer was lost; an attach looks again.
			klog.FromContext(ctx).V(1).Info("What a machine has cannot be read; what is connected to it counts", "system", p, "err", fault)
		}
		for target := range shown {
			s.taken[target] = true
		}
	}
	return s
}

// free are the devices of the model that could be attached now.
func (c *Client) free(ctx context.Context, q question, v *view, s *stock, model string) ([]device.OnFabric, *device.Fault) {
	var of []string
	for target, m := range s.models {
		if m == model && model != "" {
			of = append(of, target)
		}
	}
	if len(of) == 0 {
		if fault := whole(s.failed, nil); fault != nil {
			mine := *fault
			mine.Op = q.what
			return nil, &mine
		}
		return nil, &device.Fault{
			Class: device.FaultUnsupported, Op: q.what,
			Message: rest.Tidy(fmt.Sprintf("no GPU of the fabric is a %q; there are %q", model, slices.Compact(slices.Sorted(maps.Values(s.models))))),
		}
	}
	slices.Sort(of)
	list := []device.OnFabric{}
	for _, target := range of {
		if s.taken[target] {
			continue
		}
		p, fault := c.gpu(ctx, q, v, target)
		if fault != nil {
			return nil, fault
		}
		if p.model == model && usable(p) {
			list = append(list, describe(target, "", p))
		}
	}
	return rest.Unambiguous(list), nil
}

// usable: nothing speaks against it. A service that says nothing of health says nothing bad; one that calls it absent does.
func usable(p processor) bool {
	health, _ := p.describe()
	return (p.state == "" || p.state == "Enabled") && (health == device.HealthOK || health == device.HealthUnknown)
}
