// SPDX-License-Identifier: Apache-2.0

package config

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// MaxSlots is how many ports the simulated switch of one machine has: the device numbers of one PCI bus.
const MaxSlots = 32

const maxCount = 4096

// Config is the description of a chassis.
type Config struct {
	// Dir holds everything the simulator makes: host roots, certificates, state.
	Dir string `json:"dir,omitempty"`
	// Listen are the addresses of the faces.
	Listen Listen `json:"listen"`
	// ServerNames are further names and IPs for the certificate of the FM face, besides those of its address.
	ServerNames []string `json:"serverNames,omitempty"`

	Tenant        string          `json:"tenant"`
	Realm         string          `json:"realm"`
	Credentials   Credentials     `json:"credentials"`
	TokenLifetime simapi.Duration `json:"tokenLifetime,omitempty"`

	Fabrics  []Fabric        `json:"fabrics"`
	Machines []Machine       `json:"machines"`
	Devices  []Device        `json:"devices"`
	Timing   simapi.Timing   `json:"timing"`
	Policies simapi.Policies `json:"policies"`
	// Hotplug is the mode of machines that do not say their own.
	Hotplug string `json:"hotplug,omitempty"`
	// Ephemeral keeps the chassis in memory only: a restart of the simulator begins afresh, and no write to a disk
	// takes part in how long the manager takes.
	Ephemeral bool `json:"ephemeral,omitempty"`
	// Seed of the random picks.
	Seed uint64 `json:"seed,omitempty"`

	Driver Driver `json:"driver"`

	// Faces are the managers that are served, on one address and one core.
	Faces []string `json:"faces,omitempty"`
	CM    CM       `json:"cm,omitzero"`
	CDIM  CDIM     `json:"cdim"`
	// Redfish is served where it has an address.
	Redfish Redfish `json:"redfish,omitzero"`
}

// The faces that there are.
const (
	FaceFM = "fm"
	FaceCM = "cm"
)

// CM is what only the cluster manager has.
type CM struct {
	// Cluster is the UUID of the one cluster that has all machines.
	Cluster string `json:"cluster,omitempty"`
	// Adding and Removing are the words for devices that come and go.
	Adding   string `json:"adding,omitempty"`
	Removing string `json:"removing,omitempty"`
	// Limits of the node group, by model; null where there is none.
	Limits map[string]Limits `json:"limits,omitempty"`
	// FailedFor is how long a failed row stays where the policy lets it vanish.
	FailedFor simapi.Duration `json:"failedFor,omitempty"`
}

// Limits are how many devices of a model a machine must and may have.
type Limits struct {
	Min *int `json:"min,omitempty"`
	Max *int `json:"max,omitempty"`
}

// CDIM describes the face of a CDIM, which is served where it has an address.
type CDIM struct {
	// Dialect is oss or product.
	Dialect string `json:"dialect,omitempty"`
}

// Redfish describes the face of a Redfish service. Its user and password are those of the credentials.
type Redfish struct {
	// URIs are plain, as everybody expects them, or random, so that a client has to follow links.
	URIs string `json:"uris,omitempty"`
	// Sessions is how many there may be, SessionTimeout how long one lives that is not used.
	Sessions       int             `json:"sessions,omitempty"`
	SessionTimeout simapi.Duration `json:"sessionTimeout,omitempty"`
}

// The kinds of URIs.
const (
	URIsPlain  = "plain"
	URIsRandom = "random"
)

// Listen are the addresses of the faces, host:port.
type Listen struct {
	FM      string `json:"fm"`
	Control string `json:"control"`
	// CDIM is the gateway of a CDIM with its Keycloak, over TLS; CDIMDirect is where both of its services listen
	// themselves, without. Empty is not served.
	CDIM       string `json:"cdim,omitempty"`
	CDIMDirect string `json:"cdimDirect,omitempty"`
	// Redfish is the Redfish service, over TLS. Empty is not served.
	Redfish string `json:"redfish,omitempty"`
	// Sunfish is where a Sunfish service listens, without TLS. Empty is not served.
	Sunfish string `json:"sunfish,omitempty"`
}

