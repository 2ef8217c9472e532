package httplimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
)

const (
	defaultTimeout    = time.Second
	defaultFailureFor = 5 * time.Second
)

// Store is what a [Middleware] needs of a store: a *pgstore.Store or a
// *memstore.Store.
type Store interface {
	Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
	Settle(ctx context.Context, receipt *ratelimit.Receipt, used ...float64) (ratelimit.Result, error)
}

// Policy is one limit of a middleware: which limit, whose, and how much a request
// takes from it. Its public name, in RateLimit fields and in problems, is the limit's.
type Policy struct {
	// Limit is the limit. Required. Its name must be printable ASCII, as the fields'
	// grammar demands, and differ from those of the other policies.
	Limit ratelimit.Limit

	// Key says whose limit it is. Nil is one for all.
	Key Key

	// Tier chooses the limit for a request, such as by the customer's plan: a copy of
	// Limit with other numbers, of the same name. A nil limit means that the policy
	// does not apply to the request. An error is answered as one of Key. Nil is Limit
	// for all.
	Tier func(*http.Request) (ratelimit.Limit, error)

	// Cost says how many tokens a request takes. Nil is one.
	Cost Cost

	// Counts says, once the handler is done, whether the request counts; if not, what
	// it took is given back. Between the two the tokens are gone, so a thousand
	// guesses at the same time are limited too. Nil counts all. See [CountOnly] and
	// [CountExcept].
	Counts func(Outcome) bool
}

// Config says what a [Middleware] does.
type Config struct {
	// Policies are asked together: all grant, or nothing is taken. Required, at most
	// [ratelimit.MaxRequests].
	Policies []Policy

	// Catalog chooses what holds for a key, such as an override in a database, when Limit or
	// Tier have said what holds by the code: a *catalog.Catalog. Nil leaves that as it is.
	Catalog ratelimit.Catalog

	// Fields says which fields tell of the limits. The zero value is [Draft11].
	Fields Fields

	// PartitionSecret has the RateLimit fields carry a partition key: 12 bytes of the
	// HMAC-SHA256 of policy and key under this secret, which all processes must share.
	// It tells a client which of its requests share a quota, and nobody the key. Nil
	// leaves the parameter out.
	PartitionSecret []byte

	// Jitter is the share of the wait, 0 to 1, over which Retry-After is spread, so
	// that clients that were refused together do not come back together. It only adds,
	// and is always the same share for one key. The default is none.
	Jitter float64

	// TooLarge is the status for a cost that the limit can never grant: 413 or 422. The
	// default is 422.
	TooLarge int

	// Timeout bounds a decision, and settling after the handler. The default is 1 second.
	Timeout time.Duration

	// FailOpen lets requests through when the limit cannot be asked, such as when the
	// database is down. Observe hears of it. The default is to answer 503.
	FailOpen bool

	// FailureRetryAfter is the Retry-After of that 503, spread by up to as much again.
	// The default is 5 seconds.
	FailureRetryAfter time.Duration

	// Shadow has every request pass, with no fields, whatever the decision. Tokens are
	// taken as ever, and Observe hears what would have been done.
	Shadow bool

	// Refused answers a refusal in place of the problem. The fields and Retry-After are
	// set already; it writes status and body.
	Refused func(w http.ResponseWriter, r *http.Request, result ratelimit.Result)

	// Failed answers in place of the 503. Retry-After is set already; it writes status
	// and body. The error may hold what a client must not see.
	Failed func(w http.ResponseWriter, r *http.Request, err error)

	// Observe hears of every decision, before the answer, and of settling that failed. It
	// must not block, and be safe for concurrent use.
	Observe func(r *http.Request, e Event)

	// Logger gets the faults of the store. The default is slog.Default().
	Logger *slog.Logger
}

// Middleware limits requests. It is safe for concurrent use.
type Middleware struct {
	store    Store
	config   Config
	outcomes bool // does a policy count by outcome?
}

