// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/cdim"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/cm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/control"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/hostroot"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/idm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/nvmlsock"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/procfs"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/redfish"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/sunfish"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/tlsgen"
)

const (
	// numbersPerMachine: nvidiactl and nvidia-uvm.
	numbersPerMachine = 2
	headerTimeout     = 30 * time.Second
	stopTimeout       = 2 * time.Second
)

// Simulator is a whole chassis with its faces.
type Simulator struct {
	cfg     *config.Config
	clk     clock.WithTicker
	core    *core.Core
	faults  *fault.Injector
	tokens  *idm.Manager
	roots   map[string]*hostroot.Root
	drivers map[string]*nvmlsock.Server

	cdim    *cdim.Face    // nil where it is not served
	redfish *redfish.Face // nil where it is not served
	sunfish *sunfish.Face // the same

	fm, control net.Listener
	// gateway and direct are CDIM's, nil where they are not served.
	gateway, direct net.Listener
	composer        net.Listener // Redfish's, nil where it is not served
	sunfishAt       net.Listener // nil where it is not served
	serving         atomic.Bool
	ctx             syncContext
}

// syncContext hands the context of Run to the hooks of the core, which have none of their own.
type syncContext struct {
	mu  sync.Mutex
	ctx context.Context //nolint:containedctx // see above
}

func (s *syncContext) set(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ctx = ctx
}

func (s *syncContext) get() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ctx
}

// New makes or takes over everything in cfg.Dir and opens the listeners. Nothing is served before Run.
func New(ctx context.Context, cfg *config.Config, clk clock.WithTicker) (*Simulator, error) {
	s := &Simulator{
		cfg: cfg, clk: clk, faults: fault.New(clk), tokens: idm.New(cfg, clk),
		roots: map[string]*hostroot.Root{}, drivers: map[string]*nvmlsock.Server{},
	}
	s.ctx.set(ctx)
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil { //nolint:gosec // nodes read it
		return nil, fmt.Errorf("make simulator directory: %w", err)
	}
	if err := s.setReady(false); err != nil {
		return nil, err
	}
	numbers, err := deviceNumbers(cfg)
	if err != nil {
		return nil, err
	}
	options := core.Options{Clock: clk, Numbers: numbers, Hooks: core.Hooks{Changed: s.changed, XID: s.xid}}
	if nodes(cfg) > 0 {
		options.Judge = procfs.Proc("/proc")
	}
	if !cfg.Ephemeral {
		options.StatePath = filepath.Join(cfg.Dir, "state.json")
	}
	if s.core, err = core.New(ctx, cfg, options); err != nil {
		return nil, err
	}
	if err = s.makeMachines(numbers[len(cfg.Devices):]); err != nil {
		return nil, err
	}
	if cfg.Listen.CDIM != "" || cfg.Listen.CDIMDirect != "" {
		o := cdim.Options{Core: s.core, Faults: s.faults, Clock: clk, Dialect: cfg.CDIM.Dialect}
		if !cfg.Ephemeral {
			o.StatePath = filepath.Join(cfg.Dir, "cdim.json")
		}
		if s.cdim, err = cdim.New(ctx, o); err != nil {
			return nil, err
		}
	}
	if cfg.Listen.Redfish != "" {
		s.redfish = redfish.New(ctx, redfish.Options{Core: s.core, Config: cfg, Faults: s.faults, Clock: clk})
	}
	if cfg.Listen.Sunfish != "" {
		o := sunfish.Options{Core: s.core, Faults: s.faults, Clock: clk, Fabrics: cfg.Fabrics}
		if !cfg.Ephemeral {
			o.StatePath = filepath.Join(cfg.Dir, "sunfish.json")
		}
		if s.sunfish, err = sunfish.New(ctx, o); err != nil {
			return nil, err
		}
	}
	return s, s.listen()
}

// nodes is how many machines have a node.
func nodes(cfg *config.Config) int {
	n := 0
	for i := range cfg.Machines {
		if !cfg.Machines[i].NoNode {
			n++
		}
	}
	return n
}

// deviceNumbers are those of the devices and of the drivers' own nodes. Where nobody could open a device none is needed.
func deviceNumbers(cfg *config.Config) ([]core.Number, error) {
	if nodes(cfg) == 0 {
		return make([]core.Number, len(cfg.Devices)), nil
	}
	return hostroot.Numbers(cfg.Dir, len(cfg.Devices)+numbersPerMachine*nodes(cfg))
}

