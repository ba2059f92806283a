// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// family is a set of programs from one upstream project.
type family struct {
	name string
	// module is the one whose version counts.
	module string
	// programs maps what is built to the name it gets; an empty name keeps Go's choice.
	programs map[string]string
	tags     string
	// static leaves the C library out.
	static bool
	// stamps are the variables that hold the version; {v} stands for v1.2.3, {n} for 1.2.3.
	stamps   []string
	duration string
	// optional families are built only when named.
	optional bool
}

func families() []family {
	var kubernetes []string
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, v := range []string{"gitVersion={v}", "gitMajor={major}", "gitMinor={minor}", "gitTreeState=clean"} {
			kubernetes = append(kubernetes, pkg+"."+v)
		}
	}
	return []family{
		{
			name: "etcd", module: "go.etcd.io/etcd/server/v3", static: true, duration: "1 min",
			programs: map[string]string{"go.etcd.io/etcd/server/v3": "etcd"},
		},
		{
			name: "containerd", module: "github.com/containerd/containerd/v2", static: true, duration: "2 min",
			programs: map[string]string{
				"github.com/containerd/containerd/v2/cmd/containerd":              "containerd",
				"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2": "containerd-shim-runc-v2",
				"github.com/containerd/containerd/v2/cmd/ctr":                     "ctr",
			},
			tags:   "no_btrfs,no_devmapper,no_zfs",
			stamps: []string{"github.com/containerd/containerd/v2/version.Version={v}"},
		},
		{
			name: "kubernetes", module: "k8s.io/kubernetes", duration: "8 min", stamps: kubernetes,
			programs: map[string]string{
				"k8s.io/kubernetes/cmd/kube-apiserver":          "kube-apiserver",
				"k8s.io/kubernetes/cmd/kube-controller-manager": "kube-controller-manager",
				"k8s.io/kubernetes/cmd/kube-scheduler":          "kube-scheduler",
				"k8s.io/kubernetes/cmd/kubectl":                 "kubectl",
				"k8s.io/kubernetes/cmd/kubelet":                 "kubelet",
			},
		},
		{
			name: "golangci-lint", module: "github.com/golangci/golangci-lint/v2", static: true, duration: "3 min", optional: true,
			programs: map[string]string{"github.com/golangci/golangci-lint/v2/cmd/golangci-lint": "golangci-lint"},
			stamps:   []string{"main.version={n}"},
		},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "tools:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("tools", flag.ContinueOnError)
	modules := flags.String("modules", "test/tools", "folder with a module per family")
	bin := flags.String("bin", ".cache/bin", "folder for the programs")
	if err := flags.Parse(args); err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, name := range flags.Args() {
		wanted[name] = true
	}
	target, err := filepath.Abs(*bin)
	if err != nil {
		return fmt.Errorf("find target folder: %w", err)
	}
	unlock, err := lock(target, out)
	if err != nil {
		return err
	}
	defer unlock()
	for _, f := range families() {
		if wanted[f.name] || flags.NArg() == 0 && !f.optional {
			if err := f.ensure(ctx, filepath.Join(*modules, f.name), target, out); err != nil {
				return err
			}
		}
		delete(wanted, f.name)
	}
	if wanted["packages"] || flags.NArg() == 0 {
		delete(wanted, "packages")
		if err := ensurePackages(ctx, out); err != nil {
			return err
		}
	}
	for name := range wanted {
		return fmt.Errorf("build %q: there is no such family of tools", name)
	}
	return nil
}

// lock waits for another build: it probably builds what we need. It returns what ends the lock.
func lock(dir string, out io.Writer) (func(), error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create target folder: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		fmt.Fprintln(out, "waiting for another build of the tools")
		if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
			return nil, fmt.Errorf("lock target folder: %w", err)
		}
	}
	return func() { _ = file.Close() }, nil
}

