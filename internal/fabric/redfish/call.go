// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

const (
	rootPath = "/redfish/v1/"
	// hops is how many redirects are followed.
	hops = 5
	// parallel is how many reads of one caller are under way at once; services are small machines.
	parallel = 4

	logoutTimeout = 10 * time.Second
)

// call is one request, up to its answer.
type call struct {
	operation, what string
	method, path    string
	body            any
	etag            string
}

// changes: it is not to be made twice.
func (m call) changes() bool { return m.method != http.MethodGet }

// request is the exchange for a call.
func (c *Client) request(m call) (rest.Request, *device.Fault) {
	req := rest.Request{
		Operation: m.operation, What: m.what, Method: m.method, URL: c.endpoint + m.path, Timeout: readTimeout, Limit: maxAnswer,
		Header: http.Header{"Odata-Version": {"4.0"}}, Change: m.changes(),
	}
	if m.changes() {
		req.Timeout = c.capabilities.MaxCall
	}
	if m.etag != "" {
		req.Header.Set("If-Match", m.etag)
	}
	if m.body == nil {
		return req, nil
	}
	var err error
	if req.Body, err = json.Marshal(m.body); err != nil {
		return req, &device.Fault{Class: device.FaultRejected, Op: m.what, Err: err}
	}
	req.ContentType = "application/json"
	return req, nil
}

// do makes a call as somebody. A 401 means that nothing happened and that the session has ended: there is a new one, and
// the call is made once more.
func (c *Client) do(ctx context.Context, m call) (rest.Reply, *device.Fault) {
	for try := 0; ; try++ {
		token, proof, fault := c.prove(ctx, m.what)
		if fault != nil {
			return rest.Reply{}, fault
		}
		r, fault := c.follow(ctx, m, proof)
		if fault == nil || fault.Status != http.StatusUnauthorized || token == "" {
			return r, fault
		}
		c.sessions.Drop(token)
		if try > 0 {
			return r, fault
		}
	}
}

// proof is what shows who we are.
type proof struct {
	header  http.Header
	secrets []string
}

// prove returns the session's token, or user and password; the token is "" where there is no session.
func (c *Client) prove(ctx context.Context, what string) (string, proof, *device.Fault) {
	r, fault := c.discover(ctx, what)
	if fault != nil {
		return "", proof{}, fault
	}
	if c.basic || r.sessions == "" && r.sessionService == "" {
		cred, missing := readCredentials(c.dir, what)
		if missing != nil {
			return "", proof{}, missing
		}
		both := base64.StdEncoding.EncodeToString([]byte(cred.Username + ":" + cred.Password))
		return "", proof{http.Header{"Authorization": {"Basic " + both}}, []string{cred.Password, both}}, nil
	}
	token, fault := c.sessions.Get(ctx)
	if fault != nil {
		mine := *fault // shared by all who waited for the login
		mine.Op = what + ": " + fault.Op
		return "", proof{}, &mine
	}
	return token, proof{http.Header{"X-Auth-Token": {token}}, []string{token}}, nil
}

func readCredentials(dir, what string) (rest.Credentials, *device.Fault) {
	cred, err := rest.ReadCredentials(dir)
	if err != nil {
		return cred, &device.Fault{Class: device.FaultUnauthorized, Op: what, Err: err}
	}
	return cred, complete(cred, what)
}

func complete(cred rest.Credentials, what string) *device.Fault {
	if cred.Username != "" && cred.Password != "" {
		return nil
	}
	err := errors.New("read credentials: of username and password, one is missing or is empty")
	return &device.Fault{Class: device.FaultUnauthorized, Op: what, Err: err}
}

// follow makes a call and goes where the service sends it, on the same host: what it is sent to elsewhere would be shown
// our session. A change goes on only where the service says that nothing has been done yet.
func (c *Client) follow(ctx context.Context, m call, p proof) (rest.Reply, *device.Fault) {
	for range hops {
		req, fault := c.request(m)
		if fault != nil {
			return rest.Reply{}, fault
		}
		maps.Copy(req.Header, p.header)
		req.Secrets = p.secrets
		r, fault := c.rest.Send(ctx, req, "")
		if fault != nil {
			return r, fault
		}
		switch r.Status {
		case http.StatusMovedPermanently, http.StatusFound:
			if m.changes() {
				return r, refused(m.what, r, c.clock.Now())
			}
		case http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		default:
			if r.Status/100 == 2 {
				return r, nil
			}
			return r, refused(m.what, r, c.clock.Now())
		}
		if fault := c.redirect(&m, r); fault != nil {
			return r, fault
		}
	}
	return rest.Reply{}, &device.Fault{Class: device.FaultRejected, Op: m.what, Message: "the service sends us from one place to another without an end"}
}

func (c *Client) redirect(m *call, r rest.Reply) *device.Fault {
	u, err := parseURL(r.Header.Get("Location"))
	if err == nil && u.Host != "" && "https://"+u.Host != c.endpoint {
		err = errors.New("it is on another host")
	}
	if err != nil {
		return &device.Fault{Class: device.FaultRejected, Op: m.what, Status: r.Status, Message: "the service sends us to a place where we do not go", Err: err}
	}
	m.path = u.RequestURI()
	return nil
}

// doc is a resource as it was read.
type doc struct {
	path string
	rest.Reply
}

func (d doc) etag() string { return etagOf(d.Body, d.Header) }

