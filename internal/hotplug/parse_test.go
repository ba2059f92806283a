// SPDX-License-Identifier: Apache-2.0

package hotplug

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
)

func TestReadSerial(t *testing.T) {
	loop := make([]byte, extendedEnd)
	binary.LittleEndian.PutUint32(loop[0x100:], 1|0x200<<20)
	binary.LittleEndian.PutUint32(loop[0x200:], 2|0x100<<20)
	lost := bytes.Repeat([]byte{0xff}, extendedEnd)
	cut := configSpace(1)[:0x150]
	none := make([]byte, extendedEnd)
	binary.LittleEndian.PutUint32(none[0x100:], 0x0001|2<<16)

	tests := []struct {
		name   string
		config []byte
		want   string
		err    string
	}{
		{name: "second capability", config: configSpace(0x48b02dffff123456), want: "48-b0-2d-ff-ff-12-34-56"},
		{name: "conventional PCI has no extended space", config: make([]byte, 256)},
		{name: "reader without privilege gets 64 bytes", config: make([]byte, 64)},
		{name: "empty extended space", config: make([]byte, extendedEnd)},
		{name: "no serial number capability", config: none},
		{name: "function is gone", config: lost},
		{name: "loop", config: loop, err: "loop"},
		{name: "ends inside the capability", config: cut, err: "EOF"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := readSerial(bytes.NewReader(tt.config))
			checkError(t, err, tt.err)
			if got.String() != tt.want {
				t.Errorf("serial = %q, want %q", got, tt.want)
			}
		})
	}
}

func TestBARProblem(t *testing.T) {
	zero := "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
	bar0 := "0x00000000fa000000 0x00000000faffffff 0x0000000000040200\n"
	tests := []struct {
		name     string
		resource string
		want     string
		err      string
	}{
		{name: "healthy GPU", resource: gpuResource},
		{name: "all zeros", resource: strings.Repeat(zero, 13), want: "no BAR has address space"},
		{name: "large BAR found no room", resource: bar0 + strings.Repeat(zero, 12), want: "BAR1 has no address space"},
		{
			name:     "large BAR is marked unset",
			resource: bar0 + "0x0000000000000000 0x0000000fffffffff 0x000000002014220c\n" + strings.Repeat(zero, 4),
			want:     "BAR1 (65536 MiB) has no address space",
		},
		{name: "garbage", resource: "hello\n", err: `line 1 of resource: "hello" is not three numbers`},
		{name: "not numbers", resource: "a b c\n", err: `"a" is not a number`},
		{name: "empty", resource: "", err: "not three numbers"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := barProblem(tt.resource, requiredBARs(VendorNVIDIA))
			checkError(t, err, tt.err)
			if got != tt.want {
				t.Errorf("problem = %q, want %q", got, tt.want)
			}
		})
	}
}

func TestParseUevent(t *testing.T) {
	tests := []struct {
		name    string
		msg     string
		want    uevent
		matters bool
		err     string
	}{
		{
			name: "PCI function added",
			msg: "add@/devices/pci0000:00/0000:00:01.0\x00ACTION=add\x00DEVPATH=/devices/pci0000:00/0000:00:01.0\x00" +
				"SUBSYSTEM=pci\x00PCI_SLOT_NAME=0000:00:01.0\x00SEQNUM=1\x00",
			want:    uevent{action: "add", devPath: "/devices/pci0000:00/0000:00:01.0", subsystem: "pci"},
			matters: true,
		},
		{
			name: "driver module loaded",
			msg:  "add@/module/nvidia\x00ACTION=add\x00SUBSYSTEM=module\x00",
			want: uevent{action: "add", devPath: "/module/nvidia", subsystem: "module"}, matters: true,
		},
		{
			name: "other subsystem",
			msg:  "change@/devices/virtual/block/loop0\x00SUBSYSTEM=block\x00",
			want: uevent{action: "change", devPath: "/devices/virtual/block/loop0", subsystem: "block"},
		},
		{name: "value with an equals sign", msg: "add@/x\x00MODALIAS=a=b\x00SUBSYSTEM=pci\x00", want: uevent{action: "add", devPath: "/x", subsystem: "pci"}, matters: true},
		{name: "udev's own format", msg: "libudev\x00\xfe\xed\xca\xfe", err: "not of the form"},
		{name: "no terminator", msg: "add@/x", err: "no terminated header"},
		{name: "empty", msg: "", err: "no terminated header"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseUevent([]byte(tt.msg))
			checkError(t, err, tt.err)
			if got != tt.want {
				t.Errorf("event = %+v, want %+v", got, tt.want)
			}
			if got.matters() != tt.matters {
				t.Errorf("matters = %v, want %v", got.matters(), tt.matters)
			}
		})
	}
}

