package httplimit

import (
	"net/http"
	"net/url"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// Cost returns how many tokens a request takes; 0 takes none. An error that is a
// *[RequestError] is answered with its status, any other as a failure of the store. A client
// must not be able to make its request cheaper than it is: see [CostFromQuery].
type Cost = func(*http.Request) (float64, error)

// Fixed is the same cost for all requests.
func Fixed(n float64) Cost {
	return func(*http.Request) (float64, error) { return n, nil }
}

// CostFromHeader is a cost that the client states in a header, as CostFromQuery is
// one in the query.
func CostFromHeader(name string, least, otherwise float64) Cost {
	name = http.CanonicalHeaderKey(name)
	return func(r *http.Request) (float64, error) {
		return stated("header "+name, r.Header[name], least, otherwise)
	}
}

// CostFromQuery is a cost that the client states in the URL's query, such as how many rows it
// wants: a whole number, in digits. Less than least counts as least. If it is absent or empty,
// the cost is otherwise: the cost of such a request to the handler. All else is a
// *[RequestError] with status 400: a sign, a space, a point or a letter, since the handler may
// read another number there, and several values, of which it may see another one; and so is a
// query that cannot be parsed. The handler must read the same parameter: with r.URL.Query,
// since r.FormValue prefers one in the body.
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
