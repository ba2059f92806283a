// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// refusal is why something is not done.
type refusal struct {
	status  int
	key     string
	message string
}

func (r *refusal) Error() string { return fmt.Sprintf("%d %s: %s", r.status, r.key, r.message) }

func refuse(status int, key, format string, args ...any) *refusal {
	return &refusal{status, key, fmt.Sprintf(format, args...)}
}

// id is the message's, with its registry.
func (r *refusal) id() string {
	for _, p := range []string{"ResourceBlock", "IncompatibleZone", "NoResourceMatch", "EmptyManifest", "UnableToProcess"} {
		if strings.HasPrefix(r.key, p) {
			return "Composition.1.1." + r.key
		}
	}
	return "Base.1.18." + r.key
}

func (r *refusal) extended() map[string]any {
	return map[string]any{
		"@odata.type": "#Message.v1_1_2.Message", "MessageId": r.id(), "Message": r.message, "MessageArgs": []string{},
		"MessageSeverity": "Critical", "Severity": "Critical", "Resolution": "None",
	}
}

// body is the refusal in one of the forms.
func (r *refusal) body(form string) map[string]any {
	switch form {
	case "plain":
		return map[string]any{"error": map[string]any{"code": r.id(), "message": r.message}}
	case "message":
		return map[string]any{"message": r.message}
	}
	return map[string]any{"error": map[string]any{
		"code": r.id(), "message": r.message, "@Message.ExtendedInfo": []any{r.extended()},
	}}
}

// answer is what a request comes to.
type answer struct {
	status int
	header map[string]string
	body   any // nothing if nil
}

func (a answer) write(w http.ResponseWriter) {
	var data []byte
	if a.body != nil {
		var err error
		if data, err = json.Marshal(a.body); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json;charset=utf-8")
	}
	w.Header().Set("OData-Version", "4.0")
	w.Header().Set("Cache-Control", "no-cache")
	for k, v := range a.header {
		w.Header().Set(k, v)
	}
	w.WriteHeader(a.status)
	_, _ = w.Write(data) //nolint:errcheck // the client has gone
}

func (f *Face) refusal(r *refusal) answer {
	a := answer{status: r.status, body: r.body(f.policies().Errors)}
	if r.status == http.StatusServiceUnavailable {
		a.header = map[string]string{"Retry-After": "1"}
	}
	return a
}