// New makes a Middleware. An error is [ratelimit.ErrInvalid], and tells all that is wrong:
// a *[ratelimit.FieldError], or several joined.
func New(store Store, config *Config) (*Middleware, error) {
	var f faults
	f.must(store != nil, "Store", nil, "must not be nil")
	f.must(config != nil, "Config", nil, "must not be nil")
	if config == nil {
		return nil, f.err()
	}
	m := &Middleware{store: store, config: *config}
	m.config.Policies = append([]Policy(nil), config.Policies...)
	m.config.PartitionSecret = append([]byte(nil), config.PartitionSecret...)
	m.config.check(&f)
	if err := f.err(); err != nil {
		return nil, err
	}
	m.config.setDefaults()
	for i := range m.config.Policies {
		p := &m.config.Policies[i]
		m.outcomes = m.outcomes || p.Counts != nil
		if p.Key == nil {
			p.Key = ForAll
		}
		if p.Cost == nil {
			p.Cost = Fixed(1)
		}
	}
	return m, nil
}

// check finds what is wrong with c.
func (c *Config) check(f *faults) {
	checkPolicies(f, c.Policies)
	f.must(c.Fields <= Draft11|Triple || c.Fields == NoFields, "Fields", uint8(c.Fields), "must be Draft11, Triple, both, or NoFields")
	f.must(c.Jitter >= 0 && c.Jitter <= 1, "Jitter", c.Jitter, "must be between 0 and 1")
	f.must(c.TooLarge == 0 || c.TooLarge == http.StatusRequestEntityTooLarge || c.TooLarge == http.StatusUnprocessableEntity,
		"TooLarge", c.TooLarge, "must be 413 or 422")
	f.must(c.Timeout >= 0, "Timeout", c.Timeout, "must not be negative")
	f.must(c.FailureRetryAfter >= 0, "FailureRetryAfter", c.FailureRetryAfter, "must not be negative")
}

func (c *Config) setDefaults() {
	c.Fields = orDefault(c.Fields, Draft11)
	c.TooLarge = orDefault(c.TooLarge, http.StatusUnprocessableEntity)
	c.Timeout = orDefault(c.Timeout, defaultTimeout)
	c.FailureRetryAfter = orDefault(c.FailureRetryAfter, defaultFailureFor)
	c.Logger = orDefault(c.Logger, slog.Default())
}

func checkPolicies(f *faults, policies []Policy) {
	f.must(len(policies) > 0 && len(policies) <= ratelimit.MaxRequests, "Policies", len(policies), fmt.Sprintf("must be 1 to %d", ratelimit.MaxRequests))
	limits := make([]ratelimit.Limit, len(policies))
	for i, p := range policies {
		limits[i] = p.Limit
	}
	if err := ratelimit.Validate(limits...); err != nil {
		*f = append(*f, err)
		return // without Definitions to go by
	}
	for _, l := range limits {
		d := l.Definition()
		if !isFieldString(d.Name) {
			*f = append(*f, &ratelimit.FieldError{Package: "httplimit", Limit: d.Name, Field: "Name", Value: d.Name, Reason: "must be printable ASCII, to stand in a RateLimit field"})
		}
		if d.Capacity == 0 {
			*f = append(*f, &ratelimit.FieldError{Package: "httplimit", Limit: d.Name, Field: "Capacity", Value: d.Capacity, Reason: "can never grant a request"})
		}
	}
}

// faults are what is wrong with a configuration.
type faults []error

// err is the faults as one error: nil, the only one, or all joined.
func (f faults) err() error {
	if len(f) == 1 {
		return f[0]
	}
	return errors.Join(f...)
}

// must notes a fault unless a field is good.
func (f *faults) must(good bool, field string, value any, reason string) {
	if !good {
		*f = append(*f, invalid(field, value, reason))
	}
}

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// invalid is the error of a field of this package that has a value that it cannot have.
func invalid(field string, value any, reason string) error {
	return &ratelimit.FieldError{Package: "httplimit", Field: field, Value: value, Reason: reason}
}

// String returns the names of the policies.
func (m *Middleware) String() string { return m.config.String() }

// String returns the names of the policies, and nothing of the rest, such as the secret.
func (c Config) String() string {
	names := make([]string, len(c.Policies))
	for i, p := range c.Policies {
		names[i] = strconv.Quote(ratelimit.NameOf(p.Limit))
	}
	return "httplimit: policies " + strings.Join(names, ", ")
}

