package grpclimit

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

const (
	defaultTimeout    = time.Second
	defaultFullFor    = time.Second
	defaultFailureFor = 5 * time.Second
)

// Store is the verbs of a store that a [Limiter] needs, Allow and Settle: a *pgstore.Store or a *memstore.Store.
type Store = edge.Store

// Call is a call as policies see it. Logged, printed and in JSON it is its method.
type Call struct {
	Method  string          // its full name, such as "/shop.Orders/Place"
	Context context.Context // with its metadata, its peer, and the values of the interceptors before this one
	Message any             // of a unary call; nil when a stream is opened
}

// String returns the method.
func (c Call) String() string { return c.Method }

// LogValue returns the method.
func (c Call) LogValue() slog.Value { return slog.StringValue(c.Method) }

// MarshalJSON returns the method.
func (c Call) MarshalJSON() ([]byte, error) { return json.Marshal(c.Method) }

// Outcome is how a call ended, for Policy.Counts.
type Outcome struct {
	Call     *Call
	Code     codes.Code // of the handler's error; Unknown if it panicked
	Panicked bool
}

// CountOnly counts the calls that end with one of the codes, such as Unauthenticated for
// failed logins, and those of which the handler panicked.
func CountOnly(only ...codes.Code) func(Outcome) bool {
	return func(o Outcome) bool { return o.Panicked || contains(only, o.Code) }
}

// CountExcept counts all calls but those that end with one of the codes, such as Internal and
// Unavailable. A call of which the handler panics is Unknown.
func CountExcept(except ...codes.Code) func(Outcome) bool {
	return func(o Outcome) bool { return !contains(except, o.Code) }
}

func contains(list []codes.Code, code codes.Code) bool {
	for _, c := range list {
		if c == code {
			return true
		}
	}
	return false
}

// Policy is one limit of a limiter: its definition, its key, and the count that a call takes. Its
// public name, in answers, is the limit's.
type Policy struct {
	// Limit is the limit. Required. Its name differs from those of the other policies.
	Limit ratelimit.Limit

	// Methods are those to which the policy applies, by their full names, or all of a service
	// by "/shop.Orders/". The default is all calls, those of health checks and reflection too.
	Methods []string

	// Key returns the key of a call. Nil is one key for all.
	Key Key

	// Tier chooses the limit for a call, such as by the customer's plan: a copy of Limit with
	// other numbers, of the same name. A nil limit means that the policy does not apply to
	// the call. An error is answered as one of Key. Nil is Limit for all.
	Tier func(*Call) (ratelimit.Limit, error)

	// Cost says how many tokens a call takes. Nil is one.
	Cost Cost

	// Above is the share of the limit's Capacity that these calls leave to others, for
	// classes of priority: see [ratelimit.Request.Above]. Methods of another class have a
	// Limiter of their own. The default is 0: they may use all of it.
	Above float64

	// Counts says, once the handler is done, whether the call counts; if not, its tokens are
	// given back. Between the two the tokens are gone, so a thousand guesses at the same time
	// are limited too. Nil counts all. See [CountOnly] and [CountExcept].
	Counts func(Outcome) bool
}

// Config configures a [Limiter].
type Config struct {
	// Policies are asked together: all that apply grant, or nothing is taken. At most
	// [ratelimit.MaxRequests]. Required, unless there are policies InFlight.
	Policies []Policy

	// InFlight are how many calls may be handled at a time. They are asked with Policies, all
	// or nothing, by the verbs of Permits.
	InFlight []InFlightPolicy

	// Permits is the store's verbs for limits of how many at once, store.Permits(). Required
	// for InFlight. With a fallback.Store they are what its Permits returns of those.
	Permits ratelimit.Permits

	// Catalog chooses the definition for a key, such as an override in a database, when Limit or
	// Tier have chosen one by the code: a *catalog.Catalog. Nil leaves that as it is.
	Catalog ratelimit.Catalog

	// InTx says which calls have handlers that take in their own transaction. For these
	// nothing is taken by Policies; the handler passes [Requests] of its context to TakeTx or
	// AllowTx, and returns the error of a refusal, which is answered as any refusal:
	//
	//	func (s *orders) Place(ctx context.Context, in *shop.Order) (*shop.Placed, error) {
	//		err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
	//			if err := s.store.TakeTx(ctx, tx, grpclimit.Requests(ctx)...); err != nil {
	//				return err // a refusal rolls back
	//			}
	//			return s.place(ctx, tx, in)
	//		})
	//		if err != nil {
	//			return nil, err
	//		}
	//		return &shop.Placed{}, nil
	//	}
	//
	// Observe is told of a refusal that the handler returns, and of a grant when it has asked for
	// Requests and returns no error, which is after its commit.
	//
	// Shadow, FailOpen, Timeout and Counts do not apply to these takes. Nil is none.
	InTx func(*Call) bool

	// Jitter is the share of the wait, 0 to 1, over which RetryInfo is spread, so that clients
	// that were refused together do not come back together. It only adds, at most MaxJitter, and
	// is always the same share for one key. The default is none.
	Jitter float64

	// MaxJitter is the most that Jitter adds, such as to the wait for a day's quota. The default
	// is 30 seconds.
	MaxJitter time.Duration

	// Timeout bounds a decision, and settling after the handler. The default is 1 second.
	Timeout time.Duration

	// FailOpen lets calls through when the limit cannot be asked, such as when the database
	// is down, each after Timeout. Observe hears of it. The default is to answer Unavailable.
	// A store of package fallback answers at once, and keeps to the limit from memory.
	FailOpen bool

	// FailureRetryAfter is the RetryInfo of that Unavailable, spread by up to as much again.
	// The default is 5 seconds.
	FailureRetryAfter time.Duration

	// FullRetryAfter is the RetryInfo of a refusal for want of a permit, spread by up to as much
	// again: nobody knows when one will be free. The default is 1 second.
	FullRetryAfter time.Duration

	// Shadow has every call pass, also one that is refused. Tokens and permits are taken as ever,
	// and Observe hears of the decision.
	Shadow bool

	// Observe hears of every decision, before the answer, as an event with the Door "grpclimit";
	// and of settling that failed (VerbSettle) and permits that were lost (VerbRenew) later. Its
	// context is the call's, which [CallOf] returns. It must not block, and be safe for
	// concurrent use. The store's own Observe hears of the same decisions.
	Observe ratelimit.Observe

	// Logger gets the faults of the store. The default is slog.Default().
	Logger *slog.Logger
}

