// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	metaac "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceac "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// allocated makes a claim that the scheduler has given a unit of the fabric on the node.
func (c cluster) allocated(ctx context.Context, t *testing.T, name, node string) {
	t.Helper()
	claims := c.admin.ResourceV1().ResourceClaims(namespace)
	drop := func() { _ = claims.Delete(context.WithoutCancel(ctx), name, metav1.DeleteOptions{}) }
	drop()
	claim, err := claims.Create(ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: device.Driver},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(drop)
	result := func(driver, dev string) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: driver, Pool: fabric.Pool(), Device: dev}
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			result(device.Driver, "a100-0"), result("gpu.example.com", "x"),
		}},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
		}}},
	}
	if _, err := claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// say applies a condition of a claim's device, each kind as a field manager of its own.
func say(claim, driver, dev, kind string, status metav1.ConditionStatus) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		status := resourceac.AllocatedDeviceStatus().WithDriver(driver).WithPool(fabric.Pool()).WithDevice(dev).
			WithConditions(metaac.Condition().WithType(kind).WithStatus(status).WithReason("Fence").WithMessage("").WithLastTransitionTime(metav1.Now()))
		_, err := client.ResourceV1().ResourceClaims(namespace).ApplyStatus(ctx,
			resourceac.ResourceClaim(claim, namespace).WithStatus(resourceac.ResourceClaimStatus().WithDevices(status)),
			metav1.ApplyOptions{FieldManager: "cohdi-fences/" + kind, Force: true})
		return err
	}
}

// patchClaim merges into a claim's status.
func patchClaim(claim, patch string) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		_, err := client.ResourceV1().ResourceClaims(namespace).Patch(ctx, claim, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
		return err
	}
}

func TestClaims(t *testing.T) {
	c := connect(t)
	c.elect(t)
	const claim = "gpu"
	c.allocated(t.Context(), t, claim, nodeHolder)
	attached := say(claim, device.Driver, "a100-0", device.ConditionAttached, metav1.ConditionTrue)
	failed := say(claim, device.Driver, "a100-0", device.ConditionAttachFailed, metav1.ConditionTrue)
	try(t, []write{
		{"without a Pod nobody says Attached", c.unbound, attached, saysUnbound},
		{"another node does not say Attached", c.other, attached, "allocated to only"},
		{"nor does the leader", c.leader, attached, "allocated to only"},
		{"the node does", c.holder, attached, ""},
		{"the leader does not take it back", c.leader, say(claim, device.Driver, "a100-0", device.ConditionAttached, metav1.ConditionFalse), "allocated to only"},
		{"the node does not say AttachFailed", c.holder, failed, saysLeader},
		{"nor does another, nor the leader of another fabric", c.other, failed, saysLeader},
		{"nor one without a Pod", c.unbound, failed, saysEither},
		{"the leader does", c.leader, failed, ""},
		{"the node does not take it back", c.holder, say(claim, device.Driver, "a100-0", device.ConditionAttachFailed, metav1.ConditionFalse), saysLeader},
		{"nor by removing the entry", c.holder, patchClaim(claim, `{"status":{"devices":null}}`), saysLeader},
		{"other conditions are nobody's", c.holder, say(claim, device.Driver, "a100-0", "gpu.cohdi.io/Other", metav1.ConditionTrue), "nothing else"},
	})
	// The API server itself refuses these two, as invalid.
	for name, do := range map[string]func(context.Context, kubernetes.Interface) error{
		"another driver's device": say(claim, "gpu.example.com", "x", "Ready", metav1.ConditionTrue),
		"a reservation":           patchClaim(claim, `{"status":{"reservedFor":[{"resource":"pods","name":"x","uid":"y"}]}}`),
	} {
		t.Run(name+" is not ours", func(t *testing.T) {
			err := do(t.Context(), c.holder.client)
			if !apierrors.IsForbidden(err) && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "Forbidden")) {
				t.Errorf("got %v, want a refusal", err)
			}
		})
	}
}
