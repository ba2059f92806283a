// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fti"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

const (
	base = "/fabric_manager/api/v1"

	// defaultUpdateTimeout bounds an attach or detach: the manager answers when the hardware is done.
	defaultUpdateTimeout = 180 * time.Second

	// maxMachines bounds the list of all machines, which may be longer than other answers.
	maxMachines = 16 << 20
)

// Config says which manager to talk to.
type Config struct {
	// Endpoint is "host", "host:port" or "https://host:port".
	Endpoint string
	// Tenant is the tenant's UUID.
	Tenant string
	// FabricID is the manager's own number of the switch domain.
	FabricID int
	// Credentials is a directory with the files username, password, client_id, client_secret, realm and
	// ca.crt, as a Secret is mounted.
	Credentials string
	// Exclusion is what is known of how many changing calls this manager takes at once; unknown if empty.
	Exclusion fabric.Exclusion
	// UpdateTimeout is how long the manager may work on an attach or detach; 180 s if zero.
	UpdateTimeout time.Duration
	// Clock measures the life of tokens and how long calls took; the real one if nil.
	Clock clock.PassiveClock
	// Observe is told of each request that was tried: "login", "machines", "list", "free", "attach" or
	// "detach", the HTTP status or 0 without an answer, and how long it took. It must not block. It may be nil.
	Observe func(operation string, status int, took time.Duration)
	// Dial makes the connections; the network's if nil.
	Dial rest.Dial
}

// Client is a Fabric Manager.
type Client struct {
	conn          *fti.Client
	tenant        string
	fabricID      string
	excludes      fabric.Exclusion
	updateTimeout time.Duration

	mu sync.Mutex
	// member is a machine of our fabric, asked for what is free. Guarded by mu.
	member device.Machine
}

var _ fabric.Manager = (*Client)(nil)

// New returns a client; nothing is asked of the manager yet.
func New(cfg Config) (*Client, error) {
	conn, err := fti.New(fti.Config{Endpoint: cfg.Endpoint, Credentials: cfg.Credentials, Clock: cfg.Clock, Observe: cfg.Observe, Dial: cfg.Dial})
	if err != nil {
		return nil, err
	}
	return Over(conn, cfg)
}

// Over is New over connections and logins that are shared with another driver.
func Over(conn *fti.Client, cfg Config) (*Client, error) {
	if cfg.Tenant == "" {
		return nil, errors.New("fabric manager tenant is empty: the UUID of the tenant is needed")
	}
	return &Client{
		conn:          conn,
		tenant:        cfg.Tenant,
		fabricID:      strconv.Itoa(cfg.FabricID),
		excludes:      cmp.Or(cfg.Exclusion, fabric.ExclusionUnknown),
		updateTimeout: cmp.Or(cfg.UpdateTimeout, defaultUpdateTimeout),
	}, nil
}

// Capabilities of an FM.
func (c *Client) Capabilities() fabric.Capabilities {
	return fabric.Capabilities{
		AddressableDetach: true,
		Free:              fabric.FreeCount,
		Exclusion:         c.excludes,
		Identity:          true,
		MaxCall:           c.updateTimeout,
	}
}

// Machines lists the tenant's machines.
func (c *Client) Machines(ctx context.Context) ([]fabric.Machine, error) {
	listed, fault := c.machines(ctx)
	if fault != nil {
		return nil, fault
	}
	return listed, nil
}

func (c *Client) machines(ctx context.Context) ([]fabric.Machine, *device.Fault) {
	req := c.read("machines", "list the machines", "/machines")
	req.Limit = maxMachines
	answer, fault := c.conn.Call(ctx, req)
	if fault != nil {
		return nil, fault
	}
	wire, err := decodeMachines(answer.Body)
	if err != nil {
		return nil, answer.Strange(req.What, err)
	}
	out := make([]fabric.Machine, 0, len(wire))
	for _, m := range wire {
		d, err := m.describe()
		if err != nil {
			klog.FromContext(ctx).V(1).Info("The fabric manager lists a machine that cannot be named, left out", "reason", err.Error())
			continue
		}
		c.conn.Spell(d.ID, string(m.UUID))
		out = append(out, d)
	}
	return out, nil
}

// ListAttached reads each machine by itself, since one that fails must not hide the others.
func (c *Client) ListAttached(ctx context.Context, machines []device.Machine) (map[device.Machine][]device.OnFabric, map[device.Machine]error) {
	return fti.ListEach(ctx, machines, c.list)
}

