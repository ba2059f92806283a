// SPDX-License-Identifier: Apache-2.0

// Package pki makes the certificates of a local test cluster: one authority, and per component a
// certificate with an identity of its own, as an installer of Kubernetes would hand out.
//
// The truth is the folder given to New: a certificate authority lives as long as the cluster does,
// and nothing is reused between two clusters.
//
// An Authority may be used from several goroutines. Nothing blocks.
//
// Errors come from the file system or from crypto/x509 and name the file or the certificate.
package pki
