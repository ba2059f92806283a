// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/cohdi/cohdi-agent/internal/device"
)

func TestPrepareAttachedUnit(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	c := w.claim("c", "a100-0", "a100-1")
	w.attach("a100-0", 0, c)
	w.attach("a100-1", 3, c)

	got := mustPrepare(t, p, c)
	want := []kubeletplugin.Device{
		{Requests: []string{"gpu0"}, PoolName: "fabric-0", DeviceName: "a100-0", CDIDeviceIDs: []string{"gpu.cohdi.io/gpu=uid-c_gpu0_a100-0"}},
		{Requests: []string{"gpu1"}, PoolName: "fabric-0", DeviceName: "a100-1", CDIDeviceIDs: []string{"gpu.cohdi.io/gpu=uid-c_gpu1_a100-1"}},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(kubeletplugin.Device{}, "Metadata")); diff != "" {
		t.Errorf("answer (-want +got):\n%s", diff)
	}
	if got := *got[1].Metadata.Attributes["resource.kubernetes.io/pciBusID"].StringValue; got != "0000:04:00.0" {
		t.Errorf("metadata says PCI address %s", got)
	}

	// As a runtime finds it.
	cache, err := cdi.NewCache(cdi.WithSpecDirs(w.cdiDir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for id, node := range map[string]string{"gpu.cohdi.io/gpu=uid-c_gpu0_a100-0": "/dev/nvidia0", "gpu.cohdi.io/gpu=uid-c_gpu1_a100-1": "/dev/nvidia3"} {
		d := cache.GetDevice(id)
		if d == nil || len(d.ContainerEdits.DeviceNodes) != 1 || d.ContainerEdits.DeviceNodes[0].Path != node {
			t.Errorf("CDI device %s = %+v, want %s alone", id, d, node)
		}
	}
	if owners, known := p.PreparedBy("0", "a100-1"); !known || !cmp.Equal(owners, []types.UID{"uid-c"}) {
		t.Errorf("PreparedBy = %v, %v", owners, known)
	}
	if got := w.lease("a100-0").PreparedFor; len(got) != 0 {
		t.Errorf("a fabric offer's lease is prepared for %v", got)
	}

	unprepare(t, p, c)
	w.traceless(p, c)
	if owners, known := p.PreparedBy("0", "a100-1"); !known || len(owners) != 0 {
		t.Errorf("PreparedBy after unprepare = %v, %v", owners, known)
	}
}

func TestPrepareReadyOffer(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	c := w.claim("c", "a100-0-ready")
	w.attach("a100-0", 0, nil)
	mustPrepare(t, p, c)
	if got := w.lease("a100-0").PreparedFor; !cmp.Equal(got, []string{"uid-c"}) {
		t.Errorf("prepared-for = %v", got)
	}
	// The holder takes the unit out of idleness; the kubelet asks again.
	w.change(func(l *device.Lease) { l.IdleSince = time.Time{} })
	mustPrepare(t, p, c)

	unprepare(t, p, c)
	w.tidy(p)
	if got := w.lease("a100-0").PreparedFor; len(got) != 0 {
		t.Errorf("prepared-for after unprepare = %v", got)
	}
}

// A release that the leader stored first wins over a ready offer, and so does a release of any kind that
// was stored between the look and the reservation.
func TestPrepareLosesToRelease(t *testing.T) {
	for name, entry := range map[string]string{"ready offer": "a100-0-ready", "fabric offer": "a100-0"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.known()
				c := w.claim("c", entry)
				w.attach("a100-0", 0, nil)
				if entry == "a100-0" {
					w.attach("a100-0", 0, c)
				}
				devices, err := demanded(c, w.node)
				if err != nil {
					t.Fatal(err)
				}
				leases, _, err := p.resolve(t.Context(), c, devices)
				if err != nil {
					t.Fatal(err)
				}
				if _, _, err = p.reserve(t.Context(), c, devices); err != nil {
					t.Fatal(err)
				}
				w.change(func(l *device.Lease) { l.Phase = device.Releasing })
				if err = p.confirm(t.Context(), c, devices, leases, true); err == nil {
					t.Error("a unit that is being released was taken")
				}
				if err = p.undo(t.Context(), c.UID); err != nil {
					t.Fatal(err)
				}
				w.traceless(p, c)
			})
		})
	}
}

