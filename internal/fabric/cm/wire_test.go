// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fti"
)

const id device.Machine = "00000000-0000-4000-8000-000000000001"

// gpu is the n-th GPU's identity.
func gpu(n int) string { return fmt.Sprintf("GPU-0d5c7e11-4444-4c00-b300-%012d", n) }

func rowJSON(id, status, reason, detail string) string {
	return fmt.Sprintf(`{"device_id":%q,"status":%q,"status_reason":%q,"detail":%s,"extra":[1]}`, id, status, reason, detail)
}

func detailJSON(res, status string) string {
	return fmt.Sprintf(`{"fabric_id":0,"res_uuid":%q,"res_type":"gpu","res_op_status":%s,"resspecs":[{"model":"A100","removable":true}]}`, res, status)
}

// machineJSON has a CPU and one specification for the model A100, with these rows.
func machineJSON(count, limits string, rows ...string) string {
	const selector = `"selector":{"version":"type_conditions","expression":{"conditions":[{"column":"vendor","operator":"eq","value":"x"},{"column":"model","operator":"eq","value":%q}]}}`
	return `{"data":{"tenant_uuid":"t","cluster":{"cluster_uuid":"c","machine":{"uuid":"` + string(id) + `","name":"n","status":"ADD_COMPLETE","resspecs":[` +
		`{"spec_uuid":"s-cpu","type":"cpu",` + fmt.Sprintf(selector, "A100") + `,"min_resspec_count":null,"max_resspec_count":null,"device_count":1,"devices":[]},` +
		`{"spec_uuid":"s-a","type":"gpu",` + fmt.Sprintf(selector, "A100") + `,` + limits + `,"device_count":` + count + `,"devices":[` + strings.Join(rows, ",") + `]}]}}}}`
}

const free8 = `"min_resspec_count":0,"max_resspec_count":8`

func mustMachine(t *testing.T, body string) *machine {
	t.Helper()
	m, ok, err := decodeMachine([]byte(body), id)
	if err != nil || !ok {
		t.Fatalf("decode %s: %v, %v", body, ok, err)
	}
	return &m
}

