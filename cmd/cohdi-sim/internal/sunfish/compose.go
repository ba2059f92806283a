// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// compose is the form that names no device: so many of a model for a node. A count of 0 takes all of the model away. No id
// comes back, and fewer than asked for are no error.
func (f *Face) compose(w http.ResponseWriter, r *http.Request, body []byte) {
	c, err := decodeComposition(body)
	if err != nil {
		say(w, http.StatusBadRequest, err.Error())
		return
	}
	for _, m := range c.members {
		if m.Model == "" { // what the peer's client sends for a model that it does not know
			continue
		}
		n, _ := m.count()
		err = f.bring(r.Context(), c.node, m.Model, n)
		switch {
		case errors.Is(err, core.ErrStopped):
			panic(http.ErrAbortHandler)
		case errors.Is(err, core.ErrNotFound):
			say(w, http.StatusNotFound, err.Error())
			return
		case err != nil && !errors.Is(err, core.ErrNoCapacity) && !errors.Is(err, core.ErrNoSlot):
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
	}
	if f.core.Policies().Sunfish.SystemAnswer == "204" {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	o, err := decodeObject(body)
	if err != nil {
		say(w, http.StatusBadRequest, err.Error())
		return
	}
	reply(w, o)
}

// bring makes it n of the model on the machine, or none.
func (f *Face) bring(ctx context.Context, machine, model string, n int) error {
	v, err := f.core.Machine(machine)
	if err != nil || v.Name != machine {
		return core.ErrNotFound
	}
	var has []string
	for _, d := range v.Listed {
		if d.Phase == simapi.PhaseAttached && d.Model == model {
			has = append(has, d.ID)
		}
	}
	if n > len(has) {
		_, err := f.core.Attach(ctx, core.AttachRequest{Machine: machine, Specs: []core.Spec{{Model: model, Count: n - len(has)}}, Caller: caller, Limit: -1})
		return err
	}
	if n > 0 {
		return nil
	}
	for _, id := range has {
		if err := f.core.Detach(ctx, core.DetachRequest{Machine: machine, Device: id, Caller: caller}); err != nil {
			return err
		}
	}
	return nil
}

// hear takes an agent's event. One of our own agent about a Connection, or the fabric above it, brings the copy up to date;
// another agent is registered and has nothing that could be read here.
func (f *Face) hear(w http.ResponseWriter, body []byte) {
	var e event
	if json.Unmarshal(body, &e) != nil || len(e.Events) == 0 {
		say(w, http.StatusBadRequest, "no event")
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, one := range e.Events {
		switch {
		case strings.HasSuffix(one.MessageID, ".AggregationSourceDiscovered") && len(one.MessageArgs) > 1:
			o := object{"@odata.type": "#AggregationSource.v1_2_0.AggregationSource", "HostName": one.MessageArgs[1]}
			f.copies[identify(path.Dir(agentSource), o)] = o
		case strings.HasSuffix(one.MessageID, ".ResourceCreated") && e.Context == path.Base(agentSource):
			f.crawlLocked(one.Origin.ID)
		}
	}
	if err := f.saveLocked(); err != nil {
		say(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.WriteHeader(http.StatusOK)
}

// crawlLocked copies the agent's Connections at or below a path.
func (f *Face) crawlLocked(origin string) {
	s := f.core.State()
	for at, wire := range f.wires {
		if at != origin && !strings.HasPrefix(at, origin+"/") {
			continue
		}
		if _, there := f.copies[at]; there {
			continue
		}
		if i := slices.IndexFunc(s.Machines, func(m simapi.Machine) bool { return m.Name == wire.Machine }); i >= 0 {
			fabric := f.fabricOf(s.Machines[i].Fabric)
			f.copies[at] = connectionOf(at, initiatorOf(fabric, wire.Machine), targetOf(fabric, wire.Device))
		}
	}
}
