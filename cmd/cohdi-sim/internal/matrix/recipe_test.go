// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

func attachDetach(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	l := a.serves(u)
	if has := b.has("n1"); len(has) != 1 || l.FabricDevice == "" || l.UUID == "" || a.told[l.Attempt] != 1 {
		b.t.Errorf("n1 has %v, lease %+v, told %d times", has, l, a.told[l.Attempt])
	}
	a.release(u)
	a.gone(u)
	if n := b.given(); n != 1 {
		b.t.Errorf("%d devices were given", n)
	}
}

func severalOnOne(b *bench) {
	a := b.agent("n1")
	units := []device.Unit{a.assign(modelA), a.assign(modelB), a.assign(modelA)}
	for _, u := range units {
		a.serves(u)
	}
	if has := b.has("n1"); len(has) != 3 || b.given() != 3 {
		b.t.Errorf("n1 has %v, %d were given", has, b.given())
	}
	for _, u := range units {
		a.release(u)
	}
	for _, u := range units {
		a.gone(u)
	}
}

// backTogether: three units go back at the same moment, and the manager refuses some calls. Where it takes several
// detaches in one call, what is ready together is one.
func backTogether(refused int) func(b *bench) {
	return func(b *bench) {
		b.t.Helper()
		a := b.agent("n1")
		units := []device.Unit{a.assign(modelA), a.assign(modelB), a.assign(modelA)}
		for _, u := range units {
			a.serves(u)
		}
		before, most := b.changes(), len(units)
		together := b.leader.Capabilities().Batch >= len(units)
		if together {
			most = 2 // the first may have gone before the others are off the bus
		}
		begun := make(chan struct{})
		go func() {
			defer close(begun)
			for _, u := range units {
				a.release(u)
			}
		}()
		if refused > 0 {
			if together { // the first may go by itself, and one of a job is to be refused
				b.until("the first goes", 5*time.Minute, func() bool { return b.changes() > before })
			}
			b.face.refuseDetach(b, refused)
		}
		<-begun
		for _, u := range units {
			a.gone(u)
		}
		if n := b.changes() - before; (refused == 0 || together) && n > most+refused {
			b.t.Errorf("%d calls gave three back, at most %d", n, most+refused)
		}
		b.proved(fmt.Sprintf("%d calls gave three back", b.changes()-before))
	}
}

// parallelHosts: both hosts want one of two, and then both the last one.
func parallelHosts(b *bench) {
	one, two := b.agent("n1"), b.agent("n2")
	first, second := one.assign(modelA), two.assign(modelA)
	one.serves(first)
	two.serves(second)
	last := b.wanted(modelB)
	x, y := one.want(modelB, last), two.want(modelB, last)
	b.until("both have ended", 20*time.Minute, func() bool { return one.ended(x) && two.ended(y) })
	phases := []device.Phase{one.lease(x).Phase, two.lease(y).Phase}
	if slices.Sort(phases); !slices.Equal(phases, []device.Phase{device.Attached, device.Failed}) {
		b.t.Errorf("of two who want the last one: %v\n%s", phases, b.story())
	}
	b.proved("two wanted one")
}

// twoProcesses: an old process that has not ended works beside the new one, until the device is there.
func twoProcesses(b *bench) {
	a := b.agent("n1")
	old := a.p
	b.t.Cleanup(old.end)
	a.start(0, false)
	b.proved("two processes were at work")
	u := a.assign(modelA)
	old.loop.Poke()
	b.until("it has ended", 15*time.Minute, func() bool { return a.ended(u) })
	old.end()
	a.release(u)
	a.gone(u)
	if n := b.given(); n != 1 {
		b.t.Errorf("%d devices were given", n)
	}
}

func tokenRevoked(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	a.serves(u)
	before := b.logins()
	b.revoke()
	second := a.assign(modelB)
	a.serves(second)
	b.revoke()
	a.release(u)
	a.gone(u)
	refused := 0
	for _, r := range b.log() {
		if r.Status == 401 {
			refused++
		}
	}
	if refused == 0 {
		b.t.Error("no call was refused")
	}
	b.proved(fmt.Sprintf("%d calls were refused", refused))
	if n := b.logins() - before; n > 3 { // the agent's two and the leader's
		b.t.Errorf("%d logins after two revocations", n)
	}
}

