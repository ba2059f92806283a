// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Dialect is which of the two languages for a change the manager speaks. A wrong one is refused (E40001).
type Dialect string

// The dialects.
const (
	// DialectOSS names the CPU and the device: project-cdim.
	DialectOSS Dialect = "oss"
	// DialectProduct names the adapter on the IO side and the device.
	DialectProduct Dialect = "product"
)

const (
	defaultJobTimeout = 5 * time.Minute
	// defaultSettle: the inventory follows a job by an event, or, if that is lost, by a look every 10 minutes.
	defaultSettle = 11 * time.Minute
	defaultPoll   = 2 * time.Second

	readTimeout   = 60 * time.Second
	changeTimeout = 60 * time.Second

	// maxInventory bounds the list of all devices, maxAnswer any other answer.
	maxInventory = 32 << 20
	maxAnswer    = 4 << 20

	// mostInJob is how many changes a job of ours has: the manager makes two at a time, each may take more than a minute, and
	// all have to end within defaultJobTimeout.
	mostInJob = 8
)

// Config says which manager to talk to: either Gateway with Login, or both services.
type Config struct {
	Dialect Dialect

	// Gateway is the gateway's URL, "https://host[:port]"; Login is that of its Keycloak, which may have a path.
	Gateway string
	Login   string
	// ConfigurationManager and LayoutApply are the URLs of the services' own ports. They ask nobody who he is:
	// whoever reaches them can attach and detach.
	ConfigurationManager string
	LayoutApply          string
	// PlainHTTP accepts http URLs. Tokens and changes are then for everybody on the network to read and to
	// forge, which the client says in its log.
	PlainHTTP bool

	// Credentials is a directory as a Secret is mounted. With a gateway it holds client_id and realm, and either
	// username and password, or client_secret alone for a service account; ca.crt where the system's roots do not do.
	Credentials string
	// ResourceGroups are those whose devices may be attached, Switch is the CXL switch behind which they are, by
	// the manager's names; all if empty.
	ResourceGroups []string
	Switch         string

	// JobTimeout is how long the manager may work on one job, Settle how long its inventory may lag behind one
	// that is done, Poll how long to wait between two looks at one. Zero is 5 min, 11 min and 2 s.
	JobTimeout, Settle, Poll time.Duration
	// Clock measures the life of tokens and how long calls took; the real one if nil.
	Clock clock.PassiveClock
	// Observe is told of each request that was tried: "login", "inventory", "health", "attach", "detach", "poll"
	// or "jobs", the HTTP status or 0 without an answer, and how long it took. It must not block. It may be nil.
	Observe func(operation string, status int, took time.Duration)
	// Dial makes the connections; the network's if nil.
	Dial rest.Dial
}

// Client is a CDIM.
type Client struct {
	dialect       Dialect
	configuration string // URLs up to the paths that the two services have themselves
	layout        string
	ours          scope
	capabilities  fabric.Capabilities
	poll          time.Duration
	clock         clock.PassiveClock
	rest          *rest.Client
	tokens        *rest.Tokens // nil without a gateway
	warning       sync.Once
	plain         bool
}

var (
	_ fabric.Manager = (*Client)(nil)
	_ fabric.Batcher = (*Client)(nil)
)

// New returns a client; nothing is asked of the manager yet.
func New(cfg Config) (*Client, error) {
	if cfg.Dialect != DialectOSS && cfg.Dialect != DialectProduct {
		return nil, fmt.Errorf("CDIM dialect %q is neither %s nor %s", cfg.Dialect, DialectOSS, DialectProduct)
	}
	c := &Client{
		dialect: cfg.Dialect, ours: scope{groups: cfg.ResourceGroups, cxl: cfg.Switch}, poll: cmp.Or(cfg.Poll, defaultPoll), clock: cfg.Clock, plain: cfg.PlainHTTP,
		capabilities: fabric.Capabilities{
			AddressableAttach: true, AddressableDetach: true, Free: fabric.FreeList, Asynchronous: true,
			Exclusion: fabric.ExclusionGlobal, Batch: mostInJob,
			MaxCall: cmp.Or(cfg.JobTimeout, defaultJobTimeout), Settle: cmp.Or(cfg.Settle, defaultSettle),
		},
	}
	if c.clock == nil {
		c.clock = clock.RealClock{}
	}
	c.rest = rest.NewClient(cfg.Credentials, c.clock, cfg.Observe).Over(cfg.Dial)
	return c, c.address(cfg)
}

