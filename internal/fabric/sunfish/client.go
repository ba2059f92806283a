// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

const (
	defaultCallTimeout = time.Minute
	defaultSettle      = 10 * time.Second
	defaultPoll        = 2 * time.Second

	readTimeout = 30 * time.Second
	maxAnswer   = 4 << 20
)

// Config says which service to talk to.
type Config struct {
	// Endpoint is the service's URL, "https://host[:port]".
	Endpoint string
	// PlainHTTP accepts an http URL. Changes are then for everybody on the network to forge, which the client says in
	// its log. The service asks nobody who he is in either case.
	PlainHTTP bool
	// Fabric is the Id of the one of the service's Fabrics that counts; it may be empty where there is one.
	Fabric string
	// Credentials is a directory as a Secret is mounted: ca.crt, where the system's roots do not do.
	Credentials string

	// CallTimeout is how long one change may take, Settle how long what a machine shows may lag behind a change that is
	// done, Poll how long to wait between two looks at one. Zero is 1 min, 10 s and 2 s.
	CallTimeout, Settle, Poll time.Duration
	// Clock measures how long calls took, and how long something has been out of order; the real one if nil.
	Clock clock.PassiveClock
	// Observe is told of each request that was tried: "inventory", "health", "attach", "detach" or "poll", the HTTP status
	// or 0 without an answer, and how long it took. It must not block. It may be nil.
	Observe func(operation string, status int, took time.Duration)
	// Dial makes the connections; the network's if nil.
	Dial rest.Dial
}

// Client is a Sunfish service.
type Client struct {
	server, fabric string
	capabilities   fabric.Capabilities
	poll           time.Duration
	clock          clock.PassiveClock
	rest           *rest.Client
	warning        sync.Once
	plain          bool

	endpoints   memo[endpoint]
	systems     memo[system]
	pool        memo[processor] // the GPUs that endpoints lead to
	connections memo[connection]

	mu sync.Mutex
	// orphans are the devices that a machine shows though nothing connects them, and since when.
	orphans map[place]time.Time
}

// place is a device on a machine.
type place struct {
	machine device.Machine
	target  string
}

var _ fabric.Manager = (*Client)(nil)

// New returns a client; nothing is asked of the service yet.
func New(cfg Config) (*Client, error) {
	server, err := parseEndpoint(cfg.Endpoint, cfg.PlainHTTP)
	if err != nil {
		return nil, err
	}
	if strings.ContainsAny(cfg.Fabric, "/?#%") {
		return nil, fmt.Errorf("fabric %q is not the Id of one", cfg.Fabric)
	}
	c := &Client{
		server: server, fabric: cfg.Fabric, poll: cmp.Or(cfg.Poll, defaultPoll), clock: cfg.Clock, plain: cfg.PlainHTTP, orphans: map[place]time.Time{},
		capabilities: fabric.Capabilities{
			AddressableAttach: true, AddressableDetach: true, Free: fabric.FreeList, Asynchronous: true,
			Exclusion: fabric.ExclusionNone, Identity: true,
			MaxCall: cmp.Or(cfg.CallTimeout, defaultCallTimeout), Settle: cmp.Or(cfg.Settle, defaultSettle),
		},
	}
	if c.clock == nil {
		c.clock = clock.RealClock{}
	}
	c.rest = rest.NewClient(cfg.Credentials, c.clock, cfg.Observe).Over(cfg.Dial)
	return c, nil
}

func parseEndpoint(s string, plain bool) (string, error) {
	u, err := url.Parse(s)
	if err != nil {
		return "", fmt.Errorf("sunfish endpoint: %w", err)
	}
	if u.Scheme == "http" && !plain {
		return "", fmt.Errorf("sunfish endpoint %q is not encrypted; if that is wanted, plain HTTP has to be allowed", u.Redacted())
	}
	if u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || strings.TrimRight(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("sunfish endpoint %q is not of the form https://host[:port]", u.Redacted())
	}
	return u.Scheme + "://" + u.Host, nil
}

// Capabilities of a Sunfish service.
func (c *Client) Capabilities() fabric.Capabilities { return c.capabilities }

