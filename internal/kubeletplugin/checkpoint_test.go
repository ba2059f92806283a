// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func contextWithCancel(t *testing.T) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithCancel(t.Context())
}

func sampleRecord() *record {
	r := newRecord()
	r.Claims["uid-a"] = &entry{
		Namespace: "team", Name: "a", State: prepareCompleted, AllocatedAt: "2026-01-02T03:04:05Z",
		Devices: []preparedDevice{{Request: "r/<sub>&", Pool: "fabric-0", Entry: "a100-0", Fabric: "0", Unit: "a100-0", UUID: uuidOf(1)}},
	}
	return r
}

// S02: files of the release before and after, and damage.
func TestDecodeCheckpoint(t *testing.T) {
	good, err := encodeCheckpoint("boot-1", sampleRecord())
	if err != nil {
		t.Fatal(err)
	}
	// What another release would write: fields that this one does not know, in its own form.
	payload := []byte(`{ "future": {"x": 1}, "claims": {"uid-a": {"state": "PrepareStarted", "when": 3, "devices": [{"fabric": "0", "unit": "u", "pool": "", "entry": "", "lane": 2}]}} }`)
	foreign := func(version int) []byte {
		data, err := json.Marshal(map[string]any{"version": version, "bootID": "b", "mood": "good", "checksum": checksum(payload)})
		if err != nil {
			t.Fatal(err)
		}
		return append(append(bytes.TrimSuffix(data, []byte("}")), []byte(`,"payload":`)...), append(payload, '}')...)
	}
	for _, tc := range []struct {
		name string
		data []byte
		want string
	}{
		{"own", good, ""},
		{"unknown fields", foreign(1), ""},
		{"next release", foreign(2), ""},
		{"release after next", foreign(3), "version 3"},
		{"version 0", foreign(0), "version 0"},
		{"empty", nil, "unexpected end"},
		{"zeros", make([]byte, 64), "invalid character"},
		{"truncated", good[:len(good)/2], "unexpected end"},
		{"one digit changed", bytes.Replace(good, []byte("a100-0"), []byte("a100-1"), 1), "checksum"},
		{"no payload", []byte(`{"version":1}`), "checksum"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, r, err := decodeCheckpoint(tc.data)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %v, want %q", err, tc.want)
			}
			if err == nil && len(r.Claims) != 1 {
				t.Errorf("claims: %v", r.Claims)
			}
		})
	}
}

func FuzzDecodeCheckpoint(f *testing.F) {
	good, err := encodeCheckpoint("boot-1", sampleRecord())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good, false)
	f.Add([]byte(`{"claims":{"u":{"state":"PrepareStarted","devices":[{"fabric":"0","unit":"u"}]}}}`), true)
	f.Add([]byte(`{"claims":{"u":null}}`), true)
	f.Fuzz(func(t *testing.T, data []byte, wrap bool) {
		if wrap {
			// Get past the checksum, or nothing behind it is ever reached.
			data, err = json.Marshal(envelope{Version: 1, BootID: "b", Checksum: checksum(data), Payload: data})
			if err != nil {
				return
			}
		}
		boot, r, err := decodeCheckpoint(data)
		if err != nil {
			return
		}
		again, err := encodeCheckpoint(boot, r)
		if err != nil {
			t.Fatal(err)
		}
		if _, r2, err := decodeCheckpoint(again); err != nil || !cmp.Equal(r, r2) {
			t.Errorf("reads back as %v, %v\nwant %v", r2, err, r)
		}
	})
}