func TestGPUs(t *testing.T) {
	healthy := device.OnFabric{ID: gpu(1), Machine: id, Model: "A100", UUID: device.GPUUUID(gpu(1)), Health: device.HealthOK}
	with := func(change func(*device.OnFabric)) []device.OnFabric {
		d := healthy
		change(&d)
		return []device.OnFabric{d}
	}
	ok := detailJSON("r1", `"00"`)
	shared := "the manager gives " + gpu(1) + " to several devices"
	tests := []struct {
		name    string
		rows    []string
		want    []device.OnFabric
		unnamed int
	}{
		{name: "none"},
		{name: "complete", rows: []string{rowJSON(gpu(1), "ADD_COMPLETE", "", ok)}, want: []device.OnFabric{healthy}},
		{name: "a number for a status", rows: []string{rowJSON(gpu(1), "ADD_COMPLETE", "", detailJSON("r1", "0"))}, want: []device.OnFabric{healthy}},
		{
			name: "critical", rows: []string{rowJSON(gpu(1), "ADD_COMPLETE", "", detailJSON("r1", `"20"`))},
			want: with(func(d *device.OnFabric) {
				d.Health, d.HealthText = device.HealthCritical, `the manager's status is "20"`
			}),
		},
		{
			name: "detail nearly empty", rows: []string{rowJSON(gpu(1), "ADD_COMPLETE", "", `{"res_name":"gpu1"}`)},
			want: with(func(d *device.OnFabric) { d.Health, d.HealthText = device.HealthUnknown, `the manager's status is ""` }),
		},
		{
			name: "detail null", rows: []string{rowJSON(gpu(1), "ADD_COMPLETE", "", "null")},
			want: with(func(d *device.OnFabric) { d.Health, d.HealthText = device.HealthUnknown, `the manager's status is ""` }),
		},
		{
			name: "coming, with its id", rows: []string{rowJSON(gpu(1), "ADD_IN_PROGRESS", "", ok)},
			want: with(func(d *device.OnFabric) { d.HealthText = "the manager says ADD_IN_PROGRESS" }),
		},
		{name: "coming, without", rows: []string{rowJSON("", "ADD_IN_PROGRESS", "", ok)}},
		{name: "coming, no word for it", rows: []string{rowJSON("", "", "", "{}")}},
		{
			name: "leaving", rows: []string{rowJSON(gpu(1), "REMOVE_IN_PROGRESS", "", ok)},
			want: with(func(d *device.OnFabric) { d.HealthText = "the manager says REMOVE_IN_PROGRESS" }),
		},
		{
			name: "failed to come", rows: []string{rowJSON(gpu(1), "ADD_FAILED", "timed out", ok)},
			want: with(func(d *device.OnFabric) {
				d.Health, d.HealthText = device.HealthCritical, "the manager says ADD_FAILED: timed out"
			}),
		},
		{
			name: "failed to come, no id", rows: []string{rowJSON("", "ADD_FAILED", "timed out", ok)},
			want: with(func(d *device.OnFabric) {
				d.ID, d.UUID, d.Health, d.HealthText = "r1", "", device.HealthCritical, "the manager says ADD_FAILED: timed out"
			}),
		},
		{name: "failed to come, nothing there", rows: []string{rowJSON("", "ADD_FAILED", "none free", "{}")}},
		{
			name: "failed to leave", rows: []string{rowJSON(gpu(1), "REMOVE_FAILED", "busy", ok)},
			want: with(func(d *device.OnFabric) { d.HealthText = "the manager says REMOVE_FAILED: busy" }),
		},
		{name: "complete without any name", rows: []string{rowJSON("", "ADD_COMPLETE", "", "{}")}, unnamed: 1},
		{
			name: "an id that is no UUID", rows: []string{rowJSON("board-7", "ADD_COMPLETE", "", ok)},
			want: with(func(d *device.OnFabric) { d.ID, d.UUID, d.Serial = "board-7", "", "board-7" }),
		},
		{name: "listed twice", rows: []string{rowJSON(gpu(1), "ADD_COMPLETE", "", ok), rowJSON(gpu(1), "ADD_COMPLETE", "", ok)}, want: []device.OnFabric{healthy}},
		{
			name: "two with one id",
			rows: []string{rowJSON(gpu(1), "ADD_COMPLETE", "", ok), rowJSON(gpu(1), "ADD_COMPLETE", "", detailJSON("r2", `"00"`))},
			want: []device.OnFabric{
				{ID: gpu(1), Machine: id, Model: "A100", Health: device.HealthOK, HealthText: shared},
				{ID: "r2", Machine: id, Model: "A100", Health: device.HealthOK, HealthText: shared},
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, unnamed := mustMachine(t, machineJSON("1", free8, tt.rows...)).gpus(id)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("GPUs (-want +got):\n%s", diff)
			}
			if unnamed != tt.unnamed {
				t.Errorf("unnamed = %d, want %d", unnamed, tt.unnamed)
			}
		})
	}
}

func TestDecodeMachine(t *testing.T) {
	tests := []struct {
		name, body string
		ok, err    bool
	}{
		{name: "asked for", body: machineJSON("0", free8), ok: true},
		{name: "another", body: strings.ReplaceAll(machineJSON("0", free8), string(id), "00000000-0000-4000-8000-000000000002")},
		{name: "without its uuid", body: strings.ReplaceAll(machineJSON("0", free8), string(id), ""), ok: true},
		{name: "empty machine", body: `{"data":{"cluster":{"machine":{}}}}`},
		{name: "no machine", body: `{"data":{"cluster":{}}}`, err: true},
		{name: "no cluster", body: `{"data":{}}`, err: true},
		{name: "no data", body: `{"status":"success"}`, err: true},
		{name: "HTML", body: `<html>`, err: true},
		{name: "devices in words", body: machineJSON("0", free8, `"x"`), err: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, ok, err := decodeMachine([]byte(tt.body), id); ok != tt.ok || (err != nil) != tt.err {
				t.Errorf("decode = %v, %v", ok, err)
			}
		})
	}
}

func TestLimit(t *testing.T) {
	for _, tt := range []struct {
		limits string
		want   fabric.Limit
	}{
		{free8, fabric.Limit{Max: 8}},
		{`"min_resspec_count":2,"max_resspec_count":"4"`, fabric.Limit{Min: 2, Max: 4}},
		{`"min_resspec_count":null,"max_resspec_count":null`, fabric.Limit{Max: fabric.NoLimit}},
		{`"x":1`, fabric.Limit{Max: fabric.NoLimit}},
		{`"min_resspec_count":-1,"max_resspec_count":0`, fabric.Limit{}},
		{`"min_resspec_count":"few","max_resspec_count":1.5`, fabric.Limit{Max: fabric.NoLimit}},
	} {
		s, ok := mustMachine(t, machineJSON("0", tt.limits)).spec("A100")
		if !ok || s.limit() != tt.want {
			t.Errorf("limit of %s = %+v, want %+v", tt.limits, s.limit(), tt.want)
		}
	}
}

