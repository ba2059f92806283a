// SPDX-License-Identifier: Apache-2.0

package fabrictest

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

// The chassis that every case starts with: two machines with nothing attached, and in the pool two
// devices of ModelA and one of ModelB. ModelNone is a word that the manager does not know.
const (
	MachineOne     device.Machine = "00000000-0000-4000-8000-000000000001"
	MachineTwo     device.Machine = "00000000-0000-4000-8000-000000000002"
	MachineUnknown device.Machine = "00000000-0000-4000-8000-00000000ffff"
	ModelA                        = "Model-A"
	ModelB                        = "Model-B"
	ModelNone                     = "Model-None"
)

// Fate is what becomes of the next changing call.
type Fate string

// The fates. Only those that a Control supports are tried.
const (
	// Busy: refused, the same call later may do.
	Busy Fate = "Busy"
	// LostBefore: the connection breaks before anything is done.
	LostBefore Fate = "LostBefore"
	// LostAfter: the work is done, then the connection breaks.
	LostAfter Fate = "LostAfter"
	// ErrorBefore and ErrorAfter: a server error with a body that is not the manager's, before or after
	// the work.
	ErrorBefore Fate = "ErrorBefore"
	ErrorAfter  Fate = "ErrorAfter"
	// Truncated: the work is done, the answer of success ends in the middle.
	Truncated Fate = "Truncated"
	// NoWords: the work is done, the answer of success says nothing.
	NoWords Fate = "NoWords"
	// CredentialsEnded: the session or token has ended just now; new ones are to be had.
	CredentialsEnded Fate = "CredentialsEnded"
	// Hang: no answer comes until the caller gives up; nothing is done.
	Hang Fate = "Hang"
	// WorkRefused: the call is taken, and the work fails: the hardware refuses it. WorkLostBefore and
	// WorkLostAfter: the work fails since the hardware does not answer, before or after it is done.
	WorkRefused    Fate = "WorkRefused"
	WorkLostBefore Fate = "WorkLostBefore"
	WorkLostAfter  Fate = "WorkLostAfter"
)

// Control is the chassis behind the manager.
type Control interface {
	// Attached are the fabric identities of what a machine really has, in order, when all work is done that the
	// manager has accepted.
	Attached(m device.Machine) []string
	// FreeCount is what is really free of a model.
	FreeCount(model string) int
	// Fate decides over the next changing call. It returns false if it cannot be done with this manager.
	Fate(f Fate) bool
	// FailReads makes reads about the machine fail (of all machines if empty) until it is called with false.
	FailReads(m device.Machine, fail bool)
	// Shut makes the manager refuse connections from now on.
	Shut()
	// RefuseLogin makes the manager refuse our credentials from now on, and those that it gave before.
	RefuseLogin()
}

// Clocked is a Control whose manager works by a clock of its own: the suite waits by it.
type Clocked interface {
	Clock() clock.WithTicker
}

// Open is a Control whose manager asks nobody who he is. What credentials do is not tried with it.
type Open interface {
	Control
	// Open is true if there are no credentials.
	Open() bool
}

// New makes a chassis with a manager in front of it, and a client; both end with the test.
type New func(t *testing.T) (fabric.Manager, Control)