func skewedClock(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	a.serves(u)
	a.release(u)
	a.gone(u)
	b.proved("the clocks differ")
	most := 2 // the leader's and the agent's
	if b.leader.Capabilities().Asynchronous {
		most = 3
	}
	if n := b.logins(); n > most {
		b.t.Errorf("%d logins, at most %d", n, most)
	}
}

func loginRefused(b *bench) {
	a := b.agent("n1")
	wanted := b.wanted(modelA)
	u := a.want(modelA, wanted)
	a.serves(u)
	a.release(u)
	a.gone(u)
	before := b.logins()
	b.refuseLogin()
	u = a.want(modelA, wanted)
	b.sleep(2 * time.Minute)
	if n := b.logins() - before; n < 2 || n > 14 {
		b.t.Errorf("%d logins in two minutes of refusal", n)
	}
	b.until("a person is told", 15*time.Second, func() bool { return strings.Contains(a.why(u), b.face.denied) })
	b.lift("login")
	a.serves(u)
}

func busyStorm(b *bench) {
	a := b.agent("n1")
	wanted := b.wanted(modelA)
	b.next(fabrictest.Busy, 6)
	begun := time.Now()
	u := a.want(modelA, wanted)
	a.serves(u)
	if took := time.Since(begun); took < 30*time.Second {
		b.t.Errorf("six refusals took %s", took)
	}
	b.next(fabrictest.Busy, 2)
	a.release(u)
	a.gone(u)
}

// lost: something becomes of an attach and then of a detach, and nobody says what.
func lost(fate fabrictest.Fate) func(b *bench) {
	return func(b *bench) {
		b.t.Helper()
		a := b.agent("n1")
		wanted := b.wanted(modelA)
		name := b.next(fate, 1)
		u := a.want(modelA, wanted)
		effect := fate == fabrictest.LostAfter || fate == fabrictest.ErrorAfter || fate == fabrictest.Truncated
		if effect {
			a.serves(u)
		} else {
			a.servesInTime(u)
		}
		b.lift(name)
		if a.lease(u).Phase == device.Failed {
			return
		}
		if n := b.given(); n != 1 {
			b.t.Errorf("%d devices were given for one intent", n)
		}
		b.next(fate, 1)
		a.release(u)
		a.gone(u)
	}
}

// lostAndSlow: nobody knows of the work, and it goes on until after the time at which it is asked for again.
func lostAndSlow(b *bench) {
	a := b.agent("n1")
	wanted := b.wanted(modelA)
	took := 50 * time.Second // what one call may take is a minute
	if b.leader.Capabilities().Asynchronous {
		took = 150 * time.Second
	}
	b.slow(took)
	b.next(fabrictest.LostAfter, 1)
	u := a.want(modelA, wanted)
	a.serves(u)
	if n := b.given(); n != 1 {
		b.t.Errorf("%d devices were given", n)
	}
}

func processedTwice(b *bench) {
	a := b.agent("n1")
	wanted := b.wanted(modelA)
	b.fault(on(simapi.Fault{Action: simapi.ActionDup}, b.face.change), 1)
	u := a.want(modelA, wanted)
	l := a.serves(u)
	b.sleep(2 * time.Minute)
	for _, d := range b.chassis().State().Devices {
		view, known := b.device(b.nameOf(d.ID))
		if d.Phase != simapi.PhaseAttached || known && b.face.id(b, view) == l.FabricDevice {
			continue
		}
		surplus := a.adopt(modelA, b.nameOf(d.ID))
		b.until("what is left over is idle", 10*time.Minute, func() bool { return a.lease(surplus).Idle() })
		a.release(surplus)
		a.gone(surplus)
	}
	if has := b.has("n1"); len(has) != 1 {
		b.t.Errorf("n1 has %v, want one", has)
	}
	b.fault(on(simapi.Fault{Action: simapi.ActionDup}, b.face.change), 1)
	a.release(u)
	a.gone(u)
}

