package grpclimit

import (
	"context"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// CallOf returns the call that Config.Observe hears of, by the context that it is called with;
// nil for the context of anything else, such as an event of a store.
func CallOf(ctx context.Context) *Call { return edge.Asked[*Call](ctx) }
