// SPDX-License-Identifier: Apache-2.0

package metal3

import (
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"github.com/cohdi/cohdi-agent/internal/machine"
)

const (
	uid  = "78787878-eeee-4700-fd00-000000000001"
	uuid = "9b1d3e20-1111-4a6b-8c00-00000000a001"
)

func object(apiVersion, kind, name string, annotations map[string]any, more ...map[string]any) *unstructured.Unstructured {
	o := map[string]any{
		"apiVersion": apiVersion, "kind": kind,
		"metadata": map[string]any{"namespace": "machines", "name": name, "annotations": annotations},
	}
	for _, m := range more {
		maps.Copy(o, m)
	}
	return &unstructured.Unstructured{Object: o}
}

func bareMetalHost(annotations map[string]any, more ...map[string]any) *unstructured.Unstructured {
	u := object("metal3.io/v1alpha1", "BareMetalHost", "host-1", annotations, more...)
	u.SetUID(uid)
	return u
}

func openshift(host string) *unstructured.Unstructured {
	return object("machine.openshift.io/v1beta1", "Machine", "node-1-m", map[string]any{annotationHost: host})
}

func metal3(host string) *unstructured.Unstructured {
	return object("infrastructure.cluster.x-k8s.io/v1beta1", "Metal3Machine", "node-1-m", map[string]any{annotationHost: host})
}

func named() map[string]any { return map[string]any{annotationMachine: uuid} }

func TestFollow(t *testing.T) {
	consumed := map[string]any{"spec": map[string]any{"consumerRef": map[string]any{"kind": "Metal3Machine", "name": "node-1"}}}
	byObject := machine.Start{Namespace: "machines", Name: "node-1-m"}
	byHost := machine.Start{Host: machine.Host{Namespace: "machines", Name: "host-1", UID: uid}}
	good := machine.Chain{Machine: uuid, Host: "BareMetalHost machines/host-1"}
	broken := func(problem string) machine.Chain { return machine.Chain{Problem: problem} }
	for name, tc := range map[string]struct {
		objects []runtime.Object
		start   machine.Start
		want    machine.Chain
		gets    int
	}{
		"OpenShift's Machine":     {[]runtime.Object{openshift("machines/host-1"), bareMetalHost(named())}, byObject, good, 2},
		"Metal3's":                {[]runtime.Object{metal3("machines/host-1"), bareMetalHost(named())}, byObject, good, 3},
		"the host at once":        {[]runtime.Object{bareMetalHost(named())}, byHost, good, 1},
		"the host of its machine": {[]runtime.Object{bareMetalHost(named(), consumed)}, machine.Start{Host: machine.Host{Namespace: "machines", Name: "host-1", Consumer: "node-1"}}, good, 1},
		"no Machine": {
			nil, byObject, broken("there is no Machine machines/node-1-m; there is no Metal3Machine machines/node-1-m"), 2,
		},
		"a Machine without host": {
			[]runtime.Object{object("machine.openshift.io/v1beta1", "Machine", "node-1-m", nil)},
			byObject,
			broken("Machine machines/node-1-m has no annotation metal3.io/BareMetalHost"), 1,
		},
		"a Machine with a word for host": {
			[]runtime.Object{openshift("host-1")},
			byObject,
			broken(`annotation metal3.io/BareMetalHost of Machine machines/node-1-m is "host-1", not <namespace>/<name>`), 1,
		},
		"a Machine that leads out of the API": {
			[]runtime.Object{openshift("../host-1")},
			byObject,
			broken(`annotation metal3.io/BareMetalHost of Machine machines/node-1-m is "../host-1", not <namespace>/<name>`), 1,
		},
		"no host":             {[]runtime.Object{openshift("machines/host-2")}, byObject, broken("there is no BareMetalHost machines/host-2"), 2},
		"a host without name": {[]runtime.Object{bareMetalHost(nil)}, byHost, broken("BareMetalHost machines/host-1 has no annotation cluster-manager.cdi.io/machine"), 1},
		"a host made anew": {
			[]runtime.Object{bareMetalHost(named())},
			machine.Start{Host: machine.Host{Namespace: "machines", Name: "host-1", UID: "11"}},
			broken(`BareMetalHost machines/host-1 has the UID ` + uid + `, and the provider id says "11": it was made anew, or is another node's`), 1,
		},
		"a host of another machine": {
			[]runtime.Object{bareMetalHost(named(), consumed)},
			machine.Start{Host: machine.Host{Namespace: "machines", Name: "host-1", Consumer: "node-2"}},
			broken(`BareMetalHost machines/host-1 belongs to "node-1", and the provider id says "node-2": it is another node's now`), 1,
		},
		"two ways that do not meet": {
			[]runtime.Object{openshift("machines/host-2"), bareMetalHost(named())},
			machine.Start{Namespace: "machines", Name: "node-1-m", Host: byHost.Host},
			broken("annotation machine.openshift.io/machine leads to BareMetalHost machines/host-2, and the provider id names machines/host-1: one of them is wrong"), 1,
		},
		"the UID alone, with a Machine": {
			[]runtime.Object{openshift("machines/host-1"), bareMetalHost(named())},
			machine.Start{Namespace: "machines", Name: "node-1-m", Host: machine.Host{UID: strings.ToUpper(uid)}},
			good, 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			client := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme(), tc.objects...)
			got := New(client).Follow(t.Context(), tc.start)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("chain (-want +got):\n%s", diff)
			}
			for _, a := range client.Actions() {
				if a.GetVerb() != "get" {
					t.Errorf("%s %s: only get is granted", a.GetVerb(), a.GetResource())
				}
			}
			if n := len(client.Actions()); n != tc.gets {
				t.Errorf("%d calls, want %d", n, tc.gets)
			}
		})
	}
}

