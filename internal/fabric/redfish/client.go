// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

const (
	defaultTaskTimeout = 5 * time.Minute
	defaultSettle      = 30 * time.Second
	defaultPoll        = 2 * time.Second
	// longestPoll bounds how long a service can have a task left alone.
	longestPoll = time.Minute

	readTimeout = 60 * time.Second
	// maxAnswer bounds one answer; an expanded collection is the largest.
	maxAnswer = 16 << 20

	// tries is how often a change is decided anew, since the service had changed meanwhile.
	tries = 4
)

// Config says which service to talk to.
type Config struct {
	// Endpoint is "host", "host:port" or "https://host:port".
	Endpoint string
	// Credentials is a directory with the files username, password and ca.crt, as a Secret is mounted.
	Credentials string
	// Basic sends user and password with each request and makes no session. So does a service that has no sessions.
	Basic bool
	// NoIdentity is for a service whose processors have no UUID, or one that is not the GPU driver's: none is then taken for a
	// GPU's identity.
	NoIdentity bool

	// TaskTimeout is how long the service may work on one change, Settle how long its list may lag behind one that is
	// done, Poll how long to wait between two looks at a task where the service does not say. Zero is 5 min, 30 s and 2 s.
	TaskTimeout, Settle, Poll time.Duration
	// Clock measures how long calls took and waits between two streams of events; the real one if nil.
	Clock clock.WithTicker
	// Observe is told of each request that was tried: "login", "logout", "discover", "machines", "inventory", "attach",
	// "detach", "poll", "jobs", "health" or "events", the HTTP status or 0 without an answer, and how long it took. It must
	// not block. It may be nil.
	Observe func(operation string, status int, took time.Duration)
	// Dial makes the connections; the network's if nil.
	Dial rest.Dial
}

// Client is a Redfish service.
type Client struct {
	endpoint     string
	dir          string
	capabilities fabric.Capabilities
	poll         time.Duration
	clock        clock.WithTicker
	rest         *rest.Client
	basic        bool
	noIdentity   bool
	sessions     *rest.Tokens
	closed       chan struct{}
	closing      sync.Once

	mu sync.Mutex
	// The following are guarded by mu.
	root    *root
	service *service
	systems index
	// session is the URI of the session whose token is kept.
	session string
}

var (
	_ fabric.Manager = (*Client)(nil)
	_ fabric.Watcher = (*Client)(nil)
)

// New returns a client; nothing is asked of the service yet.
func New(cfg Config) (*Client, error) {
	endpoint, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, err
	}
	if cfg.Credentials == "" {
		return nil, errors.New("Redfish credentials directory is empty") //nolint:staticcheck // a name
	}
	c := &Client{
		endpoint: endpoint, dir: cfg.Credentials, basic: cfg.Basic, noIdentity: cfg.NoIdentity, clock: cfg.Clock, poll: cmp.Or(cfg.Poll, defaultPoll),
		capabilities: fabric.Capabilities{
			AddressableAttach: true, AddressableDetach: true, Free: fabric.FreeList, Asynchronous: true,
			Exclusion: fabric.ExclusionMachine, Identity: !cfg.NoIdentity, Events: true,
			MaxCall: cmp.Or(cfg.TaskTimeout, defaultTaskTimeout), Settle: cmp.Or(cfg.Settle, defaultSettle),
		},
		closed: make(chan struct{}),
	}
	if c.clock == nil {
		c.clock = clock.RealClock{}
	}
	c.rest = rest.NewClient(cfg.Credentials, c.clock, cfg.Observe).Over(cfg.Dial)
	c.sessions = rest.NewLogins(c.clock, cfg.Credentials, c.login)
	return c, nil
}

func parseEndpoint(s string) (string, error) {
	if !strings.Contains(s, "://") {
		s = "https://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		return "", fmt.Errorf("Redfish endpoint: %w", err) //nolint:staticcheck // a name
	}
	if u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("Redfish endpoint %q is not of the form https://host[:port]", u.Redacted()) //nolint:staticcheck // a name
	}
	return "https://" + u.Host, nil
}

