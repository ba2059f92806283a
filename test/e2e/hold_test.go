// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// TestHeldDevice: what a process has open is not taken away, and the lease says who it is.
func TestHeldDevice(t *testing.T) {
	for _, tc := range []struct {
		name string
		// idle: it is opened only when the unit is idle already.
		idle bool
	}{
		{"since its claim is gone", false},
		{"since it was idle", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := begin(t)
			s.template("one", a100, 1)
			pod := s.pod("pod", claiming("one"))
			pod = s.runs(pod.Name, running)
			own := s.sees("pod")
			units, _ := s.units("pod")
			if tc.idle {
				s.delete("pod")
				s.idle(units[0])
			}
			pid, release := s.hold(pod.Spec.NodeName, own[0])
			if !tc.idle {
				s.delete("pod")
			}
			if err := s.giveBack(t.Context()); err != nil {
				t.Fatal(err)
			}
			who := fmt.Sprintf("pid %d", pid)
			s.leased(units[0], "held by "+who, func(l device.Lease) bool { return strings.Contains(l.HeldBy, who) })
			node, err := s.client.CoreV1().Nodes().Get(t.Context(), pod.Spec.NodeName, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			// Events of one kind that follow each other are counted, with the first one's text.
			s.hasEvent(metav1.NamespaceDefault, node.UID, nodestatus.ReasonHeld)
			s.steady("the attachment of the held device", 6*time.Second, func(ctx context.Context) error {
				state, err := s.sim.State(ctx)
				if err != nil {
					return err
				}
				if d, _ := state.Device(own[0].ID); d.Phase != simapi.PhaseAttached || !d.OnBus {
					return fmt.Errorf("it is %s, on the bus: %v", d.Phase, d.OnBus)
				}
				return nil
			})
			release()
			s.settled()
		})
	}
}

// hold makes a process of the node open the GPU, until release or the end of the test.
func (s *scenario) hold(node string, gpu simapi.Device) (pid int, release func()) {
	s.t.Helper()
	n, err := localkube.FindNode(node)
	if err != nil {
		s.t.Fatal(err)
	}
	file := fmt.Sprintf("/dev/nvidia%d", gpu.Minor)
	cmd, err := s.cluster.NodeCommand(context.WithoutCancel(s.t.Context()), n, "sh", "-c", "exec 3<"+file+"; exec sleep 600")
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		s.t.Fatalf("open %s on %s: %v", file, node, err)
	}
	ended := false
	release = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Kill() // an error says that it has ended
			_ = cmd.Wait()         // killed
		}
	}
	s.t.Cleanup(release)
	await(s.t, file+" is open", soon, func(context.Context) error {
		to, err := os.Readlink(filepath.Join("/proc", fmt.Sprint(cmd.Process.Pid), "fd", "3"))
		if err == nil && to != file {
			err = fmt.Errorf("the file is %s", to)
		}
		return err
	})
	return cmd.Process.Pid, release
}