// Run checks that a client does what fabric.Manager says.
func Run(t *testing.T, newManager New) {
	t.Helper()
	cases := []struct {
		name string
		run  func(s *suite)
	}{
		{"Machines/names_both", (*suite).machines},
		{"Attach/shows_in_list_and_count", (*suite).attach},
		{"Attach/two_machines_get_different_devices", (*suite).attachTwo},
		{"Attach/pool_is_empty", (*suite).attachEmptyPool},
		{"Attach/unknown_model", (*suite).attachUnknownModel},
		{"Attach/unknown_machine", (*suite).attachUnknownMachine},
		{"Detach/goes_back_to_the_pool", (*suite).detach},
		{"Detach/absent_device", (*suite).detachAbsent},
		{"Detach/without_device", (*suite).detachNothing},
		{"DetachAll/each_by_itself", (*suite).detachAll},
		{"DetachAll/answer_is_lost", (*suite).detachAllLost},
		{"DetachAll/one_part_fails", (*suite).detachAllPartly},
		{"ListAttached/one_failing_machine_hides_no_other", (*suite).listPartly},
		{"ListAttached/no_machine", (*suite).listNone},
		{"Free/one_failing_model_hides_no_other", (*suite).freePartly},
		{"Attach/one_at_a_time_for_all", (*suite).attachOneAtATime},
		{"Poll/done_stays_done", (*suite).pollDone},
		{"Poll/what_was_stored_is_enough", (*suite).pollStored},
		{"Poll/without_handle", (*suite).pollLost},
		{"Wait/returns_what_is_done", (*suite).waitDone},
		{"Shut/nothing_left_this_machine", (*suite).shut},
		{"RefuseLogin/is_definite", (*suite).refuseLogin},
		{"Context/ended_before_the_call", (*suite).contextEnded},
		{"Context/ends_during_the_call", (*suite).contextEnds},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			c.run(newSuite(t, newManager))
		})
	}
	for _, f := range fates() {
		t.Run("Fate/attach_"+string(f.fate), func(t *testing.T) {
			newSuite(t, newManager).attachFate(f)
		})
		t.Run("Fate/detach_"+string(f.fate), func(t *testing.T) {
			newSuite(t, newManager).detachFate(f)
		})
	}
}

type suite struct {
	*testing.T
	m   fabric.Manager
	c   Control
	clk clock.WithTicker
}

func newSuite(t *testing.T, newManager New) *suite {
	t.Helper()
	m, control := newManager(t)
	s := &suite{T: t, m: m, c: control, clk: clock.RealClock{}}
	if c, ok := control.(Clocked); ok {
		s.clk = c.Clock()
	}
	return s
}

// attachNow and detachNow return when the manager says that it is done.
func (s *suite) attachNow(in fabric.Intent) (fabric.Operation, error) {
	op, err := s.m.Attach(s.Context(), in)
	if err != nil {
		return op, err
	}
	return Wait(s.Context(), s.clk, s.m, op)
}

func (s *suite) detachNow(in fabric.Intent) error {
	op, err := s.m.Detach(s.Context(), in)
	if err != nil {
		return err
	}
	_, err = Wait(s.Context(), s.clk, s.m, op)
	return err
}

func (s *suite) intent(m device.Machine, model string) fabric.Intent {
	in := fabric.Intent{Machine: m, Model: model, Before: s.c.Attached(m)}
	if s.m.Capabilities().AddressableAttach {
		free, err := s.m.Free(s.Context(), []string{model})
		if err != nil && model != ModelNone {
			s.Fatalf("free %s: %v", model, err)
		}
		if len(free[model].Devices) > 0 {
			in.Device = free[model].Devices[0].ID
		}
	}
	return in
}

// soon tells whether what a manager says is right, at once or when its list has settled.
func (s *suite) soon(right func() bool) bool {
	s.Helper()
	const step = 20 * time.Millisecond
	for begun := s.clk.Now(); ; s.clk.Sleep(step) {
		if right() {
			return true
		}
		if s.clk.Since(begun) >= s.m.Capabilities().Settle {
			return false
		}
	}
}

// mustAttach attaches one and returns it.
func (s *suite) mustAttach(m device.Machine, model string) string {
	s.Helper()
	in := s.intent(m, model)
	_, err := s.attachNow(in)
	if err != nil {
		s.Fatalf("attach %s: %v", model, err)
	}
	for _, id := range s.c.Attached(m) {
		if !slices.Contains(in.Before, id) {
			s.agree(m) // nobody goes on before
			return id
		}
	}
	s.Fatalf("attach %s is done and the machine has only %v", model, s.c.Attached(m))
	return ""
}

// list reads one machine.
func (s *suite) list(m device.Machine) []device.OnFabric {
	s.Helper()
	attached, failed := s.m.ListAttached(s.Context(), []device.Machine{m})
	if err := failed[m]; err != nil {
		s.Fatalf("list machine %s: %v", m, err)
	}
	return attached[m]
}

