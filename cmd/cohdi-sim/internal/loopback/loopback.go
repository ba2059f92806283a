// SPDX-License-Identifier: Apache-2.0

package loopback

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// Why a call has no answer.
var (
	ErrBroken  = errors.New("the connection broke")
	ErrTimeout = errors.New("no answer in time")
	ErrStopped = errors.New("the caller is stopping")
)

// Client calls a handler.
type Client struct {
	Handler http.Handler
	Clock   clock.WithTicker
	// Timeout is how long an answer may take.
	Timeout time.Duration
	// Work has the calls that still go on.
	Work *sync.WaitGroup
}

// Ask makes one call. The context is the caller's life; the call's ends with the answer, or when nobody waits for it.
func (c *Client) Ask(ctx context.Context, method, url string, body []byte) (*httptest.ResponseRecorder, error) {
	call, cancel := context.WithCancel(ctx)
	defer cancel()
	r := httptest.NewRequestWithContext(call, method, url, bytes.NewReader(body))
	ended := make(chan *httptest.ResponseRecorder, 1)
	c.Work.Go(func() {
		rec := httptest.NewRecorder()
		defer func() {
			if recover() != nil { // as a server breaks off
				rec = nil
			}
			ended <- rec
		}()
		c.Handler.ServeHTTP(rec, r)
	})
	t := c.Clock.NewTimer(c.Timeout)
	defer t.Stop()
	select {
	case rec := <-ended:
		if rec == nil {
			return nil, ErrBroken
		}
		return rec, nil
	case <-t.C():
		return nil, ErrTimeout
	case <-ctx.Done():
		return nil, ErrStopped
	}
}
