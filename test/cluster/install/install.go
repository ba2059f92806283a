// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// Options say what is installed; the files are those of the repository.
type Options struct {
	// Image is the archive that `make image` writes.
	Image string
	// Manifest is deploy/daemonset.yaml.
	Manifest string
	// Config is the agent's configuration, the ConfigMap's content.
	Config string
	// Chassis is the simulator's configuration, which holds the fabric's login.
	Chassis string
	// Fabric is the fabric's id in Config.
	Fabric string
	// More manifests are applied after the first.
	More []string
}

// Default is what the demonstration installs, with paths below the root of the repository.
func Default(root string) Options {
	at := func(path string) string { return filepath.Join(root, path) }
	return Options{
		Image: at(".cache/image/cohdi-agent.tar"), Manifest: at("deploy/daemonset.yaml"),
		Config: at("test/chassis/agent.yaml"), Chassis: at("test/chassis/demo.yaml"), Fabric: "0",
		More: []string{at("deploy/extended-resource.yaml")},
	}
}

const (
	namespace = "cohdi-system"
	name      = "cohdi-agent"
	// imageAnnotation changes with the image, whose name does not: new agents replace the old ones.
	imageAnnotation = "test.cohdi.io/image"
)

// object is a Kubernetes object of any kind.
type object = map[string]any

// Install loads the image, applies the manifests and waits until an agent runs on each node.
func Install(ctx context.Context, c *localkube.Cluster, o Options) error {
	if err := c.Import(ctx, o.Image); err != nil {
		return err
	}
	list, err := o.objects(c.Layout)
	if err != nil {
		return err
	}
	if err = kubectl(ctx, c, bytes.NewReader(list), "apply", "-f", "-"); err != nil {
		return err
	}
	for _, file := range o.More {
		if err = kubectl(ctx, c, nil, "apply", "-f", file); err != nil {
			return err
		}
	}
	return kubectl(ctx, c, nil, "rollout", "status", "-n", namespace, "daemonset/"+name, "--timeout=2m")
}

// objects returns the manifest as a user would have edited it.
func (o Options) objects(l localkube.Layout) ([]byte, error) {
	manifest, err := os.ReadFile(o.Manifest)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	secret, err := o.secret(l)
	if err != nil {
		return nil, err
	}
	var items []object
	found := map[string]bool{}
	for document := range strings.SplitSeq("\n"+string(manifest), "\n---\n") {
		var item object
		if err = yaml.Unmarshal([]byte(document), &item); err != nil {
			return nil, fmt.Errorf("decode manifest %s: %w", o.Manifest, err)
		}
		if item == nil {
			continue
		}
		kind, ok := item["kind"].(string)
		if !ok {
			return nil, fmt.Errorf("decode manifest %s: an object has no kind", o.Manifest)
		}
		found[kind] = true
		switch kind {
		case "ConfigMap":
			// The Secret comes first: an agent that starts before it waits a minute for the kubelet.
			items = append(items, secret)
			err = o.configure(item)
		case "DaemonSet":
			err = o.annotate(item)
		}
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	if !found["ConfigMap"] || !found["DaemonSet"] {
		return nil, fmt.Errorf("read manifest %s: it has no ConfigMap or no DaemonSet", o.Manifest)
	}
	return json.Marshal(object{"apiVersion": "v1", "kind": "List", "items": items})
}

// configure puts the configuration in the place of the shipped one, which names no fabric.
func (o Options) configure(configMap object) error {
	config, err := os.ReadFile(o.Config)
	if err != nil {
		return fmt.Errorf("read the agent's configuration: %w", err)
	}
	configMap["data"] = object{"config.yaml": string(config)}
	return nil
}

// annotate marks the Pods with the image's digest.
func (o Options) annotate(daemonSet object) error {
	image, err := os.ReadFile(o.Image)
	if err != nil {
		return fmt.Errorf("read image: %w", err)
	}
	where := daemonSet
	for _, key := range []string{"spec", "template", "metadata"} {
		next, ok := where[key].(object)
		if !ok {
			return fmt.Errorf("mark the DaemonSet with its image: it has no %s", key)
		}
		where = next
	}
	annotations, ok := where["annotations"].(object)
	if !ok {
		annotations = object{}
		where["annotations"] = annotations
	}
	annotations[imageAnnotation] = fmt.Sprintf("%x", sha256.Sum256(image))
	return nil
}

// secret is the fabric's login, as the simulator's configuration has it.
func (o Options) secret(l localkube.Layout) (object, error) {
	data, err := os.ReadFile(o.Chassis)
	if err != nil {
		return nil, fmt.Errorf("read chassis: %w", err)
	}
	var chassis struct {
		Realm       string            `json:"realm"`
		Credentials map[string]string `json:"credentials"`
	}
	if err = yaml.Unmarshal(data, &chassis); err != nil {
		return nil, fmt.Errorf("decode chassis %s: %w", o.Chassis, err)
	}
	ca, err := os.ReadFile(filepath.Join(l.Simulator(), "tls", "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("read the simulator's certificate authority: %w", err)
	}
	login := map[string]string{"realm": chassis.Realm, "ca.crt": string(ca)}
	maps.Copy(login, chassis.Credentials)
	return object{
		"apiVersion": "v1", "kind": "Secret", "type": "Opaque",
		"metadata":   object{"name": "cohdi-fabric-" + o.Fabric, "namespace": namespace},
		"stringData": login,
	}, nil
}

// kubectl runs the built one as the cluster's administrator and shows what it says.
func kubectl(ctx context.Context, c *localkube.Cluster, stdin io.Reader, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(c.Bin, "kubectl"), append([]string{"--kubeconfig", c.AdminConfig()}, args...)...)
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, c.Progress, &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("run kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return nil
}