// LogValue is String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// Handler returns next behind the limits. It is a func(http.Handler) http.Handler, as
// routers take for a middleware. A request that is let through reaches next with a
// context in which [Used] says what it has really used.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if result, ok := m.decide(w, r); ok {
			m.serve(w, r, next, result)
		}
	})
}

// decide decides on r, and answers it unless ok says that it is let through.
func (m *Middleware) decide(w http.ResponseWriter, r *http.Request) (result ratelimit.Result, ok bool) {
	requests, err := m.Requests(r)
	if err == nil && len(requests) == 0 {
		return result, true // no policy applies
	}
	if err == nil {
		result, err = m.allow(r.Context(), requests)
	}
	e := failed(decisionOf(result, err), err, requests)
	e.Result = result
	return result, m.decided(w, r, e)
}

// Requests returns what the policies ask for r, in their order, without those that
// do not apply. A handler that takes in its own transaction passes them to AllowTx, and
// what comes of that to [Middleware.SetFields] or [Middleware.Answer]:
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
//		limit.SetFields(w.Header(), result)
//		w.WriteHeader(http.StatusCreated)
//	}
//
// When no policy applies there are no requests, and nothing to take: AllowTx is not to be
// called then. Requests comes before the transaction begins, so that a Tier or Key that
// reads the database does not ask for a second connection. Such a handler is not
// behind [Middleware.Handler], so Shadow, FailOpen, Timeout and Counts are not for it.
func (m *Middleware) Requests(r *http.Request) ([]ratelimit.Request, error) {
	requests := make([]ratelimit.Request, 0, len(m.config.Policies))
	for i := range m.config.Policies {
		request, err := m.config.Policies[i].request(r, m.config.Catalog)
		if err != nil {
			return nil, err
		}
		if request.Limit != nil {
			requests = append(requests, request)
		}
	}
	return requests, nil
}

// request is what p asks for r; without a limit when p does not apply.
func (p *Policy) request(r *http.Request, catalog ratelimit.Catalog) (request ratelimit.Request, err error) {
	limit := p.Limit
	if p.Tier != nil {
		if limit, err = p.Tier(r); err != nil || limit == nil {
			return request, err
		}
		if got, want := ratelimit.NameOf(limit), ratelimit.NameOf(p.Limit); got != want {
			return request, &ratelimit.FieldError{Limit: want, Field: "Tier", Value: got, Reason: "must be a copy of the policy's limit, of the same name"}
		}
	}
	key, err := p.Key(r)
	if err != nil {
		return request, err
	}
	n, err := p.Cost(r)
	if err != nil {
		return request, err
	}
	request = limit.ForN(key, n)
	if catalog != nil {
		request = catalog.Resolve(request)
	}
	return bounded(request)
}

// allow is the store's answer within the time-out.
func (m *Middleware) allow(ctx context.Context, requests []ratelimit.Request) (ratelimit.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, m.config.Timeout)
	defer cancel()
	return m.store.Allow(ctx, requests...)
}

// decided tells of a decision, and answers the request unless it reports that it is let
// through.
func (m *Middleware) decided(w http.ResponseWriter, r *http.Request, e Event) bool {
	e.Shadow = m.config.Shadow
	gone := r.Context().Err() != nil // a client that has gone is not let through because its leaving failed the call
	e.Passed = m.config.Shadow || e.Decision == Granted || e.Decision == Failed && m.config.FailOpen && !gone
	m.observe(r, e)
	switch {
	case m.config.Shadow:
	case e.Passed:
		m.SetFields(w.Header(), e.Result)
	default:
		m.answer(w, r, e)
	}
	return e.Passed
}

func (m *Middleware) observe(r *http.Request, e Event) {
	if e.Decision == SettleFailed || e.Decision == Failed && r.Context().Err() == nil {
		m.config.Logger.ErrorContext(r.Context(), "httplimit: the limit could not be asked",
			slog.String("decision", e.Decision.String()), slog.Bool("passed", e.Passed), slog.String("error", e.errText()))
	}
	if m.config.Observe != nil {
		m.config.Observe(r, e)
	}
}
