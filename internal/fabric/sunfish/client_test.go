// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

const (
	one = device.Machine("00000000-0000-4000-8000-000000000001")
	two = device.Machine("00000000-0000-4000-8000-000000000002")

	f0     = base + "/Fabrics/f"
	gpuOne = f0 + "/Endpoints/t1"
	gpuTwo = f0 + "/Endpoints/t2"
	model  = "GPU 80GB"
)

func TestNew(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg  Config
		want string
	}{
		"with TLS":              {Config{Endpoint: "https://sunfish.example.com/"}, ""},
		"plain":                 {Config{Endpoint: "http://sunfish.example.com:5000", PlainHTTP: true, Fabric: "CXL"}, ""},
		"plain by mistake":      {Config{Endpoint: "http://sunfish.example.com:5000"}, "not encrypted"},
		"a path":                {Config{Endpoint: "https://sunfish.example.com/redfish/v1"}, "form"},
		"a password in the URL": {Config{Endpoint: "https://u:p@h"}, "form"},
		"no URL":                {Config{Endpoint: "::"}, "endpoint"},
		"nothing":               {Config{}, "form"},
		"a fabric's path":       {Config{Endpoint: "https://h", Fabric: "/redfish/v1/Fabrics/CXL"}, "Id"},
	} {
		_, err := New(tc.cfg)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q in it", name, err, tc.want)
		}
		if err != nil && strings.Contains(err.Error(), "u:p@") {
			t.Errorf("%s: error %v shows the password", name, err)
		}
	}
}

// service is a tree that a test writes, and what is answered to changes: 404 to all else.
type service struct {
	t      *testing.T
	clock  *clocktesting.FakeClock
	client *Client

	mu      sync.Mutex
	tree    map[string]string
	change  func(method, path, body string) (int, string)
	changes []string
	asked   map[string]int
}

func members(all ...string) string {
	var list []string
	for _, p := range all {
		list = append(list, fmt.Sprintf(`{"@odata.id":%q}`, p))
	}
	return `{"Members":[` + strings.Join(list, ",") + `]}`
}

func joining(initiators, targets []string) string {
	list := func(all []string) string {
		return strings.TrimSuffix(strings.TrimPrefix(members(all...), `{"Members":`), "}")
	}
	return `{"Links":{"InitiatorEndpoints":` + list(initiators) + `,"TargetEndpoints":` + list(targets) + `}}`
}

func gpu(endpoints string) string {
	return `{"ProcessorType":"GPU","Model":"` + model + `","UUID":"1b7e8d9c-0000-4000-8000-00000000abcd","Status":{"State":"Enabled","Health":"OK"},"Links":{"Endpoints":` + endpoints + `}}`
}

// stocked has two machines that show nothing, and two GPUs that nothing connects.
func stocked() map[string]string {
	const fabrics = base + "/Fabrics"
	tree := map[string]string{
		base:                     `{"Fabrics":{"@odata.id":"` + fabrics + `"},"Systems":{"@odata.id":"` + base + `/Systems"}}`,
		base + "/Systems":        members(base+"/Systems/1", base+"/Systems/2", base+"/Systems/System"),
		base + "/Systems/System": `{"SystemType":"Composed","Processors":{"Members":[]}}`,
		fabrics:                  members(f0),
		f0:                       `{"Endpoints":{"@odata.id":"` + f0 + `/Endpoints"},"Connections":{"@odata.id":"` + f0 + `/Connections"}}`,
		f0 + "/Endpoints":        members(f0+"/Endpoints/i1", f0+"/Endpoints/i2", gpuOne, gpuTwo),
		f0 + "/Connections":      members(),
	}
	for i, m := range []device.Machine{one, two} {
		at := fmt.Sprintf("%s/Systems/%d", base, i+1)
		tree[at] = `{"UUID":"` + strings.ToUpper(string(m)) + `","Name":"n","PowerState":"On","Processors":{"@odata.id":"` + at + `/Processors"}}`
		tree[at+"/Processors"] = members(at + "/Processors/CPU")
		tree[at+"/Processors/CPU"] = `{"ProcessorType":"CPU"}`
		tree[fmt.Sprintf("%s/Endpoints/i%d", f0, i+1)] = `{"ConnectedEntities":[{"EntityRole":"Initiator","EntityType":"RootComplex","EntityLink":{"@odata.id":"` + at + `/FabricAdapters/0"}}]}`
		p := fmt.Sprintf("%s/Chassis/P/Processors/g%d", base, i+1)
		tree[fmt.Sprintf("%s/Endpoints/t%d", f0, i+1)] = `{"ConnectedEntities":[{"EntityRole":"Target","EntityType":"Processor","EntityLink":{"@odata.id":"` + p + `"}}]}`
		tree[p] = gpu("[]")
	}
	return tree
}

