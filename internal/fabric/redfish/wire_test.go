// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

func TestParsePath(t *testing.T) {
	tests := []struct {
		in, want string
	}{
		{"/redfish/v1/Systems/1", "/redfish/v1/Systems/1"},
		{"/redfish/v1/Systems/1/", "/redfish/v1/Systems/1"},
		{"https://elsewhere:8443/redfish/v1/Systems/1?x=1#/Links/0", "/redfish/v1/Systems/1"},
		{"/redfish/v1/Chassis/1/Power#/PowerControl/0", "/redfish/v1/Chassis/1/Power"},
		{"/a%2Fb/c%20d", "/a%2Fb/c%20d"},
		{"", ""},
		{"/", ""},
		{"Systems/1", ""},
		{"//host", ""},
		{"/a/../b", ""},
		{"/a/%2e%2e/b", ""},
		{"file:///etc/passwd", ""},
		{"/a b", ""},
		{"/ä", ""},
		{"/a\r\nX-Header: 1", ""},
		{"/%zz", ""},
		{"/" + strings.Repeat("x", longestPath), ""},
	}
	for _, tt := range tests {
		got, err := parsePath(tt.in)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("path of %.40q = %q, %v, want %q", tt.in, got, err, tt.want)
		}
	}
	if got, err := parseLocation("https://h/tasks/1/?$skip=3"); err != nil || got != "/tasks/1/?$skip=3" {
		t.Errorf("location = %q, %v", got, err)
	}
}

func TestLinks(t *testing.T) {
	var list []link
	err := json.Unmarshal([]byte(`[null, "/bare", {"@odata.id":"/a"}, {"@odata.id":"/b/","Id":"b"}, {"@odata.id":7}, {}, {"@odata.id":"/a"}, [1]]`), &list)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/a", "/b"}, paths(list)); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	if list[3].raw == nil || list[2].raw != nil {
		t.Error("an expanded member has to be told from a reference")
	}
}

