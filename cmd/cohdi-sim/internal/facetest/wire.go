// SPDX-License-Identifier: Apache-2.0

package facetest

import (
	"context"
	"fmt"
	"net"
	"sync"
)

// wire is a network in memory with one server on it.
type wire struct {
	conns chan net.Conn
	shut  chan struct{}
	once  sync.Once
}

func newWire() *wire { return &wire{conns: make(chan net.Conn), shut: make(chan struct{})} }

// Accept waits for the next caller.
func (w *wire) Accept() (net.Conn, error) {
	select {
	case c := <-w.conns:
		return c, nil
	case <-w.shut:
		return nil, net.ErrClosed
	}
}

// Close refuses callers from now on.
func (w *wire) Close() error {
	w.once.Do(func() { close(w.shut) })
	return nil
}

// Addr is one that certificates of tests are good for.
func (w *wire) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443} }

// Dial connects to the server, whatever the address.
func (w *wire) Dial(ctx context.Context, _, address string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case w.conns <- theirs:
		return ours, nil
	case <-w.shut:
		return nil, fmt.Errorf("connect to %s: connection refused", address)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
