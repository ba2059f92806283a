// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/core"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/redfish"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// face is all that the rows do not know of one manager.
type face struct {
	name string
	// pool is what the description of the chassis needs beside facetest.Pool.
	pool string
	// settings are the kinds of installations. The first one runs always, the others with -full.
	settings []setting
	// start makes the face anew in front of the chassis; stop ends it, and the chassis, as a crash does.
	start func(b *bench) (handlers map[string]http.Handler, stop func())
	// manager makes the agent's driver, a new one for each process.
	manager func(b *bench) (fabric.Manager, error)
	// login are the Secret's files.
	login func(b *bench) map[string]string
	// change matches the calls that change something, look those that read what a machine has.
	change, look simapi.Fault
	// busy is the answer of a manager that is at work.
	busy string
	// partial matches what attaches, below the manager or as change does if it is empty.
	partial simapi.Fault
	// id is how the manager names a device.
	id func(*bench, core.Device) string
	// denial is how the manager refuses a login, and denied what a person is told of that.
	denial, denied string
	// revoke ends all logins; nil is those of the identity manager.
	revoke func(b *bench)

	// blind makes what the manager says about one machine fail, until it is called with false.
	blind func(b *bench, m device.Machine, on bool)
	// refuseDetach makes the manager refuse so many detaches of what is attached to machine n1.
	refuseDetach func(b *bench, times int)
	// laterPage matches a request for a page of the list of devices that is not the first one; nil where lists are whole.
	laterPage func(r *http.Request) bool
	// afterRestart is what a person has to do when the manager was started anew amid its work; nil is nothing.
	afterRestart func(b *bench)
	// stuck makes what is asked for next fail or wait in a way that a person sees at the manager; ease ends that.
	stuck func(b *bench) (ease func())

	// call and settle are what an agent's configuration has where nothing is said of them.
	call, settle time.Duration
	// requests are how many a whole life of a unit, attached and given back, may cost when nothing goes wrong, polls included.
	requests int
	// listing is how many a look at all devices costs where they are not in one answer.
	listing int
	// dear is by how much more a look at a machine costs than where one request does; 1 if zero. What a fault itself costs is
	// looks, for the most part.
	dear int
	// not says why a row cannot be run, by its name.
	not map[string]string
}

// The identity manager's refusal of a login.
const (
	deniedGrant = "invalid_grant"
	grantDenial = `{"error":"` + deniedGrant + `","error_description":"Invalid user credentials"}`
)

// setting is one kind of installation.
type setting struct {
	name string
	// kind is the face's word for what it is.
	kind string
	// open: the manager asks nobody who he is.
	open bool
	// early: it lists what is coming, and says no more of it while a call lasts.
	early    bool
	policies simapi.Policies
	// requests and listing are the face's where this costs more.
	requests, listing int
	// mute: it does not say how work has ended.
	mute bool
	// sideBySide: the agent is told that calls for one machine may go side by side.
	sideBySide bool
	// call and settle are the agent's callTimeout and settle; a minute each if zero.
	call, settle time.Duration
	// not says why a row cannot be run here, by its name.
	not map[string]string
}

// bench is an installation with agents.
type bench struct {
	*facetest.Chassis
	t       *testing.T
	face    *face
	setting setting
	dir     string

	mu    sync.RWMutex // guards Core while it is built anew
	front atomic.Pointer[http.ServeMux]
	twist atomic.Pointer[twist]
	stop  func()

	leader fabric.Manager
	agents []*agent
	proofs []string
	// allowed are changing calls and requests beyond what the row allows.
	allowed struct{ changes, requests int }

	crimes struct {
		sync.Mutex
		all []string
	}

	// Of a CDIM: the machine that its collector does not see, how often that was met, and the door for people.
	unseen     atomic.Pointer[device.Machine]
	overlooked atomic.Int32
	operator   http.Handler
	// service is the one of Redfish.
	service atomic.Pointer[redfish.Face]
}

// twist is what happens to answers on their way.
type twist struct {
	hits atomic.Int32
	do   func(w http.ResponseWriter, r *http.Request, next http.Handler)
}

func newBench(t *testing.T, f *face, s setting, r *row) *bench {
	t.Helper()
	if s.call == 0 {
		s.call = time.Minute
	}
	if r.call > 0 {
		s.call = r.call
	}
	if s.settle == 0 {
		s.settle = time.Minute
	}
	o := facetest.Options{Policies: s.policies, InMemory: true, Skew: r.skew}
	if r.restarts {
		o.StatePath = filepath.Join(t.TempDir(), "chassis.json")
	}
	b := &bench{Chassis: facetest.New(t, facetest.Pool+f.pool, o), t: t, face: f, setting: s}
	b.begin()
	t.Cleanup(func() { b.stop() })
	b.Serve(!s.open, map[string]http.Handler{"/": http.HandlerFunc(b.serve)})
	// TLS gives the other side 5 s to hear that a connection ends.
	t.Cleanup(func() { time.Sleep(10 * time.Second) })
	b.dir = b.Secret(f.login(b))
	b.leader = b.client()
	return b
}

