// SPDX-License-Identifier: Apache-2.0

package uninstall

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/lease"
)

const (
	// ours selects what the manifests installed.
	ours = "app.kubernetes.io/part-of=" + device.AgentName
	// agents selects the agents' Pods.
	agents = "app.kubernetes.io/name=" + device.AgentName
	// configKey is where the ConfigMap holds the configuration.
	configKey = "config.yaml"
	// look is how often leases and Pods are looked at while they go.
	look = 2 * time.Second
)

// Options are what Run needs.
type Options struct {
	Client kubernetes.Interface
	Clock  clock.Clock
	// Out gets a line for each step, for the person who waits.
	Out io.Writer
}

// InUseError is why nothing can be uninstalled now.
type InUseError struct {
	// Uses are "claim <namespace>/<name> has <device> (Pods …)".
	Uses []string
	// Closed: device classes were deleted already, so that no new claim can be served.
	Closed bool
}

// Error lists the claims and says what to do.
func (e *InUseError) Error() string {
	text := "GPUs are in use: " + strings.Join(e.Uses, "; ") + ". Delete the Pods and claims that have them and run this again"
	if e.Closed {
		return text + "; to go on using GPUs instead, apply the manifests again, since their device classes are deleted already"
	}
	return text + "; nothing was changed"
}

// Run uninstalls as far as is safe. It refuses, with an *InUseError, while a claim has a device.
func Run(ctx context.Context, o Options) error {
	u := &run{Options: o}
	uses, err := u.uses(ctx)
	if err != nil {
		return err
	}
	if len(uses) > 0 {
		return &InUseError{Uses: uses}
	}
	if err := u.wanted(ctx); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{u.closeClasses, u.release, u.stopAgents, u.clearNodes, u.clearSlices, u.clearOtherLeases, u.letGo} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	u.say("Done. Now run: kubectl delete --ignore-not-found -f deploy/daemonset.yaml -f deploy/extended-resource.yaml -f deploy/prefer-idle.yaml -f deploy/metal3.yaml")
	return nil
}

type run struct {
	Options
	said string
}

func (u *run) say(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if line != u.said {
		_, _ = fmt.Fprintln(u.Out, line) // progress that nobody reads stops nothing
	}
	u.said = line
}

// uses returns who has a device of ours, built into a node or not.
func (u *run) uses(ctx context.Context) ([]string, error) {
	claims, err := u.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list claims: %w", err)
	}
	var uses []string
	for _, c := range claims.Items {
		if c.Status.Allocation == nil {
			continue
		}
		var devices, pods []string
		for _, r := range c.Status.Allocation.Devices.Results {
			if r.Driver == device.Driver {
				devices = append(devices, r.Device)
			}
		}
		for _, p := range c.Status.ReservedFor {
			pods = append(pods, p.Name)
		}
		if len(devices) > 0 {
			use := fmt.Sprintf("claim %s/%s has %s", c.Namespace, c.Name, strings.Join(devices, ", "))
			if len(pods) > 0 {
				use += " for " + strings.Join(pods, ", ")
			}
			uses = append(uses, use)
		}
	}
	slices.Sort(uses)
	return uses, nil
}

// wanted fails if the configuration makes the agents take units without a claim: what is given back would be
// taken again at once. A configuration that cannot be read makes the agents do nothing.
func (u *run) wanted(ctx context.Context) error {
	cm, err := u.Client.CoreV1().ConfigMaps(device.AgentNamespace).Get(ctx, device.AgentName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the agents' configuration: %w", err)
	}
	c, err := config.Parse([]byte(cm.Data[configKey]), configKey)
	if err != nil {
		u.say("The agents' configuration cannot be read, so it is not known whether they take units without a claim: %v", err)
		return nil
	}
	var keeps []string
	for _, f := range c.Fabrics {
		for _, m := range f.Models {
			if m.MinPerNode > 0 {
				keeps = append(keeps, fmt.Sprintf("minPerNode of model %s on fabric %s", m.Name, f.ID))
			}
		}
	}
	if c.ForeignDevices == config.ForeignAdopt {
		keeps = append(keeps, "foreignDevices: adopt")
	}
	if len(keeps) > 0 {
		return fmt.Errorf("the agents would take units again that they give back: take %s out of ConfigMap %s/%s, wait two minutes until each agent has taken that up, and run this again; nothing was changed",
			strings.Join(keeps, ", "), device.AgentNamespace, device.AgentName)
	}
	return nil
}

