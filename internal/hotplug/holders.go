// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Holder is a process that uses a device.
type Holder struct {
	PID     int
	Command string
	// Container is the id of its container, "" outside of one or where the cgroup does not tell.
	Container string
	// Pod is the uid of its Pod, "" likewise.
	Pod string
	// Agent is set for an agent of this host: it has the agents' file open (Options.AgentFile).
	Agent bool
	// Mapped is set if the process holds the device only by a memory mapping.
	Mapped bool
}

// String names the process for a person.
func (h Holder) String() string {
	s := fmt.Sprintf("%s (pid %d", h.Command, h.PID)
	if h.Container != "" {
		s += ", container " + h.Container[:min(12, len(h.Container))]
	}
	if h.Pod != "" {
		s += ", Pod " + h.Pod
	}
	return s + ")"
}

// Holders returns the processes of the host that have one of the devices open or mapped, by device
// number, so that another path or another container's /dev makes no difference. One pass over all
// processes answers for all numbers. A process that ends meanwhile is not an error. One that cannot be
// inspected is, unless it is the host's init: the error is then ErrIncomplete, and what was found is
// returned beside it.
func (p *PCI) Holders(ctx context.Context, numbers ...DeviceNumber) (map[DeviceNumber][]Holder, error) {
	s := holderScan{
		ctx:    ctx,
		proc:   filepath.Join(p.root, "proc"),
		wanted: make(map[DeviceNumber]bool, len(numbers)),
		mapped: make(map[mappedFile]DeviceNumber),
		found:  make(map[DeviceNumber][]Holder, len(numbers)),
	}
	for _, n := range numbers {
		s.wanted[n] = true
	}
	if p.agents != "" {
		file, err := os.Stat(p.agents)
		if err != nil {
			return nil, fmt.Errorf("look for the file that tells an agent of this host: %w", err)
		}
		s.agentFile = file
	}
	err := forEachProcess(ctx, s.proc, s.process)
	if err == nil && len(s.refused) > 0 {
		err = fmt.Errorf("%w: pids %s", ErrIncomplete, strings.Join(s.refused, ", "))
	}
	if err != nil {
		return s.found, fmt.Errorf("look for users of devices: %w", err)
	}
	return s.found, nil
}

// initPID is the host's init. Hardened and sandboxed hosts hide it even from a privileged Pod; as it opens
// no GPU, that must not keep every device from being released.
const initPID = 1

// holderScan is one pass.
type holderScan struct {
	ctx     context.Context //nolint:containedctx // lives for one call of Holders
	proc    string
	wanted  map[DeviceNumber]bool
	mapped  map[mappedFile]DeviceNumber // files of mappings that were looked at; zero if no wanted device
	found   map[DeviceNumber][]Holder
	refused []string
	// agentFile is the file that an agent has open, nil if nothing tells one.
	agentFile os.FileInfo
}

// mappedFile identifies a file by the columns of /proc/<pid>/maps.
type mappedFile struct {
	dev   string
	inode uint64
}

// process inspects one process.
func (s *holderScan) process(dir string, pid int) error {
	open := make(map[DeviceNumber]bool)
	inMap := make(map[DeviceNumber]bool)
	err := s.openFiles(dir, open)
	if err == nil {
		err = s.mappings(dir, inMap)
	}
	switch {
	case gone(err):
		// What was seen before the process ended does not count: it has let go.
		return nil
	case errors.Is(err, fs.ErrPermission):
		if pid == initPID {
			return nil
		}
		s.refused = append(s.refused, strconv.Itoa(pid))
	case err != nil:
		return fmt.Errorf("inspect process %d: %w", pid, err)
	}
	for n := range open {
		s.add(n, dir, pid, false)
	}
	for n := range inMap {
		if !open[n] {
			s.add(n, dir, pid, true)
		}
	}
	return nil
}