func TestPrepareWaits(t *testing.T) {
	other := device.Attempt{Namespace: "team", Name: "b", UID: "uid-b", AllocatedAt: "2026-01-02T03:04:05Z", Node: "n1", Pool: "fabric-0", Entry: "a100-0"}
	for _, tc := range []struct {
		name   string
		entry  string
		lease  func(*device.Lease)
		reason string
	}{
		{"no lease", "a100-0", nil, "waiting for unit a100-0 to be assigned: it has no device lease"},
		{"other node", "a100-0", func(l *device.Lease) { l.Node = "n2" }, "node n2 holds it"},
		{"attaching", "a100-0", func(l *device.Lease) { l.Phase = device.Attaching }, "it is in phase Attaching"},
		{"failed", "a100-0", func(l *device.Lease) {
			l.Phase, l.Failure = device.Failed, device.Failure{Reason: "NoDriver", Message: "no driver took it"}
		}, "it failed with NoDriver: no driver took it"},
		{"unknown phase", "a100-0", func(l *device.Lease) { l.Phase = "Resizing" }, "it is in phase Resizing"},
		{"no UUID", "a100-0", func(l *device.Lease) { l.UUID = "" }, "the GPU of unit a100-0 to be identified"},
		{"other claim", "a100-0", func(l *device.Lease) { l.Attempt = other }, "it serves claim team/b allocated at"},
		{"other allocation", "a100-0", func(l *device.Lease) { l.Attempt.AllocatedAt = "2026-01-01T00:00:00Z" }, "it serves claim team/c allocated at 2026-01-01"},
		{"no attempt", "a100-0", func(l *device.Lease) { l.Attempt = device.Attempt{} }, "it serves no claim"},
		{"unknown GPU", "a100-0", func(l *device.Lease) { l.UUID = uuidOf(7) }, "to be seen by the driver"},
		{"ready, other claim", "a100-0-ready", func(l *device.Lease) { l.Attempt = other }, "it serves claim team/b"},
		{"ready, prepared", "a100-0-ready", func(l *device.Lease) {
			l.Attempt, l.PreparedFor, l.IdleSince = device.Attempt{}, []string{"uid-b"}, time.Unix(1, 0)
		}, "to be unprepared for claim of UID uid-b"},
		{"ready, not idle", "a100-0-ready", func(l *device.Lease) { l.Attempt = device.Attempt{} }, "to be idle"},
		{"ready, to be released", "a100-0-ready", func(l *device.Lease) {
			l.Attempt, l.IdleSince, l.Deleting = device.Attempt{}, time.Unix(1, 0), true
		}, "to be idle"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.known()
				c := w.claim("c", tc.entry)
				if tc.lease != nil {
					w.attach("a100-0", 0, c)
					w.change(tc.lease)
				}
				before := w.files()
				began := time.Now()
				_, err := prepare(t.Context(), t, p, c)
				if err == nil || !strings.Contains(err.Error(), tc.reason) || !strings.Contains(err.Error(), "after 40s") {
					t.Errorf("error %v\nwant it to say %q", err, tc.reason)
				}
				if waited := time.Since(began); waited != patience {
					t.Errorf("waited %v", waited)
				}
				w.traceless(p, c)
				if diff := cmp.Diff(before, w.files()); diff != "" {
					t.Errorf("files (-before +after):\n%s", diff)
				}

				// It comes at last: no look later than the change itself.
				time.AfterFunc(10500*time.Millisecond, func() { w.attach("a100-0", 0, c) })
				began = time.Now()
				mustPrepare(t, p, c)
				if waited := time.Since(began); waited != 10500*time.Millisecond {
					t.Errorf("answered %v after the call", waited)
				}
				if diff := cmp.Diff([]Outcome{TimedOut, Done}, w.prepared); diff != "" {
					t.Errorf("outcomes (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestPrepareAnswersBeforeTheKubeletGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		c := w.claim("c", "a100-0")
		// The helper has spent 10 of 45 s on reading claims.
		ctx, cancel := context.WithTimeout(t.Context(), 35*time.Second)
		defer cancel()
		if _, err := prepare(ctx, t, p, c); err == nil || ctx.Err() != nil {
			t.Errorf("error %v, the call's context says %v", err, ctx.Err())
		}
	})
}

// S06: the call outlives the kubelet's patience, its retry comes beside it, then identical calls.
func TestPrepareRetriedAndRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		c := w.claim("c", "a100-0", "a100-1-ready")
		w.attach("a100-1", 1, nil)
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan error)
		go func() {
			_, err := prepare(ctx, t, p, c)
			first <- err
		}()
		time.Sleep(20 * time.Second)
		cancel()
		if err := <-first; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "no device lease") {
			t.Errorf("cancelled call: %v", err)
		}
		w.traceless(p, c)

		w.attach("a100-0", 0, c)
		answer := mustPrepare(t, p, c)
		files, changes, spec := w.files(), w.changes, w.spec(c)
		for range 200 {
			if diff := cmp.Diff(answer, mustPrepare(t, p, c)); diff != "" {
				t.Fatalf("answer (-first +repeat):\n%s", diff)
			}
		}
		if diff := cmp.Diff(files, w.files()); diff != "" || w.spec(c) != spec || w.changes != changes {
			t.Errorf("repeats changed something: files %s, %d changes", diff, w.changes-changes)
		}
		if got := w.lease("a100-1").PreparedFor; !cmp.Equal(got, []string{"uid-c"}) {
			t.Errorf("prepared-for = %v", got)
		}
	})
}

