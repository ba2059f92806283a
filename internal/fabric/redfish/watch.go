// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// quiet is how long a stream may say nothing, not even that it is alive, before it is taken for dead.
	quiet = 5 * time.Minute
	// longestEvent bounds a line of a stream.
	longestEvent = 1 << 20

	firstPause   = time.Second
	longestPause = time.Minute
)

// Watch listens to the service's events. What they say is not looked at: whoever is poked reads anew.
func (c *Client) Watch(ctx context.Context, poke func()) error {
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	work.Go(func() {
		select {
		case <-c.closed:
			cancel()
		case <-ctx.Done():
		}
	})
	fresh := wait.Backoff{Duration: firstPause, Factor: 2, Jitter: 0.5, Steps: 7, Cap: longestPause}
	backoff := fresh
	for {
		begun := c.clock.Now()
		fault := c.listen(ctx, poke)
		if ctx.Err() != nil {
			return nil
		}
		if fault != nil && fault.Class == device.FaultUnsupported {
			return fault
		}
		if c.clock.Since(begun) > longestPause {
			backoff = fresh
		}
		pause := backoff.Step()
		klog.FromContext(ctx).V(1).Info("Events of the Redfish service are not heard", "err", fault, "again", pause)
		timer := c.clock.NewTimer(pause)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
	}
}

// listen opens the stream and pokes until it breaks.
func (c *Client) listen(ctx context.Context, poke func()) *device.Fault {
	const what = "listen to events"
	body, fault := c.stream(ctx, what)
	if fault != nil {
		return fault
	}
	alive := make(chan struct{}, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.guard(ctx, body, alive)
	}()
	poke()
	err := events(&lively{body, alive}, poke)
	close(alive)
	<-ended
	return &device.Fault{Class: device.FaultUnreachable, Op: what, Message: "the stream ended", Err: err}
}

// guard closes a stream that has gone quiet, or that nobody reads any more.
func (c *Client) guard(ctx context.Context, body io.Closer, alive <-chan struct{}) {
	timer := c.clock.NewTimer(quiet)
	defer timer.Stop()
	defer body.Close()
	for {
		select {
		case _, open := <-alive:
			if !open {
				return
			}
			if !timer.Stop() {
				select {
				case <-timer.C():
				default:
				}
			}
			timer.Reset(quiet)
		case <-timer.C():
			return
		case <-ctx.Done():
			return
		}
	}
}

// lively tells of each piece that comes.
type lively struct {
	io.Reader
	alive chan<- struct{}
}

func (l *lively) Read(p []byte) (int, error) {
	n, err := l.Reader.Read(p)
	select {
	case l.alive <- struct{}{}:
	default:
	}
	return n, err
}

// events pokes for each record of a stream that holds data. Comments keep it alive and say nothing.
func events(r io.Reader, poke func()) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, longestEvent)
	data := false
	for lines.Scan() {
		line := lines.Bytes()
		switch {
		case len(line) == 0 && data:
			data = false
			poke()
		case bytes.HasPrefix(line, []byte("data:")):
			data = true
		}
	}
	return lines.Err()
}

// stream finds the place of events and opens it, with a new session if the old one has ended.
func (c *Client) stream(ctx context.Context, what string) (io.ReadCloser, *device.Fault) {
	path, fault := c.eventsPath(ctx, what)
	if fault != nil {
		return nil, fault
	}
	for try := 0; ; try++ {
		token, proof, fault := c.prove(ctx, what)
		if fault != nil {
			return nil, fault
		}
		req, fault := c.request(call{operation: "events", what: what, method: http.MethodGet, path: path})
		if fault != nil {
			return nil, fault
		}
		maps.Copy(req.Header, proof.header)
		req.Header.Set("Accept", "text/event-stream")
		req.Secrets = proof.secrets
		body, r, fault := c.rest.Stream(ctx, req)
		switch {
		case fault != nil:
			return nil, fault
		case body != nil:
			return body, nil
		case r.Status == http.StatusUnauthorized && token != "" && try == 0:
			c.sessions.Drop(token)
			continue
		}
		return nil, elsewhere(refused(what, r, c.clock.Now()))
	}
}

func (c *Client) eventsPath(ctx context.Context, what string) (string, *device.Fault) {
	r, fault := c.discover(ctx, what)
	if fault != nil {
		return "", fault
	}
	none := &device.Fault{Class: device.FaultUnsupported, Op: what, Message: "the service has no stream of events"}
	if r.events == "" {
		return "", none
	}
	path, d, fault := read(ctx, c, "events", what, r.events, decodeEventService)
	switch {
	case fault != nil:
		return "", elsewhere(fault)
	case path == "":
		none.Status = d.Status
		return "", none
	}
	return path, nil
}

// decodeEventService returns where the events are, "" where there are none.
func decodeEventService(body []byte) (string, error) {
	var s struct {
		ServiceEnabled *bool
		Place          string `json:"ServerSentEventUri"`
	}
	if err := json.Unmarshal(body, &s); err != nil {
		return "", errors.New("decode event service: the answer is not the JSON that was expected")
	}
	if s.ServiceEnabled != nil && !*s.ServiceEnabled || s.Place == "" {
		return "", nil
	}
	return parseLocation(s.Place)
}
