// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// TestRescan: on a machine whose slots do not tell the kernel what comes, the agent has them looked at, and
// no more than them.
func TestRescan(t *testing.T) {
	s := begin(t)
	s.hotplug("n1", simapi.HotplugRescan)
	since := metav1.Now()
	s.template("two", a100, 2)
	s.pod("pod", claiming("two"), on("n1"))
	s.runs("pod", again)
	if own := s.sees("pod"); len(own) != 2 {
		t.Errorf("the Pod has %d GPUs, want 2", len(own))
	}

	agent, err := s.agent(t.Context(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	text, err := s.log(t.Context(), agent.Namespace, agent.Name, corev1.PodLogOptions{SinceTime: &since})
	if err != nil {
		t.Fatal(err)
	}
	looked := slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool { return !strings.Contains(line, "asked to look for a device") })
	if len(looked) == 0 || slices.ContainsFunc(looked, func(line string) bool { return !strings.Contains(line, "everywhere=false") }) {
		t.Errorf("the agent asked the kernel to look:\n%s\nwant it to look at the empty slots, and nowhere else", strings.Join(looked, "\n"))
	}

	s.delete("pod")
	s.settled()
}

// hotplug sets how a machine's slots tell what comes, until the end of the test.
func (s *scenario) hotplug(machine, mode string) {
	s.t.Helper()
	set := func(ctx context.Context, mode string) {
		if err := s.sim.Machine(ctx, machine, simapi.MachineChange{Hotplug: &mode}); err != nil {
			s.t.Error(err)
		}
	}
	set(s.t.Context(), mode)
	s.t.Cleanup(func() { set(context.Background(), simapi.HotplugEvent) })
}
