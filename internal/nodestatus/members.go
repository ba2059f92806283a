// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// agentsByNode indexes the agents' Pods by the node that they run on.
const agentsByNode = "node"

// Members is what a leader sees of all Nodes and of the agents on them. It watches both, so it exists only
// while its agent leads.
type Members struct {
	nodes   cache.SharedIndexInformer
	pods    cache.SharedIndexInformer
	lister  corelisters.NodeLister
	labels  *Labels
	machine func(*corev1.Node) (device.Machine, error)
	models  func() []device.Model
	changed func()
	// withhold: nothing is offered on a Node where somebody else advertises its GPUs.
	withhold bool
}

// MembersOptions are what a Members needs. Machine tells which machine a Node is, Models those that the
// fabric's configuration names; Changed is called after anything changed and must not block.
type MembersOptions struct {
	Client  kubernetes.Interface
	Machine func(*corev1.Node) (device.Machine, error)
	Models  func() []device.Model
	Changed func()
	// WithholdOnConflict offers nothing on a Node with the condition GPUConflict.
	WithholdOnConflict bool
}

// NewMembers returns a view on the Nodes.
func NewMembers(o MembersOptions) (*Members, error) {
	nodes := coreinformers.NewNodeInformer(o.Client, 0, cache.Indexers{})
	pods := coreinformers.NewFilteredPodInformer(o.Client, device.AgentNamespace, 0, cache.Indexers{
		agentsByNode: func(obj any) ([]string, error) {
			pod, ok := obj.(*corev1.Pod)
			if !ok {
				return nil, fmt.Errorf("index the agents by node: got a %T", obj)
			}
			return []string{pod.Spec.NodeName}, nil
		},
	}, func(l *metav1.ListOptions) { l.LabelSelector = "app.kubernetes.io/name=" + device.AgentName })
	m := &Members{
		nodes: nodes, pods: pods, lister: corelisters.NewNodeLister(nodes.GetIndexer()),
		machine: o.Machine, models: o.Models, changed: o.Changed, withhold: o.WithholdOnConflict,
	}
	m.labels = NewLabels(o.Client, m.lister.Get)
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { o.Changed() },
		UpdateFunc: func(before, after any) { m.updated(before, after) },
		DeleteFunc: func(any) { o.Changed() },
	}
	for _, informer := range []cache.SharedIndexInformer{nodes, pods} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return nil, fmt.Errorf("watch Nodes and agents: %w", err)
		}
	}
	return m, nil
}

// updated passes over what kubelets report all the time: their heartbeats change nothing here.
func (m *Members) updated(before, after any) {
	old, ok := before.(*corev1.Node)
	now, also := after.(*corev1.Node)
	if ok && also && m.member(old) == m.member(now) && sameLeaderLabels(old, now) {
		return
	}
	m.changed()
}

// memberKey is what counts of a Node.
type memberKey struct {
	uid     string
	fabric  string
	machine device.Machine
	ready   bool
	down    bool
	other   bool
}

func (m *Members) member(n *corev1.Node) memberKey {
	machine, err := m.machine(n)
	if err != nil {
		machine = ""
	}
	return memberKey{
		uid: string(n.UID), fabric: n.Labels[device.LabelFabric], machine: machine,
		ready: hasCondition(n, corev1.NodeReady, corev1.ConditionTrue), down: hasCondition(n, FabricReady, corev1.ConditionFalse),
		other: m.withhold && hasCondition(n, GPUConflict, corev1.ConditionTrue),
	}
}

func sameLeaderLabels(a, b *corev1.Node) bool {
	for _, pair := range [][2]*corev1.Node{{a, b}, {b, a}} {
		for k, v := range pair[0].Labels {
			if leaders(k) && pair[1].Labels[k] != v {
				return false
			}
		}
	}
	return true
}

// Run watches until ctx ends.
func (m *Members) Run(ctx context.Context) {
	var running sync.WaitGroup
	for _, informer := range []cache.SharedIndexInformer{m.nodes, m.pods} {
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	running.Wait()
}

// WaitForSync returns when List shows all there was when Run began.
func (m *Members) WaitForSync(ctx context.Context) error {
	if !cache.WaitForCacheSync(ctx.Done(), m.nodes.HasSynced, m.pods.HasSynced) {
		return fmt.Errorf("wait for the Nodes and agents: %w", context.Cause(ctx))
	}
	return nil
}

// List returns the Nodes that say they belong to the fabric.
func (m *Members) List(f device.FabricID) []pool.Node {
	var all []pool.Node
	for _, obj := range m.nodes.GetStore().List() {
		n, ok := obj.(*corev1.Node)
		if !ok || n.Labels[device.LabelFabric] != string(f) {
			continue
		}
		k := m.member(n)
		attachable, idle := LeaderLabels(n, m.models())
		all = append(all, pool.Node{
			Name: n.Name, UID: k.uid, Machine: k.machine, Member: n.DeletionTimestamp == nil,
			AgentReady: k.ready && m.agentRuns(n.Name), FabricDown: k.down, Conflict: k.other,
			Attachable: attachable, Idle: idle,
		})
	}
	return all
}

// SetLabels writes the leader's labels of a Node, if they differ.
func (m *Members) SetLabels(ctx context.Context, want pool.NodeLabels) error {
	return m.labels.SetLabels(ctx, want)
}

// agentRuns tells whether an agent runs on the node. Its readiness does not count: an agent that cannot reach
// its fabric manager is not ready, and is there all the same.
func (m *Members) agentRuns(node string) bool {
	pods, err := m.pods.GetIndexer().ByIndex(agentsByNode, node)
	if err != nil {
		return false
	}
	for _, obj := range pods {
		pod, ok := obj.(*corev1.Pod)
		if !ok || pod.DeletionTimestamp != nil {
			continue
		}
		for i := range pod.Status.ContainerStatuses {
			if pod.Status.ContainerStatuses[i].State.Running != nil {
				return true
			}
		}
	}
	return false
}

// OnMachine names a Node other than self whose agent says that it works on the machine, "" if there is none. It asks
// the API server, and blocks for that.
func OnMachine(ctx context.Context, client kubernetes.Interface, machine device.Machine, self string) (string, error) {
	const enough = 2 // self and one more
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: device.LabelMachine + "=" + string(machine), Limit: enough})
	if err != nil {
		return "", fmt.Errorf("look for other Nodes of machine %s: %w", machine, err)
	}
	for i := range list.Items {
		if list.Items[i].Name != self {
			return list.Items[i].Name, nil
		}
	}
	return "", nil
}

func hasCondition(n *corev1.Node, t corev1.NodeConditionType, status corev1.ConditionStatus) bool {
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == t {
			return n.Status.Conditions[i].Status == status
		}
	}
	return false
}