// Credentials are what the password grant must present.
type Credentials struct {
	Username     string `json:"username"`
	Password     string `json:"password"`
	ClientID     string `json:"client_id"`
	ClientSecret string `json:"client_secret"`
}

// Fabric is one switch domain.
type Fabric struct {
	ID   int    `json:"id"`
	UUID string `json:"uuid"`
}

// Machine is a host port and the node behind it.
type Machine struct {
	Name    string `json:"name"`
	UUID    string `json:"uuid"`
	Fabric  int    `json:"fabric"`
	Slots   int    `json:"slots,omitempty"`
	Hotplug string `json:"hotplug,omitempty"`
	// Netns are globs of network namespace files that get the node's uevents, evaluated at each event. "{pid}" stands for
	// the process id in each file of NetnsPIDs, "{dir}" for the simulator's directory, so that "/proc/{pid}/root/run/netns/*" reaches the namespaces of
	// the Pods of a containerd that lives in a mount namespace of its own.
	Netns []string `json:"netns,omitempty"`
	// NetnsPIDs are globs of files whose first word is a process id; a missing file is no error.
	NetnsPIDs []string `json:"netnsPIDs,omitempty"`
	// NoDriver leaves the GPU driver out: no library, no device nodes, devices stay unbound.
	NoDriver bool `json:"noDriver,omitempty"`
	// NoNode leaves all of the node out, driver included: the machine is there for the fabric only, and nothing ever
	// appears on its bus. There can be thousands of those.
	NoNode bool `json:"noNode,omitempty"`
}

// Device is a pooled GPU, or Count like ones.
type Device struct {
	ID     string `json:"id"`
	Count  int    `json:"count,omitempty"`
	Fabric int    `json:"fabric,omitempty"`
	// Model is the fabric manager's word for it.
	Model string `json:"model"`
	// ProductName is NVML's; the model where empty.
	ProductName string `json:"productName,omitempty"`
	// ResUUID, UUID (GPU-…) and Serial are derived from the id where empty.
	ResUUID      string  `json:"resUUID,omitempty"`
	UUID         string  `json:"uuid,omitempty"`
	Serial       string  `json:"serial,omitempty"`
	FabricSerial *string `json:"fabricSerial,omitempty"`
	MemoryMiB    uint64  `json:"memoryMiB,omitempty"`
	// PCIDevice is the PCI device id, four hex digits; Arch is NVML's name of the architecture.
	PCIDevice string `json:"pciDevice,omitempty"`
	Arch      string `json:"arch,omitempty"`
	// AttachedTo puts it on a machine from the first start, as if it had been attached before.
	AttachedTo string `json:"attachedTo,omitempty"`
}

// Driver describes the driver root of every machine.
type Driver struct {
	Version     string `json:"version,omitempty"`
	CUDAVersion int    `json:"cudaVersion,omitempty"`
	NVMLVersion string `json:"nvmlVersion,omitempty"`
	// NVMLLibrary is the test library to install as libnvidia-ml.so.<version>; Stub a small shared object to install
	// under the names of the driver's other libraries. Relative paths start at the config file.
	NVMLLibrary string `json:"nvmlLibrary,omitempty"`
	Stub        string `json:"stub,omitempty"`
	// Files are further files to copy below the driver root.
	Files []DriverFile `json:"files,omitempty"`
}

// DriverFile is a file to copy to Path below the driver root.
type DriverFile struct {
	Source string `json:"source"`
	Path   string `json:"path"`
}

