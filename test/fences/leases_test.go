// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const attempt = device.Driver + "/attempt"

func election(f device.FabricID, holder string) *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: device.LeaseNamespace, Name: f.ElectionLease(),
			Labels: map[string]string{device.LabelElection: string(f)},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder},
	}
}

func deviceLease(u device.Unit, node string) *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: device.LeaseNamespace, Name: device.LeaseName(fabric, u),
			Labels: map[string]string{
				device.LabelFabric: string(fabric), device.LabelNode: node, device.LabelPhase: string(device.Assigned),
			},
			Annotations: map[string]string{attempt: "ns/a/1 2026-01-02T03:04:05Z " + node + " " + fabric.Pool() + "/" + u.Entry()},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &node},
	}
}

func create(l *coordinationv1.Lease) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		_, err := client.CoordinationV1().Leases(l.Namespace).Create(ctx, l.DeepCopy(), metav1.CreateOptions{})
		return err
	}
}

func change(name string, edit func(*coordinationv1.Lease)) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		l, err := client.CoordinationV1().Leases(device.LeaseNamespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		edit(l)
		_, err = client.CoordinationV1().Leases(device.LeaseNamespace).Update(ctx, l, metav1.UpdateOptions{})
		return err
	}
}

func remove(name string) func(context.Context, kubernetes.Interface) error {
	return func(ctx context.Context, client kubernetes.Interface) error {
		return client.CoordinationV1().Leases(device.LeaseNamespace).Delete(ctx, name, metav1.DeleteOptions{})
	}
}

// clearLeases removes what the tests make, before and after.
func (c cluster) clearLeases(t *testing.T) {
	t.Helper()
	clear := func() {
		ctx := context.WithoutCancel(t.Context())
		leases := c.admin.CoordinationV1().Leases(device.LeaseNamespace)
		list, err := leases.List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Error(err)
			return
		}
		for _, l := range list.Items {
			if strings.Contains(l.Name, "fence") {
				_ = leases.Delete(ctx, l.Name, metav1.DeleteOptions{})
			}
		}
	}
	clear()
	t.Cleanup(clear)
}

// elect lets the two leaders take their elections, as they do.
func (c cluster) elect(t *testing.T) {
	t.Helper()
	c.clearLeases(t)
	for f, a := range map[device.FabricID]agent{fabric: c.leader, otherFabric: c.other} {
		if err := create(election(f, a.identity()))(t.Context(), a.client); err != nil {
			t.Fatalf("%s takes the election of %s: %v", a.node, f, err)
		}
	}
	// The policies read the elections with a delay.
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		publish := func(a agent, f device.FabricID) error {
			_, err := a.client.ResourceV1().ResourceSlices().Create(ctx, fabricSlice("fence-probe", f), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err
		}
		last = errors.Join(publish(c.leader, fabric), publish(c.other, otherFabric),
			refused(publish(c.other, fabric), saysLeader), refused(publish(c.leader, otherFabric), saysLeader))
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("the elections do not count: %v", last)
	}
}

// Nobody deletes the namespace of the leases, an administrator least of all by mistake, until uninstall has
// marked it.
func TestLeaseNamespace(t *testing.T) {
	c := connect(t)
	gone := func(ctx context.Context, client kubernetes.Interface) error {
		return client.CoreV1().Namespaces().Delete(ctx, device.LeaseNamespace, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
	}
	mark := func(is string) func(context.Context, kubernetes.Interface) error {
		return func(ctx context.Context, client kubernetes.Interface) error {
			patch := []byte(`{"metadata": {"annotations": {"` + device.AnnotationUninstalled + `": "` + is + `"}}}`)
			_, err := client.CoreV1().Namespaces().Patch(ctx, device.LeaseNamespace, types.MergePatchType, patch, metav1.PatchOptions{})
			return err
		}
	}
	t.Cleanup(func() {
		if err := mark("false")(context.Background(), c.admin); err != nil {
			t.Error(err)
		}
	})
	admin := agent{client: c.admin}
	try(t, []write{
		{"nobody deletes it while GPUs may be attached", admin, gone, "run `cohdi-agent uninstall` first"},
		{"uninstall marks it", admin, mark("true"), ""},
		{"then it may be deleted", admin, gone, ""},
	})
}

func TestElections(t *testing.T) {
	c := connect(t)
	c.clearLeases(t)
	name := fabric.ElectionLease()
	hold := func(who string) func(context.Context, kubernetes.Interface) error {
		return change(name, func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = &who })
	}
	relabelled := election(fabric, c.leader.identity())
	relabelled.Labels[device.LabelElection] = string(otherFabric)
	dashed := election("fence-x", c.leader.identity())
	elsewhere := election(fabric, c.leader.identity())
	elsewhere.Namespace = device.AgentNamespace
	try(t, []write{
		{"without a Pod nobody runs", c.unbound, create(election(fabric, "/")), saysUnbound},
		{"nobody makes another the leader", c.other, create(election(fabric, c.leader.identity())), "for itself only"},
		{"another Pod of the node is another", c.leader, create(election(fabric, c.leader.node+"/x")), "for itself only"},
		{"name and label must agree", c.leader, create(relabelled), "is called fabric-<id>"},
		{"an id holds no dash", c.leader, create(dashed), "is called fabric-<id>"},
		{"leases live in one namespace", c.leader, create(elsewhere), "cannot create resource"},
		{"an agent takes a new election", c.leader, create(election(fabric, c.leader.identity())), ""},
		{"the leader renews", c.leader, hold(c.leader.identity()), ""},
		{"nobody gives up for another", c.other, hold(""), "for itself only"},
		{"nobody renews for another", c.other, hold(c.leader.identity()), "for itself only"},
		{"without a Pod nobody takes over", c.unbound, hold("/"), saysUnbound},
		{"nobody deletes an election", c.leader, remove(name), "never an election"},
		{"nobody takes its label away", c.leader, change(name, func(l *coordinationv1.Lease) { l.Labels = nil }), "is called fabric-<id>"},
		{"another agent takes over", c.other, hold(c.other.identity()), ""},
		{"the leader gives up", c.other, hold(""), ""},
	})
}

