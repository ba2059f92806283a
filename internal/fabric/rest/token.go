// SPDX-License-Identifier: Apache-2.0

package rest

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	loginTimeout = 30 * time.Second
	// maxToken bounds the answer to a login.
	maxToken = 1 << 20
	// renewMargin is how long before its end a token is renewed, a third of its life at most.
	renewMargin = 30 * time.Second
	// defaultLifetime is for a token that does not say how long it lives.
	defaultLifetime = time.Minute
	// RefusedPause keeps refused credentials from being tried so often that the account is locked.
	RefusedPause = 10 * time.Second

	logIn = "log in to the fabric manager"
)

// Credentials are what a login needs, each from the file of its name in a directory.
type Credentials struct {
	Username, Password, ClientID, ClientSecret, Realm string
}

// ReadCredentials reads the files username, password, client_id, client_secret and realm; one that is missing
// is empty here. Which ones are needed is for the caller to know.
func ReadCredentials(dir string) (Credentials, error) {
	var c Credentials
	for name, into := range map[string]*string{
		"username": &c.Username, "password": &c.Password, "client_id": &c.ClientID, "client_secret": &c.ClientSecret, "realm": &c.Realm,
	} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return Credentials{}, fmt.Errorf("read credentials: %w", err)
		}
		// An editor's newline at the end is not part of the secret.
		*into = strings.TrimRight(string(b), "\r\n")
	}
	return c, nil
}

// Grant is what a login asks with.
type Grant struct {
	URL  string
	Form url.Values
}

// token is a bearer token with its times by our own clock.
type token struct {
	value   string
	renewAt time.Time
	endsAt  time.Time
}

// NoEnd is the life of a token that ends only when the manager says so.
const NoEnd = 100 * 365 * 24 * time.Hour

// Login asks the manager for a token. Its class is FaultUnauthorized only where the credentials are refused.
type Login func(ctx context.Context, c Credentials) (value string, lifetime time.Duration, fault *device.Fault)

// Tokens keeps one token for all callers.
type Tokens struct {
	clock clock.PassiveClock
	dir   string
	login Login

	group singleflight.Group
	work  sync.WaitGroup
	mu    sync.Mutex
	// The following are guarded by mu.
	closed  bool
	cancel  context.CancelFunc // of the login that is under way
	current token
	refused struct {
		by    Credentials
		until time.Time
		fault *device.Fault
	}
}

// NewTokens logs in through the client by OAuth, with what grant makes of the credentials in dir.
func NewTokens(client *Client, dir string, grant func(Credentials) (Grant, error)) *Tokens {
	return NewLogins(client.clock, dir, func(ctx context.Context, c Credentials) (string, time.Duration, *device.Fault) {
		return client.grant(ctx, c, grant)
	})
}

// NewLogins logs in by a way of the manager's own, with the credentials in dir. The real clock counts if clk is nil.
func NewLogins(clk clock.PassiveClock, dir string, login Login) *Tokens {
	if clk == nil {
		clk = clock.RealClock{}
	}
	return &Tokens{clock: clk, dir: dir, login: login}
}

// Get returns a token that is good by its own account.
func (t *Tokens) Get(ctx context.Context) (string, *device.Fault) {
	current := t.read()
	if current.value != "" && t.clock.Now().Before(current.renewAt) {
		return current.value, nil
	}
	// The login belongs to all who wait for it, so that it does not end with the first one's context.
	result := t.group.DoChan("", func() (any, error) {
		return t.renew(ctx), nil
	})
	select {
	case <-ctx.Done():
		return "", &device.Fault{Class: device.FaultUnreachable, Op: logIn, Err: context.Cause(ctx)}
	case r := <-result:
		fresh := t.read()
		if fresh.value != "" && t.clock.Now().Before(fresh.endsAt) {
			return fresh.value, nil // also an old one that has not ended: its renewal may wait
		}
		if fault, ok := r.Val.(*device.Fault); ok && fault != nil {
			return "", fault
		}
		return "", &device.Fault{Class: device.FaultUnauthorized, Op: logIn, Err: errors.New("the new token was refused or has ended already")}
	}
}

func (t *Tokens) read() token {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.current
}

// Drop forgets a token that the manager refused, unless another caller has replaced it by now.
func (t *Tokens) Drop(value string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current.value == value {
		t.current = token{}
	}
}

// Close ends a login that is under way, and returns the token that is left, "" if there is none.
func (t *Tokens) Close() string {
	t.mu.Lock()
	t.closed = true
	if t.cancel != nil {
		t.cancel()
	}
	t.mu.Unlock()
	t.work.Wait()
	return t.read().value
}

// begin makes a context for a login, which ends with Close alone.
func (t *Tokens) begin(ctx context.Context) (_ context.Context, end func(), ok bool) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		cancel()
		return ctx, nil, false
	}
	t.work.Add(1)
	t.cancel = cancel
	return ctx, func() {
		cancel()
		t.work.Done()
	}, true
}