// ensure builds the family unless its programs are there and made from the same sources and flags.
func (f family) ensure(ctx context.Context, module, target string, out io.Writer) error {
	flags, version, err := f.flags(module)
	if err != nil {
		return err
	}
	stamp, err := f.stamp(module, flags)
	if err != nil {
		return err
	}
	stampFile := filepath.Join(target, ".stamp-"+f.name)
	if f.complete(target) {
		if old, readErr := os.ReadFile(stampFile); readErr == nil && string(old) == stamp {
			return nil
		}
	}
	begin := time.Now()
	fmt.Fprintf(out, "building %s %s, about %s the first time ...\n", f.name, version, f.duration)
	temp, err := os.MkdirTemp(target, ".build-")
	if err != nil {
		return fmt.Errorf("create folder for build: %w", err)
	}
	defer os.RemoveAll(temp)
	if err := f.build(ctx, module, temp, flags, out); err != nil {
		return err
	}
	for pkg, name := range f.programs {
		if err := os.Rename(filepath.Join(temp, goName(pkg)), filepath.Join(target, name)); err != nil {
			return fmt.Errorf("install %s: %w", name, err)
		}
	}
	if err := os.WriteFile(stampFile, []byte(stamp), 0o644); err != nil {
		return fmt.Errorf("write stamp of %s: %w", f.name, err)
	}
	fmt.Fprintf(out, "built %s %s in %v\n", f.name, version, time.Since(begin).Round(time.Second))
	return nil
}

// flags returns the arguments of go build and the version that they stamp.
func (f family) flags(module string) (flags []string, version string, err error) {
	gomod, err := os.ReadFile(filepath.Join(module, "go.mod"))
	if err != nil {
		return nil, "", fmt.Errorf("read module of %s: %w", f.name, err)
	}
	match := regexp.MustCompile(`(?m)^\s*(?:require )?` + regexp.QuoteMeta(f.module) + ` v((\d+)\.(\d+)\.\S+)`).FindSubmatch(gomod)
	if match == nil {
		return nil, "", fmt.Errorf("read module of %s: go.mod does not require %s", f.name, f.module)
	}
	version = string(match[1])
	replacer := strings.NewReplacer("{v}", "v"+version, "{n}", version, "{major}", string(match[2]), "{minor}", string(match[3]))
	var ldflags strings.Builder
	ldflags.WriteString("-s -w")
	for _, variable := range f.stamps {
		ldflags.WriteString(" -X " + replacer.Replace(variable))
	}
	flags = []string{"-trimpath", "-ldflags", ldflags.String()}
	if f.tags != "" {
		flags = append(flags, "-tags", f.tags)
	}
	return flags, version, nil
}

func (f family) stamp(module string, flags []string) (string, error) {
	sum := sha256.New()
	fmt.Fprintln(sum, runtime.Version(), runtime.GOARCH, f.static, flags)
	for _, name := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(filepath.Join(module, name))
		if err != nil {
			return "", fmt.Errorf("read module of %s: %w", f.name, err)
		}
		fmt.Fprintf(sum, "%s %d\n%s", name, len(data), data)
	}
	return fmt.Sprintf("%x\n", sum.Sum(nil)), nil
}

func (f family) complete(target string) bool {
	for _, name := range f.programs {
		if _, err := os.Stat(filepath.Join(target, name)); err != nil {
			return false
		}
	}
	return true
}

// build runs go build and shows every half minute how far it is.
func (f family) build(ctx context.Context, module, target string, flags []string, out io.Writer) error {
	args := append([]string{"build", "-v", "-o", target + "/"}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, "tool")...)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	if f.static {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=0")
	}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return fmt.Errorf("build %s: %w", f.name, err)
	}
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("build %s: %w", f.name, err)
	}
	// With -v the compiler prints a package path per line; anything else is worth showing at the end.
	var other bytes.Buffer
	var packages atomic.Int64
	stopProgress := progress(30*time.Second, func() {
		fmt.Fprintf(out, "  %s: %d packages compiled after %v\n", f.name, packages.Load(), time.Since(begin).Round(time.Second))
	})
	defer stopProgress()
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		if strings.ContainsAny(lines.Text(), " :#\t") {
			other.WriteString(lines.Text() + "\n")
		} else {
			packages.Add(1)
		}
	}
	if err := errors.Join(lines.Err(), cmd.Wait()); err != nil {
		return fmt.Errorf("build %s: %w\n%s", f.name, err, other.String())
	}
	return nil
}

// progress calls show at each interval until it is stopped: linking is long and silent.
func progress(interval time.Duration, show func()) (stop func()) {
	done := make(chan struct{})
	tick := time.NewTicker(interval)
	go func() {
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				show()
			}
		}
	}()
	return func() { close(done) }
}

// goName is the name that go build gives a program: the last element, major versions left out.
func goName(pkg string) string {
	parts := strings.Split(pkg, "/")
	last := parts[len(parts)-1]
	if regexp.MustCompile(`^v[0-9]+$`).MatchString(last) {
		return parts[len(parts)-2]
	}
	return last
}