// agree checks that the list shows what the chassis has.
func (s *suite) agree(m device.Machine) {
	s.Helper()
	var listed, want []string
	if !s.soon(func() bool {
		listed = nil
		for _, d := range s.list(m) {
			listed = append(listed, d.ID)
		}
		slices.Sort(listed)
		want = slices.Sorted(slices.Values(s.c.Attached(m)))
		return slices.Equal(listed, want)
	}) {
		s.Errorf("list of machine %s = %v, the chassis has %v", m, listed, want)
	}
}

// fault checks the class.
func (s *suite) fault(err error, classes ...device.FaultClass) {
	s.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok {
		s.Fatalf("error = %v (%T), want a *device.Fault", err, err)
	}
	if !slices.Contains(classes, f.Class) {
		s.Errorf("class = %s, want one of %v (%v)", f.Class, classes, err)
	}
	if f.Op == "" {
		s.Errorf("fault %v does not say what was tried", err)
	}
}

func (s *suite) machines() {
	got, err := s.m.Machines(s.Context())
	if err != nil {
		s.Fatal(err)
	}
	for _, want := range []device.Machine{MachineOne, MachineTwo} {
		if !slices.ContainsFunc(got, func(m fabric.Machine) bool { return m.ID == want && m.Fabric != "" }) {
			s.Errorf("machines = %+v, want %s with its fabric among them", got, want)
		}
	}
	if err := s.m.Health(s.Context()); err != nil {
		s.Errorf("health: %v", err)
	}
}

func (s *suite) count(model string) int {
	s.Helper()
	free, err := s.m.Free(s.Context(), []string{model})
	if err != nil {
		s.Fatal(err)
	}
	supply, ok := free[model]
	if !ok {
		s.Fatalf("free = %v, without %s and without an error", free, model)
	}
	if s.m.Capabilities().Free == fabric.FreeList && len(supply.Devices) != supply.Count {
		s.Errorf("free %s: %d devices listed, %d counted", model, len(supply.Devices), supply.Count)
	}
	return supply.Count
}

// counts checks how many of a model are said to be free.
func (s *suite) counts(model string, want int, when string) {
	s.Helper()
	n := 0
	if !s.soon(func() bool { n = s.count(model); return n == want }) {
		s.Errorf("free %s = %d %s, want %d", model, n, when, want)
	}
}

func (s *suite) attach() {
	s.counts(ModelA, 2, "at first")
	id := s.mustAttach(MachineOne, ModelA)
	s.counts(ModelA, 1, "after the attach")
	listed := s.list(MachineOne)
	if len(listed) != 1 {
		s.Fatalf("list = %+v, want one device", listed)
	}
	d := listed[0]
	// A manager that says nothing of health is quoted with that.
	healthy := d.Health == device.HealthOK || d.Health == device.HealthUnknown && d.HealthText != ""
	if d.ID != id || d.Machine != MachineOne || d.Model != ModelA || !healthy {
		s.Errorf("listed %+v, want %s of %s, healthy, on %s", d, id, ModelA, MachineOne)
	}
	if s.m.Capabilities().Identity && d.UUID == "" {
		s.Errorf("listed %+v, want a GPU UUID", d)
	}
	s.agree(MachineOne)
	s.agree(MachineTwo)
}

func (s *suite) attachTwo() {
	one, two := s.mustAttach(MachineOne, ModelA), s.mustAttach(MachineTwo, ModelA)
	if one == two {
		s.Errorf("both machines have %s", one)
	}
	s.agree(MachineOne)
	s.agree(MachineTwo)
}

func (s *suite) attachEmptyPool() {
	s.mustAttach(MachineOne, ModelB)
	_, err := s.attachNow(s.intent(MachineTwo, ModelB))
	s.fault(err, device.FaultNoCapacity)
	s.agree(MachineTwo)
	s.counts(ModelB, 0, "while the only one is attached")
}

func (s *suite) attachUnknownModel() {
	_, err := s.attachNow(s.intent(MachineOne, ModelNone))
	s.fault(err, device.FaultNoCapacity, device.FaultRejected, device.FaultUnsupported, device.FaultNotFound)
	s.agree(MachineOne)
}

func (s *suite) attachUnknownMachine() {
	_, err := s.attachNow(fabric.Intent{Machine: MachineUnknown, Model: ModelA})
	s.fault(err, device.FaultNotFound, device.FaultRejected)
	if n := s.c.FreeCount(ModelA); n != 2 {
		s.Errorf("free %s = %d after an attach to no machine, want 2", ModelA, n)
	}
}

