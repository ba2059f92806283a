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
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
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
	registry = filepath.Join(filepath.Dir(w.dataDir), "registry")
	if err := os.MkdirAll(registry, 0o750); err != nil {
		w.t.Fatal(err)
	}
	p = w.plugin()
	p.s.Client, p.s.PodUID, p.s.RegistrarDir, p.s.Metadata = w.apiServer(), types.UID("pod-"+uid), registry, true
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
