// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// candidate runs an election in the test's bubble.
type candidate struct {
	*Election
	stop func()

	mu      sync.Mutex
	leading bool
	terms   int
	changed time.Time
	// linger is how long lead takes to return.
	linger time.Duration
}

func stand(t *testing.T, c kubernetes.Interface, node string) *candidate {
	t.Helper()
	e, err := NewElection(ElectionOptions{Client: c, Clock: clock.RealClock{}, Fabric: "0", Node: node, PodUID: "uid-" + node})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	d := &candidate{Election: e}
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.Run(ctx, d.lead)
	}()
	d.stop = func() { cancel(); <-done }
	t.Cleanup(d.stop)
	return d
}

func (d *candidate) lead(ctx context.Context) {
	d.set(true)
	<-ctx.Done()
	d.set(false)
	time.Sleep(d.linger)
}

func (d *candidate) set(leading bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.leading, d.changed = leading, time.Now()
	if leading {
		d.terms++
	}
}

func (d *candidate) leads() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.leading
}

// until waits in steps for the condition and returns how long it took.
func until(t *testing.T, most time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	const step = 100 * time.Millisecond
	for waited := time.Duration(0); waited <= most; waited += step {
		synctest.Wait()
		if ok() {
			return waited
		}
		time.Sleep(step)
	}
	t.Fatalf("%s: not within %s", what, most)
	return 0
}

// cutOff is a client whose writes and reads fail once it is cut off, as those of a killed process do.
type cutOff struct {
	mu  sync.Mutex
	off bool
}

func (c *cutOff) set(off bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off = off
}

func (c *cutOff) err(string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.off {
		return errors.New("connection refused")
	}
	return nil
}

// holder reads who holds the election by the API server.
func holder(t *testing.T, api *apiServer) string {
	t.Helper()
	obj, err := api.current(device.FabricID("0").ElectionLease())
	if err != nil {
		return ""
	}
	if obj.Labels[device.LabelElection] != "0" {
		t.Errorf("labels of the election lease: %v", obj.Labels)
	}
	return ptr.Deref(obj.Spec.HolderIdentity, "")
}

func TestElection_first_of_two(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		a, b := stand(t, api, "n1"), stand(t, api, "n2")
		until(t, 5*time.Second, "a leader", func() bool { return a.leads() || b.leads() })
		time.Sleep(time.Minute)
		if a.leads() == b.leads() {
			t.Fatalf("leading: n1 %v, n2 %v", a.leads(), b.leads())
		}
		leader, other := a, b
		if b.leads() {
			leader, other = b, a
		}
		if err := leader.StillLeads(t.Context()); err != nil {
			t.Errorf("the leader: %v", err)
		}
		if err := other.StillLeads(t.Context()); !errors.Is(err, ErrNotLeader) {
			t.Errorf("the other: %v", err)
		}
		if got := other.Leader(); got != leader.identity || holder(t, api) != leader.identity {
			t.Errorf("the other sees %q lead, the lease says %q", got, holder(t, api))
		}
	})
}

// TestElection_idle_traffic: an idle cluster has one renewal every 10 s, and the candidates send nothing.
func TestElection_idle_traffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		a, b, c := stand(t, api, "n1"), stand(t, api, "n2"), stand(t, api, "n3")
		until(t, 5*time.Second, "a leader", func() bool { return a.leads() || b.leads() || c.leads() })
		time.Sleep(5 * time.Second)
		gets, updates := api.count("get"), api.count("update")
		time.Sleep(10 * time.Minute)
		if got := api.count("get") - gets; got != 0 {
			t.Errorf("%d reads in 10 min", got)
		}
		if got := api.count("update") - updates; got < 55 || got > 61 {
			t.Errorf("%d writes in 10 min, want 6 a minute", got)
		}
	})
}

func TestElection_clean_stop_hands_over_at_once(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		a := stand(t, api, "n1")
		until(t, 5*time.Second, "n1 leads", a.leads)
		b := stand(t, api, "n2")
		a.linger = 3 * time.Second
		time.Sleep(time.Minute)
		stopped := make(chan struct{})
		go func() { defer close(stopped); a.stop() }()
		// Not before what it guards has returned.
		until(t, time.Second, "n1 was told", func() bool { return !a.leads() })
		time.Sleep(2 * time.Second)
		if b.leads() || holder(t, api) != a.identity {
			t.Errorf("the election was given up while the old leader still worked: %q", holder(t, api))
		}
		<-stopped
		until(t, 3*time.Second, "n2 leads", b.leads)
	})
}

func TestElection_killed_leader_is_replaced_in_45s(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		a := stand(t, api, "n1")
		until(t, 5*time.Second, "n1 leads", a.leads)
		b := stand(t, api, "n2")
		time.Sleep(time.Minute)
		a.kill(t, api)
		took := until(t, 45*time.Second, "n2 leads", b.leads)
		if took < 20*time.Second {
			t.Errorf("n2 took over after %s, before the lease ran out", took)
		}
	})
}