// nameOf is what the manager calls a device that is attached.
func (b *bench) nameOf(id string) string {
	for _, m := range b.chassis().Machines() {
		for _, d := range m.Listed {
			if d.ID == id {
				return b.face.id(b, d)
			}
		}
	}
	return ""
}

func partialAttach(b *bench) {
	a := b.agent("n1")
	wanted := b.wanted(modelA)
	where := b.face.partial
	if where.Face == "" {
		where = b.face.change
	}
	b.fault(on(simapi.Fault{Action: simapi.ActionPartial, Items: 0}, where), 1)
	u := a.want(modelA, wanted)
	b.until("it has ended", 15*time.Minute, func() bool { return a.ended(u) })
	if l, has := a.lease(u), b.has("n1"); l.Phase == device.Attached && len(has) != 1 || l.Phase == device.Failed && (len(has) > 0 || l.Failure.Reason != "AttachTimeout") {
		b.t.Errorf("n1 has %v, lease %+v", has, l)
	}
}

// slowRestart: the process dies amid the work, and the next one goes on.
func slowRestart(b *bench) {
	a := b.agent("n1")
	took := 40 * time.Second
	if b.leader.Capabilities().Asynchronous {
		took = 2 * time.Minute
	}
	b.slow(took)
	u := a.assign(modelA)
	b.sleep(took / 2)
	a.again()
	a.serves(u)
	if n := b.given(); n != 1 || b.changes() != 1 {
		b.t.Errorf("%d devices were given, by %d calls", n, b.changes())
	}
	a.release(u)
	b.sleep(took/2 + 5*time.Second)
	a.again()
	a.gone(u)
}

func tenMinutes(b *bench) {
	a := b.agent("n1")
	b.slow(10 * time.Minute)
	u := a.assign(modelA)
	b.sleep(2 * time.Minute)
	b.proved("the manager works for ten minutes: " + a.why(u))
	if why := a.why(u); !strings.HasPrefix(why, "stored, machine as it was") && !strings.HasPrefix(why, "work goes on") {
		b.t.Errorf("after two minutes the unit waits for: %s", why)
	}
	if b.setting.early {
		a.fails(u, "NotUsable")
		b.allow(62, 62*cmp.Or(b.setting.listing, 5)) // it is asked to take it away, and refuses as long as it works
	} else {
		a.fails(u, "AttachTimeout")
	}
	a.takeBack(u)
	a.gone(u)
	if n := b.given(); n != 1 {
		b.t.Errorf("%d devices were given", n)
	}
}

// thorough: what takes long is done in full for one kind of installation, and as a sample for the others.
func (b *bench) thorough() bool { return *full && b.setting.name == b.face.settings[0].name }

// diesAtEachStep: a process dies before and after each step of a unit's life, and the next one goes on.
func diesAtEachStep(b *bench) {
	a := b.agent("n1")
	wanted, deaths := b.wanted(modelA), 0
	for _, after := range []bool{false, true} {
		for at := 1; ; at++ {
			if !b.thorough() && at%9 != 1 { // a sample
				continue
			}
			a.kill()
			a.start(at, after)
			u := a.want(modelA, wanted)
			live := func(what string, so func() bool) {
				b.t.Helper()
				b.until(fmt.Sprintf("%s, after a death at step %d", what, at), 60*time.Minute, func() bool {
					if a.died() {
						deaths++
						a.kill()
						a.start(0, false)
					}
					return so()
				})
			}
			was := deaths
			live("it has ended", func() bool { return a.ended(u) })
			a.release(u)
			live("it is back", func() bool { return a.lease(u).Unit == "" })
			if has := b.has("n1"); len(has) != 0 {
				b.t.Fatalf("n1 has %v after a death at step %d (after it: %v)\n%s", has, at, after, b.story())
			}
			if deaths == was {
				break
			}
		}
	}
	if deaths < 4 {
		b.t.Errorf("%d processes died", deaths)
	}
	b.proved(fmt.Sprintf("%d processes died", deaths))
}