func (c *Client) list(ctx context.Context, id device.Machine) ([]device.OnFabric, *device.Fault) {
	req := c.read("list", "list what is attached to machine "+string(id), "/machines/"+url.PathEscape(c.conn.Spelled(id)))
	answer, fault := c.conn.Call(ctx, req)
	if fault != nil {
		return nil, fault
	}
	wire, err := decodeMachines(answer.Body)
	if err != nil {
		return nil, answer.Strange(req.What, err)
	}
	m, ok := pick(wire, id)
	if !ok {
		if len(wire) == 0 {
			return nil, &device.Fault{Class: device.FaultNotFound, Op: req.What, Status: answer.Status, Message: "the answer names no machine"}
		}
		return nil, answer.Strange(req.What, errors.New("the answer is about another machine"))
	}
	gpus, skipped := m.gpus(id)
	if skipped > 0 {
		klog.FromContext(ctx).Info("The fabric manager lists GPUs without res_uuid, left out", "machine", id, "count", skipped)
	}
	return gpus, nil
}

// Free counts through one machine of the fabric: the manager counts per fabric and not per machine.
func (c *Client) Free(ctx context.Context, models []string) (map[string]fabric.Supply, error) {
	free := make(map[string]fabric.Supply, len(models))
	var errs []error
	for _, model := range models {
		n, fault := c.count(ctx, model)
		if fault != nil {
			errs = append(errs, fault)
			continue
		}
		free[model] = fabric.Supply{Count: n}
	}
	return free, errors.Join(errs...)
}

// count asks the machine that answered last time, and looks for another one if it has left the fabric.
func (c *Client) count(ctx context.Context, model string) (int, *device.Fault) {
	c.mu.Lock()
	member := c.member
	c.mu.Unlock()
	if member != "" {
		n, in, fault := c.available(ctx, member, model)
		if fault == nil && (in == "" || in == c.fabricID) {
			return n, nil
		}
		if fault != nil && fault.Class != device.FaultNotFound {
			return 0, fault
		}
	}
	member, fault := c.findMember(ctx, model)
	if fault != nil {
		return 0, fault
	}
	n, in, fault := c.available(ctx, member, model)
	if fault != nil {
		return 0, fault
	}
	if in != "" && in != c.fabricID {
		return 0, &device.Fault{
			Class: device.FaultConflict, Op: "count free " + model,
			Message: fmt.Sprintf("machine %s is listed in fabric %s and answers for fabric %s", member, c.fabricID, in),
		}
	}
	return n, nil
}

func (c *Client) findMember(ctx context.Context, model string) (device.Machine, *device.Fault) {
	machines, fault := c.machines(ctx)
	if fault != nil {
		return "", fault
	}
	for _, m := range machines {
		if m.Fabric == c.fabricID {
			c.mu.Lock()
			c.member = m.ID
			c.mu.Unlock()
			return m.ID, nil
		}
	}
	return "", &device.Fault{
		Class: device.FaultNotFound, Op: "count free " + model,
		Message: fmt.Sprintf("none of the tenant's %d machines is in fabric %s", len(machines), c.fabricID),
	}
}

func (c *Client) available(ctx context.Context, id device.Machine, model string) (n int, fabricID string, _ *device.Fault) {
	req := c.read("free", "count free "+model, "/machines/"+url.PathEscape(c.conn.Spelled(id))+"/available-reserved-resources")
	req.Query.Set("res_type", fti.ResourceGPU)
	cond, err := encodeCondition(model)
	if err != nil {
		return 0, "", &device.Fault{Class: device.FaultRejected, Op: req.What, Err: err}
	}
	req.Query.Set("condition", cond)
	answer, fault := c.conn.Call(ctx, req)
	if fault != nil {
		return 0, "", fault
	}
	fabricID, n, err = decodeAvailable(answer.Body)
	if err != nil {
		return 0, "", answer.Strange(req.What, err)
	}
	return n, fabricID, nil
}

