// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	a    = device.Machine("9b1d3e20-1111-4a6b-8c00-00000000a001")
	b    = device.Machine("22222222-2222-4222-8222-000000000002")
	c    = device.Machine("33333333-3333-4333-8333-000000000003")
	aRev = device.Machine("203e1d9b-1111-6b4a-8c00-00000000a001")
	uid  = "78787878-eeee-4700-fd00-000000000001"
)

func TestParseProviderID(t *testing.T) {
	for id, want := range map[string]ProviderID{
		"":                        {},
		"fsas-cdi://" + string(a): {Machine: a},
		"FSAS-CDI://" + upper(a):  {Machine: a},
		string(a):                 {Machine: a},
		upper(a) + " ":            {Machine: a},
		"x:///a/b/" + upper(a):    {Machine: a},
		"baremetalhost:///machines/host-1/" + uid: {Machine: uid, Metal3: true, Host: Host{Namespace: "machines", Name: "host-1", UID: uid}},
		"baremetalhost:///machines/host-1":        {Metal3: true},
		"metal3://" + uid:                         {Machine: uid, Metal3: true, Host: Host{UID: uid}},
		"Metal3://ns/host-1/node-1":               {Metal3: true, Host: Host{Namespace: "ns", Name: "host-1", Consumer: "node-1"}},
		"metal3://ns/host-1/":                     {Metal3: true},
		"metal3://../../node-1":                   {Metal3: true},
		"metal3://ns/host_1/node-1":               {Metal3: true},
		"metal3://a/b/c/d":                        {Metal3: true},
		"kind://docker/c/n1":                      {},
		"aws:///eu-central-1a/i-0123456789abcdef": {},
		"://" + string(a):                         {Machine: a},
	} {
		if diff := cmp.Diff(want, ParseProviderID(id)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", id, diff)
		}
	}
}

func upper(m device.Machine) string { return strings.ToUpper(string(m)) }

func FuzzParseProviderID(f *testing.F) {
	for _, id := range []string{"", "fsas-cdi://" + string(a), "baremetalhost:///machines/host-1/" + uid, "metal3://ns/h/m", "metal3://" + uid, "a/b://c//"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		p := ParseProviderID(id)
		if p.Machine != "" {
			if m, err := device.ParseMachine(string(p.Machine)); err != nil || m != p.Machine {
				t.Errorf("%q names %q, which is no machine: %v", id, p.Machine, err)
			}
		}
		for _, name := range []string{p.Host.Namespace, p.Host.Name, p.Host.Consumer} {
			if strings.ContainsAny(name, "/ %?#") || strings.Trim(name, ".") == "" && name != "" {
				t.Errorf("%q names an object %q, which is none", id, name)
			}
		}
		if p.Host != (Host{}) && !p.Metal3 {
			t.Errorf("%q names a host of no kind: %+v", id, p)
		}
		e := Evidence{ProviderID: id}
		if _, problem, ok := e.Start(); ok && problem != "" {
			t.Errorf("%q leads to a host, and does not: %s", id, problem)
		}
	})
}

func TestStart(t *testing.T) {
	host := Host{Namespace: "machines", Name: "host-1", UID: uid}
	for name, tc := range map[string]struct {
		id, object string
		want       Start
		ok         bool
		problem    string
	}{
		"a Node of another platform":        {id: "aws:///eu/i-1"},
		"the provider id names the host":    {id: "baremetalhost:///machines/host-1/" + uid, want: Start{Host: host}, ok: true},
		"the annotation, and both":          {id: "baremetalhost:///machines/host-1/" + uid, object: "machines/m-1", want: Start{Namespace: "machines", Name: "m-1", Host: host}, ok: true},
		"the annotation alone":              {object: "machines/m-1", want: Start{Namespace: "machines", Name: "m-1"}, ok: true},
		"the host's UID leads nowhere":      {id: "metal3://" + uid, problem: "does not name its BareMetalHost"},
		"with the annotation it is checked": {id: "metal3://" + uid, object: "machines/m-1", want: Start{Namespace: "machines", Name: "m-1", Host: Host{UID: uid}}, ok: true},
		"a faulty annotation":               {object: "m-1", problem: `"m-1" is not <namespace>/<name>`},
		"one part too many":                 {object: "a/b/c", problem: "is not <namespace>/<name>"},
	} {
		t.Run(name, func(t *testing.T) {
			e := Evidence{ProviderID: tc.id, Object: tc.object}
			got, problem, ok := e.Start()
			if diff := cmp.Diff(tc.want, got); diff != "" || ok != tc.ok || !strings.Contains(problem, tc.problem) || tc.problem == "" && problem != "" {
				t.Errorf("ok %v, problem %q (-want +got):\n%s", ok, problem, diff)
			}
		})
	}
}

