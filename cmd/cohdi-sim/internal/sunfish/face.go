// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/loopback"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/statefile"
)

const (
	base    = "/redfish/v1"
	caller  = "sunfish"
	maxBody = 1 << 20

	defaultAgentTimeout = 30 * time.Second
)

// Values of policies that are not the default.
const (
	rejected = "reject"
	off      = "off"
	systems  = "systems"
)

// object is a resource as it is shown.
type object = map[string]any

// Face serves the service on one core.
type Face struct {
	core    *core.Core
	clk     clock.WithTicker
	fabrics []config.Fabric
	path    string
	agent   loopback.Client
	lag     *core.Lag

	ctx  context.Context //nolint:containedctx // the life of what the agent does, which outlives the requests
	stop context.CancelFunc
	work sync.WaitGroup

	mu sync.Mutex
	// copies are the resources that the service has been given, or has made when its agent said so.
	copies map[string]object
	// wires are the agent's own Connections, by path.
	wires map[string]*wire
}

// wire is a Connection as the agent has it. It has the device if it was the first.
type wire struct {
	Machine string `json:"machine"` // name
	Device  string `json:"device"`  // id
	Has     bool   `json:"has,omitempty"`
	busy    bool
}

// Options are what New needs.
type Options struct {
	Core    *core.Core
	Faults  *fault.Injector
	Clock   clock.WithTicker
	Fabrics []config.Fabric
	// StatePath is where Connections are kept; in memory only if empty.
	StatePath string
	// AgentTimeout is how long the service waits for its agent; 30 s if zero.
	AgentTimeout time.Duration
}

// New puts the face in front of a core and takes over what a former run kept. It lives until Close.
func New(ctx context.Context, o Options) (*Face, error) {
	f := &Face{
		core: o.Core, clk: o.Clock, fabrics: o.Fabrics, path: o.StatePath, lag: o.Core.NewLag(),
		copies: map[string]object{}, wires: map[string]*wire{},
	}
	f.ctx, f.stop = context.WithCancel(context.WithoutCancel(ctx))
	f.agent = loopback.Client{
		Handler: o.Faults.Wrap("agent", http.HandlerFunc(f.serveAgent)), Clock: o.Clock,
		Timeout: cmp.Or(o.AgentTimeout, defaultAgentTimeout), Work: &f.work,
	}
	return f, f.load()
}

// Stop ends what the agent is asked, as a crash does.
func (f *Face) Stop() { f.stop() }

// Close stops and waits for the goroutines. What they have begun in the core ends when that is closed.
func (f *Face) Close() {
	f.stop()
	f.work.Wait()
}

// Handler serves the tree. Whoever reaches it may do everything.
func (f *Face) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		at := path.Clean("/" + r.URL.Path)
		body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
		if err != nil {
			return // the client has gone
		}
		switch {
		case r.Method == http.MethodPost && at == "/EventListener":
			f.hear(w, body)
		case r.Method == http.MethodPost && at == "/ResetResources":
			f.reset(w)
		case at != base && !strings.HasPrefix(at, base+"/"):
			say(w, http.StatusNotFound, "Not found")
		default:
			f.serve(w, r, at, body)
		}
	})
}

func (f *Face) serve(w http.ResponseWriter, r *http.Request, at string, body []byte) {
	switch r.Method {
	case http.MethodGet:
		if o, ok := f.look()[at]; ok {
			reply(w, o)
			return
		}
		say(w, http.StatusNotFound, "Resource "+at+" not found")
	case http.MethodPost:
		f.post(w, at, body)
	case http.MethodPatch:
		f.patch(w, r, at, body)
	case http.MethodDelete:
		f.delete(w, at)
	default: // PUT is broken in the real one, too
		w.WriteHeader(http.StatusInternalServerError)
	}
}

