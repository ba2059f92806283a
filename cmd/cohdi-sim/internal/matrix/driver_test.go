// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// loginDown: the login answers no more while the token is near its end.
func loginDown(b *bench) {
	read := func() error { return b.leader.Health(b.t.Context()) }
	if err := read(); err != nil {
		b.t.Fatal(err)
	}
	begun, before := time.Now(), b.logins()
	b.Add(simapi.Fault{Name: "down", Face: "idm", Action: simapi.ActionStatus, Status: http.StatusServiceUnavailable, Content: facetest.Page, ContentType: "text/html"})
	at := func(d time.Duration) { b.sleep(d - time.Since(begun)) }
	at(280 * time.Second) // it is to be renewed 30 s before its end, after 300 s
	if err := read(); err != nil {
		b.t.Errorf("with a token that is good for some seconds: %v", err)
	}
	at(310 * time.Second)
	if b.face.revoke != nil { // a session does not end while it is used
		b.face.revoke(b)
	}
	for range 5 {
		if err := read(); err == nil {
			b.t.Error("without a token it goes on")
		}
	}
	if n := b.logins() - before; n > 12 {
		b.t.Errorf("%d tries to log in for 6 reads", n)
	}
	b.lift("down")
	if err := read(); err != nil {
		b.t.Errorf("when the login is back: %v", err)
	}
}

// pagedLists: a member goes or comes back each time when a later page is read, so that what follows it moves.
func pagedLists(b *bench) {
	free := func() []string {
		b.t.Helper()
		supply, err := b.leader.Free(b.t.Context(), []string{fabrictest.ModelA, fabrictest.ModelB})
		if err != nil {
			b.t.Fatal(err)
		}
		var ids []string
		for _, s := range supply {
			for _, d := range s.Devices {
				ids = append(ids, d.ID)
			}
		}
		slices.Sort(ids)
		return ids
	}
	all := free()
	first := slices.IndexFunc(all, func(id string) bool { return strings.HasSuffix(id, "a-0") })
	if len(all) != 3 || first < 0 {
		b.t.Fatalf("free = %v", all)
	}
	gone := b.churn(3)
	if diff := cmp.Diff(slices.Delete(slices.Clone(all), first, first+1), free()); diff != "" || !gone.Load() {
		b.t.Errorf("amid changes, a-0 has gone: %t, free (-want +got):\n%s", gone.Load(), diff)
	}
	b.alter("a-0", simapi.DeviceChange{Action: simapi.DeviceReturn})
	if diff := cmp.Diff(all, free()); diff != "" {
		b.t.Errorf("when it is back (-want +got):\n%s", diff)
	}
	machines, err := b.leader.Machines(b.t.Context())
	var ids []device.Machine
	for _, m := range machines {
		ids = append(ids, m.ID)
	}
	slices.Sort(ids)
	if diff := cmp.Diff([]device.Machine{fabrictest.MachineOne, fabrictest.MachineTwo}, ids); err != nil || diff != "" {
		b.t.Errorf("machines, error %v (-want +got):\n%s", err, diff)
	}
	// What never comes to rest is said to do so, or is whole but for what goes and comes.
	b.churn(1 << 20)
	stays := all[first+1] // of the same model
	if supply, err := b.leader.Free(b.t.Context(), []string{fabrictest.ModelA}); err == nil {
		found := 0
		for _, d := range supply[fabrictest.ModelA].Devices {
			if d.ID == stays {
				found++
			}
		}
		if found != 1 {
			b.t.Errorf("in a list that never comes to rest %s is %d times: %+v", stays, found, supply)
		}
	}
	b.twist.Store(nil)
	b.alter("a-0", simapi.DeviceChange{Action: simapi.DeviceFree})
	if diff := cmp.Diff(all, free()); diff != "" {
		b.t.Errorf("at rest (-want +got):\n%s", diff)
	}
	b.proved("lists changed between pages")
}
