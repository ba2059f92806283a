// SPDX-License-Identifier: Apache-2.0

package cdim

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/loopback"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const (
	defaultHardwareTimeout = 30 * time.Second
	// hardwareRetries and retryDelay are for hardware that is busy.
	hardwareRetries = 3
	retryDelay      = 100 * time.Millisecond
)

// hardware is what layout-apply calls to have something done: one link, or the power of a CPU.
func (f *Face) hardware() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("PUT "+api+"/cpu/{host}/aggregations", f.aggregate)
	mux.HandleFunc("PUT "+api+"/devices/{host}/aggregations", f.aggregate)
	mux.HandleFunc("PUT "+api+"/devices/{host}/power", func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, struct{}{}) })
	return mux
}

func (f *Face) aggregate(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Action      string `json:"action"`
		Device      string `json:"deviceID"`
		Destination string `json:"destinationDeviceID"`
	}
	data, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil || json.Unmarshal(data, &body) != nil {
		refuse(w, http.StatusBadRequest, "EF003BAS000", "bad request")
		return
	}
	if body.Device == "" {
		body.Device = body.Destination
	}
	s := f.core.State()
	m, ok := machineOf(s, r.PathValue("host"))
	if !ok {
		refuse(w, http.StatusNotFound, "EF013BAS000", "no such host")
		return
	}
	d, ok := s.Device(body.Device)
	if !ok || d.ResUUID != body.Device || d.Vanished || d.BuiltIn {
		refuse(w, http.StatusNotFound, "EF013BAS001", "no such device")
		return
	}
	if d.Tenant != "" || d.Machine != "" && d.Machine != m.Name {
		refuse(w, http.StatusConflict, "EF011BAS000", "the port is bound to another host")
		return
	}
	if body.Action == opConnect {
		err = f.connect(r.Context(), d, m)
	} else {
		err = f.disconnect(r.Context(), d, m)
	}
	f.answer(w, body.Action, err)
}

func (f *Face) connect(ctx context.Context, d simapi.Device, m simapi.Machine) error {
	if d.Phase == simapi.PhaseAttached {
		return nil
	}
	return f.lag.Change(d.ID, "", func() error {
		_, err := f.core.Attach(ctx, core.AttachRequest{Machine: m.Name, Specs: []core.Spec{{Device: d.ResUUID, Count: 1}}, Caller: caller, Limit: -1})
		return err
	})
}

func (f *Face) disconnect(ctx context.Context, d simapi.Device, m simapi.Machine) error {
	if d.Phase == simapi.PhaseFree {
		return nil
	}
	return f.lag.Change(d.ID, m.Name, func() error {
		return f.core.Detach(ctx, core.DetachRequest{Machine: m.Name, Device: d.ResUUID, Caller: caller})
	})
}

func (f *Face) answer(w http.ResponseWriter, action string, err error) {
	switch {
	case err == nil:
		reply(w, http.StatusOK, struct{}{})
	case errors.Is(err, core.ErrBusy):
		refuse(w, http.StatusServiceUnavailable, "ER005BAS001", "hardware busy")
	case errors.Is(err, core.ErrNotFound):
		refuse(w, http.StatusNotFound, "EF013BAS001", err.Error())
	case errors.Is(err, core.ErrStopped):
		panic(http.ErrAbortHandler)
	case action == opConnect:
		refuse(w, http.StatusInternalServerError, "EF004BAS001", "connect failed: "+err.Error())
	default:
		refuse(w, http.StatusInternalServerError, "EF004BAS002", "disconnect failed: "+err.Error())
	}
}

// perform has the hardware do one operation, again while it is busy.
func (f *Face) perform(p procedure) attempt {
	path, body := f.order(p)
	none := ""
	a := attempt{result: result{
		ID: p.ID, URI: "http://hw-control" + path, Method: http.MethodPut, Query: &none, Request: body, StartedAt: f.stamp(),
	}}
	for try := 0; ; try++ {
		a.Code, a.Response = f.ask(path, body)
		if a.Code != http.StatusServiceUnavailable || try == hardwareRetries || !f.sleep(retryDelay) {
			break
		}
	}
	a.EndedAt, a.Status = f.stamp(), failed
	var said codeBody
	if json.Unmarshal(a.Response, &said) != nil {
		a.Response = json.RawMessage(`{}`)
	}
	switch {
	case a.Code == http.StatusOK:
		a.Status = completed
	case strings.HasPrefix(said.Code, "E4"): // no answer of the hardware
	case a.Code == http.StatusServiceUnavailable, strings.HasPrefix(said.Code, "C"), f.patient():
		a.open = true
	}
	return a
}

// order is the call for a procedure; the two dialects have it in two versions.
func (f *Face) order(p procedure) (path string, body map[string]any) {
	host, device := p.ends()
	switch p.Operation {
	case opBoot, opShutdown:
		return api + "/devices/" + p.TargetDevice + "/power", map[string]any{"action": map[string]string{opBoot: "on", opShutdown: "off"}[p.Operation]}
	}
	if f.dialect == dialectProduct {
		return api + "/devices/" + host + "/aggregations", map[string]any{"action": p.Operation, "destinationDeviceID": device}
	}
	return api + "/cpu/" + host + "/aggregations", map[string]any{"action": p.Operation, "deviceID": device}
}

func (f *Face) sleep(d time.Duration) bool {
	t := f.clk.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C():
		return true
	case <-f.ctx.Done():
		return false
	}
}

// ask makes the call. What breaks it off has a code of layout-apply's own.
func (f *Face) ask(path string, body map[string]any) (status int, answer json.RawMessage) {
	data, err := json.Marshal(body)
	if err != nil {
		panic(err) // strings only
	}
	rec, err := f.hw.Ask(f.ctx, http.MethodPut, "http://hw-control"+path, data)
	switch {
	case errors.Is(err, loopback.ErrTimeout):
		return http.StatusGatewayTimeout, own(codeTimeout, "Timeout: Could not connect to server.")
	case err != nil:
		return http.StatusBadGateway, own(codeConnect, "Could not connect to server.")
	}
	return rec.Code, rec.Body.Bytes()
}

func own(code, message string) json.RawMessage {
	data, err := json.Marshal(codeBody{code, message})
	if err != nil {
		panic(err) // strings only
	}
	return data
}