// closeClasses keeps the scheduler from serving new claims while units are on their way back.
func (u *run) closeClasses(ctx context.Context) error {
	classes, err := u.Client.ResourceV1().DeviceClasses().List(ctx, metav1.ListOptions{LabelSelector: ours})
	if err != nil {
		return fmt.Errorf("list device classes: %w", err)
	}
	for _, c := range classes.Items {
		u.say("Deleting DeviceClass %s, so that no new claim is served.", c.Name)
		if err := u.Client.ResourceV1().DeviceClasses().Delete(ctx, c.Name, metav1.DeleteOptions{}); !gone(err) {
			return fmt.Errorf("delete device class %s: %w", c.Name, err)
		}
	}
	return nil
}

// release asks the agents for every unit that is out of the pool, by deleting its lease, which stays
// until the unit is back, and waits for that.
func (u *run) release(ctx context.Context) error {
	for {
		leases, err := u.deviceLeases(ctx)
		if err != nil {
			return err
		}
		if len(leases) == 0 {
			return nil
		}
		uses, err := u.uses(ctx)
		if err != nil {
			return err
		}
		if len(uses) > 0 {
			return &InUseError{Uses: uses, Closed: true}
		}
		for _, l := range leases {
			if l.DeletionTimestamp == nil {
				if err := u.ask(ctx, l); err != nil {
					return err
				}
			}
		}
		waiting := u.waiting(ctx, leases)
		u.say("Waiting until %s.", waiting)
		if err := u.pause(ctx, "wait until "+waiting+" (do the agents on these nodes run?)"); err != nil {
			return err
		}
	}
}

func (u *run) ask(ctx context.Context, l coordinationv1.Lease) error {
	u.say("Asking for the unit of %s on node %s back.", l.Name, ptr.Deref(l.Spec.HolderIdentity, "?"))
	// A lease that was given to a claim meanwhile has another version: looked at again.
	err := u.Client.CoordinationV1().Leases(device.LeaseNamespace).Delete(ctx, l.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &l.UID, ResourceVersion: &l.ResourceVersion},
	})
	if !gone(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete device lease %s: %w", l.Name, err)
	}
	return nil
}

// deviceLeases returns all leases but elections and turns, those that this release cannot read included.
func (u *run) deviceLeases(ctx context.Context) ([]coordinationv1.Lease, error) {
	list, err := u.Client.CoordinationV1().Leases(device.LeaseNamespace).List(ctx, metav1.ListOptions{LabelSelector: "!" + device.LabelElection + ",!" + device.LabelTurn})
	if err != nil {
		return nil, fmt.Errorf("list device leases: %w", err)
	}
	return list.Items, nil
}

// waiting says which units are still out, where, and what is known of why.
func (u *run) waiting(ctx context.Context, leases []coordinationv1.Lease) string {
	why := map[string]string{}
	for _, id := range fabrics(leases) {
		store, err := lease.NewFabricStore(id, lease.Options{Client: u.Client, Clock: u.Clock, Changed: func(string) {}})
		if err != nil {
			continue
		}
		known, err := store.ListLive(ctx)
		if unreadable := new(lease.DecodeError); errors.As(err, &unreadable) {
			why[unreadable.Lease] = unreadable.Error()
		}
		for _, l := range known {
			why[device.LeaseName(l.Fabric, l.Unit)] = reason(l)
		}
	}
	all := make([]string, 0, len(leases))
	for _, l := range leases {
		line := fmt.Sprintf("%s is given back by node %s", l.Name, ptr.Deref(l.Spec.HolderIdentity, "?"))
		all = append(all, line+" ("+cmp.Or(why[l.Name], l.Labels[device.LabelPhase])+")")
	}
	return strings.Join(all, "; ")
}

// reason is what a lease itself says about why its unit is not back.
func reason(l device.Lease) string {
	text := string(l.Phase)
	switch {
	case l.HeldBy != "":
		text += ", held open by " + l.HeldBy
	case len(l.PreparedFor) > 0:
		text += ", still prepared for a Pod"
	case l.Failure.Message != "":
		text += ", " + l.Failure.Message
	}
	return text
}

func fabrics(leases []coordinationv1.Lease) []device.FabricID {
	ids := map[device.FabricID]bool{}
	for _, l := range leases {
		if id := l.Labels[device.LabelFabric]; id != "" {
			ids[device.FabricID(id)] = true
		}
	}
	return slices.Sorted(maps.Keys(ids))
}

// stopAgents ends the agents: while one runs, it writes again what is cleared below.
func (u *run) stopAgents(ctx context.Context) error {
	u.say("No unit is out of the pool. Stopping the agents.")
	err := u.Client.AppsV1().DaemonSets(device.AgentNamespace).Delete(ctx, device.AgentName, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground),
	})
	if !gone(err) {
		return fmt.Errorf("delete the DaemonSet %s/%s: %w", device.AgentNamespace, device.AgentName, err)
	}
	for {
		pods, err := u.Client.CoreV1().Pods(device.AgentNamespace).List(ctx, metav1.ListOptions{LabelSelector: agents})
		if err != nil {
			return fmt.Errorf("list the agents: %w", err)
		}
		if len(pods.Items) == 0 {
			return nil
		}
		names := make([]string, len(pods.Items))
		for i, p := range pods.Items {
			names[i] = p.Name + " on node " + p.Spec.NodeName
		}
		if err := u.pause(ctx, "wait until the agents have ended: "+strings.Join(names, ", ")); err != nil {
			return err
		}
	}
}

