// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/cdim"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/control"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/redfish"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// desk is a chassis with a CDIM, a Redfish service and the control API.
type desk struct {
	*facetest.Chassis
	address string
	cdim    *cdim.Face
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	d := &desk{Chassis: facetest.New(t, facetest.Pool, facetest.Options{})}
	var err error
	if d.cdim, err = cdim.New(t.Context(), cdim.Options{Core: d.Core, Faults: d.Faults, Clock: clock.RealClock{}, Dialect: "oss"}); err != nil {
		t.Fatal(err)
	}
	rf := redfish.New(t.Context(), redfish.Options{Core: d.Core, Config: d.Config, Faults: d.Faults, Clock: clock.RealClock{}})
	t.Cleanup(func() {
		d.cdim.Stop()
		d.Core.Close()
		d.cdim.Close()
		rf.Close()
	})
	api := &control.API{
		Core: d.Core, Faults: d.Faults, Tokens: d.Tokens, Ready: func() bool { return true }, HostRoot: func(m string) string { return "/roots/" + m },
		Jobs: d.cdim, Sessions: rf,
	}
	server := httptest.NewServer(api.Handler())
	t.Cleanup(server.Close)
	d.address = strings.TrimPrefix(server.URL, "http://")
	return d
}

func (d *desk) ctl(args ...string) (string, error) {
	var out bytes.Buffer
	err := ctl(d.T.Context(), append([]string{"--control", d.address}, args...), &out)
	return out.String(), err
}

// job posts a job to the CDIM that never ends, and returns its name.
func (d *desk) job() string {
	d.T.Helper()
	body := strings.NewReader(`{"procedures":[{"operationID":1,"operation":"boot","targetDeviceID":"x","dependencies":[9]}]}`)
	w := httptest.NewRecorder()
	d.cdim.Handler().ServeHTTP(w, httptest.NewRequestWithContext(d.T.Context(), "POST", "/cdim/api/v1/layout-apply", body))
	jobs := d.cdim.Jobs()
	if w.Code != 202 || len(jobs) == 0 {
		d.T.Fatalf("post a job: %d %s", w.Code, w.Body)
	}
	return jobs[len(jobs)-1].ID
}

