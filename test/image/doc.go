// SPDX-License-Identifier: Apache-2.0

// Command image builds the agent's container image without a container engine or a registry: as an
// OCI archive, or as a root file system that the Dockerfile puts into an image.
//
// The truth is package images, for both ways.
//
// Errors are printed as one line, with exit status 1.
package main
