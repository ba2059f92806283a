// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// schema is the version of the stored form that this release writes. It reads one older and one newer,
// so that a rolling update and its roll-back need no conversion.
const schema = 1

// Annotations of a device lease. They are stored form, not API.
const (
	annSchema       = device.Driver + "/schema"
	annModel        = device.Driver + "/model"
	annUnit         = device.Driver + "/unit"
	annAttempt      = device.Driver + "/attempt"
	annKept         = device.Driver + "/kept"
	annPreparedFor  = device.Driver + "/prepared-for"
	annHeldBy       = device.Driver + "/held-by"
	annIdleSince    = device.Driver + "/idle-since"
	annNodeUID      = device.Driver + "/node-uid"
	annMachine      = device.Driver + "/machine"
	annFabricDevice = device.Driver + "/fabric-device"
	annSetBefore    = device.Driver + "/set-before"
	annAskedAt      = device.Driver + "/asked-at"
	annWanted       = device.Driver + "/wanted-device"
	annGPUsBefore   = device.Driver + "/gpus-before"
	annWork         = device.Driver + "/work"
	annPCIAddress   = device.Driver + "/pci-address"
	annGPUUUID      = device.Driver + "/gpu-uuid"
	annReason       = device.Driver + "/reason"
	annMessage      = device.Driver + "/message"
	annBlame        = device.Driver + "/blame"
	annRetryAfter   = device.Driver + "/retry-after"
)

// DecodeError is a device lease that cannot be read. Its unit is neither offered nor touched until a
// person has put it right.
type DecodeError struct {
	// Lease is the object's name.
	Lease string
	// Fabric, Unit and Node are what could be read of whose it is; they may be empty.
	Fabric device.FabricID
	Unit   device.Unit
	Node   string
	// Field is the label, annotation or field at fault.
	Field string
	// Err says what is wrong with it.
	Err error
}

// Error names the lease and the field, and says what is left alone.
func (e *DecodeError) Error() string {
	return fmt.Sprintf("read device lease %s/%s: %s: %v; its unit is left alone until this is put right",
		device.LeaseNamespace, e.Lease, e.Field, e.Err)
}

// Unwrap returns what is wrong with the field.
func (e *DecodeError) Unwrap() error { return e.Err }

// errMissing is the Err of a DecodeError for a field that every lease has.
var errMissing = errors.New("is missing")

// encode writes l into obj. What others keep on the object stays.
func encode(obj *coordinationv1.Lease, l device.Lease) {
	if obj.Labels == nil {
		obj.Labels = map[string]string{}
	}
	if obj.Annotations == nil {
		obj.Annotations = map[string]string{}
	}
	obj.Labels[device.LabelFabric] = string(l.Fabric)
	obj.Labels[device.LabelNode] = device.NodeLabelValue(l.Node)
	obj.Labels[device.LabelPhase] = string(l.Phase)
	// The API server takes no new finalizers on an object that is being deleted.
	if obj.DeletionTimestamp == nil && !slices.Contains(obj.Finalizers, device.Finalizer) {
		obj.Finalizers = append(obj.Finalizers, device.Finalizer)
	}
	obj.Spec.HolderIdentity = new(l.Node)
	obj.Spec.AcquireTime = microTime(l.AcquiredAt)
	obj.Spec.RenewTime = microTime(l.ChangedAt)
	obj.Spec.LeaseTransitions = new(l.Transitions)

	obj.Annotations[annSchema] = strconv.Itoa(max(schema, storedSchema(obj)))
	for key, value := range annotations(l) {
		if value == "" {
			delete(obj.Annotations, key)
		} else {
			obj.Annotations[key] = value
		}
	}
}

