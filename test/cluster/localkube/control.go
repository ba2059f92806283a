// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cohdi/cohdi-agent/test/cluster/internal/pki"
)

// The processes of the control plane, in the order in which they start.
const (
	etcd              = "etcd"
	apiserver         = "apiserver"
	controllerManager = "controller-manager"
	scheduler         = "scheduler"
	simulator         = "sim"
)

// auditPolicy tells who wrote what when. What became of a claim's status is kept with it: from that one sees
// when a claim was allocated and when it was told that its device can be used, by one clock.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
omitManagedFields: true
rules:
- level: RequestResponse
  verbs: [update, patch]
  resources: [{group: resource.k8s.io, resources: [resourceclaims/status]}]
- level: Metadata
`

// kubeletAccess lets the API server's client certificate reach the kubelets, for logs and exec.
const kubeletAccess = `{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
 "metadata": {"name": "apiserver-kubelet-api"},
 "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin"},
 "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "kube-apiserver-kubelet-client"}]}`

// writeIdentities gives every component a certificate of its own and nothing more.
func (c *Cluster) writeIdentities() error {
	ca, err := pki.New(c.pki())
	if err != nil {
		return err
	}
	ids := map[string]pki.Identity{
		"etcd":        {CommonName: "etcd", Hosts: []string{HostIP, "127.0.0.1"}},
		"etcd-client": {CommonName: "kube-apiserver-etcd-client"},
		"apiserver": {CommonName: "kube-apiserver", Hosts: []string{
			HostIP, ServiceIP, "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc." + clusterDomain,
		}},
		"apiserver-kubelet-client": {CommonName: "kube-apiserver-kubelet-client"},
		scheduler:                  {CommonName: "system:kube-scheduler"},
		controllerManager:          {CommonName: "system:kube-controller-manager"},
		"admin":                    {CommonName: "kubernetes-admin", Organization: []string{"system:masters"}},
	}
	for _, node := range Nodes() {
		ids[node.Name] = pki.Identity{CommonName: "system:node:" + node.Name, Organization: []string{"system:nodes"}}
		ids["kubelet-"+node.Name] = pki.Identity{CommonName: node.Name, Hosts: []string{node.Name, node.IP}}
	}
	for name, id := range ids {
		if err := ca.Issue(name, id); err != nil {
			return err
		}
	}
	if err := ca.KeyPair("service-account"); err != nil {
		return err
	}
	return c.writeKubeconfigs()
}

func (c *Cluster) writeKubeconfigs() error {
	files := map[string]string{"admin": c.AdminConfig()}
	for _, name := range []string{scheduler, controllerManager} {
		files[name] = c.kubeconfig(name)
	}
	for _, node := range Nodes() {
		files[node.Name] = c.kubeconfig(node.Name)
	}
	if err := os.MkdirAll(filepath.Dir(c.kubeconfig("x")), 0o755); err != nil {
		return fmt.Errorf("create folder for kubeconfigs: %w", err)
	}
	for name, path := range files {
		content := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: cohdi, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: %s, user: {client-certificate: %q, client-key: %q}}]
