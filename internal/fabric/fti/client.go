// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Limits of what the drivers ask for, if they do not say otherwise.
const (
	// ReadTimeout is how long a call may take that changes nothing.
	ReadTimeout = 60 * time.Second
	// MaxBody bounds an answer.
	MaxBody = 1 << 20
)

// Config says where the managers are and who we are.
type Config struct {
	// Endpoint is "host", "host:port" or "https://host:port".
	Endpoint string
	// Credentials is a directory with the files username, password, client_id, client_secret, realm and
	// ca.crt, as a Secret is mounted.
	Credentials string
	// Clock measures the life of tokens and how long calls took; the real one if nil.
	Clock clock.PassiveClock
	// Observe is told of each request that was tried: "login" or the driver's word, the HTTP status or 0
	// without an answer, and how long it took. It must not block. It may be nil.
	Observe func(operation string, status int, took time.Duration)
}

// Client calls the managers behind one endpoint.
type Client struct {
	endpoint *url.URL
	clock    clock.PassiveClock
	observe  func(operation string, status int, took time.Duration)
	conns    connections
	tokens   tokens

	mu sync.Mutex
	// spelling is how the managers write a machine's UUID, where it is not in lower case. Guarded by mu.
	spelling map[device.Machine]string
}

// New returns a client; nothing is asked of anybody yet.
func New(cfg Config) (*Client, error) {
	endpoint, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, err
	}
	if cfg.Credentials == "" {
		return nil, errors.New("fabric manager credentials directory is empty")
	}
	c := &Client{
		endpoint: endpoint,
		clock:    cfg.Clock,
		observe:  cfg.Observe,
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

// Spell remembers how the managers write a machine's UUID.
func (c *Client) Spell(id device.Machine, written string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if written != string(id) {
		c.spelling[id] = written
	}
}

// Spelled is how the managers write a machine's UUID, as far as they have said it.
func (c *Client) Spelled(id device.Machine) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.spelling[id]; ok {
		return s
	}
	return string(id)
}

// Close drops idle connections. The managers' tokens end by themselves.
func (c *Client) Close() { c.conns.close() }
