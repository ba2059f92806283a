// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// choice is something that may happen, and how often against the others.
type choice struct {
	weight int
	make   func(*plan) string
}

// plan writes a random script.
type plan struct {
	r     *rand.Rand
	nodes int
	pods  []string
	made  int
	// models are those that Pods choose from, none if there is only one.
	models   []string
	coolDown time.Duration
	// stories are those that its manager makes worth telling.
	stories []choice
}

// RandomScript makes the script of a seed.
func RandomScript(seed uint64) Script {
	p := &plan{r: rand.New(rand.NewPCG(seed, 7)), nodes: 1}
	p.nodes += p.r.IntN(3)
	coolDowns := []time.Duration{10 * time.Second, 20 * time.Second, time.Minute, 5 * time.Minute}
	p.coolDown = coolDowns[p.r.IntN(len(coolDowns))]
	gpus := 1 + p.r.IntN(4)
	if p.one(60) {
		gpus += pool.SliceDevices // more than one slice holds
	}
	most, set := p.r.IntN(3), ""
	if p.one(6) {
		set += " min=1"
	}
	if p.one(3) {
		set += " parallel"
	}
	if p.one(2) {
		manner := []string{"totals", "totals", "totals", "tasks", "tasks", "tasks", "jobs", "batch", "batch"}[p.r.IntN(9)]
		set += " manner=" + manner
		if manners()[manner].batch > 1 {
			p.stories = []choice{{50, (*plan).backAtOnce}}
			gpus, most = gpus+2, 0 // room for several on a node
		}
	}
	if p.one(8) {
		set += " adopt"
	}
	if p.one(12) {
		set += fmt.Sprintf(" slots=%d", 1+p.r.IntN(3))
	}
	if p.one(4) {
		p.models = []string{string(gpuModel), string(otherModel)}
		set += fmt.Sprintf(" %s=%d", otherModel, 1+p.r.IntN(2))
		if p.one(3) {
			set += " exclude"
		}
	}
	lines := []string{fmt.Sprintf("cluster seed=%d nodes=%d gpus=%d max=%d cooldown=%s", seed, p.nodes, gpus, most, p.coolDown) + set}
	if p.one(12) {
		lines = append(lines, "foreign "+p.node())
	}
	for range p.r.IntN(5) {
		lines = append(lines, p.pod())
	}
	lines = append(lines, "run 50s")
	for range 6 + p.r.IntN(30) {
		lines = append(lines, p.choose(slices.Concat(choices(), stories(), p.stories)), "run "+p.pause())
	}
	script, err := ParseScript(strings.Join(lines, "\n"))
	if err != nil {
		panic(err)
	}
	return script
}

// choose makes one of the choices.
func (p *plan) choose(all []choice) string {
	total := 0
	for _, c := range all {
		total += c.weight
	}
	n := p.r.IntN(total)
	for _, c := range all {
		if n -= c.weight; n < 0 {
			return c.make(p)
		}
	}
	return ""
}

func (p *plan) one(in int) bool { return p.r.IntN(in) == 0 }

func (p *plan) node() string { return fmt.Sprintf("n%d", 1+p.r.IntN(p.nodes)) }

func (p *plan) upTo(most time.Duration) string {
	return (time.Second + time.Duration(p.r.Int64N(int64(most)))).Truncate(100 * time.Millisecond).String()
}

// pause is mostly short: what happens at the same time is what goes wrong.
func (p *plan) pause() string {
	switch p.r.IntN(6) {
	case 0:
		return "100ms"
	case 1, 2:
		return p.upTo(5 * time.Second)
	case 3, 4:
		return p.upTo(30 * time.Second)
	}
	return p.upTo(3 * time.Minute)
}

// newPod is a Pod of a new name.
func (p *plan) newPod() string {
	p.made++
	name := fmt.Sprintf("p%d", p.made)
	p.pods = append(p.pods, name)
	text := "pod " + name
	if len(p.models) > 0 {
		text += " model=" + p.models[p.r.IntN(len(p.models))]
	}
	return text
}

func (p *plan) pod() string {
	text := p.newPod()
	if p.one(20) {
		return text + " admin"
	}
	if p.one(5) {
		text += " devices=2"
	}
	if p.one(6) {
		text += " claims=2"
	}
	if p.one(3) {
		text += " node=" + p.node()
	}
	return text
}

