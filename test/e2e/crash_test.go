// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// slowList makes the manager answer slowly when it is asked what is attached to a machine, whoever asks.
func slowList() simapi.Fault {
	return simapi.Fault{
		Face: "fm", Method: http.MethodGet, Path: "/machines/[^/]+$", Action: simapi.ActionSlow,
		Delay: simapi.Duration(2 * time.Second),
	}
}

// moment is a point on a unit's way at which something is done to the agent.
type moment struct {
	name  string
	delay simapi.Timing
	slow  *simapi.Fault
	// reached tells from the unit's lease (its error if there is none) and device, which is zero before there
	// is one.
	reached func(l device.Lease, none error, d simapi.Device) bool
}

func attachMoments() []moment {
	before, usual := slowList(), timing(attachDelay, detachDelay, nodeDelay)
	return []moment{
		{"before the manager is asked", usual, &before, func(l device.Lease, none error, _ simapi.Device) bool {
			return none == nil && l.Phase == device.Assigned
		}},
		{"while the manager works, longer than a call takes to settle", timing(12*time.Second, detachDelay, nodeDelay), nil, func(l device.Lease, none error, d simapi.Device) bool {
			return none == nil && l.Phase == device.Attaching && d.Phase == simapi.PhaseAttaching
		}},
		{"before the device is on the bus", timing(attachDelay, detachDelay, 4*time.Second), nil, func(_ device.Lease, none error, d simapi.Device) bool {
			return none == nil && d.Phase == simapi.PhaseAttached && !d.OnBus
		}},
		{"when the device is there", usual, nil, func(l device.Lease, none error, _ simapi.Device) bool {
			return none == nil && l.Phase == device.Attached
		}},
	}
}

func releaseMoments() []moment {
	slow, usual := slowList(), timing(attachDelay, detachDelay, nodeDelay)
	return []moment{
		{"when it is called back", usual, nil, func(l device.Lease, none error, _ simapi.Device) bool {
			return none == nil && l.Phase == device.Releasing
		}},
		{"when it is off the bus", usual, &slow, func(l device.Lease, none error, d simapi.Device) bool {
			return none == nil && l.Phase == device.Releasing && d.Phase == simapi.PhaseAttached && !d.OnBus
		}},
		{"while the manager works", timing(attachDelay, 4*time.Second, nodeDelay), nil, func(_ device.Lease, none error, d simapi.Device) bool {
			return none == nil && d.Phase == simapi.PhaseDetaching
		}},
		{"when it is off the fabric", usual, &slow, func(_ device.Lease, none error, d simapi.Device) bool {
			return none == nil && d.Phase == simapi.PhaseFree
		}},
	}
}

// TestAgentKilledWhileAttaching: the next process goes on; nothing is attached twice and nothing is lost.
func TestAgentKilledWhileAttaching(t *testing.T) {
	for i, m := range attachMoments() {
		t.Run(m.name, func(t *testing.T) {
			s := begin(t)
			node := localkube.Nodes()[i%2].Name
			s.fresh(node)
			h := s.watch()
			s.prepare(m)
			s.forgotten(node)
			s.template("one", a100, 1)
			s.pod("pod", claiming("one"), on(node))
			s.killAt(node, m)
			s.runs("pod", unlucky)
			s.sees("pod")
			if n := len(s.done("attach")); n != 1 {
				t.Errorf("%d attaches, want one", n)
			}
			if failed := h.failures(); len(failed) > 0 {
				t.Errorf("the claim was told %v", failed)
			}
			s.settled()
		})
	}
}

