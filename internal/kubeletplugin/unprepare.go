// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"fmt"
	"reflect"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin. It needs the UID and local files: claim,
// device, API server and CDI spec may all be gone.
func (p *Plugin) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	var (
		mu      sync.Mutex
		all     sync.WaitGroup
		results = make(map[types.UID]error, len(claims))
	)
	for _, claim := range claims {
		all.Go(func() {
			began := p.s.Clock.Now()
			err := p.unprepare(ctx, claim)
			if err != nil {
				err = fmt.Errorf("unprepare claim %s on node %s: %w", claim, p.s.NodeName, err)
			}
			p.s.Observer.Unprepared(outcome(err), p.s.Clock.Since(began))
			mu.Lock()
			defer mu.Unlock()
			results[claim.UID] = err
		})
	}
	all.Wait()
	return results, nil
}

func (p *Plugin) unprepare(ctx context.Context, claim kubeletplugin.NamespacedObject) error {
	if !validUID(claim.UID) {
		return nil // it was refused by Prepare, too
	}
	// The kubelet does not wait for a Prepare that it has given up on; nor do we.
	p.claims.interrupt(claim.UID)
	ctx, done, err := p.claims.take(ctx, claim.UID)
	if err != nil {
		return fmt.Errorf("another call for the same claim is at work: %w", err)
	}
	e, err := p.drop(ctx, claim.UID, nil)
	done()
	if err != nil {
		return err
	}
	if e != nil {
		p.wakeTidy()
		klog.FromContext(ctx).Info("Unprepared claim", "claim", klog.KRef(claim.Namespace, claim.Name), "uid", claim.UID, "devices", unitsOf(e.Devices))
	}
	return nil
}

// drop removes spec and entry of a claim and returns the entry that there was. The caller has the claim's turn. Of an orphan,
// only the entry that was found to be one is removed: the claim may have been prepared anew since. Without one it is the
// kubelet that asks, and the claim must not come back by a rebuild.
func (p *Plugin) drop(ctx context.Context, claim types.UID, found *entry) (*entry, error) {
	var was *entry
	err := p.checkpoint.update(ctx, func(r *record) (bool, error) {
		if found != nil && !reflect.DeepEqual(r.Claims[claim], found) {
			return false, nil
		}
		if err := p.specs.remove(claim); err != nil {
			return false, err
		}
		was = r.Claims[claim]
		if r.Rebuild && found == nil && !r.Unprepared[claim] {
			if r.Unprepared == nil {
				r.Unprepared = map[types.UID]bool{}
			}
			r.Unprepared[claim] = true
			delete(r.Claims, claim)
			return true, nil
		}
		delete(r.Claims, claim)
		return was != nil, nil
	})
	if err != nil {
		return nil, err
	}
	if was != nil {
		p.released.send()
	}
	return was, nil
}
