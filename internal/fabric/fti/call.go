// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
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
type Reply struct{ rest.Reply }

// Silent tells that the manager accepted a change without saying more: no body, or some other JSON. A web
// page is a proxy's, and JSON that ends early may be the half of a refusal.
func (a Reply) Silent() bool { return len(bytes.TrimSpace(a.Body)) == 0 || json.Valid(a.Body) }

// Call sends a request with a token. A 401 means that nothing happened and the token has gone bad: it is
// replaced and the call made once more. Every answer but 2xx is a fault.
func (c *Client) Call(ctx context.Context, req Request) (Reply, *device.Fault) {
	for try := 0; ; try++ {
		token, fault := c.tokens.Get(ctx)
		if fault != nil {
			mine := *fault // shared by all who waited for the login
			mine.Op = req.What + ": " + fault.Op
			return Reply{}, &mine
		}
		a, fault := c.rest.Send(ctx, rest.Request{
			Operation: req.Operation, What: req.What, Method: req.Method, URL: c.endpoint + req.Path, Query: req.Query,
			Body: req.Body, ContentType: req.ContentType, Timeout: req.Timeout, Limit: req.Limit, Change: req.Change,
		}, token)
		if fault != nil {
			return Reply{}, fault
		}
		if a.Status == http.StatusUnauthorized {
			c.tokens.Drop(token)
			if try == 0 {
				continue
			}
		}
		if a.Status/100 == 2 {
			return Reply{a}, nil
		}
		code, message := decodeRefusal(a.Body, token)
		return Reply{}, &device.Fault{Class: rest.Classify(a.Status), Op: req.What, Status: a.Status, Code: code, Message: message}
	}
}
