// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
)

// attachCall is the request by which an agent has a device attached.
func attachCall(f simapi.Fault) simapi.Fault {
	f.Face, f.Method, f.Path = "fm", http.MethodPatch, "/update$"
	return f
}

// refusal is an attach call that the manager refuses for good, in words of its own.
func refusal(nth int) (simapi.Fault, string) {
	const words = "the air baffle of slot 3 is missing"
	return attachCall(simapi.Fault{
		Action: simapi.ActionStatus, Status: http.StatusBadRequest, Nth: nth, Count: 1,
		Content: `{"status":400,"detail":{"code":"E02BAF","message":"` + words + `"}}`,
	}), words
}

// TestAttachFails: the claim is told, in the manager's words where it has any, and the Pod is placed anew,
// on another unit.
func TestAttachFails(t *testing.T) {
	refused, words := refusal(0)
	for _, tc := range []struct {
		name   string
		fault  simapi.Fault
		words  string
		within time.Duration
	}{
		{"refused", refused, words, soon},
		{"no answer in time", attachCall(simapi.Fault{Action: simapi.ActionHang}), "AttachTimeout", 45 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := begin(t)
			h := s.watch()
			name := s.fault(tc.fault)
			s.template("one", a100, 1)
			s.pod("pod", claiming("one"))
			said := s.failed(h, tc.within, tc.words)
			s.unfault(name)
			s.runs("pod", again)
			s.sees("pod")
			first, _ := device.UnitOfEntry(said.entry)
			units, _ := s.units("pod")
			if units[0] == first {
				t.Errorf("the Pod was given unit %s again, which had failed", first)
			}
			claim, err := s.claim(t.Context(), "pod")
			if err != nil {
				t.Fatal(err)
			}
			s.hasEvent(s.ns, claim.UID, nodestatus.ReasonAttachFailed, tc.words)
			s.hasEvent(s.ns, claim.UID, nodestatus.ReasonRefused, tc.words)
			if told := h.failures(); len(told) != 1 {
				t.Errorf("the claim was told that its attach failed %d times, want once: %v", len(told), told)
			}
			// Which unit's call a device answers is not known while the first one's may still take effect.
			if n := len(s.done("attach")); tc.fault.Action != simapi.ActionHang && n != 1 {
				t.Errorf("%d devices were attached, want one", n)
			}
			s.settled()
		})
	}
}

// TestPodDeletedWhileAttaching: the device comes, becomes idle, and serves the next Pod.
func TestPodDeletedWhileAttaching(t *testing.T) {
	s := begin(t)
	s.timing(5*time.Second, detachDelay, nodeDelay)
	s.template("one", a100, 1)
	s.pod("gone", claiming("one"), on("n1"))
	s.phase(simapi.PhaseAttaching, 1)
	units, _ := s.units("gone")
	s.delete("gone")
	s.idle(units[0])
	s.choosable(units[0])
	s.pod("next", claiming("one"), on("n1"))
	s.runs("next", soon)
	s.sees("next")
	if served, ready := s.units("next"); served[0] != units[0] || !ready[0] {
		t.Errorf("the next Pod has %v, ready %v; want the idle unit %s", served, ready, units[0])
	}
	if n := len(s.done("attach")); n != 1 {
		t.Errorf("%d attaches, want one", n)
	}
	s.settled()
}

// phase waits until so many devices are in a phase on the fabric.
func (s *scenario) phase(phase string, n int) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("%d devices are %s", n, phase), running, func(ctx context.Context) error {
		state, err := s.sim.State(ctx)
		if err != nil {
			return err
		}
		if all := inPhase(state, phase); len(all) != n {
			return fmt.Errorf("%d are", len(all))
		}
		return nil
	})
}

func inPhase(state *simapi.State, phase string) []simapi.Device {
	return slices.DeleteFunc(slices.Clone(state.Devices), func(d simapi.Device) bool { return d.Phase != phase })
}

// TestReplyLost: the attach took effect and its answer never came; the device is taken up, none is attached
// in addition.
func TestReplyLost(t *testing.T) {
	s := begin(t)
	h := s.watch()
	name := s.fault(attachCall(simapi.Fault{Action: simapi.ActionDropAfter, Count: 1}))
	s.template("one", a100, 1)
	s.pod("pod", claiming("one"))
	s.runs("pod", running)
	s.sees("pod")
	await(t, "the answer was lost", soon, s.hit(name, 1))
	if failed := h.failures(); len(failed) > 0 {
		t.Errorf("the claim was told %v", failed)
	}
	if n := len(s.done("attach")); n != 1 {
		t.Errorf("%d attaches took effect, want one", n)
	}
	s.settled()
}

