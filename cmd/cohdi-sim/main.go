// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/sim"
)

// errUsage marks what the caller has to correct; it ends the program with 2.
var errUsage = errors.New("bad usage")

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	err := command(ctx, os.Args[1:])
	switch {
	case err == nil, errors.Is(err, pflag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "cohdi-sim:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "cohdi-sim:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == "ctl" {
		return ctl(ctx, args[1:], os.Stdout)
	}
	cfg, err := configure(args)
	if err != nil {
		return err
	}
	s, err := sim.New(ctx, cfg, clock.RealClock{})
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

func configure(args []string) (*config.Config, error) {
	flags := pflag.NewFlagSet("cohdi-sim", pflag.ContinueOnError)
	file := flags.String("config", "", "description of the chassis (YAML)")
	dir := flags.String("dir", "", "directory for host roots, certificates and state; overrides the configuration")
	listenFM := flags.String("listen-fm", "", "host:port of the fabric manager's HTTPS API; overrides the configuration")
	listenControl := flags.String("listen-control", "", "host:port of the control API; overrides the configuration")
	library := flags.String("nvml-library", "", "test NVML library to install in the driver roots; overrides the configuration")
	stub := flags.String("driver-stub", "", "shared object to install as the driver's other libraries; overrides the configuration")
	logging := flag.NewFlagSet("", flag.ContinueOnError)
	klog.InitFlags(logging)
	flags.AddGoFlag(logging.Lookup("v"))
	flags.SortFlags = false
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	if *file == "" || flags.NArg() > 0 {
		return nil, fmt.Errorf("%w: want --config FILE and no arguments; the control API is under \"cohdi-sim ctl\"", errUsage)
	}
	cfg, err := config.Load(*file)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	for _, o := range []struct{ to, from *string }{
		{&cfg.Dir, dir},
		{&cfg.Listen.FM, listenFM},
		{&cfg.Listen.Control, listenControl},
		{&cfg.Driver.NVMLLibrary, library},
		{&cfg.Driver.Stub, stub},
	} {
		if *o.from != "" {
			*o.to = *o.from
		}
	}
	if cfg.Dir == "" || cfg.Listen.FM == "" || cfg.Listen.Control == "" {
		return nil, fmt.Errorf("%w: dir, listen.fm and listen.control are needed, from the configuration or as flags", errUsage)
	}
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, fmt.Errorf("find directory: %w", err)
	}
	return cfg, nil
}
