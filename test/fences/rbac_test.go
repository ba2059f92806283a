// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// account has the agents' rights, one after the other taken away, and is no agent to the policies.
	account     = "cohdi-fence-rights"
	accountNode = "fence-rights"
)

// right is one verb on one resource. A namespace limits it to that.
type right struct {
	namespace, group, resource, name, verb string
}

func (r right) String() string {
	return strings.TrimPrefix(fmt.Sprintf("%s/%s %s in %q for %q", r.group, r.resource, r.verb, r.namespace, r.name), "/")
}

// granted reads every right out of the manifest.
func granted(t *testing.T) []right {
	t.Helper()
	var all []right
	for _, obj := range objects(t, manifest) {
		if obj.GetKind() != "ClusterRole" && obj.GetKind() != "Role" {
			continue
		}
		var role rbacv1.Role
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, &role); err != nil {
			t.Fatal(err)
		}
		for _, rule := range role.Rules {
			names := rule.ResourceNames
			if len(names) == 0 {
				names = []string{""}
			}
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, name := range names {
						for _, verb := range rule.Verbs {
							all = append(all, right{role.Namespace, group, resource, name, verb})
						}
					}
				}
			}
		}
	}
	return all
}

// grant gives the account these rights and no other.
func (c cluster) grant(ctx context.Context, t *testing.T, rights []right) {
	t.Helper()
	rules := map[string][]rbacv1.PolicyRule{"": nil, device.AgentNamespace: nil, device.LeaseNamespace: nil}
	for _, r := range rights {
		rule := rbacv1.PolicyRule{APIGroups: []string{r.group}, Resources: []string{r.resource}, Verbs: []string{r.verb}}
		if r.name != "" {
			rule.ResourceNames = []string{r.name}
		}
		rules[r.namespace] = append(rules[r.namespace], rule)
	}
	meta := metav1.ObjectMeta{Name: account}
	for ns, list := range rules {
		var err error
		if ns == "" {
			_, err = c.admin.RbacV1().ClusterRoles().Update(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: list}, metav1.UpdateOptions{})
		} else {
			_, err = c.admin.RbacV1().Roles(ns).Update(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: list}, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// newAccount makes the account and binds it to roles that grant nothing yet.
func (c cluster) newAccount(ctx context.Context, t *testing.T) {
	t.Helper()
	meta, opts, rbac := metav1.ObjectMeta{Name: account}, metav1.CreateOptions{}, c.admin.RbacV1()
	subjects := []rbacv1.Subject{{Kind: "ServiceAccount", Name: account, Namespace: device.AgentNamespace}}
	ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: account}
	var errs [4]error
	_, errs[0] = c.admin.CoreV1().ServiceAccounts(device.AgentNamespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: meta}, opts)
	_, errs[1] = rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta}, opts)
	_, errs[2] = rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: meta, Subjects: subjects, RoleRef: ref}, opts)
	ref.Kind = "Role"
	for _, ns := range []string{device.AgentNamespace, device.LeaseNamespace} {
		_, err := rbac.Roles(ns).Create(ctx, &rbacv1.Role{ObjectMeta: meta}, opts)
		_, bindErr := rbac.RoleBindings(ns).Create(ctx, &rbacv1.RoleBinding{ObjectMeta: meta, Subjects: subjects, RoleRef: ref}, opts)
		errs[3] = errors.Join(errs[3], err, bindErr)
	}
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
}

func (c cluster) dropRights(ctx context.Context) {
	rbac, opts := c.admin.RbacV1(), metav1.DeleteOptions{}
	_ = rbac.ClusterRoleBindings().Delete(ctx, account, opts)
	_ = rbac.ClusterRoles().Delete(ctx, account, opts)
	for _, ns := range []string{device.AgentNamespace, device.LeaseNamespace} {
		_ = rbac.RoleBindings(ns).Delete(ctx, account, opts)
		_ = rbac.Roles(ns).Delete(ctx, account, opts)
	}
	_ = c.admin.CoreV1().ServiceAccounts(device.AgentNamespace).Delete(ctx, account, opts)
}

// use is what the agent needs a right for, done without a lasting effect.
type use func(ctx context.Context, client kubernetes.Interface) error

func listing[T any](list func(context.Context, metav1.ListOptions) (T, error)) use {
	return func(ctx context.Context, _ kubernetes.Interface) error {
		_, err := list(ctx, metav1.ListOptions{Limit: 1})
		return err
	}
}

func watching(start func(context.Context, metav1.ListOptions) (watch.Interface, error)) use {
	return func(ctx context.Context, _ kubernetes.Interface) error {
		w, err := start(ctx, metav1.ListOptions{})
		if err == nil {
			w.Stop()
		}
		return err
	}
}