// address finds out where the services are, and whether a token is needed.
func (c *Client) address(cfg Config) error {
	const api = "/cdim/api/v1"
	if cfg.Gateway == "" {
		if cfg.Login != "" {
			return errors.New("CDIM login is given without a gateway: the services' own ports take no token")
		}
		configuration, err := parseURL("configuration-manager", cfg.ConfigurationManager, cfg.PlainHTTP, false)
		if err != nil {
			return err
		}
		layout, err := parseURL("layout-apply", cfg.LayoutApply, cfg.PlainHTTP, false)
		if err != nil {
			return err
		}
		c.configuration, c.layout = configuration+api, layout+api
		return nil
	}
	if cfg.ConfigurationManager != "" || cfg.LayoutApply != "" {
		return errors.New("CDIM gateway is given beside the services' own addresses: which of them?")
	}
	gateway, err := parseURL("gateway", cfg.Gateway, cfg.PlainHTTP, false)
	if err != nil {
		return err
	}
	login, err := parseURL("login", cfg.Login, cfg.PlainHTTP, true)
	if err != nil {
		return err
	}
	if cfg.Credentials == "" {
		return errors.New("CDIM credentials directory is empty: the gateway wants a token")
	}
	// The gateway replaces its prefix by the base of the service.
	c.configuration, c.layout = gateway+api+"/configuration-manager", gateway+api+"/layout-apply"
	c.tokens = rest.NewTokens(c.rest, cfg.Credentials, func(cred rest.Credentials) (rest.Grant, error) { return grant(login, cred) })
	return nil
}

func parseURL(what, s string, plain, path bool) (string, error) {
	u, err := url.Parse(s)
	if err != nil {
		return "", fmt.Errorf("CDIM %s: %w", what, err)
	}
	if u.Scheme == "http" && !plain {
		return "", fmt.Errorf("CDIM %s %q is not encrypted; if that is wanted, plain HTTP has to be allowed", what, u.Redacted())
	}
	rest := strings.TrimRight(u.Path, "/")
	if u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || rest != "" && !path || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("CDIM %s %q is not of the form https://host[:port]", what, u.Redacted())
	}
	return u.Scheme + "://" + u.Host + rest, nil
}

// grant is the password grant where there is a user, else that of a service account.
func grant(login string, cred rest.Credentials) (rest.Grant, error) {
	form := url.Values{"client_id": {cred.ClientID}, "scope": {"openid"}}
	switch {
	case cred.Realm == "" || cred.ClientID == "":
		return rest.Grant{}, errors.New("read credentials: realm and client_id are needed")
	case cred.Username != "" && cred.Password != "":
		form.Set("grant_type", "password")
		form.Set("username", cred.Username)
		form.Set("password", cred.Password)
	case cred.Username != "" || cred.Password != "":
		return rest.Grant{}, errors.New("read credentials: of username and password, one is empty")
	case cred.ClientSecret == "":
		return rest.Grant{}, errors.New("read credentials: neither username and password nor client_secret are there")
	default:
		form.Set("grant_type", "client_credentials")
	}
	if cred.ClientSecret != "" {
		form.Set("client_secret", cred.ClientSecret)
	}
	return rest.Grant{URL: login + "/realms/" + url.PathEscape(cred.Realm) + "/protocol/openid-connect/token", Form: form}, nil
}

// Capabilities of a CDIM.
func (c *Client) Capabilities() fabric.Capabilities { return c.capabilities }

