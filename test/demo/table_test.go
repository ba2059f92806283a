// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cohdi/cohdi-agent/internal/device"
)

var start = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

func aPod(name, node string, phase corev1.PodPhase) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("pod-" + name)},
		Spec:       corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: phase},
	}
}

// aClaim is that of a Pod; without devices it is not allocated. A device with a condition is "unit=condition".
func aClaim(pod string, devices ...string) *resourcev1.ResourceClaim {
	c := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Name: pod + "-gpu", UID: types.UID("claim-" + pod),
		OwnerReferences: []metav1.OwnerReference{{Kind: "Pod", Name: pod, UID: types.UID("pod-" + pod)}},
	}}
	if len(devices) == 0 {
		return c
	}
	c.Status.Allocation = &resourcev1.AllocationResult{}
	for _, d := range devices {
		name, condition, _ := strings.Cut(d, "=")
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourcev1.DeviceRequestAllocationResult{Driver: device.Driver, Pool: "fabric-0", Device: name})
		if condition != "" {
			c.Status.Devices = append(c.Status.Devices, resourcev1.AllocatedDeviceStatus{
				Driver: device.Driver, Pool: "fabric-0", Device: name,
				Conditions: []metav1.Condition{{Type: device.Driver + "/" + condition, Status: metav1.ConditionTrue}},
			})
		}
	}
	return c
}

func aLease(unit, node string, phase device.Phase, annotations map[string]string) *coordinationv1.Lease {
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Name: "device-0-" + unit, Labels: map[string]string{device.LabelNode: node, device.LabelPhase: string(phase)},
		Annotations: map[string]string{annUnit: unit},
	}}
	maps.Copy(l.Annotations, annotations)
	return l
}