func (s *holderScan) add(n DeviceNumber, dir string, pid int, mapped bool) {
	h := Holder{PID: pid, Mapped: mapped, Command: "?"}
	if comm, err := readTrimmed(dir, "comm"); err == nil {
		h.Command = comm
	}
	// Best effort: without it the process is still named.
	if cgroup, err := os.ReadFile(filepath.Join(dir, "cgroup")); err == nil {
		h.Container, h.Pod = parseCgroup(string(cgroup))
	}
	if s.agentFile != nil {
		// One that cannot be told is taken for a user.
		agent, err := hasOpen(dir, s.agentFile.Name(), s.agentFile)
		h.Agent = err == nil && agent
	}
	s.found[n] = append(s.found[n], h)
}

// openFiles records the wanted devices that a process has open.
func (s *holderScan) openFiles(dir string, open map[DeviceNumber]bool) error {
	fds, err := s.openFilesOf(filepath.Join(dir, "fd"), open)
	if err != nil || fds > 0 {
		return err
	}
	// The first thread may have ended while others run on with the files.
	tasks, err := os.ReadDir(filepath.Join(dir, "task"))
	if err != nil {
		return err
	}
	for _, t := range tasks {
		if t.Name() == filepath.Base(dir) {
			continue
		}
		if _, err := s.openFilesOf(filepath.Join(dir, "task", t.Name(), "fd"), open); err != nil && !gone(err) {
			return err
		}
	}
	return nil
}

func (s *holderScan) openFilesOf(dir string, open map[DeviceNumber]bool) (int, error) {
	d, err := os.Open(dir)
	if err != nil {
		return 0, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		n, ok, err := deviceOf(int(d.Fd()), name)
		if err != nil {
			if gone(err) || errors.Is(err, syscall.EBADF) {
				continue // closed meanwhile
			}
			return len(names), fmt.Errorf("stat %s/%s: %w", dir, name, err)
		}
		if ok && s.wanted[n] {
			open[n] = true
		}
	}
	return len(names), nil
}

// deviceOf returns the device number behind a link of procfs, ok only for a character device. It asks
// for what the kernel already knows: a network file system that hangs must not hang the scan.
func deviceOf(dirfd int, name string) (n DeviceNumber, ok bool, err error) {
	var st unix.Statx_t
	if err := unix.Statx(dirfd, name, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st); err != nil {
		return n, false, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return n, false, nil
	}
	return DeviceNumber{Major: st.Rdev_major, Minor: st.Rdev_minor}, true, nil
}

// mappings records the wanted devices that a process has mapped. The device column of maps is that of
// the file system, so each file is looked at once, over all processes.
func (s *holderScan) mappings(dir string, inMap map[DeviceNumber]bool) error {
	maps, err := os.Open(filepath.Join(dir, "maps"))
	if err != nil {
		return err
	}
	defer maps.Close()
	lines := bufio.NewReader(maps)
	for {
		line, readErr := lines.ReadBytes('\n')
		if m, ok := parseMapping(line); ok {
			n, err := s.mappedDevice(dir, m)
			if err != nil {
				return err
			}
			if s.wanted[n] {
				inMap[n] = true
			}
		}
		if errors.Is(readErr, io.EOF) {
			return nil
		}
		if readErr != nil {
			return readErr
		}
	}
}

func (s *holderScan) mappedDevice(dir string, m mapping) (DeviceNumber, error) {
	if n, known := s.mapped[m.file]; known {
		return n, nil
	}
	n, ok, err := deviceOf(unix.AT_FDCWD, filepath.Join(dir, "map_files", m.span))
	switch {
	case gone(err):
		return DeviceNumber{}, nil // unmapped meanwhile
	case errors.Is(err, fs.ErrPermission):
		// map_files needs a capability that not every setup grants; the path in the process's own
		// view is the next best.
		n, ok, err = deviceOf(unix.AT_FDCWD, filepath.Join(dir, "root", m.path))
		if gone(err) {
			return DeviceNumber{}, nil
		}
	}
	if err != nil {
		return DeviceNumber{}, fmt.Errorf("stat mapping %s of %s: %w", m.span, m.path, err)
	}
	if !ok {
		n = DeviceNumber{}
	}
	s.mapped[m.file] = n
	return n, nil
}

