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

// Store has the verbs that a [Limiter] needs, Allow and Settle: a *pgstore.Store or a
// *memstore.Store.
type Store = edge.Store

// Call is the part of a call that policies see. Printed, logged and in JSON it shows the method
// only.
type Call struct {
	Method  string          // its full name, such as "/shop.Orders/Place"
	Context context.Context // with the call's metadata and peer, and the values of earlier interceptors
	Message any             // the message of a unary call; nil when a stream is opened
}

// String returns the method.
func (c Call) String() string { return c.Method }

// LogValue returns the method.
func (c Call) LogValue() slog.Value { return slog.StringValue(c.Method) }

// MarshalJSON returns the method.
func (c Call) MarshalJSON() ([]byte, error) { return json.Marshal(c.Method) }

// Outcome says how a call ended, for Policy.Counts.
type Outcome struct {
	Call     *Call
	Code     codes.Code // the code of the handler's error; Unknown if it panicked
	Panicked bool
}

// CountOnly counts calls that end with one of the codes, such as Unauthenticated for failed logins,
// and calls whose handler panicked.
func CountOnly(only ...codes.Code) func(Outcome) bool {
	return func(o Outcome) bool { return o.Panicked || slices.Contains(only, o.Code) }
}

// CountExcept counts all calls but those that end with one of the codes, such as Internal and
// Unavailable. A handler's panic is Unknown.
func CountExcept(except ...codes.Code) func(Outcome) bool {
	return func(o Outcome) bool { return !slices.Contains(except, o.Code) }
}

// Policy is a limit of a limiter, its key, and the tokens that a call takes from it. Only Limit is
// required; answers name it. Without a [Key] all calls have one key, and without a [Cost] each takes
// one token. Tier chooses another limit for a call, Applies the calls that are limited, such as
// [Methods], and Counts those whose tokens are not given back after the handler: see [CountOnly] and
// [CountExcept]. Above is a share of the limit that these calls leave to others.
type Policy = edge.Policy[*Call, Outcome]

// Config configures a [Limiter].
type Config struct {
	// Policies are asked together: all that apply must grant, or nothing is taken. There are at
	// most [ratelimit.MaxRequests]. Required, unless InFlight has policies.
	Policies []Policy

	// InFlight bounds how many calls are handled at a time. These policies are asked with Policies,
	// all or nothing, by the verbs of Permits.
	InFlight []InFlightPolicy

	// Permits has the store's verbs for limits of how many at once, store.Permits(); required for
	// InFlight. With a fallback.Store pass what its Permits returns of them.
	Permits ratelimit.Permits

	// Catalog replaces the definition that Limit or Tier chose by that of the database, such as an
	// override of a key: a *catalog.Catalog. Nil keeps the code's.
	Catalog ratelimit.Catalog

	// InTx reports whether a call's handler takes in its own transaction. For such a call the
	// Policies take nothing. The handler passes [Requests] of its context to TakeTx or AllowTx, and
	// returns the error of a refusal, which is answered like any refusal:
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
	// Observe hears of a refusal that the handler returns. It hears of a grant when the handler has
	// called Requests and returns no error, so after its commit.
	//
	// Shadow, FailOpen, Timeout and Counts do not apply to these takes. Nil means no call.
	InTx func(*Call) bool

	// Jitter spreads RetryInfo over a share, 0 to 1, of the wait, so that clients that were refused
	// together do not come back together. It only adds, at most MaxJitter, and always the same
	// share for one key. The default is none.
	Jitter float64

	// MaxJitter is the most that Jitter adds. The default is 30 seconds.
	MaxJitter time.Duration

	// Timeout bounds a decision, and settling after the handler. The default is 1 second.
	Timeout time.Duration

	// FailOpen lets calls through when the store fails, such as when the database is down, each
	// after Timeout; Observe hears of it. The default is to answer Unavailable. A store of package
	// fallback answers at once, and keeps to the limit from memory.
	FailOpen bool

	// FailureRetryAfter is the RetryInfo of that Unavailable, spread by up to as much again. The
	// default is 5 seconds.
	FailureRetryAfter time.Duration

	// FullRetryAfter is the RetryInfo when no permit is free, spread by up to as much again, since
	// nobody knows when one will be. The default is 1 second.
	FullRetryAfter time.Duration

	// Shadow lets every call pass. Tokens and permits are taken as ever, and Observe hears of each
	// decision.
	Shadow bool

	// Observe hears of every decision before the answer, as an event with the Door "grpclimit".
	// Later it hears of failed settling (VerbSettle) and lost permits (VerbRenew). [CallOf] returns
	// the call from its context. It must not block, and must be safe for concurrent use. The
	// store's own Observe hears of the same decisions.
	Observe ratelimit.Observe

	// Logger gets the errors of the store. The default is slog.Default().
	Logger *slog.Logger
}

// Limiter limits calls. It is safe for concurrent use.
type Limiter struct {
	config  Config
	limiter edge.Limiter[*Call, Outcome]
	permits edge.Limiter[*Call, Outcome] // the same without Policies
}

