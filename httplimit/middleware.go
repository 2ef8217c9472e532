package httplimit

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

const (
	defaultTimeout    = time.Second
	defaultFullFor    = time.Second
	defaultFailureFor = 5 * time.Second
)

// Store is the part of a store that a [Middleware] needs, Allow and Settle: a *pgstore.Store or a
// *memstore.Store.
type Store = edge.Store

// Policy is one limit of a middleware: the limit, its key, and the tokens that a request takes
// from it. Its public name, in RateLimit fields and in problems, is the limit's.
type Policy struct {
	// Limit is the limit. Required. Its name must be printable ASCII, as the fields'
	// grammar demands, and differ from those of the other policies.
	Limit ratelimit.Limit

	// Key returns the key of a request. Nil is one key for all requests.
	Key Key

	// Tier chooses the limit for a request, such as by the customer's plan: a copy of
	// Limit with other numbers, of the same name. A nil limit means that the policy
	// does not apply to the request. An error is answered as one of Key. Nil is Limit
	// for all.
	Tier func(*http.Request) (ratelimit.Limit, error)

	// Cost says how many tokens a request takes. Nil is one.
	Cost Cost

	// Above is the share of the limit's Capacity that these requests leave to others, for
	// classes of priority: routes that are less important than others of the same limit
	// have a middleware of their own with a larger share. See [ratelimit.Request.Above].
	// The default is 0: they may use all of it.
	Above float64

	// Counts reports, once the handler is done, whether the request counts; if not, its tokens
	// are given back. Until then they are taken, so a thousand guesses at the same time are
	// limited too. Nil counts all. See [CountOnly] and [CountExcept].
	Counts func(Outcome) bool
}

// Config configures a [Middleware].
type Config struct {
	// Policies are asked together: all grant, or nothing is taken. At most
	// [ratelimit.MaxRequests]. Required, unless there are policies InFlight.
	Policies []Policy

	// InFlight are how many requests may be handled at a time. They are asked with Policies,
	// all or nothing, by the verbs of Permits.
	InFlight []InFlightPolicy

	// Permits is the store's verbs for limits of how many at once, store.Permits(). Required
	// for InFlight. With a fallback.Store they are what its Permits returns of those.
	Permits ratelimit.Permits

	// Catalog chooses the limit of a key, such as an override in a database, in place of Limit
	// or Tier: a *catalog.Catalog. Nil leaves these as they are.
	Catalog ratelimit.Catalog

	// Fields says which fields tell of the limits. The zero value is [Draft11].
	Fields Fields

	// Limits adds to the problem of a refusal a member "limits", the status and definition of
	// each limit, for clients that predict by [PredictJS]. The default is not to.
	Limits bool

	// PartitionSecret has the RateLimit fields carry a partition key: 12 bytes of the
	// HMAC-SHA256 of policy and key under this secret, which all processes must share.
	// It tells a client which of its requests share a quota, and nobody the key. Nil
	// leaves the parameter out.
	PartitionSecret []byte

	// Jitter is the share of the wait, 0 to 1, over which Retry-After is spread, so
	// that clients that were refused together do not come back together. It only adds,
	// at most MaxJitter, and is always the same share for one key. The default is none.
	Jitter float64

	// MaxJitter is the most that Jitter adds, such as to the wait for a day's quota. The default
	// is 30 seconds.
	MaxJitter time.Duration

	// TooLarge is the status for a cost that the limit can never grant: 413 or 422. The
	// default is 422.
	TooLarge int

	// Timeout bounds a decision, and settling after the handler. The default is 1 second.
	Timeout time.Duration

	// FailOpen lets requests through when the limit cannot be asked, such as when the
	// database is down, each after Timeout. Observe hears of it. The default is to answer 503.
	// A store of package fallback answers at once, and keeps to the limit from memory.
	FailOpen bool

	// FailureRetryAfter is the Retry-After of that 503, spread by up to as much again.
	// The default is 5 seconds.
	FailureRetryAfter time.Duration

	// FullRetryAfter is the Retry-After of a refusal for want of a permit, spread by up to as
	// much again: nobody knows when one will be free. The default is 1 second.
	FullRetryAfter time.Duration

	// Shadow has every request pass, without fields, also when it is refused. Tokens and permits
	// are taken as ever, and Observe receives the decision.
	Shadow bool

	// WriteProblem answers a request that is not let through, in place of Problem.Write, such as
	// for clients of another protocol: one that is refused (429), can never be granted (422 or
	// 413), has no usable key or cost (400), or whose limits could not be asked (503). The fields
	// and Retry-After are set already; it writes status and body.
	WriteProblem func(w http.ResponseWriter, r *http.Request, p *Problem)

	// Observe hears of every decision, before the answer, as an event with the Door "httplimit";
	// and of settling that failed (VerbSettle) and permits that were lost (VerbRenew) later. Its
	// context is the request's, which [RequestOf] returns. It must not block, and be safe for
	// concurrent use. The store's own Observe hears of the same decisions.
	Observe ratelimit.Observe

	// Logger gets the faults of the store. The default is slog.Default().
	Logger *slog.Logger
}

// Middleware limits requests. It is safe for concurrent use.
type Middleware struct {
	config  Config
	limiter edge.Limiter[*http.Request, Outcome]
}

