// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// term is one run for the election Lease and, when it is won, one time of leading. It is the lock that
// client-go's elector works with, and closes four gaps of it:
//
//   - An elector starts its clock when it first looks, so one that is started for a dead leader's Lease
//     would wait for the Lease to run out once more. The term tells it what was observed before.
//   - It counts the renew deadline from the first failed renewal, which is as late as the Lease runs
//     out for others. The term counts from the last renewal that succeeded.
//   - It gives the Lease up while what it guards still runs. The term waits for that to return.
//   - When it comes back from a long stop it gives up a Lease that another holds by then. The term
//     does not.
type term struct {
	election *Election
	// end ends the run.
	end context.CancelFunc
	// done is closed when lead has returned.
	done chan struct{}

	mu sync.Mutex // guards the following
	// obj is the Lease as last read or written.
	obj *coordinationv1.Lease
	// renewed is when the last successful write of our identity was sent; zero if there was none.
	renewed time.Time
}

var _ resourcelock.Interface = (*term)(nil)

// errHeld: the Lease is another's.
var errHeld = errors.New("the election lease is held by another agent")

// Get returns the record for the elector. Where it stood unchanged for as long as it is valid, nobody
// holds it. Where another holds it, this run is over.
func (t *term) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	e := t.election
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	obj, err := e.client.Get(ctx, e.name, metav1.GetOptions{})
	if err != nil {
		if !apierrors.IsNotFound(err) {
			t.giveUp()
		}
		return nil, nil, err
	}
	t.setObj(obj)
	expired := e.expired(&obj.Spec)
	e.observe(&obj.Spec)
	record := resourcelock.LeaseSpecToLeaderElectionRecord(&obj.Spec)
	raw, err := json.Marshal(record)
	if err != nil {
		return nil, nil, fmt.Errorf("marshal the record of election %s: %w", e.name, err)
	}
	switch {
	case record.HolderIdentity == "", record.HolderIdentity == e.identity:
	case expired && !t.won():
		record.HolderIdentity = ""
	default:
		t.end()
	}
	return record, raw, nil
}

// Create makes the Lease, with the label by which the admission policies find it.
func (t *term) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	e := t.election
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	sent := e.clock.Now()
	obj, err := e.client.Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: device.LeaseNamespace,
			Name:      e.name,
			Labels:    map[string]string{device.LabelElection: string(e.fabric)},
		},
		Spec: resourcelock.LeaderElectionRecordToLeaseSpec(&record),
	}, metav1.CreateOptions{})
	if err != nil {
		t.giveUp()
		return err
	}
	t.wrote(obj, sent)
	return nil
}

// Update takes the Lease, renews it, or gives it up.
func (t *term) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	obj := t.getObj()
	if obj == nil {
		return errors.New("the election lease was never read")
	}
	if record.HolderIdentity == "" {
		return t.release(ctx, obj, record)
	}
	for {
		sent := t.election.clock.Now()
		stored, err := t.put(ctx, obj, record)
		if err == nil {
			t.wrote(stored, sent)
			return nil
		}
		t.giveUp()
		if !t.won() || apierrors.IsConflict(err) || apierrors.IsNotFound(err) || !t.election.sleep(ctx, renewRetry) {
			return err
		}
	}
}

// release gives the Lease up once lead has returned, if it is still ours.
func (t *term) release(ctx context.Context, obj *coordinationv1.Lease, record resourcelock.LeaderElectionRecord) error {
	if holder := obj.Spec.HolderIdentity; holder == nil || *holder != t.election.identity {
		return errHeld
	}
	// The elector ends what it guards only after this call.
	t.end()
	select {
	case <-t.done:
	case <-ctx.Done():
		return fmt.Errorf("give up the election lease: what it guards has not ended: %w", ctx.Err())
	}
	stored, err := t.put(ctx, obj, record)
	if err != nil {
		return err
	}
	t.setObj(stored)
	return nil
}

func (t *term) put(ctx context.Context, obj *coordinationv1.Lease, record resourcelock.LeaderElectionRecord) (*coordinationv1.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	obj = obj.DeepCopy()
	obj.Spec = resourcelock.LeaderElectionRecordToLeaseSpec(&record)
	if obj.Labels == nil {
		obj.Labels = map[string]string{}
	}
	obj.Labels[device.LabelElection] = string(t.election.fabric)
	return t.election.client.Update(ctx, obj, metav1.UpdateOptions{})
}

// RecordEvent says nothing: who leads is in the Lease, and in the log.
func (t *term) RecordEvent(string) {}

// Identity is this agent's.
func (t *term) Identity() string { return t.election.identity }

// Describe names the Lease for logs.
func (t *term) Describe() string { return device.LeaseNamespace + "/" + t.election.name }

// giveUp ends a run that is not won: the elector would try again without looking, with a pause of its
// own; the watch knows better when.
func (t *term) giveUp() {
	if !t.won() {
		t.end()
	}
}

// lead calls f with a context that ends a renew deadline after the last renewal.
func (t *term) lead(ctx context.Context, f func(ctx context.Context)) {
	defer close(t.done)
	defer t.end()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var watchdog sync.WaitGroup
	defer watchdog.Wait()
	defer cancel()
	watchdog.Go(func() { t.watch(ctx) })
	if ctx.Err() != nil {
		return
	}
	f(ctx)
}

// watch ends the term when the last renewal is too long ago.
func (t *term) watch(ctx context.Context) {
	for {
		left := t.left()
		if left <= 0 {
			klog.FromContext(ctx).Info("The election lease was not renewed in time", "fabric", t.election.fabric)
			t.end()
			return
		}
		if !t.election.sleep(ctx, left) {
			return
		}
	}
}

func (t *term) left() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.renewed.Add(renewDeadline).Sub(t.election.clock.Now())
}

// current tells whether the term is won and was renewed recently enough.
func (t *term) current() bool { return t.won() && t.left() > 0 }

func (t *term) won() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.renewed.IsZero()
}

// wrote notes a write of our identity. It counts from when it was sent, which others cannot have seen
// earlier.
func (t *term) wrote(obj *coordinationv1.Lease, sent time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.obj, t.renewed = obj, sent
}

func (t *term) setObj(obj *coordinationv1.Lease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.obj = obj
}

func (t *term) getObj() *coordinationv1.Lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.obj
}
