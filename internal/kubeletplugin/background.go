// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
)

// Background is the plugin's work beside the kubelet's calls, done in rounds by one caller.
type Background struct {
	p       *Plugin
	orphans map[types.UID]*orphan
}

// Background returns the work; what a round remembers is gone with it.
func (p *Plugin) Background() *Background {
	return &Background{p: p, orphans: map[types.UID]*orphan{}}
}

// Round does what there is to do. more says that something is left which waits for others.
func (b *Background) Round(ctx context.Context) (more bool, err error) {
	busy, err := b.p.tidy(ctx, b.orphans)
	return busy || len(b.orphans) > 0, err
}
