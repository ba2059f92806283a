// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Command is one line of a script: a verb and its words.
type Command struct {
	Verb  string
	Words []string
}

func (c Command) String() string { return strings.Join(append([]string{c.Verb}, c.Words...), " ") }

// Script is what happens in a run, in order; only "run" lets time pass.
type Script []Command

func (s Script) String() string {
	var b strings.Builder
	for _, c := range s {
		b.WriteString(c.String() + "\n")
	}
	return b.String()
}

// ParseScript reads commands, one a line; # begins a comment.
func ParseScript(text string) (Script, error) {
	var all Script
	for n, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if verbs()[f[0]] == nil && f[0] != "cluster" {
			return nil, fmt.Errorf("line %d: there is no command %q", n+1, f[0])
		}
		all = append(all, Command{f[0], f[1:]})
	}
	if len(all) == 0 || all[0].Verb != "cluster" {
		return nil, fmt.Errorf("a script begins with a cluster")
	}
	return all, nil
}

// Result is how a run went.
type Result struct {
	Trace     []string
	Violation *Violation
	Counts    Counts
}

// Run plays a script in a bubble. At its end it checks that all comes to rest: with finish, after everything
// that goes wrong has ended.
func Run(ctx context.Context, b Bubble, script Script, o Options, finish bool) (res Result, err error) {
	set := options(script[0].Words)
	if v := set["seed"]; v != "" {
		if o.Seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			return res, fmt.Errorf("seed: %w", err)
		}
	}
	s := newSim(b, o)
	coolDown, err := time.ParseDuration(or(set["cooldown"], "10m"))
	if err != nil {
		return res, fmt.Errorf("cooldown: %w", err)
	}
	_, s.adopt = set["adopt"]
	_, s.parallel = set["parallel"]
	_, s.exclude = set["exclude"]
	_, s.crude = set["crude"]
	s.coolDown, s.minPerNode, s.maxPerNode, s.slots = coolDown, number(set["min"], 0), number(set["max"], 0), number(set["slots"], 0)
	if _, known := manners()[set["manner"]]; !known {
		return res, fmt.Errorf("manner %q is none", set["manner"])
	}
	s.manner = manners()[set["manner"]]
	s.build(ctx, number(set["nodes"], 2), number(set["gpus"], 2), number(set[string(otherModel)], 0))
	defer s.close()
	for _, c := range script[1:] {
		if s.watch.broken != nil {
			break
		}
		if err := verbs()[c.Verb](s, c.Words); err != nil {
			return res, fmt.Errorf("%s: %w", c, err)
		}
		s.settle()
	}
	if finish && s.watch.broken == nil {
		s.finish()
	}
	return Result{Trace: s.trace, Violation: s.watch.broken, Counts: s.count}, nil
}

func options(words []string) map[string]string {
	set := map[string]string{}
	for _, w := range words {
		k, v, _ := strings.Cut(w, "=")
		set[k] = v
	}
	return set
}

func or(v, fallback string) string {
	if v == "" {
		return fallback
	}
	return v
}

func number(v string, fallback int) int {
	if n, err := strconv.Atoi(v); err == nil {
		return n
	}
	return fallback
}

type verb func(*Sim, []string) error

// verbs are the commands.
func verbs() map[string]verb {
	return map[string]verb{
		"run": (*Sim).run, "pod": (*Sim).podCommand, "delete": (*Sim).deleteCommand, "fault": (*Sim).faultCommand,
		"crash": onNode((*Sim).crashNode), "pause": (*Sim).pause, "update": onNode((*Sim).rollingUpdate), "away": (*Sim).away,
		"drop": forAWhile((*Sim).dropWatches), "slow": (*Sim).slow, "unbind": (*Sim).unbind, "clock": forAWhile((*Sim).stepClock),
		"vanish": (*Sim).vanish, "critical": (*Sim).critical, "steal": (*Sim).steal, "foreign": onNode((*Sim).foreign),
		"recreate": onNode((*Sim).recreate), "reboot": onNode((*Sim).reboot), "open": forAWhile((*Sim).openIdle),
		"unlease": (*Sim).unlease, "down": (*Sim).managerDown, "lose": onNode((*Sim).loseCheckpoint), "show": (*Sim).show,
		"busy": (*Sim).managerBusy, "reclaim": onNode((*Sim).reclaim), "unnamed": (*Sim).unnamed, "config": (*Sim).configure,
		"unmodel": forAWhile((*Sim).unmodel), "damage": (*Sim).damage, "restart": forAWhile((*Sim).restartKubelet), "calm": (*Sim).calmCommand,
		"unsee": onNode((*Sim).unsee), "intrude": onNode((*Sim).intrude), "close": onNode((*Sim).closeAll), "kill": onNode((*Sim).kill), "suspend": (*Sim).suspend,
		"refuse": (*Sim).refuse, "restart-manager": func(s *Sim, _ []string) error { s.restartManager(); return nil },
	}
}