func serve(t *testing.T, change func(method, path, body string) (int, string)) *service {
	t.Helper()
	s := &service{t: t, clock: clocktesting.NewFakeClock(time.Unix(1000, 0)), tree: stocked(), change: change, asked: map[string]int{}}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	c, err := New(Config{Endpoint: server.URL, PlainHTTP: true, Clock: s.clock, Settle: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
	s.client = c
	return s
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := r.URL.Path
	if r.URL.RawQuery != "" {
		at += "?" + r.URL.RawQuery
	}
	if r.Method == http.MethodGet {
		s.asked[at]++
		body, ok := s.tree[at]
		switch {
		case body == "500":
			w.WriteHeader(http.StatusInternalServerError)
		case !ok:
			http.Error(w, "not found", http.StatusNotFound)
		default:
			_, _ = io.WriteString(w, body)
		}
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		s.t.Error(err)
	}
	s.changes = append(s.changes, r.Method+" "+at)
	status, text := s.change(r.Method, at, string(body))
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text)
}

func (s *service) set(more map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(s.tree, more)
}

// connect adds Connections to the tree.
func (s *service) connect(made map[string]string) {
	s.set(made)
	s.set(map[string]string{f0 + "/Connections": members(slices.Sorted(maps.Keys(made))...)})
}

// show lets a machine show a GPU.
func (s *service) show(system int, target string) {
	at := fmt.Sprintf("%s/Systems/%d/Processors", base, system)
	s.set(map[string]string{at: members(at + "/GPU0"), at + "/GPU0": gpu(`[{"@odata.id":"` + target + `"}]`)})
}

func (s *service) is(err error, class device.FaultClass, says string) {
	s.t.Helper()
	f, ok := errors.AsType[*device.Fault](err)
	if !ok || f.Class != class || !strings.Contains(err.Error(), says) || f.Op == "" {
		s.t.Errorf("error = %v, want %s with %q", err, class, says)
	}
}

func refuse(status int, text string) func(string, string, string) (int, string) {
	return func(string, string, string) (int, string) { return status, text }
}

func ids(list []device.OnFabric) []string {
	out := []string{}
	for _, d := range list {
		out = append(out, d.ID)
	}
	return out
}

func intent(m device.Machine, id string) fabric.Intent {
	return fabric.Intent{Machine: m, Model: model, Device: id}
}

// What is refused, and what that speaks against.
func TestAttach_refused(t *testing.T) {
	for name, tc := range map[string]struct {
		status int
		in     fabric.Intent
		tree   map[string]string
		class  device.FaultClass
		says   string
	}{
		"no such endpoint":       {in: intent(one, f0+"/Endpoints/t9"), class: device.FaultRejected, says: "no endpoint of a GPU"},
		"a machine's endpoint":   {in: intent(one, f0+"/Endpoints/i2"), class: device.FaultRejected, says: "no endpoint of a GPU"},
		"another model":          {in: fabric.Intent{Machine: one, Model: "x", Device: gpuOne}, class: device.FaultRejected, says: "and not"},
		"no such model":          {in: fabric.Intent{Machine: one, Model: "x"}, class: device.FaultUnsupported, says: model},
		"no such machine":        {in: intent("00000000-0000-4000-8000-000000000009", gpuOne), class: device.FaultNotFound, says: "UUID"},
		"a machine of no fabric": {in: intent(one, gpuOne), tree: map[string]string{f0 + "/Endpoints/i1": `{}`}, class: device.FaultNotFound, says: "initiator"},
		"a GPU that cannot be read": {
			in: intent(one, gpuOne), tree: map[string]string{base + "/Chassis/P/Processors/g1": "500"}, class: device.FaultUnreachable, says: "500",
		},
		"a Connection that cannot be read": {
			in: intent(one, gpuOne), tree: map[string]string{f0 + "/Connections": members(f0 + "/Connections/x"), f0 + "/Connections/x": "500"}, class: device.FaultUnreachable, says: "500",
		},
		"the body is wrong":          {status: 400, in: intent(one, gpuOne), class: device.FaultRejected, says: "words"},
		"there is no such path":      {status: 404, in: intent(one, gpuOne), class: device.FaultRejected, says: "words"},
		"it is taken":                {status: 409, in: intent(one, gpuOne), class: device.FaultConflict, says: "words"},
		"it makes no Connections":    {status: 405, in: intent(one, gpuOne), class: device.FaultUnsupported, says: "words"},
		"it may have been made":      {status: 500, in: intent(one, gpuOne), class: device.FaultUnknown, says: "words"},
		"a proxy that gave up":       {status: 504, in: intent(one, gpuOne), class: device.FaultUnknown, says: "words"},
		"a redirect is not followed": {status: 307, in: intent(one, gpuOne), class: device.FaultRejected, says: "words"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, refuse(tc.status, "words"))
			s.set(tc.tree)
			_, err := s.client.Attach(t.Context(), tc.in)
			s.is(err, tc.class, tc.says)
			if (len(s.changes) > 0) != (tc.status > 0) {
				t.Errorf("changes %v", s.changes)
			}
		})
	}
}