func (s *suite) detach() {
	a := s.mustAttach(MachineOne, ModelA)
	b := s.mustAttach(MachineOne, ModelB)
	err := s.detachNow(fabric.Intent{Machine: MachineOne, Model: ModelA, Device: a, Before: s.c.Attached(MachineOne)})
	if err != nil {
		s.Fatal(err)
	}
	if got := s.c.Attached(MachineOne); !slices.Equal(got, []string{b}) {
		s.Errorf("machine has %v after the detach of %s, want %s alone", got, a, b)
	}
	s.agree(MachineOne)
	s.counts(ModelA, 2, "after the detach")
}

// detachAbsent: what the manager says differs; the list decides in either case.
func (s *suite) detachAbsent() {
	a := s.mustAttach(MachineOne, ModelA)
	for _, in := range []fabric.Intent{
		{Machine: MachineTwo, Model: ModelA, Device: a},
		{Machine: MachineOne, Model: ModelA, Device: "00000000-0000-4000-8000-0000000000ee"},
	} {
		if err := s.detachNow(in); err != nil {
			s.fault(err, device.FaultNotFound)
		}
	}
	if got := s.c.Attached(MachineOne); !slices.Equal(got, []string{a}) {
		s.Errorf("machine has %v, want %s untouched", got, a)
	}
	s.agree(MachineOne)
	s.agree(MachineTwo)
}

func (s *suite) detachNothing() {
	s.mustAttach(MachineOne, ModelA)
	err := s.detachNow(fabric.Intent{Machine: MachineOne, Model: ModelA})
	s.fault(err, device.FaultRejected, device.FaultUnsupported)
	s.agree(MachineOne)
}

// two attaches two devices to machine one, or skips the case where a call detaches one.
func (s *suite) two() (m fabric.Batcher, ins []fabric.Intent) {
	s.Helper()
	m, is := s.m.(fabric.Batcher)
	if batch := s.m.Capabilities().Batch; is != (batch > 1) {
		s.Fatalf("it takes several detaches in one call: %v, and says %d", is, batch)
	}
	if !is {
		s.Skip("this manager detaches one device by a call")
	}
	for _, model := range []string{ModelA, ModelB} {
		ins = append(ins, fabric.Intent{Machine: MachineOne, Model: model, Device: s.mustAttach(MachineOne, model)})
	}
	return m, ins
}

// ends waits for each and returns how it ended.
func (s *suite) ends(begun []fabric.Begun) []error {
	s.Helper()
	errs := make([]error, len(begun))
	for i, b := range begun {
		if errs[i] = b.Err; b.Err == nil {
			_, errs[i] = Wait(s.Context(), s.clk, s.m, b.Operation)
		}
	}
	return errs
}

func (s *suite) detachAll() {
	m, ins := s.two()
	absent := fabric.Intent{Machine: MachineOne, Model: ModelA, Device: "00000000-0000-4000-8000-0000000000ee"}
	errs := s.ends(m.DetachAll(s.Context(), []fabric.Intent{ins[0], absent, ins[1]}))
	if len(errs) != 3 || errs[0] != nil || errs[2] != nil {
		s.Fatalf("detached %v, want an error of the second alone", errs)
	}
	s.fault(errs[1], device.FaultNotFound)
	if got := s.c.Attached(MachineOne); len(got) > 0 {
		s.Errorf("machine has %v", got)
	}
	s.agree(MachineOne)
	s.counts(ModelA, 2, "after the detach")
}

// detachAllLost: one answer is lost, and the outcome of all is unknown, unless the client finds it out.
func (s *suite) detachAllLost() {
	m, ins := s.two()
	s.meet(LostAfter)
	for _, err := range s.ends(m.DetachAll(s.Context(), ins)) {
		if err != nil {
			s.fault(err, device.FaultUnknown)
		}
	}
	if got := s.c.Attached(MachineOne); len(got) > 0 {
		s.Errorf("machine has %v", got)
	}
	s.agree(MachineOne)
}

