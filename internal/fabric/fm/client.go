// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

const (
	base = "/fabric_manager/api/v1"

	// defaultUpdateTimeout bounds an attach or detach: the manager answers when the hardware is done.
	defaultUpdateTimeout = 180 * time.Second
	readTimeout          = 60 * time.Second

	// maxBody bounds an answer; the list of all machines may be longer.
	maxBody     = 1 << 20
	maxMachines = 16 << 20

	// parallelLists bounds how many machines are listed at once.
	parallelLists = 4
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
}

// Client is a Fabric Manager.
type Client struct {
	endpoint *url.URL
	tenant   string
	fabricID string
	excludes fabric.Exclusion
	clock    clock.PassiveClock
	observe  func(operation string, status int, took time.Duration)
	timeouts timeouts
	conns    connections
	tokens   tokens

	mu sync.Mutex
	// spelling is how the manager writes a machine's UUID, where it is not in lower case. Guarded by mu.
	spelling map[device.Machine]string
	// member is a machine of our fabric, asked for what is free. Guarded by mu.
	member device.Machine
}

type timeouts struct{ update, read, login time.Duration }

var _ fabric.Manager = (*Client)(nil)

// New returns a client; nothing is asked of the manager yet.
func New(cfg Config) (*Client, error) {
	endpoint, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, err
	}
	if cfg.Tenant == "" {
		return nil, errors.New("fabric manager tenant is empty: the UUID of the tenant is needed")
	}
	if cfg.Credentials == "" {
		return nil, errors.New("fabric manager credentials directory is empty")
	}
	c := &Client{
		endpoint: endpoint,
		tenant:   cfg.Tenant,
		fabricID: strconv.Itoa(cfg.FabricID),
		excludes: cmp.Or(cfg.Exclusion, fabric.ExclusionUnknown),
		clock:    cfg.Clock,
		observe:  cfg.Observe,
		timeouts: timeouts{update: cmp.Or(cfg.UpdateTimeout, defaultUpdateTimeout), read: readTimeout, login: loginTimeout},
		conns:    connections{dir: cfg.Credentials},
		spelling: make(map[device.Machine]string),
	}
	if c.clock == nil {
		c.clock = clock.RealClock{}
	}
	if c.observe == nil {
		c.observe = func(string, int, time.Duration) {}
	}
	c.tokens = tokens{clock: c.clock, dir: cfg.Credentials, login: c.login}
	return c, nil
}

// parseEndpoint accepts https only: the token would travel in the clear otherwise.
func parseEndpoint(s string) (*url.URL, error) {
	if !strings.Contains(s, "://") {
		s = "https://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, fmt.Errorf("fabric manager endpoint: %w", err)
	}
	if u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("fabric manager endpoint %q is not of the form [https://]host[:port]", u.Redacted())
	}
	return &url.URL{Scheme: u.Scheme, Host: u.Host}, nil
}

// Capabilities of an FM.
func (c *Client) Capabilities() fabric.Capabilities {
	return fabric.Capabilities{
		AddressableDetach: true,
		Free:              fabric.FreeCount,
		Exclusion:         c.excludes,
		Identity:          true,
		MaxCall:           c.timeouts.update,
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
	req.limit = maxMachines
	answer, fault := c.call(ctx, req)
	if fault != nil {
		return nil, fault
	}
	wire, err := decodeMachines(answer.body)
	if err != nil {
		return nil, answer.strange(req, err)
	}
	out := make([]fabric.Machine, 0, len(wire))
	for _, m := range wire {
		d, err := m.describe()
		if err != nil {
			klog.FromContext(ctx).V(1).Info("The fabric manager lists a machine that cannot be named, left out", "reason", err.Error())
			continue
		}
		c.spell(d.ID, string(m.UUID))
		out = append(out, d)
	}
	return out, nil
}

func (c *Client) spell(id device.Machine, written string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if written != string(id) {
		c.spelling[id] = written
	}
}

func (c *Client) spelled(id device.Machine) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.spelling[id]; ok {
		return s
	}
	return string(id)
}