// TestTotals: what is asked for, from what the manager shows.
func TestTotals(t *testing.T) {
	row := func(n int, status string) string {
		return rowJSON(gpu(n), status, "", detailJSON(fmt.Sprintf("r%d", n), `"00"`))
	}
	blank := rowJSON("", "ADD_FAILED", "none free", "{}")
	coming := rowJSON("", "ADD_IN_PROGRESS", "", "{}")
	tests := []struct {
		name   string
		count  int
		rows   []string
		more   int
		joined bool
		// fewer is the total when the device that is named is gone, "" for none.
		detach int
		fewer  int
	}{
		{name: "nothing", count: 0, more: 1},
		{name: "one", count: 1, rows: []string{row(1, "ADD_COMPLETE")}, more: 2, detach: 1, fewer: 0},
		{name: "two", count: 2, rows: []string{row(1, "ADD_COMPLETE"), row(2, "ADD_COMPLETE")}, more: 3, detach: 2, fewer: 1},
		{name: "one coming, counted", count: 2, rows: []string{row(1, "ADD_COMPLETE"), coming}, more: 2, joined: true},
		{name: "one coming, not counted", count: 1, rows: []string{row(1, "ADD_COMPLETE"), coming}, more: 2, joined: true},
		{name: "one coming, another word", count: 1, rows: []string{row(1, "ADD_COMPLETE"), rowJSON("", "PREPARING", "", "{}")}, more: 2, joined: true},
		{name: "one coming, only counted", count: 2, rows: []string{row(1, "ADD_COMPLETE")}, more: 2, joined: true},
		{name: "one coming, nowhere to be seen", count: 1, rows: []string{row(1, "ADD_COMPLETE")}, more: 2},
		{name: "one failed to come, counted", count: 2, rows: []string{row(1, "ADD_COMPLETE"), row(2, "ADD_FAILED")}, more: 3, detach: 2, fewer: 1},
		{name: "one failed to come, the other goes", count: 2, rows: []string{row(1, "ADD_COMPLETE"), row(2, "ADD_FAILED")}, more: 3, detach: 1, fewer: 1},
		{name: "one failed to come, not counted", count: 1, rows: []string{row(1, "ADD_COMPLETE"), row(2, "ADD_FAILED")}, more: 2, detach: 2, fewer: 1},
		{name: "none was free", count: 2, rows: []string{row(1, "ADD_COMPLETE"), blank}, more: 3, detach: 1, fewer: 1},
		{name: "one failed to leave", count: 2, rows: []string{row(1, "ADD_COMPLETE"), row(2, "REMOVE_FAILED")}, more: 3, detach: 2, fewer: 1},
		{name: "one failed to leave, counted as gone", count: 1, rows: []string{row(1, "ADD_COMPLETE"), row(2, "REMOVE_FAILED")}, more: 3, detach: 2, fewer: 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := mustMachine(t, machineJSON(fmt.Sprint(tt.count), free8, tt.rows...))
			rows := m.rows()
			s, _ := m.spec("A100")
			tally := s.tally(rows, names(rows))
			if more, joined := tally.more(tt.count); more != tt.more || joined != tt.joined {
				t.Errorf("one more = %d, joined %v; want %d, %v", more, joined, tt.more, tt.joined)
			}
			if tt.detach == 0 {
				return
			}
			if d := find(rows, gpu(tt.detach)); d == nil || tally.fewer(tt.count, d.row) != tt.fewer {
				t.Errorf("one fewer = %d, want %d", tally.fewer(tt.count, d.row), tt.fewer)
			}
		})
	}
}

