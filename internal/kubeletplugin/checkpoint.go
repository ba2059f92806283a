// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// state is how far an entry has come:
//
//	(none) ─▶ PrepareStarted ─▶ PrepareCompleted ─▶ (none)
//	               └─▶ (none), when it fails
//
// Started means that nobody was told: it may be undone. Both own the entry's devices.
type state string

const (
	prepareStarted   state = "PrepareStarted"
	prepareCompleted state = "PrepareCompleted"
)

// preparedDevice is one allocation result of a claim.
type preparedDevice struct {
	Request string `json:"request,omitempty"`
	Pool    string `json:"pool"`
	Entry   string `json:"entry"`
	// Fabric is empty for a GPU that is built into this node, which Unit names.
	Fabric device.FabricID `json:"fabric,omitempty"`
	Unit   device.Unit     `json:"unit"`
	// Admin: the claim may look, it owns nothing.
	Admin bool           `json:"admin,omitempty"`
	UUID  device.GPUUUID `json:"uuid,omitempty"`
}

// builtIn tells that the device is part of this node and of no fabric: no lease speaks of it.
func (d preparedDevice) builtIn() bool { return d.Fabric == "" }

// entry is what is prepared for one claim.
type entry struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	State     state  `json:"state"`
	// AllocatedAt tells this allocation from the claim's next one; empty if unknown.
	AllocatedAt string           `json:"allocatedAt,omitempty"`
	Devices     []preparedDevice `json:"devices"`
	// Rebuilt: the entry was inferred from device leases; the claim may not have been prepared at all.
	Rebuilt bool `json:"rebuilt,omitempty"`
}

// claimText names the entry's claim for people.
func (e entry) claimText(uid types.UID) string {
	if e.Name == "" {
		return "claim of UID " + string(uid)
	}
	return "claim " + e.Namespace + "/" + e.Name + " (UID " + string(uid) + ")"
}

// record is the checkpoint's payload.
type record struct {
	// Rebuild: what was prepared before is unknown; Unprepared are the claims that the kubelet has
	// unprepared since, so that rebuilding does not bring them back.
	Rebuild    bool                 `json:"rebuild,omitempty"`
	Unprepared map[types.UID]bool   `json:"unprepared,omitempty"`
	Claims     map[types.UID]*entry `json:"claims"`
}

func newRecord() *record { return &record{Claims: map[types.UID]*entry{}} }

// envelope is the file. The checksum covers the payload's bytes as they stand in the file, so that a
// release that knows other fields still finds it right.
type envelope struct {
	Version  int             `json:"version"`
	BootID   string          `json:"bootID"`
	Checksum string          `json:"checksum"`
	Payload  json.RawMessage `json:"payload"`
}

const (
	checkpointVersion = 1
	// newestReadable is one more: a downgrade reads what the next release wrote.
	newestReadable = checkpointVersion + 1

	checkpointFile = "checkpoint.json"
	lockFile       = "checkpoint.lock"
	// mostDamaged bounds the damaged files that are kept.
	mostDamaged = 9
	// lockPatience is how long a call waits for the other agent of a rolling update.
	lockPatience = 5 * time.Second
	lockPoll     = 10 * time.Millisecond
)

// errDamaged: the bytes are no checkpoint of a release that this one can read.
var errDamaged = errors.New("damaged checkpoint")

func checksum(payload []byte) string {
	sum := sha256.Sum256(payload)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func encodeCheckpoint(bootID string, r *record) ([]byte, error) {
	payload, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode the checkpoint: %w", err)
	}
	data, err := json.Marshal(envelope{
		Version: checkpointVersion, BootID: bootID, Checksum: checksum(payload), Payload: payload,
	})
	if err != nil {
		return nil, fmt.Errorf("encode the checkpoint: %w", err)
	}
	return append(data, '\n'), nil
}

