// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
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
}

// RandomScript makes the script of a seed.
func RandomScript(seed uint64) Script {
	p := &plan{r: rand.New(rand.NewPCG(seed, 7)), nodes: 1}
	p.nodes += p.r.IntN(3)
	coolDowns := []string{"10s", "20s", "1m", "5m"}
	lines := []string{fmt.Sprintf("cluster seed=%d nodes=%d gpus=%d max=%d cooldown=%s", seed, p.nodes, 1+p.r.IntN(4), p.r.IntN(3), coolDowns[p.r.IntN(len(coolDowns))])}
	if p.one(6) {
		lines[0] += " min=1"
	}
	if p.one(8) {
		lines[0] += " adopt"
	}
	if p.one(12) {
		lines = append(lines, "foreign "+p.node())
	}
	for range p.r.IntN(5) {
		lines = append(lines, p.pod())
	}
	lines = append(lines, "run 50s")
	total := 0
	for _, c := range choices() {
		total += c.weight
	}
	for range 6 + p.r.IntN(30) {
		n := p.r.IntN(total)
		for _, c := range choices() {
			if n -= c.weight; n < 0 {
				lines = append(lines, c.make(p))
				break
			}
		}
		lines = append(lines, "run "+p.pause())
	}
	script, err := ParseScript(strings.Join(lines, "\n"))
	if err != nil {
		panic(err)
	}
	return script
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

func (p *plan) pod() string {
	p.made++
	name := fmt.Sprintf("p%d", p.made)
	p.pods = append(p.pods, name)
	text := "pod " + name
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
		"fabric attach", "fabric attach", "fabric attach", "fabric detach", "fabric detach", "fabric list", "fabric count",
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
	}
}
