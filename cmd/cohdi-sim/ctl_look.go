// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// shownLast is how much of a long list is shown.
const shownLast = 20

const clockForm = "15:04:05.000"

// table prints rows below their heading.
func table(out io.Writer, heading string, rows [][]string) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join(strings.Fields(heading), "\t"))
	for _, row := range rows {
		for i := range row {
			row[i] = dash(row[i])
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func status(ctx context.Context, h hand, _ []string) error {
	s, err := h.sim.State(ctx)
	if err != nil {
		return err
	}
	var rows [][]string
	for _, d := range s.Devices {
		rows = append(rows, []string{
			d.ID, d.Model, phaseOf(d), d.Machine, slotOf(d), d.PCIAddress, driverOf(d), d.OpStatus, d.UUID,
		})
	}
	if err = table(h.out, "DEVICE MODEL PHASE MACHINE SLOT PCI DRIVER HEALTH UUID", rows); err != nil {
		return err
	}
	_, err = fmt.Fprintf(h.out, "%d violations, %d logins\n", s.Violations, s.Logins)
	return err
}

// phaseOf also says what is special about a device.
func phaseOf(d simapi.Device) string {
	words := []string{d.Phase}
	for _, special := range []struct {
		is   bool
		word string
	}{
		{d.Vanished, "vanished"},
		{d.BuiltIn, "built in"},
		{d.Tenant != "", "of " + d.Tenant},
		{d.Failure != "", "failed: " + d.Failure},
	} {
		if special.is {
			words = append(words, special.word)
		}
	}
	return strings.Join(words, ", ")
}

func slotOf(d simapi.Device) string {
	if d.Machine == "" {
		return ""
	}
	return fmt.Sprint(d.Slot)
}

func driverOf(d simapi.Device) string {
	if !d.Bound {
		return ""
	}
	return fmt.Sprintf("nvidia%d", d.Minor)
}

func machines(ctx context.Context, h hand, _ []string) error {
	s, err := h.sim.State(ctx)
	if err != nil {
		return err
	}
	onOff := map[bool]string{true: "on", false: "off"}
	var rows [][]string
	for _, m := range s.Machines {
		rows = append(rows, []string{
			m.Name, m.UUID, fmt.Sprint(m.Fabric), fmt.Sprintf("%d/%d", len(s.Attached(m.Name)), m.Slots), onOff[m.Power], onOff[m.DriverLoaded], m.Hotplug, m.HostRoot,
		})
	}
	return table(h.out, "MACHINE UUID FABRIC ATTACHED POWER DRIVER HOTPLUG ROOT", rows)
}

func withOperations(f *pflag.FlagSet) work {
	last := f.Int("last", shownLast, "show so many of them")
	return func(ctx context.Context, h hand, _ []string) error {
		s, err := h.sim.State(ctx)
		if err != nil {
			return err
		}
		var rows [][]string
		for _, o := range newest(s.Operations, *last) {
			took := ""
			if o.End != nil {
				took = o.End.Sub(o.Start).Round(time.Millisecond).String()
			}
			rows = append(rows, []string{
				fmt.Sprint(o.ID), o.Start.Local().Format(clockForm), o.Kind, o.Machine, strings.Join(o.Devices, ","), o.Caller, took, o.Outcome,
			})
		}
		return table(h.out, "ID START KIND MACHINE DEVICES CALLER TOOK OUTCOME", rows)
	}
}

func newest[T any](all []T, n int) []T {
	return all[max(len(all)-max(n, 0), 0):]
}

func withLog(f *pflag.FlagSet) work {
	last := f.Int("last", shownLast, "show so many of them")
	face := f.String("face", "", "only those of a face: "+strings.Join(simapi.Faces(), ", "))
	path := f.String("path", "", "only those whose path matches this regular expression")
	whole := f.Bool("json", false, "show them whole, as JSON")
	return func(ctx context.Context, h hand, _ []string) error {
		re, err := regexp.Compile(*path)
		if err != nil {
			return fmt.Errorf("%w: --path: %w", errUsage, err)
		}
		all, err := h.sim.Log(ctx)
		if err != nil {
			return err
		}
		found := []simapi.Request{}
		for _, r := range all {
			if (*face == "" || r.Face == *face) && re.MatchString(r.Path) {
				found = append(found, r)
			}
		}
		found = newest(found, *last)
		if *whole {
			return asJSON(h.out, found)
		}
		var rows [][]string
		for _, r := range found {
			answer := fmt.Sprint(r.Status)
			if !r.Answered {
				answer += " unanswered"
			}
			rows = append(rows, []string{r.Time.Local().Format(clockForm), r.Face, r.Method, r.Path, answer, fmt.Sprintf("%dms", r.Millis), r.Fault})
		}
		return table(h.out, "TIME FACE METHOD PATH STATUS TOOK FAULT", rows)
	}
}

func withViolations(f *pflag.FlagSet) work {
	forget := f.Bool("clear", false, "forget them, without showing them")
	return func(ctx context.Context, h hand, _ []string) error {
		if *forget {
			return h.sim.ClearViolations(ctx)
		}
		all, err := h.sim.Violations(ctx)
		if err != nil {
			return err
		}
		var rows [][]string
		for _, v := range all {
			var holders []string
			for _, p := range v.Holders {
				holders = append(holders, fmt.Sprintf("%s(%d)", p.Command, p.PID))
			}
			rows = append(rows, []string{v.Time.Local().Format(clockForm), v.Kind, v.Machine, v.Device, strings.Join(holders, ","), v.Detail})
		}
		return table(h.out, "TIME KIND MACHINE DEVICE HOLDERS DETAIL", rows)
	}
}

func state(ctx context.Context, h hand, _ []string) error {
	s, err := h.sim.State(ctx)
	if err != nil {
		return err
	}
	return asJSON(h.out, s)
}

func asJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func ready(ctx context.Context, h hand, _ []string) error { return h.sim.Ready(ctx) }

func jobs(ctx context.Context, h hand, _ []string) error {
	all, err := h.sim.Jobs(ctx)
	if err != nil {
		return err
	}
	var rows [][]string
	for _, j := range all {
		worker := ""
		if j.Lost {
			worker = "lost"
		}
		rows = append(rows, []string{j.ID, j.Status, j.RollbackStatus, worker, j.StartedAt})
	}
	return table(h.out, "JOB STATUS ROLLBACK WORKER START", rows)
}

func raw(ctx context.Context, h hand, args []string) error {
	method := strings.ToUpper(args[0])
	if method != http.MethodGet && method != http.MethodPost && method != http.MethodDelete {
		return fmt.Errorf("%w: raw: method %s is none of GET, POST, DELETE", errUsage, args[0])
	}
	body := strings.Join(args[2:], "")
	data, err := h.sim.Raw(ctx, method, "/"+strings.TrimPrefix(args[1], "/"), []byte(body))
	if err != nil {
		return err
	}
	var pretty bytes.Buffer
	if json.Indent(&pretty, data, "", "  ") == nil {
		data = pretty.Bytes()
	}
	_, err = h.out.Write(data)
	return err
}
