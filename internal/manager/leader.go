// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"maps"
	"slices"

	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/leader"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

var (
	_ leader.Fabric  = ofFabric{}
	_ leader.Limiter = limiter{}
)

// OfFabric is the manager as the leader needs it.
func (m *Manager) OfFabric() leader.Fabric { return ofFabric{m} }

// Limiter is the manager as one that has limits of its own, nil if it has none.
func (m *Manager) Limiter() leader.Limiter {
	own, can := m.o.Client.(fabric.Limiter)
	if !can {
		return nil
	}
	return limiter{m, own}
}

type ofFabric struct{ *Manager }

func (m ofFabric) Free(ctx context.Context, models []device.Model) (map[device.Model]pool.Supply, error) {
	words := make([]string, 0, len(models))
	for _, model := range models {
		words = append(words, m.o.Models[model])
	}
	var supplies map[string]fabric.Supply
	err := m.time("Free", func() (err error) {
		supplies, err = m.o.Client.Free(ctx, words)
		return err
	})
	m.note(err)
	free := map[device.Model]pool.Supply{}
	for _, model := range models {
		if s, ok := supplies[m.o.Models[model]]; ok {
			free[model] = m.supply(s)
		}
	}
	return free, err
}

// supply keeps the devices only where the caller may choose among them: else they are no units of their own.
func (m ofFabric) supply(s fabric.Supply) pool.Supply {
	if !m.Addressable() {
		return pool.Supply{Count: s.Count}
	}
	return pool.Supply{Count: len(s.Devices), Devices: append([]device.OnFabric{}, s.Devices...)}
}

func (m ofFabric) Attached(ctx context.Context, machines []device.Machine) map[device.Machine][]device.OnFabric {
	var lists map[device.Machine][]device.OnFabric
	err := m.time("ListAttached", func() error {
		var failed map[device.Machine]error
		lists, failed = m.o.Client.ListAttached(ctx, machines)
		return errors.Join(slices.Collect(maps.Values(failed))...)
	})
	if err != nil {
		klog.FromContext(ctx).V(1).Info("What is attached to some machines could not be read", "err", err)
	}
	return lists
}

type limiter struct {
	*Manager
	own fabric.Limiter
}

// Limits reads those of a machine.
func (m limiter) Limits(ctx context.Context, machine device.Machine) (map[device.Model]pool.Limit, error) {
	words := slices.Collect(maps.Values(m.o.Models))
	var own map[string]fabric.Limit
	err := m.time("Limits", func() (err error) {
		own, err = m.own.Limits(ctx, machine, words)
		return err
	})
	if err != nil {
		return nil, err
	}
	limits := make(map[device.Model]pool.Limit, len(own))
	for model, word := range m.o.Models {
		if l, there := own[word]; there {
			limits[model] = pool.Limit(l)
		}
	}
	return limits, nil
}
