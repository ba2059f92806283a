// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"context"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
)

func publish(s *resourceapi.ResourceSlice) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		_, err := client.ResourceV1().ResourceSlices().Create(ctx, s.DeepCopy(), metav1.CreateOptions{})
		return err
	}
}

func withdraw(name string) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		return client.ResourceV1().ResourceSlices().Delete(ctx, name, metav1.DeleteOptions{})
	}
}

// republish changes a slice. An agent may not get a single slice, so the administrator reads it.
func (c cluster) republish(name string) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		s, err := c.admin.ResourceV1().ResourceSlices().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s.Spec.Pool.Generation++
		_, err = client.ResourceV1().ResourceSlices().Update(ctx, s, metav1.UpdateOptions{})
		return err
	}
}

// eventually repeats what passes once the API server has seen a change of leaders.
func (c cluster) eventually(t *testing.T, who agent, do func(context.Context, kubernetes.Interface) error) {
	t.Helper()
	var last error
	if err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, 10*time.Second, true, func(ctx context.Context) (bool, error) {
		last = do(ctx, who.client)
		return last == nil, nil
	}); err != nil {
		t.Fatalf("refused for 10 s: %v", last)
	}
}

func TestSlices(t *testing.T) {
	c := connect(t)
	c.elect(t)
	pool, own := fabricSlice("fence-pool", fabric), nodeSlice("fence-own", nodeHolder)
	foreign := nodeSlice("fence-foreign", nodeHolder)
	foreign.Spec.Driver = "gpu.example.com"
	t.Cleanup(func() {
		for _, s := range []string{pool.Name, own.Name, foreign.Name} {
			_ = c.admin.ResourceV1().ResourceSlices().Delete(context.WithoutCancel(t.Context()), s, metav1.DeleteOptions{})
		}
	})
	disguised := nodeSlice("fence-own", nodeHolder)
	disguised.Spec.Pool.Name = fabric.Pool()
	unnamed := fabricSlice("fence-own", fabric)
	unnamed.Spec.Pool.Name = nodeHolder
	mistaken := nodeSlice("fence-own", nodeHolder)
	mistaken.Spec.Pool.Name = nodeOther
	each := fabricSlice("fence-pool", fabric)
	each.Spec.AllNodes, each.Spec.PerDeviceNodeSelection = nil, new(true)
	try(t, []write{
		{"without a Pod nobody publishes", c.unbound, publish(own), saysUnbound},
		{"without a Pod nobody leads", c.unbound, publish(pool), saysEither},
		{"a node publishes its own", c.holder, publish(own), ""},
		{"and changes it", c.holder, c.republish(own.Name), ""},
		{"another node does not change it", c.other, c.republish(own.Name), "agent on it only"},
		{"nor the leader", c.leader, c.republish(own.Name), "agent on it only"},
		{"nor withdraws it", c.other, withdraw(own.Name), "agent on it only"},
		{"the node withdraws it", c.holder, withdraw(own.Name), ""},
		{"another node does not publish it", c.other, publish(own), "agent on it only"},
		{"a node's slice is in no fabric's pool", c.leader, publish(nodeSliceIn(nodeLeader, fabric.Pool())), "called like the node"},
		{"nor the holder's", c.holder, publish(disguised), "called like the node"},
		{"nor in another node's pool", c.holder, publish(mistaken), "called like the node"},
		{"a slice of no node is in a fabric's pool", c.leader, publish(unnamed), "called like the node"},
		{"the leader publishes", c.leader, publish(each), ""},
		{"and changes it", c.leader, c.republish(pool.Name), ""},
		{"a node that does not lead does not change it", c.holder, c.republish(pool.Name), saysLeader},
		{"nor the leader of another fabric", c.other, c.republish(pool.Name), saysLeader},
		{"nor withdraws it", c.other, withdraw(pool.Name), saysLeader},
		{"the leader withdraws it", c.leader, withdraw(pool.Name), ""},
		{"a node that does not lead does not publish", c.holder, publish(pool), saysLeader},
		{"another driver is not ours", c.holder, publish(foreign), "of the driver gpu.cohdi.io only"},
		{"somebody publishes for another driver", agent{client: c.admin}, publish(foreign), ""},
		{"which is not ours to change", c.holder, c.republish(foreign.Name), "of the driver gpu.cohdi.io only"},
		{"nor to withdraw", c.holder, withdraw(foreign.Name), "of the driver gpu.cohdi.io only"},
	})
}

func nodeSliceIn(node, pool string) *resourceapi.ResourceSlice {
	s := nodeSlice("fence-own", node)
	s.Spec.Pool.Name = pool
	return s
}