func (p *plan) deletion() string {
	if len(p.pods) == 0 {
		return p.pod()
	}
	text := "delete " + p.pods[p.r.IntN(len(p.pods))]
	if p.one(2) {
		text += " grace=" + p.upTo(30*time.Second)
	}
	if p.one(2) {
		text += " force"
	}
	return text
}

// calls are the beginnings of what a process asks of the world.
func (p *plan) call() string {
	all := []string{
		"fabric attach", "fabric attach", "fabric attach", "fabric detach", "fabric detach", "fabric poll", "fabric poll", "fabric list", "fabric count",
		"api create lease", "api delete lease", "api get lease", "api list leases", "api get claim", "api list claims", "api apply claim",
		"api write slice", "api label node", "api renew election", "api acquire election", "api get election",
		"host observe", "host rescan", "host drain", "host drain", "host drain", "host remove", "host remove", "host holders", "host bind", "host discover", "host find", "host edits",
	}
	if n := p.r.IntN(len(all) + 15); n < len(all) {
		return all[n]
	}
	if p.one(3) {
		return "api update lease"
	}
	phases := device.Phases()
	return fmt.Sprintf("api update lease device-%s-%s-%d %s", fabricID, gpuModel, p.r.IntN(2), phases[p.r.IntN(len(phases))])
}

func (p *plan) fault() string {
	text := "fault "
	if p.one(3) {
		text += p.node() + " "
	}
	all := modes()
	m, call := all[p.r.IntN(len(all))], p.call()
	if m == twice && call == "fabric attach" {
		m = lostReply // no manager carries out one call to attach two times
	}
	return text + string(m) + " " + call
}

func choices() []choice {
	onNode := func(verb string) func(*plan) string { return func(p *plan) string { return verb + " " + p.node() } }
	forAWhile := func(verb string, most time.Duration) func(*plan) string {
		return func(p *plan) string { return verb + " " + p.node() + " " + p.upTo(most) }
	}
	nth := func(verb string) func(*plan) string {
		return func(p *plan) string { return verb + " " + strconv.Itoa(p.r.IntN(4)) }
	}
	return []choice{
		{30, (*plan).pod},
		{24, (*plan).deletion},
		{36, (*plan).fault},
		{6, onNode("crash")},
		{3, onNode("update")},
		{3, onNode("recreate")},
		{2, onNode("reboot")},
		{1, onNode("lose")},
		{4, func(p *plan) string { return "pause leader " + p.upTo(time.Minute) }},
		{2, forAWhile("pause", time.Minute)},
		{1, forAWhile("pause", 5*time.Minute)},
		{2, forAWhile("restart", 20*time.Second)},
		{1, forAWhile("unmodel", 2*time.Minute)},
		{1, onNode("reclaim")},
		{1, onNode("unsee")},
		{3, forAWhile("away", 3*time.Minute)},
		{3, forAWhile("drop", 10*time.Second)},
		{2, forAWhile("slow", 15*time.Second)},
		{6, func(p *plan) string { return "slow leader " + p.upTo(20*time.Second) }},
		{5, forAWhile("open", 15*time.Minute)},
		{4, func(p *plan) string { return "unbind " + strconv.Itoa(p.r.IntN(4)) }},
		{2, func(p *plan) string {
			return fmt.Sprintf("clock %s %ds", p.node(), p.r.IntN(120)-60)
		}},
		{3, nth("vanish")},
		{2, nth("critical")},
		{2, nth("unlease")},
		{4, func(p *plan) string { return fmt.Sprintf("steal %d %s", 1+p.r.IntN(3), p.upTo(3*time.Minute)) }},
		{2, func(p *plan) string { return "down " + p.upTo(time.Minute) }},
		{1, func(p *plan) string { return "down " + p.upTo(6*time.Minute) }},
		{1, func(p *plan) string { return "busy " + p.upTo(6*time.Minute) }},
		{1, func(*plan) string { return "restart-manager" }},
		{1, func(p *plan) string { return fmt.Sprintf("unnamed %d %s", p.r.IntN(4), p.upTo(3*time.Minute)) }},
		{1, func(p *plan) string { return fmt.Sprintf("damage %d %s", p.r.IntN(4), p.upTo(2*time.Minute)) }},
		{1, func(p *plan) string { return fmt.Sprintf("unlease %d force", p.r.IntN(4)) }},
	}
}

