// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// The optional policy adds a preference to Pods that ask for a GPU, keeps what they prefer already, and
// leaves others alone.
func TestPreferIdle(t *testing.T) {
	c := connect(t)
	ctx := t.Context()
	const policy = "cohdi-agent-prefer-idle"
	apply(ctx, t, c.config, "../../deploy/prefer-idle.yaml")
	t.Cleanup(func() {
		end := context.WithoutCancel(ctx)
		_ = c.admin.AdmissionregistrationV1().MutatingAdmissionPolicyBindings().Delete(end, policy, metav1.DeleteOptions{})
		_ = c.admin.AdmissionregistrationV1().MutatingAdmissionPolicies().Delete(end, policy, metav1.DeleteOptions{})
	})
	pod := func(edit func(*corev1.PodSpec)) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "fence-prefer", Namespace: namespace},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "none", Image: "none.invalid/none"}}},
		}
		edit(&p.Spec)
		return p
	}
	gpu := func(s *corev1.PodSpec) {
		s.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
	}
	zone := corev1.PreferredSchedulingTerm{Weight: 1, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{
		Key: "zone", Operator: corev1.NodeSelectorOpExists,
	}}}}
	preferred := func(p *corev1.Pod) []corev1.PreferredSchedulingTerm {
		got, err := c.admin.CoreV1().Pods(namespace).Create(ctx, p, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			t.Fatal(err)
		}
		if got.Spec.Affinity == nil || got.Spec.Affinity.NodeAffinity == nil {
			return nil
		}
		return got.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	}
	idle := func(terms []corev1.PreferredSchedulingTerm, at int) bool {
		return len(terms) == at+1 && terms[at].Preference.MatchExpressions[0].Key == device.LabelIdle
	}
	if err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, 20*time.Second, true, func(context.Context) (bool, error) {
		return idle(preferred(pod(gpu)), 0), nil
	}); err != nil {
		t.Fatalf("a Pod with a limit does not prefer idle GPUs: %v", preferred(pod(gpu)))
	}
	for _, tc := range []struct {
		name string
		edit func(*corev1.PodSpec)
		// at is where the preference is expected, -1 for none.
		at int
	}{
		{"a Pod without GPU", func(*corev1.PodSpec) {}, -1},
		{"a Pod with a claim", func(s *corev1.PodSpec) {
			name := "x"
			s.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
		}, 0},
		{"a Pod with affinity to Pods", func(s *corev1.PodSpec) {
			gpu(s)
			s.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{}}
		}, 0},
		{"a Pod with a preference of its own", func(s *corev1.PodSpec) {
			gpu(s)
			s.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{zone},
			}}
		}, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := preferred(pod(tc.edit))
			if tc.at < 0 && got != nil || tc.at >= 0 && !idle(got, tc.at) {
				t.Errorf("prefers %v, want the preference at %d", got, tc.at)
			}
		})
	}
}
