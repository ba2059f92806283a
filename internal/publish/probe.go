// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/pool"
)

// Feature gates without which the API server drops what makes offers safe.
const (
	gateTaints    = "DRADeviceTaints"
	gateBinding   = "DRADeviceBindingConditions"
	gatePartition = "DRAPartitionableDevices"
)

// probe asks the API server, by creating a pool for show, whether it stores every field that offers need.
// The controller would notice too, but only once the entries are there: without their binding conditions
// they would start Pods without a device. False is the end of ctx.
func (p *Publisher) probe(ctx context.Context) bool {
	for {
		gates, dropped, err := p.missing(ctx)
		if dropped {
			p.limit(gates, len(p.shown()) == 0)
		}
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		klog.FromContext(ctx).Error(err, "Nothing is published before that is known; trying again", "pool", p.o.Fabric.Pool())
		timer := p.o.Clock.NewTimer(probePause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C():
		}
	}
}

// missing returns the feature gates that are off and must not be; dropped is true too where none is known
// that explains what was dropped.
func (p *Publisher) missing(ctx context.Context) (gates []string, dropped bool, err error) {
	parts := forShow(p.o.Fabric)
	for i := range parts {
		want := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-" + device.Driver + "-"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver:                 device.Driver,
				Pool:                   resourceapi.ResourcePool{Name: p.o.Fabric.Pool(), ResourceSliceCount: int64(len(parts))},
				PerDeviceNodeSelection: parts[i].PerDeviceNodeSelection,
				SharedCounters:         parts[i].SharedCounters,
				Devices:                parts[i].Devices,
			},
		}
		got, err := p.dryRun(ctx, want)
		if invalidSpec(err) {
			// The one field whose loss makes the rest invalid says where the devices are.
			return []string{gatePartition}, true, nil
		}
		if err != nil {
			return nil, false, fmt.Errorf("ask the API server whether it stores every field of pool %s: %w", p.o.Fabric.Pool(), err)
		}
		if !stored(want, got) {
			return (&resourceslice.DroppedFieldsError{DesiredSlice: want, ActualSlice: got}).DisabledFeatures(), true, nil
		}
	}
	return nil, false, nil
}

func (p *Publisher) dryRun(ctx context.Context, s *resourceapi.ResourceSlice) (*resourceapi.ResourceSlice, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return p.o.Client.ResourceV1().ResourceSlices().Create(ctx, s, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
}

// forShow is a small pool with every field that a real one has.
func forShow(f device.FabricID) []resourceslice.Slice {
	const model, unit = device.Model("probe"), device.Unit("probe-0")
	ready := pool.Offer{
		Name: unit.ReadyEntry(), Units: []device.Unit{unit}, Model: model,
		Ready: true, Node: pool.Nowhere, Effect: pool.NoSchedule, Why: "Probe",
	}
	onCall := ready
	onCall.Name, onCall.Ready, onCall.Node = unit.Entry(), false, ""
	return Slices(pool.Offers{
		Fabric: f, Units: []device.Unit{unit}, Ready: [][]pool.Offer{{ready}}, OnCall: [][]pool.Offer{{onCall}},
	})
}

// stored tells whether nothing was dropped. That the API server dates the taints is no drop.
func stored(want, got *resourceapi.ResourceSlice) bool {
	return resourceslice.DevicesDeepEqual(want.Spec.Devices, got.Spec.Devices) &&
		apiequality.Semantic.DeepEqual(want.Spec.SharedCounters, got.Spec.SharedCounters) &&
		apiequality.Semantic.DeepEqual(want.Spec.PerDeviceNodeSelection, got.Spec.PerDeviceNodeSelection)
}

// invalidSpec tells whether the API server found the slice itself wrong. Admission policies, which do not
// know a new leader for a moment, may say invalid too, but name no field.
func invalidSpec(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	for _, cause := range status.Status().Details.Causes {
		if strings.HasPrefix(cause.Field, "spec") {
			return true
		}
	}
	return false
}
