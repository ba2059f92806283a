// SPDX-License-Identifier: Apache-2.0

package fabrictest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

// minPoll bounds how often Wait looks, whatever the manager says.
const minPoll = 100 * time.Millisecond

// Wait polls an operation until it is Done. Failed is returned as its Fault. Suspended goes on being
// polled: a person resumes it. So does an operation that cannot be looked at for the moment: what was asked
// is not undone by that, and only the end of ctx ends the wait, with an unknown outcome.
func Wait(ctx context.Context, clk clock.WithTicker, m fabric.Manager, op fabric.Operation) (fabric.Operation, error) {
	var why error
	for op.State == fabric.Pending || op.State == fabric.Suspended {
		timer := clk.NewTimer(max(op.PollAfter, minPoll))
		select {
		case <-ctx.Done():
			timer.Stop()
			err := context.Cause(ctx)
			if why != nil {
				err = fmt.Errorf("%w; before that: %w", err, why)
			}
			return op, &device.Fault{Class: device.FaultUnknown, Op: "wait for operation " + op.Handle, Err: err}
		case <-timer.C():
		}
		next, err := m.Poll(ctx, op)
		if err != nil {
			why = err
			continue
		}
		op, why = next, nil
		if op.Fault != nil {
			why = op.Fault
		}
	}
	if op.State == fabric.Failed {
		if op.Fault == nil {
			return op, &device.Fault{
				Class: device.FaultUnknown, Op: "wait for operation " + op.Handle, Err: errors.New("it failed without a reason"),
			}
		}
		return op, op.Fault
	}
	return op, nil
}
