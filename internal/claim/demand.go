// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// ReadError is an allocation from the pool that cannot be served because it lacks what names the attempt.
type ReadError struct {
	// Claim is namespace/name.
	Claim string
	// Pool and Entry are the device that was allocated.
	Pool, Entry string
	// Err says what is missing.
	Err error
}

// Error names the claim and the device.
func (e *ReadError) Error() string {
	return fmt.Sprintf("read allocation of %s/%s to claim %s: %v", e.Pool, e.Entry, e.Claim, e.Err)
}

// Unwrap returns what is missing.
func (e *ReadError) Unwrap() error { return e.Err }

var (
	errNoTime = errors.New("it has no allocationTimestamp (is the feature gate DRADeviceBindingConditions off?)")
	errNoNode = errors.New("its node selector does not name exactly one node")
)

// fromPool tells whether the result is demand on one of our pools. Admin access watches a device that
// somebody else has; it neither takes one nor brings one.
func fromPool(r resourcev1.DeviceRequestAllocationResult) bool {
	return r.Driver == device.Driver && !ptr.Deref(r.AdminAccess, false)
}

// Demands returns what the claim was allocated from the fabric's pool, and what of it cannot be served.
func Demands(f device.FabricID, c *resourcev1.ResourceClaim) (ds []pool.Demand, bad []*ReadError) {
	return demands(c, func(p string) bool { return p == f.Pool() })
}

// demands returns what the claim was allocated from the pools for which want holds.
func demands(c *resourcev1.ResourceClaim, want func(pool string) bool) (ds []pool.Demand, bad []*ReadError) {
	if c.Status.Allocation == nil {
		return nil, nil
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if !fromPool(r) || !want(r.Pool) {
			continue
		}
		a, err := attempt(c, r)
		if err != nil {
			bad = append(bad, &ReadError{Claim: c.Namespace + "/" + c.Name, Pool: r.Pool, Entry: r.Device, Err: err})
			continue
		}
		d := pool.Demand{Attempt: a, Reserved: len(c.Status.ReservedFor) > 0}
		for _, consumer := range c.Status.ReservedFor {
			d.Consumers = append(d.Consumers, string(consumer.UID))
		}
		if s := statusOf(c, a); s != nil {
			d.Attached = meta.IsStatusConditionTrue(s.Conditions, device.ConditionAttached)
			d.AttachFailed = meta.IsStatusConditionTrue(s.Conditions, device.ConditionAttachFailed)
		}
		ds = append(ds, d)
	}
	return ds, bad
}

// Onlooker is an attempt of a claim with admin access that was given a device to be attached. Nobody attaches one for it, so
// its Pods wait in vain.
type Onlooker struct {
	Attempt device.Attempt
	// Pods are the consumers that wait; none before the claim is reserved.
	Pods []Consumer
}

// onlookers returns the attempts of the claim by which it waits in vain for a device of the fabric.
func onlookers(f device.FabricID, c *resourcev1.ResourceClaim) []Onlooker {
	if c.Status.Allocation == nil {
		return nil
	}
	var all []Onlooker
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver != device.Driver || r.Pool != f.Pool() || !ptr.Deref(r.AdminAccess, false) {
			continue
		}
		if a, err := attempt(c, r); err == nil && !a.Ready() {
			all = append(all, Onlooker{Attempt: a, Pods: consumers(c)})
		}
	}
	return all
}

// attempt names the try to serve one result of the claim's allocation.
func attempt(c *resourcev1.ResourceClaim, r resourcev1.DeviceRequestAllocationResult) (device.Attempt, error) {
	at := c.Status.Allocation.AllocationTimestamp
	if at == nil {
		return device.Attempt{}, errNoTime
	}
	node, ok := nodeOf(c.Status.Allocation.NodeSelector)
	if !ok {
		return device.Attempt{}, errNoNode
	}
	return device.Attempt{
		Namespace: c.Namespace, Name: c.Name, UID: string(c.UID),
		AllocatedAt: at.UTC().Format(time.RFC3339),
		Node:        node, Pool: r.Pool, Entry: r.Device,
	}, nil
}

// nodeOf reads the selector that the scheduler writes when a device binds to one node. The API server
// recognizes exactly this form when it checks that an agent writes about its own node.
func nodeOf(s *corev1.NodeSelector) (string, bool) {
	if s == nil || len(s.NodeSelectorTerms) != 1 {
		return "", false
	}
	term := s.NodeSelectorTerms[0]
	if len(term.MatchExpressions) != 0 || len(term.MatchFields) != 1 {
		return "", false
	}
	f := term.MatchFields[0]
	if f.Key != "metadata.name" || f.Operator != corev1.NodeSelectorOpIn || len(f.Values) != 1 || f.Values[0] == "" {
		return "", false
	}
	return f.Values[0], true
}

// statusOf returns the claim's entry in status.devices for the attempt's device, nil if there is none.
func statusOf(c *resourcev1.ResourceClaim, a device.Attempt) *resourcev1.AllocatedDeviceStatus {
	for i := range c.Status.Devices {
		s := &c.Status.Devices[i]
		if s.Driver == device.Driver && s.Pool == a.Pool && s.Device == a.Entry && s.ShareID == nil {
			return s
		}
	}
	return nil
}