// S04: two claims, one device.
func TestPrepareRefusesSecondClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		a, b := w.claim("a", "a100-0"), w.claim("b", "a100-0")
		w.attach("a100-0", 0, a)
		mustPrepare(t, p, a)
		// The claim is gone, the unit is b's; a's container still runs.
		w.change(func(l *device.Lease) { l.Attempt = attemptOf(b, "a100-0") })
		_, err := prepare(t.Context(), t, p, b)
		if err == nil || !strings.Contains(err.Error(), "waiting for unit a100-0 to be unprepared for claim team/a (UID uid-a)") {
			t.Errorf("second claim: %v", err)
		}
		w.traceless(p, b)
		if w.spec(a) == "" {
			t.Error("the first claim lost its spec")
		}

		time.AfterFunc(2*time.Second, func() { unprepare(t, p, a) })
		began := time.Now()
		mustPrepare(t, p, b)
		if waited := time.Since(began); waited != 2*time.Second {
			t.Errorf("answered after %v", waited)
		}
	})
}

// The unit was renamed under a prepared claim: the GPU still counts.
func TestPrepareRefusesSameGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		a, b := w.claim("a", "a100-0"), w.claim("b", "a100-1")
		w.attach("a100-0", 0, a)
		mustPrepare(t, p, a)
		w.attach("a100-1", 0, b)
		if _, err := prepare(t.Context(), t, p, b); err == nil || !strings.Contains(err.Error(), "uid-a") {
			t.Errorf("second claim: %v", err)
		}
	})
}

func TestPrepareAdminAccess(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	a, watcher := w.claim("a", "a100-0"), w.claim("watcher", "a100-0-ready")
	watcher.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	w.attach("a100-0", 0, a)
	mustPrepare(t, p, watcher)
	mustPrepare(t, p, a)
	if got := w.lease("a100-0").PreparedFor; len(got) != 0 {
		t.Errorf("admin access is noted in the lease: %v", got)
	}
	if owners, _ := p.PreparedBy("0", "a100-0"); !cmp.Equal(owners, []types.UID{"uid-a", "uid-watcher"}) {
		t.Errorf("PreparedBy = %v", owners)
	}
}

// S04: what fails leaves no trace, and the retry works.
func TestPrepareFailsWithoutTrace(t *testing.T) {
	for name, fault := range map[string]func(*world) (repair func()){
		"CDI directory not writable": func(w *world) func() {
			// A file in its place: root may write to any directory.
			if err := os.WriteFile(w.cdiDir, nil, 0o600); err != nil {
				w.t.Fatal(err)
			}
			return func() {
				if err := os.Remove(w.cdiDir); err != nil {
					w.t.Fatal(err)
				}
			}
		},
		"driver being reloaded": func(w *world) func() {
			w.specsErr = errors.New("libcuda.so is gone")
			return func() { w.specsErr = nil }
		},
		"another GPU's node": func(w *world) func() {
			w.nodeOff = 1
			return func() { w.nodeOff = 0 }
		},
		"lease write refused": func(w *world) func() {
			w.refuseWrites = true
			return func() { w.refuseWrites = false }
		},
		"API server down": func(w *world) func() {
			w.apiDown = true
			return func() { w.apiDown = false }
		},
		"API server hangs": func(w *world) func() {
			w.apiHangs = true
			return func() { w.apiHangs = false }
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.known()
				c := w.claim("c", "a100-0-ready")
				w.attach("a100-0", 0, nil)
				repair := fault(w)
				if _, err := prepare(t.Context(), t, p, c); err == nil {
					t.Fatal("it worked")
				}
				repair()
				w.traceless(p, c)
				w.tidy(p)
				if got := w.lease("a100-0").PreparedFor; len(got) != 0 {
					t.Errorf("prepared-for = %v", got)
				}
				mustPrepare(t, p, c)
			})
		})
	}
}

