// SPDX-License-Identifier: Apache-2.0

// Package metrics counts what the agent does and answers a scrape. It measures nothing itself: the loops and
// adapters are observed by whoever wires them.
//
// The values live in this process and start at zero with it. Every label has a known, small set of values,
// so that its series exist from the start and an alert on a rate sees the first event; a value outside its
// set counts as "Other". Names, labels and their values are API.
//
// Methods may be called from any goroutine and return at once.
//
// There are no errors.
package metrics
