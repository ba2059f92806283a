// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// build puts GPU n into the node, and claims it.
func (w *world) build(claim string, n int) *resourceapi.ResourceClaim {
	w.mu.Lock()
	w.gpus[uuidOf(n)] = GPU{UUID: uuidOf(n), PCI: device.PCIAddress{Bus: uint8(n + 1)}, Minor: n, Name: "NVIDIA A100"}
	w.mu.Unlock()
	c := w.claim(claim, device.BuiltInUnit(uuidOf(n)).Entry())
	c.Status.Allocation.Devices.Results[0].Pool = w.node
	return c
}

func TestPrepareBuiltIn(t *testing.T) {
	w := newWorld(t)
	c := w.build("c", 3)
	p, _, stop := w.serve("1")
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	kubelet := w.dra()
	answer, err := kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: draClaims(c)})
	if err != nil || answer.Claims["uid-c"].GetError() != "" {
		t.Fatalf("prepare: %v, %v", answer, err)
	}
	d := answer.Claims["uid-c"].Devices[0]
	if d.PoolName != "n1" || d.DeviceName != "gpu-00000000-0000-4000-8000-000000000003" || len(d.CdiDeviceIds) != 2 {
		t.Errorf("device %v", d)
	}
	if spec := w.spec(c); !strings.Contains(spec, "/dev/nvidia3") {
		t.Errorf("spec:\n%s", spec)
	}
	undone, err := kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: draClaims(c)})
	if err != nil || undone.Claims["uid-c"].GetError() != "" {
		t.Fatalf("unprepare: %v, %v", undone, err)
	}
	w.traceless(p, c)
}

// One GPU, two claims: by the node's pool and as a unit, in both orders, and two of the node's pool.
func TestPrepareBuiltInOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		first, second func(*world) *resourceapi.ResourceClaim
		reason        string
	}{
		"built-in twice": {
			func(w *world) *resourceapi.ResourceClaim { return w.build("a", 0) },
			func(w *world) *resourceapi.ResourceClaim { return w.build("b", 0) },
			"to be unprepared for claim team/a",
		},
		"leased, then built-in": {
			func(w *world) *resourceapi.ResourceClaim {
				c := w.claim("a", "a100-0")
				w.attach("a100-0", 0, c)
				return c
			},
			func(w *world) *resourceapi.ResourceClaim { return w.build("b", 0) },
			"it is unit a100-0 of fabric 0",
		},
		"built-in, then leased": {
			func(w *world) *resourceapi.ResourceClaim { return w.build("a", 0) },
			func(w *world) *resourceapi.ResourceClaim {
				c := w.claim("b", "a100-0")
				w.attach("a100-0", 0, c)
				return c
			},
			"to be unprepared for claim team/a",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.known()
				mustPrepare(t, p, tc.first(w))
				second := tc.second(w)
				if _, err := prepare(t.Context(), t, p, second); err == nil || !strings.Contains(err.Error(), tc.reason) {
					t.Errorf("error %v, want it to say %q", err, tc.reason)
				}
				w.traceless(p, second)
			})
		})
	}
}

func TestPrepareBuiltInOfOthers(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	c := w.build("c", 0)
	c.Status.Allocation.Devices.Results[0].Pool = "n2"
	if _, err := prepare(t.Context(), t, p, c); err == nil || !strings.Contains(err.Error(), "n2/gpu-") {
		t.Errorf("another node's GPU: %v", err)
	}
}

// What no lease knows comes back from the claims: built-in GPUs of this node, and admin access to its units.
func TestDamagedCheckpointRebuiltFromClaims(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	own, fled, watcher := w.build("own", 7), w.build("fled", 8), w.claim("watcher", "a100-0-ready")
	watcher.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	w.attach("a100-0", 0, nil)
	for _, c := range []*resourceapi.ResourceClaim{own, fled, watcher} {
		mustPrepare(t, p, c)
	}
	away := w.build("away", 7)
	away.Status.Allocation.Devices.Results[0].Pool = "n2"
	elsewhere := w.claim("elsewhere", "a100-0")
	elsewhere.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	elsewhere.Status.Allocation.NodeSelector = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"n2"}}},
	}}}
	if err := os.Truncate(p.checkpoint.path(), 30); err != nil {
		t.Fatal(err)
	}
	unprepare(t, p, fled)
	w.tidy(p)
	r, err := p.checkpoint.read()
	if err != nil {
		t.Fatal(err)
	}
	got := map[types.UID]string{}
	for uid, e := range r.Claims {
		got[uid] = fmt.Sprintf("%s/%s %s admin=%v %s", e.Namespace, e.Name, e.Devices[0].Unit, e.Devices[0].Admin, e.Devices[0].UUID)
	}
	want := map[types.UID]string{
		"uid-own":     "team/own gpu-00000000-0000-4000-8000-000000000007 admin=false " + string(uuidOf(7)),
		"uid-watcher": "team/watcher a100-0 admin=true " + string(uuidOf(0)),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rebuilt (-want +got):\n%s", diff)
	}
	if owners, known := p.PreparedBy("0", "a100-0"); !known || !cmp.Equal(owners, []types.UID{"uid-watcher"}) {
		t.Errorf("PreparedBy = %v, %v", owners, known)
	}
}

// The pool is written by the node's name, from whichever side comes first, and taken away again.
func TestPublish(t *testing.T) {
	for _, early := range []bool{true, false} {
		t.Run(fmt.Sprintf("early=%v", early), func(t *testing.T) {
			w := newWorld(t)
			client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "node-uid"}})
			var made atomic.Int32
			client.PrependReactor("create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
				if create, ok := a.(clienttesting.CreateAction); ok {
					if s, ok := create.GetObject().(*resourceapi.ResourceSlice); ok && s.Name == "" {
						s.Name = fmt.Sprintf("%s%d", s.GenerateName, made.Add(1))
					}
				}
				return false, nil, nil
			})
			p, _, stop := w.serveWith("1", client)
			defer stop()
			w.dra()
			offer := func(names ...string) {
				t.Helper()
				s := resourceslice.Slice{}
				for _, n := range names {
					s.Devices = append(s.Devices, resourceapi.Device{Name: n})
				}
				r := resourceslice.DriverResources{}
				if len(names) > 0 {
					r.Pools = map[string]resourceslice.Pool{"n1": {Slices: []resourceslice.Slice{s}}}
				}
				if err := p.Publish(t.Context(), r); err != nil {
					t.Fatal(err)
				}
			}
			shows := func(want ...string) {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				for {
					list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
					if err != nil {
						t.Fatal(err)
					}
					var got []string
					for _, s := range list.Items {
						for _, d := range s.Spec.Devices {
							got = append(got, fmt.Sprintf("%s %s %s %s", *s.Spec.NodeName, s.Spec.Pool.Name, s.OwnerReferences[0].UID, d.Name))
						}
					}
					if cmp.Equal(want, got) {
						return
					}
					select {
					case <-ctx.Done():
						t.Fatalf("the API server shows %v, want %v", got, want)
					case <-time.After(10 * time.Millisecond):
					}
				}
			}
			if !early {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				for p.publishing() == nil {
					select {
					case <-ctx.Done():
						t.Fatal("the plugin never began to publish")
					case <-time.After(time.Millisecond):
					}
				}
			}
			offer("gpu-a", "gpu-b")
			shows("n1 n1 node-uid gpu-a", "n1 n1 node-uid gpu-b")
			offer("gpu-b")
			shows("n1 n1 node-uid gpu-b")
			offer()
			shows()
		})
	}
}

func (p *Plugin) publishing() publisher {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.helper
}