// A System that has the place of another one since we looked.
func TestAttach_systemChanged(t *testing.T) {
	s := serve(t, refuse(500, ""))
	if _, failed := s.client.ListAttached(t.Context(), []device.Machine{one}); failed[one] != nil {
		t.Fatal(failed[one])
	}
	s.set(map[string]string{base + "/Systems/1": `{"UUID":"00000000-0000-4000-8000-00000000000c"}`})
	_, err := s.client.Attach(t.Context(), intent(one, gpuOne))
	s.is(err, device.FaultConflict, "was this machine")
	_, err = s.client.Attach(t.Context(), intent(one, gpuOne))
	s.is(err, device.FaultNotFound, "UUID")
	if len(s.changes) > 0 {
		t.Errorf("changes %v", s.changes)
	}
}

// A machine whose System cannot be read is not known; the others are.
func TestListAttached_dark(t *testing.T) {
	s := serve(t, nil)
	s.set(map[string]string{base + "/Systems/1": "500"})
	lists, failed := s.client.ListAttached(t.Context(), []device.Machine{one, two})
	s.is(failed[one], device.FaultUnknown, "500")
	if list, ok := lists[two]; !ok || len(list) != 0 || len(failed) != 1 {
		t.Errorf("lists %v, failed %v", lists, failed)
	}
	if _, err := s.client.Machines(t.Context()); err == nil {
		t.Error("machines are listed of which one is not known")
	}
}

// Two GPUs with one UUID have none: nobody could tell which of them is which.
func TestListAttached_sharedUUID(t *testing.T) {
	s := serve(t, nil)
	at := base + "/Systems/1/Processors"
	s.set(map[string]string{
		at: members(at+"/GPU0", at+"/GPU1"), at + "/GPU0": gpu(`[{"@odata.id":"` + gpuOne + `"}]`), at + "/GPU1": gpu(`[{"@odata.id":"` + gpuTwo + `"}]`),
	})
	lists, failed := s.client.ListAttached(t.Context(), []device.Machine{one})
	if !slices.Equal(ids(lists[one]), []string{gpuOne, gpuTwo}) || len(failed) > 0 {
		t.Fatalf("lists %v, failed %v", lists, failed)
	}
	for _, d := range lists[one] {
		if d.UUID != "" || !strings.Contains(d.HealthText, "several devices") {
			t.Errorf("device %+v", d)
		}
	}
}

