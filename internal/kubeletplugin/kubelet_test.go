// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// apiServer serves the claims of the world.
func (w *world) apiServer() kubernetes.Interface {
	w.t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, req *http.Request) {
		out.Header().Set("Content-Type", "application/json")
		parts := strings.Split(strings.TrimPrefix(req.URL.Path, "/apis/resource.k8s.io/v1/namespaces/"), "/")
		if req.Method == http.MethodGet && len(parts) == 3 && parts[1] == "resourceclaims" {
			c, found, err := (*worldClaims)(w).Get(req.Context(), parts[0], parts[2])
			if err == nil && found {
				c = c.DeepCopy()
				c.TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"}
				if err := json.NewEncoder(out).Encode(c); err != nil {
					w.t.Error(err)
				}
				return
			}
		}
		out.WriteHeader(http.StatusNotFound)
		fmt.Fprintf(out, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"message":"no %s"}`, req.URL.Path)
	}))
	w.t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	if err != nil {
		w.t.Fatal(err)
	}
	return client
}

// serve runs an agent as the Pod uid until stop.
func (w *world) serve(uid string) (p *Plugin, registry string, stop func()) {
	w.t.Helper()
	return w.serveWith(uid, w.apiServer())
}

func (w *world) serveWith(uid string, client kubernetes.Interface) (p *Plugin, registry string, stop func()) {
	w.t.Helper()
	registry = filepath.Join(filepath.Dir(w.dataDir), "registry")
	if err := os.MkdirAll(registry, 0o750); err != nil {
		w.t.Fatal(err)
	}
	p = w.plugin()
	if w.health != nil {
		p.s.Health = w.health
	}
	p.s.Client, p.s.PodUID, p.s.RegistrarDir, p.s.Metadata = client, types.UID("pod-"+uid), registry, true
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	stop = func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Error(err)
		}
	}
	return p, registry, stop
}

// dial connects to a socket as soon as it is there.
func dial(t *testing.T, path string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

// As the kubelet speaks to it, over its sockets, with an agent replaced in between.
func TestServesTheKubelet(t *testing.T) {
	w := newWorld(t)
	c := w.claim("c", "a100-0-ready")
	w.attach("a100-0", 0, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req := []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}

	old, registry, stopOld := w.serve("1")
	register := registerapi.NewRegistrationClient(dial(t, filepath.Join(registry, "gpu.cohdi.io-pod-1-reg.sock")))
	info, err := register.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil || info.Name != "gpu.cohdi.io" {
		t.Fatalf("GetInfo = %v, %v", info, err)
	}
	if ok, why := old.Registered(); ok || why == "" {
		t.Error("registered before the kubelet said so")
	}
	if _, err = register.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	if ok, why := old.Registered(); !ok {
		t.Errorf("not registered: %s", why)
	}

	answer, err := drapb.NewDRAPluginClient(dial(t, info.Endpoint)).NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: req})
	if err != nil || answer.Claims["uid-c"].GetError() != "" || len(answer.Claims["uid-c"].GetDevices()) != 1 {
		t.Fatalf("NodePrepareResources = %v, %v", answer, err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(w.cdiDir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	ids := answer.Claims["uid-c"].Devices[0].CdiDeviceIds
	if len(ids) != 2 {
		t.Errorf("CDI devices %v: want the GPU and its metadata", ids)
	}
	for _, id := range ids {
		d := cache.GetDevice(id)
		if d == nil {
			t.Errorf("a runtime does not find CDI device %s", id)
			continue
		}
		for _, m := range d.ContainerEdits.Mounts {
			if data, readErr := os.ReadFile(m.HostPath); readErr != nil || !strings.Contains(string(data), string(uuidOf(0))) {
				t.Errorf("metadata: %v\n%s", readErr, data)
			}
		}
	}

	// Rolling update: the new agent comes, the old one goes, its sockets with it.
	_, _, stopNew := w.serve("2")
	young := drapb.NewDRAPluginClient(dial(t, filepath.Join(w.dataDir, "dra-pod-2.sock")))
	if _, err = young.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: req}); err != nil {
		t.Fatal(err)
	}
	stopOld()
	undone, err := young.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: req})
	if err != nil || undone.Claims["uid-c"].GetError() != "" {
		t.Fatalf("NodeUnprepareResources = %v, %v", undone, err)
	}
	stopNew()
	for _, dir := range []string{registry, w.dataDir, w.cdiDir} {
		found, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			if strings.HasSuffix(f.Name(), ".sock") || strings.Contains(f.Name(), "uid-c") {
				t.Errorf("left behind: %s", f.Name())
			}
		}
	}
}

// dra is a kubelet's connection to the agent that runs as the Pod 1.
func (w *world) dra() drapb.DRAPluginClient {
	w.t.Helper()
	return drapb.NewDRAPluginClient(dial(w.t, filepath.Join(w.dataDir, "dra-pod-1.sock")))
}

func draClaims(claims ...*resourceapi.ResourceClaim) []*drapb.Claim {
	all := make([]*drapb.Claim, 0, len(claims))
	for _, c := range claims {
		all = append(all, &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)})
	}
	return all
}

// atWork tells whether a call for the claim is under way.
func atWork(p *Plugin, claim types.UID) bool {
	p.claims.mu.Lock()
	defer p.claims.mu.Unlock()
	return p.claims.byClaim[claim] != nil && p.claims.byClaim[claim].interrupt != nil
}

// A claim that waits for its device holds up no other, of the same call or of another one, nor its own Unprepare.
func TestKubeletWaitsForOneClaimOnly(t *testing.T) {
	w := newWorld(t)
	a, b, c := w.claim("a", "a100-0"), w.claim("b", "a100-1"), w.claim("c", "a100-2")
	w.attach("a100-1", 1, b)
	p, _, stop := w.serve("1")
	defer stop()
	kubelet := w.dra()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	type result struct {
		answer *drapb.NodePrepareResourcesResponse
		err    error
	}
	waits := make(chan result, 1)
	go func() {
		answer, err := kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: draClaims(a, c)})
		waits <- result{answer, err}
	}()
	prepared := func(c *resourceapi.ResourceClaim) {
		t.Helper()
		answer, err := kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: draClaims(c)})
		if err != nil || answer.Claims[string(c.UID)].GetError() != "" {
			t.Fatalf("prepare %s: %v, %v", c.Name, answer, err)
		}
	}
	prepared(b) // the first call waits, or has not come yet: neither matters
	for len(waits) == 0 && !atWork(p, a.UID) {
		runtime.Gosched()
	}
	undone, err := kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: draClaims(a)})
	if err != nil || undone.Claims["uid-a"].GetError() != "" {
		t.Fatalf("unprepare the claim that waits: %v, %v", undone, err)
	}
	w.attach("a100-2", 2, c)
	got := <-waits
	if got.err != nil || got.answer.Claims["uid-c"].GetError() != "" || !strings.Contains(got.answer.Claims["uid-a"].GetError(), "unprepared") {
		t.Errorf("the call that waited: %v, %v", got.answer, got.err)
	}
}

// Two Pods with one claim, and a kubelet that restarted in between: prepared once, the same answer each time,
// and gone with the one Unprepare that the kubelet sends for the last Pod.
func TestKubeletSharesAClaim(t *testing.T) {
	w := newWorld(t)
	c := w.claim("c", "a100-0-ready")
	w.attach("a100-0", 0, nil)
	p, _, stop := w.serve("1")
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const pods = 8
	answers := make(chan *drapb.NodePrepareResourcesResponse, pods)
	for range pods {
		kubelet := w.dra()
		go func() {
			answer, err := kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: draClaims(c)})
			if err != nil {
				t.Error(err)
			}
			answers <- answer
		}()
	}
	first := (<-answers).GetClaims()["uid-c"]
	if first.GetError() != "" || len(first.GetDevices()) != 1 {
		t.Fatalf("prepare: %v", first)
	}
	for range pods - 1 {
		other := (<-answers).GetClaims()["uid-c"]
		if other.GetError() != "" || len(other.GetDevices()) != 1 || !cmp.Equal(first.GetDevices()[0].CdiDeviceIds, other.GetDevices()[0].CdiDeviceIds) {
			t.Errorf("answers differ: %v and %v", first, other)
		}
	}
	if got := w.lease("a100-0").PreparedFor; !cmp.Equal(got, []string{"uid-c"}) {
		t.Errorf("prepared-for = %v", got)
	}
	for range 2 { // and again, as after its own restart
		undone, err := w.dra().NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: draClaims(c)})
		if err != nil || undone.Claims["uid-c"].GetError() != "" {
			t.Fatalf("unprepare: %v, %v", undone, err)
		}
		w.traceless(p, c)
	}
}

// An administrator's claim is prepared beside the one that owns the device, by either order, and takes nothing
// from it; no lease says a word of it.
func TestKubeletAdminAccess(t *testing.T) {
	w := newWorld(t)
	owner, watcher := w.claim("owner", "a100-0"), w.claim("watcher", "a100-0-ready")
	watcher.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	w.attach("a100-0", 0, owner)
	before := w.lease("a100-0")
	_, _, stop := w.serve("1")
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	kubelet := w.dra()
	for _, order := range [][]*resourceapi.ResourceClaim{{watcher, owner}, {owner, watcher}} {
		for _, c := range order {
			answer, err := kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: draClaims(c)})
			if err != nil || answer.Claims[string(c.UID)].GetError() != "" {
				t.Fatalf("prepare %s: %v, %v", c.Name, answer, err)
			}
		}
		if w.spec(owner) == "" || w.spec(watcher) == "" {
			t.Error("one of them has no CDI spec")
		}
		undone, err := kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: draClaims(order[0])})
		if err != nil || undone.Claims[string(order[0].UID)].GetError() != "" {
			t.Fatalf("unprepare %s: %v, %v", order[0].Name, undone, err)
		}
		if w.spec(order[0]) != "" || w.spec(order[1]) == "" {
			t.Errorf("after %s was unprepared: its spec %q, the other's %q", order[0].Name, w.spec(order[0]), w.spec(order[1]))
		}
		if _, err = kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: draClaims(order[1])}); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(before, w.lease("a100-0")); diff != "" {
		t.Errorf("the lease was written (-before +after):\n%s", diff)
	}
}

// The kubelet is told how GPUs are, first of all and then of each change, by both agents of a rolling update.
func TestKubeletWatchesHealth(t *testing.T) {
	w := newWorld(t)
	w.health = &someHealth{change: newBroadcast(), units: []UnitHealth{
		{Fabric: "0", Unit: "a100-0", Health: device.HealthOK, At: time.Now()},
		{Unit: device.BuiltInUnit(uuidOf(1)), Health: device.HealthOK, At: time.Now()},
	}}
	old, registry, stopOld := w.serve("1")
	_, _, stopYoung := w.serve("2")
	defer stopYoung()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	register := registerapi.NewRegistrationClient(dial(t, filepath.Join(registry, "gpu.cohdi.io-pod-1-reg.sock")))
	info, err := register.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil || !slices.Contains(info.SupportedVersions, drahealth.DRAResourceHealthService) {
		t.Fatalf("GetInfo = %v, %v: the kubelet would not ask for health", info, err)
	}
	watch := func(uid string) func() map[string]string {
		stream, err := drahealth.NewDRAResourceHealthClient(dial(t, filepath.Join(w.dataDir, "dra-pod-"+uid+".sock"))).
			NodeWatchResources(ctx, &drahealth.NodeWatchResourcesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return func() map[string]string {
			t.Helper()
			report, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			says := map[string]string{}
			for _, d := range report.Devices {
				says[d.Device.PoolName+"/"+d.Device.DeviceName] = d.Health.String() + d.Message
			}
			return says
		}
	}
	own := "n1/gpu-00000000-0000-4000-8000-000000000001"
	want := map[string]string{"fabric-0/a100-0": "HEALTHY", "fabric-0/a100-0-ready": "HEALTHY", own: "HEALTHY"}
	oldSays, youngSays := watch("1"), watch("2")
	for who, says := range map[string]func() map[string]string{"old": oldSays, "young": youngSays} {
		if diff := cmp.Diff(want, says()); diff != "" {
			t.Errorf("the %s agent's first report (-want +got):\n%s", who, diff)
		}
	}
	w.health.set(func(units []UnitHealth) { units[1].Health, units[1].Message = device.HealthCritical, "XID 79" })
	want[own] = "UNHEALTHYXID 79"
	for who, says := range map[string]func() map[string]string{"old": oldSays, "young": youngSays} {
		if diff := cmp.Diff(want, says()); diff != "" {
			t.Errorf("the %s agent's next report (-want +got):\n%s", who, diff)
		}
	}
	stopOld()
	if old.publishing() != nil {
		t.Error("an agent that has ended publishes")
	}
}
