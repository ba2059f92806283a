// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// fieldManager owns our labels and conditions on Nodes.
const fieldManager = device.AgentName

// The conditions that an agent writes on its own Node. They are API.
const (
	// FabricReady: the fabric manager answers, and this node's machine is known to it.
	FabricReady corev1.NodeConditionType = device.Driver + "/FabricReady"
	// HotplugReady: devices that come and go are seen, and the driver can use them.
	HotplugReady corev1.NodeConditionType = device.Driver + "/HotplugReady"
	// GPUConflict: somebody else advertises this node's GPUs.
	GPUConflict corev1.NodeConditionType = device.Driver + "/GPUConflict"
)

func conditionTypes() []corev1.NodeConditionType {
	return []corev1.NodeConditionType{FabricReady, HotplugReady, GPUConflict}
}

// Condition is what a Node condition should say. Its message must not change while nothing changed: each
// change is a write.
type Condition struct {
	Type   corev1.NodeConditionType
	Status corev1.ConditionStatus
	// Reason is one CamelCase word.
	Reason string
	// Message is for a person: what is wrong and what to do.
	Message string
}

// longestMessage keeps a manager's page of HTML out of the Node object.
const longestMessage = 1024

// Publisher keeps the labels and the conditions of this agent's own Node.
type Publisher struct {
	client kubernetes.Interface
	name   string
	clock  clock.WithTicker
	node   func(name string) (*corev1.Node, error)
	poked  chan struct{}

	mu         sync.Mutex // guards what follows
	place      *place
	conditions map[corev1.NodeConditionType]Condition
	// written is the Node that the last write returned, and stale are the versions that it superseded: a
	// cache that shows one of those lags.
	written *corev1.Node
	stale   map[string]bool
}

// NewPublisher returns a Publisher for the Node called name. node reads it, from a cache: call Poke when
// that cache has changed.
func NewPublisher(client kubernetes.Interface, name string, node func(name string) (*corev1.Node, error), c clock.WithTicker) *Publisher {
	return &Publisher{
		client: client, name: name, clock: c, node: node,
		poked:      make(chan struct{}, 1),
		conditions: map[corev1.NodeConditionType]Condition{},
		stale:      map[string]bool{},
	}
}

// place is where the node belongs.
type place struct {
	fabric  device.FabricID
	machine device.Machine
}

// SetPlace says which fabric the node belongs to and which machine it is there; empty is none. Until it is called the
// labels are left alone.
func (p *Publisher) SetPlace(f device.FabricID, m device.Machine) {
	p.mu.Lock()
	p.place = &place{f, m}
	p.mu.Unlock()
	p.Poke()
}

// SetCondition says what a condition should be. Until it is called for a type, that condition is left alone.
func (p *Publisher) SetCondition(c Condition) {
	if len(c.Message) > longestMessage {
		c.Message = strings.ToValidUTF8(c.Message[:longestMessage-3], "") + "..."
	}
	p.mu.Lock()
	changed := p.conditions[c.Type] != c
	p.conditions[c.Type] = c
	p.mu.Unlock()
	if changed {
		p.Poke()
	}
}

// Conditions returns what was set, for the status command.
func (p *Publisher) Conditions() []Condition {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []Condition
	for _, t := range conditionTypes() {
		if c, ok := p.conditions[t]; ok {
			all = append(all, c)
		}
	}
	return all
}

// Poke makes Run compare the Node with what it should be.
func (p *Publisher) Poke() {
	select {
	case p.poked <- struct{}{}:
	default:
	}
}

// Run writes what differs, whenever it is poked, until ctx ends.
func (p *Publisher) Run(ctx context.Context) {
	const least, most = time.Second, time.Minute
	wait := least
	for ctx.Err() == nil {
		err := p.Step(ctx)
		if err == nil {
			wait = least
			select {
			case <-ctx.Done():
			case <-p.poked:
			}
			continue
		}
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "Labels and conditions of this Node are not up to date; trying again", "after", wait)
		timer := p.clock.NewTimer(wait)
		wait = min(2*wait, most)
		// A poke does not hasten it: the API server is in trouble, or refuses us.
		select {
		case <-ctx.Done():
		case <-timer.C():
		}
		timer.Stop()
	}
}

// Step compares the Node with what it should be and writes what differs.
func (p *Publisher) Step(ctx context.Context) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	if node, err = p.label(ctx, node); err != nil {
		return err
	}
	return p.condition(ctx, node)
}