// Machines are the Systems with a UUID that the fabric has an endpoint for.
func (c *Client) Machines(ctx context.Context) ([]fabric.Machine, error) {
	q := question{"inventory", "list the machines"}
	at, fault := c.where(ctx, q)
	if fault != nil {
		return nil, fault
	}
	v, fault := c.lookAt(ctx, q, at, true)
	if fault != nil {
		return nil, fault
	}
	if fault := whole(v.dark, nil); fault != nil {
		return nil, fault
	}
	out := []fabric.Machine{}
	for _, path := range slices.Sorted(maps.Keys(v.systems)) {
		s := v.systems[path]
		if s.machine != "" && len(v.initiators(path)) > 0 {
			out = append(out, fabric.Machine{ID: s.machine, Name: s.name, Fabric: at.fabric, Power: s.power})
		}
	}
	return out, nil
}

// ListAttached reads the endpoints and Connections once, and what each of the machines shows.
func (c *Client) ListAttached(ctx context.Context, machines []device.Machine) (map[device.Machine][]device.OnFabric, map[device.Machine]error) {
	attached := make(map[device.Machine][]device.OnFabric, len(machines))
	failed := make(map[device.Machine]error)
	if len(machines) == 0 {
		return attached, failed
	}
	v, fault := c.look(ctx, question{"inventory", "list what is attached"})
	for _, m := range machines {
		q := question{"inventory", "list what is attached to machine " + string(m)}
		if fault != nil {
			mine := *fault
			mine.Op = q.what
			failed[m] = &mine
			continue
		}
		list, unknown := c.attached(ctx, q, v, m)
		if unknown != nil {
			failed[m] = unknown
			continue
		}
		attached[m] = list
	}
	return attached, failed
}

// attached is what the machine shows or is connected to. What it does not show yet, or no more, is there until the
// service has taken the Connection back: whoever has it can have that done.
func (c *Client) attached(ctx context.Context, q question, v *view, m device.Machine) ([]device.OnFabric, *device.Fault) {
	path, fault := c.sure(ctx, q, v, m)
	if fault != nil {
		return nil, fault
	}
	shown, fault := c.shown(ctx, q, v, path)
	if fault != nil {
		return nil, fault
	}
	list := []device.OnFabric{}
	for target, p := range shown {
		list = append(list, describe(target, m, p))
	}
	for _, target := range v.connected(path) {
		if _, ok := shown[target]; ok {
			continue
		}
		p, fault := c.gpu(ctx, q, v, target)
		if fault != nil {
			return nil, fault
		}
		d := describe(target, m, p)
		if v.systems[path].processors != "" && d.Health == device.HealthOK {
			d.Health, d.HealthText = device.HealthUnknown, "it is connected, and the machine does not show it"
		}
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b device.OnFabric) int { return strings.Compare(a.ID, b.ID) })
	return rest.Unambiguous(list), nil
}

func describe(target string, m device.Machine, p processor) device.OnFabric {
	d := device.OnFabric{ID: target, Machine: m, Model: p.model, UUID: p.uuid, Serial: p.serial}
	d.Health, d.HealthText = p.describe()
	return d
}

// Free lists the devices that nothing connects and no machine shows.
func (c *Client) Free(ctx context.Context, models []string) (map[string]fabric.Supply, error) {
	q := question{"inventory", "list what is free"}
	free := make(map[string]fabric.Supply, len(models))
	v, fault := c.look(ctx, q)
	if fault != nil {
		return free, fault
	}
	s := c.stock(ctx, q, v)
	var errs []error
	for _, model := range models {
		list, fault := c.free(ctx, question{q.operation, "list what is free of " + model}, v, s, model)
		if fault != nil {
			errs = append(errs, fault)
			continue
		}
		free[model] = fabric.Supply{Count: len(list), Devices: list}
	}
	return free, errors.Join(errs...)
}

// Health reads what the service offers, and whether that is what we need.
func (c *Client) Health(ctx context.Context) error {
	q := question{"health", "ask how the service is"}
	at, fault := c.where(ctx, q)
	if fault == nil {
		_, fault = c.list(ctx, q, at.connections)
	}
	if fault != nil {
		return fault
	}
	return nil
}

// Close drops idle connections.
func (c *Client) Close(context.Context) error {
	c.rest.Close()
	return nil
}
