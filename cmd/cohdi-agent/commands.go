// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/status"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/uninstall"
)

// askTimeout bounds one question of a person.
const askTimeout = 10 * time.Second

func statusCommand() *cobra.Command {
	var agent, kubeconfig string
	var all bool
	cmd := &cobra.Command{
		Use: "status", Short: "Show what becomes of this node's GPUs, and why; with --all, those of all nodes", Args: noArgs,
		Example: "  kubectl exec -n cohdi-system ds/cohdi-agent -- cohdi-agent status",
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), askTimeout)
			defer cancel()
			if all {
				return showAll(ctx, c, kubeconfig)
			}
			of, err := status.Ask(ctx, http.DefaultClient, agent)
			if err != nil {
				return err
			}
			return status.WriteNode(c.OutOrStdout(), of, time.Now())
		},
	}
	cmd.Flags().StringVar(&agent, "agent", "http://127.0.0.1:8080/status", "where the agent answers")
	cmd.Flags().BoolVar(&all, "all", false, "show the units of all nodes, from their device leases")
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file for --all; the Pod's own account, or kubectl's default, if empty")
	return cmd
}

func showAll(ctx context.Context, c *cobra.Command, kubeconfig string) error {
	cs, err := personsClient(kubeconfig)
	if err != nil {
		return err
	}
	fleet, err := status.Gather(ctx, cs, clock.RealClock{})
	if err != nil {
		return err
	}
	return status.WriteFleet(c.OutOrStdout(), fleet, time.Now())
}

func uninstallCommand() *cobra.Command {
	var kubeconfig string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "uninstall", Short: "Give every idle GPU back to its pool and take the agents off; refuses while a GPU is in use", Args: noArgs,
		Long: "Run it with an administrator's kubeconfig before `kubectl delete --ignore-not-found -f deploy/daemonset.yaml`. It may be run again after an error.",
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), timeout)
			defer cancel()
			cs, err := personsClient(kubeconfig)
			if err != nil {
				return err
			}
			return uninstall.Run(ctx, uninstall.Options{Client: cs, Clock: clock.RealClock{}, Out: c.OutOrStdout()})
		},
	}
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; kubectl's default if empty")
	cmd.Flags().DurationVar(&timeout, "timeout", 10*time.Minute, "how long to wait for GPUs to go back")
	return cmd
}

// personsClient is a client with the rights of the person who runs the command: kubectl's own rules say
// which cluster, and in a Pod its account.
func personsClient(kubeconfig string) (kubernetes.Interface, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	rules.WarnIfAllMissing = false // the error says it
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, fmt.Errorf("find the API server: there is no kubeconfig %s, or it names no cluster; name yours with --kubeconfig or in KUBECONFIG",
			strings.Join(rules.GetLoadingPrecedence(), " or "))
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	cfg.UserAgent = "cohdi-agent/" + version
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client of the API server: %w", err)
	}
	return cs, nil
}