contexts: [{name: cohdi, context: {cluster: cohdi, user: %s}}]
current-context: cohdi
`, APIServerURL, c.pkiFile("ca.crt"), name, c.pkiFile(name+".crt"), c.pkiFile(name+".key"), name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			return fmt.Errorf("write kubeconfig of %s: %w", name, err)
		}
	}
	if err := os.WriteFile(c.auditPolicyFile(), []byte(auditPolicy), 0o644); err != nil {
		return fmt.Errorf("write audit policy: %w", err)
	}
	return nil
}

func (l Layout) auditPolicyFile() string { return filepath.Join(l.State, "audit-policy.yaml") }

func (c *Cluster) etcdProcess() process {
	return process{name: etcd, args: []string{
		c.tool("etcd"), "--name=cohdi", "--data-dir=" + filepath.Join(c.State, "etcd"),
		"--listen-client-urls=" + etcdURL, "--advertise-client-urls=" + etcdURL,
		"--listen-peer-urls=" + etcdPeerURL, "--initial-advertise-peer-urls=" + etcdPeerURL, "--initial-cluster=cohdi=" + etcdPeerURL,
		"--client-cert-auth", "--trusted-ca-file=" + c.pkiFile("ca.crt"),
		"--cert-file=" + c.pkiFile("etcd.crt"), "--key-file=" + c.pkiFile("etcd.key"),
		"--peer-client-cert-auth", "--peer-trusted-ca-file=" + c.pkiFile("ca.crt"),
		"--peer-cert-file=" + c.pkiFile("etcd.crt"), "--peer-key-file=" + c.pkiFile("etcd.key"),
		// The data does not outlive the cluster, and a disk flush per write makes all else slow.
		"--unsafe-no-fsync",
	}}
}

func (c *Cluster) apiserverProcess() process {
	return process{name: apiserver, args: []string{
		c.tool("kube-apiserver"),
		"--etcd-servers=" + etcdURL, "--etcd-cafile=" + c.pkiFile("ca.crt"),
		"--etcd-certfile=" + c.pkiFile("etcd-client.crt"), "--etcd-keyfile=" + c.pkiFile("etcd-client.key"),
		"--bind-address=" + HostIP, "--advertise-address=" + HostIP, "--secure-port=6443",
		"--tls-cert-file=" + c.pkiFile("apiserver.crt"), "--tls-private-key-file=" + c.pkiFile("apiserver.key"),
		"--client-ca-file=" + c.pkiFile("ca.crt"),
		// Nothing is aggregated and the name is never issued, but the others look for these settings.
		"--requestheader-client-ca-file=" + c.pkiFile("ca.crt"), "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--service-cluster-ip-range=" + serviceCIDR,
		"--service-account-issuer=" + serviceIssuer,
		"--service-account-key-file=" + c.pkiFile("service-account.pub"),
		"--service-account-signing-key-file=" + c.pkiFile("service-account.key"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--kubelet-certificate-authority=" + c.pkiFile("ca.crt"),
		"--kubelet-client-certificate=" + c.pkiFile("apiserver-kubelet-client.crt"),
		"--kubelet-client-key=" + c.pkiFile("apiserver-kubelet-client.key"),
		"--kubelet-preferred-address-types=InternalIP",
		"--audit-policy-file=" + c.auditPolicyFile(), "--audit-log-path=" + c.AuditLog(),
		// It is read as one file.
		"--audit-log-maxsize=4096",
	}}
}

// withKubeconfig are the flags by which a component is a client of the API server and lets the API
// server decide who may read its own metrics.
func (c *Cluster) withKubeconfig(name string) []string {
	conf := c.kubeconfig(name)
	return []string{
		"--kubeconfig=" + conf, "--authentication-kubeconfig=" + conf, "--authorization-kubeconfig=" + conf,
		"--bind-address=" + HostIP,
		// One instance: nothing to elect, and no wait for the old Lease after a restart.
		"--leader-elect=false",
	}
}

func (c *Cluster) controllerManagerProcess() process {
	return process{name: controllerManager, args: append([]string{
		c.tool("kube-controller-manager"),
		"--use-service-account-credentials=true",
		"--service-account-private-key-file=" + c.pkiFile("service-account.key"),
		"--root-ca-file=" + c.pkiFile("ca.crt"),
		"--cluster-signing-cert-file=" + c.pkiFile("ca.crt"), "--cluster-signing-key-file=" + c.pkiFile("ca.key"),
	}, c.withKubeconfig(controllerManager)...)}
}

func (c *Cluster) schedulerProcess() process {
	return process{name: scheduler, args: append([]string{c.tool("kube-scheduler")}, c.withKubeconfig(scheduler)...)}
}

func (c *Cluster) startControl(p process) error {
	p.cgroup = c.cgroups[controlCgroup]
	return c.start(p)
}

// startControlPlane starts etcd, API server, controller manager and scheduler and waits until the
// API server serves; the others retry until it does.
func (c *Cluster) startControlPlane(ctx context.Context) error {
	for _, p := range []process{c.etcdProcess(), c.apiserverProcess()} {
		if err := c.startControl(p); err != nil {
			return err
		}
	}
	if err := c.waitAPIServer(ctx); err != nil {
		return err
	}
	for _, p := range []process{c.controllerManagerProcess(), c.schedulerProcess()} {
		if err := c.startControl(p); err != nil {
			return err
		}
	}
	client, err := c.newClient()
	if err != nil {
		return err
	}
	return client.create(ctx, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", kubeletAccess)
}

func (c *Cluster) waitAPIServer(ctx context.Context) error {
	client, err := c.newClient()
	if err != nil {
		return err
	}
	return waitFor(ctx, time.Minute, func(ctx context.Context) error {
		for _, name := range []string{etcd, apiserver} {
			if err := c.ended(name); err != nil {
				return fatalError{err}
			}
		}
		if err := client.get(ctx, "/readyz", nil); err != nil {
			return fmt.Errorf("wait for the API server, log in %s: %w", c.Log(apiserver), err)
		}
		return nil
	})
}