// annotations returns the value of every annotation of ours but the schema; empty is "not there".
func annotations(l device.Lease) map[string]string {
	pci := ""
	if !l.PCI.IsZero() {
		pci = l.PCI.String()
	}
	return map[string]string{
		annModel:        string(l.Model),
		annUnit:         string(l.Unit),
		annAttempt:      l.Attempt.String(),
		annKept:         mark(l.Kept),
		annPreparedFor:  list(l.PreparedFor),
		annHeldBy:       strings.ToValidUTF8(l.HeldBy, "\uFFFD"),
		annIdleSince:    instant(l.IdleSince),
		annNodeUID:      l.NodeUID,
		annMachine:      string(l.Machine),
		annFabricDevice: l.FabricDevice,
		// A set that is empty and a set that nobody stored are different: with the second, nothing
		// says which device answers the call.
		annSetBefore:  list(l.SetBefore),
		annAskedAt:    instant(l.AskedAt),
		annWanted:     l.Wanted,
		annGPUsBefore: list(l.GPUsBefore),
		annWork:       l.Work,
		annPCIAddress: pci,
		annGPUUUID:    string(l.UUID),
		annReason:     l.Failure.Reason,
		// A manager's own words need not be UTF-8.
		annMessage:    strings.ToValidUTF8(l.Failure.Message, "\uFFFD"),
		annBlame:      string(l.Failure.Blame),
		annRetryAfter: instant(l.Failure.RetryAfter),
	}
}

// storedSchema returns the version that obj has now, 0 if it has none. A newer one is kept: what it
// added is still on the object, and its release reads it back after a roll-forward.
func storedSchema(obj *coordinationv1.Lease) int {
	n, err := strconv.Atoi(obj.Annotations[annSchema])
	if err != nil {
		return 0
	}
	return n
}

func microTime(t time.Time) *metav1.MicroTime {
	if t.IsZero() {
		return nil
	}
	return new(metav1.NewMicroTime(t.UTC().Truncate(time.Microsecond)))
}