// ListAttached reads each machine by itself, since one that fails must not hide the others.
func (c *Client) ListAttached(ctx context.Context, machines []device.Machine) (map[device.Machine][]device.OnFabric, map[device.Machine]error) {
	attached := make(map[device.Machine][]device.OnFabric, len(machines))
	failed := make(map[device.Machine]error)
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelLists)
	for _, m := range machines {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			gpus, fault := c.list(ctx, m)
			mu.Lock()
			defer mu.Unlock()
			if fault != nil {
				failed[m] = fault
				return
			}
			attached[m] = gpus
		})
	}
	wg.Wait()
	return attached, failed
}

func (c *Client) list(ctx context.Context, id device.Machine) ([]device.OnFabric, *device.Fault) {
	req := c.read("list", "list what is attached to machine "+string(id), "/machines/"+url.PathEscape(c.spelled(id)))
	answer, fault := c.call(ctx, req)
	if fault != nil {
		return nil, fault
	}
	wire, err := decodeMachines(answer.body)
	if err != nil {
		return nil, answer.strange(req, err)
	}
	m, ok := pick(wire, id)
	if !ok {
		if len(wire) == 0 {
			return nil, &device.Fault{Class: device.FaultNotFound, Op: req.what, Status: answer.status, Message: "the answer names no machine"}
		}
		return nil, answer.strange(req, errors.New("the answer is about another machine"))
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
	req := c.read("free", "count free "+model, "/machines/"+url.PathEscape(c.spelled(id))+"/available-reserved-resources")
	req.query.Set("res_type", resourceGPU)
	cond, err := encodeCondition(model)
	if err != nil {
		return 0, "", &device.Fault{Class: device.FaultRejected, Op: req.what, Err: err}
	}
	req.query.Set("condition", cond)
	answer, fault := c.call(ctx, req)
	if fault != nil {
		return 0, "", fault
	}
	fabricID, n, err = decodeAvailable(answer.body)
	if err != nil {
		return 0, "", answer.strange(req, err)
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
		Type: resourceGPU, Spec: &resourceSpec{Condition: []condition{modelCondition(in.Model)}}, Count: 1,
	})
	if fault != nil {
		return fabric.Operation{}, c.explainRefusal(ctx, in, fault)
	}
	wire, err := decodeMachines(answer.body)
	switch {
	case err == nil:
	case answer.silent():
		return op, nil
	default:
		return fabric.Operation{}, answer.strangeTo(what, err)
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
	answer, fault := c.update(ctx, "detach", what, in.Machine, updateSpec{Type: resourceGPU, Device: in.Device, Count: 1})
	if fault != nil {
		return fabric.Operation{}, fault
	}
	if _, err := decodeMachines(answer.body); err != nil && !answer.silent() {
		return fabric.Operation{}, answer.strangeTo(what, err)
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
	c.conns.close()
	return nil
}

// read is a request that changes nothing.
func (c *Client) read(operation, what, path string) request {
	return request{
		operation: operation, what: what, method: "GET", path: base + path,
		query: url.Values{"tenant_uuid": {c.tenant}}, timeout: c.timeouts.read, limit: maxBody,
	}
}

// update is a request that changes what a machine has.
func (c *Client) update(ctx context.Context, operation, what string, id device.Machine, spec updateSpec) (reply, *device.Fault) {
	name := c.spelled(id)
	body, err := encodeUpdate(c.tenant, name, spec)
	if err != nil {
		return reply{}, &device.Fault{Class: device.FaultRejected, Op: what, Err: err}
	}
	req := c.read(operation, what, "/machines/"+url.PathEscape(name)+"/update")
	req.change = true
	req.method, req.body, req.contentType, req.timeout = "PATCH", body, "application/json", c.timeouts.update
	if operation == "detach" {
		req.method = "DELETE"
	}
	return c.call(ctx, req)
}
