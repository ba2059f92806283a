// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// policies reads the fences out of the manifest.
func policies(t *testing.T) ([]admissionv1.ValidatingAdmissionPolicy, []admissionv1.ValidatingAdmissionPolicyBinding) {
	t.Helper()
	var all []admissionv1.ValidatingAdmissionPolicy
	var bindings []admissionv1.ValidatingAdmissionPolicyBinding
	for _, obj := range objects(t, manifest) {
		var err error
		switch obj.GetKind() {
		case "ValidatingAdmissionPolicy":
			p := admissionv1.ValidatingAdmissionPolicy{}
			err = runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, &p)
			all = append(all, p)
		case "ValidatingAdmissionPolicyBinding":
			b := admissionv1.ValidatingAdmissionPolicyBinding{}
			err = runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, &b)
			bindings = append(bindings, b)
		}
		if err != nil {
			t.Fatalf("read %s %s: %v", obj.GetKind(), obj.GetName(), err)
		}
	}
	if len(all) == 0 {
		t.Fatalf("%s holds no policy", manifest)
	}
	return all, bindings
}

// guard is the one policy that speaks to everybody: it keeps the namespace of the leases.
const guard = "cohdi-agent-lease-namespace"

// Each policy fails closed, speaks of agents only, answers Forbidden with words, and is bound.
func TestManifestPolicies(t *testing.T) {
	all, bindings := policies(t)
	bound := map[string]admissionv1.ValidatingAdmissionPolicyBinding{}
	for _, b := range bindings {
		bound[b.Spec.PolicyName] = b
	}
	for _, p := range all {
		if p.Spec.FailurePolicy == nil || *p.Spec.FailurePolicy != admissionv1.Fail {
			t.Errorf("%s does not fail closed", p.Name)
		}
		if p.Name == guard {
			if p.Spec.MatchConditions[0].Expression != "request.name == 'cohdi-leases'" {
				t.Errorf("%s speaks of other namespaces, too", p.Name)
			}
		} else if len(p.Spec.MatchConditions) == 0 || p.Spec.MatchConditions[0].Expression != "request.userInfo.username == 'system:serviceaccount:cohdi-system:cohdi-agent'" {
			t.Errorf("%s: the first match condition is not that an agent writes", p.Name)
		}
		for i, v := range p.Spec.Validations {
			if v.Reason == nil || *v.Reason != metav1.StatusReasonForbidden || v.Message == "" && v.MessageExpression == "" {
				t.Errorf("%s: validation %d lacks the reason Forbidden or a message", p.Name, i)
			}
		}
		b, ok := bound[p.Name]
		if !ok || len(b.Spec.ValidationActions) != 1 || b.Spec.ValidationActions[0] != admissionv1.Deny {
			t.Errorf("%s is bound %v with the actions %v, want Deny", p.Name, ok, b.Spec.ValidationActions)
		}
		if (p.Spec.ParamKind == nil) != (b.Spec.ParamRef == nil) {
			t.Errorf("%s has a parameter kind without reference or the other way round", p.Name)
		}
	}
	if len(bound) != len(all) {
		t.Errorf("%d bindings for %d policies", len(bound), len(all))
	}
}

// Deny is decided before match conditions: without any election it would refuse the kubelets' writes.
func TestManifestMissingElectionStopsNobody(t *testing.T) {
	all, bindings := policies(t)
	for _, b := range bindings {
		if ref := b.Spec.ParamRef; ref != nil && (ref.ParameterNotFoundAction == nil || *ref.ParameterNotFoundAction != admissionv1.AllowAction) {
			t.Errorf("%s: parameterNotFoundAction is not Allow", b.Name)
		}
	}
	for _, p := range all {
		for _, rule := range p.Spec.MatchConstraints.ResourceRules {
			selector := p.Spec.MatchConstraints.NamespaceSelector
			if rule.Resources[0] == "leases" && (selector == nil || selector.MatchLabels["kubernetes.io/metadata.name"] != "cohdi-leases") {
				t.Errorf("%s looks at leases outside of cohdi-leases", p.Name)
			}
		}
	}
}