func (c *Client) get(ctx context.Context, operation, what, path string) (doc, *device.Fault) {
	r, fault := c.do(ctx, call{operation: operation, what: what, method: http.MethodGet, path: path})
	return doc{path, r}, fault
}

// read gets a resource and decodes it.
func read[T any](ctx context.Context, c *Client, operation, what, path string, decode func([]byte) (T, error)) (T, doc, *device.Fault) {
	var none T
	d, fault := c.get(ctx, operation, what, path)
	if fault != nil {
		return none, d, fault
	}
	v, err := decode(d.Body)
	if err != nil {
		return none, d, d.Strange(what, err)
	}
	return v, d, nil
}

// each does one thing for all, some at once, and returns the results in their order, or the first fault.
func each[A, T any](ctx context.Context, all []A, do func(context.Context, A) (T, *device.Fault)) ([]T, *device.Fault) {
	out := make([]T, len(all))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for i, one := range all {
		g.Go(func() error {
			var fault *device.Fault
			if out[i], fault = do(ctx, one); fault != nil {
				return fault
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		fault, ok := errors.AsType[*device.Fault](err)
		if !ok {
			fault = &device.Fault{Class: device.FaultUnknown, Err: err}
		}
		return nil, fault
	}
	return out, nil
}

// discover reads the service root, once. It is for everybody, and a session is found by it.
func (c *Client) discover(ctx context.Context, what string) (root, *device.Fault) {
	c.mu.Lock()
	known := c.root
	c.mu.Unlock()
	if known != nil {
		return *known, nil
	}
	what += ": read the service root"
	d, fault := c.follow(ctx, call{operation: "discover", what: what, method: http.MethodGet, path: rootPath}, proof{})
	if fault != nil {
		return root{}, elsewhere(fault)
	}
	r, err := decodeRoot(d.Body)
	if err != nil {
		return root{}, d.Strange(what, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.root = &r
	return r, nil
}

// elsewhere is a fault about a path that is no machine's and no device's: nothing was asked there, and it may be back later.
func elsewhere(fault *device.Fault) *device.Fault {
	if fault.Class == device.FaultNotFound {
		fault.Class = device.FaultUnreachable
	}
	return fault
}

// forget has all links found anew.
func (c *Client) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.root, c.service, c.systems = nil, nil, index{}
}

// login makes a session.
func (c *Client) login(ctx context.Context, cred rest.Credentials) (string, time.Duration, *device.Fault) {
	const what = "log in to the Redfish service"
	if fault := complete(cred, what); fault != nil {
		return "", 0, fault
	}
	path, fault := c.sessionsPath(ctx, what)
	if fault != nil {
		return "", 0, fault
	}
	m := call{operation: "login", what: what, method: http.MethodPost, path: path, body: map[string]string{"UserName": cred.Username, "Password": cred.Password}}
	r, fault := c.follow(ctx, m, proof{secrets: []string{cred.Password, escaped(cred.Password)}})
	if fault != nil {
		switch fault.Class {
		case device.FaultUnknown: // nothing on the fabric can have changed
			fault.Class = device.FaultUnreachable
		case device.FaultRejected:
			fault.Class = device.FaultUnauthorized
		default:
			fault = elsewhere(fault)
		}
		return "", 0, fault
	}
	token := r.Header.Get("X-Auth-Token")
	if token == "" {
		return "", 0, &device.Fault{Class: device.FaultUnreachable, Op: what, Status: r.Status, Message: "the answer has no X-Auth-Token"}
	}
	session, err := parsePath(r.Header.Get("Location"))
	if err != nil {
		var self link
		if json.Unmarshal(r.Body, &self) == nil {
			session = self.to
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = session
	return token, rest.NoEnd, nil
}

// escaped is how a secret stands in a JSON body, which somebody may quote.
func escaped(secret string) string {
	b, err := json.Marshal(secret)
	if err != nil || len(b) < 2 {
		return ""
	}
	return string(b[1 : len(b)-1])
}

// sessionsPath is where sessions are made: the root says so to those who have none; else their service does.
func (c *Client) sessionsPath(ctx context.Context, what string) (string, *device.Fault) {
	r, fault := c.discover(ctx, what)
	if fault != nil || r.sessions != "" {
		return r.sessions, fault
	}
	d, fault := c.follow(ctx, call{operation: "login", what: what, method: http.MethodGet, path: r.sessionService}, proof{})
	if fault != nil {
		return "", elsewhere(fault)
	}
	var s struct{ Sessions link }
	if err := json.Unmarshal(d.Body, &s); err != nil || s.Sessions.to == "" {
		return "", &device.Fault{Class: device.FaultUnreachable, Op: what, Status: d.Status, Message: "the session service has no link to Sessions", Err: err}
	}
	return s.Sessions.to, nil
}

// logout ends the session. One that has ended already is as good.
func (c *Client) logout(ctx context.Context) *device.Fault {
	token := c.sessions.Close()
	c.mu.Lock()
	session := c.session
	c.mu.Unlock()
	if token == "" || session == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, logoutTimeout)
	defer cancel()
	m := call{operation: "logout", what: "end the session with the Redfish service", method: http.MethodDelete, path: session}
	_, fault := c.follow(ctx, m, proof{http.Header{"X-Auth-Token": {token}}, []string{token}})
	if fault != nil && (fault.Class == device.FaultUnauthorized || fault.Class == device.FaultNotFound) {
		return nil
	}
	return fault
}
