// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
)

// A manager that does not answer, or does not know this node's machine, is asked again after retryFirst,
// then after twice as long, up to retryMost.
const (
	retryFirst = 5 * time.Second
	retryMost  = 30 * time.Second
)

// seat is this node's place: the fabric that it belongs to and its machine there.
type seat struct {
	fabric  device.FabricID
	machine device.Machine
	nodeUID string
}

// membership finds out where this node belongs and runs its loops there.
type membership struct {
	a        *agent
	cfg      config.Config
	managers map[device.FabricID]*manager
	look     chan struct{}
	own      *ownPool
	asked    time.Time // when recover asked; used by run's goroutine only

	mu     sync.Mutex // guards the following
	loop   *node.Loop
	survey *node.Survey
	seat   seat
	term   *term
	// why says, in a word and a sentence, why the node is in no fabric.
	why, whyNot string
	// none: no fabric has this node's machine. placed: it was known once where the node belongs.
	none, placed bool
	// conflict: somebody else advertises this node's GPUs. looked: that was looked for.
	conflict, looked bool
}

// notInFabric is why a node is in no fabric when every manager that could have it was asked.
const notInFabric = "NotInFabric"

func newMembership(a *agent, cfg config.Config) (*membership, error) {
	m := &membership{a: a, cfg: cfg, managers: map[device.FabricID]*manager{}, look: make(chan struct{}, 1)}
	m.own = newOwnPool(m)
	for i := range cfg.Fabrics {
		f := &cfg.Fabrics[i]
		client, err := newClient(f, a.clock, func(op string, status int, took time.Duration) {
			if op == "login" {
				a.metrics.Requested(f.ID, "Login", took, loginFault(status))
			}
		})
		if err != nil {
			return nil, usageError{fmt.Errorf("fabric %s: %w", f.ID, err)}
		}
		m.managers[f.ID] = &manager{
			Manager: client, clock: a.clock, models: f.FabricModels(), answered: m.tellFabric,
			timed: func(op metrics.Operation, took time.Duration, err error) {
				a.metrics.Requested(f.ID, op, took, faultOf(err))
			},
		}
	}
	return m, nil
}

// lookAgain asks for the membership to be found anew.
func (m *membership) lookAgain() {
	select {
	case m.look <- struct{}{}:
	default:
	}
}

// poke makes the node loop and the survey look again, if there are any.
func (m *membership) poke() {
	m.mu.Lock()
	loop, survey := m.loop, m.survey
	m.mu.Unlock()
	if loop != nil {
		loop.Poke()
	}
	if survey != nil {
		survey.Poke()
	}
}

// run keeps the loops of the present seat running until ctx ends.
func (m *membership) run(ctx context.Context) {
	stop, stopSurvey := func() {}, func() {}
	defer func() { stop(); stopSurvey() }()
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { m.own.run(ctx) })
	var surveyed *outlook
	retry := retryFirst
	for {
		at, known := m.find(ctx)
		if ctx.Err() != nil {
			return
		}
		if known && at != m.present() {
			stop()
			stop = m.sit(ctx, at)
		}
		if o, trouble := m.outlook(known); surveyed == nil || o != *surveyed {
			stopSurvey()
			surveyed, stopSurvey = &o, m.surveyBy(ctx, o, trouble)
		}
		m.tellFabric()
		m.tellConflict(ctx)
		pause := m.cfg.Timings.NodeList
		if !known || at == (seat{}) || m.troubled(at) || m.a.leases.Refused() != nil {
			pause, retry = retry, min(2*retry, retryMost)
		} else {
			retry = retryFirst
		}
		timer := m.a.clock.NewTimer(pause + rand.N(pause/10)) //nolint:gosec // jitter
		select {
		case <-ctx.Done():
		case <-m.look:
		case <-timer.C():
		}
		timer.Stop()
	}
}

func (m *membership) present() seat {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seat
}