// New makes a Middleware. An error is [ratelimit.ErrInvalid], and tells all that is wrong:
// a *[ratelimit.FieldError], or several joined.
func New(store Store, config *Config) (*Middleware, error) {
	f := edge.Faults{Package: "httplimit"}
	f.Must(store != nil, "Store", nil, "must not be nil")
	f.Must(config != nil, "Config", nil, "must not be nil")
	if config == nil {
		return nil, f.Err()
	}
	m := &Middleware{config: *config}
	m.config.Policies = append([]Policy(nil), config.Policies...)
	m.config.InFlight = append([]InFlightPolicy(nil), config.InFlight...)
	m.config.PartitionSecret = append([]byte(nil), config.PartitionSecret...)
	m.config.check(&f)
	checkInFlight(&f, config)
	if err := f.Err(); err != nil {
		return nil, err
	}
	m.config.setDefaults()
	m.limiter = edge.Limiter[*http.Request, Outcome]{
		Package: "httplimit", Store: store, Policies: policies(config.Policies), Catalog: config.Catalog,
		InFlight: inFlight(config.InFlight), Permits: config.Permits,
		Timeout: m.config.Timeout, FailOpen: config.FailOpen, Shadow: config.Shadow,
		Observe: config.Observe, Logger: m.config.Logger, Fault: isRequestError,
	}
	return m, nil
}

// policies returns ps with their defaults.
func policies(ps []Policy) []edge.Policy[*http.Request, Outcome] {
	policies := make([]edge.Policy[*http.Request, Outcome], len(ps))
	for i, p := range ps {
		if p.Key == nil {
			p.Key = ForAll
		}
		if p.Cost == nil {
			p.Cost = Fixed(1)
		}
		policies[i] = edge.Policy[*http.Request, Outcome](p)
	}
	return policies
}

// check notes the faults of c.
func (c *Config) check(f *edge.Faults) {
	for i, d := range edge.CheckLimits(f, c.limits(), len(c.InFlight) > 0) {
		edge.CheckAbove(f, d.Name, c.Policies[i].Above)
		checkName(f, d.Name)
	}
	f.Must(c.Fields <= Draft11|Triple || c.Fields == NoFields, "Fields", uint8(c.Fields), "must be Draft11, Triple, both, or NoFields")
	f.Must(c.Jitter >= 0 && c.Jitter <= 1, "Jitter", c.Jitter, "must be between 0 and 1")
	f.Must(c.MaxJitter >= 0, "MaxJitter", c.MaxJitter, "must not be negative")
	f.Must(c.TooLarge == 0 || c.TooLarge == http.StatusRequestEntityTooLarge || c.TooLarge == http.StatusUnprocessableEntity,
		"TooLarge", c.TooLarge, "must be 413 or 422")
	f.Must(c.Timeout >= 0, "Timeout", c.Timeout, "must not be negative")
	f.Must(c.FullRetryAfter >= 0, "FullRetryAfter", c.FullRetryAfter, "must not be negative")
	f.Must(c.FailureRetryAfter >= 0, "FailureRetryAfter", c.FailureRetryAfter, "must not be negative")
}

// checkName notes a name that no field can have.
func checkName(f *edge.Faults, name string) {
	if !isFieldString(name) {
		f.Add(&ratelimit.FieldError{Package: "httplimit", Limit: name, Field: "Name", Value: name, Reason: "must be printable ASCII, to stand in a RateLimit field"})
	}
}

func (c *Config) setDefaults() {
	c.Fields = edge.OrDefault(c.Fields, Draft11)
	c.MaxJitter = edge.OrDefault(c.MaxJitter, edge.DefaultMaxJitter)
	c.TooLarge = edge.OrDefault(c.TooLarge, http.StatusUnprocessableEntity)
	c.Timeout = edge.OrDefault(c.Timeout, defaultTimeout)
	c.FullRetryAfter = edge.OrDefault(c.FullRetryAfter, defaultFullFor)
	c.FailureRetryAfter = edge.OrDefault(c.FailureRetryAfter, defaultFailureFor)
	c.Logger = edge.OrDefault(c.Logger, slog.Default())
}

// limits returns the limits of the policies.
func (c *Config) limits() []ratelimit.Limit {
	limits := make([]ratelimit.Limit, len(c.Policies))
	for i, p := range c.Policies {
		limits[i] = p.Limit
	}
	return limits
}

// String returns the names of the policies.
func (m *Middleware) String() string { return m.config.String() }

// String returns the names of the policies, and nothing of the rest, such as the secret.
func (c Config) String() string {
	return "httplimit: policies " + edge.Names(c.limits(), permitLimits(c.InFlight))
}

// LogValue is String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// Handler returns next behind the limits. It is a func(http.Handler) http.Handler, as routers
// take for a middleware. A request that is let through reaches next with a context for [Used].
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
//			if result, err = store.AllowTx(r.Context(), tx, requests...); err != nil {
//				return err
//			}
//			if err = result.Err(); err != nil {
//				return err // rolls back
//			}
//			return placeOrder(r, tx)
//		})
//	}
//	switch {
//	case limit.Answer(w, r, err): // was about the limits
//	case err != nil:
//		http.Error(w, "no order", http.StatusInternalServerError)
//	default:
//		limit.Granted(w, r, result)
//		w.WriteHeader(http.StatusCreated)
//	}
//
// When no policy applies there are no requests, and nothing to take: AllowTx is not to be
// called then. Requests comes before the transaction begins, so that a Tier or Key that
// reads the database does not ask for a second connection. Such a handler is not
// behind [Middleware.Handler], so Shadow, FailOpen, Timeout and Counts are not for it.
func (m *Middleware) Requests(r *http.Request) ([]ratelimit.Request, error) {
	return m.limiter.Requests(r)
}