// decodeCheckpoint reads a checkpoint. Every error is errDamaged.
func decodeCheckpoint(data []byte) (bootID string, r *record, err error) {
	var env envelope
	if err = json.Unmarshal(data, &env); err != nil {
		return "", nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	if env.Version < 1 || env.Version > newestReadable {
		return "", nil, fmt.Errorf("%w: version %d, this release reads 1 to %d", errDamaged, env.Version, newestReadable)
	}
	if sum := checksum(env.Payload); sum != env.Checksum {
		return "", nil, fmt.Errorf("%w: the payload's checksum is %s, the file says %q", errDamaged, sum, env.Checksum)
	}
	r = newRecord()
	if err = json.Unmarshal(env.Payload, r); err != nil {
		return "", nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	if r.Claims == nil {
		r.Claims = map[types.UID]*entry{}
	}
	for uid, e := range r.Claims {
		if err := checkEntry(uid, e); err != nil {
			return "", nil, fmt.Errorf("%w: %w", errDamaged, err)
		}
	}
	return env.BootID, r, nil
}

func checkEntry(uid types.UID, e *entry) error {
	if !validUID(uid) {
		return fmt.Errorf("claim UID %q", uid)
	}
	if e == nil || len(e.Devices) == 0 {
		return fmt.Errorf("claim %s has no devices", uid)
	}
	if e.State != prepareStarted && e.State != prepareCompleted {
		return fmt.Errorf("claim %s is in the unknown state %q", uid, e.State)
	}
	for _, d := range e.Devices {
		if _, builtIn := d.Unit.BuiltIn(); d.Unit == "" || d.builtIn() && !builtIn {
			return fmt.Errorf("claim %s has a device without fabric or unit", uid)
		}
	}
	return nil
}

// validUID tells whether the UID can be part of a file's name.
func validUID(uid types.UID) bool {
	const longest = 128
	if uid == "" || len(uid) > longest {
		return false
	}
	for i, c := range string(uid) {
		alnum := c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !alnum && (i == 0 || i == len(uid)-1 || c != '-') {
			return false
		}
	}
	return true
}

// checkpoint keeps the record on disk. Writers exclude each other by a lock file, across the agents of
// a rolling update too; readers need no lock, since the file is only ever replaced.
type checkpoint struct {
	dir, bootID string
	clock       clock.Clock
	// mutex holds one token: whoever has it may use the lock file.
	mutex    chan struct{}
	observer Observer
	// lost is called when what was prepared before has to be rebuilt.
	lost func()
}

func newCheckpoint(dir, bootID string, c clock.Clock, o Observer, lost func()) *checkpoint {
	return &checkpoint{dir: dir, bootID: bootID, clock: c, mutex: make(chan struct{}, 1), observer: o, lost: lost}
}

func (c *checkpoint) path() string { return filepath.Join(c.dir, checkpointFile) }

// read returns what is stored. It never repairs: a file that is missing or damaged is a record that
// has to be rebuilt.
func (c *checkpoint) read() (*record, error) {
	r, _, err := c.load()
	if errors.Is(err, errDamaged) {
		return &record{Rebuild: true, Claims: map[types.UID]*entry{}}, nil
	}
	return r, err
}

// load returns what is stored, and whether the file says something else than the record: it is missing,
// or written before the machine booted.
func (c *checkpoint) load() (r *record, stale bool, err error) {
	data, err := os.ReadFile(c.path())
	if errors.Is(err, os.ErrNotExist) {
		// Lost or never there: both look alike, and the leases know.
		return &record{Rebuild: true, Claims: map[types.UID]*entry{}}, true, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read the checkpoint: %w", err)
	}
	bootID, r, err := decodeCheckpoint(data)
	if err != nil {
		return nil, false, err
	}
	if bootID != c.bootID {
		// No container of the former boot runs: nobody was told anything that still holds.
		for _, e := range r.Claims {
			e.State = prepareStarted
		}
		return r, true, nil
	}
	return r, false, nil
}

// update lets change work on what is stored, and stores the result if change says so. change runs under
// the lock and must be quick.
func (c *checkpoint) update(ctx context.Context, change func(*record) (write bool, err error)) error {
	unlock, err := c.lock(ctx)
	if err != nil {
		return err
	}
	kept, cause, err := c.updateLocked(change)
	unlock()
	if kept != "" {
		c.observer.CheckpointDamaged(kept, cause)
	}
	return err
}

func (c *checkpoint) updateLocked(change func(*record) (bool, error)) (kept string, cause, err error) {
	r, stale, err := c.load()
	if errors.Is(err, errDamaged) {
		cause = err
		r = &record{Rebuild: true, Claims: map[types.UID]*entry{}}
		if kept, err = c.keepDamaged(); err != nil {
			return "", nil, err
		}
		// At once, whatever becomes of the change: the same damage is kept and told once.
		err = c.store(r)
	}
	if err != nil {
		return kept, cause, err
	}
	write, err := change(r)
	if r.Rebuild {
		c.lost()
	}
	if err != nil || (!write && !stale) {
		return kept, cause, err
	}
	if err = c.store(r); err != nil {
		return kept, cause, err
	}
	if write {
		c.observer.PreparedChanged()
	}
	return kept, cause, nil
}

func (c *checkpoint) store(r *record) error {
	data, err := encodeCheckpoint(c.bootID, r)
	if err == nil {
		err = replaceFile(c.path(), data, 0o600, nil)
	}
	if err != nil {
		return fmt.Errorf("store the checkpoint: %w", err)
	}
	return nil
}

// keepDamaged gives the file a second name. The file itself stays until it is replaced by one that says
// "rebuild": a crash in between must not leave none, which would look like a new node... and lose the Warning.
func (c *checkpoint) keepDamaged() (string, error) {
	for n := 1; ; n++ {
		kept := fmt.Sprintf("%s.damaged-%d", c.path(), n)
		if n == mostDamaged {
			if err := ignoreMissing(os.Remove(kept)); err != nil {
				return "", fmt.Errorf("make room for the damaged checkpoint: %w", err)
			}
		}
		err := os.Link(c.path(), kept)
		if err == nil {
			return kept, nil
		}
		if !errors.Is(err, os.ErrExist) || n == mostDamaged {
			return "", fmt.Errorf("keep the damaged checkpoint: %w", err)
		}
	}
}

// lock takes the lock file. The kernel drops it with its holder, so it cannot go stale.
func (c *checkpoint) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case c.mutex <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("lock the checkpoint: %w", context.Cause(ctx))
	}
	defer func() {
		if err != nil {
			<-c.mutex
		}
	}()
	f, err := os.OpenFile(filepath.Join(c.dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the checkpoint's lock: %w", err)
	}
	give := c.clock.Now().Add(lockPatience)
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			// Closing the only descriptor of the open file drops the lock.
			return func() { _ = f.Close(); <-c.mutex }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || c.clock.Now().After(give) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
		}
		if err = c.pause(ctx, lockPoll); err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
		}
	}
}