// TestCtl does all commands one after the other on one chassis.
func TestCtl(t *testing.T) {
	d := newDesk(t)
	job := d.job()
	// The node still sees what the agent gives back: the judge minds.
	_, err := d.Core.Attach(t.Context(), core.AttachRequest{Machine: "n1", Specs: []core.Spec{{Device: "b-0", Count: 1}}, Limit: -1})
	if err != nil {
		t.Fatal(err)
	}
	if err = d.Core.Detach(t.Context(), core.DetachRequest{Machine: "n1", Device: "b-0"}); err != nil {
		t.Fatal(err)
	}
	device := func(t *testing.T, id string) simapi.Device {
		t.Helper()
		one, ok := d.Core.State().Device(id)
		if !ok {
			t.Fatalf("there is no device %s", id)
		}
		return one
	}
	done := map[string]bool{}
	for _, step := range []struct {
		args string
		// says are parts of the output.
		says []string
		// holds is what is so after it.
		holds func(t *testing.T, s *simapi.State) bool
	}{
		{"ready", nil, nil},
		{"status", []string{"DEVICE", "a-0", "free", "1 violations"}, nil},
		{"timing --attach 10ms --detach 5ms", nil, func(_ *testing.T, s *simapi.State) bool {
			return time.Duration(*s.Timing.AttachDelay) == 10*time.Millisecond && time.Duration(*s.Timing.DetachDelay) == 5*time.Millisecond
		}},
		{"timing", []string{"attach", "10ms", "stale"}, nil},
		{"attach a-0 n1", nil, func(t *testing.T, _ *simapi.State) bool { t.Helper(); return device(t, "a-0").Machine == "n1" }},
		{"machines", []string{"n1", "1/8", "on", "/roots/n1"}, nil},
		{"operations --last 1", []string{"attach", "n1", "a-0", "control"}, nil},
		{"detach a-0", nil, func(t *testing.T, _ *simapi.State) bool {
			t.Helper()
			return device(t, "a-0").Phase == simapi.PhaseFree
		}},
		{"device a-0 --health Critical --serial S1", nil, func(t *testing.T, _ *simapi.State) bool {
			t.Helper()
			return device(t, "a-0").OpStatus == "20" && device(t, "a-0").FabricSerial == "S1"
		}},
		{"device a-1 steal --tenant them", nil, func(t *testing.T, _ *simapi.State) bool { t.Helper(); return device(t, "a-1").Tenant == "them" }},
		{"status", []string{"free, of them", "20"}, nil},
		{"device a-1 free", nil, func(t *testing.T, _ *simapi.State) bool { t.Helper(); return device(t, "a-1").Tenant == "" }},
		{"machine n2 --power off --driver off --hotplug rescan", nil, func(_ *testing.T, s *simapi.State) bool {
			m := s.Machines[1]
			return !m.Power && !m.DriverLoaded && m.Hotplug == simapi.HotplugRescan
		}},
		{"policies pick=worst cm.count=atComplete", nil, func(_ *testing.T, s *simapi.State) bool {
			return s.Policies.Pick == "worst" && s.Policies.CM.Count == "atComplete"
		}},
		{"policies", []string{"cm.count", "atComplete", "atAccept, atComplete"}, nil},
		{"fault status --name f --face hw --status 503 --header Retry-After=3 --count 2 --delay 1s", []string{"f\n"}, func(*testing.T, *simapi.State) bool {
			r := d.Faults.Rules()
			return len(r) == 1 && r[0].Status == 503 && r[0].Headers["Retry-After"] == "3" && time.Duration(r[0].Delay) == time.Second
		}},
		{"faults", []string{"f", "status", "hw", "0/2"}, nil},
		{"faults --clear --name f", nil, func(*testing.T, *simapi.State) bool { return len(d.Faults.Rules()) == 0 }},
		{"token --revoke --lifetime 1s", nil, nil},
		{"jobs", []string{job, "IN_PROGRESS"}, nil},
		{"lose-worker", nil, func(*testing.T, *simapi.State) bool { return d.cdim.Jobs()[0].Lost }},
		{"jobs", []string{"lost"}, nil},
		{"forget-tasks", nil, nil},
		{"log", []string{"TIME"}, nil},
		{"log --json --face fm --path x", []string{"[]"}, nil},
		{"violations", []string{"presentAtDetach"}, nil},
		{"violations --clear", nil, func(_ *testing.T, s *simapi.State) bool { return s.Violations == 0 }},
		{"state", []string{`"phase": "free"`}, nil},
		{"raw get violations", []string{"[]"}, nil},
	} {
		out, err := d.ctl(strings.Fields(step.args)...)
		if err != nil {
			t.Errorf("%s: %v", step.args, err)
		}
		for _, part := range step.says {
			if !strings.Contains(out, part) {
				t.Errorf("%s says %q, want %q in it", step.args, out, part)
			}
		}
		if step.holds != nil && !step.holds(t, d.Core.State()) {
			t.Errorf("%s: it is not so: %+v", step.args, d.Core.State())
		}
		done[strings.Fields(step.args)[0]] = true
	}
	// What nobody works on is ended by force, which the manager calls a conflict.
	if _, err := d.ctl("job", job, "cancel"); err == nil || errors.Is(err, errUsage) || d.cdim.Jobs()[0].Status != "FAILED" {
		t.Errorf("cancel: %v, %+v", err, d.cdim.Jobs())
	}
	next := d.job()
	if _, err := d.ctl("job", next, "cancel", "--rollback"); err != nil {
		t.Errorf("cancel: %v", err)
	}
	done["job"] = true
	for _, g := range groups() {
		for _, v := range g.commands {
			if !done[v.name] {
				t.Errorf("command %s was not tried", v.name)
			}
		}
	}
}