// uses are all that the agent does at the API server, by the right that it takes.
func (c cluster) uses(client kubernetes.Interface) map[right]use {
	const claims, dra = "resourceclaims", resourceapi.GroupName
	dry := []string{metav1.DryRunAll}
	nodes, slicesOf, claimsOf := client.CoreV1().Nodes(), client.ResourceV1().ResourceSlices(), client.ResourceV1().ResourceClaims("")
	leases, pods := client.CoordinationV1().Leases(device.LeaseNamespace), client.CoreV1().Pods(device.AgentNamespace)
	inLeases := func(verb string) right {
		return right{device.LeaseNamespace, coordinationv1.GroupName, "leases", "", verb}
	}
	patchOf := func(sub ...string) use {
		return func(ctx context.Context, client kubernetes.Interface) error {
			_, err := client.CoreV1().Nodes().Patch(ctx, accountNode, types.MergePatchType, []byte("{}"), metav1.PatchOptions{DryRun: dry}, sub...)
			return err
		}
	}
	attached := say("fence-here", device.Driver, "a100-0", device.ConditionAttached, metav1.ConditionTrue)
	event := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "fence", Namespace: namespace}, EventTime: metav1.NowMicro(), Type: "Normal",
		Reason: "Fence", Action: "Fence", ReportingController: device.Driver, ReportingInstance: accountNode,
		Regarding: corev1.ObjectReference{Kind: "ResourceClaim", Name: "fence-here", Namespace: namespace},
	}
	return map[right]use{
		{"", "", "nodes", "", "get"}: func(ctx context.Context, client kubernetes.Interface) error {
			_, err := client.CoreV1().Nodes().Get(ctx, accountNode, metav1.GetOptions{})
			return err
		},
		{"", "", "nodes", "", "list"}:         listing(nodes.List),
		{"", "", "nodes", "", "watch"}:        watching(nodes.Watch),
		{"", "", "nodes", "", "patch"}:        patchOf(),
		{"", "", "nodes/status", "", "patch"}: patchOf("status"),
		{"", dra, claims, "", "get"}: func(ctx context.Context, client kubernetes.Interface) error {
			_, err := client.ResourceV1().ResourceClaims(namespace).Get(ctx, "fence-here", metav1.GetOptions{})
			return err
		},
		{"", dra, claims, "", "list"}:                                         listing(claimsOf.List),
		{"", dra, claims, "", "watch"}:                                        watching(claimsOf.Watch),
		{"", dra, claims + "/status", "", "patch"}:                            attached,
		{"", dra, claims + "/driver", device.Driver, "associated-node:patch"}: attached,
		{"", dra, claims + "/driver", device.Driver, "arbitrary-node:patch"}:  say("fence-there", device.Driver, "a100-0", device.ConditionAttachFailed, metav1.ConditionTrue),
		{"", dra, "resourceslices", "", "list"}:                               listing(slicesOf.List),
		{"", dra, "resourceslices", "", "watch"}:                              watching(slicesOf.Watch),
		{"", dra, "resourceslices", "", "create"}: func(ctx context.Context, client kubernetes.Interface) error {
			_, err := client.ResourceV1().ResourceSlices().Create(ctx, nodeSlice("fence-new", accountNode), metav1.CreateOptions{DryRun: dry})
			return err
		},
		{"", dra, "resourceslices", "", "update"}: func(ctx context.Context, client kubernetes.Interface) error {
			s, err := c.admin.ResourceV1().ResourceSlices().Get(ctx, "fence-slice", metav1.GetOptions{})
			if err == nil {
				_, err = client.ResourceV1().ResourceSlices().Update(ctx, s, metav1.UpdateOptions{DryRun: dry})
			}
			return err
		},
		{"", dra, "resourceslices", "", "delete"}: func(ctx context.Context, client kubernetes.Interface) error {
			return client.ResourceV1().ResourceSlices().Delete(ctx, "fence-slice", metav1.DeleteOptions{DryRun: dry})
		},
		{"", eventsv1.GroupName, "events", "", "create"}: func(ctx context.Context, client kubernetes.Interface) error {
			_, err := client.EventsV1().Events(namespace).Create(ctx, event, metav1.CreateOptions{DryRun: dry})
			return err
		},
		{"", eventsv1.GroupName, "events", "", "patch"}: func(ctx context.Context, client kubernetes.Interface) error {
			_, err := client.EventsV1().Events(namespace).Patch(ctx, "fence-event", types.StrategicMergePatchType, []byte("{}"), metav1.PatchOptions{DryRun: dry})
			return err
		},
		inLeases("get"): func(ctx context.Context, client kubernetes.Interface) error {
			_, err := client.CoordinationV1().Leases(device.LeaseNamespace).Get(ctx, fabric.ElectionLease(), metav1.GetOptions{})
			return err
		},
		inLeases("list"):  listing(leases.List),
		inLeases("watch"): watching(leases.Watch),
		inLeases("create"): func(ctx context.Context, client kubernetes.Interface) error {
			_, err := client.CoordinationV1().Leases(device.LeaseNamespace).Create(ctx, deviceLease("a100-9", accountNode), metav1.CreateOptions{DryRun: dry})
			return err
		},
		inLeases("update"): func(ctx context.Context, client kubernetes.Interface) error {
			l, err := c.admin.CoordinationV1().Leases(device.LeaseNamespace).Get(ctx, fabric.ElectionLease(), metav1.GetOptions{})
			if err == nil {
				_, err = client.CoordinationV1().Leases(device.LeaseNamespace).Update(ctx, l, metav1.UpdateOptions{DryRun: dry})
			}
			return err
		},
		inLeases("delete"): func(ctx context.Context, client kubernetes.Interface) error {
			return client.CoordinationV1().Leases(device.LeaseNamespace).Delete(ctx, fabric.ElectionLease(), metav1.DeleteOptions{DryRun: dry})
		},
		{device.AgentNamespace, "", "pods", "", "list"}:  listing(pods.List),
		{device.AgentNamespace, "", "pods", "", "watch"}: watching(pods.Watch),
	}
}

