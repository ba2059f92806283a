// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// What the world does to the cluster.

func (s *Sim) struck(kind string) { s.count.Faults[kind]++ }

func (s *Sim) crashNode(h *host) {
	for _, p := range s.live(h.node) {
		s.struck("agent crash")
		s.crash(p, "by itself")
	}
}

// pause stops a process without ending it: "leader", or the agents of a node.
func (s *Sim) pause(words []string) error {
	if len(words) != 2 {
		return fmt.Errorf("who, how long?")
	}
	d, err := time.ParseDuration(words[1])
	if err != nil {
		return err
	}
	for _, p := range s.procs {
		if p.dead || p.pausedUntil.After(s.now()) || words[0] != p.node && (words[0] != "leader" || p.term == nil) {
			continue
		}
		s.struck("agent pause")
		s.note(p.node, "agent is paused")
		p.pausedUntil = s.now().Add(d)
	}
	return nil
}

// rollingUpdate starts a new Pod of the agent, and ends the old one when that runs.
func (s *Sim) rollingUpdate(h *host) {
	old := s.live(h.node)
	if len(old) != 1 {
		return
	}
	s.struck("agent update")
	s.note(h.node, "agent is replaced")
	old[0].replaced = true
	s.start(h, s.newPodUID(h))
	s.after(s.between("overlap "+h.node, time.Second, 10*time.Second), nil, func() { s.stopAgent(old[0]) })
}

// stopAgent is SIGTERM: calls end, the election is given up.
func (s *Sim) stopAgent(p *process) {
	if p.dead {
		return
	}
	s.note(p.node, "agent stops")
	p.stopping = true
	if p.term != nil {
		p.term.end("it stops")
		if s.api.leads(p) {
			s.api.leader = ""
			for _, other := range s.procs {
				if other != p && !other.dead && other.host.owner == other {
					s.after(s.between("free "+other.node, 100*time.Millisecond, time.Second), other, func() {
						other.balloting = false
						other.campaign()
					})
				}
			}
		}
	}
	p.cancel()
	s.after(500*time.Millisecond, nil, func() {
		if !p.dead {
			s.end(p)
		}
	})
}

// away takes the agent off a node for a while.
func (s *Sim) away(words []string) error {
	if len(words) != 2 || s.hosts[words[0]] == nil {
		return fmt.Errorf("which node, how long?")
	}
	d, err := time.ParseDuration(words[1])
	if err != nil {
		return err
	}
	h := s.hosts[words[0]]
	s.struck("agent away")
	s.note(h.node, "agent is away")
	h.awayUntil = s.now().Add(d)
	for _, p := range s.live(h.node) {
		s.end(p)
	}
	s.at(h.awayUntil, nil, func() {
		s.after(time.Second, nil, func() {
			if len(s.live(h.node)) == 0 {
				s.start(h, s.newPodUID(h))
			}
		})
	})
	return nil
}

func (s *Sim) eachWatch(h *host, f func(*watch)) {
	for _, w := range s.api.watches {
		if w.p != nil && w.p.host == h && !w.closed {
			f(w)
		}
	}
}

func (s *Sim) dropWatches(h *host, d time.Duration) {
	s.struck("watch dropped")
	s.eachWatch(h, func(w *watch) { w.drop(s.now().Add(d)) })
}

// slow holds back what the watches of a node, or the claims that the leader watches, show.
func (s *Sim) slow(words []string) error {
	if len(words) != 2 {
		return fmt.Errorf("whose, how long?")
	}
	d, err := time.ParseDuration(words[1])
	if err != nil {
		return err
	}
	s.struck("watch slow")
	if h := s.hosts[words[0]]; h != nil {
		s.eachWatch(h, func(w *watch) { w.slowUntil = s.now().Add(d) })
		return nil
	}
	for _, p := range s.procs {
		if !p.dead && p.term != nil {
			p.term.demands.slowUntil = s.now().Add(d)
		}
	}
	return nil
}

// unbind makes the scheduler take back a Pod that waits for its devices, for a reason of its own.
func (s *Sim) unbind(words []string) error {
	var all []*pod
	for _, p := range s.scheduler.pods {
		if p.waiting != "" && !p.deleted && s.scheduler.stored(p) {
			all = append(all, p)
		}
	}
	if len(all) == 0 || len(words) != 1 {
		return nil
	}
	s.struck("scheduler takes back")
	s.scheduler.takeBack(all[number(words[0], 0)%len(all)], "it failed to bind for another reason")
	return nil
}

func (s *Sim) stepClock(h *host, d time.Duration) {
	s.struck("clock step")
	s.note(h.node, "clock steps by %s", d)
	h.skew += d
}

// pick chooses one GPU: by its id, or the n-th that is attached to a node by us.
func (s *Sim) pick(words []string) *gpu {
	if len(words) != 1 {
		return nil
	}
	if g := s.fabric.byID(words[0]); g != nil {
		return g
	}
	var all []*gpu
	for _, g := range s.fabric.gpus {
		if g.machine != "" && g.machine != tenant && !g.foreign {
			all = append(all, g)
		}
	}
	n, err := strconv.Atoi(words[0])
	if err != nil || len(all) == 0 {
		return nil
	}
	return all[n%len(all)]
}

