// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const defaultControl = "127.0.0.1:8444"

// hand is what the commands are done with.
type hand struct {
	sim *simapi.Client
	out io.Writer
}

// work does a command with its arguments.
type work func(ctx context.Context, h hand, args []string) error

// verb is one of the commands of ctl.
type verb struct {
	name, args, what string
	// from and to are how many arguments it takes.
	from, to int
	// with declares the flags and returns the work that goes by them.
	with func(f *pflag.FlagSet) work
}

// group is a heading in the table of commands.
type group struct {
	title    string
	commands []verb
}

const anyNumber = 1 << 10

// groups are all commands, as the help shows them.
func groups() []group {
	return []group{
		{"Look", []verb{
			{"status", "", "the devices: where they are, and how the node sees them", 0, 0, noFlags(status)},
			{"machines", "", "the machines, and what their nodes are like", 0, 0, noFlags(machines)},
			{"operations", "", "the attaches and detaches that the fabric has done", 0, 0, withOperations},
			{"log", "", "the requests that the managers' faces saw", 0, 0, withLog},
			{"violations", "", "what the judge recorded; --clear forgets it", 0, 0, withViolations},
			{"state", "", "everything that the chassis knows, as JSON", 0, 0, noFlags(state)},
			{"ready", "", "nothing, if all faces serve; an error if not", 0, 0, noFlags(ready)},
		}},
		{"Be somebody else", []verb{
			{"attach", "DEVICE MACHINE", "attach it at the fabric, behind the agent's back", 2, 2, noFlags(attach)},
			{"detach", "DEVICE", "detach it at the fabric, behind the agent's back", 1, 1, noFlags(detach)},
			{"jobs", "", "the jobs of a CDIM", 0, 0, noFlags(jobs)},
			{"job", "ID resume|cancel", "resume or cancel a job of a CDIM, as its operator", 2, 2, withJob},
		}},
		{"Break something", []verb{
			{"device", "DEVICE [ACTION]", "change a device: " + strings.Join(simapi.DeviceActions(), ", "), 1, 2, withDevice},
			{"machine", "MACHINE", "switch its power or driver, or change how it hot-plugs", 1, 1, withMachine},
			{"fault", "ACTION", "spoil requests: " + strings.Join(simapi.FaultActions(), ", "), 1, 1, withFault},
			{"faults", "", "the faults, and how often each has hit; --clear removes them", 0, 0, withFaults},
			{"token", "", "revoke all tokens and sessions, or make new ones short", 0, 0, withToken},
			{"lose-worker", "", "the running job of a CDIM loses its worker", 0, 0, noFlags(loseWorker)},
			{"forget-tasks", "", "a Redfish service forgets its tasks; what they do goes on", 0, 0, noFlags(forgetTasks)},
		}},
		{"Be another manager", []verb{
			{"policies", "[NAME=VALUE…]", "how the manager behaves where real ones differ", 0, anyNumber, noFlags(policies)},
			{"timing", "", "how long things take", 0, 0, withTiming},
		}},
		{"By hand", []verb{
			{"raw", "METHOD PATH [JSON]", "one request to the control API, and its answer", 2, 3, noFlags(raw)},
		}},
	}
}

const ctlExamples = `Examples:
  cohdi-sim ctl status
  cohdi-sim ctl device a100-0 --health Critical
  cohdi-sim ctl fault dropAfter --face fm --method PATCH --count 1    # the next attach is done, and its answer lost
  cohdi-sim ctl faults --clear
  cohdi-sim ctl log --face fm --last 5
  cohdi-sim ctl attach a100-1 n1                                      # a person's hand
  cohdi-sim ctl policies serialization=busy409 cm.count=atComplete
  cohdi-sim ctl timing --attach 30s
`

// ctl is a person's hand on the control API.
func ctl(ctx context.Context, args []string, out io.Writer) error {
	address := defaultControl
	flags := ctlFlags("ctl", &address)
	flags.SetInterspersed(false)
	flags.Usage = func() { usage(out) }
	if err := flags.Parse(args); err != nil {
		return asUsage("ctl", err)
	}
	if flags.NArg() == 0 {
		return fmt.Errorf("%w: ctl: no command; cohdi-sim ctl --help lists them", errUsage)
	}
	name := flags.Arg(0)
	if name == "help" {
		usage(out)
		return nil
	}
	for _, g := range groups() {
		for _, c := range g.commands {
			if c.name == name {
				return c.do(ctx, flags.Args()[1:], address, out)
			}
		}
	}
	return fmt.Errorf("%w: ctl: %q is no command; cohdi-sim ctl --help lists them", errUsage, name)
}

// ctlFlags has the flag that may stand before a command and behind it.
func ctlFlags(name string, address *string) *pflag.FlagSet {
	flags := pflag.NewFlagSet(name, pflag.ContinueOnError)
	flags.StringVar(address, "control", *address, "host:port of the control API")
	flags.SortFlags = false
	return flags
}

func (v verb) do(ctx context.Context, args []string, address string, out io.Writer) error {
	flags := pflag.NewFlagSet(v.name, pflag.ContinueOnError)
	flags.SortFlags = false
	run := v.with(flags)
	flags.AddFlagSet(ctlFlags(v.name, &address))
	flags.Usage = func() {
		fmt.Fprintf(out, "cohdi-sim ctl %s\n%s\n\n%s", v.form(), v.what, flags.FlagUsages())
	}
	if err := flags.Parse(args); err != nil {
		return asUsage(v.name, err)
	}
	if n := flags.NArg(); n < v.from || n > v.to {
		return fmt.Errorf("%w: want cohdi-sim ctl %s", errUsage, v.form())
	}
	return explain(address, run(ctx, hand{simapi.NewClient(address), out}, flags.Args()))
}

// form is how the command is written.
func (v verb) form() string { return strings.TrimSpace(v.name + " " + v.args) }

func asUsage(name string, err error) error {
	if errors.Is(err, pflag.ErrHelp) {
		return err
	}
	return fmt.Errorf("%w: %s: %w", errUsage, name, err)
}

// explain says whose fault an error is: what the simulator finds meaningless is a mistake of the caller.
func explain(address string, err error) error {
	var said *simapi.StatusError
	switch {
	case err == nil || errors.Is(err, errUsage):
		return err
	case errors.As(err, &said) && said.Status == http.StatusBadRequest:
		return fmt.Errorf("%w: %s", errUsage, said.Message)
	case errors.As(err, &said):
		return errors.New(said.Message)
	}
	return fmt.Errorf("control API at %s: %w (is it running, and its address this one? see --control)", address, err)
}

func usage(out io.Writer) {
	fmt.Fprintf(out, "cohdi-sim ctl [--control HOST:PORT] COMMAND\n\nThe hand of a person on a running simulator; it looks for the control API at %s.\n", defaultControl)
	width := 0
	for _, g := range groups() {
		for _, v := range g.commands {
			width = max(width, utf8.RuneCountInString(v.form()))
		}
	}
	for _, g := range groups() {
		fmt.Fprintf(out, "\n%s\n", g.title)
		for _, v := range g.commands {
			fmt.Fprintf(out, "  %-*s   %s\n", width, v.form(), v.what)
		}
	}
	fmt.Fprintf(out, "\ncohdi-sim ctl COMMAND --help shows the flags of a command. The exit status is 2 for bad usage, 1 if something failed.\n\n%s", ctlExamples)
}

func noFlags(run work) func(*pflag.FlagSet) work {
	return func(*pflag.FlagSet) work { return run }
}