// A collection in pages; members that come twice; one that has gone before it was read.
func TestMachines_pages(t *testing.T) {
	s := serve(t, nil)
	first := strings.Replace(members(base+"/Systems/1", base+"/Systems/gone"), "}]}", `}],"Members@odata.nextLink":"`+base+`/Systems?$skip=2"}`, 1)
	s.set(map[string]string{base + "/Systems": first, base + "/Systems?%24skip=2": members(base+"/Systems/1", base+"/Systems/2")})
	got, err := s.client.Machines(t.Context())
	if err != nil || len(got) != 2 || got[0].ID != one || got[1].ID != two || got[0].Fabric != "f" || got[0].Power != fabric.PowerOn {
		t.Fatalf("machines %+v, %v", got, err)
	}
	endless := strings.Replace(members(base+"/Systems/1"), "}]}", `}],"Members@odata.nextLink":"`+base+`/Systems"}`, 1)
	s.set(map[string]string{base + "/Systems": endless})
	_, err = s.client.Machines(t.Context())
	s.is(err, device.FaultUnknown, "pages")
	elsewhere := strings.Replace(members(base+"/Systems/1"), "}]}", `}],"Members@odata.nextLink":"http://elsewhere/x"}`, 1)
	s.set(map[string]string{base + "/Systems": elsewhere})
	_, err = s.client.Machines(t.Context())
	s.is(err, device.FaultUnknown, "no path below")
}

// Which of several fabrics, and what the service must offer.
func TestHealth(t *testing.T) {
	for name, tc := range map[string]struct {
		tree   map[string]string
		fabric string
		class  device.FaultClass
		says   string
	}{
		"in order":                {},
		"the named one":           {tree: map[string]string{base + "/Fabrics": members(f0, f0+"2")}, fabric: "f"},
		"several":                 {tree: map[string]string{base + "/Fabrics": members(f0, f0+"2")}, class: device.FaultRejected, says: "has to name one"},
		"not the named one":       {fabric: "CXL", class: device.FaultRejected, says: `"CXL"`},
		"none":                    {tree: map[string]string{base + "/Fabrics": members()}, class: device.FaultUnsupported, says: "names no device"},
		"nothing of fabrics":      {tree: map[string]string{base: `{"Systems":{"@odata.id":"/redfish/v1/Systems"}}`}, class: device.FaultUnsupported, says: "names no device"},
		"a fabric of nothing":     {tree: map[string]string{f0: `{}`}, class: device.FaultUnsupported, says: "names no device"},
		"another program":         {tree: map[string]string{base: `<html>`}, class: device.FaultUnknown, says: "<html>"},
		"a collection of nothing": {tree: map[string]string{f0 + "/Connections": `{}`}, class: device.FaultUnknown, says: "no Members"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, nil)
			s.client.fabric = tc.fabric
			s.set(tc.tree)
			err := s.client.Health(t.Context())
			if tc.class == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			s.is(err, tc.class, tc.says)
		})
	}
}

// What is free: nothing connects it, whoever did, and no machine shows it.
func TestFree(t *testing.T) {
	s := serve(t, nil)
	free := func() []string {
		t.Helper()
		all, err := s.client.Free(t.Context(), []string{model})
		if err != nil || all[model].Count != len(all[model].Devices) {
			t.Fatalf("free %+v, %v", all, err)
		}
		return ids(all[model].Devices)
	}
	if got := free(); !slices.Equal(got, []string{gpuOne, gpuTwo}) {
		t.Errorf("free %v", got)
	}
	s.show(2, gpuTwo) // the service has no Connection of it
	if got := free(); !slices.Equal(got, []string{gpuOne}) {
		t.Errorf("free %v while a machine shows the other one", got)
	}
	s.connect(map[string]string{f0 + "/Connections/x": joining([]string{base + "/Fabrics/g/Endpoints/i"}, []string{gpuOne})})
	if got := free(); len(got) != 0 {
		t.Errorf("free %v while somebody unknown is connected to it", got)
	}
	// A machine that cannot be read hides nothing.
	s.set(map[string]string{base + "/Systems/2/Processors": "500"})
	if got := free(); !slices.Equal(got, []string{gpuTwo}) {
		t.Errorf("free %v", got)
	}
	// The card behind an endpoint is another one now.
	s.set(map[string]string{base + "/Chassis/P/Processors/g2": strings.Replace(gpu("[]"), model, "other", 1)})
	if got := free(); len(got) != 0 {
		t.Errorf("free %v", got)
	}
}

