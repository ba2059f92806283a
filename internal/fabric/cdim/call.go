// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"

	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Codes of layout-apply that say more than their status.
const (
	codeRequest   = "E40001" // not of the form of this version
	codeBusy      = "E40010" // another job runs
	codeUnknown   = "E40020" // no such job
	codeSuspended = "E40027" // a job waits for a person
)

// request is one that changes nothing.
func (c *Client) request(operation, what, address string, query url.Values) rest.Request {
	return rest.Request{
		Operation: operation, What: what, Method: http.MethodGet, URL: address, Query: query, Timeout: readTimeout, Limit: maxAnswer,
	}
}

// call sends a request, with a token where there is a gateway. A 401 means that nothing happened and the token
// has gone bad: it is replaced and the call made once more.
func (c *Client) call(ctx context.Context, req rest.Request) (rest.Reply, *device.Fault) {
	if c.plain {
		c.warning.Do(func() {
			klog.FromContext(ctx).Info("WARNING: plain HTTP to the fabric manager is allowed: whoever is on the network can read and forge calls that attach and detach devices")
		})
	}
	for try := 0; ; try++ {
		token, fault := c.token(ctx, req.What)
		if fault != nil {
			return rest.Reply{}, fault
		}
		r, fault := c.rest.Send(ctx, req, token)
		if fault != nil {
			return r, fault
		}
		if r.Status == http.StatusUnauthorized && c.tokens != nil {
			c.tokens.Drop(token)
			if try == 0 {
				continue
			}
		}
		if r.Status/100 == 2 {
			return r, nil
		}
		return r, refused(req.What, r)
	}
}

func (c *Client) token(ctx context.Context, what string) (string, *device.Fault) {
	if c.tokens == nil {
		return "", nil
	}
	token, fault := c.tokens.Get(ctx)
	if fault == nil {
		return token, nil
	}
	mine := *fault // shared by all who waited for the login
	mine.Op = what + ": " + fault.Op
	return "", &mine
}

// refused reads an answer that is no success.
func refused(what string, r rest.Reply) *device.Fault {
	code, message := decodeRefusal(r.Body)
	fault := &device.Fault{Class: rest.Classify(r.Status), Op: what, Status: r.Status, Code: r.Tidy(code), Message: r.Tidy(message)}
	if r.Status == http.StatusConflict {
		// Those codes that have no word of their own say that the job is in no state for it.
		switch code {
		case codeBusy:
		case codeSuspended:
			fault.Class = device.FaultSuspended
		case "":
		default:
			fault.Class = device.FaultConflict
		}
	}
	return fault
}

// decodeRefusal finds the words of the services, of the gateway (which has two forms) or of a proxy.
func decodeRefusal(body []byte) (code, message string) {
	var r struct {
		Code    rest.Text       `json:"code"`
		Message rest.Text       `json:"message"`
		Details json.RawMessage `json:"details"`
		Expired rest.Text       `json:"exp"`
	}
	if json.Unmarshal(body, &r) != nil {
		return "", string(body)
	}
	message = string(r.Message)
	if details := string(r.Details); details != "" && details != "null" && details != `""` {
		message += ": " + details
	}
	switch {
	case message != "":
		return string(r.Code), message
	case r.Expired != "":
		return string(r.Code), string(r.Expired)
	}
	return string(r.Code), string(body)
}
