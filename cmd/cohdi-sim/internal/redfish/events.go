// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"
)

const (
	keptEvents = 100
	// keepAlive is how often a stream says that it is there.
	keepAlive = 15 * time.Second
)

// record is one event.
type record struct {
	id   int
	data []byte
}

// broadcast keeps the last events and wakes those who listen.
type broadcast struct {
	mu      sync.Mutex
	last    int
	kept    []record
	woken   chan struct{} // closed at the next event
	broken  chan struct{} // closed when all streams are cut off
	streams int
}

// add keeps an event, made of its number.
func (b *broadcast) add(data func(id int) ([]byte, error)) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	text, err := data(b.last + 1)
	if err != nil {
		return err
	}
	b.last++
	b.kept = append(b.kept, record{b.last, text})
	if len(b.kept) > keptEvents {
		b.kept = b.kept[1:]
	}
	if b.woken != nil {
		close(b.woken)
		b.woken = nil
	}
	return nil
}

// after returns what came after an event, and channels for what comes next.
func (b *broadcast) after(id int) (news []record, woken, broken <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.kept {
		if r.id > id {
			news = append(news, r)
		}
	}
	if b.woken == nil {
		b.woken = make(chan struct{})
	}
	if b.broken == nil {
		b.broken = make(chan struct{})
	}
	return news, b.woken, b.broken
}

func (b *broadcast) count(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.streams += n
}

// Streams is how many listen.
func (f *Face) Streams() int {
	f.events.mu.Lock()
	defer f.events.mu.Unlock()
	return f.events.streams
}

// CutStreams ends all streams of events.
func (f *Face) CutStreams() {
	f.events.mu.Lock()
	defer f.events.mu.Unlock()
	if f.events.broken != nil {
		close(f.events.broken)
		f.events.broken = nil
	}
}

// tell makes events of what has begun or ended.
func (f *Face) tell(jobs []job) {
	for _, j := range jobs {
		if err := f.events.add(func(id int) ([]byte, error) { return f.eventBody(id, j) }); err != nil {
			f.log.Error(err, "Event was not told")
		}
	}
}

func (f *Face) getEventService(*http.Request) answer {
	body := object{
		"@odata.type": "#EventService.v1_10_0.EventService", "@odata.id": f.eventService(), "Id": "EventService", "Name": "Events", "ServiceEnabled": true,
	}
	if f.policies().Events == "sse" {
		body["ServerSentEventUri"] = f.names.stream()
	}
	return f.show(body, tagOf(body, ""), readOnly)
}

// stream tells of events until the client leaves or is cut off. The end of the session does not end it.
func (f *Face) stream(w http.ResponseWriter, r *http.Request) {
	if !f.known(r) {
		f.refusal(refuse(http.StatusUnauthorized, "NoValidSession", "no valid session")).write(w)
		return
	}
	if f.policies().Events != "sse" {
		f.refusal(f.missing(r)).write(w)
		return
	}
	last, err := strconv.Atoi(r.Header.Get("Last-Event-ID"))
	if err != nil {
		f.events.mu.Lock()
		last = f.events.last
		f.events.mu.Unlock()
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	rc := http.NewResponseController(w)
	f.events.count(1)
	defer f.events.count(-1)
	for {
		news, woken, broken := f.events.after(last)
		for _, n := range news {
			if _, err := fmt.Fprintf(w, "id: %d\ndata: %s\n\n", n.id, n.data); err != nil {
				return
			}
			last = n.id
		}
		if rc.Flush() != nil {
			return
		}
		timer := f.clk.NewTimer(keepAlive)
		select {
		case <-woken:
		case <-timer.C():
			if _, err := fmt.Fprint(w, ": alive\n\n"); err != nil {
				return
			}
		case <-broken:
			panic(http.ErrAbortHandler)
		case <-r.Context().Done():
			return
		case <-f.ctx.Done():
			return
		}
		timer.Stop()
	}
}
