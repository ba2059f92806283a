// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric/cdim"
	"github.com/cohdi/cohdi-agent/internal/fabric/sunfish"
)

// Limits of what the API server takes.
const (
	// longestModel leaves room in an entry's name, a DNS label of 63 characters, and in a Node label's.
	longestModel = 40
	// longestValue is that of a device attribute.
	longestValue = 64
	// mostAttributes leaves room among the 32 of a device for those that the agent adds.
	mostAttributes = 16
)

// fabricID is the form of a fabric's id. A dash would make device-<fabric>-<unit> ambiguous, which the
// admission policies take apart.
var fabricID = regexp.MustCompile(`^[a-z0-9]{1,20}$`)

// uuidForm is the form of a tenant's or cluster's name at a manager: a UUID, in any case.
var uuidForm = regexp.MustCompile(`^(?i)[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// syntax is how the parser words a fault of the YAML itself.
var syntax = regexp.MustCompile(`^yaml: (?:unmarshal errors:\n\s*)?line (\d+): (?s:(.*))$`)

// Load reads and parses the file.
func Load(file string) (Config, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return Config{}, fmt.Errorf("read the configuration: %w", err)
	}
	return Parse(data, file)
}

// Parse reads a configuration; file is its name in errors. It reports every fault that it finds, in the
// order of the file.
func Parse(data []byte, file string) (Config, error) {
	top, err := document(data, file)
	if err != nil {
		return Config{}, err
	}
	r := &reader{file: file}
	c := r.config(field{node: top})
	if len(r.fault) == 0 {
		return c, nil
	}
	slices.SortStableFunc(r.fault, func(a, b fault) int { return cmp.Compare(a.line, b.line) })
	all := make([]error, len(r.fault))
	for i, f := range r.fault {
		all[i] = f.err
	}
	return Config{}, errors.Join(all...)
}

// document returns the root of the file's only YAML document.
func document(data []byte, file string) (*yaml.Node, error) {
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	err := d.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && (len(doc.Content) != 1 || isNull(doc.Content[0])) {
		return nil, fmt.Errorf("%s:1: is empty; it needs at least apiVersion: %s and kind: %s", file, APIVersion, Kind)
	}
	if err == nil {
		if kind := manifest(doc.Content[0]); kind != "" {
			return nil, fmt.Errorf("%s:%d: is a manifest of Kubernetes, a %s; give the content of config.yaml, as it stands in the manifest's ConfigMap",
				file, doc.Content[0].Line, kind)
		}
		if err = d.Decode(&more); errors.Is(err, io.EOF) {
			return doc.Content[0], nil
		}
		if err == nil {
			return nil, fmt.Errorf("%s:%d: a second document begins; one is allowed", file, more.Line)
		}
	}
	if m := syntax.FindStringSubmatch(err.Error()); m != nil {
		return nil, fmt.Errorf("%s:%s: is not YAML: %s", file, m[1], m[2])
	}
	return nil, fmt.Errorf("%s: is not YAML: %s", file, strings.TrimPrefix(err.Error(), "yaml: "))
}

// manifest returns the kind of a Kubernetes object, which a configuration is not: it has metadata.
func manifest(n *yaml.Node) string {
	var object struct {
		Kind     string
		Metadata map[string]any
	}
	if err := n.Decode(&object); err != nil || object.Metadata == nil || object.Kind == Kind {
		return ""
	}
	return object.Kind
}

func (r *reader) config(f field) Config {
	c := defaults()
	var apiVersion, kind string
	present := r.object(f, map[string]func(field){
		"apiVersion": func(f field) { word(r, f, &apiVersion, APIVersion) },
		"kind":       func(f field) { word(r, f, &kind, Kind) },
		"fabrics":    func(f field) { c.Fabrics = r.fabrics(f) },
		"machines":   func(f field) { c.Machines = r.machines(f) },
		"builtIn":    func(f field) { c.BuiltIn = r.builtIn(f) },
		"timings":    func(f field) { r.timings(f, &c.Timings) },
		"logging": func(f field) {
			r.object(f, map[string]func(field){
				"format": func(f field) { word(r, f, &c.Logging.Format, LogText, LogJSON) },
			})
		},
		"driverRoots":           func(f field) { c.DriverRoots = r.driverRoots(f) },
		"foreignDevices":        func(f field) { word(r, f, &c.ForeignDevices, ForeignReport, ForeignAdopt) },
		"ifAdvertisedElsewhere": func(f field) { word(r, f, &c.IfAdvertisedElsewhere, Withhold, Ignore) },
	})
	if f.node.Kind == yaml.MappingNode {
		r.require(f, present, "apiVersion", "kind")
	}
	return c
}

// require reports fields that are missing.
func (r *reader) require(f field, present map[string]bool, keys ...string) {
	if f.node.Kind != yaml.MappingNode {
		return
	}
	for _, key := range keys {
		if !present[key] {
			r.say(f, "the field %s is missing", key)
		}
	}
}

func (r *reader) fabrics(f field) []Fabric {
	var all []Fabric
	names := map[string][]string{} // attribute names of a model, to the models that have just these
	r.list(f, func(f field) {
		fabric, at := r.fabric(f)
		for _, other := range all {
			if other.ID == fabric.ID && fabric.ID != "" {
				r.say(at, "%q is the id of another fabric, too", fabric.ID)
			}
		}
		for _, m := range fabric.Models {
			key := strings.Join(slices.Sorted(maps.Keys(m.Attributes)), ", ")
			names[key] = append(names[key], string(m.Name))
		}
		all = append(all, fabric)
	})
	if len(names) > 1 {
		var sets []string
		for key, models := range names {
			sets = append(sets, fmt.Sprintf("%s: [%s]", strings.Join(models, ", "), key))
		}
		slices.Sort(sets)
		// A CEL selector on an attribute that one device lacks fails the scheduling of the whole Pod.
		r.say(f, `all models must have attributes of the same names, "" where one does not apply; these differ: %s`, strings.Join(sets, "; "))
	}
	return all
}

// managers are the kinds of managers.
func managers() []string {
	return []string{ManagerFM, ManagerCM, ManagerCDIM, ManagerRedfish, ManagerSunfish}
}

// own checks the fields that only some kinds of managers have, or need; at is where they stand.
func (r *reader) own(f field, manager string, at map[string]field) {
	fti := []string{ManagerFM, ManagerCM}
	for _, o := range []struct {
		name  string
		kinds []string
		needs bool
	}{
		{"endpoint", append(slices.Clone(fti), ManagerRedfish), true},
		{"tenant", fti, true},
		{"managerFabric", fti, false},
		{"exclusion", fti, false},
		{"cluster", []string{ManagerCM}, true},
		{"cdim", []string{ManagerCDIM}, true},
		{"redfish", []string{ManagerRedfish}, false},
		{"sunfish", []string{ManagerSunfish}, true},
	} {
		where, present := at[o.name]
		has := slices.Contains(o.kinds, manager)
		switch {
		case has && o.needs && !present:
			r.say(f, "the field %s is missing, which manager: %s needs", o.name, manager)
		case !has && slices.Contains(managers(), manager) && present:
			r.say(where, "is a field of manager: %s alone", strings.Join(o.kinds, " and "))
		}
	}
}

// redfish reads what is special of a Redfish service.
func (r *reader) redfish(f field) *Redfish {
	var s Redfish
	r.object(f, map[string]func(field){
		"basic":        func(f field) { r.yes(f, &s.Basic) },
		"noIdentities": func(f field) { r.yes(f, &s.NoIdentities) },
	})
	return &s
}

// sunfish reads how a Sunfish service is reached.
func (r *reader) sunfish(f field) *Sunfish {
	var s Sunfish
	present := r.object(f, map[string]func(field){
		"endpoint":  func(f field) { s.Endpoint = r.filled(f, "a URL of the form https://host[:port]") },
		"plainHTTP": func(f field) { r.yes(f, &s.PlainHTTP) },
		"fabric":    func(f field) { s.Fabric = r.filled(f, "the Id of a fabric at the service") },
	})
	r.require(f, present, "endpoint")
	if s.Endpoint != "" {
		// What its URL may be, the client knows.
		if _, err := sunfish.New(s.Client()); err != nil {
			r.say(f, "%v", err)
		}
	}
	return &s
}

// Client is the client's configuration, without what any fabric has.
func (s *Sunfish) Client() sunfish.Config {
	return sunfish.Config{Endpoint: s.Endpoint, PlainHTTP: s.PlainHTTP, Fabric: s.Fabric}
}

// cdim reads how a CDIM is reached.
func (r *reader) cdim(f field) *CDIM {
	const where = "a URL of the form https://host[:port]"
	var c CDIM
	present := r.object(f, map[string]func(field){
		"dialect":              func(f field) { word(r, f, &c.Dialect, string(cdim.DialectOSS), string(cdim.DialectProduct)) },
		"gateway":              func(f field) { c.Gateway = r.filled(f, where) },
		"login":                func(f field) { c.Login = r.filled(f, where) },
		"configurationManager": func(f field) { c.ConfigurationManager = r.filled(f, where) },
		"layoutApply":          func(f field) { c.LayoutApply = r.filled(f, where) },
		"plainHTTP":            func(f field) { r.yes(f, &c.PlainHTTP) },
		"resourceGroups": func(f field) {
			r.list(f, func(f field) {
				c.ResourceGroups = append(c.ResourceGroups, r.filled(f, "the name of a resource group"))
			})
		},
		"switch": func(f field) { c.Switch = r.filled(f, "the name of a CXL switch") },
	})
	r.require(f, present, "dialect")
	if f.node.Kind != yaml.MappingNode {
		return &c
	}
	// Which of them go together, and what their URLs may be, the client knows.
	if _, err := cdim.New(c.Client()); err != nil {
		r.say(f, "%v", err)
	}
	return &c
}

// Client is the client's configuration, without what any fabric has.
func (c *CDIM) Client() cdim.Config {
	return cdim.Config{
		Dialect: cdim.Dialect(c.Dialect), Gateway: c.Gateway, Login: c.Login, ConfigurationManager: c.ConfigurationManager, LayoutApply: c.LayoutApply,
		PlainHTTP: c.PlainHTTP, ResourceGroups: c.ResourceGroups, Switch: c.Switch, Credentials: fabricsDir,
	}
}

// fabric also returns where the id stands.
func (r *reader) fabric(f field) (Fabric, field) {
	fabric := Fabric{Exclusion: ExclusionMachine}
	at, own := f, map[string]field{}
	keep := func(name string, read func(field)) func(field) {
		return func(f field) { own[name] = f; read(f) }
	}
	present := r.object(f, map[string]func(field){
		"id":            func(f field) { at = f; fabric.ID = r.fabricID(f) },
		"manager":       func(f field) { word(r, f, &fabric.Manager, managers()...) },
		"endpoint":      keep("endpoint", func(f field) { fabric.Endpoint = r.endpoint(f) }),
		"tenant":        keep("tenant", func(f field) { fabric.Tenant = r.uuid(f, "the tenant's UUID at the manager") }),
		"cluster":       keep("cluster", func(f field) { fabric.Cluster = r.uuid(f, "the cluster's UUID at the manager") }),
		"cdim":          keep("cdim", func(f field) { fabric.CDIM = r.cdim(f) }),
		"redfish":       keep("redfish", func(f field) { fabric.Redfish = r.redfish(f) }),
		"sunfish":       keep("sunfish", func(f field) { fabric.Sunfish = r.sunfish(f) }),
		"managerFabric": keep("managerFabric", func(f field) { r.number(f, &fabric.ManagerFabric, 0, 1<<31-1) }),
		"credentials":   func(f field) { fabric.Credentials = r.directory(f) },
		"callTimeout":   func(f field) { r.duration(f, &fabric.CallTimeout, time.Second, time.Hour) },
		"exclusion":     keep("exclusion", func(f field) { word(r, f, &fabric.Exclusion, ExclusionMachine, ExclusionNone) }),
		"settle":        func(f field) { r.duration(f, &fabric.Settle, time.Second, time.Hour) },
		"nodeSelector":  func(f field) { fabric.NodeSelector = r.nodeSelector(f) },
		"slotsPerNode":  func(f field) { r.number(f, &fabric.SlotsPerNode, 1, 1024) },
		"slots":         func(f field) { fabric.Slots = r.slots(f) },
		"models":        func(f field) { fabric.Models = r.models(f) },
	})
	r.require(f, present, "id", "manager", "models")
	r.own(f, fabric.Manager, own)
	call, settle := usual(fabric.Manager)
	fabric.CallTimeout, fabric.Settle = cmp.Or(fabric.CallTimeout, call), cmp.Or(fabric.Settle, settle)
	if fabric.Manager == ManagerCM && fabric.Exclusion == ExclusionNone {
		r.say(own["exclusion"], "is %q, which manager: %s cannot do: it is told how many devices a machine is to have in all", ExclusionNone, ManagerCM)
	}
	if !present["credentials"] {
		fabric.Credentials = fabricsDir + string(fabric.ID)
	}
	return fabric, at
}

func (r *reader) fabricID(f field) device.FabricID {
	const want = "1 to 20 lower-case letters and digits"
	text, ok := r.text(f, want)
	if ok && !fabricID.MatchString(text) {
		r.kind(f, want)
		return ""
	}
	return device.FabricID(text)
}

func (r *reader) endpoint(f field) string {
	const want = "an https URL of the form https://host[:port]"
	text, ok := r.text(f, want)
	if !ok {
		return ""
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		r.kind(f, want)
	case u.User != nil:
		// Not quoted: it would print a password.
		r.say(f, "holds a user name; credentials belong into the Secret cohdi-fabric-<id>, the endpoint is %s", want)
	case u.Scheme != "https" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		r.kind(f, want)
	}
	return strings.TrimRight(text, "/")
}

func (r *reader) uuid(f field, want string) string {
	text, ok := r.text(f, want)
	if ok && !uuidForm.MatchString(text) {
		r.kind(f, want)
	}
	return text
}

func (r *reader) models(f field) []Model {
	var all []Model
	excludes := make([]field, 0)
	r.list(f, func(f field) {
		m, at := r.model(f)
		for _, other := range all {
			if other.Name == m.Name && m.Name != "" {
				r.say(at.name, "%q is the name of another model of this fabric, too", m.Name)
			}
			if other.FabricModel == m.FabricModel && m.FabricModel != "" {
				r.say(at.word, "%q is the model %q already: the manager cannot tell them apart", m.FabricModel, other.Name)
			}
		}
		all, excludes = append(all, m), append(excludes, at.excludes)
	})
	if f.node.Kind == yaml.SequenceNode && len(all) == 0 {
		r.say(f, "is empty; a fabric has at least one model")
	}
	for i, m := range all {
		for _, other := range m.Excludes {
			known := slices.ContainsFunc(all, func(o Model) bool { return o.Name == other })
			if other != "" && (!known || other == m.Name) {
				r.say(excludes[i], "%q is not the name of another model of this fabric", other)
			}
		}
	}
	return all
}

// places are where the parts of a model stand.
type places struct{ name, word, excludes field }

func (r *reader) model(f field) (Model, places) {
	var m Model
	at, least := places{f, f, f}, f
	present := r.object(f, map[string]func(field){
		"name":        func(f field) { at.name = f; m.Name = r.modelName(f) },
		"fabricModel": func(f field) { at.word = f; m.FabricModel = r.filled(f, "the manager's word for the model") },
		"minPerNode":  func(f field) { least = f; r.number(f, &m.MinPerNode, 1, 1024) },
		"maxPerNode":  func(f field) { r.number(f, &m.MaxPerNode, 1, 1024) },
		"excludes": func(f field) {
			at.excludes = f
			r.list(f, func(f field) { m.Excludes = append(m.Excludes, r.modelName(f)) })
		},
		"attributes": func(f field) { m.Attributes = r.attributes(f) },
	})
	r.require(f, present, "name", "fabricModel")
	if m.MaxPerNode > 0 && m.MinPerNode > m.MaxPerNode {
		r.say(least, "is %d, more than maxPerNode, which is %d", m.MinPerNode, m.MaxPerNode)
	}
	return m, at
}

// slots reads how many slots certain Nodes have.
func (r *reader) slots(f field) map[string]int {
	all := map[string]int{}
	r.entries(f, func(key *yaml.Node, value field) {
		r.nodeName(key, value.path)
		var n int
		r.number(value, &n, 1, 1024)
		all[key.Value] = n
	})
	return all
}

func (r *reader) nodeName(key *yaml.Node, path string) {
	if problems := validation.IsDNS1123Subdomain(key.Value); len(problems) > 0 {
		r.say(field{key, path}, "is not a Node's name: %s", strings.Join(problems, "; "))
	}
}

func (r *reader) modelName(f field) device.Model {
	want := fmt.Sprintf("a DNS label (lower-case letters, digits, dashes between them) of at most %d characters", longestModel)
	text, ok := r.text(f, want)
	if !ok {
		return ""
	}
	if len(text) > longestModel || len(validation.IsDNS1123Label(text)) > 0 {
		r.kind(f, want)
		return ""
	}
	return device.Model(text)
}

func (r *reader) attributes(f field) map[string]string {
	all := map[string]string{}
	r.entries(f, func(key *yaml.Node, value field) {
		if !attributeName(key.Value) {
			r.say(field{key, value.path}, "is not an attribute name, which is a C identifier of at most 32 characters, with a domain and a slash before it if it is another's (gpu.example.com/productName)")
		}
		want := fmt.Sprintf("a text of at most %d bytes", longestValue)
		text, ok := r.text(value, want)
		if ok && len(text) > longestValue {
			r.kind(value, want)
		}
		all[key.Value] = text
	})
	if len(all) > mostAttributes {
		r.say(f, "holds %d attributes, at most %d are allowed", len(all), mostAttributes)
	}
	return all
}

// identifier is the form of an attribute's name without its domain (k8s.io/api/resource/v1).
var identifier = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]{0,31}$`)