// detachAllPartly: the work on one of them fails, whichever that is.
func (s *suite) detachAllPartly() {
	m, ins := s.two()
	s.meet(WorkRefused)
	var stay []string
	for i, err := range s.ends(m.DetachAll(s.Context(), ins)) {
		if err != nil {
			s.fault(err, device.FaultRejected, device.FaultConflict, device.FaultNotFound)
			stay = append(stay, ins[i].Device)
		}
	}
	if got := s.c.Attached(MachineOne); len(stay) != 1 || !slices.Equal(got, stay) {
		s.Errorf("machine has %v, and %v are said to stay, want one", got, stay)
	}
	s.agree(MachineOne)
}

func (s *suite) listPartly() {
	a := s.mustAttach(MachineTwo, ModelA)
	s.c.FailReads(MachineOne, true)
	attached, failed := s.m.ListAttached(s.Context(), []device.Machine{MachineOne, MachineTwo, MachineUnknown})
	if len(attached) != 1 || len(attached[MachineTwo]) != 1 || attached[MachineTwo][0].ID != a {
		s.Errorf("attached = %v, want only machine two with %s", attached, a)
	}
	if len(failed) != 2 {
		s.Fatalf("failed = %v, want machine one and the unknown one", failed)
	}
	s.fault(failed[MachineUnknown], device.FaultNotFound)
	s.fault(failed[MachineOne], device.FaultUnknown, device.FaultUnreachable, device.FaultBusy)
	s.c.FailReads(MachineOne, false)
	s.agree(MachineOne)
}

func (s *suite) listNone() {
	attached, failed := s.m.ListAttached(s.Context(), nil)
	if len(attached) != 0 || len(failed) != 0 {
		s.Errorf("list of no machine = %v, %v", attached, failed)
	}
	got := s.list(MachineOne)
	if len(got) != 0 {
		s.Errorf("list of a machine without devices = %v", got)
	}
}

func (s *suite) freePartly() {
	free, err := s.m.Free(s.Context(), []string{ModelNone, ModelB})
	if free[ModelB].Count != 1 {
		s.Errorf("free = %v, want one %s", free, ModelB)
	}
	if n, ok := free[ModelNone]; ok && n.Count != 0 {
		s.Errorf("free = %v of a model that does not exist", free)
	}
	if _, ok := free[ModelNone]; !ok {
		s.fault(err, device.FaultNotFound, device.FaultRejected, device.FaultUnsupported)
	}
	s.c.FailReads("", true)
	free, err = s.m.Free(s.Context(), []string{ModelA, ModelB})
	if len(free) != 0 {
		s.Errorf("free = %v while the manager does not say", free)
	}
	s.fault(err, device.FaultUnknown, device.FaultUnreachable, device.FaultBusy)
}

func (s *suite) pollDone() {
	op, err := s.attachNow(s.intent(MachineOne, ModelA))
	if err != nil {
		s.Fatal(err)
	}
	for range 3 {
		if op, err = s.m.Poll(s.Context(), op); err != nil || op.State != fabric.Done {
			s.Fatalf("poll = %+v, %v, want Done", op, err)
		}
	}
	if n := len(s.c.Attached(MachineOne)); n != 1 {
		s.Errorf("%d devices after one attach and polls", n)
	}
}

func (s *suite) waitDone() {
	op, err := s.attachNow(s.intent(MachineOne, ModelA))
	if err != nil || op.State != fabric.Done || op.Kind != fabric.KindAttach {
		s.Fatalf("wait = %+v, %v, want a done attach", op, err)
	}
	// What the answer names is a hint, but never somebody else's.
	for _, d := range op.Devices {
		if !slices.Contains(s.c.Attached(MachineOne), d.ID) {
			s.Errorf("the answer names %s, the machine has %v", d.ID, s.c.Attached(MachineOne))
		}
	}
}

