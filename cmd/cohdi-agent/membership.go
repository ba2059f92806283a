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
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/machine"
	"github.com/cohdi/cohdi-agent/internal/manager"
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
	managers map[device.FabricID]*manager.Manager
	look     chan struct{}
	own      *ownPool

	// The following is used by run's goroutine only.
	asked time.Time // when recover asked
	// evidence is what the present seat was found by; chain is what was found behind it and followed is when, nil if
	// nothing was followed.
	evidence machine.Evidence
	chain    *machine.Chain
	followed time.Time

	mu     sync.Mutex // guards the following
	loop   *node.Loop
	survey *node.Survey
	seat   seat
	term   *term
	// why says, in a word and a sentence, why the node is in no fabric.
	why, whyNot string
	// notes are what else names a machine of this node, though it does not count.
	notes []string
	// none: no fabric has this node's machine. placed: it was known once where the node belongs.
	none, placed bool
	// conflict: somebody else advertises this node's GPUs. looked: that was looked for.
	conflict, looked bool
}

// notInFabric is why a node is in no fabric when every manager that could have it was asked.
const notInFabric = machine.NotInFabric

func newMembership(a *agent, cfg config.Config) (*membership, error) {
	m := &membership{a: a, cfg: cfg, managers: map[device.FabricID]*manager.Manager{}, look: make(chan struct{}, 1)}
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
		m.managers[f.ID] = manager.New(manager.Options{
			Client: client, Clock: a.clock, Models: f.FabricModels(), Answered: m.tellFabric,
			Timed: func(op metrics.Operation, took time.Duration, err error) {
				a.metrics.Requested(f.ID, op, took, faultOf(err))
			},
		})
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
	defer m.logOut(context.WithoutCancel(ctx))
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

// logOutMost bounds how long managers are told goodbye: sessions end by themselves, too.
const logOutMost = 5 * time.Second

// logOut ends the sessions at the managers, when nobody uses them any more.
func (m *membership) logOut(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, logOutMost)
	defer cancel()
	var all sync.WaitGroup
	for id, asked := range m.managers {
		all.Go(func() {
			if err := asked.Close(ctx); err != nil {
				klog.FromContext(ctx).V(1).Info("The session at a fabric manager could not be ended", "fabric", id, "err", err)
			}
		})
	}
	all.Wait()
}

func (m *membership) present() seat {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seat
}

// find looks for the machine and the fabric of this node. known is false where that cannot be said for the moment: the
// node then stays where it is, or where its labels say.
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
	evidence := evidenceOf(self, m.cfg.Machines)
	if here != (seat{}) && here.nodeUID == string(self.UID) && evidence == m.evidence && !m.movedOn(ctx) {
		m.recover(ctx, here)
		return here, true // a machine does not change its fabric while it runs
	}
	d := m.decide(ctx, &machine.Facts{
		Evidence: evidence,
		Was:      machine.Place{Fabric: device.FabricID(self.Labels[device.LabelFabric]), Machine: device.Machine(self.Labels[device.LabelMachine])},
	}, self.Labels)
	if d.Machine == "" {
		m.because(d.Reason, d.Message)
		return seat{}, !d.Passing
	}
	m.evidence = evidence
	m.noted(d.Notes)
	return seat{fabric: d.Fabric, machine: d.Machine, nodeUID: string(self.UID)}, true
}

// decide asks the managers what they list, follows the chain to the host if that is wanted, and makes sure that the
// machine is no other Node's.
func (m *membership) decide(ctx context.Context, facts *machine.Facts, labels map[string]string) machine.Decision {
	facts.Listed = map[device.Machine][]device.FabricID{}
	for i := range m.cfg.Fabrics {
		f := &m.cfg.Fabrics[i]
		if !f.Selects(labels) {
			continue
		}
		id := f.ID
		call, cancel := context.WithTimeout(ctx, time.Minute)
		all, err := m.managers[id].Machines(call)
		cancel()
		if err != nil {
			facts.Unasked = append(facts.Unasked, id)
		}
		for _, known := range all {
			if !slices.Contains(facts.Listed[known.ID], id) {
				facts.Listed[known.ID] = append(facts.Listed[known.ID], id)
			}
		}
	}
	d := machine.Decide(facts)
	m.chain = nil
	if d.Follow {
		m.follow(ctx, facts)
		d = machine.Decide(facts)
	}
	if d.Machine == "" || d.Machine == facts.Was.Machine {
		return d // where two nodes say that they are there, the leader sees both
	}
	other, err := nodestatus.OnMachine(ctx, m.a.client, d.Machine, m.a.o.node)
	switch {
	case err != nil:
		return machine.Decision{Reason: machine.Unknown, Passing: true, Message: err.Error()}
	case other != "":
		return machine.Decision{Reason: machine.Shared, Message: fmt.Sprintf(
			"the node's %s names machine %s, on which node %s is already: what names the machine of one is wrong", d.By, d.Machine, other)}
	}
	return d
}

