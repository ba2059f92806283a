// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// quoted is how many of the service's messages are quoted.
const quoted = 3

// Keys that more than their class depends on.
const (
	keyNoSession  = "NoValidSession"
	keyBlockGone  = "ResourceBlockNotFound"
	keyBlockTaken = "ResourceBlockInUse"
)

// meanings are what the keys of the registries say for the next step, whatever their status. What is not here says no
// more than the status does.
func meanings() map[string]device.FaultClass {
	return map[string]device.FaultClass{
		keyNoSession:                         device.FaultUnauthorized,
		"InsufficientPrivilege":              device.FaultUnauthorized,
		"PasswordChangeRequired":             device.FaultUnauthorized,
		"AccessDenied":                       device.FaultUnauthorized,
		"ResourceAtUriUnauthorized":          device.FaultUnauthorized,
		"SessionLimitExceeded":               device.FaultBusy,
		"ResourceInUse":                      device.FaultBusy,
		"ResourceInStandby":                  device.FaultBusy,
		"ServiceTemporarilyUnavailable":      device.FaultBusy,
		"ServiceInUnknownState":              device.FaultBusy,
		"ServiceShuttingDown":                device.FaultBusy,
		"ResourceMissingAtURI":               device.FaultNotFound,
		"ResourceNotFound":                   device.FaultNotFound,
		keyBlockGone:                         device.FaultNotFound,
		"PreconditionFailed":                 device.FaultConflict,
		"PreconditionRequired":               device.FaultConflict,
		"ETagMismatch":                       device.FaultConflict,
		keyBlockTaken:                        device.FaultConflict,
		"SpecifiedResourceAlreadyReserved":   device.FaultConflict,
		"ConstrainedResourceAlreadyReserved": device.FaultConflict,
		"NoResourceMatch":                    device.FaultNoCapacity,
		"ActionNotSupported":                 device.FaultUnsupported,
		"OperationNotAllowed":                device.FaultUnsupported,
		"QueryNotSupported":                  device.FaultUnsupported,
		"PropertyNotWritable":                device.FaultUnsupported,
		"ResourceBlockInvalid":               device.FaultRejected,
		"IncompatibleZone":                   device.FaultRejected,
		"EmptyManifest":                      device.FaultRejected,
		"UnableToProcessStanzaRequest":       device.FaultRejected,
		"PropertyValueConflict":              device.FaultRejected,
		"PropertyValueNotInList":             device.FaultRejected,
		"PropertyValueTypeError":             device.FaultRejected,
		"PropertyValueFormatError":           device.FaultRejected,
		"PropertyMissing":                    device.FaultRejected,
		"PropertyUnknown":                    device.FaultRejected,
		"MalformedJSON":                      device.FaultRejected,
		"ActionParameterMissing":             device.FaultRejected,
		"ActionParameterUnknown":             device.FaultRejected,
		"ActionParameterValueTypeError":      device.FaultRejected,
	}
}

// message is one of a refusal, a task or an event.
type message struct {
	ID   rest.Text `json:"MessageId"`
	Text rest.Text `json:"Message"`
}

// key is the last part of "Base.1.18.ResourceInUse".
func (m message) key() string { return string(m.ID[strings.LastIndexByte(string(m.ID), '.')+1:]) }

// verdict is what a list of messages comes to.
type verdict struct {
	// class is "" where no key says anything.
	class device.FaultClass
	code  string
	text  string
}

// judge reads messages, the first one that says something for the next step before all others.
func judge(list []message) verdict {
	known := meanings()
	var v verdict
	var words []string
	for _, m := range list {
		if len(words) < quoted && m.Text != "" && !slices.Contains(words, string(m.Text)) {
			words = append(words, string(m.Text))
		}
		class, ok := known[m.key()]
		if ok && v.class == "" {
			v.class, v.code = class, m.key()
		}
		if v.code == "" {
			v.code = m.key()
		}
	}
	v.text = strings.Join(words, " ")
	return v
}

// decodeRefusal finds the words of the service in an answer that is no success, in any of the forms that there are. own is
// false where they are a proxy's, for all that can be told.
func decodeRefusal(body []byte) (v verdict, own bool) {
	var r struct {
		Error struct {
			Code     rest.Text `json:"code"`
			Message  rest.Text `json:"message"`
			Extended messages  `json:"@Message.ExtendedInfo"`
		} `json:"error"`
		// Of small implementations, and annotations of an answer that is half a success.
		Message  rest.Text `json:"message"`
		Extended messages  `json:"@Message.ExtendedInfo"`
	}
	if json.Unmarshal(body, &r) != nil {
		return verdict{text: string(body)}, false
	}
	list := slices.Concat([]message(r.Error.Extended), []message(r.Extended))
	if r.Error.Code != "" || r.Error.Message != "" {
		list = append(list, message{r.Error.Code, r.Error.Message})
	}
	if len(list) == 0 {
		if r.Message != "" {
			return verdict{text: string(r.Message)}, true
		}
		return verdict{text: string(body)}, false
	}
	return judge(list), true
}

// messages may be absent, or of another form.
type messages []message

// UnmarshalJSON never fails: without messages the status has to do.
func (m *messages) UnmarshalJSON(b []byte) error {
	*m = nil
	var list []json.RawMessage
	if json.Unmarshal(b, &list) == nil {
		m.add(list)
	}
	return nil
}

func (m *messages) add(list []json.RawMessage) {
	for _, raw := range list {
		var one message
		if json.Unmarshal(raw, &one) == nil {
			*m = append(*m, one)
		}
	}
}

// refused is the fault for an answer that is no success.
func refused(what string, r rest.Reply, now time.Time) *device.Fault {
	v, _ := decodeRefusal(r.Body)
	fault := &device.Fault{Class: v.class, Op: what, Status: r.Status, Code: r.Tidy(v.code), Message: r.Tidy(v.text)}
	if fault.Class == "" {
		fault.Class = rest.Classify(r.Status)
	}
	if r.Status == http.StatusUnauthorized {
		fault.Class = device.FaultUnauthorized
	}
	if after := retryAfter(r, now); after > 0 && (fault.Class == device.FaultBusy || fault.Class == device.FaultUnknown) {
		fault.Message = r.Tidy(strings.TrimSpace(fault.Message + " (to be asked again after " + after.String() + ")"))
	}
	return fault
}

// retryAfter is how long the service wants to be left alone, 0 where it does not say: seconds, or a date by its own clock.
func retryAfter(r rest.Reply, now time.Time) time.Duration {
	const longest = 24 * time.Hour
	text := strings.TrimSpace(r.Header.Get("Retry-After"))
	if n, err := strconv.ParseUint(text, 10, 32); err == nil {
		return min(time.Duration(n)*time.Second, longest)
	}
	at, err := http.ParseTime(text)
	if err != nil {
		return 0
	}
	if !r.Date.IsZero() {
		now = r.Date
	}
	return max(0, min(at.Sub(now), longest))
}
