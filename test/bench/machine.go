// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// machine describes where the figures come from.
func machine(ctx context.Context, o options) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	version := func(tool string, args ...string) string {
		out, err := exec.CommandContext(ctx, filepath.Join(o.bin, tool), args...).Output()
		first, _, _ := strings.Cut(string(out), "\n")
		if err != nil {
			return "unknown"
		}
		return strings.TrimSpace(first)
	}
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		kernel = []byte("unknown")
	}
	return fmt.Sprintf("%s, with `%s`: %d cores (%s), %.0f GiB of memory, Linux %s, %s, %s, %s, etcd without fsync, %s.",
		time.Now().UTC().Format("2006-01-02"), o.commandLine(), runtime.NumCPU(), processor(), memory(), strings.TrimSpace(string(kernel)),
		version("kube-apiserver", "--version"), version("etcd", "--version"), version("containerd", "--version"), runtime.Version())
}

// commandLine is what a person types for these parts.
func (o options) commandLine() string {
	if len(o.parts) == len(allParts()) {
		return "make bench"
	}
	return "make bench PARTS=" + strings.Join(o.parts, ",")
}

func processor() string {
	for line := range strings.Lines(file("/proc/cpuinfo")) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

func memory() float64 {
	var kib float64
	for line := range strings.Lines(file("/proc/meminfo")) {
		if _, err := fmt.Sscanf(line, "MemTotal: %f kB", &kib); err == nil {
			break
		}
	}
	return kib / (1 << 20)
}

// file is its content, nothing if it cannot be read.
func file(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(data)
}

// load is how busy the machine was while something was measured, this program's cluster included.
type load struct {
	begin      time.Time
	busy, idle float64
}

func newLoad() *load {
	l := &load{begin: time.Now()}
	l.busy, l.idle = ticks()
	return l
}

// ticks are the clock ticks that all cores were busy and idle since the machine started.
func ticks() (busy, idle float64) {
	line, _, _ := strings.Cut(file("/proc/stat"), "\n")
	for i, field := range strings.Fields(line) {
		var n float64
		if _, err := fmt.Sscanf(field, "%f", &n); err != nil {
			continue
		}
		switch i {
		case 4, 5: // idle, waiting for a disk
			idle += n
		case 1, 2, 3, 6, 7, 8:
			busy += n
		}
	}
	return busy, idle
}

// cell says it in short: how much of the time the cores were busy, and the load average now.
func (l *load) cell() string {
	busy, idle := ticks()
	busy, idle = busy-l.busy, idle-l.idle
	average, _, _ := strings.Cut(file("/proc/loadavg"), " ")
	return fmt.Sprintf("%.0f %%, %s", 100*busy/max(busy+idle, 1), average)
}

// String says it in a sentence.
func (l *load) String() string {
	busy, average, _ := strings.Cut(l.cell(), ", ")
	return fmt.Sprintf("Meanwhile the machine's cores were busy for %s of the time, load average %s at the end.", busy, average)
}
