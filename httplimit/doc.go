// Package httplimit limits HTTP requests with package ratelimit's limits. It has a [Middleware]
// for servers, whose answers clients can rely on, and a [Transport] for clients, which waits as
// long as servers ask.
//
// # Servers
//
//	customer := httplimit.Hashed(httplimit.BySubject(customerOf)) // from the request's context
//	limit, err := httplimit.New(store, &httplimit.Config{
//		Policies: []httplimit.Policy{
//			{Limit: PerSecond, Key: customer},
//			{Limit: PerDay, Key: customer},
//		},
//		Jitter: 0.1,
//	})
//	if err != nil {
//		return err
//	}
//	http.ListenAndServe(":8080", authenticated(limit.Handler(mux)))
//
// If one policy refuses a request, nothing is taken from any. The answers:
//
//	granted                      the handler's answer, with RateLimit and RateLimit-Policy
//	refused                      429 with Retry-After, and a problem that names the policies
//	can never be granted         422 (or 413), since there is no later
//	no usable key or cost        400, or the status of a [RequestError]
//	the store does not answer    503 with Retry-After; or the handler's, with FailOpen
//
// [InFlightPolicy] limits how many requests are handled at a time.
//
// A client that waits for Retry-After gets through, if no other request took tokens of the same
// key meanwhile. Problems are application/problem+json (RFC 9457). The fields follow draft 11
// of draft-ietf-httpapi-ratelimit-headers, which may still change: see [Draft11].
//
// The middleware takes tokens before the handler runs, in a decision of its own. They stay spent
// if the handler's work is rolled back. After the handler, tokens are given back if the request
// does not count ([Policy].Counts), or settled by what was used ([Used]). If that fails, or the
// process dies before, they stay spent. A handler that wants tokens and work in one transaction
// takes the tokens itself: see [Middleware.Requests].
//
// # Keys and addresses
//
// A client that can choose its key has as many limits as it likes. So use an authenticated
// identity, and for addresses name the trusted proxies ([AddressConfig]). Keys appear in no
// answer.
//
// # Clients
//
//	transport, err := httplimit.NewTransport(nil)
//	if err != nil {
//		return err
//	}
//	client := &http.Client{Transport: transport}
//
// It waits where servers ask for it, and repeats requests that are safe to repeat.
package httplimit
