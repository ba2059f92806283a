// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/loopback"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const (
	caller  = "redfish"
	maxBody = 1 << 20

	variantZones = "zones"
)

// Face serves one service on a core.
type Face struct {
	names
	core    *core.Core
	clk     clock.WithTicker
	cfg     config.Redfish
	cred    config.Credentials
	hw      loopback.Client
	log     klog.Logger
	fabrics []config.Fabric

	ctx  context.Context //nolint:containedctx // the life of the work, which outlives the requests that start it
	stop context.CancelFunc
	work sync.WaitGroup

	mu       sync.Mutex
	logins   int
	sessions map[string]*session // by token
	tasks    []*task             // the oldest first
	lastTask int
	coming   []*job // what is under way, in the order of its acceptance
	reserved map[string]bool
	events   broadcast
}

// session is one login.
type session struct {
	id   string
	used time.Time
}

// Options are what New needs.
type Options struct {
	Core   *core.Core
	Config *config.Config
	Faults *fault.Injector
	Clock  clock.WithTicker
	// HardwareTimeout is how long a change waits for the hardware to answer; 30 s if zero.
	HardwareTimeout time.Duration
}

// New puts the face in front of a core. It lives until Close.
func New(ctx context.Context, o Options) *Face {
	f := &Face{
		core: o.Core, clk: o.Clock, cfg: o.Config.Redfish, cred: o.Config.Credentials, fabrics: o.Config.Fabrics,
		log: klog.FromContext(ctx), sessions: map[string]*session{}, reserved: map[string]bool{},
	}
	if f.cfg.URIs == config.URIsRandom {
		f.salt = strconv.FormatUint(o.Config.Seed, 10)
	}
	f.ctx, f.stop = context.WithCancel(context.WithoutCancel(ctx))
	f.hw = loopback.Client{
		Handler: o.Faults.Wrap("hw", http.HandlerFunc(f.hardware)), Clock: o.Clock,
		Timeout: cmp.Or(o.HardwareTimeout, defaultHardwareTimeout), Work: &f.work,
	}
	return f
}

// Stop ends the work where it stands, as a crash does.
func (f *Face) Stop() { f.stop() }

// Close stops and waits for the goroutines. What they have begun in the core ends when that is closed.
func (f *Face) Close() {
	f.stop()
	f.work.Wait()
}

func (f *Face) policies() simapi.RedfishPolicies { return f.core.Policies().Redfish }

// Handler serves the service.
func (f *Face) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /redfish", func(w http.ResponseWriter, _ *http.Request) {
		answer{status: http.StatusOK, body: map[string]string{"v1": root + "/"}}.write(w)
	})
	mux.HandleFunc("GET "+root, func(w http.ResponseWriter, r *http.Request) {
		if f.policies().Root == "redirect" {
			http.Redirect(w, r, root+"/", http.StatusPermanentRedirect)
			return
		}
		f.serviceRoot(r).write(w)
	})
	mux.HandleFunc("GET "+root+"/{$}", func(w http.ResponseWriter, r *http.Request) { f.serviceRoot(r).write(w) })
	mux.HandleFunc("POST "+f.names.sessions(), func(w http.ResponseWriter, r *http.Request) { f.login(r).write(w) })
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		if f.known(r) {
			f.refusal(f.missing(r)).write(w)
			return
		}
		f.refusal(refuse(http.StatusUnauthorized, "NoValidSession", "no valid session")).write(w)
	})
	for pattern, h := range f.routes() {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if !f.known(r) {
				f.refusal(refuse(http.StatusUnauthorized, "NoValidSession", "no valid session")).write(w)
				return
			}
			if bad := f.queryOf(r); bad != nil {
				f.refusal(bad).write(w)
				return
			}
			h(r).write(w)
		})
	}
	mux.HandleFunc("GET "+f.names.stream(), f.stream)
	return mux
}

