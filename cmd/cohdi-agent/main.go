// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
)

// usageError is a mistake in flags or configuration: exit code 2.
type usageError struct{ error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := root().ExecuteContext(ctx)
	stop()
	if err == nil {
		return
	}
	for line := range strings.Lines(err.Error()) { // several errors stand on lines of their own
		fmt.Fprintln(os.Stderr, "cohdi-agent:", strings.TrimRight(line, "\n"))
	}
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
		// Not a usage template of our own: one would link text/template, for which the linker keeps every method of every type.
		DisableFlagsInUseLine: true,
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	cmd.AddCommand(runCommand(), statusCommand(), configCommand(), uninstallCommand(), &cobra.Command{
		Use: "version", Short: "Print the version, the revision of the source and the compiler's version", Args: noArgs,
		Run: func(c *cobra.Command, _ []string) { fmt.Fprintln(c.OutOrStdout(), told(build())) },
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
	cmd := &cobra.Command{Use: "config", Short: "Work with configuration files", Args: noArgs, RunE: help, DisableFlagsInUseLine: true}
	cmd.AddCommand(&cobra.Command{
		Use: "check FILE", Short: "Check a configuration file; - is standard input",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{fmt.Errorf("%s needs one FILE", cmd.CommandPath())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			file, load := args[0], config.Load
			if file == "-" {
				file, load = "standard input", func(file string) (config.Config, error) { return read(c.InOrStdin(), file) }
			}
			cfg, err := load(file)
			if err != nil {
				return usageError{err}
			}
			fmt.Fprintf(c.OutOrStdout(), "%s: ok, %s\n", file, count(len(cfg.Fabrics), "fabric"))
			return nil
		},
	})
	return cmd
}

// read parses a configuration that is not in a file; name is what errors call it.
func read(in io.Reader, name string) (config.Config, error) {
	data, err := io.ReadAll(in)
	if err != nil {
		return config.Config{}, fmt.Errorf("read the configuration from %s: %w", name, err)
	}
	return config.Parse(data, name)
}

// count prints a number of things.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