func (s *Simulator) makeMachines(numbers []core.Number) error {
	for _, v := range s.core.Machines() {
		if v.NoNode {
			continue
		}
		control, uvm := numbers[0], numbers[1]
		numbers = numbers[numbersPerMachine:]
		dir := filepath.Join(s.cfg.Dir, "machines", v.Name)
		for _, globs := range [][]string{v.Netns, v.NetnsPIDs} {
			for j := range globs {
				globs[j] = strings.ReplaceAll(globs[j], "{dir}", s.cfg.Dir)
			}
		}
		root, err := hostroot.New(dir, v, s.core, control, uvm)
		if err != nil {
			return err
		}
		s.roots[v.Name] = root
		if v.NoDriver {
			continue
		}
		if err := root.InstallDriver(s.cfg.Driver); err != nil {
			return err
		}
		lib := filepath.Join(root.DriverRoot(), hostroot.LibDir())
		s.drivers[v.Name] = nvmlsock.New(lib, v.Name, s.core, s.cfg.Driver)
	}
	return nil
}

func (s *Simulator) listen() error {
	host, _, err := net.SplitHostPort(s.cfg.Listen.FM)
	if err != nil {
		return fmt.Errorf("listen.fm %q: %w", s.cfg.Listen.FM, err)
	}
	names := append([]string{host}, s.cfg.ServerNames...)
	cert, err := tlsgen.Server(filepath.Join(s.cfg.Dir, "tls"), names, s.clk.Now())
	if err != nil {
		return err
	}
	plain, err := net.Listen("tcp", s.cfg.Listen.FM) //nolint:noctx // at start, on a local address
	if err != nil {
		return fmt.Errorf("listen for the fabric manager's clients: %w", err)
	}
	// HTTP/1 only: a fault that drops a connection must drop no other request.
	secure := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	s.fm = tls.NewListener(plain, secure)
	if err = s.listenOthers(secure); err != nil {
		return errors.Join(err, s.fm.Close())
	}
	s.control, err = net.Listen("tcp", s.cfg.Listen.Control) //nolint:noctx // at start, on a local address
	if err != nil {
		return errors.Join(fmt.Errorf("listen for the control API: %w", err), s.fm.Close())
	}
	return nil
}

// listenOthers opens the addresses of the faces that have their own.
func (s *Simulator) listenOthers(secure *tls.Config) error {
	for _, l := range []struct {
		whose, address string
		plain          bool
		to             *net.Listener
	}{
		{"CDIM", s.cfg.Listen.CDIM, false, &s.gateway},
		{"CDIM", s.cfg.Listen.CDIMDirect, true, &s.direct},
		{"Redfish service", s.cfg.Listen.Redfish, false, &s.composer},
		{"Sunfish service", s.cfg.Listen.Sunfish, true, &s.sunfishAt},
	} {
		if l.address == "" {
			continue
		}
		plain, err := net.Listen("tcp", l.address) //nolint:noctx // at start, on a local address
		if err != nil {
			return fmt.Errorf("listen for the %s's clients: %w", l.whose, err)
		}
		if *l.to = plain; !l.plain {
			*l.to = tls.NewListener(plain, secure)
		}
	}
	return nil
}

// CDIMAddress and CDIMDirectAddress are where the CDIM's gateway and its services listen, "" where they do not.
func (s *Simulator) CDIMAddress() string { return addressOf(s.gateway) }

// CDIMDirectAddress is where the CDIM's services listen.
func (s *Simulator) CDIMDirectAddress() string { return addressOf(s.direct) }

// RedfishAddress is where the Redfish service listens, "" where it does not.
func (s *Simulator) RedfishAddress() string { return addressOf(s.composer) }

// SunfishAddress is where the Sunfish service listens, "" where it does not.
func (s *Simulator) SunfishAddress() string { return addressOf(s.sunfishAt) }

func addressOf(l net.Listener) string {
	if l == nil {
		return ""
	}
	return l.Addr().String()
}

// FMAddress and ControlAddress are where the faces listen.
func (s *Simulator) FMAddress() string { return s.fm.Addr().String() }

// ControlAddress is where the control API listens.
func (s *Simulator) ControlAddress() string { return s.control.Addr().String() }

// server is a face on a listener.
type server struct {
	l net.Listener
	h http.Handler
}

