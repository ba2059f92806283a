// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/fabric/fabrictest"
)

// have checks that a resource has these properties.
func have(t *testing.T, what string, o object, keys ...string) {
	t.Helper()
	for _, k := range keys {
		at := any(o)
		for part := range strings.SplitSeq(k, "/") {
			m, _ := at.(map[string]any)
			var ok bool
			if at, ok = m[part]; !ok {
				t.Errorf("%s has no %s: %v", what, k, o)
				break
			}
		}
	}
}

// get reads as somebody who is known.
func (b *bench) get(path string) object {
	b.t.Helper()
	status, body := b.person("GET", path, "")
	if status != http.StatusOK {
		b.t.Fatalf("GET %s = %d %v", path, status, body)
	}
	return body
}

// TestFace_shapes: everything is found by links from the root, and has what the schemas want.
func TestFace_shapes(t *testing.T) {
	b := newBench(t, setting{random: true})
	to := func(o object, key string) string {
		m, _ := o[key].(map[string]any)
		s, _ := m["@odata.id"].(string)
		if s == "" {
			t.Fatalf("no link %s in %v", key, o)
		}
		return s
	}
	first := func(o object) string {
		list, _ := o["Members"].([]any)
		if len(list) == 0 {
			t.Fatalf("no members in %v", o)
		}
		m, _ := list[len(list)-1].(map[string]any)
		s, _ := m["@odata.id"].(string)
		return s
	}
	service := b.get(root + "/")
	have(t, "root", service, "@odata.type", "RedfishVersion", "ProtocolFeaturesSupported/ExpandQuery/NoLinks", "Links/Sessions/@odata.id", "Tasks", "EventService")
	composition := b.get(to(service, "CompositionService"))
	have(t, "composition service", composition, "ServiceEnabled", "ResourceZones", "Actions")
	blocks := b.get(to(composition, "ResourceBlocks"))
	if n := blocks["Members@odata.count"]; n != 5.0 {
		t.Errorf("%v members", n)
	}
	next, _ := blocks["Members@odata.nextLink"].(string)
	last := b.get(next)
	if _, more := last["Members@odata.nextLink"]; more || last["Members@odata.count"] != 5.0 {
		t.Errorf("last page %v", last)
	}
	block := b.get(first(last))
	have(t, "block", block, "@odata.etag", "ResourceBlockType", "Pool", "CompositionStatus/CompositionState", "CompositionStatus/Reserved",
		"CompositionStatus/NumberOfCompositions", "Links/ComputerSystems", "Links/Zones", "Status/Health", "Processors")
	list, _ := block["Processors"].([]any)
	have(t, "processor", b.get(to(object{"p": list[0]}, "p")), "ProcessorType", "Model", "SerialNumber", "UUID", "Status/State", "Location/PartLocation/ServiceLabel")
	zone := b.get(first(b.get(to(composition, "ResourceZones"))))
	have(t, "zone", zone, "ZoneType", "Links/ResourceBlocks", "@Redfish.CollectionCapabilities/Capabilities")
	system := b.get(first(b.get(to(service, "Systems"))))
	have(t, "system", system, "SystemType", "UUID", "PowerState", "Links/ResourceBlocks", "Actions/#ComputerSystem.AddResourceBlock/target", "@odata.etag")
	have(t, "session service", b.get(to(service, "SessionService")), "SessionTimeout", "Sessions/@odata.id")
	have(t, "event service", b.get(to(service, "EventService")), "ServerSentEventUri")
	have(t, "task service", b.get(to(service, "Tasks")), "Tasks/@odata.id")
	have(t, "capabilities", b.get(b.face.capabilities()), "Links/ResourceBlocks@Redfish.UpdatableAfterCreate")
	for _, plain := range []string{"/Systems", "/CompositionService", "/TaskService"} {
		if status, _ := b.person("GET", root+plain, ""); status != http.StatusNotFound {
			t.Errorf("GET %s = %d, want it somewhere else", plain, status)
		}
	}
}

func TestFace_knowsNobody(t *testing.T) {
	b := newBench(t, setting{})
	for path, want := range map[string]int{
		"/redfish": 200, root: 308, root + "/": 200, b.face.systems(): 401, b.face.blocks(): 401, b.face.names.stream(): 401, root + "/nowhere": 401,
	} {
		rec := httptest.NewRecorder()
		b.face.Handler().ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), "GET", path, nil))
		if rec.Code != want {
			t.Errorf("GET %s = %d, want %d", path, rec.Code, want)
		}
	}
}

