// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// full is a lease with every field set.
func full() device.Lease {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678901000, time.UTC)
	return device.Lease{
		Fabric: "0", Unit: "a100-3", Model: "a100",
		Node: "n1", NodeUID: "11111111-0000-4000-8000-000000000001", Machine: "9b1d3e20-1111-4a6b-8c00-00000000a001",
		Phase: device.Attaching,
		Attempt: device.Attempt{
			Namespace: "team-a", Name: "pod-gpu-x7", UID: "5b1e", AllocatedAt: "2026-01-02T03:04:05Z",
			Node: "n1", Pool: "fabric-0", Entry: "a100-3",
		},
		Failure: device.Failure{
			Reason: "NoCapacity", Message: "the manager said: \"none left\"\nask for less", Blame: device.BlameModel,
			RetryAfter: at.Add(time.Minute),
		},
		SetBefore: []string{"d1", "d2"}, AskedAt: at, Wanted: "d3", GPUsBefore: []string{"0000:01:00.0"}, Work: "job-1", FabricDevice: "d3",
		PCI: device.PCIAddress{Bus: 0x3b}, UUID: "GPU-1b7e8d9c-0000-4000-8000-00000000abcd",
		Kept: true, PreparedFor: []string{"u1"}, HeldBy: "python3 (pid 4711)", IdleSince: at,
		AcquiredAt: at, ChangedAt: at.Add(time.Second), Transitions: 7,
	}
}

// object is l as the API server stores it.
func object(l device.Lease) *coordinationv1.Lease {
	obj := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: device.LeaseNamespace, Name: device.LeaseName(l.Fabric, l.Unit),
		UID: "0f0f", ResourceVersion: "12",
	}}
	encode(obj, l)
	return obj
}

// stored is what decode makes of object(l).
func stored(l device.Lease) device.Lease {
	l.ObjectUID, l.Version = "0f0f", "12"
	return l
}

func TestEncode(t *testing.T) {
	got := object(full())
	at := metav1.NewMicroTime(full().AcquiredAt)
	changed := metav1.NewMicroTime(full().ChangedAt)
	holder, transitions := "n1", int32(7)
	want := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "cohdi-leases", Name: "device-0-a100-3", UID: "0f0f", ResourceVersion: "12",
			Finalizers: []string{"gpu.cohdi.io/attached"},
			Labels: map[string]string{
				"gpu.cohdi.io/fabric": "0", "gpu.cohdi.io/node": "n1", "gpu.cohdi.io/phase": "Attaching",
			},
			Annotations: map[string]string{
				"gpu.cohdi.io/schema":        "1",
				"gpu.cohdi.io/model":         "a100",
				"gpu.cohdi.io/unit":          "a100-3",
				"gpu.cohdi.io/attempt":       "team-a/pod-gpu-x7/5b1e 2026-01-02T03:04:05Z n1 fabric-0/a100-3",
				"gpu.cohdi.io/kept":          "true",
				"gpu.cohdi.io/prepared-for":  `["u1"]`,
				"gpu.cohdi.io/held-by":       "python3 (pid 4711)",
				"gpu.cohdi.io/idle-since":    "2026-01-02T03:04:05.678901Z",
				"gpu.cohdi.io/node-uid":      "11111111-0000-4000-8000-000000000001",
				"gpu.cohdi.io/machine":       "9b1d3e20-1111-4a6b-8c00-00000000a001",
				"gpu.cohdi.io/fabric-device": "d3",
				"gpu.cohdi.io/set-before":    `["d1","d2"]`,
				"gpu.cohdi.io/wanted-device": "d3",
				"gpu.cohdi.io/gpus-before":   `["0000:01:00.0"]`,
				"gpu.cohdi.io/work":          "job-1",
				"gpu.cohdi.io/asked-at":      "2026-01-02T03:04:05.678901Z",
				"gpu.cohdi.io/pci-address":   "0000:3b:00.0",
				"gpu.cohdi.io/gpu-uuid":      "GPU-1b7e8d9c-0000-4000-8000-00000000abcd",
				"gpu.cohdi.io/reason":        "NoCapacity",
				"gpu.cohdi.io/message":       "the manager said: \"none left\"\nask for less",
				"gpu.cohdi.io/blame":         "model",
				"gpu.cohdi.io/retry-after":   "2026-01-02T03:05:05.678901Z",
			},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, AcquireTime: &at, RenewTime: &changed, LeaseTransitions: &transitions},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("stored lease (-want +got):\n%s", diff)
	}
}

