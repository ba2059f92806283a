// SPDX-License-Identifier: Apache-2.0

package rest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	dialTimeout = 10 * time.Second
	idleTimeout = 30 * time.Second

	fileCA = "ca.crt"
)

// Request is one exchange.
type Request struct {
	Operation   string // for metrics
	What        string // for people
	Method      string
	URL         string
	Query       url.Values // in place of the URL's own, if there is any
	Body        []byte
	ContentType string
	// Header has what this manager wants besides; Secrets are what of it, or of the body, must be in no error.
	Header  http.Header
	Secrets []string
	Timeout time.Duration
	// Limit bounds the answer, in bytes.
	Limit int64
	// Change goes over a connection of its own. On one kept from before, a manager that is down cannot be
	// told from one that took the call; without one, nothing was sent.
	Change bool
}

// Reply is what came back, whatever its status.
type Reply struct {
	Status int
	Body   []byte
	// Date is the server's clock, zero where it does not say.
	Date    time.Time
	Header  http.Header
	secrets []string
}

// Text is the body, fit for a condition.
func (r Reply) Text() string { return Tidy(string(r.Body), r.secrets...) }

// Tidy makes words out of the answer fit for a condition.
func (r Reply) Tidy(s string) string { return Tidy(s, r.secrets...) }

// Strange is the fault for an answer that cannot be the manager's, or cannot be read.
func (r Reply) Strange(what string, err error) *device.Fault {
	return &device.Fault{Class: device.FaultUnknown, Op: what, Status: r.Status, Message: r.Text(), Err: err}
}

// Dial makes a connection, as net.Dialer.DialContext does.
type Dial = func(ctx context.Context, network, address string) (net.Conn, error)

// Client makes exchanges.
type Client struct {
	clock   clock.PassiveClock
	observe func(operation string, status int, took time.Duration)
	conns   connections
}

// NewClient takes the CA bundle from ca.crt in dir; without one, or with dir empty, the system's roots count.
// The real clock counts if clk is nil; observe may be nil, too, and must not block.
func NewClient(dir string, clk clock.PassiveClock, observe func(operation string, status int, took time.Duration)) *Client {
	c := &Client{clock: clk, observe: observe, conns: connections{dir: dir, dial: (&net.Dialer{Timeout: dialTimeout}).DialContext}}
	if c.clock == nil {
		c.clock = clock.RealClock{}
	}
	if c.observe == nil {
		c.observe = func(string, int, time.Duration) {}
	}
	return c
}

// Over has the client make its connections by dial; nil changes nothing. It belongs before the first exchange.
func (c *Client) Over(dial Dial) *Client {
	if dial != nil {
		c.conns.dial = dial
	}
	return c
}

// Close drops idle connections.
func (c *Client) Close() { c.conns.close() }

// Send makes one exchange. The fault is for the case that there was no whole answer; the status, date and
// header of the reply are set beside it if the header came. A token goes as a bearer's.
func (c *Client) Send(ctx context.Context, req Request, token string) (Reply, *device.Fault) {
	client, err := c.conns.client(req.Change)
	if err != nil {
		return Reply{}, &device.Fault{Class: device.FaultUnreachable, Op: req.What, Err: err}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, req.Timeout, fmt.Errorf("no answer within %s", req.Timeout))
	defer cancel()
	// Without a connection nothing of the request can have left.
	var connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected.Store(true) }})
	h, err := req.http(ctx, token)
	if err != nil {
		return Reply{}, &device.Fault{Class: device.FaultRejected, Op: req.What, Err: err}
	}
	begun := c.clock.Now()
	r, err := exchange(client, h, req.Limit)
	c.observe(req.Operation, r.Status, c.clock.Since(begun))
	r.secrets = append([]string{token}, req.Secrets...)
	if err == nil {
		return r, nil
	}
	fault := &device.Fault{Class: device.FaultUnknown, Op: req.What, Status: r.Status, Err: cause(ctx, err)}
	if !connected.Load() {
		fault.Class = device.FaultUnreachable
		fault.Message = "no connection to " + h.URL.Host
	}
	return r, fault
}