func TestParseMapping(t *testing.T) {
	tests := []struct {
		name string
		line string
		want mapping
		ok   bool
	}{
		{
			name: "device",
			line: "7f00a000-7f00b000 rw-s 00000000 00:06 123                        /dev/nvidia0\n",
			want: mapping{span: "7f00a000-7f00b000", file: mappedFile{dev: "00:06", inode: 123}, path: "/dev/nvidia0"},
			ok:   true,
		},
		{
			name: "deleted path with spaces",
			line: "7f00a000-7f00b000 rw-s 00000000 00:06 9 /tmp/a b (deleted)\n",
			want: mapping{span: "7f00a000-7f00b000", file: mappedFile{dev: "00:06", inode: 9}, path: "/tmp/a b"},
			ok:   true,
		},
		{name: "anonymous", line: "7f00a000-7f00b000 rw-p 00000000 00:00 0 \n"},
		{name: "heap", line: "7f00a000-7f00b000 rw-p 00000000 00:00 0      [heap]\n"},
		{name: "span that leaves the directory", line: "../../../etc rw-p 00000000 00:06 1 /x\n"},
		{name: "cut", line: "7f00a000-7f00b000 rw-p"},
		{name: "empty"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := parseMapping([]byte(tt.line))
			if ok != tt.ok || got != tt.want {
				t.Errorf("mapping = %+v, %v, want %+v, %v", got, ok, tt.want, tt.ok)
			}
		})
	}
}

func TestParseCgroup(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	const uid = "8f1c6a52-7f2a-4c58-9d6f-0d1e2f3a4b5c"
	tests := []struct{ name, cgroup, container, pod string }{
		{name: "v2 systemd", cgroup: "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8f1c6a52_7f2a_4c58_9d6f_0d1e2f3a4b5c.slice/cri-containerd-" + id + ".scope\n", container: id, pod: uid},
		{name: "v1 cgroupfs", cgroup: "12:memory:/kubepods/besteffort/pod" + uid + "/" + id + "\n11:cpu:/\n", container: id, pod: uid},
		{name: "host process", cgroup: "0::/system.slice/nvidia-persistenced.service\n"},
		{name: "empty"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			container, pod := parseCgroup(tt.cgroup)
			if container != tt.container || pod != tt.pod {
				t.Errorf("cgroup = %q, %q, want %q, %q", container, pod, tt.container, tt.pod)
			}
		})
	}
}

func checkError(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case err == nil && want != "":
		t.Errorf("no error, want one that contains %q", want)
	case err != nil && (want == "" || !strings.Contains(err.Error(), want)):
		t.Errorf("error = %v, want one that contains %q", err, want)
	}
}

func FuzzParseUevent(f *testing.F) {
	f.Add([]byte("add@/devices/pci0000:00/0000:00:01.0\x00SUBSYSTEM=pci\x00"))
	f.Add([]byte("libudev\x00"))
	f.Fuzz(func(t *testing.T, msg []byte) {
		e, err := parseUevent(msg)
		if err == nil && (e.action == "" || e.devPath == "" || e.devPath[0] != '/') {
			t.Errorf("accepted %q as %+v", msg, e)
		}
	})
}

func FuzzReadSerial(f *testing.F) {
	f.Add(configSpace(1)[extendedStart:])
	f.Add([]byte{3, 0, 0, 0x10})
	f.Fuzz(func(t *testing.T, extended []byte) {
		config := append(make([]byte, extendedStart), extended...)
		s, err := readSerial(bytes.NewReader(config))
		if err != nil && s != 0 {
			t.Errorf("serial %s beside error %v", s, err)
		}
		if s != 0 && !bytes.Contains(config, binary.LittleEndian.AppendUint64(nil, uint64(s))) {
			t.Errorf("serial %s is not in the configuration space", s)
		}
	})
}

func FuzzBARProblem(f *testing.F) {
	f.Add(gpuResource)
	f.Add("0x0 0x0 0x0")
	f.Fuzz(func(t *testing.T, resource string) {
		problem, err := barProblem(resource, requiredBARs(VendorNVIDIA))
		if err != nil && problem != "" {
			t.Errorf("problem %q beside error %v", problem, err)
		}
		// A function without any assigned BAR must never pass as usable.
		if err == nil && problem == "" && !strings.Contains(resource, "\n") {
			t.Errorf("%q passed with fewer BARs than required", resource)
		}
	})
}

func FuzzParseMapping(f *testing.F) {
	f.Add([]byte("7f00a000-7f00b000 rw-s 00000000 00:06 123 /dev/nvidia0\n"))
	f.Fuzz(func(t *testing.T, line []byte) {
		m, ok := parseMapping(line)
		if ok && (m.file.inode == 0 || m.path == "" || strings.ContainsAny(m.span, "/.")) {
			t.Errorf("accepted %q as %+v", line, m)
		}
	})
}

func FuzzParseCgroup(f *testing.F) {
	f.Add("0::/kubepods/pod8f1c6a52-7f2a-4c58-9d6f-0d1e2f3a4b5c/x\n")
	f.Fuzz(func(t *testing.T, cgroup string) {
		container, pod := parseCgroup(cgroup)
		if (container != "" && len(container) != 64) || (pod != "" && len(pod) != 36) {
			t.Errorf("container %q, pod %q of %q", container, pod, cgroup)
		}
	})
}
