// SPDX-License-Identifier: Apache-2.0

package sunfish

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Words of the resources.
const (
	roleInitiator = "Initiator"
	roleTarget    = "Target"

	entityProcessor = "Processor"
	processorGPU    = "GPU"

	connectionType = "#Connection.v1_0_0.Connection"
)

// base is where the tree begins.
const base = "/redfish/v1"

// pathForm bounds what is stored and asked for: a path below the tree.
var pathForm = regexp.MustCompile(`^` + base + `(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+$`)

// checkPath makes a link of the service usable; a slash at its end means nothing.
func checkPath(link string) (string, error) {
	p := strings.TrimRight(link, "/")
	if len(p) > 512 || !pathForm.MatchString(p) || slices.ContainsFunc(strings.Split(p, "/"), func(s string) bool { return s == "." || s == ".." }) {
		return "", fmt.Errorf("%q is no path below %s", rest.Tidy(link), base)
	}
	return p, nil
}

// link points to a resource; one that is not usable is empty.
type link string

// UnmarshalJSON never fails: a link in no usable form leads nowhere.
func (l *link) UnmarshalJSON(b []byte) error {
	var body struct {
		ID rest.Text `json:"@odata.id"`
	}
	*l = ""
	if json.Unmarshal(b, &body) == nil {
		if p, err := checkPath(string(body.ID)); err == nil {
			*l = link(p)
		}
	}
	return nil
}

// links are those of a list that lead anywhere.
func links(all []link) []string {
	out := []string{}
	for _, l := range all {
		if l != "" && !slices.Contains(out, string(l)) {
			out = append(out, string(l))
		}
	}
	return out
}

// collection is one page of a list of resources.
type collection struct {
	members []string
	next    string
}

func decodeCollection(body []byte) (collection, error) {
	var c struct {
		Members *[]link   `json:"Members"`
		Next    rest.Text `json:"Members@odata.nextLink"`
	}
	if err := json.Unmarshal(body, &c); err != nil {
		return collection{}, fmt.Errorf("decode collection: %w", err)
	}
	if c.Members == nil {
		return collection{}, errors.New("decode collection: no Members in it")
	}
	if slices.Contains(*c.Members, "") {
		return collection{}, errors.New("decode collection: a member without a usable path")
	}
	return collection{members: links(*c.Members), next: string(c.Next)}, nil
}

// root is what the service offers.
type root struct {
	Fabrics link `json:"Fabrics"`
	Systems link `json:"Systems"`
}

func decodeRoot(body []byte) (root, error) {
	var r root
	if err := json.Unmarshal(body, &r); err != nil {
		return root{}, fmt.Errorf("decode service root: %w", err)
	}
	return r, nil
}

// domain is a fabric of the service.
type domain struct {
	Endpoints   link `json:"Endpoints"`
	Connections link `json:"Connections"`
}

func decodeDomain(body []byte) (domain, error) {
	var d domain
	if err := json.Unmarshal(body, &d); err != nil {
		return domain{}, fmt.Errorf("decode fabric: %w", err)
	}
	return d, nil
}

// system is a machine. One without a UUID, as the one that stands for compositions, is none that we could name.
type system struct {
	machine    device.Machine
	name       string
	power      fabric.Power
	processors string // empty where the service does not show what the machine has
}

func decodeSystem(body []byte) (system, error) {
	var s struct {
		UUID       rest.Text `json:"UUID"`
		Name       rest.Text `json:"Name"`
		Power      rest.Text `json:"PowerState"`
		Processors link      `json:"Processors"`
	}
	if err := json.Unmarshal(body, &s); err != nil {
		return system{}, fmt.Errorf("decode system: %w", err)
	}
	out := system{name: rest.Tidy(string(s.Name)), power: fabric.PowerUnknown, processors: string(s.Processors)}
	if m, err := device.ParseMachine(string(s.UUID)); err == nil {
		out.machine = m
	}
	switch string(s.Power) {
	case string(fabric.PowerOn):
		out.power = fabric.PowerOn
	case string(fabric.PowerOff):
		out.power = fabric.PowerOff
	}
	return out, nil
}

// endpoint is one end of a Connection that may be.
type endpoint struct {
	// initiates are the resources that it is the initiator of; gpu is the Processor that it is the target of.
	initiates []string
	gpu       string
}

