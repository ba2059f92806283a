// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const ctlUsage = `cohdi-sim ctl [--control HOST:PORT] COMMAND
  status                     a table of devices and where they are
  get PATH                   state, log, violations, fault or ready, as JSON
  post PATH JSON             fault, timing, policies, token, attach, detach, device/ID or machine/NAME
  delete PATH                fault, fault?name=NAME or violations
`

// ctl is a thin hand for people on the control API.
func ctl(ctx context.Context, args []string, out io.Writer) error {
	flags := pflag.NewFlagSet("cohdi-sim ctl", pflag.ContinueOnError)
	address := flags.String("control", "127.0.0.1:8444", "host:port of the control API")
	flags.Usage = func() { fmt.Fprint(os.Stderr, ctlUsage) }
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	client := simapi.NewClient(*address)
	switch a := flags.Args(); {
	case len(a) == 1 && a[0] == "status":
		return status(ctx, client, out)
	case len(a) == 2 && a[0] == "get":
		return raw(ctx, client, out, http.MethodGet, a[1], "")
	case len(a) == 3 && a[0] == "post":
		return raw(ctx, client, out, http.MethodPost, a[1], a[2])
	case len(a) == 2 && a[0] == "delete":
		return raw(ctx, client, out, http.MethodDelete, a[1], "")
	default:
		flags.Usage()
		return fmt.Errorf("%w: %q is no command", errUsage, strings.Join(a, " "))
	}
}

func raw(ctx context.Context, client *simapi.Client, out io.Writer, method, path, body string) error {
	data, err := client.Raw(ctx, method, "/"+strings.TrimPrefix(path, "/"), []byte(body))
	if err != nil {
		return err
	}
	var pretty bytes.Buffer
	if json.Indent(&pretty, data, "", "  ") == nil {
		data = pretty.Bytes()
	}
	_, err = out.Write(data)
	return err
}

func status(ctx context.Context, client *simapi.Client, out io.Writer) error {
	s, err := client.State(ctx)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "DEVICE\tMODEL\tPHASE\tMACHINE\tSLOT\tPCI\tDRIVER\tHEALTH\tUUID")
	for _, d := range s.Devices {
		driver := "-"
		if d.Bound {
			driver = fmt.Sprintf("nvidia%d", d.Minor)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n",
			d.ID, d.Model, d.Phase, dash(d.Machine), d.Slot, dash(d.PCIAddress), driver, dash(d.OpStatus), d.UUID)
	}
	fmt.Fprintf(w, "%d violations, %d logins\n", s.Violations, s.Logins)
	return w.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
