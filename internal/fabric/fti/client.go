// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Limits of what the drivers ask for, if they do not say otherwise.
const (
	// ReadTimeout is how long a call may take that changes nothing.
	ReadTimeout = 60 * time.Second
	// MaxBody bounds an answer.
	MaxBody = 1 << 20
	// RefusedPause keeps refused credentials from being tried so often that the account is locked.
	RefusedPause = rest.RefusedPause
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
	// Dial makes the connections; the network's if nil.
	Dial rest.Dial
}

// Client calls the managers behind one endpoint.
type Client struct {
	endpoint string
	rest     *rest.Client
	tokens   *rest.Tokens

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
	c := &Client{endpoint: endpoint, rest: rest.NewClient(cfg.Credentials, cfg.Clock, cfg.Observe).Over(cfg.Dial), spelling: make(map[device.Machine]string)}
	c.tokens = rest.NewTokens(c.rest, cfg.Credentials, func(cred rest.Credentials) (rest.Grant, error) {
		return grant(endpoint, cfg.Credentials, cred)
	})
	return c, nil
}

// grant is the password grant of the id_manager. Only the client secret may be missing (a public client).
func grant(endpoint, dir string, cred rest.Credentials) (rest.Grant, error) {
	for _, f := range []struct{ name, value string }{
		{"username", cred.Username}, {"password", cred.Password}, {"client_id", cred.ClientID}, {"realm", cred.Realm},
	} {
		if f.value == "" {
			return rest.Grant{}, fmt.Errorf("read credentials: %s is missing or is empty", filepath.Join(dir, f.name))
		}
	}
	form := url.Values{
		"client_id": {cred.ClientID}, "username": {cred.Username}, "password": {cred.Password},
		"scope": {"openid"}, "response_type": {"id_token token"}, "grant_type": {"password"},
	}
	if cred.ClientSecret != "" {
		form.Set("client_secret", cred.ClientSecret)
	}
	return rest.Grant{URL: endpoint + "/id_manager/realms/" + url.PathEscape(cred.Realm) + "/protocol/openid-connect/token", Form: form}, nil
}

// parseEndpoint accepts https only: the token would travel in the clear otherwise.
func parseEndpoint(s string) (string, error) {
	if !strings.Contains(s, "://") {
		s = "https://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		return "", fmt.Errorf("fabric manager endpoint: %w", err)
	}
	if u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("fabric manager endpoint %q is not of the form [https://]host[:port]", u.Redacted())
	}
	return u.Scheme + "://" + u.Host, nil
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
func (c *Client) Close() { c.rest.Close() }
