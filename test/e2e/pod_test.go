// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
)

// sees checks that the Pod's container has just the GPUs of its claim: it opens their nodes, and no other
// GPU's, not even by the number of its device. It returns the GPUs.
func (s *scenario) sees(pod string) []simapi.Device {
	s.t.Helper()
	var lines []string
	await(s.t, "Pod "+pod+" reports what it sees", soon, func(ctx context.Context) error {
		text, err := s.log(ctx, s.ns, pod, corev1.PodLogOptions{})
		if err != nil {
			return err
		}
		lines = strings.Split(strings.TrimSpace(text), "\n")
		if lines[len(lines)-1] != "reported" {
			return fmt.Errorf("it has not finished: %q", lines)
		}
		return nil
	})
	units, _ := s.units(pod)
	state := s.state()
	var own []simapi.Device
	for _, u := range units {
		if id, builtIn := u.BuiltIn(); builtIn {
			if d, ok := state.Device(string(id)); ok {
				own = append(own, d)
				continue
			}
			s.t.Fatalf("the chassis has no GPU %s", id)
		}
		l, err := s.lease(s.t.Context(), u)
		if err != nil {
			s.t.Fatalf("read the lease of unit %s: %v", u, err)
		}
		d, ok := state.Device(l.FabricDevice)
		if !ok || l.FabricDevice == "" {
			s.t.Fatalf("the lease of unit %s names device %q, which the chassis does not have", u, l.FabricDevice)
		}
		own = append(own, d)
	}
	for _, d := range state.Devices {
		mine := slices.ContainsFunc(own, func(o simapi.Device) bool { return o.ID == d.ID })
		opened := slices.Contains(lines, "opened number "+d.DeviceNumber)
		refused := slices.ContainsFunc(lines, func(l string) bool {
			return strings.HasPrefix(l, "refused number "+d.DeviceNumber+" ") && strings.Contains(l, "not permitted")
		})
		if mine != opened || mine == refused {
			s.t.Errorf("GPU %s (%s): the Pod's own: %v, opened: %v, refused: %v", d.ID, d.DeviceNumber, mine, opened, refused)
		}
	}
	s.nodesOf(lines, own)
	for _, library := range []string{"libnvidia-ml.so", "libcuda.so"} {
		if !slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, "library ") && strings.Contains(l, library) }) {
			s.t.Errorf("the container has no %s", library)
		}
	}
	if s.t.Failed() {
		s.t.Fatalf("the container says:\n%s", strings.Join(lines, "\n"))
	}
	return own
}

// nodesOf checks that the GPU nodes in the container's /dev are those of the devices, and open.
func (s *scenario) nodesOf(lines []string, own []simapi.Device) {
	s.t.Helper()
	var want, got []string
	for _, d := range own {
		want = append(want, fmt.Sprintf("/dev/nvidia%d %s", d.Minor, d.DeviceNumber))
	}
	for _, l := range lines {
		f := strings.Fields(l)
		if f[0] != "node" {
			continue
		}
		major, errMajor := strconv.ParseUint(f[2], 16, 32)
		minor, errMinor := strconv.ParseUint(f[3], 16, 32)
		if errMajor != nil || errMinor != nil {
			s.t.Fatalf("cannot read %q", l)
		}
		got = append(got, fmt.Sprintf("%s %d:%d", f[1], major, minor))
		if !slices.Contains(lines, "opened "+f[1]) {
			s.t.Errorf("the container cannot open its %s", f[1])
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(want, got) {
		s.t.Errorf("the container has the GPU nodes %q, want %q", got, want)
	}
}

// TestPodWithClaim: from Pending to Running with a GPU of the pool, and the way back over idle.
func TestPodWithClaim(t *testing.T) {
	s := begin(t)
	s.template("one", a100, 1)
	first := s.pod("first", claiming("one"))
	s.runs("first", running)
	own := s.sees("first")
	units, ready := s.units("first")
	if len(units) != 1 || ready[0] {
		t.Fatalf("the claim has %v, ready %v; want one unit of the pool", units, ready)
	}
	unit := units[0]
	claim, err := s.claim(t.Context(), "first")
	if err != nil {
		t.Fatal(err)
	}
	if c := condition(claim, device.ConditionAttached); c == nil || c.Status != metav1.ConditionTrue || !strings.Contains(c.Message, own[0].UUID) {
		t.Errorf("condition %s of the claim is %+v, want True with %s", device.ConditionAttached, c, own[0].UUID)
	}
	l := s.leased(unit, "attached", func(l device.Lease) bool { return l.Phase == device.Attached })
	if l.Attempt.UID != string(claim.UID) || string(l.UUID) != own[0].UUID || l.PCI.String() != own[0].PCIAddress {
		t.Errorf("the lease says claim %s, GPU %s at %s; want %s, %s at %s", l.Attempt.UID, l.UUID, l.PCI, claim.UID, own[0].UUID, own[0].PCIAddress)
	}
	s.hasEvent(s.ns, claim.UID, nodestatus.ReasonAttaching, string(unit))
	s.hasEvent(s.ns, claim.UID, nodestatus.ReasonAttached, own[0].UUID)
	await(t, "nothing contradicts anything", soon, s.consistent)

	s.delete(first.Name)
	s.idle(unit)
	s.choosable(unit)
	s.labelled(l.Node, device.LabelIdle, true)

	s.pod("second", claiming("one"), on(l.Node))
	s.runs("second", soon)
	again := s.sees("second")
	if units, ready = s.units("second"); units[0] != unit || !ready[0] {
		t.Errorf("the second claim has %v, ready %v; want the idle unit %s", units, ready, unit)
	}
	if again[0].ID != own[0].ID || len(s.done("attach")) != 1 {
		t.Errorf("the second Pod has GPU %s after %d attaches, want the first one's, %s, after one", again[0].ID, len(s.done("attach")), own[0].ID)
	}
	s.cooledDown()
	if n := len(s.done("detach")); n != 1 {
		t.Errorf("%d detaches, want one", n)
	}
	s.labelled(l.Node, device.LabelIdle, false)
}

// labelled waits until a Node carries the label, or does not.
func (s *scenario) labelled(node, label string, want bool) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("label %s of %s is there: %v", label, node, want), soon, func(ctx context.Context) error {
		n, err := s.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if _, has := n.GetLabels()[label]; err == nil && has != want {
			err = fmt.Errorf("the labels are %v", n.Labels)
		}
		return err
	})
}

// TestExtendedResource: a Pod that knows nothing of claims asks for two GPUs.
func TestExtendedResource(t *testing.T) {
	s := begin(t)
	s.pod("plain", limited("2"))
	s.runs("plain", running)
	if own := s.sees("plain"); len(own) != 2 {
		t.Errorf("the Pod has %d GPUs, want 2", len(own))
	}
	s.settled()
}