// Run serves until ctx ends.
func (s *Simulator) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	s.ctx.set(ctx)
	for _, m := range s.cfg.Machines {
		if m.NoNode {
			continue
		}
		g.Go(func() error { return s.roots[m.Name].Watch(ctx) })
		s.sync(ctx, m.Name)
	}
	faces := s.faces()
	api := &control.API{Core: s.core, Faults: s.faults, Tokens: s.tokens, Ready: s.serving.Load, HostRoot: s.hostRoot}
	if s.cdim != nil {
		api.Jobs = s.cdim
	}
	if s.redfish != nil {
		api.Sessions = s.redfish
	}
	servers := []server{{s.fm, faces}, {s.control, api.Handler()}}
	if s.gateway != nil {
		front := http.NewServeMux()
		front.Handle("/realms/", s.faults.Wrap("idm", s.tokens.Keycloak()))
		front.Handle("/", s.faults.Wrap("cdim", s.cdim.Gateway(s.tokens)))
		servers = append(servers, server{s.gateway, front})
	}
	if s.direct != nil {
		servers = append(servers, server{s.direct, s.faults.Wrap("cdim", s.cdim.Handler())})
	}
	if s.composer != nil {
		servers = append(servers, server{s.composer, s.faults.Wrap("redfish", s.redfish.Handler())})
	}
	if s.sunfishAt != nil {
		servers = append(servers, server{s.sunfishAt, s.faults.Wrap("sunfish", s.sunfish.Handler())})
	}
	for _, server := range servers {
		g.Go(func() error { return serve(ctx, server.l, server.h) })
	}
	err := s.setReady(true)
	if err == nil {
		klog.FromContext(ctx).Info("Serving", "fm", s.FMAddress(), "cdim", s.CDIMAddress(), "cdimDirect", s.CDIMDirectAddress(),
			"redfish", s.RedfishAddress(), "sunfish", s.SunfishAddress(), "control", s.ControlAddress(), "dir", s.cfg.Dir)
		<-ctx.Done()
	}
	return errors.Join(err, s.stop(g))
}

// faces serves the managers that the configuration names, and the id_manager that they share.
func (s *Simulator) faces() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/id_manager/", s.faults.Wrap("idm", s.tokens.Handler()))
	for _, face := range []struct {
		name, path string
		handler    http.Handler
	}{
		{config.FaceFM, "/fabric_manager/", fm.New(s.core, s.tokens, s.cfg).Handler()},
		{config.FaceCM, "/cluster_manager/", cm.New(s.core, s.tokens, s.cfg, s.clk).Handler()},
	} {
		if slices.Contains(s.cfg.Faces, face.name) {
			mux.Handle(face.path, s.faults.Wrap(face.name, face.handler))
		}
	}
	return mux
}

func (s *Simulator) stop(g *errgroup.Group) error {
	err := s.setReady(false)
	if s.cdim != nil {
		s.cdim.Stop()
	}
	if s.redfish != nil {
		s.redfish.Stop()
	}
	if s.sunfish != nil {
		s.sunfish.Stop()
	}
	s.core.Close()
	if s.sunfish != nil {
		s.sunfish.Close()
	}
	if s.cdim != nil {
		s.cdim.Close()
	}
	if s.redfish != nil {
		s.redfish.Close()
	}
	err = errors.Join(err, g.Wait())
	for _, d := range s.drivers {
		err = errors.Join(err, d.Close())
	}
	return err
}

// serve ends the requests that hang when ctx ends.
func serve(ctx context.Context, l net.Listener, h http.Handler) error {
	server := &http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, BaseContext: func(net.Listener) context.Context { return ctx },
		// Clients that hang up during the handshake are what tests do all day.
		ErrorLog: log.New(discard{}, "", 0),
	}
	done := make(chan error, 1)
	go func() {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		err := server.Shutdown(grace)
		if err != nil {
			err = server.Close()
		}
		done <- err
	}()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	}
	return <-done
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

func (s *Simulator) hostRoot(machine string) string {
	if r, ok := s.roots[machine]; ok {
		return r.Dir()
	}
	return ""
}

func (s *Simulator) changed(machine string) { s.sync(s.ctx.get(), machine) }

// sync makes the node side of a machine follow the core.
func (s *Simulator) sync(ctx context.Context, machine string) {
	root, ok := s.roots[machine]
	if !ok {
		return // still starting; Run comes back to it
	}
	logger := klog.FromContext(ctx)
	if err := root.Sync(ctx); err != nil {
		logger.Error(err, "Host root does not show the chassis", "machine", machine)
	}
	v, err := s.core.Machine(machine)
	if d, ok := s.drivers[machine]; ok && err == nil {
		if err := d.SetLoaded(v.DriverLoaded && v.Power); err != nil {
			logger.Error(err, "Driver socket does not follow the driver", "machine", machine)
		}
	}
}

func (s *Simulator) xid(machine, address string, code uint64) {
	if d, ok := s.drivers[machine]; ok {
		d.XID(address, code)
	}
}

func (s *Simulator) setReady(ready bool) error {
	s.serving.Store(ready)
	path := filepath.Join(s.cfg.Dir, "ready")
	if ready {
		if err := os.WriteFile(path, []byte(s.FMAddress()+"\n"), 0o644); err != nil { //nolint:gosec // scripts read it
			return fmt.Errorf("say that the simulator is ready: %w", err)
		}
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("say that the simulator is not ready: %w", err)
	}
	return nil
}
