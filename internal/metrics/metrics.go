// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Stage is a part of the time that a unit takes from the pool to a Pod, or back. Stages follow one another
// and add up to StageTotal.
type Stage string

// The stages of an attach.
const (
	// StageAssign: from the leader's lease to the holder's first step.
	StageAssign Stage = "assign"
	// StageFabric: the fabric manager's call.
	StageFabric Stage = "fabric"
	// StageBus: until the kernel shows the device.
	StageBus Stage = "bus"
	// StageDriver: until the driver can use it.
	StageDriver Stage = "driver"
	// StageTell: until the claim's condition is written.
	StageTell Stage = "tell"
	// StageTotal is the whole way, in both directions.
	StageTotal Stage = "total"
)

// The stages of a detach, beside StageFabric and StageTotal.
const (
	// StageDrain: until nobody uses the device and the driver takes no new work.
	StageDrain Stage = "drain"
	// StageRemove: until it has left the bus.
	StageRemove Stage = "remove"
)

// AttachStages and DetachStages return the stages in their order.
func AttachStages() []Stage {
	return []Stage{StageAssign, StageFabric, StageBus, StageDriver, StageTell, StageTotal}
}

// DetachStages returns the stages of a detach in their order.
func DetachStages() []Stage { return []Stage{StageDrain, StageRemove, StageFabric, StageTotal} }

// Operation is a call to a fabric manager.
type Operation string

// Operations returns the calls that any manager's client makes.
func Operations() []Operation {
	return []Operation{"Login", "Free", "ListAttached", "Attach", "Detach", "Poll", "Limits", "Health"}
}

// CodeOK is the code of a call that succeeded; the others are device.FaultClasses.
const CodeOK = "OK"

// Other stands for label values that are in no known set.
const Other = "Other"

// Reasons returns the known reasons of errors: where in the agent something went wrong that a person may
// have to look at.
func Reasons() []string {
	return []string{
		"AttachFailed", "AttachRefused", "Bus", "CDISpec", "Checkpoint", "ClaimStatus", "Config", "DriverHung",
		"Election", "Fabric", "GPULost", "GPUUnhealthy", "Lease", "NodeStatus", "Prepare", "Publish", "Unprepare", Other,
	}
}

// Metrics are the agent's collectors and their registry.
type Metrics struct {
	registry *prometheus.Registry

	attach, detach, request, prepare *prometheus.HistogramVec
	units, free, leader, driver      *prometheus.GaugeVec
	foreign, lacking                 *prometheus.GaugeVec
	requests, errors                 *prometheus.CounterVec
	gpus                             *prometheus.GaugeVec
	prepared, conflict, hotplug      prometheus.Gauge

	mu      sync.Mutex // guards what follows
	fabrics []device.FabricID
	models  []device.Model
}

// durations reach from what the agent alone takes to beyond the scheduler's ten minutes.
func durations() []float64 {
	return []float64{0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 240, 480, 600, 900}
}

func histogram(name, help string, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Name: name, Help: help,
		Buckets:                         durations(),
		NativeHistogramBucketFactor:     1.1,
		NativeHistogramMaxBucketNumber:  100,
		NativeHistogramMinResetDuration: time.Hour,
	}, labels)
}

func gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

const namespace = "cohdi_agent"

// Build identifies the running binary.
type Build struct {
	Version, Revision, GoVersion string
}