// stories are several commands that together hit what single ones, drawn apart, hardly ever do.
func stories() []choice {
	return []choice{
		{20, (*plan).moment},
		{3, (*plan).handOver},
		{3, (*plan).slowRelease},
		{2, (*plan).anew},
		{2, (*plan).stale},
		{2, (*plan).callBack},
		{2, (*plan).openLate},
		{1, (*plan).changedBefore},
		{1, (*plan).keptBefore},
	}
}

// moment is a choice that comes just when something is noted.
func (p *plan) moment() string {
	all := []string{"Assigned", "Attaching_for", "Attaching_res", "Attached_res", "Releasing", "Failed", "drained", "removed", "attached_res", "detached", "prepared", "runs", "idle", "back_from"}
	text := "run until=" + all[p.r.IntN(len(all))] + " most=" + p.upTo(time.Minute) + "\n"
	if p.one(3) {
		text += "run " + p.shortly() + "\n"
	}
	return text + p.choose(choices())
}

func (p *plan) shortly() string { return strconv.Itoa(10+p.r.IntN(700)) + "ms" }

// handOver: a leader follows another just after an allocation, and its first list may be older than that.
func (p *plan) handOver() string {
	return p.newPod() + "\nrun until=Assigned most=10s\nrun " + p.upTo(4*time.Second) + "\nupdate leader"
}

// slowRelease: a unit's cool-down ends while the leader does not see that a claim was given it. The claim's
// other device keeps it from being prepared meanwhile.
func (p *plan) slowRelease() string {
	first := p.newPod()
	return first + "\nrun until=runs most=40s\ndelete " + strings.Fields(first)[1] + "\nrun until=idle most=40s\nrun " +
		max(p.coolDown-time.Duration(1+p.r.IntN(8))*time.Second, time.Second).String() + "\nslow leader 25s\n" + p.newPod() + " devices=2"
}

// anew: a claim is allocated anew, and the leader does not see that it was not for a moment.
func (p *plan) anew() string {
	return p.newPod() + "\nrun until=Attaching most=10s\nslow leader 25s\nunbind " + strconv.Itoa(p.r.IntN(4))
}

// stale: what was decided is carried out late, since the host does not answer; meanwhile it is not so any more.
func (p *plan) stale() string {
	return p.newPod() + "\nrun until=Attaching_for most=10s\nfault hang host observe\n" + p.choose(choices())
}

// callBack: a claim is given a unit that is about to leave the bus, and the driver does not take it back at once.
func (p *plan) callBack() string {
	text := "run until=drained most=2m\nfault error host remove\n" + strings.Repeat("fault error host undrain\n", p.r.IntN(3)) + p.newPod()
	if p.one(2) {
		text += "\nrun until=Attached_res most=20s\n" + p.choose(choices())
	}
	return text
}

// openLate: a process opens a GPU that is on its way out.
func (p *plan) openLate() string {
	text := "run until=Releasing most=2m\nrun " + p.shortly() + "\n"
	if p.one(2) {
		text += "fault error host undrain\n"
	}
	return text + "open " + p.node() + " " + p.upTo(2*time.Minute)
}

// changedBefore: what others attached goes between the look and the call.
func (p *plan) changedBefore() string {
	node := p.node()
	return "foreign " + node + "\nrun 15s\n" + p.newPod() + " node=" + node + "\nrun until=Attaching_for most=10s\nfault hang host observe\nreclaim " + node
}

// keptBefore: the node is to keep a unit that a claim was just given on another.
func (p *plan) keptBefore() string {
	return "slow leader 10s\n" + p.newPod() + " node=" + p.node() + "\nconfig min=1\nrun " + p.upTo(2*time.Minute) + "\nconfig min=0"
}

// backAtOnce: several units of a node go back at the same moment, and something happens to their job, or amid it.
func (p *plan) backAtOnce() string {
	pod := p.newPod()
	text := fmt.Sprintf("%s claims=%d\nrun until=runs most=3m\ndelete %s\nrun until=removed most=%s\n",
		pod, 2+p.r.IntN(2), strings.Fields(pod)[1], p.coolDown+time.Minute)
	if p.one(2) {
		all := modes()
		return text + "fault " + string(all[p.r.IntN(len(all))]) + " fabric detach"
	}
	return text + "run until=job- most=1m\nrun " + p.shortly() + "\n" + p.choose(choices())
}
