// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
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
	// renewMargin is how long before its end a token is renewed, a third of its life at most.
	renewMargin = 30 * time.Second
	// defaultLifetime is for a token that does not say how long it lives.
	defaultLifetime = time.Minute
	// RefusedPause keeps refused credentials from being tried so often that the account is locked.
	RefusedPause = 10 * time.Second
)

// token is a bearer token with its times by our own clock.
type token struct {
	value   string
	renewAt time.Time
	endsAt  time.Time
}

// tokens keeps one token for all callers.
type tokens struct {
	clock clock.PassiveClock
	dir   string
	// login asks the id_manager.
	login func(ctx context.Context, c credentials) (value string, lifetime time.Duration, fault *device.Fault)

	group singleflight.Group
	mu    sync.Mutex
	// The following are guarded by mu.
	current token
	refused struct {
		by    credentials
		until time.Time
		fault *device.Fault
	}
}

// get returns a token that is good by its own account.
func (t *tokens) get(ctx context.Context) (string, *device.Fault) {
	current := t.read()
	if current.value != "" && t.clock.Now().Before(current.renewAt) {
		return current.value, nil
	}
	// The login belongs to all who wait for it, so that it does not end with the first one's context.
	result := t.group.DoChan("", func() (any, error) {
		fault := t.renew(context.WithoutCancel(ctx))
		return fault, nil
	})
	select {
	case <-ctx.Done():
		return "", &device.Fault{Class: device.FaultUnreachable, Op: "log in to the fabric manager", Err: context.Cause(ctx)}
	case r := <-result:
		fresh := t.read()
		if fresh.value != "" && t.clock.Now().Before(fresh.endsAt) {
			return fresh.value, nil // also an old one that has not ended: its renewal may wait
		}
		if fault, ok := r.Val.(*device.Fault); ok && fault != nil {
			return "", fault
		}
		return "", &device.Fault{
			Class: device.FaultUnauthorized, Op: "log in to the fabric manager",
			Err: errors.New("the new token was refused or has ended already"),
		}
	}
}

func (t *tokens) read() token {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.current
}

// drop forgets a token that the manager refused, unless another caller has replaced it by now.
func (t *tokens) drop(value string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current.value == value {
		t.current = token{}
	}
}

// renew logs in and stores the token.
func (t *tokens) renew(ctx context.Context) *device.Fault {
	c, err := readCredentials(t.dir)
	if err != nil {
		return &device.Fault{Class: device.FaultUnauthorized, Op: "log in to the fabric manager", Err: err}
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
func (t *tokens) refusedBefore(c credentials) *device.Fault {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refused.fault != nil && t.refused.by == c && t.clock.Now().Before(t.refused.until) {
		return t.refused.fault
	}
	return nil
}

// login does the password grant.
func (c *Client) login(ctx context.Context, cred credentials) (string, time.Duration, *device.Fault) {
	const op = "log in to the fabric manager"
	form := url.Values{
		"client_id": {cred.clientID}, "username": {cred.username}, "password": {cred.password},
		"scope": {"openid"}, "response_type": {"id_token token"}, "grant_type": {"password"},
	}
	if cred.clientSecret != "" {
		form.Set("client_secret", cred.clientSecret)
	}
	answer, fault := c.send(ctx, Request{
		Operation: "login", What: op, Method: http.MethodPost,
		Path: "/id_manager/realms/" + url.PathEscape(cred.realm) + "/protocol/openid-connect/token",
		Body: []byte(form.Encode()), ContentType: "application/x-www-form-urlencoded",
		Timeout: loginTimeout, Limit: MaxBody,
	}, "")
	if fault != nil {
		// A login changes nothing on the fabric, so that its loss is definite.
		fault.Class = device.FaultUnreachable
		return "", 0, fault
	}
	if answer.Status/100 != 2 {
		code, message := decodeRefusal(answer.Body, cred.password, cred.clientSecret)
		fault = &device.Fault{Class: device.FaultUnreachable, Op: op, Status: answer.Status, Code: code, Message: message}
		if answer.Status/100 == 4 && answer.Status != http.StatusTooManyRequests && answer.Status != http.StatusRequestTimeout {
			fault.Class = device.FaultUnauthorized
		}
		return "", 0, fault
	}
	value, lifetime, err := decodeToken(answer.Body)
	if err != nil {
		return "", 0, &device.Fault{Class: device.FaultUnreachable, Op: op, Status: answer.Status, Err: err}
	}
	return value, lifetime, nil
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

// redact hides secrets that a manager or a proxy may echo.
func redact(s string, secrets ...string) string {
	for _, secret := range secrets {
		for _, form := range []string{secret, url.QueryEscape(secret)} {
			if secret != "" {
				s = strings.ReplaceAll(s, form, "<secret>")
			}
		}
	}
	return s
}
