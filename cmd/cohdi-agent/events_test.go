// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2/ktesting"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/metrics"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
)

// reasons is an event recorder that keeps reasons.
type reasons []string

func (s *reasons) Eventf(_, _ runtime.Object, kind, reason, _, _ string, _ ...any) {
	*s = append(*s, fmt.Sprintf("%s %s", kind, reason))
}

func testObserver(t *testing.T) *observer {
	t.Helper()
	log, _ := ktesting.NewTestContext(t)
	m := metrics.New(metrics.Build{}, nil)
	return &observer{log: log, clock: clocktesting.NewFakePassiveClock(time.Unix(0, 0)), metrics: m, stages: newStages(m), changed: func() {}}
}

// What the plugin finds when it starts is said once the Node is known, and once only.
func TestEarlyEvents(t *testing.T) {
	o := testObserver(t)
	o.CheckpointDamaged("kept", errors.New("torn"))
	var told reasons
	e := nodestatus.NewEvents(&told, "n1", "uid")
	o.setEvents(e)
	o.OrphanUndone("ns", "c", "uid", []device.Unit{"a100-0"})
	o.setEvents(e)
	if diff := cmp.Diff(reasons{"Warning CheckpointDamaged", "Warning ClaimUnprepared"}, told); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// A fault of the configuration is told on the Node, and so is its end.
func TestConfiguredTellsTheNode(t *testing.T) {
	o := testObserver(t)
	var told reasons
	o.setEvents(nodestatus.NewEvents(&told, "n1", "uid"))
	o.Configured(errors.New("config.yaml:3: fabrix: is no field"))
	o.Configured(nil)
	if diff := cmp.Diff(reasons{"Warning ConfigFaulty", "Normal ConfigInOrder"}, told); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}
