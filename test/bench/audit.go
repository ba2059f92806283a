// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// agentUser is the account that all agents share.
const agentUser = "system:serviceaccount:" + device.AgentNamespace + ":" + device.AgentName

// nodeExtra is where the API server says on which node the Pod of a token runs.
const nodeExtra = "authentication.kubernetes.io/node-name"

// call is one line of the audit log: what was asked of the API server, by whom, and when it was answered.
type call struct {
	Stage string `json:"stage"`
	Verb  string `json:"verb"`
	User  struct {
		Username string              `json:"username"`
		Extra    map[string][]string `json:"extra"`
	} `json:"user"`
	ObjectRef struct {
		Resource    string `json:"resource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
		APIGroup    string `json:"apiGroup"`
		Subresource string `json:"subresource"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	Received       time.Time       `json:"requestReceivedTimestamp"`
	At             time.Time       `json:"stageTimestamp"`
	ResponseObject json.RawMessage `json:"responseObject"`
}

// auditLog reads the API server's audit log, from where it was read last.
type auditLog struct {
	path   string
	offset int64
}

// read returns the calls that were answered since the last read, in the order in which they were. A watch counts
// when it began.
func (l *auditLog) read() ([]call, error) {
	f, err := os.Open(l.path)
	if err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	defer f.Close()
	if _, err = f.Seek(l.offset, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	var calls []call
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break // the rest of the line is still to come
		}
		if err != nil {
			return nil, fmt.Errorf("read the audit log: %w", err)
		}
		l.offset += int64(len(line))
		var c call
		if err = json.Unmarshal(line, &c); err != nil {
			return nil, fmt.Errorf("decode a line of the audit log: %w", err)
		}
		if watch := c.Verb == "watch"; watch && c.Stage == "ResponseStarted" || !watch && c.Stage == "ResponseComplete" {
			calls = append(calls, c)
		}
	}
	slices.SortStableFunc(calls, func(a, b call) int { return a.At.Compare(b.At) })
	return calls, nil
}

// byAgent tells whether an agent asked.
func (c *call) byAgent() bool { return c.User.Username == agentUser }

// node is that of the Pod which asked.
func (c *call) node() string {
	if n := c.User.Extra[nodeExtra]; len(n) > 0 {
		return n[0]
	}
	return ""
}

// writes tells whether the call changes something; a question about rights is none.
func (c *call) writes() bool {
	return slices.Contains([]string{"create", "update", "patch", "delete"}, c.Verb) && c.ObjectRef.APIGroup != "authorization.k8s.io"
}

func (c *call) refused() bool { return c.ResponseStatus.Code >= 400 }

// What agents write.
const (
	deviceLease    = "device lease"
	electionLease  = "election lease"
	claimCondition = "claim's condition"
	sliceObject    = "ResourceSlice"
	nodeLabels     = "Node's labels"
	nodeConditions = "Node's conditions"
	eventObject    = "event"
)

// objects are those that agents write, in the order of the tables.
func objects() []string {
	return []string{deviceLease, claimCondition, sliceObject, nodeLabels, nodeConditions, eventObject, electionLease}
}

// object names what the call is about.
func (c *call) object() string {
	r := c.ObjectRef
	switch {
	case r.Resource == "leases" && strings.HasPrefix(r.Name, "device-"):
		return deviceLease
	case r.Resource == "leases" && strings.HasPrefix(r.Name, "fabric-"):
		return electionLease
	case r.Resource == "resourceclaims" && r.Subresource == "status":
		return claimCondition
	case r.Resource == "resourceslices":
		return sliceObject
	case r.Resource == "nodes" && r.Subresource == "status":
		return nodeConditions
	case r.Resource == "nodes":
		return nodeLabels
	case r.Resource == "events":
		return eventObject
	case r.Subresource != "":
		return r.Resource + "/" + r.Subresource
	}
	return r.Resource
}

// countWrites counts the agents' writes by object, and those that were refused.
func countWrites(calls []call) (by map[string]int, refused int) {
	by = map[string]int{}
	for i := range calls {
		if c := &calls[i]; c.byAgent() && c.writes() {
			by[c.object()]++
			if c.refused() {
				refused++
			}
		}
	}
	return by, refused
}

// countVerbs counts all that the agents asked, by verb.
func countVerbs(calls []call) map[string]int {
	by := map[string]int{}
	for i := range calls {
		if c := &calls[i]; c.byAgent() {
			by[c.Verb]++
		}
	}
	return by
}

// journey is what one claim went through, as its status was written.
type journey struct {
	claim               string // namespace/name
	unit                device.Unit
	allocated, attached time.Time
	// leased are the times at which the unit's device lease was written meanwhile, the first by the leader.
	leased []time.Time
}

func (j *journey) took() time.Duration { return j.attached.Sub(j.allocated) }

// journeys follows each claim from the write of its first allocation to that of its condition Attached.
func journeys(calls []call) ([]*journey, error) {
	byClaim, byLease := map[string]*journey{}, map[string]*journey{}
	for i := range calls {
		c := &calls[i]
		if c.refused() || !c.writes() {
			continue
		}
		if c.object() == deviceLease && c.byAgent() {
			if j := byLease[c.ObjectRef.Name]; j != nil && j.attached.IsZero() {
				j.leased = append(j.leased, c.At)
			}
			continue
		}
		if c.object() != claimCondition || len(c.ResponseObject) == 0 {
			continue
		}
		var claim resourcev1.ResourceClaim
		if err := json.Unmarshal(c.ResponseObject, &claim); err != nil {
			return nil, fmt.Errorf("decode the claim in the audit log: %w", err)
		}
		r := ours(&claim)
		if r == nil {
			continue
		}
		name := claim.Namespace + "/" + claim.Name
		j := byClaim[name]
		if j == nil {
			unit, _ := device.UnitOfEntry(r.Device)
			j = &journey{claim: name, unit: unit, allocated: c.At}
			byClaim[name], byLease[device.LeaseName(fabric, unit)] = j, j
		}
		if j.attached.IsZero() && says(&claim, r, device.ConditionAttached) {
			j.attached = c.At
		}
	}
	all := make([]*journey, 0, len(byClaim))
	for _, j := range byClaim {
		all = append(all, j)
	}
	slices.SortFunc(all, func(a, b *journey) int {
		return cmp.Or(a.allocated.Compare(b.allocated), cmp.Compare(a.claim, b.claim))
	})
	return all, nil
}

// ours is the device of our driver that the claim was given, nil if none was.
func ours(c *resourcev1.ResourceClaim) *resourcev1.DeviceRequestAllocationResult {
	if c.Status.Allocation == nil {
		return nil
	}
	for i := range c.Status.Allocation.Devices.Results {
		if r := &c.Status.Allocation.Devices.Results[i]; r.Driver == device.Driver {
			return r
		}
	}
	return nil
}

// says tells whether the claim has the condition for the device.
func says(c *resourcev1.ResourceClaim, r *resourcev1.DeviceRequestAllocationResult, condition string) bool {
	for _, d := range c.Status.Devices {
		if d.Driver != r.Driver || d.Pool != r.Pool || d.Device != r.Device {
			continue
		}
		for _, cond := range d.Conditions {
			if cond.Type == condition && cond.Status == "True" {
				return true
			}
		}
	}
	return false
}
