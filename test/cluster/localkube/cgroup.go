// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// hierarchy is one mounted cgroup tree. A machine has several with cgroup v1 and one with v2.
type hierarchy struct {
	path        string
	controllers []string // v1 only
	v2          bool
}

// hierarchies finds every cgroup tree of this machine.
func hierarchies() ([]hierarchy, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find cgroup trees: %w", err)
	}
	defer file.Close()
	var found []hierarchy
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if h, ok := parseHierarchy(lines.Text()); ok {
			found = append(found, h)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read mount table: %w", err)
	}
	if len(found) == 0 {
		return nil, errors.New("find cgroup trees: none is mounted, containers cannot run here")
	}
	return found, nil
}

func parseHierarchy(mountinfo string) (hierarchy, bool) {
	before, after, ok := strings.Cut(mountinfo, " - ")
	mount, super := strings.Fields(before), strings.Fields(after)
	if !ok || len(mount) < 5 || len(super) < 3 {
		return hierarchy{}, false
	}
	switch super[0] {
	case "cgroup2":
		return hierarchy{path: mount[4], v2: true}, true
	case "cgroup":
		return hierarchy{path: mount[4], controllers: strings.Split(super[2], ",")}, true
	}
	return hierarchy{}, false
}

// tracking chooses the tree by which processes are found again: one that every process is in and
// that container runtimes do not lend to others.
func tracking(all []hierarchy) hierarchy {
	for _, want := range []string{"pids", "name=systemd"} {
		for _, h := range all {
			if slices.Contains(h.controllers, want) {
				return h
			}
		}
	}
	return all[len(all)-1]
}

// makeCgroups creates the named groups in every tree and returns the folder of each in the tracking tree.
func makeCgroups(names ...string) (map[string]string, error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	track := tracking(all)
	dirs := map[string]string{}
	for _, name := range names {
		for _, h := range all {
			if err := h.make(name); err != nil {
				return nil, err
			}
		}
		dirs[name] = filepath.Join(track.path, name)
		if track.v2 {
			// With v2 a group has either processes or child groups: the kubelet needs the latter.
			dirs[name] = filepath.Join(dirs[name], "system")
			if err := os.MkdirAll(dirs[name], 0o755); err != nil {
				return nil, fmt.Errorf("create cgroup: %w", err)
			}
		}
	}
	return dirs, nil
}

// make creates a group and its parents with all controllers usable in it.
func (h hierarchy) make(name string) error {
	dir := h.path
	for part := range strings.SplitSeq(name, "/") {
		parent := dir
		dir = filepath.Join(dir, part)
		if h.v2 {
			if err := enableControllers(parent); err != nil {
				return err
			}
		}
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("create cgroup: %w", err)
		}
		if !slices.Contains(h.controllers, "cpuset") {
			continue
		}
		// A v1 cpuset starts empty, and no process can join an empty one.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			data, err := os.ReadFile(filepath.Join(parent, file))
			if err != nil {
				return fmt.Errorf("read cpuset: %w", err)
			}
			if err := os.WriteFile(filepath.Join(dir, file), data, 0o644); err != nil {
				return fmt.Errorf("fill cpuset: %w", err)
			}
		}
	}
	if h.v2 {
		return enableControllers(dir)
	}
	return nil
}

// enableControllers makes those controllers usable below dir that a kubelet asks for, if the machine has them.
func enableControllers(dir string) error {
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("read cgroup controllers: %w", err)
	}
	for controller := range strings.FieldsSeq(string(data)) {
		if !slices.Contains([]string{"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}, controller) {
			continue
		}
		err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0o644)
		if err != nil {
			return fmt.Errorf("enable cgroup controller %s: %w", controller, err)
		}
	}
	return nil
}

// cgroupProcesses lists the processes in a group of any tree and in the groups below it.
func cgroupProcesses(name string) ([]int, error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	seen := map[int]bool{}
	for _, h := range all {
		err := filepath.WalkDir(filepath.Join(h.path, name), func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // it went away while we looked
			}
			if err != nil || d.IsDir() || d.Name() != "cgroup.procs" {
				return err
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return nil //nolint:nilerr // removed while we looked, or a threaded group: its parent lists them
			}
			for pid := range strings.FieldsSeq(string(data)) {
				if n, err := strconv.Atoi(pid); err == nil && n > 0 {
					seen[n] = true
				}
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("list processes of cgroup %s: %w", name, err)
		}
	}
	pids := make([]int, 0, len(seen))
	for pid := range seen {
		pids = append(pids, pid)
	}
	slices.Sort(pids)
	return pids, nil
}

// killCgroup kills everything in a group until nothing is left: what is killed may fork meanwhile.
func killCgroup(ctx context.Context, name string) error {
	return waitFor(ctx, 20*time.Second, func(context.Context) error {
		pids, err := cgroupProcesses(name)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill pid %d: %w", pid, err)
			}
		}
		return fmt.Errorf("kill processes of cgroup %s: %v still there", name, pids)
	})
}

// removeCgroup removes an empty group with all groups below it from every tree.
func removeCgroup(ctx context.Context, name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	// The kernel frees a dead process's group a little after the process is gone from it.
	return waitFor(ctx, 10*time.Second, func(context.Context) error {
		for _, h := range all {
			if err := removeTree(filepath.Join(h.path, name)); err != nil {
				return fmt.Errorf("remove cgroup: %w", err)
			}
		}
		return nil
	})
}

func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := syscall.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("rmdir %s: %w", dir, err)
	}
	return nil
}