// TestTurns: an agent takes the turn for itself, and hands its own on.
func TestTurns(t *testing.T) {
	c := connect(t)
	c.clearLeases(t)
	name := device.TurnLease("https://fences")
	turn := func(holder string) *coordinationv1.Lease {
		return &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: device.LeaseNamespace, Name: name, Labels: map[string]string{device.LabelTurn: name}},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder},
		}
	}
	hold := func(who string) func(context.Context, kubernetes.Interface) error {
		return change(name, func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = &who })
	}
	elected := turn(c.leader.node)
	elected.Labels[device.LabelElection] = string(fabric)
	try(t, []write{
		{"without a Pod nobody takes it", c.unbound, create(turn("")), saysUnbound},
		{"nobody gives it to another", c.leader, create(turn(c.other.node)), "takes the turn for itself"},
		{"it is no election", c.leader, create(elected), "does not carry the label"},
		{"an agent takes it", c.leader, create(turn(c.leader.node)), ""},
		{"another gets in line", c.other, change(name, func(l *coordinationv1.Lease) { l.Annotations = map[string]string{device.Driver + "/queue": `["x"]`} }), ""},
		{"nobody takes it from another for a third", c.other, hold("x"), "takes the turn for itself"},
		{"it is handed on", c.leader, hold(c.other.node), ""},
		{"it is taken from who is gone", c.leader, hold(c.leader.node), ""},
		{"nobody deletes it", c.leader, remove(name), "never a turn"},
	})
}

func TestDeviceLeases(t *testing.T) {
	c := connect(t)
	c.elect(t)
	unit := device.NumberedUnit("a100", 0)
	l := deviceLease(unit, nodeHolder)
	phase := change(l.Name, func(l *coordinationv1.Lease) { l.Labels[device.LabelPhase] = string(device.Attaching) })
	take := change(l.Name, func(l *coordinationv1.Lease) { delete(l.Annotations, attempt) })
	give := change(l.Name, func(l *coordinationv1.Lease) { l.Annotations = map[string]string{attempt: "another"} })
	move := change(l.Name, func(l *coordinationv1.Lease) {
		l.Spec.HolderIdentity, l.Labels[device.LabelNode] = new(nodeOther), nodeOther
	})
	relabel := change(l.Name, func(l *coordinationv1.Lease) { l.Labels[device.LabelNode] = nodeOther })
	stray := deviceLease(unit, nodeHolder)
	stray.Labels[device.LabelFabric] = string(otherFabric)
	election := deviceLease(unit, nodeHolder)
	election.Labels[device.LabelElection] = string(fabric)
	nobody := deviceLease(unit, nodeHolder)
	nobody.Spec.HolderIdentity = nil
	try(t, []write{
		{"without a Pod nobody creates", c.unbound, create(l), saysEither},
		{"the holder does not create", c.holder, create(l), saysLeader},
		{"the leader of another fabric does not create", c.other, create(l), saysLeader},
		{"nor by another fabric's label", c.other, create(stray), "is called device-<fabric>-<unit>|" + saysLeader},
		{"a label of another fabric is refused to leaders, too", c.leader, create(stray), "is called device-<fabric>-<unit>"},
		{"it is no election", c.leader, create(election), "does not carry the label"},
		{"it has a holder", c.leader, create(nobody), "names its node"},
		{"the leader creates", c.leader, create(l), ""},
		{"the holder changes the phase", c.holder, phase, ""},
		{"another node does not", c.other, phase, saysLeader},
		{"without a Pod nobody does", c.unbound, phase, saysEither},
		{"the holder does not take from a claim", c.holder, take, "gives a unit to a claim"},
		{"nor give to one", c.holder, give, "gives a unit to a claim"},
		{"another node does not take from a claim", c.other, take, saysLeader},
		{"the leader takes from a claim", c.leader, take, ""},
		{"and gives to another", c.leader, give, ""},
		{"the leader does not move it", c.leader, move, "never moves"},
		{"nor its label alone", c.leader, relabel, "names its node"},
		{"nor does the holder", c.holder, move, "never moves"},
		{"another node does not take it", c.other, move, "never moves|" + saysLeader},
		{"another node does not delete it", c.other, remove(l.Name), saysLeader},
		{"without a Pod nobody does either", c.unbound, remove(l.Name), saysEither},
		{"the holder deletes it", c.holder, remove(l.Name), ""},
		{"the leader creates another", c.leader, create(l), ""},
		{"and deletes it", c.leader, remove(l.Name), ""},
	})
	t.Run("an old leader is refused once another leads", func(t *testing.T) {
		if err := change(fabric.ElectionLease(), func(l *coordinationv1.Lease) {
			l.Spec.HolderIdentity = new(c.other.identity())
		})(t.Context(), c.other.client); err != nil {
			t.Fatal(err)
		}
		c.eventually(t, c.other, create(l))
		if err := refused(change(l.Name, func(l *coordinationv1.Lease) { delete(l.Annotations, attempt) })(t.Context(), c.leader.client), saysLeader); err != nil {
			t.Error(err)
		}
	})
}