// begin puts the face in front of the chassis.
func (b *bench) begin() {
	handlers, stop := b.face.start(b)
	mux := http.NewServeMux()
	for prefix, h := range handlers {
		mux.Handle(prefix, h)
	}
	b.stop = stop
	b.front.Store(mux)
}

func (b *bench) serve(w http.ResponseWriter, r *http.Request) {
	mux := b.front.Load()
	if mux == nil { // nobody is there
		panic(http.ErrAbortHandler)
	}
	if t := b.twist.Load(); t != nil {
		t.do(w, r, mux)
		return
	}
	mux.ServeHTTP(w, r)
}

// down ends the manager, as a crash does; up starts it again with what it has stored.
func (b *bench) down() {
	b.front.Store(nil)
	b.stop()
	b.Server.CloseClientConnections()
}

func (b *bench) up() {
	b.t.Helper()
	b.mu.Lock()
	b.Build()
	b.mu.Unlock()
	b.begin()
	b.proved("the manager was started again")
}

// chassis is the hardware of now.
func (b *bench) chassis() *core.Core {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.Core
}

func (b *bench) client() fabric.Manager {
	b.t.Helper()
	m, err := b.face.manager(b)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if err := m.Close(context.WithoutCancel(b.t.Context())); err != nil {
			b.t.Error(err)
		}
	})
	return m
}

// fault adds a rule that has to be met, times times, or at least once if that is 0.
func (b *bench) fault(rule simapi.Fault, times int) string {
	b.t.Helper()
	rule.Name = fmt.Sprintf("rule-%d", len(b.Faults.Rules())+1)
	rule.Count = times
	b.Add(rule)
	return rule.Name
}

// next makes something become of the next changing calls.
func (b *bench) next(f fabrictest.Fate, times int) string {
	b.t.Helper()
	rule, ok := facetest.Fate(f, b.face.busy)
	if !ok {
		b.t.Fatalf("fate %s is not one of a call", f)
	}
	return b.fault(on(rule, b.face.change), times)
}

// on makes a rule match what another one does.
func on(rule, match simapi.Fault) simapi.Fault {
	rule.Face, rule.Method, rule.Path, rule.Body = match.Face, match.Method, match.Path, match.Body
	return rule
}

// allow lets a kind of installation cost more than the row allows, for a reason that the row knows.
func (b *bench) allow(changes, requests int) {
	b.allowed.changes += changes
	b.allowed.requests += requests
}

// proved records that what the row is about has taken place.
func (b *bench) proved(what string) { b.proofs = append(b.proofs, what) }

// met checks that the rules were hit, and counts them as proofs.
func (b *bench) met() {
	b.t.Helper()
	for _, r := range b.Faults.Rules() {
		if r.Hits == 0 || r.Count > 0 && r.Hits != r.Count {
			b.t.Errorf("fault %s (%s of %s %s) has met %d calls, want %d", r.Name, r.Action, r.Face, r.Path, r.Hits, r.Count)
			continue
		}
		b.proved(r.Name)
	}
}

// lift takes a fault back, once it was met.
func (b *bench) lift(name string) {
	b.t.Helper()
	for _, r := range b.Faults.Rules() {
		if r.Name == name {
			if r.Hits == 0 {
				b.t.Errorf("fault %s has met no call", name)
			}
			b.proved(name)
		}
	}
	b.Faults.Clear(name)
}

// log are the requests that have come from outside.
func (b *bench) log() []simapi.Request {
	return slices.DeleteFunc(b.Faults.Log(), func(r simapi.Request) bool { return r.Face == "hw" || r.Face == "agent" })
}

// split gives what changes something another name for faults and in the log, where paths alone do not tell.
func (b *bench) split(name func(r *http.Request) string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { b.Faults.Wrap(name(r), h).ServeHTTP(w, r) })
}

// revoke ends all logins.
func (b *bench) revoke() {
	if b.face.revoke != nil {
		b.face.revoke(b)
		return
	}
	b.Tokens.RevokeAll()
}

// refuseLogin ends all logins and lets nobody in any more.
func (b *bench) refuseLogin() {
	b.t.Helper()
	b.revoke()
	b.Add(simapi.Fault{Name: "login", Face: "idm", Action: simapi.ActionStatus, Status: http.StatusUnauthorized, Content: b.face.denial})
}

// changes counts the calls that were to change something.
func (b *bench) changes() int {
	path, n := regexp.MustCompile(b.face.change.Path), 0
	for _, r := range b.log() {
		if r.Face == b.face.change.Face && path.MatchString(r.Path) && (b.face.change.Method == "" || r.Method == b.face.change.Method) {
			n++
		}
	}
	return n
}

