// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// nodeSays is nil when a condition of the Node has the status and its text holds the words.
func (e *environment) nodeSays(node string, kind corev1.NodeConditionType, status corev1.ConditionStatus, words string) func(context.Context) error {
	return func(ctx context.Context) error {
		n, err := e.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type != kind {
				continue
			}
			if text := c.Reason + ": " + c.Message; c.Status != status || !strings.Contains(text, words) {
				return fmt.Errorf("%s of %s is %s, %s", kind, node, c.Status, text)
			}
			return nil
		}
		return fmt.Errorf("%s has no condition %s", node, kind)
	}
}

// TestManagerUnreachable: an attach waits for the manager as long as its deadline allows, and the Node says
// what it waits for.
func TestManagerUnreachable(t *testing.T) {
	s := begin(t)
	h := s.watch()
	// First only the update, so that the unit is given to the node before anybody knows.
	update := s.fault(attachCall(simapi.Fault{Action: simapi.ActionDropBefore}))
	s.template("one", a100, 1)
	s.pod("pod", claiming("one"), on("n1"))
	await(t, "the manager was asked in vain", running, s.hit(update, 1))
	all := s.fault(simapi.Fault{Face: "fm", Action: simapi.ActionDropBefore})
	await(t, "the Node says so", soon, s.nodeSays("n1", nodestatus.FabricReady, corev1.ConditionFalse, "fabric 0"))
	s.steady("the claim's patience", 5*time.Second, func(context.Context) error {
		if told := h.failures(); len(told) > 0 {
			return fmt.Errorf("it was told %v", told)
		}
		return nil
	})
	s.unfault(all)
	s.unfault(update)
	s.runs("pod", running)
	s.sees("pod")
	if told := h.failures(); len(told) > 0 {
		t.Errorf("the claim was told %v", told)
	}
	await(t, "the Node says that the manager answers", soon, s.nodeSays("n1", nodestatus.FabricReady, corev1.ConditionTrue, ""))
	s.settled()
	if n := len(s.done("attach")); n != 1 {
		t.Errorf("%d attaches, want one", n)
	}
}

// TestDegraded: without a login, or with the wrong certificate authority, the agents run on: they say what
// is wrong, and still take back what a Pod leaves.
func TestDegraded(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(t *testing.T, s *corev1.Secret) *corev1.Secret // nil: there is none
		words string
	}{
		{"secret is missing", func(*testing.T, *corev1.Secret) *corev1.Secret { return nil }, "/etc/cohdi-agent/fabrics/0"},
		{"wrong certificate authority", func(t *testing.T, s *corev1.Secret) *corev1.Secret {
			t.Helper()
			// A certificate authority, but not the manager's.
			ca, err := os.ReadFile(filepath.Join(env.cluster.State, "pki", "ca.crt"))
			if err != nil {
				t.Fatal(err)
			}
			s.Data["ca.crt"] = ca
			return s
		}, "certificate"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := begin(t)
			s.template("one", a100, 1)
			s.pod("pod", claiming("one"), on("n1"))
			s.runs("pod", running)
			restore := s.secret(tc.spoil)
			s.deleteAgents("")
			for _, n := range localkube.Nodes() {
				await(t, "the Node says so", running, s.nodeSays(n.Name, nodestatus.FabricReady, corev1.ConditionFalse, tc.words))
				await(t, "the agent is not ready and says why", soon, s.readyz(n.Name, http.StatusServiceUnavailable, tc.words))
			}
			s.delete("pod")
			await(t, "the claim is unprepared", soon, func(ctx context.Context) error {
				left, err := s.specs(ctx, "n1")
				if err == nil && len(left) > 0 {
					err = fmt.Errorf("CDI specs are left: %v", left)
				}
				return err
			})
			restore()
			await(t, "both agents are ready", returned, s.rolledOut)
			s.settled()
		})
	}
}

// readyz is nil when the node's agent answers /readyz with the status and the words.
func (e *environment) readyz(node string, status int, words string) func(context.Context) error {
	return func(ctx context.Context) error {
		pods, err := e.agents(ctx, node)
		if err != nil {
			return err
		}
		for i := range pods {
			if pods[i].DeletionTimestamp != nil || pods[i].Status.PodIP == "" {
				continue
			}
			got, body, err := e.get(ctx, &pods[i], "/readyz")
			if err == nil && (got != status || !strings.Contains(body, words)) {
				err = fmt.Errorf("/readyz answers %d: %s", got, body)
			}
			return err
		}
		return fmt.Errorf("no agent on %s", node)
	}
}

// deleteAgents deletes the agents of a node, or all, and waits until they are gone.
func (s *scenario) deleteAgents(node string) {
	s.t.Helper()
	old, err := s.agents(s.t.Context(), node)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := range old {
		if err := s.client.CoreV1().Pods(device.AgentNamespace).Delete(s.t.Context(), old[i].Name, metav1.DeleteOptions{}); err != nil {
			s.t.Fatalf("delete agent: %v", err)
		}
	}
	await(s.t, "the former agents are gone", running, func(ctx context.Context) error {
		now, err := s.agents(ctx, node)
		for i := range now {
			for j := range old {
				if now[i].UID == old[j].UID {
					err = errors.Join(err, fmt.Errorf("%s is still there", now[i].Name))
				}
			}
		}
		return err
	})
}

