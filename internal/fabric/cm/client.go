// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fm"
	"github.com/cohdi/cohdi-agent/internal/fabric/fti"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

const (
	base = "/cluster_manager/cluster_autoscaler"

	// defaultResizeTimeout bounds the acceptance of a change; the work itself has no call.
	defaultResizeTimeout = 60 * time.Second
	// defaultWorkTimeout is for work that shows nowhere: what is seen to be under way is waited for.
	defaultWorkTimeout = 3 * time.Minute
	// defaultPollAfter suits hardware that takes about twenty seconds.
	defaultPollAfter = 2 * time.Second
)

// Config says which manager to talk to.
type Config struct {
	// Endpoint is "host", "host:port" or "https://host:port".
	Endpoint string
	// Tenant and Cluster are the UUIDs that the manager has for them.
	Tenant, Cluster string
	// Credentials is a directory with the files username, password, client_id, client_secret, realm and
	// ca.crt, as a Secret is mounted.
	Credentials string
	// FabricManager: a Fabric Manager at the same endpoint lists machines and counts what is free. Without it
	// machines are those of the node groups, and nothing can be counted.
	FabricManager bool
	// FabricID is the Fabric Manager's own number of the switch domain.
	FabricID int
	// PollAfter is how often to look at a change that is under way; 2 s if zero.
	PollAfter time.Duration
	// WorkTimeout is how long the manager may work on a change of which it shows nothing; 3 min if zero.
	WorkTimeout time.Duration
	// Clock measures the life of tokens and how long calls took; the real one if nil.
	Clock clock.PassiveClock
	// Observe is told of each request that was tried: "login", "list", "attach", "detach", "poll", "limits",
	// "groups", and the Fabric Manager's "machines" and "free"; the HTTP status or 0 without an answer, and how
	// long it took. It must not block. It may be nil.
	Observe func(operation string, status int, took time.Duration)
	// Dial makes the connections; the network's if nil.
	Dial rest.Dial
}

// Client is a Cluster Manager.
type Client struct {
	conn *fti.Client
	// tenant and cluster are escaped.
	tenant, cluster string
	// fm is nil where there is none.
	fm            *fm.Client
	pollAfter     time.Duration
	resizeTimeout time.Duration
	workTimeout   time.Duration
	clock         clock.PassiveClock
}

var (
	_ fabric.Manager = (*Client)(nil)
	_ fabric.Limiter = (*Client)(nil)
)

// New returns a client; nothing is asked of the manager yet.
func New(cfg Config) (*Client, error) {
	conn, err := fti.New(fti.Config{Endpoint: cfg.Endpoint, Credentials: cfg.Credentials, Clock: cfg.Clock, Observe: cfg.Observe, Dial: cfg.Dial})
	if err != nil {
		return nil, err
	}
	if cfg.Tenant == "" || cfg.Cluster == "" {
		return nil, errors.New("cluster manager tenant or cluster is empty: the UUIDs of both are needed")
	}
	c := &Client{
		conn: conn, tenant: url.PathEscape(cfg.Tenant), cluster: url.PathEscape(cfg.Cluster),
		pollAfter: cmp.Or(cfg.PollAfter, defaultPollAfter), resizeTimeout: defaultResizeTimeout,
		workTimeout: cmp.Or(cfg.WorkTimeout, defaultWorkTimeout), clock: cfg.Clock,
	}
	if c.clock == nil {
		c.clock = clock.RealClock{}
	}
	if cfg.FabricManager {
		c.fm, err = fm.Over(conn, fm.Config{Tenant: cfg.Tenant, FabricID: cfg.FabricID})
	}
	return c, err
}

// Capabilities of a CM.
func (c *Client) Capabilities() fabric.Capabilities {
	free := fabric.FreeNone
	if c.fm != nil {
		free = fabric.FreeCount
	}
	return fabric.Capabilities{
		AddressableDetach: true,
		Free:              free,
		Asynchronous:      true,
		Exclusion:         fabric.ExclusionMachine,
		Identity:          true,
		Limits:            true,
		MaxCall:           c.resizeTimeout,
	}
}

// Machines lists the tenant's machines, or those of the cluster's node groups where only the CM can be asked.
func (c *Client) Machines(ctx context.Context) ([]fabric.Machine, error) {
	if c.fm != nil {
		return c.fm.Machines(ctx)
	}
	groups, fault := c.groups(ctx)
	if fault != nil {
		return nil, fault
	}
	var all []fabric.Machine
	for _, g := range groups {
		members, fault := c.members(ctx, g)
		if fault != nil {
			return nil, fault
		}
		all = append(all, members...)
	}
	return all, nil
}