// Endpoints that are known are not read again, and those that have gone are forgotten.
func TestLook_remembers(t *testing.T) {
	s := serve(t, nil)
	for range 3 {
		if _, err := s.client.Free(t.Context(), []string{model}); err != nil {
			t.Fatal(err)
		}
	}
	if s.asked[gpuOne] != 1 || s.asked[base+"/Systems/1"] != 1 || s.asked[base+"/Systems/1/Processors"] != 3 {
		t.Errorf("asked %v", s.asked)
	}
	s.set(map[string]string{f0 + "/Endpoints": members(f0+"/Endpoints/i1", gpuTwo)})
	if free, err := s.client.Free(t.Context(), []string{model}); err != nil || !slices.Equal(ids(free[model].Devices), []string{gpuTwo}) {
		t.Errorf("free %+v, %v", free, err)
	}
	if _, known := s.client.endpoints.get(gpuOne); known {
		t.Error("an endpoint that has gone is remembered")
	}
}

// What is not ours alone is not taken apart, and nothing is deleted that the answer does not allow.
func TestDetach_refused(t *testing.T) {
	i1, i2 := f0+"/Endpoints/i1", f0+"/Endpoints/i2"
	for name, tc := range map[string]struct {
		status     int
		initiators []string
		targets    []string
		class      device.FaultClass
		says       string
	}{
		"two targets":         {initiators: []string{i1}, targets: []string{gpuOne, gpuTwo}, class: device.FaultRejected, says: "joins more"},
		"two machines":        {initiators: []string{i1, i2}, targets: []string{gpuOne}, class: device.FaultRejected, says: "joins more"},
		"another machine":     {initiators: []string{i2}, targets: []string{gpuOne}, class: device.FaultNotFound, says: "Systems/2"},
		"another device":      {initiators: []string{i1}, targets: []string{gpuTwo}, class: device.FaultNotFound, says: "not there"},
		"it must not":         {status: 403, initiators: []string{i1}, targets: []string{gpuOne}, class: device.FaultRejected, says: "words"},
		"the agent may have":  {status: 500, initiators: []string{i1}, targets: []string{gpuOne}, class: device.FaultUnknown, says: "words"},
		"it has gone already": {status: 404, initiators: []string{i1}, targets: []string{gpuOne}},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, nil)
			s.change = func(string, string, string) (int, string) {
				if tc.status == 404 {
					s.tree[f0+"/Connections"] = members()
				}
				return tc.status, "words"
			}
			s.connect(map[string]string{f0 + "/Connections/x": joining(tc.initiators, tc.targets)})
			op, err := s.client.Detach(t.Context(), intent(one, gpuOne))
			if tc.class == "" {
				if err != nil || op.State != fabric.Done {
					t.Errorf("detach = %+v, %v", op, err)
				}
			} else {
				s.is(err, tc.class, tc.says)
			}
			if (len(s.changes) > 0) != (tc.status > 0) {
				t.Errorf("changes %v", s.changes)
			}
		})
	}
	s := serve(t, nil)
	_, err := s.client.Detach(t.Context(), intent(one, "no path"))
	s.is(err, device.FaultNotFound, "no endpoint")
}

// A machine that shows a device which nothing connects may only lag. When it does so for longer, the Connection is made
// anew and deleted; not when it was in order meanwhile.
func TestDetach_orphan(t *testing.T) {
	s := serve(t, nil)
	made := f0 + "/Connections/" + connectionID(f0+"/Endpoints/i1", gpuOne)
	s.change = func(method, path, body string) (int, string) {
		switch {
		case method == http.MethodPost:
			s.tree[made], s.tree[f0+"/Connections"] = body, members(made)
		case path == made:
			s.tree[f0+"/Connections"], s.tree[base+"/Systems/1/Processors"] = members(), members()
		}
		return 200, ""
	}
	s.show(1, gpuOne)
	detach := func() error {
		_, err := s.client.Detach(t.Context(), intent(one, gpuOne))
		return err
	}
	s.is(detach(), device.FaultConflict, "nothing connects it")
	s.clock.Step(59 * time.Second)
	s.is(detach(), device.FaultConflict, "nothing connects it")
	s.set(map[string]string{base + "/Systems/1/Processors": members()})
	s.is(detach(), device.FaultNotFound, "not there")
	s.show(1, gpuOne)
	s.clock.Step(time.Minute)
	s.is(detach(), device.FaultConflict, "nothing connects it")
	if len(s.changes) != 0 {
		t.Fatalf("changes %v", s.changes)
	}
	s.clock.Step(time.Minute)
	if err := detach(); err != nil || !slices.Equal(s.changes, []string{"POST " + f0 + "/Connections", "DELETE " + made}) {
		t.Errorf("detach = %v, changes %v", err, s.changes)
	}
}

