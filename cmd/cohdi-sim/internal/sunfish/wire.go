// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// decodeObject reads a resource, or a part of one.
func decodeObject(body []byte) (object, error) {
	var o object
	if err := json.Unmarshal(body, &o); err != nil {
		return nil, fmt.Errorf("decode resource: %w", err)
	}
	if o == nil {
		return nil, errors.New("decode resource: null is none")
	}
	return o, nil
}

// text is a field of a resource, empty where it is no text.
func text(o object, field string) string {
	if s, ok := o[field].(string); ok {
		return s
	}
	return ""
}

// fingerprint names what has no name.
func fingerprint(o object) []byte {
	data, err := json.Marshal(o)
	if err != nil {
		panic(err) // it was JSON before
	}
	sum := sha256.Sum256(data)
	return sum[:8]
}

// targets are the target endpoints of a Connection, none of anything else.
func targets(o object) []string {
	data, err := json.Marshal(o)
	if err != nil {
		panic(err) // it was JSON before
	}
	var e ends
	if json.Unmarshal(data, &e) != nil {
		return nil
	}
	var out []string
	for _, t := range e.Links.Targets {
		out = append(out, t.ID)
	}
	return out
}

// member is a count of a model as the composition form has it: the peer's client spells the annotation in its own way.
type member struct {
	RequestCount   *int   `json:"@Redfish.RequestCount"`
	RequestedCount *int   `json:"@Redfish.RequestedCount"`
	Type           string `json:"ProcessorType"`
	Model          string `json:"Model"`
}

func (m member) count() (int, bool) {
	switch {
	case m.RequestedCount != nil:
		return *m.RequestedCount, *m.RequestedCount >= 0
	case m.RequestCount != nil:
		return *m.RequestCount, *m.RequestCount >= 0
	}
	return 0, false
}

// composition is what is written to the composition system.
type composition struct {
	node    string
	members []member
}

func decodeComposition(body []byte) (composition, error) {
	var c struct {
		Name       string `json:"Name"`
		Processors struct {
			Members []member `json:"Members"`
		} `json:"Processors"`
	}
	if err := json.Unmarshal(body, &c); err != nil {
		return composition{}, fmt.Errorf("decode composition: %w", err)
	}
	for _, m := range c.Processors.Members {
		if _, ok := m.count(); !ok {
			return composition{}, errors.New("decode composition: a member without a count")
		}
	}
	return composition{node: c.Name, members: c.Processors.Members}, nil
}

// event is one of those that agents send.
type event struct {
	Context string `json:"Context"`
	Events  []struct {
		MessageID   string   `json:"MessageId"`
		MessageArgs []string `json:"MessageArgs"`
		Origin      struct {
			ID string `json:"@odata.id"`
		} `json:"OriginOfCondition"`
	} `json:"Events"`
}

func say(w http.ResponseWriter, status int, words string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, words) //nolint:errcheck,gosec // the client has gone; and it is plain text
}

func reply(w http.ResponseWriter, o object) {
	data, err := json.Marshal(o)
	if err != nil {
		say(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(data) //nolint:errcheck // the client has gone
}
