// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// looks tells whether a request reads what a machine has.
func (b *bench) looks() func(r *http.Request) bool {
	path := regexp.MustCompile(b.face.look.Path)
	return func(r *http.Request) bool { return r.Method == http.MethodGet && path.MatchString(r.URL.Path) }
}

func (b *bench) changing() func(r *http.Request) bool {
	path := regexp.MustCompile(b.face.change.Path)
	return func(r *http.Request) bool { return r.Method != http.MethodGet && path.MatchString(r.URL.Path) }
}

// pass sends an answer with another body.
func pass(w http.ResponseWriter, rec *httptest.ResponseRecorder, body []byte) {
	maps.Copy(w.Header(), rec.Header())
	w.Header().Del("Content-Length")
	w.WriteHeader(rec.Code)
	_, _ = w.Write(body) // or the client has gone
}

// stale answers every look as it was answered first while on is set, as a manager whose list lags behind.
func (b *bench) stale() (on *atomic.Bool) {
	on = &atomic.Bool{}
	looks := b.looks()
	var mu sync.Mutex
	old := map[string]*httptest.ResponseRecorder{}
	t := &twist{}
	t.do = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !looks(r) {
			next.ServeHTTP(w, r)
			return
		}
		mu.Lock()
		before := old[r.URL.String()]
		mu.Unlock()
		if on.Load() && before != nil {
			t.hits.Add(1)
			pass(w, before, before.Body.Bytes())
			return
		}
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		if rec.Code == http.StatusOK {
			mu.Lock()
			old[r.URL.String()] = rec
			mu.Unlock()
		}
		pass(w, rec, rec.Body.Bytes())
	}
	b.twist.Store(t)
	return on
}

// churn makes device a-0 vanish, or come back, each time when a later page is read, so many times.
func (b *bench) churn(times int32) (gone *atomic.Bool) {
	gone = &atomic.Bool{}
	t := &twist{}
	t.do = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if b.face.laterPage(r) && t.hits.Load() < times {
			t.hits.Add(1)
			action := simapi.DeviceReturn
			if !gone.Load() {
				action = simapi.DeviceVanish
			}
			gone.Store(!gone.Load())
			b.alter("a-0", simapi.DeviceChange{Action: action})
		}
		next.ServeHTTP(w, r)
	}
	b.twist.Store(t)
	return gone
}

// endless makes the answers to certain requests go on until the client has had enough.
func (b *bench) endless(which func(r *http.Request) bool, most int32) (sent *atomic.Int64) {
	sent = &atomic.Int64{}
	t := &twist{}
	t.do = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !which(r) || t.hits.Load() >= most {
			next.ServeHTTP(w, r)
			return
		}
		t.hits.Add(1)
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		w.Header().Set("Content-Type", "application/json")
		if rec.Code == http.StatusNoContent {
			rec.Code = http.StatusOK // or nothing could follow
		}
		w.WriteHeader(rec.Code)
		chunk := append([]byte(`{"data":[`), bytes.Repeat([]byte(`"more",`), 1<<14)...)
		for {
			n, err := w.Write(chunk)
			sent.Add(int64(n))
			if err != nil {
				return
			}
			chunk = chunk[:len(chunk)/7*7]
		}
	}
	b.twist.Store(t)
	return sent
}

// estrange makes all answers of success strange and true: fields that nobody knows, lists in another order, numbers as text.
func (b *bench) estrange() *twist {
	t := &twist{}
	t.do = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		var body any
		d := json.NewDecoder(bytes.NewReader(rec.Body.Bytes()))
		d.UseNumber()
		if rec.Code/100 != 2 || d.Decode(&body) != nil {
			pass(w, rec, rec.Body.Bytes())
			return
		}
		t.hits.Add(1)
		out, err := json.Marshal(strange(body))
		if err != nil {
			panic(err) // what came as JSON
		}
		pass(w, rec, out)
	}
	b.twist.Store(t)
	return t
}

func strange(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, one := range v {
			v[k] = strange(one)
		}
		v["unheardOf"] = map[string]any{"of": []any{nil, true, 1e9, "x"}}
		return v
	case []any:
		for i := range v {
			v[i] = strange(v[i])
		}
		slices.Reverse(v)
		return v
	case json.Number:
		if _, err := strconv.Atoi(v.String()); err == nil {
			return v.String()
		}
	}
	return v
}