// Of two that connected a device, the one whose machine does not show it gives up; where it cannot, it says so.
func TestPoll_givesUp(t *testing.T) {
	ours := f0 + "/Connections/" + connectionID(f0+"/Endpoints/i1", gpuOne)
	i1, i2 := []string{f0 + "/Endpoints/i1"}, []string{f0 + "/Endpoints/i2"}
	for name, tc := range map[string]struct {
		shows  int
		ours   string
		status int
		class  device.FaultClass
		says   string
		state  fabric.OperationState
		tries  int
	}{
		"the other one has it":             {shows: 2, ours: ours, status: 200, class: device.FaultConflict, says: "Systems/2", state: fabric.Failed, tries: 1},
		"and ours cannot be deleted":       {shows: 2, ours: ours, status: 500, class: device.FaultUnknown, says: "one too many", state: fabric.Failed, tries: 1},
		"and the Connection is no one's":   {shows: 2, ours: f0 + "/Connections/x", status: 200, class: device.FaultConflict, says: "Systems/2", state: fabric.Failed},
		"we have it":                       {shows: 1, ours: ours, state: fabric.Done},
		"nobody shows it, so nobody moves": {ours: ours, state: fabric.Pending},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, refuse(tc.status, "words"))
			s.connect(map[string]string{tc.ours: joining(i1, []string{gpuOne}), f0 + "/Connections/theirs": joining(i2, []string{gpuOne})})
			if tc.shows > 0 {
				s.show(tc.shows, gpuOne)
			}
			op, err := s.client.Poll(t.Context(), fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Intent: intent(one, gpuOne), Handle: tc.ours})
			if err != nil || op.State != tc.state || (op.Fault != nil) != (tc.class != "") {
				t.Fatalf("poll = %+v, %v", op, err)
			}
			if op.Fault != nil {
				s.is(op.Fault, tc.class, tc.says)
			}
			if len(s.changes) != tc.tries {
				t.Errorf("changes %v", s.changes)
			}
		})
	}
}

// A look that fails says nothing of the operation; one whose Connection has gone is not known.
func TestPoll_looks(t *testing.T) {
	s := serve(t, nil)
	op := fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Intent: intent(one, gpuOne), Handle: f0 + "/Connections/x"}
	s.set(map[string]string{f0 + "/Connections": "500"})
	got, err := s.client.Poll(t.Context(), op)
	s.is(err, device.FaultUnknown, "500")
	if got.State != fabric.Pending {
		t.Errorf("poll = %+v", got)
	}
	s.set(map[string]string{f0 + "/Connections": members()})
	got, err = s.client.Poll(t.Context(), op)
	if err != nil || got.State != fabric.Failed || got.Fault.Class != device.FaultUnknown {
		t.Errorf("poll = %+v, %v", got, err)
	}
	if again, looked := s.client.Poll(t.Context(), got); looked != nil || again.State != fabric.Failed {
		t.Errorf("poll of what is over = %+v, %v", again, looked)
	}
	op.Kind, op.Intent.Device = fabric.KindDetach, ""
	_, err = s.client.Poll(t.Context(), op)
	s.is(err, device.FaultUnknown, "no device")
}

// Each request is told of, by what it is for.
func TestObserve(t *testing.T) {
	s := serve(t, nil)
	seen := map[string]int{}
	var mu sync.Mutex
	c, err := New(Config{Endpoint: s.client.server, PlainHTTP: true, Observe: func(operation string, status int, _ time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		if seen[operation]++; status != 200 {
			t.Errorf("%s: status %d", operation, status)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Machines(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	if seen["inventory"] == 0 || seen["health"] == 0 || len(seen) != 2 {
		t.Errorf("seen %v", seen)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
