// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

func attach(ctx context.Context, h hand, args []string) error {
	return h.sim.Attach(ctx, args[1], args[0])
}

func detach(ctx context.Context, h hand, args []string) error { return h.sim.Detach(ctx, args[0]) }

func withJob(f *pflag.FlagSet) work {
	rollback := f.Bool("rollback", false, "with cancel: undo what the job has done")
	return func(ctx context.Context, h hand, args []string) error {
		return h.sim.ChangeJob(ctx, args[0], simapi.JobChange{Action: args[1], Rollback: *rollback})
	}
}

// given is nil for a flag that is not set: then what it is about stays.
func given[T any](f *pflag.FlagSet, name string, value *T) *T {
	if f.Changed(name) {
		return value
	}
	return nil
}

func withDevice(f *pflag.FlagSet) work {
	health := f.String("health", "", "OK, Warning, Critical or Unknown")
	op := f.String("op-status", "", "raw value of res_op_status")
	serial := f.String("serial", "", "serial number that the fabric manager tells")
	failAttach := f.String("fail-attach", "", "its next attach fails, for this reason, where the manager is cm; empty takes that back")
	failDetach := f.String("fail-detach", "", "its next detach fails, for this reason; empty takes that back")
	xid := f.Uint64("xid", 0, "the driver of its machine reports this XID error")
	machine := f.String("machine", "", "with buildIn: the machine")
	tenant := f.String("tenant", "", "with steal: who has it")
	return func(ctx context.Context, h hand, args []string) error {
		change := simapi.DeviceChange{
			Health: given(f, "health", health), OpStatus: given(f, "op-status", op), FabricSerial: given(f, "serial", serial),
			FailAttach: given(f, "fail-attach", failAttach), FailDetach: given(f, "fail-detach", failDetach), XID: given(f, "xid", xid),
			Action: strings.Join(args[1:], ""), Machine: *machine, Tenant: *tenant,
		}
		if change == (simapi.DeviceChange{}) {
			return fmt.Errorf("%w: device: no change of %s is asked for; cohdi-sim ctl device --help lists them", errUsage, args[0])
		}
		return h.sim.Device(ctx, args[0], change)
	}
}

// onOff is a switch that may be left as it is.
func onOff(f *pflag.FlagSet, name, value string) (*bool, error) {
	if !f.Changed(name) {
		return nil, nil //nolint:nilnil // left as it is
	}
	on := value == "on"
	if !on && value != "off" {
		return nil, fmt.Errorf("%w: --%s: %q is neither on nor off", errUsage, name, value)
	}
	return &on, nil
}

func withMachine(f *pflag.FlagSet) work {
	power := f.String("power", "", "on or off")
	driver := f.String("driver", "", "on or off")
	hotplug := f.String("hotplug", "", simapi.HotplugEvent+" (devices show up by themselves) or "+simapi.HotplugRescan+" (after a rescan)")
	return func(ctx context.Context, h hand, args []string) error {
		change := simapi.MachineChange{Hotplug: given(f, "hotplug", hotplug)}
		var err error
		if change.Power, err = onOff(f, "power", *power); err != nil {
			return err
		}
		if change.DriverLoaded, err = onOff(f, "driver", *driver); err != nil {
			return err
		}
		if change == (simapi.MachineChange{}) {
			return fmt.Errorf("%w: machine: no change of %s is asked for; cohdi-sim ctl machine --help lists them", errUsage, args[0])
		}
		return h.sim.Machine(ctx, args[0], change)
	}
}

func withFault(f *pflag.FlagSet) work {
	var x simapi.Fault
	f.StringVar(&x.Name, "name", "", "name in the log of requests, and to remove it by")
	f.StringVar(&x.Face, "face", "", "only requests to a face: "+strings.Join(simapi.Faces(), ", "))
	f.StringVar(&x.Method, "method", "", "only requests with this method")
	f.StringVar(&x.Path, "path", "", "only requests whose path matches this regular expression")
	f.StringVar(&x.Body, "body", "", "only requests with this text in their body")
	f.IntVar(&x.Nth, "nth", 0, "begin with the nth of them")
	f.IntVar(&x.Count, "count", 0, "end after so many; 0 never ends")
	f.IntVar(&x.Status, "status", 0, "status of the answer, for status and statusAfterEffect")
	f.StringToStringVar(&x.Headers, "header", nil, "NAME=VALUE of the answer, for the same")
	f.StringVar(&x.Content, "content", "", "body of the answer, for the same")
	f.StringVar(&x.ContentType, "content-type", "", "type of the body, for the same; application/json if empty")
	f.DurationVar((*time.Duration)(&x.Delay), "delay", 0, "for slow: before the first byte, and again spread over the body")
	f.BoolVar(&x.Effect, "effect", false, "for hang: do the work before")
	f.IntVar(&x.Items, "items", 0, "for partial: so many devices are really attached")
	return func(ctx context.Context, h hand, args []string) error {
		x.Action = args[0]
		name, err := h.sim.AddFault(ctx, x)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(h.out, name)
		return err
	}
}