// clearNodes removes our labels and conditions. The annotation that names a machine is not ours.
func (u *run) clearNodes(ctx context.Context) error {
	nodes, err := u.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list Nodes: %w", err)
	}
	const prefix = device.Driver + "/"
	for _, n := range nodes.Items {
		labels := map[string]any{}
		for key := range n.Labels {
			if strings.HasPrefix(key, prefix) {
				labels[key] = nil
			}
		}
		if len(labels) > 0 {
			if err := u.patchNode(ctx, n, map[string]any{"metadata": map[string]any{"labels": labels}}); err != nil {
				return err
			}
		}
		var conditions []any
		for _, c := range n.Status.Conditions {
			if strings.HasPrefix(string(c.Type), prefix) {
				conditions = append(conditions, map[string]any{"$patch": "delete", "type": c.Type})
			}
		}
		if len(conditions) > 0 {
			if err := u.patchNode(ctx, n, map[string]any{"status": map[string]any{"conditions": conditions}}, "status"); err != nil {
				return err
			}
		}
		if len(labels)+len(conditions) > 0 {
			u.say("Cleared %d labels and %d conditions of Node %s.", len(labels), len(conditions), n.Name)
		}
	}
	return nil
}

func (u *run) patchNode(ctx context.Context, n corev1.Node, patch map[string]any, sub ...string) error {
	data, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("make a patch for Node %s: %w", n.Name, err)
	}
	if _, err := u.Client.CoreV1().Nodes().Patch(ctx, n.Name, types.StrategicMergePatchType, data, metav1.PatchOptions{}, sub...); !gone(err) {
		return fmt.Errorf("clear Node %s: %w", n.Name, err)
	}
	return nil
}

// clearSlices withdraws the offers. A node's own slices the kubelet would remove in a while, too.
func (u *run) clearSlices(ctx context.Context) error {
	list, err := u.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, device.Driver).String(),
	})
	if err != nil {
		return fmt.Errorf("list ResourceSlices of driver %s: %w", device.Driver, err)
	}
	withdrawn := 0
	for _, s := range list.Items {
		if s.Spec.Driver != device.Driver {
			continue
		}
		withdrawn++
		if err := u.Client.ResourceV1().ResourceSlices().Delete(ctx, s.Name, metav1.DeleteOptions{}); !gone(err) {
			return fmt.Errorf("delete ResourceSlice %s: %w", s.Name, err)
		}
	}
	u.say("Withdrew %d ResourceSlices.", withdrawn)
	return nil
}

// clearOtherLeases deletes elections and turns.
func (u *run) clearOtherLeases(ctx context.Context) error {
	for _, label := range []string{device.LabelElection, device.LabelTurn} {
		list, err := u.Client.CoordinationV1().Leases(device.LeaseNamespace).List(ctx, metav1.ListOptions{LabelSelector: label})
		if err != nil {
			return fmt.Errorf("list the leases with label %s: %w", label, err)
		}
		for _, l := range list.Items {
			if err := u.Client.CoordinationV1().Leases(device.LeaseNamespace).Delete(ctx, l.Name, metav1.DeleteOptions{}); !gone(err) {
				return fmt.Errorf("delete lease %s: %w", l.Name, err)
			}
		}
	}
	return nil
}

// letGo allows what is empty now to be deleted: until here a policy has kept the namespace of the leases.
func (u *run) letGo(ctx context.Context) error {
	patch := fmt.Appendf(nil, `{"metadata": {"annotations": {%q: "true"}}}`, device.AnnotationUninstalled)
	_, err := u.Client.CoreV1().Namespaces().Patch(ctx, device.LeaseNamespace, types.MergePatchType, patch, metav1.PatchOptions{})
	if !gone(err) {
		return fmt.Errorf("mark namespace %s as empty: %w", device.LeaseNamespace, err)
	}
	return nil
}

// pause waits until it is time to look again; doing says what for, if ctx ends first.
func (u *run) pause(ctx context.Context, doing string) error {
	t := u.Clock.NewTimer(look)
	defer t.Stop()
	select {
	case <-t.C():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", doing, context.Cause(ctx))
	}
}

// gone tells that something is as wanted: the call went well or there was nothing left to do.
func gone(err error) bool { return err == nil || apierrors.IsNotFound(err) }
