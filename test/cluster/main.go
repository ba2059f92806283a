// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/cohdi/cohdi-agent/test/chassis"
	"github.com/cohdi/cohdi-agent/test/cluster/install"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// exitStatus is that of a command on a node.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	err := newCommand(os.Stdout, os.Stderr).ExecuteContext(ctx)
	stop()
	var status exitStatus
	switch {
	case errors.As(err, &status):
		os.Exit(int(status)) // a command on a node has said itself what is wrong
	case err != nil:
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

// runFunc does what a command is for.
type runFunc func(context.Context, *localkube.Cluster, []string) error

func newCommand(stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use: "cluster", Short: "A real Kubernetes with two nodes on this machine",
		SilenceUsage: true, SilenceErrors: true,
	}
	state := root.PersistentFlags().String("state", ".cache/cluster", "folder that holds the cluster")
	bin := root.PersistentFlags().String("bin", ".cache/bin", "folder with the built programs")
	open := func() (*localkube.Cluster, error) { return localkube.New(*state, *bin, stdout) }
	// simple makes a command that does one thing with the cluster.
	simple := func(use, short string, args cobra.PositionalArgs, run runFunc) *cobra.Command {
		return &cobra.Command{Use: use, Short: short, Args: args, RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := open()
			if err != nil {
				return err
			}
			return run(cmd.Context(), cluster, args)
		}}
	}
	var file, manager string
	up := simple("up", "Start the cluster, or say that it is up", cobra.NoArgs,
		func(ctx context.Context, c *localkube.Cluster, _ []string) error {
			if manager != "" {
				files, err := chassis.Files(".", manager)
				if err != nil {
					return err
				}
				file = files.Chassis
			}
			return c.Up(ctx, file)
		})
	up.Flags().StringVar(&file, "chassis", "", "configuration of the device simulator; none starts no simulator")
	up.Flags().StringVar(&manager, "manager", "", "kind of the fabric manager of the demonstration's chassis, instead of a file")
	root.AddCommand(up,
		simple("down", "Take the cluster down; only its logs stay", cobra.NoArgs,
			func(ctx context.Context, c *localkube.Cluster, _ []string) error { return c.Down(ctx) }),
		simple("status", "Show processes and nodes", cobra.NoArgs,
			func(ctx context.Context, c *localkube.Cluster, _ []string) error {
				err := c.Status(ctx, stdout)
				if errors.Is(err, localkube.ErrNone) { // an answer, too
					_, err = fmt.Fprintln(stdout, err)
				}
				return err
			}),
		simple("kubeconfig", "Print the path of the administrator's kubeconfig", cobra.NoArgs,
			func(_ context.Context, c *localkube.Cluster, _ []string) error {
				_, err := fmt.Fprintln(stdout, c.AdminConfig())
				return err
			}),
		simple("import IMAGE.tar", "Load an OCI archive into every node", cobra.ExactArgs(1),
			func(ctx context.Context, c *localkube.Cluster, args []string) error { return c.Import(ctx, args[0]) }),
		deployCommand(simple),
		simple("start COMPONENT | start NODE kubelet|containerd", "Start a stopped component", cobra.RangeArgs(1, 2),
			func(ctx context.Context, c *localkube.Cluster, args []string) error { return c.Start(ctx, args...) }),
		simple("stop COMPONENT | stop NODE kubelet|containerd", "Stop a component", cobra.RangeArgs(1, 2),
			func(ctx context.Context, c *localkube.Cluster, args []string) error { return c.Stop(ctx, args...) }),
		simple("restart COMPONENT | restart NODE kubelet|containerd", "Stop and start a component", cobra.RangeArgs(1, 2),
			func(ctx context.Context, c *localkube.Cluster, args []string) error { return c.Restart(ctx, args...) }),
		simple("reboot NODE", "Power-cycle a node: no process survives, the boot id changes", cobra.ExactArgs(1),
			func(ctx context.Context, c *localkube.Cluster, args []string) error {
				node, err := localkube.FindNode(args[0])
				if err != nil {
					return err
				}
				return c.Reboot(ctx, node)
			}),
		simple("node-exec NODE -- COMMAND...", "Run a command in a node's namespaces", cobra.MinimumNArgs(2),
			func(ctx context.Context, c *localkube.Cluster, args []string) error {
				return nodeExec(ctx, c, args, stdout, stderr)
			}),
	)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return root
}

// deployCommand installs the agent; what it installs is that of the repository in the working directory.
func deployCommand(simple func(string, string, cobra.PositionalArgs, runFunc) *cobra.Command) *cobra.Command {
	o := install.Default(".")
	var manager string
	cmd := simple("deploy", "Install the agent as a user does", cobra.NoArgs,
		func(ctx context.Context, c *localkube.Cluster, _ []string) error {
			if manager != "" {
				files, err := chassis.Files(".", manager)
				if err != nil {
					return err
				}
				o.Config, o.Chassis = files.Agent, files.Chassis
			}
			return install.Install(ctx, c, o)
		})
	cmd.Flags().StringVar(&manager, "manager", "", "kind of the fabric manager of the demonstration's chassis, instead of files")
	cmd.Flags().StringVar(&o.Image, "image", o.Image, "archive of the agent's image")
	cmd.Flags().StringVar(&o.Manifest, "manifest", o.Manifest, "the agent's manifest")
	cmd.Flags().StringVar(&o.Config, "config", o.Config, "the agent's configuration")
	cmd.Flags().StringVar(&o.Chassis, "chassis", o.Chassis, "the simulator's configuration, which holds the login")
	cmd.Flags().StringVar(&o.Fabric, "fabric", o.Fabric, "id of the fabric in the agent's configuration")
	cmd.Flags().StringSliceVar(&o.More, "more", o.More, "manifests to apply after it")
	return cmd
}

func nodeExec(ctx context.Context, c *localkube.Cluster, args []string, stdout, stderr io.Writer) error {
	node, err := localkube.FindNode(args[0])
	if err != nil {
		return err
	}
	cmd, err := c.NodeCommand(ctx, node, args[1:]...)
	if err != nil {
		return err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, stdout, stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exitStatus(exit.ExitCode())
	}
	if err != nil {
		return fmt.Errorf("run %q on node %s: %w", strings.Join(args[1:], " "), node.Name, err)
	}
	return nil
}
