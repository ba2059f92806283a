// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/node"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func gpu(t *testing.T) device.GPUUUID {
	t.Helper()
	u, err := device.ParseGPUUUID("GPU-1b7e8d9c-0000-4000-8000-00000000abcd")
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func units(t *testing.T) []node.UnitStatus {
	t.Helper()
	return []node.UnitStatus{{
		Lease: device.Lease{
			Fabric: "0", Unit: "a100-0", Node: "n1", Phase: device.Attached, ChangedAt: now.Add(-90 * time.Second),
			Attempt: device.Attempt{Namespace: "team", Name: "pod-gpu-x7", UID: "u", AllocatedAt: "t", Node: "n1", Pool: "fabric-0", Entry: "a100-0"},
			PCI:     device.PCIAddress{Bus: 0x3b}, UUID: gpu(t),
		},
		Doing: attach.Wait, Why: "in use",
	}, {
		Lease: device.Lease{Fabric: "0", Unit: "a100-1", Node: "n1", Phase: device.Attaching, ChangedAt: now.Add(-5 * time.Minute)},
		Doing: attach.Wait, Why: "the manager\tis busy", Wake: now.Add(7 * time.Second),
	}, {
		Lease: device.Lease{Fabric: "0", Unit: "l40s-0", Node: "n1", Phase: device.Attached, ChangedAt: now.Add(-time.Hour), IdleSince: now.Add(-3 * time.Minute)},
		Doing: attach.Wait, Why: "waits", Wake: now.Add(999 * time.Millisecond),
	}, {
		Lease: device.Lease{Fabric: "0", Unit: "l40s-1", Node: "n1", Phase: device.Releasing, ChangedAt: now},
		Doing: attach.Drain, Why: "nobody uses it",
	}}
}

// others is a node without units: what is built-in, not known, leased or foreign.
func others(t *testing.T) node.Status {
	t.Helper()
	at := func(bus uint8) device.PCIAddress { return device.PCIAddress{Bus: bus} }
	return node.Status{
		GPUs: []attach.Placed{
			{Present: attach.Present{Address: at(0x17), UUID: gpu(t), Name: "NVIDIA H100", Since: now}, Owner: attach.BuiltIn, Why: "the fabric manager does not list it"},
			{Present: attach.Present{Address: at(0x18), Since: now}, Owner: attach.Unclassified, Why: "the driver does not show it"},
			{Present: attach.Present{Address: at(0x19), UUID: "GPU-2", Since: now}, Owner: attach.Leased, Unit: "a100-0", Why: "it is unit a100-0"},
		},
		Foreign: []device.OnFabric{{ID: "res-8", UUID: "GPU-2"}, {ID: "res-9", Model: "NVIDIA-A100-PCIE-80GB"}},
		Trouble: "connection refused",
	}
}

func TestWriteNode(t *testing.T) {
	for _, tc := range []struct {
		name string
		of   node.Status
		want string
	}{
		{"nothing", node.Status{Node: "n1"}, "Node n1\n\nThe node holds no unit of a fabric.\n"},
		{"some", node.Status{Units: units(t)}, strings.TrimPrefix(`
UNIT    PHASE           SINCE  CLAIM            PCI ADDRESS   UUID                                      NOW
a100-0  Attached        90s    team/pod-gpu-x7  0000:3b:00.0  GPU-1b7e8d9c-0000-4000-8000-00000000abcd  in use
a100-1  Attaching       5m00s  -                -             -                                         the manager is busy (looks again in 7s)
l40s-0  Attached, idle  3m00s  -                -             -                                         waits
l40s-1  Releasing       0s     -                -             -                                         has the driver let go of it: nobody uses it
`, "\n")},
		{"others", others(t), strings.TrimPrefix(`
The node holds no unit of a fabric.

GPU                    PCI ADDRESS   UUID                                      IS            BECAUSE
NVIDIA H100            0000:17:00.0  GPU-1b7e8d9c-0000-4000-8000-00000000abcd  built-in      the fabric manager does not list it
-                      0000:18:00.0  -                                         unclassified  the driver does not show it
NVIDIA-A100-PCIE-80GB  -             -                                         foreign       the fabric manager lists it as res-9, and the bus does not show it

The fabric manager's list could not be read: connection refused
`, "\n")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got strings.Builder
			if err := WriteNode(&got, tc.of, now); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got.String()); diff != "" {
				t.Errorf("table (-want +got):\n%s", diff)
			}
		})
	}
}

// TestWords: no action shows by the name that it has in the code.
func TestWords(t *testing.T) {
	for _, k := range attach.Kinds() {
		if words(k) == "" && k != attach.Wait {
			t.Errorf("there are no words for %s", k)
		}
	}
}

