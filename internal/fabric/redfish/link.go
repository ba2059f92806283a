// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// longestPath bounds what is stored with a device or an operation.
const longestPath = 1024

// parsePath reads the service's reference to a resource: an absolute path, or a URL of which only the path counts, since
// a service behind a proxy may not know its own name, and nothing must lead our session to another host. A fragment
// names a part of a resource and is dropped.
func parsePath(s string) (string, error) {
	u, err := parseURL(s)
	if err != nil {
		return "", err
	}
	path := strings.TrimRight(u.EscapedPath(), "/")
	if path == "" {
		return "", fmt.Errorf("reference %q names no resource", rest.Tidy(s))
	}
	return path, nil
}

// parseLocation is parsePath for links that are followed as they are, with their query and their slash.
func parseLocation(s string) (string, error) {
	u, err := parseURL(s)
	if err != nil {
		return "", err
	}
	if u.RawQuery != "" {
		return u.EscapedPath() + "?" + u.RawQuery, nil
	}
	return u.EscapedPath(), nil
}

func parseURL(s string) (*url.URL, error) {
	if len(s) > longestPath || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return nil, fmt.Errorf("reference %q is longer than %d bytes, or not of ASCII", rest.Tidy(s), longestPath)
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, errors.New("reference is not a URL") // the cause would repeat it in full
	}
	if u.Scheme != "" && u.Scheme != "https" && u.Scheme != "http" || !strings.HasPrefix(u.Path, "/") ||
		slices.Contains(strings.Split(u.Path, "/"), "..") {
		return nil, fmt.Errorf("reference %q is not an absolute path", rest.Tidy(s))
	}
	return u, nil
}

// link is a reference to a resource, or the resource itself where the service expanded it. What is no usable reference
// leads nowhere: to is "".
type link struct {
	to  string
	raw json.RawMessage
}

// UnmarshalJSON never fails: null, a bare string and anything else that is no reference lead nowhere.
func (l *link) UnmarshalJSON(b []byte) error {
	*l = link{}
	var all map[string]json.RawMessage
	var id string
	if json.Unmarshal(b, &all) == nil && json.Unmarshal(all["@odata.id"], &id) == nil {
		l.to = pathOrNone(id)
	}
	if l.to != "" && len(all) > 1 {
		l.raw = slices.Clone(b)
	}
	return nil
}

// pathOrNone is the path of a reference, "" where it is none.
func pathOrNone(s string) string {
	path, err := parsePath(s)
	if err != nil {
		return ""
	}
	return path
}

// locationOrNone is what a location leads to, "" where it leads nowhere.
func locationOrNone(s string) string {
	at, err := parseLocation(s)
	if err != nil {
		return ""
	}
	return at
}

// paths are the places that links lead to, in their order, each once.
func paths(links []link) []string {
	out := make([]string, 0, len(links))
	seen := make(map[string]bool, len(links))
	for _, l := range links {
		if l.to != "" && !seen[l.to] {
			seen[l.to] = true
			out = append(out, l.to)
		}
	}
	return out
}
