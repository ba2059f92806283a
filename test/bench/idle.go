// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// clockTick is USER_HZ, in which the kernel tells of processor time on every architecture.
const clockTick = 10 * time.Millisecond

// usage is what a process has used since it started, and what it holds now.
type usage struct {
	cpu      time.Duration
	resident int64 // bytes
	wakeups  int64 // voluntary context switches of all threads
	threads  int
}

// usageOf reads what /proc tells of a process.
func usageOf(pid int) (usage, error) {
	var u usage
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return u, fmt.Errorf("read what process %d uses: %w", pid, err)
	}
	// The command name may hold blanks and parentheses: count fields after the last ")".
	fields := strings.Fields(string(stat[strings.LastIndex(string(stat), ")")+1:]))
	const user, system = 11, 12
	if len(fields) <= system {
		return u, fmt.Errorf("read what process %d uses: %s/stat has an unexpected form", pid, dir)
	}
	for _, i := range []int{user, system} {
		n, bad := strconv.ParseInt(fields[i], 10, 64)
		if bad != nil {
			return u, fmt.Errorf("read what process %d uses: %w", pid, bad)
		}
		u.cpu += time.Duration(n) * clockTick
	}
	u.resident = statusValue(filepath.Join(dir, "status"), "VmRSS") << 10
	tasks, err := filepath.Glob(filepath.Join(dir, "task", "*", "status"))
	if err != nil || len(tasks) == 0 || u.resident == 0 {
		return u, errors.Join(fmt.Errorf("read what process %d uses: it has ended", pid), err)
	}
	u.threads = len(tasks)
	for _, task := range tasks {
		u.wakeups += statusValue(task, "voluntary_ctxt_switches")
	}
	return u, nil
}

// statusValue is a number of a status file, 0 if it is not there: a thread may have ended meanwhile.
func statusValue(path, name string) int64 {
	for line := range strings.Lines(file(path)) {
		if key, value, ok := strings.Cut(line, ":"); ok && key == name {
			if n, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64); err == nil {
				return n
			}
		}
	}
	return 0
}

// agentOn is the process of the agent on a node.
func agentOn(node string) (int, error) {
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, fmt.Errorf("find the agent of %s: %w", node, err)
	}
	var found []int
	for _, path := range commands {
		args := strings.Split(file(path), "\x00")
		if len(args) > 2 && filepath.Base(args[0]) == device.AgentName && args[1] == "run" && slices.Contains(args, "--node-name="+node) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			if err != nil {
				return 0, fmt.Errorf("find the agent of %s: %w", node, err)
			}
			found = append(found, pid)
		}
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("find the agent of %s: there are %d processes, not one", node, len(found))
	}
	return found[0], nil
}

// leader is the node whose agent leads the fabric.
func (b *bench) leader(ctx context.Context) (string, error) {
	l, err := b.client.CoordinationV1().Leases(device.LeaseNamespace).Get(ctx, fabric.ElectionLease(), metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read who leads: %w", err)
	}
	node, _, _ := strings.Cut(ptr.Deref(l.Spec.HolderIdentity, ""), "/")
	return node, nil
}

// settle is how long the agents are left alone before part c watches: what they do once after a start or after
// the last GPU came back is not what they do when idle.
const settle = 15 * time.Second

// idle is part c.
func (b *bench) idle(ctx context.Context) error {
	if err := pause(ctx, settle); err != nil {
		return err
	}
	if _, err := b.calm(ctx); err != nil {
		return err
	}
	if err := b.world.settled(); err != nil {
		return fmt.Errorf("the cluster is not idle: %w", err)
	}
	leads, err := b.leader(ctx)
	if err != nil {
		return err
	}
	pids, before := map[string]int{}, map[string]usage{}
	for _, node := range localkube.Nodes() {
		if pids[node.Name], err = agentOn(node.Name); err != nil {
			return err
		}
		if before[node.Name], err = usageOf(pids[node.Name]); err != nil {
			return err
		}
	}
	if _, err = b.audit.read(); err != nil {
		return err
	}
	load := newLoad()
	if err = pause(ctx, b.o.idle); err != nil {
		return err
	}
	calls, err := b.audit.read()
	if err != nil {
		return err
	}
	b.say("\n## c. Nothing to do\n")
	b.say("%s long, no Pod asks for a GPU. %s\n", b.o.idle, load)
	t := newTable("agent", "CPU", "resident memory", "wake-ups", "threads")
	for _, node := range localkube.Nodes() {
		after, err := usageOf(pids[node.Name])
		if err != nil {
			return err
		}
		name := node.Name
		if name == leads {
			name += ", the leader"
		}
		was := before[node.Name]
		cpu := (after.cpu - was.cpu).Seconds() / b.o.idle.Seconds()
		t.add(name, fmt.Sprintf("%.2f %% of a core", 100*cpu), fmt.Sprintf("%.1f MiB", float64(after.resident)/(1<<20)),
			fmt.Sprintf("%.1f a second", float64(after.wakeups-was.wakeups)/b.o.idle.Seconds()), strconv.Itoa(after.threads))
	}
	t.add("target", "", "60 MiB at most", "", "")
	b.say("%s", t)
	b.reportCalls(calls)
	if now, err := b.leader(ctx); err != nil || now != leads {
		return errors.Join(fmt.Errorf("the leader changed from %s to %s while nothing happened", leads, now), err)
	}
	return nil
}

// reportCalls says who asked the API server for what while nothing happened.
func (b *bench) reportCalls(calls []call) {
	minutes := b.o.idle.Minutes()
	type row struct{ node, object, verb string }
	count := map[row]int{}
	for i := range calls {
		if c := &calls[i]; c.byAgent() {
			count[row{c.node(), c.object(), c.Verb}]++
		}
	}
	rows := make([]row, 0, len(count))
	for r := range count {
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.node+a.verb+a.object, b.node+b.verb+b.object) })
	t := newTable("agent", "object", "calls", "a minute")
	for _, r := range rows {
		t.add(r.node, r.object, r.verb, fmt.Sprintf("%.1f", float64(count[r])/minutes))
	}
	t.add("target", electionLease, "update", "6.0 by the leader, and no other write")
	b.say("%s", t)
}
