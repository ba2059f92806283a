// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Advertiser is somebody else who offers this node's GPUs to Pods.
type Advertiser struct {
	// DRA: a driver that publishes ResourceSlices; otherwise a device plugin.
	DRA bool
	// Name is the driver's, or the extended resource's.
	Name string
	// Devices is how many it offers.
	Devices int64
}

// String names it for people.
func (a Advertiser) String() string {
	if a.DRA {
		return fmt.Sprintf("DRA driver %s (%d devices)", a.Name, a.Devices)
	}
	return fmt.Sprintf("device plugin for %s (%d)", a.Name, a.Devices)
}

// busIDAttributes are where drivers publish a device's PCI address.
func busIDAttributes() []string { return []string{"pciBusID", "pcieBusID", "pciAddress"} }

// gpuDrivers publish GPUs, whatever attributes they use.
func gpuDrivers() []string {
	return []string{"gpu.nvidia.com", "gpu.amd.com", "gpu.intel.com", "hami-core-gpu.project-hami.io"}
}

// gpuResources are what device plugins call GPUs; a name that ends in "*" stands for all that begin so.
func gpuResources() []string {
	return []string{
		"nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*", "nvidia.com/vgpu*", "nvidia.com/pgpu",
		"amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "aliyun.com/gpu*", "tencent.com/vcuda-core",
	}
}

// Conflicts returns who else advertises GPUs of this node: known GPU drivers, any driver that publishes a
// device at the address of one of our GPUs, and device plugins. What is named in tolerated does not count.
// Slices of other nodes may be among them.
func Conflicts(node *corev1.Node, published []*resourcev1.ResourceSlice, gpus []device.PCIAddress, tolerated []string) []Advertiser {
	found := map[string]Advertiser{}
	for _, s := range published {
		driver := s.Spec.Driver
		if driver == device.Driver || slices.Contains(tolerated, driver) {
			continue
		}
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			if !onNode(s, d, node.Name) || (!slices.Contains(gpuDrivers(), driver) && !atAny(d, gpus)) {
				continue
			}
			a := found[driver]
			found[driver] = Advertiser{DRA: true, Name: driver, Devices: a.Devices + 1}
		}
	}
	// Allocatable, not capacity: the kubelet keeps the capacity of a device plugin that has gone.
	for name, quantity := range node.Status.Allocatable {
		if n := quantity.Value(); n > 0 && isGPUResource(string(name)) && !slices.Contains(tolerated, string(name)) {
			found[string(name)] = Advertiser{Name: string(name), Devices: n}
		}
	}
	all := make([]Advertiser, 0, len(found))
	for _, a := range found {
		all = append(all, a)
	}
	slices.SortFunc(all, func(a, b Advertiser) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

func onNode(s *resourcev1.ResourceSlice, d *resourcev1.Device, node string) bool {
	if s.Spec.NodeName != nil {
		return *s.Spec.NodeName == node
	}
	return d.NodeName != nil && *d.NodeName == node
}

// atAny tells whether a device sits at one of the addresses.
func atAny(d *resourcev1.Device, gpus []device.PCIAddress) bool {
	for name, attribute := range d.Attributes {
		_, plain, qualified := strings.Cut(string(name), "/")
		if !qualified {
			plain = string(name)
		}
		if attribute.StringValue == nil || !slices.Contains(busIDAttributes(), plain) {
			continue
		}
		if a, err := device.ParsePCIAddress(*attribute.StringValue); err == nil && slices.Contains(gpus, a) {
			return true
		}
	}
	return false
}

func isGPUResource(name string) bool {
	return slices.ContainsFunc(gpuResources(), func(known string) bool {
		if prefix, ok := strings.CutSuffix(known, "*"); ok {
			return strings.HasPrefix(name, prefix)
		}
		return name == known
	})
}

// ConflictCondition is the Node condition for what Conflicts found.
func ConflictCondition(found []Advertiser) Condition {
	if len(found) == 0 {
		return Condition{
			Type: GPUConflict, Status: corev1.ConditionFalse, Reason: "NoOtherAdvertiser",
			Message: "nobody else advertises this node's GPUs",
		}
	}
	who := make([]string, 0, len(found))
	for _, a := range found {
		who = append(who, a.String())
	}
	return Condition{
		Type: GPUConflict, Status: corev1.ConditionTrue, Reason: "OtherAdvertiser",
		Message: "this node's GPUs are also advertised by " + strings.Join(who, ", ") +
			"; no GPU of the pool is offered here: keep the other one off this node, or set ifAdvertisedElsewhere: ignore",
	}
}