// follow follows the chain from the node to its host.
func (m *membership) follow(ctx context.Context, facts *machine.Facts) {
	start, _, ok := facts.Start()
	if !ok {
		return
	}
	c := m.a.chain.Follow(ctx, start)
	facts.Chain, m.chain, m.followed = &c, &c, m.a.clock.Now()
}

// movedOn tells whether the chain by which the node has its place leads to another machine than it did. Nothing wakes
// us when that happens, so it is followed anew now and then.
func (m *membership) movedOn(ctx context.Context) bool {
	if m.chain == nil || m.a.clock.Since(m.followed) < m.cfg.Timings.NodeList {
		return false
	}
	before := m.chain
	m.follow(ctx, &machine.Facts{Evidence: m.evidence})
	if m.chain.Problem == "" && m.chain.Machine != before.Machine {
		return true
	}
	m.chain = before
	return false
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
	m.managers[at.fabric].Ask(ctx)
}

func (m *membership) because(why, whyNot string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.why, m.whyNot = why, whyNot
}

// noted remembers what else names a machine of this node.
func (m *membership) noted(notes []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.notes = notes
}

// evidenceOf is what a Node and the configuration say of the Node's machine.
func evidenceOf(n *corev1.Node, all map[string]device.Machine) machine.Evidence {
	text, annotated := n.Annotations[device.AnnotationMachine]
	return machine.Evidence{
		ProviderID: n.Spec.ProviderID, Annotation: text, Annotated: annotated, Configured: all[n.Name],
		Object: n.Annotations[machine.AnnotationObject], SystemUUID: n.Status.NodeInfo.SystemUUID,
	}
}

// machineOf tells a leader which machine a Node is: what the agent on it says. Agents before this one did not say it; what
// they went by is on the Node, too.
func machineOf(n *corev1.Node, all map[string]device.Machine) (device.Machine, error) {
	if text, ok := n.Labels[device.LabelMachine]; ok {
		return device.ParseMachine(text)
	}
	evidence := evidenceOf(n, all)
	if m := evidence.Named(); m != "" {
		return m, nil
	}
	return "", fmt.Errorf("neither the label %s nor anything else of Node %s names its machine", device.LabelMachine, n.Name)
}

// sit starts the loops of a seat; the returned function ends them and waits for that.
func (m *membership) sit(ctx context.Context, at seat) func() {
	m.mu.Lock()
	m.seat, m.loop, m.term = at, nil, nil
	m.mu.Unlock()
	m.a.status.SetPlace(at.fabric, at.machine)
	if at.fabric == "" {
		return func() {}
	}
	log := klog.FromContext(ctx).WithValues("fabric", at.fabric)
	log.Info("This node is a member of a fabric", "machine", at.machine, "notes", m.notes)
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
	if !m.managers[at.fabric].Queues() {
		return nil
	}
	turn, err := lease.NewTurn(lease.TurnOptions{
		Client: m.a.client, Clock: m.a.clock, Name: device.TurnLease(f.Address()), Node: m.a.o.node, Changed: m.poke,
	})
	if err != nil {
		m.a.fail(err)
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
	at, why, whyNot, notes := m.seat, m.why, m.whyNot, m.notes
	m.mu.Unlock()
	c := nodestatus.Condition{Type: nodestatus.FabricReady, Status: corev1.ConditionFalse, Reason: why, Message: whyNot}
	if at.fabric == "" {
		for i := range m.cfg.Fabrics { // in one order, so that the condition does not change by itself
			id := m.cfg.Fabrics[i].ID
			if err, asked := m.managers[id].Trouble(); asked && err != nil {
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
		if len(notes) > 0 {
			c.Message += "; " + strings.Join(notes, "; ")
		}
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
	f, ok := errors.AsType[*device.Fault](err)
	if !ok || f.Class == device.FaultUnknown { // what became of a look is of no interest, but that it failed
		return "ManagerError"
	}
	return string(f.Class)
}
