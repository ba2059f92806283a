// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/idm"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/loopback"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/statefile"
)

const (
	api     = "/cdim/api/v1"
	caller  = "cdim"
	maxBody = 1 << 20

	dialectProduct = "product"
)

// Face serves both services on one core.
type Face struct {
	core    *core.Core
	clk     clock.WithTicker
	dialect string
	path    string
	hw      loopback.Client
	lag     *core.Lag
	log     klog.Logger

	ctx  context.Context //nolint:containedctx // the life of the jobs, which outlive the requests that start them
	stop context.CancelFunc
	work sync.WaitGroup

	mu        sync.Mutex
	jobs      []*job // the oldest first
	withdrawn map[string]bool
}

// Options are what New needs.
type Options struct {
	Core   *core.Core
	Faults *fault.Injector
	Clock  clock.WithTicker
	// Dialect is oss or product.
	Dialect string
	// StatePath is where jobs are kept; in memory only if empty.
	StatePath string
	// HardwareTimeout is how long a job waits for the hardware to answer; 30 s if zero.
	HardwareTimeout time.Duration
}

// New puts the face in front of a core and takes over the jobs of a former run. It lives until Close.
func New(ctx context.Context, o Options) (*Face, error) {
	f := &Face{
		core: o.Core, clk: o.Clock, dialect: o.Dialect, path: o.StatePath, lag: o.Core.NewLag(), log: klog.FromContext(ctx),
		withdrawn: map[string]bool{},
	}
	f.ctx, f.stop = context.WithCancel(context.WithoutCancel(ctx))
	f.hw = loopback.Client{
		Handler: o.Faults.Wrap("hw", f.hardware()), Clock: o.Clock, Timeout: cmp.Or(o.HardwareTimeout, defaultHardwareTimeout), Work: &f.work,
	}
	return f, f.load()
}

// Stop ends the jobs where they stand, as a crash does.
func (f *Face) Stop() { f.stop() }

// Close stops and waits for the goroutines. What they have begun in the core ends when that is closed.
func (f *Face) Close() {
	f.stop()
	f.work.Wait()
}

// Handler serves both services as they do on their own ports: whoever reaches them may do everything.
func (f *Face) Handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, h := range map[string]http.HandlerFunc{
		"GET /resources":                 f.listResources,
		"GET /resources/{id}":            f.getResource,
		"GET /resources/available":       f.listAvailable,
		"GET /resources/unused":          f.listUnused,
		"PUT /resources/{id}/annotation": f.annotate,
		"GET /nodes":                     f.listNodes,
		"GET /nodes/{id}":                f.getNode,
		"GET /resource-groups":           f.listGroups,
		"POST /devices":                  f.refresh,
		"POST /layout-apply":             f.post,
		"GET /layout-apply":              f.list,
		"GET /layout-apply/{id}":         f.get,
		"PUT /layout-apply/{id}":         f.put,
		"DELETE /layout-apply/{id}":      f.delete,
	} {
		for i := range pattern {
			if pattern[i] == ' ' {
				mux.HandleFunc(pattern[:i+1]+api+pattern[i+1:], h)
				break
			}
		}
	}
	return mux
}

// Gateway is the front with a token: it replaces each service's prefix by the base of the service.
func (f *Face) Gateway(tokens *idm.Manager) http.Handler {
	mux := http.NewServeMux()
	services := f.Handler()
	for _, service := range []string{"configuration-manager", "layout-apply"} {
		prefix := api + "/" + service
		mux.Handle(prefix+"/", http.StripPrefix(prefix, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			r.URL.Path = api + r.URL.Path
			r.URL.RawPath = ""
			services.ServeHTTP(w, r)
		})))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch err := tokens.Check(r); {
		case errors.Is(err, idm.ErrNoToken):
			reply(w, http.StatusUnauthorized, map[string]string{"message": "Unauthorized"})
		case err != nil:
			reply(w, http.StatusUnauthorized, map[string]string{"exp": "token expired"})
		default:
			mux.ServeHTTP(w, r)
		}
	})
}

// saved is the state file.
type saved struct {
	Jobs      []jobBody       `json:"jobs"`
	Withdrawn map[string]bool `json:"withdrawn"`
}

func (f *Face) saveLocked() error {
	s := saved{Withdrawn: f.withdrawn}
	for _, j := range f.jobs {
		s.Jobs = append(s.Jobs, j.jobBody)
	}
	return statefile.Save(f.path, s)
}

func (f *Face) load() error {
	s := saved{Withdrawn: f.withdrawn}
	if _, err := statefile.Load(f.path, &s); err != nil {
		return err
	}
	for _, body := range s.Jobs {
		f.jobs = append(f.jobs, &job{jobBody: body, lost: body.busy()})
	}
	if s.Withdrawn != nil {
		f.withdrawn = s.Withdrawn
	}
	return nil
}