func TestSwapped(t *testing.T) {
	if got := swapped(a); got != aRev {
		t.Errorf("%s swapped is %s, want %s", a, got, aRev)
	}
	if got := swapped(swapped(a)); got != a {
		t.Errorf("%s swapped twice is %s", a, got)
	}
}

func TestDecide(t *testing.T) {
	metal3 := "baremetalhost:///machines/host-1/" + uid
	const at = "BareMetalHost machines/host-1"
	found := &Chain{Machine: string(a), Host: at}
	in := func(fabric device.FabricID, machines ...device.Machine) map[device.Machine][]device.FabricID {
		all := map[device.Machine][]device.FabricID{}
		for _, m := range machines {
			all[m] = append(all[m], fabric)
		}
		return all
	}
	for name, tc := range map[string]struct {
		Facts
		want Place
		by   string
		note string
		// where it cannot be said:
		reason, says    string
		follow, passing bool
	}{
		"fsas-cdi":                {Facts: Facts{Evidence: Evidence{ProviderID: "fsas-cdi://" + string(a)}, Listed: in("f", a, b)}, want: Place{"f", a}, by: "provider id"},
		"a bare UUID in capitals": {Facts: Facts{Evidence: Evidence{ProviderID: upper(a)}, Listed: in("f", a)}, want: Place{"f", a}},
		"another scheme":          {Facts: Facts{Evidence: Evidence{ProviderID: "openstack:///" + string(a)}, Listed: in("f", a)}, want: Place{"f", a}},
		"the provider id wins, and the other is named": {
			Facts: Facts{Evidence: Evidence{ProviderID: "fsas-cdi://" + string(a), Annotation: string(b), Annotated: true}, Listed: in("f", a, b)},
			want:  Place{"f", a}, by: "provider id", note: "names " + string(b) + ", which a manager lists, too",
		},
		"a wrong annotation beside it": {
			Facts: Facts{Evidence: Evidence{ProviderID: "fsas-cdi://" + string(a), Annotation: string(c), Annotated: true}, Listed: in("f", a, b)},
			want:  Place{"f", a}, note: "names " + string(c) + ", which no manager lists",
		},
		"a faulty annotation beside it": {
			Facts: Facts{Evidence: Evidence{ProviderID: "fsas-cdi://" + string(a), Annotation: "rack 7", Annotated: true}, Listed: in("f", a)},
			want:  Place{"f", a}, note: `"rack 7" is not a UUID`,
		},
		"firmware that says another machine of the manager": {
			Facts: Facts{Evidence: Evidence{ProviderID: "fsas-cdi://" + string(b), SystemUUID: upper(aRev)}, Listed: in("f", a, b)},
			want:  Place{"f", b}, note: "names " + string(a) + ", which a manager lists, too",
		},
		"firmware that says what no manager has": {
			Facts: Facts{Evidence: Evidence{ProviderID: "fsas-cdi://" + string(b), SystemUUID: uid}, Listed: in("f", a, b)}, want: Place{"f", b},
		},
		"a person corrects the provider id": {
			Facts: Facts{Evidence: Evidence{ProviderID: "fsas-cdi://" + string(c), Annotation: upper(a), Annotated: true}, Listed: in("f", a)},
			want:  Place{"f", a}, by: "annotation", note: "names " + string(c) + ", which no manager lists",
		},
		"a wrong provider id is not put right by firmware": {
			Facts:  Facts{Evidence: Evidence{ProviderID: "fsas-cdi://" + string(c), SystemUUID: string(a), Object: "n/m"}, Listed: in("f", a)},
			reason: NotInFabric, says: string(c) + ", which the node's provider id",
		},
		"a cloud's provider id": {
			Facts: Facts{Evidence: Evidence{ProviderID: "aws:///eu/i-0123", Annotation: string(a), Annotated: true}, Listed: in("f", a)}, want: Place{"f", a},
		},
		"a faulty annotation is not skipped": {
			Facts:  Facts{Evidence: Evidence{Annotation: "rack 7", Annotated: true, Configured: a}, Listed: in("f", a)},
			reason: Unknown, says: `"rack 7" is not a UUID`,
		},
		"nor a wrong one": {
			Facts:  Facts{Evidence: Evidence{Annotation: string(b), Annotated: true, Configured: a}, Listed: in("f", a)},
			reason: NotInFabric, says: "annotation " + device.AnnotationMachine,
		},
		"the configuration": {Facts: Facts{Evidence: Evidence{Configured: a}, Listed: in("f", a)}, want: Place{"f", a}, by: "configuration"},
		"a wrong configuration": {
			Facts: Facts{Evidence: Evidence{Configured: b, SystemUUID: string(a)}, Listed: in("f", a)}, reason: NotInFabric, says: "configuration's machines names",
		},
		"the chain is wanted":       {Facts: Facts{Evidence: Evidence{ProviderID: metal3}, Listed: in("f", a)}, follow: true},
		"but not where others know": {Facts: Facts{Evidence: Evidence{ProviderID: metal3, Configured: a}, Listed: in("f", a)}, want: Place{"f", a}},
		"the chain":                 {Facts: Facts{Evidence: Evidence{ProviderID: metal3}, Listed: in("f", a), Chain: found}, want: Place{"f", a}, by: at},
		"a host that is a machine by its UID": {
			Facts: Facts{Evidence: Evidence{ProviderID: metal3}, Listed: in("f", device.Machine(uid))}, want: Place{"f", device.Machine(uid)},
		},
		"the chain leads to a machine that is not there": {
			Facts:  Facts{Evidence: Evidence{ProviderID: metal3, SystemUUID: string(b)}, Listed: in("f", b), Chain: found},
			reason: NotInFabric, says: string(a) + ", which the node's " + at,
		},
		"a broken chain": {
			Facts:  Facts{Evidence: Evidence{ProviderID: metal3, SystemUUID: string(c)}, Listed: in("f", a), Chain: &Chain{Problem: "the host has no name"}},
			reason: Unknown, says: "the host has no name",
		},
		"a chain that breaks for the moment": {
			Facts:  Facts{Evidence: Evidence{ProviderID: metal3}, Listed: in("f", a), Chain: &Chain{Problem: "no answer", Passing: true}},
			reason: Unknown, says: "no answer", passing: true,
		},
		"a chain to a word": {
			Facts:  Facts{Evidence: Evidence{ProviderID: metal3}, Listed: in("f", a), Chain: &Chain{Machine: "rack 7", Host: at}},
			reason: Unknown, says: at + ` names the machine "rack 7"`,
		},
		"a chain that begins nowhere": {
			Facts: Facts{Evidence: Evidence{ProviderID: "metal3://" + uid}, Listed: in("f", a)}, reason: Unknown, says: "does not name its BareMetalHost",
		},
		"firmware after a broken chain": {
			Facts: Facts{Evidence: Evidence{ProviderID: metal3, SystemUUID: string(b)}, Listed: in("f", b), Chain: &Chain{Problem: "x"}}, want: Place{"f", b}, by: "system UUID",
		},
		"firmware":                      {Facts: Facts{Evidence: Evidence{SystemUUID: upper(a)}, Listed: in("f", a)}, want: Place{"f", a}, by: "system UUID"},
		"firmware in the other order":   {Facts: Facts{Evidence: Evidence{SystemUUID: string(aRev)}, Listed: in("f", a)}, want: Place{"f", a}},
		"firmware that can be both":     {Facts: Facts{Evidence: Evidence{SystemUUID: string(aRev)}, Listed: in("f", a, aRev)}, reason: Ambiguous, says: string(a)},
		"firmware that is no machine's": {Facts: Facts{Evidence: Evidence{SystemUUID: string(c)}, Listed: in("f", a)}, reason: Unknown, says: string(c)},
		"nothing says it": {
			Facts: Facts{Evidence: Evidence{ProviderID: "kind://docker/c/n1"}, Listed: in("f", a)}, reason: Unknown, says: "there is no annotation " + device.AnnotationMachine,
		},
		"two fabrics list it": {
			Facts:  Facts{Evidence: Evidence{Configured: a}, Listed: map[device.Machine][]device.FabricID{a: {"g", "f"}}},
			reason: Ambiguous, says: "fabrics [f g]",
		},
		"two fabrics list it, and it works in one": {
			Facts: Facts{Evidence: Evidence{Configured: a}, Was: Place{"g", a}, Listed: map[device.Machine][]device.FabricID{a: {"f", "g"}}}, want: Place{"g", a},
		},
		"no manager answers": {
			Facts: Facts{Evidence: Evidence{Configured: a}, Unasked: []device.FabricID{"f"}}, reason: Unreachable, says: string(a), passing: true,
		},
		"no manager answers, and firmware may name it": {
			Facts: Facts{Evidence: Evidence{SystemUUID: string(a)}, Unasked: []device.FabricID{"f"}}, reason: Unknown, says: string(a), passing: true,
		},
		"the node's own manager does not answer": {
			Facts: Facts{Evidence: Evidence{Configured: a}, Was: Place{"f", a}, Unasked: []device.FabricID{"f"}}, want: Place{"f", a},
		},
		"nor does it to a node of an older agent": {
			Facts: Facts{Evidence: Evidence{Configured: a}, Was: Place{Fabric: "f"}, Unasked: []device.FabricID{"f"}}, want: Place{"f", a},
		},
		"a node that firmware placed stays": {
			Facts: Facts{Evidence: Evidence{SystemUUID: string(aRev)}, Was: Place{"f", a}, Unasked: []device.FabricID{"f"}}, want: Place{"f", a},
		},
		"another machine than before is not taken on trust": {
			Facts: Facts{Evidence: Evidence{Configured: a}, Was: Place{"f", b}, Unasked: []device.FabricID{"f"}}, reason: Unreachable, says: string(a), passing: true,
		},
		"another manager that lists it does not take it": {
			Facts: Facts{Evidence: Evidence{Configured: a}, Was: Place{"f", a}, Listed: in("g", a), Unasked: []device.FabricID{"f"}}, want: Place{"f", a},
		},
		"one that was elsewhere goes there": {
			Facts: Facts{Evidence: Evidence{Configured: a}, Was: Place{"h", b}, Listed: in("g", a), Unasked: []device.FabricID{"f"}}, want: Place{"g", a},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := Decide(&tc.Facts)
			if d.Place != tc.want || d.Reason != tc.reason || d.Follow != tc.follow || d.Passing != tc.passing {
				t.Fatalf("decision %+v", d)
			}
			if (d.Message == "") != (tc.reason == "") || !strings.Contains(d.Message, tc.says) {
				t.Errorf("message %q, want one that names %q", d.Message, tc.says)
			}
			if (d.By == "") != (tc.want == Place{}) || !strings.Contains(d.By, tc.by) {
				t.Errorf("by %q, want %q", d.By, tc.by)
			}
			named := slices.ContainsFunc(d.Notes, func(n string) bool { return strings.Contains(n, tc.note) })
			if tc.note == "" && len(d.Notes) > 0 || tc.note != "" && !named {
				t.Errorf("notes %q, want %q", d.Notes, tc.note)
			}
		})
	}
}

func TestNamed(t *testing.T) {
	for name, tc := range map[string]struct {
		Evidence
		want device.Machine
	}{
		"provider id":                 {Evidence{ProviderID: "fsas-cdi://" + string(a), Annotation: string(b), Annotated: true}, a},
		"annotation":                  {Evidence{ProviderID: "aws:///eu/i-1", Annotation: string(b), Annotated: true, Configured: c}, b},
		"configuration":               {Evidence{Configured: c, SystemUUID: string(a)}, c},
		"a host's UID is no machine":  {Evidence{ProviderID: "metal3://" + uid}, ""},
		"firmware names none by name": {Evidence{SystemUUID: string(a)}, ""},
	} {
		if got := tc.Named(); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

func TestQuote(t *testing.T) {
	if got := Quote(strings.Repeat("ä", 500)); len(got) > 110 || !strings.HasSuffix(got, `ä..."`) {
		t.Errorf("long text is quoted as %s", got)
	}
}