func decodeEndpoint(body []byte) (endpoint, error) {
	var e struct {
		Entities []struct {
			Role rest.Text `json:"EntityRole"`
			Type rest.Text `json:"EntityType"`
			Link link      `json:"EntityLink"`
		} `json:"ConnectedEntities"`
	}
	if err := json.Unmarshal(body, &e); err != nil {
		return endpoint{}, fmt.Errorf("decode endpoint: %w", err)
	}
	var out endpoint
	for _, one := range e.Entities {
		switch {
		case one.Link == "":
		case one.Role == roleInitiator:
			out.initiates = append(out.initiates, string(one.Link))
		case one.Role == roleTarget && one.Type == entityProcessor && out.gpu == "":
			out.gpu = string(one.Link)
		}
	}
	return out, nil
}

// connection joins endpoints.
type connection struct {
	initiators, targets []string
}

func (c connection) joins(initiator, target string) bool {
	return slices.Contains(c.initiators, initiator) && slices.Contains(c.targets, target)
}

func decodeConnection(body []byte) (connection, error) {
	var c struct {
		Links struct {
			Initiators []link `json:"InitiatorEndpoints"`
			Targets    []link `json:"TargetEndpoints"`
		} `json:"Links"`
	}
	if err := json.Unmarshal(body, &c); err != nil {
		return connection{}, fmt.Errorf("decode connection: %w", err)
	}
	return connection{initiators: links(c.Links.Initiators), targets: links(c.Links.Targets)}, nil
}

// processor is a GPU, in the pool or on a machine.
type processor struct {
	gpu           bool
	model         string
	uuid          device.GPUUUID
	serial        string
	state, health string
	endpoints     []string
}

func decodeProcessor(body []byte) (processor, error) {
	var p struct {
		Type   rest.Text `json:"ProcessorType"`
		Model  rest.Text `json:"Model"`
		UUID   rest.Text `json:"UUID"`
		Serial rest.Text `json:"SerialNumber"`
		Status *struct {
			State  rest.Text `json:"State"`
			Health rest.Text `json:"Health"`
		} `json:"Status"`
		Links struct {
			Endpoints []link `json:"Endpoints"`
		} `json:"Links"`
	}
	if err := json.Unmarshal(body, &p); err != nil {
		return processor{}, fmt.Errorf("decode processor: %w", err)
	}
	out := processor{gpu: p.Type == processorGPU, model: string(p.Model), endpoints: links(p.Links.Endpoints)}
	if id, err := device.ParseGPUUUID(string(p.UUID)); err == nil {
		out.uuid = id
	}
	_, out.serial = device.ParseIdentity(string(p.Serial))
	if p.Status != nil {
		out.state, out.health = string(p.Status.State), string(p.Status.Health)
	}
	return out, nil
}

// describe joins state and health; only what is said to be critical is.
func (p processor) describe() (device.Health, string) {
	said := fmt.Sprintf("the service's status is %s, %s", orNothing(p.state), orNothing(p.health))
	switch {
	case p.health == "Critical":
		return device.HealthCritical, said
	case p.health == "Warning", p.health == "OK" && p.state != "" && p.state != "Enabled":
		return device.HealthWarning, said
	case p.health == "OK":
		return device.HealthOK, ""
	}
	return device.HealthUnknown, said
}

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return rest.Tidy(s)
}

// idPrefix begins the ids of Connections that we make.
const idPrefix = "cohdi-"

// connectionID follows from the ends.
func connectionID(initiator, target string) string {
	sum := sha256.Sum256([]byte(initiator + "\n" + target))
	return idPrefix + hex.EncodeToString(sum[:8])
}

type reference struct {
	ID string `json:"@odata.id"`
}

// encodeConnection is the body that makes a Connection. It has no ConnectionType: the schema knows memory and storage.
func encodeConnection(initiator, target string) ([]byte, error) {
	type ends struct {
		Initiators []reference `json:"InitiatorEndpoints"`
		Targets    []reference `json:"TargetEndpoints"`
	}
	id := connectionID(initiator, target)
	return json.Marshal(struct {
		Type  string `json:"@odata.type"`
		ID    string `json:"Id"`
		Name  string `json:"Name"`
		Links ends   `json:"Links"`
	}{connectionType, id, id, ends{[]reference{{initiator}}, []reference{{target}}}})
}
