// SPDX-License-Identifier: Apache-2.0

// Package chassis holds the simulated chassis of the demonstration and of the end-to-end tests (demo.yaml), and the
// agent's configuration for it (agent.yaml), with a Fabric Manager in front. A file more for each other kind of manager says
// what differs; Files puts them together. Errors name the file.
package chassis