func TestEncode_keeps_what_is_not_ours(t *testing.T) {
	obj := object(full())
	obj.Labels["team"] = "a"
	obj.Annotations["note"] = "b"
	obj.Annotations[device.Driver+"/later"] = "of a newer release"
	obj.Annotations[annSchema] = "2"
	obj.Finalizers = append(obj.Finalizers, "example.com/other")
	want := obj.DeepCopy()
	want.Labels[device.LabelPhase] = "Attached"
	delete(want.Annotations, annReason)
	delete(want.Annotations, annSetBefore)

	l := full()
	l.Phase, l.Failure.Reason, l.SetBefore = device.Attached, "", nil
	encode(obj, l)
	if diff := cmp.Diff(want, obj); diff != "" {
		t.Errorf("stored lease (-want +got):\n%s", diff)
	}

	now := metav1.Now()
	obj.DeletionTimestamp, obj.Finalizers = &now, []string{"example.com/other"}
	encode(obj, l)
	if diff := cmp.Diff([]string{"example.com/other"}, obj.Finalizers); diff != "" {
		t.Errorf("finalizers of a lease that is being deleted (-want +got):\n%s", diff)
	}
}

func TestDecode(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*coordinationv1.Lease)
		want   func(*device.Lease)
	}{
		{name: "all fields"},
		{
			name:   "an older schema",
			change: func(o *coordinationv1.Lease) { o.Annotations[annSchema] = "0" },
		},
		{
			name:   "a newer schema with a phase that nobody knows here",
			change: func(o *coordinationv1.Lease) { o.Annotations[annSchema] = "2"; o.Labels[device.LabelPhase] = "Resting" },
			want:   func(l *device.Lease) { l.Phase = "Resting" },
		},
		{
			name:   "a set before that is empty is not one that was never stored",
			change: func(o *coordinationv1.Lease) { o.Annotations[annSetBefore] = "[]" },
			want:   func(l *device.Lease) { l.SetBefore = []string{} },
		},
		{
			name:   "a set before that was never stored",
			change: func(o *coordinationv1.Lease) { delete(o.Annotations, annSetBefore) },
			want:   func(l *device.Lease) { l.SetBefore = nil },
		},
		{
			name:   "deleted by a person",
			change: func(o *coordinationv1.Lease) { now := metav1.Now(); o.DeletionTimestamp = &now },
			want:   func(l *device.Lease) { l.Deleting = true },
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			obj, want := object(full()), stored(full())
			if tc.change != nil {
				tc.change(obj)
			}
			if tc.want != nil {
				tc.want(&want)
			}
			got, err := decode(obj)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("lease (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecode_reports(t *testing.T) {
	annotation := func(key, value string) func(*coordinationv1.Lease) {
		return func(o *coordinationv1.Lease) { o.Annotations[key] = value }
	}
	for _, tc := range []struct {
		field  string
		change func(*coordinationv1.Lease)
	}{
		{"annotation " + annSchema, func(o *coordinationv1.Lease) { delete(o.Annotations, annSchema) }},
		{"annotation " + annSchema, annotation(annSchema, "3")},
		{"annotation " + annSchema, annotation(annSchema, "one")},
		{"annotation " + annUnit, func(o *coordinationv1.Lease) { delete(o.Annotations, annUnit) }},
		{"annotation " + annModel, func(o *coordinationv1.Lease) { delete(o.Annotations, annModel) }},
		{"annotation " + annAttempt, annotation(annAttempt, "c1")},
		{"annotation " + annKept, annotation(annKept, "maybe")},
		{"annotation " + annPreparedFor, annotation(annPreparedFor, "u1,u2")},
		{"annotation " + annSetBefore, annotation(annSetBefore, "null")},
		{"annotation " + annIdleSince, annotation(annIdleSince, "yesterday")},
		{"annotation " + annMachine, annotation(annMachine, "n1")},
		{"annotation " + annPCIAddress, annotation(annPCIAddress, "3b")},
		{"annotation " + annGPUUUID, annotation(annGPUUUID, "4711")},
		{"annotation " + annRetryAfter, annotation(annRetryAfter, "9999-12-31T23:59:59-23:59")},
		{"label " + device.LabelPhase, func(o *coordinationv1.Lease) { delete(o.Labels, device.LabelPhase) }},
		{"label " + device.LabelFabric, func(o *coordinationv1.Lease) { delete(o.Labels, device.LabelFabric) }},
		{"label " + device.LabelNode, func(o *coordinationv1.Lease) { o.Labels[device.LabelNode] = "n2" }},
		{"spec.holderIdentity", func(o *coordinationv1.Lease) { o.Spec.HolderIdentity = nil }},
		{"metadata.name", func(o *coordinationv1.Lease) { o.Name = "device-0-a100-4" }},
	} {
		obj := object(full())
		tc.change(obj)
		_, err := decode(obj)
		var bad *DecodeError
		if !errors.As(err, &bad) || bad.Lease != obj.Name || bad.Field != tc.field {
			t.Errorf("%s: got %v", tc.field, err)
			continue
		}
		if text := err.Error(); !strings.Contains(text, "cohdi-leases/"+obj.Name) || !strings.Contains(text, tc.field) {
			t.Errorf("%s: the text does not say where to look: %s", tc.field, text)
		}
	}
}

// TestRoundTrip_any_lease stores and reads leases with any fields set or not.
func TestRoundTrip_any_lease(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		want := randomLease(r)
		// The way over the wire: what JSON does to the object counts too.
		b, err := json.Marshal(object(want))
		if err != nil {
			t.Fatal(err)
		}
		obj := &coordinationv1.Lease{}
		if err = json.Unmarshal(b, obj); err != nil {
			t.Fatal(err)
		}
		got, err := decode(obj)
		if err != nil {
			t.Fatalf("%v\n%s", err, b)
		}
		if diff := cmp.Diff(stored(want), got); diff != "" {
			t.Fatalf("lease (-want +got):\n%s", diff)
		}
	}
}

func randomLease(r *rand.Rand) device.Lease {
	maybe := func() bool { return r.IntN(2) == 0 }
	text := func() string {
		if maybe() {
			return ""
		}
		return []string{"x", "ä\u2028\"<>&\\", "two\nlines", "u1,u2", "[]", "null"}[r.IntN(6)]
	}
	instant := func() time.Time {
		if maybe() {
			return time.Time{}
		}
		return time.UnixMicro(r.Int64N(4e15)).UTC()
	}
	items := func() []string {
		if maybe() {
			return nil
		}
		out := []string{}
		for range r.IntN(3) {
			out = append(out, text())
		}
		return out
	}
	l := device.Lease{
		Fabric: device.FabricID(fmt.Sprint(r.IntN(3))), Unit: device.Unit(fmt.Sprintf("a100-%d", r.IntN(99))), Model: "a100",
		Node: "n" + strings.Repeat("x", r.IntN(200)), NodeUID: text(),
		Phase:   device.Phases()[r.IntN(len(device.Phases()))],
		Failure: device.Failure{Reason: text(), Message: text(), Blame: device.Blame(text()), RetryAfter: instant()},

		SetBefore: items(), AskedAt: instant(), Wanted: text(), GPUsBefore: items(), Work: text(), FabricDevice: text(),
		Kept: maybe(), PreparedFor: items(), HeldBy: text(), IdleSince: instant(),
		AcquiredAt: instant(), ChangedAt: instant(), Transitions: r.Int32(),
	}
	if maybe() {
		l.Attempt = full().Attempt
	}
	if maybe() {
		l.Machine, l.UUID = full().Machine, full().UUID
	}
	if maybe() {
		l.PCI = device.PCIAddress{Domain: r.Uint32(), Bus: 1, Device: uint8(r.IntN(32)), Function: uint8(r.IntN(8))}
	}
	return l
}

// FuzzDecode feeds what anybody may write into the annotations: whatever is read must be stored and read
// the same again.
func FuzzDecode(f *testing.F) {
	a := object(full()).Annotations
	f.Add(a[annAttempt], a[annPreparedFor], a[annSetBefore], a[annMachine], a[annPCIAddress], a[annGPUUUID], a[annRetryAfter], "n1", "Attached")
	f.Add("", "", "[]", "", "", "", "0001-01-01T00:00:00Z", "n1", "Resting")
	f.Fuzz(func(t *testing.T, attempt, preparedFor, setBefore, machine, pci, uuid, retryAfter, node, phase string) {
		obj := object(full())
		obj.Spec.HolderIdentity = &node
		obj.Labels[device.LabelNode] = device.NodeLabelValue(node)
		obj.Labels[device.LabelPhase] = phase
		maps.Copy(obj.Annotations, map[string]string{
			annAttempt: attempt, annPreparedFor: preparedFor, annSetBefore: setBefore, annMachine: machine,
			annPCIAddress: pci, annGPUUUID: uuid, annRetryAfter: retryAfter,
		})
		l, err := decode(obj)
		if err != nil {
			if _, ok := errors.AsType[*DecodeError](err); !ok {
				t.Fatalf("%v is not a DecodeError", err)
			}
			return
		}
		encode(obj, l)
		again, err := decode(obj)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(l, again); diff != "" {
			t.Errorf("read, stored and read (-first +second):\n%s", diff)
		}
	})
}