// kill makes the candidate's end look like kill -9: what it gave up on the way out is put back as it was.
func (d *candidate) kill(t *testing.T, api *apiServer) {
	t.Helper()
	name := device.FabricID("0").ElectionLease()
	api.setRefuse(func(verb string) error {
		if verb == "update" {
			return errors.New("connection refused")
		}
		return nil
	})
	before, err := api.current(name)
	if err != nil {
		t.Fatal(err)
	}
	d.stop()
	api.setRefuse(nil)
	after, err := api.current(name)
	if err != nil {
		t.Fatal(err)
	}
	if before.ResourceVersion != after.ResourceVersion {
		t.Fatal("the killed leader wrote")
	}
}

func TestElection_restarted_container_goes_on_at_once(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		a := stand(t, api, "n1")
		until(t, 5*time.Second, "n1 leads", a.leads)
		a.kill(t, api)
		again := stand(t, api, "n1")
		until(t, time.Second, "n1 leads again", again.leads)
	})
}

func TestElection_leader_that_cannot_renew_stops_in_time(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		a := stand(t, api, "n1")
		until(t, 5*time.Second, "n1 leads", a.leads)
		time.Sleep(time.Minute)
		link := &cutOff{}
		api.setRefuse(link.err)
		link.set(true)
		began := time.Now()
		until(t, renewDeadline+time.Second, "n1 stops", func() bool { return !a.leads() })
		if led := a.changed.Sub(renewed(t, api)); led > renewDeadline+time.Millisecond {
			t.Errorf("n1 led until %s after its last renewal", led)
		}
		if err := a.StillLeads(t.Context()); err == nil {
			t.Error("n1 still leads")
		}
		link.set(false)
		until(t, 45*time.Second, "n1 leads again", a.leads)
		t.Logf("led again after %s", time.Since(began))
	})
}

// renewed returns when the election was renewed last, to the microsecond.
func renewed(t *testing.T, api *apiServer) time.Time {
	t.Helper()
	obj, err := api.current(device.FabricID("0").ElectionLease())
	if err != nil {
		t.Fatal(err)
	}
	return obj.Spec.RenewTime.Time
}

func TestElection_survives_a_short_outage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		a := stand(t, api, "n1")
		until(t, 5*time.Second, "n1 leads", a.leads)
		time.Sleep(time.Minute)
		link := &cutOff{}
		api.setRefuse(link.err)
		// It spans a renewal wherever that falls.
		link.set(true)
		time.Sleep(9 * time.Second)
		link.set(false)
		time.Sleep(time.Minute)
		if !a.leads() || a.terms != 1 {
			t.Errorf("leading %v after %d terms", a.leads(), a.terms)
		}
	})
}

// TestElection_old_leader_does_not_give_up_what_another_holds stands for SIGSTOP: n2 has the lease, and
// n1 must find that out by itself and leave it alone.
func TestElection_old_leader_does_not_give_up_what_another_holds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(t)
		a := stand(t, api, "n1")
		until(t, 5*time.Second, "n1 leads", a.leads)
		time.Sleep(time.Minute)
		name := device.FabricID("0").ElectionLease()
		obj, err := api.current(name)
		if err != nil {
			t.Fatal(err)
		}
		obj.Spec.HolderIdentity = new("n2/uid-n2")
		obj.Spec.RenewTime = new(metav1.NowMicro())
		if _, err := api.CoordinationV1().Leases(device.LeaseNamespace).Update(t.Context(), obj, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := a.StillLeads(t.Context()); !errors.Is(err, ErrNotLeader) {
			t.Errorf("n1 before it noticed: %v", err)
		}
		until(t, renewPeriod+renewRetry, "n1 stops", func() bool { return !a.leads() })
		if got := holder(t, api); got != "n2/uid-n2" {
			t.Errorf("the lease is held by %q", got)
		}
		a.stop()
		if got := holder(t, api); got != "n2/uid-n2" {
			t.Errorf("after n1's clean stop the lease is held by %q", got)
		}
	})
}

// TestElection_foreign_clock: times in the Lease are another machine's and count for nothing.
func TestElection_foreign_clock(t *testing.T) {
	for _, skew := range []time.Duration{-time.Hour, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			api := newAPIServer(t)
			leases := api.CoordinationV1().Leases(device.LeaseNamespace)
			obj := must(leases.Create(t.Context(), &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Name: device.FabricID("0").ElectionLease(), Namespace: device.LeaseNamespace},
				Spec:       coordinationv1.LeaseSpec{HolderIdentity: new("n1/uid-n1"), LeaseDurationSeconds: new(int32(30))},
			}, metav1.CreateOptions{}))(t)
			b := stand(t, api, "n2")
			for range 30 {
				obj.Spec.RenewTime = new(metav1.NewMicroTime(time.Now().Add(skew)))
				obj = must(leases.Update(t.Context(), obj, metav1.UpdateOptions{}))(t)
				time.Sleep(renewPeriod)
				if b.leads() {
					t.Fatalf("skew %s: n2 took over from a leader that renews", skew)
				}
			}
			until(t, leaseDuration+spreadExpired, "n2 leads", b.leads)
		})
	}
}