func TestDamagedCheckpointRebuilt(t *testing.T) {
	for name, damage := range map[string]func(string) error{
		"truncated": func(path string) error { return os.Truncate(path, 30) },
		"empty":     func(path string) error { return os.Truncate(path, 0) },
		"zeros":     func(path string) error { return os.WriteFile(path, make([]byte, 100), 0o600) },
		"lost":      os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.known()
				a, b, fled := w.claim("a", "a100-0"), w.claim("b", "a100-1-ready"), w.claim("fled", "a100-2-ready")
				w.attach("a100-0", 0, a)
				w.attach("a100-1", 1, nil)
				w.attach("a100-2", 2, nil)
				for _, c := range []*resourceapi.ResourceClaim{a, b, fled} {
					mustPrepare(t, p, c)
				}
				specA := w.spec(a)
				if err := damage(p.checkpoint.path()); err != nil {
					t.Fatal(err)
				}
				w.apiDown = true
				p = w.plugin()
				if owners, known := p.PreparedBy("0", "a100-0"); known {
					t.Errorf("PreparedBy = %v although the checkpoint is lost", owners)
				}
				// The kubelet goes on meanwhile; and the agent may be restarted meanwhile.
				unprepare(t, p, fled)
				p = w.plugin()
				if _, known := p.PreparedBy("0", "a100-0"); known {
					t.Error("a restart made it known")
				}
				if _, err := p.tidy(t.Context(), map[types.UID]*orphan{}); err == nil {
					t.Error("rebuilt without the API server")
				}
				if w.spec(a) == "" {
					t.Error("specs were removed while it is unknown whose they are")
				}
				w.apiDown = false
				w.tidy(p)
				for unit, want := range map[device.Unit][]types.UID{"a100-0": {"uid-a"}, "a100-1": {"uid-b"}, "a100-2": nil} {
					if owners, known := p.PreparedBy("0", unit); !known || !cmp.Equal(owners, want) {
						t.Errorf("PreparedBy(%s) = %v, %v; want %v", unit, owners, known, want)
					}
				}
				mustPrepare(t, p, a)
				if w.spec(a) != specA {
					t.Errorf("spec before:\n%s\nafter:\n%s", specA, w.spec(a))
				}
				unprepare(t, p, a)
				unprepare(t, p, b)
				w.tidy(p)
				want := []string(nil)
				files := []string{checkpointFile}
				if name != "lost" {
					want = []string{"checkpoint.json.damaged-1"}
					files = append(files, want...)
				}
				if diff := cmp.Diff(want, w.damaged); diff != "" {
					t.Errorf("warnings (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(files, w.files()); diff != "" {
					t.Errorf("files (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// The claim was deleted by force and its attempt has left the lease, while nobody was there to unprepare it: only the
// CDI spec tells that its containers may still run.
func TestRebuiltFromSpecs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		c, two := w.claim("c", "a100-0"), w.claim("two", "a100-1-ready", "a100-2-ready")
		w.attach("a100-0", 0, c)
		w.attach("a100-1", 1, nil)
		w.attach("a100-2", 2, nil)
		mustPrepare(t, p, c)
		mustPrepare(t, p, two)
		if err := os.Truncate(p.checkpoint.path(), 30); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(w.cdiDir, specName("uid-x")), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		clear(w.claims)
		for i, unit := range []device.Unit{"a100-0", "a100-1", "a100-2"} {
			w.attach(unit, i, nil)
		}
		p = w.plugin()
		orphans := map[types.UID]*orphan{}
		if _, err := p.tidy(t.Context(), orphans); err != nil {
			t.Fatal(err)
		}
		for unit, want := range map[device.Unit][]types.UID{"a100-0": {"uid-c"}, "a100-1": {"uid-two"}, "a100-2": {"uid-two"}} {
			if owners, known := p.PreparedBy("0", unit); !known || !cmp.Equal(owners, want) {
				t.Errorf("PreparedBy(%s) = %v, %v; want %v", unit, owners, known, want)
			}
		}
		time.Sleep(orphanGrace)
		if _, err := p.tidy(t.Context(), orphans); err != nil {
			t.Fatal(err)
		}
		w.traceless(p, c)
		w.traceless(p, two)
	})
}

// Damaged while the agent runs, and found by whoever comes first.
func TestDamageIsRepairedAtOnce(t *testing.T) {
	for name, find := range map[string]func(*testing.T, *Plugin, *resourceapi.ResourceClaim){
		"unprepare": unprepare,
		"prepare":   func(t *testing.T, p *Plugin, c *resourceapi.ResourceClaim) { t.Helper(); mustPrepare(t, p, c) },
		"node loop": func(_ *testing.T, p *Plugin, _ *resourceapi.ResourceClaim) { p.PreparedBy("0", "a100-0") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.known()
				c := w.claim("c", "a100-0")
				w.attach("a100-0", 0, c)
				mustPrepare(t, p, c)
				ctx, cancel := contextWithCancel(t)
				stopped := make(chan struct{})
				go func() {
					defer close(stopped)
					p.tidyUntil(ctx)
				}()
				synctest.Wait()
				if err := os.Truncate(p.checkpoint.path(), 30); err != nil {
					t.Fatal(err)
				}
				find(t, p, c)
				time.Sleep(time.Second)
				if owners, known := p.PreparedBy("0", "a100-0"); !known || (len(owners) == 0) != (name == "unprepare") {
					t.Errorf("PreparedBy = %v, %v", owners, known)
				}
				cancel()
				<-stopped
			})
		})
	}
}

