package httplimit

import (
	"bytes"
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// Store is what a [Middleware] needs of a store: Allow and Settle. A *pgstore.Store and a
// *memstore.Store have it.
type Store = edge.Store

// Policy is a limit of a middleware, its key, and the tokens that a request takes from it. Only Limit
// is required. Clients see its name, in RateLimit fields and in problems, so it must be printable
// ASCII. Without a [Key] all requests have one key, and without a [Cost] each takes one token. Tier
// chooses another limit for a request, Applies the requests that are limited, and Counts those whose
// tokens are not given back after the handler: see [CountOnly] and [CountExcept]. Above is a share of
// the limit that these requests leave to others.
type Policy = edge.Policy[*http.Request, Outcome]

// Config configures a [Middleware].
type Config struct {
	// Policies are asked together: all grant, or nothing is taken. At most
	// [ratelimit.MaxRequests]. Required, unless there are policies InFlight.
	Policies []Policy

	// InFlight limits how many requests are handled at a time. It is asked together with
	// Policies, all or nothing, by Permits.
	InFlight []InFlightPolicy

	// Permits has the store's verbs for InFlight, and is required for it: store.Permits(). With
	// a fallback.Store f around the store, it is f.Permits(store.Permits()).
	Permits ratelimit.Permits

	// Catalog chooses the limit of a key, such as an override in a database, in place of Limit
	// or Tier: a *catalog.Catalog. The default, nil, leaves these as they are.
	Catalog ratelimit.Catalog

	// Fields says which response fields describe the limits. The default is [Draft11].
	Fields Fields

	// Limits adds a member "limits" to the problem of a refusal: the status and definition of
	// each limit, for clients that predict by [PredictJS]. The default is not to.
	Limits bool

	// PartitionSecret adds a partition key to the RateLimit fields: 12 bytes of the HMAC-SHA256
	// of policy and key under this secret. It tells a client which of its requests share a
	// quota, and does not tell the key. All processes must have the same secret. The default,
	// nil, adds none.
	PartitionSecret []byte

	// Jitter is a share of the wait, from 0 to 1. Retry-After is later by up to that share, and
	// at most by MaxJitter, so that refused clients do not all come back together. One key
	// always gets the same part of it. The default is none.
	Jitter float64

	// MaxJitter is the most that Jitter adds, such as to the wait for a day's quota. The default
	// is 30 seconds.
	MaxJitter time.Duration

	// TooLarge is the status for a cost that the limit can never grant: 413 or 422. The
	// default is 422.
	TooLarge int

	// Timeout bounds a decision, and settling after the handler. The default is 1 second.
	Timeout time.Duration

	// FailOpen lets a request through, after Timeout, if its limits cannot be asked, such as
	// while the database is down. Observe is called for it. The default is to answer 503. A
	// store of package fallback answers at once, and keeps to the limit from memory.
	FailOpen bool

	// FailureRetryAfter is the Retry-After of that 503, spread by up to as much again.
	// The default is 5 seconds.
	FailureRetryAfter time.Duration

	// FullRetryAfter is the Retry-After of a request that got no permit, spread by up to as
	// much again. It is a guess, since a permit's release is not known beforehand. The default
	// is 1 second.
	FullRetryAfter time.Duration

	// Shadow lets every request through, without fields, even if it is refused. Tokens and
	// permits are taken, and Observe gets the decision.
	Shadow bool

	// WriteProblem writes status and body for every request that is not let through, in place
	// of Problem.Write, such as for clients of another protocol. The request was refused (429),
	// can never be granted (422 or 413), has no usable key or cost (400), or its limits could
	// not be asked (503). Fields and Retry-After are set before the call.
	WriteProblem func(w http.ResponseWriter, r *http.Request, p *Problem)

	// Observe is called for every decision, before the answer is written, with an event whose
	// Door is "httplimit". It is also called later if settling failed (VerbSettle) or a permit
	// was lost (VerbRenew). [RequestOf] returns the request from its context. It must not
	// block, and must be safe for concurrent use. The store's own Observe is called for the
	// same decisions.
	Observe ratelimit.Observe

	// Logger gets the faults of the store. The default is slog.Default().
	Logger *slog.Logger
}

// Middleware limits requests. It is safe for concurrent use.
type Middleware struct {
	config  Config
	limiter edge.Limiter[*http.Request, Outcome]
}

// New makes a Middleware. An error is [ratelimit.ErrInvalid], and names every invalid field: it is
// a *[ratelimit.FieldError], or several joined.
func New(store Store, config *Config) (*Middleware, error) {
	f := edge.Faults{Package: "httplimit"}
	if config == nil {
		f.Must(false, "Config", nil, "must not be nil")
		return nil, f.Err()
	}
	m := &Middleware{config: *config}
	c := &m.config
	m.limiter = edge.Limiter[*http.Request, Outcome]{
		Package: "httplimit", Store: store, Policies: c.Policies, InFlight: c.InFlight, Permits: c.Permits, Catalog: c.Catalog,
		Jitter: c.Jitter, MaxJitter: c.MaxJitter, Timeout: c.Timeout, FailureRetryAfter: c.FailureRetryAfter, FullRetryAfter: c.FullRetryAfter,
		FailOpen: c.FailOpen, Shadow: c.Shadow, Observe: c.Observe, Logger: c.Logger, Fault: isRequestError,
	}
	m.limiter.Init(&f)
	for _, name := range edge.Names(c.Policies, c.InFlight) {
		if !isFieldString(name) {
			f.Add(&ratelimit.FieldError{Package: "httplimit", Limit: name, Field: "Name", Value: name, Reason: "must be printable ASCII, to stand in a RateLimit field"})
		}
	}
	f.Must(c.Fields <= Draft11|Triple || c.Fields == NoFields, "Fields", uint8(c.Fields), "must be Draft11, Triple, both, or NoFields")
	f.Must(c.TooLarge == 0 || c.TooLarge == http.StatusRequestEntityTooLarge || c.TooLarge == http.StatusUnprocessableEntity,
		"TooLarge", c.TooLarge, "must be 413 or 422")
	c.PartitionSecret = bytes.Clone(c.PartitionSecret)
	c.Fields = cmp.Or(c.Fields, Draft11)
	c.TooLarge = cmp.Or(c.TooLarge, http.StatusUnprocessableEntity)
	if err := f.Err(); err != nil {
		return nil, err
	}
	return m, nil
}

// String returns the names of the policies.
func (m *Middleware) String() string { return m.config.String() }

// RequestOf returns the request of an event, from the context that Config.Observe is called with.
// It returns nil if the event is not a middleware's, such as a store's.
func RequestOf(ctx context.Context) *http.Request { return edge.Asked[*http.Request](ctx) }

// String returns the names of the policies, and nothing of the rest, such as the secret.
func (c Config) String() string {
	return "httplimit: policies " + edge.Quoted(c.Policies, c.InFlight)
}

// LogValue returns String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// Handler returns next behind the limits. As a func(http.Handler) http.Handler it fits routers.
// [Used] works in the context of a request that is let through.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		pass, e := m.limiter.Ask(r.Context(), r)
		if !e.Passed {
			m.answer(w, r, e)
			return
		}
		if !e.Shadow {
			m.setFields(w.Header(), e)
		}
		m.serve(w, r, next, pass)
	})
}