// What the API server refuses is one clear line, and only what may pass is taken for passing.
func TestFollow_refused(t *testing.T) {
	hosts := host().resource
	for name, tc := range map[string]struct {
		resource string
		err      error
		want     []string
		passing  bool
	}{
		"no right to the host": {
			"baremetalhosts", apierrors.NewForbidden(hosts.GroupResource(), "host-1", errors.New("no")),
			[]string{"BareMetalHost machines/host-1", "may not get baremetalhosts.metal3.io", "deploy/metal3.yaml"},
			false,
		},
		"no rights to machines": {
			"*", apierrors.NewForbidden(schema.GroupResource{}, "x", errors.New("no")),
			[]string{"may not get machines.machine.openshift.io", "may not get metal3machines.infrastructure.cluster.x-k8s.io"},
			false,
		},
		"no such kind": {
			"baremetalhosts", &meta.NoResourceMatchError{PartialResource: hosts},
			[]string{"the cluster has no baremetalhosts.metal3.io in version v1alpha1"},
			false,
		},
		"the API server is busy": {"baremetalhosts", apierrors.NewTooManyRequests("later", 1), []string{"BareMetalHost machines/host-1 cannot be read", "later"}, true},
		"no answer":              {"machines", errors.New("connection refused"), []string{"Machine machines/node-1-m cannot be read", "connection refused"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			client := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme(), openshift("machines/host-1"), bareMetalHost(named()))
			client.PrependReactor("get", tc.resource, func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, tc.err })
			got := New(client).Follow(t.Context(), machine.Start{Namespace: "machines", Name: "node-1-m"})
			for _, want := range tc.want {
				if !strings.Contains(got.Problem, want) {
					t.Errorf("problem %q does not name %q", got.Problem, want)
				}
			}
			if got.Machine != "" || got.Passing != tc.passing {
				t.Errorf("chain %+v", got)
			}
		})
	}
}

// A real API server answers for a kind that it does not have with a page that is no Status.
func TestFollow_noSuchKind(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/machines/node-1-m") {
			http.Error(w, "404 page not found", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(metal3("machines/host-1").Object); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	client, err := dynamic.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	if _, why := New(client).get(t.Context(), machines()[0], "machines", "node-1-m"); why == nil || why.passing ||
		why.what != "Machine machines/node-1-m cannot be read: the cluster has no machines.machine.openshift.io in version v1beta1" {
		t.Errorf("trouble %+v", why)
	}
	if namespace, name, why := New(client).hostOf(t.Context(), "machines", "node-1-m"); why != nil || namespace != "machines" || name != "host-1" {
		t.Errorf("host %s/%s, trouble %+v", namespace, name, why)
	}
}
