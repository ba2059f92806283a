// SPDX-License-Identifier: Apache-2.0

// Package matrix plays every fault of a fabric manager on every face of the simulated chassis: the agent's real driver talks
// to the face, and where it is about the recipe (ask once, look, adopt exactly one, ask again only when nothing can come any
// more, give back what is left over) the node's real loop uses that driver, over a model of the node on the same chassis. All
// of it is tests; docs/fabrics.md keeps the table that they make.
//
// A row is a fault or a scenario and knows no face; a face is one file and knows no row, but says why one does not apply to
// it. A cell that is neither run nor explained fails the test. Each run ends with the same questions: was the fault met, is
// all back in the pool, was nothing attached, claimed or told twice, were there no more requests than the row allows.
//
// Every run has a bubble of virtual time of its own, so that production's times cost nothing, and a goroutine that does not
// end fails it.
package matrix