func TestPrepareBadClaims(t *testing.T) {
	for name, change := range map[string]func(*resourceapi.ResourceClaim){
		"not ours":       func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Driver = "x" },
		"another pool":   func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Pool = "n1" },
		"not allocated":  func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil },
		"UID as a path":  func(c *resourceapi.ResourceClaim) { c.UID = "../x" },
		"UID with a dot": func(c *resourceapi.ResourceClaim) { c.UID = "a.json" },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := w.known()
			c := w.claim("c", "a100-0")
			change(c)
			if _, err := prepare(t.Context(), t, p, c); err == nil {
				t.Error("it was prepared")
			}
			unprepare(t, p, c)
			if diff := cmp.Diff([]Outcome{Refused}, w.prepared); diff != "" {
				t.Errorf("outcome (-want +got):\n%s", diff)
			}
		})
	}
}

// The same claim allocated anew, while its former Pod is not yet unprepared.
func TestPrepareNewAllocationOfSameClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		c := w.claim("c", "a100-0")
		w.attach("a100-0", 0, c)
		mustPrepare(t, p, c)
		again := c.DeepCopy()
		again.Status.Allocation.AllocationTimestamp = new(metav1.NewTime(time.Date(2026, 1, 2, 4, 0, 0, 0, time.UTC)))
		w.attach("a100-0", 0, again)
		if _, err := prepare(t.Context(), t, p, again); err == nil || !strings.Contains(err.Error(), "its allocation at 2026-01-02T03:04:05Z") {
			t.Errorf("prepare of the new allocation: %v", err)
		}
		if w.spec(c) == "" {
			t.Error("the former allocation lost its spec")
		}
		unprepare(t, p, c)
		mustPrepare(t, p, again)
	})
}

// S19: minors move, claims do not.
func TestPrepareFollowsTheGPU(t *testing.T) {
	w := newWorld(t)
	p := w.known()
	a, b, c := w.claim("a", "a100-0"), w.claim("b", "a100-1"), w.claim("c", "a100-2")
	w.attach("a100-0", 0, a)
	w.attach("a100-1", 1, b)
	mustPrepare(t, p, a)
	answer, spec := mustPrepare(t, p, b), w.spec(b)

	unprepare(t, p, a)
	w.mu.Lock()
	delete(w.leases, device.LeaseName("0", "a100-0"))
	delete(w.gpus, uuidOf(0))
	w.mu.Unlock()
	w.attach("a100-2", 2, c)
	w.mu.Lock()
	g := w.gpus[uuidOf(2)]
	g.Minor = 0
	w.gpus[uuidOf(2)] = g
	w.mu.Unlock()

	p = w.known() // restarted
	if diff := cmp.Diff(answer, mustPrepare(t, p, b)); diff != "" || w.spec(b) != spec {
		t.Errorf("b's answer (-before +after):\n%s\nspec before:\n%s\nafter:\n%s", diff, spec, w.spec(b))
	}
	mustPrepare(t, p, c)
	if got := w.spec(c); !strings.Contains(got, "/dev/nvidia0") || strings.Contains(got, "uid-a") {
		t.Errorf("c's spec:\n%s", got)
	}
	if w.spec(a) != "" {
		t.Error("a's spec is still there")
	}
}

// S01: the checkpoint survives a reboot; what it says about the former boot does not.
func TestPrepareAfterReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		c := w.claim("c", "a100-0")
		w.attach("a100-0", 1, c)
		mustPrepare(t, p, c)

		w.bootID = "boot-2"
		gpu := w.gpus[uuidOf(1)]
		delete(w.gpus, uuidOf(1))
		p = w.known()
		if owners, known := p.PreparedBy("0", "a100-0"); !known || len(owners) != 1 {
			t.Errorf("PreparedBy after the reboot = %v, %v", owners, known)
		}
		if _, err := prepare(t.Context(), t, p, c); err == nil || !strings.Contains(err.Error(), string(uuidOf(1))) {
			t.Errorf("prepare without the GPU: %v", err)
		}
		w.traceless(p, c)

		gpu.Minor, gpu.PCI = 0, device.PCIAddress{Bus: 0x81}
		w.gpus[gpu.UUID] = gpu
		got := mustPrepare(t, p, c)
		if spec := w.spec(c); !strings.Contains(spec, "/dev/nvidia0") || strings.Contains(spec, "/dev/nvidia1") {
			t.Errorf("spec after the reboot:\n%s", spec)
		}
		if pci := *got[0].Metadata.Attributes["resource.kubernetes.io/pciBusID"].StringValue; pci != "0000:81:00.0" {
			t.Errorf("metadata after the reboot says %s", pci)
		}
	})
}