// secret changes the fabric's Secret; restore puts it back.
func (s *scenario) secret(spoil func(*testing.T, *corev1.Secret) *corev1.Secret) (restore func()) {
	s.t.Helper()
	secrets := s.client.CoreV1().Secrets(device.AgentNamespace)
	name := "cohdi-fabric-" + string(fabric)
	good, err := secrets.Get(s.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	good.ResourceVersion, good.UID = "", ""
	put := func(ctx context.Context, secret *corev1.Secret) error {
		if failed := secrets.Delete(ctx, name, metav1.DeleteOptions{}); failed != nil || secret == nil {
			return failed
		}
		_, failed := secrets.Create(ctx, secret, metav1.CreateOptions{})
		return failed
	}
	if err = put(s.t.Context(), spoil(s.t, good.DeepCopy())); err != nil {
		s.t.Fatal(err)
	}
	restored := false
	restore = func() {
		if restored {
			return
		}
		restored = true
		ctx := context.WithoutCancel(s.t.Context())
		_ = secrets.Delete(ctx, name, metav1.DeleteOptions{}) // there may be none
		if _, err := secrets.Create(ctx, good, metav1.CreateOptions{}); err != nil {
			s.t.Errorf("restore the Secret: %v", err)
		}
		s.touchAgents(ctx)
	}
	s.t.Cleanup(restore)
	return restore
}

// touchAgents makes the kubelets look at the agents' volumes now and not at the next minute.
func (s *scenario) touchAgents(ctx context.Context) {
	s.t.Helper()
	pods, err := s.agents(ctx, "")
	if err != nil {
		s.t.Error(err)
	}
	for i := range pods {
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"test.cohdi.io/touched":%q}}}`, time.Now().Format(time.RFC3339Nano))
		_, err := s.client.CoreV1().Pods(device.AgentNamespace).Patch(ctx, pods[i].Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		if err != nil {
			s.t.Errorf("touch agent: %v", err)
		}
	}
}

// TestBadUsage: what is wrong with flags or configuration is said in one line, and the exit code is 2.
func TestBadUsage(t *testing.T) {
	agent := env.program(t)
	bad := filepath.Join("testdata", "bad.yaml")
	for _, args := range [][]string{
		{"walk"},
		{"run", "--no-such-flag"},
		{"run", "--config=" + bad},
		{"run", "--node-name=n1", "--pod-uid=1", "--config=" + bad},
		{"run", "--node-name=n1", "--pod-uid=1", "--config=testdata/none.yaml"},
		{"config", "check", bad},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			stdout, stderr, code := call(t, agent, args...)
			if code != 2 || strings.Count(stderr, "\n") != 1 || stdout != "" {
				t.Errorf("exit code %d, standard output %q, standard error %q; want 2 and one line", code, stdout, stderr)
			}
		})
	}
}

// program is the agent's program as it was installed.
func (e *environment) program(t *testing.T) string {
	t.Helper()
	pid, err := e.process(t.Context(), localkube.Nodes()[0].Name)
	if err != nil {
		t.Fatal(err)
	}
	from, err := os.Open(fmt.Sprintf("/proc/%d/root/usr/bin/cohdi-agent", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	name := filepath.Join(t.TempDir(), "cohdi-agent")
	to, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = io.Copy(to, from); err == nil {
		err = to.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// call runs a program to its end.
func call(t *testing.T, program string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %s: %v", program, err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// TestGPUConflict: where another driver advertises the node's GPUs, nothing is offered until it is gone.
func TestGPUConflict(t *testing.T) {
	s := begin(t)
	const driver = "gpu.nvidia.com"
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "n1-" + driver},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: new("n1"), Pool: resourceapi.ResourcePool{Name: "n1", ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0"}},
		},
	}
	slices := s.client.ResourceV1().ResourceSlices()
	if _, err := slices.Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = slices.Delete(context.Background(), slice.Name, metav1.DeleteOptions{}) // usually gone
	})
	await(t, "the Node says so", soon, s.nodeSays("n1", nodestatus.GPUConflict, corev1.ConditionTrue, driver))
	await(t, "the other Node has no conflict", soon, s.nodeSays("n2", nodestatus.GPUConflict, corev1.ConditionFalse, ""))
	await(t, "nothing can be attached to n1", soon, func(ctx context.Context) error {
		n, err := s.client.CoreV1().Nodes().Get(ctx, "n1", metav1.GetOptions{})
		if v := n.GetLabels()[device.Model(a100).AttachableLabel()]; err == nil && v == "true" {
			err = errors.New("its label says that it can")
		}
		return err
	})
	s.template("one", a100, 1)
	s.pod("anywhere", claiming("one"))
	if pod := s.runs("anywhere", running); pod.Spec.NodeName != "n2" {
		t.Errorf("the Pod runs on %s, want n2", pod.Spec.NodeName)
	}
	s.pod("waiting", claiming("one"), on("n1"))
	s.steady("the wait of the Pod for n1", 5*time.Second, func(ctx context.Context) error {
		pod, err := s.client.CoreV1().Pods(s.ns).Get(ctx, "waiting", metav1.GetOptions{})
		if err == nil && pod.Spec.NodeName != "" {
			err = errors.New("it was placed")
		}
		return err
	})
	if err := slices.Delete(t.Context(), slice.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "the Node says that it is over", soon, s.nodeSays("n1", nodestatus.GPUConflict, corev1.ConditionFalse, ""))
	s.runs("waiting", again)
	s.settled()
}
