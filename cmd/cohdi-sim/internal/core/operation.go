// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// Kinds of operation.
const (
	kindAttach = "attach"
	kindDetach = "detach"
)

// operation is the record of one update, from its acceptance to its end. It is on disk before anything happens.
type operation struct {
	simapi.Operation
	// Kept: what fails stays on the machine and says so, as managers do it that work asynchronously.
	Kept bool `json:"kept,omitempty"`
}

// Spec is what an attach asks for: so many of a model, or one certain device (only the control API can).
type Spec struct {
	Model  string
	Count  int
	Device string
}

// AttachRequest is an update that adds devices.
type AttachRequest struct {
	Machine string
	Specs   []Spec
	Caller  string
	// Limit makes the hardware stop after so many devices, as a manager that fails halfway; negative is no limit.
	Limit int
}

// DetachRequest is an update that takes one device away.
type DetachRequest struct {
	Machine string // empty: wherever it is
	Device  string
	Caller  string
	// Forced: a test wants it so; nothing is judged.
	Forced bool
}

type result struct {
	devices []Device
	err     error
}

// Attach reserves devices, waits for the attach delay and returns what was attached. When ctx ends first, the operation goes
// on without its caller.
func (c *Core) Attach(ctx context.Context, r AttachRequest) ([]Device, error) {
	return c.run(ctx, r.Machine, func() ([]Device, error) { return c.attach(r) })
}

// Detach judges, waits for the detach delay and puts the device back into the pool.
func (c *Core) Detach(ctx context.Context, r DetachRequest) error {
	_, err := c.run(ctx, r.Machine, func() ([]Device, error) { return nil, c.detach(r) })
	return err
}

// run does the work in a goroutine of the core, behind the gate of the serialization policy.
func (c *Core) run(ctx context.Context, machine string, work func() ([]Device, error)) ([]Device, error) {
	c.mu.Lock()
	gate, busy := c.gateLocked(machine)
	out := make(chan result, 1)
	ok := c.spawnLocked(func() {
		if gate != nil {
			if busy && !tryEnter(gate) {
				out <- result{err: ErrBusy}
				return
			}
			if !busy {
				select {
				case gate <- struct{}{}:
				case <-c.stop:
					out <- result{err: ErrStopped}
					return
				}
			}
			defer func() { <-gate }()
		}
		devices, err := work()
		out <- result{devices, err}
	})
	c.mu.Unlock()
	if !ok {
		return nil, ErrStopped
	}
	select {
	case res := <-out:
		return res.devices, res.err
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the update of %s: %w", machine, ctx.Err())
	}
}

func tryEnter(gate chan struct{}) bool {
	select {
	case gate <- struct{}{}:
		return true
	default:
		return false
	}
}

// gateLocked returns the one-at-a-time gate of a machine or fabric, nil where updates are independent.
func (c *Core) gateLocked(machine string) (gate chan struct{}, busy bool) {
	key := ""
	m, err := c.machineLocked(machine)
	if err != nil {
		return nil, false
	}
	switch c.policies.Serialization {
	case "none":
		return nil, false
	case "perFabric":
		key = "fabric/" + strconv.Itoa(m.Fabric)
	default: // perMachine, busy409
		key = "machine/" + m.Name
	}
	if c.gates[key] == nil {
		c.gates[key] = make(chan struct{}, 1)
	}
	return c.gates[key], c.policies.Serialization == "busy409"
}

func (c *Core) attach(r AttachRequest) ([]Device, error) {
	op, err := c.acceptAttach(r, false)
	if err != nil {
		return nil, err
	}
	if !c.waitUntil(op.Due) {
		return nil, ErrStopped
	}
	return c.finishAttach(op)
}

func (c *Core) acceptAttach(r AttachRequest, kept bool) (*operation, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := c.machineLocked(r.Machine)
	if err != nil {
		return nil, err
	}
	picked, err := c.pickLocked(m, r)
	if err != nil {
		return nil, err
	}
	op := c.beginLocked(kindAttach, m.Name, r.Caller, false, time.Duration(*c.timing.AttachDelay), picked)
	op.Kept = kept
	return op, c.commitLocked()
}

// pickLocked reserves the devices of all specs, or none.
func (c *Core) pickLocked(m *Machine, r AttachRequest) ([]*Device, error) {
	var picked []*Device
	undo := func(err error) ([]*Device, error) {
		for _, d := range picked {
			c.releaseLocked(d)
		}
		return nil, err
	}
	for _, s := range r.Specs {
		free, err := c.candidatesLocked(m, s)
		if err != nil {
			return undo(err)
		}
		if len(free) < s.Count && (c.policies.Shortage != "partial" || len(free) == 0) {
			return undo(fmt.Errorf("attach %d of model %q to %s: %w", s.Count, s.Model, m.Name, ErrNoCapacity))
		}
		for _, d := range free[:min(s.Count, len(free))] {
			if r.Limit >= 0 && len(picked) >= r.Limit {
				return picked, nil
			}
			slot, ok := c.freeSlotLocked(m)
			if !ok {
				return undo(fmt.Errorf("attach model %q to %s: %w", s.Model, m.Name, ErrNoSlot))
			}
			c.assignLocked(d, m, slot)
			c.setPhaseLocked(d, simapi.PhaseAttaching)
			picked = append(picked, d)
		}
	}
	return picked, nil
}

