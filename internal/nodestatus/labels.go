// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// labelTrue is the value of the leader's labels; they are absent where they are not true.
const labelTrue = "true"

// Labels writes the labels by which a fabric's leader steers the scheduler.
type Labels struct {
	client kubernetes.Interface
	node   func(name string) (*corev1.Node, error)
}

// NewLabels returns a writer of the leader's labels. node reads a Node, from a cache.
func NewLabels(client kubernetes.Interface, node func(name string) (*corev1.Node, error)) *Labels {
	return &Labels{client: client, node: node}
}

// SetLabels makes the leader's labels of a Node those wanted: labels of models that are not in it go. It
// writes what differs and nothing else.
func (l *Labels) SetLabels(ctx context.Context, want pool.NodeLabels) error {
	node, err := l.node(want.Node)
	if err != nil {
		return fmt.Errorf("read Node %s to label it: %w", want.Node, err)
	}
	on := map[string]bool{}
	for model, attachable := range want.Attachable {
		if attachable {
			on[model.AttachableLabel()] = true
		}
	}
	if want.Idle {
		on[device.LabelIdle] = true
	}
	change := map[string]*string{}
	for label := range node.Labels {
		if leaders(label) && !on[label] {
			change[label] = nil
		}
	}
	for label := range on {
		if node.Labels[label] != labelTrue {
			value := labelTrue
			change[label] = &value
		}
	}
	if len(change) == 0 {
		return nil
	}
	_, err = patchLabels(ctx, l.client, node, change)
	return err
}

// LeaderLabels reads the leader's labels of a Node for the given models.
func LeaderLabels(node *corev1.Node, models []device.Model) (attachable map[device.Model]bool, idle bool) {
	attachable = make(map[device.Model]bool, len(models))
	for _, m := range models {
		attachable[m] = node.Labels[m.AttachableLabel()] == labelTrue
	}
	return attachable, node.Labels[device.LabelIdle] == labelTrue
}
