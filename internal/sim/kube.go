// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applyresourcev1 "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	resourcev1client "k8s.io/client-go/kubernetes/typed/resource/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// How long calls to the API server take.
const (
	apiLeast = 2 * time.Millisecond
	apiMost  = 80 * time.Millisecond
)

func apiCall(key string) request {
	return request{
		key: "api " + key, least: apiLeast, most: apiMost,
		lost: func(cause error) error { return fmt.Errorf("no answer from the API server: %w", cause) },
		no:   refusedWrite,
	}
}

// kube is the API server as client-go shows it to one process. What is not implemented is not called.
type kube struct {
	kubernetes.Interface
	p *process
}

func (k kube) CoordinationV1() coordinationv1client.CoordinationV1Interface {
	return kubeCoordination{p: k.p}
}
func (k kube) ResourceV1() resourcev1client.ResourceV1Interface { return kubeResource{p: k.p} }

type kubeCoordination struct {
	coordinationv1client.CoordinationV1Interface
	p *process
}

func (k kubeCoordination) Leases(string) coordinationv1client.LeaseInterface {
	return kubeLeases{p: k.p}
}

type kubeLeases struct {
	coordinationv1client.LeaseInterface
	p *process
}

func (k kubeLeases) Get(ctx context.Context, name string, _ metav1.GetOptions) (*coordinationv1.Lease, error) {
	return invoke(ctx, k.p, apiCall("get lease "+name), func() (*coordinationv1.Lease, error) {
		return as[*coordinationv1.Lease](k.p.s.api.get(leases, name))
	})
}

func (k kubeLeases) List(ctx context.Context, o metav1.ListOptions) (*coordinationv1.LeaseList, error) {
	label, value, _ := strings.Cut(o.LabelSelector, "=")
	return invoke(ctx, k.p, apiCall("list leases"), func() (*coordinationv1.LeaseList, error) {
		list := &coordinationv1.LeaseList{}
		for _, l := range listOf[*coordinationv1.Lease](k.p.s.api, leases) {
			if l.Labels[label] == value {
				list.Items = append(list.Items, *l)
			}
		}
		return list, nil
	})
}

func (k kubeLeases) Create(ctx context.Context, l *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return invoke(ctx, k.p, apiCall("create lease "+l.Name), func() (*coordinationv1.Lease, error) {
		if err := k.p.s.api.admitLease(k.p, nil, l); err != nil {
			return nil, err
		}
		return as[*coordinationv1.Lease](k.p.s.api.create(leases, l))
	})
}

func (k kubeLeases) Update(ctx context.Context, l *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return invoke(ctx, k.p, apiCall("update lease "+l.Name+" "+l.Labels[device.LabelPhase]), func() (*coordinationv1.Lease, error) {
		before, ok := find[*coordinationv1.Lease](k.p.s.api, leases, l.Name)
		if ok {
			if err := k.p.s.api.admitLease(k.p, before, l); err != nil {
				return nil, err
			}
		}
		k.p.s.writer = k.p
		defer func() { k.p.s.writer = nil }()
		after, err := as[*coordinationv1.Lease](k.p.s.api.update(leases, l))
		if err == nil {
			k.p.s.handsOff(before)
		}
		return after, err
	})
}

func (k kubeLeases) Delete(ctx context.Context, name string, o metav1.DeleteOptions) error {
	_, err := invoke(ctx, k.p, apiCall("delete lease "+name), func() (struct{}, error) {
		before, ok := find[*coordinationv1.Lease](k.p.s.api, leases, name)
		if ok {
			if err := k.p.s.api.admitLease(k.p, before, nil); err != nil {
				return struct{}{}, err
			}
		}
		err := k.p.s.api.remove(leases, name, o.Preconditions)
		if err == nil {
			k.p.s.handsOff(before)
		}
		return struct{}{}, err
	})
	return err
}

// as narrows what the API server returned.
func as[T object](o object, err error) (T, error) {
	var none T
	if err != nil {
		return none, err
	}
	t, ok := o.(T)
	if !ok {
		return none, fmt.Errorf("the API server has a %T", o)
	}
	return t, nil
}

type kubeResource struct {
	resourcev1client.ResourceV1Interface
	p *process
}

func (k kubeResource) ResourceClaims(string) resourcev1client.ResourceClaimInterface {
	return kubeClaims{p: k.p}
}

type kubeClaims struct {
	resourcev1client.ResourceClaimInterface
	p *process
}

func (k kubeClaims) Get(ctx context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	return invoke(ctx, k.p, apiCall("get claim "+name), func() (*resourceapi.ResourceClaim, error) {
		return as[*resourceapi.ResourceClaim](k.p.s.api.get(claims, name))
	})
}

func (k kubeClaims) List(ctx context.Context, _ metav1.ListOptions) (*resourceapi.ResourceClaimList, error) {
	return invoke(ctx, k.p, apiCall("list claims"), func() (*resourceapi.ResourceClaimList, error) {
		k.p.s.watch.listed[k.p.name] = k.p.s.now()
		list := &resourceapi.ResourceClaimList{}
		for _, c := range listOf[*resourceapi.ResourceClaim](k.p.s.api, claims) {
			list.Items = append(list.Items, *c)
		}
		return list, nil
	})
}

func (k kubeClaims) ApplyStatus(ctx context.Context, c *applyresourcev1.ResourceClaimApplyConfiguration, o metav1.ApplyOptions) (*resourceapi.ResourceClaim, error) {
	told := []string{"apply claim", *c.Name}
	for _, d := range c.Status.Devices {
		for _, cond := range d.Conditions {
			told = append(told, *d.Device, strings.TrimPrefix(*cond.Type, device.Driver+"/"))
		}
	}
	return invoke(ctx, k.p, apiCall(strings.Join(told, " ")), func() (*resourceapi.ResourceClaim, error) {
		return k.p.s.api.applyStatus(k.p, c, o.FieldManager)
	})
}

// applyStatus is server-side apply of status.devices: what the manager applied before and does not repeat
// is taken away.
func (a *apiServer) applyStatus(p *process, c *applyresourcev1.ResourceClaimApplyConfiguration, manager string) (*resourceapi.ResourceClaim, error) {
	stored, ok := find[*resourceapi.ResourceClaim](a, claims, *c.Name)
	if !ok {
		_, err := a.get(claims, *c.Name)
		return nil, err
	}
	if c.UID != nil && *c.UID != stored.UID || c.ResourceVersion != nil && *c.ResourceVersion != stored.ResourceVersion {
		return nil, conflict(claims, *c.Name)
	}
	owned := stored.Annotations["manager/"+manager]
	stored.Status.Devices = slices.DeleteFunc(stored.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
		return owned != "" && d.Pool+"/"+d.Device == owned
	})
	for _, d := range c.Status.Devices {
		entry := resourceapi.AllocatedDeviceStatus{Driver: *d.Driver, Pool: *d.Pool, Device: *d.Device}
		for _, cond := range d.Conditions {
			meta.SetStatusCondition(&entry.Conditions, metav1.Condition{
				Type: *cond.Type, Status: *cond.Status, Reason: *cond.Reason, Message: *cond.Message,
			})
			a.s.told(p, stored, *d.Device, *cond.Type, *cond.Reason, *cond.Message)
		}
		stored.Status.Devices = append(stored.Status.Devices, entry)
		if stored.Annotations == nil {
			stored.Annotations = map[string]string{}
		}
		stored.Annotations["manager/"+manager] = *d.Pool + "/" + *d.Device
	}
	return as[*resourceapi.ResourceClaim](a.update(claims, stored))
}
