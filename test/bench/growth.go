// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// growthAttaches are measured at each size, in rounds of growthRound on as many nodes.
	growthAttaches = 24
	growthRound    = 4
	// growthAtOnce is how many attaches are under way when what stands is attached.
	growthAtOnce = 20
	// growthIdle is how long the agents are watched while nothing happens.
	growthIdle = 30 * time.Second
	// growthLimit bounds what has to happen on all nodes.
	growthLimit = 5 * time.Minute
)

// grown is what was measured with one number of nodes.
type grown struct {
	nodes, standing int
	ready, burst    time.Duration // until all nodes were in, until all that stands was attached
	starts          int           // calls until then
	all             []*journey
	there, back     way
	leader, others  share
	load            string
}

// share is what a process used: while nothing happened, and for all attaches and detaches that were measured.
type share struct {
	idle, work time.Duration
	resident   int64
	wakeups    int64
}

// growth is part d. The scheduler, the kubelets and the controllers take no part: the nodes are objects, this program
// allocates, and the controller manager is stopped, since it would take nodes for dead that nobody renews.
func (b *bench) growth(ctx context.Context) error {
	tell("part d")
	if err := b.start(ctx, ""); err != nil {
		return err
	}
	defer b.world.stop()
	if err := b.cluster.Stop(ctx, "controller-manager"); err != nil {
		return err
	}
	if err := b.kubectl(ctx, "apply", "-f", "deploy/daemonset.yaml"); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return fmt.Errorf("make a folder for part d: %w", err)
	}
	defer os.RemoveAll(dir)
	var all []*grown
	members := &members{b: b}
	for _, n := range b.o.sizes {
		var g *grown
		if g, err = b.grow(ctx, members, n, filepath.Join(dir, strconv.Itoa(n))); err != nil {
			err = fmt.Errorf("part d, %d nodes: %w", n, err)
			break // what was measured with fewer is told all the same
		}
		all = append(all, g)
	}
	if len(all) > 0 {
		b.reportGrowth(all)
	}
	return errors.Join(err, flat(all))
}

// flat fails if an attach takes more calls on more nodes.
func flat(all []*grown) error {
	for _, g := range all {
		if least, now := callsPer(&all[0].there), callsPer(&g.there); now > least+1 {
			return fmt.Errorf("an attach takes %.1f calls of the API server with %d nodes, and %.1f with %d", now, g.nodes, least, all[0].nodes)
		}
	}
	return nil
}

// callsPer is how much the agents asked for, on average; what a watch asks for when it begins anew does not count: it goes by
// the clock.
func callsPer(w *way) float64 {
	n := 0
	for _, verb := range verbs() {
		n += w.verbs[verb]
	}
	return float64(n) / float64(max(w.count, 1))
}

// verbs are those by which agents ask, but for watches.
func verbs() []string { return []string{"get", "list", "create", "update", "patch", "delete"} }

// grow measures with n nodes.
func (b *bench) grow(ctx context.Context, m *members, n int, dir string) (g *grown, err error) {
	tell("%d nodes", n)
	g = &grown{nodes: n, standing: n / 2}
	if err = m.make(ctx, n); err != nil {
		return nil, err
	}
	f, err := b.startFabric(ctx, dir, m.names, g.standing+growthRound)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	load := newLoad()
	if _, err = b.audit.read(); err != nil { // what was before
		return nil, err
	}
	agents, err := b.startAgents(ctx, f, m, g)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, agents.stop()) }()
	calls, err := b.audit.read()
	if err != nil {
		return nil, err
	}
	for _, n := range countVerbs(calls) {
		g.starts += n
	}
	if err = b.stand(ctx, g, m); err != nil {
		return nil, err
	}
	if err = b.growthIdle(ctx, g, agents); err != nil {
		return nil, err
	}
	if err = b.growthWork(ctx, g, m, agents); err != nil {
		return nil, err
	}
	g.load = load.cell()
	if err = b.clear(ctx, g); err != nil {
		return nil, err
	}
	return g, f.judge(ctx)
}

