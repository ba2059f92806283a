// SPDX-License-Identifier: Apache-2.0

package simapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
)

const maxAnswer = 32 << 20

// StatusError is an answer of the control API that is not 2xx.
type StatusError struct {
	Method, Path string
	Status       int
	Message      string
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("%s %s: simulator answered %d: %s", e.Method, e.Path, e.Status, e.Message)
}

// Client talks to the control API.
type Client struct {
	base string
	http *http.Client
}

// NewClient takes the control address, with or without "http://".
func NewClient(address string) *Client {
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	return &Client{base: strings.TrimRight(address, "/"), http: &http.Client{}}
}

// Ready is nil once all faces serve.
func (c *Client) Ready(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, "/ready", nil, nil)
}

// State returns everything the chassis knows.
func (c *Client) State(ctx context.Context) (*State, error) {
	out := &State{}
	return out, c.call(ctx, http.MethodGet, "/state", nil, out)
}

// Log returns the requests that the faces saw, oldest first; the log is bounded.
func (c *Client) Log(ctx context.Context) ([]Request, error) {
	var out []Request
	err := c.call(ctx, http.MethodGet, "/log", nil, &out)
	return out, err
}

// Violations returns what the judge recorded, oldest first.
func (c *Client) Violations(ctx context.Context) ([]Violation, error) {
	var out []Violation
	err := c.call(ctx, http.MethodGet, "/violations", nil, &out)
	return out, err
}

// ClearViolations forgets the recorded violations; for tests that provoke one.
func (c *Client) ClearViolations(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/violations", nil, nil)
}

// AddFault adds a rule and returns its name.
func (c *Client) AddFault(ctx context.Context, f Fault) (string, error) {
	var out FaultState
	err := c.call(ctx, http.MethodPost, "/fault", f, &out)
	return out.Name, err
}

// Faults lists the rules with how often each was seen and hit.
func (c *Client) Faults(ctx context.Context) ([]FaultState, error) {
	var out []FaultState
	err := c.call(ctx, http.MethodGet, "/fault", nil, &out)
	return out, err
}

// ClearFaults removes the rule of that name, or all where name is empty.
func (c *Client) ClearFaults(ctx context.Context, name string) error {
	path := "/fault"
	if name != "" {
		path += "?name=" + url.QueryEscape(name)
	}
	return c.call(ctx, http.MethodDelete, path, nil, nil)
}

// Device changes one device.
func (c *Client) Device(ctx context.Context, id string, change DeviceChange) error {
	return c.call(ctx, http.MethodPost, "/device/"+url.PathEscape(id), change, nil)
}

// Machine changes one machine.
func (c *Client) Machine(ctx context.Context, name string, change MachineChange) error {
	return c.call(ctx, http.MethodPost, "/machine/"+url.PathEscape(name), change, nil)
}

// SetTiming changes delays from now on; what already runs keeps its due time.
func (c *Client) SetTiming(ctx context.Context, t Timing) error {
	return c.call(ctx, http.MethodPost, "/timing", t, nil)
}

// SetPolicies changes the behaviours that are named, from the next request on.
func (c *Client) SetPolicies(ctx context.Context, p Policies) error {
	return c.call(ctx, http.MethodPost, "/policies", p, nil)
}

// Token revokes tokens or changes their lifetime.
func (c *Client) Token(ctx context.Context, t TokenChange) error {
	return c.call(ctx, http.MethodPost, "/token", t, nil)
}

// Jobs lists those of a CDIM, oldest first.
func (c *Client) Jobs(ctx context.Context) ([]Job, error) {
	var out []Job
	err := c.call(ctx, http.MethodGet, "/job", nil, &out)
	return out, err
}

// ChangeJob resumes or cancels a job of a CDIM, as an operator would.
func (c *Client) ChangeJob(ctx context.Context, id string, change JobChange) error {
	return c.call(ctx, http.MethodPost, "/job/"+url.PathEscape(id), change, nil)
}

// LoseWorker makes the worker of a CDIM's running job vanish.
func (c *Client) LoseWorker(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "/loseWorker", nil, nil)
}

// ForgetTasks makes all tasks of a Redfish service vanish. What they do goes on.
func (c *Client) ForgetTasks(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "/forgetTasks", nil, nil)
}

// Attach gives a certain device to a machine, as a person at the fabric manager would. It blocks for the attach delay.
func (c *Client) Attach(ctx context.Context, machine, device string) error {
	return c.call(ctx, http.MethodPost, "/attach", AttachRequest{Machine: machine, Device: device}, nil)
}

// Detach takes a device away, as a person would. It blocks for the detach delay and is not judged.
func (c *Client) Detach(ctx context.Context, device string) error {
	return c.call(ctx, http.MethodPost, "/detach", DetachRequest{Device: device}, nil)
}

// Raw sends one request and returns the body.
func (c *Client) Raw(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make request %s %s: %w", method, path, err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask simulator: %w", err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("read answer to %s %s: %w", method, path, err)
	}
	if resp.StatusCode/100 != 2 {
		e := &StatusError{Method: method, Path: path, Status: resp.StatusCode, Message: strings.TrimSpace(string(data))}
		var eb ErrorBody
		if json.Unmarshal(data, &eb) == nil && eb.Error != "" {
			e.Message = eb.Error
		}
		return nil, e
	}
	return data, nil
}

func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return fmt.Errorf("encode body of %s %s: %w", method, path, err)
		}
	}
	data, err := c.Raw(ctx, method, path, body)
	if err != nil {
		return err
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("decode answer to %s %s: %w", method, path, err)
	}
	return nil
}
