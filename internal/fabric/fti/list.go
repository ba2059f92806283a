// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"context"
	"sync"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// parallelLists bounds how many machines are listed at once.
const parallelLists = 4

// ListEach lists each machine by itself: one that fails does not hide the others.
func ListEach(
	ctx context.Context, machines []device.Machine, list func(context.Context, device.Machine) ([]device.OnFabric, *device.Fault),
) (map[device.Machine][]device.OnFabric, map[device.Machine]error) {
	attached := make(map[device.Machine][]device.OnFabric, len(machines))
	failed := make(map[device.Machine]error)
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelLists)
	for _, m := range machines {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			gpus, fault := list(ctx, m)
			mu.Lock()
			defer mu.Unlock()
			if fault != nil {
				failed[m] = fault
				return
			}
			attached[m] = gpus
		})
	}
	wg.Wait()
	return attached, failed
}