// TestAgentKilledWhileReleasing: the next process finishes it; nothing stays and nothing is detached twice.
func TestAgentKilledWhileReleasing(t *testing.T) {
	for i, m := range releaseMoments() {
		t.Run(m.name, func(t *testing.T) {
			s := begin(t)
			node := localkube.Nodes()[i%2].Name
			s.fresh(node)
			s.template("one", a100, 1)
			s.pod("pod", claiming("one"), on(node))
			s.runs("pod", running)
			units, _ := s.units("pod")
			s.delete("pod")
			s.idle(units[0])
			s.forgotten(node)
			s.prepare(m)
			if err := s.giveBack(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.killAt(node, m)
			s.settled()
			if n := len(s.done("detach")); n != 1 {
				t.Errorf("%d detaches, want one", n)
			}
		})
	}
}

// unlucky is a Pod whose kubelet asked for its devices while no agent answered: it asks again after a minute
// or more.
const unlucky = 2 * time.Minute

// forgotten waits until the node's agent reads the fabric's list anew before it asks for anything: a list of
// the last 5 s would do.
func (s *scenario) forgotten(node string) {
	s.t.Helper()
	n, err := localkube.FindNode(node)
	if err != nil {
		s.t.Fatal(err)
	}
	await(s.t, "the list of what is attached to "+node+" is old", soon, func(ctx context.Context) error {
		requests, err := s.sim.Log(ctx)
		if err != nil {
			return err
		}
		for _, r := range requests {
			if age := time.Since(r.Time); strings.HasSuffix(r.Path, "/machines/"+n.Machine) && age < 6*time.Second {
				return fmt.Errorf("it was read %v ago", age)
			}
		}
		return nil
	})
}

// prepare sets the simulator up so that the moment lasts.
func (s *scenario) prepare(m moment) {
	s.t.Helper()
	if err := s.sim.SetTiming(s.t.Context(), m.delay); err != nil {
		s.t.Fatal(err)
	}
	if m.slow != nil {
		s.fault(*m.slow)
	}
}

// killAt kills the agent of the node at the moment and waits until it is back.
func (s *scenario) killAt(node string, m moment) {
	s.t.Helper()
	pid, err := s.process(s.t.Context(), node)
	if err != nil {
		s.t.Fatal(err)
	}
	await(s.t, "the moment "+m.name, running, func(ctx context.Context) error {
		leases, err := s.leases.ListLive(ctx)
		if err != nil {
			return err
		}
		state, err := s.sim.State(ctx)
		if err != nil {
			return err
		}
		l, none := device.Lease{}, error(nil)
		if len(leases) == 0 {
			none = errors.New("there is no lease")
		} else {
			l = leases[0]
		}
		d, _ := state.Device(l.FabricDevice)
		for _, other := range state.Devices { // the lease may not name it yet
			if l.FabricDevice == "" && other.Phase != simapi.PhaseFree {
				d = other
			}
		}
		if l.FabricDevice == "" && d.ResUUID == "" {
			d = simapi.Device{}
		}
		if !m.reached(l, none, d) {
			return fmt.Errorf("lease of %q is %q (there is none: %t), device %q is %q", l.Unit, l.Phase, none != nil, d.ID, d.Phase)
		}
		return nil
	})
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		s.t.Fatalf("kill the agent on %s: %v", node, err)
	}
	s.unfault("") // the moment is over
	await(s.t, "another agent runs on "+node, running, func(ctx context.Context) error {
		now, err := s.process(ctx, node)
		if err == nil && now == pid {
			err = fmt.Errorf("process %d is still there", pid)
		}
		return err
	})
}

// fresh replaces an agent that was restarted before: the kubelet makes each further restart wait longer.
func (s *scenario) fresh(node string) {
	s.t.Helper()
	pods, err := s.agents(s.t.Context(), node)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := range pods {
		for _, c := range pods[i].Status.ContainerStatuses {
			if c.RestartCount > 0 {
				s.replace(node)
				return
			}
		}
	}
}

// replace deletes the node's agent and waits for the next one, ready.
func (s *scenario) replace(node string) {
	s.t.Helper()
	s.deleteAgents(node)
	await(s.t, "a new agent is ready on "+node, running, func(ctx context.Context) error {
		_, err := s.agent(ctx, node)
		return err
	})
}

// TestLeaderGone: another agent leads soon, serves new Pods, and the former one does not come between.
func TestLeaderGone(t *testing.T) {
	for _, tc := range []struct {
		name   string
		strike func(s *scenario, node string) (undo func())
	}{
		{"killed", killForGood},
		{"paused", pause},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := begin(t)
			old, err := s.leader(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			undo := tc.strike(s, old)
			led := func(ctx context.Context) error {
				now, err := s.leader(ctx)
				if err == nil && now == old {
					err = fmt.Errorf("%s leads", now)
				}
				return err
			}
			await(t, "another agent leads", 45*time.Second, led)
			s.template("one", a100, 1)
			s.pod("pod", claiming("one"), on(other(old)))
			s.runs("pod", running)
			s.sees("pod")
			undo()
			await(t, "both agents are ready", 90*time.Second, s.rolledOut)
			s.steady("the leadership of another", 3*time.Second, led)
			s.settled()
		})
	}
}

func other(node string) string {
	for _, n := range localkube.Nodes() {
		if n.Name != node {
			return n.Name
		}
	}
	return ""
}

// killForGood kills the node's agent, and nobody starts it again before undo.
func killForGood(s *scenario, node string) (undo func()) {
	s.t.Helper()
	pid, err := s.process(s.t.Context(), node)
	if err != nil {
		s.t.Fatal(err)
	}
	if err = s.cluster.Stop(s.t.Context(), node, "kubelet"); err != nil {
		s.t.Fatal(err)
	}
	undone := false
	undo = func() {
		if undone {
			return
		}
		undone = true
		if failed := s.cluster.Start(context.WithoutCancel(s.t.Context()), node, "kubelet"); failed != nil {
			s.t.Error(failed)
		}
	}
	s.t.Cleanup(undo)
	if err = syscall.Kill(pid, syscall.SIGKILL); err != nil {
		s.t.Fatalf("kill the agent on %s: %v", node, err)
	}
	return undo
}

// pause stops the node's agent without its knowledge.
func pause(s *scenario, node string) (undo func()) {
	s.t.Helper()
	pid, err := s.process(s.t.Context(), node)
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGSTOP)
	}
	if err != nil {
		s.t.Fatalf("pause the agent on %s: %v", node, err)
	}
	undo = func() {
		// It may have been killed by the kubelet, which found it dead.
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && !errors.Is(err, syscall.ESRCH) {
			s.t.Error(err)
		}
	}
	s.t.Cleanup(undo)
	return undo
}