// current is the Node as the cache shows it, or as this process has just written it.
func (p *Publisher) current() (*corev1.Node, error) {
	node, err := p.node(p.name)
	if err != nil {
		return nil, fmt.Errorf("read Node %s: %w", p.name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stale[node.ResourceVersion] && node.UID == p.written.UID {
		return p.written, nil
	}
	clear(p.stale)
	return node, nil
}

// wrote remembers what a write made of the Node.
func (p *Publisher) wrote(before, after *corev1.Node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.written = after
	if before.ResourceVersion != after.ResourceVersion {
		p.stale[before.ResourceVersion] = true
	}
}

func (p *Publisher) label(ctx context.Context, node *corev1.Node) (*corev1.Node, error) {
	p.mu.Lock()
	at := p.place
	p.mu.Unlock()
	if at == nil {
		return node, nil
	}
	change := map[string]*string{}
	moved := at.fabric == ""
	for label, want := range map[string]string{device.LabelFabric: string(at.fabric), device.LabelMachine: string(at.machine)} {
		had, has := node.Labels[label]
		switch {
		case want == "" && has:
			change[label] = nil
		case want != "" && had != want:
			change[label] = &want
		}
		moved = moved || had != want && (has || label == device.LabelFabric)
	}
	if moved {
		// What a leader said of this Node ends with the membership: that leader no longer looks here.
		for label := range node.Labels {
			if leaders(label) {
				change[label] = nil
			}
		}
	}
	if len(change) == 0 {
		return node, nil
	}
	after, err := patchLabels(ctx, p.client, node, change)
	if err != nil {
		return nil, err
	}
	p.wrote(node, after)
	return after, nil
}

func (p *Publisher) condition(ctx context.Context, node *corev1.Node) error {
	want, changed := p.wanted(node)
	if !changed {
		return nil
	}
	// All of ours in one apply: what a field manager leaves out is dropped.
	apply := applycorev1.Node(p.name).WithUID(node.UID).WithStatus(applycorev1.NodeStatus().WithConditions(want...))
	after, err := p.client.CoreV1().Nodes().ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	if err != nil {
		return fmt.Errorf("write the conditions of Node %s: %w", p.name, err)
	}
	p.wrote(node, after)
	return nil
}

// wanted returns all our conditions as they should be, and whether one of them differs from the Node's.
func (p *Publisher) wanted(node *corev1.Node) (all []*applycorev1.NodeConditionApplyConfiguration, changed bool) {
	p.mu.Lock()
	set := maps.Clone(p.conditions)
	p.mu.Unlock()
	now := metav1.NewTime(p.clock.Now())
	for _, t := range conditionTypes() {
		var have *corev1.NodeCondition
		for i := range node.Status.Conditions {
			if node.Status.Conditions[i].Type == t {
				have = &node.Status.Conditions[i]
			}
		}
		want, ours := set[t]
		if have == nil && !ours {
			continue
		}
		heartbeat, transition := now, now
		if have != nil {
			if !ours {
				want = Condition{Type: t, Status: have.Status, Reason: have.Reason, Message: have.Message}
			}
			if want == (Condition{Type: t, Status: have.Status, Reason: have.Reason, Message: have.Message}) {
				heartbeat = have.LastHeartbeatTime
			}
			if want.Status == have.Status {
				transition = have.LastTransitionTime
			}
		}
		changed = changed || heartbeat == now
		all = append(all, applycorev1.NodeCondition().WithType(t).WithStatus(want.Status).
			WithReason(want.Reason).WithMessage(want.Message).
			WithLastHeartbeatTime(heartbeat).WithLastTransitionTime(transition))
	}
	return all, changed
}

// leaders tells whether a label is one of those that a fabric's leader writes.
func leaders(label string) bool {
	return label == device.LabelIdle ||
		strings.HasPrefix(label, device.Driver+"/") && strings.HasSuffix(label, device.Model("").AttachableLabel()[len(device.Driver)+1:])
}

// patchLabels sets labels of a Node, or removes those that are nil. It names the Node's UID, so that one
// made anew under the same name is left alone.
func patchLabels(ctx context.Context, client kubernetes.Interface, node *corev1.Node, change map[string]*string) (*corev1.Node, error) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": node.UID, "labels": change}})
	if err != nil {
		return nil, fmt.Errorf("make a patch for the labels of Node %s: %w", node.Name, err)
	}
	after, err := client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: fieldManager})
	if err != nil {
		return nil, fmt.Errorf("write labels of Node %s: %w", node.Name, err)
	}
	return after, nil
}
