// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

// look lists the devices and driver files that a container sees, and tries to open each GPU: those that it
// was given by the node it sees, the numbers of all others by nodes of its own making. A lookup by dd, since
// a shell that opens a terminal-like device could become its session.
const look = `
ls -l /dev/nvidia*
find / -xdev \( -name 'libcuda*' -o -name 'libnvidia*' \) 2>/dev/null
for d in /dev/nvidia[0-9]*; do
  if dd if=$d of=/dev/null count=0 2>/dev/null; then echo "opens $d"; else echo "refused $d"; fi
done
for n in %s; do
  mknod /other-$n c ${n%%:*} ${n#*:} || continue
  if dd if=/other-$n of=/dev/null count=0 2>/tried; then echo "opens other $n"; else echo "refused other $n: $(cat /tried)"; fi
  rm -f /other-$n
done
`

// lookInside shows what the containers got.
func (d *demo) lookInside(ctx context.Context) error {
	state, err := d.sim.State(ctx)
	if err != nil {
		return err
	}
	now := d.world.copyOf()
	for _, pod := range []string{first, second} {
		own := map[string]bool{}
		for _, u := range now.unitsOf(pod) {
			dev, ok := deviceOf(state, now, u)
			if !ok {
				return fmt.Errorf("the chassis knows no GPU behind %s", u)
			}
			own[dev.DeviceNumber] = true
		}
		if err := d.lookInto(ctx, pod, own, state); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) lookInto(ctx context.Context, pod string, own map[string]bool, state *simapi.State) error {
	var others []string
	for _, dev := range state.Devices {
		if !own[dev.DeviceNumber] {
			others = append(others, dev.DeviceNumber)
		}
	}
	d.screen.say("\n== What the container of Pod %s sees, and what it can open", pod)
	d.typed("kubectl exec -n %s %s -- ls -l '/dev/nvidia*' ...", namespace, pod)
	out, err := d.kubectl(ctx, "exec", "-n", namespace, pod, "--", "sh", "-c", fmt.Sprintf(look, strings.Join(others, " ")))
	if err != nil {
		return err
	}
	for l := range strings.Lines(out) {
		d.screen.say("  %s", strings.TrimRight(l, "\n"))
	}
	return judgeLook(out, len(own), others)
}

// judgeLook says what is wrong with what a container saw.
func judgeLook(out string, own int, others []string) error {
	var opens int
	var refused []string
	var wrong []error
	for l := range strings.Lines(out) {
		f := strings.Fields(l)
		switch {
		case len(f) < 2:
		case f[0] == "opens" && f[1] == "other":
			wrong = append(wrong, fmt.Errorf("the container can open the GPU %s, which is not its own", f[2]))
		case f[0] == "refused" && f[1] == "other":
			refused = append(refused, strings.TrimSuffix(f[2], ":"))
			if !strings.Contains(l, "Operation not permitted") {
				wrong = append(wrong, fmt.Errorf("the container was refused another GPU for another reason than its device rules: %s", strings.TrimSpace(l)))
			}
		case f[0] == "opens":
			opens++
		case f[0] == "refused":
			wrong = append(wrong, fmt.Errorf("the container cannot open its own %s", f[1]))
		}
	}
	if opens != own {
		wrong = append(wrong, fmt.Errorf("the container has %d GPUs that open, not %d", opens, own))
	}
	for _, n := range others {
		if !slices.Contains(refused, n) {
			wrong = append(wrong, fmt.Errorf("the container was not refused the GPU with the device number %s", n))
		}
	}
	return errors.Join(wrong...)
}
