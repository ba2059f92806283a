// SPDX-License-Identifier: Apache-2.0

// Package config reads the description of a chassis: fabrics, machines, devices, delays and the behaviours of the manager.
//
// The truth is one YAML file, read once at start; an unknown or misspelt field is an error. What the control API changes
// later lives in the core.
//
// Load is a plain function without state.
//
// Errors name the field and say what would be accepted.
package config
