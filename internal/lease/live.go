// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// ListLive reads the selected leases from the API server itself, no cache between. One that cannot be
// decoded is an error: who needs a live list must not miss any.
func (s *Store) ListLive(ctx context.Context) ([]device.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	list, err := s.client.List(ctx, metav1.ListOptions{LabelSelector: labels.Set{s.label: s.value}.String()})
	if err != nil {
		return nil, fmt.Errorf("list device leases of %s: %w", s.what, err)
	}
	all := make([]device.Lease, 0, len(list.Items))
	for i := range list.Items {
		l, err := decode(&list.Items[i])
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}