func attributeName(s string) bool {
	domain, id, qualified := strings.Cut(s, "/")
	if !qualified {
		return identifier.MatchString(s)
	}
	return len(domain) <= 63 && len(validation.IsDNS1123Subdomain(domain)) == 0 && identifier.MatchString(id)
}

func (r *reader) machines(f field) map[string]device.Machine {
	all := map[string]device.Machine{}
	owner := map[device.Machine]string{}
	r.entries(f, func(key *yaml.Node, value field) {
		r.nodeName(key, value.path)
		text, ok := r.text(value, "the UUID of the node's machine")
		if !ok {
			return
		}
		m, err := device.ParseMachine(text)
		if err != nil {
			r.say(value, "%v", err)
			return
		}
		if other, twice := owner[m]; twice {
			r.say(value, "%s is the machine of node %s already", m, other)
		}
		owner[m], all[key.Value] = key.Value, m
	})
	return all
}

func (r *reader) builtIn(f field) map[string][]device.PCIAddress {
	all := map[string][]device.PCIAddress{}
	r.entries(f, func(key *yaml.Node, value field) {
		if problems := validation.IsDNS1123Subdomain(key.Value); len(problems) > 0 {
			r.say(field{key, value.path}, "is not a Node's name: %s", strings.Join(problems, "; "))
		}
		r.list(value, func(f field) {
			const want = `the PCI address of a GPU, as "0000:17:00.0"`
			text, ok := r.text(f, want)
			if !ok {
				return
			}
			at, err := device.ParsePCIAddress(text)
			switch {
			case err != nil || at.IsZero():
				r.kind(f, want)
			case slices.Contains(all[key.Value], at):
				r.say(f, "%s stands in this list already", at)
			default:
				all[key.Value] = append(all[key.Value], at)
			}
		})
	})
	return all
}

