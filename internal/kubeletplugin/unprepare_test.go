// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// S05: everything is gone but the kubelet.
func TestUnprepareWithEverythingGone(t *testing.T) {
	for name, lose := range map[string]func(*world, *resourceapi.ResourceClaim){
		"claim": func(w *world, _ *resourceapi.ResourceClaim) { clear(w.claims) },
		"device": func(w *world, _ *resourceapi.ResourceClaim) {
			clear(w.gpus)
			clear(w.leases)
		},
		"API server":      func(w *world, _ *resourceapi.ResourceClaim) { w.apiDown = true },
		"API server mute": func(w *world, _ *resourceapi.ResourceClaim) { w.apiHangs = true },
		"CDI spec": func(w *world, c *resourceapi.ResourceClaim) {
			if err := os.Remove(filepath.Join(w.cdiDir, specName(c.UID))); err != nil {
				w.t.Fatal(err)
			}
		},
		"CDI directory": func(w *world, _ *resourceapi.ResourceClaim) {
			if err := os.RemoveAll(w.cdiDir); err != nil {
				w.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.known()
				c := w.claim("c", "a100-0-ready")
				w.attach("a100-0", 0, nil)
				mustPrepare(t, p, c)
				lose(w, c)
				began := time.Now()
				var calls sync.WaitGroup
				for range 4 {
					calls.Go(func() { unprepare(t, p, c) })
				}
				calls.Wait()
				if took := time.Since(began); took > time.Second {
					t.Errorf("took %v", took)
				}
				w.traceless(p, c)

				w.apiDown, w.apiHangs = false, false
				w.tidy(p)
				if got := w.lease("a100-0").PreparedFor; len(got) != 0 {
					t.Errorf("prepared-for = %v", got)
				}
			})
		})
	}
}

func TestUnprepareNeverPrepared(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	before := w.changes
	unprepare(t, p, w.claim("c", "a100-0"))
	if w.changes != before {
		t.Error("it changed something")
	}
}

func TestUnprepareInterruptsPrepare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		c := w.claim("c", "a100-0")
		first := make(chan error)
		go func() {
			_, err := prepare(t.Context(), t, p, c)
			first <- err
		}()
		time.Sleep(5 * time.Second)
		began := time.Now()
		unprepare(t, p, c)
		if took := time.Since(began); took != 0 {
			t.Errorf("Unprepare waited %v for Prepare", took)
		}
		if err := <-first; err == nil || !strings.Contains(err.Error(), errInterrupted.Error()) {
			t.Errorf("Prepare: %v", err)
		}
		w.traceless(p, c)
	})
}

// S03: the kubelet never unprepares a claim that was deleted by force.
func TestOrphan(t *testing.T) {
	for name, lose := range map[string]func(*world, *resourceapi.ResourceClaim){
		"deleted": func(w *world, _ *resourceapi.ResourceClaim) { clear(w.claims) },
		"replaced": func(w *world, c *resourceapi.ResourceClaim) {
			n := c.DeepCopy()
			n.UID = "uid-other"
			w.claims[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}] = n
		},
		"deallocated": func(w *world, c *resourceapi.ResourceClaim) {
			n := c.DeepCopy()
			n.Status.Allocation = nil
			w.claims[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}] = n
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.known()
				c, alive := w.claim("c", "a100-0-ready"), w.claim("alive", "a100-1")
				w.attach("a100-0", 0, nil)
				w.attach("a100-1", 1, alive)
				mustPrepare(t, p, c)
				keep := alive.DeepCopy()
				mustPrepare(t, p, alive)
				lose(w, c)
				w.claims[types.NamespacedName{Namespace: "team", Name: "alive"}] = keep
				w.holders[uuidOf(0)] = "python3 (PID 12)"

				stopped := make(chan struct{})
				ctx, cancel := contextWithCancel(t)
				go func() {
					defer close(stopped)
					p.tidyUntil(ctx)
				}()
				time.Sleep(10 * time.Minute)
				if owners, _ := p.PreparedBy("0", "a100-0"); len(owners) != 1 {
					t.Error("undone although a process holds the device")
				}
				w.mu.Lock()
				delete(w.holders, uuidOf(0))
				w.mu.Unlock()
				time.Sleep(2 * time.Minute)
				w.traceless(p, c)
				if got := w.lease("a100-0").PreparedFor; len(got) != 0 {
					t.Errorf("prepared-for = %v", got)
				}
				if diff := cmp.Diff([]types.UID{"uid-c"}, w.orphans); diff != "" {
					t.Errorf("reported (-want +got):\n%s", diff)
				}
				if owners, _ := p.PreparedBy("0", "a100-1"); len(owners) != 1 || w.spec(alive) == "" {
					t.Error("a living claim was undone")
				}
				cancel()
				<-stopped
			})
		})
	}
}

