// SPDX-License-Identifier: Apache-2.0

// Package oci writes container images as OCI archives, without a container engine or a registry.
//
// An archive is a function of the image alone: files are sorted, and every time stamp is the same,
// so that equal content gives equal bytes and an equal digest.
//
// Nothing is shared between calls. Write reads every source file once and holds one layer in memory.
//
// Errors name the file that could not be read or written.
package oci
