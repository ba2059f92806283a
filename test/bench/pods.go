// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// part is who a time is spent by.
type part string

// The parts of the way from Pending to Running.
const (
	byScheduler part = "scheduler"
	byFabric    part = "fabric"
	byAgent     part = "agent"
	byKubelet   part = "kubelet"
)

// mark is a moment on the way, and who has spent the time before it.
type mark struct {
	by part
	at time.Time
}

// scenario is one row of part b.
type scenario struct {
	name  string
	delay time.Duration
	pods  int
	// manager is how the manager takes calls for one machine: one at a time, or side by side.
	manager string
	cohdi   string // what CoHDI needs
	target  string
}

func scenarios() []scenario {
	const one = "47 / 62 / 67 s, 37 s at its shortest settings"
	return []scenario{
		{"one Pod, fabric 0 s", 0, 1, oneByOne, one, "< 7 s"},
		{"one Pod, fabric 2 s", 2 * time.Second, 1, oneByOne, one, "< 7 s"},
		{"four at once, fabric 5 s, calls side by side", 5 * time.Second, 4, sideBySide, "27 to 111 s", "< 12 s each"},
		{"four at once, fabric 5 s, one call per machine", 5 * time.Second, 4, oneByOne, "27 to 111 s", ""},
	}
}

// How the manager takes calls for one machine, in the chassis' words. The agents are told that it may be called at any
// time (fabrics[].exclusion); one that takes one call at a time has the others wait.
const (
	oneByOne   = "perMachine"
	sideBySide = "none"
)

// pods is part b.
func (b *bench) pods(ctx context.Context) error {
	b.say("\n## b. From a Pod's creation until it runs\n")
	load := newLoad()
	total := newTable("", "min / median / max", "target", "CoHDI")
	split := newTable("median", "scheduler", "fabric", "agent", "kubelet", "sum")
	for i, s := range scenarios() {
		var ways []podWay
		for n := range b.o.repeat {
			found, err := b.podsOnce(ctx, s, fmt.Sprintf("b-%d-%d", i, n))
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			ways = append(ways, found...)
		}
		addWays(total, s, ways)
		split.add(append([]string{s.name}, middle(ways)...)...)
	}
	if err := b.setManager(ctx, 0, oneByOne); err != nil {
		return err
	}
	b.say("%d times each. %s\n", b.o.repeat, load)
	b.say("%s", total)
	b.say("The Pod in the middle of each, whose parts add up:\n")
	b.say("%s", split)
	return nil
}

// podWay is what a Pod has waited for.
type podWay struct {
	parts map[part]time.Duration
	// machine is where its GPU was attached, asked when the manager was asked for it.
	machine string
	asked   time.Time
}

func (w podWay) total() (d time.Duration) {
	for _, v := range w.parts {
		d += v
	}
	return d
}

// addWays adds the rows of a scenario: all Pods, those that came first, second … on their machine, and the parts.
func addWays(t *table, s scenario, ways []podWay) {
	var took sample
	parts := map[part]sample{}
	for _, w := range ways {
		took = append(took, w.total())
		for p, d := range w.parts {
			parts[p] = append(parts[p], d)
		}
	}
	t.add(s.name, took.spread(), s.target, s.cohdi)
	if s.pods > 1 {
		for place, some := range byPlace(ways, s.pods) {
			t.add(fmt.Sprintf("  attached as number %d on its machine (%d Pods)", place+1, len(some)), some.spread())
		}
	}
	for _, p := range order() {
		t.add("  of which "+string(p), parts[p].spread())
	}
}

// byPlace sorts the Pods by how many of the same run, of n Pods each, were asked for before on the same machine.
func byPlace(ways []podWay, n int) []sample {
	var all []sample
	for run := range slices.Chunk(ways, n) {
		for _, w := range run {
			place := 0
			for _, other := range run {
				if other.machine == w.machine && other.asked.Before(w.asked) {
					place++
				}
			}
			for len(all) <= place {
				all = append(all, nil)
			}
			all[place] = append(all[place], w.total())
		}
	}
	return all
}

func order() []part { return []part{byScheduler, byFabric, byAgent, byKubelet} }

// middle is the way whose total is the median, as cells that add up.
func middle(ways []podWay) []string {
	ways = slices.Clone(ways)
	slices.SortFunc(ways, func(a, b podWay) int { return int(a.total() - b.total()) })
	w := ways[(len(ways)-1)/2]
	values := make([]time.Duration, 0, len(w.parts))
	for _, p := range order() {
		values = append(values, w.parts[p])
	}
	cells, total := make([]string, 0, len(values)+1), 0
	for _, tenths := range roundToSum(values, 100*time.Millisecond) {
		cells = append(cells, fmt.Sprintf("%.1f s", float64(tenths)/10))
		total += tenths
	}
	return append(cells, fmt.Sprintf("%.1f s", float64(total)/10))
}