// Every right in the manifest serves one of the agent's uses, which fails without it; and there is no
// other.
func TestRights(t *testing.T) {
	c := connect(t)
	ctx := t.Context()
	c.elect(t)
	rights := granted(t)
	c.dropRights(ctx)
	t.Cleanup(func() { c.dropRights(context.WithoutCancel(ctx)) })
	c.newAccount(ctx, t)
	client := c.agentOn(ctx, t, accountNode, account).client
	c.rightsObjects(ctx, t)
	uses := c.uses(client)
	c.grant(ctx, t, rights)
	for r := range uses {
		if !slices.Contains(rights, r) {
			t.Errorf("the manifest does not grant %s", r)
		}
	}
	for _, r := range rights {
		do, used := uses[r]
		if !used {
			t.Errorf("%s is granted without use", r)
			continue
		}
		t.Run(r.verb+" "+r.resource, func(t *testing.T) {
			within(ctx, t, "with all rights", func(ctx context.Context) bool { return do(ctx, client) == nil }, func() any { return do(ctx, client) })
			rest := slices.DeleteFunc(slices.Clone(rights), func(other right) bool {
				// arbitrary-node includes associated-node.
				return other == r || r.verb == "associated-node:patch" && other.verb == "arbitrary-node:patch"
			})
			c.grant(ctx, t, rest)
			defer c.grant(ctx, t, rights)
			within(ctx, t, "refused without it", func(ctx context.Context) bool { return denied(do(ctx, client)) }, func() any { return do(ctx, client) })
		})
	}
}

// denied tells whether the API server refused for want of a right; about a claim's devices it calls that
// invalid.
func denied(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) && strings.Contains(err.Error(), "Forbidden")
}

// within waits until the API server has taken up changed roles.
func within(ctx context.Context, t *testing.T, what string, ok func(context.Context) bool, got func() any) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, 10*time.Second, true, func(ctx context.Context) (bool, error) {
		return ok(ctx), nil
	}); err != nil {
		t.Fatalf("not %s: %v", what, got())
	}
}

// rightsObjects are what the uses change or read.
func (c cluster) rightsObjects(ctx context.Context, t *testing.T) {
	t.Helper()
	c.allocated(ctx, t, "fence-here", accountNode)
	c.allocated(ctx, t, "fence-there", nodeOther)
	slice := nodeSlice("fence-slice", accountNode)
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "fence-event", Namespace: namespace}, Reason: "Fence", Type: "Normal",
		InvolvedObject: corev1.ObjectReference{Kind: "ResourceClaim", Name: "fence-here", Namespace: namespace},
	}
	drop := func() {
		end := context.WithoutCancel(ctx)
		_ = c.admin.ResourceV1().ResourceSlices().Delete(end, slice.Name, metav1.DeleteOptions{})
		_ = c.admin.CoreV1().Events(namespace).Delete(end, event.Name, metav1.DeleteOptions{})
	}
	drop()
	t.Cleanup(drop)
	if _, err := c.admin.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.admin.CoreV1().Events(namespace).Create(ctx, event, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}
