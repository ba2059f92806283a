// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

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
		s.fabric.move(g, tenant)
		s.after(d, nil, func() {
			s.note("fabric", "%s is free again", g.id)
			s.fabric.move(g, "")
		})
	}
	return nil
}

// foreign attaches a device by hand, while no call of ours is open there: during one, nobody could tell. Where the
// manager gives no identities and its lists lag, nobody ever could, and so nobody may.
func (s *Sim) foreign(h *host) {
	if s.fabric.manner.nameless || s.callOpen(h.machine) {
		return
	}
	for _, g := range s.fabric.gpus {
		if g.machine == "" && !slices.ContainsFunc(s.leases(), func(l device.Lease) bool { return l.FabricDevice == g.id }) {
			s.struck("device foreign")
			s.struck("device of a person")
			s.note("fabric", "a person attaches %s to %s", g.id, h.node)
			// Nobody can tell a device that comes back to where a lease has it from one that never went.
			g.foreign = !slices.ContainsFunc(s.leases(), func(l device.Lease) bool { return l.FabricDevice == g.id && l.Machine == h.machine })
			s.fabric.connect(g, h.machine)
			return
		}
	}
}

// callOpen: a call of ours may bring a device to the machine.
func (s *Sim) callOpen(m device.Machine) bool {
	return slices.ContainsFunc(s.leases(), func(l device.Lease) bool {
		return l.Machine == m && (l.FabricDevice == "" || s.fabric.manner.nameless && l.UUID == "")
	})
}

// suspend has the next thing that the manager works on wait for a person.
func (s *Sim) suspend(words []string) error {
	if len(words) != 1 {
		return fmt.Errorf("how long?")
	}
	d, err := time.ParseDuration(words[0])
	s.fabric.suspends = d
	return err
}

// refuse has the next part of a job fail that is to detach the device.
func (s *Sim) refuse(words []string) error {
	g := s.pick(words)
	if g == nil {
		return fmt.Errorf("which device?")
	}
	g.refuses = true
	return nil
}

// restartManager is a manager that is down for a moment and has forgotten what it worked on.
func (s *Sim) restartManager() {
	s.struck("manager restarts")
	s.note("fabric", "its manager restarts")
	s.fabric.restart()
	s.fabric.downUntil = s.now().Add(2 * time.Second)
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
	if len(words) == 2 && words[1] == "force" {
		s.stripLease(words[0])
		return nil
	}
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

// stripLease deletes the object of a lease that serves a claim, finalizer or not: the n-th of them. What it
// named is there without a lease from then on, as if a person had attached it.
func (s *Sim) stripLease(nth string) {
	var serving []device.Lease
	for _, l := range s.leases() {
		if s.callOpen(l.Machine) {
			continue
		}
		if g := s.fabric.byID(l.FabricDevice); l.Phase == device.Attached && !l.Attempt.IsZero() && g != nil && g.machine == l.Machine {
			serving = append(serving, l)
		}
	}
	if len(serving) == 0 {
		return
	}
	l := serving[number(nth, 0)%len(serving)]
	s.struck("lease stripped")
	s.note("user", "deletes the lease of %s with its finalizer", l.Unit)
	s.fabric.byID(l.FabricDevice).foreign = true
	s.api.record(leases, s.api.objects[leases][device.LeaseName(fabricID, l.Unit)], nil)
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
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return // no agent was here yet
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		panic(err)
	}
	for _, p := range s.live(h.node) {
		s.crash(p, "by itself")
	}
}

// forHow reads the duration that a command is given alone.
func forHow(words []string) (time.Duration, error) {
	if len(words) != 1 {
		return 0, fmt.Errorf("how long?")
	}
	return time.ParseDuration(words[0])
}

// managerBusy lets the manager refuse for a while to change anything.
func (s *Sim) managerBusy(words []string) error {
	d, err := forHow(words)
	if err != nil {
		return err
	}
	s.struck("manager busy")
	s.note("fabric", "its manager changes nothing for %s", d)
	s.fabric.busyUntil = s.now().Add(d)
	return nil
}

// reclaim takes a device away from the node that a person attached there.
func (s *Sim) reclaim(h *host) {
	for _, g := range s.fabric.on(h.machine) {
		if g.foreign && !s.kubelets[h.node].uses(g) {
			s.struck("device reclaimed")
			s.note("fabric", "a person takes %s away from %s", g.id, h.node)
			g.upset = s.now()
			s.fabric.disconnect(g)
			return
		}
	}
}