// Limiter limits calls. It is safe for concurrent use.
type Limiter struct {
	config  Config
	gate    edge.Limiter[*Call, Outcome]
	permits edge.Limiter[*Call, Outcome] // the same without Policies
}

// New makes a Limiter. An error is [ratelimit.ErrInvalid], and tells all that is wrong: a
// *[ratelimit.FieldError], or several joined.
func New(store Store, config *Config) (*Limiter, error) {
	f := edge.Faults{Package: "grpclimit"}
	f.Must(store != nil, "Store", nil, "must not be nil")
	f.Must(config != nil, "Config", nil, "must not be nil")
	if config == nil {
		return nil, f.Err()
	}
	l := &Limiter{config: *config}
	c := &l.config
	c.Policies = append([]Policy(nil), config.Policies...)
	c.InFlight = append([]InFlightPolicy(nil), config.InFlight...)
	for i, d := range edge.CheckLimits(&f, c.limits(), len(c.InFlight) > 0) {
		edge.CheckAbove(&f, d.Name, c.Policies[i].Above)
	}
	edge.CheckInFlight(&f, c.Permits, permitLimits(c.InFlight), c.limits())
	f.Must(c.Jitter >= 0 && c.Jitter <= 1, "Jitter", c.Jitter, "must be between 0 and 1")
	f.Must(c.MaxJitter >= 0, "MaxJitter", c.MaxJitter, "must not be negative")
	f.Must(c.Timeout >= 0, "Timeout", c.Timeout, "must not be negative")
	f.Must(c.FailureRetryAfter >= 0, "FailureRetryAfter", c.FailureRetryAfter, "must not be negative")
	f.Must(c.FullRetryAfter >= 0, "FullRetryAfter", c.FullRetryAfter, "must not be negative")
	if err := f.Err(); err != nil {
		return nil, err
	}
	c.MaxJitter = edge.OrDefault(c.MaxJitter, edge.DefaultMaxJitter)
	c.Timeout = edge.OrDefault(c.Timeout, defaultTimeout)
	c.FailureRetryAfter = edge.OrDefault(c.FailureRetryAfter, defaultFailureFor)
	c.FullRetryAfter = edge.OrDefault(c.FullRetryAfter, defaultFullFor)
	c.Logger = edge.OrDefault(c.Logger, slog.Default())
	l.gate = edge.Limiter[*Call, Outcome]{
		Package: "grpclimit", Store: store, Policies: policies(c.Policies), InFlight: inFlight(c.InFlight), Permits: config.Permits,
		Catalog: c.Catalog, Timeout: c.Timeout, FailOpen: c.FailOpen, Shadow: c.Shadow,
		Observe: c.Observe, Logger: c.Logger, Fault: isFault,
	}
	l.permits = l.gate
	l.permits.Policies = nil
	return l, nil
}

// policies returns ps with their defaults.
func policies(ps []Policy) []edge.Policy[*Call, Outcome] {
	policies := make([]edge.Policy[*Call, Outcome], len(ps))
	for i, p := range ps {
		if p.Key == nil {
			p.Key = ForAll
		}
		if p.Cost == nil {
			p.Cost = Fixed(1)
		}
		policies[i] = edge.Policy[*Call, Outcome]{Limit: p.Limit, Key: p.Key, Tier: of(p.Methods, p.Limit, p.Tier), Cost: p.Cost, Above: p.Above, Counts: p.Counts}
	}
	return policies
}

