// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func newMetrics() *Metrics {
	m := New(Build{Version: "v1", Revision: "abc", GoVersion: "go1.26"}, []string{"Ready", "Hung"})
	m.Configure([]device.FabricID{"f1"}, []device.Model{"a100"})
	return m
}

// scrape returns the series of ours whose names begin with one of prefixes, as text.
func scrape(t *testing.T, m *Metrics, prefixes ...string) []string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("scrape: %d %s", w.Code, w.Body)
	}
	var lines []string
	for line := range strings.Lines(w.Body.String()) {
		for _, p := range prefixes {
			if strings.HasPrefix(line, "cohdi_agent_"+p) {
				lines = append(lines, strings.TrimPrefix(strings.TrimSpace(line), "cohdi_agent_"))
			}
		}
	}
	return lines
}

func TestSeriesExistFromTheStart(t *testing.T) {
	m := newMetrics()
	want := []string{
		`units{fabric="f1",model="a100",phase="Assigned"} 0`,
		`units{fabric="f1",model="a100",phase="Attached"} 0`,
		`units{fabric="f1",model="a100",phase="Attaching"} 0`,
		`units{fabric="f1",model="a100",phase="Failed"} 0`,
		`units{fabric="f1",model="a100",phase="Idle"} 0`,
		`units{fabric="f1",model="a100",phase="Releasing"} 0`,
	}
	if diff := cmp.Diff(want, scrape(t, m, "units")); diff != "" {
		t.Errorf("units (-want +got):\n%s", diff)
	}
	for prefix, n := range map[string]int{
		"fabric_requests_total":          (len(Operations()) + 1) * (len(device.FaultClasses()) + 1),
		"attach_duration_seconds_count":  len(AttachStages()),
		"detach_duration_seconds_count":  len(DetachStages()),
		"prepare_duration_seconds_count": 2,
		"errors_total":                   len(Reasons()),
		"leader":                         1,
		"driver_state":                   2,
		"claims_prepared":                1,
		"build_info":                     1,
		"fabric_free_units":              0,
	} {
		if got := scrape(t, m, prefix+"{", prefix+" "); len(got) != n {
			t.Errorf("%s: %d series, want %d: %v", prefix, len(got), n, got)
		}
	}
}

