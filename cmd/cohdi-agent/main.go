// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
)

// version is set when the program is linked.
var version = "dev"

// usageError is a mistake in flags or configuration: exit code 2.
type usageError struct{ error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := root().ExecuteContext(ctx)
	stop()
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "cohdi-agent:", err)
	if _, usage := errors.AsType[usageError](err); usage {
		os.Exit(2)
	}
	os.Exit(1)
}

func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "cohdi-agent",
		Short:         "Attaches GPUs from a PCIe/CXL fabric to the node that a Pod runs on",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
		RunE:          help,
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	cmd.AddCommand(runCommand(), statusCommand(), configCommand(), uninstallCommand(), &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs,
		Run: func(c *cobra.Command, _ []string) { fmt.Fprintln(c.OutOrStdout(), "cohdi-agent", version) },
	})
	return cmd
}

// help is what a command does that only has subcommands.
func help(c *cobra.Command, _ []string) error { return c.Help() }

// noArgs refuses a mistyped subcommand or a stray argument as bad usage.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unknown argument %q; see %q", args[0], cmd.CommandPath()+" --help")}
	}
	return nil
}

func configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Work with configuration files", Args: noArgs, RunE: help}
	cmd.AddCommand(&cobra.Command{
		Use: "check FILE", Short: "Check a configuration file",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{fmt.Errorf("%s needs one FILE", cmd.CommandPath())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			cfg, err := config.Load(args[0])
			if err != nil {
				return usageError{err}
			}
			fmt.Fprintf(c.OutOrStdout(), "%s: ok, %d fabrics\n", args[0], len(cfg.Fabrics))
			return nil
		},
	})
	return cmd
}