// Stream makes an exchange whose answer goes on for as long as it likes; the time limit is for its beginning. The body is
// nil, and the reply whole, where the answer is no success. Whoever gets the body closes it.
func (c *Client) Stream(ctx context.Context, req Request) (io.ReadCloser, Reply, *device.Fault) {
	client, err := c.conns.streaming(req.Timeout)
	if err != nil {
		return nil, Reply{}, &device.Fault{Class: device.FaultUnreachable, Op: req.What, Err: err}
	}
	h, err := req.http(ctx, "")
	if err != nil {
		return nil, Reply{}, &device.Fault{Class: device.FaultRejected, Op: req.What, Err: err}
	}
	begun := c.clock.Now()
	resp, err := client.Do(h)
	if err != nil {
		c.observe(req.Operation, 0, c.clock.Since(begun))
		return nil, Reply{}, &device.Fault{Class: device.FaultUnreachable, Op: req.What, Err: cause(ctx, err)}
	}
	c.observe(req.Operation, resp.StatusCode, c.clock.Since(begun))
	r := Reply{Status: resp.StatusCode, Header: resp.Header, secrets: req.Secrets}
	if resp.StatusCode/100 == 2 {
		return resp.Body, r, nil
	}
	defer resp.Body.Close()
	r.Body, err = io.ReadAll(io.LimitReader(resp.Body, req.Limit))
	if err != nil {
		r.Body = nil // the status says enough
	}
	return nil, r, nil
}

func (req Request) http(ctx context.Context, token string) (*http.Request, error) {
	h, err := http.NewRequestWithContext(ctx, req.Method, req.URL, bytes.NewReader(req.Body))
	if err != nil {
		return nil, err
	}
	if len(req.Query) > 0 {
		h.URL.RawQuery = req.Query.Encode()
	}
	h.Header.Set("Accept", "application/json")
	if req.ContentType != "" {
		h.Header.Set("Content-Type", req.ContentType)
	}
	if token != "" {
		h.Header.Set("Authorization", "Bearer "+token)
	}
	maps.Copy(h.Header, req.Header)
	return h, nil
}

// exchange returns the answer; its status is set beside an error too, if the header came.
func exchange(client *http.Client, h *http.Request, limit int64) (Reply, error) {
	resp, err := client.Do(h)
	if err != nil {
		return Reply{}, err
	}
	defer resp.Body.Close()
	r := Reply{Status: resp.StatusCode, Header: resp.Header}
	if r.Date, err = http.ParseTime(resp.Header.Get("Date")); err != nil {
		r.Date = time.Time{}
	}
	r.Body, err = io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		if resp.StatusCode/100 == 2 {
			return r, fmt.Errorf("read answer: %w", err)
		}
		return r, nil // the status says enough
	}
	if int64(len(r.Body)) > limit {
		r.Body = r.Body[:limit]
		if resp.StatusCode/100 == 2 {
			return r, fmt.Errorf("read answer: longer than %d bytes", limit)
		}
	}
	return r, nil
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

// Classify says what a status other than 2xx means where the manager's own words say nothing better. A 5xx
// may come from a proxy after the manager has done the work, so that only 4xx are definite, and 408 is not.
func Classify(status int) device.FaultClass {
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

// connections keeps the HTTP clients for the CA bundle that is on disk.
type connections struct {
	dir  string
	dial Dial

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
		c.bundle, c.reads, c.changes = bundle, newHTTP(roots, c.dial, true, 0), newHTTP(roots, c.dial, false, 0)
	}
	if change {
		return c.changes, nil
	}
	return c.reads, nil
}

// streaming is a client for one answer that does not end.
func (c *connections) streaming(begin time.Duration) (*http.Client, error) {
	roots, _, err := readCA(c.dir)
	if err != nil {
		return nil, err
	}
	return newHTTP(roots, c.dial, false, begin), nil
}

func newHTTP(roots *x509.CertPool, dial Dial, keep bool, begin time.Duration) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			ResponseHeaderTimeout: begin,
			DialContext:           dial,
			TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
			TLSHandshakeTimeout:   dialTimeout,
			IdleConnTimeout:       idleTimeout,
			DisableKeepAlives:     !keep,
			ForceAttemptHTTP2:     keep, // shares its connection
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

// readCA reads the CA bundle; without one the system's roots count. The text is returned too, to notice a
// change.
func readCA(dir string) (pool *x509.CertPool, bundle string, err error) {
	if dir == "" {
		return nil, "", nil
	}
	path := filepath.Join(dir, fileCA)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", fmt.Errorf("read CA bundle: %w", err)
	}
	pool = x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return nil, "", fmt.Errorf("read CA bundle: %s holds no PEM certificate", path)
	}
	return pool, string(b), nil
}
