// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// removeStaleSockets removes the sockets of agents that were killed: their names hold the Pod's UID, so
// no later agent replaces them, and the kubelet would dial them for ever. A socket that somebody listens
// on is the other agent of a rolling update.
func removeStaleSockets(ctx context.Context, dataDir, registrarDir string) error {
	var errs error
	for _, pattern := range []string{
		filepath.Join(dataDir, "dra*.sock"),
		filepath.Join(registrarDir, device.Driver+"-*reg.sock"),
	} {
		found, err := filepath.Glob(pattern)
		errs = errors.Join(errs, err)
		for _, path := range found {
			if !refused(ctx, path) {
				continue
			}
			if err := ignoreMissing(os.Remove(path)); err != nil {
				errs = errors.Join(errs, fmt.Errorf("remove a stale socket: %w", err))
				continue
			}
			klog.FromContext(ctx).Info("Removed the socket of a former agent", "path", path)
		}
	}
	return errs
}

// refused tells whether nobody listens on the socket. Only the kernel's word for exactly that counts.
func refused(ctx context.Context, path string) bool {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		return conn.Close() != nil
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
