// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/clock"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// world is the edge of the plugin: API server, driver, clock. Everything between is real.
type world struct {
	mu      sync.Mutex
	t       *testing.T
	node    string
	leases  map[string]device.Lease
	version int
	// apiDown fails every call to the API server; apiHangs blocks it until its context ends.
	apiDown, apiHangs bool
	// refuseWrites fails lease writes, as a conflict does.
	refuseWrites bool
	leaseChange  *broadcast
	gpuChange    *broadcast
	gpus         map[device.GPUUUID]GPU
	holders      map[device.GPUUUID]string
	claims       map[types.NamespacedName]*resourceapi.ResourceClaim
	specsErr     error
	health       *someHealth
	// nodeOff makes the spec maker see the GPUs with other minors.
	nodeOff int

	prepared, unprepared []Outcome
	damaged              []string
	orphans              []types.UID
	changes              int

	dataDir, cdiDir, bootID string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := t.TempDir()
	return &world{
		t: t, node: "n1", leases: map[string]device.Lease{}, leaseChange: newBroadcast(), gpuChange: newBroadcast(),
		gpus: map[device.GPUUUID]GPU{}, holders: map[device.GPUUUID]string{},
		claims:  map[types.NamespacedName]*resourceapi.ResourceClaim{},
		dataDir: filepath.Join(dir, "plugin"), cdiDir: filepath.Join(dir, "cdi"), bootID: "boot-1",
	}
}

