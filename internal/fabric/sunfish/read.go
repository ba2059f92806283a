// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

const (
	// maxPages and maxMembers bound one collection; sideBySide is how many resources are read at once.
	maxPages   = 200
	maxMembers = 10000
	sideBySide = 4
)

// memo remembers resources of which nothing changes that we go by. A nil one remembers nothing.
type memo[T any] struct {
	mu    sync.Mutex
	known map[string]T
}

func (m *memo[T]) get(path string) (T, bool) {
	if m == nil {
		var none T
		return none, false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.known[path]
	return v, ok
}

func (m *memo[T]) set(path string, v T) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == nil {
		m.known = map[string]T{}
	}
	m.known[path] = v
}

// keep forgets what its collection lists no more.
func (m *memo[T]) keep(collection string, listed []string) {
	if m == nil {
		return
	}
	still := make(map[string]bool, len(listed))
	for _, path := range listed {
		still[path] = true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.known, func(path string, _ T) bool { return strings.HasPrefix(path, collection+"/") && !still[path] })
}

// question is one that changes nothing.
type question struct{ operation, what string }

// get reads one resource.
func (c *Client) get(ctx context.Context, q question, path string) (rest.Reply, *device.Fault) {
	return c.send(ctx, rest.Request{Operation: q.operation, What: q.what, Method: http.MethodGet, URL: c.server + path, Timeout: readTimeout, Limit: maxAnswer})
}

// send makes an exchange of which anything but success is a fault in the service's plain words.
func (c *Client) send(ctx context.Context, req rest.Request) (rest.Reply, *device.Fault) {
	if c.plain {
		c.warning.Do(func() {
			klog.FromContext(ctx).Info("WARNING: plain HTTP to the fabric manager is allowed: whoever is on the network can read and forge calls that attach and detach devices")
		})
	}
	r, fault := c.rest.Send(ctx, req, "")
	if fault != nil || r.Status/100 == 2 {
		return r, fault
	}
	return r, &device.Fault{Class: rest.Classify(r.Status), Op: req.What, Status: r.Status, Message: r.Text()}
}

// read reads and decodes one resource.
func read[T any](ctx context.Context, c *Client, q question, path string, decode func([]byte) (T, error)) (T, *device.Fault) {
	var none T
	r, fault := c.get(ctx, q, path)
	if fault != nil {
		return none, fault
	}
	v, err := decode(r.Body)
	if err != nil {
		return none, r.Strange(q.what+": "+path, err)
	}
	return v, nil
}

// list reads the members of a collection, page by page.
func (c *Client) list(ctx context.Context, q question, path string) ([]string, *device.Fault) {
	all := map[string]bool{}
	next := path
	for range maxPages {
		page, fault := c.page(ctx, q, next)
		if fault != nil {
			return nil, missing(fault)
		}
		for _, m := range page.members {
			all[m] = true
		}
		if len(all) > maxMembers {
			return nil, &device.Fault{Class: device.FaultUnknown, Op: q.what, Message: fmt.Sprintf("%s has more than %d members", path, maxMembers)}
		}
		if page.next == "" {
			return slices.Sorted(maps.Keys(all)), nil
		}
		next = page.next
	}
	return nil, &device.Fault{Class: device.FaultUnknown, Op: q.what, Message: fmt.Sprintf("%s has more than %d pages", path, maxPages)}
}

// page reads one page; its address may have a query, which nextLink brings.
func (c *Client) page(ctx context.Context, q question, address string) (collection, *device.Fault) {
	path, query, _ := strings.Cut(address, "?")
	path, err := checkPath(path)
	if err != nil {
		return collection{}, &device.Fault{Class: device.FaultUnknown, Op: q.what, Err: err}
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return collection{}, &device.Fault{Class: device.FaultUnknown, Op: q.what, Err: err}
	}
	r, fault := c.send(ctx, rest.Request{
		Operation: q.operation, What: q.what, Method: http.MethodGet, URL: c.server + path, Query: values, Timeout: readTimeout, Limit: maxAnswer,
	})
	if fault != nil {
		return collection{}, fault
	}
	page, err := decodeCollection(r.Body)
	if err != nil {
		return collection{}, r.Strange(q.what+": "+path, err)
	}
	return page, nil
}

// missing makes a path that is not there a refusal: FaultNotFound would be a machine or a device.
func missing(fault *device.Fault) *device.Fault {
	if fault.Class == device.FaultNotFound {
		fault.Class = device.FaultRejected
	}
	return fault
}

// source is a collection whose members are of one kind. known is what is remembered of them, nil for nothing; fresh
// reads them all the same, and remembers what comes.
type source[T any] struct {
	path   string
	known  *memo[T]
	fresh  bool
	decode func([]byte) (T, error)
}

// all reads each member. One that has gone meanwhile is left out, one that cannot be read is in failed.
func all[T any](ctx context.Context, c *Client, q question, from source[T]) (found map[string]T, failed map[string]*device.Fault, fault *device.Fault) {
	members, fault := c.list(ctx, q, from.path)
	if fault != nil {
		return nil, nil, fault
	}
	from.known.keep(from.path, members)
	found, failed = each(ctx, c, q, from, members)
	return found, failed, nil
}

// each reads the resources, a few side by side.
func each[T any](ctx context.Context, c *Client, q question, from source[T], paths []string) (found map[string]T, failed map[string]*device.Fault) {
	found, failed = make(map[string]T, len(paths)), map[string]*device.Fault{}
	var asked []string
	for _, path := range paths {
		if v, ok := from.known.get(path); ok && !from.fresh {
			found[path] = v
		} else {
			asked = append(asked, path)
		}
	}
	var mu sync.Mutex
	var workers sync.WaitGroup
	next := make(chan string)
	for range min(sideBySide, len(asked)) {
		workers.Go(func() {
			for path := range next {
				v, fault := read(ctx, c, q, path, from.decode)
				mu.Lock()
				switch {
				case fault == nil:
					found[path] = v
					from.known.set(path, v)
				case fault.Class != device.FaultNotFound:
					failed[path] = fault
				}
				mu.Unlock()
			}
		})
	}
	for _, path := range asked {
		next <- path
	}
	close(next)
	workers.Wait()
	return found, failed
}

// whole is the first of the faults: a list of which a part is missing is none.
func whole(failed map[string]*device.Fault, fault *device.Fault) *device.Fault {
	if fault != nil || len(failed) == 0 {
		return fault
	}
	return failed[slices.Sorted(maps.Keys(failed))[0]]
}