// TestProgress: what a read of the machine says of an operation.
func TestProgress(t *testing.T) {
	old := rowJSON(gpu(1), "ADD_COMPLETE", "", detailJSON("r1", `"00"`))
	fresh := func(status string) string { return rowJSON(gpu(2), status, "because", detailJSON("r2", `"00"`)) }
	blank := rowJSON("", "ADD_FAILED", "none free", "{}")
	tests := []struct {
		name   string
		kind   fabric.OperationKind
		goal   goal
		rows   []string
		want   fabric.OperationState
		class  device.FaultClass
		device string
	}{
		{name: "nothing yet", kind: fabric.KindAttach, rows: []string{old}, want: fabric.Pending},
		{name: "coming", kind: fabric.KindAttach, rows: []string{old, rowJSON("", "ADD_IN_PROGRESS", "", "{}")}, want: fabric.Pending},
		{name: "coming, with its id", kind: fabric.KindAttach, rows: []string{old, fresh("ADD_IN_PROGRESS")}, want: fabric.Pending},
		{name: "there", kind: fabric.KindAttach, rows: []string{old, fresh("ADD_COMPLETE")}, want: fabric.Done, device: gpu(2)},
		{name: "there, without a name", kind: fabric.KindAttach, rows: []string{old, rowJSON("", "ADD_COMPLETE", "", "{}")}, want: fabric.Done},
		{name: "there, the old one is leaving", kind: fabric.KindAttach, rows: []string{rowJSON(gpu(1), "REMOVE_IN_PROGRESS", "", "{}"), fresh("ADD_COMPLETE")}, want: fabric.Done, device: gpu(2)},
		{name: "failed", kind: fabric.KindAttach, rows: []string{old, fresh("ADD_FAILED")}, want: fabric.Failed, class: device.FaultUnknown, device: gpu(2)},
		{name: "failed, nothing there", kind: fabric.KindAttach, rows: []string{old, blank}, want: fabric.Failed, class: device.FaultUnknown},
		{name: "only what had failed before", kind: fabric.KindAttach, goal: goal{blank: 1}, rows: []string{old, blank}, want: fabric.Pending},
		{name: "refuses to leave is not fresh", kind: fabric.KindAttach, rows: []string{rowJSON(gpu(1), "REMOVE_FAILED", "", "{}")}, want: fabric.Pending},
		{name: "still there", kind: fabric.KindDetach, rows: []string{old, fresh("ADD_COMPLETE")}, want: fabric.Pending},
		{name: "leaving", kind: fabric.KindDetach, rows: []string{old, fresh("REMOVE_IN_PROGRESS")}, want: fabric.Pending},
		{name: "leaving, its id is gone already", kind: fabric.KindDetach, goal: goal{uuid: "r2"}, rows: []string{rowJSON("", "REMOVE_IN_PROGRESS", "", detailJSON("r2", `"00"`))}, want: fabric.Pending},
		{name: "gone", kind: fabric.KindDetach, rows: []string{old}, want: fabric.Done},
		{name: "refuses", kind: fabric.KindDetach, rows: []string{old, fresh("REMOVE_FAILED")}, want: fabric.Failed, class: device.FaultBusy},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := mustMachine(t, machineJSON("2", free8, tt.rows...))
			op := fabric.Operation{Kind: tt.kind, State: fabric.Pending, Intent: fabric.Intent{Machine: id, Model: "A100"}}
			tt.goal.total = 2
			if tt.kind == fabric.KindAttach {
				op.Intent.Before = []string{gpu(1)}
				s, _ := m.spec("A100")
				tally := s.tally(m.rows(), op.Intent.Before)
				op = tally.attached(op, tt.goal)
			} else {
				op.Intent.Device = gpu(2)
				op = detached(op, tt.goal, m.rows())
			}
			if op.State != tt.want || (op.Fault != nil) != (tt.class != "") || op.Fault != nil && op.Fault.Class != tt.class {
				t.Errorf("operation is %s, %v; want %s %s", op.State, op.Fault, tt.want, tt.class)
			}
			var devices []string
			for _, d := range op.Devices {
				devices = append(devices, d.ID)
			}
			if tt.device != "" && !slices.Equal(devices, []string{tt.device}) || tt.device == "" && len(devices) > 0 {
				t.Errorf("devices %v, want %q", devices, tt.device)
			}
		})
	}
}

// TestOverdue: what shows nowhere is waited for as long as a call may take, and what is seen to be under way for ever.
func TestOverdue(t *testing.T) {
	const most = 3 * time.Minute
	begun := time.Unix(1e9, 0)
	for _, tt := range []struct {
		name  string
		state fabric.OperationState
		shows bool
		since int64
		after time.Duration
		want  fabric.OperationState
	}{
		{"in time", fabric.Pending, false, begun.Unix(), most - time.Second, fabric.Pending},
		{"over", fabric.Pending, false, begun.Unix(), most, fabric.Failed},
		{"over, and it shows", fabric.Pending, true, begun.Unix(), time.Hour, fabric.Pending},
		{"over, and done", fabric.Done, false, begun.Unix(), time.Hour, fabric.Done},
		{"since when is not known", fabric.Pending, false, 0, time.Hour, fabric.Pending},
	} {
		op := goal{since: tt.since}.overdue(fabric.Operation{State: tt.state}, tt.shows, begun.Add(tt.after), most)
		if op.State != tt.want || (op.Fault != nil) != (tt.want == fabric.Failed) || op.Fault != nil && op.Fault.Definite() {
			t.Errorf("%s: %+v, want it %s", tt.name, op, tt.want)
		}
	}
}