func TestRequested(t *testing.T) {
	m := newMetrics()
	m.Requested("f1", "Attach", 90*time.Second, nil)
	m.Requested("f1", "Attach", time.Second, &device.Fault{Class: device.FaultBusy})
	m.Requested("f1", "Attach", time.Second, &device.Fault{Class: "brand new"})
	m.Requested("somebody's", "made up", time.Second, nil)
	var got []string
	for _, line := range scrape(t, m, "fabric_requests_total") {
		if !strings.HasSuffix(line, " 0") {
			got = append(got, line)
		}
	}
	want := []string{
		`fabric_requests_total{code="Busy",fabric="f1",operation="Attach"} 1`,
		`fabric_requests_total{code="OK",fabric="Other",operation="Other"} 1`,
		`fabric_requests_total{code="OK",fabric="f1",operation="Attach"} 1`,
		`fabric_requests_total{code="Other",fabric="f1",operation="Attach"} 1`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
	if got := scrape(t, m, `fabric_request_duration_seconds_bucket{fabric="f1",operation="Attach",le="60"}`, `fabric_request_duration_seconds_bucket{fabric="f1",operation="Attach",le="120"}`); len(got) != 2 ||
		!strings.HasSuffix(got[0], " 2") || !strings.HasSuffix(got[1], " 3") {
		t.Errorf("duration buckets: %v", got)
	}
}

func TestUnits(t *testing.T) {
	m := newMetrics()
	m.SetUnits([]device.Lease{
		{Fabric: "f1", Model: "a100", Phase: device.Attached},
		{Fabric: "f1", Model: "a100", Phase: device.Attached},
		{Fabric: "f1", Model: "a100", Phase: device.Attached, IdleSince: time.Unix(1000, 0)},
		{Fabric: "f1", Model: "gone", Phase: "Levitating"},
	})
	got := strings.Join(scrape(t, m, "units"), "\n")
	for _, want := range []string{
		`units{fabric="f1",model="a100",phase="Attached"} 2`, `units{fabric="f1",model="a100",phase="Idle"} 1`, `units{fabric="f1",model="Other",phase="Other"} 1`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
	m.SetUnits(nil)
	got = strings.Join(scrape(t, m, "units"), "\n")
	if strings.Contains(got, Other) || !strings.Contains(got, `units{fabric="f1",model="a100",phase="Attached"} 0`) {
		t.Errorf("after all have gone:\n%s", got)
	}
}

func TestLeaderAndFree(t *testing.T) {
	m := newMetrics()
	m.SetLeader("f1", true)
	m.SetFree("f1", map[device.Model]int{"a100": 3})
	m.SetForeign("f1", 2)
	m.SetLacking("f1", map[device.Model]int{"a100": 1, "gone": 7})
	all := []string{"fabric_foreign_devices", "fabric_free_units", "fabric_lacking_units", "leader"}
	want := []string{`fabric_foreign_devices{fabric="f1"} 2`, `fabric_free_units{fabric="f1",model="a100"} 3`, `fabric_lacking_units{fabric="f1",model="a100"} 1`, `leader{fabric="f1"} 1`}
	if diff := cmp.Diff(want, scrape(t, m, all...)); diff != "" {
		t.Errorf("leading (-want +got):\n%s", diff)
	}
	m.SetLacking("f1", nil)
	if diff := cmp.Diff([]string{`fabric_lacking_units{fabric="f1",model="a100"} 0`}, scrape(t, m, "fabric_lacking_units")); diff != "" {
		t.Errorf("nothing is lacking (-want +got):\n%s", diff)
	}
	m.SetLeader("f1", false)
	if diff := cmp.Diff([]string{`leader{fabric="f1"} 0`}, scrape(t, m, all...)); diff != "" {
		t.Errorf("no longer (-want +got):\n%s", diff)
	}
}

func TestGPUs(t *testing.T) {
	m := newMetrics()
	m.SetGPUs(map[string]int{"built-in": 2, "foreign": 0})
	want := []string{`gpus{owner="built-in"} 2`, `gpus{owner="foreign"} 0`}
	if diff := cmp.Diff(want, scrape(t, m, "gpus")); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestConfigureForgets(t *testing.T) {
	m := newMetrics()
	m.Attached("f1", StageTotal, time.Second)
	m.Configure([]device.FabricID{"f2"}, []device.Model{"h100"})
	for _, line := range scrape(t, m, "") {
		if strings.Contains(line, `"f1"`) || strings.Contains(line, `"a100"`) {
			t.Errorf("left over: %s", line)
		}
	}
	if got := scrape(t, m, `units{fabric="f2",model="h100"`); len(got) != len(device.Phases())+1 {
		t.Errorf("new series: %v", got)
	}
}

func TestOthers(t *testing.T) {
	m := newMetrics()
	m.Attached("f1", "no such stage", time.Second)
	m.Detached("f1", StageDrain, time.Second)
	m.Prepared(time.Second)
	m.Unprepared(time.Second)
	m.SetPrepared(4)
	m.Failed("Lease")
	m.Failed("no such reason")
	m.SetDriver([]string{"Ready", "Hung"}, "Hung")
	m.SetConflict(true)
	m.SetHotplugEvents(true)
	m.SetHotplugEvents(false)
	got := strings.Join(scrape(t, m, ""), "\n") + "\n"
	for _, want := range []string{
		`attach_duration_seconds_count{fabric="f1",stage="Other"} 1`,
		`detach_duration_seconds_count{fabric="f1",stage="drain"} 1`,
		`prepare_duration_seconds_count{operation="prepare"} 1`,
		`prepare_duration_seconds_count{operation="unprepare"} 1`,
		`claims_prepared 4`,
		`errors_total{reason="Lease"} 1`,
		`errors_total{reason="Other"} 1`,
		`driver_state{state="Hung"} 1`,
		`driver_state{state="Ready"} 0`,
		`gpu_conflict 1`,
		`hotplug_events 0`,
		`build_info{goversion="go1.26",revision="abc",version="v1"} 1`,
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
}
