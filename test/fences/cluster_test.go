// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/cohdi/cohdi-agent/internal/device"
)

var (
	kubeconfig = flag.String("kubeconfig", "../../.cache/cluster/admin.conf", "administrator's kubeconfig of the cluster")
	required   = flag.Bool("require-cluster", false, "fail instead of skip when there is no cluster")
)

const (
	manifest = "../../deploy/daemonset.yaml"

	// Fabrics of the tests alone. The agent on nodeLeader leads the first, the one on nodeOther the
	// second; nodeHolder is in the first, too.
	fabric      = device.FabricID("fence")
	otherFabric = device.FabricID("otherfence")

	nodeLeader = "fence-leader"
	nodeHolder = "fence-holder"
	nodeOther  = "fence-other"

	// probed begins the names of the policies, and of their bindings, that are asked whether the API server enforces.
	// They are applied last: it reads policies in the order in which they were written, so that those before are in
	// force, too.
	probed = "cohdi-agent-slice"

	// namespace holds the tests' claims.
	namespace = "cohdi-fences"
)

// agent is one who holds a token of the agents' ServiceAccount.
type agent struct {
	node   string
	pod    string
	client kubernetes.Interface
}

// identity is what the agent writes as an election's holder.
func (a agent) identity() string { return a.node + "/" + a.pod }

// cluster is a real API server with the fences up and four agents.
type cluster struct {
	admin                          kubernetes.Interface
	config                         *rest.Config
	leader, holder, other, unbound agent
}

// connect finds the cluster, raises the fences and mints the tokens.
func connect(t *testing.T) cluster {
	t.Helper()
	ctx := t.Context()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err == nil {
		config.QPS, config.Burst = 200, 400
		_, err = kubernetes.NewForConfigOrDie(config).Discovery().ServerVersion()
	}
	if err != nil {
		if *required {
			t.Fatalf("no cluster, and -require-cluster is set: %v", err)
		}
		t.Skipf("skipped: no cluster at %s (start one with `make cluster`): %v", *kubeconfig, err)
	}
	c := cluster{admin: kubernetes.NewForConfigOrDie(config), config: config}
	install(ctx, t, config)
	ensureNamespace(ctx, t, c.admin)
	c.leader = c.agentOn(ctx, t, nodeLeader, device.AgentName)
	c.holder = c.agentOn(ctx, t, nodeHolder, device.AgentName)
	c.other = c.agentOn(ctx, t, nodeOther, device.AgentName)
	c.unbound = agent{client: c.clientFor(ctx, t, device.AgentName, nil)}
	c.waitForFences(ctx, t)
	return c
}

// install applies the manifest as an administrator would, the DaemonSet and its configuration aside.
func install(ctx context.Context, t *testing.T, config *rest.Config) {
	t.Helper()
	apply(ctx, t, config, manifest)
}

func apply(ctx context.Context, t *testing.T, config *rest.Config, file string) {
	t.Helper()
	client := dynamic.NewForConfigOrDie(config)
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(kubernetes.NewForConfigOrDie(config).Discovery()))
	all := objects(t, file)
	slices.SortStableFunc(all, func(a, b *unstructured.Unstructured) int {
		return cmp.Compare(strings.Index(a.GetName(), probed), strings.Index(b.GetName(), probed))
	})
	for _, obj := range all {
		gvk := obj.GroupVersionKind()
		if gvk.Kind == "DaemonSet" || gvk.Kind == "ConfigMap" {
			continue
		}
		mapping, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		if err != nil {
			t.Fatalf("find resource of %s: %v", gvk, err)
		}
		if _, err := client.Resource(mapping.Resource).Namespace(obj.GetNamespace()).
			Apply(ctx, obj.GetName(), obj, metav1.ApplyOptions{FieldManager: "cohdi-fences", Force: true}); err != nil {
			t.Fatalf("apply %s %s: %v", gvk.Kind, obj.GetName(), err)
		}
	}
}

// objects reads a file of manifests.
func objects(t *testing.T, file string) []*unstructured.Unstructured {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var all []*unstructured.Unstructured
	for d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096); ; {
		obj := &unstructured.Unstructured{}
		if err := d.Decode(obj); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatalf("decode %s: %v", file, err)
		}
		if len(obj.Object) > 0 {
			all = append(all, obj)
		}
	}
}

