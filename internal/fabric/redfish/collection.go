// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// mostPages and mostMembers bound a collection.
	mostPages   = 1000
	mostMembers = 1 << 16
	// rounds is how often a collection is read that changes while it is read.
	rounds = 6
)

// collect returns the members of a collection, each once. A page says nothing of what came or went before it while the
// others were read, so that a collection of several pages is read until two readings agree. Members are in full where the
// service can expand them.
func (c *Client) collect(ctx context.Context, operation, what, path, expand string) ([]link, *device.Fault) {
	full := make(map[string]json.RawMessage)
	var before []string
	for round := range rounds {
		links, whole, fault := c.pages(ctx, operation, what, path, expand)
		if fault != nil && expand != "" && slices.Contains([]int{http.StatusBadRequest, http.StatusNotImplemented, http.StatusInsufficientStorage}, fault.Status) {
			expand = ""
			links, whole, fault = c.pages(ctx, operation, what, path, expand)
		}
		if fault != nil {
			return nil, fault
		}
		for _, l := range links {
			if l.raw != nil {
				full[l.to] = l.raw
			}
		}
		now := paths(links)
		slices.Sort(now)
		if whole || round > 0 && slices.Equal(before, now) {
			return merge(links, full), nil
		}
		before, expand = now, ""
	}
	return nil, &device.Fault{Class: device.FaultBusy, Op: what, Message: "the collection " + path + " changes all the time while it is read"}
}

func merge(links []link, full map[string]json.RawMessage) []link {
	places := paths(links)
	out := make([]link, len(places))
	for i, to := range places {
		out[i] = link{to: to, raw: full[to]}
	}
	return out
}

// pages reads a collection once; whole tells that it came in one piece.
func (c *Client) pages(ctx context.Context, operation, what, path, expand string) (links []link, whole bool, fault *device.Fault) {
	next := path
	if expand != "" {
		next += "?" + expand
	}
	seen := make(map[string]bool)
	for n := 0; next != ""; n++ {
		if n == mostPages || len(links) > mostMembers || seen[next] {
			return nil, false, &device.Fault{
				Class: device.FaultRejected, Op: what, Message: "the collection " + path + " has no end: more pages or members than are taken, or a page that leads back",
			}
		}
		seen[next] = true
		p, _, fault := read(ctx, c, operation, what, next, decodePage)
		if fault != nil {
			return nil, false, elsewhere(fault)
		}
		links = append(links, p.members...)
		whole = n == 0 && p.next == "" && (p.count < 0 || p.count == len(paths(links)))
		next = p.next
	}
	return links, whole, nil
}