// Machines are the CPUs: a node of this manager is named by its CPU, and is no node while nothing is linked to it.
func (c *Client) Machines(ctx context.Context) ([]fabric.Machine, error) {
	inv, fault := c.inventory(ctx, "list the machines")
	if fault != nil {
		return nil, fault
	}
	out := make([]fabric.Machine, 0, len(inv.machines))
	for id, cpu := range inv.machines {
		out = append(out, fabric.Machine{ID: id, Fabric: string(cpu.Device.Switch), Power: cpu.power()})
	}
	slices.SortFunc(out, func(a, b fabric.Machine) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return out, nil
}

// ListAttached reads the inventory once, for all machines at the same moment.
func (c *Client) ListAttached(ctx context.Context, machines []device.Machine) (map[device.Machine][]device.OnFabric, map[device.Machine]error) {
	attached := make(map[device.Machine][]device.OnFabric, len(machines))
	failed := make(map[device.Machine]error)
	if len(machines) == 0 {
		return attached, failed
	}
	inv, fault := c.inventory(ctx, "list what is attached")
	for _, m := range machines {
		what := "list what is attached to machine " + string(m)
		if fault != nil {
			mine := *fault
			mine.Op = what
			failed[m] = &mine
			continue
		}
		gpus, unknown := inv.attached(what, m)
		if unknown != nil {
			failed[m] = unknown
			continue
		}
		attached[m] = gpus
	}
	return attached, failed
}

// Free lists the devices that could be attached now.
func (c *Client) Free(ctx context.Context, models []string) (map[string]fabric.Supply, error) {
	free := make(map[string]fabric.Supply, len(models))
	inv, fault := c.inventory(ctx, "list what is free")
	if fault != nil {
		return free, fault
	}
	var errs []error
	for _, model := range models {
		what := "list what is free of " + model
		if unknown := inv.knows(what, model); unknown != nil {
			errs = append(errs, unknown)
			continue
		}
		gpus := inv.free(model, c.ours)
		free[model] = fabric.Supply{Count: len(gpus), Devices: gpus}
	}
	return free, errors.Join(errs...)
}

// Attach starts a job that connects the device to the machine.
func (c *Client) Attach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	what := fmt.Sprintf("attach %s to machine %s", cmp.Or(in.Device, "one "+in.Model), in.Machine)
	inv, fault := c.inventory(ctx, what)
	if fault != nil {
		return fabric.Operation{}, unsent(fault)
	}
	cpu, fault := inv.machine(what, in.Machine)
	if fault != nil {
		return fabric.Operation{}, fault
	}
	gpu, fault := inv.wanted(what, in, c.ours)
	if fault != nil {
		return fabric.Operation{}, fault
	}
	p := procedure{Operation: operationConnect}
	if fault := c.name(what, &p, inv, cpu, gpu); fault != nil {
		fault.Class = device.FaultNotFound // nothing can come to this machine
		return fabric.Operation{}, fault
	}
	begun := c.apply(ctx, what, []change{{fabric.Operation{Kind: fabric.KindAttach, Intent: in}, p}})
	return begun[0].Operation, begun[0].Err
}

// Detach starts a job that disconnects the device from the machine.
func (c *Client) Detach(ctx context.Context, in fabric.Intent) (fabric.Operation, error) {
	begun := c.DetachAll(ctx, []fabric.Intent{in})
	return begun[0].Operation, begun[0].Err
}

// DetachAll starts one job that disconnects all the devices that are there.
func (c *Client) DetachAll(ctx context.Context, ins []fabric.Intent) []fabric.Begun {
	begun := make([]fabric.Begun, len(ins))
	names := make([]string, len(ins))
	for i, in := range ins {
		names[i] = in.Device
	}
	what := fmt.Sprintf("detach %s from machine %s", strings.Join(names, ", "), ins[0].Machine)
	inv, fault := c.inventory(ctx, what)
	var changes []change
	var of []int // which intent each of them is
	for i, in := range ins {
		if fault != nil {
			mine := *unsent(fault)
			begun[i].Err = &mine
			continue
		}
		p, refused := c.disconnect(inv, in)
		if refused != nil {
			begun[i].Err = refused
			continue
		}
		changes, of = append(changes, change{fabric.Operation{Kind: fabric.KindDetach, Intent: in}, p}), append(of, i)
	}
	if len(changes) > 0 {
		for i, b := range c.apply(ctx, what, changes) {
			begun[of[i]] = b
		}
	}
	return begun
}