// Load reads and checks the file; nothing in the result is empty that the simulator needs.
func Load(path string) (*Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read chassis: %w", err)
	}
	c, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("read chassis %s: %w", path, err)
	}
	base := filepath.Dir(path)
	c.Driver.NVMLLibrary = below(base, c.Driver.NVMLLibrary)
	c.Driver.Stub = below(base, c.Driver.Stub)
	for i := range c.Driver.Files {
		c.Driver.Files[i].Source = below(base, c.Driver.Files[i].Source)
	}
	return c, nil
}

// Parse decodes, fills in defaults and checks.
func Parse(data []byte) (*Config, error) {
	c := &Config{}
	if err := yaml.UnmarshalStrict(data, c); err != nil {
		return nil, err
	}
	c.setDefaults()
	if err := c.expandDevices(); err != nil {
		return nil, err
	}
	return c, c.check()
}

func below(base, path string) string {
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(base, path)
}

func (c *Config) setDefaults() {
	def(&c.TokenLifetime, simapi.Duration(5*time.Minute))
	def(&c.Hotplug, simapi.HotplugEvent)
	def(&c.Driver.Version, "570.86.15")
	def(&c.Driver.CUDAVersion, 12080)
	def(&c.CM.Adding, "ADD_IN_PROGRESS")
	def(&c.CM.Removing, "REMOVE_IN_PROGRESS")
	def(&c.CM.FailedFor, simapi.Duration(time.Minute))
	if len(c.Faces) == 0 {
		c.Faces = []string{FaceFM}
	}
	def(&c.Driver.NVMLVersion, "12."+c.Driver.Version)
	for _, d := range []**simapi.Duration{&c.Timing.AttachDelay, &c.Timing.DetachDelay, &c.Timing.NodeDelay, &c.Timing.StaleDelay} {
		if *d == nil {
			*d = new(simapi.Duration)
		}
	}
	def(&c.CDIM.Dialect, "oss")
	def(&c.Redfish.URIs, URIsPlain)
	def(&c.Redfish.Sessions, 16)
	def(&c.Redfish.SessionTimeout, simapi.Duration(time.Minute))
	p := &c.Policies
	for _, o := range policyOptions(p) {
		def(o.value, o.accepted[0])
	}
	for i := range c.Machines {
		def(&c.Machines[i].Slots, 8)
		if c.Machines[i].NoNode {
			c.Machines[i].NoDriver, c.Machines[i].Hotplug = true, simapi.HotplugRescan // by nobody
		}
		def(&c.Machines[i].Hotplug, c.Hotplug)
	}
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

type option struct {
	name     string
	value    *string
	accepted []string
}

// policyOptions lists each policy with what it accepts, the default first.
func policyOptions(p *simapi.Policies) []option {
	return []option{
		{"attachAnswer", &p.AttachAnswer, []string{"newOnly", "allResources", "reordered", "withoutSerial", "empty"}},
		{"serialization", &p.Serialization, []string{"perMachine", "none", "perFabric", "busy409"}},
		{"pick", &p.Pick, []string{"first", "random", "worst"}},
		{"noCapacity", &p.NoCapacity, []string{"404mock", "409", "400", "empty200"}},
		{"shortage", &p.Shortage, []string{"allOrNothing", "partial"}},
		{"unknownModel", &p.UnknownModel, []string{"zero", "404"}},
		{"detachAnswer", &p.DetachAnswer, []string{"200", "204"}},
		{"unknownDetach", &p.UnknownDetach, []string{"404", "200"}},
		{"detachInUse", &p.DetachInUse, []string{"success", "409"}},
		{"cm.count", &p.CM.Count, []string{"atAccept", "atComplete"}},
		{"cm.progress", &p.CM.Progress, []string{"noID", "withID", "absent"}},
		{"cm.detail", &p.CM.Detail, []string{"full", "partial"}},
		{"cm.above", &p.CM.Above, []string{"400", "409", "clamp"}},
		{"cm.below", &p.CM.Below, []string{"noop", "lastWins"}},
		{"cm.shortage", &p.CM.Shortage, []string{"addFailed", "409"}},
		{"cm.unknown", &p.CM.Unknown, []string{"404", "ignore"}},
		{"cm.remaining", &p.CM.Remaining, []string{"checked", "trusted"}},
		{"cm.failed", &p.CM.Failed, []string{"stay", "vanish"}},
		{"cm.answer", &p.CM.Answer, []string{"json", "empty", "text"}},
		{"cm.refusal", &p.CM.Refusal, []string{"json", "html", "empty"}},
		{"cdim.jobCheck", &p.CDIM.JobCheck, []string{"asReal", "strict"}},
		{"cdim.jobError", &p.CDIM.JobError, []string{"failed", "suspended"}},
		{"cdim.adapterLink", &p.CDIM.AdapterLink, []string{"both", "typed", "eeio", "nodeOnly"}},
		{"cdim.serial", &p.CDIM.Serial, []string{"own", "board", "none"}},
		{"redfish.variant", &p.Redfish.Variant, []string{"composition", "zones"}},
		{"redfish.forms", &p.Redfish.Forms, []string{"all", "actions", "list", "manifest"}},
		{"redfish.work", &p.Redfish.Work, []string{"task202", "task200", "bare202", "sync200", "sync204", "early200"}},
		{"redfish.afterTask", &p.Redfish.AfterTask, []string{"replay", "task", "gone"}},
		{"redfish.retryAfter", &p.Redfish.RetryAfter, []string{"zero", "seconds", "date", "none"}},
		{"redfish.composing", &p.Redfish.Composing, []string{"listed", "unlisted"}},
		{"redfish.etag", &p.Redfish.ETag, []string{"optional", "required", "none", "gzip"}},
		{"redfish.pageSize", &p.Redfish.PageSize, []string{"3", "1", "50"}},
		{"redfish.expand", &p.Redfish.Expand, []string{"no", "yes"}},
		{"redfish.identity", &p.Redfish.Identity, []string{"full", "prefixed", "inSerial", "serialOnly", "none", "duplicate", "nullStatus"}},
		{"redfish.hostBlock", &p.Redfish.HostBlock, []string{"400", "409", "406"}},
		{"redfish.errors", &p.Redfish.Errors, []string{"extended", "plain", "message"}},
		{"redfish.root", &p.Redfish.Root, []string{"redirect", "same"}},
		{"redfish.events", &p.Redfish.Events, []string{"sse", "none"}},
		{"sunfish.sameTarget", &p.Sunfish.SameTarget, []string{"accept", "reject"}},
		{"sunfish.systemAnswer", &p.Sunfish.SystemAnswer, []string{"200", "204"}},
		{"sunfish.extension", &p.Sunfish.Extension, []string{"on", "off"}},
		{"sunfish.offers", &p.Sunfish.Offers, []string{"all", "systems"}},
	}
}

// Policy is one of Policies by its name, such as cm.count.
type Policy struct {
	Name, Value string
	// Accepted are the values that mean something, the default first.
	Accepted []string
}

// ListPolicies lists all policies.
func ListPolicies(p simapi.Policies) []Policy {
	var out []Policy
	for _, o := range policyOptions(&p) {
		out = append(out, Policy{o.name, *o.value, o.accepted})
	}
	return out
}

// SetPolicy sets the policy of that name.
func SetPolicy(p *simapi.Policies, name, value string) error {
	for _, o := range policyOptions(p) {
		if o.name == name {
			*o.value = value
			return CheckPolicies(*p)
		}
	}
	return fmt.Errorf("policies.%s: there is no such policy", name)
}

// CheckPolicies refuses values that mean nothing; empty ones pass.
func CheckPolicies(p simapi.Policies) error {
	for _, o := range policyOptions(&p) {
		if *o.value != "" && !slices.Contains(o.accepted, *o.value) {
			return fmt.Errorf("policies.%s: %q is none of %s", o.name, *o.value, strings.Join(o.accepted, ", "))
		}
	}
	return nil
}

// MergePolicies puts the non-empty fields of change over base.
func MergePolicies(base, change simapi.Policies) simapi.Policies {
	from, to := policyOptions(&change), policyOptions(&base)
	for i := range from {
		if *from[i].value != "" {
			*to[i].value = *from[i].value
		}
	}
	return base
}

// known are the PCI device id, architecture and memory of models that need not spell them out.
func known(model string) (pciDevice, arch string, memoryMiB uint64) {
	switch {
	case strings.Contains(model, "L40S"):
		return "26b9", "ada", 46068
	case strings.Contains(model, "H100"):
		return "2331", "hopper", 81559
	case strings.Contains(model, "A100"):
		return "20b5", "ampere", 81920
	default:
		return "20b7", "ampere", 24576
	}
}

func (c *Config) expandDevices() error {
	var out []Device
	for _, d := range c.Devices {
		if d.Count < 0 || d.Count > maxCount {
			return fmt.Errorf("devices[%s].count: %d is not in 0 to %d", d.ID, d.Count, maxCount)
		}
		if d.Count == 0 {
			out = append(out, d)
			continue
		}
		if d.UUID != "" || d.ResUUID != "" || d.Serial != "" || d.FabricSerial != nil {
			return fmt.Errorf("devices[%s]: count does not go with uuid, resUUID, serial or fabricSerial", d.ID)
		}
		for n := range d.Count {
			one := d
			one.ID, one.Count = fmt.Sprintf("%s-%d", d.ID, n), 0
			out = append(out, one)
		}
	}
	for i := range out {
		d := &out[i]
		pciDevice, arch, memory := known(d.Model)
		def(&d.PCIDevice, pciDevice)
		def(&d.Arch, arch)
		def(&d.MemoryMiB, memory)
		def(&d.ProductName, d.Model)
		def(&d.ResUUID, derivedUUID("res", d.ID))
		def(&d.UUID, "GPU-"+derivedUUID("gpu", d.ID))
		def(&d.Serial, derivedSerial(d.ID))
		if d.FabricSerial == nil {
			d.FabricSerial = &d.UUID
		}
	}
	c.Devices = out
	return nil
}

func derivedUUID(kind, id string) string {
	h := sha256.Sum256([]byte(kind + "\x00" + id))
	h[6], h[8] = h[6]&0x0f|0x50, h[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

func derivedSerial(id string) string {
	h := sha256.Sum256([]byte("serial\x00" + id))
	n := uint64(0)
	for _, b := range h[:5] {
		n = n<<8 | uint64(b)
	}
	return fmt.Sprintf("1%012d", n)
}

var hex4 = regexp.MustCompile(`^[0-9a-f]{4}$`)

func (c *Config) check() error {
	for _, f := range []struct{ name, value string }{
		{"tenant", c.Tenant},
		{"realm", c.Realm},
		{"credentials.username", c.Credentials.Username},
		{"credentials.password", c.Credentials.Password},
		{"credentials.client_id", c.Credentials.ClientID},
		{"credentials.client_secret", c.Credentials.ClientSecret},
	} {
		if f.value == "" {
			return fmt.Errorf("%s: must not be empty", f.name)
		}
	}
	if err := CheckPolicies(c.Policies); err != nil {
		return err
	}
	if err := c.checkFaces(); err != nil {
		return err
	}
	if d := c.CDIM.Dialect; d != "oss" && d != "product" {
		return fmt.Errorf("cdim.dialect: %q is none of oss, product", d)
	}
	if u := c.Redfish.URIs; u != URIsPlain && u != URIsRandom {
		return fmt.Errorf("redfish.uris: %q is none of %s, %s", u, URIsPlain, URIsRandom)
	}
	if r := c.Redfish; r.Sessions < 1 || r.SessionTimeout < 0 {
		return fmt.Errorf("redfish: %d sessions of %s each: there must be at least one, and it must live", r.Sessions, time.Duration(r.SessionTimeout))
	}
	fabrics := map[int]bool{}
	for _, f := range c.Fabrics {
		if fabrics[f.ID] || f.UUID == "" {
			return fmt.Errorf("fabrics: id %d is given twice or has no uuid", f.ID)
		}
		fabrics[f.ID] = true
	}
	if err := c.checkMachines(fabrics); err != nil {
		return err
	}
	return c.checkDevices(fabrics)
}

func (c *Config) checkFaces() error {
	for i, f := range c.Faces {
		if f != FaceFM && f != FaceCM {
			return fmt.Errorf("faces: %q is none of %s, %s", f, FaceFM, FaceCM)
		}
		if slices.Contains(c.Faces[:i], f) {
			return fmt.Errorf("faces: %q is given twice", f)
		}
	}
	if slices.Contains(c.Faces, FaceCM) && c.CM.Cluster == "" {
		return errors.New("cm.cluster: must not be empty where faces has cm")
	}
	return nil
}

func (c *Config) checkMachines(fabrics map[int]bool) error {
	seen := map[string]bool{}
	for _, m := range c.Machines {
		switch {
		case m.Name == "" || m.UUID == "" || strings.ContainsAny(m.Name, "/\x00") || m.Name == "." || m.Name == "..":
			return fmt.Errorf("machines: %q (uuid %q) needs a name that can be a directory, and a uuid", m.Name, m.UUID)
		case seen[m.Name] || seen[m.UUID]:
			return fmt.Errorf("machines[%s]: name or uuid is given twice", m.Name)
		case !fabrics[m.Fabric]:
			return fmt.Errorf("machines[%s].fabric: no fabric has id %d", m.Name, m.Fabric)
		case m.Slots < 1 || m.Slots > MaxSlots:
			return fmt.Errorf("machines[%s].slots: %d is not in 1 to %d", m.Name, m.Slots, MaxSlots)
		}
		if err := CheckHotplug(m.Hotplug); err != nil {
			return fmt.Errorf("machines[%s].hotplug: %w", m.Name, err)
		}
		seen[m.Name], seen[m.UUID] = true, true
	}
	return nil
}

// CheckHotplug accepts the two hot-plug modes.
func CheckHotplug(mode string) error {
	if mode != simapi.HotplugEvent && mode != simapi.HotplugRescan {
		return fmt.Errorf("%q is none of %s, %s", mode, simapi.HotplugEvent, simapi.HotplugRescan)
	}
	return nil
}

func (c *Config) checkDevices(fabrics map[int]bool) error {
	seen := map[string]bool{}
	for _, d := range c.Devices {
		switch {
		case d.ID == "" || d.Model == "":
			return fmt.Errorf("devices: %q (model %q) needs an id and a model", d.ID, d.Model)
		case seen[d.ID] || seen[d.ResUUID] || seen[d.UUID]:
			return fmt.Errorf("devices[%s]: id, resUUID or uuid is given twice", d.ID)
		case !fabrics[d.Fabric]:
			return fmt.Errorf("devices[%s].fabric: no fabric has id %d", d.ID, d.Fabric)
		case !hex4.MatchString(d.PCIDevice):
			return fmt.Errorf("devices[%s].pciDevice: %q is not four lower-case hex digits", d.ID, d.PCIDevice)
		}
		if i := slices.IndexFunc(c.Machines, func(m Machine) bool { return m.Name == d.AttachedTo }); d.AttachedTo != "" &&
			(i < 0 || c.Machines[i].Fabric != d.Fabric) {
			return fmt.Errorf("devices[%s].attachedTo: no machine of fabric %d has the name %q", d.ID, d.Fabric, d.AttachedTo)
		}
		seen[d.ID], seen[d.ResUUID], seen[d.UUID] = true, true, true
	}
	return nil
}
