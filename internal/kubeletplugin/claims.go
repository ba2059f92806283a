// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// pageSize bounds one answer when all claims are listed.
const pageSize = 500

// apiClaims reads claims from the API server.
type apiClaims struct{ client kubernetes.Interface }

// NewClaims returns Claims that ask the API server each time.
func NewClaims(client kubernetes.Interface) Claims { return apiClaims{client} }

func (a apiClaims) Get(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, bool, error) {
	c, err := a.client.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("get claim %s/%s: %w", namespace, name, err)
	}
	return c, true, nil
}

func (a apiClaims) List(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	var all []resourceapi.ResourceClaim
	opts := metav1.ListOptions{Limit: pageSize}
	for {
		page, err := a.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, opts)
		if err != nil {
			return nil, fmt.Errorf("list claims: %w", err)
		}
		all = append(all, page.Items...)
		if opts.Continue = page.Continue; opts.Continue == "" {
			return all, nil
		}
	}
}
