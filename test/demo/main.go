// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/cohdi/cohdi-agent/test/chassis"
)

// options are the flags.
type options struct {
	state, bin string
	// keep leaves the cluster up; reuse takes the agent that runs in it already.
	keep, reuse bool
	// manager is the kind of the fabric manager.
	manager string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// A second Ctrl-C ends the program at once; the guard then takes the cluster down.
	context.AfterFunc(ctx, stop)
	err := command(ctx, os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		stop()
		os.Exit(1) //nolint:gocritic // stop has been called
	}
}

func command(ctx context.Context, args []string) error {
	var o options
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.StringVar(&o.state, "state", ".cache/cluster", "folder that holds the cluster")
	flags.StringVar(&o.bin, "bin", ".cache/bin", "folder with the built programs")
	flags.BoolVar(&o.keep, "keep", os.Getenv("KEEP") != "", "leave the cluster up; KEEP=1 in the environment says the same")
	flags.BoolVar(&o.reuse, "reuse", false, "use the agent that is installed in the running cluster")
	flags.StringVar(&o.manager, "manager", cmp.Or(os.Getenv("FABRIC"), chassis.Default), "kind of the fabric manager; FABRIC in the environment says the same")
	guard := flags.Bool("guard", false, "wait on standard input for the end of the demonstration, and take the cluster down if it broke off")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unknown argument %q; make demo runs it without any", flags.Arg(0))
	}
	if *guard {
		return watchOver(context.WithoutCancel(ctx), os.Stdin, o)
	}
	if _, err := os.Stat("deploy/daemonset.yaml"); err != nil {
		return fmt.Errorf("start at the root of the repository: %w", err)
	}
	return show(ctx, o)
}

// show runs the demonstration and cleans up, whatever happens.
func show(ctx context.Context, o options) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go followParent(ctx, cancel)
	d, err := newDemo(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		interrupted := ctx.Err() != nil
		// The context may be what ended the demonstration.
		after := context.WithoutCancel(ctx)
		p := recover()
		switch {
		case p != nil:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			d.collect(after)
		case interrupted:
			err = d.stopped(d.end(after, interrupted, false))
			return
		case err != nil:
			d.collect(after)
		}
		err = errors.Join(err, d.end(after, interrupted, err == nil))
		if err == nil {
			d.screen.say("%s", d.result)
		}
	}()
	return d.perform(ctx)
}

// followParent ends the demonstration when the program that runs it is gone: it may be `go run`, which passes on the
// terminal's interrupt only.
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
				cancel(errors.New("the program that ran the demonstration is gone"))
				return
			}
		}
	}
}
