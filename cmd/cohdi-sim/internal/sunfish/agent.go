// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"path"
	"strings"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/fault"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// serveAgent is the agent of the fabrics. It makes and ends Connections, takes zones and what is written to them without
// doing anything, and refuses the rest.
func (f *Face) serveAgent(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return // the service has gone
	}
	at := r.URL.Path
	switch {
	case strings.Contains(at, "/Zones"):
		w.WriteHeader(http.StatusOK)
	case r.Method == http.MethodPost && path.Base(at) == "Connections":
		f.join(w, r, at, body)
	case r.Method == http.MethodDelete && path.Base(path.Dir(at)) == "Connections":
		f.part(r.Context(), w, at)
	default:
		say(w, http.StatusMethodNotAllowed, "the agent does not do that")
	}
}

// ends are the two ends of a Connection, by the names that the endpoints have.
type ends struct {
	Links struct {
		Initiators []reference `json:"InitiatorEndpoints"`
		Targets    []reference `json:"TargetEndpoints"`
	} `json:"Links"`
}

type reference struct {
	ID string `json:"@odata.id"`
}

// join makes a Connection. The same one again is made already; one more for a device that another has does nothing.
func (f *Face) join(w http.ResponseWriter, r *http.Request, at string, body []byte) {
	var e ends
	var named struct {
		ID string `json:"Id"`
	}
	if json.Unmarshal(body, &e) != nil || json.Unmarshal(body, &named) != nil || len(e.Links.Initiators) != 1 || len(e.Links.Targets) != 1 {
		say(w, http.StatusBadRequest, "one initiator and one target, please")
		return
	}
	m, d, ok := f.find(f.core.State(), path.Dir(at), e.Links.Initiators[0].ID, e.Links.Targets[0].ID)
	if !ok {
		say(w, http.StatusBadRequest, "no such endpoint in this fabric")
		return
	}
	made := at + "/" + named.ID
	f.mu.Lock()
	before, twice := f.wires[made]
	if twice {
		same := before.Machine == m.Name && before.Device == d.ID
		f.mu.Unlock()
		if !same {
			say(w, http.StatusConflict, "there is another Connection of that Id")
		}
		return // 200
	}
	taken := false
	for _, other := range f.wires {
		taken = taken || other.Device == d.ID && other.Has
	}
	mine := &wire{Machine: m.Name, Device: d.ID, Has: !taken, busy: !taken}
	f.wires[made] = mine
	err := f.saveLocked()
	f.mu.Unlock()
	if err == nil && !taken {
		err = f.attach(r.Context(), m, d)
		f.mu.Lock()
		if mine.busy = false; err != nil {
			delete(f.wires, made)
		}
		f.mu.Unlock()
	}
	f.agentAnswer(w, err)
}

func (f *Face) attach(ctx context.Context, m simapi.Machine, d simapi.Device) error {
	return f.lag.Change(d.ID, "", func() error {
		got, err := f.core.Attach(ctx, core.AttachRequest{
			Machine: m.Name, Specs: []core.Spec{{Device: d.ResUUID, Count: 1}}, Caller: caller, Limit: fault.Limit(ctx),
		})
		if err == nil && len(got) == 0 {
			return core.ErrNotFound
		}
		return err
	})
}

// part ends a Connection. One that the agent does not have is ended already.
func (f *Face) part(ctx context.Context, w http.ResponseWriter, at string) {
	f.mu.Lock()
	mine, ok := f.wires[at]
	if !ok || mine.busy {
		f.mu.Unlock()
		if ok {
			say(w, http.StatusServiceUnavailable, "the Connection is being made or ended")
		}
		return // 200
	}
	mine.busy = mine.Has
	f.mu.Unlock()
	var err error
	if mine.Has {
		err = f.lag.Change(mine.Device, mine.Machine, func() error {
			return f.core.Detach(ctx, core.DetachRequest{Machine: mine.Machine, Device: mine.Device, Caller: caller})
		})
		if errors.Is(err, core.ErrNotFound) {
			err = nil // somebody has taken it away
		}
	}
	f.mu.Lock()
	if mine.busy = false; err == nil {
		delete(f.wires, at)
		err = f.saveLocked()
	}
	f.mu.Unlock()
	f.agentAnswer(w, err)
}

func (f *Face) agentAnswer(w http.ResponseWriter, err error) {
	switch {
	case err == nil:
		w.WriteHeader(http.StatusOK)
	case errors.Is(err, core.ErrStopped):
		panic(http.ErrAbortHandler)
	case errors.Is(err, core.ErrBusy):
		say(w, http.StatusServiceUnavailable, err.Error())
	default:
		say(w, http.StatusConflict, err.Error())
	}
}

// noticeLocked lets the agent see what has come and gone without it, and the service its events about that.
func (f *Face) noticeLocked(s *simapi.State) {
	has, busy := map[string]*wire{}, map[string]bool{}
	for at, w := range f.wires {
		d, _ := s.Device(w.Device)
		busy[w.Device] = busy[w.Device] || w.busy
		switch {
		case w.busy || !w.Has:
		case d.Machine != w.Machine || d.Phase != simapi.PhaseAttached && d.Phase != simapi.PhaseDetaching:
			delete(f.wires, at)
			delete(f.copies, at)
			continue
		}
		if w.Has {
			has[w.Device] = w
		}
	}
	for _, d := range s.Devices {
		if d.Phase != simapi.PhaseAttached || d.BuiltIn || has[d.ID] != nil || busy[d.ID] {
			continue
		}
		fabric := f.fabricOf(d.Fabric)
		at := fabric + "/Connections/agent-" + d.ID
		f.wires[at] = &wire{Machine: d.Machine, Device: d.ID, Has: true}
		f.copies[at] = connectionOf(at, initiatorOf(fabric, d.Machine), targetOf(fabric, d.ID))
	}
}