// find asks whose machine this node is. known is false where a manager could not be asked: the node then
// stays where it is, or where its label says.
func (m *membership) find(ctx context.Context) (at seat, known bool) {
	self, err := m.a.watch.Node(m.a.o.node)
	if err != nil {
		m.because("NodeUnknown", "the Node of this agent cannot be read: "+err.Error())
		return seat{}, false
	}
	here := m.present()
	if here == (seat{}) && !m.selected(self.Labels) {
		m.because(notInFabric, "no configured fabric selects this node")
		return seat{}, true
	}
	machine, err := machineOf(self, m.cfg.Machines)
	if err != nil {
		m.because("MachineUnknown", err.Error())
		return seat{}, true
	}
	if here.machine == machine && here.nodeUID == string(self.UID) {
		m.recover(ctx, here)
		return here, true // a machine does not change its fabric while it runs
	}
	asked := true
	for id, manager := range m.managers {
		if f, _ := m.cfg.Fabric(id); !f.Selects(self.Labels) {
			continue
		}
		call, cancel := context.WithTimeout(ctx, time.Minute)
		has, err := manager.has(call, machine)
		cancel()
		switch {
		case err != nil && self.Labels[device.LabelFabric] == string(id):
			return seat{fabric: id, machine: machine, nodeUID: string(self.UID)}, true
		case err != nil:
			asked = false
		case has:
			return seat{fabric: id, machine: machine, nodeUID: string(self.UID)}, true
		}
	}
	if !asked {
		m.because("Unreachable", "not every fabric manager could be asked whether it has machine "+string(machine))
		return seat{}, false
	}
	m.because(notInFabric, fmt.Sprintf("no configured fabric manager has machine %s", machine))
	return seat{}, true
}

// selected tells whether a fabric may have a node with these labels.
func (m *membership) selected(labels map[string]string) bool {
	return slices.ContainsFunc(m.cfg.Fabrics, func(f config.Fabric) bool { return f.Selects(labels) })
}

// troubled tells whether the manager of a seat did not answer when it was last asked.
func (m *membership) troubled(at seat) bool {
	err, asked := m.managers[at.fabric].Trouble()
	return asked && err != nil
}

// recover asks a manager that did not answer whether it does now: on a node that has nothing to attach nobody
// else would, and nothing is offered to a node that cannot work with its manager.
func (m *membership) recover(ctx context.Context, at seat) {
	// The Node changes when its condition is written: that must not make us ask again at once.
	if at.fabric == "" || !m.troubled(at) || m.a.clock.Since(m.asked) < retryFirst {
		return
	}
	m.asked = m.a.clock.Now()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	m.managers[at.fabric].health(ctx)
}

func (m *membership) because(why, whyNot string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.why, m.whyNot = why, whyNot
}

// machineOf tells which machine a Node is: by its provider id, else its annotation, else the configuration.
func machineOf(n *corev1.Node, configured map[string]device.Machine) (device.Machine, error) {
	if m, err := device.MachineOfProviderID(n.Spec.ProviderID); err == nil {
		return m, nil
	}
	if text, ok := n.Annotations[device.AnnotationMachine]; ok {
		m, err := device.ParseMachine(text)
		if err != nil {
			return "", fmt.Errorf("annotation %s: %w", device.AnnotationMachine, err)
		}
		return m, nil
	}
	if m, ok := configured[n.Name]; ok {
		return m, nil
	}
	return "", fmt.Errorf("the machine of this node is not known: its provider id %q is none, it has no annotation %s, and the configuration's machines do not name it", n.Spec.ProviderID, device.AnnotationMachine)
}

// sit starts the loops of a seat; the returned function ends them and waits for that.
func (m *membership) sit(ctx context.Context, at seat) func() {
	m.mu.Lock()
	m.seat, m.loop, m.term = at, nil, nil
	m.mu.Unlock()
	m.a.status.SetFabric(at.fabric)
	if at.fabric == "" {
		return func() {}
	}
	log := klog.FromContext(ctx).WithValues("fabric", at.fabric)
	log.Info("This node is a member of a fabric", "machine", at.machine)
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, log))
	f, _ := m.cfg.Fabric(at.fabric)
	var all sync.WaitGroup
	cfg := m.nodeConfig(at, f)
	if turn := m.turn(at, &f); turn != nil {
		cfg.Turns = turn
		all.Go(func() { turn.Run(ctx) })
	}
	loop := node.New(cfg)
	term := &term{m: m, fabric: f, seat: at}
	m.mu.Lock()
	m.loop, m.term = loop, term
	m.mu.Unlock()
	all.Go(func() { loop.Run(ctx) })
	all.Go(func() {
		if err := term.run(ctx); err != nil && ctx.Err() == nil {
			m.a.fail(err)
		}
	})
	return func() { cancel(); all.Wait() }
}

// turn is this node's place in the line at a manager that does one thing at a time for all nodes, nil at any other.
func (m *membership) turn(at seat, f *config.Fabric) *lease.Turn {
	if m.managers[at.fabric].Capabilities().Exclusion != fabric.ExclusionGlobal {
		return nil
	}
	turn, err := lease.NewTurn(lease.TurnOptions{
		Client: m.a.client, Clock: m.a.clock, Name: device.TurnLease(f.Address()), Node: m.a.o.node, Changed: m.poke,
	})
	if err != nil {
		m.a.fail(err) // the manager still takes one call at a time, whoever comes first
		return nil
	}
	return turn
}

