// SPDX-License-Identifier: Apache-2.0

package fm

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	dialTimeout = 10 * time.Second
	idleTimeout = 30 * time.Second
)

// request is one call.
type request struct {
	operation   string // for metrics
	what        string // for people
	method      string
	path        string // escaped
	query       url.Values
	body        []byte
	contentType string
	timeout     time.Duration
	limit       int64
	// change goes over a connection of its own. On one kept from before, a manager that is down cannot be told
	// from one that took the call; without one, nothing was sent.
	change bool
}

// reply is what came back, whatever its status.
type reply struct {
	status  int
	body    []byte
	secrets []string
}

// silent tells that the manager accepted a change without saying more: no body, or some other JSON. A web
// page is a proxy's, and JSON that ends early may be the half of a refusal.
func (a reply) silent() bool { return len(bytes.TrimSpace(a.body)) == 0 || json.Valid(a.body) }

// strange is the fault for an answer of success that cannot be the manager's, or cannot be read.
func (a reply) strange(req request, err error) *device.Fault { return a.strangeTo(req.what, err) }

func (a reply) strangeTo(what string, err error) *device.Fault {
	return &device.Fault{
		Class: device.FaultUnknown, Op: what, Status: a.status, Message: tidy(string(a.body), a.secrets...), Err: err,
	}
}

// call sends a request with a token. A 401 means that nothing happened and the token has gone bad: it is
// replaced and the call made once more.
func (c *Client) call(ctx context.Context, req request) (reply, *device.Fault) {
	for try := 0; ; try++ {
		token, fault := c.tokens.get(ctx)
		if fault != nil {
			mine := *fault // shared by all who waited for the login
			mine.Op = req.what + ": " + fault.Op
			return reply{}, &mine
		}
		a, fault := c.send(ctx, req, token)
		if fault != nil {
			return reply{}, fault
		}
		if a.status == http.StatusUnauthorized {
			c.tokens.drop(token)
			if try == 0 {
				continue
			}
		}
		if a.status/100 == 2 {
			return a, nil
		}
		code, message := decodeRefusal(a.body, a.secrets...)
		return reply{}, &device.Fault{Class: classify(a.status), Op: req.what, Status: a.status, Code: code, Message: message}
	}
}

// classify says what a status other than 2xx means. A 5xx may come from a proxy after the manager has
// done the work, so that only 4xx are definite, and 408 is not.
func classify(status int) device.FaultClass {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return device.FaultUnauthorized
	case http.StatusNotFound, http.StatusGone:
		return device.FaultNotFound
	case http.StatusConflict, http.StatusLocked, http.StatusTooManyRequests:
		return device.FaultBusy
	case http.StatusPreconditionFailed, http.StatusPreconditionRequired:
		return device.FaultConflict
	case http.StatusMethodNotAllowed, http.StatusNotImplemented:
		return device.FaultUnsupported
	case http.StatusRequestTimeout:
		return device.FaultUnknown
	}
	if status/100 == 3 || status/100 == 4 {
		return device.FaultRejected
	}
	return device.FaultUnknown
}

// send makes one exchange. The fault is for the case that there was no whole answer.
func (c *Client) send(ctx context.Context, req request, token string) (reply, *device.Fault) {
	client, err := c.conns.client(req.change)
	if err != nil {
		return reply{}, &device.Fault{Class: device.FaultUnreachable, Op: req.what, Err: err}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, req.timeout, fmt.Errorf("no answer within %s", req.timeout))
	defer cancel()
	// Without a connection nothing of the request can have left.
	var connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected.Store(true) }})

	h, err := http.NewRequestWithContext(ctx, req.method, c.endpoint.String()+req.path, bytes.NewReader(req.body))
	if err != nil {
		return reply{}, &device.Fault{Class: device.FaultRejected, Op: req.what, Err: err}
	}
	h.URL.RawQuery = req.query.Encode()
	h.Header.Set("Accept", "application/json")
	if req.contentType != "" {
		h.Header.Set("Content-Type", req.contentType)
	}
	if token != "" {
		h.Header.Set("Authorization", "Bearer "+token)
	}
	begun := c.clock.Now()
	a, err := exchange(client, h, req.limit)
	c.observe(req.operation, a.status, c.clock.Since(begun))
	a.secrets = []string{token}
	if err == nil {
		return a, nil
	}
	fault := &device.Fault{Class: device.FaultUnknown, Op: req.what, Status: a.status, Err: cause(ctx, err)}
	if !connected.Load() {
		fault.Class = device.FaultUnreachable
		fault.Message = "no connection to " + c.endpoint.Host
	}
	return reply{}, fault
}

// exchange returns the answer; its status is set beside an error too, if the header came.
func exchange(client *http.Client, h *http.Request, limit int64) (reply, error) {
	resp, err := client.Do(h)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	a := reply{status: resp.StatusCode}
	a.body, err = io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		if resp.StatusCode/100 == 2 {
			return a, fmt.Errorf("read answer: %w", err)
		}
		return a, nil // the status says enough
	}
	if int64(len(a.body)) > limit {
		a.body = a.body[:limit]
		if resp.StatusCode/100 == 2 {
			return a, fmt.Errorf("read answer: longer than %d bytes", limit)
		}
	}
	return a, nil
}

// cause strips the URL, which the fault's own words make superfluous, and names the reason of a timeout.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil && errors.Is(err, ctx.Err()) {
		return c
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	return err
}

// connections keeps the HTTP client for the CA bundle that is on disk.
type connections struct {
	dir string

	mu sync.Mutex
	// The following are guarded by mu.
	bundle         string
	reads, changes *http.Client
}

// client reads the CA bundle anew and starts over with new connections if it has changed.
func (c *connections) client(change bool) (*http.Client, error) {
	roots, bundle, err := readCA(c.dir)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reads == nil || c.bundle != bundle {
		if c.reads != nil {
			c.reads.CloseIdleConnections()
		}
		c.bundle, c.reads, c.changes = bundle, newHTTP(roots, true), newHTTP(roots, false)
	}
	if change {
		return c.changes, nil
	}
	return c.reads, nil
}

func newHTTP(roots *x509.CertPool, keep bool) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
			TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
			TLSHandshakeTimeout: dialTimeout,
			IdleConnTimeout:     idleTimeout,
			DisableKeepAlives:   !keep,
			ForceAttemptHTTP2:   keep, // shares its connection
		},
		// A redirect would carry the token elsewhere, and repeat a call that must be made once.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func (c *connections) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reads != nil {
		c.reads.CloseIdleConnections()
	}
}
