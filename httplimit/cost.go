package httplimit

import (
	"net/http"
	"net/url"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// Cost returns how many tokens a request takes; 0 takes none. A *[RequestError] is answered with
// its status, and any other error like a failure of the store. A client must not be able to state
// less than its request costs: see [CostFromQuery].
type Cost = func(*http.Request) (float64, error)

// Fixed returns a cost that is n for every request.
func Fixed(n float64) Cost {
	return func(*http.Request) (float64, error) { return n, nil }
}

// CostFromHeader returns a cost that the client states in a header, by the rules of
// [CostFromQuery].
func CostFromHeader(name string, least, otherwise float64) Cost {
	name = http.CanonicalHeaderKey(name)
	return func(r *http.Request) (float64, error) {
		return stated("header "+name, r.Header[name], least, otherwise)
	}
}

// CostFromQuery returns a cost that the client states in the URL's query, such as the number of
// rows that it wants. The value is a whole number in digits. Below least it counts as least. A
// request without it costs the argument otherwise, which should be the handler's own default.
// Signs, spaces, points, letters and several values are a *[RequestError] with status 400, since
// the handler may read another number there. So is a query that cannot be parsed. The handler must
// read the parameter by r.URL.Query, since r.FormValue prefers the body.
func CostFromQuery(name string, least, otherwise float64) Cost {
	return func(r *http.Request) (float64, error) {
		query, err := url.ParseQuery(r.URL.RawQuery)
		if err != nil {
			return 0, &RequestError{http.StatusBadRequest, "the query cannot be parsed"}
		}
		return stated("query parameter "+name, query[name], least, otherwise)
	}
}

// stated returns the cost that values state.
func stated(what string, values []string, least, otherwise float64) (float64, error) {
	return edge.StatedCost(what, values, least, otherwise, func(detail string) error {
		return &RequestError{http.StatusBadRequest, detail}
	})
}