// logins counts what was asked of the login, refused or not.
func (b *bench) logins() int {
	n := 0
	for _, r := range b.log() {
		if r.Face == "idm" {
			n++
		}
	}
	return n
}

// crime records what must never be.
func (b *bench) crime(format string, args ...any) {
	b.crimes.Lock()
	defer b.crimes.Unlock()
	b.crimes.all = append(b.crimes.all, fmt.Sprintf(format, args...))
}

// sleep lets time pass.
func (b *bench) sleep(d time.Duration) { time.Sleep(d) }

// until waits for something to be so.
func (b *bench) until(what string, most time.Duration, so func() bool) {
	b.t.Helper()
	for begun := time.Now(); !so(); time.Sleep(500 * time.Millisecond) {
		if time.Since(begun) > most {
			b.t.Fatalf("%s: not within %s\n%s", what, most, b.story())
		}
	}
}

// story is what happened, for whoever reads a failure.
func (b *bench) story() string {
	var out strings.Builder
	for _, a := range b.agents {
		for _, s := range a.status() {
			fmt.Fprintf(&out, "%s\n", s)
		}
	}
	all := b.log()
	for _, r := range all[max(0, len(all)-30):] {
		fmt.Fprintf(&out, "%s %s %s %s = %d %s\n", r.Time.Format(time.TimeOnly), r.Face, r.Method, r.Path, r.Status, r.Fault)
	}
	for _, o := range b.chassis().State().Operations {
		fmt.Fprintf(&out, "%s %s %s %v: %s\n", o.Start.Format(time.TimeOnly), o.Kind, o.Machine, o.Devices, o.Outcome)
	}
	return out.String()
}

// slow makes the hardware take so long from now on.
func (b *bench) slow(d time.Duration) {
	delay := simapi.Duration(d)
	b.Config.Timing.AttachDelay, b.Config.Timing.DetachDelay = &delay, &delay
	b.chassis().SetTiming(b.Config.Timing)
}

// alter does something to a device.
func (b *bench) alter(id string, c simapi.DeviceChange) {
	b.t.Helper()
	if err := b.chassis().ChangeDevice(id, c); err != nil {
		b.t.Fatal(err)
	}
}

// byHand attaches a device as a person does, behind the agent's back, and again while the manager is busy.
func (b *bench) byHand(machine, id string) {
	b.t.Helper()
	for {
		_, err := b.chassis().Attach(b.t.Context(), core.AttachRequest{Machine: machine, Specs: []core.Spec{{Device: id, Count: 1}}, Caller: "person", Limit: -1})
		if err == nil {
			return
		}
		if !errors.Is(err, core.ErrBusy) {
			b.t.Fatal(err)
		}
		b.sleep(time.Second)
	}
}

// has are the devices that a machine really has.
func (b *bench) has(machine string) []string {
	var out []string
	for _, d := range b.chassis().State().Devices {
		if d.Machine == machine {
			out = append(out, d.ID)
		}
	}
	return out
}

// given counts how often a machine was really given a device by the manager.
func (b *bench) given() int {
	n := 0
	for _, o := range b.chassis().State().Operations {
		if o.Kind == "attach" && o.Caller != "person" {
			n += len(o.Devices)
		}
	}
	return n
}

// finish has all given back and asks what is asked of every row.
func (b *bench) finish(r *row) {
	b.t.Helper()
	b.met()
	b.Faults.Clear("")
	b.twist.Store(nil)
	if !r.quiet && len(b.proofs) == 0 {
		b.t.Error("nothing proves that the fault was met")
	}
	for _, a := range b.agents {
		a.giveAllBack()
	}
	for _, d := range b.chassis().State().Devices {
		if d.Phase != simapi.PhaseFree {
			b.t.Errorf("leak: %s is %s on %s in the end\n%s", d.ID, d.Phase, d.Machine, b.story())
		}
	}
	for _, v := range b.chassis().Violations() {
		b.t.Errorf("the chassis has seen what must not be: %+v", v)
	}
	b.crimes.Lock()
	defer b.crimes.Unlock()
	for _, c := range b.crimes.all {
		b.t.Error(c)
	}
	if n, most := b.changes(), r.changes+b.allowed.changes; n > most {
		b.t.Errorf("%d changing calls, at most %d\n%s", n, most, b.story())
	}
	if n, most := len(b.log()), b.most(r); n > most {
		b.t.Errorf("%d requests, at most %d\n%s", n, most, b.story())
	}
}

// most is how many requests a row may take.
func (b *bench) most(r *row) int {
	return r.lives*cmp.Or(b.setting.requests, b.face.requests) + r.listings*cmp.Or(b.setting.listing, b.face.listing) +
		(r.more+b.allowed.requests)*cmp.Or(b.face.dear, 1)
}