// TestCtl_refuses: an error is one line; usage errors are told from others.
func TestCtl_refuses(t *testing.T) {
	d := newDesk(t)
	for _, tt := range []struct {
		args  string
		usage bool
		says  string
	}{
		{"", true, "no command"},
		{"dance", true, `"dance" is no command`},
		{"--contrl x status", true, "contrl"},
		{"status now", true, "want cohdi-sim ctl status"},
		{"attach a-0", true, "want cohdi-sim ctl attach DEVICE MACHINE"},
		{"device a-0", true, "no change"},
		{"device a-0 --health Good", true, "OK, Warning"},
		{"device a-0 dance", true, "dance"},
		{"device z --health OK", false, `device "z": not found`},
		{"machine n1", true, "no change"},
		{"machine n1 --power maybe", true, "neither on nor off"},
		{"machine n1 --hotplug magic", true, "magic"},
		{"fault explode", true, "dropBefore"},
		{"fault status", true, "status 0"},
		{"fault hang --face nobody", true, "nobody"},
		{"fault slow --delay -1s", true, "negative"},
		{"faults --name f", true, "--clear"},
		{"log --path (", true, "--path"},
		{"policies pick", true, "NAME=VALUE"},
		{"policies pick=best", true, "first, random, worst"},
		{"policies pck=first", true, "no such policy"},
		{"timing --attach soon", true, "soon"},
		{"token", true, "--revoke"},
		{"job 0123456789 resume", false, "not found"},
		{"job 0123456789 dance", true, "dance"},
		{"lose-worker", false, "not found"},
		{"raw PUT /state", true, "PUT"},
		{"raw GET /nothing", false, "404"},
		{"raw POST /timing {\"atachDelay\":\"1s\"}", true, "atachDelay"},
		{"--control 127.0.0.1:1 status", false, "127.0.0.1:1"},
	} {
		_, err := d.ctl(strings.Fields(tt.args)...)
		if err == nil || errors.Is(err, errUsage) != tt.usage || !strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one line about %q, of usage %t", tt.args, err, tt.says, tt.usage)
		}
	}
}

func TestCtl_help(t *testing.T) {
	d := newDesk(t)
	for _, args := range [][]string{{"--help"}, {"help"}} {
		out, err := d.ctl(args...)
		if err != nil && !errors.Is(err, pflag.ErrHelp) {
			t.Error(err)
		}
		for _, g := range groups() {
			for _, v := range g.commands {
				if !strings.Contains(out, "  "+v.form()) || !strings.Contains(out, v.what) {
					t.Errorf("%s: nothing about %s", args, v.name)
				}
			}
		}
	}
	out, err := d.ctl("fault", "--help")
	if !errors.Is(err, pflag.ErrHelp) || !strings.Contains(out, "cohdi-sim ctl fault ACTION") || !strings.Contains(out, "--content-type") || !strings.Contains(out, "--control") {
		t.Errorf("help of a command: %v, %q", err, out)
	}
}

// TestCtl_examples: what the help shows is understood.
func TestCtl_examples(t *testing.T) {
	d := newDesk(t)
	tried := 0
	for line := range strings.Lines(ctlExamples) {
		words, _, _ := strings.Cut(strings.TrimSpace(line), "#")
		args, ok := strings.CutPrefix(words, "cohdi-sim ctl ")
		if !ok {
			continue
		}
		tried++
		_, err := d.ctl(strings.Fields(strings.ReplaceAll(args, "a100-", "a-"))...)
		if err != nil {
			t.Errorf("%s: %v", words, err)
		}
	}
	if tried < 5 || !slices.ContainsFunc(d.Core.State().Devices, func(v simapi.Device) bool { return v.Machine == "n1" }) {
		t.Errorf("%d examples, and nothing is attached", tried)
	}
}