// podsOnce runs the Pods of a scenario once.
func (b *bench) podsOnce(ctx context.Context, s scenario, prefix string) ([]podWay, error) {
	if err := b.setManager(ctx, s.delay, s.manager); err != nil {
		return nil, err
	}
	if _, err := b.audit.read(); err != nil { // what was before
		return nil, err
	}
	names := make([]string, s.pods)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%d", prefix, i)
		if err := b.createPod(ctx, names[i]); err != nil {
			return nil, err
		}
	}
	if err := b.world.wait(ctx, 2*time.Minute, func() error { return b.world.podsRun(names...) }); err != nil {
		return nil, err
	}
	calls, err := b.calm(ctx)
	if err != nil {
		return nil, err
	}
	state, err := b.sim.State(ctx)
	if err != nil {
		return nil, err
	}
	found, err := journeys(calls)
	if err != nil {
		return nil, err
	}
	if err = complete(found, len(names)); err != nil {
		return nil, err
	}
	ways := make([]podWay, 0, len(names))
	for _, name := range names {
		var w podWay
		if w, err = b.wayOf(name, calls, found, state); err != nil {
			return nil, err
		}
		ways = append(ways, w)
	}
	_, err = b.giveBack(ctx, names)
	return ways, err
}

// setManager sets how long the fabric takes for an attach, and how it takes calls.
func (b *bench) setManager(ctx context.Context, took time.Duration, calls string) error {
	delay := simapi.Duration(took)
	if err := b.sim.SetTiming(ctx, simapi.Timing{AttachDelay: &delay}); err != nil {
		return err
	}
	return b.sim.SetPolicies(ctx, simapi.Policies{Serialization: calls})
}

// wayOf puts together what the audit log and the chassis tell of a Pod.
func (b *bench) wayOf(pod string, calls []call, found []*journey, state *simapi.State) (w podWay, err error) {
	claim := b.world.claimOf(pod)
	if claim == nil {
		return w, fmt.Errorf("read the way of Pod %s: it has no claim", pod)
	}
	at := slices.IndexFunc(found, func(j *journey) bool { return j.claim == claim.Namespace+"/"+claim.Name })
	if at < 0 {
		return w, fmt.Errorf("the audit log does not show claim %s", claim.Name)
	}
	j := found[at]
	gpu, ok := state.Device(b.world.uuidOf(j.unit))
	if !ok || gpu.OnBusSince == nil {
		return w, fmt.Errorf("the chassis does not show the GPU of unit %s on a bus", j.unit)
	}
	ops := slices.DeleteFunc(slices.Clone(state.Operations), func(op simapi.Operation) bool {
		return op.Kind != "attach" || op.End == nil || op.Start.Before(j.allocated) || !slices.Contains(op.Devices, gpu.ID)
	})
	if len(ops) != 1 {
		return w, fmt.Errorf("the chassis shows %d attaches of %s for Pod %s, not one", len(ops), gpu.ID, pod)
	}
	created, bound := time.Time{}, time.Time{}
	for i := range calls {
		c := &calls[i]
		if c.ObjectRef.Resource != "pods" || c.ObjectRef.Name != pod || c.Verb != "create" || c.refused() {
			continue
		}
		switch c.ObjectRef.Subresource {
		case "":
			created = c.At
		case "binding":
			bound = c.At
		}
	}
	if created.IsZero() || bound.IsZero() {
		return w, fmt.Errorf("the audit log does not show that Pod %s was created and bound", pod)
	}
	w.machine, w.asked = ops[0].Machine, ops[0].Start
	w.parts = partsOf(created, []mark{
		{byScheduler, j.allocated},
		{byAgent, ops[0].Start},
		{byFabric, *ops[0].End},
		{byFabric, *gpu.OnBusSince},
		{byAgent, j.attached},
		{byScheduler, bound},
		{byKubelet, b.world.whenRunning(pod)},
	})
	return w, nil
}

// partsOf says who has spent how much; it adds up to the whole. What one source tells after another has told of
// what follows counts as at the same time.
func partsOf(begin time.Time, marks []mark) map[part]time.Duration {
	sum := map[part]time.Duration{}
	last := begin
	for _, m := range marks {
		at := m.at
		if at.Before(last) {
			at = last
		}
		sum[m.by] += at.Sub(last)
		last = at
	}
	return sum
}
