// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// mode is what goes wrong with a call.
type mode string

// The modes. Around a crash there are three moments: before the world heard of the call, after it took
// effect and before the answer was heard, and after that.
const (
	refused     mode = "error"        // no effect, and the caller is told so
	lostReply   mode = "lost"         // it takes effect; the caller hears nothing
	lateEffect  mode = "late"         // the caller gives up, then it takes effect
	neverSent   mode = "unsent"       // no effect; the caller hears nothing
	hung        mode = "hang"         // no effect, no answer until the caller gives up
	twice       mode = "twice"        // it takes effect two times
	crashBefore mode = "crash-before" // the process dies, the world hears nothing
	crashLost   mode = "crash-lost"   // it takes effect; the process dies before it hears the answer
	crashAfter  mode = "crash-after"  // the process hears the answer and dies
)

func modes() []mode {
	return []mode{refused, lostReply, lateEffect, neverSent, hung, twice, crashBefore, crashLost, crashAfter}
}

// fault waits for the next call that it fits.
type fault struct {
	node   string // empty is any
	prefix string // of the call's key
	mode   mode
	// late is how late it takes effect, zero is drawn.
	late time.Duration
}

func (f *fault) text() string {
	if f == nil {
		return ""
	}
	return " (fault: " + string(f.mode) + ")"
}

// class is the fault's kind for the count: what it hits, and how.
func (f *fault) class() string { return firstWord(f.prefix) + " " + string(f.mode) }

func firstWord(s string) string {
	w, _, _ := strings.Cut(s, " ")
	return w
}

// armed takes the first fault that fits the call.
func (s *Sim) armed(c *call) *fault {
	i := slices.IndexFunc(s.faults, func(f *fault) bool {
		return (f.node == "" || f.node == c.p.node) && strings.HasPrefix(c.key, f.prefix)
	})
	if i < 0 {
		return nil
	}
	f := s.faults[i]
	s.faults = slices.Delete(s.faults, i, i+1)
	if !strings.HasPrefix(string(f.mode), "crash") {
		s.note(c.p.node, "fault: %s: %s", c.key, f.mode)
	}
	return f
}

var errConnection = errors.New("connection reset by peer")

// strike lets the call go wrong.
func (f *fault) strike(c *call, took time.Duration) {
	s := c.s
	silence := s.between("silence "+c.key, time.Second, 10*time.Second)
	switch f.mode {
	case refused:
		c.answer(took, nil, c.no())
	case lostReply:
		c.takeEffect(took/2, func(any, error) { c.answer(silence, nil, c.lost(errConnection)) })
	case lateEffect:
		late := s.between("late "+c.key, 2*time.Second, lateMost(c.key))
		if f.late > 0 {
			late = f.late
		}
		c.answer(took, nil, c.lost(errConnection))
		c.takeEffect(took+late, func(any, error) { s.note(c.p.node, "late effect: %s", c.key) })
	case neverSent:
		c.answer(took, nil, c.lost(errConnection))
	case hung:
		if _, ok := c.ctx.Deadline(); !ok {
			c.answer(time.Minute, nil, c.lost(errConnection)) // TCP gives up one day
		}
	case twice:
		c.takeEffect(took/2, func(v any, err error) {
			_, again := c.do()
			s.detail("world", "%s a second time: %v", c.key, again)
			c.answer(took/2, v, err)
		})
	case crashBefore:
		s.crash(c.p, "before "+c.key)
	case crashLost:
		c.takeEffect(took/2, func(any, error) { s.crash(c.p, "before it hears of "+c.key) })
	case crashAfter:
		c.takeEffect(took/2, func(v any, err error) {
			c.end(v, err)
			s.after(0, c.p, func() { s.crash(c.p, "after "+c.key) })
		})
	default:
		panic(fmt.Sprintf("fault mode %q", f.mode))
	}
}

// lateMost is how late a call takes effect: what the agent is told of its manager (attach.Settings.Settle)
// holds, and a request to the API server does not live long.
func lateMost(key string) time.Duration {
	if strings.HasPrefix(key, "fabric") {
		return maxCall + settle*8/10
	}
	return 8 * time.Second
}
