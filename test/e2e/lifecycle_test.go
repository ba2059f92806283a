// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// TestRollingUpdate: a Pod with a GPU does not notice that the agents are replaced, and one that comes
// meanwhile is served.
func TestRollingUpdate(t *testing.T) {
	s := begin(t)
	s.template("one", a100, 1)
	s.pod("pod", claiming("one"))
	before := s.runs("pod", running)
	own := s.sees("pod")
	units, _ := s.units("pod")
	l := s.leased(units[0], "attached", func(l device.Lease) bool { return l.Phase == device.Attached })

	rolled := make(chan error, 1)
	go func() { rolled <- s.restartAgents(t.Context()) }()
	s.pod("meanwhile", claiming("one"))
	s.runs("meanwhile", again)
	s.sees("meanwhile")
	if err := <-rolled; err != nil {
		t.Fatal(err)
	}

	after := s.runs("pod", soon)
	for i, c := range after.Status.ContainerStatuses {
		if c.RestartCount != 0 || c.ContainerID != before.Status.ContainerStatuses[i].ContainerID {
			t.Errorf("container %s is %s after %d restarts, was %s", c.Name, c.ContainerID, c.RestartCount, before.Status.ContainerStatuses[i].ContainerID)
		}
	}
	if now, err := s.lease(t.Context(), units[0]); err != nil || now.ObjectUID != l.ObjectUID || now.Attempt != l.Attempt || now.Phase != l.Phase {
		t.Errorf("the lease is %+v (%v), was %+v", now, err, l)
	}
	if d, _ := s.state().Device(own[0].ID); !d.PhaseSince.Equal(own[0].PhaseSince) || !d.OnBus || !d.Bound {
		t.Errorf("the GPU is %+v, was %+v", d, own[0])
	}
	s.settled()
}

// TestUninstall: not while a GPU is in use; then all that is idle goes back and nothing of the agent is left.
func TestUninstall(t *testing.T) {
	s := begin(t)
	agent := s.program(t)
	uninstall := func() (out, errs string, code int) {
		return call(t, agent, "uninstall", "--kubeconfig="+s.cluster.AdminConfig(), "--timeout=75s")
	}
	s.template("one", a100, 1)
	s.pod("pod", claiming("one"))
	s.runs("pod", running)
	claim, err := s.claim(t.Context(), "pod")
	if err != nil {
		t.Fatal(err)
	}
	if out, errs, code := uninstall(); code != 1 || !strings.Contains(errs, s.ns+"/"+claim.Name) {
		t.Fatalf("uninstall while a GPU is in use: exit code %d, %q, %q; want 1 and the claim's name", code, out, errs)
	}
	await(t, "the agents are as they were", soon, s.rolledOut)
	units, _ := s.units("pod")
	s.delete("pod")
	s.idle(units[0])

	t.Cleanup(func() { // before the scenario's own
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if err := s.install(ctx); err != nil {
			t.Errorf("install again: %v", err)
		}
	})
	if out, errs, code := uninstall(); code != 0 {
		t.Fatalf("uninstall: exit code %d, %q, %q", code, out, errs)
	}
	await(t, "nothing is attached and nothing is left behind", soon, s.left)
	kubectl := filepath.Join(s.cluster.Bin, "kubectl")
	out, errs, code := call(t, kubectl, "--kubeconfig="+s.cluster.AdminConfig(), "delete", "--ignore-not-found", "--timeout=60s",
		"-f", filepath.Join(root, "deploy", "daemonset.yaml"))
	if code != 0 {
		t.Fatalf("delete what the manifest made: %q, %q", out, errs)
	}
	for _, ns := range []string{device.AgentNamespace, device.LeaseNamespace} {
		if _, err := s.client.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("namespace %s: %v, want it gone", ns, err)
		}
	}
}

// left lists what an agent leaves behind that runs no more.
func (e *environment) left(ctx context.Context) error {
	var left []error
	state, err := e.sim.State(ctx)
	if err != nil {
		return err
	}
	for _, d := range state.Devices {
		if d.Machine != "" {
			left = append(left, fmt.Errorf("device %s is %s to %s", d.ID, d.Phase, d.Machine))
		}
	}
	all := metav1.ListOptions{}
	leases, err := e.client.CoordinationV1().Leases(device.LeaseNamespace).List(ctx, all)
	if err != nil {
		return err
	}
	for i := range leases.Items {
		left = append(left, fmt.Errorf("lease %s", leases.Items[i].Name))
	}
	slices, err := e.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + device.Driver})
	if err != nil {
		return err
	}
	for i := range slices.Items {
		left = append(left, fmt.Errorf("slice %s", slices.Items[i].Name))
	}
	nodes, err := e.client.CoreV1().Nodes().List(ctx, all)
	if err != nil {
		return err
	}
	for i := range nodes.Items {
		left = append(left, ours(&nodes.Items[i])...)
	}
	pods, err := e.agents(ctx, "")
	if err != nil {
		return err
	}
	for i := range pods {
		left = append(left, fmt.Errorf("agent %s", pods[i].Name))
	}
	for _, n := range localkube.Nodes() {
		specs, err := e.specs(ctx, n.Name)
		if err != nil {
			return err
		}
		for _, spec := range specs {
			left = append(left, fmt.Errorf("CDI spec %s on %s", spec, n.Name))
		}
	}
	return errors.Join(left...)
}

// ours are the marks that an agent made on a Node.
func ours(n *corev1.Node) []error {
	var marks []error
	for key := range n.Labels {
		if strings.HasPrefix(key, device.Driver+"/") {
			marks = append(marks, fmt.Errorf("label %s on %s", key, n.Name))
		}
	}
	for _, c := range n.Status.Conditions {
		if strings.HasPrefix(string(c.Type), device.Driver+"/") {
			marks = append(marks, fmt.Errorf("condition %s on %s", c.Type, n.Name))
		}
	}
	return marks
}