// A claim that was allocated anew is prepared while the background work still has in mind what it was before.
func TestOrphanPreparedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		c := w.claim("c", "a100-0")
		w.attach("a100-0", 0, c)
		p := w.known() // rebuilt from the lease
		r, err := p.checkpoint.read()
		if err != nil || r.Claims[c.UID] == nil {
			t.Fatal(r, err)
		}
		before := r.Claims[c.UID]
		again := w.claim("c", "a100-0")
		again.Status.Allocation.AllocationTimestamp = new(metav1.NewTime(again.Status.Allocation.AllocationTimestamp.Add(time.Minute)))
		w.attach("a100-0", 0, again)
		mustPrepare(t, p, again)
		if err := p.undoOrphan(t.Context(), c.UID, before, &orphan{}); err != nil {
			t.Fatal(err)
		}
		if owners, _ := p.PreparedBy("0", "a100-0"); len(owners) != 1 || w.spec(again) == "" || len(w.orphans) > 0 {
			t.Errorf("owners %v, spec %q, undone %v", owners, w.spec(again), w.orphans)
		}
	})
}

// The API server is away when the note should leave the lease: later is early enough.
func TestLeaseNoteRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		c := w.claim("c", "a100-0-ready")
		w.attach("a100-0", 0, nil)
		mustPrepare(t, p, c)
		ctx, cancel := contextWithCancel(t)
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			p.tidyUntil(ctx)
		}()
		w.mu.Lock()
		w.apiDown = true
		w.mu.Unlock()
		unprepare(t, p, c)
		time.Sleep(2 * time.Minute)
		w.mu.Lock()
		w.apiDown = false
		w.mu.Unlock()
		time.Sleep(time.Minute)
		if got := w.lease("a100-0").PreparedFor; len(got) != 0 {
			t.Errorf("prepared-for = %v", got)
		}
		cancel()
		<-stopped
	})
}

func TestStraysRemoved(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	c := w.claim("c", "a100-0")
	w.attach("a100-0", 0, c)
	mustPrepare(t, p, c)
	meta := filepath.Join(w.dataDir, metadataDir)
	for _, dir := range []string{"team_c", "team_gone"} {
		if err := os.MkdirAll(filepath.Join(meta, dir, "gpu0"), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	for dir, names := range map[string][]string{
		w.cdiDir: {
			specName("uid-gone"), "." + specName("uid-gone") + ".1.tmp", metadataPrefix + "uid-gone_gpu0.json",
			metadataPrefix + "uid-c_gpu0.json", "nvidia.yaml", "spec.1.tmp",
		},
		w.dataDir: {"." + checkpointFile + ".1.tmp"},
	} {
		for _, name := range names {
			if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.tidy(w.plugin())
	want := []string{checkpointFile, metadataDir, specName("uid-c"), metadataPrefix + "uid-c_gpu0.json", "nvidia.yaml", "spec.1.tmp"}
	if diff := cmp.Diff(want, w.files()); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if left, err := os.ReadDir(meta); err != nil || len(left) != 1 || left[0].Name() != "team_c" {
		t.Errorf("metadata directories: %v, %v", left, err)
	}
	if owners, known := p.PreparedBy("0", "a100-0"); !known || len(owners) != 1 {
		t.Errorf("PreparedBy = %v, %v", owners, known)
	}
}