// attachOneAtATime: where one call occupies all of the manager, another one is told so, and nothing comes of it.
func (s *suite) attachOneAtATime() {
	if c := s.m.Capabilities(); c.Exclusion != fabric.ExclusionGlobal || !c.Asynchronous {
		s.Skip("this manager takes calls side by side, or makes them wait")
	}
	first, second := s.intent(MachineOne, ModelA), s.intent(MachineTwo, ModelB)
	op, err := s.m.Attach(s.Context(), first)
	if err != nil || op.State != fabric.Pending || op.Handle == "" {
		s.Fatalf("attach = %+v, %v, want it pending with a handle", op, err)
	}
	other, err := s.m.Attach(s.Context(), second)
	if err == nil {
		// So slow a machine, that the first one is over?
		if again, polled := s.m.Poll(s.Context(), op); polled != nil || again.State != fabric.Done {
			s.Fatalf("a second call was taken while the first one was %+v, %v", again, polled)
		}
	} else {
		s.fault(err, device.FaultBusy)
	}
	if _, err = Wait(s.Context(), s.clk, s.m, op); err != nil {
		s.Fatal(err)
	}
	if other.State == "" {
		if other, err = s.m.Attach(s.Context(), second); err != nil {
			s.Fatalf("attach when the first one is over: %v", err)
		}
	}
	if _, err = Wait(s.Context(), s.clk, s.m, other); err != nil {
		s.Fatal(err)
	}
	if a, b := s.c.Attached(MachineOne), s.c.Attached(MachineTwo); len(a) != 1 || len(b) != 1 {
		s.Errorf("the machines have %v and %v, want one device each", a, b)
	}
	s.agree(MachineOne)
	s.agree(MachineTwo)
}

// pollStored: what a lease can keep is enough for another process.
func (s *suite) pollStored() {
	if !s.m.Capabilities().Asynchronous {
		s.Skip("this manager has no pending operations")
	}
	in := s.intent(MachineOne, ModelA)
	op, err := s.m.Attach(s.Context(), in)
	if err != nil {
		s.Fatal(err)
	}
	stored := fabric.Operation{
		Kind: op.Kind, State: fabric.Pending, Handle: op.Handle, Intent: fabric.Intent{Machine: in.Machine, Model: in.Model, Device: in.Device},
	}
	if op, err = s.m.Poll(s.Context(), stored); err != nil || op.State == fabric.Pending && op.PollAfter <= 0 {
		s.Errorf("poll of what was stored = %+v, %v, want it to say when to look again", op, err)
	}
	if stored, err = Wait(s.Context(), s.clk, s.m, stored); err != nil || stored.State != fabric.Done {
		s.Fatalf("wait for what was stored = %+v, %v, want Done", stored, err)
	}
	if n := len(s.c.Attached(MachineOne)); n != 1 {
		s.Errorf("%d devices, want 1", n)
	}
}

// pollLost: a process that died before it stored the handle finds the work by what it intended.
func (s *suite) pollLost() {
	if c := s.m.Capabilities(); !c.Asynchronous || !c.AddressableAttach {
		s.Skip("this manager's work cannot be told by what is intended")
	}
	in := s.intent(MachineOne, ModelA)
	lost := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Intent: in}
	_, err := s.m.Poll(s.Context(), lost)
	s.fault(err, device.FaultUnknown)
	if _, err = s.m.Attach(s.Context(), in); err != nil {
		s.Fatal(err)
	}
	op, err := s.m.Poll(s.Context(), lost)
	if err != nil || op.Handle == "" && op.State != fabric.Done {
		s.Fatalf("poll = %+v, %v, want the operation with its handle", op, err)
	}
	if _, err = Wait(s.Context(), s.clk, s.m, op); err != nil {
		s.Fatal(err)
	}
	if n := len(s.c.Attached(MachineOne)); n != 1 {
		s.Errorf("%d devices, want 1", n)
	}
}

func (s *suite) shut() {
	s.mustAttach(MachineOne, ModelA) // credentials are there
	s.c.Shut()
	_, err := s.m.Attach(s.Context(), fabric.Intent{Machine: MachineOne, Model: ModelA, Before: s.c.Attached(MachineOne)})
	s.fault(err, device.FaultUnreachable)
	if err := s.m.Health(s.Context()); err == nil {
		s.Error("a manager that is shut is healthy")
	}
	_, failed := s.m.ListAttached(s.Context(), []device.Machine{MachineOne})
	s.fault(failed[MachineOne], device.FaultUnreachable)
}

