// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	state, bin string
	parts      []string
	attaches   int
	repeat     int
	idle       time.Duration
	sizes      []int
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err := command(ctx, os.Args[1:], os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1) //nolint:gocritic // stop has been called
	}
}

func command(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if _, err = os.Stat("deploy/daemonset.yaml"); err != nil {
		return fmt.Errorf("start at the root of the repository: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go followParent(ctx, cancel)
	return run(ctx, o, out)
}

func parse(args []string) (options, error) {
	o := options{}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.state, "state", ".cache/cluster", "folder that holds the cluster")
	flags.StringVar(&o.bin, "bin", ".cache/bin", "folder with the built programs")
	parts := flags.String("parts", strings.Join(allParts(), ","), "what to measure")
	flags.IntVar(&o.attaches, "attaches", 56, "attaches in part a")
	flags.IntVar(&o.repeat, "repeat", 5, "repetitions in part b")
	flags.DurationVar(&o.idle, "idle", 3*time.Minute, "how long part c watches")
	sizes := flags.String("sizes", "2,100,1000", "numbers of nodes in part d")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	for part := range strings.SplitSeq(*parts, ",") {
		if !slices.Contains(allParts(), part) {
			return o, fmt.Errorf("unknown part %q: there are a, b, c and d", part)
		}
		o.parts = append(o.parts, part)
	}
	for text := range strings.SplitSeq(*sizes, ",") {
		var n int
		if _, err := fmt.Sscanf(text, "%d", &n); err != nil || n < 2 {
			return o, fmt.Errorf("%q is not a number of nodes: at least 2", text)
		}
		o.sizes = append(o.sizes, n)
	}
	return o, nil
}

func allParts() []string { return []string{"a", "b", "c", "d"} }

func (o options) has(part string) bool { return slices.Contains(o.parts, part) }

// followParent ends the program when the one that runs it is gone: `go run` passes on the terminal's
// interrupt only.
func followParent(ctx context.Context, cancel context.CancelCauseFunc) {
	parent := os.Getppid()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if os.Getppid() != parent {
				cancel(errors.New("the program that ran this one is gone"))
				return
			}
		}
	}
}