func TestDecodeRoot(t *testing.T) {
	tests := []struct {
		name, body string
		want       root
	}{
		{
			"with composition", `{"Systems":{"@odata.id":"/s"},"CompositionService":{"@odata.id":"/c"},"Tasks":{"@odata.id":"/t"},"EventService":{"@odata.id":"/e"},
			"SessionService":{"@odata.id":"/ss"},"Links":{"Sessions":{"@odata.id":"/ss/x"}},"ProtocolFeaturesSupported":{"ExpandQuery":{"NoLinks":true}}}`,
			root{systems: "/s", composition: "/c", tasks: "/t", events: "/e", sessionService: "/ss", sessions: "/ss/x", expand: "$expand=."},
		},
		{
			"with levels", `{"Systems":{"@odata.id":"/s"},"Fabrics":{"@odata.id":"/f"},"ProtocolFeaturesSupported":{"ExpandQuery":{"NoLinks":true,"Levels":true,"MaxLevels":3}}}`,
			root{systems: "/s", fabrics: "/f", expand: "$expand=.($levels=2)"},
		},
		{
			"with one level", `{"Systems":{"@odata.id":"/s"},"ProtocolFeaturesSupported":{"ExpandQuery":{"NoLinks":true,"Levels":true,"MaxLevels":"1"}}}`,
			root{systems: "/s", expand: "$expand=."},
		},
		{"without features", `{"Systems":{"@odata.id":"/s"},"ProtocolFeaturesSupported":null,"Links":null}`, root{systems: "/s"}},
		{"no root", `{"v1":"/redfish/v1/"}`, root{}},
		{"no JSON", `<html>`, root{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := decodeRoot([]byte(tt.body))
			if got != tt.want || (err == nil) != (tt.want != root{}) {
				t.Errorf("root = %+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
}

func TestDecodeService(t *testing.T) {
	for body, want := range map[string]service{
		`{"ResourceBlocks":{"@odata.id":"/b"},"ResourceZones":{"@odata.id":"/z"},"Actions":{"#CompositionService.Compose":{"target":"/x"},"Oem":{"a":1},"#B":"x"}}`: {"/b", "/z", "/x"},
		`{"ServiceEnabled":true,"ResourceBlocks":{"@odata.id":"/b"},"Actions":[]}`:                                                                                  {blocks: "/b"},
		`{"ServiceEnabled":false,"ResourceBlocks":{"@odata.id":"/b"}}`:                                                                                              {},
		`{}`: {},
	} {
		got, err := decodeService([]byte(body))
		if got != want || (err == nil) != (want != service{}) {
			t.Errorf("service %s = %+v, %v, want %+v", body, got, err, want)
		}
	}
}

func TestDecodeSystem(t *testing.T) {
	const uuid = "00000000-0000-4000-8000-00000000000A"
	tests := []struct {
		name, body string
		want       system
	}{
		{
			"composed", `{"Id":"n1","Name":"node","UUID":"` + uuid + `","PowerState":"On","Links":{"ResourceBlocks":[{"@odata.id":"/h"},null,{"@odata.id":"/g"}]},
			"Actions":{"#ComputerSystem.AddResourceBlock":{"target":"/add"},"#ComputerSystem.Reset":{"target":"/reset","ResetType@Redfish.AllowableValues":["On"]}}}`,
			system{
				id: "n1", name: "node", machine: "00000000-0000-4000-8000-00000000000a", power: fabric.PowerOn, composable: true, blocks: []string{"/h", "/g"},
				actions: actions{"#ComputerSystem.AddResourceBlock": "/add", "#ComputerSystem.Reset": "/reset"},
			},
		},
		{"physical", `{"Id":"n1","UUID":null,"PowerState":"PoweringOn","Links":{"Chassis":[]}}`, system{id: "n1", power: fabric.PowerUnknown}},
		{"empty list", `{"Id":1,"Links":{"ResourceBlocks":[]},"PowerState":"Off"}`, system{id: "1", power: fabric.PowerOff, composable: true}},
		{"strange UUID", `{"Id":"n1","UUID":"no"}`, system{id: "n1", power: fabric.PowerUnknown}},
		{"none", `{"Members":[]}`, system{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := decodeSystem([]byte(tt.body))
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(system{}), cmpopts.EquateEmpty()); diff != "" || (err == nil) != (tt.want.id != "") {
				t.Errorf("error %v, system (-want +got):\n%s", err, diff)
			}
		})
	}
}

// gpu is a block as it is free.
const gpu = `{"@odata.id":"/b/1","@odata.etag":"\"1\"","ResourceBlockType":["Processor"],"Pool":"Free","Status":{"State":"Enabled","Health":"OK"},
"CompositionStatus":{"CompositionState":"Unused","Reserved":false,"NumberOfCompositions":0},"Processors":[{"@odata.id":"/b/1/p"}],"Links":{"ComputerSystems":[],"Zones":[{"@odata.id":"/z"}]}}`

func TestBlock_taken(t *testing.T) {
	one := []processor{{kind: "GPU", model: "A", uuid: "GPU-00000000-0000-4000-8000-000000000001", status: status{State: "Enabled", Health: "OK"}}}
	tests := []struct {
		name   string
		old    string
		new    string
		parts  []processor
		taken  string // "" is free
		health device.Health
	}{
		{name: "free", health: device.HealthOK},
		{name: "reserved", old: `"Reserved":false`, new: `"Reserved":true`, taken: "reserved", health: device.HealthOK},
		{name: "reserved is null", old: `"Reserved":false`, new: `"Reserved":null`, health: device.HealthOK},
		{name: "composing", old: "Unused", new: "Composing", taken: "being composed", health: device.HealthOK},
		{name: "composed", old: "Unused", new: "Composed", taken: "in use", health: device.HealthOK},
		{name: "shared", old: "Unused", new: "ComposedAndAvailable", taken: "in use", health: device.HealthOK},
		{name: "counted", old: `Compositions":0`, new: `Compositions":1`, taken: "in use", health: device.HealthOK},
		{name: "counted as text", old: `Compositions":0`, new: `Compositions":"1"`, taken: "in use", health: device.HealthOK},
		{name: "linked", old: `"ComputerSystems":[]`, new: `"ComputerSystems":[{"@odata.id":"/s/9"}]`, taken: "in use, by /s/9", health: device.HealthOK},
		{name: "failed", old: "Unused", new: "Failed", taken: "Failed", health: device.HealthCritical},
		{name: "unavailable", old: "Unused", new: "Unavailable", taken: "Unavailable", health: device.HealthOK},
		{name: "of a later version", old: "Unused", new: "Lent", taken: "Lent", health: device.HealthOK},
		{name: "not said", old: `"CompositionState":"Unused",`, taken: "nothing", health: device.HealthOK},
		{name: "active pool", old: `"Pool":"Free"`, new: `"Pool":"Active"`, taken: "pool Active", health: device.HealthOK},
		{name: "unassigned pool", old: `"Pool":"Free"`, new: `"Pool":"Unassigned"`, taken: "pool Unassigned", health: device.HealthOK},
		{name: "no pool", old: `"Pool":"Free",`, health: device.HealthOK},
		{name: "critical", old: `"Health":"OK"`, new: `"Health":"Critical"`, taken: "not healthy", health: device.HealthCritical},
		{name: "warning", old: `"Health":"OK"`, new: `"Health":"Warning"`, health: device.HealthWarning},
		{name: "no status", old: `"Status":{"State":"Enabled","Health":"OK"}`, new: `"Status":null`, health: device.HealthOK},
		{name: "no status at all", old: `"Status":{"State":"Enabled","Health":"OK"}`, new: `"Status":null`, parts: []processor{{kind: "GPU"}}, health: device.HealthUnknown},
		{name: "standing by", old: `"State":"Enabled"`, new: `"State":"StandbyOffline"`, health: device.HealthOK},
		{name: "absent", old: `"State":"Enabled"`, new: `"State":"Absent"`, taken: "Absent", health: device.HealthWarning},
		{name: "critical component", parts: []processor{{kind: "GPU", status: status{Health: "Critical"}}}, taken: "not healthy", health: device.HealthCritical},
		{name: "two", parts: []processor{one[0], one[0]}, taken: "2 devices", health: device.HealthOK},
		{name: "CPU beside it", parts: []processor{{kind: "CPU", status: status{Health: "Critical"}}, one[0]}, health: device.HealthOK},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !strings.Contains(gpu, tt.old) {
				t.Fatalf("nothing is changed")
			}
			b, err := decodeBlock([]byte(strings.Replace(gpu, tt.old, tt.new, 1)))
			if err != nil {
				t.Fatal(err)
			}
			if tt.parts == nil {
				tt.parts = one
			}
			u := b.unit(tt.parts)
			if (u.taken == "") != (tt.taken == "") || !strings.Contains(u.taken, tt.taken) || u.health != tt.health {
				t.Errorf("taken %q, health %s (%s), want %q, %s", u.taken, u.health, u.text, tt.taken, tt.health)
			}
		})
	}
	b, err := decodeBlock([]byte(gpu))
	if err != nil {
		t.Fatal(err)
	}
	if u := b.unit([]processor{{kind: "CPU"}}); !u.fixed {
		t.Errorf("a block of CPUs is %+v, want it fixed", u)
	}
	u := b.unit(append(slices.Clone(one), one...))
	if d := u.onFabric(); d.UUID != "" || !strings.Contains(d.HealthText, "2 devices") {
		t.Errorf("a block of two is %+v, want it without an identity", d)
	}
	for _, body := range []string{`{"Id":"1"}`, `{"CompositionStatus":null}`, `[]`} {
		if _, err := decodeBlock([]byte(body)); err == nil {
			t.Errorf("%s was taken for a block", body)
		}
	}
}

// TestChart_asBlock: a zone that cannot be read makes those devices unknown alone that do not say which zones they are in.
func TestChart_asBlock(t *testing.T) {
	decode := func(links string) endpoint {
		e, err := decodeEndpoint([]byte(`{"Id":"1","ConnectedEntities":[{"EntityRole":"Target","EntityType":"Processor"}]` + links + `}`))
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	free, silent, taken := decode(`,"Links":{"Zones":[]}`), decode(""), decode(`,"Links":{"Zones":[{"@odata.id":"/z/2"}]}`)
	broken := port{fault: &device.Fault{Class: device.FaultUnknown}}
	for _, tt := range []struct {
		name string
		e    endpoint
		port port
		want string
	}{
		{"in no zone", silent, port{}, "Unused"},
		{"in a zone", free, port{members: []string{"/e/1"}}, "Composed"},
		{"its zone is not read", taken, broken, "Composed"},
		{"another zone is not read", free, broken, "Unused"},
		{"some zone is not read", silent, broken, "unknown, for a zone could not be read"},
	} {
		all := &chart{ports: []port{{members: []string{"/e/2"}}, tt.port}}
		b := all.asBlock("/e/1", tt.e)
		if b.state != tt.want || (len(b.systems) > 0) != (tt.want == "Composed") {
			t.Errorf("%s: state %q, used by %v, want %q", tt.name, b.state, b.systems, tt.want)
		}
	}
}

func TestDecodeProcessor(t *testing.T) {
	const id device.GPUUUID = "GPU-0d5c7e11-4444-4c00-b300-00000000000a"
	for body, want := range map[string]processor{
		`{"Id":"0","ProcessorType":"GPU","Model":"A","UUID":"0d5c7e11-4444-4c00-b300-00000000000A","SerialNumber":"17","Status":{"State":"Enabled","Health":"OK"}}`: {kind: "GPU", model: "A", uuid: id, serial: "17", status: status{"Enabled", "OK"}},
		`{"Id":"0","UUID":"GPU-0D5C7E11-4444-4C00-B300-00000000000A"}`:                     {uuid: id},
		`{"Id":"0","UUID":null,"SerialNumber":"GPU-0d5c7e11-4444-4c00-b300-00000000000a"}`: {uuid: id},
		`{"Id":"0","UUID":"00000000-0000-0000-0000-000000000000","SerialNumber":null}`:     {},
		`{"Id":"0","SerialNumber":"1650522000042"}`:                                        {serial: "1650522000042"},
		`{"Id":"0","UUID":"no","SerialNumber":"0d5c7e11-4444-4c00-b300-00000000000a"}`:     {}, // a serial number may look so
		`{"Id":0,"Model":null,"Status":null}`:                                              {},
	} {
		if got, err := decodeProcessor([]byte(body)); err != nil || got != want {
			t.Errorf("processor %s = %+v, %v, want %+v", body, got, err, want)
		}
	}
	if _, err := decodeProcessor([]byte(`{}`)); err == nil {
		t.Error("nothing was taken for a processor")
	}
	for kind, want := range map[string]bool{"GPU": true, "Accelerator": true, "FPGA": true, "": true, "CPU": false, "core": false, "Thread": false} {
		if (processor{kind: kind}).attachable() != want {
			t.Errorf("a %q is attachable: %v", kind, !want)
		}
	}
}

func TestEtagOf(t *testing.T) {
	tests := []struct{ body, header, want string }{
		{`{"@odata.etag":"\"1\""}`, `"2"`, `"1"`},
		{`{}`, `"2"`, `"2"`},
		{`{}`, `"2-gzip"`, `"2"`},
		{`{"@odata.etag":"W/\"1\""}`, "", `W/"1"`},
		{`{"@odata.etag":7}`, "", ""},
		{`[]`, "", ""},
		{`{"@odata.etag":"a\nb"}`, "", ""},
		{`{"@odata.etag":"` + strings.Repeat("x", 2000) + `"}`, "", ""},
	}
	for _, tt := range tests {
		if got := etagOf([]byte(tt.body), http.Header{"Etag": {tt.header}}); got != tt.want {
			t.Errorf("ETag of %.40s, %s = %q, want %q", tt.body, tt.header, got, tt.want)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	here := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	there := here.Add(time.Hour) // its clock is ahead
	tests := []struct {
		text string
		date time.Time
		want time.Duration
	}{
		{"5", there, 5 * time.Second},
		{" 0 ", there, 0},
		{"", there, 0},
		{"-5", there, 0},
		{"soon", there, 0},
		{"4000000000", there, 24 * time.Hour},
		{"99999999999999999999", there, 0},
		{there.Add(7 * time.Second).Format(http.TimeFormat), there, 7 * time.Second},
		{here.Add(7 * time.Second).Format(http.TimeFormat), time.Time{}, 7 * time.Second},
		{here.Format(http.TimeFormat), there, 0},
	}
	for _, tt := range tests {
		if got := retryAfter(rest.Reply{Header: http.Header{"Retry-After": {tt.text}}, Date: tt.date}, here); got != tt.want {
			t.Errorf("retry after %q = %s, want %s", tt.text, got, tt.want)
		}
	}
}

func extended(keys ...string) string {
	var list []string
	for _, k := range keys {
		list = append(list, `{"MessageId":"Base.1.18.`+k+`","Message":"words of `+k+`"}`)
	}
	return `{"error":{"code":"Base.1.18.GeneralError","message":"see there","@Message.ExtendedInfo":[` + strings.Join(list, ",") + `]}}`
}

func TestRefused(t *testing.T) {
	tests := []struct {
		name   string
		status int
		body   string
		class  device.FaultClass
		code   string
	}{
		{"busy", 503, extended("ResourceInUse"), device.FaultBusy, "ResourceInUse"},
		{"busy with 400", 400, extended("ResourceInUse"), device.FaultBusy, "ResourceInUse"},
		{"for the moment", 503, extended("ServiceTemporarilyUnavailable"), device.FaultBusy, "ServiceTemporarilyUnavailable"},
		{"sessions", 503, extended("SessionLimitExceeded"), device.FaultBusy, "SessionLimitExceeded"},
		{"block in use", 409, extended("ResourceBlockInUse"), device.FaultConflict, "ResourceBlockInUse"},
		{"nothing fits", 400, extended("NoResourceMatch"), device.FaultNoCapacity, "NoResourceMatch"},
		{"gone", 404, extended("ResourceMissingAtURI"), device.FaultNotFound, "ResourceMissingAtURI"},
		{"stale", 412, extended("PreconditionFailed"), device.FaultConflict, "PreconditionFailed"},
		{"stale without words", 428, "", device.FaultConflict, ""},
		{"not for us", 403, extended("InsufficientPrivilege"), device.FaultUnauthorized, "InsufficientPrivilege"},
		{"no session", 401, extended("NoValidSession"), device.FaultUnauthorized, "NoValidSession"},
		{"401 wins", 401, extended("ResourceInUse"), device.FaultUnauthorized, "ResourceInUse"},
		{"no such action", 400, extended("ActionNotSupported"), device.FaultUnsupported, "ActionNotSupported"},
		{"405", 405, "", device.FaultUnsupported, ""},
		{"our mistake", 400, extended("PropertyValueTypeError"), device.FaultRejected, "PropertyValueTypeError"},
		{"nobody knows", 500, extended("InternalError"), device.FaultUnknown, "InternalError"},
		{"the second one says it", 400, extended("SomethingElse", "ResourceInUse"), device.FaultBusy, "ResourceInUse"},
		{"a proxy", 502, "<html>Bad gateway</html>", device.FaultUnknown, ""},
		{"plain", 409, `{"error":{"code":"Composition.1.1.ResourceBlockInUse","message":"block is in use"}}`, device.FaultConflict, "ResourceBlockInUse"},
		{"small one", 406, `{"message":"no"}`, device.FaultRejected, ""},
		{"strange", 400, `{"error":{"@Message.ExtendedInfo":[7,{"MessageId":"ResourceInUse"}]}}`, device.FaultBusy, "ResourceInUse"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := refused("try", rest.Reply{Status: tt.status, Body: []byte(tt.body), Header: http.Header{"Retry-After": {"5"}}}, time.Time{})
			if f.Class != tt.class || f.Code != tt.code || f.Status != tt.status {
				t.Errorf("fault %v, want class %s, code %s", f, tt.class, tt.code)
			}
			if after := strings.Contains(f.Message, "after 5s"); after != (f.Class == device.FaultBusy || f.Class == device.FaultUnknown) {
				t.Errorf("message %q", f.Message)
			}
		})
	}
	long := refused("try", rest.Reply{Status: 400, Body: []byte(extended(strings.Repeat("x", 5000), "a", "b", "c"))}, time.Time{})
	readable(t, long.Message)
	readable(t, long.Code)
}

// TestForms: what is offered decides how it is asked for.
func TestForms(t *testing.T) {
	h := host{path: "/s/1", etag: `"s"`, members: []string{"/b/h", "/b/1", "/b/2"}}
	everything := offer{add: "/add", remove: "/remove", update: true, compose: "/compose"}
	const list = `[{"@odata.id":"/b/h"},{"@odata.id":"/b/1"},{"@odata.id":"/b/2"},{"@odata.id":"/b/3"}]`
	const less = `[{"@odata.id":"/b/h"},{"@odata.id":"/b/2"}]`
	tests := []struct {
		name  string
		kind  fabric.OperationKind
		offer offer
		names string // of the forms that are offered
		path  string // of the best one
		etag  string
		body  string
	}{
		{"all", fabric.KindAttach, everything, "action list manifest", "/add", "", `{"ComputerSystemETag":"\"s\"","ResourceBlock":{"@odata.id":"/b/3"},"ResourceBlockETag":"\"b\""}`},
		{"all, away", fabric.KindDetach, everything, "action list manifest", "/remove", "", `{"ComputerSystemETag":"\"s\"","ResourceBlock":{"@odata.id":"/b/1"},"ResourceBlockETag":"\"b\""}`},
		{"no action for that", fabric.KindDetach, offer{add: "/add", update: true}, "list", "/s/1", `"s"`, `{"Links":{"ResourceBlocks":` + less + `}}`},
		{"list", fabric.KindAttach, offer{update: true}, "list", "/s/1", `"s"`, `{"Links":{"ResourceBlocks":` + list + `}}`},
		{"manifest", fabric.KindAttach, offer{compose: "/compose"}, "manifest", "/compose", "", `{"Manifest":{"Expand":"None","Stanzas":[{"Request":{"@odata.etag":"\"s\"","@odata.id":"/s/1","Links":{"ResourceBlocks":` + list + `}},"StanzaId":"1","StanzaType":"ComposeSystem"}]},"RequestFormat":"Manifest","RequestType":"Apply"}`},
		{"zone", fabric.KindAttach, offer{add: "/add", zone: true}, "action", "/add", "", `{"Endpoint":{"@odata.id":"/b/3"},"EndpointETag":"\"b\"","ZoneETag":"\"s\""}`},
		{"zone's list", fabric.KindDetach, offer{update: true, zone: true}, "list", "/s/1", `"s"`, `{"Links":{"Endpoints":` + less + `}}`},
		{"nothing", fabric.KindAttach, offer{}, "", "", "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			here, u := h, unit{path: "/b/3", etag: `"b"`}
			here.offer = tt.offer
			if tt.kind == fabric.KindDetach {
				u.path = "/b/1"
			}
			var names []string
			var best *call
			for _, f := range forms() {
				if !f.offered(tt.offer, tt.kind) {
					continue
				}
				names = append(names, f.name)
				if m := f.call(change{tt.kind, &here, &u}); best == nil {
					best = &m
				}
			}
			if got := strings.Join(names, " "); got != tt.names {
				t.Errorf("forms %q, want %q", got, tt.names)
			}
			if best == nil {
				return
			}
			body, err := json.Marshal(best.body)
			if err != nil {
				t.Fatal(err)
			}
			if best.path != tt.path || best.etag != tt.etag || string(body) != tt.body {
				t.Errorf("%s %s If-Match %s\n%s\nwant\n%s", best.method, best.path, best.etag, body, tt.body)
			}
		})
	}
}

func TestMayPatch(t *testing.T) {
	for allow, want := range map[string]bool{"": true, "GET, HEAD": false, "GET,patch": true, "PATCH": true, "PATCHES": false} {
		h := http.Header{}
		if allow != "" {
			h.Set("Allow", allow)
		}
		if mayPatch(h) != want {
			t.Errorf("Allow %q: %v", allow, !want)
		}
	}
}

func TestJudge_task(t *testing.T) {
	c := &Client{poll: 2 * time.Second}
	tests := []struct {
		name  string
		body  string
		state fabric.OperationState
		class device.FaultClass
		words string
	}{
		{"runs", `{"TaskState":"Running"}`, fabric.Pending, "", ""},
		{"is new", `{"TaskState":"New"}`, fabric.Pending, "", ""},
		{"is interrupted", `{"TaskState":"Interrupted"}`, fabric.Pending, "", ""},
		{"of a later version", `{"TaskState":"Dreaming"}`, fabric.Pending, "", ""},
		{"is done", `{"TaskState":"Completed","TaskStatus":"Warning"}`, fabric.Done, "", ""},
		{"waits", `{"TaskState":"Suspended","Messages":[{"Message":"open the door"}]}`, fabric.Suspended, device.FaultSuspended, "open the door"},
		{"fails", `{"TaskState":"Exception","Messages":[{"MessageId":"Base.1.18.InternalError","Message":"link training failed"}]}`, fabric.Failed, device.FaultUnknown, "link training"},
		{"fails for good", `{"TaskState":"Exception","Messages":[{"MessageId":"Composition.1.1.ResourceBlockInvalid"}]}`, fabric.Failed, device.FaultRejected, "ResourceBlockInvalid"},
		{"block is gone", `{"TaskState":"Exception","Messages":[{"MessageId":"Composition.1.1.ResourceBlockNotFound"}]}`, fabric.Failed, device.FaultRejected, ""},
		{"fails without a word", `{"TaskState":"Exception","Messages":null}`, fabric.Failed, device.FaultUnknown, "Exception"},
		{"is cancelled", `{"TaskState":"Cancelled"}`, fabric.Failed, device.FaultUnknown, "Cancelled"},
		{"is killed", `{"TaskState":"Killed","Messages":{}}`, fabric.Failed, device.FaultUnknown, "Killed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := decodeTask([]byte(tt.body))
			if !ok {
				t.Fatal("no task")
			}
			op := c.judge(fabric.Operation{Kind: fabric.KindAttach, State: fabric.Pending, Handle: "/m/1", PollAfter: time.Second, Intent: fabric.Intent{Device: "/b/1"}}, got)
			if op.State != tt.state || (op.Fault == nil) != (tt.class == "") || op.Fault != nil && (op.Fault.Class != tt.class || !strings.Contains(op.Fault.Error(), tt.words)) {
				t.Errorf("operation %+v, want %s, %s %q", op, tt.state, tt.class, tt.words)
			}
			if (tt.state == fabric.Pending || tt.state == fabric.Suspended) != (op.PollAfter == time.Second) {
				t.Errorf("operation %+v", op)
			}
		})
	}
	if _, ok := decodeTask([]byte(`{"Id":"n1","UUID":"x"}`)); ok {
		t.Error("a system was taken for a task")
	}
}

func TestTask_does(t *testing.T) {
	h := &host{path: "/s/1", members: []string{"/b/h", "/b/1"}, offer: offer{add: "/add", remove: "/remove", compose: "/compose"}}
	attach, detach := change{fabric.KindAttach, h, &unit{path: "/b/2"}}, change{fabric.KindDetach, h, &unit{path: "/b/1"}}
	tests := []struct {
		name, target, body string
		attach, detach     bool
	}{
		{"our action", "https://h/add/", `{"ResourceBlock":{"@odata.id":"/b/2"}}`, true, false},
		{"another block", "/add", `{"ResourceBlock":{"@odata.id":"/b/22"}}`, false, false},
		{"our removal", "/remove", `{"ResourceBlock":{"@odata.id":"/b/1"}}`, false, true},
		{"our list", "/s/1", `{"Links":{"ResourceBlocks":[{"@odata.id":"/b/h"},{"@odata.id":"/b/1"},{"@odata.id":"/b/2"}]}}`, true, false},
		{"our shorter list", "/s/1", `{"Links":{"ResourceBlocks":[{"@odata.id":"/b/h"}]}}`, false, true},
		{"our manifest", "/compose", `{"@odata.id":"/s/1","Links":[{"@odata.id":"/b/2"},{"@odata.id":"/b/1"}]}`, true, false},
		{"another's manifest", "/compose", `{"@odata.id":"/s/2","Links":[{"@odata.id":"/b/2"}]}`, false, false},
		{"another system", "/s/2", `{"Links":{"ResourceBlocks":[{"@odata.id":"/b/2"}]}}`, false, false},
		{"nothing", "", "", false, false},
	}
	for _, tt := range tests {
		made := task{payload: payload{Target: tt.target, Body: tt.body}}
		if a, d := made.does(attach), made.does(detach); a != tt.attach || d != tt.detach {
			t.Errorf("%s: does the attach: %v, the detach: %v", tt.name, a, d)
		}
	}
}

func TestSwapped(t *testing.T) {
	if got := swapped("00112233-4455-6677-8899-aabbccddeeff"); got != "33221100-5544-7766-8899-aabbccddeeff" {
		t.Errorf("swapped %s", got)
	}
}

// readable checks that words are fit for a condition.
func readable(t *testing.T, s string) {
	t.Helper()
	if !utf8.ValidString(s) || len(s) > rest.LongestText+4 || strings.ContainsAny(s, "\n\r\x00") {
		t.Errorf("%q is not fit for a condition", s)
	}
}

// sane checks a path that came out of a decoder.
func sane(t *testing.T, list ...string) {
	t.Helper()
	for _, p := range list {
		if p != "" && (p[0] != '/' || strings.ContainsAny(p, " \r\n\x00#") || len(p) > 3*longestPath) {
			t.Errorf("path %q", p)
		}
	}
}

func FuzzParsePath(f *testing.F) {
	for _, s := range []string{"/redfish/v1/Systems/1", "https://h:1/a/?b#c", "/a/../b", "//h/x", "/%2e%2e/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if at, err := parseLocation(s); err == nil {
			if again, err := parseLocation(at); err != nil || again != at || !strings.HasPrefix(at, "/") {
				t.Errorf("location %q is %q the second time, %v", at, again, err)
			}
		}
		p, err := parsePath(s)
		if err != nil {
			return
		}
		sane(t, p)
		if again, err := parsePath(p); err != nil || again != p {
			t.Errorf("path %q is %q the second time, %v", p, again, err)
		}
	})
}