// TestThreeDevicesOneFails: the claim is allocated anew, and the two devices that came are used for it.
func TestThreeDevicesOneFails(t *testing.T) {
	s := begin(t)
	h := s.watch()
	fault, words := refusal(3)
	s.fault(fault)
	s.template("three", "", 3)
	s.pod("pod", claiming("three"), on("n1"))
	s.failed(h, running, words)
	attached := s.done("attach")
	if len(attached) != 2 {
		t.Fatalf("%d devices were attached before the third failed, want two", len(attached))
	}
	s.runs("pod", again)
	own := s.sees("pod")
	if len(own) != 3 {
		t.Errorf("the Pod has %d GPUs, want 3", len(own))
	}
	for _, o := range attached {
		if !slices.ContainsFunc(own, func(d simapi.Device) bool { return d.ID == o.Devices[0] }) {
			t.Errorf("GPU %s, which had come, is not among the Pod's", o.Devices[0])
		}
	}
	if n := len(s.done("attach")); n != 3 {
		t.Errorf("%d attaches, want three: the two that came and one more", n)
	}
	s.settled()
}

// TestOneLeft: of two Pods one waits, and has the GPU when the other ends.
func TestOneLeft(t *testing.T) {
	s := begin(t)
	s.steal("a100-1")
	s.template("one", a100, 1)
	s.pod("first", claiming("one"))
	s.runs("first", running)
	s.pod("second", claiming("one"))
	await(t, "the second Pod is found unschedulable", soon, func(ctx context.Context) error {
		pod, err := s.client.CoreV1().Pods(s.ns).Get(ctx, "second", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				return nil
			}
		}
		return fmt.Errorf("its conditions are %+v", pod.Status.Conditions)
	})
	s.steady("the second Pod waits", 5*time.Second, func(ctx context.Context) error {
		pod, err := s.client.CoreV1().Pods(s.ns).Get(ctx, "second", metav1.GetOptions{})
		if err == nil && pod.Spec.NodeName != "" {
			err = fmt.Errorf("it is on %s", pod.Spec.NodeName)
		}
		return err
	})
	s.delete("first")
	s.runs("second", again)
	if own := s.sees("second"); own[0].ID != "a100-0" {
		t.Errorf("the second Pod has GPU %s, want a100-0, the only one", own[0].ID)
	}
	s.free("a100-1")
	s.settled()
}

// steal gives a free device to somebody else, until the test frees it or ends.
func (s *scenario) steal(id string) {
	s.t.Helper()
	if err := s.sim.Device(s.t.Context(), id, simapi.DeviceChange{Action: simapi.DeviceSteal}); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { // runs before the scenario's own
		if err := s.sim.Device(context.Background(), id, simapi.DeviceChange{Action: simapi.DeviceFree}); err != nil {
			s.t.Error(err)
		}
	})
	await(s.t, "the pool no longer offers "+id, soon, func(ctx context.Context) error { return s.offered(ctx, 3) })
}

func (s *scenario) free(id string) {
	s.t.Helper()
	if err := s.sim.Device(s.t.Context(), id, simapi.DeviceChange{Action: simapi.DeviceFree}); err != nil {
		s.t.Fatal(err)
	}
}

// TestReleasedForAnotherNode: units idle on one node, a Pod that must run on the other.
func TestReleasedForAnotherNode(t *testing.T) {
	s := begin(t)
	s.template("two", a100, 2)
	s.template("one", a100, 1)
	s.pod("here", claiming("two"), on("n1"))
	s.runs("here", running)
	units, _ := s.units("here")
	s.delete("here")
	for _, u := range units {
		s.idle(u)
	}
	s.pod("there", claiming("one"), on("n2"))
	var moved device.Unit
	await(t, "one unit is called back though its time is not over", soon, func(ctx context.Context) error {
		for _, u := range units {
			l, err := s.lease(ctx, u)
			if err == nil && l.Phase == device.Releasing {
				moved = u
				return nil
			}
		}
		return fmt.Errorf("none of %v is", units)
	})
	for _, u := range units {
		if l, err := s.lease(t.Context(), u); u != moved && (err != nil || !l.Idle()) {
			t.Errorf("unit %s is %s, error %v; want it idle still: one is enough", u, l.Phase, err)
		}
	}
	pod := s.runs("there", again)
	own := s.sees("there")
	if pod.Spec.NodeName != "n2" || own[0].Machine != "n2" {
		t.Errorf("the Pod is on %s, its GPU on %s; want both on n2", pod.Spec.NodeName, own[0].Machine)
	}
	s.settled()
}
