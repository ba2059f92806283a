// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// Errors on which callers decide. Each wraps its cause, if there is one.
var (
	// ErrGone: the claim does not exist, or was allocated anew, or is not allocated.
	ErrGone = errors.New("the claim does not have this allocation any more")
	// ErrConflict: the claim changed at each try. Look again.
	ErrConflict = errors.New("the claim kept changing")
	// ErrForbidden: the API server does not let this agent write the claim's device status.
	ErrForbidden = errors.New("this agent may not write the claim's status.devices; it needs resourceclaims/status patch and, for driver " +
		device.Driver + ", resourceclaims/driver associated-node:patch, with a token that is bound to its Pod on the claim's node")
)

const (
	// callTimeout bounds one call to the API server.
	callTimeout = 8 * time.Second
	// writeTries is how often a write is decided anew after a conflict. The scheduler and the kubelet
	// write a claim a few times in a second around its binding, then not at all.
	writeTries = 5
	// listPage is how many claims one call lists.
	listPage = 500
)

// Options are what Claims need.
type Options struct {
	Client kubernetes.Interface
	Clock  clock.PassiveClock
}

// Claims reads claims live and writes their conditions.
type Claims struct {
	client kubernetes.Interface
	clock  clock.PassiveClock
}

// New makes Claims; nothing is sent.
func New(o Options) *Claims { return &Claims{client: o.Client, clock: o.Clock} }

// Consumer is who a claim is reserved for, for events.
type Consumer struct {
	Namespace, Name, UID string
	// Resource is "pods", or what else may use a claim one day.
	Resource string
}

// Has reads from the API server whether the claim still has that very allocation.
func (c *Claims) Has(ctx context.Context, a device.Attempt) (bool, error) {
	_, err := c.get(ctx, a)
	if errors.Is(err, ErrGone) {
		return false, nil
	}
	return err == nil, err
}

// Consumers reads from the API server who the attempt's claim is reserved for. It is the only way to
// find them: a Pod that asks for an extended resource does not name its claim.
func (c *Claims) Consumers(ctx context.Context, a device.Attempt) ([]Consumer, error) {
	obj, err := c.get(ctx, a)
	if err != nil {
		return nil, err
	}
	return consumers(obj), nil
}

func consumers(obj *resourcev1.ResourceClaim) []Consumer {
	var all []Consumer
	for _, r := range obj.Status.ReservedFor {
		all = append(all, Consumer{Namespace: obj.Namespace, Name: r.Name, UID: string(r.UID), Resource: r.Resource})
	}
	return all
}

// Live reads from the API server, not from a cache, which claims are allocated the unit, by either of
// its entries. It lists all claims of the cluster: it is for the moment before a unit is called back.
func (c *Claims) Live(ctx context.Context, f device.FabricID, u device.Unit) ([]device.Attempt, error) {
	var found []device.Attempt
	opts := metav1.ListOptions{Limit: listPage}
	for {
		page, err := c.list(ctx, opts)
		if err != nil {
			return nil, fmt.Errorf("list the claims on unit %s of fabric %s: %w", u, f, err)
		}
		for i := range page.Items {
			attempts, err := on(&page.Items[i], f, u)
			if err != nil {
				return nil, err
			}
			found = append(found, attempts...)
		}
		if page.Continue == "" {
			return found, nil
		}
		opts.Continue = page.Continue
	}
}

func (c *Claims) list(ctx context.Context, opts metav1.ListOptions) (*resourcev1.ResourceClaimList, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return c.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, opts)
}

// on returns the attempts by which the claim has the unit. One that cannot be read is an error: that
// nobody knows whose it is does not make the unit free.
func on(obj *resourcev1.ResourceClaim, f device.FabricID, u device.Unit) ([]device.Attempt, error) {
	var found []device.Attempt
	ds, bad := Demands(f, obj)
	for _, e := range bad {
		if unit, _ := device.UnitOfEntry(e.Entry); unit == u {
			return nil, e
		}
	}
	for _, d := range ds {
		if unit, _ := device.UnitOfEntry(d.Attempt.Entry); unit == u {
			found = append(found, d.Attempt)
		}
	}
	return found, nil
}

// get reads the claim of the attempt; ErrGone if it has not that allocation.
func (c *Claims) get(ctx context.Context, a device.Attempt) (*resourcev1.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	obj, err := c.client.ResourceV1().ResourceClaims(a.Namespace).Get(ctx, a.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("read claim %s: %w: %w", a.Claim(), ErrGone, err)
	}
	if err != nil {
		return nil, fmt.Errorf("read claim %s: %w", a.Claim(), err)
	}
	if find(obj, a) == nil {
		return nil, fmt.Errorf("read claim %s: allocation %q: %w", a.Claim(), a, ErrGone)
	}
	return obj, nil
}

// find returns what the claim demands by the attempt, nil if it does not.
func find(obj *resourcev1.ResourceClaim, a device.Attempt) *pool.Demand {
	ds, _ := demands(obj, func(p string) bool { return p == a.Pool })
	for i := range ds {
		if ds[i].Attempt == a {
			return &ds[i]
		}
	}
	return nil
}