// serve lets r through to next.
func (m *Middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler, pass *edge.Admission[*http.Request, Outcome]) {
	served := r
	rec, writer := &recorder{ResponseWriter: w}, w
	if pass.ByOutcome() {
		writer = rec.writer()
	}
	failure, ok := pass.Do(r.Context(), func(ctx context.Context) {
		served = r.WithContext(ctx)
		next.ServeHTTP(writer, served)
	}, func(panicked bool) Outcome { return rec.outcome(served, panicked, r.Context().Err() != nil) })
	if !ok {
		m.answer(w, r, failure)
	}
}

// Requests returns the requests of the policies for r, in their order, without those that do
// not apply. A handler that takes in its own transaction passes them to AllowTx, and its result
// to [Middleware.Granted] or its error to [Middleware.Answer]:
//
//	var result ratelimit.Result
//	requests, err := limit.Requests(r)
//	if err == nil {
//		err = pgx.BeginFunc(r.Context(), pool, func(tx pgx.Tx) (err error) {
//			if err = placeOrder(r, tx); err != nil {
//				return err
//			}
//			if result, err = store.AllowTx(r.Context(), tx, requests...); err != nil {
//				return err
//			}
//			return result.Err() // a refusal rolls the order back
//		})
//	}
//	switch {
//	case limit.Answer(w, r, err): // a refusal, or an invalid request
//	case err != nil:
//		http.Error(w, "no order", http.StatusInternalServerError)
//	default:
//		limit.Granted(w, r, result)
//		w.WriteHeader(http.StatusCreated)
//	}
//
// If no policy applies, there are no requests, and AllowTx must not be called. Call Requests before
// the transaction begins, so that a Tier or Key that reads the database needs no second connection.
// The handler does not go behind [Middleware.Handler], so Shadow, FailOpen, Timeout and Counts have
// no effect.
func (m *Middleware) Requests(r *http.Request) ([]ratelimit.Request, error) {
	requests, err := m.limiter.Requests(r)
	if err != nil {
		return nil, err
	}
	return requests, nil
}
