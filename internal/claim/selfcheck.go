// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// right is something that the agent must be allowed to do.
type right struct{ verb, subresource, name string }

// String prints the right as a role would name it.
func (r right) String() string {
	resource := "resourceclaims"
	if r.subresource != "" {
		resource += "/" + r.subresource
	}
	if r.name != "" {
		resource += " " + r.name
	}
	return r.verb + " " + resource
}

// rights are all that this package needs. The two on resourceclaims/driver exist in RBAC only: the API
// server asks for them when an entry of status.devices changes.
func rights() []right {
	return []right{
		{verb: "get"},
		{verb: "list"},
		{verb: "watch"},
		{verb: "patch", subresource: "status"},
		{verb: resourcev1.VerbPrefixAssociatedNode + "patch", subresource: resourcev1.SubresourceDriver, name: device.Driver},
		{verb: resourcev1.VerbPrefixArbitraryNode + "patch", subresource: resourcev1.SubresourceDriver, name: device.Driver},
	}
}

// SelfCheck asks the API server which of the rights on claims this agent lacks, printed as a role would
// name them. Without them an attach works and its Pod never starts, which nobody would think to look for.
func (c *Claims) SelfCheck(ctx context.Context) (missing []string, err error) {
	for _, r := range rights() {
		allowed, err := c.allowed(ctx, r)
		if err != nil {
			return nil, fmt.Errorf("ask whether this agent may %s: %w", r, err)
		}
		if !allowed {
			missing = append(missing, r.String())
		}
	}
	return missing, nil
}

func (c *Claims) allowed(ctx context.Context, r right) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	review, err := c.client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: resourcev1.GroupName, Resource: "resourceclaims",
			Verb: r.verb, Subresource: r.subresource, Name: r.name,
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	return review.Status.Allowed, nil
}
