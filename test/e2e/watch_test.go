// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// told is a condition that was seen on a claim. The scheduler clears them with the allocation, so that only
// who watches has seen all of them.
type told struct {
	kind    string
	claim   string
	entry   string
	node    string
	reason  string
	message string
}

// told prints as a person reads it.
func (c told) String() string {
	return fmt.Sprintf("%s of %s for claim %s on %q: %s: %s", c.kind, c.entry, c.claim, c.node, c.reason, c.message)
}

// history is what was said about the claims of a test.
type history struct {
	mu  sync.Mutex // guards all
	all []told
}

// watch follows the claims of the test until its end.
func (s *scenario) watch() *history {
	s.t.Helper()
	h := &history{}
	w, err := s.client.ResourceV1().ResourceClaims(s.ns).Watch(s.t.Context(), metav1.ListOptions{})
	if err != nil {
		s.t.Fatalf("watch claims: %v", err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		for event := range w.ResultChan() {
			if claim, ok := event.Object.(*resourceapi.ResourceClaim); ok {
				h.see(claim)
			}
		}
	})
	s.t.Cleanup(func() {
		w.Stop()
		done.Wait()
	})
	return h
}

func (h *history) see(claim *resourceapi.ResourceClaim) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range claim.Status.Devices {
		for _, c := range d.Conditions {
			one := told{kind: c.Type, claim: claim.Name, entry: d.Device, node: nodeOf(claim), reason: c.Reason, message: c.Message}
			if !slices.Contains(h.all, one) {
				h.all = append(h.all, one)
			}
		}
	}
}

// nodeOf is where the claim is allocated, empty if it is not, or not to one node.
func nodeOf(claim *resourceapi.ResourceClaim) string {
	if claim.Status.Allocation == nil || claim.Status.Allocation.NodeSelector == nil {
		return ""
	}
	for _, term := range claim.Status.Allocation.NodeSelector.NodeSelectorTerms {
		for _, f := range term.MatchFields {
			if f.Key == metav1.ObjectNameField && len(f.Values) == 1 {
				return f.Values[0]
			}
		}
	}
	return ""
}

// failures returns every AttachFailed that was said.
func (h *history) failures() []told {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.all), func(c told) bool { return c.kind != device.ConditionAttachFailed })
}

// failed waits for a claim to be told AttachFailed with the words.
func (s *scenario) failed(h *history, within time.Duration, words string) told {
	s.t.Helper()
	var found told
	await(s.t, fmt.Sprintf("a claim is told %s with %q", device.ConditionAttachFailed, words), within, func(context.Context) error {
		all := h.failures()
		i := slices.IndexFunc(all, func(c told) bool { return strings.Contains(c.reason+": "+c.message, words) })
		if i < 0 {
			return fmt.Errorf("what was said is %v", all)
		}
		found = all[i]
		return nil
	})
	return found
}

// steady fails the test unless check returns nil all the time.
func (s *scenario) steady(what string, all time.Duration, check func(context.Context) error) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), all)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if err := check(ctx); err != nil && ctx.Err() == nil {
			s.t.Fatalf("%s does not last %v: %v", what, all, err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