func TestFace_sessions(t *testing.T) {
	b := newBenchOf(t, setting{}, chassis+"redfish: {sessions: 2, sessionTimeout: 100ms}\n")
	login := func(password string) *httptest.ResponseRecorder {
		body, err := json.Marshal(map[string]string{"UserName": "agent", "Password": password})
		if err != nil {
			t.Fatal(err)
		}
		rec := httptest.NewRecorder()
		b.face.Handler().ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), "POST", b.face.names.sessions(), strings.NewReader(string(body))))
		return rec
	}
	if rec := login("wrong"); rec.Code != 401 {
		t.Errorf("login with a wrong password = %d", rec.Code)
	}
	one := login(b.Config.Credentials.Password)
	if one.Code != 201 || one.Header().Get("X-Auth-Token") == "" || !strings.HasPrefix(one.Header().Get("Location"), root) {
		t.Fatalf("login = %d %v", one.Code, one.Header())
	}
	if rec := login(b.Config.Credentials.Password); rec.Code != 201 {
		t.Errorf("second login = %d", rec.Code)
	}
	if rec := login(b.Config.Credentials.Password); rec.Code != 503 || !strings.Contains(rec.Body.String(), "SessionLimitExceeded") {
		t.Errorf("third login = %d %s", rec.Code, rec.Body)
	}
	if status, _ := b.person("DELETE", one.Header().Get("Location"), ""); status != 204 {
		t.Errorf("logout = %d", status)
	}
	if status, _ := b.person("DELETE", one.Header().Get("Location"), ""); status != 404 {
		t.Errorf("second logout = %d", status)
	}
	time.Sleep(200 * time.Millisecond)
	if n := b.face.Sessions(); n != 0 {
		t.Errorf("%d sessions that nobody used", n)
	}
}

func TestEdit(t *testing.T) {
	list := []string{"/h", "/1", "/2"}
	tests := []struct {
		name, body string
		want       string // "" is refused
	}{
		{"all and one more", `[{"@odata.id":"/h"},{"@odata.id":"/1"},{"@odata.id":"/2"},{"@odata.id":"/3"}]`, "/h /1 /2 /3"},
		{"placeholders", `[{},{},{},{"@odata.id":"/3"}]`, "/h /1 /2 /3"},
		{"one is deleted", `[{},null,{}]`, "/h /2"},
		{"one is deleted, one added", `[{},null,{},{"@odata.id":"/3"}]`, "/h /2 /3"},
		{"the rest is cut off", `[{}]`, "/h"},
		{"only the new one: the others are lost", `[{"@odata.id":"/3"}]`, "/3"},
		{"nothing", `[]`, " "},
		{"bare string", `["/h"]`, ""},
		{"twice", `[{},{"@odata.id":"/h"}]`, ""},
		{"placeholder for nothing", `[{},{},{},{}]`, ""},
		{"deletes nothing", `[{},{},{},null]`, ""},
	}
	for _, tt := range tests {
		var elements []json.RawMessage
		if err := json.Unmarshal([]byte(tt.body), &elements); err != nil {
			t.Fatal(err)
		}
		got, bad := edit(list, elements)
		if (bad != nil) != (tt.want == "") || bad == nil && strings.Join(got, " ") != strings.TrimSpace(tt.want) {
			t.Errorf("%s = %v, %v, want %s", tt.name, got, bad, tt.want)
		}
	}
}

