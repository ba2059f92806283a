// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"context"
	"encoding/json"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/cohdi/cohdi-agent/internal/device"
)

type object = map[string]any

// patchNode merges into a Node, through its status if a subresource is named.
func patchNode(node string, patch object, sub ...string) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		data, err := json.Marshal(patch)
		if err != nil {
			return err
		}
		_, err = client.CoreV1().Nodes().Patch(ctx, node, types.StrategicMergePatchType, data, metav1.PatchOptions{}, sub...)
		return err
	}
}

func label(key string, value any) object {
	return object{"metadata": object{"labels": object{key: value}}}
}

func condition(kind string) object {
	return object{"status": object{"conditions": []object{{"type": kind, "status": "True", "reason": "Fence"}}}}
}

func TestNodes(t *testing.T) {
	c := connect(t)
	c.elect(t)
	attachable, of := device.Model("a100").AttachableLabel(), string(fabric)
	try(t, []write{
		{"without a Pod nobody labels", c.unbound, patchNode(nodeHolder, label(device.LabelFabric, of)), saysUnbound},
		{"another node does not say the fabric", c.other, patchNode(nodeHolder, label(device.LabelFabric, of)), "agent on it only"},
		{"nobody writes a leader's label without fabric", c.leader, patchNode(nodeHolder, label(attachable, "true")), "has no leader"},
		{"a node says its fabric", c.holder, patchNode(nodeHolder, label(device.LabelFabric, of)), ""},
		{"and its machine", c.holder, patchNode(nodeHolder, label(device.LabelMachine, "11111111-1111-4111-8111-000000000001")), ""},
		{"another node does not say the machine", c.other, patchNode(nodeHolder, label(device.LabelMachine, "22222222-2222-4222-8222-000000000002")), "agent on it only"},
		{"nor does the leader", c.leader, patchNode(nodeHolder, label(device.LabelMachine, nil)), "agent on it only"},
		{"another node says its own", c.other, patchNode(nodeOther, label(device.LabelFabric, string(otherFabric))), ""},
		{"a node does not make itself attachable", c.holder, patchNode(nodeHolder, label(attachable, "true")), saysLeader},
		{"nor through its status", c.holder, patchNode(nodeHolder, label(attachable, "true"), "status"), saysLeader},
		{"nor does another", c.other, patchNode(nodeHolder, label(attachable, "true")), saysLeader},
		{"nor one without a Pod", c.unbound, patchNode(nodeHolder, label(attachable, "true")), saysEither},
		{"the leader makes it attachable", c.leader, patchNode(nodeHolder, label(attachable, "true")), ""},
		{"and says that a unit is idle", c.leader, patchNode(nodeHolder, label(device.LabelIdle, "true")), ""},
		{"not in another fabric", c.leader, patchNode(nodeOther, label(attachable, "true")), saysLeader},
		{"another node does not end it", c.other, patchNode(nodeHolder, label(device.LabelIdle, nil)), saysLeader},
		{"the leader ends it", c.leader, patchNode(nodeHolder, label(device.LabelIdle, nil)), ""},
		{"the node may drop a leader's label", c.holder, patchNode(nodeHolder, label(attachable, nil)), ""},
		{"other labels of the prefix are nobody's", c.holder, patchNode(nodeHolder, label(device.Driver+"/x", "y")), "not gpu.cohdi.io/x"},
		{"other labels are not ours", c.holder, patchNode(nodeHolder, label("topology.kubernetes.io/zone", "z")), "not topology.kubernetes.io/zone"},
		{"nor are annotations", c.holder, patchNode(nodeHolder, object{"metadata": object{"annotations": object{device.AnnotationMachine: "x"}}}), "not its spec"},
		{"nor the spec", c.holder, patchNode(nodeHolder, object{"spec": object{"unschedulable": false}}), "not its spec"},
		{"nor finalizers", c.holder, patchNode(nodeHolder, object{"metadata": object{"finalizers": []string{"a.b/c"}}}), "not its spec"},
		{"a node says its own condition", c.holder, patchNode(nodeHolder, condition(device.Driver+"/FabricReady"), "status"), ""},
		{"and says it again", c.holder, patchNode(nodeHolder, condition(device.Driver+"/FabricReady"), "status"), ""},
		{"the leader does not say it", c.leader, patchNode(nodeHolder, condition(device.Driver+"/HotplugReady"), "status"), "agent on it only"},
		{"nor one without a Pod", c.unbound, patchNode(nodeHolder, condition(device.Driver+"/HotplugReady"), "status"), saysUnbound},
		{"other conditions are not ours", c.holder, patchNode(nodeHolder, condition("Ready"), "status"), "gpu.cohdi.io/* only"},
		{"nor is the capacity", c.holder, patchNode(nodeHolder, object{"status": object{"capacity": object{"nvidia.com/gpu": "8"}}}, "status"), "conditions only"},
		{"nor the addresses", c.holder, patchNode(nodeHolder, object{"status": object{"addresses": []object{{"type": "InternalIP", "address": "192.0.2.1"}}}}, "status"), "conditions only"},
		{"a node leaves its fabric", c.holder, patchNode(nodeHolder, object{"metadata": object{"labels": object{device.LabelFabric: nil, device.LabelMachine: nil}}}), ""},
	})
}