// New returns the agent's metrics. driverStates are the states that SetDriver is called with.
func New(b Build, driverStates []string) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		attach:   histogram("attach_duration_seconds", "Time to bring a unit from the pool to a claim, by stage.", "fabric", "stage"),
		detach:   histogram("detach_duration_seconds", "Time to bring a unit back to the pool, by stage.", "fabric", "stage"),
		request:  histogram("fabric_request_duration_seconds", "Time of calls to the fabric manager.", "fabric", "operation"),
		prepare:  histogram("prepare_duration_seconds", "Time of the kubelet's calls for one claim.", "operation"),
		units:    gauge("units", "Units that this node holds, by phase of their device lease; Idle are those attached that nobody uses.", "fabric", "model", "phase"),
		free:     gauge("fabric_free_units", "Units that the fabric manager says are free; reported by the leader.", "fabric", "model"),
		foreign:  gauge("fabric_foreign_devices", "Devices attached to this fabric's nodes that no device lease names; reported by the leader.", "fabric"),
		lacking:  gauge("fabric_lacking_units", "Units that nodes lack of the least number that each should have attached; reported by the leader.", "fabric", "model"),
		leader:   gauge("leader", "Whether this agent leads the fabric.", "fabric"),
		driver:   gauge("driver_state", "1 for the state that the NVIDIA driver is in.", "state"),
		requests: counter("fabric_requests_total", "Calls to the fabric manager by outcome.", "fabric", "operation", "code"),
		errors:   counter("errors_total", "Errors that a person may have to look at.", "reason"),
		gpus:     gauge("gpus", "GPUs of this node by whose they are; foreign ones as the fabric manager lists them.", "owner"),
		prepared: prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "claims_prepared", Help: "Claims prepared on this node."}),
		conflict: prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "gpu_conflict", Help: "Whether somebody else advertises this node's GPUs."}),
		hotplug:  prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "hotplug_events", Help: "Whether the kernel's hot-plug events are heard; without them the bus is polled."}),
	}
	build := gauge("build_info", "The running binary; always 1.", "version", "revision", "goversion")
	build.WithLabelValues(b.Version, b.Revision, b.GoVersion).Set(1)
	m.registry.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), build,
		m.attach, m.detach, m.request, m.prepare, m.units, m.free, m.foreign, m.lacking, m.leader, m.driver, m.requests, m.errors,
		m.gpus, m.prepared, m.conflict, m.hotplug,
	)
	for _, r := range Reasons() {
		m.errors.WithLabelValues(r)
	}
	for _, op := range []string{prepareOperation, unprepareOperation} {
		m.prepare.WithLabelValues(op)
	}
	for _, s := range driverStates {
		m.driver.WithLabelValues(s)
	}
	return m
}

const (
	prepareOperation   = "prepare"
	unprepareOperation = "unprepare"
)

// Configure makes the series of these fabrics and models exist, and forgets those that are not configured
// any more.
func (m *Metrics) Configure(fabrics []device.FabricID, models []device.Model) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range m.fabrics {
		if !slices.Contains(fabrics, f) {
			gone := prometheus.Labels{"fabric": string(f)}
			for _, v := range []interface{ DeletePartialMatch(prometheus.Labels) int }{m.attach, m.detach, m.request, m.units, m.free, m.foreign, m.lacking, m.leader, m.requests} {
				v.DeletePartialMatch(gone)
			}
		}
	}
	for _, model := range m.models {
		if !slices.Contains(models, model) {
			m.units.DeletePartialMatch(prometheus.Labels{"model": string(model)})
			m.free.DeletePartialMatch(prometheus.Labels{"model": string(model)})
			m.lacking.DeletePartialMatch(prometheus.Labels{"model": string(model)})
		}
	}
	m.fabrics, m.models = slices.Clone(fabrics), slices.Clone(models)
	for _, f := range fabrics {
		m.start(f)
	}
}

func (m *Metrics) start(f device.FabricID) {
	for _, s := range AttachStages() {
		m.attach.WithLabelValues(string(f), string(s))
	}
	for _, s := range DetachStages() {
		m.detach.WithLabelValues(string(f), string(s))
	}
	for _, op := range append(Operations(), Other) {
		m.request.WithLabelValues(string(f), string(op))
		m.requests.WithLabelValues(string(f), string(op), CodeOK)
		for _, c := range device.FaultClasses() {
			m.requests.WithLabelValues(string(f), string(op), string(c))
		}
	}
	m.leader.WithLabelValues(string(f))
	for _, model := range m.models {
		for _, p := range device.Phases() {
			m.units.WithLabelValues(string(f), string(model), string(p))
		}
		m.units.WithLabelValues(string(f), string(model), phaseIdle)
	}
}

func (m *Metrics) known(f device.FabricID) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return knownOf(f, m.fabrics)
}

func knownOf[T ~string](v T, set []T) string {
	if slices.Contains(set, v) {
		return string(v)
	}
	return Other
}

// Attached adds the time of one stage of an attach.
func (m *Metrics) Attached(f device.FabricID, s Stage, took time.Duration) {
	m.attach.WithLabelValues(m.known(f), knownOf(s, AttachStages())).Observe(took.Seconds())
}

// Detached adds the time of one stage of a detach.
func (m *Metrics) Detached(f device.FabricID, s Stage, took time.Duration) {
	m.detach.WithLabelValues(m.known(f), knownOf(s, DetachStages())).Observe(took.Seconds())
}

// Requested counts a call to a fabric manager; fault is nil if it succeeded.
func (m *Metrics) Requested(f device.FabricID, op Operation, took time.Duration, fault *device.Fault) {
	code := CodeOK
	if fault != nil {
		code = knownOf(fault.Class, device.FaultClasses())
	}
	fabric, operation := m.known(f), knownOf(op, Operations())
	m.requests.WithLabelValues(fabric, operation, code).Inc()
	m.request.WithLabelValues(fabric, operation).Observe(took.Seconds())
}

