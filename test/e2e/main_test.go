// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"
)

var keep = flag.Bool("keep", false, "leave the cluster up, also one that the tests have started")

// env is the cluster that all tests run on.
var env *environment

func TestMain(m *testing.M) {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	code, err := run(ctx, m)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// run starts what the tests need, runs them, and takes it down, also when ctx ends or the time for the whole
// binary, after which nobody could clean up any more, is nearly over.
func run(ctx context.Context, m *testing.M) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if limit, ok := flag.Lookup("test.timeout").Value.(flag.Getter).Get().(time.Duration); ok && limit > 2*reserve {
		timer := time.AfterFunc(limit-reserve, func() { cancel(fmt.Errorf("the tests took longer than %v", limit-reserve)) })
		defer timer.Stop()
	}
	e, err := startEnvironment(ctx)
	if e != nil {
		defer func() { e.stop(context.WithoutCancel(ctx), *keep) }()
	}
	if err != nil {
		return 1, err
	}
	env = e
	done := make(chan int, 1)
	go func() { done <- m.Run() }()
	select {
	case code := <-done:
		return code, nil
	case <-ctx.Done():
		e.dump(context.WithoutCancel(ctx), "interrupted")
		return 1, errors.New(context.Cause(ctx).Error())
	}
}

// reserve is what is kept of the binary's time to clean up.
const reserve = 90 * time.Second
