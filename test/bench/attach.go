// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// quiet is how long nothing may be written before a phase of a measurement counts as over: events and the pool
// follow what they tell of.
const quiet = 2 * time.Second

// way is what was written on the way to or back from the nodes.
type way struct {
	writes  map[string]int
	refused int
	verbs   map[string]int
	count   int // attaches or detaches
}

func (w *way) add(calls []call, count int) {
	writes, refused := countWrites(calls)
	if w.writes == nil {
		w.writes, w.verbs = map[string]int{}, map[string]int{}
	}
	for k, n := range writes {
		w.writes[k] += n
	}
	for k, n := range countVerbs(calls) {
		w.verbs[k] += n
	}
	w.refused += refused
	w.count += count
}

// per is the average, as a cell.
func (w *way) per(n int) string {
	return strconv.FormatFloat(float64(n)/float64(max(w.count, 1)), 'f', 2, 64)
}

// attaches is part a: rounds in which every GPU is attached for a Pod, one after the other, and then all go back.
func (b *bench) attaches(ctx context.Context) error {
	state, err := b.sim.State(ctx)
	if err != nil {
		return err
	}
	if _, err = b.audit.read(); err != nil { // what was before
		return err
	}
	load := newLoad()
	var there, back way
	var all []*journey
	for round := 0; len(all) < b.o.attaches; round++ {
		names := make([]string, min(len(state.Devices), b.o.attaches-len(all)))
		for i := range names {
			names[i] = fmt.Sprintf("a-%d-%d", round, i)
		}
		var found []*journey
		if found, err = b.round(ctx, names, &there, &back); err != nil {
			return err
		}
		all = append(all, found...)
	}
	after, err := b.sim.State(ctx)
	if err != nil {
		return err
	}
	if attached := len(after.Operations) - len(state.Operations); attached != 2*len(all) {
		return fmt.Errorf("the chassis has done %d attaches and detaches, the audit log shows %d claims that were told", attached, len(all))
	}
	b.reportAttaches(all, chassisWork(after.Operations[len(state.Operations):]), &there, &back, load.String())
	return nil
}

// chassisWork is how long the chassis itself has taken for each attach.
func chassisWork(ops []simapi.Operation) (took sample) {
	for i := range ops {
		if ops[i].Kind == "attach" && ops[i].End != nil {
			took = append(took, ops[i].End.Sub(ops[i].Start))
		}
	}
	return took
}

// round is there and back for these Pods.
func (b *bench) round(ctx context.Context, names []string, there, back *way) ([]*journey, error) {
	calls, err := b.attachEach(ctx, names)
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
	there.add(calls, len(names))
	if calls, err = b.giveBack(ctx, names); err != nil {
		return nil, err
	}
	back.add(calls, len(names))
	return found, nil
}

// complete makes sure that the audit log shows each claim's whole way.
func complete(found []*journey, want int) error {
	units := sets.New[string]()
	for _, j := range found {
		if j.attached.IsZero() {
			return fmt.Errorf("the audit log does not show that claim %s was told", j.claim)
		}
		if len(j.leased) == 0 {
			return fmt.Errorf("the audit log shows that claim %s was told, and no device lease for it", j.claim)
		}
		units.Insert(string(j.unit))
	}
	if len(found) != want || len(units) != want {
		return fmt.Errorf("the audit log shows %d claims on %d units, %d Pods were made", len(found), len(units), want)
	}
	return nil
}

// attachEach runs the Pods, each once the one before it runs: its containers that start would keep the agents from the
// cores, and part b shows that. It returns what was asked of the API server until all was calm.
func (b *bench) attachEach(ctx context.Context, names []string) ([]call, error) {
	for _, name := range names {
		if err := b.createPod(ctx, name); err != nil {
			return nil, err
		}
		if err := b.world.wait(ctx, time.Minute, func() error { return b.world.podsRun(name) }); err != nil {
			return nil, err
		}
	}
	return b.calm(ctx)
}

// giveBack ends the Pods and waits until all GPUs are back in the pool.
func (b *bench) giveBack(ctx context.Context, names []string) ([]call, error) {
	for _, name := range names {
		if err := b.deletePod(ctx, name); err != nil {
			return nil, err
		}
	}
	if err := b.world.wait(ctx, time.Minute, b.world.settled); err != nil {
		return nil, err
	}
	return b.calm(ctx)
}

// calm reads the audit log until no agent has written anything but its leader's renewal for a while.
func (b *bench) calm(ctx context.Context) ([]call, error) {
	var all []call
	last := time.Now()
	for time.Since(last) < quiet {
		if err := pause(ctx, quiet/4); err != nil {
			return nil, err
		}
		calls, err := b.audit.read()
		if err != nil {
			return nil, err
		}
		all = append(all, calls...)
		for i := range calls {
			if c := &calls[i]; c.byAgent() && c.writes() && c.object() != electionLease && c.At.After(last) {
				last = c.At
			}
		}
	}
	return all, nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

func (b *bench) reportAttaches(all []*journey, chassis sample, there, back *way, load string) {
	var took sample
	steps := map[int]sample{}
	for _, j := range all {
		took = append(took, j.took())
		last := j.allocated
		for i, at := range append(j.leased, j.attached) {
			steps[i] = append(steps[i], at.Sub(last))
			last = at
		}
	}
	b.say("\n## a. One attach\n")
	b.say("%d attaches, one after the other, by a fabric that takes no time; both ends as the API server's audit log has them. %s\n", len(all), load)
	t := newTable("from the allocation's write to the condition's", "p50", "p90", "p99", "most")
	t.add(append([]string{"cohdi-agent"}, took.quantiles()...)...)
	t.add("target", "< 100 ms", "", "< 400 ms", "")
	b.say("%s", t)
	const deviceStored = "→ fabric device stored"
	names := []string{"allocated → lease created (leader)", "→ Attaching stored (holder)", deviceStored, "→ Attached stored", "→ condition written"}
	t = newTable("of which", "p50", "p90", "p99", "most")
	for i := range len(steps) {
		name := fmt.Sprintf("→ write %d", i+1)
		if len(steps) == len(names) {
			name = names[i]
		}
		t.add(append([]string{name}, steps[i].quantiles()...)...)
		if name == deviceStored {
			t.add(append([]string{"  of which the chassis, from request to answer"}, chassis.quantiles()...)...)
		}
	}
	b.say("%s", t)
	t = newTable("the agents' writes", "per attach", "per detach", "target")
	for _, object := range objects() {
		if object == electionLease {
			continue // by the clock, not by what is done
		}
		target := map[string]string{deviceLease: "at most 4 per attach", claimCondition: "1 per attach"}[object]
		t.add(object, there.per(there.writes[object]), back.per(back.writes[object]), target)
	}
	t.add("refused, of all these", there.per(there.refused), back.per(back.refused), "")
	b.say("%s", t)
	t = newTable("all that the agents ask of the API server", "per attach", "per detach")
	for _, verb := range verbs() {
		t.add(verb, there.per(there.verbs[verb]), back.per(back.verbs[verb]))
	}
	b.say("%s", t)
}
