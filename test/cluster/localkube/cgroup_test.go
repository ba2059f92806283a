// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTracking(t *testing.T) {
	tests := map[string]struct {
		mounts []string
		want   string
	}{
		"v1 with pids": {
			mounts: []string{
				"33 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct",
				"34 25 0:29 / /sys/fs/cgroup/pids rw,relatime shared:10 - cgroup cgroup rw,pids",
				"35 25 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
			},
			want: "/sys/fs/cgroup/pids",
		},
		"v1 without pids": {
			mounts: []string{
				"33 25 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu",
				"34 25 0:29 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd",
			},
			want: "/sys/fs/cgroup/systemd",
		},
		"v2": {
			mounts: []string{
				"22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro",
				"30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate",
			},
			want: "/sys/fs/cgroup",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var all []hierarchy
			for _, line := range tc.mounts {
				if h, ok := parseHierarchy(line); ok {
					all = append(all, h)
				}
			}
			if diff := cmp.Diff(tc.want, tracking(all).path); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzParseHierarchy(f *testing.F) {
	f.Add("34 25 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids")
	f.Add(" - ")
	f.Fuzz(func(t *testing.T, line string) {
		if h, ok := parseHierarchy(line); ok && h.path == "" {
			t.Errorf("%q: accepted without a path", line)
		}
	})
}
