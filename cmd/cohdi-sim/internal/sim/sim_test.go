// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
)

const chassis = `
listen: {fm: "127.0.0.1:0", control: "127.0.0.1:0"}
tenant: t-1
realm: r
credentials: {username: u, password: "p&w=d+%41 x", client_id: c, client_secret: "s& =+%25 t"}
fabrics: [{id: 0, uuid: f-0}]
machines: [{name: n1, uuid: m-1}, {name: n2, uuid: m-2}]
devices: [{id: gpu, count: 2, model: A}]
`

// bench is a running simulator and a client for each of its faces.
type bench struct {
	*simapi.Client
	t    *testing.T
	dir  string
	fm   string
	http *http.Client
	// simulator is the running one.
	simulator *Simulator
	token     string
	stop      func()
}

func start(t *testing.T, dir string) *bench {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make device nodes")
	}
	return startChassis(t, dir, chassis)
}

func startChassis(t *testing.T, dir, description string) *bench {
	t.Helper()
	cfg, err := config.Parse([]byte(description))
	if err != nil {
		t.Fatal(err)
	}
	cfg.Dir = dir
	ctx, cancel := context.WithCancel(t.Context())
	s, err := New(ctx, cfg, clock.RealClock{})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	b := &bench{Client: simapi.NewClient(s.ControlAddress()), t: t, dir: dir, fm: "https://" + s.FMAddress(), simulator: s}
	stopped := false
	b.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if rerr := <-ended; rerr != nil {
			t.Error(rerr)
		}
		if _, serr := os.Stat(filepath.Join(dir, "ready")); !errors.Is(serr, os.ErrNotExist) {
			t.Errorf("ready outlives the simulator: %v", serr)
		}
	}
	t.Cleanup(b.stop)
	for err = b.Ready(ctx); err != nil; err = b.Ready(ctx) {
		if _, refused := errors.AsType[*simapi.StatusError](err); !refused {
			t.Fatal(err)
		}
	}
	ca, err := os.ReadFile(filepath.Join(dir, "tls/ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	b.http = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}}
	return b
}

func (b *bench) login() {
	b.t.Helper()
	form := url.Values{
		"client_id": {"c"}, "client_secret": {"s& =+%25 t"}, "username": {"u"}, "password": {"p&w=d+%41 x"}, "grant_type": {"password"},
	}
	status, body, err := b.do("POST", "/id_manager/realms/r/protocol/openid-connect/token", "application/x-www-form-urlencoded", form.Encode())
	var token struct {
		Access string `json:"access_token"`
	}
	if err != nil || status != 200 || json.Unmarshal([]byte(body), &token) != nil {
		b.t.Fatalf("login: %d %s, %v", status, body, err)
	}
	b.token = token.Access
}

func (b *bench) do(method, path, contentType, body string) (int, string, error) {
	b.t.Helper()
	r, err := http.NewRequestWithContext(b.t.Context(), method, b.fm+path, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	r.Header.Set("Content-Type", contentType)
	r.Header.Set("Authorization", "Bearer "+b.token)
	resp, err := b.http.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data), err
}

// update asks for a change of machine m-1.
func (b *bench) update(method, spec string) (int, string, error) {
	b.t.Helper()
	body := fmt.Sprintf(`{"tenants":{"tenant_uuid":"t-1","machines":[{"mach_uuid":"m-1","resources":[{"res_specs":[%s]}]}]}}`, spec)
	return b.do(method, "/fabric_manager/api/v1/machines/m-1/update?tenant_uuid=t-1", "application/json", body)
}

const oneA = `{"res_type":"gpu","res_spec":{"condition":[{"column":"model","operator":"eq","value":"A"}]},"res_num":1}`

func (b *bench) attach() simapi.Device {
	b.t.Helper()
	if status, body, err := b.update("PATCH", oneA); err != nil || status != 200 {
		b.t.Fatalf("attach: %d %s, %v", status, body, err)
	}
	got := b.state().Attached("n1")
	if len(got) == 0 {
		b.t.Fatal("nothing is attached")
	}
	return got[len(got)-1]
}

func (b *bench) state() *simapi.State {
	b.t.Helper()
	s, err := b.State(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) violations() []simapi.Violation {
	b.t.Helper()
	v, err := b.Violations(b.t.Context())
	b.must(err)
	return v
}

func TestSimulator_wholeWay(t *testing.T) {
	b := start(t, t.TempDir())
	if status, _, err := b.do("GET", "/fabric_manager/api/v1/machines?tenant_uuid=t-1", "", ""); err != nil || status != 401 {
		t.Errorf("without token: %d, %v; want 401", status, err)
	}
	b.login()
	d := b.attach()
	root := filepath.Join(b.dir, "machines/n1")
	node := filepath.Join(root, "dev/nvidia0")
	var st unix.Stat_t
	b.must(unix.Stat(node, &st))
	if got := fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)); got != d.DeviceNumber {
		t.Errorf("dev/nvidia0 is %s, the device %s", got, d.DeviceNumber)
	}
	if _, err := os.Stat(filepath.Join(root, "run/nvidia/driver/usr/lib")); err != nil {
		t.Error(err)
	}
	b.must(os.WriteFile(filepath.Join(root, "sys/bus/pci/devices", d.PCIAddress, "remove"), []byte("1\n"), 0o200))
	waitFor(t, func() bool { return !b.state().Attached("n1")[0].OnBus })
	detach := fmt.Sprintf(`{"res_type":"gpu","res_uuid":%q,"res_num":1}`, d.ResUUID)
	if status, body, err := b.update("DELETE", detach); err != nil || status != 200 {
		t.Fatalf("detach: %d %s, %v", status, body, err)
	}
	s := b.state()
	if len(s.Attached("n1")) != 0 || s.Logins != 1 || len(s.Operations) != 2 || len(b.violations()) != 0 {
		t.Errorf("at the end: %+v, violations %v", s, b.violations())
	}
	log, err := b.Log(t.Context())
	b.must(err)
	if len(log) != 4 || log[1].Face != "idm" || log[1].Body != "" || log[2].Method != "PATCH" || log[3].Status != 200 {
		t.Errorf("log %+v", log)
	}
}

