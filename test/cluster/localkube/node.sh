# SPDX-License-Identifier: Apache-2.0
#
# Makes the mount namespace of one node and then holds it open. Runs in a mount namespace of its own,
# private to the host, and in the node's network namespace.
#
# NODE_DIR: the node's own files. MACHINE: the simulator's host root of this node, or empty.
set -eu

# As systemd does on a real node, so that Pods may ask for mount propagation; the host sees none of it.
mount --make-rshared /

mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/cdi /run/lock /run/nvidia/driver
mount --bind "$NODE_DIR/kubelet" /var/lib/kubelet
mount --bind "$NODE_DIR/containerd" /var/lib/containerd
mount --bind "$NODE_DIR/cni" /var/lib/cni
mount --bind "$NODE_DIR/cni-conf" /etc/cni/net.d
mount --bind "$NODE_DIR/log" /var/log
mount --bind "$NODE_DIR/boot_id" /proc/sys/kernel/random/boot_id
if [ -e /etc/machine-id ]; then mount --bind "$NODE_DIR/machine-id" /etc/machine-id; fi

dev="$NODE_DIR/dev"
if [ -n "$MACHINE" ]; then
	dev="$MACHINE/dev"
	mount --bind "$MACHINE/sys/bus/pci" /sys/bus/pci
	mount --bind "$MACHINE/run/nvidia/driver" /run/nvidia/driver
fi

node() { [ -e "$dev/$1" ] || mknod -m 666 "$dev/$1" c "$2" "$3"; }
link() { ln -sfn "$2" "$dev/$1"; }
mkdir -p "$dev/pts" "$dev/shm" "$dev/mqueue"
node null 1 3
node zero 1 5
node full 1 7
node random 1 8
node urandom 1 9
node kmsg 1 11
node tty 5 0
link fd /proc/self/fd
link stdin /proc/self/fd/0
link stdout /proc/self/fd/1
link stderr /proc/self/fd/2
link ptmx pts/ptmx
mount --bind "$dev" /dev
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t mqueue mqueue /dev/mqueue
: </dev/null || { echo "device nodes in $dev cannot be opened: is that file system mounted nodev?"; exit 1; }

touch "$NODE_DIR/namespaces-ready"
exec sleep infinity
