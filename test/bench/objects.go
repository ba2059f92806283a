// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// templateName is that of the claims' template.
const templateName = "one-gpu"

func claimSpec() resourcev1.ResourceClaimSpec {
	return resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
		Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{
			DeviceClassName: device.Driver, AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1,
		},
	}}}}
}

func template() *resourcev1.ResourceClaimTemplate {
	return &resourcev1.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: templateName, Namespace: namespace},
		Spec:       resourcev1.ResourceClaimTemplateSpec{Spec: claimSpec()},
	}
}

// createPod makes a Pod that asks for a GPU.
func (b *bench) createPod(ctx context.Context, name string) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](5),
			ResourceClaims:                []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new(templateName)}},
			Containers: []corev1.Container{{
				Name: "main", Image: "docker.io/cohdi/test:dev", ImagePullPolicy: corev1.PullNever,
				Command:   []string{"sh", "-c", "trap exit TERM; while true; do sleep 1; done"},
				Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}},
			}},
		},
	}
	if _, err := b.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("make Pod %s: %w", name, err)
	}
	return nil
}

func (b *bench) deletePod(ctx context.Context, name string) error {
	if err := b.client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete Pod %s: %w", name, err)
	}
	return nil
}