// renew logs in and stores the token.
func (t *Tokens) renew(ctx context.Context) *device.Fault {
	ctx, end, ok := t.begin(ctx)
	if !ok {
		return &device.Fault{Class: device.FaultUnreachable, Op: logIn, Err: errors.New("the client is closed")}
	}
	defer end()
	c, err := ReadCredentials(t.dir)
	if err != nil {
		return &device.Fault{Class: device.FaultUnauthorized, Op: logIn, Err: err}
	}
	if fault := t.refusedBefore(c); fault != nil {
		return fault
	}
	value, lifetime, fault := t.login(ctx, c)
	now := t.clock.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if fault != nil {
		if fault.Class == device.FaultUnauthorized {
			t.refused.by, t.refused.until, t.refused.fault = c, now.Add(RefusedPause), fault
		}
		return fault
	}
	t.current = token{value: value, renewAt: now.Add(lifetime - min(renewMargin, lifetime/3)), endsAt: now.Add(lifetime)}
	return nil
}

// refusedBefore repeats the last refusal of the same credentials for a while.
func (t *Tokens) refusedBefore(c Credentials) *device.Fault {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refused.fault != nil && t.refused.by == c && t.clock.Now().Before(t.refused.until) {
		return t.refused.fault
	}
	return nil
}

// grant asks for a token by OAuth.
func (c *Client) grant(ctx context.Context, cred Credentials, of func(Credentials) (Grant, error)) (string, time.Duration, *device.Fault) {
	grant, err := of(cred)
	if err != nil {
		return "", 0, &device.Fault{Class: device.FaultUnauthorized, Op: logIn, Err: err}
	}
	r, fault := c.Send(ctx, Request{
		Operation: "login", What: logIn, Method: http.MethodPost, URL: grant.URL, Body: []byte(grant.Form.Encode()),
		ContentType: "application/x-www-form-urlencoded", Timeout: loginTimeout, Limit: maxToken,
	}, "")
	if fault != nil {
		// A login changes nothing on the fabric, so that its loss is definite.
		fault.Class = device.FaultUnreachable
		return "", 0, fault
	}
	if r.Status/100 != 2 {
		code, message := decodeRefusal(r.Body, cred.Password, cred.ClientSecret)
		fault = &device.Fault{Class: device.FaultUnreachable, Op: logIn, Status: r.Status, Code: code, Message: message}
		if r.Status/100 == 4 && r.Status != http.StatusTooManyRequests && r.Status != http.StatusRequestTimeout {
			fault.Class = device.FaultUnauthorized
		}
		return "", 0, fault
	}
	value, lifetime, err := decodeToken(r.Body)
	if err != nil {
		return "", 0, &device.Fault{Class: device.FaultUnreachable, Op: logIn, Status: r.Status, Err: err}
	}
	return value, lifetime, nil
}

// decodeRefusal finds the words of OAuth in a refusal, else takes it as it came.
func decodeRefusal(body []byte, secrets ...string) (code, message string) {
	var r struct {
		Error       Text `json:"error"`
		Description Text `json:"error_description"`
	}
	if json.Unmarshal(body, &r) != nil || r.Error == "" {
		return "", Tidy(string(body), secrets...)
	}
	return Tidy(string(r.Error), secrets...), Tidy(string(r.Description), secrets...)
}

// Text is a JSON string that may come as a number, a boolean or null.
type Text string

// UnmarshalJSON accepts any scalar.
func (t *Text) UnmarshalJSON(b []byte) error {
	switch {
	case bytes.Equal(b, []byte("null")):
		*t = ""
	case len(b) > 0 && b[0] == '"':
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*t = Text(s)
	case len(b) > 0 && (b[0] == '{' || b[0] == '['):
		return fmt.Errorf("%.20s is neither text nor number", b)
	default:
		*t = Text(b)
	}
	return nil
}

// decodeToken returns the access token and how long it lives, counted from its receipt: the clocks of
// the manager and the node need not agree. Where it says so twice, the shorter counts.
func decodeToken(body []byte) (string, time.Duration, error) {
	var r struct {
		AccessToken string `json:"access_token"`
		ExpiresIn   Text   `json:"expires_in"`
	}
	if err := json.Unmarshal(body, &r); err != nil {
		// The decoder's error may quote the body, and with it the token.
		return "", 0, errors.New("decode token: the answer is not the JSON that was expected")
	}
	if r.AccessToken == "" {
		return "", 0, errors.New("decode token: no access_token in the answer")
	}
	if strings.ContainsFunc(r.AccessToken, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return "", 0, errors.New("decode token: the access_token holds characters that no header may hold")
	}
	lifetime := seconds(string(r.ExpiresIn))
	if inside := claimedLifetime(r.AccessToken); inside > 0 && (lifetime <= 0 || inside < lifetime) {
		lifetime = inside
	}
	if lifetime <= 0 {
		lifetime = defaultLifetime
	}
	return r.AccessToken, lifetime, nil
}

// claimedLifetime is exp − iat of a JWT, 0 if it is none or does not say.
func claimedLifetime(jwt string) time.Duration {
	parts := strings.Split(jwt, ".")
	if len(parts) < 2 {
		return 0
	}
	payload, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(parts[1], "="))
	if err != nil {
		return 0
	}
	var claims struct {
		Expires Text `json:"exp"`
		Issued  Text `json:"iat"`
	}
	if json.Unmarshal(payload, &claims) != nil || claims.Expires == "" || claims.Issued == "" {
		return 0
	}
	return seconds(string(claims.Expires)) - seconds(string(claims.Issued))
}

// seconds reads a number of seconds; what is no sensible number is 0.
func seconds(s string) time.Duration {
	const most = float64(1 << 33) // the year 2242, in seconds; far below what a Duration holds
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f >= 0 && f <= most) {
		return 0
	}
	return time.Duration(f * float64(time.Second))
}