// vanish takes a device away behind our back.
func (s *Sim) vanish(words []string) error {
	if g := s.pick(words); g != nil && g.machine != "" && g.machine != tenant {
		s.struck("device vanishes")
		s.note("fabric", "%s vanishes", g.id)
		g.upset = s.now()
		s.fabric.disconnect(g)
	}
	return nil
}

func (s *Sim) critical(words []string) error {
	if g := s.pick(words); g != nil {
		s.struck("device critical")
		s.note("fabric", "%s turns critical", g.id)
		g.health, g.upset = device.HealthCritical, s.now()
	}
	return nil
}

// steal gives free devices to another tenant for a while.
func (s *Sim) steal(words []string) error {
	if len(words) != 2 {
		return fmt.Errorf("how many, how long?")
	}
	n, err := strconv.Atoi(words[0])
	if err != nil {
		return err
	}
	d, err := time.ParseDuration(words[1])
	if err != nil {
		return err
	}
	for _, g := range s.fabric.gpus {
		if n == 0 {
			break
		}
		if g.machine != "" {
			continue
		}
		n--
		s.struck("device stolen")
		s.note("fabric", "another tenant takes %s", g.id)
		g.machine = tenant
		s.after(d, nil, func() {
			s.note("fabric", "%s is free again", g.id)
			g.machine = ""
		})
	}
	return nil
}

// foreign attaches a device by hand, while no call of ours is open there: during one, nobody could tell.
func (s *Sim) foreign(h *host) {
	for _, l := range s.leases() {
		if l.Machine == h.machine && l.FabricDevice == "" {
			return
		}
	}
	for _, g := range s.fabric.gpus {
		if g.machine == "" {
			s.struck("device foreign")
			s.note("fabric", "a person attaches %s to %s", g.id, h.node)
			g.foreign = true
			s.fabric.connect(g, h.machine)
			return
		}
	}
}

// recreate makes the Node object anew; the machine knows nothing of it.
func (s *Sim) recreate(h *host) {
	s.struck("node re-created")
	s.note(h.node, "its Node is made anew")
	if err := s.api.remove(nodes, h.node, nil); err != nil {
		return // it is being made anew already
	}
	s.after(s.between("node anew "+h.node, time.Second, 5*time.Second), nil, func() { s.addNode(h) })
}

func (s *Sim) reboot(h *host) {
	s.struck("node reboot")
	s.note(h.node, "reboots")
	h.boots++
	h.bootID, h.bootedAt = "boot-"+strconv.Itoa(h.boots+1), s.now()
	h.awayUntil = s.now().Add(20 * time.Second)
	for _, g := range s.fabric.on(h.machine) {
		g.upset = s.now()
	}
	for _, p := range s.procs {
		if p.host == h && !p.dead {
			s.end(p)
		}
	}
	h.bus = nil
	s.kubelets[h.node].reboot()
	s.at(h.awayUntil, nil, func() {
		on := s.fabric.on(h.machine)
		slices.Reverse(on) // the addresses need not be those of before
		for _, g := range on {
			h.appear(g)
		}
		s.after(time.Second, nil, func() {
			if len(s.live(h.node)) == 0 {
				s.start(h, s.newPodUID(h))
			}
		})
	})
}

// openIdle lets a process that has no claim open a GPU of the node.
func (s *Sim) openIdle(h *host, d time.Duration) {
	for _, f := range h.bus {
		if len(h.open[f.g]) > 0 || f.drained != nil || !f.bound || f.g.foreign {
			continue
		}
		s.struck("process opens idle GPU")
		s.note(h.node, "a process opens %s", f.g.id)
		h.openedBy(f.g, "python (7)")
		s.after(d, nil, func() {
			s.kubelets[h.node].closeHandles("python (7)")
			s.detail(h.node, "the process ends")
		})
		return
	}
}

// unlease deletes the object of a device lease: of a unit, or the n-th.
func (s *Sim) unlease(words []string) error {
	if len(words) != 1 {
		return fmt.Errorf("which unit?")
	}
	all := keys(s.api.objects[leases])
	if len(all) == 0 {
		return nil
	}
	name := device.LeaseName(fabricID, device.Unit(words[0]))
	if n, err := strconv.Atoi(words[0]); err == nil {
		name = all[n%len(all)]
	}
	s.struck("lease deleted")
	s.note("user", "deletes lease %s", name)
	s.api.discard(leases, name)
	return nil
}

func (s *Sim) managerDown(words []string) error {
	if len(words) != 1 {
		return fmt.Errorf("how long?")
	}
	d, err := time.ParseDuration(words[0])
	if err != nil {
		return err
	}
	s.struck("manager down")
	s.note("fabric", "its manager is down for %s", d)
	s.fabric.downUntil = s.now().Add(d)
	return nil
}

// loseCheckpoint damages the plugin's checkpoint, and the agent crashes.
func (s *Sim) loseCheckpoint(h *host) {
	s.struck("checkpoint damaged")
	s.note(h.node, "its checkpoint is damaged")
	path := filepath.Join(h.dir, "plugin", "checkpoint.json")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		panic(err)
	}
	for _, p := range s.live(h.node) {
		s.crash(p, "by itself")
	}
}