func (c *Core) candidatesLocked(m *Machine, s Spec) ([]*Device, error) {
	if s.Device != "" {
		d, err := c.deviceLocked(s.Device)
		if err != nil {
			return nil, err
		}
		if !usable(d, m.Fabric, d.Model) {
			return nil, fmt.Errorf("attach device %s to %s: %w (phase %s)", d.ID, m.Name, ErrInUse, d.Phase)
		}
		return []*Device{d}, nil
	}
	var free []*Device
	for _, d := range c.devices {
		if usable(d, m.Fabric, s.Model) {
			free = append(free, d)
		}
	}
	switch c.policies.Pick {
	case "random":
		c.rand.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	case "worst":
		slices.SortStableFunc(free, func(a, b *Device) int { return badness(b) - badness(a) })
	}
	return free, nil
}

func badness(d *Device) int {
	if d.OpStatus == "" {
		return 0
	}
	return map[byte]int{'2': 3, '9': 2, '1': 1}[d.OpStatus[0]]
}

func (c *Core) beginLocked(kind, machine, caller string, forced bool, delay time.Duration, devices []*Device) *operation {
	now := c.clk.Now()
	c.lastOp++
	op := &operation{Operation: simapi.Operation{
		ID: c.lastOp, Kind: kind, Machine: machine, Caller: caller, Forced: forced, Start: now, Due: now.Add(delay),
	}}
	for _, d := range devices {
		op.Devices = append(op.Devices, d.ID)
	}
	c.operations = append(c.operations, op)
	if len(c.operations) > keptOperations {
		if i := slices.IndexFunc(c.operations, func(o *operation) bool { return o.End != nil }); i >= 0 {
			c.operations = slices.Delete(c.operations, i, i+1)
		}
	}
	return op
}

func (c *Core) endLocked(op *operation, outcome string) {
	now := c.clk.Now()
	op.End, op.Outcome = &now, outcome
}

// waitUntil is false when the core stops first.
func (c *Core) waitUntil(due time.Time) bool {
	d := due.Sub(c.clk.Now())
	if d <= 0 {
		return true
	}
	t := c.clk.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C():
		return true
	case <-c.stop:
		return false
	}
}

func (c *Core) finishAttach(op *operation) ([]Device, error) {
	c.mu.Lock()
	var out []Device
	var came []*Device
	for _, id := range op.Devices {
		d, err := c.deviceLocked(id)
		// A person may have taken it away in the meantime.
		if err != nil || d.Phase != simapi.PhaseAttaching || d.Machine != op.Machine {
			continue
		}
		if op.Kept && d.FailAttach != "" {
			d.Failure, d.FailAttach = d.FailAttach, ""
			c.setPhaseLocked(d, simapi.PhaseAttaching) // since now
			continue
		}
		c.setPhaseLocked(d, simapi.PhaseAttached)
		out, came = append(out, *d), append(came, d)
	}
	c.endLocked(op, fmt.Sprintf("attached %d of %d", len(out), len(op.Devices)))
	c.linkLaterLocked(came, c.clk.Now().Add(time.Duration(*c.timing.NodeDelay)))
	err := c.commitLocked()
	c.mu.Unlock()
	c.changed(op.Machine)
	return out, err
}

// linkLaterLocked brings the links of attached devices up when the node delay is over, in the order of the devices.
func (c *Core) linkLaterLocked(devices []*Device, at time.Time) {
	if !at.After(c.clk.Now()) {
		for _, d := range devices {
			c.linkUpLocked(d)
		}
		return
	}
	var seqs []int
	for _, d := range devices {
		seqs = append(seqs, d.AttachSeq)
	}
	c.spawnLocked(func() {
		if !c.waitUntil(at) {
			return
		}
		machines := map[string]bool{}
		c.mu.Lock()
		for i, d := range devices {
			// It may have been taken away again, or its link cut, in the meantime.
			if d.AttachSeq == seqs[i] && d.Phase == simapi.PhaseAttached && !d.LinkDown {
				c.linkUpLocked(d)
				machines[d.Machine] = true
			}
		}
		err := c.commitLocked()
		c.mu.Unlock()
		if err != nil {
			c.log.Error(err, "Links came up but were not recorded")
		}
		for m := range machines {
			c.changed(m)
		}
	})
}

func (c *Core) detach(r DetachRequest) error {
	op, judged, err := c.acceptDetach(r, false)
	if err != nil {
		return err
	}
	if !c.waitUntil(op.Due) {
		return ErrStopped
	}
	return c.finishDetach(op, judged)
}

