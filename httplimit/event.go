package httplimit

import (
	"context"
	"net/http"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// RequestOf returns the request that Config.Observe hears of, by the context that it is called
// with; nil for the context of anything else, such as an event of a store.
func RequestOf(ctx context.Context) *http.Request { return edge.Asked[*http.Request](ctx) }
