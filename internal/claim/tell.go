// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applymetav1 "k8s.io/client-go/applyconfigurations/meta/v1"
	applyresourcev1 "k8s.io/client-go/applyconfigurations/resource/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Limits of a condition (k8s.io/apimachinery, metav1.Condition).
const (
	longestReason  = 1024
	longestMessage = 32768
)

// anyReason stands in for a reason that the API would not take.
const anyReason = "AttachFailed"

var reasonForm = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$`)

// TellAttached writes Attached=True for the lease's attempt. That it says so already is success, and so
// is a ready entry, which nobody waits for. ErrGone: the claim has another allocation by now, or none.
func (c *Claims) TellAttached(ctx context.Context, l device.Lease) error {
	a := l.Attempt
	if a.IsZero() {
		return fmt.Errorf("tell that unit %s is attached: its lease serves no claim", l.Unit)
	}
	message := fmt.Sprintf("%s at %s on node %s", l.UUID, l.PCI, l.Node)
	err := c.tell(ctx, []device.Attempt{a}, told{
		kind: device.ConditionAttached, reason: "Attached", message: message,
	})
	if err != nil {
		return fmt.Errorf("tell claim %s that unit %s is attached: %w", a.Claim(), l.Unit, err)
	}
	return nil
}

// Refuse writes AttachFailed=True for each of the attempts that its claim still has and that was not
// told Attached. The scheduler looks no further than the first device of a Pod that is not ready, so all
// of them have to be told. An attempt that is gone is success; one failure does not keep the others from
// being told.
func (c *Claims) Refuse(ctx context.Context, attempts []device.Attempt, reason, message string) error {
	if len(reason) > longestReason || !reasonForm.MatchString(reason) {
		reason = anyReason
	}
	t := told{kind: device.ConditionAttachFailed, reason: reason, message: cut(message)}
	var failed []error
	for _, ofOne := range byAllocation(attempts) {
		if err := c.tell(ctx, ofOne, t); err != nil && !errors.Is(err, ErrGone) {
			failed = append(failed, fmt.Errorf("tell claim %s that its attach failed: %w", ofOne[0].Claim(), err))
		}
	}
	return errors.Join(failed...)
}

// told is the condition to be written.
type told struct{ kind, reason, message string }

// byAllocation groups the attempts that one read of one claim answers for, in their order.
func byAllocation(attempts []device.Attempt) [][]device.Attempt {
	var groups [][]device.Attempt
	index := map[device.Attempt]int{}
	for _, a := range attempts {
		key := a
		key.Entry = ""
		i, known := index[key]
		if !known {
			i = len(groups)
			index[key] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], a)
	}
	return groups
}

// tell writes the condition for attempts of one allocation. Each write carries the version of the claim
// that was looked at: a word that comes late must not hit the next allocation. After a conflict the
// claim is read and decided on anew.
func (c *Claims) tell(ctx context.Context, attempts []device.Attempt, t told) error {
	var err error
	for range writeTries {
		err = c.tellOnce(ctx, attempts, t)
		if !apierrors.IsConflict(err) {
			return explain(err)
		}
	}
	return fmt.Errorf("%w: %w", ErrConflict, err)
}

func (c *Claims) tellOnce(ctx context.Context, attempts []device.Attempt, t told) error {
	obj, err := c.get(ctx, attempts[0])
	if err != nil {
		return err
	}
	for _, a := range attempts {
		if a.Ready() || !lacks(obj, a, t.kind) {
			continue
		}
		if obj, err = c.apply(ctx, obj, a, t); err != nil {
			return err
		}
	}
	return nil
}

// lacks tells whether the claim has the attempt and is still to be told. What was told Attached is not
// told anything else: the scheduler may have bound the Pod on it.
func lacks(obj *resourcev1.ResourceClaim, a device.Attempt, kind string) bool {
	d := find(obj, a)
	if d == nil || d.Attached {
		return false
	}
	return kind == device.ConditionAttached || !d.AttachFailed
}

// apply writes one device's entry. Each unit has a field manager of its own: an apply takes away what the
// same manager applied before and does not repeat, other devices included.
func (c *Claims) apply(ctx context.Context, obj *resourcev1.ResourceClaim, a device.Attempt, t told) (*resourcev1.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	unit, _ := device.UnitOfEntry(a.Entry)
	config := applyresourcev1.ResourceClaim(obj.Name, obj.Namespace).
		WithUID(obj.UID).
		WithResourceVersion(obj.ResourceVersion).
		WithStatus(applyresourcev1.ResourceClaimStatus().
			WithDevices(applyresourcev1.AllocatedDeviceStatus().
				WithDriver(device.Driver).WithPool(a.Pool).WithDevice(a.Entry).
				WithConditions(applymetav1.Condition().
					WithType(t.kind).
					WithStatus(metav1.ConditionTrue).
					WithReason(t.reason).
					WithMessage(t.message).
					WithLastTransitionTime(metav1.NewTime(c.clock.Now())))))
	return c.client.ResourceV1().ResourceClaims(obj.Namespace).ApplyStatus(ctx, config, metav1.ApplyOptions{
		FieldManager: FieldManager(unit),
		// The condition types are ours alone; whoever else wrote one is overruled.
		Force: true,
	})
}

// FieldManager returns the name under which a unit's condition is applied, by holder and leader alike.
func FieldManager(u device.Unit) string { return device.AgentName + "/" + string(u) }

// explain makes a missing right recognizable. The API server says 403 where the status must not be
// written at all, and 422 with a forbidden field where the device's entry must not.
func explain(err error) error {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return err
	}
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("%w: %w", ErrForbidden, err)
	}
	if details := status.Status().Details; apierrors.IsInvalid(err) && details != nil {
		for _, cause := range details.Causes {
			if cause.Type == metav1.CauseTypeForbidden {
				return fmt.Errorf("%w: %w", ErrForbidden, err)
			}
		}
	}
	return err
}

// cut makes a message fit for a condition.
func cut(message string) string {
	const more = " …"
	message = strings.ToValidUTF8(message, "\uFFFD")
	if len(message) <= longestMessage {
		return message
	}
	end := longestMessage - len(more)
	for !utf8.RuneStart(message[end]) {
		end--
	}
	return message[:end] + more
}
