// SPDX-License-Identifier: Apache-2.0

package metal3

import (
	"context"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/cohdi/cohdi-agent/internal/machine"
)

// The annotations that lead on: from the Machine object to the host, and from the host to the fabric's name for it.
const (
	annotationHost    = "metal3.io/BareMetalHost"
	annotationMachine = "cluster-manager.cdi.io/machine"
)

// callTimeout bounds one GET.
const callTimeout = 10 * time.Second

// kind is a kind of object on the way.
type kind struct {
	name     string
	resource schema.GroupVersionResource
}

// machines are the kinds that the Node's annotation may name: OpenShift's Machine, or Metal3's where that manages the
// machines itself.
func machines() []kind {
	return []kind{
		{"Machine", schema.GroupVersionResource{Group: "machine.openshift.io", Version: "v1beta1", Resource: "machines"}},
		{"Metal3Machine", schema.GroupVersionResource{Group: "infrastructure.cluster.x-k8s.io", Version: "v1beta1", Resource: "metal3machines"}},
	}
}

func host() kind {
	return kind{"BareMetalHost", schema.GroupVersionResource{Group: "metal3.io", Version: "v1alpha1", Resource: "baremetalhosts"}}
}

// Reader follows Nodes to their hosts.
type Reader struct{ client dynamic.Interface }

// New returns a Reader.
func New(client dynamic.Interface) *Reader { return &Reader{client: client} }

// trouble is why an object cannot be read; passing may be over the next time.
type trouble struct {
	what    string
	passing bool
}

func (t *trouble) chain() machine.Chain { return machine.Chain{Problem: t.what, Passing: t.passing} }

// Follow goes from start to the end of the chain.
func (r *Reader) Follow(ctx context.Context, start machine.Start) machine.Chain {
	at := start.Host
	if start.Name != "" {
		namespace, name, bad := r.hostOf(ctx, start.Namespace, start.Name)
		if bad != nil {
			return bad.chain()
		}
		if at.Name != "" && (at.Namespace != namespace || at.Name != name) {
			return machine.Chain{Problem: fmt.Sprintf("annotation %s leads to BareMetalHost %s/%s, and the provider id names %s/%s: one of them is wrong",
				machine.AnnotationObject, namespace, name, at.Namespace, at.Name)}
		}
		at.Namespace, at.Name = namespace, name
	}
	obj, bad := r.get(ctx, host(), at.Namespace, at.Name)
	if bad != nil {
		return bad.chain()
	}
	if problem := mismatch(obj, &at); problem != "" {
		return machine.Chain{Problem: problem}
	}
	what := describe(host(), at.Namespace, at.Name)
	text := obj.GetAnnotations()[annotationMachine]
	if text == "" {
		return machine.Chain{Problem: what + " has no annotation " + annotationMachine}
	}
	return machine.Chain{Machine: text, Host: what}
}

// hostOf reads the Machine object that a Node names, of whichever kind it is, and returns the host that it names.
func (r *Reader) hostOf(ctx context.Context, namespace, name string) (hostNamespace, hostName string, bad *trouble) {
	var missing []string
	for _, k := range machines() {
		obj, why := r.get(ctx, k, namespace, name)
		switch {
		case why != nil && why.passing:
			return "", "", why
		case why != nil:
			missing = append(missing, why.what)
			continue
		}
		what, text := describe(k, namespace, name), obj.GetAnnotations()[annotationHost]
		hostNamespace, hostName, ok := machine.ParseObject(text)
		switch {
		case text == "":
			return "", "", &trouble{what: what + " has no annotation " + annotationHost}
		case !ok:
			return "", "", &trouble{what: fmt.Sprintf("annotation %s of %s is %s, not <namespace>/<name>", annotationHost, what, machine.Quote(text))}
		}
		return hostNamespace, hostName, nil
	}
	return "", "", &trouble{what: strings.Join(missing, "; ")}
}

// mismatch says why the host is not the one that the Node runs on.
func mismatch(obj *unstructured.Unstructured, at *machine.Host) string {
	what := describe(host(), at.Namespace, at.Name)
	if at.UID != "" && !strings.EqualFold(at.UID, string(obj.GetUID())) {
		return fmt.Sprintf("%s has the UID %s, and the provider id says %s: it was made anew, or is another node's", what, obj.GetUID(), machine.Quote(at.UID))
	}
	consumer, _, err := unstructured.NestedString(obj.Object, "spec", "consumerRef", "name")
	if at.Consumer != "" && err == nil && consumer != "" && consumer != at.Consumer {
		return fmt.Sprintf("%s belongs to %s, and the provider id says %s: it is another node's now", what, machine.Quote(consumer), machine.Quote(at.Consumer))
	}
	return ""
}

func describe(k kind, namespace, name string) string { return k.name + " " + namespace + "/" + name }

// get reads one object.
func (r *Reader) get(ctx context.Context, k kind, namespace, name string) (*unstructured.Unstructured, *trouble) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	obj, err := r.client.Resource(k.resource).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	what, of := describe(k, namespace, name), k.resource.GroupResource().String()
	switch {
	case err == nil:
		return obj, nil
	case apierrors.IsForbidden(err):
		return nil, &trouble{what: fmt.Sprintf("%s cannot be read: this agent's account may not get %s; apply deploy/metal3.yaml", what, of)}
	case meta.IsNoMatchError(err), apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) && apierrors.IsNotFound(err):
		return nil, &trouble{what: fmt.Sprintf("%s cannot be read: the cluster has no %s in version %s", what, of, k.resource.Version)}
	case apierrors.IsNotFound(err):
		return nil, &trouble{what: "there is no " + what}
	}
	return nil, &trouble{what: fmt.Sprintf("%s cannot be read: %v", what, err), passing: true}
}
