// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// settled is the end of every scenario: what must hold with the Pods still there, and what must hold once
// they are gone. It asks for the units back, as a person may, and does not wait until they have cooled down.
func (s *scenario) settled() {
	s.t.Helper()
	s.settle(s.giveBack)
}

// cooledDown is settled, but leaves it to the agents when units go back.
func (s *scenario) cooledDown() {
	s.t.Helper()
	s.settle(func(context.Context) error { return nil })
}

func (s *scenario) settle(ask func(context.Context) error) {
	s.t.Helper()
	await(s.t, "nothing contradicts anything", returned, s.consistent)
	if err := s.clear(s.t.Context()); err != nil {
		s.t.Fatalf("delete the Pods: %v", err)
	}
	if err := ask(s.t.Context()); err != nil {
		s.t.Fatalf("ask for the units back: %v", err)
	}
	await(s.t, "everything is back in the pool", returned, func(ctx context.Context) error {
		return errors.Join(s.consistent(ctx), s.whole(ctx))
	})
}

// giveBack deletes all device leases, which is a wish: each goes when its unit is back in the pool.
func (e *environment) giveBack(ctx context.Context) error {
	return e.client.CoordinationV1().Leases(device.LeaseNamespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: device.LabelPhase})
}

// clear deletes the Pods of the test and its claims.
func (s *scenario) clear(ctx context.Context) error {
	everything := metav1.ListOptions{}
	if err := s.client.CoreV1().Pods(s.ns).DeleteCollection(ctx, metav1.DeleteOptions{}, everything); err != nil {
		return err
	}
	err := poll(ctx, running, func(ctx context.Context) error {
		pods, err := s.client.CoreV1().Pods(s.ns).List(ctx, everything)
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d Pods are still there", len(pods.Items))
		}
		return err
	})
	if err != nil {
		return err
	}
	return s.client.ResourceV1().ResourceClaims(s.ns).DeleteCollection(ctx, metav1.DeleteOptions{}, everything)
}

// consistent lists everything that contradicts something else: fabric, device leases, claims, CDI specs.
func (e *environment) consistent(ctx context.Context) error {
	violations, err := e.sim.Violations(ctx)
	if err != nil {
		return err
	}
	var wrong []error
	for _, v := range violations {
		wrong = append(wrong, fmt.Errorf("the simulator saw a violation: %s of %s: %s", v.Kind, v.Device, v.Detail))
	}
	leases, err := e.leases.ListLive(ctx)
	if err != nil {
		return err
	}
	state, err := e.sim.State(ctx)
	if err != nil {
		return err
	}
	wrong = append(wrong, leasesAgainst(state, leases)...)
	claims, err := e.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, node := range localkube.Nodes() {
		specs, err := e.specs(ctx, node.Name)
		if err != nil {
			return err
		}
		wrong = append(wrong, specsAgainst(node.Name, specs, claims.Items)...)
	}
	return errors.Join(wrong...)
}

// leasesAgainst compares what the fabric has attached with the device leases.
func leasesAgainst(state *simapi.State, leases []device.Lease) []error {
	var wrong []error
	for _, d := range state.Devices {
		if d.Phase == simapi.PhaseFree || d.BuiltIn {
			continue
		}
		if d.Phase != simapi.PhaseAttached {
			wrong = append(wrong, fmt.Errorf("device %s is %s", d.ID, d.Phase))
		}
		holders := slices.DeleteFunc(slices.Clone(leases), func(l device.Lease) bool { return l.FabricDevice != d.ResUUID })
		if len(holders) != 1 || holders[0].Node != d.Machine {
			wrong = append(wrong, fmt.Errorf("device %s is %s to %s, and %d leases name it", d.ID, d.Phase, d.Machine, len(holders)))
		}
	}
	for _, l := range leases {
		d, there := state.Device(l.FabricDevice)
		there = there && l.FabricDevice != "" && d.Phase == simapi.PhaseAttached && d.Machine == l.Node
		switch {
		case l.Phase == device.Failed && time.Now().Before(l.Failure.RetryAfter):
		case l.Phase != device.Attached:
			wrong = append(wrong, fmt.Errorf("the lease of %s is %s (%s)", l.Unit, l.Phase, l.Failure.Reason))
		case !there:
			wrong = append(wrong, fmt.Errorf("the lease of %s names device %q on %s, which the fabric has not attached there", l.Unit, l.FabricDevice, l.Node))
		case !l.Idle() && l.Attempt.IsZero() && l.HeldBy == "":
			wrong = append(wrong, fmt.Errorf("unit %s serves no claim and is not idle", l.Unit))
		}
	}
	return wrong
}