func (f *Face) routes() map[string]func(*http.Request) answer {
	n := f.names
	routes := map[string]func(*http.Request) answer{
		"GET " + n.systems():          f.listSystems,
		"GET " + n.system("{id}"):     f.getSystem,
		"GET " + n.sessionService():   f.getSessionService,
		"GET " + n.sessions():         f.listSessions,
		"DELETE " + n.session("{id}"): f.logout,
		"GET " + n.taskService():      f.getTaskService,
		"GET " + n.tasks():            f.listTasks,
		"GET " + n.task("{id}"):       f.getTask,
		"GET " + n.monitor("{id}"):    f.getMonitor,
		"DELETE " + n.monitor("{id}"): f.cancel,
		"GET " + n.eventService():     f.getEventService,
		"GET " + n.composition():      f.getComposition,
		"GET " + n.blocks():           f.listBlocks,
		"GET " + n.block("{id}"):      f.getBlock,
		"PATCH " + n.block("{id}"):    f.reserve,
		"GET " + n.processor("{id}"):  f.getProcessor,
		"GET " + n.resourceZones():    f.listResourceZones,
		"GET " + n.path("CompositionService", "ResourceZones", "={id}"): f.getResourceZone,
		"GET " + n.capabilities():                                   f.getCapabilities,
		"PATCH " + n.system("{id}"):                                 f.patchSystem,
		"POST " + n.action(n.system("{id}"), "AddResourceBlock"):    f.addBlock,
		"POST " + n.action(n.system("{id}"), "RemoveResourceBlock"): f.removeBlock,
		"POST " + n.compose():                                       f.postManifest,
		"GET " + n.fabrics():                                        f.listFabrics,
		"GET " + n.path("Fabrics", "={fabric}"):                     f.getFabric,
		"GET " + n.boxed("{id}"):                                    f.getBoxed,
	}
	ports, ends := n.path("Fabrics", "={fabric}", "Zones"), n.path("Fabrics", "={fabric}", "Endpoints")
	maps.Copy(routes, map[string]func(*http.Request) answer{
		"GET " + ports:                                      f.listPorts,
		"GET " + ports + "/{id}":                            f.getPort,
		"PATCH " + ports + "/{id}":                          f.patchPort,
		"POST " + n.action(ports+"/{id}", "AddEndpoint"):    f.addEndpoint,
		"POST " + n.action(ports+"/{id}", "RemoveEndpoint"): f.removeEndpoint,
		"GET " + ends:                                       f.listEndpoints,
		"GET " + ends + "/{id}":                             f.getEndpoint,
	})
	return routes
}

func (f *Face) missing(r *http.Request) *refusal {
	return refuse(http.StatusNotFound, "ResourceMissingAtURI", "there is no resource at %s", r.URL.Path)
}

// queryOf refuses what the service does not advertise.
func (f *Face) queryOf(r *http.Request) *refusal {
	for name := range r.URL.Query() {
		switch name {
		case "$skip", "$top":
			if n, err := strconv.Atoi(r.URL.Query().Get(name)); err != nil || n < 0 {
				return refuse(http.StatusBadRequest, "QueryParameterValueFormatError", "%s is no number", name)
			}
		case "$expand":
			if f.policies().Expand == "no" {
				return refuse(http.StatusNotImplemented, "QueryNotSupported", "%s is not supported", name)
			}
		default:
			if strings.HasPrefix(name, "$") {
				return refuse(http.StatusNotImplemented, "QueryNotSupported", "%s is not supported", name)
			}
		}
	}
	return nil
}

// known tells whether the caller has a session, or user and password.
func (f *Face) known(r *http.Request) bool {
	if user, password, ok := r.BasicAuth(); ok {
		return user == f.cred.Username && password == f.cred.Password
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expireLocked()
	s, ok := f.sessions[r.Header.Get("X-Auth-Token")]
	if ok {
		s.used = f.clk.Now()
	}
	return ok
}

func (f *Face) expireLocked() {
	for token, s := range f.sessions {
		if f.clk.Since(s.used) > time.Duration(f.cfg.SessionTimeout) {
			delete(f.sessions, token)
		}
	}
}

func (f *Face) login(r *http.Request) answer {
	var body struct{ UserName, Password string }
	if bad := decode(r, &body); bad != nil {
		return f.refusal(bad)
	}
	if body.UserName != f.cred.Username || body.Password != f.cred.Password {
		return f.refusal(refuse(http.StatusUnauthorized, "ResourceAtUriUnauthorized", "wrong user or password"))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expireLocked()
	if len(f.sessions) >= f.cfg.Sessions {
		return f.refusal(refuse(http.StatusServiceUnavailable, "SessionLimitExceeded", "too many sessions"))
	}
	f.logins++
	id, token := strconv.Itoa(f.logins), rand.Text()
	f.sessions[token] = &session{id: id, used: f.clk.Now()}
	return answer{
		status: http.StatusCreated, header: map[string]string{"X-Auth-Token": token, "Location": f.session(id)},
		body: f.sessionBody(id),
	}
}

func (f *Face) sessionBody(id string) map[string]any {
	return map[string]any{
		"@odata.type": "#Session.v1_5_0.Session", "@odata.id": f.session(id), "Id": id, "Name": "Session", "UserName": f.cred.Username,
	}
}

func (f *Face) logout(r *http.Request) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	for token, s := range f.sessions {
		if s.id == r.PathValue("id") {
			delete(f.sessions, token)
			return answer{status: http.StatusNoContent}
		}
	}
	return f.refusal(f.missing(r))
}

// Logins is how many sessions were made; Sessions how many there are.
func (f *Face) Logins() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.logins
}

// Sessions is how many sessions there are.
func (f *Face) Sessions() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expireLocked()
	return len(f.sessions)
}

// EndSessions ends all sessions, as a restart of the service does.
func (f *Face) EndSessions() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.sessions)
}

// decode reads a body.
func decode(r *http.Request, into any) *refusal {
	data, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return refuse(http.StatusBadRequest, "MalformedJSON", "the body could not be read")
	}
	if err := json.Unmarshal(data, into); err != nil {
		if _, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return refuse(http.StatusBadRequest, "PropertyValueTypeError", "%s", err.Error())
		}
		return refuse(http.StatusBadRequest, "MalformedJSON", "%s", err.Error())
	}
	return nil
}