func TestAsk(t *testing.T) {
	answer := func(w http.ResponseWriter, _ *http.Request) {
		if err := json.NewEncoder(w).Encode(node.Status{Units: units(t), GPUs: others(t).GPUs}); err != nil {
			t.Error(err)
		}
	}
	for _, tc := range []struct {
		name    string
		handler http.HandlerFunc
		want    string
	}{
		{"answers", answer, ""},
		{"is not ready", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusServiceUnavailable) }, "it answered 503"},
		{"answers something else", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) }, "read the answer of the agent at http"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := httptest.NewServer(tc.handler)
			defer server.Close()
			got, err := Ask(t.Context(), server.Client(), server.URL+"/status")
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got %v, want %q", err, tc.want)
				}
				return
			}
			if diff := cmp.Diff(node.Status{Units: units(t), GPUs: others(t).GPUs}, got); err != nil || diff != "" {
				t.Errorf("%v; units (-want +got):\n%s", err, diff)
			}
		})
	}
	t.Run("is not there", func(t *testing.T) {
		server := httptest.NewServer(http.NotFoundHandler())
		server.Close()
		if _, err := Ask(t.Context(), http.DefaultClient, server.URL); err == nil || !strings.Contains(err.Error(), "kubectl exec -n cohdi-system") {
			t.Errorf("got %v, want what to do", err)
		}
	})
}

func TestFleet(t *testing.T) {
	clk := clocktesting.NewFakePassiveClock(now)
	leader := "n1/uid"
	client := fake.NewClientset(
		&coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: device.LeaseNamespace, Name: "fabric-0", Labels: map[string]string{device.LabelElection: "0"}},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &leader},
		},
		&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
			Namespace: device.LeaseNamespace, Name: "device-1-x-0", Labels: map[string]string{device.LabelFabric: "1", device.LabelNode: "n9"},
		}},
	)
	store, err := lease.NewFabricStore("0", lease.Options{Client: client, Clock: clk, Changed: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []device.Lease{
		{Fabric: "0", Unit: "l40s-0", Model: "l40s", Node: "n2", Machine: "9b1d3e20-1111-4a6b-8c00-00000000a002", Phase: device.Assigned, ChangedAt: now},
		{Fabric: "0", Unit: "a100-0", Model: "a100", Node: "n1", Machine: "9b1d3e20-1111-4a6b-8c00-00000000a001", Phase: device.Assigned, ChangedAt: now},
	} {
		if _, err = store.Create(t.Context(), l); err != nil {
			t.Fatal(err)
		}
	}
	f, err := Gather(t.Context(), client, clk)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[device.FabricID]string{"0": leader, "1": ""}, f.Leaders); diff != "" {
		t.Errorf("leaders (-want +got):\n%s", diff)
	}
	if len(f.Leases) != 2 || len(f.Unreadable) != 1 {
		t.Fatalf("gathered %d leases and %d unreadable ones, want 2 and 1", len(f.Leases), len(f.Unreadable))
	}
	for i := range f.Leases {
		if f.Leases[i].Unit == "a100-0" {
			f.Leases[i].Phase, f.Leases[i].IdleSince, f.Leases[i].PCI = device.Attached, now.Add(2*time.Hour), device.PCIAddress{Bus: 0x3b}
		} else {
			f.Leases[i].Failure, f.Leases[i].Phase = device.Failure{Reason: "NoCapacity", Message: "none is\nfree"}, device.Failed
		}
	}
	var got strings.Builder
	if err := WriteFleet(&got, f, now.Add(3*time.Hour)); err != nil {
		t.Fatal(err)
	}
	want := strings.TrimPrefix(`
Fabric 0 is led by n1/uid.
Fabric 1 is led by nobody.
NODE  FABRIC  UNIT    PHASE           SINCE  CLAIM  PCI ADDRESS   UUID  NOTE
n1    0       a100-0  Attached, idle  60m    -      0000:3b:00.0  -     -
n2    0       l40s-0  Failed          3h     -      -             -     NoCapacity: none is free
-     1       -       ?               -      -      -             -     `, "\n") + f.Unreadable[0].Error() + "\n"
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
}

func TestWriteFleetEmpty(t *testing.T) {
	var got strings.Builder
	if err := WriteFleet(&got, Fleet{Leaders: map[device.FabricID]string{"0": ""}}, now); err != nil {
		t.Fatal(err)
	}
	if want := "Fabric 0 is led by nobody.\nNo unit is out of the pool.\n"; got.String() != want {
		t.Errorf("got %q, want %q", got.String(), want)
	}
}

func TestAge(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 119 * time.Second: "119s", 2 * time.Minute: "2m00s", 61 * time.Minute: "61m", 47 * time.Hour: "47h", 48 * time.Hour: "2d",
	} {
		if got := age(d); got != want {
			t.Errorf("age(%s) = %s, want %s", d, got, want)
		}
	}
}