// Attach asks for one more GPU of the model. The manager chooses it.
func (c *Client) Attach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	op := fabric.Operation{Kind: fabric.KindAttach, Intent: in, State: fabric.Done}
	what := fmt.Sprintf("attach one %s to machine %s", in.Model, in.Machine)
	if in.Device != "" {
		return fabric.Operation{}, &device.Fault{
			Class: device.FaultUnsupported, Op: what, Message: "a Fabric Manager chooses the device itself",
		}
	}
	if in.Model == "" {
		return fabric.Operation{}, &device.Fault{Class: device.FaultRejected, Op: what, Message: "no model is given"}
	}
	answer, fault := c.update(ctx, "attach", what, in.Machine, updateSpec{
		Type: fti.ResourceGPU, Spec: &resourceSpec{Condition: []fti.Condition{fti.IsModel(in.Model)}}, Count: 1,
	})
	if fault != nil {
		return fabric.Operation{}, c.explainRefusal(ctx, in, fault)
	}
	wire, err := decodeMachines(answer.Body)
	switch {
	case err == nil:
	case answer.Silent():
		return op, nil
	default:
		return fabric.Operation{}, answer.Strange(what, err)
	}
	before := make(map[string]bool, len(in.Before))
	for _, id := range in.Before {
		before[id] = true
	}
	if m, ok := pick(wire, in.Machine); ok {
		gpus, _ := m.gpus(in.Machine)
		for _, g := range gpus {
			if !before[g.ID] { // some answer with all that the machine has
				op.Devices = append(op.Devices, g)
			}
		}
	}
	return op, nil
}

// explainRefusal finds out whether a refused attach was refused because nothing is free. The manager's
// codes are not public and its status differs (400, 404, 409), but it can be asked.
func (c *Client) explainRefusal(ctx context.Context, in fabric.Intent, fault *device.Fault) *device.Fault {
	switch fault.Class {
	case device.FaultBusy, device.FaultNotFound, device.FaultRejected, device.FaultConflict:
	default:
		return fault
	}
	if fault.Code == "no_available_resources" {
		fault.Class = device.FaultNoCapacity
		return fault
	}
	n, _, asked := c.available(ctx, in.Machine, in.Model)
	if asked == nil && n == 0 {
		fault.Class = device.FaultNoCapacity
	}
	return fault
}

// Detach asks to take a GPU away.
func (c *Client) Detach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	what := fmt.Sprintf("detach %s from machine %s", in.Device, in.Machine)
	if in.Device == "" {
		return fabric.Operation{}, &device.Fault{Class: device.FaultRejected, Op: what, Message: "no device is given"}
	}
	answer, fault := c.update(ctx, "detach", what, in.Machine, updateSpec{Type: fti.ResourceGPU, Device: in.Device, Count: 1})
	if fault != nil {
		return fabric.Operation{}, fault
	}
	if _, err := decodeMachines(answer.Body); err != nil && !answer.Silent() {
		return fabric.Operation{}, answer.Strange(what, err)
	}
	return fabric.Operation{Kind: fabric.KindDetach, Intent: in, State: fabric.Done}, nil
}

// Poll has nothing to look at: every operation has ended when its call did.
func (c *Client) Poll(_ context.Context, op fabric.Operation) (fabric.Operation, error) {
	if op.State == fabric.Pending || op.State == fabric.Suspended {
		return op, &device.Fault{
			Class: device.FaultUnknown, Op: "poll operation " + op.Handle, Message: "a Fabric Manager has no pending operations",
		}
	}
	return op, nil
}

// Health asks for the machines: that needs credentials, the tenant and a manager that answers.
func (c *Client) Health(ctx context.Context) error {
	if _, fault := c.machines(ctx); fault != nil {
		return fault
	}
	return nil
}

// Close drops idle connections. The manager's tokens end by themselves.
func (c *Client) Close(context.Context) error {
	c.conn.Close()
	return nil
}

// read is a request that changes nothing.
func (c *Client) read(operation, what, path string) fti.Request {
	return fti.Request{
		Operation: operation, What: what, Method: "GET", Path: base + path,
		Query: url.Values{"tenant_uuid": {c.tenant}}, Timeout: fti.ReadTimeout, Limit: fti.MaxBody,
	}
}

// update is a request that changes what a machine has.
func (c *Client) update(ctx context.Context, operation, what string, id device.Machine, spec updateSpec) (fti.Reply, *device.Fault) {
	name := c.conn.Spelled(id)
	body, err := encodeUpdate(c.tenant, name, spec)
	if err != nil {
		return fti.Reply{}, &device.Fault{Class: device.FaultRejected, Op: what, Err: err}
	}
	req := c.read(operation, what, "/machines/"+url.PathEscape(name)+"/update")
	req.Change = true
	req.Method, req.Body, req.ContentType, req.Timeout = "PATCH", body, "application/json", c.updateTimeout
	if operation == "detach" {
		req.Method = "DELETE"
	}
	return c.conn.Call(ctx, req)
}