func (r *reader) nodeSelector(f field) map[string]string {
	all := map[string]string{}
	r.entries(f, func(key *yaml.Node, value field) {
		if problems := validation.IsQualifiedName(key.Value); len(problems) > 0 {
			r.say(field{key, value.path}, "is not a label: %s", strings.Join(problems, "; "))
		}
		text, ok := r.text(value, "the label's value")
		if ok {
			if problems := validation.IsValidLabelValue(text); len(problems) > 0 {
				r.say(value, "is %q, not a label's value: %s", text, strings.Join(problems, "; "))
			}
		}
		all[key.Value] = text
	})
	return all
}

func (r *reader) driverRoots(f field) []string {
	var all []string
	r.list(f, func(f field) {
		dir := r.directory(f)
		if dir != "" && slices.Contains(all, dir) {
			r.say(f, "%q stands in this list already", dir)
		}
		all = append(all, dir)
	})
	if f.node.Kind == yaml.SequenceNode && len(all) == 0 {
		r.say(f, "is empty; leave the field out for its default")
	}
	return all
}

func (r *reader) timings(f field, t *Timings) {
	r.object(f, map[string]func(field){
		// What is left of the scheduler's 10 minutes is for telling it.
		"attachDeadline": func(f field) { r.duration(f, &t.AttachDeadline, 10*time.Second, 9*time.Minute) },
		"coolDown":       func(f field) { r.duration(f, &t.CoolDown, 0, 30*24*time.Hour) },
		"readySettle":    func(f field) { r.duration(f, &t.ReadySettle, time.Second, time.Hour) },
		"leaderList":     func(f field) { r.duration(f, &t.LeaderList, time.Second, time.Hour) },
		"nodeList":       func(f field) { r.duration(f, &t.NodeList, 10*time.Second, 24*time.Hour) },
		"agentAway":      func(f field) { r.duration(f, &t.AgentAway, time.Second, 24*time.Hour) },
		"retryAfter":     func(f field) { r.duration(f, &t.RetryAfter, time.Second, 24*time.Hour) },
		"forgetUnit":     func(f field) { r.duration(f, &t.ForgetUnit, time.Hour, 365*24*time.Hour) },
		// Shorter than that, a device that is being attached or detached would look like one.
		"adoptAfter": func(f field) { r.duration(f, &t.AdoptAfter, 5*time.Minute, 30*24*time.Hour) },
	})
}

// filled reads a text that is not empty.
func (r *reader) filled(f field, want string) string {
	text, ok := r.text(f, want)
	if ok && strings.TrimSpace(text) == "" {
		r.kind(f, want)
	}
	return text
}

// directory reads a clean absolute path.
func (r *reader) directory(f field) string {
	const want = "an absolute path without . and .. in it"
	text, ok := r.text(f, want)
	if ok && (!path.IsAbs(text) || path.Clean(text) != text) {
		r.kind(f, want)
		return ""
	}
	return text
}