// disconnect is what a job does to take the device from the machine.
func (c *Client) disconnect(inv *inventory, in fabric.Intent) (procedure, *device.Fault) {
	what := fmt.Sprintf("detach %s from machine %s", in.Device, in.Machine)
	p := procedure{Operation: operationDisconnect}
	if in.Device == "" {
		return p, &device.Fault{Class: device.FaultRejected, Op: what, Message: "no device is given"}
	}
	cpu, fault := inv.machine(what, in.Machine)
	if fault != nil {
		return p, fault
	}
	gpu, fault := inv.here(what, in)
	if fault != nil {
		return p, fault
	}
	return p, c.name(what, &p, inv, cpu, gpu)
}

// unsent is the fault of a question before the change: what came of it or not, nothing was asked to change.
func unsent(fault *device.Fault) *device.Fault {
	if fault.Class == device.FaultUnknown {
		fault.Class = device.FaultUnreachable
	}
	return fault
}

// name fills in what the dialect calls the two ends of a link. Identities are sent as the manager writes them.
func (c *Client) name(what string, p *procedure, inv *inventory, cpu, gpu *resource) *device.Fault {
	if c.dialect == DialectOSS {
		p.TargetCPU, p.TargetDevice = string(cpu.Device.ID), string(gpu.Device.ID)
		return nil
	}
	adapter := inv.adapterBetween(cpu, gpu)
	if adapter == nil {
		return &device.Fault{
			Class: device.FaultConflict, Op: what,
			Message: "the inventory shows no detected pair of a sourceFabricAdapter (eesv) and a destinationFabricAdapter (eeio) behind the machine",
		}
	}
	p.Source, p.Destination = string(adapter.Device.ID), string(gpu.Device.ID)
	return nil
}

// Health asks both services. FaultSuspended is a job, anybody's, that waits for a person and lets no other begin.
func (c *Client) Health(ctx context.Context) error {
	req := c.request("health", "ask how the configuration-manager is", c.configuration+"/resources", url.Values{"detail": {"false"}})
	req.Limit = maxInventory
	if _, fault := c.call(ctx, req); fault != nil {
		return fault
	}
	const what = "ask how layout-apply is"
	jobs, _, fault := c.jobs(ctx, what)
	if fault != nil {
		return fault
	}
	for _, j := range jobs {
		id, err := checkApplyID(string(j.ID))
		if err == nil && j.waits() {
			return &device.Fault{
				Class: device.FaultSuspended, Op: what,
				Message: fmt.Sprintf("job %s is suspended until a person resumes or cancels it, and no other can begin", id),
			}
		}
	}
	return nil
}

// Close drops idle connections. Tokens end by themselves.
func (c *Client) Close(context.Context) error {
	c.rest.Close()
	return nil
}

func (c *Client) inventory(ctx context.Context, what string) (*inventory, *device.Fault) {
	req := c.request("inventory", what, c.configuration+"/resources", url.Values{"detail": {"true"}})
	req.Limit = maxInventory
	r, fault := c.call(ctx, req)
	if fault != nil {
		if fault.Class == device.FaultNotFound {
			fault.Class = device.FaultRejected // the path, not a machine
		}
		return nil, fault
	}
	inv, err := decodeInventory(r.Body)
	if err != nil {
		return nil, r.Strange(what, err)
	}
	if len(inv.strays) > 0 {
		klog.FromContext(ctx).V(1).Info("The inventory shows GPUs linked to what leads to no CPU; they are neither free nor on any machine", "devices", inv.strays)
	}
	if len(inv.unnamed) > 0 {
		klog.FromContext(ctx).V(1).Info("The inventory lists CPUs that cannot be named, left out", "devices", inv.unnamed)
	}
	return inv, nil
}