func critical(b *bench) {
	bad := "Critical"
	a := b.agent("n1")
	u := a.assign(modelA)
	var came string
	b.until("one is coming", 5*time.Minute, func() bool {
		for _, d := range b.chassis().State().Devices {
			if d.Phase == simapi.PhaseAttaching {
				came = d.ID
			}
		}
		return came != ""
	})
	b.alter(came, simapi.DeviceChange{Health: &bad})
	b.proved(came + " is critical")
	a.fails(u, "DeviceCritical")
	if has := b.has("n1"); len(has) != 1 {
		b.t.Errorf("n1 has %v", has)
	}
	a.takeBack(u)
	second := a.assign(modelA)
	l := a.serves(second)
	if b.given() != 2 {
		b.t.Errorf("%d devices were given", b.given())
	}
	a.gone(u)
	d, _ := b.device(l.FabricDevice)
	b.alter(d.ID, simapi.DeviceChange{Health: &bad})
	before := b.changes()
	b.sleep(10 * time.Minute)
	if n := b.changes() - before; a.lease(second).Phase != device.Attached || n != 0 {
		b.t.Errorf("one that goes bad later: %+v, %d changing calls", a.lease(second), n)
	}
}

func healthUnknown(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	l := a.serves(u)
	d, _ := b.device(l.FabricDevice)
	for _, s := range []string{"", "9", "9x", "0", "?"} {
		b.alter(d.ID, simapi.DeviceChange{OpStatus: &s})
		b.sleep(15 * time.Second) // a list may lag
		lists, failed := b.leader.ListAttached(b.t.Context(), []device.Machine{a.machine})
		if len(failed) > 0 || len(lists[a.machine]) != 1 || lists[a.machine][0].Health == device.HealthCritical {
			b.t.Errorf("with health %q: %v, %v", s, lists, failed)
		}
		b.proved("health " + s)
	}
	if got := a.lease(u); got.Phase != device.Attached {
		b.t.Errorf("lease %+v", got)
	}
}

// wanted is a device for a unit of the model, where the manager takes one, and nobody's yet.
func (b *bench) wanted(model device.Model) string {
	b.t.Helper()
	if !b.leader.Capabilities().AddressableAttach {
		return ""
	}
	word := map[device.Model]string{modelA: fabrictest.ModelA, modelB: fabrictest.ModelB}[model]
	free, err := b.leader.Free(b.t.Context(), []string{word})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, d := range free[word].Devices {
		if !b.taken(d.ID) {
			return d.ID
		}
	}
	b.t.Fatalf("nothing of %s is free: %v", word, free)
	return ""
}

func stolen(b *bench) {
	a, other := b.agent("n1"), b.agent("n2")
	wanted := b.wanted(modelA)
	for _, id := range []string{"a-0", "a-1"} {
		b.alter(id, simapi.DeviceChange{Action: simapi.DeviceSteal})
	}
	b.proved("all were stolen")
	u := a.want(modelA, wanted)
	a.fails(u, "NoCapacity", "Rejected")
	other.serves(other.assign(modelB))
	for _, id := range []string{"a-0", "a-1"} {
		b.alter(id, simapi.DeviceChange{Action: simapi.DeviceFree})
	}
	a.takeBack(u)
	a.gone(u)
	a.serves(a.assign(modelA))
}

func duplicateIdentity(b *bench) {
	a := b.agent("n1")
	first := a.serves(a.assign(modelA))
	one, _ := b.device(first.FabricDevice)
	for _, id := range []string{"a-0", "a-1"} {
		b.alter(id, simapi.DeviceChange{FabricSerial: &one.UUID})
	}
	b.proved("two go by one identity")
	second := a.assign(modelA)
	a.fails(second, "NoIdentity", "NotUsable", "AttachTimeout", "Ambiguous")
	if l := a.lease(second); l.UUID == first.UUID { // by its arrival it may be known for what it is
		b.t.Errorf("the second one is taken for %s, the first one", l.UUID)
	}
	has := b.has("n1")
	for _, id := range has {
		if id != one.ID {
			b.alter(id, simapi.DeviceChange{Action: simapi.DeviceFree})
		}
	}
	b.identities()
	a.takeBack(second)
	a.gone(second)
}

