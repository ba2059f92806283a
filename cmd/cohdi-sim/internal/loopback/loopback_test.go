// SPDX-License-Identifier: Apache-2.0

package loopback

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"
)

func TestAsk(t *testing.T) {
	for _, tt := range []struct {
		path   string
		want   error
		status int
	}{
		{"/echo", nil, http.StatusTeapot},
		{"/breaks", ErrBroken, 0},
		{"/hangs", ErrTimeout, 0},
		{"/stops", ErrStopped, 0},
	} {
		t.Run(tt.path, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				var work sync.WaitGroup
				c := Client{Clock: clock.RealClock{}, Timeout: time.Minute, Work: &work, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					switch r.URL.Path {
					case "/echo":
						w.WriteHeader(http.StatusTeapot)
						_, _ = io.Copy(w, r.Body)
					case "/breaks":
						panic(http.ErrAbortHandler)
					case "/stops":
						stop()
						fallthrough
					default:
						<-r.Context().Done()
					}
				})}
				began := time.Now()
				rec, err := c.Ask(ctx, "PUT", "http://other"+tt.path, []byte("words"))
				if !errors.Is(err, tt.want) {
					t.Fatalf("error %v, want %v", err, tt.want)
				}
				if err == nil && (rec.Code != tt.status || rec.Body.String() != "words") {
					t.Errorf("answer %d %s", rec.Code, rec.Body)
				}
				if took := time.Since(began); (took == time.Minute) != errors.Is(err, ErrTimeout) {
					t.Errorf("it took %s", took)
				}
				work.Wait() // nobody waits, and so it ends
			})
		})
	}
}
