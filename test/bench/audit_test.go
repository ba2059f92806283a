// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// line is one of the audit log; second is when it was answered.
func line(second int, user, verb, resource, name, more string) string {
	group, resource, _ := strings.Cut(resource, ":")
	resource, sub, _ := strings.Cut(resource, "/")
	return fmt.Sprintf(`{"stage":"ResponseComplete","verb":%q,"user":{"username":%q,"extra":{"authentication.kubernetes.io/node-name":["n1"]}},`+
		`"objectRef":{"resource":%q,"namespace":"bench","name":%q,"apiGroup":%q,"subresource":%q},"responseStatus":{"code":200},`+
		`"requestReceivedTimestamp":"2026-01-01T00:00:%02d.000000Z","stageTimestamp":"2026-01-01T00:00:%02d.500000Z"%s}`+"\n",
		verb, user, resource, name, group, sub, second, second, more)
}

// claim is the object of a claim's status as it was stored.
func claim(name, entry string, attached bool) string {
	devices := ""
	if attached {
		devices = fmt.Sprintf(`,"devices":[{"driver":"gpu.cohdi.io","pool":"fabric-0","device":%q,"conditions":[{"type":"gpu.cohdi.io/Attached","status":"True"}]}]`, entry)
	}
	return fmt.Sprintf(`,"responseObject":{"metadata":{"namespace":"bench","name":%q},"status":{"allocation":{"devices":{"results":[`+
		`{"driver":"gpu.cohdi.io","pool":"fabric-0","device":%q}]}}%s}}`, name, entry, devices)
}

const scheduler = "system:kube-scheduler"

// oneAttach is what the log shows of one attach, with what else happens meanwhile.
func oneAttach() string {
	return line(1, scheduler, "create", ":pods", "p", "") +
		line(2, scheduler, "update", "resource.k8s.io:resourceclaims/status", "c", claim("c", "a100-0", false)) +
		line(3, agentUser, "create", "coordination.k8s.io:leases", "device-0-a100-0", "") +
		line(3, agentUser, "update", "coordination.k8s.io:leases", "fabric-0", "") +
		line(4, agentUser, "update", "coordination.k8s.io:leases", "device-0-a100-0", "") +
		line(4, agentUser, "update", "coordination.k8s.io:leases", "device-0-a100-1", "") +
		line(5, agentUser, "create", "events.k8s.io:events", "e", "") +
		line(5, agentUser, "get", "resource.k8s.io:resourceclaims", "c", "") +
		line(5, agentUser, "create", "authorization.k8s.io:selfsubjectaccessreviews", "", "") +
		line(6, agentUser, "patch", "resource.k8s.io:resourceclaims/status", "c", claim("c", "a100-0", true)) +
		line(7, agentUser, "update", "resource.k8s.io:resourceslices", "s", "") +
		line(8, agentUser, "update", "coordination.k8s.io:leases", "device-0-a100-0", "")
}

func readAll(t *testing.T, text string) []call {
	t.Helper()
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	calls, err := (&auditLog{path: path}).read()
	if err != nil {
		t.Fatal(err)
	}
	return calls
}

func TestJourneys(t *testing.T) {
	found, err := journeys(readAll(t, oneAttach()))
	if err != nil {
		t.Fatal(err)
	}
	at := func(second int) time.Time { return time.Date(2026, 1, 1, 0, 0, second, 500_000_000, time.UTC) }
	want := []*journey{{claim: "bench/c", unit: "a100-0", allocated: at(2), attached: at(6), leased: []time.Time{at(3), at(4)}}}
	if diff := cmp.Diff(want, found, cmp.AllowUnexported(journey{})); diff != "" {
		t.Errorf("journeys (-want +got):\n%s", diff)
	}
	if err := complete(found, 1); err != nil {
		t.Error(err)
	}
}

// What contradicts the claims that were made is an error, not a figure.
func TestComplete_refuses(t *testing.T) {
	at := time.Unix(1, 0)
	whole := func(unit string) *journey {
		return &journey{claim: unit, unit: device.Unit(unit), allocated: at, attached: at, leased: []time.Time{at}}
	}
	untold, unleased := whole("a100-0"), whole("a100-0")
	untold.attached, unleased.leased = time.Time{}, nil
	for name, found := range map[string][]*journey{
		"too few":                {whole("a100-0")},
		"two claims on one unit": {whole("a100-0"), whole("a100-0")},
		"never told":             {whole("a100-1"), untold},
		"no lease":               {whole("a100-1"), unleased},
	} {
		if err := complete(found, 2); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestCounts(t *testing.T) {
	refused := strings.Replace(line(9, agentUser, "update", "coordination.k8s.io:leases", "device-0-a100-0", ""), "200", "409", 1)
	calls := readAll(t, oneAttach()+refused+line(9, agentUser, "patch", ":nodes", "n1", "")+line(9, agentUser, "patch", ":nodes/status", "n1", ""))
	writes, failed := countWrites(calls)
	want := map[string]int{
		deviceLease: 5, electionLease: 1, claimCondition: 1, sliceObject: 1, eventObject: 1, nodeLabels: 1, nodeConditions: 1,
	}
	if diff := cmp.Diff(want, writes); diff != "" {
		t.Errorf("writes (-want +got):\n%s", diff)
	}
	if failed != 1 {
		t.Errorf("%d writes were refused, want 1", failed)
	}
	if diff := cmp.Diff(map[string]int{"create": 3, "update": 6, "patch": 3, "get": 1}, countVerbs(calls)); diff != "" {
		t.Errorf("verbs (-want +got):\n%s", diff)
	}
}

// The log is read while it is written: half a line waits for its other half, and nothing is told twice.
func TestAuditLog_grows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	whole := line(1, scheduler, "create", ":pods", "p", "")
	started := strings.Replace(line(2, agentUser, "watch", ":nodes", "", ""), "ResponseComplete", "ResponseStarted", 1)
	ended := line(3, agentUser, "watch", ":nodes", "", "")
	log := &auditLog{path: path}
	for i, step := range []struct {
		text string
		want int
	}{{whole + whole[:20], 1}, {whole + whole, 1}, {whole + whole, 0}, {whole + whole + started + ended, 1}} {
		if err := os.WriteFile(path, []byte(step.text), 0o600); err != nil {
			t.Fatal(err)
		}
		calls, err := log.read()
		if err != nil || len(calls) != step.want {
			t.Errorf("read %d: %d calls, %v; want %d", i, len(calls), err, step.want)
		}
	}
}

func FuzzAuditLine(f *testing.F) {
	for l := range strings.Lines(oneAttach()) {
		f.Add([]byte(l))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var c call
		if json.Unmarshal(data, &c) != nil {
			return
		}
		if c.object() == "" && c.ObjectRef.Resource != "" {
			t.Errorf("no name for %q", data)
		}
		_, _ = journeys([]call{c}) // must not panic
	})
}
