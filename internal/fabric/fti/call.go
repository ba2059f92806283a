// SPDX-License-Identifier: Apache-2.0

package fti

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

// Request is one call.
type Request struct {
	// Operation is for metrics, What for people.
	Operation, What string
	Method          string
	// Path is escaped.
	Path        string
	Query       url.Values
	Body        []byte
	ContentType string
	Timeout     time.Duration
	// Limit is how long an answer may be; longer ones of success are no answer.
	Limit int64
	// Change goes over a connection of its own. On one kept from before, a manager that is down cannot be told
	// from one that took the call; without one, nothing was sent.
	Change bool
}

// Reply is what came back.
type Reply struct {
	Status  int
	Body    []byte
	secrets []string
}

// Silent tells that the manager accepted a change without saying more: no body, or some other JSON. A web
// page is a proxy's, and JSON that ends early may be the half of a refusal.
func (a Reply) Silent() bool { return len(bytes.TrimSpace(a.Body)) == 0 || json.Valid(a.Body) }

// Strange is the fault for an answer of success that cannot be the manager's, or cannot be read.
func (a Reply) Strange(what string, err error) *device.Fault {
	return &device.Fault{
		Class: device.FaultUnknown, Op: what, Status: a.Status, Message: Tidy(string(a.Body), a.secrets...), Err: err,
	}
}

// Call sends a request with a token. A 401 means that nothing happened and the token has gone bad: it is
// replaced and the call made once more. Every answer but 2xx is a fault.
func (c *Client) Call(ctx context.Context, req Request) (Reply, *device.Fault) {
	for try := 0; ; try++ {
		token, fault := c.tokens.get(ctx)
		if fault != nil {
			mine := *fault // shared by all who waited for the login
			mine.Op = req.What + ": " + fault.Op
			return Reply{}, &mine
		}
		a, fault := c.send(ctx, req, token)
		if fault != nil {
			return Reply{}, fault
		}
		if a.Status == http.StatusUnauthorized {
			c.tokens.drop(token)
			if try == 0 {
				continue
			}
		}
		if a.Status/100 == 2 {
			return a, nil
		}
		code, message := decodeRefusal(a.Body, a.secrets...)
		return Reply{}, &device.Fault{Class: classify(a.Status), Op: req.What, Status: a.Status, Code: code, Message: message}
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
func (c *Client) send(ctx context.Context, req Request, token string) (Reply, *device.Fault) {
	client, err := c.conns.client(req.Change)
	if err != nil {
		return Reply{}, &device.Fault{Class: device.FaultUnreachable, Op: req.What, Err: err}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, req.Timeout, fmt.Errorf("no answer within %s", req.Timeout))
	defer cancel()
	// Without a connection nothing of the request can have left.
	var connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected.Store(true) }})

	h, err := http.NewRequestWithContext(ctx, req.Method, c.endpoint.String()+req.Path, bytes.NewReader(req.Body))
	if err != nil {
		return Reply{}, &device.Fault{Class: device.FaultRejected, Op: req.What, Err: err}
	}
	h.URL.RawQuery = req.Query.Encode()
	h.Header.Set("Accept", "application/json")
	if req.ContentType != "" {
		h.Header.Set("Content-Type", req.ContentType)
	}
	if token != "" {
		h.Header.Set("Authorization", "Bearer "+token)
	}
	begun := c.clock.Now()
	a, err := exchange(client, h, req.Limit)
	c.observe(req.Operation, a.Status, c.clock.Since(begun))
	a.secrets = []string{token}
	if err == nil {
		return a, nil
	}
	fault := &device.Fault{Class: device.FaultUnknown, Op: req.What, Status: a.Status, Err: cause(ctx, err)}
	if !connected.Load() {
		fault.Class = device.FaultUnreachable
		fault.Message = "no connection to " + c.endpoint.Host
	}
	return Reply{}, fault
}

// exchange returns the answer; its status is set beside an error too, if the header came.
func exchange(client *http.Client, h *http.Request, limit int64) (Reply, error) {
	resp, err := client.Do(h)
	if err != nil {
		return Reply{}, err
	}
	defer resp.Body.Close()
	a := Reply{Status: resp.StatusCode}
	a.Body, err = io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		if resp.StatusCode/100 == 2 {
			return a, fmt.Errorf("read answer: %w", err)
		}
		return a, nil // the status says enough
	}
	if int64(len(a.Body)) > limit {
		a.Body = a.Body[:limit]
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