// tellFabric says on the Node whether this node can work with its fabric manager.
func (m *membership) tellFabric() {
	if len(m.cfg.Fabrics) == 0 {
		return
	}
	m.a.status.SetCondition(m.fabricCondition())
}

func (m *membership) fabricCondition() nodestatus.Condition {
	m.mu.Lock()
	at, why, whyNot := m.seat, m.why, m.whyNot
	m.mu.Unlock()
	c := nodestatus.Condition{Type: nodestatus.FabricReady, Status: corev1.ConditionFalse, Reason: why, Message: whyNot}
	if at.fabric == "" {
		for id, manager := range m.managers {
			if err, asked := manager.Trouble(); asked && err != nil {
				c.Reason, c.Message = faultReason(err), fmt.Sprintf("fabric %s: %v", id, err)
			}
		}
		if c.Reason == "" {
			c.Status, c.Reason, c.Message = corev1.ConditionUnknown, "Starting", "the fabric managers are being asked"
		}
		return c
	}
	err, asked := m.managers[at.fabric].Trouble()
	reason, message := m.ownTrouble()
	switch {
	case reason != "":
		c.Reason, c.Message = reason, message
	case !asked:
		c.Status, c.Reason, c.Message = corev1.ConditionUnknown, "Starting", "the fabric manager is being asked"
	case err != nil:
		c.Reason = faultReason(err)
		c.Message = fmt.Sprintf("fabric %s, machine %s: %v", at.fabric, at.machine, err)
	default:
		c.Status, c.Reason = corev1.ConditionTrue, "Answers"
		c.Message = fmt.Sprintf("the manager of fabric %s answers and has machine %s", at.fabric, at.machine)
	}
	return c
}

// ownTrouble says what on the cluster's side keeps this node from working, whatever the manager says.
func (m *membership) ownTrouble() (reason, message string) {
	m.mu.Lock()
	term := m.term
	m.mu.Unlock()
	if err := m.a.leases.Refused(); err != nil {
		return "Forbidden", fmt.Sprintf("what this node holds is not known: %v; apply deploy/daemonset.yaml of this release", err)
	}
	if bad := m.a.leases.Unreadable(); len(bad) > 0 {
		return "UnreadableLease", bad[0].Error()
	}
	for _, l := range m.a.leases.List() {
		if at := m.present(); l.Fabric != at.fabric && l.Machine == at.machine {
			return "UnknownFabric", fmt.Sprintf("unit %s is attached here by the lease of a fabric %q that this node is not in, so nobody gives it back: the configuration names that fabric no more, or calls it %q now; take back the former id until its GPUs are in the pool", l.Unit, l.Fabric, at.fabric)
		}
	}
	if missing := m.a.missingRights(); len(missing) > 0 {
		return "Forbidden", fmt.Sprintf("this agent's account lacks rights, so that no Pod would start with its GPU: %s; apply deploy/daemonset.yaml of this release",
			strings.Join(missing, ", "))
	}
	if term != nil {
		if dropped := term.trouble(); dropped != "" {
			return "FeatureGate", dropped
		}
	}
	return "", ""
}

// tellConflict says on the Node whether somebody else advertises its GPUs.
func (m *membership) tellConflict(ctx context.Context) {
	found, err := m.a.watch.Conflicts(m.a.machine.addresses(ctx), nil)
	if err != nil {
		return // not everything was read yet; the watch pokes again
	}
	m.a.status.SetCondition(nodestatus.ConflictCondition(found))
	m.a.metrics.SetConflict(len(found) > 0)
	m.mu.Lock()
	changed := (len(found) > 0) != m.conflict
	first := !m.looked
	m.conflict, m.looked = len(found) > 0, true
	m.mu.Unlock()
	if changed || first {
		m.own.poke()
	}
	if changed && len(found) > 0 {
		m.a.obs.onEvents(func(e *nodestatus.Events) { e.Conflict(found) })
	}
}

// faultOf makes a fault of any error, for metrics.
func faultOf(err error) *device.Fault {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*device.Fault](err); ok {
		return f
	}
	return &device.Fault{Class: device.FaultUnknown}
}

// loginFault sorts the answer to a login by its HTTP status; 0 is no answer.
func loginFault(status int) *device.Fault {
	switch {
	case status >= 200 && status < 300:
		return nil
	case status == 0:
		return &device.Fault{Class: device.FaultUnreachable}
	}
	return &device.Fault{Class: device.FaultUnauthorized}
}

// faultReason is the word for a failure of the manager.
func faultReason(err error) string {
	if f, ok := errors.AsType[*device.Fault](err); ok {
		return string(f.Class)
	}
	return "Failed"
}
