// SPDX-License-Identifier: Apache-2.0

package device

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestBuiltInUnit(t *testing.T) {
	const id, name = GPUUUID("GPU-0a1b2c3d-0000-4000-8000-00000000000f"), Unit("gpu-0a1b2c3d-0000-4000-8000-00000000000f")
	if got := BuiltInUnit(id); got != name {
		t.Errorf("BuiltInUnit(%s) = %s", id, got)
	}
	for unit, want := range map[Unit]GPUUUID{
		name: id, "a100-0": "", "gpu-0": "", "": "", "0a1b2c3d-0000-4000-8000-00000000000f": "", Unit(id): "", name + "-ready": "",
	} {
		if got, ok := unit.BuiltIn(); got != want || ok != (want != "") {
			t.Errorf("%q is the GPU %q, %v; want %q", unit, got, ok, want)
		}
	}
}

func TestParsePCIAddress(t *testing.T) {
	for _, tc := range []struct{ in, want string }{
		{"0000:3b:00.0", "0000:3b:00.0"},
		{"00000000:3B:00.0", "0000:3b:00.0"}, // NVML's form
		{"3b:1f.7", "0000:3b:1f.7"},
		{"10000:e1:00.0", "10000:e1:00.0"}, // behind VMD
	} {
		got, err := ParsePCIAddress(tc.in)
		if err != nil || got.String() != tc.want {
			t.Errorf("ParsePCIAddress(%q) = %v, %v; want %s", tc.in, got, err, tc.want)
		}
	}
	for _, in := range []string{"", "0000:3b:00", "0000:3b:20.0", "0000:3b:00.8", "0000:+b:00.0", "a:b:c:d.0", "000:3b:00.0", "0000:3b:00.00"} {
		if got, err := ParsePCIAddress(in); err == nil {
			t.Errorf("ParsePCIAddress(%q) = %v, want an error", in, got)
		}
	}
}

func FuzzParsePCIAddress(f *testing.F) {
	f.Add("0000:3b:00.0")
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParsePCIAddress(s)
		if err != nil {
			return
		}
		if b, err := ParsePCIAddress(a.String()); err != nil || b != a {
			t.Errorf("%q reads as %v, which reads back as %v, %v", s, a, b, err)
		}
	})
}

func TestAttemptRoundTrip(t *testing.T) {
	a := Attempt{
		Namespace: "team-a", Name: "pod-gpu-x7", UID: "5b1e", AllocatedAt: "2026-01-02T03:04:05Z",
		Node: "n1", Pool: "fabric-0", Entry: "a100-0",
	}
	got, err := ParseAttempt(a.String())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(a, got); diff != "" {
		t.Errorf("attempt (-want +got):\n%s", diff)
	}
	if a.Ready() {
		t.Error("a100-0 is not a ready entry")
	}
	for _, in := range []string{"x", "a/b/c t n p", "a/b t n p/d", "a/b/ t n p/d", "a/b/c  n p/d"} {
		if got, err := ParseAttempt(in); err == nil {
			t.Errorf("ParseAttempt(%q) = %+v, want an error", in, got)
		}
	}
}

func FuzzParseAttempt(f *testing.F) {
	f.Add("ns/name/uid 2026-01-02T03:04:05Z n1 fabric-0/a100-0")
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParseAttempt(s)
		if err == nil && a.String() != s {
			t.Errorf("%q reads as %q", s, a.String())
		}
	})
}

func TestUnitNames(t *testing.T) {
	u := NumberedUnit("a100", 12)
	if n, ok := u.Number("a100"); !ok || n != 12 {
		t.Errorf("Number of %s = %d, %v", u, n, ok)
	}
	for _, other := range []Unit{"a100-012", "a100-", "a100-x", "a100-80-1", "l40s-1"} {
		if n, ok := other.Number("a100"); ok {
			t.Errorf("%s counted as number %d of a100", other, n)
		}
	}
	for unit, of := range map[Unit]bool{
		u: true, AddressableUnit("a100", "d-1"): true, "a100-0badcafe": true, "a100-12345678": true,
		"a100-0badcaf": false, "a100-0badcafe0": false, "a100-0BADCAFE": false, "a100-80-0badcafe": false, "a100": false, "l40s-0badcafe": false,
	} {
		if unit.Of("a100") != of {
			t.Errorf("%s of a100 = %v", unit, !of)
		}
	}
	if got, ready := UnitOfEntry(u.ReadyEntry()); got != u || !ready {
		t.Errorf("UnitOfEntry(%s) = %s, %v", u.ReadyEntry(), got, ready)
	}
	if got, ready := UnitOfEntry(u.Entry()); got != u || ready {
		t.Errorf("UnitOfEntry(%s) = %s, %v", u.Entry(), got, ready)
	}
}

func TestParseIdentity(t *testing.T) {
	const uuid = GPUUUID("GPU-0d5c7e11-0000-4c00-b300-000000000001")
	for in, want := range map[string]struct {
		uuid   GPUUUID
		serial string
	}{
		string(uuid):            {uuid: uuid},
		" 1650522000042 ":       {serial: "1650522000042"},
		"":                      {},
		strings.Repeat("1", 29): {serial: strings.Repeat("1", 29)},
		strings.Repeat("1", 30): {},
	} {
		if uuid, serial := ParseIdentity(in); uuid != want.uuid || serial != want.serial {
			t.Errorf("ParseIdentity(%q) = %q, %q, want %q, %q", in, uuid, serial, want.uuid, want.serial)
		}
	}
}

func TestParseGPUUUID(t *testing.T) {
	const want = GPUUUID("GPU-1b7e8d9c-0000-4000-8000-00000000abcd")
	for _, in := range []string{string(want), "1B7E8D9C-0000-4000-8000-00000000ABCD", "gpu-1b7e8d9c-0000-4000-8000-00000000abcd "} {
		if got, err := ParseGPUUUID(in); err != nil || got != want {
			t.Errorf("ParseGPUUUID(%q) = %q, %v", in, got, err)
		}
	}
	if got, err := ParseGPUUUID(""); got != "" || err != nil {
		t.Errorf("empty identity = %q, %v", got, err)
	}
	if _, err := ParseGPUUUID("1234567890"); err == nil {
		t.Error("a serial number passed as a GPU UUID")
	}
}

func TestParseMachine(t *testing.T) {
	const want = Machine("9b1d3e20-1111-4a6b-8c00-00000000a001")
	for _, in := range []string{string(want), strings.ToUpper(string(want)) + " "} {
		if got, err := ParseMachine(in); err != nil || got != want {
			t.Errorf("ParseMachine(%q) = %q, %v", in, got, err)
		}
	}
	if _, err := ParseMachine("n1"); err == nil {
		t.Error("a name passed as a machine")
	}
}

func TestNodeLabelValue(t *testing.T) {
	long := strings.Repeat("n", 62) + ".example.com"
	a, b := NodeLabelValue(long), NodeLabelValue(long+"x")
	if len(a) > 63 || a == b {
		t.Errorf("short forms %q, %q", a, b)
	}
	if got := NodeLabelValue("n1"); got != "n1" {
		t.Errorf("NodeLabelValue(n1) = %q", got)
	}
}