// stand attaches what is in use while the rest is measured.
func (b *bench) stand(ctx context.Context, g *grown, m *members) error {
	free := b.world.free()
	if len(free) < g.standing+growthRound {
		return fmt.Errorf("%d units are free, %d are needed", len(free), g.standing+growthRound)
	}
	begin := time.Now()
	attached := func(upTo int) error {
		return b.world.wait(ctx, growthLimit, func() error {
			for i := range upTo {
				if err := b.world.claimAttached(fmt.Sprintf("standing-%d", i)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for i := range g.standing {
		if err := b.allocate(ctx, fmt.Sprintf("standing-%d", i), free[i], m.names[i]); err != nil {
			return err
		}
		if err := attached(i + 1 - growthAtOnce); err != nil {
			return err
		}
	}
	err := attached(g.standing)
	g.burst = time.Since(begin)
	tell("  %d attached after %s", g.standing, seconds(g.burst))
	return err
}

// growthIdle measures what the agents do when there is nothing to do.
func (b *bench) growthIdle(ctx context.Context, g *grown, a *agents) error {
	if err := pause(ctx, settle); err != nil {
		return err
	}
	if _, err := b.calm(ctx); err != nil {
		return err
	}
	leader, others, err := a.usage()
	if err != nil {
		return err
	}
	if err = pause(ctx, growthIdle); err != nil {
		return err
	}
	leaderAfter, othersAfter, err := a.usage()
	if err != nil {
		return err
	}
	g.leader = share{idle: leaderAfter.cpu - leader.cpu, resident: leaderAfter.resident, wakeups: leaderAfter.wakeups - leader.wakeups}
	g.others = share{idle: othersAfter.cpu - others.cpu, resident: othersAfter.resident, wakeups: othersAfter.wakeups - others.wakeups}
	return nil
}

// growthWork measures attaches, one after the other, on nodes that have nothing yet where there are any.
func (b *bench) growthWork(ctx context.Context, g *grown, m *members, a *agents) error {
	if _, err := b.audit.read(); err != nil {
		return err
	}
	leader, others, err := a.usage()
	if err != nil {
		return err
	}
	begin := time.Now()
	for done := 0; done < growthAttaches; done += growthRound {
		if err = b.growthOnce(ctx, g, m, done); err != nil {
			return err
		}
	}
	leaderAfter, othersAfter, err := a.usage()
	if err != nil {
		return err
	}
	if leads, err := b.leader(ctx); err != nil || leads != m.names[0] {
		return errors.Join(fmt.Errorf("the agent of %s leads, and no more the one that has a process of its own", leads), err)
	}
	// What they do without any attach is told apart.
	part := float64(time.Since(begin)) / float64(growthIdle)
	g.leader.work = leaderAfter.cpu - leader.cpu - time.Duration(part*float64(g.leader.idle))
	g.others.work = othersAfter.cpu - others.cpu - time.Duration(part*float64(g.others.idle))
	return nil
}

// growthOnce is one round: attaches one after the other, and all of them back.
func (b *bench) growthOnce(ctx context.Context, g *grown, m *members, done int) error {
	names := make([]string, growthRound)
	for i := range names {
		names[i] = fmt.Sprintf("measured-%d", done+i)
		// From the last node backwards: those are the ones that hold nothing.
		where := m.names[len(m.names)-1-(done+i)%(len(m.names)-g.standing)]
		unit, err := b.freeUnit(ctx)
		if err != nil {
			return err
		}
		if err = b.allocate(ctx, names[i], unit, where); err != nil {
			return err
		}
		if err = b.world.wait(ctx, time.Minute, func() error { return b.world.claimAttached(names[i]) }); err != nil {
			return err
		}
	}
	calls, err := b.calm(ctx)
	if err != nil {
		return err
	}
	found, err := journeys(calls)
	if err != nil {
		return err
	}
	if err = complete(found, len(names)); err != nil {
		return err
	}
	g.all = append(g.all, found...)
	g.there.add(calls, len(names))
	for _, name := range names {
		if err = b.release(ctx, name); err != nil {
			return err
		}
	}
	if err = b.world.wait(ctx, time.Minute, func() error { return b.world.leased(g.standing) }); err != nil {
		return err
	}
	if calls, err = b.calm(ctx); err != nil {
		return err
	}
	g.back.add(calls, len(names))
	return nil
}

// freeUnit waits for one: the leader withholds some while it does not know what the manager has left.
func (b *bench) freeUnit(ctx context.Context) (u device.Unit, err error) {
	err = b.world.wait(ctx, time.Minute, func() error {
		free := b.world.free()
		if len(free) == 0 {
			return errors.New("wait for a free unit: the pool offers none")
		}
		u = free[0]
		return nil
	})
	return u, err
}

// clear gives all back.
func (b *bench) clear(ctx context.Context, g *grown) error {
	for i := range g.standing {
		if err := b.release(ctx, fmt.Sprintf("standing-%d", i)); err != nil {
			return err
		}
	}
	begin := time.Now()
	err := b.world.wait(ctx, growthLimit, func() error { return b.world.leased(0) })
	tell("  all back after %s", seconds(time.Since(begin)))
	return err
}

func (b *bench) reportGrowth(all []*grown) {
	head := []string{""}
	for _, g := range all {
		head = append(head, fmt.Sprintf("%d nodes", g.nodes))
	}
	t := newTable(head...)
	row := func(what string, cell func(*grown) string) {
		cells := []string{what}
		for _, g := range all {
			cells = append(cells, cell(g))
		}
		t.add(cells...)
	}
	took := func(g *grown) (s sample) {
		for _, j := range g.all {
			s = append(s, j.took())
		}
		return s
	}
	row("in use meanwhile (leases, claims)", func(g *grown) string { return strconv.Itoa(g.standing) })
	for _, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p90", 0.9}, {"most", 1}} {
		row("allocation → condition, "+q.name, func(g *grown) string { return ms(took(g).quantile(q.q)) })
	}
	row("API calls per attach", func(g *grown) string { return fmt.Sprintf("%.2f", callsPer(&g.there)) })
	for _, verb := range verbs() {
		row("API calls per attach: "+verb, func(g *grown) string { return g.there.per(g.there.verbs[verb]) })
	}
	row("API calls per detach", func(g *grown) string { return fmt.Sprintf("%.2f", callsPer(&g.back)) })
	for _, verb := range verbs() {
		row("API calls per detach: "+verb, func(g *grown) string { return g.back.per(g.back.verbs[verb]) })
	}
	row("writes of device leases per attach", func(g *grown) string { return g.there.per(g.there.writes[deviceLease]) })
	per := func(d time.Duration) string { return ms(d / growthAttaches) }
	row("CPU per attach and detach, leader", func(g *grown) string { return per(g.leader.work) })
	row("CPU per attach and detach, all other agents", func(g *grown) string { return per(g.others.work) })
	share := func(d time.Duration) string {
		return fmt.Sprintf("%.2f %% of a core", 100*d.Seconds()/growthIdle.Seconds())
	}
	row("CPU idle, leader", func(g *grown) string { return share(g.leader.idle) })
	row("CPU idle, all other agents", func(g *grown) string { return share(g.others.idle) })
	row("memory, leader", func(g *grown) string { return fmt.Sprintf("%.1f MiB", float64(g.leader.resident)/(1<<20)) })
	row("memory, all other agents", func(g *grown) string { return fmt.Sprintf("%.1f MiB", float64(g.others.resident)/(1<<20)) })
	row("memory of one more agent", func(g *grown) string {
		if g == all[0] {
			return ""
		}
		return fmt.Sprintf("%.2f MiB", float64(g.others.resident-all[0].others.resident)/float64(g.nodes-all[0].nodes)/(1<<20))
	})
	row("API calls per agent until all nodes were in", func(g *grown) string { return fmt.Sprintf("%.1f", float64(g.starts)/float64(g.nodes)) })
	row("until all nodes were in", func(g *grown) string { return seconds(g.ready) })
	row("until all that is in use was attached, 20 at once", func(g *grown) string { return seconds(g.burst) })
	row("cores busy, load average", func(g *grown) string { return g.load })
	b.say("\n## d. Growth\n")
	b.say("%d attaches at each size, one after the other. The leader is a process of its own, all other agents share one.\n", growthAttaches)
	b.say("%s", t)
}

// judge asks the chassis of part d.
func (f *fabricProcess) judge(ctx context.Context) error {
	state, err := f.sim.State(ctx)
	if err != nil {
		return err
	}
	for _, d := range state.Devices {
		if d.Phase != simapi.PhaseFree {
			return fmt.Errorf("the chassis says that %s is %s on machine %s, though it has no lease", d.ID, d.Phase, d.Machine)
		}
	}
	if state.Violations > 0 {
		return fmt.Errorf("the chassis has seen %d violations", state.Violations)
	}
	return nil
}

// release deletes a claim, as when its Pod is gone.
func (b *bench) release(ctx context.Context, name string) error {
	if err := b.client.ResourceV1().ResourceClaims(namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete claim %s: %w", name, err)
	}
	return nil
}