// post makes a resource in a collection. The answer to that is 200.
func (f *Face) post(w http.ResponseWriter, at string, body []byte) {
	o, err := decodeObject(body)
	kind := text(o, "@odata.type")
	switch {
	case err != nil || kind == "":
		say(w, http.StatusBadRequest, "missing @odata.type")
		return
	case strings.Contains(kind, "Collection."):
		say(w, http.StatusMethodNotAllowed, "a collection cannot be created")
		return
	}
	id := identify(at, o)
	tree := f.look()
	if _, there := tree[at]; !there {
		say(w, http.StatusNotFound, "Resource "+at+" not found")
		return
	}
	if _, twice := tree[id]; twice {
		say(w, http.StatusConflict, "Resource "+id+" already exists")
		return
	}
	if f.core.Policies().Sunfish.SameTarget == rejected && f.connected(o) {
		say(w, http.StatusConflict, "a target endpoint is connected already")
		return
	}
	if f.owned(at) && f.ask(http.MethodPost, at, o) != http.StatusOK {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.copies[id] = o
	f.answer(w, o)
}

// identify names a resource that does not name itself, and returns its path.
func identify(collection string, o object) string {
	id := text(o, "Id")
	if at := text(o, "@odata.id"); at != "" && id == "" {
		id = path.Base(at)
	}
	if id == "" || strings.Contains(id, "/") {
		id = fmt.Sprintf("%x", fingerprint(o))
	}
	at := collection + "/" + id
	o["Id"], o["@odata.id"] = id, at
	return at
}

// patch merges the first level only.
func (f *Face) patch(w http.ResponseWriter, r *http.Request, at string, body []byte) {
	if at == base+"/Systems/System" {
		f.compose(w, r, body)
		return
	}
	change, err := decodeObject(body)
	if err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	o, ok := f.look()[at]
	if !ok {
		say(w, http.StatusNotFound, "Resource "+at+" not found")
		return
	}
	if strings.Contains(text(o, "@odata.type"), "Collection.") {
		say(w, http.StatusMethodNotAllowed, "a collection cannot be changed")
		return
	}
	if f.owned(at) && !success(f.ask(http.MethodPatch, at, change)) {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	o = maps.Clone(o)
	maps.Copy(o, change)
	f.copies[at] = o
	f.answer(w, o)
}

func (f *Face) delete(w http.ResponseWriter, at string) {
	_, there := f.look()[at]
	f.mu.Lock()
	_, ours := f.copies[at]
	f.mu.Unlock()
	if !ours {
		if there {
			say(w, http.StatusForbidden, "Resource "+at+" cannot be deleted")
			return
		}
		say(w, http.StatusNotFound, "Resource "+at+" not found")
		return
	}
	if f.owned(at) && !success(f.ask(http.MethodDelete, at, nil)) {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.copies, at)
	if err := f.saveLocked(); err != nil {
		say(w, http.StatusInternalServerError, err.Error())
		return
	}
	say(w, http.StatusOK, "DELETE: "+at)
}

// answer keeps the state and shows a resource.
func (f *Face) answer(w http.ResponseWriter, o object) {
	if err := f.saveLocked(); err != nil {
		say(w, http.StatusInternalServerError, err.Error())
		return
	}
	reply(w, o)
}

func success(status int) bool {
	return status == http.StatusOK || status == http.StatusAccepted || status == http.StatusNoContent
}

// owned tells whether the agent has to be asked about a path.
func (f *Face) owned(at string) bool {
	for _, below := range []string{"/Fabrics/", "/Chassis/", "/Systems/"} {
		if strings.HasPrefix(at, base+below) {
			return true
		}
	}
	return false
}

// ask forwards to the agent; 0 is no answer.
func (f *Face) ask(method, at string, o object) int {
	data, err := json.Marshal(o)
	if err != nil {
		panic(err) // it was JSON before
	}
	rec, err := f.agent.Ask(f.ctx, method, "http://agent"+at, data)
	switch {
	case errors.Is(err, loopback.ErrStopped):
		panic(http.ErrAbortHandler) // as a service that is killed
	case err != nil:
		return 0
	}
	return rec.Code
}

// reset is a test aid of the real one: the tree is as it was at the start. The agent is not asked.
func (f *Face) reset(w http.ResponseWriter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.copies)
	if err := f.saveLocked(); err != nil {
		say(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// saved is the state file.
type saved struct {
	Copies map[string]object `json:"copies"`
	Wires  map[string]*wire  `json:"wires"`
}

func (f *Face) saveLocked() error { return statefile.Save(f.path, saved{f.copies, f.wires}) }

func (f *Face) load() error {
	s := saved{Copies: f.copies, Wires: f.wires}
	if _, err := statefile.Load(f.path, &s); err != nil {
		return err
	}
	f.copies, f.wires = s.Copies, s.Wires
	return nil
}