func ensureNamespace(ctx context.Context, t *testing.T, admin kubernetes.Interface) {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := admin.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	// No Pod can be created before the account that it runs by default as.
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		_, err := admin.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		t.Fatalf("wait for the default ServiceAccount of %s: %v", namespace, err)
	}
}

// agentOn returns an agent on a node that has no kubelet: a token is bound to its Pod all the same. The
// node lacks the label that the DaemonSet selects by and takes no Pods.
func (c cluster) agentOn(ctx context.Context, t *testing.T, node, account string) agent {
	t.Helper()
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: node},
		Spec:       corev1.NodeSpec{Unschedulable: true},
	}
	cleanup := func() {
		end := context.WithoutCancel(ctx)
		grace := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
		_ = c.admin.CoreV1().Pods(device.AgentNamespace).Delete(end, node, grace)
		_ = c.admin.CoreV1().Nodes().Delete(end, node, metav1.DeleteOptions{})
	}
	cleanup()
	if _, err := c.admin.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cleanup)
	pod, err := c.admin.CoreV1().Pods(device.AgentNamespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: node},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: account,
			Containers: []corev1.Container{{Name: "none", Image: "none.invalid/none"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return agent{node: node, pod: string(pod.UID), client: c.clientFor(ctx, t, account, pod)}
}

// clientFor returns a client with a token of a ServiceAccount, bound to the Pod if there is one.
func (c cluster) clientFor(ctx context.Context, t *testing.T, account string, pod *corev1.Pod) kubernetes.Interface {
	t.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(3600))}}
	if pod != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	}
	token, err := c.admin.CoreV1().ServiceAccounts(device.AgentNamespace).CreateToken(ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("request a token of %s: %v", account, err)
	}
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = token.Status.Token
	config.QPS, config.Burst = 200, 400
	return kubernetes.NewForConfigOrDie(config)
}

// waitForFences returns when the API server enforces: it reads policies and roles with a delay.
func (c cluster) waitForFences(ctx context.Context, t *testing.T) {
	t.Helper()
	dryRun := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	var last error
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		slice := nodeSlice("fence-probe", nodeOther)
		if _, last = c.other.client.ResourceV1().ResourceSlices().Create(ctx, slice, dryRun); last == nil {
			_, err := c.unbound.client.ResourceV1().ResourceSlices().Create(ctx, slice, dryRun)
			last = refused(err, saysUnbound, saysLeader)
		}
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("the fences did not come up: %v", last)
	}
}

// refused checks that err is the API server's no, for a person to read.
// Several policies may refuse the same
// write and one of them, any, speaks: it says one of these words.
func refused(err error, words ...string) error {
	if err == nil {
		return errors.New("it passed")
	}
	if !apierrors.IsForbidden(err) {
		return fmt.Errorf("it failed, but not as forbidden: %w", err)
	}
	for _, w := range words {
		if strings.Contains(err.Error(), w) {
			return nil
		}
	}
	return fmt.Errorf("refused without saying any of %q: %w", words, err)
}

// write is one try of one agent to write, and whether it may.
type write struct {
	name string
	who  agent
	do   func(ctx context.Context, client kubernetes.Interface) error
	// refusal is a part of the message, or several with a bar between; empty means that it must pass.
	refusal string
}

// try runs writes in order: later ones find what earlier ones left.
func try(t *testing.T, writes []write) {
	t.Helper()
	for _, w := range writes {
		t.Run(w.name, func(t *testing.T) {
			err := w.do(t.Context(), w.who.client)
			if w.refusal == "" {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			if wrong := refused(err, strings.Split(w.refusal, "|")...); wrong != nil {
				t.Error(wrong)
			}
		})
	}
}

const (
	// Parts of the policies' messages.
	saysUnbound = "bound to none"
	saysLeader  = "leader"
	// saysEither is for writes that only a leader may do.
	saysEither = saysUnbound + "|" + saysLeader
)

// nodeSlice is a slice of the node's own pool.
func nodeSlice(name, node string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: device.Driver, NodeName: &node,
			Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1},
		},
	}
}

// fabricSlice is a slice of a fabric's pool.
func fabricSlice(name string, f device.FabricID) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: device.Driver, AllNodes: new(true),
			Pool: resourceapi.ResourcePool{Name: f.Pool(), Generation: 1, ResourceSliceCount: 1},
		},
	}
}