// specs are our files in the node's CDI folder.
func (e *environment) specs(ctx context.Context, node string) ([]string, error) {
	out, err := e.onNode(ctx, node, "ls", "-A", "/var/run/cdi")
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(strings.Fields(out), func(name string) bool { return !strings.Contains(name, device.Driver) }), nil
}

// specsAgainst looks for CDI specs whose claim is no more.
func specsAgainst(node string, specs []string, claims []resourceapi.ResourceClaim) []error {
	var wrong []error
	for _, name := range specs {
		if !slices.ContainsFunc(claims, func(c resourceapi.ResourceClaim) bool { return strings.Contains(name, string(c.UID)) }) {
			wrong = append(wrong, fmt.Errorf("CDI spec %s on %s has no claim", name, node))
		}
	}
	return wrong
}

// whole is nil when no unit is away: no device lease, nothing attached, no CDI spec, every unit on offer.
func (e *environment) whole(ctx context.Context) error {
	var away []error
	leases, err := e.leases.ListLive(ctx)
	if err != nil {
		return err
	}
	for _, l := range leases {
		away = append(away, fmt.Errorf("the lease of %s is there: %s on %s, attempt %q, idle since %q, held by %q, failure %q",
			l.Unit, l.Phase, l.Node, l.Attempt, l.IdleSince, l.HeldBy, l.Failure.Reason))
	}
	state, err := e.sim.State(ctx)
	if err != nil {
		return err
	}
	for _, d := range state.Devices {
		if d.Phase != simapi.PhaseFree || d.Tenant != "" || d.Vanished {
			away = append(away, fmt.Errorf("device %s is %s %s%s", d.ID, d.Phase, d.Machine, d.Tenant))
		}
	}
	for _, node := range localkube.Nodes() {
		specs, err := e.specs(ctx, node.Name)
		if err != nil {
			return err
		}
		if len(specs) > 0 {
			away = append(away, fmt.Errorf("CDI specs are left on %s: %v", node.Name, specs))
		}
	}
	return errors.Join(append(away, e.offered(ctx, len(state.Devices)))...)
}

// offered is nil when the pool offers each unit to be attached, and none where it is.
func (e *environment) offered(ctx context.Context, want int) error {
	list, err := e.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + device.Driver})
	if err != nil {
		return err
	}
	free, ready := 0, 0
	for i := range list.Items {
		for _, d := range list.Items[i].Spec.Devices {
			_, isReady := device.UnitOfEntry(d.Name)
			switch {
			case len(d.Taints) > 0:
			case isReady:
				ready++
			default:
				free++
			}
		}
	}
	if free != want || ready != 0 {
		return fmt.Errorf("the pool offers %d of %d units, and %d where they are attached", free, want, ready)
	}
	nodes := 0
	members, err := e.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: device.LabelFabric + "=" + string(fabric) +
		"," + device.Model(a100).AttachableLabel() + "=true," + device.Model(l40s).AttachableLabel() + "=true"})
	if err == nil {
		nodes = len(members.Items)
	}
	if nodes != len(localkube.Nodes()) {
		return errors.Join(err, fmt.Errorf("%d nodes can have units attached", nodes))
	}
	return nil
}

// force puts everything back into the pool without the agents' consent, after a test that has failed.
func (s *scenario) force(ctx context.Context) error {
	list, err := s.client.CoordinationV1().Leases(device.LeaseNamespace).List(ctx, metav1.ListOptions{LabelSelector: device.LabelPhase})
	if err != nil {
		return err
	}
	for i := range list.Items {
		l := &list.Items[i]
		if err = s.client.CoordinationV1().Leases(device.LeaseNamespace).Delete(ctx, l.Name, metav1.DeleteOptions{}); err == nil {
			_, err = s.client.CoordinationV1().Leases(device.LeaseNamespace).Patch(ctx, l.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		}
		if err != nil {
			s.t.Logf("remove lease %s by force: %v", l.Name, err)
		}
	}
	state, err := s.sim.State(ctx)
	if err != nil {
		return err
	}
	for _, d := range state.Devices {
		if err = s.sim.Device(ctx, d.ID, simapi.DeviceChange{Action: simapi.DeviceFree}); err != nil {
			return err
		}
	}
	// The agents still have open what was taken from them.
	return errors.Join(s.restartAgents(ctx), s.sim.ClearViolations(ctx))
}
