// SPDX-License-Identifier: Apache-2.0

package main

import (
	"sync"
	"time"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/metrics"
)

// stages measures the parts of an attach and a detach from what the node loop reports. A way that began
// before this process is not measured.
type stages struct {
	metrics *metrics.Metrics

	mu    sync.Mutex // guards marks
	marks map[device.Unit]marks
}

// marks are the moments of one unit's way.
type marks struct {
	taken, intent, sent, answered, seen, attached time.Time
	releasing, drained, removed, detached         time.Time
}

func newStages(m *metrics.Metrics) *stages {
	return &stages{metrics: m, marks: map[device.Unit]marks{}}
}

func (s *stages) edit(u device.Unit, f func(*marks)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.marks[u]
	f(&m)
	s.marks[u] = m
}

func (s *stages) stored(before, after device.Lease, now time.Time) {
	s.edit(after.Unit, func(m *marks) {
		switch {
		case before.Phase == device.Assigned && after.Phase == device.Attaching:
			*m = marks{taken: after.AcquiredAt, intent: now}
		case after.Phase == device.Attached && before.Phase == device.Attaching:
			m.attached = now
			if m.seen.IsZero() {
				m.seen = now
			}
		case after.Phase == device.Releasing && before.Phase != device.Releasing:
			*m = marks{releasing: now}
		}
	})
}

func (s *stages) acted(l device.Lease, k attach.Kind, took time.Duration, now time.Time, err error) {
	s.edit(l.Unit, func(m *marks) {
		switch k {
		case attach.SendAttach:
			m.sent, m.answered = now.Add(-took), now
		case attach.Discover:
			if m.seen.IsZero() {
				m.seen = now.Add(-took)
			}
		case attach.FindHolders:
			if l.Phase == device.Releasing && m.releasing.IsZero() {
				m.releasing = now.Add(-took) // the leader asked for it
			}
		case attach.Drain:
			if err == nil {
				m.drained = now
			}
		case attach.Remove:
			if err == nil {
				m.removed = now
			}
		case attach.SendDetach:
			m.detached = now
		case attach.Poll: // the manager still worked on it, or has ended it just now
			if l.Phase == device.Releasing {
				m.detached = now
			} else {
				m.answered = now
			}
		default:
		}
	})
}

// told ends an attach.
func (s *stages) told(l device.Lease, now time.Time) {
	s.edit(l.Unit, func(m *marks) {
		if m.taken.IsZero() || m.answered.IsZero() || m.attached.IsZero() {
			return // it was attached before, or by a former run
		}
		s.metrics.Attached(l.Fabric, metrics.StageAssign, positive(m.sent.Sub(m.taken)))
		s.metrics.Attached(l.Fabric, metrics.StageFabric, m.answered.Sub(m.sent))
		s.metrics.Attached(l.Fabric, metrics.StageBus, positive(m.seen.Sub(m.answered)))
		s.metrics.Attached(l.Fabric, metrics.StageDriver, positive(m.attached.Sub(m.seen)))
		s.metrics.Attached(l.Fabric, metrics.StageTell, now.Sub(m.attached))
		s.metrics.Attached(l.Fabric, metrics.StageTotal, positive(now.Sub(m.taken)))
		*m = marks{}
	})
}

// deleted ends a detach.
func (s *stages) deleted(l device.Lease, now time.Time) {
	s.mu.Lock()
	m := s.marks[l.Unit]
	delete(s.marks, l.Unit)
	s.mu.Unlock()
	if m.releasing.IsZero() || m.drained.IsZero() || m.removed.IsZero() || m.detached.IsZero() {
		return
	}
	s.metrics.Detached(l.Fabric, metrics.StageDrain, m.drained.Sub(m.releasing))
	s.metrics.Detached(l.Fabric, metrics.StageRemove, m.removed.Sub(m.drained))
	s.metrics.Detached(l.Fabric, metrics.StageFabric, m.detached.Sub(m.removed))
	s.metrics.Detached(l.Fabric, metrics.StageTotal, now.Sub(m.releasing))
}

// positive keeps clocks that differ from making a negative time.
func positive(d time.Duration) time.Duration { return max(d, 0) }