// TestFace_changes: what is taken and what is refused, in each form.
func TestFace_changes(t *testing.T) {
	const stale = `"stale"`
	tests := []struct {
		name     string
		policies simapi.RedfishPolicies
		method   string
		path     func(f *Face) string
		body     string // H, A and B are the host block, a free one, and one of the other system
		match    string
		status   int
		key      string
	}{
		{"list", simapi.RedfishPolicies{Work: "sync200"}, "PATCH", system, `{"Links":{"ResourceBlocks":[H,A]}}`, "", 200, ""},
		{"list, a task", simapi.RedfishPolicies{}, "PATCH", system, `{"Links":{"ResourceBlocks":[H,A]}}`, "", 202, ""},
		{"list, without a word", simapi.RedfishPolicies{Work: "sync204"}, "PATCH", system, `{"Links":{"ResourceBlocks":[{},A]}}`, "", 204, ""},
		{"list, nothing to do", simapi.RedfishPolicies{}, "PATCH", system, `{"Links":{"ResourceBlocks":[H]}}`, "", 200, "NoOperation"},
		{"list, stale", simapi.RedfishPolicies{}, "PATCH", system, `{"Links":{"ResourceBlocks":[H,A]}}`, stale, 412, "PreconditionFailed"},
		{"list, no ETag", simapi.RedfishPolicies{ETag: "required"}, "PATCH", system, `{"Links":{"ResourceBlocks":[H,A]}}`, "", 428, "PreconditionRequired"},
		{"list, ETags do not count", simapi.RedfishPolicies{ETag: "none"}, "PATCH", system, `{"Links":{"ResourceBlocks":[H,A]}}`, stale, 202, ""},
		{"list without the host", simapi.RedfishPolicies{}, "PATCH", system, `{"Links":{"ResourceBlocks":[A]}}`, "", 400, "PropertyValueConflict"},
		{"list without the host, 406", simapi.RedfishPolicies{HostBlock: "406"}, "PATCH", system, `{"Links":{"ResourceBlocks":[A]}}`, "", 406, ""},
		{"list with another's", simapi.RedfishPolicies{}, "PATCH", system, `{"Links":{"ResourceBlocks":[H,B]}}`, "", 409, "ResourceBlockInUse"},
		{"list with nothing", simapi.RedfishPolicies{}, "PATCH", system, `{"Links":{"ResourceBlocks":[H,{"@odata.id":"/x"}]}}`, "", 404, "ResourceBlockNotFound"},
		{"list, not offered", simapi.RedfishPolicies{Forms: "actions"}, "PATCH", system, `{"Links":{"ResourceBlocks":[H,A]}}`, "", 405, "OperationNotAllowed"},
		{"list, no JSON", simapi.RedfishPolicies{}, "PATCH", system, `{`, "", 400, "MalformedJSON"},
		{"list, none", simapi.RedfishPolicies{}, "PATCH", system, `{"Links":{}}`, "", 400, "PropertyMissing"},
		{"action", simapi.RedfishPolicies{Work: "sync204"}, "POST", add, `{"ResourceBlock":A}`, "", 204, ""},
		{"action, bare string", simapi.RedfishPolicies{}, "POST", add, `{"ResourceBlock":"/x"}`, "", 400, "ActionParameterValueTypeError"},
		{"action, stale", simapi.RedfishPolicies{}, "POST", add, `{"ResourceBlock":A,"ComputerSystemETag":"\"stale\""}`, "", 428, "PreconditionRequired"},
		{"action, empty ETag", simapi.RedfishPolicies{}, "POST", add, `{"ResourceBlock":A,"ResourceBlockETag":""}`, "", 428, "PreconditionRequired"},
		{"action, another's", simapi.RedfishPolicies{}, "POST", add, `{"ResourceBlock":B}`, "", 409, "ResourceBlockInUse"},
		{"action, not here", simapi.RedfishPolicies{}, "POST", remove, `{"ResourceBlock":A}`, "", 404, "ResourceBlockNotFound"},
		{"action, the host", simapi.RedfishPolicies{HostBlock: "409"}, "POST", remove, `{"ResourceBlock":H}`, "", 409, "PropertyValueConflict"},
		{"action, not offered", simapi.RedfishPolicies{Forms: "list"}, "POST", add, `{"ResourceBlock":A}`, "", 404, "ResourceMissingAtURI"},
		{"manifest", simapi.RedfishPolicies{Forms: "manifest", Work: "sync204"}, "POST", compose, `{"RequestFormat":"Manifest","RequestType":"Apply","Manifest":{"Stanzas":[{"StanzaId":"1","StanzaType":"ComposeSystem","Request":{"@odata.id":"S","Links":{"ResourceBlocks":[H,A]}}}]}}`, "", 204, ""},
		{"manifest, empty", simapi.RedfishPolicies{Forms: "manifest"}, "POST", compose, `{"RequestFormat":"Manifest","RequestType":"Apply","Manifest":{}}`, "", 400, "EmptyManifest"},
		{"manifest, a bad stanza", simapi.RedfishPolicies{Forms: "manifest"}, "POST", compose, `{"RequestFormat":"Manifest","RequestType":"Apply","Manifest":{"Stanzas":[{"StanzaId":"1","StanzaType":"ComposeSystem","Request":{"@odata.id":"S","Links":{"ResourceBlocks":[H,B]}}}]}}`, "", 200, "ResourceBlockInUse"},
		{"manifest, preview", simapi.RedfishPolicies{Forms: "manifest"}, "POST", compose, `{"RequestFormat":"Manifest","RequestType":"Preview","Manifest":{"Stanzas":[{"StanzaId":"1","StanzaType":"ComposeSystem","Request":{"@odata.id":"S","Links":{"ResourceBlocks":[H,A]}}}]}}`, "", 200, ""},
		{"reservation", simapi.RedfishPolicies{}, "PATCH", func(f *Face) string { return f.block("a-0") }, `{"CompositionStatus":{"Reserved":true}}`, "", 204, ""},
		{"reservation, something else", simapi.RedfishPolicies{}, "PATCH", func(f *Face) string { return f.block("a-0") }, `{"Pool":"Free"}`, "", 400, "PropertyNotWritable"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, setting{policies: tt.policies})
			b.place("n2", "b-0")
			reference := func(id string) string { return `{"@odata.id":"` + b.face.block(id) + `"}` }
			body := strings.NewReplacer(`"S"`, `"`+b.face.system("n1")+`"`, "H", reference(hostBlock+"n1"), "[A", "["+reference("a-0"), ",A", ","+reference("a-0"),
				":A", ":"+reference("a-0"), ",B", ","+reference("b-0"), ":B", ":"+reference("b-0")).Replace(tt.body)
			var header []string
			if tt.match != "" {
				header = []string{"If-Match", tt.match}
			}
			status, said := b.person(tt.method, tt.path(b.face), body, header...)
			text, err := json.Marshal(said)
			if err != nil {
				t.Fatal(err)
			}
			if status != tt.status || !strings.Contains(string(text), tt.key) {
				t.Errorf("%s = %d %s, want %d %s", body, status, text, tt.status, tt.key)
			}
			b.rest()
			v, err := b.Core.Machine("n1")
			if err != nil {
				t.Fatal(err)
			}
			if done := status/100 == 2 && tt.key == "" && !strings.Contains(tt.name, "preview") && !strings.Contains(tt.name, "reserv"); (len(v.Listed) == 1) != done {
				t.Errorf("the machine has %d devices", len(v.Listed))
			}
		})
	}
}