func (c *Core) acceptDetach(r DetachRequest, kept bool) (op *operation, judged bool, err error) {
	d, err := c.beginDetach(r)
	if err != nil {
		return nil, false, err
	}
	// Reading all of /proc takes a while, so it happens without the lock.
	holders, err := c.holders(d)
	if err != nil {
		return nil, false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(holders) > 0 && c.policies.DetachInUse == "409" && !r.Forced {
		return nil, false, fmt.Errorf("detach %s: %w", d.ID, ErrInUse)
	}
	live, err := c.deviceLocked(d.ID)
	if err != nil || live.Phase != d.Phase || live.Machine != d.Machine {
		return nil, false, fmt.Errorf("detach %s from %s: it is not attached there any more: %w", d.ID, d.Machine, ErrNotFound)
	}
	c.setPhaseLocked(live, simapi.PhaseDetaching)
	live.Failure = ""
	op = c.beginLocked(kindDetach, d.Machine, r.Caller, r.Forced, time.Duration(*c.timing.DetachDelay), []*Device{live})
	op.Kept = kept
	judged = r.Forced
	if !judged {
		judged = c.judgeDetachLocked(live, holders, "when the detach was accepted")
	}
	return op, judged, c.commitLocked()
}

func (c *Core) beginDetach(r DetachRequest) (Device, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d, err := c.deviceLocked(r.Device)
	if err != nil {
		return Device{}, err
	}
	if r.Machine != "" {
		m, err := c.machineLocked(r.Machine)
		if err != nil {
			return Device{}, err
		}
		if d.Machine != m.Name {
			return Device{}, fmt.Errorf("device %s on machine %s: %w", d.ID, m.Name, ErrNotFound)
		}
	}
	switch {
	case d.Phase == simapi.PhaseAttached, d.Phase == simapi.PhaseAttaching && d.Failure != "":
		return *d, nil
	case d.Phase == simapi.PhaseFree:
		return Device{}, fmt.Errorf("device %s is not attached: %w", d.ID, ErrNotFound)
	default:
		return Device{}, fmt.Errorf("device %s is %s: %w", d.ID, d.Phase, ErrBusy)
	}
}

// judgeDetachLocked records what is wrong with taking the device away now, and says whether it found anything.
func (c *Core) judgeDetachLocked(d *Device, holders []simapi.Holder, when string) bool {
	bad := false
	if len(holders) > 0 {
		bad = true
		c.violateLocked(simapi.Violation{
			Kind: simapi.OpenAtDetach, Machine: d.Machine, Device: d.ID, Holders: holders,
			Detail: fmt.Sprintf("processes had %s (device number %s) open %s", d.UUID, d.Number, when),
		})
	}
	if d.OnBus {
		bad = true
		c.violateLocked(simapi.Violation{
			Kind: simapi.PresentAtDetach, Machine: d.Machine, Device: d.ID,
			Detail: fmt.Sprintf("%s was still on the node's PCI tree %s", d.Address(), when),
		})
	}
	return bad
}

func (c *Core) holders(d Device) ([]simapi.Holder, error) {
	if c.judge == nil {
		return nil, nil
	}
	h, err := c.judge.Holders(d.Number.Major, d.Number.Minor)
	if err != nil {
		return nil, fmt.Errorf("look for open files of device %s: %w", d.ID, err)
	}
	return h, nil
}

// finishDetach looks a second time: the device may have come back, or been opened, while the manager worked.
func (c *Core) finishDetach(op *operation, judged bool) error {
	c.mu.Lock()
	d, err := c.deviceLocked(op.Devices[0])
	if err != nil {
		c.mu.Unlock()
		return err
	}
	seen := *d
	c.mu.Unlock()
	holders, herr := c.holders(seen)
	if herr != nil {
		c.log.Error(herr, "Judge could not look", "device", seen.ID)
	}
	c.mu.Lock()
	outcome := "was gone already"
	switch {
	case d.Phase != simapi.PhaseDetaching || d.Machine != op.Machine:
	case op.Kept && d.FailDetach != "":
		d.Failure, d.FailDetach = d.FailDetach, ""
		c.setPhaseLocked(d, simapi.PhaseAttached)
		outcome = "failed: " + d.Failure
	default:
		if !judged {
			c.judgeDetachLocked(d, holders, "when the fabric took it away")
		}
		c.releaseLocked(d)
		outcome = "detached"
	}
	c.endLocked(op, outcome)
	err = c.commitLocked()
	c.mu.Unlock()
	c.changed(op.Machine)
	return err
}

// resumeLocked goes on with what a former run had accepted, and with links that had not come up yet.
func (c *Core) resumeLocked() {
	for _, op := range c.operations {
		if op.End != nil {
			continue
		}
		c.spawnLocked(func() {
			if !c.waitUntil(op.Due) {
				return
			}
			var err error
			if op.Kind == kindAttach {
				_, err = c.finishAttach(op)
			} else {
				err = c.finishDetach(op, op.Forced)
			}
			if err != nil {
				c.log.Error(err, "Operation of a former run", "operation", op.ID)
			}
		})
	}
	var waiting []*Device
	for _, d := range c.devices {
		if d.Phase == simapi.PhaseAttached && !d.Linked && !d.LinkDown {
			waiting = append(waiting, d)
		}
	}
	c.linkLaterLocked(waiting, c.clk.Now().Add(time.Duration(*c.timing.NodeDelay)))
}