// of returns a tier that is the zero limit for calls of other methods; limit, without a tier.
func of[L any](methods []string, limit L, tier func(*Call) (L, error)) func(*Call) (L, error) {
	if len(methods) == 0 {
		return tier
	}
	return func(c *Call) (l L, err error) {
		switch {
		case !matches(methods, c.Method):
			return l, nil
		case tier == nil:
			return limit, nil
		}
		return tier(c)
	}
}

// matches reports whether a method is one of methods, or of a service among them.
func matches(methods []string, method string) bool {
	for _, m := range methods {
		if m == method || strings.HasSuffix(m, "/") && strings.HasPrefix(method, m) {
			return true
		}
	}
	return false
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
func (l *Limiter) String() string { return l.config.String() }

// String returns the names of the policies, and nothing of the rest.
func (c Config) String() string {
	return "grpclimit: policies " + edge.Names(c.limits(), permitLimits(c.InFlight))
}

// LogValue is String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// Unary is a grpc.UnaryServerInterceptor. Put it behind authentication. A handler that is
// let through has a context for [Used], which reports the tokens really used.
func (l *Limiter) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	err = l.serve(&Call{info.FullMethod, ctx, req}, func(ctx context.Context) (err error) {
		resp, err = handler(ctx, req)
		return err
	})
	return resp, err
}

// Stream is a grpc.StreamServerInterceptor, as [Limiter.Unary] is one. A stream takes when it
// is opened, and holds its permits until its handler returns. The context that ends when one is
// lost is that of the stream that the handler has: a handler that waits in RecvMsg learns of it
// after the next message.
func (l *Limiter) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return l.serve(&Call{info.FullMethod, stream.Context(), nil}, func(ctx context.Context) error {
		return handler(srv, &serverStream{stream, ctx})
	})
}

// serverStream is a stream with a context of its own.
type serverStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *serverStream) Context() context.Context { return s.ctx }

// serve has do handle a call that is let through.
func (l *Limiter) serve(c *Call, do func(context.Context) error) (err error) {
	gate := &l.gate
	if l.config.InTx != nil && l.config.InTx(c) {
		requests, err := l.gate.Requests(c)
		if err != nil {
			return l.answer(c.Context, l.gate.Fail(c.Context, c, err))
		}
		gate, do = &l.permits, l.inTx(c, requests, do)
	}
	pass, e := gate.Ask(c.Context, c)
	if !e.Passed {
		return l.answer(c.Context, e)
	}
	failure, ok := pass.Do(c.Context, func(ctx context.Context) { err = do(ctx) }, func(panicked bool) Outcome {
		if panicked {
			return Outcome{c, codes.Unknown, true}
		}
		return Outcome{c, codeOf(err), false}
	})
	if !ok {
		return l.answer(c.Context, failure)
	}
	return err
}

// codeOf returns the code that the server answers for an error of a handler.
func codeOf(err error) codes.Code {
	if s, ok := status.FromError(err); ok {
		return s.Code()
	}
	return status.FromContextError(err).Code()
}

type handedKey struct{}

// handed is the requests that a handler is to take in its own transaction.
type handed struct {
	requests []ratelimit.Request
	outer    *handed // of the limiter before, whose requests are among them
	asked    atomic.Bool
}

// inTx returns do for a handler that takes requests in its own transaction.
func (l *Limiter) inTx(c *Call, requests []ratelimit.Request, do func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		h := &handed{requests: requests}
		if h.outer, _ = ctx.Value(handedKey{}).(*handed); h.outer != nil {
			h.requests = slices.Concat(h.outer.requests, requests)
		}
		err := do(context.WithValue(ctx, handedKey{}, h))
		if err == nil && len(requests) > 0 && h.asked.Load() {
			l.gate.Granted(c.Context, c, ratelimit.Result{}, requests)
		}
		if _, ok := status.FromError(err); ok { // of the handler's own
			return err
		}
		if e, ok := l.gate.Answers(c.Context, c, err); ok {
			return l.answer(c.Context, e)
		}
		return err
	}
}

// Requests returns the requests of the policies for the call of ctx, if its handler takes in its
// own transaction: see Config.InTx. It is empty when no policy applies; AllowTx is not to be called
// then.
func Requests(ctx context.Context) []ratelimit.Request {
	innermost, _ := ctx.Value(handedKey{}).(*handed)
	for h := innermost; h != nil; h = h.outer {
		h.asked.Store(true)
	}
	if innermost == nil {
		return nil
	}
	return slices.Clone(innermost.requests)
}

// Used says how many tokens of a policy, named by its limit, the call has really used, such as
// those of a stream's messages, when that is known only in its course. When the handler is done,
// the difference to the tokens taken is given back, or taken unconditionally; the last call
// holds. A use that a policy does not count, by its Counts, is given back whole.
//
// An error is [ratelimit.ErrInvalid]: the count is none that a request may have (see
// Request.Validate), or ctx is not that of a call with such a policy, or the handler has
// returned. Then the count noted before holds. Used is safe for concurrent use. Where nothing was
// taken, since the policy does not apply, or the call was let through in shadow mode or because
// the store failed, it does nothing.
func Used(ctx context.Context, policy string, n float64) error {
	return edge.Use(ctx, "grpclimit", policy, n)
}