// unnamed keeps the manager for a while from knowing the UUID of a device.
func (s *Sim) unnamed(words []string) error {
	if len(words) != 2 {
		return fmt.Errorf("which device, how long?")
	}
	n, err := strconv.Atoi(words[0])
	if err != nil {
		return err
	}
	d, err := time.ParseDuration(words[1])
	if err != nil {
		return err
	}
	g := s.fabric.gpus[n%len(s.fabric.gpus)]
	s.struck("device unnamed")
	s.note("fabric", "its manager does not know which GPU %s is", g.id)
	g.unnamedUntil = s.now().Add(d)
	return nil
}

// configure changes the configuration of all agents.
func (s *Sim) configure(words []string) error {
	set := options(words)
	s.minPerNode, s.maxPerNode = number(set["min"], s.minPerNode), number(set["max"], s.maxPerNode)
	s.struck("configuration changed")
	s.note("user", "configures min=%d max=%d", s.minPerNode, s.maxPerNode)
	return nil
}

// unmodel takes the first model out of one node's configuration for a while.
func (s *Sim) unmodel(h *host, d time.Duration) {
	s.struck("configuration lacks model")
	s.note(h.node, "its configuration has no model %s", gpuModel)
	h.unmodelUntil = s.now().Add(d)
}

func (s *Sim) restartKubelet(h *host, d time.Duration) {
	s.struck("kubelet restart")
	s.note(h.node, "its kubelet is restarted")
	s.kubelets[h.node].restart(d)
}

// damage makes a lease unreadable, until a person has put it right.
func (s *Sim) damage(words []string) error {
	if len(words) != 2 {
		return fmt.Errorf("which lease, how long?")
	}
	n, err := strconv.Atoi(words[0])
	if err != nil {
		return err
	}
	d, err := time.ParseDuration(words[1])
	if err != nil {
		return err
	}
	all := keys(s.api.objects[leases])
	if len(all) == 0 {
		return nil
	}
	name := all[n%len(all)]
	l, ok := find[*coordinationv1.Lease](s.api, leases, name)
	if _, broken := s.damaged[name]; !ok || broken {
		return nil
	}
	s.struck("lease damaged")
	s.note("user", "damages lease %s", name)
	s.damaged[name] = l.Annotations[schemaKey]
	l.Annotations[schemaKey] = "99"
	if _, err := s.api.update(leases, l); err != nil {
		return err
	}
	s.after(d, nil, s.repair)
	return nil
}

const schemaKey = device.Driver + "/schema"

// repair puts right what was damaged.
func (s *Sim) repair() {
	for _, name := range keys(s.damaged) {
		if l, ok := find[*coordinationv1.Lease](s.api, leases, name); ok {
			s.note("user", "puts lease %s right", name)
			l.Annotations[schemaKey] = s.damaged[name]
			if _, err := s.api.update(leases, l); err != nil {
				panic(err) // it was just read
			}
		}
		delete(s.damaged, name)
	}
}

// unsee makes the driver's library lose sight of a GPU, until it looks for new ones.
func (s *Sim) unsee(h *host) {
	for _, f := range h.bus {
		if f.seen && f.drained == nil {
			s.struck("device unseen")
			s.note(h.node, "the driver's library shows %s no more", f.g.id)
			f.seen = false
			f.g.upset = s.now()
			return
		}
	}
}

// kill makes a GPU fall off the driver: it stays on the bus and on the manager's list, and is never shown again.
func (s *Sim) kill(h *host) {
	for _, f := range h.bus {
		if f.seen && f.drained == nil {
			s.struck("device dead")
			s.note(h.node, "%s has fallen off the driver", f.g.id)
			f.seen, f.g.dead = false, true
			f.g.upset = s.now()
			s.hostChanged(h)
			return
		}
	}
}

// closeAll makes the containers of the node close their GPUs, and go on.
func (s *Sim) closeAll(h *host) {
	s.note(h.node, "the containers have closed their GPUs")
	clear(h.open)
	s.hostChanged(h)
}

// intrude is a person who attaches a device to the node, at whatever moment.
func (s *Sim) intrude(h *host) {
	for i := range s.fabric.gpus {
		g := s.fabric.gpus[len(s.fabric.gpus)-1-i]
		if g.machine == "" {
			s.note("fabric", "a person attaches %s to %s", g.id, h.node)
			g.foreign = true
			s.fabric.connect(g, h.machine)
			return
		}
	}
}