func TestRows(t *testing.T) {
	for name, tc := range map[string]struct {
		told []any
		want []row
	}{
		"nothing": {},
		"a Pod whose claim has not been made": {
			[]any{aPod("first", "", "")},
			[]row{{Pod: "first", Phase: "Pending"}},
		},
		"a Pod that waits for the scheduler": {
			[]any{aPod("first", "", corev1.PodPending), aClaim("first")},
			[]row{{Pod: "first", Phase: "Pending", Claim: "waiting"}},
		},
		"a Pod with two GPUs in different phases": {
			[]any{
				aPod("second", "", corev1.PodPending), aClaim("second", "a100-1=Attached", "l40s-0"),
				aLease("a100-1", "n2", device.Attached, nil), aLease("l40s-0", "n2", device.Attaching, nil),
			},
			[]row{
				{"second", "Pending", "n2", "a100-1", "Attached", "Attached"},
				{"second", "Pending", "n2", "l40s-0", "allocated", "Attaching"},
			},
		},
		"an attach that failed": {
			[]any{aPod("first", "", corev1.PodPending), aClaim("first", "a100-0=AttachFailed"), aLease("a100-0", "n1", device.Failed, nil)},
			[]row{{"first", "Pending", "n1", "a100-0", "AttachFailed", "Failed"}},
		},
		"a GPU that was idle, and one that still is": {
			[]any{
				aPod("third", "n1", corev1.PodRunning), aClaim("third", "a100-0-ready"),
				aLease("a100-0", "n1", device.Attached, nil), aLease("l40s-0", "n2", device.Attached, map[string]string{annIdleSince: "2026-05-04T12:00:00Z"}),
			},
			[]row{
				{"third", "Running", "n1", "a100-0", "ready offer", "Attached"},
				{"", "", "n2", "l40s-0", "", "Attached, idle"},
			},
		},
		"a lease that is no device's": {
			[]any{&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "fabric-0"}}},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			for _, obj := range tc.told {
				w.told(obj, start)
			}
			if diff := cmp.Diff(tc.want, w.copyOf().rows()); diff != "" {
				t.Errorf("rows (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDraw_without_a_terminal_prints_what_changed(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out}
	s.start(start)
	waiting := row{Pod: "first", Phase: "Pending", Claim: "waiting"}
	given := row{"first", "Pending", "n1", "a100-0", "allocated", "Assigned"}
	other := row{Pod: "second", Phase: "Pending"}
	s.draw([]row{waiting, other}, at(0.1))
	s.draw([]row{waiting, other}, at(0.2))
	s.draw([]row{given, other}, at(1))
	s.draw([]row{other}, at(2))
	want := `            POD      PHASE        NODE  GPU       CLAIM         LEASE
  +  0.1 s  first    Pending      -     -         waiting       -
  +  0.1 s  second   Pending      -     -         -             -
  +  1.0 s  first    Pending      n1    a100-0    allocated     Assigned
  +  2.0 s  first    gone         -     a100-0    -             -
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
}

func TestDraw_on_a_terminal_replaces_the_table(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out, width: 40}
	s.start(start)
	s.draw([]row{{Pod: "first", Phase: "Pending"}, {Pod: "second", Phase: "Pending"}}, at(0.1))
	first := out.String()
	if got := strings.Count(first, "\n"); got != 3 || strings.Contains(first, "\x1b[3A") {
		t.Errorf("the first table has %d lines, want 3 and no way up: %q", got, first)
	}
	out.Reset()
	s.draw([]row{{Pod: "first", Phase: "Running", GPU: "a100-0"}}, at(1))
	again := out.String()
	if !strings.HasPrefix(again, "\x1b[3A") || strings.Count(again, "\n") != 3 || !strings.HasSuffix(again, "\x1b[J") {
		t.Errorf("the second table is not drawn over the first: %q", again)
	}
	for l := range strings.Lines(again) {
		l = strings.TrimPrefix(strings.TrimPrefix(l, "\x1b[3A"), "\r\x1b[2K")
		if len(l) > s.width {
			t.Errorf("a line is wider than the terminal: %q", l)
		}
	}
	out.Reset()
	s.draw([]row{{Pod: "first", Phase: "Running", GPU: "a100-0"}}, at(1.2))
	if got := out.String(); !strings.HasPrefix(got, "\x1b[2A") || strings.Contains(got, "second") {
		t.Errorf("the line of the Pod that is gone does not stay above: %q", got)
	}
	out.Reset()
	s.wipe()
	if got := out.String(); got != "\x1b[2A\r\x1b[J" {
		t.Errorf("the table is not taken away: %q", got)
	}
	s.draw([]row{{Pod: "first", Phase: "Running", GPU: "a100-0"}}, at(1.3))
	out.Reset()
	s.say("below")
	s.draw(nil, at(2))
	if strings.Contains(out.String(), "\x1b[3A") {
		t.Errorf("a table is drawn over what was said after the last: %q", out.String())
	}
}

// A unit that went back leaves a line, and a table without rows nothing.
func TestDraw_on_a_terminal_keeps_what_went_back(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out, width: 100}
	s.start(start)
	s.draw([]row{{Node: "n1", GPU: "a100-1", Lease: "Attached, idle"}}, at(20))
	s.draw([]row{{Node: "n1", GPU: "a100-1", Lease: "Releasing"}}, at(21))
	out.Reset()
	s.draw(nil, at(22.4))
	want := "\x1b[2A\r\x1b[2K   22.4 s  -        gone         n1    a100-1    -             was Releasing\n\x1b[J"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
	out.Reset()
	s.draw(nil, at(22.6))
	s.wipe()
	if got := out.String(); got != "\x1b[J" {
		t.Errorf("an empty table leaves %q", got)
	}
}

// Where there is no terminal's width to go by, as on a new pseudo-terminal, nothing is cut.
func TestNewScreen(t *testing.T) {
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no pseudo-terminal: %v", err)
	}
	defer pty.Close()
	for cols, want := range map[uint16]int{0: 0, 20: 40, 120: 120} {
		if err := unix.IoctlSetWinsize(int(pty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: cols}); err != nil {
			t.Fatal(err)
		}
		if got := newScreen(pty).width; got != want {
			t.Errorf("width on a terminal of %d columns = %d, want %d", cols, got, want)
		}
	}
}