func withFaults(f *pflag.FlagSet) work {
	forget := f.Bool("clear", false, "remove them, without showing them")
	name := f.String("name", "", "with --clear: only those of this name")
	return func(ctx context.Context, h hand, _ []string) error {
		if *forget {
			return h.sim.ClearFaults(ctx, *name)
		}
		if *name != "" {
			return fmt.Errorf("%w: faults: --name goes with --clear", errUsage)
		}
		all, err := h.sim.Faults(ctx)
		if err != nil {
			return err
		}
		var rows [][]string
		for _, r := range all {
			hits := fmt.Sprint(r.Hits)
			if r.Count > 0 {
				hits = fmt.Sprintf("%d/%d", r.Hits, r.Count)
			}
			rows = append(rows, []string{r.Name, r.Action, r.Face, r.Method, r.Path, r.Body, fmt.Sprint(r.Seen), hits})
		}
		return table(h.out, "FAULT ACTION FACE METHOD PATH BODY SEEN HITS", rows)
	}
}

func withToken(f *pflag.FlagSet) work {
	revoke := f.Bool("revoke", false, "make all tokens worthless, and end the sessions of a Redfish service")
	lifetime := f.Duration("lifetime", 0, "how long tokens live that are given out from now on")
	return func(ctx context.Context, h hand, _ []string) error {
		if !*revoke && !f.Changed("lifetime") {
			return fmt.Errorf("%w: token: want --revoke, --lifetime, or both", errUsage)
		}
		return h.sim.Token(ctx, simapi.TokenChange{RevokeAll: *revoke, Lifetime: given(f, "lifetime", (*simapi.Duration)(lifetime))})
	}
}

func loseWorker(ctx context.Context, h hand, _ []string) error { return h.sim.LoseWorker(ctx) }

func forgetTasks(ctx context.Context, h hand, _ []string) error { return h.sim.ForgetTasks(ctx) }

// policies shows what there is where nothing is to be changed.
func policies(ctx context.Context, h hand, args []string) error {
	var change simapi.Policies
	for _, a := range args {
		name, value, ok := strings.Cut(a, "=")
		if !ok || value == "" {
			return fmt.Errorf("%w: policies: %q is not NAME=VALUE", errUsage, a)
		}
		if err := config.SetPolicy(&change, name, value); err != nil {
			return fmt.Errorf("%w: %w", errUsage, err)
		}
	}
	if len(args) > 0 {
		return h.sim.SetPolicies(ctx, change)
	}
	s, err := h.sim.State(ctx)
	if err != nil {
		return err
	}
	var rows [][]string
	for _, p := range config.ListPolicies(s.Policies) {
		rows = append(rows, []string{p.Name, p.Value, strings.Join(p.Accepted, ", ")})
	}
	return table(h.out, "POLICY VALUE ACCEPTED", rows)
}

// withTiming shows what there is where nothing is to be changed.
func withTiming(f *pflag.FlagSet) work {
	var t simapi.Timing
	delays := []struct {
		name, what string
		value      time.Duration
		of         func(*simapi.Timing) **simapi.Duration
	}{
		{"attach", "an attach takes", 0, func(t *simapi.Timing) **simapi.Duration { return &t.AttachDelay }},
		{"detach", "a detach takes", 0, func(t *simapi.Timing) **simapi.Duration { return &t.DetachDelay }},
		{"node", "the node sees a device so long after that", 0, func(t *simapi.Timing) **simapi.Duration { return &t.NodeDelay }},
		{"stale", "the list of a CDIM, or the machines of a Sunfish service, lag behind by", 0, func(t *simapi.Timing) **simapi.Duration { return &t.StaleDelay }},
	}
	for i := range delays {
		f.DurationVar(&delays[i].value, delays[i].name, 0, delays[i].what)
	}
	return func(ctx context.Context, h hand, _ []string) error {
		changed := false
		for i := range delays {
			d := &delays[i]
			*d.of(&t) = given(f, d.name, (*simapi.Duration)(&d.value))
			changed = changed || f.Changed(d.name)
		}
		if changed {
			return h.sim.SetTiming(ctx, t)
		}
		s, err := h.sim.State(ctx)
		if err != nil {
			return err
		}
		var rows [][]string
		for _, d := range delays {
			if now := *d.of(&s.Timing); now != nil {
				rows = append(rows, []string{d.name, time.Duration(*now).String(), d.what})
			}
		}
		return table(h.out, "DELAY VALUE WHAT", rows)
	}
}