// waitFor asks again until the watcher of the control files has done its work.
func waitFor(t *testing.T, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !done(); {
		if time.Now().After(deadline) {
			t.Fatal("not in 10 s")
		}
	}
}

func TestSimulator_judgesWhoHoldsTheDevice(t *testing.T) {
	b := start(t, t.TempDir())
	b.login()
	d := b.attach()
	fd, err := unix.Open(filepath.Join(b.dir, "machines/n1/dev/nvidia0"), unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	b.must(err)
	defer unix.Close(fd)
	if status, _, err := b.update("DELETE", fmt.Sprintf(`{"res_type":"gpu","res_uuid":%q,"res_num":1}`, d.ResUUID)); err != nil || status != 200 {
		t.Fatalf("detach: %d, %v", status, err)
	}
	v := b.violations()
	if len(v) != 2 || v[0].Kind != simapi.OpenAtDetach || v[1].Kind != simapi.PresentAtDetach || v[0].Device != d.ID {
		t.Fatalf("violations %+v", v)
	}
	if len(v[0].Holders) != 1 || v[0].Holders[0].PID != os.Getpid() {
		t.Errorf("holders %+v, want this process", v[0].Holders)
	}
	b.must(b.ClearViolations(t.Context()))
	if len(b.violations()) != 0 {
		t.Error("violations are still there")
	}
}

func TestSimulator_restartKeepsAttachments(t *testing.T) {
	dir := t.TempDir()
	b := start(t, dir)
	b.login()
	before := b.attach()
	b.stop()

	again := start(t, dir)
	after, ok := again.state().Device(before.ID)
	if !ok || after.Machine != "n1" || !after.Bound || after.PCIAddress != before.PCIAddress {
		t.Errorf("after the restart: %+v", after)
	}
	again.token = b.token
	if status, _, err := again.do("GET", "/fabric_manager/api/v1/machines?tenant_uuid=t-1", "", ""); err != nil || status != 401 {
		t.Errorf("old token after the restart: %d, %v; want 401 over the same CA", status, err)
	}
}

func TestSimulator_lostAnswer(t *testing.T) {
	b := start(t, t.TempDir())
	b.login()
	name, err := b.AddFault(t.Context(), simapi.Fault{Method: "PATCH", Action: simapi.ActionDropAfter, Count: 1})
	b.must(err)
	status, body, err := b.update("PATCH", oneA)
	if err == nil {
		t.Errorf("answered %d %s", status, body)
	}
	if got := b.state().Attached("n1"); len(got) != 1 {
		t.Errorf("attached %+v, want one", got)
	}
	rules, err := b.Faults(t.Context())
	b.must(err)
	if len(rules) != 1 || rules[0].Name != name || rules[0].Hits != 1 {
		t.Errorf("rules %+v", rules)
	}
	b.must(b.ClearFaults(t.Context(), name))
}

func TestSimulator_controlAPI(t *testing.T) {
	b := start(t, t.TempDir())
	ctx := t.Context()
	rescan, critical, slow, off := simapi.HotplugRescan, "Critical", simapi.Duration(0), false
	b.must(b.Machine(ctx, "n2", simapi.MachineChange{Hotplug: &rescan}))
	b.must(b.Attach(ctx, "n2", "gpu-1"))
	b.must(b.Device(ctx, "gpu-1", simapi.DeviceChange{Health: &critical}))
	b.must(b.SetTiming(ctx, simapi.Timing{DetachDelay: &slow}))
	b.must(b.SetPolicies(ctx, simapi.Policies{NoCapacity: "409"}))
	if d, ok := b.state().Device("gpu-1"); !ok || d.Machine != "n2" || d.OnBus || d.OpStatus != "20" {
		t.Errorf("device %+v", d)
	}
	socket := filepath.Join(b.dir, "machines/n2/run/nvidia/driver/usr/lib/x86_64-linux-gnu/nvml.sock")
	if _, err := os.Stat(socket); err != nil {
		t.Skipf("no socket where amd64 has it: %v", err)
	}
	b.must(b.Machine(ctx, "n2", simapi.MachineChange{DriverLoaded: &off}))
	if _, err := os.Stat(socket); err == nil {
		t.Error("the driver's socket outlives the driver")
	}
	b.must(b.Detach(ctx, "gpu-1"))
	b.login()
	b.must(b.Token(ctx, simapi.TokenChange{RevokeAll: true}))
	if status, _, err := b.update("PATCH", oneA); err != nil || status != 401 {
		t.Errorf("revoked token: %d, %v", status, err)
	}
	if len(b.violations()) != 0 {
		t.Errorf("a person's doing is judged: %v", b.violations())
	}
	for status, err := range map[int]error{
		404: b.Device(ctx, "nobody", simapi.DeviceChange{}),
		400: b.Device(ctx, "gpu-1", simapi.DeviceChange{Action: "explode"}),
		409: errors.Join(b.Attach(ctx, "n1", "gpu-1"), b.Attach(ctx, "n2", "gpu-1")),
	} {
		var refused *simapi.StatusError
		if !errors.As(err, &refused) || refused.Status != status {
			t.Errorf("error %v, want status %d", err, status)
		}
	}
	if _, err := b.Raw(ctx, "POST", "/timing", []byte(`{"atachDelay":"1s"}`)); err == nil {
		t.Error("accepted a misspelt field")
	}
}

func TestSimulator_hangingRequestEndsWithIt(t *testing.T) {
	b := start(t, t.TempDir())
	if _, err := b.AddFault(t.Context(), simapi.Fault{Action: simapi.ActionHang}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if status, body, err := b.do("GET", "/fabric_manager/api/v1/machines", "", ""); err == nil && status == 200 && body != "" {
			t.Errorf("answered %d %s", status, body)
		}
	}()
	waitFor(t, func() bool {
		rules, err := b.Faults(t.Context())
		return err == nil && rules[0].Hits == 1
	})
	b.stop()
	<-ended
}

// Machines for the fabric only need no root, no device numbers and no directories, so there can be more than a kernel has
// numbers for; their devices come and go, and nothing of it is kept.
func TestMachines_without_nodes(t *testing.T) {
	dir := t.TempDir()
	description := strings.Replace(chassis, "[{name: n1, uuid: m-1}, {name: n2, uuid: m-2}]", "[{name: n1, uuid: m-1, noNode: true}, {name: n2, uuid: m-2, noNode: true}]", 1)
	description = strings.Replace(description, "count: 2", "count: 1500", 1) + "ephemeral: true\n"
	b := startChassis(t, dir, description)
	b.login()
	status, body, err := b.update("PATCH", oneA)
	if err != nil || status != 200 {
		t.Fatalf("attach: %d %s, %v", status, body, err)
	}
	if status, body, err = b.do("GET", "/fabric_manager/api/v1/machines/m-1?tenant_uuid=t-1", "", ""); err != nil || status != 200 || !strings.Contains(body, "GPU-") {
		t.Errorf("list: %d %s, %v", status, body, err)
	}
	state, err := b.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range state.Devices {
		if d.Phase != simapi.PhaseAttached {
			continue
		}
		if d.OnBus || d.Bound {
			t.Errorf("%s is on the bus of a machine without a node", d.ID)
		}
		if err := b.Detach(t.Context(), d.ID); err != nil {
			t.Error(err)
		}
	}
	b.stop()
	for _, name := range []string{"machines", "state.json"} {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s was made: %v", name, err)
		}
	}
}