// plugin starts an agent: a new process that finds only what is on disk.
func (w *world) plugin() *Plugin {
	w.t.Helper()
	p, err := New(Settings{
		NodeName: w.node, DataDir: w.dataDir, RegistrarDir: filepath.Join(w.dataDir, "registry"), CDIDir: w.cdiDir, BootID: w.bootID,
		Client: (*kubernetes.Clientset)(nil), Clock: clock.RealClock{},
		Leases: (*worldLeases)(w), GPUs: (*worldGPUs)(w), Specs: (*worldSpecs)(w), Claims: (*worldClaims)(w), Observer: (*worldObserver)(w),
		Fatal: func(err error) { w.t.Error(err) },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// known starts an agent on a node where nothing is prepared yet.
func (w *world) known() *Plugin {
	w.t.Helper()
	p := w.plugin()
	w.tidy(p)
	return p
}

func (w *world) tidy(p *Plugin) {
	w.t.Helper()
	if _, err := p.tidy(w.t.Context(), map[types.UID]*orphan{}); err != nil {
		w.t.Fatal(err)
	}
}

func uuidOf(n int) device.GPUUUID {
	return device.GPUUUID(fmt.Sprintf("GPU-00000000-0000-4000-8000-%012x", n))
}

// attach gives the node unit n as GPU n, for the claim; none: idle.
func (w *world) attach(unit device.Unit, n int, claim *resourceapi.ResourceClaim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := device.Lease{Fabric: "0", Unit: unit, Node: w.node, Phase: device.Attached, UUID: uuidOf(n)}
	if claim == nil {
		l.IdleSince = time.Unix(1, 0)
	} else {
		l.Attempt = attemptOf(claim, unit)
	}
	w.put(l)
	w.gpus[l.UUID] = GPU{UUID: l.UUID, PCI: device.PCIAddress{Bus: uint8(n + 1)}, Minor: n, Name: "NVIDIA A100"}
	w.gpuChange.send()
}

func attemptOf(claim *resourceapi.ResourceClaim, unit device.Unit) device.Attempt {
	a := device.Attempt{
		Namespace: claim.Namespace, Name: claim.Name, UID: string(claim.UID), AllocatedAt: allocatedAt(claim),
		Node: "n1", Pool: "fabric-0", Entry: unit.Entry(),
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		if u, _ := device.UnitOfEntry(r.Device); u == unit {
			a.Entry = r.Device
		}
	}
	return a
}

// put stores a lease as the API server does. The caller holds mu.
func (w *world) put(l device.Lease) {
	w.version++
	l.Version = strconv.Itoa(w.version)
	w.leases[device.LeaseName(l.Fabric, l.Unit)] = l
	w.leaseChange.send()
}

// change stores unit a100-0's lease anew.
func (w *world) change(change func(*device.Lease)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.leases[device.LeaseName("0", "a100-0")]
	l.Fabric, l.Unit = "0", "a100-0"
	change(&l)
	w.put(l)
}

func (w *world) lease(unit device.Unit) device.Lease {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.leases[device.LeaseName("0", unit)]
}

func (w *world) api(ctx context.Context) error {
	w.mu.Lock()
	down, hangs := w.apiDown, w.apiHangs
	w.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	if down {
		return errors.New("connection refused")
	}
	return ctx.Err()
}

type worldLeases world

func (f *worldLeases) Get(ctx context.Context, fabric device.FabricID, unit device.Unit) (device.Lease, bool, error) {
	w := (*world)(f)
	if err := w.api(ctx); err != nil {
		return device.Lease{}, false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	l, ok := w.leases[device.LeaseName(fabric, unit)]
	l.PreparedFor = slices.Clone(l.PreparedFor)
	return l, ok, nil
}

func (f *worldLeases) Held(ctx context.Context) ([]device.Lease, error) {
	w := (*world)(f)
	if err := w.api(ctx); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var held []device.Lease
	for _, name := range slices.Sorted(maps.Keys(w.leases)) {
		if l := w.leases[name]; l.Node == w.node {
			held = append(held, l)
		}
	}
	return held, nil
}

func (f *worldLeases) write(ctx context.Context, l device.Lease, change func(*device.Lease)) error {
	w := (*world)(f)
	if err := w.api(ctx); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	stored := w.leases[device.LeaseName(l.Fabric, l.Unit)]
	if stored.Version != l.Version || w.refuseWrites {
		return errors.New("the object has been modified")
	}
	stored.PreparedFor = slices.Clone(stored.PreparedFor)
	change(&stored)
	w.put(stored)
	return nil
}

func (f *worldLeases) PrepareReady(ctx context.Context, l device.Lease, claim types.UID) error {
	return f.write(ctx, l, func(l *device.Lease) { l.PreparedFor = append(l.PreparedFor, string(claim)) })
}

func (f *worldLeases) Unprepared(ctx context.Context, l device.Lease, claim types.UID) error {
	return f.write(ctx, l, func(l *device.Lease) {
		l.PreparedFor = slices.DeleteFunc(l.PreparedFor, func(uid string) bool { return uid == string(claim) })
	})
}

func (f *worldLeases) Changed() <-chan struct{} { return f.leaseChange.next() }

type worldGPUs world

func (f *worldGPUs) GPU(_ context.Context, uuid device.GPUUUID) (GPU, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g, ok := f.gpus[uuid]
	return g, ok, nil
}

func (f *worldGPUs) Holders(_ context.Context, uuid device.GPUUUID) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.holders[uuid], nil
}

func (f *worldGPUs) Changed() <-chan struct{} { return f.gpuChange.next() }

type worldSpecs world

func (f *worldSpecs) Edits(_ context.Context, gpus []GPU) (cdispecs.ContainerEdits, []cdispecs.ContainerEdits, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var own []cdispecs.ContainerEdits
	for _, g := range gpus {
		node := &cdispecs.DeviceNode{Path: fmt.Sprintf("/dev/nvidia%d", g.Minor+f.nodeOff)}
		own = append(own, cdispecs.ContainerEdits{DeviceNodes: []*cdispecs.DeviceNode{node}})
	}
	return cdispecs.ContainerEdits{Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}}, own, f.specsErr
}

type worldClaims world

func (f *worldClaims) Get(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, bool, error) {
	w := (*world)(f)
	if err := w.api(ctx); err != nil {
		return nil, false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	c, ok := w.claims[types.NamespacedName{Namespace: namespace, Name: name}]
	return c, ok, nil
}

func (f *worldClaims) List(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	w := (*world)(f)
	if err := w.api(ctx); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []resourceapi.ResourceClaim
	for _, c := range w.claims {
		all = append(all, *c)
	}
	return all, nil
}

type worldObserver world

func (f *worldObserver) Prepared(o Outcome, _ time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.prepared = append(f.prepared, o)
}

func (f *worldObserver) Unprepared(o Outcome, _ time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unprepared = append(f.unprepared, o)
}

func (f *worldObserver) CheckpointDamaged(kept string, _ error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.damaged = append(f.damaged, filepath.Base(kept))
}

func (f *worldObserver) OrphanUndone(_, _ string, claim types.UID, _ []device.Unit) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.orphans = append(f.orphans, claim)
}

func (f *worldObserver) PreparedChanged() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changes++
}

// claim makes a claim that was given the entries, and stores it.
func (w *world) claim(name string, entries ...string) *resourceapi.ResourceClaim {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)}}
	c.Status.Allocation = &resourceapi.AllocationResult{AllocationTimestamp: new(metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)))}
	for i, e := range entries {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpu" + strconv.Itoa(i), Driver: device.Driver, Pool: "fabric-0", Device: e,
		})
	}
	w.claims[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}] = c
	return c
}

