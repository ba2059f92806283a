// SPDX-License-Identifier: Apache-2.0

package nvmlsock

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// SocketName is the file beside the library.
const SocketName = "nvml.sock"

// Return codes of NVML.
const (
	errInvalidArgument = 2
	errNotFound        = 6
	errDriverNotLoaded = 9
	errInUse           = 19
	errUnknown         = 999
	errInvalidState    = 29
)

const maxLine = 4096

// Driver is what the requests reach.
type Driver interface {
	GPUs(machine string) ([]core.Device, error)
	SetDrain(machine, address string, on bool) error
	SetPersistence(machine, address string, on bool) error
	RemoveGPU(machine, address string) error
	Discover(machine string) error
	Users(machine, address string) ([]simapi.Holder, error)
}

// Server serves the socket of one machine.
type Server struct {
	dir     string
	machine string
	driver  Driver
	info    config.Driver

	mu        sync.Mutex
	listener  *net.UnixListener
	conns     map[net.Conn]bool
	listeners map[chan string]bool
	work      sync.WaitGroup
}

// New takes the directory of the library; SetLoaded starts the server.
func New(dir, machine string, driver Driver, info config.Driver) *Server {
	return &Server{
		dir: dir, machine: machine, driver: driver, info: info,
		conns: map[net.Conn]bool{}, listeners: map[chan string]bool{},
	}
}

// SetLoaded makes the socket come and go as the driver is loaded and unloaded.
func (s *Server) SetLoaded(loaded bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if loaded == (s.listener != nil) {
		return nil
	}
	if loaded {
		return s.listenLocked()
	}
	return s.closeLocked()
}

// Close unloads the driver and waits for the connections.
func (s *Server) Close() error {
	err := s.SetLoaded(false)
	s.work.Wait()
	return err
}

// listenLocked binds through the directory's descriptor, because a socket path may hold 107 bytes only. A socket that a killed
// run left is replaced.
func (s *Server) listenLocked() error {
	if err := os.Remove(filepath.Join(s.dir, SocketName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace NVML socket: %w", err)
	}
	dir, err := os.Open(s.dir)
	if err != nil {
		return fmt.Errorf("listen for the NVML library: %w", err)
	}
	defer dir.Close()
	path := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), SocketName)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return fmt.Errorf("listen for the NVML library in %s: %w", s.dir, err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o666); err != nil { //nolint:gosec // every process of the node may ask its driver
		return errors.Join(fmt.Errorf("open NVML socket to everybody: %w", err), l.Close())
	}
	s.listener = l
	s.work.Go(func() { s.accept(l) })
	return nil
}

func (s *Server) closeLocked() error {
	err := s.listener.Close()
	s.listener = nil
	for c := range s.conns {
		// The peer may have gone already.
		_ = c.Close()
	}
	return errors.Join(err, os.Remove(filepath.Join(s.dir, SocketName)))
}

func (s *Server) accept(l *net.UnixListener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.listener != l {
			s.mu.Unlock()
			_ = c.Close() // the driver is gone, and the connection with it
			return
		}
		s.conns[c] = true
		s.work.Go(func() { s.serve(c) })
		s.mu.Unlock()
	}
}

func (s *Server) serve(c net.Conn) {
	defer func() {
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		_ = c.Close()
	}()
	in := bufio.NewReaderSize(c, maxLine)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return
		}
		fields := strings.Fields(string(line))
		if len(fields) == 1 && fields[0] == "events" {
			s.stream(c, in)
			return
		}
		if _, err := c.Write([]byte(s.answer(fields))); err != nil {
			return
		}
	}
}

// answer is the whole answer to one request.
func (s *Server) answer(fields []string) string {
	lines, err := s.do(fields)
	if err != nil {
		return fmt.Sprintf("err %d\n.\n", code(err))
	}
	return strings.Join(append(lines, "ok", ".", ""), "\n")
}

var errBadRequest = errors.New("request is not understood")