// Failed counts an error by its reason.
func (m *Metrics) Failed(reason string) {
	m.errors.WithLabelValues(knownOf(reason, Reasons())).Inc()
}

// Prepared adds the time that the kubelet waited for one claim to be prepared.
func (m *Metrics) Prepared(took time.Duration) {
	m.prepare.WithLabelValues(prepareOperation).Observe(took.Seconds())
}

// Unprepared adds the time that the kubelet waited for one claim to be unprepared.
func (m *Metrics) Unprepared(took time.Duration) {
	m.prepare.WithLabelValues(unprepareOperation).Observe(took.Seconds())
}

// SetPrepared says how many claims are prepared.
func (m *Metrics) SetPrepared(claims int) { m.prepared.Set(float64(claims)) }

// phaseIdle stands for Attached where nobody uses the unit.
const phaseIdle = "Idle"

// SetUnits takes this node's device leases.
func (m *Metrics) SetUnits(leases []device.Lease) {
	m.mu.Lock()
	defer m.mu.Unlock()
	type key struct{ fabric, model, phase string }
	count := map[key]int{}
	for _, f := range m.fabrics {
		for _, model := range m.models {
			for _, p := range device.Phases() {
				count[key{string(f), string(model), string(p)}] = 0
			}
			count[key{string(f), string(model), phaseIdle}] = 0
		}
	}
	for _, l := range leases {
		phase := Other
		switch {
		case l.Idle():
			phase = phaseIdle
		case l.Phase.Known():
			phase = string(l.Phase)
		}
		count[key{knownOf(l.Fabric, m.fabrics), knownOf(l.Model, m.models), phase}]++
	}
	// Not reset in between: a scrape would see gaps. Only what is not configured can be left over.
	m.units.DeletePartialMatch(prometheus.Labels{"fabric": Other})
	m.units.DeletePartialMatch(prometheus.Labels{"model": Other})
	m.units.DeletePartialMatch(prometheus.Labels{"phase": Other})
	for k, n := range count {
		m.units.WithLabelValues(k.fabric, k.model, k.phase).Set(float64(n))
	}
}

// SetLeader says whether this agent leads a fabric. Free counts, foreign devices and what nodes lack are the leader's to
// report: they end with its lead.
func (m *Metrics) SetLeader(f device.FabricID, leads bool) {
	fabric := m.known(f)
	if !leads {
		m.leader.WithLabelValues(fabric).Set(0)
		m.free.DeletePartialMatch(prometheus.Labels{"fabric": fabric})
		m.foreign.DeletePartialMatch(prometheus.Labels{"fabric": fabric})
		m.lacking.DeletePartialMatch(prometheus.Labels{"fabric": fabric})
		return
	}
	m.leader.WithLabelValues(fabric).Set(1)
}

// SetFree takes what the fabric manager said is free. A model that is missing keeps its last count.
func (m *Metrics) SetFree(f device.FabricID, free map[device.Model]int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for model, n := range free {
		m.free.WithLabelValues(knownOf(f, m.fabrics), knownOf(model, m.models)).Set(float64(n))
	}
}

// SetForeign takes how many devices without a lease are attached to the fabric's nodes.
func (m *Metrics) SetForeign(f device.FabricID, n int) {
	m.foreign.WithLabelValues(m.known(f)).Set(float64(n))
}

// SetLacking takes how many units the fabric's nodes lack of each model's minimum; a model that is missing is lacked by none.
func (m *Metrics) SetLacking(f device.FabricID, lacking map[device.Model]int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, model := range m.models {
		m.lacking.WithLabelValues(knownOf(f, m.fabrics), string(model)).Set(float64(lacking[model]))
	}
}

// SetDriver says which of the states given to New the driver is in.
func (m *Metrics) SetDriver(states []string, is string) {
	for _, s := range states {
		value := 0.0
		if s == is {
			value = 1
		}
		m.driver.WithLabelValues(s).Set(value)
	}
}

// SetGPUs says how many GPUs this node has, by owner.
func (m *Metrics) SetGPUs(owners map[string]int) {
	for owner, n := range owners {
		m.gpus.WithLabelValues(owner).Set(float64(n))
	}
}

// SetConflict says whether somebody else advertises this node's GPUs.
func (m *Metrics) SetConflict(yes bool) { m.conflict.Set(boolean(yes)) }

// SetHotplugEvents says whether the kernel's events are heard.
func (m *Metrics) SetHotplugEvents(heard bool) { m.hotplug.Set(boolean(heard)) }

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Handler answers a scrape.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		Registry: m.registry, MaxRequestsInFlight: 4, Timeout: 10 * time.Second, EnableOpenMetrics: true,
	})
}