// Killed between any two steps: the next agent goes on, and an Unprepare cleans up.
func TestPrepareResumesAfterCrash(t *testing.T) {
	crash := func(w *world, p *Plugin, c *resourceapi.ResourceClaim, steps int) {
		devices, err := demanded(c, w.node)
		if err != nil {
			w.t.Fatal(err)
		}
		leases, gpus, err := p.resolve(w.t.Context(), c, devices)
		if err != nil {
			w.t.Fatal(err)
		}
		devices[0].UUID = gpus[0].UUID
		var fresh bool
		for _, step := range []func() error{
			func() (err error) { fresh, _, err = p.reserve(w.t.Context(), c, devices); return err },
			func() error { return p.confirm(w.t.Context(), c, devices, leases, fresh) },
			func() error {
				common, own, err := p.s.Specs.Edits(w.t.Context(), gpus)
				return errors.Join(err, p.specs.write(c.UID, devices, common, own))
			},
			func() error { return p.complete(w.t.Context(), c.UID) },
		}[:steps] {
			if err := step(); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	for steps := range 5 {
		for _, again := range []bool{true, false} {
			w := newWorld(t)
			c := w.claim("c", "a100-0-ready")
			w.attach("a100-0", 0, nil)
			crash(w, w.known(), c, steps)
			p := w.known()
			if owners, known := p.PreparedBy("0", "a100-0"); !known || (len(owners) == 1) != (steps > 0) {
				t.Errorf("after %d steps PreparedBy = %v, %v", steps, owners, known)
			}
			if again {
				mustPrepare(t, p, c)
				if got := w.lease("a100-0").PreparedFor; !cmp.Equal(got, []string{"uid-c"}) || w.spec(c) == "" {
					t.Errorf("after %d steps: prepared-for %v, spec %q", steps, got, w.spec(c))
				}
			}
			unprepare(t, p, c)
			w.tidy(p)
			w.traceless(p, c)
			if got := w.lease("a100-0").PreparedFor; len(got) != 0 {
				t.Errorf("after %d steps and unprepare: prepared-for %v", steps, got)
			}
			if diff := cmp.Diff([]string{checkpointFile}, w.files()); diff != "" {
				t.Errorf("after %d steps, files (-want +got):\n%s", steps, diff)
			}
		}
	}
}

func TestPrepareSeesTheOtherAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		old, young := w.known(), w.known()
		a, b := w.claim("a", "a100-0"), w.claim("b", "a100-0")
		w.attach("a100-0", 0, a)
		mustPrepare(t, old, a)
		w.change(func(l *device.Lease) { l.Attempt = attemptOf(b, "a100-0") })
		if _, err := prepare(t.Context(), t, young, b); err == nil || !strings.Contains(err.Error(), "uid-a") {
			t.Errorf("prepared by two agents for two claims: %v", err)
		}
		unprepare(t, young, a)
		mustPrepare(t, old, b)
	})
}

func TestSpecFilesOfClaims(t *testing.T) {
	for file, want := range map[string]types.UID{
		"gpu.cohdi.io-gpu_uid-1.json":           "uid-1",
		".gpu.cohdi.io-gpu_uid-1.json.123.tmp":  "uid-1",
		"gpu.cohdi.io_metadata_uid-1_gpu0.json": "uid-1",
		"gpu.cohdi.io-gpu_uid-1.yaml":           "",
		"nvidia.com-gpu_uid-1.json":             "",
		"spec.123.tmp":                          "",
		"gpu.cohdi.io_metadata_uid-1.json":      "",
	} {
		if got, ours := claimOfSpec(file); ours != (want != "") || ours && got != want {
			t.Errorf("claimOfSpec(%s) = %q, %v; want %q", filepath.Base(file), got, ours, want)
		}
	}
}