func TestGroups(t *testing.T) {
	groups, err := decodeGroups([]byte(`{"nodegroups":[{"uuid":"g1","name":"a"},{"name":"b"}]}`))
	if err != nil || !slices.Equal(groups, []string{"g1"}) {
		t.Errorf("groups = %v, %v", groups, err)
	}
	members, err := decodeGroup([]byte(`{"uuid":"g1","name":"a","mach_ids":["m1","m2"]}`))
	if err != nil || !slices.Equal(members, []string{"m1", "m2"}) {
		t.Errorf("members = %v, %v", members, err)
	}
	for _, body := range []string{`{}`, `<html>`, `{"nodegroups":1}`} {
		if _, err := decodeGroups([]byte(body)); err == nil {
			t.Errorf("groups of %s", body)
		}
		if _, err := decodeGroup([]byte(body)); err == nil && body != `{"nodegroups":1}` {
			t.Errorf("group of %s", body)
		}
	}
}

func FuzzDecodeMachine(f *testing.F) {
	ok := detailJSON("r1", `"00"`)
	f.Add([]byte(machineJSON("0", free8)), gpu(1))
	f.Add([]byte(machineJSON("2", `"min_resspec_count":null,"max_resspec_count":null`, rowJSON(gpu(1), "ADD_COMPLETE", "", ok), rowJSON("", "ADD_IN_PROGRESS", "", "{}"))), "")
	f.Add([]byte(machineJSON("2", free8, rowJSON(gpu(1), "ADD_FAILED", "x", ok), rowJSON(gpu(1), "REMOVE_FAILED", "y", `{"res_name":"gpu1"}`))), gpu(1))
	f.Add([]byte(machineJSON(`"1"`, free8, rowJSON("r1", "ADD_COMPLETE", "", ok), rowJSON("", "ADD_COMPLETE", "", ok))), "r1")
	f.Fuzz(func(t *testing.T, body []byte, before string) {
		m, _, err := decodeMachine(body, id)
		if err != nil {
			return
		}
		gpus, unnamed := m.gpus(id)
		seen := map[string]bool{}
		for _, g := range gpus {
			if g.ID == "" || seen[g.ID] || g.Machine != id || len(g.HealthText) > 2*fti.LongestText {
				t.Errorf("listed %+v of %q", g, body)
			}
			seen[g.ID] = true
		}
		rows := m.rows()
		if len(gpus)+unnamed > len(rows) {
			t.Errorf("%d listed and %d unnamed of %d", len(gpus), unnamed, len(rows))
		}
		for i := range m.Specs {
			s := &m.Specs[i]
			count, err := s.count()
			if err != nil {
				continue
			}
			tally := s.tally(rows, []string{before})
			if more, _ := tally.more(count); more < 1 {
				t.Errorf("one more is %d of %q", more, body)
			}
			if l := s.limit(); l.Min < 0 || l.Max < 0 {
				t.Errorf("limit %+v of %q", l, body)
			}
			for j := range rows {
				if n := tally.fewer(count, rows[j].row); n < 0 {
					t.Errorf("one fewer is %d of %q", n, body)
				}
			}
			op := tally.attached(fabric.Operation{}, goal{total: 1})
			if (op.State == fabric.Failed) != (op.Fault != nil) {
				t.Errorf("operation %+v of %q", op, body)
			}
		}
	})
}

func FuzzParseGoal(f *testing.F) {
	f.Add(goal{spec: "s & t", total: 3, blank: 1, since: 1e9, uuid: "r1"}.handle())
	f.Add("spec=x&total=1")
	f.Add("total=%zz")
	f.Fuzz(func(t *testing.T, handle string) {
		g, err := parseGoal(handle)
		if err != nil {
			return
		}
		if again, err := parseGoal(g.handle()); err != nil || again != g {
			t.Errorf("%+v is read back as %+v, %v", g, again, err)
		}
	})
}

func FuzzDecodeGroups(f *testing.F) {
	f.Add([]byte(`{"nodegroups":[{"uuid":"g1","name":"a"}]}`))
	f.Add([]byte(`{"uuid":"g1","mach_ids":["m1",2,null]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		groups, err := decodeGroups(body)
		if err == nil && slices.Contains(groups, "") {
			t.Errorf("a group without a name of %q", body)
		}
		if members, err := decodeGroup(body); err != nil && members != nil {
			t.Errorf("members %v beside %v", members, err)
		}
	})
}