// identities makes the manager tell the truth again.
func (b *bench) identities() {
	b.t.Helper()
	for i := range b.Config.Devices {
		d := &b.Config.Devices[i]
		b.alter(d.ID, simapi.DeviceChange{FabricSerial: &d.UUID})
	}
}

func identityMissing(b *bench) {
	a := b.agent("n1")
	none := ""
	for _, id := range []string{"a-0", "a-1"} {
		b.alter(id, simapi.DeviceChange{FabricSerial: &none})
	}
	b.proved("none has an identity")
	u := a.assign(modelA)
	a.fails(u, "NoIdentity")
	has := b.has("n1")
	if n := b.given(); n != 1 || len(has) != 1 {
		b.t.Fatalf("%d devices were given, n1 has %v", n, has)
	}
	a.takeBack(u) // it is the one that came: off the bus with it, and back
	b.until(has[0]+" is off the bus", 15*time.Minute, func() bool {
		return slices.ContainsFunc(b.chassis().State().Devices, func(d simapi.Device) bool { return d.ID == has[0] && !d.OnBus })
	})
	if b.face.name == "cm" { // it takes nothing away that has no device_id
		b.alter(has[0], simapi.DeviceChange{Action: simapi.DeviceFree})
	}
	a.gone(u)

	// Two came, and the agent has not seen in which order.
	u = a.assign(modelA)
	b.until("it is coming", 5*time.Minute, func() bool { return b.given() == 2 })
	a.kill()
	theirs := "a-0"
	if slices.Contains(b.has("n1"), theirs) {
		theirs = "a-1"
	}
	b.byHand("n1", theirs)
	b.sleep(time.Minute)
	a.again()
	a.fails(u, "NoIdentity")
	a.takeBack(u)
	b.sleep(10 * retryAfter)
	if l, on := a.lease(u), b.has("n1"); len(on) != 2 || l.Phase != device.Failed || !strings.Contains(l.Failure.Message, "until a person takes it away") {
		b.t.Errorf("n1 has %v, lease %+v; want that it waits for a person", on, l)
	}
	for _, id := range b.has("n1") {
		b.alter(id, simapi.DeviceChange{Action: simapi.DeviceFree})
	}
	a.p.loop.Poke()
	a.gone(u)
	b.identities()
}

func vanished(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	l := a.serves(u)
	d, _ := b.device(l.FabricDevice)
	b.face.blind(b, a.machine, true)
	b.alter(d.ID, simapi.DeviceChange{Action: simapi.DeviceLinkDown})
	a.p.loop.Poke()
	b.sleep(2 * time.Minute)
	if got := a.lease(u); got.Phase != device.Attached {
		b.t.Errorf("a list that cannot be read has made of it %+v", got)
	}
	b.face.blind(b, a.machine, false)
	b.alter(d.ID, simapi.DeviceChange{Action: simapi.DeviceLinkUp})
	b.sleep(time.Minute)
	if got := a.lease(u); got.Phase != device.Attached {
		b.t.Errorf("it is back: %+v", got)
	}
	b.alter(d.ID, simapi.DeviceChange{Action: simapi.DeviceVanish})
	b.proved("it has vanished")
	a.p.loop.Poke()
	b.until("it is given up", 5*time.Minute, func() bool { return a.lease(u).Phase == device.Failed })
	if got := a.lease(u); got.Failure.Reason != "Vanished" {
		b.t.Errorf("lease %+v", got)
	}
	b.alter(d.ID, simapi.DeviceChange{Action: simapi.DeviceReturn})
}

func oneMachineBroken(b *bench) {
	one, two := b.agent("n1"), b.agent("n2")
	first, second := b.wanted(modelA), b.wanted(modelB)
	b.face.blind(b, two.machine, true)
	u, v := one.want(modelA, first), two.want(modelB, second)
	one.serves(u)
	lists, failed := b.leader.ListAttached(b.t.Context(), []device.Machine{one.machine, two.machine})
	if len(lists) != 1 || failed[two.machine] == nil {
		b.t.Errorf("lists %v, failed %v; want the one and not the other", lists, failed)
	}
	if has := b.has("n2"); len(has) > 0 {
		b.t.Errorf("n2 has %v", has)
	}
	b.proved("one could not be read")
	b.face.blind(b, two.machine, false)
	two.serves(v)
}

