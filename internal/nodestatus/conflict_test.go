// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func slice(driver, node string, devices ...resourcev1.Device) *resourcev1.ResourceSlice {
	s := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: driver + "-" + node},
		Spec:       resourcev1.ResourceSliceSpec{Driver: driver, Devices: devices},
	}
	if node != "" {
		s.Spec.NodeName = &node
	}
	return s
}

func at(attribute, value string) resourcev1.Device {
	return resourcev1.Device{Name: "d", Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{
		resourcev1.QualifiedName(attribute): {StringValue: &value},
	}}
}

func TestConflicts(t *testing.T) {
	gpu := device.PCIAddress{Bus: 0x3b}
	n1, n2 := "n1", "n2"
	for _, tt := range []struct {
		name        string
		slices      []*resourcev1.ResourceSlice
		allocatable map[string]string
		tolerated   []string
		want        []Advertiser
	}{
		{name: "nobody"},
		{name: "ourselves", slices: []*resourcev1.ResourceSlice{slice(device.Driver, "n1", at("pciBusID", "0000:3b:00.0"))}},
		{
			name: "NVIDIA's driver", slices: []*resourcev1.ResourceSlice{slice("gpu.nvidia.com", "n1", resourcev1.Device{}, resourcev1.Device{})},
			want: []Advertiser{{DRA: true, Name: "gpu.nvidia.com", Devices: 2}},
		},
		{name: "on another node", slices: []*resourcev1.ResourceSlice{slice("gpu.nvidia.com", "n2", resourcev1.Device{})}},
		{name: "no devices", slices: []*resourcev1.ResourceSlice{slice("gpu.nvidia.com", "n1")}},
		{
			name: "node name per device",
			slices: []*resourcev1.ResourceSlice{slice("gpu.nvidia.com", "",
				resourcev1.Device{NodeName: &n1}, resourcev1.Device{NodeName: &n2})},
			want: []Advertiser{{DRA: true, Name: "gpu.nvidia.com", Devices: 1}},
		},
		{
			name: "unknown driver at our address",
			slices: []*resourcev1.ResourceSlice{
				slice("acme.example", "n1", at("resource.kubernetes.io/pciBusID", "0000:3b:00.0"), at("pciBusID", "0000:99:00.0")),
			},
			want: []Advertiser{{DRA: true, Name: "acme.example", Devices: 1}},
		},
		{name: "unknown driver elsewhere", slices: []*resourcev1.ResourceSlice{slice("nic.example", "n1", at("pciBusID", "0000:99:00.0"), at("pciBusID", "nonsense"))}},
		{
			name:        "device plugins",
			allocatable: map[string]string{"nvidia.com/gpu": "8", "nvidia.com/mig-1g.10gb": "7", "amd.com/gpu": "0", "cpu": "64", "nvidia.com/gpumem": "1"},
			want:        []Advertiser{{Name: "nvidia.com/gpu", Devices: 8}, {Name: "nvidia.com/mig-1g.10gb", Devices: 7}},
		},
		{
			name: "tolerated", tolerated: []string{"gpu.nvidia.com", "nvidia.com/gpu"},
			slices:      []*resourcev1.ResourceSlice{slice("gpu.nvidia.com", "n1", resourcev1.Device{})},
			allocatable: map[string]string{"nvidia.com/gpu": "8"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			node := newNode(nil)
			node.Status.Allocatable = corev1.ResourceList{}
			for name, q := range tt.allocatable {
				node.Status.Allocatable[corev1.ResourceName(name)] = resource.MustParse(q)
			}
			got := Conflicts(node, tt.slices, []device.PCIAddress{gpu}, tt.tolerated)
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("Conflicts (-want +got):\n%s", diff)
			}
			c := ConflictCondition(got)
			if (c.Status == corev1.ConditionTrue) != (len(tt.want) > 0) {
				t.Errorf("condition %+v", c)
			}
			for _, a := range tt.want {
				if !strings.Contains(c.Message, a.Name) {
					t.Errorf("message %q does not name %s", c.Message, a.Name)
				}
			}
		})
	}
}

// TestWatch: a driver that comes later is seen, and its going too.
func TestWatch(t *testing.T) {
	c := fake.NewClientset(newNode(nil))
	w := NewWatch(c, "n1")
	changed := make(chan struct{}, 100)
	w.OnChange(func() { changed <- struct{}{} })
	if _, err := w.Conflicts(nil, nil); err == nil {
		t.Error("Conflicts before the API server was read: no error")
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.Run(ctx) }()
	if err := w.WaitForSync(t.Context()); err != nil {
		t.Fatal(err)
	}
	find := func(want int) {
		t.Helper()
		for {
			got, err := w.Conflicts(nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if len(got) == want {
				return
			}
			<-changed
		}
	}
	find(0)
	if _, err := c.ResourceV1().ResourceSlices().Create(t.Context(), slice("gpu.nvidia.com", "n1", resourcev1.Device{Name: "gpu-0"}), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	find(1)
	if err := c.ResourceV1().ResourceSlices().Delete(t.Context(), "gpu.nvidia.com-n1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	find(0)
	own := slice(device.Driver, "n1")
	own.Spec.Pool.Name = "n1"
	if _, err := c.ResourceV1().ResourceSlices().Create(t.Context(), own, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for !w.HasPool("n1") {
		<-changed
	}
	if w.HasPool("n2") {
		t.Error("a pool that nobody publishes")
	}
	find(0)
	if n, err := w.Node("n1"); err != nil || n.UID != "uid-1" {
		t.Errorf("Node = %v, %v", n, err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
