// SPDX-License-Identifier: Apache-2.0

//go:build !race

package sim

// fewSeeds are played with the unit tests.
const fewSeeds = 200