func detachAbsent(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	l := a.serves(u)
	d, _ := b.device(l.FabricDevice)
	b.next(fabrictest.Busy, 1)
	a.release(u)
	b.until("it is asked for", 5*time.Minute, func() bool { return b.changes() == 2 })
	b.alter(d.ID, simapi.DeviceChange{Action: simapi.DeviceFree})
	a.gone(u)
}

func detachRefused(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	a.serves(u)
	begun := time.Now()
	const times = 3
	if s := b.setting; s.mute { // it has to be found out each time, by a look every 2 s
		b.allow(0, times*int((s.call+s.settle)/(2*time.Second)))
	}
	if b.face.refuseDetach == nil {
		b.t.Fatal("the face does not say how")
	}
	ready := make(chan struct{})
	go func() {
		defer close(ready)
		a.release(u)
	}()
	b.face.refuseDetach(b, times)
	<-ready
	a.gone(u)
	if took := time.Since(begun); took < times*5*time.Second {
		b.t.Errorf("%d refusals took %s", times, took)
	}
}

func listLags(b *bench) {
	a := b.agent("n1")
	u := b.wanted(modelA)
	on := b.stale()
	t := b.twist.Load()
	unit := a.want(modelA, u)
	b.until("it is asked for", 5*time.Minute, func() bool { return b.given() == 1 })
	on.Store(true)
	b.sleep(40 * time.Second)
	on.Store(false)
	a.serves(unit)
	if n := t.hits.Load(); n == 0 {
		b.t.Error("nobody read an old list")
	}
	b.proved("old lists were read")
	a.release(unit)
	b.until("it goes", 5*time.Minute, func() bool { return b.changes() == 2 })
	on.Store(true)
	b.sleep(40 * time.Second)
	on.Store(false)
	a.gone(unit)
}

func personsHand(b *bench) {
	a := b.agent("n1")
	b.byHand("n1", "a-1")
	b.proved("a person has attached one")
	b.sleep(20 * time.Second)
	u := a.assign(modelA)
	l := a.serves(u)
	if d, _ := b.device(l.FabricDevice); d.ID != "a-0" {
		b.t.Errorf("the unit is %s", d.ID)
	}
	b.sleep(10 * time.Minute)
	if has := b.has("n1"); len(has) != 2 || b.changes() != 1 {
		b.t.Errorf("n1 has %v after %d changing calls", has, b.changes())
	}
	b.alter("a-1", simapi.DeviceChange{Action: simapi.DeviceFree})
	b.alter("a-0", simapi.DeviceChange{Action: simapi.DeviceFree})
	b.sleep(15 * time.Second)
	a.p.loop.Poke()
	b.until("it is given up", 15*time.Minute, func() bool { return a.lease(u).Phase == device.Failed })
	if got := a.lease(u); got.Failure.Reason != "Vanished" {
		b.t.Errorf("lease %+v", got)
	}
}

// handAmidAttach: a person attaches another device while the manager attaches the unit's.
func handAmidAttach(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	b.until("it is coming", 5*time.Minute, func() bool { return b.given() == 1 })
	theirs := "a-0"
	if slices.Contains(b.has("n1"), theirs) {
		theirs = "a-1"
	}
	b.byHand("n1", theirs)
	b.proved("a person has attached " + theirs)
	b.until("it has ended", 15*time.Minute, func() bool { return a.ended(u) })
	l := a.lease(u)
	// Where the manager says which GPU a device is, there is no doubt; else there may be, and then it is nobody's.
	if l.Phase != device.Attached && (b.leader.Capabilities().Identity || l.Failure.Reason != "Ambiguous") {
		b.t.Errorf("lease %+v\n%s", l, b.story())
	}
	b.sleep(2 * time.Minute)
	if has := b.has("n1"); len(has) != 2 {
		b.t.Errorf("n1 has %v, want both", has)
	}
	for _, id := range b.has("n1") {
		if b.nameOf(id) != l.FabricDevice {
			b.alter(id, simapi.DeviceChange{Action: simapi.DeviceFree})
		}
	}
}