func (c *Client) groups(ctx context.Context) ([]string, *device.Fault) {
	req := c.read("v2", "groups", "list the node groups", "/nodegroups")
	answer, fault := c.conn.Call(ctx, req)
	if fault != nil {
		return nil, fault
	}
	groups, err := decodeGroups(answer.Body)
	if err != nil {
		return nil, answer.Strange(req.What, err)
	}
	return groups, nil
}

func (c *Client) members(ctx context.Context, group string) ([]fabric.Machine, *device.Fault) {
	req := c.read("v2", "groups", "read node group "+group, "/nodegroups/"+url.PathEscape(group))
	answer, fault := c.conn.Call(ctx, req)
	if fault != nil {
		return nil, fault
	}
	written, err := decodeGroup(answer.Body)
	if err != nil {
		return nil, answer.Strange(req.What, err)
	}
	var all []fabric.Machine
	for _, w := range written {
		id, err := device.ParseMachine(w)
		if err != nil {
			klog.FromContext(ctx).V(1).Info("The cluster manager lists a machine that cannot be named, left out", "reason", err.Error())
			continue
		}
		c.conn.Spell(id, w)
		all = append(all, fabric.Machine{ID: id, Power: fabric.PowerUnknown})
	}
	return all, nil
}

// ListAttached reads each machine by itself, since one that fails must not hide the others.
func (c *Client) ListAttached(ctx context.Context, machines []device.Machine) (map[device.Machine][]device.OnFabric, map[device.Machine]error) {
	return fti.ListEach(ctx, machines, func(ctx context.Context, id device.Machine) ([]device.OnFabric, *device.Fault) {
		m, fault := c.machine(ctx, id, "list", "list what is attached to machine "+string(id))
		if fault != nil {
			return nil, fault
		}
		gpus, unnamed := m.gpus(id)
		if unnamed > 0 {
			klog.FromContext(ctx).Info("The cluster manager lists GPUs that it gives no name, left out", "machine", id, "count", unnamed)
		}
		return gpus, nil
	})
}

// machine reads one machine.
func (c *Client) machine(ctx context.Context, id device.Machine, operation, what string) (*machine, *device.Fault) {
	req := c.read("v3", operation, what, "/machines/"+url.PathEscape(c.conn.Spelled(id)))
	answer, fault := c.conn.Call(ctx, req)
	if fault != nil {
		return nil, fault
	}
	m, ok, err := decodeMachine(answer.Body, id)
	if err == nil && !ok {
		err = errors.New("the answer is not about this machine")
	}
	if err != nil {
		return nil, answer.Strange(what, err)
	}
	return &m, nil
}

// Free asks the Fabric Manager: a Cluster Manager does not count what is free.
func (c *Client) Free(ctx context.Context, models []string) (map[string]fabric.Supply, error) {
	if c.fm == nil {
		return nil, &device.Fault{
			Class: device.FaultUnsupported, Op: "count what is free", Message: "a Cluster Manager does not count it, and no Fabric Manager is configured beside it",
		}
	}
	return c.fm.Free(ctx, models)
}

// Limits are those of the machine's node group.
func (c *Client) Limits(ctx context.Context, id device.Machine, models []string) (map[string]fabric.Limit, error) {
	m, fault := c.machine(ctx, id, "limits", "read the limits of machine "+string(id))
	if fault != nil {
		return nil, fault
	}
	limits := make(map[string]fabric.Limit, len(models))
	for _, model := range models {
		if s, ok := m.spec(model); ok {
			limits[model] = s.limit()
		}
	}
	return limits, nil
}

// Health asks for the node groups: that needs credentials, tenant, cluster and a manager that answers.
func (c *Client) Health(ctx context.Context) error {
	if _, fault := c.groups(ctx); fault != nil {
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
func (c *Client) read(version, operation, what, path string) fti.Request {
	return fti.Request{
		Operation: operation, What: what, Method: "GET",
		Path:    strings.Join([]string{base, version, "tenants", c.tenant, "clusters", c.cluster}, "/") + path,
		Timeout: fti.ReadTimeout, Limit: fti.MaxBody,
	}
}

// unsent makes a fault definite that came before the change was sent.
func unsent(fault *device.Fault) *device.Fault {
	if fault.Class == device.FaultUnknown {
		fault.Class = device.FaultUnreachable
	}
	return fault
}

// wrong is the fault for an intent or a state that does not allow a change.
func wrong(class device.FaultClass, what, format string, args ...any) *device.Fault {
	return &device.Fault{Class: class, Op: what, Message: fmt.Sprintf(format, args...)}
}