func system(f *Face) string  { return f.system("n1") }
func add(f *Face) string     { return f.action(f.system("n1"), "AddResourceBlock") }
func remove(f *Face) string  { return f.action(f.system("n1"), "RemoveResourceBlock") }
func compose(f *Face) string { return f.compose() }

// place attaches behind everybody's back.
func (b *bench) place(machine, id string) {
	b.t.Helper()
	if bad := b.face.askHardware(job{true, machine, id}); bad != nil {
		b.t.Fatal(bad)
	}
}

// TestFace_task: a monitor goes on, then answers what the change would have, in one of three ways.
func TestFace_task(t *testing.T) {
	for after, want := range map[string]int{"replay": 200, "task": 200, "gone": 404} {
		for _, work := range []string{"task202", "task200"} {
			b := newBench(t, setting{policies: simapi.RedfishPolicies{AfterTask: after, Work: work, RetryAfter: "seconds"}})
			b.slow(100 * time.Millisecond)
			status, task := b.person("POST", add(b.face), `{"ResourceBlock":{"@odata.id":"`+b.face.block("a-0")+`"}}`)
			have(t, "task", task, "TaskState", "TaskMonitor", "Messages", "Payload/TargetUri", "Payload/JsonBody")
			monitor, _ := task["TaskMonitor"].(string)
			if status != 202 || monitor == "" || task["@odata.id"] == monitor {
				t.Fatalf("change = %d %v", status, task)
			}
			running := map[string]int{"task202": 202, "task200": 200}[work]
			var said object
			if status, said = b.person("GET", monitor, ""); status != running || said["TaskState"] != "Running" {
				t.Errorf("monitor = %d %v, want %d while it goes on", status, said, running)
			}
			block := b.get(b.face.block("a-0"))
			if c, _ := block["CompositionStatus"].(map[string]any); c["CompositionState"] != "Composing" {
				t.Errorf("block %v while it is composed", block)
			}
			b.rest()
			status, said = b.person("GET", monitor, "")
			_, isTask := said["TaskState"]
			if status != want || isTask != (after == "task") {
				t.Errorf("%s: monitor = %d %v at the end", after, status, said)
			}
			if at, _ := task["@odata.id"].(string); b.get(at)["TaskState"] != "Completed" {
				t.Error("the task is not completed")
			}
			b.face.ForgetTasks()
			if status, _ := b.person("GET", monitor, ""); status != 404 {
				t.Errorf("monitor = %d when the task is forgotten", status)
			}
		}
	}
}

