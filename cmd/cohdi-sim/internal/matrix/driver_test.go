// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"net/http"
	"time"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/facetest"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
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
