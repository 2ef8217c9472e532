package httplimit

import (
	"context"
	"net/http"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// RequestOf returns the request of an event, from the context that Config.Observe is called with.
// It returns nil if the event is not a middleware's, such as a store's.
func RequestOf(ctx context.Context) *http.Request { return edge.Asked[*http.Request](ctx) }