// TestFace_suspended: a task whose hardware waits for a person does so until that one cancels it, and has done nothing.
func TestFace_suspended(t *testing.T) {
	b := newBench(t, setting{})
	b.Add(simapi.Fault{Face: "hw", Method: "PUT", Action: simapi.ActionStatus, Status: 503, Content: "the slot is to be seen to", Count: 1})
	_, task := b.person("POST", add(b.face), `{"ResourceBlock":{"@odata.id":"`+b.face.block("a-0")+`"}}`)
	monitor, _ := task["TaskMonitor"].(string)
	for task["TaskState"] == "Running" {
		clock.RealClock{}.Sleep(5 * time.Millisecond)
		_, task = b.person("GET", monitor, "")
	}
	if task["TaskState"] != "Suspended" || !strings.Contains(fmt.Sprint(task["Messages"]), "to be seen to") || !b.busy() {
		t.Errorf("task %v", task)
	}
	if status, _ := b.person("DELETE", monitor, ""); status != 204 {
		t.Errorf("cancel = %d", status)
	}
	b.rest()
	at, _ := task["@odata.id"].(string)
	if state := b.get(at)["TaskState"]; state != "Cancelled" {
		t.Errorf("the task is %v", state)
	}
	if status, body := b.person("GET", monitor, ""); status != 409 || !strings.Contains(fmt.Sprint(body), "TaskCancelled") {
		t.Errorf("monitor = %d %v", status, body)
	}
	if status, _ := b.person("DELETE", monitor, ""); status != 405 {
		t.Errorf("cancel of what is over = %d", status)
	}
	b.has(fabrictest.MachineOne)
}

func (b *bench) slow(d time.Duration) {
	delay := simapi.Duration(d)
	b.Core.SetTiming(simapi.Timing{AttachDelay: &delay, DetachDelay: &delay})
}

func TestFace_query(t *testing.T) {
	b := newBench(t, setting{policies: simapi.RedfishPolicies{PageSize: "50"}})
	for query, want := range map[string]int{"?$top=2": 200, "?$skip=4": 200, "?$top=x": 400, "?$filter=x": 501, "?$expand=.": 501, "?other=1": 200} {
		if status, body := b.person("GET", b.face.blocks()+query, ""); status != want {
			t.Errorf("%s = %d %v, want %d", query, status, body, want)
		}
	}
	members := func(query string) int {
		list, _ := b.get(b.face.blocks() + query)["Members"].([]any)
		return len(list)
	}
	if a, c, d := members("?$top=2"), members("?$skip=4"), members(""); a != 2 || c != 1 || d != 5 {
		t.Errorf("%d, %d and %d members", a, c, d)
	}
}

// TestFace_etag: it changes with what is shown, and while something is under way that is not shown yet.
func TestFace_etag(t *testing.T) {
	b := newBench(t, setting{policies: simapi.RedfishPolicies{Composing: "unlisted"}})
	b.slow(100 * time.Millisecond)
	tag := func() string {
		s, _ := b.get(b.face.system("n1"))["@odata.etag"].(string)
		return s
	}
	tags := []string{tag()}
	if again := tag(); again != tags[0] {
		t.Error("the ETag changes by itself")
	}
	if status, body := b.person("POST", add(b.face), `{"ResourceBlock":{"@odata.id":"`+b.face.block("a-0")+`"}}`); status != 202 {
		t.Fatalf("%d %v", status, body)
	}
	tags = append(tags, tag())
	b.rest()
	tags = append(tags, tag())
	if slices.Sort(tags); len(slices.Compact(tags)) != 3 {
		t.Errorf("ETags %v, want three", tags)
	}
}

func TestRefusal_forms(t *testing.T) {
	r := refuse(http.StatusConflict, "ResourceBlockInUse", "block is in use")
	for form, want := range map[string]string{
		"extended": `{"error":{"@Message.ExtendedInfo":[{"@odata.type":"#Message.v1_1_2.Message","Message":"block is in use","MessageArgs":[],"MessageId":"Composition.1.1.ResourceBlockInUse","MessageSeverity":"Critical","Resolution":"None","Severity":"Critical"}],"code":"Composition.1.1.ResourceBlockInUse","message":"block is in use"}}`,
		"plain":    `{"error":{"code":"Composition.1.1.ResourceBlockInUse","message":"block is in use"}}`,
		"message":  `{"message":"block is in use"}`,
	} {
		got, err := json.Marshal(r.body(form))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", form, diff)
		}
	}
}