func (c *checkpoint) pause(ctx context.Context, d time.Duration) error {
	t := c.clock.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C():
		return nil
	}
}

// owners returns the claims that have the unit, in order.
func (r *record) owners(fabric device.FabricID, unit device.Unit) []types.UID {
	var uids []types.UID
	for _, uid := range slices.Sorted(maps.Keys(r.Claims)) {
		if slices.ContainsFunc(r.Claims[uid].Devices, func(d preparedDevice) bool { return d.Fabric == fabric && d.Unit == unit }) {
			uids = append(uids, uid)
		}
	}
	return uids
}

// conflict returns another claim that owns one of the devices, if any. Admin access neither owns nor
// minds. The GPU counts as well as the unit: one of them may have got another name.
func (r *record) conflict(claim types.UID, devices []preparedDevice) (types.UID, preparedDevice, bool) {
	for _, uid := range slices.Sorted(maps.Keys(r.Claims)) {
		if uid == claim {
			continue
		}
		for _, has := range r.Claims[uid].Devices {
			for _, wants := range devices {
				same := has.Fabric == wants.Fabric && has.Unit == wants.Unit || has.UUID != "" && has.UUID == wants.UUID
				if same && !has.Admin && !wants.Admin {
					return uid, wants, true
				}
			}
		}
	}
	return "", preparedDevice{}, false
}