func object(c *resourceapi.ResourceClaim) kubeletplugin.NamespacedObject {
	return kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}, UID: c.UID}
}

// prepare is one call of the kubelet for one claim.
func prepare(ctx context.Context, t *testing.T, p *Plugin, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	t.Helper()
	results, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
	if err != nil || len(results) != 1 {
		t.Fatalf("PrepareResourceClaims: %d results, error %v; want one result", len(results), err)
	}
	return results[c.UID].Devices, results[c.UID].Err
}

func mustPrepare(t *testing.T, p *Plugin, c *resourceapi.ResourceClaim) []kubeletplugin.Device {
	t.Helper()
	devices, err := prepare(t.Context(), t, p, c)
	if err != nil {
		t.Fatal(err)
	}
	return devices
}

func unprepare(t *testing.T, p *Plugin, c *resourceapi.ResourceClaim) {
	t.Helper()
	results, err := p.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{object(c)})
	if err != nil || len(results) != 1 || results[c.UID] != nil {
		t.Fatalf("UnprepareResourceClaims = %v, %v", results, err)
	}
}

// spec is the claim's CDI spec; empty if there is none.
func (w *world) spec(c *resourceapi.ResourceClaim) string {
	w.t.Helper()
	data, err := os.ReadFile(filepath.Join(w.cdiDir, specName(c.UID)))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Fatal(err)
	}
	return string(data)
}

// files lists what is on disk besides the lock.
func (w *world) files() []string {
	w.t.Helper()
	var names []string
	for _, dir := range []string{w.dataDir, w.cdiDir} {
		found, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			w.t.Fatal(err)
		}
		for _, f := range found {
			if f.Name() != lockFile {
				names = append(names, f.Name())
			}
		}
	}
	return names
}

// traceless fails unless nothing of the claim is left.
func (w *world) traceless(p *Plugin, c *resourceapi.ResourceClaim) {
	w.t.Helper()
	r, err := p.checkpoint.read()
	if err != nil || r.Claims[c.UID] != nil || w.spec(c) != "" {
		w.t.Errorf("of %s is left: entry %+v (%v), spec %q", c.Name, r.Claims[c.UID], err, w.spec(c))
	}
	// The background may just look whether something is left of the claim: it is done in a moment.
	left := func() int {
		p.claims.mu.Lock()
		defer p.claims.mu.Unlock()
		return len(p.claims.byClaim)
	}
	for end := time.Now().Add(10 * time.Second); left() != 0; runtime.Gosched() {
		if time.Now().After(end) {
			w.t.Fatalf("%d turns left", left())
		}
	}
}