func instant(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// mark prints what holds; what does not is not stored.
func mark(yes bool) string {
	if !yes {
		return ""
	}
	return strconv.FormatBool(yes)
}

// list prints a list as compact JSON; nil, as against empty, is not stored.
func list(items []string) string {
	if items == nil {
		return ""
	}
	b, err := json.Marshal(items)
	if err != nil { // strings always marshal
		panic(fmt.Sprintf("marshal %q: %v", items, err))
	}
	return string(b)
}

// Decode reads a device lease as it is stored. Its error is always a *DecodeError.
func Decode(obj *coordinationv1.Lease) (device.Lease, error) { return decode(obj) }

// decode reads a device lease. Its error is always a *DecodeError.
func decode(obj *coordinationv1.Lease) (device.Lease, error) {
	r := reader{obj: obj}
	r.readSchema()
	l := device.Lease{
		Fabric:       device.FabricID(r.label(device.LabelFabric)),
		Phase:        device.Phase(r.label(device.LabelPhase)),
		Node:         ptr.Deref(obj.Spec.HolderIdentity, ""),
		Unit:         device.Unit(r.required(annUnit)),
		Model:        device.Model(r.required(annModel)),
		NodeUID:      obj.Annotations[annNodeUID],
		Attempt:      parse(&r, annAttempt, device.ParseAttempt),
		Kept:         parse(&r, annKept, strconv.ParseBool),
		PreparedFor:  r.list(annPreparedFor),
		HeldBy:       obj.Annotations[annHeldBy],
		IdleSince:    parse(&r, annIdleSince, parseInstant),
		Machine:      parse(&r, annMachine, device.ParseMachine),
		FabricDevice: obj.Annotations[annFabricDevice],
		SetBefore:    r.list(annSetBefore),
		AskedAt:      parse(&r, annAskedAt, parseInstant),
		Wanted:       obj.Annotations[annWanted],
		GPUsBefore:   r.list(annGPUsBefore),
		Work:         obj.Annotations[annWork],
		PCI:          parse(&r, annPCIAddress, device.ParsePCIAddress),
		UUID:         parse(&r, annGPUUUID, device.ParseGPUUUID),
		Failure: device.Failure{
			Reason:     obj.Annotations[annReason],
			Message:    obj.Annotations[annMessage],
			Blame:      device.Blame(obj.Annotations[annBlame]),
			RetryAfter: parse(&r, annRetryAfter, parseInstant),
		},
		AcquiredAt:  fromMicroTime(obj.Spec.AcquireTime),
		ChangedAt:   fromMicroTime(obj.Spec.RenewTime),
		Transitions: ptr.Deref(obj.Spec.LeaseTransitions, 0),
		Deleting:    obj.DeletionTimestamp != nil,
		ObjectUID:   string(obj.UID),
		Version:     obj.ResourceVersion,
	}
	r.agree(l)
	if r.err != nil {
		return device.Lease{}, r.err
	}
	return l, nil
}

// reader keeps the first thing that is wrong with a lease.
type reader struct {
	obj *coordinationv1.Lease
	err error
}

func (r *reader) fail(field string, err error) {
	if r.err != nil {
		return
	}
	r.err = &DecodeError{
		Lease:  r.obj.Name,
		Fabric: device.FabricID(r.obj.Labels[device.LabelFabric]),
		Unit:   device.Unit(r.obj.Annotations[annUnit]),
		Node:   ptr.Deref(r.obj.Spec.HolderIdentity, ""),
		Field:  field,
		Err:    err,
	}
}

func (r *reader) readSchema() {
	text, ok := r.obj.Annotations[annSchema]
	if !ok {
		r.fail("annotation "+annSchema, errMissing)
		return
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < schema-1 || n > schema+1 {
		r.fail("annotation "+annSchema, fmt.Errorf("version %q is not one that this release reads (%d to %d)", text, schema-1, schema+1))
	}
}

func (r *reader) label(key string) string {
	v := r.obj.Labels[key]
	if v == "" {
		r.fail("label "+key, errMissing)
	}
	return v
}

func (r *reader) required(key string) string {
	v := r.obj.Annotations[key]
	if v == "" {
		r.fail("annotation "+key, errMissing)
	}
	return v
}

// parse reads an annotation that may be missing.
func parse[T any](r *reader, key string, read func(string) (T, error)) T {
	var zero T
	text, ok := r.obj.Annotations[key]
	if !ok || text == "" {
		return zero
	}
	v, err := read(text)
	if err != nil {
		r.fail("annotation "+key, err)
		return zero
	}
	return v
}

func (r *reader) list(key string) []string {
	return parse(r, key, func(text string) ([]string, error) {
		var items []string
		if err := json.Unmarshal([]byte(text), &items); err != nil {
			return nil, fmt.Errorf("parse %q as a JSON list of strings: %w", text, err)
		}
		if items == nil {
			return nil, fmt.Errorf("%q is not a JSON list of strings", text)
		}
		return items, nil
	})
}

// agree checks what is written twice. A unit has one lease because there is one object of its name, and
// its holder sees it by the label: where these disagree, two agents would act on one unit, or none.
func (r *reader) agree(l device.Lease) {
	if l.Node == "" {
		r.fail("spec.holderIdentity", errMissing)
	}
	if want, got := device.NodeLabelValue(l.Node), r.obj.Labels[device.LabelNode]; got != want {
		r.fail("label "+device.LabelNode, fmt.Errorf("is %q, but spec.holderIdentity %q asks for %q", got, l.Node, want))
	}
	if want := device.LeaseName(l.Fabric, l.Unit); r.obj.Name != want {
		r.fail("metadata.name", fmt.Errorf("the lease of unit %q on fabric %q is named %q", l.Unit, l.Fabric, want))
	}
}

func parseInstant(text string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}, fmt.Errorf("parse time: %w", err)
	}
	// What RFC 3339 cannot print in UTC could not be stored again.
	if t = t.UTC(); t.Year() < 1 || t.Year() > 9999 {
		return time.Time{}, fmt.Errorf("time %q is outside of the years 1 to 9999", text)
	}
	return t, nil
}

func fromMicroTime(t *metav1.MicroTime) time.Time {
	if t == nil || t.IsZero() {
		return time.Time{}
	}
	return t.UTC()
}