func FuzzDecodeRoot(f *testing.F) {
	f.Add([]byte(`{"Systems":{"@odata.id":"/s"},"CompositionService":{"@odata.id":"/c"},"Links":{"Sessions":{"@odata.id":"/x"}}}`))
	f.Add([]byte(`{"Systems":"/s","ResourceBlocks":{"@odata.id":"/b"},"Actions":{"#CompositionService.Compose":{"target":"/x"}}}`))
	f.Add([]byte(`{"ServiceEnabled":true,"ServerSentEventUri":"/e"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, _ := decodeRoot(body)
		sane(t, r.systems, r.composition, r.fabrics, r.tasks, r.events, r.sessions, r.sessionService)
		s, _ := decodeService(body)
		sane(t, s.blocks, s.zones, s.compose)
		e, _ := decodeEventService(body)
		sane(t, e)
	})
}

func FuzzDecodePage(f *testing.F) {
	f.Add([]byte(`{"Members@odata.count":5,"Members":[{"@odata.id":"/b/1"},{"@odata.id":"/b/2","Id":"2"}],"Members@odata.nextLink":"/b?$skip=2"}`))
	f.Add([]byte(`{"Members":[null,7],"@odata.nextLink":"/b"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		p, err := decodePage(body)
		if err != nil {
			return
		}
		sane(t, p.next)
		sane(t, paths(p.members)...)
	})
}

func FuzzDecodeSystem(f *testing.F) {
	f.Add([]byte(`{"Id":"n1","UUID":"00000000-0000-4000-8000-000000000001","PowerState":"On","Links":{"ResourceBlocks":[{"@odata.id":"/h"}]},"Actions":{"#A":{"target":"/add"}}}`))
	f.Add([]byte(`{"Id":"z","Links":{"Endpoints":[{"@odata.id":"/e"}]},"ZoneType":"ZoneOfEndpoints"}`))
	f.Add([]byte(`{"Id":"z","Links":{"ResourceBlocks":[{"@odata.id":"/h"},null]}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		s, err := decodeSystem(body)
		if err == nil && s.id == "" {
			t.Error("a system without a name")
		}
		sane(t, s.blocks...)
		readable(t, s.name)
		z, _ := decodeBlockZone(body)
		sane(t, z.members...)
		p, _ := decodePort(body)
		sane(t, p.members...)
		for _, target := range p.actions {
			sane(t, target)
		}
	})
}

func FuzzDecodeBlock(f *testing.F) {
	f.Add([]byte(gpu), []byte(`{"Id":"0","ProcessorType":"GPU","Model":"A","UUID":"0d5c7e11-4444-4c00-b300-00000000000a","Status":{"State":"Enabled","Health":"OK"}}`))
	f.Add([]byte(`{"ResourceBlockType":["Compute"],"Status":null,"CompositionStatus":null}`), []byte(`{"Id":7,"UUID":null,"Status":null}`))
	f.Add([]byte(`{"Id":"e","ConnectedEntities":[{"EntityRole":"Target","EntityType":"Processor","EntityLink":{"@odata.id":"/p"}}]}`), []byte(`{}`))
	f.Fuzz(func(t *testing.T, body, part []byte) {
		e, _ := decodeEndpoint(body)
		sane(t, e.entities...)
		b, err := decodeBlock(body)
		if err != nil {
			return
		}
		sane(t, b.systems...)
		sane(t, paths(b.processors)...)
		p, err := decodeProcessor(part)
		if err != nil {
			return
		}
		u := b.unit([]processor{p})
		u.path = "/b"
		d := u.onFabric()
		readable(t, d.HealthText)
		if u.taken == "" && !u.fixed && (!strings.EqualFold(b.state, "Unused") || b.reserved || len(b.systems) > 0 || d.Health == device.HealthCritical) {
			t.Errorf("%s is free", body)
		}
		if d.UUID != "" && !strings.HasPrefix(string(d.UUID), "GPU-") {
			t.Errorf("UUID %q", d.UUID)
		}
	})
}

func FuzzDecodeTask(f *testing.F) {
	f.Add([]byte(`{"@odata.id":"/t/1","TaskState":"Running","TaskMonitor":"/m/1","Messages":[],"Payload":{"TargetUri":"/s/1","JsonBody":"{}"}}`))
	f.Add([]byte(`{"TaskState":"Exception","Messages":[{"MessageId":"Base.1.18.InternalError","Message":"x"}],"Payload":7}`))
	f.Add([]byte(`{"Manifest":{"Stanzas":[{"Response":{"error":{"code":"a","message":"b"}}}]}}`))
	c := &Client{poll: time.Second}
	f.Fuzz(func(t *testing.T, body []byte) {
		if fault := refusedStanza("try", rest.Reply{Status: 200, Body: body}); fault != nil {
			readable(t, fault.Message)
		}
		got, ok := decodeTask(body)
		if !ok {
			return
		}
		sane(t, got.self, got.monitor)
		for _, kind := range []fabric.OperationKind{fabric.KindAttach, fabric.KindDetach} {
			got.does(change{kind, &host{path: "/s/1"}, &unit{path: "/b/1"}})
			op := c.judge(fabric.Operation{Kind: kind, State: fabric.Pending, Handle: "/m/1", PollAfter: time.Second}, got)
			if bad := op.State == fabric.Failed || op.State == fabric.Suspended; bad != (op.Fault != nil) {
				t.Errorf("judged %+v", op)
			}
			if op.Fault != nil {
				readable(t, op.Fault.Message)
				readable(t, op.Fault.Code)
			}
		}
	})
}

func FuzzDecodeRefusal(f *testing.F) {
	f.Add([]byte(extended("ResourceInUse")), "5")
	f.Add([]byte(`{"message":"no"}`), "Thu, 01 Jan 2026 00:00:00 GMT")
	f.Add([]byte(`<html>`), "")
	f.Fuzz(func(t *testing.T, body []byte, after string) {
		fault := refused("try", rest.Reply{Status: 400, Body: body, Header: http.Header{"Retry-After": {after}}}, time.Time{})
		readable(t, fault.Message)
		readable(t, fault.Code)
		if !fault.Definite() {
			t.Errorf("a refusal is %s", fault.Class)
		}
	})
}

func FuzzEvents(f *testing.F) {
	f.Add("id: 1\ndata: {}\n\n: alive\n\ndata: a\ndata: b\n\n")
	f.Add("data")
	f.Fuzz(func(t *testing.T, s string) {
		n := 0
		if err := events(strings.NewReader(s), func() { n++ }); err != nil && len(s) < longestEvent {
			t.Error(err)
		}
		if most := strings.Count(s, "data"); n > most {
			t.Errorf("%d pokes out of %d lines of data", n, most)
		}
	})
}

func TestEvents(t *testing.T) {
	for s, want := range map[string]int{
		"id: 1\ndata: {\ndata: }\n\n": 1, ": alive\n\n": 0, "\n\n\n": 0, "data:x\r\n\r\ndata:y\r\n\r\n": 2, "data: unfinished\n": 0, "database: x\n\n": 0, "event: x\n\n": 0,
	} {
		n := 0
		if err := events(strings.NewReader(s), func() { n++ }); err != nil || n != want {
			t.Errorf("%q pokes %d times, %v, want %d", s, n, err, want)
		}
	}
	if err := events(strings.NewReader("data: "+strings.Repeat("x", longestEvent)), func() {}); err == nil {
		t.Error("an endless line was read")
	}
}