// New returns a Limiter. Errors are [ratelimit.ErrInvalid] and report every fault: a
// *[ratelimit.FieldError], or several joined.
func New(store Store, config *Config) (*Limiter, error) {
	f := edge.Faults{Package: "grpclimit"}
	if config == nil {
		f.Must(false, "Config", nil, "must not be nil")
		return nil, f.Err()
	}
	l := &Limiter{config: *config}
	c := &l.config
	l.limiter = edge.Limiter[*Call, Outcome]{
		Package: "grpclimit", Store: store, Policies: c.Policies, InFlight: c.InFlight, Permits: c.Permits, Catalog: c.Catalog,
		Jitter: c.Jitter, MaxJitter: c.MaxJitter, Timeout: c.Timeout, FailureRetryAfter: c.FailureRetryAfter, FullRetryAfter: c.FullRetryAfter,
		FailOpen: c.FailOpen, Shadow: c.Shadow, Observe: c.Observe, Logger: c.Logger, Fault: isFault,
	}
	l.limiter.Init(&f)
	if err := f.Err(); err != nil {
		return nil, err
	}
	l.permits = l.limiter
	l.permits.Policies = nil
	return l, nil
}

// Methods returns a Policy.Applies that selects calls by the full names of their methods, or all
// methods of a service by "/shop.Orders/".
func Methods(names ...string) func(*Call) bool {
	return func(c *Call) bool {
		return slices.ContainsFunc(names, func(name string) bool {
			return name == c.Method || strings.HasSuffix(name, "/") && strings.HasPrefix(c.Method, name)
		})
	}
}

// String returns the names of the policies.
func (l *Limiter) String() string { return l.config.String() }

// String returns the names of the policies, and nothing of the rest.
func (c Config) String() string {
	return "grpclimit: policies " + edge.Quoted(c.Policies, c.InFlight)
}

// LogValue returns what String returns.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// Unary is a grpc.UnaryServerInterceptor. Put it behind authentication. In the handler's context,
// [Used] reports the tokens really used.
func (l *Limiter) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	err = l.serve(&Call{info.FullMethod, ctx, req}, func(ctx context.Context) (err error) {
		resp, err = handler(ctx, req)
		return err
	})
	return resp, err
}

// Stream is a grpc.StreamServerInterceptor that does what [Limiter.Unary] does. A stream takes when
// it is opened, and holds its permits until its handler returns. When a permit is lost, the
// stream's context ends; a handler that waits in RecvMsg notices after the next message.
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

// serve calls do for a call that is let through.
func (l *Limiter) serve(c *Call, do func(context.Context) error) (err error) {
	limiter := &l.limiter
	if l.config.InTx != nil && l.config.InTx(c) {
		requests, err := l.limiter.Requests(c)
		if err != nil {
			return l.answer(c.Context, l.limiter.Fail(c.Context, c, err))
		}
		limiter, do = &l.permits, l.inTx(c, requests, do)
	}
	pass, e := limiter.Ask(c.Context, c)
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

// codeOf returns the code that the server answers for a handler's error.
func codeOf(err error) codes.Code {
	if s, ok := status.FromError(err); ok {
		return s.Code()
	}
	return status.FromContextError(err).Code()
}

type handedKey struct{}

// handed holds the requests that a handler takes in its own transaction.
type handed struct {
	requests []ratelimit.Request
	outer    *handed // of the limiter before this one, whose requests come first
	asked    atomic.Bool
}

// inTx wraps do for a handler that takes requests in its own transaction.
func (l *Limiter) inTx(c *Call, requests []ratelimit.Request, do func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		h := &handed{requests: requests}
		if h.outer, _ = ctx.Value(handedKey{}).(*handed); h.outer != nil {
			h.requests = slices.Concat(h.outer.requests, requests)
		}
		err := do(context.WithValue(ctx, handedKey{}, h))
		if err == nil && len(requests) > 0 && h.asked.Load() {
			l.limiter.Granted(c.Context, c, ratelimit.Result{}, requests)
		}
		if _, ok := status.FromError(err); ok { // the handler's own status, or no error
			return err
		}
		if e, ok := l.limiter.Answers(c.Context, c, err); ok {
			return l.answer(c.Context, e)
		}
		return err
	}
}

// Requests returns the requests of the policies for the call of ctx, if Config.InTx selects it. If
// no policy applies, there are none: do not call AllowTx then.
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

// Used notes how many tokens the call has really used of a policy, named by its limit, such as for
// a stream's messages. After the handler, the difference to the tokens taken is given back, or
// taken even without enough tokens. The last call holds. If Counts does not count the call, all its
// tokens go back.
//
// The error is [ratelimit.ErrInvalid] if the count is invalid (see Request.Validate), if ctx is not
// that of a call with such a policy, or if the handler has returned. The count noted before then
// holds. If nothing was taken, Used does nothing: the policy does not apply, or the call was let
// through in shadow or because the store failed. Used is safe for concurrent use.
func Used(ctx context.Context, policy string, n float64) error {
	return edge.Use(ctx, "grpclimit", policy, n)
}

// CallOf returns the call that Config.Observe hears of, by the context that it is called with;
// nil for the context of anything else, such as an event of a store.
func CallOf(ctx context.Context) *Call { return edge.Asked[*Call](ctx) }
