// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Health is what /healthz and /readyz answer. A part is ready when its last report was no error; parts named
// to NewHealth are not ready before their first report.
type Health struct {
	mu    sync.Mutex // guards what follows
	ready map[string]error
	dead  map[string]error
}

var errNoReport = errors.New("nothing reported yet")

// NewHealth returns a Health that waits for the given parts.
func NewHealth(parts ...string) *Health {
	h := &Health{ready: map[string]error{}, dead: map[string]error{}}
	for _, p := range parts {
		h.ready[p] = errNoReport
	}
	return h
}

// Ready reports a part: nil, or why it cannot do its work now.
func (h *Health) Ready(part string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready[part] = err
}

// Alive reports a part that only a restart can help, with why; nil takes that back.
func (h *Health) Alive(part string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		delete(h.dead, part)
		return
	}
	h.dead[part] = err
}

// NotReady returns why the agent is not ready, by part; it is empty when it is.
func (h *Health) NotReady() map[string]error {
	h.mu.Lock()
	defer h.mu.Unlock()
	not := map[string]error{}
	for part, err := range h.ready {
		if err != nil {
			not[part] = err
		}
	}
	return not
}

func (h *Health) serveReady(w http.ResponseWriter, _ *http.Request) {
	h.mu.Lock()
	parts := maps.Clone(h.ready)
	h.mu.Unlock()
	answer(w, parts)
}

func (h *Health) serveAlive(w http.ResponseWriter, _ *http.Request) {
	h.mu.Lock()
	parts := maps.Clone(h.dead)
	h.mu.Unlock()
	answer(w, parts)
}

// answer prints one line for each part, for whoever reads the kubelet's probe failure.
func answer(w http.ResponseWriter, parts map[string]error) {
	var b strings.Builder
	status := http.StatusOK
	for _, part := range slices.Sorted(maps.Keys(parts)) {
		if err := parts[part]; err != nil {
			status = http.StatusServiceUnavailable
			fmt.Fprintf(&b, "%s: %v\n", part, err)
			continue
		}
		fmt.Fprintf(&b, "%s: ok\n", part)
	}
	if b.Len() == 0 {
		b.WriteString("ok\n")
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	if _, err := io.WriteString(w, b.String()); err != nil {
		return // the prober has gone; it asks again
	}
}

// Server answers /metrics, /healthz and /readyz.
type Server struct {
	http *http.Server
}

// NewServer returns a Server for these metrics and this health.
func NewServer(m *Metrics, h *Health) *Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", m.Handler())
	mux.HandleFunc("GET /healthz", h.serveAlive)
	mux.HandleFunc("GET /readyz", h.serveReady)
	return &Server{http: &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
	}}
}

// Serve answers on l until ctx ends; answers under way get a moment to finish.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	const moment = 5 * time.Second
	stopped := make(chan error, 1)
	defer context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), moment)
		defer cancel()
		stopped <- s.http.Shutdown(grace)
	})()
	err := s.http.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		err = <-stopped
	}
	if err != nil {
		return fmt.Errorf("serve metrics and probes on %s: %w", l.Addr(), err)
	}
	return nil
}