func (s *suite) refuseLogin() {
	if o, ok := s.c.(Open); ok && o.Open() {
		s.Skip("this manager asks for no credentials")
	}
	s.mustAttach(MachineOne, ModelA)
	s.c.RefuseLogin()
	_, err := s.m.Attach(s.Context(), fabric.Intent{Machine: MachineOne, Model: ModelA, Before: s.c.Attached(MachineOne)})
	s.fault(err, device.FaultUnauthorized)
	s.fault(s.m.Health(s.Context()), device.FaultUnauthorized)
	if n := len(s.c.Attached(MachineOne)); n != 1 {
		s.Errorf("%d devices, want the one from before", n)
	}
}

func (s *suite) contextEnded() {
	ctx, cancel := context.WithCancel(s.Context())
	cancel()
	_, err := s.m.Attach(ctx, s.intent(MachineOne, ModelA))
	s.fault(err, device.FaultUnreachable, device.FaultUnknown)
	if n := len(s.c.Attached(MachineOne)); n != 0 {
		s.Errorf("%d devices after a call that was over before it began", n)
	}
}

func (s *suite) contextEnds() {
	s.mustAttach(MachineTwo, ModelB) // credentials and connection are there
	if !s.c.Fate(Hang) {
		s.Skip("this manager cannot be made to hang")
	}
	ctx, cancel := context.WithCancel(s.Context())
	in := s.intent(MachineOne, ModelA)
	ended := make(chan error, 1)
	go func() {
		_, err := s.m.Attach(ctx, in)
		ended <- err
	}()
	cancel()
	// Whether the call was on its way by then is a matter of time; it must end in any case.
	s.fault(<-ended, device.FaultUnknown, device.FaultUnreachable)
}

// needsWork: the fate is one of the work that goes on after the call.
func (f Fate) needsWork() bool { return f == WorkRefused || f == WorkLostBefore || f == WorkLostAfter }

// meet brings the fate about, or skips the case.
func (s *suite) meet(f Fate) {
	s.Helper()
	if f.needsWork() && !s.m.Capabilities().Asynchronous || !s.c.Fate(f) {
		s.Skipf("%s cannot be done with this manager", f)
	}
}

// fateCase is what a fate means for the caller.
type fateCase struct {
	fate Fate
	// classes of the fault; none means success. Where the answer was lost and the work is done, a client that
	// finds that out may say so.
	classes []device.FaultClass
	effect  bool
}

func fates() []fateCase {
	unknown := []device.FaultClass{device.FaultUnknown}
	return []fateCase{
		{Busy, []device.FaultClass{device.FaultBusy}, false},
		{LostBefore, unknown, false},
		{LostAfter, unknown, true},
		{ErrorBefore, unknown, false},
		{ErrorAfter, unknown, true},
		{Truncated, unknown, true},
		{NoWords, nil, true},
		{CredentialsEnded, nil, true},
		{WorkRefused, []device.FaultClass{device.FaultRejected, device.FaultNoCapacity, device.FaultConflict, device.FaultNotFound}, false},
		{WorkLostBefore, unknown, false},
		{WorkLostAfter, unknown, true},
	}
}

func (s *suite) attachFate(f fateCase) {
	s.mustAttach(MachineTwo, ModelB) // credentials and connection are there
	in := s.intent(MachineOne, ModelA)
	s.meet(f.fate)
	_, err := s.attachNow(in)
	want := 0
	if f.effect {
		want = 1
	}
	s.checkFate(f, err, want)
}

func (s *suite) detachFate(f fateCase) {
	id := s.mustAttach(MachineOne, ModelA)
	s.meet(f.fate)
	err := s.detachNow(fabric.Intent{Machine: MachineOne, Model: ModelA, Device: id, Before: []string{id}})
	want := 1
	if f.effect {
		want = 0
	}
	s.checkFate(f, err, want)
}

func (s *suite) checkFate(f fateCase, err error, want int) {
	s.Helper()
	if f.classes == nil && err != nil {
		s.Errorf("error = %v, want success", err)
	}
	if f.classes != nil && (err != nil || !f.effect || !s.m.Capabilities().Asynchronous) {
		s.fault(err, f.classes...)
	}
	if got := s.c.Attached(MachineOne); len(got) != want {
		s.Errorf("the machine has %v, want %d devices: the call was made more than once, or not at all", got, want)
	}
	s.agree(MachineOne)
}
