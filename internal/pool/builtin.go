// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// BuiltIn is a GPU that is part of a node.
type BuiltIn struct {
	UUID device.GPUUUID
	PCI  device.PCIAddress
	// Name is the driver's word for the model.
	Name   string
	Health device.Health
}

// productName is the attribute that every GPU can fill.
const productName = "productName"

// BuiltInOffers returns the entries of a node's own pool: of every GPU that may be given to anybody. One that is
// not well is withdrawn, and all are where somebody else advertises them (conflict). What a claim has already stays
// with it: nothing is counted here, so an entry may come and go.
func BuiltInOffers(models []Model, gpus []BuiltIn, conflict bool) []Offer {
	if conflict {
		return nil
	}
	var all []Offer
	for _, g := range gpus {
		if g.Health != device.HealthOK && g.Health != device.HealthWarning {
			continue
		}
		u := device.BuiltInUnit(g.UUID)
		all = append(all, Offer{Name: u.Entry(), Units: []device.Unit{u}, Attributes: builtInAttributes(models, g)})
	}
	slices.SortFunc(all, func(a, b Offer) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// builtInAttributes have the names of a fabric's entries, so that a selector written for those does not fail on
// these. Of what the configuration names, only the product's name is known here; where it names nothing, nothing
// else is published that could lack it.
func builtInAttributes(models []Model, g BuiltIn) map[string]string {
	a := map[string]string{"model": "", "uuid": string(g.UUID), "pciBusID": g.PCI.String(), "fabric": ""}
	for _, m := range models {
		for name := range m.Attributes {
			a[name] = ""
		}
	}
	if _, named := a[productName]; named || len(models) == 0 {
		a[productName] = g.Name
	}
	return a
}