func managerRestarts(b *bench) {
	a := b.agent("n1")
	u := a.assign(modelA)
	b.until("it is coming", 5*time.Minute, func() bool { return b.given() == 1 })
	b.down()
	b.sleep(10 * time.Second)
	b.up()
	if b.face.afterRestart != nil {
		b.sleep(10 * time.Second)
		b.face.afterRestart(b)
	}
	a.serves(u)
	if n := b.given(); n != 1 {
		b.t.Errorf("%d devices were given", n)
	}
	a.release(u)
	b.until("it is going", 5*time.Minute, func() bool { return b.changes() == 2 })
	b.sleep(time.Second)
	b.down()
	b.sleep(10 * time.Second)
	b.up()
	if b.face.afterRestart != nil {
		b.sleep(10 * time.Second)
		b.face.afterRestart(b)
	}
	a.gone(u)
}

func endlessAnswers(b *bench) {
	a := b.agent("n1")
	wanted := b.wanted(modelA)
	const most = 48 << 20
	sent := b.endless(b.looks(), 1)
	unit := a.want(modelA, wanted)
	a.serves(unit)
	if n := sent.Load(); n < 1<<20 || n > most {
		b.t.Errorf("%d bytes of a list were read", n)
	}
	sent = b.endless(b.changing(), 1)
	a.release(unit)
	a.gone(unit)
	if n := sent.Load(); n < 1<<20 || n > most {
		b.t.Errorf("%d bytes of an answer were read", n)
	}
	b.proved("answers had no end")
}

func strangeAnswers(b *bench) {
	t := b.estrange()
	attachDetach(b)
	if t.hits.Load() < 4 {
		b.t.Errorf("%d strange answers", t.hits.Load())
	}
	b.proved("answers were strange")
}

func stuckWork(b *bench) {
	a := b.agent("n1")
	wanted := b.wanted(modelA)
	ease := b.face.stuck(b)
	u := a.want(modelA, wanted)
	b.sleep(3 * time.Minute)
	l := a.lease(u)
	shown := a.why(u) + " " + l.Failure.Message
	b.proved("it is stuck: " + shown)
	if n := b.changes(); n != 1 || l.Phase == device.Attached {
		b.t.Errorf("%d changing calls for what is stuck, lease %+v", n, l)
	}
	if !strings.Contains(shown, "hot-plug timed out") && !strings.Contains(shown, "suspended") {
		b.t.Errorf("a person is told: %s", shown)
	}
	ease()
	a.takeBack(u)
	a.gone(u)
	a.serves(a.assign(modelA))
}

func otherSpelling(b *bench) {
	for _, word := range []string{strings.ToLower(fabrictest.ModelA), fabrictest.ModelA + " ", ""} {
		in := fabric.Intent{Machine: fabrictest.MachineOne, Model: word, Before: []string{}}
		before := b.changes()
		op, err := b.leader.Attach(b.t.Context(), in)
		if f, ok := errors.AsType[*device.Fault](err); !ok || !f.Definite() {
			b.t.Errorf("attach of %q = %+v, %v; want a refusal", word, op, err)
		}
		if word == "" && b.changes() > before {
			b.t.Error("the manager was asked for a device of no model")
		}
	}
	b.sleep(time.Minute)
	if n := b.given(); n != 0 {
		b.t.Errorf("%d devices were given", n)
	}
}

// dayOfFaults: one unit after another on both nodes, and something goes wrong with most of what is done, and in between.
func dayOfFaults(b *bench) {
	day := time.Hour
	if b.thorough() {
		day = 24 * time.Hour
	}
	d := &dayOf{bench: b, r: rand.New(rand.NewPCG(1, 23))}
	var lives []*lifeOf
	for _, name := range []string{"n1", "n2"} {
		lives = append(lives, &lifeOf{agent: b.agent(name)})
	}
	for end := time.Now().Add(day); time.Now().Before(end); b.sleep(5 * time.Second) {
		for _, l := range lives {
			d.goOn(l)
		}
	}
	b.Faults.Clear("")
	b.proved(fmt.Sprintf("%d disturbances, %d units came, %d failed", d.disturbed, d.served, d.failed))
	if d.served == 0 || d.served+d.failed < 2*int(day/time.Hour) || d.disturbed < d.served {
		b.t.Errorf("in %s %d units came, %d failed, %d things went wrong", day, d.served, d.failed, d.disturbed)
	}
}

