// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

// DefaultLookInterval is the mean time between two looks that no event asked for.
const DefaultLookInterval = 30 * time.Second

// lookJitter spreads the looks of many nodes: up to this share of the interval is added.
const lookJitter = 0.2

// nodePrefix begins the names of the device nodes that are watched.
const nodePrefix = "nvidia"

// Counters say what a Watcher heard. They only grow.
type Counters struct {
	// Events of the kernel that asked for a look.
	Events uint64
	// Ignored events of the kernel: other subsystems.
	Ignored uint64
	// Malformed messages on the socket.
	Malformed uint64
	// Overruns of the socket or the /dev watch: events were lost and a look was asked for.
	Overruns uint64
	// NodeEvents are device nodes that came or went.
	NodeEvents uint64
	// Looks that no event asked for.
	Looks uint64
}

// Watcher says when to look again.
type Watcher struct {
	pci      *PCI
	interval time.Duration
	events   *os.File
	deaf     error
	nodes    *fsnotify.Watcher
	nodesErr error
	look     chan struct{}

	heard, ignored, malformed, overruns, nodeEvents, looks atomic.Uint64
}

// NewWatcher opens the sources of events, so that nothing that happens after it returns is missed: take
// the first snapshot after this. A source that cannot be opened is no error, since the periodic look
// does the work alone; Deaf tells. An interval of zero means DefaultLookInterval.
func (p *PCI) NewWatcher(interval time.Duration) *Watcher {
	if interval <= 0 {
		interval = DefaultLookInterval
	}
	w := &Watcher{pci: p, interval: interval, look: make(chan struct{}, 1)}
	w.events, w.deaf = openUevents()
	if w.deaf == nil {
		w.deaf = checkAudible()
	}
	w.nodes, w.nodesErr = p.watchNodes()
	w.poke()
	return w
}

func (p *PCI) watchNodes() (*fsnotify.Watcher, error) {
	n, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch device nodes: %w", err)
	}
	dir := filepath.Join(p.root, "dev")
	if err := n.Add(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("watch device nodes in %s: %w", dir, err), n.Close())
	}
	return n, nil
}

// Look returns the channel that says "look again". It holds one message, there from the start; several
// events before the reader comes are one.
func (w *Watcher) Look() <-chan struct{} { return w.look }

// Deaf returns why no events of the kernel are heard, nil if they are. The periodic look then does all
// the work, and a change takes up to its interval to be seen.
func (w *Watcher) Deaf() error { return w.deaf }

// Counters returns what was heard so far.
func (w *Watcher) Counters() Counters {
	return Counters{
		Events:     w.heard.Load(),
		Ignored:    w.ignored.Load(),
		Malformed:  w.malformed.Load(),
		Overruns:   w.overruns.Load(),
		NodeEvents: w.nodeEvents.Load(),
		Looks:      w.looks.Load(),
	}
}

// poke asks for a look, also from a Remove that waits.
func (w *Watcher) poke() {
	w.pci.changes.wake()
	select {
	case w.look <- struct{}{}:
	default:
	}
}

// Run listens until ctx ends and returns nil then. It may be called once.
func (w *Watcher) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if w.deaf != nil {
		logger.Info("No kernel events are heard, looking periodically", "interval", w.interval, "reason", w.deaf.Error())
	}
	if w.nodesErr != nil {
		logger.Info("Device nodes are not watched, looking periodically", "interval", w.interval, "reason", w.nodesErr.Error())
	}
	ended := make(chan error, 1)
	if w.events == nil {
		ended = nil
	} else {
		go func() { ended <- w.hear() }()
		defer func() {
			// Closing ends the read; waiting for it leaves nothing behind.
			if err := w.events.Close(); err == nil && ended != nil {
				logger.V(4).Info("Kernel events are let go", "reason", (<-ended).Error())
			}
		}()
	}
	var nodeEvents chan fsnotify.Event
	var nodeErrors chan error
	if w.nodes != nil {
		nodeEvents, nodeErrors = w.nodes.Events, w.nodes.Errors
		defer w.nodes.Close()
	}
	timer := w.pci.clock.NewTimer(wait.Jitter(w.interval, lookJitter))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			ended = nil
			logger.Error(err, "Kernel events ended, looking periodically", "interval", w.interval)
			w.poke()
		case e, ok := <-nodeEvents:
			if !ok {
				nodeEvents = nil
				continue
			}
			w.nodeEvent(e)
		case err, ok := <-nodeErrors:
			if !ok {
				nodeErrors = nil
				continue
			}
			logger.V(2).Info("Device node events were lost", "reason", err.Error())
			w.overruns.Add(1)
			w.poke()
		case <-timer.C():
			w.looks.Add(1)
			w.poke()
			timer.Reset(wait.Jitter(w.interval, lookJitter))
		}
	}
}

func (w *Watcher) nodeEvent(e fsnotify.Event) {
	if !strings.HasPrefix(filepath.Base(e.Name), nodePrefix) || !e.Has(fsnotify.Create|fsnotify.Remove|fsnotify.Rename) {
		return
	}
	w.nodeEvents.Add(1)
	w.poke()
}

// hear reads uevents until the socket is closed or broken.
func (w *Watcher) hear() error {
	buf := make([]byte, eventSize)
	for {
		n, err := w.events.Read(buf)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			// The kernel dropped events; whatever they said, the bus itself says too.
			w.overruns.Add(1)
			w.poke()
			continue
		case errors.Is(err, io.EOF):
			w.malformed.Add(1) // an empty message; a datagram socket has no end
			continue
		case err != nil:
			return fmt.Errorf("read uevent: %w", err)
		}
		e, err := parseUevent(buf[:n])
		switch {
		case err != nil:
			w.malformed.Add(1)
		case e.matters():
			w.heard.Add(1)
			w.poke()
		default:
			w.ignored.Add(1)
		}
	}
}