// Capabilities of a Redfish service.
func (c *Client) Capabilities() fabric.Capabilities { return c.capabilities }

// Machines are the systems that something can be attached to and that have a UUID.
func (c *Client) Machines(ctx context.Context) ([]fabric.Machine, error) {
	const what = "list the machines"
	w, fault := c.world(ctx, what)
	if fault != nil {
		return nil, fault
	}
	machines, fault := w.machines(ctx, what)
	if fault != nil {
		return nil, fault
	}
	return machines, nil
}

// ListAttached reads each machine and the devices on it.
func (c *Client) ListAttached(ctx context.Context, machines []device.Machine) (map[device.Machine][]device.OnFabric, map[device.Machine]error) {
	attached := make(map[device.Machine][]device.OnFabric, len(machines))
	failed := make(map[device.Machine]error)
	if len(machines) == 0 {
		return attached, failed
	}
	w, fault := c.world(ctx, "list what is attached")
	for _, m := range machines {
		what := "list what is attached to machine " + string(m)
		if fault != nil {
			failed[m] = renamed(fault, what)
			continue
		}
		list, fault := c.listMachine(ctx, w, what, m)
		if fault != nil {
			failed[m] = fault
			continue
		}
		attached[m] = list
	}
	return attached, failed
}

func renamed(fault *device.Fault, what string) *device.Fault {
	mine := *fault
	mine.Op = what
	return &mine
}

func (c *Client) listMachine(ctx context.Context, w world, what string, m device.Machine) ([]device.OnFabric, *device.Fault) {
	h, fault := w.host(ctx, what, m)
	if fault != nil {
		return nil, fault
	}
	units, fault := each(ctx, h.members, func(ctx context.Context, path string) (*unit, *device.Fault) {
		u, unread := w.unit(ctx, what, path)
		if unread != nil && unread.Class == device.FaultNotFound {
			// The list has the last word, so that what is there can still be taken away.
			return &unit{path: path, counted: 1, health: device.HealthUnknown, text: "the machine lists it, and the service does not know it"}, nil
		}
		return u, unread
	})
	if fault != nil {
		return nil, fault
	}
	list := []device.OnFabric{}
	for _, u := range units {
		if u.fixed {
			continue
		}
		d := u.onFabric()
		d.Machine = m
		list = append(list, d)
	}
	return rest.Unambiguous(list), nil
}

// Free lists the devices that could be attached now.
func (c *Client) Free(ctx context.Context, models []string) (map[string]fabric.Supply, error) {
	const what = "list what is free"
	free := make(map[string]fabric.Supply, len(models))
	if len(models) == 0 {
		return free, nil
	}
	w, fault := c.world(ctx, what)
	if fault != nil {
		return free, fault
	}
	units, fault := w.units(ctx, what)
	if fault != nil {
		return free, fault
	}
	var errs []error
	for _, model := range models {
		if fault := knows(units, what+" of "+model, model); fault != nil {
			errs = append(errs, fault)
			continue
		}
		list := []device.OnFabric{}
		for _, u := range units {
			if u.model == model && u.taken == "" {
				list = append(list, u.onFabric())
			}
		}
		list = rest.Unambiguous(list)
		free[model] = fabric.Supply{Count: len(list), Devices: list}
	}
	return free, errors.Join(errs...)
}

// Health asks for what only those may read who are known.
func (c *Client) Health(ctx context.Context) error {
	const what = "ask how the service is"
	r, fault := c.discover(ctx, what)
	if fault != nil {
		return fault
	}
	if _, fault = c.get(ctx, "health", what, cmp.Or(r.composition, r.systems)); fault != nil {
		if fault.Class == device.FaultNotFound {
			c.forget()
		}
		return fault
	}
	return nil
}

// Close ends the session, as their number is limited.
func (c *Client) Close(ctx context.Context) error {
	var fault *device.Fault
	c.closing.Do(func() {
		close(c.closed)
		fault = c.logout(ctx)
		c.rest.Close()
	})
	if fault != nil {
		return fault
	}
	return nil
}