// A rebuilt entry may be of a running container: a failing Prepare of the same claim must not drop it.
func TestRebuiltEntrySurvivesFailedPrepare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		c := w.claim("c", "a100-0")
		w.attach("a100-0", 0, c)
		p := w.known()
		delete(w.gpus, uuidOf(0))
		if _, err := prepare(t.Context(), t, p, c); err == nil {
			t.Fatal("prepared without its GPU")
		}
		if owners, known := p.PreparedBy("0", "a100-0"); !known || len(owners) != 1 {
			t.Errorf("PreparedBy = %v, %v", owners, known)
		}
	})
}

// The same damage is kept and told once, also when what found it fails, and by whichever agent.
func TestDamageIsToldOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		old, young := w.known(), w.known()
		c := w.claim("c", "a100-0")
		w.attach("a100-0", 0, c)
		if err := os.WriteFile(old.checkpoint.path(), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, p := range []*Plugin{old, young} {
			if _, err := prepare(t.Context(), t, p, c); err == nil {
				t.Error("prepared though it is not known what is prepared")
			}
		}
		if diff := cmp.Diff([]string{"checkpoint.json.damaged-1"}, w.damaged); diff != "" {
			t.Errorf("told (-want +got):\n%s", diff)
		}
	})
}

// Two agents of a rolling update change the file at once, and neither undoes what the other wrote.
func TestCheckpointOfTwoProcesses(t *testing.T) {
	const each = 60
	claims := func(who string) (all []types.UID) {
		for i := range each {
			all = append(all, types.UID(fmt.Sprintf("uid-%s-%d", who, i)))
		}
		return all
	}
	change := func(dir string, uids []types.UID) error {
		c := newCheckpoint(dir, "boot-1", clock.RealClock{}, nobody{}, func() {})
		for _, uid := range uids {
			if err := c.update(context.Background(), func(r *record) (bool, error) {
				r.Rebuild = false
				r.Claims[uid] = &entry{State: prepareCompleted, Devices: []preparedDevice{{Fabric: "0", Unit: "a100-0", Pool: "fabric-0", Entry: "a100-0"}}}
				return true, nil
			}); err != nil {
				return err
			}
		}
		return nil
	}
	if *otherAgent != "" { // the other process
		if err := change(*otherAgent, claims("theirs")); err != nil {
			t.Fatal(err)
		}
		return
	}
	dir := t.TempDir()
	other := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestCheckpointOfTwoProcesses$", "-other-agent="+dir)
	var said bytes.Buffer
	other.Stdout, other.Stderr = &said, &said
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	mine := change(dir, claims("mine"))
	if err := errors.Join(mine, other.Wait()); err != nil {
		t.Fatalf("%v\n%s", err, said.String())
	}
	r, err := newCheckpoint(dir, "boot-1", clock.RealClock{}, nobody{}, func() {}).read()
	if err != nil {
		t.Fatal(err)
	}
	for _, uid := range slices.Concat(claims("mine"), claims("theirs")) {
		if r.Claims[uid] == nil {
			t.Errorf("%s was lost", uid)
		}
	}
}

// otherAgent is where the second process of TestCheckpointOfTwoProcesses works.
var otherAgent = flag.String("other-agent", "", "the data directory of two agents; set by the test itself")

// nobody hears nothing.
type nobody struct{}

func (nobody) Prepared(Outcome, time.Duration)                       {}
func (nobody) Unprepared(Outcome, time.Duration)                     {}
func (nobody) CheckpointDamaged(string, error)                       {}
func (nobody) OrphanUndone(string, string, types.UID, []device.Unit) {}
func (nobody) PreparedChanged()                                      {}

func TestDamagedFilesAreBounded(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	for range mostDamaged + 3 {
		if err := os.WriteFile(p.checkpoint.path(), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.tidy(p)
	}
	kept, err := filepath.Glob(p.checkpoint.path() + ".damaged-*")
	if err != nil || len(kept) != mostDamaged {
		t.Errorf("kept %v, %v", kept, err)
	}
}

func TestCheckpointLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.known()
		mine := newCheckpoint(w.dataDir, "boot-1", clock.RealClock{}, (*worldObserver)(w), func() {})
		theirs := newCheckpoint(w.dataDir, "boot-1", clock.RealClock{}, (*worldObserver)(w), func() {})
		unlock, err := theirs.lock(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err = mine.update(t.Context(), func(*record) (bool, error) { return false, nil }); err == nil {
			t.Fatal("two hold the lock")
		}
		time.AfterFunc(time.Second, unlock)
		if err = mine.update(t.Context(), func(*record) (bool, error) { return false, nil }); err != nil {
			t.Error(err)
		}
	})
}