func (s *Server) do(fields []string) ([]string, error) {
	if len(fields) == 0 {
		return nil, errBadRequest
	}
	name, args := fields[0], fields[1:]
	wants := map[string]int{"list": 0, "discover": 0, "procs": 1, "remove": 1, "drain": 2, "persistence": 2}
	if n, ok := wants[name]; !ok || n != len(args) {
		return nil, fmt.Errorf("%q: %w", fields, errBadRequest)
	}
	on := len(args) == 2 && args[1] == "1"
	if len(args) == 2 && !on && args[1] != "0" {
		return nil, fmt.Errorf("%q: %w", fields, errBadRequest)
	}
	switch name {
	case "list":
		return s.list()
	case "discover":
		return nil, s.driver.Discover(s.machine)
	case "procs":
		return s.procs(Address(args[0]))
	case "remove":
		return nil, s.driver.RemoveGPU(s.machine, Address(args[0]))
	case "drain":
		return nil, s.driver.SetDrain(s.machine, Address(args[0]), on)
	default:
		return nil, s.driver.SetPersistence(s.machine, Address(args[0]), on)
	}
}

// Address turns NVML's form of a PCI address, with a domain of eight digits and capitals, into that of sysfs.
func Address(pci string) string {
	pci = strings.ToLower(pci)
	if domain, rest, ok := strings.Cut(pci, ":"); ok && len(domain) == 8 {
		return domain[4:] + ":" + rest
	}
	return pci
}

func (s *Server) list() ([]string, error) {
	gpus, err := s.driver.GPUs(s.machine)
	if err != nil {
		return nil, err
	}
	out := []string{fmt.Sprintf("driver\tversion=%s\tcuda=%d\tnvml=%s", s.info.Version, s.info.CUDAVersion, s.info.NVMLVersion)}
	for i, d := range gpus {
		out = append(out, strings.Join([]string{
			"pci=" + d.Address(), "uuid=" + d.UUID, fmt.Sprintf("minor=%d", d.Minor), "name=" + d.ProductName,
			fmt.Sprintf("memory=%d", d.MemoryMiB<<20), "serial=" + d.Serial, "arch=" + d.Arch,
			"persistence=" + bit(d.Persistence), "drain=" + bit(d.Drain), "mig=0", fmt.Sprintf("index=%d", i),
			"device=" + d.PCIDevice,
		}, "\t"))
	}
	return out, nil
}

func bit(on bool) string {
	if on {
		return "1"
	}
	return "0"
}

func (s *Server) procs(address string) ([]string, error) {
	users, err := s.driver.Users(s.machine, address)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, u := range users {
		out = append(out, fmt.Sprintf("proc\tpid=%d\tused=%d", u.PID, 256<<20))
	}
	return out, nil
}

func code(err error) int {
	for _, c := range []struct {
		err  error
		code int
	}{
		{errBadRequest, errInvalidArgument},
		{core.ErrNotFound, errNotFound},
		{core.ErrNoDriver, errDriverNotLoaded},
		{core.ErrInUse, errInUse},
		{core.ErrNotDraining, errInvalidState},
	} {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	return errUnknown
}

// XID sends an error event to all that listen.
func (s *Server) XID(address string, xid uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.listeners {
		select {
		case ch <- fmt.Sprintf("xid\tpci=%s\tcode=%d\n", address, xid):
		default: // as the driver, which drops events that nobody fetches
		}
	}
}

// stream sends events until the peer closes.
func (s *Server) stream(c net.Conn, in *bufio.Reader) {
	ch := make(chan string, 64)
	gone := make(chan struct{})
	s.mu.Lock()
	s.listeners[ch] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, ch)
		s.mu.Unlock()
	}()
	s.work.Go(func() {
		defer close(gone)
		for {
			if _, err := in.ReadByte(); err != nil {
				return
			}
		}
	})
	for {
		select {
		case <-gone:
			return
		case line := <-ch:
			if _, err := c.Write([]byte(line)); err != nil {
				return
			}
		}
	}
}