// run lets time pass: a duration, or until=<what>, which has to come within=<duration>, or is waited for, if
// it does not come anew, at most=<duration>.
func (s *Sim) run(words []string) error {
	most, seen, must := 2*time.Hour, 0, true
	if len(words) == 2 {
		set := options(words[1:])
		if _, ok := set["most"]; ok {
			seen, must = len(s.trace), false
		}
		within, err := time.ParseDuration(set["within"] + set["most"])
		if err != nil {
			return err
		}
		most = within
	}
	if len(words) == 0 || len(words) > 2 {
		return fmt.Errorf("run takes a duration or until=<what>")
	}
	what, until := strings.CutPrefix(words[0], "until=")
	if !until {
		d, err := time.ParseDuration(words[0])
		if err != nil {
			return err
		}
		s.runUntil(s.now().Add(d), nil)
		return nil
	}
	if what == "stable" {
		s.runStable(most, 90*time.Second)
		return nil
	}
	met := func() bool {
		return slices.ContainsFunc(s.trace[seen:], func(l string) bool { return strings.Contains(l, strings.ReplaceAll(what, "_", " ")) })
	}
	s.runUntil(s.now().Add(most), met)
	if must && s.watch.broken == nil && !met() {
		s.breakIt("never", "it did not come to %q", what)
	}
	return nil
}

// runStable lets time pass until nothing is noted for a while.
func (s *Sim) runStable(most, quiet time.Duration) {
	for end := s.now().Add(most); s.now().Before(end) && s.watch.broken == nil; {
		n := len(s.trace)
		s.runUntil(s.now().Add(quiet), func() bool { return len(s.trace) != n })
		if len(s.trace) == n {
			return
		}
	}
}

func (s *Sim) podCommand(words []string) error {
	if len(words) == 0 {
		return fmt.Errorf("which Pod?")
	}
	set := options(words[1:])
	p := s.addPod(words[0], number(set["claims"], 1), number(set["devices"], 1), set["node"])
	p.model = device.Model(set["model"])
	_, p.admin = set["admin"]
	return nil
}

func (s *Sim) deleteCommand(words []string) error {
	if len(words) == 0 {
		return fmt.Errorf("which Pod?")
	}
	p := s.podByName(words[0])
	if d, err := time.ParseDuration(options(words)["grace"]); err == nil && p != nil {
		p.grace = d
	}
	s.deletePod(p, slices.Contains(words, "force"))
	return nil
}

// faultCommand arms a fault: [node] mode prefix of the call; late=<duration> says how late.
func (s *Sim) faultCommand(words []string) error {
	f := &fault{}
	if len(words) > 0 && s.hosts[words[0]] != nil {
		f.node, words = words[0], words[1:]
	}
	if d, ok := options(words)[string(lateEffect)]; ok && d != "" {
		var err error
		if f.late, err = time.ParseDuration(d); err != nil {
			return err
		}
		words = slices.Clone(words)
		words[0] = string(lateEffect)
	}
	if len(words) < 2 || !slices.Contains(modes(), mode(words[0])) {
		return fmt.Errorf("a fault is [node] mode call")
	}
	f.mode, f.prefix = mode(words[0]), strings.Join(words[1:], " ")
	s.faults = append(s.faults, f)
	return nil
}

// onNode is a command on a node, or on the one that leads.
func onNode(f func(*Sim, *host)) verb {
	return func(s *Sim, words []string) error {
		if len(words) == 1 && words[0] == "leader" {
			if h := s.leads(); h != nil {
				f(s, h)
			}
			return nil
		}
		if len(words) != 1 || s.hosts[words[0]] == nil {
			return fmt.Errorf("which node?")
		}
		f(s, s.hosts[words[0]])
		return nil
	}
}

// leads is the node that leads the fabric, nil if none does.
func (s *Sim) leads() *host {
	for _, p := range s.procs {
		if !p.dead && p.term != nil {
			return p.host
		}
	}
	return nil
}

// forAWhile is a command on a node with a duration.
func forAWhile(f func(*Sim, *host, time.Duration)) verb {
	return func(s *Sim, words []string) error {
		if len(words) != 2 || s.hosts[words[0]] == nil {
			return fmt.Errorf("which node, how long?")
		}
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		f(s, s.hosts[words[0]], d)
		return nil
	}
}

// show notes what is attached where.
func (s *Sim) show([]string) error {
	for _, h := range s.order {
		s.note("fabric", "%s has [%s]", h.node, ids(s.fabric.on(h.machine)))
	}
	return nil
}

// calmCommand says that nothing goes wrong from here on, so that who waits has to hear of it.
func (s *Sim) calmCommand([]string) error {
	s.calmDown()
	return nil
}