// mapping is one line of maps that is backed by a file.
type mapping struct {
	span string
	file mappedFile
	path string
}

// parseMapping reads "7f00-7f01 rw-s 00000000 00:06 123   /dev/nvidia0"; ok is false for memory without
// a file.
func parseMapping(line []byte) (m mapping, ok bool) {
	line = bytes.TrimSuffix(line, []byte("\n"))
	var fields [5]string
	for i := range fields {
		line = bytes.TrimLeft(line, " ")
		field, rest, found := bytes.Cut(line, []byte(" "))
		if !found {
			return m, false
		}
		fields[i], line = string(field), rest
	}
	path := string(bytes.TrimLeft(line, " "))
	inode, err := strconv.ParseUint(fields[4], 10, 64)
	if err != nil || inode == 0 || !strings.HasPrefix(path, "/") {
		return m, false
	}
	if !spanForm.MatchString(fields[0]) {
		return m, false
	}
	return mapping{
		span: fields[0],
		file: mappedFile{dev: fields[3], inode: inode},
		path: strings.TrimSuffix(path, " (deleted)"),
	}, true
}

var (
	spanForm      = regexp.MustCompile(`^[0-9a-f]+-[0-9a-f]+$`)
	containerForm = regexp.MustCompile(`[0-9a-f]{64}`)
	podForm       = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})`)
)

// parseCgroup finds container id and Pod uid in the paths that kubelet and container runtimes make, with
// either cgroup driver and either cgroup version.
func parseCgroup(cgroup string) (container, pod string) {
	for line := range strings.Lines(cgroup) {
		if all := containerForm.FindAllString(line, -1); len(all) > 0 {
			container = all[len(all)-1]
		}
		if m := podForm.FindStringSubmatch(line); m != nil {
			pod = strings.ReplaceAll(m[1], "_", "-")
		}
		if container != "" {
			break
		}
	}
	return container, pod
}

// forEachProcess calls f for each process below proc.
func forEachProcess(ctx context.Context, proc string, f func(dir string, pid int) error) error {
	d, err := os.Open(proc)
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	names, err := d.Readdirnames(-1)
	if err = errors.Join(err, d.Close()); err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	seen := false
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid <= 0 {
			continue
		}
		seen = true
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := f(filepath.Join(proc, name), pid); err != nil {
			return err
		}
	}
	if !seen {
		return fmt.Errorf("list processes: none in %s; is the host's procfs mounted there?", proc)
	}
	return nil
}

// writerOf returns a process that has the file open, 0 if none has. The file is compared by identity,
// since other mount namespaces see it under other paths.
func (p *PCI) writerOf(ctx context.Context, file string) (int, error) {
	info, err := os.Stat(file)
	if gone(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	writer := 0
	err = forEachProcess(ctx, filepath.Join(p.root, "proc"), func(dir string, pid int) error {
		has, failure := hasOpen(dir, filepath.Base(file), info)
		if has {
			writer = pid
		}
		return failure
	})
	return writer, err
}

// hasOpen tells whether a process has the file of this name open.
func hasOpen(dir, base string, file os.FileInfo) (bool, error) {
	fds, err := filepath.Glob(filepath.Join(dir, "fd", "*"))
	if err == nil && len(fds) == 0 {
		fds, err = filepath.Glob(filepath.Join(dir, "task", "*", "fd", "*"))
	}
	if err != nil {
		return false, err
	}
	for _, fd := range fds {
		// The name is compared first, as a stat may block on a file system that hangs.
		target, closed := os.Readlink(fd)
		if closed != nil || filepath.Base(target) != base {
			continue
		}
		if other, statErr := os.Stat(fd); statErr == nil && os.SameFile(file, other) {
			return true, nil
		}
	}
	return false, nil
}
