// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// kernelGroup is the multicast group of the kernel's own uevents; udev's copies go to another.
	kernelGroup = 1
	// receiveBuffer is what the socket holds before events are lost: a chassis that is switched on
	// sends hundreds within milliseconds.
	receiveBuffer = 1 << 20
	// eventSize is larger than any uevent (2 KiB of environment and a path).
	eventSize = 16 << 10
)

// uevent is one message of the kernel.
type uevent struct {
	action    string
	devPath   string
	subsystem string
}

// parseUevent reads "add@/devices/..." followed by NUL-terminated KEY=value pairs.
func parseUevent(msg []byte) (uevent, error) {
	head, rest, ok := bytes.Cut(msg, []byte{0})
	if !ok {
		return uevent{}, errors.New("uevent has no terminated header")
	}
	action, devPath, ok := strings.Cut(string(head), "@")
	if !ok || action == "" || !strings.HasPrefix(devPath, "/") {
		return uevent{}, fmt.Errorf("uevent header %q is not of the form action@/path", head)
	}
	e := uevent{action: action, devPath: devPath}
	for field := range bytes.SplitSeq(rest, []byte{0}) {
		if value, ok := bytes.CutPrefix(field, []byte("SUBSYSTEM=")); ok {
			e.subsystem = string(value)
		}
	}
	return e, nil
}

// matters tells whether the event may change what this package reports: a function that came, went or
// was bound, or a driver that was loaded.
func (e uevent) matters() bool {
	return e.subsystem == "pci" || e.subsystem == "module" || e.subsystem == "drivers"
}

// openUevents subscribes to the kernel's uevents.
func openUevents() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("open uevent socket: %w", err)
	}
	// The forced form ignores the system's limit but needs CAP_NET_ADMIN; a smaller buffer only means
	// more overruns, and those are handled.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer); err != nil {
			return nil, errors.Join(fmt.Errorf("size uevent socket: %w", err), unix.Close(fd))
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		return nil, errors.Join(fmt.Errorf("join the kernel's uevent group: %w", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "uevents"), nil
}

// initialUserNamespace is the inode number of the first user namespace (include/linux/proc_ns.h).
const initialUserNamespace = 0xEFFFFFFD

// checkAudible returns an error if the kernel sends no uevents to this process: it sends them only to
// network namespaces that belong to the initial user namespace.
func checkAudible() error {
	ns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer ns.Close()
	owner, err := unix.IoctlRetInt(int(ns.Fd()), unix.NS_GET_USERNS)
	if errors.Is(err, unix.EPERM) {
		return errors.New("own network namespace belongs to a user namespace outside of ours: the kernel's uevents may not arrive")
	}
	if err != nil {
		return fmt.Errorf("ask for the owner of own network namespace: %w", err)
	}
	defer unix.Close(owner)
	var st unix.Stat_t
	if err := unix.Fstat(owner, &st); err != nil {
		return fmt.Errorf("stat owner of own network namespace: %w", err)
	}
	if st.Ino != initialUserNamespace {
		return errors.New("own network namespace belongs to a user namespace (hostUsers: false): the kernel sends it no uevents")
	}
	return nil
}