type dayOf struct {
	*bench
	r                         *rand.Rand
	served, failed, disturbed int
}

// lifeOf is the life of one unit of a node.
type lifeOf struct {
	agent    *agent
	unit     device.Unit
	released bool
	// next is when something is done next, or by when it has to have ended.
	next time.Time
}

func (d *dayOf) minutes(least, most int) time.Time {
	return time.Now().Add(time.Duration(least*60+d.r.IntN((most-least)*60)) * time.Second)
}

// goOn does what is next for a node: a claim comes, it goes, and its device goes back.
func (d *dayOf) goOn(l *lifeOf) {
	d.t.Helper()
	a, now := l.agent, time.Now()
	switch {
	case l.unit == "" && now.After(l.next):
		if free, ok := d.anyFree(d.r); ok {
			d.disturb(a)
			l.unit, l.released, l.next = a.want(free.model, free.id), false, now.Add(time.Hour)
		}
	case l.unit == "":
	case a.lease(l.unit).Unit == "":
		l.unit, l.next = "", d.minutes(1, 20)
	case l.released:
		a.release(l.unit) // once it is attached, if it is coming still
		if now.After(l.next) {
			d.t.Fatalf("%s does not leave %s\n%s", l.unit, a.name, d.story())
		}
	case a.ended(l.unit) && l.next.After(now.Add(20*time.Minute)):
		if d.served++; a.lease(l.unit).Phase == device.Failed {
			d.served, d.failed = d.served-1, d.failed+1
		}
		l.next = d.minutes(1, 20)
	case now.After(l.next):
		if !a.ended(l.unit) {
			d.t.Fatalf("%s comes neither nor fails on %s\n%s", l.unit, a.name, d.story())
		}
		d.disturb(a)
		l.released, l.next = true, now.Add(2*time.Hour)
		a.release(l.unit)
	}
}

type freeOne struct {
	model device.Model
	id    string
}

// anyFree is something that a unit could become now.
func (b *bench) anyFree(r *rand.Rand) (freeOne, bool) {
	model := []device.Model{modelA, modelA, modelB}[r.IntN(3)]
	word := map[device.Model]string{modelA: fabrictest.ModelA, modelB: fabrictest.ModelB}[model]
	free, err := b.leader.Free(b.t.Context(), []string{word})
	if err != nil || free[word].Count == 0 {
		return freeOne{}, false
	}
	if !b.leader.Capabilities().AddressableAttach {
		return freeOne{model: model}, true
	}
	for _, d := range free[word].Devices {
		if !b.taken(d.ID) {
			return freeOne{model, d.ID}, true
		}
	}
	return freeOne{}, false
}

// disturb makes something go wrong.
func (d *dayOf) disturb(a *agent) {
	b, r := d.bench, d.r
	fates := []fabrictest.Fate{
		fabrictest.Busy, fabrictest.LostBefore, fabrictest.LostAfter, fabrictest.ErrorBefore, fabrictest.ErrorAfter, fabrictest.Truncated, fabrictest.NoWords, fabrictest.Hang,
	}
	b.Faults.Clear("")
	d.disturbed++
	if r.IntN(5) > 0 {
		rule, _ := facetest.Fate(fates[r.IntN(len(fates))], b.face.busy)
		b.Add(on(rule, b.face.change))
	}
	switch r.IntN(4) {
	case 0:
		b.Add(on(simapi.Fault{Action: simapi.ActionStatus, Status: http.StatusServiceUnavailable, Count: 1 + r.IntN(20)}, b.face.look))
	case 1:
		b.revoke()
	case 2:
		a.kill()
		a.start(0, false)
	}
}
